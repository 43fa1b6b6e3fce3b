"""What a session does with a case before it times it, driven in this process."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import Availability, Candidates, Prepared
from pytest_gemm.api.registry import Registry
from pytest_gemm.api.request import DEFAULT, BuildRequest, Capability
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.config.config import GemmConfig, SpeedConfig
from pytest_gemm.config.options import BY_NAME
from pytest_gemm.core.case_id import CandidateSelection, CaseId, Device
from pytest_gemm.core.outcome import Misconduct, Outcome, Status
from pytest_gemm.judging.case import Case
from pytest_gemm.ledger.entry import Comparison, Comparisons, Entry, Environment, Globs
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.machine import processor
from pytest_gemm.operands import tensors
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.problem import Problem
from pytest_gemm.run import known
from pytest_gemm.run.progress import Display
from pytest_gemm.speed import bench, controller
from pytest_gemm.speed import runner as runner_module
from pytest_gemm.speed.baseline import store
from pytest_gemm.speed.check import SpeedCheck
from pytest_gemm.speed.data import Peaks, Sample, Session, read_session
from pytest_gemm.speed.kept import _same
from pytest_gemm.speed.report.rows import Run
from pytest_gemm.speed.request import SESSION, Group, Project, Request, TimedCase
from pytest_gemm.speed.timing import paired
from pytest_gemm.speed.worker import Meter
from pytest_gemm.tools import cli
from pytest_gemm.worker.inline import Inline
from pytest_gemm.worker.messages import Job

MM = Problem.parse("mm:f32:nn:4x8x8")
SEVERAL, COMPILER = CaseId("several", MM.line), CaseId("compiler", MM.line)
OPTIONS = {name: option.default for name, option in BY_NAME.items()}


class Several:
    """A backend of three candidates, for any instruction set and in any mode."""

    name = "several"
    devices = ("cpu",)
    capabilities = frozenset({Capability.ISA, Capability.MODE})
    function = staticmethod(torch.matmul)

    def availability(self, device: str) -> Availability:
        return Availability()

    def supports(self, problem: Problem, request: object = None) -> None:
        return None

    def candidates(self, problem: Problem, operands: Operands, request: BuildRequest) -> Candidates:
        return Candidates(("big", "medium", "small"))

    def prepare(self, problem: Problem, operands: Operands, request: BuildRequest) -> Prepared:
        choice = request.candidate or "big"
        registry = Registry()
        registry.add_callable(choice, self.function)
        made: Any = registry[choice].prepare(problem, operands, DEFAULT)
        made.proof = lambda: Proof(chosen=(choice,), generated=(choice,), executed=(choice,))
        prepared: Prepared = made
        return prepared


def case(**axes: Any) -> Case:
    return Case(Several(), MM, (), 0, Device.CPU, **axes)


def registered(*backends: Any) -> Registry:
    registry = Registry()
    for backend in backends:
        registry.add(backend)
    return registry


def configured(speed: SpeedConfig, *backends: Any) -> Any:
    """What a run's configuration has for its sessions."""
    return SimpleNamespace(
        speed=speed,
        seed=0,
        registry=registered(*backends),
        jobs=2,
        wanted_candidates="",
        device_of=lambda _: "cpu",
        options=OPTIONS,
        deciding={},
    )


def runner_in(folder: Path, *backends: Any, device: str = "cpu") -> runner_module.Runner:
    config = configured(SpeedConfig(root=folder), *backends)
    return runner_module.Runner(config, Project(str(folder)), Display(None), device, folder)


def judged(folder: Path, asked: Case, entry: Entry, output: Path | None = None, **selected: Any) -> tuple[Sample, ...]:
    """The samples of a session that compiles and judges this one case under a ledger of this one entry."""
    timed = TimedCase(CaseId(asked.backend.name, MM.line), "test_speed", **selected)
    request = Request((timed,), "cpu", timed=False)
    config = GemmConfig(
        registered(asked.backend), device="cpu", ledger=Ledger((entry,)), output=output, options=OPTIONS
    )
    meter = Meter(request, folder, config)
    meter(asked, timed)
    meter.close()
    return read_session(folder / SESSION).samples


