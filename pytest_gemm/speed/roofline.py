"""How fast a problem could run here at best: its operations and bytes against what the machine reached.

The model is the roofline (Williams, Waterman and Patterson, 2009, doi:10.1145/1498765.1498785): a product takes at
least as long as its operations take at the highest matrix rate, and at least as long as its operands and results take
to cross the memory bus once.  Both peaks are measured, by the same PyTorch that is under test; nothing is taken from
a data sheet.

torch is imported by :func:`measure` alone, so that reports can do without.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from msgspec.structs import replace

from pytest_gemm.core.outcome import Reason, Status
from pytest_gemm.core.units import plural, seconds_text
from pytest_gemm.machine import gpus, isa, processor
from pytest_gemm.problem.dtypes import DTYPES, TF32, DType
from pytest_gemm.problem.ops import OPS
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import StepKind
from pytest_gemm.speed.data import Peaks, Sample, Session, by_case
from pytest_gemm.speed.timing import cpu, cuda

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of a problem.

    Attributes:
        flops: operations of the product, a multiplication and an addition counting two; of integers alike.
        bytes: least traffic: every operand read once and every result written once.
    """

    flops: float
    bytes: float


def work(problem: Problem) -> Work:
    """Operations and least traffic of a problem.

    Operations: ``2 M N K`` times the batch, for the product alone.  The epilogue adds a few for each of the ``M N``
    elements and is left out, as rates of matrix products are usually quoted.

    Bytes: A, B, bias, residuals, scales and group ends read once in the dtypes in which they are *stored*, and the
    result (two of them for ``program.multi_output``) written once.  What is expanded over a batch is read once; B is
    not read where it is A, nor a residual that is A, nor a bias that ``beta-0`` ignores, nor padding between rows.  A
    residual that is looked up counts as what is read of its table.
    Copies that a program makes on its way (a cast to the half type under autocast) are what a kernel could have
    avoided, and do not count.
    """
    shape = problem.shape
    batch = 1 if shape.batch is None else shape.batch
    rows = shape.m * batch  # of grouped_mm as well: M is the mean size of a group
    a_rows = shape.m if problem.has("a.broadcast") or problem.op.several else rows
    bits = a_rows * shape.k * problem.dtypes.a.bits
    if not problem.b_is_a:
        # One weight serves a whole batch of linear.
        b_count = 1 if problem.has("b.broadcast") or problem.op.batch == "optional" else batch
        bits += b_count * shape.k * shape.n * problem.dtypes.b.bits
    if problem.bias_shape is not None and problem.beta != 0.0:
        bits += math.prod(problem.bias_shape) * problem.bias_dtype.bits
    if problem.op.grouped or problem.has("groups.masked"):  # ends or counts of groups, or a label for each row
        bits += (rows if problem.has("groups.labels") else batch) * DTYPES["i32"].bits
    bits += _scale_bits(problem) + _residual_bits(problem)
    bits += sum(math.prod(one.judged_shape) * one.result_dtype.bits for one in problem.outputs)
    return Work(float(shape.flops), bits / 8)


