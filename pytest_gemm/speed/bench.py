"""What the kernels' process does for a session: it keeps what has passed, with operands of its own, and times it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pytest_gemm.api.protocols import Prepared, timed
from pytest_gemm.core.outcome import Misconduct
from pytest_gemm.machine import processor
from pytest_gemm.speed import roofline
from pytest_gemm.speed.data import Peaks
from pytest_gemm.speed.timing import clock, cpu, cuda, paired

if TYPE_CHECKING:
    import torch

    from pytest_gemm.operands.tensors import Operands
    from pytest_gemm.speed.timing.changing import Changing, Doubt
    from pytest_gemm.worker.inline import Inline


# Seconds in which every thread is to do nothing.
_QUIET: Final = 0.004
# Threads of a library may spin for a fifth of a second behind a call before they sleep.
_SPIN: Final = 0.4


@dataclasses.dataclass
class _Bench:
    """A case that is timed.

    Attributes:
        backend: whose the subject is.
        subject, comparator: what is called; there may be no comparator.
        sets: operands: on a GPU as many as its cache does not hold, on a CPU two, of which A is not the same memory.
        changing: changes them.
        calls: how many calls fill a reading, known from the first window on.
        last: what a call behind the last window returned, of a result that all calls accumulate.
    """

    backend: str
    subject: Prepared
    comparator: Prepared | None
    sets: Sequence[Operands]
    changing: Changing
    calls: dict[str, int] = dataclasses.field(default_factory=dict)
    last: Any = None

    @contextlib.contextmanager
    def calling(self, prepared: Prepared) -> Iterator[list[Callable[[], object]]]:
        """A block with the call of each set."""
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(timed(prepared, given)) for given in self.sets]


_benches: dict[int, _Bench] = {}
# The block of a window whose calls are still being looked at.
_open: Final = contextlib.ExitStack()
# By thread or child that began before a case was kept, and after the one before it: the backend of the case; or "" of
# what was there before any.
_owners: dict[int, str] = {}


def _timer(device: str) -> cpu.CpuTimer | cuda.CudaTimer:
    return _timer_of(device == "cuda")


@functools.cache  # by a fact of the device: a text and the member of an enumeration that equals it are two keys
def _timer_of(is_cuda: bool) -> cpu.CpuTimer | cuda.CudaTimer:
    return cuda.CudaTimer() if is_cuda else cpu.CpuTimer()


def _check(timer: paired.Timer) -> None:
    """Restore the clocks and the caches.

    Raises:
        Misconduct: for a clock that was replaced, and for another part of L2 that is kept than before.
    """
    names = clock.restored()
    if isinstance(timer, cuda.CudaTimer) and (sizes := timer.runtime.l2_changed()):
        before, now = (f"{size / 1e6:.3g} MB" for size in sizes)
        text = f"the kernel sets {now} of L2 aside for data to stay from call to call, and {before} were before it"
        raise Misconduct("l2-persists", text, "reset the limit of persisting L2 before returning")
    if names:
        text = f"functions that time were replaced: {', '.join(names)}"
        raise Misconduct("clock-replaced", text, "leave the clocks of Python, of PyTorch and of pytest-gemm alone")


def begin(_: object, device: str) -> list[str]:
    """Note, before a kernel is loaded or called, what is there without it: threads, clocks, and the L2 set aside.

    Returns:
        Names of PyTorch's functions that time, where others stand in their place.
    """
    _owners.update(dict.fromkeys(processor.worked().keys() - _owners.keys(), ""))
    timer = _timer(device)
    if not isinstance(timer, cuda.CudaTimer):
        return []
    import torch

    torch.zeros(1, device=device)  # a context
    timer.runtime.l2_changed()
    owners: Mapping[Any, tuple[str, ...]] = {
        torch.cuda: ("synchronize", "Event", "CUDAGraph"),
        torch.cuda.Event: ("record", "elapsed_time", "synchronize"),
        torch.cuda.CUDAGraph: ("replay", "instantiate"),
    }
    for owner, names in owners.items():
        clock.seal_names(owner, names)
    return [
        f"{owner.__name__}.{name}"
        for owner, names in owners.items()
        for name in names
        if not str(getattr(vars(owner).get(name), "__module__", None) or "torch").startswith("torch")
    ]


def keep(inline: Inline, subject: int, comparator: int, backend: str, given: Operands) -> None:
    """Keep what was built of a backend, by the numbers of the worker (comparator 0: none), to be timed with copies.

    Raises:
        Misconduct: for what it has done to the clocks and caches.
    """
    from pytest_gemm.speed.timing.changing import Changing

    _owners.update(dict.fromkeys(processor.worked().keys() - _owners.keys(), backend))
    _check(_timer(given.device))  # of no later case
    first = given.clone()
    if given.device == "cuda":
        count = cuda.rotation(int(roofline.work(given.problem).bytes), given.device)
        sets = [first, *(given.clone() for _ in range(count - 1))]
    else:
        sets = [first, first.moved(lambda one: one.clone() if one.name in {"a", "out"} else one)]
    beside = inline.prepared(comparator) if comparator else None
    # A CPU's measurement is of many windows, each with a strip of its own; a GPU's is one.
    changing = Changing(sets, 4 if given.device == "cuda" else 1)
    _benches[subject] = _Bench(backend, inline.prepared(subject), beside, sets, changing)


def window(_: Inline, subject: int, plan: paired.Plan, stays: bool) -> paired.Readings:
    """Time a case for a while.

    Args:
        subject: its number.
        plan: how.
        stays: a :func:`stretch` and :func:`working` follow.

    Raises:
        Misconduct: for a result that comes late, a clock that was replaced and L2 that is kept.
    """
    _open.close()
    one = _benches[subject]
    timer = _timer(one.sets[0].device)
    timer.changing = one.changing
    with contextlib.ExitStack() as stack:
        of_subject = stack.enter_context(one.calling(one.subject))
        beside = None if one.comparator is None else stack.enter_context(one.calling(one.comparator))
        readings = paired.measure(of_subject, beside, timer=timer, plan=plan, calls=one.calls)
        one.changing.restore()
        if one.sets[0].problem.in_place:
            one.sets[0].reset_out()
            one.last = of_subject[0]()
        if stays:
            _open.push(stack.pop_all())
    _check(timer)
    return readings


def stretch(_: Inline, subject: int, calls: int) -> int:
    """At least so many calls, for the clock of who asks; how many it were."""
    one = _benches[subject]
    made = _timer(one.sets[0].device).subject.repeat(calls)
    _wait(one)
    return made


def working(_: Inline, subject: int) -> tuple[float, str]:
    """How many threads and children live beside the main thread, and which of other cases work between the calls.

    Raises:
        Misconduct: where one of this case works although no call is being made, with its name.
    """
    one = _benches[subject]
    _wait(one)
    ends = clock.now() + _SPIN
    count, busy = _busy(_QUIET, waiting=True)
    while busy and clock.now() < ends:
        count, busy = _busy(_QUIET, waiting=True)
    if busy:
        count, busy = _busy(_SPIN / 4)
    if own := [name for task, name in busy.items() if _owners.get(task, one.backend) == one.backend]:
        text = f"{', '.join(own)} worked while no call was being made"
        raise Misconduct("works-outside", text, "do all work of a call before it returns, and end what it started")
    return float(count), ", ".join(busy.values())


def _busy(seconds: float, *, waiting: bool = False) -> tuple[int, dict[int, str]]:
    """How many threads and children live, and the names of those that work for a tenth of so many seconds.

    With ``waiting`` also of those that wait for a core then: on a busy machine one gets none for longer than that.
    """
    began, before = clock.now(), processor.worked()
    time.sleep(seconds)
    now = processor.worked()
    least = 0.1e9 * (clock.now() - began)  # others may have the cores, too
    names = {one.native_id: f"thread {one.name}" for one in threading.enumerate()}
    return len(before) - 1, {
        one: names.get(one) or f"{'thread' if processor.is_own(one) else 'child'} {processor.task_name(one)}"
        for one, spent in now.items()
        if one != threading.get_native_id()
        and (spent - before.get(one, spent) > least or (waiting and processor.is_runnable(one)))
    }


def _wait(one: _Bench) -> None:
    from pytest_gemm.worker.inline import wait_for

    wait_for(one.sets[0].device)


def last(_: Inline, subject: int) -> tuple[torch.Tensor, ...]:
    """What a timed call of the operands as they are given has returned; raises as ``calls.taken``."""
    from pytest_gemm.worker.calls import taken
    from pytest_gemm.worker.inline import as_tuple

    _open.close()
    one = _benches[subject]
    _wait(one)
    return one.changing.first or taken(as_tuple(one.last))[1]


def doubt(_: Inline, subject: int) -> Doubt | None:
    """What is to be known of a timed result that differs from what its operands let expect."""
    return _benches[subject].changing.doubt


def doubted(_: Inline, subject: int) -> tuple[torch.Tensor, ...]:
    """That result."""
    return _benches[subject].changing.doubted


def drop(_: Inline, subject: int) -> None:
    """Free what was kept of a case."""
    _open.close()
    _benches.pop(subject, None)


def peaks(_: Inline, device: str, dtypes: Sequence[str]) -> Peaks:
    """What the machine reaches, see ``roofline.measure``."""
    return roofline.measure(device, dtypes)


_CALLS: Final = (begin, keep, window, stretch, working, last, doubt, doubted, drop, peaks)
CALLS: Final[Mapping[str, Callable[..., Any]]] = {one.__name__: one for one in _CALLS}
"""For the keeper of a session."""

for _module in (cpu, cuda, paired, sys.modules[__name__]):
    clock.seal(_module)