@pytest.mark.parametrize(
    ("conditions", "axes", "held"),
    [
        ({"threads": Comparisons((Comparison("==", 1),))}, {"threads": 1}, True),
        ({"threads": Comparisons((Comparison("==", 1),))}, {"threads": 2}, False),
        ({"threads": Comparisons((Comparison("==", 4),))}, {"threads": 1}, False),  # the run's are no matter
        ({"threads": Comparisons((Comparison("==", 4),))}, {}, True),
        ({"isa": Globs(("avx512*",))}, {}, True),
        ({"isa": Globs(("avx512*",))}, {"isa": "avx2"}, False),
        ({"mode": Globs(("aoti",))}, {"mode": "aoti"}, True),
        ({"mode": Globs(("aoti",))}, {}, False),
        ({"test": Globs(("test_speed",))}, {}, True),
        ({"test": Globs(("test_product",))}, {}, False),
    ],
)
def test_a_session_asks_the_ledger_as_a_judgement_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conditions: dict[str, Any], axes: dict[str, Any], held: bool
) -> None:
    here = Environment("2.13.0", ("avx2", "avx512f"), threads=4)
    monkeypatch.setattr(known, "environment", lambda _: here)
    entry = Entry("deadly", "planted", {"backend": Globs(("several",)), **conditions}, crashes=True)
    asked = case(**axes)
    assert (known.withheld(Ledger((entry,)), asked, "test_speed") is not None) is held
    (sample,) = judged(tmp_path, asked, entry)
    assert sample.status is (Status.KNOWN_FAILURE if held else Status.PASSED)
    if held:
        assert "deadly: not run" in str(sample.reason)


def test_a_candidate_that_the_ledger_forbids_is_not_run_and_the_others_are_timed(tmp_path: Path) -> None:
    entry = Entry("deadly", "planted", {"backend": Globs(("several",)), "candidate": Globs(("medium",))}, crashes=True)
    samples = judged(tmp_path, case(candidates=CandidateSelection("all")), entry)
    held = Status.KNOWN_FAILURE
    assert {s.case.candidate: s.status for s in samples} == {
        "big": Status.PASSED,
        "medium": held,
        "small": Status.PASSED,
    }
    runner = runner_in(tmp_path)
    runner.note_failures(samples)
    assert runner.left([SEVERAL]) == [SEVERAL]


def test_a_candidate_that_was_selected_by_timing_is_the_backend_s_own_way(tmp_path: Path) -> None:
    entry = Entry("deadly", "planted", {"backend": Globs(("several",)), "candidate": Globs(("medium",))}, crashes=True)
    (sample,) = judged(tmp_path, case(), entry, selected="medium")
    assert (sample.status, sample.selected, sample.distribution) == (Status.PASSED, ("medium",), "rand")


def test_a_case_that_has_been_timed_keeps_no_operands(tmp_path: Path) -> None:
    timed = TimedCase(SEVERAL)
    speed = SpeedConfig(windows=2, comparator="")
    config = GemmConfig(registered(Several()), device="cpu", options=OPTIONS, speed=speed)
    meter = Meter(Request((timed,), "cpu", peaks=Peaks({"f32": 1e15}, 1e15)), tmp_path, config)
    meter(case(), timed)
    assert bench._benches
    meter.close()
    assert all(sample.subject for sample in read_session(tmp_path / SESSION).samples)
    assert not bench._benches


def test_what_worked_before_a_kernel_came_is_not_its_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    busy = 1 << 30  # no process has this number
    monkeypatch.setattr(processor, "worked", lambda: {0: 0, busy: next(seconds) * 1_000_000_000})
    monkeypatch.setattr(bench, "_owners", {})
    given, worker = tensors.make(MM, "rand", 0), Inline()
    number = worker.prepare(Job(AtenBackend(), MM, DEFAULT), given).number

    def working() -> str:
        bench.keep(worker, number, 0, "aten", given)
        try:
            bench.window(worker, number, paired.Plan(blocks=1, warm_seconds=0.0, max_seconds=0.1), stays=True)
            return bench.working(worker, number)[1]
        finally:
            bench.drop(worker, number)

    assert bench.begin(None, "cpu") == []
    assert working() == f"child {busy}"
    bench._owners.clear()
    with pytest.raises(Misconduct, match=f"child {busy} worked while no call was being made"):
        working()


