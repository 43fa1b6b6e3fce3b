"""The operands of a problem: where their values lie, and what surrounds them.

``make(problem, distribution, seed)`` gives every tensor that the problem's program takes.  Three promises:

* **Reproducible.**  The same call gives the same bytes on every machine (``draws``).  The key of an
  operand is the problem (without ``m.dynamic``), the distribution, the seed and the operand's name; for whatever does
  not have M rows (B, its scales, a bias of N) it leaves M out: with ``m.dynamic`` one compiled constant serves every M.
* **Fenced.**  Every tensor is a window into a larger, poisoned storage (``memory``), and
  :meth:`Operands.changed` proves that nothing was written.
* **Telling.**  The values are those of a distribution (``distributions``): exact ones, of which a correct kernel
  has one possible sum (:attr:`Operands.quantum` > 0), or random ones.

Cost: three to five times the operand's size in transient memory, and about 10 ns per element up to 2^22 elements; what
is larger costs a copy.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from pytest_gemm.operands import views
from pytest_gemm.operands.addends import TABLE_ROWS, bias_of, residuals_of
from pytest_gemm.operands.distributions import DISTRIBUTIONS, distributions_for
from pytest_gemm.operands.dtypes import torch_dtype
from pytest_gemm.operands.magnitudes import Draw, Drawn, Headroom, headroom_of, powers_of_two, scaled_lines
from pytest_gemm.operands.memory import Guarded, guarded, moved_to
from pytest_gemm.operands.random_streams import Array, Lines, Stream, all_lines, is_finite
from pytest_gemm.outcome import Unsupported
from pytest_gemm.problem.dtypes import DTYPES, DType
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.rules import FLAGS
from pytest_gemm.text import did_you_mean

# Elements between two rows of a padded matrix: 8 keeps 16-byte alignment of a row for 2-byte types.  fp8 takes 16, as
# no kernel multiplies it unaligned.
_PAD: Final = 8
_PAD_FP8: Final = 16


@dataclasses.dataclass(eq=False)
class Operands:
    """All tensors that a problem takes, as views into poisoned storage.

    Attributes:
        problem, distribution, seed, device: what was asked for.
        a: ([B,] M, K), strided as the layout and the flags say; (B * M, K) for ``grouped_mm``, (M, K) for ``linears``.
        b: ([B,] K, N); (K, N) for ``linear`` and quantised weights; ``a.mT`` for ``self``, ``a`` for ``square``.
            ``woq_int4``: codes of 0 to 15, each in a byte.
        bias: of :attr:`Problem.bias_shape` in the product's dtype (f32 under autocast), contiguous, or ``None``.
        residuals: one of the result's shape for each binary step, in the dtype of the value at that step and in the
            product's places (``moves``); a row or column is expanded; with ``r0.alias`` the first is ``a``.
        lookups: of a residual that is looked up, by its number: the table, and int64 indices of the result's rows.
        scale_b: (N,) scales of B's columns in the product's dtype for ``woq_int8``, in f32 for ``qlinear``, in f32 or
            bf16 for ``da8w8``; for ``scaled_mm`` in f32, (1, N) or a scalar; or ``None``.
        scale_a: the scales of A: in f32, (M, 1) or a scalar for ``scaled_mm``; ([B,] M, 1) or a scalar in the dtype of
            ``scale_b`` for ``da8w8``; a scalar for ``qlinear`` with ``dynamic``; or ``None``.
        zero_a: A's zero point as a tensor, int32, a scalar, for ``qlinear`` with ``dynamic``; or ``None``.
        zero_b: B's zero points, int32, (N,), all of them 0, for ``qlinear``; or ``None``.
        affine: scale and zero of each group of K and each column for ``woq_int4``, (K / group, N, 2) in A's dtype:
            an element of B is ``(code - 8) * scale + zero``; or ``None``.
        zero: what is subtracted of each element of A before it is multiplied: its zero point.
        offs: where the groups of ``grouped_mm`` end, int32, (B,), see :func:`group_ends`; or ``None``.
        quantum: > 0: every product ``a * b`` (times its scale) and every bias element is an integer multiple
            of it, so sums are exact in an accumulator of p bits if ``sum |a||b| + |bias| <= 2^p * quantum``, which
            holds for p = 24 (53 for f64, 31 for integers).  0.0: no grid.
        base_quantum: the same for the products before any scale; it is the quantum where there are no scales.
        units: powers of two that the elements of A and those of B are multiples of; 0.0 where there is no grid.
        magnitude_bound: what no sum of magnitudes ``sum |a||b|`` (times its scale) exceeds, in quanta;
            infinite without a grid.
        zero_mean: the products are independent with zero mean: a statistical bound may be used.
        finite: no NaN and no infinity in any of the tensors.
        buffers: the storages of all tensors, for digests and poison checks.
    """

    problem: Problem
    distribution: str
    seed: int
    device: str
    a: Tensor
    b: Tensor
    bias: Tensor | None
    residuals: tuple[Tensor, ...]
    scale_b: Tensor | None
    quantum: float
    zero_mean: bool
    finite: bool
    buffers: tuple[Guarded, ...] = dataclasses.field(repr=False)
    scale_a: Tensor | None = None
    offs: Tensor | None = None
    lookups: Mapping[int, tuple[Tensor, Tensor]] = dataclasses.field(default_factory=dict)
    base_quantum: float = 0.0
    units: tuple[float, float] = (0.0, 0.0)
    magnitude_bound: float = math.inf
    zero_a: Tensor | None = None
    zero_b: Tensor | None = None
    affine: Tensor | None = None
    zero: int = 0

    def clone(self) -> Operands:
        """The same operands in fresh memory: values, strides, alignment and poison; about the time of a copy."""
        moved = {g.storage.untyped_storage().data_ptr(): g.clone() for g in self.buffers}

        def move(x: Tensor) -> Tensor:
            return moved_to(x, moved[x.untyped_storage().data_ptr()].storage)

        def move_any(x: Tensor | None) -> Tensor | None:
            return None if x is None else move(x)

        def move_residual(index: int, x: Tensor) -> Tensor:
            return x if index in self.lookups else move(x)  # no other tensor shares its storage

        return dataclasses.replace(
            self,
            a=move(self.a),
            b=move(self.b),
            bias=move_any(self.bias),
            residuals=tuple(move_residual(*pair) for pair in enumerate(self.residuals)),
            lookups={i: (move(table), move(rows)) for i, (table, rows) in self.lookups.items()},
            scale_b=move_any(self.scale_b),
            scale_a=move_any(self.scale_a),
            offs=move_any(self.offs),
            zero_a=move_any(self.zero_a),
            zero_b=move_any(self.zero_b),
            affine=move_any(self.affine),
            buffers=tuple(moved.values()),
        )

    @property
    def scale(self) -> Tensor | None:
        """What multiplies an element of the product: B's scales, or A's times B's; float64, CPU, broadcastable."""
        if self.scale_b is None:
            return None
        found = self.scale_b.detach().to(device="cpu", dtype=torch.float64)
        if static := self.problem.step("static"):
            return found * float(np.float32(static.numbers[0]))  # the op keeps it in f32
        return found if self.scale_a is None else self.scale_a.detach().cpu().to(torch.float64) * found

    @property
    def weight(self) -> Tensor:
        """B as the product multiplies it, where it is stored as codes: float64, CPU, (K, N), exact."""
        assert self.affine is not None
        codes = self.b.detach().cpu().to(torch.float64)
        each = self.affine.detach().cpu().to(torch.float64).repeat_interleave(self.problem.group_size, 0)
        return (codes - 8.0) * each[..., 0] + each[..., 1]

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """Rows [first, last) of A for each B of a grouped product; () for any other."""
        if self.offs is None:
            return ()
        ends = self.offs.tolist()
        return tuple(zip([0, *ends[:-1]], ends, strict=True))

    def digest(self) -> str:
        """Hashes of every byte of every storage, viewed or not, as ``a=... b=...``.  About 2 ms for 1 MB."""
        return " ".join(f"{g.name}={g.digest()}" for g in self.buffers)

    def changed(self, before: str) -> tuple[str, ...]:
        """Names of the operands whose storage is not what it was when ``before = digest()``; () for none."""
        old = dict(part.split("=") for part in before.split())
        return tuple(g.name for g in self.buffers if old.get(g.name) != g.digest())

    def guards_intact(self) -> bool:
        """Whether all poison around the operands is in place."""
        return all(g.guards_intact() for g in self.buffers)


