"""One session: a fresh process that compiles, judges and times the cases of a request, and stores each sample at once.

    python -m pytest_gemm.speed.worker FOLDER/request.json

The samples are written to ``session.jsonl`` in the folder of the request.  While a case is at work its name stands in
``now.txt``: a process that dies leaves the name of its last case.

The process runs pytest's start-up, so that the conftests of the project register their backends, and no test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import os
import random
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest
from msgspec.structs import replace

from pytest_gemm import effect
from pytest_gemm.api.protocols import Backend, CandidateBackend, Prepared, timed
from pytest_gemm.api.request import DEFAULT
from pytest_gemm.config import CONFIG, GemmConfig
from pytest_gemm.core.case_id import CandidateSelection, CaseId, Device
from pytest_gemm.core.outcome import Activity, Misconduct, Outcome, Phase, Pruned, Reason, Status, Unsupported
from pytest_gemm.core.text import first_line
from pytest_gemm.failures.text import Rerun
from pytest_gemm.isolation import termination
from pytest_gemm.isolation.journal import Journal
from pytest_gemm.isolation.limits import Watch
from pytest_gemm.machine import key as key_module
from pytest_gemm.machine import software
from pytest_gemm.problem.problem import Problem
from pytest_gemm.speed import roofline
from pytest_gemm.speed.data import INTERLEAVED, Peaks, Sample, Session, end_line, sample_line, session_line
from pytest_gemm.speed.imports import InstalledFirst, shared
from pytest_gemm.speed.lockstep import Interleaving
from pytest_gemm.speed.request import LEFT, LOST, NOW, SESSION, UNWRITTEN, WORKER, Request, TimedCase
from pytest_gemm.speed.timing import cpu, cuda, paired
from pytest_gemm.storage import files

if TYPE_CHECKING:
    import torch

    from pytest_gemm.judging.case import Case, Judged
    from pytest_gemm.operands.tensors import Operands
    from pytest_gemm.run.orchestrator import Orchestrator

_Calls = list[Callable[[], object]]


@dataclasses.dataclass
class _Work:
    """A case that has passed and is being timed.

    Attributes:
        case: as it was judged, with its one candidate.
        prepared, given: what is called, on which operands.
        comparator, candidates: what is timed beside it, by name; the comparator is one or none.
        first: copies of the results that were judged.
        last: what the last timed call returned.
        outcome: of the judgement.
        windows: what was measured so far.
        calls: how many calls fill a reading, known from the first window on.
        phases: seconds that it took so far.
    """

    case: Case
    prepared: Prepared
    given: Operands
    comparator: Mapping[str, Prepared]
    candidates: Mapping[str, Prepared]
    first: tuple[torch.Tensor, ...]
    outcome: Outcome
    last: Any = None
    windows: list[paired.Readings] = dataclasses.field(default_factory=list)
    calls: dict[str, int] = dataclasses.field(default_factory=dict)
    phases: dict[str, float] = dataclasses.field(default_factory=dict)


# On a CPU each window is short, for it is the next one that sees another state of the machine.  Nothing is retaken: the
# median over the windows leaves out what a guard would.
_WINDOW: Final = paired.Plan(blocks=1, warm_seconds=0.0, retakes=0, guard=10.0)
# Operands of cases that wait for their next window; what they need beside that (packed weights) is about as much again.
_WAITING_BYTES: Final = 2 << 30
_FEWEST_WINDOWS: Final = 3
_MOST_WINDOWS: Final = 1000
# Allocations between two collections of young objects; a compile makes hundreds of thousands of short-lived ones.
_GC_THRESHOLD: Final = 50_000
# Under which a CPU session runs, see runner.py: threads bound, large pages.  Part of the contract.
_CONDITIONS: Final = "-bound-huge"


class Meter:
    """Answers a request.

    On a CPU the cases are judged first, and then timed one after the other, over and over: a window of each, then the
    next window of each, so that a state of the machine that lasts for seconds is not a session's whole truth on a case.
    On a GPU, which is quieter and whose memory the operands fill, each case is timed when it has been judged.

    Args:
        request: what to time.
        folder: where the samples are written.
        config: of the run.
    """

    def __init__(self, request: Request, folder: Path, config: GemmConfig) -> None:
        from pytest_gemm.judging.judge import Judge
        from pytest_gemm.run.state import eager_refusal

        self.folder = folder
        self.request = request
        self.windows = config.speed.windows if request.device == "cpu" else 1
        self.plan = dataclasses.replace(_WINDOW if self.windows > 1 else paired.Plan(), seed=request.index)
        self._config = config
        self._eager_refusal = eager_refusal(config.ledger)
        self._watch = Watch(config.timeout, config.compile_timeout, Journal(), stacks=2)
        self._judge = Judge(self._eager_refusal, self._watch, config.reference, statements=config.ledger.statements)
        self._timer: paired.Timer = cuda.CudaTimer() if request.device == "cuda" else cpu.CpuTimer()
        self._started = time.perf_counter()
        self._interleaving = Interleaving(request.socket, first=request.begins)
        self._parent = os.getppid()
        self._is_cross_checked = False
        self._lost: dict[str, str] = {}  # why a file could not be written, by the option that asks for it
        self._works: list[_Work] = []
        self._begun = 0  # cases
        self._peaks = request.peaks or self._measured_peaks()
        self._write(session_line(self._head()))

    def __call__(self, case: Case, wanted: TimedCase) -> None:
        """Compile and judge a case; if it passes it is timed, now or when the others are as far."""
        from pytest_gemm.run.orchestrator import Orchestrator  # which imports torch

        run = Orchestrator(self._config, self._judge, wanted.test)
        self._begun += 1
        with self._at_work(case):
            if held := run.withheld(case):
                self._keep(case.device, held, {})
            else:
                self._judged(_as_timed(case, wanted), wanted, run)
        if self._judge.has_lost(case.device):
            os._exit(LOST)  # the context is gone; nothing that pytest would do now can reach the device either
        if self.windows == 1 or sum(roofline.work(w.case.problem).bytes for w in self._works) > _WAITING_BYTES:
            self._time_all()

    def close(self) -> None:
        """Time what is left, and end the session."""
        self._time_all()
        self._interleaving.close()
        self._write(end_line(time.perf_counter() - self._started))
        self._watch.close()

    def _measured_peaks(self) -> Peaks | None:
        if not self.request.timed:
            return None
        dtypes = sorted({roofline.dtype_name(Problem.parse(case.problem)) for case in self.request.cases})
        with self._interleaving.round(), self._interleaving.window():
            return roofline.measure(self.request.device, dtypes)

    def _head(self) -> Session:
        request = self.request
        device: key_module.Device = "cuda" if request.device == "cuda" else "cpu"
        conditions = _CONDITIONS if device == "cpu" else ""
        interleaved = "" if request.socket is None else INTERLEAVED
        return Session(
            hardware=key_module.hardware_key(device, self._config.threads),
            software=software.software(device),
            contract=f"{self.plan.contract()}-{self.windows}{conditions}{interleaved}",
            group=request.group,
            index=request.index,
            date=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            commit=request.commit,
            peaks=self._peaks or Peaks(),
            shared=shared(),
        )

    def _write(self, line: str) -> None:
        with (self.folder / SESSION).open("a", encoding="utf-8") as file:
            file.write(line)

    def _keep(self, device: str, outcome: Outcome, phases: Mapping[str, float], **measured: Any) -> None:
        """Write the sample of an outcome."""
        reason = outcome.reason
        if outcome.known_failure and reason is not None:  # of an outcome a sample keeps the reason alone
            reason = dataclasses.replace(reason, text=f"{outcome.known_failure}: {reason.text}")
        sample = Sample(
            case=CaseId(outcome.backend, outcome.problem, outcome.candidate),
            device=device,
            status=outcome.status,
            reason=reason,
            selected=outcome.chosen,
            kernels=outcome.kernels,
            phases=phases,
            distribution=outcome.distribution,
            **measured,
        )
        if sample.is_timed and (excess := self._excess(sample)) is not None:
            # The result was right, so the fault is the clock's or the peaks': no estimate to keep, and no failure.
            sample = replace(sample, disturbed=str(excess))
        self._write(sample_line(sample))

    @contextlib.contextmanager
    def _at_work(self, case: Case) -> Iterator[None]:
        """The name of the case stands in a file meanwhile, and stays there if the block does not end."""
        if os.getppid() != self._parent:  # the answer has no reader, and the next run may be timing by now
            pytest.exit("the run that started this session is gone", returncode=3)
        _tell(self.folder / NOW, f"{case.backend.name} {case.problem.line}")
        yield
        (self.folder / NOW).unlink()

    # -- judging -----------------------------------------------------------------------------------------

    def _judged(self, case: Case, wanted: TimedCase, run: Orchestrator) -> None:
        """Judge a case; what passes is left to be timed, and of the rest the samples are written."""
        from pytest_gemm.worker.calls import taken
        from pytest_gemm.worker.inline import as_tuple

        passed: list[Callable[..., _Work]] = []  # what is being timed, until its outcome is there
        timings: dict[str, float] = {}

        def timing(case: Case, prepared: Prepared, given: Operands) -> object:
            """Make ready to be timed what has passed; the judge gets what a timed call returned."""
            if not self.request.timed:
                timings.clear()
                timings.update(getattr(prepared, "timings", {}))  # what the backend measured of its candidates
                return prepared.run(given)
            comparator = self._comparator(case, given)
            candidates = self._candidates(case, wanted, run, prepared, given)
            with timed(prepared, given) as call:
                first = call()
            _wait_for(case.device)
            copies = taken(as_tuple(first))[1]  # each call may return the same memory
            passed.append(functools.partial(_Work, case, prepared, given, comparator, candidates, copies))
            return first

        started, compiled = time.perf_counter(), 0.0

        def spent() -> dict[str, float]:
            return {"prepare": compiled, "judge": time.perf_counter() - started - compiled}

        last: dict[str, Outcome] = {}
        found: list[Judged] = []
        # What is named was selected by the backend itself, even if the ledger withholds the candidate.
        for judged in (self._judge.judge if wanted.ranked else run.judged)(case, timing=timing):
            found.append(judged)
            outcome = judged.outcome
            compiled += outcome.seconds.compile
            pruned = outcome.status is Status.PRUNED
            if pruned and outcome.candidate and case.candidates.by_backend:
                continue  # left out by autotuning, which is no case of its own
            if wanted.ranked:  # which candidate it was is a fact of the case, as it is where autotuning has selected it
                status = Status.CRASHED if pruned else outcome.status
                outcome = dataclasses.replace(outcome, case=case.id(), status=status)
            work = passed.pop() if passed else None
            if work is not None and outcome.status is Status.PASSED:
                self._works.append(work(outcome=outcome, phases={**spent(), "time": 0.0}))
                last.pop(outcome.candidate, None)
                started, compiled = time.perf_counter(), 0.0
            elif outcome.candidate not in last or last[outcome.candidate].status is Status.PASSED:
                last[outcome.candidate] = outcome
        if any(judged.evidence for judged in found) and not self._judge.has_lost(case.device):
            # Judged by the conformance suite, which takes any problem: the test that timed it would time it again.
            rerun = effect.rerun_options(self._config, case.backend.name, timed=False)
            self._lost |= run.keep(
                case, run.explained(case, found)[0], Rerun("--pyargs pytest_gemm.conformance", rerun)
            )
            _tell(self.folder / UNWRITTEN, msgspec.json.encode(self._lost).decode())
        ranking = tuple(sorted(filter(lambda name: math.isfinite(timings[name]), timings), key=timings.__getitem__))
        phases = spent()
        for outcome in last.values():  # what is not timed: a case that failed, or a session that only judges
            seconds = tuple(timings[name] for name in ranking)
            self._keep(case.device, outcome, phases, ranking=ranking, ranking_seconds=seconds)

    def _candidates(
        self, case: Case, wanted: TimedCase, run: Orchestrator, prepared: Prepared, given: Operands
    ) -> dict[str, Prepared]:
        """The candidates that are timed beside the selected one."""
        backend, found = case.backend, {}
        if not isinstance(backend, CandidateBackend):
            return {}

        def listed() -> Sequence[str]:
            return backend.candidates(case.problem, given, case.request()).names

        chosen, withheld = prepared.proof().chosen, functools.partial(run.withheld, case)
        for name in others(wanted, chosen, self._config.speed.regret, listed, withheld):
            with contextlib.suppress(Pruned, Unsupported):
                found[name] = backend.prepare(case.problem, given, case.request(name))
        return found

    def _comparator(self, case: Case, given: Operands) -> dict[str, Prepared]:
        """The comparator of a case by its name, if one can compute it; none is timed beside itself."""
        name = self._config.speed.comparator
        if not name or name == case.backend.name:
            return {}
        backend: Backend = self._config.registry[name]
        refused = backend.supports(case.problem, DEFAULT)
        if refused is not None or (name == "aten" and self._eager_refusal(case.problem, case.device)):
            return {}
        try:
            comparator = backend.prepare(case.problem, given, DEFAULT)
            comparator.run(given)
        except Exception:  # not a fault of the subject; the sample has no comparator
            return {}
        return {name: comparator}

    # -- timing ------------------------------------------------------------------------------------------

    def _time_all(self) -> None:
        """Time the cases that wait, window by window, and judge their last results."""

        def place(work: _Work, window: int) -> float:
            """Another order in each window; a case that only the other side of a pair has does not change it."""
            return random.Random(f"{self.request.index} {window} {work.case.backend.name} {work.case.problem}").random()

        with self._interleaving.round():
            for window in range(self.windows):
                for work in sorted(self._works, key=lambda work: place(work, window)):
                    if len(work.windows) < _FEWEST_WINDOWS or work.phases["time"] < self.plan.max_seconds:
                        with self._interleaving.window(), self._at_work(work.case):
                            self._window(work)
                        self._leave_word()
        for work in self._works:
            with self._at_work(work.case):
                self._finish(work)
        self._works.clear()

    def _leave_word(self) -> None:
        """How long the rest takes: a case that has had no window, or was not judged yet, is like the others."""
        wholes = []
        for work in self._works:
            if work.windows:
                one = work.phases["time"] / len(work.windows)
                wholes.append(max(min(self.windows * one, self.plan.max_seconds + one), _FEWEST_WINDOWS * one))
        if wholes:
            cases = len(self._works) + len(self.request.cases) - self._begun
            left = cases * sum(wholes) / len(wholes) - sum(work.phases["time"] for work in self._works)
            with contextlib.suppress(OSError):  # progress that cannot be told ends no session
                _tell(self.folder / LEFT, f"{max(left, 0.0):.1f}")

    def _window(self, work: _Work) -> None:
        """Time one case for a while."""
        if work.outcome.status is not Status.PASSED:
            return
        case, started = work.case, time.perf_counter()
        activity = Activity(case.id(), Phase.TIME, case.distributions[0], case.seed, device=case.device)
        try:
            with self._watch(activity), contextlib.ExitStack() as stack:
                subject = self._calls(stack, work.prepared, work)
                beside = next((self._calls(stack, one, work) for one in work.comparator.values()), None)
                candidates = {name: self._calls(stack, one, work) for name, one in work.candidates.items()}
                # The order of the readings is drawn anew in each window.
                plan = dataclasses.replace(self.plan, seed=_MOST_WINDOWS * self.plan.seed + len(work.windows))
                readings = paired.measure(subject, beside, candidates, timer=self._timer, plan=plan, calls=work.calls)
                if case.device == "cuda":
                    more = self._device_telemetry(min(readings.subject), subject, beside)
                    readings = dataclasses.replace(readings, telemetry={**readings.telemetry, **more})
                work.last = subject[0]()
                _wait_for(case.device)
        except Exception as error:  # of the backend: it has passed before, and does no longer
            first = first_line(error)
            reason = Reason(f"time-{type(error).__name__}", f"{type(error).__name__} while it was timed: {first}")
            work.outcome = dataclasses.replace(work.outcome, status=Status.CRASHED, reason=reason)
            return
        work.windows.append(readings)
        work.phases["time"] += time.perf_counter() - started

    def _calls(self, stack: contextlib.ExitStack, prepared: Prepared, work: _Work) -> _Calls:
        """The calls, one after the other: on a GPU with as many sets of operands as its cache does not hold."""
        count = cuda.rotation(int(roofline.work(work.case.problem).bytes), work.case.device)
        sets = [work.given, *(work.given.clone() for _ in range(1, count))]
        return [stack.enter_context(timed(prepared, one)) for one in sets]

    def _device_telemetry(self, seconds: float, subject: _Calls, comparator: _Calls | None) -> dict[str, float]:
        """What a call costs from Python, and once in this process the timer against the profiler's device time."""
        found = {"end_to_end_us": 1e6 * cuda.latency(subject)}
        if comparator is not None:
            found["comparator_end_to_end_us"] = 1e6 * cuda.latency(comparator)
        if not self._is_cross_checked:
            self._is_cross_checked = True
            if (ratio := cuda.cross_check(subject, seconds)) is not None:
                found["timer_over_profiler"] = ratio
        return found

    def _finish(self, work: _Work) -> None:
        """Write the case's sample, after its last result has been compared with the one that was judged."""
        outcome, measured = work.outcome, {}
        if outcome.status is Status.PASSED and not _same(work.first, work.last):
            candidates = CandidateSelection(outcome.candidate or work.case.candidates.text)
            again = dataclasses.replace(work.case, candidates=candidates)
            outcome = self._judge.outcomes(again, timing=lambda *_: work.last)[-1]
        if outcome.status is Status.PASSED and work.windows:
            units = roofline.units(work.case.device)
            measured = {
                **vars(paired.merged(work.windows)),
                "comparator_name": next(iter(work.comparator), ""),
                "least": units and roofline.least_seconds(work.case.problem, units),
            }
        self._keep(work.case.device, outcome, work.phases, **measured)

    def _excess(self, sample: Sample) -> Reason | None:
        """A rate that the machine cannot reach was not measured but made up."""
        if (impossible := roofline.impossible([sample])) is not None:
            return impossible
        if self._peaks is None:
            return None
        problem = Problem.parse(sample.case.problem)
        cache, dtype = roofline.cache_bytes(sample.device), roofline.dtype_name(problem)
        return roofline.excess(min(sample.subject), roofline.work(problem), dtype, self._peaks, cache=cache)


