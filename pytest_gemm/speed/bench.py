"""What the kernels' process does for a session: it keeps what has passed, with operands of its own, and times it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pytest_gemm.api.protocols import Prepared, timed
from pytest_gemm.speed import roofline
from pytest_gemm.speed.data import Peaks
from pytest_gemm.speed.timing import cpu, cuda, paired

if TYPE_CHECKING:
    import torch

    from pytest_gemm.operands.tensors import Operands
    from pytest_gemm.worker.inline import Inline


@dataclasses.dataclass
class _Bench:
    """A case that is timed.

    Attributes:
        subject, comparator: what is called; there may be no comparator.
        sets: operands: on a GPU as many as its cache does not hold.
        calls: how many calls fill a reading, known from the first window on.
        last: what the last timed call returned.
    """

    subject: Prepared
    comparator: Prepared | None
    sets: Sequence[Operands]
    calls: dict[str, int] = dataclasses.field(default_factory=dict)
    last: Any = None


_benches: dict[int, _Bench] = {}


@functools.cache
def _timer(device: str) -> paired.Timer:
    return cuda.CudaTimer() if device == "cuda" else cpu.CpuTimer()


def keep(inline: Inline, subject: int, comparator: int, given: Operands) -> None:
    """Keep what was built, by the numbers of the worker (comparator 0: none), to be timed with copies of operands."""
    count = cuda.rotation(int(roofline.work(given.problem).bytes), given.device)
    _benches[subject] = _Bench(
        inline.prepared(subject),
        inline.prepared(comparator) if comparator else None,
        [given.clone() for _ in range(count)],
    )


def window(_: Inline, subject: int, plan: paired.Plan) -> paired.Readings:
    """Time a case for a while.

    Args:
        subject: its number.
        plan: how.
    """
    one = _benches[subject]
    with contextlib.ExitStack() as stack:

        def calls(prepared: Prepared) -> list[Callable[[], object]]:
            return [stack.enter_context(timed(prepared, given)) for given in one.sets]

        of_subject = calls(one.subject)
        beside = None if one.comparator is None else calls(one.comparator)
        readings = paired.measure(of_subject, beside, timer=_timer(one.sets[0].device), plan=plan, calls=one.calls)
        one.sets[0].reset_out()
        one.last = of_subject[0]()
    return readings


def last(_: Inline, subject: int) -> tuple[torch.Tensor, ...]:
    """What the last timed call has returned; raises as ``calls.taken``."""
    from pytest_gemm.worker.calls import taken
    from pytest_gemm.worker.inline import as_tuple, wait_for

    wait_for(_benches[subject].sets[0].device)
    return taken(as_tuple(_benches[subject].last))[1]


def drop(_: Inline, subject: int) -> None:
    """Free what was kept of a case."""
    _benches.pop(subject, None)


def peaks(_: Inline, device: str, dtypes: Sequence[str]) -> Peaks:
    """What the machine reaches, see ``roofline.measure``."""
    return roofline.measure(device, dtypes)


CALLS: Final[Mapping[str, Callable[..., Any]]] = {one.__name__: one for one in (keep, window, last, drop, peaks)}
"""For the keeper of a session."""
