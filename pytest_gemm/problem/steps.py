"""Epilogue steps: names, parameters and what each takes."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from pytest_gemm.core.text import did_you_mean
from pytest_gemm.problem.dtypes import DTYPES, DType
from pytest_gemm.problem.errors import ProblemError

# A torch.Tensor; what collection imports must not import torch, not even for its types.
Tensor = Any


class StepKind(enum.Enum):
    """What a step of an epilogue does with the product."""

    BIAS = "bias"  # adds a bias operand (for addmm and baddbmm: the addend C)
    FACTOR = "factor"  # alpha or beta: a parameter of the product, not a pass over its result
    UNARY = "unary"  # activation, or a product with a constant
    BINARY = "binary"  # arithmetic with a residual: a tensor of the result's shape, a row or a column
    CAST = "cast"  # conversion to another dtype
    JOIN = "join"  # makes one value of the two products of ``linears``
    QUANT = "quant"  # scales and zero points of quantised operands and results: a field of the line of their own
    VIEW = "view"  # a view with its elements in other places: nothing is computed
    REDUCE = "reduce"  # makes one row or one column of the result, in f32


@dataclasses.dataclass(frozen=True)
class Step:
    """One link of the epilogue chain, for instance ``relu``, ``bias-m1`` or ``clamp--1_1``, or one of its parameters.

    Attributes:
        name: the step's name, a key of :data:`STEPS`.
        text: its parameter in canonical form, "" when it is the default or there is none.

    Raises:
        ProblemError: for an unknown name, and for a parameter that does not fit.
    """

    name: str
    text: str = ""

    def __post_init__(self) -> None:
        if self.name not in STEPS:
            problem = f"unknown step {self.name!r}{did_you_mean(self.name, STEPS)}" if self.name else "an empty token"
            allowed = f"known: {' '.join(STEPS)}" if self.name else "tokens are joined by one '+'"
            raise ProblemError("epilogue", problem, allowed)
        object.__setattr__(self, "text", self.spec.canonical(self.name, self.text))

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def parse(cls, token: str) -> Step:
        """The step of a token such as ``clamp-0_6``.

        Raises:
            ProblemError: as the class.
        """
        name, _, text = token.partition("-")
        return cls(name, text) if text else cls(token)

    @property
    def spec(self) -> StepSpec:
        """The step's facts."""
        return STEPS[self.name]

    @property
    def kind(self) -> StepKind:
        """The step's kind."""
        return self.spec.kind

    @functools.cached_property
    def numbers(self) -> tuple[float, ...]:
        """The numeric parameters, with defaults filled in: ``clamp-0_6`` gives ``(0.0, 6.0)``; of a sum :attr:`dim`."""
        if self.kind is StepKind.REDUCE:
            return (self.dim,)
        given = self.spec.numbers and self.text
        return tuple(map(float, self.text.split("_"))) if given else self.spec.numbers

    def apply(self, torch: Any, x: Tensor, residual: Tensor | None) -> Tensor:
        """The step on ``x`` as eager PyTorch computes it, given the module ``torch``."""
        if self.kind is StepKind.CAST:
            return x.to(getattr(torch, self.dtype.torch_name))
        assert self.spec.function is not None, self
        x = x.to(torch.float32) if self.kind is StepKind.REDUCE else x
        met = () if residual is None else (residual,)
        return self.spec.function(torch.nn.functional, x, *met, *self.numbers)

    @property
    def extent(self) -> str:
        """How much of the result's shape a residual has, as written: ``n``, ``m1``, ``at``; "" for all of it."""
        word = self.text.partition("_")[0]
        return word if self.spec.default and word not in DTYPES else ""

    @property
    def operand(self) -> DType | None:
        """The element type that the step names for its residual; ``None``: that of the value."""
        return DTYPES.get(self.text.rpartition("_")[2]) if self.kind is StepKind.BINARY else None

    def makes(self, value: DType) -> DType:
        """The element type of what the step makes of a value: of a cast its own, of two types what PyTorch promotes."""
        if self.kind is StepKind.CAST:
            return self.dtype
        other = self.operand or value
        if other != value and other.bits == value.bits:
            return DTYPES["f32"]  # f16 and bf16
        return max(value, other, key=lambda dtype: dtype.bits)

    @property
    def dim(self) -> int:
        """The dimension that a ``REDUCE`` step sums over: -2 for the rows, -1 for the columns, and for A's K."""
        return -2 if self.text == "m" else -1

    @property
    def dtype(self) -> DType:
        """The target type of a ``cast`` step."""
        return DTYPES[self.text]

    def moved(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that a ``VIEW`` step makes of ``shape``."""
        if self.name == "view":
            return self.sizes
        return tuple(shape[dim] for dim in self.order(len(shape)))

    def order(self, rank: int) -> tuple[int, ...]:
        """Which dimension comes where, as in ``permute``: for ``t`` the last two are swapped, for ``dense`` none."""
        if self.name == "perm":
            return tuple(map(int, self.text.split("_")))
        if self.name == "dense":
            return tuple(range(rank))
        return (*range(rank - 2), rank - 1, rank - 2)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape that a ``view`` step gives."""
        return tuple(map(int, self.text.split("x")))

    def __str__(self) -> str:
        return f"{self.name}-{self.text}" if self.text else self.name


@dataclasses.dataclass(frozen=True)
class Domain:
    """Where an activation is evaluated, and in which arithmetic: what its error depends on.

    Attributes:
        x: the largest magnitude of the argument, elementwise.
        y: the largest magnitude of the value.
        below: how far the argument lies below 0, at most 800.
        u: unit roundoff of the working precision.
        flush: the smallest normal number of the working precision.
    """

    x: Tensor
    y: Tensor
    below: Tensor
    u: float
    flush: float


@dataclasses.dataclass(frozen=True)
class Curve:
    """The shape of an activation, and how accurately kernels compute it.

    The function rises, or falls to its only minimum and rises from there.

    Attributes:
        error: absolute error of any sound implementation; ``None`` for an exact function.  In units of u (an ulp is at
            most 2 u) for libm, sleef and CUDA's libdevice, none of which exceeds 4 ulp, plus what the usual formula
            around them loses.
        minimum: argument of the minimum, and a value a hair below it; ``None`` for a function that only rises.
        range: smallest and largest value of any implementation.
        zero_below: the argument up to which every implementation returns exactly 0; -inf for none.
        undefined_at: infinite arguments at which implementations return NaN or the limit.
    """

    error: Callable[[Domain], Tensor | float] | None = None
    minimum: tuple[float, float] | None = None
    range: tuple[float, float] = (-math.inf, math.inf)
    zero_below: float = -math.inf
    undefined_at: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """The facts of a step: its parameter, its function, the accuracy of kernels and the magnitudes that suit it.

    The module imports no torch: functions are given ``torch.nn.functional`` as their first argument.  A step takes
    numbers, one of several choices, places of dimensions, or no parameter.

    Attributes:
        kind: what the step does with the value.
        function: ``function(f, x, *numbers)``, for a residual ``function(f, x, r, *numbers)``: eager PyTorch, and in
            float64 the exact function.
        curve: of an activation without numbers; ``None`` where the step has an enclosure of its own.
        help: what it computes, and the parameter in words.
        numbers: the defaults of its numbers.
        fits: which numbers make sense.
        choices: what a parameter may be; ``default``: the one that goes without saying, "" where one must be given.
        places: pattern of the parameter of a view.
        needs: attribute of :class:`~pytest_gemm.problem.ops.op.Op` that an op with this step has; "" for every op.
        saturates: whether the result hardly changes any more where the argument is large.
        unit_range: whether the result has a magnitude of about one, whatever went in.
        target: wanted magnitude of an argument of a step that saturates.
        onednn: name and algorithm in ``onednn::qlinear_pointwise``, ``gelu/none``; "" where the op lacks the step.
    """

    kind: StepKind
    function: Callable[..., Any] | None = None
    curve: Curve | None = None
    help: str = ""
    numbers: tuple[float, ...] = ()
    fits: Callable[..., bool] = lambda *_: True
    choices: tuple[str, ...] = ()
    default: str = ""
    places: str = ""
    needs: str = ""
    saturates: bool = False
    unit_range: bool = False
    target: float = 2.0
    onednn: str = ""

    def canonical(self, name: str, text: str) -> str:
        """The one spelling of a parameter; "" for the default.

        Raises:
            ProblemError: when it does not fit.
        """
        problem = f"{text!r} does not fit {name}" if text else f"{name} needs a parameter"
        wrong = functools.partial(ProblemError, "epilogue", problem, offset=len(name) + 1)
        if self.choices:
            if text not in self.choices and (text or not self.default):
                raise wrong(f"write {name}- and one of {' '.join(self.choices)}")
            return "" if text == self.default else text
        if self.places:
            if not re.fullmatch(self.places, text):
                raise wrong(self.help)
            return text if name == "perm" else "x".join(str(int(size)) for size in text.split("x"))
        if text and not self.numbers:
            raise ProblemError("epilogue", f"{name} takes no parameter", f"write {name}", offset=len(name) + 1)
        return self._canonical_numbers(text, wrong) if text else ""

    def _canonical_numbers(self, text: str, wrong: Callable[[str], ProblemError]) -> str:
        parts = text.split("_")
        if len(parts) != len(self.numbers) or not all(map(_NUMBER.fullmatch, parts)):
            raise wrong(self.help)
        # The sum turns -0 into 0: a parameter has no sign of zero.
        numbers = tuple(float(part) + 0.0 for part in parts)
        for part, number in zip(parts, numbers, strict=True):
            if not (_LEAST <= abs(number) <= _MOST or _ZERO.fullmatch(part)):
                raise wrong(f"{part} is neither 0 nor from {_shortest(_LEAST)} to {_shortest(_MOST)} in size")
        if not self.fits(*numbers):
            raise wrong(self.help)
        return "" if numbers == self.numbers else "_".join(map(_shortest, numbers))


# Numbers of an epilogue: smaller and larger ones are no normal numbers of f32, or no factors that a product survives.
_LEAST: Final = 1e-30
_MOST: Final = 1e30
_NUMBER: Final = re.compile(r"-?[0-9]+(\.[0-9]+)?(e-?[0-9]+)?")
_ZERO: Final = re.compile(r"-?[0.]+(e.*)?")


def _shortest(number: float) -> str:
    """The shortest text that is read as this number: 0.5, 2, 1e-7."""
    return repr(number).removesuffix(".0").replace("e+", "e").replace("e-0", "e-")


def _scale_and_zero(scale: float, zero: float) -> bool:
    return scale > 0.0 and zero % 1.0 == 0.0


def _of_argument(units: float) -> Callable[[Domain], Tensor]:
    return lambda at: at.x * (units * at.u)


def _of_quotient(at: Domain) -> Tensor:
    """Error of what divides by 1 + exp(-x): it inherits that of exp where x < 0."""
    return at.y * ((8 + at.below) * (2 * at.u)) + at.flush


def _of_exp(at: Domain) -> Tensor:
    """Often exp2(x log2 e): its rounded argument costs |x| u.  Small results may be flushed by the range reduction."""
    return at.y * ((8 + at.x.clamp(max=800)) * (2 * at.u)) + at.flush


_smooth: Final = functools.partial(StepSpec, StepKind.UNARY, saturates=True)
_with_numbers: Final = functools.partial(StepSpec, StepKind.UNARY)
_OPERANDS: Final = ("f32", "f16", "bf16")
_EXTENTS: Final = ("n", "m1", "at")
_residual: Final = functools.partial(
    StepSpec,
    StepKind.BINARY,
    choices=("mn", *_EXTENTS, *_OPERANDS, *(f"{extent}_{dtype}" for extent in _EXTENTS for dtype in _OPERANDS)),
    default="mn",
)
_RESIDUAL: Final = (
    "of a residual r of the result's shape; {0}-n: of shape (N,); {0}-m1: of (M, 1); {0}-at: rows of a table by index; "
    "{0}-f32, {0}-n_f32: in another dtype than the value, which is promoted"
)
_reduction: Final = functools.partial(StepSpec, StepKind.REDUCE, needs="reducible")
_quant: Final = functools.partial(StepSpec, StepKind.QUANT)
_view: Final = functools.partial(StepSpec, StepKind.VIEW)
_INF: Final = math.inf

STEPS: Final[Mapping[str, StepSpec]] = {
    "bias": StepSpec(
        StepKind.BIAS,
        lambda _, x, r: x + r,
        help="bias of shape (N,), or -1n, -m1, -mn; -0: no dimensions, -xn: (N,) expanded to the result (stride 0)",
        choices=("n", "1n", "m1", "mn", "0", "xn"),
        default="n",
    ),
    "alpha": StepSpec(StepKind.FACTOR, help="alpha-0.5: factor of the product", numbers=(1.0,), needs="addend"),
    "beta": StepSpec(StepKind.FACTOR, help="beta-2: factor of the bias", numbers=(1.0,), needs="addend"),
    "relu": StepSpec(StepKind.UNARY, lambda f, x: f.relu(x), Curve(), help="max(x, 0)", onednn="relu"),
    # 1 + erf(x / sqrt 2) cancels: an absolute term.  A vectorised erf makes gelu(Inf) NaN (CPU with AVX-512, bf16).
    "gelu": _smooth(
        lambda f, x: f.gelu(x),
        Curve(_of_argument(8), minimum=(-0.7517915249894, -0.16997120747), undefined_at=(-_INF, _INF)),
        help="x (1 + erf(x / sqrt 2)) / 2",
        onednn="gelu/none",
    ),
    "gelu_tanh": _smooth(
        lambda f, x: f.gelu(x, approximate="tanh"),
        Curve(_of_argument(8), minimum=(-0.7524614115719, -0.17004075058), undefined_at=(-_INF,)),
        help="gelu by its approximation with tanh",
        onednn="gelu/tanh",
    ),
    "silu": _smooth(
        lambda f, x: f.silu(x),
        Curve(
            lambda at: _of_quotient(at) + at.flush * at.below,
            minimum=(-1.2784645427610, -0.27846454277),
            undefined_at=(-_INF,),
        ),
        help="x sigmoid(x)",
        onednn="swish",
    ),
    "sigmoid": _smooth(
        lambda _, x: x.sigmoid(), Curve(_of_quotient, range=(0.0, 1.0)), help="1 / (1 + exp(-x))", unit_range=True
    ),
    "tanh": _smooth(
        lambda _, x: x.tanh(),
        Curve(lambda at: at.y * (8 * at.u), range=(-1.0, 1.0)),
        help="hyperbolic tangent",
        unit_range=True,
        onednn="tanh",
    ),
    "exp": _smooth(
        lambda _, x: x.exp(), Curve(_of_exp, range=(0.0, _INF)), help="exponential", unit_range=True, target=1.0
    ),
    "hardswish": _smooth(
        lambda f, x: f.hardswish(x),
        Curve(_of_argument(4), minimum=(-1.5, -0.375), zero_below=-3.0, undefined_at=(-_INF,)),
        help="x clamp(x + 3, 0, 6) / 6",
        onednn="hardswish",
    ),
    "hardsigmoid": _smooth(
        lambda f, x: f.hardsigmoid(x),
        Curve(lambda at: 4 * at.u, range=(0.0, 1.0), zero_below=-3.0),
        help="clamp(x + 3, 0, 6) / 6",
        unit_range=True,
    ),
    # min(x, 0) - log1p(exp(-|x|)): no cancellation; where x is large, the value is the exponential's.
    "logsigmoid": _smooth(lambda f, x: f.logsigmoid(x), Curve(_of_exp, range=(-_INF, 0.0)), help="log(sigmoid(x))"),
    "leaky_relu": _with_numbers(
        lambda f, x, slope: f.leaky_relu(x, slope),
        help="leaky_relu-0.1: negative slope",
        numbers=(0.01,),
        onednn="leaky_relu",
    ),
    "clamp": _with_numbers(
        lambda _, x, low, high: x.clamp(low, high),
        help="clamp-0_6: bounds LOW_HIGH, the lower one first",
        numbers=(-1.0, 1.0),
        fits=operator.lt,
        saturates=True,
        onednn="hardtanh",
    ),
    "scale": _with_numbers(lambda _, x, factor: x * factor, help="scale-0.125: constant factor", numbers=(0.5,)),
    # A whole number is an int of Python's, as a user writes x + 1.
    "shift": _with_numbers(
        lambda _, x, term: x + (int(term) if term.is_integer() else term),
        help="shift-1.5: constant addend, of a size up to 65504",
        numbers=(1.0,),
        fits=lambda term: 0.0 < abs(term) <= 65504.0,
    ),
    "add": _residual(lambda _, x, r: x + r, help=f"x + r, {_RESIDUAL.format('add')}", onednn="add"),
    "sub": _residual(lambda _, x, r: x - r, help=f"x - r, {_RESIDUAL.format('sub')}"),
    "mul": _residual(lambda _, x, r: x * r, help=f"x * r, {_RESIDUAL.format('mul')}"),
    "div": _residual(lambda _, x, r: x / r, help=f"x / r, {_RESIDUAL.format('div')}"),
    "sum": StepSpec(
        StepKind.BINARY,
        lambda _, x, r, scale, zero: x + (r - zero) * scale,
        help="sum: adds to a residual in place; sum-0.5_3: SCALE_ZEROPOINT of one in 8 bits, above 0 and an integer",
        numbers=(1.0, 0.0),
        fits=_scale_and_zero,
        needs="fused_steps",
        onednn="sum",
    ),
    # Only packed weights are i4, and only operands are f4.
    "cast": StepSpec(
        StepKind.CAST,
        help="cast-f32: result in another dtype",
        choices=tuple(name for name, dtype in DTYPES.items() if dtype.bits > 4),
    ),
    # Where the result is stored, and what later steps meet there.  A result has up to 10 dimensions, so that each is
    # named by one digit.
    "t": _view(help="the last two dimensions swapped"),
    "perm": _view(help="perm-1_0_2: the dimensions in this order", places="[0-9](_[0-9]){1,9}"),
    "view": _view(help="view-4x8x2x33: the result in this shape, as many elements", places="[0-9]+(x[0-9]+){0,9}"),
    "dense": _view(help="what was moved is copied to memory in its new order: contiguous()"),
    "sums": _reduction(
        lambda _, x, dim: x.sum(dim, keepdim=True),
        help="sums-m: the sum of all rows, in f32, as the gradient of a bias; sums-n: of all columns; sums-k: of A's",
        choices=("m", "n", "k"),
    ),
    "squares": _reduction(
        lambda _, x, dim: x.square().mean(dim, keepdim=True),
        help="squares-n: the mean of the squares of each row, in f32, as RMSNorm has it; squares-m: of each column",
        choices=("m", "n"),
    ),
    # It multiplies two products: what encodes something in its digits does not survive it, and it overflows early.
    "gated": StepSpec(
        StepKind.JOIN,
        help="gated-silu: silu of the first product times the second",
        choices=("silu", "gelu", "gelu_tanh", "relu", "sigmoid"),
        needs="several",
        saturates=True,
    ),
    # Quantisation parameters; an op names the scales that it takes.
    "tensorwise": _quant(help="one scale for A and one for B"),
    "rowwise": _quant(help="a scale for each row of A and each column of B"),
    "blocks": _quant(
        help="blocks-1_128: a scale for each 128 elements of K, of so many rows of A and columns of B: 1 or 128",
        numbers=(1.0, 128.0),
        fits=lambda rows, columns: (rows, columns) in {(1.0, 1.0), (1.0, 128.0), (128.0, 1.0)},
    ),
    "edge": _quant(help="edge-64: blocks of 64 elements in place of 128", choices=("64",), needs="blocked"),
    "mx": _quant(help="MXFP8 and MXFP4: a power of two as the scale of 32 elements of K, in swizzled order"),
    "nv": _quant(
        help="NVFP4: an fp8 scale for each 16 elements of K, in swizzled order; nv-2: and one for the whole tensor",
        numbers=(1.0,),
        fits=(1.0, 2.0).__contains__,
    ),
    "result": _quant(
        help="result-0.25: scale_result of an fp8 result, a power of two: a divisor on a CPU, a factor on CUDA",
        numbers=(0.25,),
        fits=lambda scale: scale > 0.0 and math.frexp(scale)[0] == 0.5,
        needs="fp8_result",
    ),
    "columnwise": _quant(help="a scale for each column of B, and where A is quantised one for A"),
    "group": _quant(
        help="group-64: so many elements of K share a scale; 16, 32, 64, 128, 256 or 512",
        numbers=(128.0,),
        fits=(16.0, 32.0, 64.0, 128.0, 256.0, 512.0).__contains__,
    ),
    "zeros": _quant(
        help="a zero point for each scale of B, subtracted from its codes; without it the code in the middle",
        needs="coded",
    ),
    "nf4": _quant(
        help="the codes of B are places in the table of NF4, and its scales, in f32, largest magnitudes", needs="coded"
    ),
    "inside": _quant(
        help="inside-q8_0: the kernel quantises A by ggml's Q8_0, 32 elements of K at a time; inside-row: by its rows",
        choices=("q8_0", "row"),
        needs="coded",
    ),
    "bias_codes": _quant(
        help="the bias is int32 codes in steps of A's scale times that of the column, as in QNNPACK",
        needs="fused_steps",
    ),
    "absmax": _quant(
        help="scales of rows and columns are their largest magnitudes, each divided by 127, as bitsandbytes has them",
        needs="absmax",
    ),
    "static": _quant(
        help="static-0.02_7: SCALE_ZEROPOINT of A, constants of the program, above 0 and an integer",
        numbers=(0.0078125, 7.0),
        fits=_scale_and_zero,
    ),
    "dynamic": _quant(help="scale and zero point of A are tensors that are computed"),
    "requant": _quant(
        help="requant-0.5_3: SCALE_ZEROPOINT of an 8-bit result, above 0 and an integer",
        numbers=(0.5, 3.0),
        fits=_scale_and_zero,
        needs="fused_steps",
    ),
}

# Elements of K that share a scale, where the scales are those of blocks.
BLOCK_K: Final = 128

# Steps that ``onednn::qlinear_pointwise`` takes behind its product, in the order binary, unary.
QLINEAR_UNARY: Final = tuple(n for n, spec in STEPS.items() if spec.onednn and spec.kind is StepKind.UNARY)
QLINEAR_BINARY: Final = tuple(n for n, spec in STEPS.items() if spec.onednn and spec.kind is StepKind.BINARY)
