"""One bad kernel is one case's status: planted segmentation faults, endless kernels, lost devices and empty memories.

The faults are real ones of a process of the CPU; only the lost device is made up, for that takes CUDA.  What takes it
is in ``planted_cuda.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_gemm import xdist
from pytest_gemm.core.case_id import CaseId, Device
from pytest_gemm.core.outcome import Activity, Outcome, Phase, Status
from pytest_gemm.isolation import journal, limits
from pytest_gemm.ledger.entry import Environment
from pytest_gemm.numerics import reference
from pytest_gemm.worker import faults

# How the planted backend goes wrong, by M; the second distribution is the one that it cannot stand.
PLANTED = """
    import ctypes
    import dataclasses
    import os
    import signal
    import subprocess
    import time

    from pytest_gemm.api.proof import Proof
    from pytest_gemm.api.protocols import Availability, Candidates
    from pytest_gemm.numerics.contract import Contract

    LOST = []  # made up: what CUDA does after an illegal address

    def pytest_runtest_setup():
        from pytest_gemm.worker import faults  # with torch, which the controller can do without
        faults.device_error = lambda device: LOST[0] if LOST else None


    def segfault():
        os.kill(os.getpid(), signal.SIGSEGV)

    def abort():
        os.abort()

    def leave():
        os._exit(7)

    def endless():
        while True:
            time.sleep(60)

    def endless_with_the_lock():
        ctypes.PyDLL(None).sleep(60)

    def endless_compiler():
        with subprocess.Popen(["sleep", "600"]) as compiler:
            with open("compiler.pid", "w") as file:
                file.write(str(compiler.pid))

    def starve():
        import torch
        torch.empty(1 << 50)

    def starve_in_python():
        raise MemoryError

    def lose_the_device():
        LOST.append(RuntimeError("CUDA error: an illegal memory access was encountered"))
        raise LOST[0]


    PLAN = {%s}


    @dataclasses.dataclass
    class Prepared:
        name: str
        fault: object = None
        contract: Contract = Contract(epilogue="eager")
        runs: int = 0

        def run(self, operands):
            if LOST:
                raise LOST[0]
            self.runs += 1
            if self.fault is not None and self.runs == 2:
                self.fault()
            return operands.a @ operands.b

        def proof(self):
            return Proof((self.name,), ("planted_kernel",), ("planted_kernel",) if self.runs else ())


    class Correct:
        name = "correct"
        devices = ("cpu",)

        def availability(self, device):
            return Availability()

        def supports(self, problem, request=None):
            return None

        def prepare(self, problem, operands, request=None):
            return Prepared("correct")


    class Planted(Correct):
        name = "planted"

        def prepare(self, problem, operands, request=None):
            phase, fault = PLAN.get(problem.shape.m, ("", None))
            if phase == "compile":
                fault()
            return Prepared("planted_choice", fault)


    class Choosing(Correct):
        name = "choosing"

        def candidates(self, problem, operands, request):
            return Candidates(("first", "second", "third", "fourth"))

        def prepare(self, problem, operands, request):
            choice = request.candidate
            phase, fault = PLAN.get(problem.shape.m, ("", None))
            return Prepared(choice, fault if choice == phase else None)


    def pytest_gemm_register_backends(registry):
        registry.add(Correct())
        registry.add(Planted())
        registry.add(Choosing())
"""

TEST = """
    import pytest

    @pytest.mark.gemm(problems=[{problems}])
    def test_product(gemm_case, gemm_check):
        gemm_check(gemm_case)
