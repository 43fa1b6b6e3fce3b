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
import itertools
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

from pytest_gemm.api.request import DEFAULT
from pytest_gemm.config import effect
from pytest_gemm.config.config import CONFIG, SPEED_WORKER, GemmConfig
from pytest_gemm.core.case_id import CandidateSelection, CaseId, Device
from pytest_gemm.core.outcome import Activity, Misconduct, Outcome, Phase, Pruned, Reason, Status, Unsupported
from pytest_gemm.failures.text import Rerun
from pytest_gemm.machine import key as key_module
from pytest_gemm.machine import processor, software
from pytest_gemm.problem.problem import Problem
from pytest_gemm.speed import bench, roofline
from pytest_gemm.speed.data import INTERLEAVED, Peaks, Sample, Session, end_line, sample_line, session_line
from pytest_gemm.speed.imports import InstalledFirst, shared
from pytest_gemm.speed.kept import BRIEF, Kept, beside
from pytest_gemm.speed.lockstep import Interleaving
from pytest_gemm.speed.request import LOST, NOW, SESSION, UNWRITTEN, Request, TimedCase
from pytest_gemm.speed.timing import clock, paired
from pytest_gemm.storage import files
from pytest_gemm.worker.keeper import KEEPER, Keeper
from pytest_gemm.worker.messages import Built, Died, How, Job, Ran, Thrown

if TYPE_CHECKING:
    from pytest_gemm.api.protocols import Backend
    from pytest_gemm.judging.case import Case, Judged
    from pytest_gemm.operands.tensors import Operands
    from pytest_gemm.run.orchestrator import Orchestrator
    from pytest_gemm.worker.inline import Inline
    from pytest_gemm.worker.process import Process


@dataclasses.dataclass
class _Work:
    """A case that has passed and is being timed.

    Attributes:
        kept: the case as it was judged, with its one candidate, and what was built of it.
        comparator: name of what is timed beside it, "" for nothing.
        deaths: how many of its worker's processes had ended when it was kept.
        outcome: of the judgement.
        phases: seconds that it took so far.
        windows: what was measured so far.
        looked: the window, by chance, behind which its calls are timed from here and its threads are counted.
    """

    kept: Kept
    comparator: str
    deaths: int
    outcome: Outcome
    phases: dict[str, float]
    windows: list[paired.Readings] = dataclasses.field(default_factory=list)
    looked: int = dataclasses.field(default_factory=lambda: random.SystemRandom().randrange(_FEWEST_WINDOWS))

    @property
    def case(self) -> Case:
        """As it was judged."""
        return self.kept.case

    @property
    def is_lost(self) -> bool:
        """Whether the process that had it has ended."""
        return self.kept.worker.deaths > self.deaths