def _keys(problem: Problem, distribution: str, seed: int) -> Draw:
    """Streams by operand name.

    ``m.dynamic`` changes no value.  What does not have M rows leaves M out of its key, so that a constant is the same
    for every M.
    """
    epilogue = "+".join(map(str, problem.epilogue))
    flags = "+".join(FLAGS[flag].stream for flag in problem.flags if flag != "m.dynamic")
    rest = f":{epilogue}:{flags}" if flags else f":{epilogue}" if epilogue else ""
    front, shape = f"{problem.op.name}:{problem.dtypes}:{problem.layout}", problem.shape
    batch = "" if shape.batch is None else f"{shape.batch}x"
    line, any_m = (f"{front}:{batch}{m}x{shape.n}x{shape.k}{rest}" for m in (shape.m, "M"))

    def draw(name: str) -> Stream:
        constant = name in {
            "b",
            "b-heavy",
            "b-specials",
            "b-zeros",
            "scale",
            "scale-both",
            "bias",
            "affine",
            "affine-zero",
        }
        return Stream(any_m if constant else line, distribution, str(seed), name)

    return draw


def make(problem: Problem, distribution: str, seed: int, device: str = "cpu") -> Operands:
    """The operands of ``problem``.

    Args:
        problem: what is to be computed.
        distribution: a key of :data:`DISTRIBUTIONS`.
        seed: any integer; another seed gives other values (``k-cover`` and ``tile-map`` have one product only).
        device: where the tensors lie; values are drawn on the CPU.

    Raises:
        Unsupported: when operands of the op cannot be built yet, or the distribution does not apply to the problem.
        ValueError: for an unknown distribution.
    """
    if distribution not in DISTRIBUTIONS:
        hint = did_you_mean(distribution, DISTRIBUTIONS)
        raise ValueError(f"unknown distribution {distribution!r}{hint}; known: {', '.join(DISTRIBUTIONS)}")
    headroom = headroom_of(problem)
    chosen = DISTRIBUTIONS[distribution]
    if not chosen.applies(problem):
        remedy = f"one of {' '.join(distributions_for(problem))}"
        raise Unsupported("distribution", f"{distribution} does not apply to {problem}", remedy)
    draw = _keys(problem, distribution, seed)
    # Roundings to a narrow dtype, overflows to Inf included, are meant; torch does them silently.
    drawn = chosen._build(headroom, draw)
    _face_relu(headroom, drawn)
    affine = None
    if headroom.int8:
        _scale_int8(headroom, drawn, draw, distribution)
    elif headroom.b.name == "i4":
        affine = _affine(headroom, drawn, draw, distribution)
    exact = drawn.quantum > 0

    transposed = problem.layout.a_transposed
    lines = all_lines(drawn.a, headroom.a_shape, transposed)
    several = problem.op.several
    stored_a = _matrix(
        "a",
        lines,
        problem.dtypes.a,
        device,
        problem.has("a.padded"),
        problem.has("a.offset"),
        middle=problem.has("a.batch_middle"),
    )
    batch = None if problem.grouped or several else problem.shape.batch
    a = _logical(stored_a, transposed, batch, problem.has("a.broadcast"))
    buffers = [stored_a]
    if drawn.b is None:
        b = a if problem.has("b.alias") else a.mT
    else:
        transposed = problem.layout.b_transposed
        lines = all_lines(drawn.b, headroom.b_shape, not transposed)
        stored_b = _matrix(
            "b", lines, problem.dtypes.b, device, problem.has("b.padded"), problem.has("b.offset"),
            apart=several, middle=problem.has("b.batch_middle"),
        )  # fmt: skip
        batch = None if problem.op.weight else problem.shape.batch
        b = _logical(stored_b, transposed, batch, problem.has("b.broadcast"))
        buffers.append(stored_b)

    def keep(name: str, values: Array | Lines, dtype: DType, apart: bool = False) -> Tensor:
        buffers.append(guarded(name, values, values.shape, torch_dtype(dtype), device, apart=apart))
        return buffers[-1].view

    offs = keep("offs", group_ends(problem, draw("offs")), DTYPES["i32"]) if problem.grouped else None
    found = _keep_scales(headroom, drawn, affine, keep)
    bias_values = bias_of(headroom, drawn, draw, exact, distribution == "specials")
    if bias_values is not None and several:
        for index in range(len(bias_values)):
            if not problem.is_one_of("bias", index):
                bias_values[index] = -0.0  # the neutral element: a product without a bias keeps the sign of its zeros
    bias = None if bias_values is None else keep("bias", bias_values, problem.bias_dtype, several)
    lookups: dict[int, tuple[Tensor, Tensor]] = {}
    residuals = tuple(
        a if index == 0 and problem.has("r0.alias") else _kept_residual(problem, index, *drawn_one, draw, keep, lookups)
        for index, drawn_one in enumerate(residuals_of(headroom, drawn, draw, exact))
    )
    finite = all(g.drawn_finite if g.drawn_finite is not None else is_finite(g.view) for g in buffers)
    return Operands(
        problem, distribution, seed, device, a, b, bias, residuals, found.get("scale_b"),
        drawn.quantum, chosen.zero_mean and not headroom.b_is_a and not exact, finite, tuple(buffers),
        found.get("scale_a"), offs, lookups, drawn.base_quantum or drawn.quantum, drawn.units, drawn.magnitude_bound,
        found.get("zero_a"), found.get("zero_b"), found.get("affine"), headroom.zero,
    )  # fmt: skip