"""

LIMITS = ("--gemm-timeout=1,3",)
# As on CUDA; a process of the kernel's own has its tests in tests/worker.
INLINE = ("--gemm-set=run.inline=yes",)


def project(pytester: pytest.Pytester, plan: str, sizes: range) -> pytest.Pytester:
    """A project of products of M rows, of which some go wrong."""
    pytester.makeconftest(PLANTED % plan)
    pytester.makepyfile(test_it=TEST.format(problems=", ".join(f"'mm:f32:nn:{m}x16x32'" for m in sizes)))
    return pytester


def run(pytester: pytest.Pytester, *args: str, backends: str = "planted,correct") -> tuple[Any, list[dict[str, Any]]]:
    """An inner run in a process of its own; its result and the outcomes in its record."""
    record = pytester.path / "run.jsonl"
    options = (f"--gemm-backends={backends}", "--gemm-output=.", "-p", "no:cacheprovider", *LIMITS, *INLINE)
    result = pytester.runpytest_subprocess(*options, *args, timeout=400)  # of a loaded machine; what hangs has no end
    return result, statuses(record)


def run_here(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, *args: str, backends: str = "planted,correct"
) -> tuple[Any, list[dict[str, Any]]]:
    """The same in this process, for faults that a process survives; without limits, which would end this one."""
    for module, name in ((faults, "device_error"), (reference, "reference")):
        monkeypatch.setattr(module, name, getattr(module, name))  # what the project plants there goes with the test
    record = pytester.path / "run.jsonl"
    options = (f"--gemm-backends={backends}", "--gemm-output=.", "-p", "no:cacheprovider", *INLINE)
    return pytester.runpytest_inprocess(*options, *args), statuses(record)


def statuses(record: Path) -> list[dict[str, Any]]:
    """The outcomes in a run record."""
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    return [line for line in lines if "status" in line]


def failures(outcomes: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """M, status, reason code and distribution of what did not pass."""
    found = [o for o in outcomes if o["status"] != "passed"]
    return [
        (o["problem"].split(":")[3].split("x")[0], o["status"], o["reason"]["code"], o["distribution"]) for o in found
    ]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be asked does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


# -- with workers ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_fault_is_one_case_and_everything_else_is_judged(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(pytester.mkdir("tmp")))
    project(
        pytester,
        """
        16: ("run", segfault), 24: ("compile", abort), 32: ("run", leave), 40: ("run", endless),
        48: ("compile", endless_compiler), 56: ("run", endless_with_the_lock), 64: ("run", starve),
        72: ("compile", starve_in_python), 80: ("run", lose_the_device),
        """,
        range(8, 97, 8),
    )
    result, outcomes = run(pytester, "-n2")
    assert result.ret == 1
    result.assert_outcomes(passed=12 + 3, failed=9)

    judged = [(o["backend"], o["problem"], o["distribution"]) for o in outcomes]
    assert len(judged) == len(set(judged))
    assert len({(backend, problem) for backend, problem, _ in judged}) == 2 * 12
    assert all(o["status"] == "passed" for o in outcomes if o["backend"] == "correct")
    second = next(o["distribution"] for o in outcomes if o["distribution"] not in {"int-2", ""})
    starved = [("64", "crashed", "out-of-memory", second)]
    assert sorted(failures(outcomes)) == sorted(
        [
            ("16", "crashed", "process-died", second),
            ("24", "crashed", "process-died", "int-2"),
            ("32", "crashed", "process-died", second),
            ("40", "timed-out", "no-end", second),
            ("48", "timed-out", "no-end", "int-2"),
            ("56", "timed-out", "no-end", second),
            *starved,
            ("72", "crashed", "out-of-memory", "int-2"),
            ("80", "crashed", "illegal-address", second),
        ]
    )
    # What was judged before the fault is not lost, and the kernel has its name.
    for m in (16, 32, 40, 56, 80):
        mine = [o for o in outcomes if o["problem"] == f"mm:f32:nn:{m}x16x32" and o["backend"] == "planted"]
        assert len(mine) == 2
        assert mine[0]["status"] == "passed"
        assert mine[1]["kernels"] == ["planted_kernel (planted_choice)"]
    result.stdout.fnmatch_lines(
        [
            "*mm:f32:nn:16x16x32 on planted: crashed: the test process died in run: SIGSEGV*",
            "*in segfault*",
            "*kernel planted_kernel (planted_choice); distribution*",
            "*rerun: pytest test_it.py::test_product --gemm-backends=planted --gemm-problem=mm:f32:nn:16x16x32 *",
        ]
    )
    text = result.stdout.str()
    assert "mm:f32:nn:24x16x32 on planted: crashed: the test process died in compile: SIGABRT" in text
    assert (
        "mm:f32:nn:32x16x32 on planted: crashed: the test process died in run: it ended itself with exit status 7"
        in text
    )
    assert "mm:f32:nn:40x16x32 on planted: timed-out: no end in run within 1 s" in text
    assert "remedy: raise --gemm-timeout=RUN if it is only slow" in text
    assert "mm:f32:nn:48x16x32 on planted: timed-out: no end in compile within 3 s" in text
    assert "remedy: raise --gemm-timeout=RUN,COMPILE if it is only slow" in text
    assert "in endless_with_the_lock" in text
    assert "out of memory in run: 4 PiB asked for, the machine has " in text
    assert "an illegal memory access was encountered; the process has lost the device" in text
    # The compiler that nobody waits for has been ended too, and the workers' journals are gone.
    assert not alive(int((pytester.path / "compiler.pid").read_text()))
    assert not list((pytester.path / "tmp").glob("pytest-gemm-*"))


@pytest.mark.slow
def test_the_other_choices_of_the_problem_are_judged_behind_the_fault(pytester: pytest.Pytester) -> None:
    plan = '8: ("second", segfault), 16: ("second", endless), 24: ("fourth", lose_the_device)'
    project(pytester, plan, range(8, 25, 8))
    result, outcomes = run(pytester, "-n2", "--gemm-candidates=all", backends="choosing")
    assert result.ret == 1
    result.assert_outcomes(failed=3)
    for m, bad, status in ((8, "second", "crashed"), (16, "second", "timed-out"), (24, "fourth", "crashed")):
        mine = [o for o in outcomes if o["problem"] == f"mm:f32:nn:{m}x16x32"]
        for choice in ("first", "second", "third", "fourth"):
            expected = ["passed", status] if choice == bad else ["passed"] * 4
            assert [o["status"] for o in mine if o["candidate"] == choice] == expected
    result.stdout.fnmatch_lines_random(
        [
            "*  candidate second",
            "*  rerun: pytest *--gemm-problem=mm:f32:nn:8x16x32 *--gemm-candidates=second",
            "*  rerun: pytest *--gemm-problem=mm:f32:nn:24x16x32 *--gemm-candidates=fourth",
        ]
    )


KNOWN = """
    [[known-failure]]
    id = "falls"
    backend = "planted"
    status = "crashed"
    reason = "it falls over"
    where = { m = "==8" }

    [[known-failure]]
    id = "hangs"
    backend = "planted"
    status = "timed-out"
    test = "test_product"
    device = "cpu"
    isa = "*"
    reason = "it hangs"
    where = { m = "==16" }
