"""A right kernel's time beside ATen's, in interleaved blocks of one process."""

from __future__ import annotations

import dataclasses
from typing import Final

from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.core.outcome import Activity, Misconduct, Phase, Reason, Status, Unsupported
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.operands import tensors
from pytest_gemm.speed.data import Sample
from pytest_gemm.speed.kept import Kept
from pytest_gemm.speed.timing import paired
from pytest_gemm.tools.judgement import Speed
from pytest_gemm.worker.inline import Inline
from pytest_gemm.worker.messages import Died, How, Thrown
from pytest_gemm.worker.process import Process

# Of a window; the estimate is the median over the windows, as the gate's of a session.
_PLAN: Final = paired.Plan(blocks=7, warm_seconds=0.05, max_seconds=0.5, retakes=2)
_WINDOWS: Final = 3


def timed(case: Case, worker: Process | Inline, judge: Judge) -> Speed | str | Reason:
    """Time a kernel that has passed, with the threads that it was judged with.

    Args:
        case: that has passed.
        worker: the kernel's process, with :data:`speed.bench.CALLS`.
        judge: of the timed results.

    Returns:
        Its time; or why there is none: a sentence, or the reason for which the kernel is wrong.
    """
    given = tensors.make(case.problem, "rand", case.seed, case.device)
    case = dataclasses.replace(case, distributions=("rand",))
    try:
        with worker.watch(Activity(case.id(), Phase.TIME)):
            aten = dataclasses.replace(case, backend=AtenBackend())
            number, beside = [worker.prepare(one.job(), given).number for one in (case, aten)]
            kept = Kept(case, worker, number, worker.run(number, given, How(Phase.TIME)))
            kept.keep(beside, given)
        readings = paired.merged([kept.window(_PLAN, is_looked_at=n == 0) for n in range(_WINDOWS)])
        reason = kept.wrong(judge, "rand")
        kept.drop()
    except (Unsupported, Died, Thrown) as error:
        return str(error)
    except Misconduct as error:
        return error.reason
    if reason is not None or readings.disturbed:
        return reason or f"the machine was busy: {readings.disturbed.partition(';')[0]}"
    own, atens, windows = readings.subject, readings.comparator, readings.windows
    sample = Sample(case.id(), case.device, Status.PASSED, subject=own, comparator=atens, windows=windows)
    if sample.comparator_estimate is None:
        return "nothing was timed beside it"
    ratios = sorted(a / b for a, b in zip(own, atens, strict=True))
    low, high = (ratios[round(share * (len(ratios) - 1))] for share in (0.25, 0.75))
    ratio = sample.estimate / sample.comparator_estimate
    return Speed(case.problem.line, sample.estimate, sample.comparator_estimate, ratio, low, high)