# On a CPU each window is short, for it is the next one that sees another state of the machine.  Nothing is retaken: the
# median over the windows leaves out what a guard would.
_WINDOW: Final = paired.Plan(blocks=1, warm_seconds=0.0, retakes=0, guard=10.0)
# Operands of cases that wait for their next window; what they need beside that (packed weights) is about as much again.
_WAITING_BYTES: Final = 2 << 30
# By which a process does not compute what it is asked for.
_FAULTS: Final = (Unsupported, Pruned, Misconduct, Thrown, Died)
_REPLACED: Final = "a conftest or a plugin has replaced functions that time: {}"
# Seconds in which threads of OpenMP go to sleep behind a call, and between two looks at them.
_SPIN: Final = 0.25
_LOOK: Final = 0.001
# Rounds of windows between two times of the comparator in its own process, which cost half of a window each.
_ROUNDS: Final = 8
_FEWEST_WINDOWS: Final = 3
_MOST_WINDOWS: Final = 1000
# Allocations between two collections of young objects; a compile makes hundreds of thousands of short-lived ones.
_GC_THRESHOLD: Final = 50_000
# Under which a CPU session runs, see runner.py: threads bound, large pages; and how threads wait.  In the contract.
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
        keeper: starts the kernels' processes; ``None`` where kernels run in this one.
    """

    def __init__(self, request: Request, folder: Path, config: GemmConfig, keeper: Keeper | None = None) -> None:
        from pytest_gemm.backends.aten import AtenBackend
        from pytest_gemm.judging.judge import Judge
        from pytest_gemm.run.known import eager_refusal
        from pytest_gemm.worker.inline import Inline
        from pytest_gemm.worker.process import Workers

        self.folder = folder
        self.request = request
        self.windows = config.speed.windows if request.device == "cpu" else 1
        self.plan = dataclasses.replace(_WINDOW if self.windows > 1 else paired.Plan(), seed=request.index)
        self._config = config
        self._eager_refusal = eager_refusal(config.ledger)
        inline, processes = Inline(bench.CALLS), None if keeper is None else Workers(keeper, config.limits)
        self._workers: Callable[[Backend], Process | Inline] = processes or (lambda _: inline)
        self._end_workers = inline.close if processes is None else processes.close
        self._pytorch = self._workers(AtenBackend())
        self._judge = Judge(
            self._eager_refusal, config.reference, statements=config.ledger.statements, workers=self._workers
        )
        self._started = time.perf_counter()
        self._interleaving = Interleaving(request.socket, first=request.begins)
        self._parent = os.getppid()
        self._lost: dict[str, str] = {}  # why a file could not be written, by the option that asks for it
        self._works: list[_Work] = []
        self._alone: dict[Problem, tuple[Kept, list[float]]] = {}  # the comparator, and seconds of its calls
        self._begun: dict[Process | Inline, int] = {}  # after how many of its deaths its clocks were looked at
        self._last = 0  # the process that has timed last
        self._doubtful: list[Sample] = []  # above the roofline, of which the peaks are measured once more at the end
        self._peaks = request.peaks or (self._measured_peaks() if request.timed else None)
        self._session = self._head()
        self._write(session_line(self._session))

    def __call__(self, case: Case, wanted: TimedCase) -> None:
        """Compile and judge a case; if it passes it is timed, now or when the others are as far."""
        from pytest_gemm.run.orchestrator import Orchestrator  # which imports torch

        run = Orchestrator(self._config, self._judge, wanted.test)
        if self.request.timed and self._begun.get(worker := self._workers(case.backend), -1) < worker.deaths:
            self._begin(worker)
        with self._at_work(case):
            if held := run.withheld(case):
                self._keep(case.device, held, {})
            else:
                self._judged(_as_timed(case, wanted), wanted, run)
        self._leave_if_lost()
        waiting = (*(work.case.problem for work in self._works), *self._alone)
        if self.windows == 1 or sum(roofline.work(one).bytes for one in waiting) > _WAITING_BYTES:
            self._time_all()

    def _begin(self, worker: Process | Inline) -> None:
        """Look at the clocks of a kernels' process before it runs a kernel."""
        if names := worker.call(list[str], "begin", self.request.device):
            raise pytest.UsageError(_REPLACED.format(", ".join(names)))
        self._begun[worker] = worker.deaths

    def close(self) -> None:
        """Time what is left, and end the session."""
        self._time_all()
        if self._peaks is not None and self._doubtful:
            self._peaks = self._peaks.or_higher(self._measured_peaks())
            self._write(session_line(replace(self._session, peaks=self._peaks)))
            self._write("".join(sample_line(self._bounded(sample)) for sample in self._doubtful))
        self._interleaving.close()
        self._write(end_line(time.perf_counter() - self._started))
        self._end_workers()

    def _leave_if_lost(self) -> None:
        """End the session where cases that wait have lost what was compiled, with the process that had it."""
        if any(work.is_lost for work in self._works):
            self._end_workers()
            os._exit(LOST)

    def _measured_peaks(self) -> Peaks:
        dtypes = sorted({roofline.dtype_name(Problem.parse(one.case.problem)) for one in self.request.cases})
        with self._interleaving.round(), self._interleaving.window():
            return self._pytorch.call(Peaks, "peaks", self.request.device, dtypes)

    def _head(self) -> Session:
        request = self.request
        device: key_module.Device = "cuda" if request.device == "cuda" else "cpu"
        conditions = f"{_CONDITIONS}{processor.waiting()}" if device == "cpu" else ""
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
            inductor=software.inductor(),
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
        if sample.is_timed and roofline.excess(bounded := self._bounded(sample)) is not None:
            self._doubtful.append(sample)
        else:
            self._write(sample_line(bounded if sample.is_timed else sample))

    @contextlib.contextmanager
    def _at_work(self, case: Case) -> Iterator[None]:
        """The name of the case stands in a file meanwhile, and stays there if the block does not end."""
        if os.getppid() != self._parent:  # the answer has no reader, and the next run may be timing by now
            pytest.exit("the run that started this session is gone", returncode=3)
        # The run may be reading it.
        files.replace(self.folder / NOW, f"{case.backend.name} {case.problem.line}".encode(), durable=False)
        yield
        (self.folder / NOW).unlink()

    # -- judging -----------------------------------------------------------------------------------------

    def _judged(self, case: Case, wanted: TimedCase, run: Orchestrator) -> None:
        """Judge a case; what passes is left to be timed, and of the rest the samples are written."""
        worker = self._workers(case.backend)
        passed: list[Callable[..., _Work]] = []  # what is being timed, until its outcome is there
        timings: dict[str, float] = {}

        def timing(case: Case, built: Built, given: Operands) -> Ran:
            """Make ready to be timed what has passed; the judge gets what a timed call returned."""
            if not self.request.timed:
                timings.clear()
                timings.update(built.timings)  # what the backend measured of its candidates
                return worker.run(built.number, given, How())
            ran = worker.run(built.number, given, How(Phase.TIME))
            name, comparator = self._comparator(case, given)
            kept = Kept(case, worker, built.number, ran)
            kept.keep(comparator, given)
            passed.append(functools.partial(_Work, kept, name, worker.deaths))
            return ran

        started, compiled = time.perf_counter(), 0.0

        def spent() -> dict[str, float]:
            return {"prepare": compiled, "judge": time.perf_counter() - started - compiled}

        last: dict[str, Outcome] = {}
        found: list[Judged] = []
        # What is named was selected by the backend itself, even if the ledger withholds the candidate.
        for judged in (self._judge.judge if wanted.selected else run.judged)(case, timing=timing):
            found.append(judged)
            outcome = judged.outcome
            compiled += outcome.seconds.compile
            pruned = outcome.status is Status.PRUNED
            if pruned and outcome.candidate and case.candidates.by_backend:
                continue  # left out by autotuning, which is no case of its own
            if wanted.selected:  # which candidate it was is a fact of the case, as where autotuning has selected it
                status = Status.CRASHED if pruned else outcome.status
                outcome = dataclasses.replace(outcome, case=case.id(), status=status)
            work = passed.pop() if passed else None
            if work is not None and outcome.status is Status.PASSED:
                self._works.append(work(outcome=outcome, phases={**spent(), "time": 0.0}))
                last.pop(outcome.candidate, None)
                started, compiled = time.perf_counter(), 0.0
            elif outcome.candidate not in last or last[outcome.candidate].status is Status.PASSED:
                last[outcome.candidate] = outcome
        if any(judged.evidence for judged in found):
            # Judged by the conformance suite, which takes any problem: the test that timed it would time it again.
            rerun = effect.rerun_options(self._config, case.backend.name, timed=False)
            why = run.explained(case, found)[0]
            self._lost |= run.keep(case, why, Rerun("--pyargs pytest_gemm.conformance", rerun))
            files.replace(self.folder / UNWRITTEN, msgspec.json.encode(self._lost), durable=False)
        ranking = tuple(sorted((name for name, one in timings.items() if math.isfinite(one)), key=timings.__getitem__))
        phases = spent()
        for outcome in last.values():  # what is not timed: a case that failed, or a session that only judges
            self._keep(case.device, outcome, phases, ranking=ranking)

    def _comparator(self, case: Case, given: Operands) -> tuple[str, int]:
        """The comparator of a case, if one can compute it, and its number; none is timed beside itself."""
        name = self._config.speed.comparator
        if not name or name == case.backend.name or (name == "aten" and self._eager_refusal(case.problem, case.device)):
            return "", 0
        comparator = dataclasses.replace(case, backend=self._config.registry[name])
        try:
            kept = _built(comparator, self._workers(case.backend), given)
        except (Unsupported, Pruned, Misconduct, Thrown):  # not a fault of the subject; the sample has no comparator
            return "", 0
        own = self._workers(comparator.backend)
        if own is not kept.worker and case.device == "cpu" and case.problem not in self._alone:
            with contextlib.suppress(*_FAULTS), own.watch(Activity(comparator.id(), Phase.TIME)):
                alone = _built(comparator, own, given)
                alone.keep(0, given)
                self._alone[case.problem] = alone, []
        return name, kept.number

    # -- timing ------------------------------------------------------------------------------------------

    def _time_all(self) -> None:
        """Time the cases that wait, window by window, and judge their last results."""

        def place(work: _Work, window: int) -> list[float]:
            """Another order in each window, process by process; a case that only the other side has changes nothing."""
            name = work.case.backend.name
            source = "" if work.kept.worker is self._pytorch else name
            seeds = [f"{self.request.index} {window} {one}" for one in (source, f"{name} {work.case.problem}")]
            return [random.Random(seed).random() for seed in seeds]

        with self._interleaving.round():
            for window in range(self.windows):
                if window % _ROUNDS == 0:
                    self._time_alone()
                for work in sorted(self._works, key=lambda work: place(work, window)):
                    if len(work.windows) < _FEWEST_WINDOWS or work.phases["time"] < self.plan.max_seconds:
                        with self._interleaving.window(), self._at_work(work.case):
                            self._settle(work.kept.worker)
                            self._window(work)
            self._time_alone()
        for work in self._works:
            with self._at_work(work.case):
                self._finish(work)
        self._works.clear()
        for alone, _ in self._alone.values():
            alone.drop()
        self._alone.clear()

    def _time_alone(self) -> None:
        """Time the comparator in its own process, before and behind some rounds of windows."""
        for problem, (alone, seconds) in list(self._alone.items()):
            with self._interleaving.window():
                self._settle(alone.worker)
                try:
                    seconds.append(min(alone.window(BRIEF, is_looked_at=False).subject))
                except _FAULTS:
                    del self._alone[problem]

    def _settle(self, worker: Process | Inline) -> None:
        """Wait until the threads of another process that has just timed sleep: OpenMP's spin behind a call."""
        last, self._last = self._last, worker.pid
        until = clock.now() + _SPIN
        while last != self._last and any(map(processor.is_runnable, processor.ran(last))) and clock.now() < until:
            time.sleep(_LOOK)

    def _window(self, work: _Work) -> None:
        """Time one case for a while."""
        if work.outcome.status is not Status.PASSED:
            return
        started = time.perf_counter()
        # The order of the readings is drawn anew in each window.
        plan = dataclasses.replace(self.plan, seed=_MOST_WINDOWS * self.plan.seed + len(work.windows))
        is_looked_at = len(work.windows) == min(work.looked, self.windows - 1)
        try:
            readings = work.kept.window(plan, is_looked_at=is_looked_at)
        except Misconduct as error:
            status, reason = Status.INCORRECT, error.reason
        except Died as error:  # it has passed before, and does no longer
            status, reason = Status.TIMED_OUT if error.limit else Status.CRASHED, error.reason
        except Thrown as error:
            status = Status.CRASHED
            reason = error.lost or Reason(f"time-{error.kind}", f"{error.kind} while it was timed: {error.line}")
        else:
            work.windows.append(readings)
            work.phases["time"] += time.perf_counter() - started
            return
        work.outcome = dataclasses.replace(work.outcome, status=status, reason=reason)
        if work.is_lost:
            self._works.remove(work)
            self._finish(work)
            self._leave_if_lost()

    def _finish(self, work: _Work) -> None:
        """Write the case's sample, after its last result has been compared with the one that was judged."""
        outcome, measured = work.outcome, {}
        if outcome.status is Status.PASSED and work.windows:
            reason = work.kept.wrong(self._judge, outcome.distribution)
            if reason is not None:
                outcome = dataclasses.replace(outcome, status=Status.INCORRECT, reason=reason)
        if work.outcome.status in {Status.PASSED, Status.INCORRECT}:  # else its process may be gone
            work.kept.drop()
        if outcome.status is Status.PASSED and work.windows:
            alone, seconds = self._alone.get(work.case.problem, (work.kept, []))
            if alone.worker is not work.kept.worker:
                around = list(itertools.pairwise(seconds))
                work.windows = [beside(one, around[n // _ROUNDS], min(seconds)) for n, one in enumerate(work.windows)]
            units = roofline.units(work.case.device)
            measured = {
                **vars(paired.merged(work.windows)),
                "comparator_name": work.comparator,
                "least": units and roofline.least_seconds(work.case.problem, units),
            }
        self._keep(work.case.device, outcome, work.phases, **measured)

    def _bounded(self, sample: Sample) -> Sample:
        """A timed sample with what its calls take at least by the measured peaks; disturbed where a reading is faster.

        One session alone does not fail the case: the peaks may have been measured beside a load.
        """
        problem = Problem.parse(sample.case.problem)
        floor = roofline.floor(problem, self._peaks or Peaks(), sample.device)
        sample = replace(sample, **floor._asdict())
        excess = roofline.impossible([sample]) or roofline.excess(sample)
        return sample if excess is None else replace(sample, disturbed=str(excess))


def _built(case: Case, worker: Process | Inline, given: Operands) -> Kept:
    """What a backend makes of a case, after a first run."""
    job = Job(case.backend, case.problem, DEFAULT)
    worker.supports(job)
    number = worker.prepare(job, given).number
    return Kept(case, worker, number, worker.run(number, given, How()))


def _as_timed(case: Case, wanted: TimedCase) -> Case:
    """The case with one input distribution and its candidate.

    Power, and with it the clock, depends on the data: uniform in [-1, 1] where the problem has such values.
    """
    from pytest_gemm.operands.distributions import distributions_for

    distributions = distributions_for(case.problem)
    return dataclasses.replace(
        case,
        distributions=("rand",) if "rand" in distributions else distributions[:1],
        candidates=CandidateSelection(wanted.selected or case.candidates.text or "winner"),
    )


# -- the process ---------------------------------------------------------------------------------------------


class _Plugin:
    """Takes the place of collection in a worker process."""

    __name__ = SPEED_WORKER

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
        try:
            answer(self.request, self.folder, config, session.config.stash.get(KEEPER, None))
        except OSError as error:  # of a file of the session, for instance on a full disk
            raise pytest.UsageError(f"{error.filename or self.folder}: {error.strerror}") from None
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> bool:
        """There are no tests."""
        return True


def answer(request: Request, folder: Path, config: GemmConfig, keeper: Keeper | None = None) -> None:
    """Time the cases of a request and write their samples.

    Raises:
        pytest.UsageError: where a conftest or a plugin has replaced a clock.
    """
    if names := clock.restored():
        raise pytest.UsageError(_REPLACED.format(", ".join(names)))
    if keeper is not None:
        keeper.prepare(cuda=request.device == "cuda")
    import torch

    from pytest_gemm.judging.case import Case

    torch.set_num_threads(config.threads)
    # torch and a compiler are millions of objects that every full collection would go through.
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, *gc.get_threshold()[1:])
    meter = Meter(request, folder, config, keeper)
    device, candidates = Device(request.device), CandidateSelection(config.wanted_candidates)
    for wanted in request.cases:
        backend, problem = config.registry[wanted.case.backend], Problem.parse(wanted.case.problem)
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
    raise SystemExit(main())