"""


@pytest.mark.slow
def test_the_ledger_explains_a_process_that_died_even_with_the_only_worker_s_last_test(
    pytester: pytest.Pytester,
) -> None:
    project(pytester, '16: ("run", endless), 24: ("run", segfault)', range(8, 25, 8))
    ledger = pytester.path / "known.toml"
    ledger.write_text(textwrap.dedent(KNOWN.replace("==8", "==24")))
    result, outcomes = run(pytester, "-n1", f"--gemm-known-failures={ledger}", "-v", backends="planted")
    assert result.ret == 0
    known = [(m, code) for m, status, code, _ in failures(outcomes) if status == "known-failure"]
    assert known == [("16", "no-end"), ("24", "process-died")]
    assert {o["known_failure"] for o in outcomes if o["status"] == "known-failure"} == {"falls", "hangs"}
    result.stdout.fnmatch_lines(["known failure hangs: 1 problem(s)", "known failure falls: 1 problem(s)"])
    result.stdout.fnmatch_lines(["*= 1 passed, 2 known-failure in *"])
    assert result.stdout.str().count("KNOWN-FAILURE test_it.py") == 2


@pytest.mark.slow
def test_with_xdist_s_own_scopes_another_worker_goes_on_too(pytester: pytest.Pytester) -> None:
    project(pytester, '8: ("run", segfault)', range(8, 17, 8))
    result, outcomes = run(pytester, "-n1", "--dist=loadfile", backends="planted")
    assert result.ret == 1
    result.assert_outcomes(passed=1, failed=1)
    assert [o["status"] for o in outcomes if "8x16x32" in o["problem"]] == ["passed", "crashed"]


@pytest.mark.slow
def test_a_run_that_is_interrupted_keeps_the_cases_that_ended_a_process(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes when the next worker has taken over the test that the first one died in."""
    # The parent of a worker is the controller, and no server.
    monkeypatch.setattr(pytester, "_getpytestargs", lambda: (sys.executable, "-m", "pytest"))
    project(pytester, '8: ("run", lambda: (open("died", "w").close(), segfault()))', range(8, 17, 8))
    with (pytester.path / "conftest.py").open("a") as file:
        file.write(
            "\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job of a CI ignores it
            "\ndef pytest_runtest_protocol():\n"
            "    if os.path.exists('died'):\n"
            "        os.kill(os.getppid(), signal.SIGINT)\n"
            "        time.sleep(5)\n"
        )
    result, outcomes = run(pytester, "-n1", backends="planted")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert [(o["status"], o["problem"]) for o in outcomes] == [
        ("passed", "mm:f32:nn:8x16x32"),
        ("crashed", "mm:f32:nn:8x16x32"),
    ]
    result.stdout.fnmatch_lines(["planted  mm *", "1 cases of 1 problems judged*"])


