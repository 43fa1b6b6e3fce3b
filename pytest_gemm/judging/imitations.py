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
from pytest_gemm.judging.recompute import toward_zero
from pytest_gemm.judging.sampled import ResultVerdict, Sample
from pytest_gemm.judging.truth import Truth
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.numerics.interval import Interval, passed
from pytest_gemm.numerics.precision import TF32_BITS, TF32_ERROR
from pytest_gemm.numerics.product import Bounding, product_of
from pytest_gemm.numerics.reference import as_added, as_multiplied, reference, widened
from pytest_gemm.numerics.rounding import round_to, ulp_of
from pytest_gemm.operands import tensors
from pytest_gemm.operands.magnitudes import Grid
from pytest_gemm.problem.dtypes import DTYPES, DType
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import BLOCK_K
from pytest_gemm.programs.program import args

# Columns of a register block of the C++ templates, and register blocks of a cache block.
_REGISTER_BLOCKS: Final = (16, 32, 48, 64)
_CACHE_BLOCKS: Final = range(2, 65)
# M, N and K of a tile in the name of a Triton template's candidate.
_TILE: Final = re.compile(r"-(\d+)x(\d+)x(\d+)\b")
# Register blocks of K of a cache block in the name of a candidate of the C++ templates that was asked for it.
_BLOCKS_OF_K: Final = re.compile(r",cache=\d+\.\d+\.(\d+)")
# K of a step of cuBLAS's kernels.
_STEPS_OF_K: Final = (32, 64, 128)
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

    @property
    def tile(self) -> tuple[int, int, int]:
        """M, N and K of the register block or tile of the candidate, (1, 1, 1) where its name has none."""
        m, n, k = next(((*map(int, tile.groups()),) for tile in map(_TILE.search, self.candidates) if tile), (1, 1, 1))
        return m, n, k

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

    def answer_if(
        self, product: Tensor | None = None, contract: Contract | None = None, **changes: Any
    ) -> tuple[Problem, tensors.Operands, Interval]:
        """As :meth:`interval_if`, with the problem that it answers and its operands."""
        truth = Truth(self.with_operands(**changes), "", product=product)
        return next(itertools.islice(truth.answers(self.results, contract or self.contract), self.place, None))

    def interval_if(self, product: Tensor | None = None, contract: Contract | None = None, **changes: Any) -> Interval:
        """What a right kernel may return for other operands; arguments as of :meth:`as_if`."""
        return self.answer_if(product, contract, **changes)[-1]

    def as_if(self, product: Tensor | None = None, contract: Contract | None = None, **changes: Any) -> bool:
        """Whether the wrong elements are those of a right kernel on other operands.

        Args:
            product: A @ B as the defective kernel computes it, float64; ``None``: that of the operands.
            contract: what the kernel does promise.
            changes: fields of the operands.
        """
        if self.judged.note:
            output, result = self.problem.outputs[self.place], self.results[self.place]
            return Sample(self.with_operands(**changes)).judge(output, result, contract or self.contract).comparison.ok
        return not bool(verdict.rejected(self.x, self.interval_if(product, contract, **changes))[self.bad].any())

    def on(self, **changes: Any) -> Failure:
        """The same result, judged by other operands."""
        given = self.with_operands(**changes)
        judged = dataclasses.replace(self.judged, operands=given, interval=self.interval_if(**changes))
        return dataclasses.replace(self, given=given, judged=judged)

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

    def with_operands(self, **changes: Any) -> tensors.Operands:
        """The operands with changes, of which nothing else is known."""
        return dataclasses.replace(self.given, zero_mean=False, finite=False, **vars(Grid()), **changes)


# Whether a failure is a defect's.
Imitation = Callable[[Failure], bool]
# Changes of the operands, each of which makes those that a defective kernel may have read.
Changes = Callable[[Failure], Iterator[dict[str, Any]]]


def imitated(failure: Failure, names: Sequence[str]) -> tuple[str, ...]:
    """Of these defects those whose wrong answer this is; () for what is not a result of the right shape and type.

    Each alone; or else several at once, of which all but one change the operands.
    """
    if not failure.judged.comparison.is_comparable:
        return ()
    alone = tuple(name for name in names if IMITATIONS[name](failure))
    if alone or failure.judged.note:
        return alone
    for name in names if len(names) > 1 else ():
        others = tuple(other for other in names if other != name)
        for changes in _CHANGES[name](failure) if name in _CHANGES else ():
            if rest := imitated(failure.on(**changes), others):
                return (name, *rest)
    return ()


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


