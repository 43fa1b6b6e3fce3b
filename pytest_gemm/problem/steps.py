"""Epilogue steps: names, parameters and what each takes."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from pytest_gemm.problem.dtypes import DTYPES, DType
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.text import did_you_mean

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


@dataclasses.dataclass(frozen=True)
class Step:
    """One link of the epilogue chain, for instance ``relu``, ``bias-m1`` or ``clamp--1_1``.

    Attributes:
        name: the step's name, a key of :data:`STEPS`.
        text: its parameter in canonical form, "" when it is the default or there is none.

    Raises:
        ProblemError: for an unknown name, and for a parameter that does not fit.
    """

    name: str
    text: str = ""

    def __post_init__(self) -> None:
        spec = STEPS.get(self.name)
        if spec is None:
            hint, known = did_you_mean(self.name, STEPS), " ".join(STEPS)
            raise ProblemError("", "epilogue", f"unknown step {self.name!r}{hint}", f"known: {known}")
        object.__setattr__(self, "text", spec.canonical(self.name, self.text))

    @property
    def kind(self) -> StepKind:
        """The step's kind, from :data:`STEPS`."""
        return STEPS[self.name].kind

    @property
    def spec(self) -> StepSpec:
        """The step's facts."""
        return STEPS[self.name]

    @functools.cached_property
    def numbers(self) -> tuple[float, ...]:
        """The numeric parameters, with defaults filled in: ``clamp-0_6`` gives ``(0.0, 6.0)``."""
        spec = STEPS[self.name]
        if spec.parameter != "numbers":
            return ()
        return tuple(map(float, self.text.split("_"))) if self.text else spec.defaults

    def apply(self, torch: Any, x: Tensor, residual: Tensor | None) -> Tensor:
        """The step on ``x`` as eager PyTorch computes it, given the module ``torch``."""
        if self.kind is StepKind.CAST:
            return x.to(getattr(torch, self.dtype.torch_name))
        assert self.spec.function is not None, self
        met = () if residual is None else (residual,)
        return self.spec.function(torch.nn.functional, x, *met, *self.numbers)

    @property
    def extent(self) -> str:
        """How much of the result's shape a residual has, as written: ``n``, ``m1``, ``at``; "" for all of it."""
        return self.text if STEPS[self.name].parameter == "shape" else ""

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


def _always(*_: float) -> bool:
    return True


def _ascending(low: float, high: float) -> bool:
    return low < high