def _keep_scales(
    headroom: Headroom, drawn: Drawn, affine: Array | None, keep: Callable[[str, Array, DType], Tensor]
) -> dict[str, Tensor]:
    """The scales and zero points that the op takes, as tensors, by the names that :class:`Operands` has for them."""
    problem = headroom.problem
    if affine is not None:
        return {"affine": keep("affine", affine, problem.dtypes.a)}
    if drawn.scale is None:
        return {}
    dtype = DTYPES[problem.op.scale_dtype(problem.dtypes.out.name)]
    found = {} if drawn.scale_a is None else {"scale_a": keep("scale_a", drawn.scale_a, dtype)}
    named = "scale_b" if headroom.int8 or headroom.quantised else "scale"
    found["scale_b"] = keep(named, drawn.scale, dtype)
    if problem.op.zero_points:
        found["zero_b"] = keep("zero_b", np.zeros(headroom.b_shape[1], dtype=np.int32), DTYPES["i32"])
        if "scale_a" in found:
            found["zero_a"] = keep("zero_a", np.asarray(headroom.zero, dtype=np.int32), DTYPES["i32"])
    return found


# Distributions whose integers must come through as they are.
_NEUTRAL: Final = frozenset({"k-cover", "tile-map"})
# Distributions whose A is what the product multiplies, so that the zero point is added to what is stored; in the others
# the stored integers take their whole range.
_BEFORE_ZERO: Final = _NEUTRAL | {"int-1", "one-hot"}


