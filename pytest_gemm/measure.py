"""One session: a fresh process that compiles, judges and times the cases of a request, and writes down each at once.

The run that started it (see :mod:`pytest_gemm.sessions`) leaves ``request.json`` in a folder of the session's own and
reads ``session.jsonl`` there.  While a case is at work its name stands in ``now.txt``, so that a process that dies has
said in which.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_gemm import machine, roofline, timing
from pytest_gemm.backend import Backend, Choosing, Dropped, Prepared, Timeable, Unsupported
from pytest_gemm.config import GemmConfig
from pytest_gemm.outcome import Outcome, Reason, Status
from pytest_gemm.problem import Problem
from pytest_gemm.speed import CaseKey, Ceilings, Sample, Session, sample_line, session_line

if TYPE_CHECKING:
    from pytest_gemm.judge import Case, Judge
    from pytest_gemm.operands import Operands

__all__ = ["NOW", "REQUEST", "SESSION", "Meter", "Request"]

REQUEST: Final = "request.json"
SESSION: Final = "session.jsonl"
NOW: Final = "now.txt"


@dataclasses.dataclass(frozen=True)
class Request:
    """What one session is asked for.

    Attributes:
        cases: backend and problem line of each, in the order in which they are to be timed.
        device: all of them compute there.
        arm, index: see :class:`pytest_gemm.speed.Session`.
        timed: ``False`` to compile and judge only, which fills the compilers' caches and may be done in parallel.
        ceilings: of the machine; ``None``: measure them.
        commit: of the tree that is measured.
        plan: fields of :class:`pytest_gemm.timing.Plan` that differ from its defaults.
    """

    cases: tuple[tuple[str, str], ...]
    device: str
    arm: str = "head"
    index: int = 0
    timed: bool = True
    ceilings: Ceilings | None = None
    commit: str = ""
    plan: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Leave it for the process that is to answer."""
        (folder / REQUEST).write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Request:
        """The request in a folder."""
        data = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
        ceilings = Ceilings(**data["ceilings"]) if data["ceilings"] else None
        return cls(**{**data, "cases": tuple(map(tuple, data["cases"])), "ceilings": ceilings})