def _as_timed(case: Case, wanted: TimedCase) -> Case:
    """The case with one input distribution and its candidate.

    Power, and with it the clock, depends on the data: uniform in [-1, 1] where the problem has such values.
    """
    from pytest_gemm.operands.distributions import distributions_for

    distributions = distributions_for(case.problem)
    return dataclasses.replace(
        case,
        distributions=("rand",) if "rand" in distributions else distributions[:1],
        candidates=CandidateSelection(wanted.ranked[0] if wanted.ranked else case.candidates.text or "winner"),
        spared=frozenset(wanted.spared),
    )


def others(
    wanted: TimedCase,
    chosen: Sequence[str],
    regret: int,
    listed: Callable[[], Sequence[str]],
    withheld: Callable[[str], object],
) -> list[str]:
    """The candidates that are timed beside the selected one.

    The one of the baseline, where another one is selected now and it is still a candidate.  Then as many as
    ``--gemm-regret`` asks for: those that autotuning found nearly as fast; where it has timed none, some from all over
    the list.

    Args:
        wanted: the case.
        chosen: what is selected.
        regret: value of ``--gemm-regret``.
        listed: all candidates of the problem.
        withheld: whether the ledger forbids to run a candidate.
    """

    def allowed(names: Sequence[str]) -> list[str]:
        return [name for name in names if name not in chosen and not withheld(name)]

    before = allowed([wanted.before]) if wanted.before and chosen else []
    found = [name for name in before if name in wanted.ranked or name in listed()]
    if regret:
        names = allowed(wanted.ranked)
        found += names[:regret] or CandidateSelection(str(regret)).of(allowed(listed()))
    return list(dict.fromkeys(found))