def _scale_int8(headroom: Headroom, drawn: Drawn, draw: Draw, distribution: str) -> None:
    """Scales of A and B that bring an integer product to where its steps and its result tell values apart.

    8 or 40 steps of an 8-bit result, elsewhere the middle of an activation, or 4.  Powers of two where the distribution
    is exact, full significands elsewhere.  A's zero point is added to what is stored.
    """
    problem, exact = headroom.problem, drawn.quantum > 0 and distribution not in {"rand", "rand-positive"}
    requant, static = problem.step("requant"), problem.step("static")
    assert drawn.scale is not None
    if headroom.zero and distribution in _BEFORE_ZERO:
        drawn.a = drawn.a + headroom.zero

    def scales(name: str, shape: tuple[int, ...]) -> Array:
        stream = draw(name)
        return powers_of_two(stream, shape) if exact else np.abs(stream.binade(shape, False))

    if problem.step("rowwise") is not None:
        rows = headroom.a_shape[:2] if problem.shape.batch is not None else headroom.a_shape[1:2]
        drawn.scale_a = scales("scale-a", (*rows, 1))
    elif static is None:
        drawn.scale_a = scales("scale-both", (1,)).reshape(())
    size = static.numbers[0] if static else 0.5
    if distribution in _NEUTRAL:
        unit = 2.0 ** -round(math.log2(size))
        if drawn.scale_a is not None:
            drawn.scale_a, unit = np.full_like(drawn.scale_a, 4.0), 0.25
        drawn.scale = np.full_like(drawn.scale, unit)
        return
    if distribution == "rand":
        drawn.quantum = drawn.spare = 0.0
    steps = (
        8.0 if distribution == "int-1" else 40.0
    )  # of small integers so few that many values lie half way between two
    target = steps * requant.numbers[0] if requant else headroom.target or 4.0
    e = round(math.log2(target / (drawn.level * size)))
    drawn.scale = scaled_lines(drawn.scale, e)
    drawn.level, drawn.quantum = drawn.level * size * 2.0**e, drawn.quantum * 2.0 ** (e + math.floor(math.log2(size)))
    if exact and drawn.scale_a is not None:
        drawn.quantum *= 0.25  # the smallest of its powers is 1/8


