"""One session: a fresh process that compiles, judges and times the cases of a request, and stores each sample at once.

    python -m pytest_gemm.speed.worker FOLDER/request.json

The samples are written to ``session.jsonl`` in the folder of the request.  While a case is at work its name stands in
``now.txt``: a process that dies leaves the name of its last case.

The process runs pytest's start-up, so that the conftests of the project register their backends, and no test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import os
import random
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from msgspec.structs import replace

from pytest_gemm import effect
from pytest_gemm.api.protocols import Backend, CandidateBackend, Prepared, timed
from pytest_gemm.api.request import DEFAULT
from pytest_gemm.case_id import CandidateSelection, CaseId, Device
from pytest_gemm.config import CONFIG, GemmConfig
from pytest_gemm.isolation.journal import Diary
from pytest_gemm.isolation.limits import Watch
from pytest_gemm.machine import key as key_module
from pytest_gemm.machine import software
from pytest_gemm.outcome import Activity, Outcome, Phase, Pruned, Reason, Status, Unsupported
from pytest_gemm.problem.problem import Problem
from pytest_gemm.speed import roofline
from pytest_gemm.speed.data import INTERLEAVED, Peaks, Sample, Session, end_line, sample_line, session_line
from pytest_gemm.speed.lockstep import Interleaving
from pytest_gemm.speed.request import LOST, NOW, SESSION, WORKER, Request
from pytest_gemm.speed.timing import blocks, cpu, cuda
from pytest_gemm.speed.timing import plan as plan_module
from pytest_gemm.text import first_line

if TYPE_CHECKING:
    from pytest_gemm.judging.case import Case, Judged
    from pytest_gemm.judging.judge import Judge
    from pytest_gemm.operands.tensors import Operands


@dataclasses.dataclass
class _Work:
    """A case that has passed and is being timed.

    Attributes:
        case: as it was judged, for its one choice.
        prepared, given: what is called, on which operands.
        comparator, candidates: what is timed beside it, by name.
        first: the result that was judged.
        last: what the last timed call returned.
        outcome: of the judgement.
        windows: what was measured so far.
        calls: how many calls fill a visit, known from the first window on.
        phases: seconds that it took so far.
    """

    case: Case
    prepared: Prepared
    given: Operands
    comparator: tuple[str, Prepared | None]
    candidates: Mapping[str, Prepared]
    first: Any
    last: Any = None
    outcome: Outcome | None = None
    windows: list[plan_module.Readings] = dataclasses.field(default_factory=list)
    calls: dict[str, int] = dataclasses.field(default_factory=dict)
    phases: dict[str, float] = dataclasses.field(default_factory=dict)


# On a CPU each window is short, for it is the next one that sees another state of the machine.  Nothing is retaken: the
# median over the windows leaves out what a guard would.
_WINDOW: Final = plan_module.Plan(blocks=1, warm_seconds=0.0, retakes=0, guard=10.0)
# Operands of cases that wait for their next window; what they need beside that (packed weights) is about as much again.
_WAITING_BYTES: Final = 2 << 30
_FEWEST_WINDOWS: Final = 3
_MOST_WINDOWS: Final = 1000
# Allocations between two collections of young objects; a compile makes hundreds of thousands of short-lived ones.
_GC_THRESHOLD: Final = 50_000
# Under which a CPU session runs, see sessions.py: threads bound, large pages.  Part of the contract.
_CONDITIONS: Final = "-bound-huge"


class Meter:
    """Answers a request.

    On a CPU the cases are judged first, and then timed in turn, over and over: a window of each, then the next window
    of each, so that a state of the machine that lasts for seconds is not a session's whole truth on a case.  On a GPU,
    which is quieter and whose memory the operands fill, each case is timed when it has been judged.

    Args:
        request: what to time.
        folder: where the samples are written.
        config: of the run.
        judge: judges what was timed.
        eager_refusal: why eager ATen does not run a problem on a device, "" where it does.
        watch: limits the time of every activity that may not return.
    """

    def __init__(
        self,
        request: Request,
        folder: Path,
        config: GemmConfig,
        judge: Judge,
        eager_refusal: Callable[[Problem, str], str],
        watch: Callable[[Activity], AbstractContextManager[None]],
    ) -> None:
        self.folder = folder
        self.request = request
        self.windows = config.speed.windows if self.request.device == "cpu" else 1
        self.plan = dataclasses.replace(_WINDOW if self.windows > 1 else plan_module.Plan(), seed=self.request.index)
        self._config = config
        self._judge = judge
        self._eager_refusal = eager_refusal
        self._watch = watch
        self._timer: plan_module.Timer = cuda.CudaTimer() if self.request.device == "cuda" else cpu.CpuTimer()
        self._started = time.perf_counter()
        self._interleaving = Interleaving(request.socket, first=request.begins) if request.socket is not None else None
        self._parent = os.getppid()
        self._is_cross_checked = False
        self._timings: Mapping[str, float] = {}
        self._test = ""
        self._fresh: list[_Work] = []
        self._works: list[_Work] = []
        self._peaks = self.request.peaks
        self._write(session_line(self._head()))

    def __call__(self, case: Case, test: str) -> None:
        """Compile and judge a case; if it passes it is timed, now or when the others are as far.

        Args:
            case: what to time.
            test: name of the test function that asks.
        """
        from pytest_gemm.operands.distributions import distributions_for

        self._begin(case)
        self._test = test
        if held := self._withheld(case, ""):
            self._write(sample_line(_sample(case, held, {})))
            self._end()
            return
        distributions = distributions_for(case.problem)
        # Power, and with it the clock, depends on the data: uniform in [-1, 1] where the problem has such values.
        distribution = ("rand",) if "rand" in distributions else distributions[:1]
        pinned = self.request.pinned_of(case.backend.name, case.problem.line)
        candidates = CandidateSelection(pinned[0] if pinned else case.candidates.text or "winner")
        judged = dataclasses.replace(case, distributions=distribution, candidates=candidates)
        spared = self.request.spared.get(f"{case.backend.name} {case.problem.line}", ())
        judged = dataclasses.replace(judged, pruned=frozenset(spared))
        started, compiled = time.perf_counter(), 0.0
        last: dict[str, Outcome] = {}
        found: list[Judged] = []

        def withheld(choice: str) -> Outcome | None:
            return None if pinned else self._withheld(case, choice)  # the backend itself has selected what is pinned

        for outcome in self._outcomes(judged, withheld, found):
            compiled += outcome.seconds.compile
            if outcome.status is Status.PRUNED and outcome.candidate != "" and candidates.by_backend:
                continue  # left out by autotuning, which is no case of its own
            if pinned:  # which candidate it was is a fact of the case, as it is where autotuning has selected it here
                lost = outcome.status is Status.PRUNED
                outcome = dataclasses.replace(  # noqa: PLW2901  # the same outcome under the case's own name
                    outcome, case=judged.id(), status=Status.CRASHED if lost else outcome.status
                )
            if self._fresh and outcome.status is Status.PASSED:
                work = self._fresh.pop()
                work.outcome = outcome
                work.phases = {"prepare": compiled, "judge": time.perf_counter() - started - compiled, "time": 0.0}
                self._works.append(work)
                last.pop(outcome.candidate, None)
                started, compiled = time.perf_counter(), 0.0
            elif outcome.candidate not in last or last[outcome.candidate].status is Status.PASSED:
                last[outcome.candidate] = outcome
        self._fresh.clear()
        if self._config.artifacts is not None and not self._judge.has_lost(case.device):
            from pytest_gemm.failures import artifacts, text

            # Judged by the conformance suite, which takes any problem: the test that timed it would time it again.
            options = effect.rerun_options(self._config, case.backend.name, timed=False)
            rerun = text.Rerun("--pyargs pytest_gemm.conformance", options)
            artifacts.save(self._config.artifacts, found, judged, rerun)
        # What is not timed: a case that failed, or a session that only judges.
        spent = {"prepare": compiled, "judge": time.perf_counter() - started - compiled}
        ranking = tuple(sorted(self._timings, key=self._timings.__getitem__))
        for outcome in last.values():
            sample = replace(_sample(case, outcome, spent), ranking=ranking)
            seconds = tuple(self._timings[name] for name in ranking)
            self._write(sample_line(replace(sample, ranking_seconds=seconds)))
        self._timings = {}
        self._end()
        if self._judge.has_lost(case.device):
            os._exit(LOST)  # the context is gone; nothing that pytest would do now can reach the device either
        if self.windows == 1 or sum(roofline.work(w.case.problem).bytes for w in self._works) > _WAITING_BYTES:
            self._time_all()

    def close(self) -> None:
        """All cases have been asked for."""
        self._time_all()
        if self._interleaving:
            self._interleaving.close()
        self._write(end_line(time.perf_counter() - self._started))

    def _outcomes(
        self, case: Case, withheld: Callable[[str], Outcome | None], found: list[Judged]
    ) -> Iterator[Outcome]:
        """The outcomes of a case as they come; ``found`` has them with their evidence."""
        timing = self._take if self.request.timed else self._note_timings
        for judged in self._judge.judge(case, withheld=withheld, timing=timing):
            found.append(judged)
            yield judged.outcome

    def _withheld(self, case: Case, choice: str) -> Outcome | None:
        """The outcome of a case, or of one candidate of it, that the ledger forbids to run; ``None`` of any other."""
        from pytest_gemm.run.state import withheld

        held = withheld(self._config.ledger, case, self._test, choice)
        if held is None or held.reason is None:
            return held
        named = f"{held.known_failure}: {held.reason.text}"  # of an outcome a sample keeps the reason alone
        return dataclasses.replace(held, reason=dataclasses.replace(held.reason, text=named))

    def _begin(self, case: Case) -> None:
        if os.getppid() != self._parent:  # the answer has no reader, and the next run may be timing by now
            pytest.exit("the run that asked for this session is gone", returncode=3)
        (self.folder / NOW).write_text(f"{case.backend.name} {case.problem.line}", encoding="utf-8")

    def _end(self) -> None:
        (self.folder / NOW).unlink()

    # -- parts -------------------------------------------------------------------------------------------

    def _head(self) -> Session:
        request, device = self.request, self.request.device
        key = key_module.hardware_key("cuda" if device == "cuda" else "cpu", self._config.threads)
        if self._peaks is None and request.timed:
            dtypes = sorted({roofline.dtype_name(Problem.parse(line)) for _, line in request.cases})
            with self._round(), self._alone():
                self._peaks = roofline.measure(device, dtypes, self._config.threads)
        return Session(
            hardware=key,
            software=software.software("cuda" if device == "cuda" else "cpu"),
            contract=f"{self.plan.contract()}-{self.windows}{_CONDITIONS if device == 'cpu' else ''}"
            f"{INTERLEAVED if self._interleaving else ''}",
            group=request.group,
            index=request.index,
            date=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            commit=request.commit,
            peaks=self._peaks or Peaks(),
        )

    def _write(self, line: str) -> None:
        with (self.folder / SESSION).open("a", encoding="utf-8") as file:
            file.write(line)

    def _note_timings(self, _: Case, prepared: Prepared, given: Operands) -> object:
        """Remember what the backend measured of its candidates to pick one."""
        timings: Mapping[str, float] = getattr(prepared, "timings", {})
        self._timings = {name: seconds for name, seconds in timings.items() if math.isfinite(seconds)}
        return prepared.run(given)

    def _take(self, case: Case, prepared: Prepared, given: Operands) -> object:
        """Make ready to be timed what has passed; the judge sees what a timed call returns."""
        comparator, candidates = self._comparator(case, given), self._candidates(case, prepared, given)
        candidates = self._earlier(case, prepared, given) | candidates
        with timed(prepared, given) as call:
            first = call()
        _wait_for(case.device)
        self._fresh.append(_Work(case, prepared, given, comparator, candidates, first))
        return first

    def _time_all(self) -> None:
        """Time the cases that wait, window by window, and judge their last results."""

        def place(work: _Work, window: int) -> float:
            """Another order in each window; a case that only the other side of a pair has does not change it."""
            return random.Random(f"{self.request.index} {window} {work.case.backend.name} {work.case.problem}").random()

        with self._round():
            for window in range(self.windows):
                for work in sorted(self._works, key=lambda work: place(work, window)):
                    if len(work.windows) < _FEWEST_WINDOWS or work.phases["time"] < self.plan.max_seconds:
                        with self._alone():
                            self._begin(work.case)
                            self._window(work)
                            self._end()
        for work in self._works:
            self._begin(work.case)
            self._write(sample_line(self._sample(work)))
            self._end()
        self._works.clear()

    def _round(self) -> AbstractContextManager[None]:
        return self._interleaving.round() if self._interleaving else contextlib.nullcontext()

    def _alone(self) -> AbstractContextManager[None]:
        return self._interleaving.window() if self._interleaving else contextlib.nullcontext()

    def _window(self, work: _Work) -> None:
        """Time one case for a while."""
        if work.outcome is None or work.outcome.status is not Status.PASSED:
            return
        case, started = work.case, time.perf_counter()
        activity = Activity(case.id(), Phase.TIME, case.distributions[0], case.seed, device=case.device)
        try:
            with self._watch(activity), contextlib.ExitStack() as stack:
                _, comparator = work.comparator
                subject = self._calls(stack, work.prepared, work)
                beside = self._calls(stack, comparator, work) if comparator else None
                candidates = {name: self._calls(stack, one, work) for name, one in work.candidates.items()}
                # The order of visits is drawn anew in each window.
                plan = dataclasses.replace(self.plan, seed=_MOST_WINDOWS * self.plan.seed + len(work.windows))
                readings = blocks.measure(subject, beside, candidates, timer=self._timer, plan=plan, calls=work.calls)
                if case.device == "cuda":
                    readings = self._cross_checked(_with_latency(readings, subject, beside), subject)
                work.last = subject[0]()
                _wait_for(case.device)
        except Exception as error:  # of the backend: it has passed before, and does no longer
            first = first_line(error)
            reason = Reason(f"time-{type(error).__name__}", f"{type(error).__name__} while it was timed: {first}")
            work.outcome = dataclasses.replace(work.outcome, status=Status.CRASHED, reason=reason)
            return
        work.windows.append(readings)
        work.phases["time"] += time.perf_counter() - started

    def _sample(self, work: _Work) -> Sample:
        """The case's sample, after its last result has been held against the one that was judged."""
        assert work.outcome is not None
        outcome = work.outcome
        if outcome.status is Status.PASSED and not _same(work.first, work.last):
            candidates = CandidateSelection(outcome.candidate or work.case.candidates.text)
            again = dataclasses.replace(work.case, candidates=candidates)
            outcome = self._judge.outcomes(again, timing=lambda *_: work.last)[-1]
        if outcome.status is not Status.PASSED or not work.windows:
            return _sample(work.case, outcome, work.phases)
        readings = plan_module.merged(work.windows)
        sample = readings.sample(
            CaseId(outcome.backend, outcome.problem, outcome.candidate),
            work.case.device,
            outcome.status,
            comparator_name=work.comparator[0],
            selected=outcome.chosen,
            kernels=outcome.kernels,
            phases=work.phases,
            distribution=outcome.distribution,
        )
        excess = self._excess(work.case, sample)
        if excess is not None:
            # The result was right, so the fault is the clock's or the peaks': no figure to keep, and no failure.
            sample = replace(sample, disturbed=str(excess))
        return sample

    def _cross_checked(self, readings: plan_module.Readings, calls: list[Callable[[], object]]) -> plan_module.Readings:
        """The first readings of this process held against the profiler's device time, a second instrument."""
        if self._is_cross_checked:
            return readings
        self._is_cross_checked = True
        ratio = cuda.cross_check(calls, min(readings.subject))
        if ratio is None:
            return readings
        return dataclasses.replace(readings, telemetry={**readings.telemetry, "timer_over_profiler": ratio})

    def _calls(self, stack: contextlib.ExitStack, prepared: Prepared, work: _Work) -> list[Callable[[], object]]:
        """What to call in turn: on a GPU with as many sets of operands as its cache does not hold."""
        case, given = work.case, work.given
        count = cuda.rotation(int(roofline.work(case.problem).bytes), case.device)
        sets = [given, *(given.clone() for _ in range(1, count))]
        return [stack.enter_context(timed(prepared, one)) for one in sets]

    def _comparator(self, case: Case, given: Operands) -> tuple[str, Prepared | None]:
        """The comparator of a case, if one can compute it; none is timed beside itself."""
        name = self._config.speed.comparator
        if not name or name == case.backend.name:
            return "", None
        backend: Backend = self._config.registry[name]
        if backend.supports(case.problem, DEFAULT) is not None:
            return "", None
        if name == "aten" and self._eager_refusal(case.problem, case.device):
            return "", None
        try:
            comparator = backend.prepare(case.problem, given, DEFAULT)
            comparator.run(given)
        except Exception:  # not a fault of the subject; the sample says that it had no comparator
            return "", None
        return name, comparator

    def _candidates(self, case: Case, prepared: Prepared, given: Operands) -> dict[str, Prepared]:
        """Other candidates of the problem, as many as ``--gemm-regret`` asks for."""
        count, backend = self._config.speed.regret, case.backend
        if not count or not isinstance(backend, CandidateBackend):
            return {}
        mine = frozenset(prepared.proof().chosen)

        def others(names: Sequence[str]) -> list[str]:
            return [name for name in names if name not in mine and self._withheld(case, name) is None]

        ranked = others(self.request.pinned_of(backend.name, case.problem.line))
        names = others(backend.candidates(case.problem, given, case.request()).names) if not ranked else []
        found = {}
        # The ones that autotuning found nearly as fast; where it has timed none, some from all over the list.
        for name in ranked[:count] or CandidateSelection(str(count)).of(names):
            with contextlib.suppress(Pruned, Unsupported):
                found[name] = backend.prepare(case.problem, given, case.request(name))
        return found

    def _earlier(self, case: Case, prepared: Prepared, given: Operands) -> dict[str, Prepared]:
        """The pick of the baseline, where another one is selected now and it is still a candidate."""
        backend, found = case.backend, {}
        earlier = self.request.before.get(f"{backend.name} {case.problem.line}", "")
        if earlier and isinstance(backend, CandidateBackend):
            mine, ranked = prepared.proof().chosen, self.request.pinned_of(backend.name, case.problem.line)
            moved = bool(mine) and earlier not in mine and self._withheld(case, earlier) is None
            if moved and (
                earlier in ranked or earlier in backend.candidates(case.problem, given, case.request()).names
            ):
                with contextlib.suppress(Pruned, Unsupported):
                    found[earlier] = backend.prepare(case.problem, given, case.request(earlier))
        return found

    def _excess(self, case: Case, sample: Sample) -> Reason | None:
        """A rate that the machine cannot reach was not measured but made up."""
        if self._peaks is None:
            return None
        name = roofline.dtype_name(case.problem)
        cache = None
        if case.device == "cuda":
            import torch

            cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        return roofline.excess(min(sample.subject), roofline.work(case.problem), name, self._peaks, cache=cache)


