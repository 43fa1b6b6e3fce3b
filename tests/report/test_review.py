"""What a reviewer sees of a run: annotations with their lines, the summary of the job, JUnit, a comment."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from pathlib import Path

import pytest

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Outcome, Reason, Status
from pytest_gemm.record import lines as records
from pytest_gemm.record.lines import Head, Totals
from pytest_gemm.record.reader import Run
from pytest_gemm.report import github, review, terminal
from pytest_gemm.report.github import Annotation
from pytest_gemm.tools import cli

CONFTEST = """
    import os
    from pytest_gemm.api.protocols import Availability
    from pytest_gemm.core.outcome import Reason

    def mine(a, b):
        return (a.float() @ b.float()).to(a.dtype)

    def off(a, b):
        return mine(a, b) + 1

    def tail(a, b):
        k = a.shape[-1] // 8 * 8
        return mine(a[..., :k], b[..., :k, :])

    def dies(a, b):
        os._exit(0)

    class Absent:
        name = "absent"
        devices = ("cpu",)
        def availability(self, device):
            return Availability(Reason("no-board", "there is no board", "plug in the board"))
        def supports(self, problem, request=None): ...
        def prepare(self, problem, operands, request=None): ...

    def pytest_gemm_register_backends(registry):
        for function in (mine, off, tail, dies):
            registry.add_callable(function.__name__, function)
        registry.add(Absent())
"""
TEST = """
    import pytest

    @pytest.mark.gemm(problems=[f"mm:f32:{layout}:8x8x8" for layout in ("nn", "nt")], distributions=["rand"])
    def test_made(gemm_case, gemm_check):
        gemm_check(gemm_case)

    @pytest.mark.gemm(
        problems=[
            "mm:f32:nn:9x16x32",
        ],
        distributions=["rand"],
    )
    def test_lines(gemm_case, gemm_check):
        gemm_check(gemm_case)
"""
TAILS = """
    import pytest

    SIZES = (8, 16, 24, 32, 9, 13, 18, 31, 43, 98)

    @pytest.mark.gemm(problems=[f"mm:f32:nn:16x16x{k}" for k in SIZES], distributions=["rand"])
    def test_made(gemm_case, gemm_check):
        gemm_check(gemm_case)

    def test_own():
        assert 1 == 2, "a failure of the user"
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A repository in a job of GitHub Actions; one of its problems stands in the file of the test as it is."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TEST)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(pytester.path))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "step.md"))
    return pytester


