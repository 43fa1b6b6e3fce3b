"""``pytest-gemm bisect``: the first environment that is wrong or slow, among several."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import made_up_sessions
import pytest
import whole_libraries  # noqa: F401  # before an inner run loads it

from pytest_gemm.outcome import Status
from pytest_gemm.tools import cli
from pytest_gemm.tools.bisect import Bisection, Refused
from pytest_gemm.tools.trial import Failure, Trial, Trials, Tried, Word, by_gate

LINE: Final = "mm:f32:nn:8x8x8"
GOOD, SKIP = Trial(Word.GOOD), Trial(Word.SKIP, "it does not import")
BAD = Trial(Word.BAD, failure=Failure(Status.INCORRECT, "outside-bound"))
OTHER = Trial(Word.SKIP, "it fails in another way", Failure(Status.CRASHED, "run-RuntimeError"))

# -- the search ------------------------------------------------------------------------------------------------


def bisection(trials: Sequence[Trial] | Callable[[int], Trial], count: int = 8) -> Bisection:
    judge = trials if callable(trials) else trials.__getitem__
    return Bisection([f"e{i}" for i in range(count)], judge, lambda _: None)


def steps(search: Bisection) -> list[int]:
    return [number for phase, number, _ in search.steps if phase.startswith("step")]


@pytest.mark.parametrize("first_bad", range(1, 8))
def test_of_eight_environments_any_is_found_in_three_steps(first_bad: int) -> None:
    search = bisection([GOOD] * first_bad + [BAD] * (8 - first_bad))
    assert search.run(repeat=3) == (first_bad - 1, first_bad)
    assert len(steps(search)) <= 3
    again = [number for phase, number, _ in search.steps if phase == "again"]
    assert again == [first_bad - 1, first_bad] * 3


def test_what_cannot_be_judged_is_skipped_and_the_answer_is_a_range_where_it_is_at_the_border() -> None:
    assert bisection([GOOD, SKIP, GOOD, GOOD, BAD, BAD, SKIP, BAD]).run(1) == (3, 4)
    search = bisection([GOOD, GOOD, GOOD, SKIP, OTHER, BAD, BAD, BAD])
    assert search.run(1) == (2, 5)
    assert {3, 4} <= set(steps(search))


@pytest.mark.parametrize(
    ("first", "last", "why"),
    [
        (GOOD, GOOD, r"both ends are good: name an environment last that is bad, not 2 \(e1\)"),
        (BAD, BAD, r"both ends fail in the same way: name an environment first that is good, not 1 \(e0\)"),
        (BAD, GOOD, r"1 \(e0\) fails and 2 \(e1\) does not: give them in the other order"),
        (OTHER, BAD, r"1 \(e0\) fails as well, in another way"),
        (GOOD, OTHER, r"2 \(e1\) does not have the failure that is followed"),
        (SKIP, BAD, r"1 \(e0\) cannot be judged"),
        (GOOD, SKIP, r"2 \(e1\) cannot be judged"),
    ],
)
def test_a_pair_that_does_not_differ_by_the_failure_is_refused(first: Trial, last: Trial, why: str) -> None:
    with pytest.raises(Refused, match=why):
        bisection([first, last], 2).run(1)


def test_a_border_that_does_not_repeat_is_flaky_and_no_answer() -> None:
    asked: list[int] = []

    def judge(number: int) -> Trial:
        asked.append(number)
        return GOOD if number < 3 or (number == 3 and asked.count(3) == 3) else BAD

    with pytest.raises(Refused, match=r"4 \(e3\) was bad, and 2 of 3 times when it was judged again: it is flaky"):
        bisection(judge).run(3)


# -- one environment -----------------------------------------------------------------------------------------


def test_a_failure_is_known_again_by_its_status_code_and_cause() -> None:
    causes = frozenset({"the bias is missing"}), frozenset({"the result is transposed"})
    wrong = Failure(Status.INCORRECT, "outside-bound")
    biased, transposed = (Failure(Status.INCORRECT, "outside-bound", cause) for cause in causes)
    assert wrong.is_like(biased)  # a cause that was found in one place only tells nothing
    assert not biased.is_like(transposed)
    assert not wrong.is_like(Failure(Status.INCORRECT, "nan"))
    assert not wrong.is_like(Failure(Status.CRASHED, "outside-bound"))
    assert Failure.parse(str(biased)) == wrong


@pytest.mark.parametrize(
    ("verdict", "low", "high", "word"),
    [
        ("same", -0.01, 0.01, Word.GOOD),
        ("faster", -0.2, -0.1, Word.GOOD),
        ("slower", 0.12, 0.14, Word.BAD),
        ("slower", 0.04, 0.06, Word.GOOD),
        ("slower", 0.08, 0.12, Word.SKIP),
        ("undecided", -0.02, 0.09, Word.GOOD),
        ("undecided", 0.02, 0.3, Word.SKIP),
        ("no-baseline", None, None, Word.SKIP),
    ],
)
def test_a_slow_down_is_bad_where_the_gate_has_it_and_all_of_it_is_beyond_the_limit(
    verdict: str, low: float | None, high: float | None, word: Word
) -> None:
    change = None if low is None or high is None else (low + high) / 2
    facts = {"verdict": verdict, "verdict_code": "code", "change": change, "low": low, "high": high}
    assert by_gate(facts, 10.0).word is word


# -- planted environments --------------------------------------------------------------------------------------

CONFTEST: Final = """
import torch