def _sample(case: Case, outcome: Outcome, phases: Mapping[str, float]) -> Sample:
    """An outcome as a sample without readings."""
    return Sample(
        case=CaseId(outcome.backend, outcome.problem, outcome.candidate),
        device=case.device,
        status=outcome.status,
        reason=outcome.reason,
        selected=outcome.chosen,
        kernels=outcome.kernels,
        phases=phases,
        distribution=outcome.distribution,
    )


def _with_latency(
    readings: plan_module.Readings,
    subject: list[Callable[[], object]],
    comparator: list[Callable[[], object]] | None,
) -> plan_module.Readings:
    """With what a call costs from Python; on a CPU that is what is timed anyway."""
    calls = {"end_to_end_us": subject, "comparator_end_to_end_us": comparator}
    found = {name: 1e6 * cuda.latency(some) for name, some in calls.items() if some}
    return dataclasses.replace(readings, telemetry={**readings.telemetry, **found})


def _wait_for(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def _same(first: Any, last: Any) -> bool:
    """Whether two results, tensors or tuples of them, are the same bit for bit."""
    import torch

    pairs = zip(*(one if isinstance(one, tuple) else (one,) for one in (first, last)), strict=True)
    return all(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in pairs)


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
        answer(self.request, self.folder, dataclasses.replace(config, threads=config.speed.threads))
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> bool:
        """There are no tests."""
        return True


def answer(request: Request, folder: Path, config: GemmConfig) -> None:
    """Time the cases of a request and write their samples."""
    import torch

    from pytest_gemm.judging.case import Case
    from pytest_gemm.judging.judge import Judge
    from pytest_gemm.run.state import eager_refusal

    torch.set_num_threads(config.threads)
    # torch and a compiler are millions of objects that every full collection would visit.
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, *gc.get_threshold()[1:])
    refusal, watch = eager_refusal(config.ledger), Watch(config.timeout, config.compile_timeout, Diary(), stacks=2)
    meter = Meter(request, folder, config, Judge(refusal, watch, config.reference), refusal, watch)
    device, candidates = Device(request.device), CandidateSelection(config.choices)
    for name, line in request.cases:
        case = Case(config.registry[name], Problem.parse(line), (), config.seed, device, candidates)
        meter(case, request.project.tests.get(f"{name} {line}", ""))
    meter.close()
    watch.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer the request in the file that the command line names; returns the exit status."""
    (file,) = map(Path, sys.argv[1:] if arguments is None else arguments)
    request = Request.read(file)
    status = int(pytest.main(request.project.arguments(), plugins=[_Plugin(request, file.parent)]))
    return 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else status


if __name__ == "__main__":
    raise SystemExit(main())