def run(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return project.runpytest_inprocess("-p", "no:cacheprovider", *arguments)


def annotated(result: pytest.RunResult) -> list[str]:
    return [line for line in (*result.outlines, *result.errlines) if line.startswith(("::error", "::warning"))]


# -- in a run ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_one_bug_is_told_once_everywhere_and_counted_as_pytest_counts(project: pytest.Pytester) -> None:
    (project.path / "test_it.py").write_text(textwrap.dedent(TAILS))
    result = run(project, "--gemm-backends=mine,tail", "--gemm-output=out", "--junit-xml=junit.xml", "-n2")
    assert result.ret == 1
    failed = result.parseoutcomes()["failed"] - 1
    assert failed == 6
    shown = result.stdout.lines
    lines = shown[next(i for i, line in enumerate(shown) if "= FAILURES =" in line) :]
    assert len([line for line in lines if not line.startswith("::error")]) <= 40
    assert sum(line.startswith("  rerun: ") for line in lines) == 1
    assert any("AssertionError: a failure of the user" in line for line in lines)
    _, short = (line for line in lines if line.startswith("incorrect: "))
    assert re.fullmatch(rf"incorrect: [\w -]+, {failed} tests: .*test_made\[tail-mm:f32:nn:16x16x9\]", short)
    (command,) = annotated(result)
    assert command.startswith("::error file=test_it.py,line=7,title=tail%3A incorrect%3A ")
    assert "condition: K %25 4 > 0: 6 of 6 failures, 0 of 4 passes" in command
    summary = (project.path / "step.md").read_text()
    assert f"**Red**: 1 finding in {failed} problems" in summary
    junit = (project.path / "junit.xml").read_text()
    assert junit.count("<failure ") == failed + 1
    assert sum(path.stat().st_size for path in (project.path / "out").rglob("*.p*")) < 4 << 20
    assert len(list((project.path / "out").rglob("error_map.png"))) <= 3 * 2
    assert run(project, "--gemm-backends=tail", "-vv").stdout.str().count("  rerun: ") >= failed


@pytest.mark.slow
def test_without_github_there_are_none(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS")
    assert not annotated(run(project, "--gemm-backends=off"))
    assert not (project.path / "step.md").exists()


# A kernel whose words are commands to GitHub's runner, in all the ways that it reads.
HOSTILE = """
    import os, time
    from pytest_gemm.api.proof import Proof
    from pytest_gemm.api.protocols import Availability, Candidates
    from pytest_gemm.numerics.contract import Contract
    from pytest_gemm.core.outcome import Unsupported

    WORDS = "planted\\n::error::planted\\r::add-mask::planted\\n   ::stop-commands::planted\\nat ##[add-mask]planted"
    Odd = type("Odd" + WORDS, (Exception,), {})

    class Prepared:
        contract = Contract()
        def __init__(self, end):
            self.end = end
        def run(self, operands):
            print(WORDS)
            if self.end == "raises":
                raise Odd(WORDS)
            if self.end == "dies":
                os._exit(0)
            if self.end == "hangs":
                time.sleep(600)
            return operands.a @ operands.b + 1
        def proof(self):
            return Proof((WORDS,), (WORDS,), (WORDS,))

    class Hostile:
        devices = ("cpu",)
        def __init__(self, name):
            self.name = name
        def availability(self, device):
            return Availability()
        def supports(self, problem, request=None):
            return Unsupported("odd" + WORDS, WORDS) if problem.layout.b_transposed else None
        def prepare(self, problem, operands, request=None):
            return Prepared(self.name)

    class Naming(Hostile):
        def candidates(self, problem, operands, request):
            return Candidates((WORDS,))

    def pytest_gemm_register_backends(registry):
        for name in ("raises", "dies", "hangs", "wrong"):
            registry.add(Hostile(name))
        registry.add(Naming("naming"))

    def pytest_runtest_setup():
        import warnings
        warnings.warn(WORDS)
"""


def obeyed(log: str) -> list[str]:
    """The commands that GitHub's runner finds in a log: ``::name::`` that begins a line, ``##[name]`` anywhere.

    Between ``::stop-commands::TOKEN`` and ``::TOKEN::`` it looks for the latter alone.
    """
    found, token = [], ""
    for line in re.split(r"[\r\n]+", log):
        command = re.match(r"\s*::([^\s:]+)(?: [^:]*)?::(.*)", line) or re.search(r"##\[([\w-]+)[^\]]*\](.*)", line)
        if command is None or (token and command[1] != token):
            continue
        if command[1] in {"stop-commands", token}:
            token = "" if token else command[2]
        else:
            found.append(line.strip())
    assert token == "", "nothing behind pytest is read"
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize(
    ("arguments", "cases"),
    [
        ("--gemm-backends=raises,wrong,dies,naming --gemm-candidates=all -rA", 4),
        ("--gemm-backends=raises,wrong,dies -n1 -v", 3),
        ("--gemm-backends=hangs --gemm-timeout=0.3", 1),
    ],
)
def test_no_word_of_a_kernel_is_a_command_to_github(project: pytest.Pytester, arguments: str, cases: int) -> None:
    project.makeconftest(HOSTILE)
    result = project.runpytest_subprocess("-p", "no:cacheprovider", *arguments.split(), timeout=300)
    assert result.ret == 1
    log = result.stdout.str() + "\n" + result.stderr.str()
    assert "planted" in log
    commands = obeyed(log)
    assert len(commands) == cases
    assert all(
        re.match(r"::error file=[\w.]+,line=\d+,title=\w+%3A (crashed|incorrect|timed-out)%3A [^:]*::.*mm:", one)
        for one in commands
    )


@pytest.mark.slow
def test_a_case_of_the_installed_suite_is_annotated_at_the_kernel(project: pytest.Pytester) -> None:
    """The suite is installed outside of the repository, and GitHub shows files of the repository only."""
    suite = ("--pyargs", "pytest_gemm.conformance.test_products", "--gemm-problem=mm:f32:nn:1x64x64")
    result = run(project, "--gemm-backends=off", *suite)
    (line,) = annotated(result)
    assert line.startswith("::error file=conftest.py,line=8,title=off%3A incorrect%3A ")
    assert "mm:f32:nn:1x64x64 on off: " in line


@pytest.mark.slow
def test_a_backend_that_cannot_run_is_annotated(project: pytest.Pytester) -> None:
    result = run(project, "--gemm-backends=mine,absent", "--gemm-output=out")
    assert result.ret == 10
    said = "absent did not run: there is no board (plug in the board)"
    assert annotated(result) == [f"::error file=conftest.py,line=18,title=a backend judged nothing::{said}"]
    assert f"- {said}" in (project.path / "out" / "summary.md").read_text()


@pytest.mark.slow
def test_a_known_failure_that_has_become_right_is_annotated_at_its_entry(project: pytest.Pytester) -> None:
    entry = '\n[[known-failure]]\nid = "one-too-large"\nbackend = "mine"\nreason = "one too large"\n'
    (project.path / "known.toml").write_text(entry)
    result = run(project, "--gemm-backends=mine", "--gemm-known-failures=known.toml")
    assert result.ret == 14
    said = "known failure 'one-too-large' passed everywhere it applied: delete it from the ledger"
    title = "a known failure has become right"
    assert annotated(result) == [f"::error file=known.toml,line=2,title={title}::{said}"]


# -- the form ------------------------------------------------------------------------------------------------------


def test_an_annotation_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "x,y.toml").touch()
    made = Annotation("a:b,c%\n", "50%\r\nmore: a, b", (github.Place(str(tmp_path / "x,y.toml"), 3),))
    assert made.command(tmp_path) == ("::error file=x%2Cy.toml,line=3,title=a%3Ab%2Cc%25%0A::50%25%0D%0Amore: a, b")


def test_only_a_place_in_the_repository_is_named(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    inside, outside = github.Place(str(tmp_path / "here" / "a.py"), 7), github.Place(str(tmp_path / "b.py"), 1)
    for place in (inside, outside):
        Path(place.file).touch()
    made = Annotation("t", "m", (outside, None, github.Place(str(tmp_path / "here")), inside))
    assert made.command(tmp_path / "here") == "::error file=a.py,line=7,title=t::m"
    assert Annotation("t", "m", (outside,)).command(tmp_path / "here") == "::error title=t::m"


def test_of_many_the_first_are_shown_and_the_rest_is_counted(tmp_path: Path) -> None:
    many = [Annotation(f"a{i}", "m") for i in range(30)]
    shown = github.commands([Annotation("b", "m"), *many], tmp_path)
    assert len(shown) == 10
    assert shown[0] == "::error title=b::m"
    assert shown[-1] == "::error title=22 more::The summary of the job lists them."
    assert len(github.commands(many[:10], tmp_path)) == 10


# -- Markdown ------------------------------------------------------------------------------------------------------

WRONG = Outcome(
    CaseId("off", "mm:f32:nn:1x1x1"), "rand", 0, Status.INCORRECT, Reason("far", "a | b <b> `c`\nd"), ratio=7.0
)


def test_a_comment_is_short_whatever_failed() -> None:
    many = [
        dataclasses.replace(
            WRONG,
            case=CaseId(f"backend-{i % 60}", f"mm:f32:nn:{i + 1}x1x1"),
            reason=Reason("far", f"{i} " + "x" * 3000),
            status=(Status.INCORRECT, Status.UNSUPPORTED, Status.KNOWN_FAILURE)[i % 3],
            known_failure=f"entry-{i}" if i % 3 == 2 else "",
        )
        for i in range(5000)
    ]
    made = review.markdown([Run(outcomes=many, totals=Totals(1.0, lost={f"{i}": "y" * 5000 for i in range(50)}))], "T")
    assert len(made) < 65_536
    head = made.partition("<details>")[0]
    assert head.count("| incorrect: far |") == 10
    assert "are in the run record" in made
    assert made.count("<details>") == made.count("</details>")


def test_the_comment_of_records_is_what_their_runs_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"run": records.plain(Head())},
        records.to_record(WRONG),
        {"totals": records.plain(Totals(3.0, 1, missing={"absent": Reason("no-board", "there is no board")}))},
    ]
    for name in ("a", "b"):
        (tmp_path / name).write_text("".join(map(records.record_line, lines)))
    (tmp_path / "b").write_text("".join(map(records.record_line, lines[:2])))
    assert cli.main(["results", str(tmp_path / "a"), str(tmp_path / "b"), "--title=Mine"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("## Mine\n\n**Red**: 1 finding in 1 problem, and 2 other reason(s).\n")
    assert "- absent did not run: there is no board\n- a run did not end\n" in shown


def test_foreign_words_do_not_break_the_table() -> None:
    made = review.markdown([Run(outcomes=[WRONG])], "T")
    assert r"| incorrect: far | `off` | 1 |  | `mm:f32:nn:1x1x1` | a \| b &lt;b&gt; \`c\`\\nd | 7 |" in made


def test_of_what_passed_the_share_is_shown_that_is_correctly_rounded() -> None:
    cases = [dataclasses.replace(WRONG, status=Status.PASSED, reason=None, ratio=ratio) for ratio in (0.0, 0.5, 1.0)]
    run = Run(outcomes=[*cases, WRONG])
    made = review.markdown([run], "T")
    assert "| backend | op | passed | incorrect | correctly rounded |" in made
    assert "| 33% |" in made
    said = terminal.summary(run)
    assert [line.split()[-1] for line in said[:2]] == ["rounded", "33%"]


def test_below_failures_the_table_of_many_ops_has_a_row_for_each_backend() -> None:
    ops = ("mm", "addmm", "bmm", "linear", "baddbmm", "int_mm", "mixed_mm", "grouped_mm", "mm_plus_mm")
    cases = [dataclasses.replace(WRONG, case=CaseId("off", f"{op}:f32:nn:1x1x1")) for op in ops]
    right = [dataclasses.replace(one, status=Status.PASSED, reason=None) for one in cases]
    short = terminal.summary(Run(outcomes=cases), verbose=False)
    assert [line.split()[:3] for line in short[1:3]] == [["off", "9", "ops"], ["all", ".", "9"]]
    assert short[3].endswith("; -v shows each op)")
    for told in (terminal.summary(Run(outcomes=cases)), terminal.summary(Run(outcomes=right), verbose=False)):
        assert [line.split()[1] for line in told[1:10]] == list(ops)


def test_a_green_run_says_so() -> None:
    right = dataclasses.replace(WRONG, status=Status.PASSED, reason=None, ratio=0.5)
    made = review.markdown([Run(outcomes=[right], totals=Totals(2.0))], "T")
    assert made.startswith("## T\n\n**Green**.\nProblems, each on one backend: 1 passed. 1 case(s) judged in 2 s.\n")
    assert "Failures" not in made
