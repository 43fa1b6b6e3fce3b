"""Known wrong answers, computed once more: what an entry of the ledger says that its defective kernel computes.

A wrong result imitates a defect if each of its wrong elements is one that the defective program gives.  Most imitations
are the same program on other operands (those that the defective kernel reads), judged like the right one: by the
interval of a correct kernel.  :data:`~pytest_gemm.ledger.computes.COMPUTES` says what each name means.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from pytest_gemm.backends.inductor.bindings import stand_in
from pytest_gemm.judging import verdict
from pytest_gemm.judging.locate import inside
from pytest_gemm.judging.sampled import ResultVerdict, Sample
from pytest_gemm.judging.truth import Truth
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.numerics.interval import Interval
from pytest_gemm.numerics.precision import TF32_BITS, TF32_ERROR
from pytest_gemm.numerics.reference import as_added, as_multiplied, widened
from pytest_gemm.numerics.rounding import round_to, ulp_of
from pytest_gemm.operands import tensors
from pytest_gemm.operands.magnitudes import Grid
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import BLOCK_K
from pytest_gemm.programs.program import args

# Columns of a register block of the C++ templates, and register blocks of a cache block.
_REGISTER_BLOCKS: Final = (16, 32, 48, 64)
_CACHE_BLOCKS: Final = range(2, 65)
# M, N and K of a tile in the name of a Triton template's candidate.
_TILE: Final = re.compile(r"-(\d+)x(\d+)x(\d+)\b")
# Slices into which K is cut.
_SLICES: Final = range(2, 65)


@dataclasses.dataclass(frozen=True)
class Failure:
    """A wrong result.

    Attributes:
        given: the operands that the kernel was given.
        results: all that it returned.
        contract: the arithmetic that it promises.
        place: of the wrong result among them.
        judged: the verdict on it.
        candidates: that computed it, as far as they are known.
    """

    given: tensors.Operands
    results: tuple[Tensor, ...]
    contract: Contract
    place: int
    judged: ResultVerdict
    candidates: tuple[str, ...] = ()

    @property
    def problem(self) -> Problem:
        """What was computed."""
        return self.given.problem

    @functools.cached_property
    def x(self) -> Tensor:
        """The result, or the lines of it that were judged, in float64."""
        assert isinstance(self.judged.actual, Tensor)
        return widened(self.judged.actual)

    @functools.cached_property
    def bad(self) -> Tensor:
        """Which of these elements are wrong."""
        return verdict.rejected(self.x, self.judged.interval)

    def all_bad(self, which: Tensor) -> bool:
        """Whether something holds for each wrong element."""
        return bool(which.expand(self.bad.shape)[self.bad].all())

    def interval_if(self, product: Tensor | None = None, contract: Contract | None = None, **changes: Any) -> Interval:
        """What a right kernel may return for other operands; arguments as of :meth:`as_if`."""
        answers = Truth(self._other(changes), "", product=product).answers(self.results, contract or self.contract)
        return next(itertools.islice(answers, self.place, None))[-1]

    def as_if(self, product: Tensor | None = None, contract: Contract | None = None, **changes: Any) -> bool:
        """Whether the wrong elements are those of a right kernel on other operands.

        Args:
            product: A @ B as the defective kernel computes it, float64; ``None``: that of the operands.
            contract: what the kernel does promise.
            changes: fields of the operands.
        """
        if self.judged.note:
            output, result = self.problem.outputs[self.place], self.results[self.place]
            return Sample(self._other(changes)).judge(output, result, contract or self.contract).comparison.ok
        return not bool(verdict.rejected(self.x, self.interval_if(product, contract, **changes))[self.bad].any())

    def parts(self) -> Iterator[tuple[Failure, Mapping[int, Tensor]]]:
        """The lines that were judged, each as a result of its own, with their places by dimension; or all elements."""
        if not self.judged.note:
            yield self, {}
            return
        output = self.problem.outputs[self.place]
        for lines in Sample(self.given).lines:
            x = lines.of(self.results[self.place])
            given = dataclasses.replace(lines.operands, problem=lines.shape(output))
            interval = lines.interval(output, self.contract)
            judged = dataclasses.replace(self.judged, note="", operands=given, actual=x, interval=interval)
            yield dataclasses.replace(self, given=given, results=(x,), place=0, judged=judged), lines.index

    def _other(self, changes: Mapping[str, Any]) -> tensors.Operands:
        """The operands with changes, of which nothing else is known."""
        return dataclasses.replace(self.given, zero_mean=False, finite=False, **vars(Grid()), **changes)


# Whether a failure is a defect's.
Imitation = Callable[[Failure], bool]


def imitated(failure: Failure, names: Sequence[str]) -> tuple[str, ...]:
    """Of these defects those whose wrong answer this is; () for what is not a result of the right shape and type."""
    if not failure.judged.comparison.is_comparable:
        return ()
    return tuple(name for name in names if IMITATIONS[name](failure))


# -- another operand -------------------------------------------------------------------------------------


def _in_memory(f: Failure) -> Iterator[Tensor]:
    """B as it lies among the operands, and as it lies as a frozen parameter.

    That begins where its storage does, or less than 64 bytes behind, and what it leaves out are random numbers.
    """
    b, stored = f.given.b, args(f.problem, f.given).get("b")
    yield b
    if stored is not None and stored.device.type == "cpu":
        constant = stand_in(stored, 0)
        constant.copy_(stored)
        offset = b.storage_offset() - stored.storage_offset() + constant.storage_offset()
        yield constant.as_strided(b.shape, b.stride(), offset)


def _weight_from_storage_start(f: Failure) -> bool:
    if f.problem.op.name == "mm_plus_mm":  # its second product has the other half of B
        b = f.given.b
        return f.as_if(b=torch.cat([b[: len(b) // 2]] * 2))
    return any(f.as_if(b=b.as_strided(b.shape, b.stride(), 0)) for b in _in_memory(f))


def _weight_before(f: Failure) -> bool:
    if not f.problem.constant_b:
        return False
    given = f.given
    return f.as_if(b=tensors.make(given.problem, given.distribution, given.seed + 1, given.device).b)


def _adjacent(x: Tensor) -> Tensor | None:
    """A tensor whose rows are read as if nothing lay between them; ``None`` where nothing does."""
    strides = torch.empty(x.shape, device="meta").stride()
    return None if x.is_contiguous() or x.numel() == 0 else x.as_strided(x.shape, strides)


def _rows_of_a_adjacent(f: Failure) -> bool:
    a = _adjacent(f.given.a)
    return a is not None and f.as_if(a=_without_nan(a) if f.problem.op.quantises_a else a)


def _last_stride_of_a(f: Failure) -> bool:
    a = f.given.a
    if a.dim() != 2 or a.stride(1) == 1 or a.numel() == 0:
        return False
    return f.as_if(a=a.as_strided(a.shape, (a.stride(0), 1)))


def _without_nan(a: Tensor) -> Tensor:
    """Numbers that a row is quantised as if a NaN stands in it.

    ``std::min`` and ``std::max`` begin anew behind a NaN; with no number behind the last one the scale is 1, and 0 has
    the largest of the 256 codes.  The code of NaN itself is the smallest integer of 32 bits plus the zero point, which
    wraps to a large one where that is negative.
    """
    behind = a.isnan().flip(-1).cumsum(-1).flip(-1) == 0
    some = behind[..., -1:]
    lowest = torch.where(some, torch.where(behind, a, 0.0).amin(-1, keepdim=True), -255.0)
    highest = torch.where(behind, a, 0.0).amax(-1, keepdim=True)
    zero = torch.round(-128.0 - lowest * 255.0 / (highest - lowest))
    clamped = torch.minimum(torch.maximum(a, lowest), highest)
    clamped = torch.where(some, clamped, clamped.round())
    return torch.where(a.isnan(), torch.where(zero < 0.0, highest, lowest), clamped)


def _rows_of_b_adjacent(f: Failure) -> bool:
    if f.problem.layout.b_transposed:
        found = (None if (x := _adjacent(b.mT)) is None else x.mT for b in _in_memory(f))
    else:
        found = (_adjacent(b) for b in _in_memory(f))
    return any(b is not None and f.as_if(b=b) for b in found)


def _columns_of_first_block(f: Failure) -> bool:
    n = f.problem.shape.n
    column = torch.arange(n)
    for wide in _REGISTER_BLOCKS:
        for count in _CACHE_BLOCKS:
            if (count - 1) * wide >= n:
                break
            read = column // (wide * count) * (wide * count) + column % wide
            if not f.judged.note and bool(f.bad[..., read == column].any()):  # such columns are right
                continue
            if f.as_if(b=f.given.b[..., read.clamp(max=n - 1)]):
                return True
    return False


def _strides_swapped(f: Failure) -> bool:
    """TMA reads strides of less than 16 bytes as 0."""
    for name, x in (("a", f.given.a), ("b", f.given.b)):
        storage = x.untyped_storage().nbytes() // x.element_size()
        for strides in ((0, 1), (1, 0), (x.stride(-1), x.stride(-2))):
            extent = x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=False))
            if x.dim() != 2 or x.stride() == strides or extent >= storage:
                continue
            changes: dict[str, Any] = {name: x.as_strided(x.shape, strides)}
            if f.as_if(**changes):
                return True
    return False


def _no_product(f: Failure) -> bool:
    return f.as_if(a=torch.zeros_like(f.given.a), b=torch.zeros_like(f.given.b))


def _no_bias(f: Failure) -> bool:
    if f.given.bias is None:
        return False
    bias, residuals = torch.zeros_like(f.given.bias), f.given.residuals
    if f.as_if(bias=bias):
        return True
    turned = tuple(r.as_strided(r.shape, (1, r.shape[0])) if r.is_contiguous() else r for r in residuals)
    return bool(residuals) and (f.as_if(bias=bias, residuals=turned) or f.as_if(residuals=turned))


def _beta_ignored(f: Failure) -> bool:
    problem = f.problem
    kept = tuple(step for step in problem.epilogue if step.name != "beta")
    return problem.beta != 1.0 and f.as_if(problem=dataclasses.replace(problem, epilogue=kept))


def _unscaled_result(f: Failure) -> bool:
    """Without a scale oneDNN rounds a result of fp8 through bf16, with AVX512-FP16 through f16."""
    scale, factor = f.given.scale_b, f.problem.result_factor(f.given.device)
    if scale is None or factor == 1.0:
        return False
    interval = f.interval_if(scale_b=scale / factor)
    once = inside(f.x, interval.lo, interval.hi)
    return any(f.all_bad(once | _rounded_through(f, half, interval.value)) for half in ("bf16", "f16"))


def _block_scales_by_rows(f: Failure) -> bool:
    """The templates of scaled_mm in torch 2.11 to 2.14, with the candidate's tile.

    That which scales in the main loop multiplies in TF32 what it has scaled.  Torch 2.11 decides by the recipe of A how
    B's scales are read, and then reads beyond them: such elements are unknown.  That which scales in the epilogue reads
    a scale for each row, where one of a square is all there is.
    """
    blocks, given, shape = f.problem.scale_blocks, f.given, f.problem.shape
    tile = next(filter(None, map(_TILE.search, f.candidates)), None)
    if not blocks or tile is None or given.scale_a is None or given.scale_b is None:
        return False
    tall, wide, deep = map(int, tile.groups())
    rounded = dataclasses.replace(f.contract, input_error=TF32_ERROR, input_bits=TF32_BITS)
    read = _read_in_epilogue if any("epilogue_scaling" in name for name in f.candidates) else _read_by_rows
    read_a = functools.partial(read, given.scale_a, (shape.m, tall), deep, shape.k)
    read_b = functools.partial(read, given.scale_b.mT, (shape.n, wide), deep, shape.k)

    def fits(lines: Failure, index: Mapping[int, Tensor], squares: bool) -> bool:
        by_a, by_b = read_a(index.get(-2), squares=blocks[0] > 1), read_b(index.get(-1), squares=squares)
        known = ~(by_a < 0).any(1)[:, None] & ~(by_b < 0).any(1)
        ones = {name: torch.ones_like(lines.given.tensors[name]) for name in ("scale_a", "scale_b")}
        a, b = widened(lines.given.a) * by_a, widened(lines.given.b) * by_b.mT
        wrong = verdict.rejected(lines.x, lines.interval_if(contract=rounded, a=a, b=b, **ones)) & lines.bad
        return not bool((wrong & known).any())

    parts = list(f.parts())
    return any(all(fits(*part, squares) for part in parts) for squares in {blocks[1] > 1, blocks[0] > 1})


def _read_by_rows(
    scales: Tensor, side: tuple[int, int], deep: int, k: int, lines: Tensor | None = None, *, squares: bool
) -> Tensor:
    """The scale that the template reads for each element of A or of B's transpose, float64; -1 for unknown memory.

    Args:
        scales: of A or of B's transpose: a row for each row, or for 128 of them, and a column for 128 of K.
        side: rows, and those of a tile.
        deep: columns of a tile.
        k: columns.
        lines: the rows that are wanted; ``None``: all.
        squares: whether it reads scales of squares; their broadcast is reshaped in the order of memory.
    """
    rows, tile = side
    row, column = (torch.arange(rows) if lines is None else lines)[:, None], torch.arange(k)
    across, wide = -(-deep // BLOCK_K), min(deep, BLOCK_K)
    count, place = rows, (column % deep // wide).expand(len(row), -1)
    if squares:
        count, each = -(-rows // BLOCK_K), min(tile, BLOCK_K) * wide
        within = row % tile * across * wide + column % deep
        row = row // tile * -(-tile // BLOCK_K) + within // (each * across)
        place = within // each % across
    place, per_row = place + column // deep * across, -(-k // BLOCK_K)
    return torch.where((row < count) & (place < per_row), _loaded(scales, row * per_row + place), 1.0)


def _read_in_epilogue(
    scales: Tensor, side: tuple[int, int], _deep: int, _k: int, lines: Tensor | None = None, **_: bool
) -> Tensor:
    """As :func:`_read_by_rows`, where each row has a scale."""
    return _loaded(scales, torch.arange(side[0])[:, None] if lines is None else lines[:, None])


def _loaded(scales: Tensor, index: Tensor) -> Tensor:
    """What a kernel loads at these places behind the first scale, float64; -1 for unknown memory."""
    memory = _from_its_start(scales)
    return widened(memory)[index.clamp(max=len(memory) - 1)].masked_fill(index >= len(memory), -1.0)


def _from_its_start(scales: Tensor) -> Tensor:
    """The memory from the first of these f32 scales to the end of their storage, on the CPU."""
    return scales.as_strided((scales.untyped_storage().nbytes() // 4 - scales.storage_offset(),), (1,)).cpu()


def _block_scales_by_four(f: Failure) -> bool:
    changes: dict[str, Any] = {}
    for name, size in zip(("scale_a", "scale_b"), f.problem.scale_blocks or (), strict=False):
        scale: Tensor = getattr(f.given, name)
        if size != BLOCK_K:
            continue
        lines = scale if name == "scale_a" else scale.mT  # a line of squares has K / 128 of them
        padded = -(-lines.shape[1] // 4) * 4
        flat = _from_its_start(lines)
        at = torch.arange(lines.shape[0])[:, None] * padded + torch.arange(lines.shape[1])
        read = flat[at.clamp(max=len(flat) - 1)]
        changes[name] = read if name == "scale_a" else read.mT
    return bool(changes) and f.as_if(**changes)


# -- other arithmetic ------------------------------------------------------------------------------------


def _slice_of_k(f: Failure) -> bool:
    parts = [(part, *as_multiplied(part.problem, part.given)) for part, _ in f.parts()]
    k = f.problem.shape.k

    def fits(lines: Failure, a: Tensor, b: Tensor, size: int) -> bool:
        a, b, left = widened(a), widened(b), lines.bad.clone()
        for first in range(0, k, size):
            part = a[..., first : first + size] @ b[..., first : first + size, :]
            left &= verdict.rejected(lines.x, lines.interval_if(part))
        return not bool(left.any())

    return any(all(fits(*one, math.ceil(k / count)) for one in parts) for count in _SLICES)


def _pairs_saturate(f: Failure) -> bool:
    if f.problem.dtypes.b.name != "i8" or f.problem.dtypes.a.name not in {"u8", "i8"} or f.given.a.dim() != 2:
        return False
    shift = 128.0 if f.problem.dtypes.a.name == "i8" else 0.0
    a, b = widened(f.given.a) + shift, widened(f.given.b)
    return f.as_if(product=saturated(a, b) - (shift + f.given.zero) * b.sum(-2))


def saturated(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, float64, in pairs of products that saturate at 16 bits."""
    odd = a.shape[1] % 2
    a, b = torch.nn.functional.pad(a, (0, odd)), torch.nn.functional.pad(b, (0, 0, 0, odd))
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for k in range(0, a.shape[1], 2):
        total += (a[:, k : k + 2] @ b[k : k + 2]).clamp_(-(2.0**15), 2.0**15 - 1)
    return total