def _weight_from_storage_start(f: Failure) -> Iterator[dict[str, Any]]:
    for b in _in_memory(f):
        first = b.as_strided(b.shape, b.stride(), 0)
        if f.problem.op.name == "mm_plus_mm":  # its products have a half of B each
            first = torch.cat([first[: len(b) // 2]] * 2)
        yield {"b": first}


def _weight_before(f: Failure) -> Iterator[dict[str, Any]]:
    given = f.given
    if f.problem.constant_b:
        yield {"b": tensors.make(given.problem, given.distribution, given.seed + 1, given.device).b}


def _adjacent(x: Tensor) -> Tensor | None:
    """A tensor whose rows are read as if nothing lay between them; ``None`` where nothing does."""
    strides = torch.empty(x.shape, device="meta").stride()
    return None if x.is_contiguous() or x.numel() == 0 else x.as_strided(x.shape, strides)


def _rows_of_a_adjacent(f: Failure) -> Iterator[dict[str, Any]]:
    a = _adjacent(f.given.a)
    if a is not None and f.problem.op.quantises_a and not f.judged.note:
        # A tie of the zero point goes either way, in each row.
        read = [_without_nan(a, aside) for aside in (-1e-3, 1e-3)]
        wrong = [verdict.rejected(f.x, f.interval_if(a=one)).sum(-1, keepdim=True) for one in read]
        yield {"a": torch.where(wrong[0] <= wrong[1], *read)}
    elif a is not None:
        yield {"a": a}


def _last_stride_of_a(f: Failure) -> Iterator[dict[str, Any]]:
    """Each cache block of K is found by the right stride, and read with a stride of 1.

    What a conversion to a half type writes for the kernel is A without gaps between its columns.
    """
    a, k = f.given.a, f.problem.shape.k
    if a.dim() != 2 or a.stride(1) == 1 or a.numel() == 0:
        return
    memory = a.mT.contiguous().mT if f.problem.autocast else a
    flat = memory.as_strided((memory.untyped_storage().nbytes() // a.element_size(),), (1,), 0)
    row, column = torch.arange(len(a))[:, None] * memory.stride(0) + memory.storage_offset(), torch.arange(k)
    count, wide = next(filter(None, map(_BLOCKS_OF_K.search, f.candidates)), None), f.tile[2]
    # Without a request Inductor makes one block, or fits it to the L1 cache.
    for block in (int(count[1]) * wide,) if count else (k, *range((k - 1) // wide * wide, 0, -wide)):
        read = row + column // block * block * memory.stride(1) + column % block
        if int(read.max()) < len(flat):
            yield {"a": flat[read]}


def _without_nan(a: Tensor, aside: float = 0.0) -> Tensor:
    """Numbers that a row is quantised as if a NaN stands in it.

    In f32 ``std::min`` and ``std::max`` begin anew behind a NaN, in bf16 the kernel passes it over.  With no number but
    zero the scale is 1, and 0 has the largest of the 256 codes.  The code of NaN, and of what is too large for an
    integer, is the smallest integer of 32 bits plus the zero point, which wraps to a large one where that is negative.
    ``aside`` is added to the zero point before it is rounded.
    """
    behind = ~a.isnan() if a.dtype == torch.bfloat16 else a.isnan().flip(-1).cumsum(-1).flip(-1) == 0
    a = a.float()
    lowest, highest = torch.where(behind, a, 0.0).aminmax(dim=-1, keepdim=True)
    lowest, highest = lowest.clamp(max=0.0), highest.clamp(min=0.0)
    lowest = torch.where(lowest == highest, -255.0, lowest)
    scale = 255.0 / (highest - lowest)
    zero = torch.round(-128.0 - lowest * scale + aside)
    lost = a.isnan() | ((a * scale).abs() >= 2.0**31)
    clamped = torch.minimum(torch.maximum(a, lowest), highest)
    return torch.where(lost, torch.where(zero < 0.0, highest, lowest), clamped)


def _rows_of_b_adjacent(f: Failure) -> Iterator[dict[str, Any]]:
    for b in _in_memory(f):
        turned = f.problem.layout.b_transposed
        if (adjacent := _adjacent(b.mT if turned else b)) is not None:
            yield {"b": adjacent.mT if turned else adjacent}


def _columns_of_first_block(f: Failure) -> Iterator[dict[str, Any]]:
    n = f.problem.shape.n
    column = torch.arange(n)
    for wide in _REGISTER_BLOCKS:
        for count in _CACHE_BLOCKS:
            if (count - 1) * wide >= n:
                break
            read = column // (wide * count) * (wide * count) + column % wide
            if f.judged.note or not bool(f.bad[..., read == column].any()):  # such columns are right
                yield {"b": f.given.b[..., read.clamp(max=n - 1)]}


def _strides_swapped(f: Failure) -> Iterator[dict[str, Any]]:
    """TMA reads strides of less than 16 bytes as 0."""
    for name, x in (("a", f.given.a), ("b", f.given.b)):
        storage = x.untyped_storage().nbytes() // x.element_size()
        for strides in ((0, 1), (1, 0), (x.stride(-1), x.stride(-2))):
            extent = x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=False))
            if x.dim() == 2 and x.stride() != strides and extent < storage:
                yield {name: x.as_strided(x.shape, strides)}


def _no_product(f: Failure) -> Iterator[dict[str, Any]]:
    yield {"a": torch.zeros_like(f.given.a), "b": torch.zeros_like(f.given.b)}


def _no_bias(f: Failure) -> Iterator[dict[str, Any]]:
    if f.given.bias is None:
        return
    bias, residuals = torch.zeros_like(f.given.bias), f.given.residuals
    yield {"bias": bias}
    if residuals:
        turned = tuple(r.as_strided(r.shape, (1, r.shape[0])) if r.is_contiguous() else r for r in residuals)
        yield {"bias": bias, "residuals": turned}
        yield {"residuals": turned}


def _whole_steps_of_k(f: Failure) -> Iterator[dict[str, Any]]:
    groups = f.given.groups if f.problem.op.ragged == "k" else [(0, f.given.a.shape[-1])]
    for step in _STEPS_OF_K:
        a = f.given.a.clone()
        for first, last in groups:
            a[..., last - (last - first) % step : last] = 0
        yield {"a": a}


def _beta_ignored(f: Failure) -> Iterator[dict[str, Any]]:
    problem = f.problem
    if problem.beta != 1.0:
        kept = tuple(step for step in problem.epilogue if step.name != "beta")
        yield {"problem": dataclasses.replace(problem, epilogue=kept)}


def _unscaled_result(f: Failure) -> bool:
    """Without a scale oneDNN rounds a result of fp8 through bf16, with AVX512-FP16 through f16."""
    scale, factor = f.given.scale_b, f.problem.result_factor(f.given.device)
    if scale is None or factor == 1.0:
        return False
    unscaled = dataclasses.replace(f, given=f.with_operands(scale_b=scale / factor))
    return unscaled.as_if() or _rounded_through("bf16", unscaled) or _rounded_through("f16", unscaled)


def _block_scales_by_rows(f: Failure) -> bool:
    """The templates of scaled_mm in torch 2.11 to 2.14, with the candidate's tile.

    That which scales in the main loop multiplies in TF32 what it has scaled.  Torch 2.11 decides by the recipe of A how
    B's scales are read, and then reads beyond them: such elements are unknown.  That which scales in the epilogue reads
    a scale for each row, where one of a square is all there is.
    """
    blocks, given, shape = f.problem.scale_blocks, f.given, f.problem.shape
    tall, wide, deep = f.tile
    if not blocks or given.scale_a is None or given.scale_b is None:
        return False
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


def _block_scales_by_four(f: Failure) -> Iterator[dict[str, Any]]:
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
    if changes:
        yield changes


def _rows_of_out_adjacent(f: Failure) -> bool:
    if f.given.out is None or f.judged.note:
        return False
    given = torch.empty_strided(f.x.shape, f.given.out.stride(), dtype=torch.float64).copy_(f.x)
    read = given.as_strided(f.x.shape, torch.empty(f.x.shape, device="meta").stride())
    as_written = dataclasses.replace(f, judged=dataclasses.replace(f.judged, actual=read))
    return not bool(as_written.bad.any()) or _rounded_through("f16", as_written)  # as any result of fp8 may be


# -- other arithmetic ------------------------------------------------------------------------------------


def _slice_of_k(f: Failure) -> bool:
    parts = [(part, *as_multiplied(part.problem, part.given)) for part, _ in f.parts()]
    k, deep = f.problem.shape.k, f.tile[2]  # a slice is of whole register blocks

    def fits(lines: Failure, a: Tensor, b: Tensor, size: int) -> bool:
        a, b, left = widened(a), widened(b), lines.bad.clone()
        for first in range(0, k, size):
            part = a[..., first : first + size] @ b[..., first : first + size, :]
            left &= verdict.rejected(lines.x, lines.interval_if(part))
        return not bool(left.any())

    sizes = dict.fromkeys(math.ceil(math.ceil(k / deep) / count) * deep for count in _SLICES)
    return any(all(fits(*one, size) for one in parts) for size in sizes)


def _pairs_saturate(f: Failure) -> bool:
    if f.problem.dtypes.b.name != "i8" or f.problem.dtypes.a.name not in {"u8", "i8"}:
        return False
    shift = 128.0 if f.problem.dtypes.a.name == "i8" else 0.0
    a, b = widened(f.given.a) + shift, widened(f.given.b)
    return f.as_if(product=saturated(a, b) - (shift + f.given.zero) * b.sum(-2))


def saturated(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, float64, in pairs of products that saturate at 16 bits."""
    odd = a.shape[-1] % 2
    a, b = torch.nn.functional.pad(a, (0, odd)), torch.nn.functional.pad(b, (0, 0, 0, odd))
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=torch.float64)
    for k in range(0, a.shape[-1], 2):
        total += (a[..., k : k + 2] @ b[..., k : k + 2, :]).clamp_(-(2.0**15), 2.0**15 - 1)
    return total


def _fast_accumulation(f: Failure) -> bool:
    return f.contract.promote_every > 0 and f.as_if(contract=dataclasses.replace(f.contract, promote_every=0))


def _stored(store: Callable[[Tensor, DType], Tensor], f: Failure) -> bool:
    """Whether each wrong element follows from a product that ``store`` has rounded; what passes make of it is right."""

    def fits(lines: Failure) -> bool:
        problem, given, _ = lines.answer_if()
        bounding = Bounding(problem, given, reference(problem, given), lines.contract)
        unrounded = dataclasses.replace(lines.contract, epilogue="fused")
        product = product_of(dataclasses.replace(bounding, contract=unrounded))
        span = product.span.map(lambda x: store(x, problem.dtypes.out))
        return not bool((verdict.rejected(lines.x, passed(bounding, product._replace(span=span))) & lines.bad).any())

    return f.problem.dtypes.out.is_float and all(fits(lines) for lines, _ in f.parts())


def _rounded_through(half: str, f: Failure) -> bool:
    return _stored(lambda x, dtype: round_to(round_to(x, DTYPES[half]), dtype), f)


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


def _nan_in_rows(f: Failure, which: Tensor) -> bool:
    """Whether each wrong element is NaN, and of one of these rows of A: bool, of A's shape without K."""
    reduction = f.problem.reduction
    rows = which.any(-1, keepdim=True) if reduction is not None and reduction.dim == -2 else which
    return _nan(f) and f.all_bad(rows[..., None])


def _nan_of_next_row(f: Failure) -> bool:
    a = f.judged.operands.a
    rows = a.detach().cpu().flatten(0, -2).to(torch.float32)
    after, part = torch.cat([rows[1:], torch.zeros_like(rows[:1])]), rows.shape[1] // f.problem.op.summands
    bad = torch.zeros(len(rows), dtype=torch.bool)
    for end in range(part, rows.shape[1] + 1, part):  # of each product; behind the first lies the second
        bad |= ~torch.cat([rows[:, end:], after], 1)[:, : -part % 32].isfinite().all(1)
    return _nan_in_rows(f, bad.reshape(a.shape[:-1]))


def _nan_of_last_infinity(f: Failure) -> bool:
    a, part = as_multiplied(f.problem, f.judged.operands)[0], f.problem.terms // f.problem.op.summands
    return _nan_in_rows(f, a.detach().cpu()[..., part - 1 :: part].isinf().any(-1))


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


def _by_name(*functions: Callable[[Failure], Any]) -> dict[str, Callable[[Failure], Any]]:
    """``_no_bias`` is the imitation "no-bias"."""
    return {function.__name__[1:].replace("_", "-"): function for function in functions}


def _on(changes: Changes) -> Imitation:
    """Whether the wrong elements are those of a right kernel on operands with one of these changes."""
    return lambda f: any(f.as_if(**change) for change in changes(f))


_CHANGES: Final[dict[str, Changes]] = {
    **_by_name(_weight_from_storage_start, _weight_before, _rows_of_a_adjacent, _last_stride_of_a),
    **_by_name(_rows_of_b_adjacent, _columns_of_first_block, _strides_swapped, _no_product, _no_bias),
    **_by_name(_whole_steps_of_k, _beta_ignored),
}
_OTHERS: Final[dict[str, Imitation]] = {
    **_by_name(_unscaled_result, _block_scales_by_rows),
    "block-scales-by-four": _on(_block_scales_by_four),
    **_by_name(_rows_of_out_adjacent),
    **_by_name(_slice_of_k, _pairs_saturate, _fast_accumulation),
    "truncated": functools.partial(_stored, toward_zero),
    "rounded-through-f16": functools.partial(_rounded_through, "f16"),
    "flushed-to-zero": lambda f: f.all_bad((f.x == 0.0) & (f.judged.interval.expected.abs() < 2.0**-120)),
    "precision-of-f32": lambda f: _within(f, 2.0**-22),
    "precision-of-11-bits": lambda f: _within(f, 2.0**-10.9),
    **_by_name(_nan, _nan_of_next_row, _nan_of_last_infinity, _nan_of_bias, _number_for_nan),
    **_by_name(_first_block_right, _beyond_2_31),
}
IMITATIONS: Final[dict[str, Imitation]] = {**{name: _on(changes) for name, changes in _CHANGES.items()}, **_OTHERS}
