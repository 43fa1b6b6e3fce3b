"""Every row of the tables of exit statuses in docs/reference/statuses.md: what a CI goes by."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import textwrap
import time
from fnmatch import fnmatchcase
from pathlib import Path

import psutil
import pytest
from warm_processes import Programs

from pytest_gemm.core.outcome import Reason
from pytest_gemm.record.lines import Totals
from pytest_gemm.record.reader import Run
from pytest_gemm.verdict import Red, last_line

pytestmark = pytest.mark.slow

CONFTEST = """
    import os
    import signal
    import threading
    import time
    import unittest

    import pytest
    import torch

    from pytest_gemm.api.proof import Proof
    from pytest_gemm.api.protocols import Availability, Candidates
    from pytest_gemm.core.outcome import Unsupported
    from pytest_gemm.core.outcome import Reason


    def mine(a, b):
        return (a.float() @ b.float()).to(a.dtype)

    def off(a, b):
        return mine(a, b) + 1

    def crash(a, b):
        raise RuntimeError("out of registers")

    def skips(a, b):
        pytest.skip("no such kernel")

    def exits(a, b):
        pytest.exit("enough", returncode=0)

    def surrogate(a, b):
        raise LookupError("\\ud800 \\x1b[31m")

    def leaves(a, b):
        os._exit(0)

    def forks(a, b):
        os.fork()
        return mine(a, b)

    def interrupted(a, b):
        os.kill(os.getppid(), signal.SIGINT)  # as kill or a CI does: it is the parent that they know
        while True:
            time.sleep(0.05)  # signal.pause() would sleep through a signal that came just before it

    def terminated(a, b):
        os.kill(os.getppid(), signal.SIGTERM)
        while True:
            time.sleep(0.05)  # signal.pause() would sleep through a signal that came just before it


    PYTEST = os.getpid()  # it imports this file before it starts a process

    def interrupts_pytest(a, b):
        os.kill(PYTEST, signal.SIGINT)
        time.sleep(20)

    def terminates_pytest(a, b):
        os.kill(PYTEST, signal.SIGTERM)
        time.sleep(20)

    def polls(a, b):
        threading.Thread(target=time.sleep, args=(600,), name="poller\\nof mine").start()
        return mine(a, b)


    CALLS = []

    def at_first(a, b):
        CALLS.append(1)
        return off(a, b) if len(CALLS) == 1 else mine(a, b)

    def waits(a, b):
        with open("kernel", "w") as file:
            file.write(str(os.getpid()))
        time.sleep(60)

    class Unraisable:
        def __del__(self):
            raise RuntimeError("\\ud800")

    def unraisable(a, b):
        Unraisable()
        return mine(a, b)


    class Absent:
        name = "absent"
        devices = ("cpu",)
        def availability(self, device):
            return Availability(Reason("no-board", "there is no board", "plug in the board"))
        def supports(self, problem, request=None): ...
        def prepare(self, problem, operands, request=None): ...

    class Silent(Absent):
        name = "silent"
        def availability(self, device):
            pytest.skip("no board")

    class Odd(Absent):
        name = "odd"
        def availability(self, device):
            return None

    class Refusing(Absent):
        name = "refusing"
        def availability(self, device):
            return Availability()
        def supports(self, problem, request=None):
            return Unsupported("never", "nothing is taken")

    class Contract:
        @property
        def contract(self):
            raise unittest.SkipTest("no contract")
        def run(self, operands):
            return operands.a @ operands.b
        def proof(self):
            return Proof(executed=("kernel",), provable=False)

    class Lawless(Refusing):
        name = "lawless"
        def supports(self, problem, request=None):
            return None
        def prepare(self, problem, operands, request=None):
            return Contract()

    class Late(Refusing):
        name = "late"
        def supports(self, problem, request=None):
            return None
        def prepare(self, problem, operands, request=None):
            raise Unsupported("never", "nothing can be compiled")

    class Picky(Late):
        name = "picky"
        def candidates(self, problem, operands, request):
            return Candidates(("x", "y"))


    def pytest_gemm_register_backends(registry):
        for function in (
            mine, off, crash, skips, exits, surrogate, leaves, at_first, waits,
            forks, interrupted, terminated, unraisable, polls,
            interrupts_pytest, terminates_pytest,
        ):
            registry.add_callable(function.__name__.replace("_", "-"), function)
        for backend in (Absent, Silent, Odd, Lawless, Refusing, Late, Picky):
            registry.add(backend())

        def linear(a, b, bias, activation):
            return torch.relu(mine(a, b) + bias) if activation else mine(a, b) + bias

        registry.add_callable("biased", mine, linear=linear, activations=("relu",))
        registry.add_callable("lazy", mine)
        registry.add_callable("unbound", mine, bind=lambda problem, tensors: None)
        registry.add_callable("bound", mine, bind=lambda problem, tensors: lambda: mine(tensors["a"], tensors["b"]))
        registry.add_callable("typed", mine, dtypes=("f32", "f16"), devices=("cpu", "cuda"))