def planted(a, b):
    if torch.version.planted == "crash":
        raise RuntimeError("planted")
    return (a @ b) * float(torch.version.planted)


def pytest_gemm_register_backends(registry):
    registry.add_callable("planted", planted)
"""


def environment(folder: Path, number: int, planted: str) -> str:
    """A folder to import from first: this torch with another ``torch/version.py``."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    real, made = Path(spec.origin).parent, folder / f"nightly-{number}" / "torch"
    for source, target in ((real, made), (real / "__pycache__", made / "__pycache__")):
        target.mkdir(parents=True)
        for one in source.iterdir():
            if not one.name.startswith(("version.", "__pycache__")):
                (target / one.name).symlink_to(one)
    text = (real / "version.py").read_text()
    (made / "version.py").write_text(f"{text}\ngit_version = 'commit-{number}'\nplanted = '{planted}'\n")
    return str(made.parent)


def bisect(*words: str, one: str = "") -> int:
    quick = [] if any(word.startswith("--slower-than") for word in words) else ["--pytest=--gemm-distributions=int-2"]
    given = ["bisect", f"--problem={LINE}", "--backend=planted", "--set=run.supervise=no", *quick, *words]
    return cli.main([*given[:1], "--one", *given[1:], one] if one else given)


@pytest.fixture
def folder(pytester: pytest.Pytester) -> Path:
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\n")
    return pytester.path