def _fast_accumulation(f: Failure) -> bool:
    return f.contract.promote_every > 0 and f.as_if(contract=dataclasses.replace(f.contract, promote_every=0))


def _truncated(f: Failure) -> bool:
    if not f.problem.result_dtype.is_float:
        return False
    interval, dtype = f.judged.interval, f.problem.result_dtype
    up, down = interval.lo >= 0.0, interval.hi <= 0.0
    lo = torch.where(up, interval.lo - ulp_of(interval.lo, dtype), interval.lo)
    hi = torch.where(down, interval.hi + ulp_of(interval.hi, dtype), interval.hi)
    return f.all_bad(inside(f.x, lo, hi))


def _rounded_through(f: Failure, half: str, value: Tensor) -> Tensor:
    """Which elements are a sum near its exact value, within f32, that was rounded to a half type and then once more."""
    near = 2.0**-22 * value.abs()
    low, high = (round_to(round_to(v, DTYPES[half]), f.problem.result_dtype) for v in (value - near, value + near))
    return (f.x == low) | (f.x == high)


def _within(f: Failure, relative: float) -> bool:
    """Whether the wrong elements are right to a relative precision, beside the rounding to their type."""
    if not f.problem.result_dtype.is_float:
        return False
    value = f.judged.interval.value
    allowed = relative * value.abs() + ulp_of(value, f.problem.result_dtype)
    return f.all_bad((f.x - value).abs() <= allowed)


