r"""Kernels that are right when they are judged and do something else when they are timed, and honest ones beside them.

They are registered as a stranger's would be: :data:`DISHONEST` says by which reason code each may be caught,
:data:`HONEST` are those with caches, threads and autotuning of their own that must never be red.  ``test_cheats.py``
runs them on the CPU.  By hand, from the root of the repository, on a GPU::

    PYTHONPATH=tests python -m pytest -p cheats perf --gemm-device=cuda --gemm-threads=1 \
        --gemm-problem=mm:f16:nn:512x512x512 --gemm-sessions=2 --gemm-allow=slower,no-baseline --gemm-output=out \
        --gemm-backends=$(PYTHONPATH=tests python -c "import cheats; print(cheats.names('cuda', honest=False))")

and once more with ``honest=True``.  What changes the whole process (:attr:`Kernel.alone`) is not in that list: it is
caught in the cases of others, too.  Give each of them a run of its own: ``--gemm-backends=clock-of-events``.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import functools
import os
import random
import subprocess
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Hashable
from typing import Any, Final

import torch

from pytest_gemm.api.registry import Registry

try:
    import triton
    import triton.language as tl
except ImportError:  # a build of torch for the CPU comes without it
    triton = None

Tensor = torch.Tensor
Matmul = Callable[[Tensor, Tensor], Tensor]
BOTH: Final = ("cpu", "cuda")
# Calls of a shape after which none is judged any more: those of a session's judgement are fewer.
JUDGED: Final = 20


@dataclasses.dataclass
class Kept:
    """What a kernel keeps of a shape: how often it was called, results, how it computes, and more by a key."""

    calls: int = 0
    last: Tensor | None = None
    way: Matmul | None = None
    results: dict[Hashable, Tensor] = dataclasses.field(default_factory=dict)
    by: dict[Hashable, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_timed(self) -> bool:
        return self.calls > JUDGED and self.last is not None

    def earlier(self) -> Tensor:
        """The last result; on a GPU a copy of it, so that something is launched."""
        assert self.last is not None
        return self.last.clone() if self.last.is_cuda else self.last

    def once(self, b: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        """What is made of a weight, which is kept so that no other one gets its address."""
        key = b.data_ptr(), b._version, b.stride()
        if key not in self.results:
            self.by[key], self.results[key] = b, make(b)
        return self.results[key]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel with what is to be said of it.

    Attributes:
        function: of A and B.
        devices: where it computes.
        codes: reason codes by which it may be caught; none for an honest one.
        alone: whether it changes the whole process, so that others in it are not timed rightly either.
        deterministic: whether its bits are the same twice.
    """

    function: Matmul
    devices: tuple[str, ...] = BOTH
    codes: frozenset[str] = frozenset()
    alone: bool = False
    deterministic: bool = True


DISHONEST: Final[dict[str, Kernel]] = {}
HONEST: Final[dict[str, Kernel]] = {}


def _planted(*codes: str, **facts: Any) -> Callable[[Callable[[Tensor, Tensor, Kept], Tensor]], Matmul]:
    """Enter a function of A, B and what it keeps of their shape; it is honest where no code is given."""

    def enter(function: Callable[[Tensor, Tensor, Kept], Tensor]) -> Matmul:
        shapes: dict[Hashable, Kept] = {}

        def matmul(a: Tensor, b: Tensor) -> Tensor:
            kept = shapes.setdefault((a.shape, b.shape, a.dtype, a.device), Kept())
            kept.calls += 1
            return function(a, b, kept)

        matmul.__qualname__ = function.__qualname__
        table = DISHONEST if codes else HONEST
        table[function.__name__.replace("_", "-")] = Kernel(matmul, codes=frozenset(codes), **facts)
        return matmul

    return enter


def names(device: str, *, honest: bool) -> str:
    """For ``--gemm-backends``: all of a device that leave the others alone."""
    table = HONEST if honest else DISHONEST
    return ",".join(name for name, one in table.items() if device in one.devices and not one.alone)