@pytest.mark.parametrize(("again", "disturbed"), [(1e15, False), (1.0, True)])
def test_peaks_are_measured_once_more_before_a_time_above_them_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: float, disturbed: bool
) -> None:
    calls: list[str] = []

    def measure(device: str, _: object) -> Peaks:
        calls.append(device)
        return Peaks({"f32": again}, 1.0)

    monkeypatch.setattr("pytest_gemm.speed.roofline.measure", measure)
    config = GemmConfig(
        registered(Several()), device="cpu", options=OPTIONS, speed=SpeedConfig(windows=2, comparator="")
    )
    timed = TimedCase(SEVERAL)
    meter = Meter(Request((timed, timed), "cpu", peaks=Peaks({"f32": 2.0}, 0.5)), tmp_path, config)
    for _ in range(2):
        meter(case(), timed)
    meter.close()
    session = read_session(tmp_path / SESSION)
    assert calls == ["cpu"]
    assert session.peaks == Peaks({"f32": max(2.0, again)}, 1.0)
    assert ["at the rate" in s.disturbed for s in session.samples] == [disturbed] * 2
    assert all(sample.is_impossible is disturbed for sample in session.samples)


def test_why_the_files_of_a_failure_were_not_written_reaches_the_run(tmp_path: Path) -> None:
    wrong: Any = Several()
    wrong.function = lambda a, b: torch.matmul(a, b) + 1
    entry = Entry("other", "planted", {"backend": Globs(("other",))}, crashes=True)
    output = tmp_path / "output"
    output.write_text("a file has the name of the folder")
    (sample,) = judged(tmp_path, dataclasses.replace(case(), backend=wrong), entry, output)
    assert sample.status is Status.INCORRECT
    runner = runner_in(tmp_path)
    session = runner_module._Open(runner, Group("head"), Request((), "cpu"))
    session._folder = tmp_path
    assert session._read(0).samples == (sample,)
    assert list(runner.lost) == [str(output / "failures")]


def test_the_last_timed_results_are_compared_bit_for_bit() -> None:
    first, zeros = (torch.ones(2, 3),), torch.zeros(2, 3)
    assert _same(first, (torch.ones(3, 2).t(),))
    assert not any(_same(first, last) for last in ((zeros,), (zeros[:1],), (), (first[0], zeros)))