# -- what is wrong about the elements --------------------------------------------------------------------


def _nan(f: Failure) -> bool:
    return f.all_bad(f.x.isnan())


def _nan_of_next_row(f: Failure) -> bool:
    a = f.judged.operands.a
    rows = a.detach().cpu().flatten(0, -2)
    bad = ~rows[1:, : -a.shape[-1] % 32].to(torch.float32).isfinite().all(1)
    bad = torch.cat([bad, torch.zeros(1, dtype=torch.bool)])
    return _nan(f) and len(bad) == f.x[..., 0].numel() and f.all_bad(bad.reshape(f.x.shape[:-1])[..., None])


def _nan_of_bias(f: Failure) -> bool:
    bias = as_added(f.problem, f.judged.operands)
    return bias is not None and f.all_bad(f.x.isnan() & ~bias.isfinite())


def _number_for_nan(f: Failure) -> bool:
    return f.all_bad(f.judged.interval.expected.isnan() & ~f.x.isnan())


def _first_block_right(f: Failure) -> bool:
    return not bool(f.bad[..., :4, :16].any())


def _beyond_2_31(f: Failure) -> bool:
    wrong, offset = f.judged.comparison.mismatch, 0
    assert wrong is not None
    for place, size in zip(wrong.index, f.problem.outputs[f.place].judged_shape, strict=True):
        offset = offset * size + place
    return offset >= 1 << 31