@pytest.mark.slow
def test_a_planted_wrong_result_is_found_among_four_environments(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    values = ["1", "1.01", "1.02", "1.01"]
    lines = [f"dev{i} {environment(folder, i, value)}" for i, value in enumerate(values)]
    (folder / "nightlies").write_text("\n".join(["# by date", *lines]))
    assert bisect("--environments=nightlies", "--repeat=1", "--json=answer.json") == 0
    told = capfd.readouterr().out
    assert "step 1 (2 left): 2 (dev1) is bad (incorrect:outside-bound: " in told
    assert "the first bad environment is 2 (dev1)\n" in told
    assert "the last good one is 1 (dev0)\n" in told
    assert "  torch's commit: commit-0 -> commit-1\n" in told
    assert "to reproduce: pytest-gemm bisect --one " in told
    assert "--failure=incorrect:outside-bound " in told
    assert f"{folder}/nightly-1\n" in told
    facts = json.loads((folder / "answer.json").read_text())
    found = [(step["phase"], step["environment"], step["word"]) for step in facts["steps"]]
    assert found[:2] == [("end", 4, "bad"), ("end", 1, "good")]
    assert found[2:] == [("step 1", 2, "bad"), ("again", 1, "good"), ("again", 2, "bad")]


@pytest.mark.slow
def test_one_environment_ends_as_git_bisect_run_wants_it(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert bisect(one=environment(folder, 1, "1")) == 0
    assert bisect(one=environment(folder, 2, "1.01")) == 1
    assert "the bad elements are 1.01 times what is expected" in capfd.readouterr().out
    assert bisect("--failure=incorrect:outside-bound", one=environment(folder, 3, "crash")) == 125
    assert "it fails in another way, crashed:run-RuntimeError" in capfd.readouterr().out
    broken = folder / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('no libtorch.so')")
    assert bisect(one=str(broken.parent)) == 125
    assert "is skipped (ImportError: no libtorch.so)" in capfd.readouterr().out
    assert bisect("--slower-than=5", sys.executable, one=str(broken.parent)) == 125
    assert "is skipped (ImportError: no libtorch.so)" in capfd.readouterr().out


@pytest.mark.slow
def test_a_planted_slow_down_is_found_among_eight_environments(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The runs are in this process, and their sessions are made up: milliseconds as the environment's folder has them.
    scratch = pytester.mkdir("tmp")
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    pytester.makeini("[pytest]\n")
    pytester.makeconftest(CONFTEST.replace("float(torch.version.planted)", "1"))

    class Process(made_up_sessions.Process):
        def __init__(self, args: Any, **how: Any) -> None:
            first = Path((how.get("env") or {}).get("PYTHONPATH", "").partition(os.pathsep)[0]) / "milliseconds"
            with monkeypatch.context() as patch:
                patch.setenv("SUBJECT_MS", first.read_text() if first.is_file() else "1")
                super().__init__(args, **how)

    real = subprocess.run

    def in_this_process(command: Any, **how: Any) -> Any:
        if command[1:3] != ["-m", "pytest"]:
            return real(command, **how)
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", Process)
            result = pytester.runpytest_inprocess(*command[3:])
        return subprocess.CompletedProcess(command, int(result.ret), result.stdout.str(), result.stderr.str())

    monkeypatch.setattr(subprocess, "run", in_this_process)
    made = []
    for i, milliseconds in enumerate(["1", "1.01", "0.99", "1.04", "1.05", "1.3", "1.31", "1.3"]):
        (pytester.mkdir(f"nightly-{i}") / "torch").mkdir()
        made.append(str(pytester.path / f"nightly-{i}"))
        Path(made[i], "torch", "__init__.py").touch()
        Path(made[i], "milliseconds").write_text(milliseconds)
    assert bisect("--slower-than=15", "--repeat=1", "--json=answer.json", *made) == 0
    facts = json.loads((pytester.path / "answer.json").read_text())
    assert (facts["last_good"], facts["first_bad"]) == (5, 6)
    found = [(step["phase"], step["environment"], step["word"]) for step in facts["steps"]]
    assert found[2:5] == [("step 1", 4, "good"), ("step 2", 6, "bad"), ("step 3", 5, "good")]
    (rerun,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("to reproduce: "))
    assert "--one" in rerun.split()
    assert "--slower-than=15" in rerun.split()
    assert rerun.split()[-2:] == [made[0], made[5]]
    assert bisect("--slower-than=15", *made[:3]) == 1  # none of which is slower
    assert "no answer: both ends are good" in capsys.readouterr().out


def test_the_answer_is_0_the_refusal_1_and_a_range_is_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = {"good": GOOD, "skip": SKIP, "bad": BAD}
    monkeypatch.setattr(Trials, "wrong", lambda _, tried, *__: trials[tried.label.rstrip("0123456789")])
    monkeypatch.setattr(Tried, "versions", lambda tried: {"torch": tried.label, "python": "3.12"})
    monkeypatch.chdir(tmp_path)
    Path("list").write_text(
        "".join(f"{name} {sys.executable}\n" for name in ("good1", "good2", "skip", "bad1", "bad2"))
    )
    assert bisect("--environments=list", "--json=answer.json") == 0
    told = capsys.readouterr().out
    assert "first bad environment is 3 (skip) or 4 (bad1), of which all but the last were skipped\n" in told
    assert "what differs between them:\n  torch: good2 -> bad1\n" in told
    facts = json.loads(Path("answer.json").read_text())
    assert (facts["last_good"], facts["first_bad"], facts["failure"]) == (2, 4, "incorrect:outside-bound")
    Path("list").write_text(f"bad1 {sys.executable}\nbad2 {sys.executable}\n")
    assert bisect("--environments=list", "--json=answer.json") == 1
    assert "no answer: both ends fail in the same way" in capsys.readouterr().out
    assert "both ends fail" in json.loads(Path("answer.json").read_text())["refused"]


@pytest.mark.slow
def test_the_recipe_for_git_bisect_run_finds_a_commit_skips_one_and_stops_at_wrong_input(tmp_path: Path) -> None:
    # The script of the documentation; its build and its judge are stubs that end as a file of the commit says.
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "bisect.md").read_text()
    script = page[page.index("    #!/bin/sh") :].split("\n\n", 1)[0]
    (tmp_path / "judge.sh").write_text(textwrap.dedent(script))
    for name, text in {
        "venv/bin/python": "cp status ../work/status",
        "venv/bin/pytest-gemm": 'echo "$@" > asked; exit $(cat status)',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "work").mkdir()
    clone = tmp_path / "pytorch"
    clone.mkdir()

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        named = ("-c", "user.name=me", "-c", "user.email=me@here", "-c", "init.defaultBranch=main")
        return subprocess.run(["git", *named, *words], cwd=clone, capture_output=True, text=True, check=False)

    git("init")
    for number, status in enumerate((0, 0, 0, 125, 0, 1, 1, 1)):
        (clone / "status").write_text(str(status))
        git("add", "status")
        git("commit", "--allow-empty", "-m", f"commit {number}")
    git("bisect", "start", "HEAD", "HEAD~7")
    done = git("bisect", "run", "sh", "../judge.sh")
    assert "is the first bad commit" in done.stdout
    assert git("log", "-1", "--format=%s", "refs/bisect/bad").stdout.strip() == "commit 5"
    parser = cli.Parser()
    parser.fill(cli.COMMANDS["bisect"])
    assert parser.parse_args((tmp_path / "work" / "asked").read_text().split()[1:]).one
    git("bisect", "reset")
    git("bisect", "start", "HEAD", "HEAD~7")
    (tmp_path / "venv" / "bin" / "python").write_text("#!/bin/sh\necho 4 > ../work/status\n")
    stopped = git("bisect", "run", "sh", "../judge.sh")
    assert stopped.returncode
    assert "is the first bad commit" not in stopped.stdout


# -- wrong input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([sys.executable], "1 environment(s) are given; give two at least, the good one first"),
        ([sys.executable, "/nowhere"], "/nowhere: there is no such interpreter, virtual environment, wheel or folder"),
        (["--one", sys.executable, sys.executable], "2 environment(s) are given; --one takes one environment"),
        (["--one", "--slower-than=5", sys.executable], "--one takes two environments, the good one first"),
        (["--slower-than=-1", sys.executable], "--slower-than=-1: give a percentage above 0"),
        (["--slower-than=5", "--failure=incorrect:nan", sys.executable], "--failure is about wrong results: leave it"),
        (["--failure=passed:nan", sys.executable], "--failure=passed:nan: give STATUS:CODE, with one of incorrect"),
        (["--repeat=0", sys.executable], "--repeat=0: the border is judged again once at least"),
        (["--environments=list"], "list:2: give ENV, or LABEL ENV; a path with blanks needs quotes"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(
    words: Sequence[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list").write_text(f"{shutil.which('sh')}\na b c\n")
    with pytest.raises(SystemExit, match="4"):
        bisect(*words)
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_what_pytest_refuses_is_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="4"):
        bisect("--set=run.nothing=1", one=sys.executable)
    assert "--gemm-set=run.nothing=1: run has no setting 'nothing'" in capsys.readouterr().err