@pytest.mark.slow
def test_where_xdist_hands_out_the_tests_the_controller_reports_the_case(pytester: pytest.Pytester) -> None:
    project(pytester, '8: ("run", segfault), 16: ("run", endless)', range(8, 25, 8))
    ledger = pytester.path / "known.toml"
    ledger.write_text(textwrap.dedent(KNOWN.replace("==8", "==9")))
    options = ("-n1", "--dist=worksteal", f"--gemm-known-failures={ledger}", "--gemm-ops=mm")
    result, outcomes = run(pytester, *options, backends="planted")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*= 1 failed, 1 passed, 1 known-failure in *"])
    assert [o["status"] for o in outcomes if "8x16x32" in o["problem"]] == ["passed", "crashed"]
    assert {o["known_failure"] for o in outcomes if o["status"] == "known-failure"} == {"hangs"}
    result.stdout.fnmatch_lines(
        [
            "mm:f32:nn:8x16x32 on planted: crashed: the test process died in run: SIGSEGV*",
            "  kernel planted_kernel (planted_choice); distribution*",
            "  rerun: pytest test_it.py::test_product --gemm-backends=planted --gemm-problem=mm:f32:nn:8x16x32 *",
        ]
    )


@pytest.mark.slow
def test_a_test_that_dies_outside_of_its_cases_is_over_and_the_rest_runs(pytester: pytest.Pytester) -> None:
    project(pytester, "", range(8, 25, 8))
    pytester.makepyfile(
        test_it=TEST.format(problems="'mm:f32:nn:8x16x32', 'mm:f32:nn:16x16x32'").replace(
            "gemm_check(gemm_case)",
            "import os\n        os.kill(os.getpid(), 9 if gemm_case.problem.shape.m == 8 else 0)\n"
            "        gemm_check(gemm_case)",
        )
    )
    # One that is not ours is left to xdist.
    pytester.makepyfile(test_other="import os\n\ndef test_other():\n    os.abort()\n")
    result, outcomes = run(pytester, "-n1", backends="planted")
    result.assert_outcomes(passed=1, failed=2)
    assert failures(outcomes) == [("8", "crashed", "process-died", "")]
    result.stdout.fnmatch_lines_random(
        [
            "mm:f32:nn:8x16x32 on planted: crashed: the test process died in the test: SIGKILL *",
            "*crashed while running 'test_other.py::test_other'*",
        ]
    )