class Ends:
    """Stands for what ends a test: keeps what it is told."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[Status, str, str]] = []
        self.asked_again = False

    def __call__(self, _: Case) -> None:
        self.asked_again = True

    def finish(self, _: Case, outcomes: list[Outcome]) -> None:
        self.outcomes += [(one.status, one.candidate, one.distribution) for one in outcomes]


@pytest.mark.parametrize("left_out", [Status.PRUNED, Status.KNOWN_FAILURE])
@pytest.mark.parametrize("alone", [False, True])
def test_a_candidate_that_was_left_out_ends_the_test_only_where_no_other_was_timed(
    left_out: Status, alone: bool
) -> None:
    other = Sample(CaseId("several", MM.line, "medium"), "cpu", left_out)
    timed = Sample(CaseId("several", MM.line, "big"), "cpu", Status.PASSED, subject=(1e-3,) * 4, distribution="int-2")
    made = Run(sessions=[Session("amd", samples=(other,) if alone else (other, timed))])
    ends: Any = Ends()
    config = configured(SpeedConfig(allow=("slower",)))
    SpeedCheck(config, ends, [made], None)(case(candidates=CandidateSelection("all")))
    assert ends.outcomes == [(left_out, "medium", "") if alone else (Status.PASSED, "big", "int-2")]
    assert ends.asked_again is (alone and left_out is Status.KNOWN_FAILURE)  # the judgement finds the entry


# -- selecting ---------------------------------------------------------------------------------------------


class Timing(Several):
    """A backend that selects by timing its candidates itself."""

    capabilities = frozenset({*Several.capabilities, Capability.SELECTION})

    def __init__(self) -> None:
        self.seconds = {"big": 1e-5, "medium": 1.4e-5, "small": 2e-5}

    def prepare(self, problem: Problem, operands: Operands, request: BuildRequest) -> Prepared:
        fastest = min(self.seconds, key=self.seconds.__getitem__)
        prepared: Any = super().prepare(problem, operands, request.replace(candidate=fastest))
        prepared.timings = {**self.seconds, "failed": float("inf")}
        made: Prepared = prepared
        return made


class Compilers(Several):
    """A backend whose compiler selects."""

    name = "compiler"
    capabilities = frozenset({*Several.capabilities, Capability.SELECTION})


def test_a_session_tells_what_the_backend_measured_of_the_candidates_that_it_did_not_leave_out(tmp_path: Path) -> None:
    asked = dataclasses.replace(case(), backend=Timing())
    entry = Entry("other", "planted", {"backend": Globs(("other",))}, crashes=True)
    (sample,) = judged(tmp_path, asked, entry)
    assert sample.ranking == ("big", "medium", "small")


def ranked(backend: str, names: Sequence[str]) -> Sample:
    return Sample(CaseId(backend, MM.line), "cuda", Status.PASSED, selected=(names[0],), ranking=tuple(names))


def test_candidates_are_selected_again_when_nothing_else_is_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_in(tmp_path, Timing(), Compilers(), device="cuda")

    def compiling(*given: Any) -> list[Sample]:
        first = "c0" if given[2] > 1 else "c1"
        return [ranked("several", [first, "c2"]), ranked("compiler", ["c0", "c1"])]

    monkeypatch.setattr(runner, "_compile", compiling)
    head = Group("head")
    runner.compile(head, [SEVERAL, COMPILER, *(CaseId("several", f"x{i}") for i in range(4))])
    assert runner.selected["head"] == {SEVERAL: "c1", COMPILER: "c0"}


# -- a run that is cut short -----------------------------------------------------------------------------


class Answer:
    """Stands for a session's process: some have an answer, and then the user has had enough."""

    left: ClassVar[list[BaseException | None]] = []

    def __init__(self, _: object, group: Group, request: Request) -> None:
        self.request, self.group, self.now, self.done = request, group, "", 0

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def poll(self) -> bool:
        if (end := self.left.pop(0)) is not None:
            raise end
        return True

    def result(self) -> Session:
        times = tuple(1e-3 + 1e-6 * i for i in range(4))
        sample = Sample(CaseId("several", MM.line), "cpu", Status.PASSED, subject=times)
        date = f"2026-01-01T00:00:0{self.request.index}+0000"
        return Session("amd", {"torch": "2"}, "c", "head", self.request.index, date, "12ab", samples=(sample,))


class Lines(Display):
    """A display that keeps its lines."""

    def __init__(self) -> None:
        super().__init__(None)
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize(
    ("end", "raised"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (runner_module.SessionFailed("planted"), pytest.UsageError)],
)
def test_a_recording_that_is_cut_short_says_what_records_from_its_complete_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException, raised: type[BaseException]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # the last recording is there
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(runner_module, "_Open", Answer)
    monkeypatch.setattr(Answer, "left", [None, None, None, end])
    speed = SpeedConfig(record=True, sessions=5, baselines=tmp_path / "b", samples=tmp_path / "mine")
    config = configured(speed, Several())
    display = Lines()
    with pytest.raises(raised):
        controller.measure(config, {SEVERAL: ""}, Project(str(tmp_path)), display)
    first, then, *_ = display.lines
    assert "the recording was cut short: 3 of 5 sessions are complete" in first
    _, _, line = then.partition(": to record from these: ")
    program, command, *words = shlex.split(line)
    assert (program, command, words[0]) == ("pytest-gemm", "baseline", "record")
    assert not (tmp_path / "b").exists()
    assert cli.main([command, *words]) == 0
    ((key, stored),) = store.Store(tmp_path / "b", "amd").load("several").items()
    assert (key.problem, len(stored.subject_us)) == (MM.line, 3)