def _scale_bits(problem: Problem) -> int:
    """Bits of the scales and zero points of quantised operands, in the types in which PyTorch takes them."""
    op, n, dtype = problem.op, problem.shape.n, problem.scale_dtype
    if not (op.scales or op.weight_scales):
        return 0
    if problem.group_size:  # a scale and a zero point for each group of K and each column
        zero = problem.dtypes.a.bits if not op.coded else problem.dtypes.b.bits if problem.step("zeros") else 0
        return n * -(-problem.shape.k // problem.group_size) * ((dtype.bits if op.coded else zero) + zero)
    batch = problem.shape.batch or 1
    if blocks := problem.scale_blocks:
        k = -(-problem.shape.k // problem.block_size)
        return batch * k * (-(-problem.shape.m // blocks[0]) + -(-n // blocks[1])) * dtype.bits
    if block := problem.micro_block:
        return batch * (problem.shape.m + n) * (problem.shape.k // block) * 8
    kind = next((step.name for step in problem.quant if step.name in op.scales), "")
    rows = problem.shape.m * batch
    of_a = {"rowwise": rows, "tensorwise": 1, "columnwise": 1, "dynamic": 1}.get(kind, 0)
    # A grouped product has scales for the columns of each B.
    of_b = 1 if kind == "tensorwise" else n * batch if op.batch == "always" else n
    zero_points = of_b + of_a if op.zero_points else 0
    return (of_a + of_b) * dtype.bits + zero_points * DTYPES["i32"].bits


def _residual_bits(problem: Problem) -> int:
    """Bits of the residuals; each has the dtype of the value that it meets."""
    bits, first = 0, True
    for step, dtype in zip(problem.passes, problem.value_dtypes, strict=False):
        if step.kind is StepKind.BINARY:
            if not (first and problem.has("r0.alias")):
                shape = problem.result_shape
                own = problem.residual_dtype(step, dtype)
                bits += {"n": shape[-1], "m1": shape[-2]}.get(step.extent, math.prod(shape)) * own.bits
            first = False
    return bits


def dtype_name(problem: Problem) -> str:
    """Under which name of :attr:`speed.Peaks.flops` a problem's rate is looked up: what its product multiplies."""
    if problem.has("math.tf32") and problem.input_dtype.name == "f32":
        return TF32.name
    return problem.input_dtype.name


# -- against the peaks ----------------------------------------------------------------------------------------

# A rate may lie this far above a measured peak: that is the best of a second's calls in one process, and the rate is
# that of the fastest reading of many.  On eight cores of a shared Xeon correct kernels came to 1.21 times the peak.
MARGIN: Final = 1.3

# Types that the hardware treats as another one of which there may be a measurement.
_ALIKE: Final = {"u8": "i8", "f8e5m2": "f8e4m3fn", "i4": "i8", "tf32": "f32"}


def _measured_rate(name: str, peaks: Peaks) -> float | None:
    """The highest measured rate of products of a dtype, in FLOP/s; ``None`` where none was measured."""
    return peaks.flops.get(name) or peaks.flops.get(_ALIKE.get(name, "")) or None


def limit(work: Work, dtype_name: str, peaks: Peaks) -> tuple[float, Literal["compute", "memory"]] | None:
    """The least time of a call by the roofline, data coming from memory, and the peak that it is due to.

    Args:
        work: of the problem.
        dtype_name: of its inputs, see :func:`dtype_name`.
        peaks: of the machine.

    Returns:
        Seconds and peak; ``None`` where a peak that is needed was not measured.  Operands that stay in a cache between
        the calls can make a problem that is bound by memory faster; :func:`floor` has the limit.
    """
    rate = _measured_rate(dtype_name, peaks)
    if rate is None or peaks.bandwidth <= 0.0:
        return None
    compute, memory = work.flops / rate, work.bytes / peaks.bandwidth
    return (memory, "memory") if memory > compute else (compute, "compute")


class Floor(NamedTuple):
    """What a call takes at least by the measured peaks, in seconds; 0 where nothing is known.

    Attributes:
        computing: its operations.
        reading: the bytes that have to cross the memory bus.
    """

    computing: float
    reading: float


def floor(problem: Problem, peaks: Peaks, device: str) -> Floor:
    """The roofline that no correct kernel exceeds.

    It is weaker than :func:`limit`, so that only what is impossible is an error:

    * The compute peak of a dtype is what PyTorch's own product reached, and PyTorch may be bad at it: bf16 without
      bf16 instructions runs at a hundredth of f32, and cuBLAS's int8 on an H200 at 1.3 times f16 where CUTLASS reaches
      1.8.  A unit that multiplies elements of ``wide`` bits multiplies ``wide / bits`` times as many narrow ones, so
      that multiple of every wider type's rate is allowed as well, and so is a product of elements split into 16 bits.
    * Bytes that fit in the caches need not come from memory again.  Whatever a cache keeps, no more than its size is
      kept from one call on the same operands to the next: of ``sets`` operand sets in turn, ``sets * bytes - cache``
      must cross the bus.  On a CPU one set is counted, for B is the same in all of them.
    * What a kernel may leave out (:func:`_fewest_operations`) does not count, nor do the bytes of grouped products, of
      which a group may be empty, and of masked ones.

    Every time is divided by :data:`MARGIN`.
    """
    operations, moved = _fewest_operations(problem), work(problem).bytes
    if not operations:
        return Floor(0.0, 0.0)
    name = "i8" if problem.op.quantises_a else dtype_name(problem)
    computing = reading = 0.0
    if (rate := _measured_rate(name, peaks)) is not None:
        halves = max(peaks.flops.get("f16", 0.0), peaks.flops.get("bf16", 0.0))
        computing = operations / max(rate, _by_width(name, peaks), halves / _split(problem)[1])
    if peaks.bandwidth > 0.0 and not (problem.op.grouped or problem.has("groups.masked")):
        sets = cuda.rotation(int(moved), device) if device == "cuda" else 1
        # A cache of which the size is not known may hold everything.
        reading = max(0.0, moved - (cache_bytes(device) or math.inf) / sets) / peaks.bandwidth
    return Floor(computing / MARGIN, reading / MARGIN)


def _by_width(name: str, peaks: Peaks) -> float:
    """What units could reach in a narrow type, going by the rates of wider ones."""
    if name not in DTYPES:
        return 0.0
    ratios = {other: DTYPES[other].bits / DTYPES[name].bits for other in peaks.flops if other in DTYPES}
    return max((peaks.flops[other] * ratio for other, ratio in ratios.items() if ratio >= 1), default=0.0)


def excess(sample: Sample) -> Reason | None:
    """Why the fastest reading of a sample is too good to be true, by the measured peaks; ``None`` where it is not."""
    fastest = min(sample.subject)
    if fastest >= sample.roofline:
        return None
    return Reason("above-roofline", f"{seconds_text(fastest)} a call in one reading, and {_because(sample)}", _REMEDY)


_REMEDY: Final = "compute the whole product in every call; if the peaks were measured beside a load, run again"


def _because(sample: Sample) -> str:
    if sample.computing >= sample.reading:
        return f"its operations take at least {seconds_text(sample.computing)} at the rate that was measured here"
    needed = f"the bytes that no cache holds take at least {seconds_text(sample.reading)} from memory"
    return f"{needed}: the kernel reads fewer bytes than its operands have"


# -- what no kernel can exceed --------------------------------------------------------------------------------


class Units(NamedTuple):
    """How many bits of factors the units of a machine multiply in a second at their highest clock.

    Nothing of it is measured: a peak that was measured beside a load, or with a poor product, is no ceiling.

    Attributes:
        vector: of the vector units, which multiply elements of any width.
        matrix: of the matrix units, which multiply elements of at most :data:`_MATRIX_BITS`; 0 without any.
    """

    vector: float
    matrix: float


# In Hz.  No processor is sold with a higher clock, and a virtual machine does not report the highest one of its host.
_HIGHEST_CLOCK: Final = 6.2e9
# In a cycle of a core: two units of 512 bits, or two of 256 (four of 128), by the widest instruction set.
_VECTORS: Final = {"avx512f": 1024, "avx2": 512}
# AMX in a cycle of a core: 16 x 16 x 32 products of 16 bits in 16 cycles.
_TILES: Final = {"amx_tile": 8192}
_MATRIX_BITS: Final = 16
# Tensor cores in a cycle of a multiprocessor, by compute capability: 16 bits for each product of half types.
_TENSOR_CORES: Final = {
    **{"7.0": 8192, "7.2": 8192, "7.5": 8192, "8.0": 16384, "8.6": 8192, "8.7": 16384, "8.9": 8192},
    **{"9.0": 32768, "10.0": 65536, "10.3": 65536, "12.0": 8192, "12.1": 8192},
}


def units(device: str) -> Units | None:
    """The units of this machine that its kernels can use; ``None`` for a machine that this package does not know.

    On a CPU they are those of the cores that the threads of this process may run on.
    """
    if device == "cuda":
        import torch

        gpu, count = _gpu(), torch.cuda.get_device_properties(0).multi_processor_count
        clock, bits = (gpu.highest_clock, _TENSOR_CORES.get(gpu.capability, 0)) if gpu else (0.0, 0)
        return Units(0.0, count * bits * clock) if bits and clock else None
    flags = processor.cpu().flags
    vector, matrix = (next((bits for f, bits in some.items() if f in flags), 0) for some in (_VECTORS, _TILES))
    cycles = len(processor.cores()) * _HIGHEST_CLOCK
    return Units(cycles * vector, cycles * matrix) if vector else None


_gpu: Final = functools.cache(gpus.visible_gpu)


def least_seconds(problem: Problem, units: Units) -> float:
    """A call that computes the problem takes longer than this, wherever its operands lie; 0: there is no such time."""
    bits = _bits(problem)
    width, products = _split(problem)
    rate = 2.0 * max(units.vector / bits, units.matrix / width / products)
    return _fewest_operations(problem) / (MARGIN * rate)


def _bits(problem: Problem) -> int:
    """Width of the elements that are multiplied."""
    name = dtype_name(problem)
    return 8 if problem.op.quantises_a else _MATRIX_BITS if name == TF32.name else DTYPES[name].bits


def _split(problem: Problem) -> tuple[int, int]:
    """Width of the pieces that the matrix units take of an element, and how many products of pieces replace one.

    The upper half of the products of ``p`` pieces each, ``p (p + 1) / 2``, is what an accurate result needs; one factor
    of an op that converts has few bits, so that it is a single piece.
    """
    pieces = max(1, _bits(problem) // _MATRIX_BITS)
    return _bits(problem) // pieces, pieces if problem.op.converts else pieces * (pieces + 1) // 2


def _fewest_operations(problem: Problem) -> float:
    """The operations of the product less those that a kernel may leave out.

    :data:`MARGIN` has room for one level or two of Strassen's algorithm, each of which saves an eighth.
    """
    flops = work(problem).flops
    if not problem.alpha or "tril" in problem.prologues("ab"):  # factors that are known to be zeros
        return 0.0
    if problem.has("a.broadcast") and problem.has("b.broadcast"):  # one product, over and over
        flops /= problem.shape.batch or 1
    if problem.has("b.alias_t"):  # a symmetric result
        flops /= 2.0
    if problem.has("groups.masked"):  # one matrix has all of its rows
        flops /= problem.shape.batch or 1
    if problem.has("groups.unowned"):  # an eighth of the rows, and of two tiles of rows one
        flops /= 2.0
    return flops


def impossible(samples: Sequence[Sample]) -> Reason | None:
    """Why the samples of a case are no times of its kernel; ``None`` unless every window of each is too short for it.

    By the ceiling only the arithmetic counts, for operands may come from a cache; by the measured roofline
    (:func:`floor`) the bytes count that no cache holds.
    """
    if not samples or not all(sample.is_impossible for sample in samples):
        return None
    head = f"every window of {plural(len(samples), 'session')} is faster than this machine"
    measured = next((sample for sample in samples if not sample.is_above_ceiling), None)
    if measured is not None:
        text = f"{head} has been measured to be: {seconds_text(measured.estimate)} a call in one, {_because(measured)}"
        return Reason("above-roofline", text, _REMEDY)
    first = samples[0]
    text = (
        f"{head} can multiply: "
        f"{seconds_text(first.estimate)} a call in the first one, and it takes at least {seconds_text(first.least)}"
    )
    return Reason("above-ceiling", text, "compute the whole product in every call")


def without_impossible(sessions: Sequence[Session]) -> list[Session]:
    """The sessions of one group; a case that all of them timed faster than the machine can be has failed."""
    reasons = {case: impossible(samples) for case, samples in by_case(sessions).items()}

    def judged(sample: Sample) -> Sample:
        reason = reasons.get(sample.case) if sample.is_timed else None
        return replace(sample, status=Status.IMPOSSIBLE, reason=reason) if reason else sample

    return [replace(session, samples=tuple(map(judged, session.samples))) for session in sessions]


# -- measuring the peaks ---------------------------------------------------------------------------------------


def measure(device: str, dtypes: Iterable[str]) -> Peaks:
    """Measure what this machine reaches without other load.

    The matrix rate of a dtype is the best call of square products ``M = N = K``, in the layouts ``nn`` and ``nt``; on
    the CPU from 256 up to 4096, as far as about 1.5 s a dtype allow, on CUDA from 2048 up to 8192.  f32 is always
    measured, and a type of 16 bits where there are matrix units.  A product of a narrow type can be computed in a wider
    one, so no peak is below that of a wider type.

    The bandwidth is the best of copying (``b.copy_(a)``, read and written bytes together) and of reading (a dot product
    on the CPU, a sum on CUDA), over arrays of at least four times the caches.  Reading matters because a product reads
    far more than it writes, and a copy on a CPU may fetch its destination first, which is not counted.

    Takes 1.5 to 3 s a dtype on the CPU and less than 1 s on CUDA.

    A call during which a thread waited for its core, because others kept it busy, does not count.  A peak of which
    no call is left after three times the usual time is missing: a peak that is far too low would make every kernel look
    impossibly fast.  So there are no rates on a CPU where the environment caps a library that would be measured:
    generated code may use what the cap keeps from PyTorch's own product.

    Args:
        device: ``cpu`` or ``cuda``.
        dtypes: names of ``problem.dtypes.DTYPES`` or ``tf32``; one that PyTorch cannot multiply on the
            device is left out of the result.
    """
    # A wider type can be split into 16 bits, and a narrower one computed in them: see floor().
    flags = processor.cpu().flags
    fast = ["f16"] if device == "cuda" else ["bf16"] if "amx_tile" in flags else []
    names = [] if device == "cpu" and isa.caps(flags) else dict.fromkeys(["f32", *fast, *dtypes])
    found = {name: _peak_rate(device, name) for name in names}
    rates, bandwidth = {name: rate for name, rate in found.items() if rate}, _bandwidth(device)
    missing = [f"the rate of {name}" for name, rate in rates.items() if not rate.undisturbed]
    missing += ["the bandwidth"] * (not bandwidth.undisturbed)
    return Peaks(
        _levelled({name: rate.value for name, rate in rates.items() if rate.undisturbed}),
        bandwidth.value if bandwidth.undisturbed else 0.0,
        f"{' and '.join(missing)} could not be measured: others kept the cores busy" if missing else "",
    )


def _levelled(rates: Mapping[str, float]) -> dict[str, float]:
    """No rate lower than that of a wider type."""

    def width(name: str) -> float:
        # TF32 is f32 that may be multiplied with fewer bits.
        return TF32.bits - 0.5 if name == TF32.name else DTYPES[name].bits

    return {
        name: max([rate, *(wider for other, wider in rates.items() if width(other) > width(name))])
        for name, rate in rates.items()
    }


# The line of a square product by the name of its input dtype; what is not here is multiplied as itself.
_LINES: Final = {
    "i8": "int_mm:i8-i8-i32:{layout}:{size}",
    "tf32": "mm:f32:{layout}:{size}:math.tf32",
    "f8e4m3fn": "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:{size}:quant.tensorwise:math.fast_accumulate",
    "f8e5m2": "scaled_mm:f8e5m2-f8e4m3fn-bf16:nt:{size}:quant.tensorwise:math.fast_accumulate",
}
_SIZES: Final = {"cpu": (256, 512, 1024, 2048, 4096), "cuda": (2048, 4096, 8192)}
_BUDGET: Final = {"cpu": 1.5, "cuda": 0.5}
_LEAST_CALLS: Final = 3


class _Rate(NamedTuple):
    """The best rate of some calls.

    Attributes:
        undisturbed: of calls beside no other load, which count as the larger.
        value: per second.
        spent: seconds of all calls.
    """

    undisturbed: bool
    value: float
    spent: float = 0.0


def _peak_rate(device: str, name: str) -> _Rate | None:
    """The highest rate of square products in FLOP/s; ``None`` where PyTorch has no fast product of the type."""
    line = _LINES.get(name, f"mm:{name}:{{layout}}:{{size}}")
    # PyTorch multiplies i32 in a plain loop, which compiled code may outrun.
    if name not in _LINES and not (name in OPS["mm"].dtypes and DTYPES[name].is_float):
        return None
    best: _Rate | None = None
    spent = 0.0
    layouts = ["nn", "nt"] if "{layout}" in line else ["nt"]
    for size in _SIZES[device]:
        for layout in list(layouts):
            problem = Problem.parse(line.format(layout=layout, size=f"{size}x{size}x{size}"))
            # The next size is expected to run at the best rate so far; one that would take too long is not begun.
            expected = problem.shape.flops / best.value if best else 0.0
            if spent + _LEAST_CALLS * expected > _BUDGET[device]:
                return best
            try:
                rate = _rate_of_product(problem, device, _BUDGET[device] / 8)
            except RuntimeError:  # PyTorch's way to say that it has no such product here
                layouts.remove(layout)
                continue
            spent += rate.spent
            best = max(best or rate, rate)
    return best


def _rate_of(call: Callable[[], object], amount: float, device: str, budget: float) -> _Rate:
    """``amount`` per second in the fastest of at least three calls, and of more while the budget of seconds lasts.

    The first call is not counted.  The fastest is that of the calls that no other process disturbed, for which three
    times the budget is spent.
    """
    import torch

    def seconds() -> float:
        if device == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            return float(begin.elapsed_time(end)) / 1e3
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    # Where there are more threads than cores they wait for each other.
    is_watched = device == "cpu" and torch.get_num_threads() <= len(processor.cores())

    def once() -> tuple[float, bool]:
        before = processor.waited() if is_watched else None
        spent = seconds()
        after = processor.waited() if is_watched else None
        return spent, before is None or after is None or after - before <= cpu.LOAD_OF_OTHERS * spent

    began = time.perf_counter()
    seconds()
    found = [once() for _ in range(_LEAST_CALLS)]
    while (total := time.perf_counter() - began) < (
        budget if (undisturbed := [s for s, good in found if good]) else 3 * budget
    ):
        found.append(once())
    return _Rate(bool(undisturbed), amount / min(undisturbed or (s for s, _ in found)), total)


def _rate_of_product(problem: Problem, device: str, budget: float) -> _Rate:
    """Time the problem's own program on random operands: the data decides how much power a product draws."""
    import torch

    from pytest_gemm.numerics.precision import settings
    from pytest_gemm.programs import program

    tensors = _operands(problem, device)
    function = program.build(problem)
    with torch.inference_mode(), settings(problem):
        return _rate_of(lambda: function(**tensors), problem.shape.flops, device, budget)


def _operands(problem: Problem, device: str) -> dict[str, torch.Tensor]:
    """A and B, uniform in [-1, 1] or over all integers, and scales of 1; aligned and without gaps."""
    import torch

    from pytest_gemm.operands.dtypes import torch_dtype

    generator = torch.Generator(device).manual_seed(0)
    size = (problem.shape.m, problem.shape.m)

    def draw(dtype: DType) -> torch.Tensor:
        if dtype.is_float:
            return (torch.rand(size, generator=generator, device=device) * 2 - 1).to(torch_dtype(dtype))
        return torch.randint(-128, 128, size, generator=generator, device=device).to(torch_dtype(dtype))

    a, b = draw(problem.dtypes.a), draw(problem.dtypes.b)
    tensors = {"a": a, "b": b.mT if problem.layout.b_transposed else b}
    if problem.op.scales:
        tensors |= {name: torch.ones((), device=device) for name in ("scale_a", "scale_b")}
    return tensors


_FALLBACK_CACHE: Final = 64 << 20
_LEAST_ARRAY: Final = 64 << 20


def cache_bytes(device: str) -> int:
    """Bytes that the caches of a device can hold beside those of single cores; 0 where it is unknown."""
    return cuda.l2_cache_bytes() if device == "cuda" else processor.outer_caches()


def _bandwidth(device: str) -> _Rate:
    """The best bandwidth of copying and of reading, in byte/s."""
    import torch

    count = max(_LEAST_ARRAY, 4 * (cache_bytes(device) or _FALLBACK_CACHE)) // 4
    a = torch.ones(count, device=device)
    b = torch.zeros(count, device=device)
    copied = _rate_of(lambda: b.copy_(a), 8 * count, device, 0.3)
    if device == "cuda":
        return max(copied, _rate_of(a.sum, 4 * count, device, 0.3))
    far = max(copied, _rate_of(lambda: torch.dot(a, b), 8 * count, device, 0.3))
    # Arrays of twice the caches.  Half of them may be kept; where far more is, the system (a virtual machine's) reports
    # caches that are too small, and the rate of the real ones is the only one that no kernel exceeds.
    first, second = a[: count // 4], b[: count // 4]
    near = _rate_of(lambda: torch.dot(first, second), 8 * (count // 4), device, 0.1)
    return near if near.undisturbed and near.value > 2.0 * far.value else far