"""

TEST = """
    import pytest

    @pytest.mark.gemm(problems=["mm:f32:nn:8x16x32", "mm:f32:nn:9x16x32"], distributions=["rand"])
    def test_product(gemm_case, gemm_check):
        if gemm_case.backend.name != "lazy":
            gemm_check(gemm_case)
"""

KNOWN = """
    [[known-failure]]
    id = "off-by-one"
    backend = "{backend}"
    reason = "one too large"
    {more}
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TEST)
    for name, backend, more in (
        ("known", "off", ""),
        ("stale", "mine", ""),
        ("sometimes", "mine", 'sometimes = "where the cache is small"'),
        ("withheld", "mine", "crashes = true"),
        ("all", "*", 'status = ["incorrect", "crashed"]'),
    ):
        (pytester.path / f"{name}.toml").write_text(textwrap.dedent(KNOWN.format(backend=backend, more=more)))
    (pytester.path / "wrong.toml").write_text("shapes = 3\n")
    return pytester


# Status, arguments, and a line of what is said.
HERE = [
    (0, "--gemm-backends=mine", "mine *mm *"),
    (0, "--gemm-backends=off --gemm-known-failures=known.toml", "known failure off-by-one: 2 problem(s)"),
    (0, "--gemm-backends=refusing --gemm-allow=unjudged", "refusing does not support 2: nothing is taken"),
    (0, "--gemm-backends=mine,absent --gemm-allow=missing", "absent did not run: there is no board"),
    (0, "--gemm-backends=mine --gemm-known-failures=stale.toml --gemm-ops=mm", "*2 passed*"),  # it is narrowed
    (0, "--gemm-backends=mine --gemm-known-failures=sometimes.toml", "*2 passed*"),
    (0, "--gemm-backends=mine,refusing -k mine", "*2 passed, 2 deselected*"),
    (0, "--gemm-backends=bound", "bound: 2 cases by its own path, *"),
    (0, "--gemm-backends=biased --gemm-allow=unjudged", "*2 passed*"),
    (0, "--gemm-backends=biased test_it.py", "biased was registered with linear=, relu in activations=, which no *"),
    (0, "--gemm-backends=unbound -k 9x16", "unbound was registered with bind=, which no case called"),
    (1, "--gemm-backends=off", "incorrect: * on off: *"),
    (1, "--gemm-backends=crash", "crashed: RuntimeError in run: * on crash: out of registers"),
    (1, "--gemm-backends=skips", "*2 failed*"),
    (1, "--gemm-backends=exits", "*2 failed*"),
    (1, "--gemm-backends=lawless", "*2 failed*"),
    (1, "--gemm-backends=leaves", "crashed: exit in run: * on leaves: *in run: it ended itself*status 0"),
    (1, "--gemm-backends=surrogate", "crashed: LookupError in run: * on surrogate: \\ud800 \\x1b[[]31m"),
    (10, "--gemm-backends=absent,mine", "*plug in the board"),
    (10, "--gemm-backends=silent,mine", "silent did not run: availability() of silent raised Skipped: no board"),
    (10, "--gemm-backends=odd,mine", "odd did not run: availability() of odd returned NoneType"),
    (10, "--gemm-backends=picky --gemm-candidates=no_such_candidate", "picky judged no case: 2 unsupported (*"),
    (14, "--gemm-backends=mine --gemm-known-failures=stale.toml", "known failure 'off-by-one' passed everywhere*"),
    (10, "--gemm-backends=mine,refusing", "refusing judged no case: 2 unsupported (nothing is taken); *"),
    (10, "--gemm-backends=mine,late", "late judged no case: 2 unsupported (nothing can be compiled); *"),
    (10, "--gemm-backends=mine --gemm-known-failures=withheld.toml", "mine judged no case: 2 known-failure (*"),
    (10, "--gemm-backends=biased", "biased was registered with linear=, relu in activations=, which no case called: *"),
    (10, "--gemm-backends=mine,unbound", "FAILED: unbound was registered with bind=, which no case called (status 10)"),
    (10, "--gemm-backends=typed", "typed was registered with f16 in dtypes=, which no case called: *"),
    (10, "--gemm-backends=lazy", "lazy judged no case: no selected test calls gemm_check for lazy; *"),
    (4, "--gemm-problem=mm:f32:nn:8x16x32,mm:f32:nn:8x8x9", "*8x8x9: no selected test takes it; *"),
    (5, "--gemm-backends=mine --gemm-problem=mm:f32:nn:8x8x9", "*9: no selected test takes it; the suite does: *"),
    (5, "--gemm-backends=mine --gemm-problem=mm:f32:nn:8x16x32 -k nothing", "*; test_it.py::test_product does, and *"),
    (2, "--gemm-backends=mine test_marker.py", "*no keyword 'problem' (did you mean 'problems'?)*"),
    (3, "--gemm-backends=mine -p broken_plugin", "INTERNALERROR> *planted in a plugin*"),
    (4, "--gemm-known-failures=all.toml", "*all.toml:4: the entry matches every case; name the backend*"),
    (4, "-p broken_registration", "*pytest_gemm_register_backends raised Skipped: no library"),
    (5, "--gemm-backends=mine -k nothing", "*2 deselected*"),
    (5, "--gemm-backends=mine --gemm-ops=bmm", "*1 deselected*"),
]