def _affine(headroom: Headroom, drawn: Drawn, draw: Draw, distribution: str) -> Array:
    """Scales and zeros of the groups of a 4-bit weight, (K / group, N, 2), and codes of 0 to 15 in place of B's values.

    Exact distributions whose digits mean something keep a scale of 1.  The others have powers of two and zeros of up to
    8 scales, other ones from group to group and from column to column.
    """
    problem, n = headroom.problem, headroom.b_shape[1]
    shape = (headroom.k // problem.group_size, n)
    exact = drawn.quantum > 0
    assert drawn.b is not None
    drawn.b = drawn.b + 8
    if distribution in _NEUTRAL | {"int-1"}:
        scale, zero = np.ones(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
    elif exact:
        scale = draw("affine").look_up(shape, np.array([1, 0.5, 0.25, 0.125], dtype=np.float32), 8)
        zero = scale * draw("affine-zero").look_up(shape, np.arange(-8, 9, dtype=np.float32), 8)
    else:
        scale = np.abs(draw("affine").binade(shape, False))
        zero = scale * draw("affine-zero").uniform(shape, False) * np.float32(4.0)
        zero = np.abs(zero) if drawn.positive else np.zeros_like(zero) if distribution == "specials" else zero
    found: Array = np.stack([scale, zero], axis=-1)
    return found


def again(given: Operands, problem: Problem, a: Tensor) -> Operands:
    """The operands of a further product by the same B: what its A holds has been computed, and nothing is promised."""
    facts: dict[str, Any] = {
        "quantum": 0.0,
        "base_quantum": 0.0,
        "units": (0.0, 0.0),
        "magnitude_bound": math.inf,
        "zero_mean": False,
    }
    finite = given.finite and is_finite(a)
    return dataclasses.replace(
        given, problem=problem, distribution="rand", a=a, residuals=(), buffers=(), finite=finite, **facts
    )


def _kept_residual(
    problem: Problem,
    index: int,
    values: Array,
    dtype: DType,
    draw: Draw,
    keep: Callable[[str, Array | Lines, DType], Tensor],
    lookups: dict[int, tuple[Tensor, Tensor]],
) -> Tensor:
    """A residual in the product's places.  In memory it lies as the program's result does, but for one after a view."""
    step, made = problem.residuals[index]
    if step.extent == "at":
        rows = draw(f"i{index}").look_up(problem.result_shape[:-1], np.arange(TABLE_ROWS, dtype=np.int32))
        lookups[index] = keep(f"r{index}", values, dtype), keep(f"i{index}", rows, DTYPES["i32"])
        table, where = lookups[index]
        return table[where.long()]
    if step.extent:
        return keep(f"r{index}", values, dtype).expand(problem.result_shape)
    lines = all_lines(values, problem.result_shape)
    if isinstance(lines, Lines) or any(move.name == "view" for move in made):
        return keep(f"r{index}", lines, dtype)  # no view could undo the view; the program takes one with gaps
    stored = views.forth(torch.from_numpy(lines), made).contiguous()
    return views.back(keep(f"r{index}", stored.numpy(), dtype), problem.result_shape, made)


def group_ends(problem: Problem, stream: Stream) -> Array:
    """Where the groups of ``grouped_mm`` end: int32, the last one at the last row.

    Ends at random rows, so that no tile's edge is one; of three groups and more one is empty, at a random place.
    """
    groups, rows = problem.shape.batch or 0, problem.result_shape[0]
    ends = sorted(stream.below(rows + 1) for _ in range(groups - 1))
    if groups >= 3:
        empty = stream.below(groups)
        if empty == groups - 1:
            ends[-1] = rows
        else:
            ends[empty] = ends[empty - 1] if empty else 0
    return np.array([*ends, rows][:groups], dtype=np.int32)


def _face_relu(headroom: Headroom, drawn: Drawn) -> None:
    """Turn A's sign if a relu would silence most of a result, which then could show no error.

    That is a result of few elements, or one of a single sign.  A's, as B may be a constant that other M share.
    """
    problem = headroom.problem
    relu = next((index for index, step in enumerate(problem.epilogue) if step.name == "relu"), None)
    if relu is None or not headroom.a.is_float or drawn.b is None:
        return
    factors = [problem.alpha, *(s.numbers[0] for s in problem.epilogue[:relu] if s.name == "scale")]
    sign = math.prod(math.copysign(1.0, factor) for factor in factors)
    if drawn.positive:
        turned = sign < 0.0
    elif math.prod(problem.result_shape) <= 16:
        with np.errstate(invalid="ignore"):  # an infinity may meet a zero
            total = float((drawn.a.astype(np.float64) @ drawn.b.astype(np.float64).swapaxes(-1, -2)).sum())
        turned = sign * total < 0.0
    else:
        return
    if turned:
        drawn.a = -drawn.a


def _matrix(
    name: str,
    lines: Array | Lines,
    dtype: DType,
    device: str,
    pad: bool,
    off: bool,
    *,
    apart: bool = False,
    middle: bool = False,
) -> Guarded:
    """A stack of matrices in storage order; see :func:`guarded` for ``apart`` and ``middle``."""
    gap = _PAD_FP8 if dtype.bits == 8 and dtype.is_float else _PAD
    shape = lines.shape
    if isinstance(lines, Lines) and lines.transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return guarded(
        name, lines, shape, torch_dtype(dtype), device, pad=gap if pad else 0, offset=1 if off else 0, apart=apart,
        middle=middle,
    )  # fmt: skip


def _logical(stored: Guarded, transposed: bool, batch: int | None, expand: bool) -> Tensor:
    """The tensor of the problem over its storage: transposed, expanded, without a batch of one."""
    view = stored.view.mT if transposed else stored.view
    if batch is None:
        return view[0]
    return view.expand(batch, -1, -1) if expand else view