class Meter:
    """Answers a request, case by case.

    Args:
        config: of the run.
        judge: who judges what was timed.
        may_run_eager: whether eager ATen may run a problem on a device, or would kill the process.
    """

    def __init__(self, config: GemmConfig, judge: Judge, may_run_eager: Callable[[Problem, str], bool]) -> None:
        assert config.speed.session is not None
        self.folder = config.speed.session
        self.request = Request.read(self.folder)
        self.plan = timing.Plan(**self.request.plan)
        self._config = config
        self._judge = judge
        self._may_run_eager = may_run_eager
        self._timers: dict[str, timing.Timer] = {}
        self._started = time.perf_counter()
        self._parent = os.getppid()
        self._is_cross_checked = False
        self._readings: list[tuple[timing.Readings, str, float]] = []
        self._ceilings = self.request.ceilings
        self._write(session_line(self._head()))

    def __call__(self, case: Case) -> list[Sample]:
        """Compile, judge and time a case: a sample for each choice that the case asks for."""
        from pytest_gemm.judge import Case as JudgedCase
        from pytest_gemm.operands import fillings_for

        if os.getppid() != self._parent:  # nobody reads the answer, and the next run may be timing by now
            pytest.exit("the run that asked for this session is gone", returncode=3)
        (self.folder / NOW).write_text(f"{case.backend.name} {case.problem.line}", encoding="utf-8")
        fillings = fillings_for(case.problem)
        # Power, and with it the clock, depends on the data: uniform in [-1, 1] where the problem has such values.
        filling = ("rand",) if "rand" in fillings else fillings[:1]
        timed = JudgedCase(case.backend, case.problem, filling, case.seed, case.device, case.choices or "winner")
        started, compiled = time.perf_counter(), 0.0
        samples: list[Sample] = []
        last: dict[str, Outcome] = {}
        self._readings.clear()
        for outcome in self._judge.judge(timed, timing=self._time if self.request.timed else None):
            compiled += outcome.seconds.compile
            if outcome.status is Status.DROPPED and outcome.choice != "" and timed.choices in {"winner", "one"}:
                continue  # left out by autotuning, which is no case of its own
            if self._readings:
                spent = {"prepare": compiled, "judge": time.perf_counter() - started - compiled}
                samples.append(self._sample(case, outcome, *self._readings.pop(), spent))
                last.pop(outcome.choice, None)
                started, compiled = time.perf_counter(), 0.0
            elif outcome.choice not in last or last[outcome.choice].status is Status.PASSED:
                last[outcome.choice] = outcome
        # What was not timed: a case that failed before, or a session that only judges.
        spent = {"prepare": compiled, "judge": time.perf_counter() - started - compiled}
        samples += [_sample(case, outcome, spent) for outcome in last.values()]
        for sample in samples:
            self._write(sample_line(sample))
        (self.folder / NOW).unlink()
        return samples

    def close(self) -> None:
        """All cases have been asked for."""
        self._write(json.dumps({"end": {"seconds": round(time.perf_counter() - self._started, 3)}}) + "\n")

    # -- parts -------------------------------------------------------------------------------------------

    def _head(self) -> Session:
        request, device = self.request, self.request.device
        key = machine.hardware_key("cuda" if device == "cuda" else "cpu", self._config.threads)
        if self._ceilings is None and request.timed:
            dtypes = sorted({roofline.dtype_name(Problem.parse(line)) for _, line in request.cases})
            self._ceilings = roofline.measure(device, dtypes, self._config.threads)
        return Session(
            hardware=key,
            software=machine.software("cuda" if device == "cuda" else "cpu"),
            contract=self.plan.contract(),
            arm=request.arm,
            index=request.index,
            date=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            commit=request.commit,
            ceilings=self._ceilings or Ceilings(),
        )

    def _write(self, line: str) -> None:
        with (self.folder / SESSION).open("a", encoding="utf-8") as file:
            file.write(line)

    def _time(self, case: Case, prepared: Prepared, given: Operands) -> object:
        """Time what has passed; the last result goes back to the judge."""
        started = time.perf_counter()
        with contextlib.ExitStack() as stack:
            name, comparator = self._comparator(case, given)
            arms = [prepared, *([comparator] if comparator else [])]
            rivals = self._rivals(case, prepared, given)
            calls = [self._calls(stack, one, case, given) for one in (*arms, *rivals.values())]
            subject, others = calls[0], calls[1:]
            readings = timing.measure(
                subject,
                others.pop(0) if comparator else None,
                dict(zip(rivals, others, strict=True)),
                timer=self._timer(case.device),
                plan=self.plan,
            )
            if case.device == "cuda":
                readings = self._cross_checked(readings, subject)
            result = subject[0]()
            if case.device == "cuda":
                import torch

                torch.cuda.synchronize()
        self._readings.append((readings, name, time.perf_counter() - started))
        return result

    def _cross_checked(self, readings: timing.Readings, calls: list[Callable[[], object]]) -> timing.Readings:
        """The first readings of this process held against the profiler's device time, a second instrument."""
        if self._is_cross_checked:
            return readings
        self._is_cross_checked = True
        ratio = timing.cross_check(calls, min(readings.subject))
        if ratio is None:
            return readings
        return dataclasses.replace(readings, telemetry={**readings.telemetry, "timer_over_profiler": ratio})

    def _calls(
        self, stack: contextlib.ExitStack, prepared: Prepared, case: Case, given: Operands
    ) -> list[Callable[[], object]]:
        """What to call in turn: on a GPU with as many sets of operands as its cache does not hold."""
        from pytest_gemm import operands

        count = timing.rotation(int(roofline.work(case.problem).bytes), case.device)
        more = (operands.make(case.problem, given.filling, case.seed + i, case.device) for i in range(1, count))
        sets = [given, *more]
        return [stack.enter_context(_timed(prepared, one)) for one in sets]

    def _timer(self, device: str) -> timing.Timer:
        if device not in self._timers:
            self._timers[device] = timing.CudaTimer() if device == "cuda" else timing.CpuTimer()
        return self._timers[device]

    def _comparator(self, case: Case, given: Operands) -> tuple[str, Prepared | None]:
        """Who is timed beside the case, if anybody can compute it: nobody beside itself."""
        name = self._config.speed.comparator
        if not name or name == case.backend.name:
            return "", None
        backend: Backend = self._config.registry[name]
        if backend.supports(case.problem) is not None:
            return "", None
        if name == "aten" and not self._may_run_eager(case.problem, case.device):
            return "", None
        try:
            return name, backend.prepare(case.problem, given)
        except (Unsupported, Dropped):
            return "", None

    def _rivals(self, case: Case, prepared: Prepared, given: Operands) -> dict[str, Prepared]:
        """Other candidates of the problem, as many as ``--gemm-regret`` asks for."""
        from pytest_gemm.judge import picked

        count, backend = self._config.speed.regret, case.backend
        if not count or not isinstance(backend, Choosing):
            return {}
        mine = frozenset(prepared.proof().chosen)
        names = [name for name in backend.choices(case.problem, given) if name not in mine]
        found = {}
        for name in picked(names, str(count)):
            with contextlib.suppress(Dropped, Unsupported):
                found[name] = backend.prepare_choice(case.problem, given, name)
        return found

    def _sample(
        self,
        case: Case,
        outcome: Outcome,
        readings: timing.Readings,
        comparator: str,
        timed: float,
        spent: Mapping[str, float],
    ) -> Sample:
        sample = dataclasses.replace(
            _sample(case, outcome, {**spent, "judge": max(0.0, spent["judge"] - timed), "time": timed}),
            subject=readings.subject,
            comparator=readings.comparator,
            comparator_name=comparator,
            calls=readings.calls,
            retaken=readings.retaken,
            disturbed=readings.disturbed,
            rivals=readings.rivals,
            telemetry=readings.telemetry,
        )
        excess = self._excess(case, sample) if sample.is_timed else None
        if excess is not None:
            # The result was right, so the fault is the clock's or the ceilings': no figure to keep, and no failure.
            sample = dataclasses.replace(sample, disturbed=str(excess))
        return sample

    def _excess(self, case: Case, sample: Sample) -> Reason | None:
        """A rate that the machine cannot reach was not measured but made up."""
        if self._ceilings is None:
            return None
        name = roofline.dtype_name(case.problem)
        cache = None
        if case.device == "cuda":
            import torch

            cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        return roofline.excess(sample.best, roofline.work(case.problem), name, self._ceilings, cache=cache)


def _sample(case: Case, outcome: Outcome, phases: Mapping[str, float]) -> Sample:
    """An outcome as a sample without readings."""
    return Sample(
        case=CaseKey(outcome.backend, outcome.problem, outcome.choice),
        device=case.device,
        status=outcome.status,
        reason=outcome.reason,
        picked=outcome.chosen,
        kernels=outcome.kernels,
        phases=phases,
    )


@contextlib.contextmanager
def _timed(prepared: Prepared, given: Operands) -> Iterator[Callable[[], object]]:
    """The call to time; a backend that is not :class:`Timeable` is timed with all that its ``run`` does."""
    if isinstance(prepared, Timeable):
        with prepared.timed(given) as call:
            yield call
    else:
        yield lambda: prepared.run(given)