def _scale_and_zero(scale: float, zero: float) -> bool:
    return scale > 0.0 and zero % 1.0 == 0.0


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

    The module imports no torch: functions are given ``torch.nn.functional`` as their first argument.

    Attributes:
        kind: what the step does with the value.
        parameter: "", "numbers", "shape" (the first of ``choices`` is the default), "choice" (no default) or "places".
        defaults: the numbers that go without saying.
        choices: what a parameter may be.
        help: the parameter in words.
        fits: which numbers make sense.
        rule: the same in words.
        function: ``function(f, x, *numbers)``, for a residual ``function(f, x, r, *numbers)``: eager PyTorch, and in
            float64 the exact function.
        curve: of an activation without numbers; ``None`` where the step has an enclosure of its own.
        saturates: whether the result hardly changes any more where the argument is large.
        unit_range: whether the result has a magnitude of about one, whatever went in.
        target: wanted magnitude of an argument of a step that saturates.
        onednn: name and algorithm in ``onednn::qlinear_pointwise``; "" where the op lacks the step.
    """

    kind: StepKind
    parameter: str = ""
    defaults: tuple[float, ...] = ()
    choices: tuple[str, ...] = ()
    help: str = ""
    fits: Callable[..., bool] = _always
    rule: str = ""
    function: Callable[..., Any] | None = None
    curve: Curve | None = None
    saturates: bool = False
    unit_range: bool = False
    target: float = 2.0
    onednn: tuple[str, str] = ("", "")

    def canonical(self, name: str, text: str) -> str:
        """The one spelling of a parameter; "" for the default.

        Raises:
            ProblemError: when it does not fit; its line is empty.
        """

        def wrong(problem: str, allowed: str, offset: int = len(name) + 1) -> ProblemError:
            return ProblemError("", "epilogue", problem, allowed, 0, offset)

        if self.parameter == "choice":
            if text not in self.choices:
                problem = f"{name} does not take {text!r}" if text else f"{name} needs a parameter"
                raise wrong(problem, f"write {name}- and one of {' '.join(self.choices)}")
            return text
        if self.parameter == "places":
            if not _PLACES[name].fullmatch(text):
                raise wrong(f"{text!r} does not fit {name}", self.help)
            return text if name == "perm" else "x".join(str(int(size)) for size in text.split("x"))
        if not text:
            return ""
        if not self.parameter:
            raise wrong(f"{name} takes no parameter", f"write {name}")
        if self.parameter == "shape":
            if text not in self.choices:
                kind = "bias" if self.kind is StepKind.BIAS else "residual"
                raise wrong(f"unknown {kind} shape {text!r}", f"one of {' '.join(self.choices)}")
            return "" if text == self.choices[0] else text
        parts = text.split("_")
        if len(parts) != len(self.defaults) or not all(map(_NUMBER.fullmatch, parts)):
            raise wrong(f"{text!r} does not fit {name}", self.help)
        # The sum turns -0 into 0: a parameter has no sign of zero.
        numbers = tuple(float(part) + 0.0 for part in parts)
        for part, number in zip(parts, numbers, strict=True):
            if not (_LEAST <= abs(number) <= _MOST or _ZERO.fullmatch(part)):
                raise wrong(
                    f"{part} of {name} is out of range",
                    f"a number is 0, or from {_shortest(_LEAST)} to {_shortest(_MOST)} in size",
                )
        if not self.fits(*numbers):
            raise wrong(f"{name}-{text} is no {self.rule}", self.help, 0)
        return "" if numbers == self.defaults else "_".join(map(_shortest, numbers))


# Numbers of an epilogue: smaller and larger ones are no normal numbers of f32, or no factors that a product survives.
_LEAST: Final = 1e-30
_MOST: Final = 1e30
_NUMBER: Final = re.compile(r"-?[0-9]+(\.[0-9]+)?(e-?[0-9]+)?")
_ZERO: Final = re.compile(r"-?[0.]+(e.*)?")
# A result has up to 10 dimensions, so that each of them is named by one digit.
_PLACES: Final[Mapping[str, re.Pattern[str]]] = {
    "perm": re.compile(r"[0-9](_[0-9]){1,9}"),
    "view": re.compile(r"[0-9]+(x[0-9]+){0,9}"),
}


def _shortest(number: float) -> str:
    """The shortest text that is read as this number: 0.5, 2, 1e-7."""
    return repr(number).removesuffix(".0").replace("e+", "e").replace("e-0", "e-")


def _of_exp(at: Domain) -> Tensor:
    """Error of what divides by 1 + exp(-x): it inherits that of exp where x < 0."""
    return at.y * ((8 + at.below) * (2 * at.u)) + at.flush


_BIAS_SHAPES: Final = ("n", "1n", "m1", "mn")
_RESIDUAL_SHAPES: Final = ("mn", "n", "m1", "at")
_SCALE_RULE: Final = "scale and zero point"

STEPS: Final[Mapping[str, StepSpec]] = {
    "bias": StepSpec(
        StepKind.BIAS,
        "shape",
        choices=_BIAS_SHAPES,
        help="bias of shape (N,), or -1n, -m1, -mn",
        function=lambda _, x, r: x + r,
    ),
    "alpha": StepSpec(StepKind.FACTOR, "numbers", (1.0,), help="alpha-0.5: factor of the product"),
    "beta": StepSpec(StepKind.FACTOR, "numbers", (1.0,), help="beta-2: factor of the bias"),
    "relu": StepSpec(
        StepKind.UNARY,
        function=lambda f, x: f.relu(x),
        curve=Curve(),
        onednn=("relu", ""),
    ),
    # 1 + erf(x / sqrt 2) cancels: an absolute term.  A vectorised erf makes gelu(Inf) NaN (CPU with AVX-512, bf16).
    "gelu": StepSpec(
        StepKind.UNARY,
        function=lambda f, x: f.gelu(x),
        curve=Curve(
            error=lambda at: at.x * (8 * at.u),
            minimum=(-0.7517915249894, -0.16997120747),
            undefined_at=(-math.inf, math.inf),
        ),
        saturates=True,
        onednn=("gelu", "none"),
    ),
    "gelu_tanh": StepSpec(
        StepKind.UNARY,
        function=lambda f, x: f.gelu(x, approximate="tanh"),
        curve=Curve(
            error=lambda at: at.x * (8 * at.u),
            minimum=(-0.7524614115719, -0.17004075058),
            undefined_at=(-math.inf,),
        ),
        saturates=True,
        onednn=("gelu", "tanh"),
    ),
    "silu": StepSpec(
        StepKind.UNARY,
        function=lambda f, x: f.silu(x),
        curve=Curve(
            error=lambda at: _of_exp(at) + at.flush * at.below,
            minimum=(-1.2784645427610, -0.27846454277),
            undefined_at=(-math.inf,),
        ),
        saturates=True,
        onednn=("swish", ""),
    ),
    "sigmoid": StepSpec(
        StepKind.UNARY,
        function=lambda _, x: x.sigmoid(),
        curve=Curve(error=_of_exp, range=(0.0, 1.0)),
        saturates=True,
        unit_range=True,
    ),
    "tanh": StepSpec(
        StepKind.UNARY,
        function=lambda _, x: x.tanh(),
        curve=Curve(error=lambda at: at.y * (8 * at.u), range=(-1.0, 1.0)),
        saturates=True,
        unit_range=True,
        onednn=("tanh", ""),
    ),
    # Often exp2(x log2 e), whose rounded argument costs |x| u.  Small results may be flushed by the range reduction.
    "exp": StepSpec(
        StepKind.UNARY,
        function=lambda _, x: x.exp(),
        curve=Curve(
            error=lambda at: at.y * ((8 + at.x.clamp(max=800)) * (2 * at.u)) + at.flush,
            range=(0.0, math.inf),
        ),
        saturates=True,
        unit_range=True,
        target=1.0,
    ),
    "hardswish": StepSpec(
        StepKind.UNARY,
        function=lambda f, x: f.hardswish(x),
        curve=Curve(
            error=lambda at: at.x * (4 * at.u),
            minimum=(-1.5, -0.375),
            zero_below=-3.0,
            undefined_at=(-math.inf,),
        ),
        saturates=True,
        onednn=("hardswish", ""),
    ),
    "hardsigmoid": StepSpec(
        StepKind.UNARY,
        function=lambda f, x: f.hardsigmoid(x),
        curve=Curve(error=lambda at: 4 * at.u, range=(0.0, 1.0), zero_below=-3.0),
        saturates=True,
        unit_range=True,
    ),
    # min(x, 0) - log1p(exp(-|x|)): no cancellation; where x is large, the value is the exponential's.
    "logsigmoid": StepSpec(
        StepKind.UNARY,
        function=lambda f, x: f.logsigmoid(x),
        curve=Curve(
            error=lambda at: at.y * ((8 + at.x.clamp(max=800)) * (2 * at.u)) + at.flush,
            range=(-math.inf, 0.0),
        ),
        saturates=True,
    ),
    "leaky_relu": StepSpec(
        StepKind.UNARY,
        "numbers",
        (0.01,),
        help="leaky_relu-0.1: negative slope",
        function=lambda f, x, slope: f.leaky_relu(x, slope),
        onednn=("leaky_relu", ""),
    ),
    "clamp": StepSpec(
        StepKind.UNARY,
        "numbers",
        (-1.0, 1.0),
        help="clamp-0_6: bounds LOW_HIGH, the lower one first",
        fits=_ascending,
        rule="range",
        function=lambda _, x, low, high: x.clamp(low, high),
        saturates=True,
        onednn=("hardtanh", ""),
    ),
    "scale": StepSpec(
        StepKind.UNARY,
        "numbers",
        (0.5,),
        help="scale-0.125: constant factor",
        function=lambda _, x, factor: x * factor,
    ),
    # With a residual of the result's shape; of shape (N,), add-n; of (M, 1), add-m1; or, add-at, of the rows of a table
    # that an index for each row of the result looks up.
    "add": StepSpec(
        StepKind.BINARY, "shape", choices=_RESIDUAL_SHAPES, function=lambda _, x, r: x + r, onednn=("add", "")
    ),
    "sub": StepSpec(StepKind.BINARY, "shape", choices=_RESIDUAL_SHAPES, function=lambda _, x, r: x - r),
    "mul": StepSpec(StepKind.BINARY, "shape", choices=_RESIDUAL_SHAPES, function=lambda _, x, r: x * r),
    "div": StepSpec(StepKind.BINARY, "shape", choices=_RESIDUAL_SHAPES, function=lambda _, x, r: x / r),
    "sum": StepSpec(
        StepKind.BINARY,
        "numbers",
        (1.0, 0.0),
        help="sum: adds to a residual in place, as the op qlinear can; sum-0.5_3: SCALE_ZEROPOINT of one in 8 bits, "
        "above 0 and an integer",
        fits=_scale_and_zero,
        rule=_SCALE_RULE,
        function=lambda _, x, r, scale, zero: x + (r - zero) * scale,
        onednn=("sum", ""),
    ),
    "cast": StepSpec(
        StepKind.CAST,
        "choice",
        choices=tuple(name for name in DTYPES if name != "i4"),  # which only packed weights have
        help="cast-f32: result in another dtype",
    ),
    # Where the result is stored, and what later steps meet there.
    "t": StepSpec(StepKind.VIEW, help="the last two dimensions swapped"),
    "perm": StepSpec(StepKind.VIEW, "places", help="perm-1_0_2: the dimensions in this order"),
    "view": StepSpec(StepKind.VIEW, "places", help="view-4x8x2x33: the result in this shape, as many elements"),
    "dense": StepSpec(StepKind.VIEW, help="what was moved is copied to memory in its new order: contiguous()"),
    "gated": StepSpec(
        StepKind.JOIN,
        "choice",
        choices=("silu", "gelu", "gelu_tanh", "relu", "sigmoid"),
        help="gated-silu: silu of the first product times the second",
        # It multiplies two products: what encodes something in its digits does not survive it, and it overflows early.
        saturates=True,
    ),
    # Scales of quantised operands; the ops that take them say so.
    "tensorwise": StepSpec(StepKind.QUANT, help="one scale for A and one for B"),
    "rowwise": StepSpec(StepKind.QUANT, help="a scale for each row of A and each column of B"),
    "columnwise": StepSpec(StepKind.QUANT, help="one scale for A and a scale for each column of B"),
    "group": StepSpec(
        StepKind.QUANT,
        "numbers",
        (128.0,),
        help="group-64: so many elements of K share a scale; 32, 64, 128 or 256",
        fits=(32.0, 64.0, 128.0, 256.0).__contains__,
        rule="size of a group",
    ),
    "static": StepSpec(
        StepKind.QUANT,
        "numbers",
        (0.0078125, 7.0),
        help="static-0.02_7: SCALE_ZEROPOINT of A, constants of the program, above 0 and an integer",
        fits=_scale_and_zero,
        rule=_SCALE_RULE,
    ),
    "dynamic": StepSpec(StepKind.QUANT, help="scale and zero point of A are tensors that are computed"),
    "requant": StepSpec(
        StepKind.QUANT,
        "numbers",
        (0.5, 3.0),
        help="requant-0.5_3: SCALE_ZEROPOINT of an 8-bit result, above 0 and an integer",
        fits=_scale_and_zero,
        rule=_SCALE_RULE,
    ),
}

# Steps that ``onednn::qlinear_pointwise`` takes behind its product, in the order binary, unary.
QLINEAR_UNARY: Final = tuple(n for n, spec in STEPS.items() if spec.onednn[0] and spec.kind is StepKind.UNARY)
QLINEAR_BINARY: Final = tuple(n for n, spec in STEPS.items() if spec.onednn[0] and spec.kind is StepKind.BINARY)