@pytest.mark.parametrize(("status", "arguments", "line"), HERE, ids=[f"{s}-{a}" for s, a, _ in HERE])
def test_a_run_ends_with_its_status(project: pytest.Pytester, status: int, arguments: str, line: str) -> None:
    project.makepyfile(
        broken_plugin="def pytest_runtest_logreport(report):\n    raise RuntimeError('planted in a plugin')\n",
        broken_registration="""
            import pytest
            def pytest_gemm_register_backends(registry):
                pytest.skip("no library")
        """,
    )
    project.syspathinsert()
    if "test_marker.py" in arguments:
        project.makepyfile(test_marker=TEST.replace("problems=", "problem="))
    result = project.runpytest_inprocess("-p", "no:cacheprovider", *arguments.split())
    assert result.ret == status
    assert any(fnmatchcase(shown, line) for shown in (*result.outlines, *result.errlines)), line
    why = [shown for shown in result.outlines if fnmatchcase(shown, f"FAILED: ?* (status {status})")]
    assert why == [] if status in {0, 3, 4} else why[0] in result.outlines[-3:-1]


# The same where the process itself comes to its end, or a signal does.
PROCESS = [
    (0, "--gemm-backends=forks,polls --gemm-timeout=4", "*4 passed*"),
    (1, "--gemm-backends=interrupted,mine", "crashed: * in run: * on interrupted: the kernel's process died in run: *"),
    (1, "--gemm-backends=terminated,mine", "*2 failed, 2 passed*"),
    (1, "--gemm-backends=surrogate,mine -n1", "crashed: LookupError in run: * on surrogate: \\ud800 \\x1b[[]31m"),
    (10, "--gemm-backends=refusing,unraisable -n1", "refusing judged no case: 2 unsupported (nothing is taken); *"),
    (2, "--gemm-backends=interrupts-pytest", "*KeyboardInterrupt*"),
    (143, "--gemm-backends=terminates-pytest", "*Terminated: SIGTERM*"),
]


@pytest.mark.parametrize(("status", "arguments", "line"), PROCESS, ids=[f"{s}-{a}" for s, a, _ in PROCESS])
def test_a_process_ends_with_its_status(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, status: int, arguments: str, line: str
) -> None:
    monkeypatch.setenv("TMPDIR", str(project.mkdir("tmp")))
    with (project.path / "conftest.py").open("a") as file:  # a background job of a CI ignores SIGINT
        file.write("\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n")
    result = project.runpytest_subprocess("-p", "no:cacheprovider", *arguments.split(), timeout=300)
    assert result.ret == status
    assert any(fnmatchcase(shown, line) for shown in (*result.outlines, *result.errlines)), line
    assert not list((project.path / "tmp").glob("pytest-gemm-*"))
    until = time.monotonic() + 10
    while left := _runs_in(project.path):
        assert time.monotonic() < until, left
        time.sleep(0.1)
    assert "INTERNALERROR" not in result.stdout.str()