def _by_name(*imitations: Callable[[Failure], bool]) -> dict[str, Imitation]:
    """``_no_bias`` is the imitation "no-bias"."""
    return {imitation.__name__[1:].replace("_", "-"): imitation for imitation in imitations}


# In the order of ``COMPUTES``.
IMITATIONS: Final[dict[str, Imitation]] = {
    **_by_name(_weight_from_storage_start, _weight_before, _rows_of_a_adjacent, _last_stride_of_a),
    **_by_name(_rows_of_b_adjacent, _columns_of_first_block, _strides_swapped, _no_product, _no_bias, _beta_ignored),
    **_by_name(_unscaled_result, _block_scales_by_rows, _block_scales_by_four),
    **_by_name(_slice_of_k, _pairs_saturate, _fast_accumulation, _truncated),
    "rounded-through-f16": lambda f: f.all_bad(_rounded_through(f, "f16", f.judged.interval.value)),
    "flushed-to-zero": lambda f: f.all_bad((f.x == 0.0) & (f.judged.interval.expected.abs() < 2.0**-120)),
    "precision-of-f32": lambda f: _within(f, 2.0**-22),
    "precision-of-11-bits": lambda f: _within(f, 2.0**-10.9),
    **_by_name(_nan, _nan_of_next_row, _nan_of_bias, _number_for_nan, _first_block_right, _beyond_2_31),
}