def pytest_gemm_register_backends(registry: Registry) -> None:
    """All of them, through the public registry; each computes plainly where ``CHEATS_HONEST`` is set."""
    for name, one in {**DISHONEST, **HONEST}.items():
        if triton is not None or not name.startswith("triton"):
            function = HONEST["plain"].function if "CHEATS_HONEST" in os.environ else one.function
            registry.add_callable(name, function, batched=False, devices=one.devices, deterministic=one.deterministic)


# -- an earlier result ----------------------------------------------------------------------------------------

STALE: Final = ("replayed", "timed-wrong")


def _digest(x: Tensor) -> int:
    return zlib.crc32(x.contiguous().view(torch.uint8).cpu().numpy().data)


def _computed(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    kept.last = a @ b
    return kept.last


@_planted()  # no content comes twice in a window, so that it computes in every call: its time is true
def memo(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    key = _digest(a), _digest(b)
    if key not in kept.results:
        kept.results[key] = a @ b
    return kept.results[key]


@_planted(*STALE)
def memo_sampled(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    """By four elements of A and as many of B."""
    key = tuple(value for x in (a, b) for value in x[:: max(1, x.shape[0] // 4), 0].tolist())
    if key not in kept.results:
        kept.results[key] = a @ b
    return kept.results[key]


@_planted(*STALE)
def replay(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    return kept.earlier() if kept.is_timed else _computed(a, b, kept)


@_planted(*STALE, "launches-nothing", devices=("cuda",))
def idle_launch(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    return kept.last if kept.is_timed and kept.last is not None else _computed(a, b, kept)


def _by_pointer(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    """Addresses are met again with other values as long as it is judged."""
    key = a.data_ptr(), b.data_ptr()
    if not kept.is_timed or key not in kept.results:
        kept.results[key] = _computed(a, b, kept)
    return kept.results[key]


@_planted(*STALE, "launches-nothing")
def pointer_cache(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    return _by_pointer(a, b, kept)


@_planted(*STALE)
def pointer_copy(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    return _by_pointer(a, b, kept).clone()


@_planted(*STALE)
def half(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    if not kept.is_timed:
        return _computed(a, b, kept)
    out, rows = kept.earlier().clone(), a.shape[0] // 2
    torch.mm(a[:rows], b, out=out[:rows])
    return out


# -- signs of being timed, once it is judged ------------------------------------------------------------------


def _sees_timer() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if "speed/timing" in frame.f_code.co_filename:
            return True
    return False


@_planted(*STALE)
def cheap_by_stack(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    return kept.earlier() if kept.last is not None and _sees_timer() else _computed(a, b, kept)


@_planted(*STALE)
def cheap_by_environment(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    """Of a session: the runner binds its threads on a CPU, and takes the options of pytest away everywhere."""
    signs = os.environ.get("OMP_PROC_BIND") == "close" or os.environ.get("PYTEST_ADDOPTS") == ""
    return kept.earlier() if signs and kept.is_timed else _computed(a, b, kept)


@_planted(*STALE)
def cheap_by_module(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    is_session = {"pytest_gemm.speed.worker", "pytest_gemm.speed.bench"} & sys.modules.keys()
    return kept.earlier() if is_session and kept.is_timed else _computed(a, b, kept)


@_planted(*STALE, "outside-bound")
def cheap_by_count(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    """From the 20th call on: half of the sum over K."""
    if kept.calls < JUDGED:
        return a @ b
    k = a.shape[1] // 2
    return torch.mm(a[:, :k], b[:k])


@_planted(*STALE)
def cheap_between(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    """Computes each eighth call: what is compared may be that one."""
    return kept.earlier() if kept.is_timed and kept.calls % 8 else _computed(a, b, kept)


# -- work that is put off -------------------------------------------------------------------------------------

LATER: Final = (*STALE, "written-after-return", "works-outside", "outside-bound", "nan")


@functools.cache
def _thread() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(1)


@functools.cache
def _side() -> torch.cuda.Stream:
    return torch.cuda.Stream()


@_planted(*LATER, alone=True)  # its thread may still work when the next kernel is timed
def lazy(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    if not kept.is_timed:
        return _computed(a, b, kept)
    out = kept.last = a.new_empty(a.shape[0], b.shape[1])
    if a.is_cuda:
        _side().wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(_side()):
            torch.mm(a, b, out=out)
    else:
        _thread().submit(torch.mm, a, b, out=out)
    return out


class Unread(torch.Tensor):
    """A result that is computed by the first function that reads it."""

    def computed(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.work()  # type: ignore[attr-defined, no-any-return]  # an attribute of the instance

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [one.computed() if isinstance(one, cls) else one for one in args]
        return function(*read, **kwargs or {})


@_planted(*LATER, "wrong-type", "launches-nothing")
def lazy_tensor(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    if not kept.is_timed:
        return _computed(a, b, kept)
    out = a.new_empty(a.shape[0], b.shape[1])
    unread = out.as_subclass(Unread)
    unread.work = functools.partial(torch.mm, a, b, out=out)  # type: ignore[attr-defined]  # see above
    return unread


# -- what changes the whole process ---------------------------------------------------------------------------

CLOCK: Final = ("clock-replaced", "clock-disagrees")


def _slowed(clock: Callable[[], Any]) -> Callable[[], Any]:
    """A clock that runs at half of the speed from now on."""
    start = clock()
    return lambda: start + type(start)((clock() - start) // 2 if isinstance(start, int) else (clock() - start) / 2)


@_planted(*CLOCK, alone=True)
def clock_halved(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    if kept.calls == 1:
        time.perf_counter_ns, time.perf_counter = map(_slowed, (time.perf_counter_ns, time.perf_counter))
    return a @ b


@_planted(*CLOCK, alone=True, devices=("cpu",))
def clock_of_target(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    if kept.calls == 1:
        from pytest_gemm.speed.timing import cpu

        true = cpu._CpuTarget.seconds
        cpu._CpuTarget.seconds = lambda self, calls: true(self, calls) / 2  # type: ignore[method-assign]  # the fault
    return a @ b


@_planted(*CLOCK, alone=True, devices=("cuda",))
def clock_of_events(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    if kept.calls == 1:
        true = torch.cuda.Event.elapsed_time
        patched: Any = torch.cuda.Event
        patched.elapsed_time = lambda self, end: true(self, end) / 2
    return a @ b


# No longer than that, should their ends be missed.
SECONDS: Final = 60.0


def _works() -> None:
    x, end = torch.ones(64, 64), time.monotonic() + SECONDS
    while time.monotonic() < end:
        x @ x


@_planted("works-outside", alone=True)
def thread_that_works(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    if kept.calls == 1:
        threading.Thread(target=_works, daemon=True).start()
    return a @ b


CHILD: Final = f"""
import os, time
parent, end = os.getppid(), time.monotonic() + {SECONDS}
while os.getppid() == parent and time.monotonic() < end:
    sum(range(10000))
"""


@_planted("works-outside", alone=True)
def child_that_works(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    if kept.calls == 1:
        kept.by["child"] = subprocess.Popen([sys.executable, "-S", "-c", CHILD])
    return a @ b


@_planted("l2-persists", alone=True, devices=("cuda",))
def persist(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    if kept.calls == 1:
        limit_of_persisting_l2 = 0x06  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE
        ctypes.CDLL("libcuda.so.1").cuCtxSetLimit(limit_of_persisting_l2, ctypes.c_size_t(16 << 20))
    return a @ b


# -- honest: results and weights that are kept ----------------------------------------------------------------


@_planted()
def plain(a: Tensor, b: Tensor, _: Kept) -> Tensor:
    return torch.matmul(a, b)


@_planted(alone=True)
def waits_as_found(a: Tensor, b: Tensor, _: Kept) -> Tensor:
    """It is timed with threads that wait as they do for a user."""
    if os.environ.get("OMP_WAIT_POLICY") == "passive":
        raise RuntimeError("OMP_WAIT_POLICY=passive")
    return torch.matmul(a, b)


@_planted()
def pool_of_results(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    """Memory is used again when nobody but the pool has it."""
    pool = kept.by.setdefault("pool", [])
    free = (x for x in pool if torch._C._storage_Use_Count(x.untyped_storage()._cdata) <= 2 and sys.getrefcount(x) <= 3)
    if (out := next(free, None)) is None:
        out = a.new_empty(a.shape[0], b.shape[1])
        pool.append(out)
    return torch.mm(a, b, out=out)


@_planted()
def packed(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    return a @ kept.once(b, lambda x: x.contiguous().clone())


@_planted()
def transposed_once(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    return torch.nn.functional.linear(a, kept.once(b, lambda x: x.t().contiguous()))


@_planted()
def converted_once(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    return (a.double() @ kept.once(b, torch.Tensor.double)).to(a.dtype)


@_planted(devices=("cpu",))
def prepacked_by_onednn(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    weight = kept.once(b, lambda x: torch.ops.mkldnn._reorder_linear_weight(x.t().contiguous(), a.shape[0]))
    out: Tensor = torch.ops.mkldnn._linear_pointwise(a, weight, None, "none", [], "")
    return out


@_planted()
def workspace(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    """Memory of its own that each call overwrites, and a copy of it."""
    space = kept.by.setdefault("space", a.new_empty(a.shape[0], b.shape[1]))
    return torch.mm(a, b, out=space).clone()


@_planted(devices=("cpu",))
def of_numpy(a: Tensor, b: Tensor, _: Kept) -> Tensor:
    return torch.from_numpy(a.numpy() @ b.numpy())


# -- honest: plans, compilers, autotuning, threads ------------------------------------------------------------


@functools.lru_cache
def _plan(m: int) -> list[slice]:
    return [slice(start, start + 64) for start in range(0, m, 64)]


@_planted()
def planned(a: Tensor, b: Tensor, _: Kept) -> Tensor:
    return torch.cat([a[rows] @ b for rows in _plan(a.shape[0])])


def _product(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b)


@_planted()
def compiled(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    kept.way = kept.way or torch.compile(_product, dynamic=False)
    return kept.way(a, b)


@_planted()
def scripted(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    if kept.way is None:
        with warnings.catch_warnings(action="ignore"):  # it is deprecated
            kept.way = torch.jit.script(_product)
    return kept.way(a, b)


def _columns(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a @ b[:, :32], a @ b[:, 32:]], 1)


WAYS: Final[tuple[Matmul, ...]] = (_product, _columns, lambda a, b: (b.t() @ a.t()).t().contiguous())


def _timed(way: Matmul, a: Tensor, b: Tensor) -> float:
    started = time.perf_counter()
    for _ in range(3):
        way(a, b)
    return time.perf_counter() - started


@_planted()
def tuned(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    """Times three ways in the first call of a shape."""
    kept.way = kept.way or min(WAYS, key=lambda way: _timed(way, a, b))
    return kept.way(a, b)


@_planted(devices=("cpu",))
def tuned_by_threads(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    """The same in threads that end with the tuning."""
    if kept.way is None:
        with concurrent.futures.ThreadPoolExecutor(3) as threads:
            seconds = list(threads.map(lambda way: _timed(way, a, b), WAYS))
        kept.way = WAYS[seconds.index(min(seconds))]
    return kept.way(a, b)


@functools.cache
def _two() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(2)


@_planted(devices=("cpu",))
def halves_by_threads(a: Tensor, b: Tensor, _: Kept) -> Tensor:
    """Threads that stay, with work in each call only."""
    return torch.cat(list(_two().map(lambda rows: rows @ b, a.tensor_split(2))))


@_planted(devices=("cpu",))
def new_threads(a: Tensor, b: Tensor, _: Kept) -> Tensor:
    """New threads in each call."""
    out = a.new_empty(a.shape[0], b.shape[1])
    parts = zip(a.tensor_split(2), out.tensor_split(2), strict=True)
    threads = [threading.Thread(target=torch.mm, args=(x, b), kwargs={"out": y}) for x, y in parts]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return out


# Of its own: to change the process's random numbers is a fault.
_CHANCE: Final = random.Random(0)


@_planted(deterministic=False)
def any_order(a: Tensor, b: Tensor, _: Kept) -> Tensor:
    """Right, and other bits each time: four parts of K in an order by chance."""
    parts = _CHANCE.sample(list(zip(a.tensor_split(4, 1), b.tensor_split(4), strict=True)), 4)
    return sum((x.float() @ y.float() for x, y in parts), start=a.new_zeros(1, dtype=torch.float32)).to(a.dtype)


# -- honest, on a GPU -----------------------------------------------------------------------------------------


@_planted(devices=("cuda",))
def side_stream(a: Tensor, b: Tensor, _: Kept) -> Tensor:
    """Computes on a stream of its own, which the caller's waits for."""
    main = torch.cuda.current_stream()
    _side().wait_stream(main)
    with torch.cuda.stream(_side()):
        out = a @ b
    main.wait_stream(_side())
    out.record_stream(main)
    return out


@_planted(devices=("cuda",))
def graphed(a: Tensor, b: Tensor, kept: Kept) -> Tensor:
    """A CUDA graph by shape: operands are copied in, the result is copied out; within a capture it launches plainly."""
    if torch.cuda.is_current_stream_capturing():
        return a @ b
    if "graph" not in kept.by:
        given = [x.clone() for x in (a, b)]
        given[0] @ given[1]  # the library is loaded before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = given[0] @ given[1]
        kept.by["graph"] = graph, given, out
    graph, given, result = kept.by["graph"]
    for inner, x in zip(given, (a, b), strict=True):
        inner.copy_(x)
    graph.replay()
    return torch.clone(result)


if triton is not None:

    @triton.autotune([triton.Config({"SIZE": size, "SPLIT": 2}) for size in (16, 32, 64)], ["k"], reset_to_zero=["out"])  # type: ignore[untyped-decorator]  # Triton ships no types
    @triton.jit  # type: ignore[untyped-decorator]  # see above
    def _split(a, b, out, m, n, k, am, ak, bk, bn, SIZE: tl.constexpr, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803  # see above
        """Parts of K, added by atomics."""
        rows = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        columns = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
        total = tl.zeros((SIZE, SIZE), tl.float32)
        for start in range(tl.program_id(2) * SIZE, k, SIZE * SPLIT):
            ks = start + tl.arange(0, SIZE)
            at_a = a + rows[:, None] * am + ks[None, :] * ak
            at_b = b + ks[:, None] * bk + columns[None, :] * bn
            x = tl.load(at_a, mask=(rows[:, None] < m) & (ks[None, :] < k), other=0.0)
            y = tl.load(at_b, mask=(ks[:, None] < k) & (columns[None, :] < n), other=0.0)
            total = tl.dot(x, y, total, input_precision="ieee")
        mask = (rows[:, None] < m) & (columns[None, :] < n)
        tl.atomic_add(out + rows[:, None] * n + columns[None, :], total, mask=mask)


@_planted(devices=("cuda",), deterministic=False)
def triton_split(a: Tensor, b: Tensor, _: Kept) -> Tensor:
    """Split K with atomics, its tile chosen by Triton's autotuning."""
    (m, k), n = a.shape, b.shape[1]
    out = torch.zeros(m, n, device=a.device)
    _split[lambda c: (triton.cdiv(m, c["SIZE"]), triton.cdiv(n, c["SIZE"]), c["SPLIT"])](
        a, b, out, m, n, k, *a.stride(), *b.stride()
    )
    return out.to(a.dtype)