@pytest.mark.slow
def test_workers_that_never_come_up_end_the_run(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("import os\nif 'PYTEST_XDIST_WORKER' in os.environ:\n    os._exit(3)\n")
    pytester.makepyfile(test_it=TEST.format(problems="'mm:f32:nn:8x16x32'"))
    result = pytester.runpytest_subprocess("-n1", "--gemm-backends=aten", timeout=100)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*8 workers died before they had collected a test*"])


# -- in a single process -----------------------------------------------------------------------------


@pytest.mark.slow
def test_without_workers_an_endless_kernel_is_named_as_the_run_ends_with_it(pytester: pytest.Pytester) -> None:
    project(pytester, '16: ("run", endless)', range(8, 33, 8))
    result, outcomes = run(pytester, "--capture=fd", backends="planted")
    assert result.ret == 1
    result.stderr.fnmatch_lines(
        [
            "mm:f32:nn:16x16x32 on planted: timed-out: no end in run within 1 s",
            "*in endless*",
            "  kernel planted_kernel (planted_choice); distribution *",
            "  remedy: raise --gemm-timeout=RUN if it is only slow",
            "  rerun: pytest test_it.py::test_product --gemm-backends=planted --gemm-problem=mm:f32:nn:16x16x32 *",
            "*2 more test(s) are not run.",
            "With -n 1 or more this case alone would have been lost*",
            "planted *mm *1 *1 *",
        ]
    )
    assert [o["status"] for o in outcomes if "16x16x32" in o["problem"]] == ["passed", "timed-out"]
    assert len({o["problem"] for o in outcomes}) == 2


@pytest.mark.slow
def test_without_workers_a_kernel_that_keeps_python_s_lock_is_ended_all_the_same(pytester: pytest.Pytester) -> None:
    project(pytester, '16: ("run", endless_with_the_lock)', range(8, 33, 8))
    started = time.monotonic()
    result, _ = run(pytester, backends="planted")
    assert time.monotonic() - started < 40
    assert result.ret == 1
    result.stderr.fnmatch_lines(
        [
            "mm:f32:nn:16x16x32 on planted: timed-out: no end in run within 1 s",
            "*in endless_with_the_lock",
            "*2 more test(s) are not run.",
        ]
    )


@pytest.mark.parametrize("known", [False, True])
def test_without_workers_what_follows_a_lost_device_is_not_run_and_the_run_is_red(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    project(pytester, '16: ("run", lose_the_device)', range(8, 33, 8))
    ledger = pytester.path / "known.toml"
    ledger.write_text(textwrap.dedent(KNOWN.replace("==8", "==16")) if known else "")
    result, outcomes = run_here(pytester, monkeypatch, f"--gemm-known-failures={ledger}", "-v")
    assert result.ret == (10 if known else 1)
    assert [o["status"] for o in outcomes if "16x16x32" in o["problem"]] == [
        "passed",
        "known-failure" if known else "crashed",
        "not-run",
    ]
    assert {o["status"] for o in outcomes if "24x16x32" in o["problem"]} == {"not-run"}
    result.stdout.fnmatch_lines(
        [
            "*correct-mm:f32:nn:16x16x32* NOT-RUN *",
            "not run, 5: mm:f32:nn:16x16x32 on planted has lost the device to this process (with -n 1 or more*",
        ]
    )


@pytest.mark.slow
def test_without_workers_memory_that_ran_out_costs_nobody_else_anything(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    project(pytester, '16: ("run", starve)', range(8, 33, 8))
    result, outcomes = run_here(pytester, monkeypatch)
    result.assert_outcomes(passed=7, failed=1)
    starved = [o for o in outcomes if o["status"] == "crashed"]
    assert [(o["reason"]["code"], o["kernels"]) for o in starved] == [
        ("out-of-memory", ["planted_kernel (planted_choice)"])
    ]
    assert [o["status"] for o in outcomes if "16x16x32" in o["problem"] and o["backend"] == "planted"] == [
        "passed",
        "crashed",
        "passed",
        "passed",
    ]


def test_memory_that_runs_out_in_the_harness_is_said_to(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    project(pytester, "", range(8, 9))
    with (pytester.path / "conftest.py").open("a") as file:
        file.write(
            "\nfrom pytest_gemm.numerics import reference\n\ndef nothing_left(*args):\n    raise MemoryError\n\n"
            "reference.reference = nothing_left\n"
        )
    result, outcomes = run_here(pytester, monkeypatch, backends="planted")
    result.assert_outcomes(failed=1)
    assert {o["reason"]["code"] for o in outcomes} == {"out-of-memory"}
    result.stdout.fnmatch_lines(["*crashed: out of memory in reference: *"])


@pytest.mark.slow
def test_no_limit_means_none(pytester: pytest.Pytester) -> None:
    project(pytester, '8: ("run", slow)', range(8, 9))
    conftest = pytester.path / "conftest.py"
    conftest.write_text(conftest.read_text().replace("PLAN = ", "def slow():\n    time.sleep(1.5)\n\n\nPLAN = "))
    result, _ = run(pytester, "--gemm-timeout=0", backends="planted")
    result.assert_outcomes(passed=1)


# -- parts -------------------------------------------------------------------------------------------


DOING = Activity(
    CaseId("cutlass", "mm:f16:nt:8x8x8", candidate="choice_7"), Phase.RUN, "rand", 3, ("kernel_7",), Device.CUDA
)


def test_another_process_goes_on_behind_the_case_that_one_died_with() -> None:
    journals = journal.Journals()
    cuda = Environment("2.11.0+cu130", ("sm_90",), "cuda")
    first = journal.Journal(journals.folder, "gw0", replaceable=True)
    first.begin("test_it.py::test_product[x]")
    assert first.open_call(cuda) == journal.Earlier()
    first.judged(Outcome(CaseId("cutlass", "mm:f16:nt:8x8x8", candidate="choice_6"), "int-2", 3, Status.PASSED))
    first.close_call()
    first.open_call(cuda)
    first.doing(DOING, 60.0)

    died = journals.inherit("gw0", "test_it.py::test_product[x]", -signal.SIGSEGV)
    assert died is not None
    assert (died.status, died.candidate, died.kernels, died.distribution, died.seed) == (
        Status.CRASHED,
        "choice_7",
        ("kernel_7",),
        "rand",
        3,
    )
    second = journal.Journal(journals.folder, "gw1", replaceable=True)
    second.begin("test_it.py::test_product[x]")
    assert second.open_call(cuda).complete
    again = second.open_call(cuda)
    assert not again.complete
    assert again.candidates == {"choice_7"}
    assert again.outcomes == (died,)
    # It has done nothing in this test yet: with its death the test would be over.
    assert journals.inherit("gw1", "test_it.py::test_product[x]", None) is None
    position = journals.position("gw0")
    assert position is not None
    assert position.environment == cuda
    assert position.activity == DOING
    second.end()
    assert journals.outcomes("test_it.py::test_product[x]") == ()
    first.close()
    second.close()
    journals.close()
    assert not journals.folder.exists()


def test_half_a_line_of_a_process_that_died_writing_is_left_out() -> None:
    journals = journal.Journals()
    written = journal.Journal(journals.folder, "gw0")
    written.begin("t")
    written.open_call(Environment("2.13.0"))
    written.judged(Outcome(CaseId("aten", "mm:f32:nn:1x1x1"), "rand", 0, Status.PASSED))
    (file,) = journals.folder.glob("*.judged")
    with file.open("a") as half:
        half.write('{"call": 0, "outco')
    assert len(journals.outcomes("t")) == 1
    written.close()
    journals.close()


def test_watching_costs_less_than_a_tenth_of_a_millisecond(tmp_path: Path) -> None:
    written = journal.Journal(tmp_path, "gw0")
    written.begin("t")
    watcher = limits.Watch(60, 60, written, stacks=written.stacks)
    best = 1.0
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(50):
            with watcher(DOING):
                pass
        best = min(best, (time.perf_counter() - started) / 50)
    watcher.close()
    written.close()
    assert best < 1e-4


@pytest.mark.slow
def test_a_debugger_lifts_the_limit() -> None:
    code = """
        import sys, time
        from pytest_gemm.isolation.journal import Journal
        from pytest_gemm.isolation.limits import Watch
        from pytest_gemm.core.case_id import CaseId
        from pytest_gemm.core.outcome import Activity, Phase
        watch = Watch(0.3, 0.3, Journal(), stacks=sys.stderr)
        with watch(Activity(CaseId("b", "mm:f32:nn:1x1x1"), Phase.RUN)):
            if sys.argv[1:]:
                watch.lift()
            time.sleep(1)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(command, check=False, timeout=60).returncode == 1
    assert subprocess.run([*command, "lift"], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1024.00 GiB. GPU 0 has"),
            "out-of-memory",
            "1 TiB",
        ),
        (RuntimeError("CUDA error: out of memory\nCompile with"), "out-of-memory", "out of memory in run"),
        (MemoryError(), "out-of-memory", "the machine has"),
        (RuntimeError("CUDA error: invalid configuration argument"), None, ""),
        (RuntimeError("out of registers"), None, ""),
    ],
)
def test_memory_that_ran_out_is_told_from_other_exceptions(error: Exception, code: str | None, text: str) -> None:
    wrapped = RuntimeError("backend='inductor' raised")
    wrapped.__cause__ = error
    for given in (error, wrapped):
        reason = faults.out_of_memory(given, "run", "cuda")
        assert (reason and reason.code) == code
        assert text in str(reason)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("CUDA error: an illegal memory access was encountered\nSearch for", "illegal-address"),
        ("Triton Error [CUDA]: an illegal memory access was encountered", "illegal-address"),
        ("CUDA error: misaligned address", "cuda-error"),
        ("CUDA error: device-side assert triggered", "cuda-error"),
        ("unspecified launch failure", "cuda-error"),
    ],
)
def test_a_lost_device_says_what_cuda_said(message: str, code: str) -> None:
    reason = faults.lost(RuntimeError(message), RuntimeError(message), "run")
    assert reason.code == code
    assert message.splitlines()[0].rpartition(": ")[2] in reason.text
    assert "compute-sanitizer" in reason.remedy


def test_an_error_that_is_raised_once_is_no_lost_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = [RuntimeError("CUDA error: invalid argument")]
    monkeypatch.setattr(faults, "_raised_by", lambda _: pending.pop() if pending else None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert faults.device_error("cuda") is None
    monkeypatch.setattr(faults, "_raised_by", lambda _: RuntimeError("CUDA error: an illegal memory access"))
    assert isinstance(faults.device_error("cuda"), RuntimeError)
    assert faults.device_error("cpu") is None


# -- the scheduler -----------------------------------------------------------------------------------


class FakeNode:
    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name, _io=None)
        self.shutting_down = False
        self.sent: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.sent += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def scheduling(pytester: pytest.Pytester, *names: str) -> tuple[Any, list[FakeNode], list[str]]:
    """A scheduler with workers that have collected eight tests and have been given theirs."""
    config = pytester.parseconfig("-n2", "--dist=load", "--gemm-backends=aten")
    config.option.tx = ["popen"] * len(names)
    scheduler: Any = xdist.scheduler(config, None, None, {})
    nodes = [FakeNode(name) for name in names]
    tests = [f"t.py::test_product[aten-mm:f32:nn:{m}x1x1]" for m in range(1, 9)]
    for node in nodes:
        scheduler.add_node(node)
        scheduler.add_node_collection(node, tests)
    scheduler.schedule()
    return scheduler, nodes, tests


def test_work_is_not_lost_to_a_replacement_that_is_still_collecting(pytester: pytest.Pytester) -> None:
    scheduler, (first, second), tests = scheduling(pytester, "gw0", "gw1")
    scheduler.remove_node(first)
    third = FakeNode("gw2")
    scheduler.add_node(third)
    scheduler.remove_node(second)  # dies while the replacement of the first has not collected yet
    assert third.sent == []
    scheduler.add_node_collection(third, tests)
    scheduler.schedule()
    while not scheduler.tests_finished:
        scheduler.mark_test_complete(third, next_of(scheduler, third))
    # Both dead workers took one test with them.
    assert len(set(third.sent)) == len(tests) - 2
    assert len(third.sent) == len(tests) - 2


def next_of(scheduler: Any, node: FakeNode) -> int:
    """Index of the test that the worker runs now."""
    pending = (test for unit in scheduler.assigned_work[node].values() for test, done in unit.items() if not done)
    return int(scheduler.collection.index(next(pending)))


def test_a_worker_that_was_sent_home_before_it_was_ready_is_not_taken_for_one(pytester: pytest.Pytester) -> None:
    scheduler, _, tests = scheduling(pytester, "gw0", "gw1")
    scheduler.add_node_collection(FakeNode("gw2"), tests)
    assert len(scheduler.registered_collections) == 2


# -- GPUs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("0,1", ["0", "1"]),
        (" 3 , 5 ", ["3", "5"]),
        ("GPU-8f3a,MIG-11", ["GPU-8f3a", "MIG-11"]),
        ("0,-1,1", ["0"]),
        ("", []),
        ("-1", []),
    ],
)
def test_the_user_s_choice_of_gpus_is_kept(visible: str, found: list[str], tmp_path: Path) -> None:
    assert xdist.gpus({"CUDA_VISIBLE_DEVICES": visible}, tmp_path, tmp_path) == found


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    assert xdist.gpus({}, tmp_path / "dev", tmp_path / "driver") == []
    (tmp_path / "driver" / "0000:17:00.0").mkdir(parents=True)
    assert xdist.gpus({}, tmp_path / "dev", tmp_path / "driver") == ["0"]
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia2"):
        (tmp_path / "dev" / name).touch()
    assert xdist.gpus({}, tmp_path / "dev", tmp_path / "driver") == ["0", "1", "2"]


@pytest.mark.slow
def test_workers_share_out_the_gpus_and_a_replacement_takes_over_its_predecessor_s(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-8f3a")
    noted = 'lambda: (open("died.txt", "w").write(os.environ["PYTEST_XDIST_WORKER"]), segfault())'
    project(pytester, f'8: ("run", {noted})', range(8, 41, 8))
    with (pytester.path / "conftest.py").open("a") as file:
        file.write(
            "\nif 'PYTEST_XDIST_WORKER' in os.environ:\n"
            "    with open('gpus.txt', 'a') as file:\n"
            "        file.write(os.environ['PYTEST_XDIST_WORKER'] + ' ' + os.environ['CUDA_VISIBLE_DEVICES'] + '\\n')\n"
        )
    result, _ = run(pytester, "-n3", backends="planted")
    lines = [line.split() for line in (pytester.path / "gpus.txt").read_text().splitlines()]
    given = dict(sorted(lines, key=lambda pair: int(pair[0][2:])))
    assert [given[w] for w in ("gw0", "gw1", "gw2")] == ["4", "GPU-8f3a", "4"]
    assert list(given) == ["gw0", "gw1", "gw2", "gw3"]
    assert given["gw3"] == given[(pytester.path / "died.txt").read_text()]
    result.stdout.fnmatch_lines(["GPUs: 4 for gw0 gw2; GPU-8f3a for gw1"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,GPU-8f3a"


# -- on a GPU ----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: the faults are those of a GPU")
@pytest.mark.parametrize("workers", ["-n4", "-n1"])
def test_each_fault_of_a_gpu_is_one_case_and_everything_else_is_judged(pytester: pytest.Pytester, workers: str) -> None:
    pytest.importorskip("triton", reason="the faults are planted with Triton")
    folder = str(Path(__file__).parents[1])
    pytester.makeconftest(
        f"import sys\nsys.path.insert(0, {folder!r})\nfrom planted_cuda import pytest_gemm_register_backends\n"
    )
    lines = ", ".join(f"'mm:f32:nn:{m}x64x64'" for m in range(8, 97, 8))
    pytester.makepyfile(test_it=TEST.format(problems=lines))
    options = ("--gemm-timeout=20,60",)
    result, outcomes = run(pytester, workers, *options, backends="planted-cuda,correct-cuda")
    assert result.ret == 1
    result.assert_outcomes(passed=12 + 8, failed=4)

    second = next(o["distribution"] for o in outcomes if o["distribution"] not in {"int-2", ""})
    wrong = failures(outcomes)
    assert sorted(wrong) == [
        ("16", "crashed", "illegal-address", second),
        ("32", "timed-out", "no-end", second),
        ("48", "crashed", "out-of-memory", second),
        ("64", "crashed", "out-of-memory", "int-2"),
    ]
    judged = [(o["backend"], o["problem"], o["distribution"]) for o in outcomes]
    assert len(judged) == len(set(judged))
    assert len({(backend, problem) for backend, problem, _ in judged}) == 2 * 12
    kernels = {o["problem"].split(":")[3].split("x")[0]: o["kernels"] for o in outcomes if o["status"] != "passed"}
    assert kernels["16"] == ["planted_illegal_address"]
    assert kernels["32"] == ["planted_endless"]
    text = result.stdout.str()
    assert "CUDA error in run: an illegal memory access was encountered; the process has lost the device" in text
    assert "no end in run within 20 s" in text
    assert "out of memory in run: 1 TiB asked for, the device has " in text