def _runs_in(folder: Path) -> list[str]:
    """Command lines of other processes that were started in a folder and still run."""
    others = [one.info for one in psutil.process_iter(["pid", "cwd", "cmdline"]) if one.pid != os.getpid()]
    return [
        " ".join(one["cmdline"]) for one in others if one["cmdline"] and Path(one["cwd"] or "/").is_relative_to(folder)
    ]


@pytest.mark.parametrize(
    ("totals", "line"),
    [
        (Totals(), ""),
        (Totals(failed={Red.SLOWER}, status=1), "FAILED: a timed case is slower (status 11)"),
        (Totals(failed={Red.NO_BASELINE}, status=1), "FAILED: a timed case has no baseline (status 12)"),
        (Totals(undecided=True), "FAILED: more of the timed cases stayed undecided than * allows (status 13)"),
        (Totals(lost={"out/run.jsonl": "disk full"}), "FAILED: out/run.jsonl is not complete (status 15)"),
        (
            Totals(failed={Red.CASE}, missing={"x": Reason("no", "no board")}),
            "FAILED: a test failed; x did not run (status 1)",
        ),
        (Totals(status=2), "FAILED: the run was interrupted (status 2)"),
    ],
)
def test_the_last_line_says_why(totals: Totals, line: str) -> None:
    assert fnmatchcase(last_line(Run(totals=totals)), line)


def test_the_tables_of_statuses_have_each_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "statuses.md").read_text(encoding="utf-8")
    section = page.partition("## Exit status of a run\n")[2]
    rows = re.findall(r"^\| `?([\d, ]+?)`? \|", section, re.MULTILINE)
    found = {int(number) for row in rows for number in row.split(",")} | {int(section.split(":")[0])}
    tested = {status if status >= 0 else 128 - status for status, _, _ in (*HERE, *PROCESS)}
    timed = {Red.SLOWER, Red.NO_BASELINE, Red.UNDECIDED, Red.FILE}  # tests/speed/test_sessions.py
    assert found == tested | {128 + signal.SIGHUP} | timed


def test_without_the_terminal_plugin_a_run_with_a_worker_judges_and_writes(project: pytest.Pytester) -> None:
    options = ("-p", "no:terminal", "-p", "no:cacheprovider", "--gemm-backends=off", "--gemm-output=out")
    result = project.runpytest_subprocess(*options, "-n1", timeout=300)
    assert (result.ret, result.stdout.str() + result.stderr.str()) == (1, "")
    assert '"totals"' in (project.path / "out" / "run.jsonl").read_text()
    assert "GEMM correctness of off" in (project.path / "out" / "summary.md").read_text()


def test_when_pytest_is_killed_the_kernel_goes_too(project: pytest.Pytester, programs: Programs) -> None:
    command, null = [programs.python, "-m", "pytest", "--gemm-backends=waits"], subprocess.DEVNULL
    kernel, until = project.path / "kernel", time.monotonic() + 100
    with subprocess.Popen(command, stdout=null, stderr=null, cwd=project.path) as started:
        while not (kernel.exists() and kernel.read_text()):
            assert time.monotonic() < until
            time.sleep(0.1)
        started.kill()
    while _runs_in(project.path):
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_marker_with_a_wrong_name_is_one_error(project: pytest.Pytester) -> None:
    project.makepyfile(test_it=TEST.replace('"rand"', '"rnd"'))
    result = project.runpytest_inprocess("-p", "no:cacheprovider", "--gemm-backends=mine")
    assert result.ret == 2
    said = "test_it.py::test_product: the gemm marker has an unknown distribution 'rnd' (did you mean 'rand'?)"
    assert result.stdout.str().count(said) == 1
    result.assert_outcomes(errors=1)


def test_a_rerun_counts_once(project: pytest.Pytester) -> None:
    pytest.importorskip("pytest_rerunfailures", reason="pytest-rerunfailures is what makes reruns")
    options = ("-p", "no:cacheprovider", "--gemm-backends=at-first", "--reruns=1", "--gemm-output=.")
    result = project.runpytest_inprocess(*options, f"--junit-xml={project.path / 'junit.xml'}")
    assert result.ret == 0
    outcomes = result.parseoutcomes()
    assert outcomes == {"passed": 2, "rerun": 1}
    result.stdout.fnmatch_lines(
        ["1 attempt(s) at a test were run again; the last one counts", "at-first  mm  *2 *", "2 cases of 2 problems*"]
    )
    record = (project.path / "run.jsonl").read_text()
    assert record.count('"status": "passed"') == 2
    assert "incorrect" not in record