def _tell(file: Path, text: str) -> None:
    """Replace a file that the run may be reading."""
    files.replace(file, text.encode(), durable=False)


def _wait_for(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def _same(first: tuple[torch.Tensor, ...], last: Any) -> bool:
    """Whether what a call returned, a tensor or a tuple of them, is the same as these tensors, bit for bit."""
    from pytest_gemm.judging.results import differing
    from pytest_gemm.worker.calls import ordinary
    from pytest_gemm.worker.inline import as_tuple

    try:
        now = tuple(map(ordinary, as_tuple(last)))
    except Misconduct:
        return False
    alike = [(x.shape, x.dtype) for x in now] == [(x.shape, x.dtype) for x in first]
    return alike and not any(map(differing, now, first))


# -- the process ---------------------------------------------------------------------------------------------


class _Plugin:
    """Takes the place of collection in a worker process."""

    __name__ = WORKER

    def __init__(self, request: Request, folder: Path) -> None:
        self.request = request
        self.folder = folder
        self._known: frozenset[str] = frozenset()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_load_initial_conftests(self, early_config: pytest.Config) -> Generator[None, object, object]:
        """Note which options exist before the conftests add theirs."""
        self._known = frozenset(vars(early_config.known_args_namespace))
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Give the options of this plugin and of conftests the run's values."""
        for name, value in self.request.project.options.items():
            if name.startswith("gemm_") or (name not in self._known and hasattr(config.option, name)):
                setattr(config.option, name, value)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        """Answer the request."""
        config = session.config.stash[CONFIG]
        config = dataclasses.replace(config, threads=config.speed.threads, loading=self.request.project.loading)
        answer(self.request, self.folder, config)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> bool:
        """There are no tests."""
        return True


def answer(request: Request, folder: Path, config: GemmConfig) -> None:
    """Time the cases of a request and write their samples."""
    import torch

    from pytest_gemm.judging.case import Case

    torch.set_num_threads(config.threads)
    # torch and a compiler are millions of objects that every full collection would go through.
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, *gc.get_threshold()[1:])
    meter = Meter(request, folder, config)
    device, candidates = Device(request.device), CandidateSelection(config.wanted_candidates)
    for wanted in request.cases:
        backend, problem = config.registry[wanted.backend], Problem.parse(wanted.problem)
        meter(Case(backend, problem, (), config.seed, device, candidates), wanted)
    meter.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer the request in the file that the command line names; returns the exit status."""
    (file,) = map(Path, sys.argv[1:] if arguments is None else arguments)
    request = Request.read(file)
    # It runs no test: nothing is rewritten, and pytest does not warn that this package is imported already.
    arguments = ["--assert=plain", *request.project.arguments()]
    if request.environment:
        project = (request.project.folder, request.project.root)
        sys.meta_path.insert(0, InstalledFirst(project, request.environment))
    status = int(pytest.main(arguments, plugins=[_Plugin(request, file.parent)]))
    return 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else status


if __name__ == "__main__":
    termination.end_soon(ended := main())
    raise SystemExit(ended)
