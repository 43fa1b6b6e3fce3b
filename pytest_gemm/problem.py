"""A problem is one line of text, both ways: ``op:dtypes:layout:shape[:epilogue[:flags]]``.

This module is the vocabulary of the whole project: every other room receives a
:class:`Problem` and none of them parses text.  It imports no torch, so that collection stays fast.

Examples::

    mm:f16:nt:512x768x1024
    int_mm:i8-i8-i32:nt:512x1024x2048
    bmm:bf16:nn:4x128x96x192
    linear:f32:nt:1000x1024x1000:bias+gelu:dyn-m+pad-lda
    linear:f32-f32-bf16:nt:32x384x64:bias
    addmm:f32:nn:33x65x127:bias-m1+alpha-0.5+beta-2
    qlinear:u8-i8-bf16:nt:17x64x128:static-0.02_7+bias+relu

The characters are those that ``pytest -k`` and every shell take unquoted.

A problem has one spelling, the canonical line.  Whatever else means the same is read and shown in it: numbers are
written in their shortest form, a parameter that is the default goes unwritten (``scale-0.50`` is ``scale``), and so do
factors of 1 and ``const-b`` or ``var-b`` where the op implies them; scales, bias, alpha and beta stand in this order,
flags in that of :data:`ALL_FLAGS`; a ``perm`` that swaps the last two dimensions is ``t``.  A token that would change
nothing else is an error.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

__all__ = [
    "ALL_FLAGS",
    "DTYPES",
    "OPS",
    "OWN_BIAS",
    "QLINEAR_UNARY",
    "STEPS",
    "TF32",
    "DType",
    "DTypes",
    "Layout",
    "Op",
    "Problem",
    "ProblemError",
    "Shape",
    "Step",
    "StepKind",
    "canonical_line",
    "did_you_mean",
]


class ProblemError(ValueError):
    """A problem line that cannot be read, or that contradicts itself.

    The message is one paragraph for a user: it names the field and the token, points at the character,
    and says what would be right.

    Attributes:
        line: the whole line as given.
        field: which field is wrong: ``op``, ``dtypes``, ``layout``, ``shape``, ``epilogue``, ``flags``.
        problem: what is wrong; ``allowed``: what would be right.
        index: which token of the field is wrong, from 0; ``offset``: which character of it.
        column: 0-based offset of the offending character in ``line``.
    """

    def __init__(self, line: str, field: str, problem: str, allowed: str, index: int = 0, offset: int = 0) -> None:
        self.line = line
        self.field = field
        self.problem = problem
        self.allowed = allowed
        self.index = index
        self.offset = offset
        self.column = _column(line, field, index, offset)
        shown = "".join(c if c.isprintable() else "?" for c in line)
        pointer = f"\n  {shown}\n  {' ' * self.column}^" if line else ""
        super().__init__(f"{field}: {problem}; {allowed}{pointer}")

    def on(self, line: str) -> ProblemError:
        """The same complaint about the same token of another text, the one that the user typed."""
        return ProblemError(line, self.field, self.problem, self.allowed, self.index, self.offset)


def _column(line: str, field: str, index: int, offset: int) -> int:
    """Where in ``line`` a token of a field begins; where the field ought to be if it is missing."""
    parts = line.split(":")
    place = _FIELDS.index(field)
    if place >= len(parts):
        return len(line)
    start = sum(len(part) + 1 for part in parts[:place])
    tokens = parts[place].split({"dtypes": "-", "shape": "x"}.get(field, "+"))
    if index >= len(tokens):
        return start
    return min(start + sum(len(token) + 1 for token in tokens[:index]) + offset, len(line))


@dataclasses.dataclass(frozen=True)
class DType:
    """An element type under PyTorch's own abbreviation.

    Attributes:
        name: the abbreviation, ``bf16``.
        torch_name: attribute of the ``torch`` module, ``bfloat16``.
        bits: storage width of an element in bits.
        precision: significand bits with the hidden one (0 for integers).
        emin: exponent of the smallest normal number, ``2**emin`` (0 for integers).
        emax: exponent of the largest binade (0 for integers).
        max_finite: largest finite magnitude; for integers the largest value.
        has_inf: whether overflow becomes infinity (``False``: NaN or saturation).
    """

    name: str
    torch_name: str
    bits: int
    precision: int
    emin: int
    emax: int
    max_finite: float
    has_inf: bool = True

    @property
    def is_float(self) -> bool:
        """Whether values have a significand and an exponent."""
        return self.precision > 0

    @property
    def unit_roundoff(self) -> float:
        """Relative rounding error bound u = 2^-p of round-to-nearest (Higham, 2002, section 2.1)."""
        return 2.0**-self.precision if self.is_float else 0.0


DTYPES: Final[Mapping[str, DType]] = {
    d.name: d
    for d in (
        DType("f64", "float64", 64, 53, -1022, 1023, 1.7976931348623157e308),
        DType("f32", "float32", 32, 24, -126, 127, 3.4028234663852886e38),
        DType("f16", "float16", 16, 11, -14, 15, 65504.0),
        DType("bf16", "bfloat16", 16, 8, -126, 127, 3.3895313892515355e38),
        DType("f8e4m3fn", "float8_e4m3fn", 8, 4, -6, 8, 448.0, has_inf=False),
        DType("f8e5m2", "float8_e5m2", 8, 3, -14, 15, 57344.0),
        DType("i8", "int8", 8, 0, 0, 0, 127.0, has_inf=False),
        DType("u8", "uint8", 8, 0, 0, 0, 255.0, has_inf=False),
        DType("i32", "int32", 32, 0, 0, 0, 2147483647.0, has_inf=False),
        # Two 4-bit values packed in a byte; the operands room owns the nibble order.
        DType("i4", "uint8", 4, 0, 0, 0, 7.0, has_inf=False),
    )
}


# The f32 that tensor cores keep of an input: no dtype of a tensor, so not in the table.
TF32: Final = DType("tf32", "float32", 32, 11, -126, 127, 3.4011621342146535e38)


@dataclasses.dataclass(frozen=True)
class DTypes:
    """The element types of A, B and the product, before any ``cast`` in the epilogue."""

    a: DType
    b: DType
    out: DType

    def __str__(self) -> str:
        if self.a == self.b == self.out:
            return self.a.name
        return f"{self.a.name}-{self.b.name}-{self.out.name}"


class Layout(enum.Enum):
    """Whether A and B are row-major (``n``) or transposed views of row-major storage (``t``).

    The first letter speaks of A (``n``: M x K row-major), the second of B (``n``: K x N row-major;
    ``t``: an N x K row-major weight seen as K x N, which is what ``torch.nn.Linear`` stores).
    """

    NN = "nn"
    NT = "nt"
    TN = "tn"
    TT = "tt"

    @property
    def a_transposed(self) -> bool:
        """A is a view of K x M storage."""
        return self.value[0] == "t"

    @property
    def b_transposed(self) -> bool:
        """B is a view of N x K storage."""
        return self.value[1] == "t"

    def __str__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True)
class Shape:
    """``MxNxK``, batch first: C[M, N] = A[M, K] @ B[K, N], ``batch`` times.

    ``batch`` is ``None`` for a plain product.  For ``linear`` it is the leading dimension of a 3-D
    input, for ``linears`` the number of weights that one A of M rows meets.  For ``grouped_mm`` it is the number of
    groups, and M their mean size: A has ``batch * M`` rows, each group of them a B of its own, and the groups are as
    uneven as the operands make them.
    """

    m: int
    n: int
    k: int
    batch: int | None = None

    def __str__(self) -> str:
        dims = (self.m, self.n, self.k) if self.batch is None else (self.batch, self.m, self.n, self.k)
        return "x".join(map(str, dims))

    @property
    def is_empty(self) -> bool:
        """Whether the output has no element (K = 0 alone leaves an output of zeros)."""
        return 0 in (self.m, self.n) or self.batch == 0

    @property
    def flops(self) -> int:
        """Operations of the product alone: 2 M N K, times the batch."""
        return 2 * self.m * self.n * self.k * (1 if self.batch is None else self.batch)


class StepKind(enum.Enum):
    """What a step of an epilogue does with the product."""

    BIAS = "bias"  # adds a bias operand (for addmm and baddbmm: the addend C)
    FACTOR = "factor"  # alpha or beta: a parameter of the product, not a pass over its result
    UNARY = "unary"  # activation, or a product with a constant
    BINARY = "binary"  # arithmetic with a residual: a tensor of the result's shape, a row or a column
    CAST = "cast"  # conversion to another dtype
    JOIN = "join"  # makes one value of the two products of ``linears``
    MOVE = "move"  # a view with its elements in other places: nothing is computed


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

    @functools.cached_property
    def numbers(self) -> tuple[float, ...]:
        """The numeric parameters, with defaults filled in: ``clamp-0_6`` gives ``(0.0, 6.0)``."""
        spec = STEPS[self.name]
        if spec.parameter != "numbers":
            return ()
        return tuple(map(float, self.text.split("_"))) if self.text else spec.defaults

    @property
    def extent(self) -> str:
        """How much of the result's shape a residual has, as written: ``n``, ``m1``, ``at``; "" for all of it."""
        return self.text if STEPS[self.name].parameter == "shape" else ""

    @property
    def dtype(self) -> DType:
        """The target type of a ``cast`` step."""
        return DTYPES[self.text]

    def moved(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that a ``MOVE`` step makes of ``shape``."""
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
class StepSpec:
    """What the grammar allows after a step's name."""

    kind: StepKind
    # "", "numbers", "shape" (the first of ``choices`` is the default), "choice" (no default) or "places"
    parameter: str = ""
    defaults: tuple[float, ...] = ()
    choices: tuple[str, ...] = ()
    help: str = ""
    # Which numbers make sense, and the same in words.
    fits: Callable[..., bool] = _always
    rule: str = ""

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


_BIAS_SHAPES: Final = ("n", "1n", "m1", "mn")
_RESIDUAL_SHAPES: Final = ("mn", "n", "m1", "at")
_SCALE_RULE: Final = "scale and zero point"

STEPS: Final[Mapping[str, StepSpec]] = {
    "bias": StepSpec(StepKind.BIAS, "shape", choices=_BIAS_SHAPES, help="bias of shape (N,), or -1n, -m1, -mn"),
    "alpha": StepSpec(StepKind.FACTOR, "numbers", (1.0,), help="alpha-0.5: factor of the product"),
    "beta": StepSpec(StepKind.FACTOR, "numbers", (1.0,), help="beta-2: factor of the bias"),
    "relu": StepSpec(StepKind.UNARY),
    "gelu": StepSpec(StepKind.UNARY),
    "gelu_tanh": StepSpec(StepKind.UNARY),
    "silu": StepSpec(StepKind.UNARY),
    "sigmoid": StepSpec(StepKind.UNARY),
    "tanh": StepSpec(StepKind.UNARY),
    "exp": StepSpec(StepKind.UNARY),
    "hardswish": StepSpec(StepKind.UNARY),
    "hardsigmoid": StepSpec(StepKind.UNARY),
    "leaky_relu": StepSpec(StepKind.UNARY, "numbers", (0.01,), help="leaky_relu-0.1: negative slope"),
    "clamp": StepSpec(
        StepKind.UNARY,
        "numbers",
        (-1.0, 1.0),
        help="clamp-0_6: bounds LOW_HIGH, the lower one first",
        fits=_ascending,
        rule="range",
    ),
    "scale": StepSpec(StepKind.UNARY, "numbers", (0.5,), help="scale-0.125: constant factor"),
    # With a residual of the result's shape; of shape (N,), add-n; of (M, 1), add-m1; or, add-at, of the rows of a table
    # that an index for each row of the result looks up.
    "add": StepSpec(StepKind.BINARY, "shape", choices=_RESIDUAL_SHAPES),
    "sub": StepSpec(StepKind.BINARY, "shape", choices=_RESIDUAL_SHAPES),
    "mul": StepSpec(StepKind.BINARY, "shape", choices=_RESIDUAL_SHAPES),
    "div": StepSpec(StepKind.BINARY, "shape", choices=_RESIDUAL_SHAPES),
    "sum": StepSpec(
        StepKind.BINARY,
        "numbers",
        (1.0, 0.0),
        help="sum: adds to a residual in place, as the op qlinear can; sum-0.5_3: SCALE_ZEROPOINT of one in 8 bits, "
        "above 0 and an integer",
        fits=_scale_and_zero,
        rule=_SCALE_RULE,
    ),
    "cast": StepSpec(
        StepKind.CAST,
        "choice",
        choices=tuple(name for name in DTYPES if name != "i4"),  # which only packed weights have
        help="cast-f32: result in another dtype",
    ),
    # Where the result is stored, and what later steps meet there.
    "t": StepSpec(StepKind.MOVE, help="the last two dimensions swapped"),
    "perm": StepSpec(StepKind.MOVE, "places", help="perm-1_0_2: the dimensions in this order"),
    "view": StepSpec(StepKind.MOVE, "places", help="view-4x8x2x33: the result in this shape, as many elements"),
    "dense": StepSpec(StepKind.MOVE, help="what was moved is copied to memory in its new order: contiguous()"),
    "gated": StepSpec(
        StepKind.JOIN,
        "choice",
        choices=("silu", "gelu", "gelu_tanh", "relu", "sigmoid"),
        help="gated-silu: silu of the first product times the second",
    ),
    # Scales of quantised operands; the ops that take them say so.
    "tensorwise": StepSpec(StepKind.FACTOR, help="one scale for A and one for B"),
    "rowwise": StepSpec(StepKind.FACTOR, help="a scale for each row of A and each column of B"),
    "columnwise": StepSpec(StepKind.FACTOR, help="one scale for A and a scale for each column of B"),
    "group": StepSpec(
        StepKind.FACTOR,
        "numbers",
        (128.0,),
        help="group-64: so many elements of K share a scale; 32, 64, 128 or 256",
        fits=(32.0, 64.0, 128.0, 256.0).__contains__,
        rule="size of a group",
    ),
    "static": StepSpec(
        StepKind.FACTOR,
        "numbers",
        (0.0078125, 7.0),
        help="static-0.02_7: SCALE_ZEROPOINT of A, constants of the program, above 0 and an integer",
        fits=_scale_and_zero,
        rule=_SCALE_RULE,
    ),
    "dynamic": StepSpec(StepKind.FACTOR, help="scale and zero point of A are tensors that are computed"),
    "requant": StepSpec(
        StepKind.FACTOR,
        "numbers",
        (0.5, 3.0),
        help="requant-0.5_3: SCALE_ZEROPOINT of an 8-bit result, above 0 and an integer",
        fits=_scale_and_zero,
        rule=_SCALE_RULE,
    ),
}


ALL_FLAGS: Final[Mapping[str, str]] = {
    "dyn-m": "one artifact compiled for any M",
    "pad-lda": "A's rows are wider than K: the gap must not be read",
    "pad-ldb": "B's rows are wider than they need to be",
    "off-a": "A starts one element into its storage: an unaligned base",
    "off-b": "B starts one element into its storage",
    "bcast-a": "A is one matrix expanded over the batch (stride 0)",
    "bcast-b": "B is one matrix expanded over the batch (stride 0)",
    "self": "B is A transposed: A @ A.T on one storage",
    "const-b": "B is a constant that the compiler may pack",
    "var-b": "B is an argument, not a constant",
    "tf32": "f32 may be multiplied as TF32; without the flag it may not",
    "reduced": "partial sums may be stored in the product's half type; without the flag they may not",
    "res-a": "the first residual is A itself: an operand that is read twice",
    "tap": "the value before the last step is returned too: a program of two results",
    "reduce-range": "A holds 7 of the 8 bits of u8: what PyTorch quantises to for processors that add pairs in 16 bits",
    "fork": "the last two steps read one value, and each makes a result: a program of two results",
    "again": "the result is multiplied by B once more: a program of two products and two results",
    "fast-acc": "fp8 products may be added with the few bits that a tensor core keeps; without the flag they may not",
    "mid-a": "A's batch lies in the middle of its memory: a permuted view",
    "mid-b": "B's batch lies in the middle of its memory",
    "square": "B is A itself: A @ A on one storage",
    "unfrozen": "B is a parameter that freezing has not made a constant: one in a package of AOTInductor's only",
    "concat": "B's columns are those of three weights, each of which the program multiplies by on its own",
    "in-3d": "the input of linears is 3-D: its rows are those of two matrices",
    "flat": "with in-3d: the program makes its results 2-D again",
    "in-4d": "the input of a linear is 4-D: its batch is that of two dimensions, the first of size 2",
    "bias-first": "of linears only the first has the bias",
    "bias-last": "of linears only the last has the bias",
    "steps-first": "the steps are those of the first of linears only; the others are returned as they are",
    "steps-last": "the steps are those of the last of linears only",
}


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation under its ATen-style name, with what its grammar allows.

    Attributes:
        name: the key of :data:`OPS`.
        batch: ``"never"``, ``"always"`` or ``"optional"``.
        dtypes: whether a triple of dtype names makes sense (a backend may still refuse it).
        dtypes_help: the same in words, with an example.
        constant_b: whether B is a weight, constant for the compiler, unless a flag says otherwise.
        addend: whether the op itself takes a bias operand C (``beta * C + alpha * A @ B``).
        layouts: layouts that can be expressed.
    """

    name: str
    batch: str
    dtypes: Callable[[str, str, str], bool]
    dtypes_help: str
    constant_b: bool = True
    addend: bool = False
    layouts: tuple[Layout, ...] = tuple(Layout)
    scales: tuple[str, ...] = ()


_FLOATS: Final = frozenset({"f64", "f32", "f16", "bf16"})
_HALVES: Final = frozenset({"f16", "bf16"})
_FP8: Final = frozenset({"f8e4m3fn", "f8e5m2"})


def _uniform_float(a: str, b: str, out: str) -> bool:
    return a == b == out and a in _FLOATS


def _float(a: str, b: str, out: str) -> bool:
    return _uniform_float(a, b, out) or (a == b == "f32" and out in _HALVES)


def _quantised(a: str, b: str, out: str) -> bool:
    return a in {"u8", "i8"} and b == "i8" and out in {"f32", "f16", "bf16", "u8", "i8"}


def _one_integer_side(a: str, b: str, out: str) -> bool:
    return (a in _FLOATS and b in {"i8", "u8"} and out == a) or (b in _FLOATS and a in {"i8", "u8"} and out == b)


_LINEAR_LAYOUTS: Final = (Layout.NT, Layout.TT)

# Flags about one of several products.
_OF_ONE: Final = ("bias-first", "bias-last", "steps-first", "steps-last")
_UNIFORM_HELP: Final = "one of f64 f32 f16 bf16"
_FLOAT_HELP: Final = f"{_UNIFORM_HELP}, f32-f32-bf16 or f32-f32-f16 (converted first, as autocast does)"

# How many weights the flag concat speaks of: as many as Inductor's pattern has.
THIRDS: Final = 3
# Ops that add a bias of shape (N,) themselves.
OWN_BIAS: Final = frozenset({"linear", "linears", "qlinear", "da8w8", "scaled_mm"})
# Steps that the op qlinear takes behind its product, each in the order binary, unary.
QLINEAR_UNARY: Final = ("relu", "gelu", "gelu_tanh", "silu", "tanh", "hardswish", "leaky_relu", "clamp")
QLINEAR_BINARY: Final = ("add", "sum")

OPS: Final[Mapping[str, Op]] = {
    op.name: op
    for op in (
        Op("mm", "never", _float, _FLOAT_HELP),
        Op("addmm", "never", _float, _FLOAT_HELP, addend=True),
        Op("bmm", "always", _float, _FLOAT_HELP, constant_b=False),
        Op("baddbmm", "always", _uniform_float, _UNIFORM_HELP, constant_b=False, addend=True),
        Op("linear", "optional", _float, _FLOAT_HELP, layouts=_LINEAR_LAYOUTS),
        Op("linears", "always", _float, _FLOAT_HELP, layouts=_LINEAR_LAYOUTS),
        Op("int_mm", "never", lambda a, b, out: (a, b, out) == ("i8", "i8", "i32"), "i8-i8-i32"),
        Op("mixed_mm", "never", _one_integer_side, "float-i8-float or i8-float-float, for example f16-i8-f16"),
        Op(
            "woq_int8",
            "never",
            lambda a, b, out: a in _HALVES | {"f32"} and b == "i8" and out == a,
            "bf16-i8-bf16, f16-i8-f16 or f32-i8-f32",
            layouts=(Layout.NT,),
        ),
        Op(
            "woq_int4",
            "never",
            lambda a, b, out: a in _HALVES | {"f32"} and b == "i4" and out == a,
            "for example bf16-i4-bf16",
            layouts=(Layout.NT,),
            scales=("group",),
        ),
        Op(
            "qlinear",
            "never",
            _quantised,
            "u8 or i8, i8, and one of f32 f16 bf16 u8 i8, for example u8-i8-f32",
            layouts=(Layout.NT,),
            scales=("static", "dynamic"),
        ),
        Op(
            "da8w8",
            "optional",
            lambda a, b, out: a == b == "i8" and out in _HALVES | {"f32"},
            "i8-i8-f32, i8-i8-bf16 or i8-i8-f16",
            layouts=(Layout.NT,),
            scales=("rowwise", "columnwise"),
        ),
        Op(
            "scaled_mm",
            "never",
            lambda a, b, out: a in _FP8 and b in _FP8 and out in {"bf16", "f16", "f32"},
            "for example f8e4m3fn-f8e4m3fn-bf16",
            constant_b=False,
            layouts=(Layout.NT,),
            scales=("tensorwise", "rowwise"),
        ),
        Op("grouped_mm", "always", _uniform_float, _UNIFORM_HELP, constant_b=False, layouts=(Layout.NN, Layout.NT)),
    )
}

_FIELDS: Final = ("op", "dtypes", "layout", "shape", "epilogue", "flags")
# Characters that a line may have.
_LONGEST: Final = 1000
# What a size is indexed by, 32 bits in BLAS and in kernels, and what the elements of a matrix are counted in.
_LARGEST: Final = 2**31 - 1
_MOST_ELEMENTS: Final = 2**40
# Each weight of linears is an argument of the program.
_MOST_LINEARS: Final = 64

# The order of the steps that are parameters of the product: the scales, the bias and its factors before what is done
# to the result, the requantisation behind it.
_SCALES: Final = ("tensorwise", "rowwise", "columnwise", "group", "static", "dynamic")
_RANKS: Final[Mapping[str, int]] = {**dict.fromkeys(_SCALES, 0), "bias": 1, "alpha": 2, "beta": 3, "requant": 5}
_PASS_RANK: Final = 4


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint in brackets for a word that is nearly one of ``known``; "" where none is near."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _rank(step: Step) -> int:
    return _RANKS.get(step.name, _PASS_RANK)


_SWAPPED: Final = Step("t")


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is to be computed: op, dtypes, layout, shape, epilogue and flags.

    ``str(problem)`` is its canonical line and ``Problem.parse(str(problem)) == problem``.  Fields may be given in any
    order and spelling that the grammar takes; they are canonical afterwards.  A problem says nothing about values
    (filling, seed) or about who computes it (backend).

    Raises:
        ProblemError: when the parts contradict each other, or one of them has no effect.
    """

    op: Op
    dtypes: DTypes
    layout: Layout
    shape: Shape
    epilogue: tuple[Step, ...] = ()
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "epilogue", tuple(self.epilogue))
        object.__setattr__(self, "flags", tuple(self.flags))
        self._check()
        if self.epilogue:
            object.__setattr__(self, "epilogue", self._canonical_epilogue())
        if self.flags:
            object.__setattr__(self, "flags", self._canonical_flags())

    def _canonical_epilogue(self) -> tuple[Step, ...]:
        """The steps without factors of 1, parameters of the product before what is done to the result, ``t`` as t."""
        found = []
        rank = len(self.result_shape)
        for step in self.epilogue:
            if step.name in {"alpha", "beta"} and not step.text:
                continue
            if step.name == "view":
                rank = len(step.sizes)
            swapped = step.name == "perm" and step.order(rank) == _SWAPPED.order(rank)
            found.append(_SWAPPED if swapped else step)
        return tuple(sorted(found, key=_rank))

    def _canonical_flags(self) -> tuple[str, ...]:
        """The flags in the order of the table, without the one that says of B what the op implies."""
        implied = "const-b" if self.op.constant_b and not self.is_twin else "var-b"
        return tuple(flag for flag in ALL_FLAGS if flag in self.flags and flag != implied)

    @functools.cached_property
    def line(self) -> str:
        """The canonical text; also the problem's id."""
        return self._text()

    def _text(self) -> str:
        parts = [self.op.name, str(self.dtypes), str(self.layout), str(self.shape)]
        if self.epilogue or self.flags:
            parts.append("+".join(map(str, self.epilogue)))
        if self.flags:
            parts.append("+".join(self.flags))
        return ":".join(parts)

    def __str__(self) -> str:
        return self.line

    # -- facts that several rooms need -----------------------------------------------------------

    def has(self, flag: str) -> bool:
        """Whether the problem carries ``flag``, a key of :data:`ALL_FLAGS`."""
        return flag in self.flags

    def step(self, name: str) -> Step | None:
        """The first step called ``name``, or ``None``."""
        return next((s for s in self.epilogue if s.name == name), None)

    @property
    def alpha(self) -> float:
        """Factor of the product; 1 where none is given."""
        step = self.step("alpha")
        return step.numbers[0] if step else 1.0

    @property
    def beta(self) -> float:
        """Factor of the bias operand of addmm and baddbmm; 1 where none is given."""
        step = self.step("beta")
        return step.numbers[0] if step else 1.0

    @property
    def bias_shape(self) -> tuple[int, ...] | None:
        """Shape of the bias operand, ``None`` without one.  addmm's default is (N,)."""
        step = self.step("bias")
        if step is None:
            return None
        m, n = self.shape.m, self.shape.n
        if self.op.name == "linears":  # one for each product
            return (self.shape.batch or 0, 1, n)
        shape = {"": (n,), "n": (n,), "1n": (1, n), "m1": (m, 1), "mn": (m, n)}[step.text]
        if self.shape.batch is not None and step.text == "mn":
            return (self.shape.batch, m, n)
        return shape

    @property
    def chain(self) -> tuple[Step, ...]:
        """The steps applied to the product one after the other: no alpha, beta, bias of addmm or scales.

        With ``in-4d`` the product itself has the shape of a first ``view``.
        """
        own_bias = self.op.addend or self.op.name in OWN_BIAS
        steps = tuple(
            s for s in self.epilogue if s.kind is not StepKind.FACTOR and not (own_bias and s.kind is StepKind.BIAS)
        )
        if not self.is_deep:
            return steps
        return Step("view", _by((2, (self.shape.batch or 0) // 2, self.shape.m, self.shape.n))), *steps

    @property
    def is_deep(self) -> bool:
        """Whether A is 4-D."""
        return self.op.name == "linear" and self.has("in-4d")

    @property
    def passes(self) -> tuple[Step, ...]:
        """The steps of :attr:`chain` that compute something."""
        return tuple(s for s in self.chain if s.kind is not StepKind.MOVE)

    @property
    def moves(self) -> tuple[Step, ...]:
        """The steps of :attr:`chain` that only move: what lies between the product's shape and the returned one."""
        return tuple(s for s in self.chain if s.kind is StepKind.MOVE)

    @property
    def residuals(self) -> tuple[tuple[Step, tuple[Step, ...]], ...]:
        """Each step with a residual, and the moves that the value has made when it meets it; a copy is none."""
        found: list[tuple[Step, tuple[Step, ...]]] = []
        moves: tuple[Step, ...] = ()
        for step in self.chain:
            if step.kind is StepKind.MOVE and step.name != "dense":
                moves = (*moves, step)
            elif step.kind is StepKind.BINARY:
                found.append((step, moves))
        return tuple(found)

    @property
    def result_dtype(self) -> DType:
        """Element type of the result: that of the last cast, or of the product."""
        casts = [s.dtype for s in self.epilogue if s.kind is StepKind.CAST]
        return casts[-1] if casts else self.dtypes.out

    @property
    def value_dtype(self) -> DType:
        """Element type of the value that bias and steps meet: that of the product, f32 before it is requantised."""
        return self.dtypes.out if self.dtypes.out.is_float or self.op.name != "qlinear" else DTYPES["f32"]

    def residual_dtype(self, step: Step, dtype: DType) -> DType:
        """Element type of a step's residual, where the step meets a value of ``dtype``.

        That is ``dtype``, but for ``sum`` into 8 bits: what it adds to is the result, codes with their own scale.
        """
        return dtype if step.name != "sum" or self.dtypes.out.is_float else self.dtypes.out

    @property
    def bias_dtype(self) -> DType:
        """Element type of the bias operand."""
        return self.dtypes.a if self.autocast else self.value_dtype

    @property
    def is_twin(self) -> bool:
        """Whether B is A, as it is or transposed: one storage for both."""
        return self.has("self") or self.has("square")

    @property
    def group_size(self) -> int:
        """Elements along K that share a scale, 0 where the op has no groups."""
        step = self.step("group")
        return int(step.numbers[0]) if step else 0

    @property
    def grouped(self) -> bool:
        """Whether A's rows belong to groups, each with a B of its own."""
        return self.op.name == "grouped_mm"

    @property
    def several(self) -> int:
        """How many tensors the program of ``linears`` returns, of which the judge makes one; 0 for another program."""
        return (self.shape.batch or 0) if self.op.name == "linears" and self.step("gated") is None else 0

    def is_one_of(self, what: str, index: int) -> bool:
        """Whether product ``index`` of ``linears`` has what ``what`` speaks of: ``bias`` or ``steps``."""
        if self.has(f"{what}-first"):
            return index == 0
        return not self.has(f"{what}-last") or index == (self.shape.batch or 0) - 1

    @property
    def returned_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that the program returns: :attr:`result_shape` after :attr:`moves`."""
        shape = self.result_shape
        for step in self.moves:
            shape = step.moved(shape)
        return shape

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Shape of the result in the product's own coordinates, where it is judged; of ``linears`` of all results."""
        m, n = self.shape.m, self.shape.n
        if self.step("gated") is not None:
            return (m, n)
        if self.grouped:
            return ((self.shape.batch or 0) * m, n)
        return (m, n) if self.shape.batch is None else (self.shape.batch, m, n)

    @property
    def autocast(self) -> bool:
        """Whether the operands are f32 and the program itself converts them to the half type of its product.

        That is what ``torch.autocast`` makes of a product: ``f32-f32-bf16``.  The bias is converted with them.
        """
        return self.dtypes.a.name == self.dtypes.b.name == "f32" and self.dtypes.out.name in _HALVES

    @property
    def input_dtype(self) -> DType:
        """Element type of A when the product's kernel reads it.

        The program converts f32 under autocast and the integer side of a weight-only or mixed product first.
        """
        converted = self.autocast or self.op.name in {"mixed_mm", "woq_int8", "woq_int4"}
        return self.dtypes.out if converted else self.dtypes.a

    @property
    def outputs(self) -> tuple[Problem, ...]:
        """What each result of the program is the answer to: one, or two with ``tap``, ``fork`` and ``again``.

        With ``tap`` the first is the value before the last step, with ``fork`` what the step before the last makes of
        the value that the last one reads too.  These problems share the operands of this one, but for the second of
        ``again``: its A is the first result.
        """
        if self.has("again"):
            layout = Layout.NT if self.layout.b_transposed else Layout.NN
            kept = tuple(f for f in self.flags if f in {"dyn-m", "pad-ldb", "off-b", "bcast-b", "const-b", "var-b"})
            own = tuple(s for s in self.epilogue if s not in self.chain)
            once = dataclasses.replace(self, flags=tuple(f for f in self.flags if f != "again"))
            return (once, dataclasses.replace(self, layout=layout, epilogue=own, flags=kept))
        if not (self.has("tap") or self.has("fork")):
            return (self,)
        chain = self.chain
        places = [index for index, step in enumerate(self.epilogue) if step in chain]
        without_last = self.without(places[-1])
        return (without_last, self.without(places[-2]) if self.has("fork") else self.without(None))

    def without(self, place: int | None) -> Problem:
        """The program of one result that lacks the step at this place of the epilogue; ``None``: that lacks none."""
        kept = tuple(step for index, step in enumerate(self.epilogue) if index != place)
        gone = {"tap", "fork"} if any(s.kind is StepKind.BINARY for s in kept) else {"tap", "fork", "res-a"}
        return dataclasses.replace(self, epilogue=kept, flags=tuple(f for f in self.flags if f not in gone))

    @property
    def output_names(self) -> tuple[str, ...]:
        """What a report calls each of :attr:`outputs`; "" for the only one."""
        if self.has("fork") or self.has("again"):
            return ("the first result", "the second result")
        return ("the tapped value", "the result") if self.has("tap") else ("",)

    @property
    def constant_b(self) -> bool:
        """Whether B is a constant of the compiled program (a weight) rather than an argument."""
        if self.has("const-b"):
            return True
        return self.op.constant_b and not (self.has("var-b") or self.is_twin)

    @property
    def frozen(self) -> bool:
        """Whether freezing has made a constant of B; without, it is one in a program that is packaged."""
        return self.constant_b and not self.has("unfrozen")

    def with_m(self, m: int) -> Problem:
        """The same problem at another M; for ``dyn-m`` both belong to one artifact."""
        return dataclasses.replace(self, shape=dataclasses.replace(self.shape, m=m))

    # -- text ------------------------------------------------------------------------------------

    @classmethod
    def parse(cls, line: str) -> Problem:
        """Read a problem line.

        Raises:
            ProblemError: naming the field and the character that is wrong, and what is allowed there.
        """
        line = line.strip()
        if len(line) > _LONGEST:
            raise ProblemError(
                f"{line[:80]}...", "op", f"a line of {len(line)} characters", f"up to {_LONGEST} are read"
            )
        fields = line.split(":")
        if len(fields) > len(_FIELDS):
            offset = len(fields[5]) + 1
            raise ProblemError(line, "flags", "too many fields", f"the fields are {':'.join(_FIELDS)}", 0, offset)
        for place, field in enumerate(_FIELDS[:4]):
            if place >= len(fields) or not fields[place]:
                allowed = f"a line is {':'.join(_FIELDS[:4])}[:epilogue[:flags]]"
                raise ProblemError(line, field, "is missing", allowed)
        try:
            return cls(
                _read_op(fields[0]),
                _read_dtypes(fields[1]),
                _read_layout(fields[2]),
                _read_shape(fields[3]),
                _read_epilogue(fields[4]) if len(fields) > 4 and fields[4] else (),
                tuple(fields[5].split("+")) if len(fields) > 5 and fields[5] else (),
            )
        except ProblemError as error:
            raise error.on(line) from None  # pointing into the text that the user typed

    # -- contradictions --------------------------------------------------------------------------

    def _wrong(self, field: str, problem: str, allowed: str, index: int = 0) -> ProblemError:
        """An error about a token of a field, by its number: a flag, a step, a size."""
        return ProblemError(self._text(), field, problem, allowed, index)

    def _check(self) -> None:
        op, names = self.op, (self.dtypes.a.name, self.dtypes.b.name, self.dtypes.out.name)
        if not op.dtypes(*names):
            raise self._wrong("dtypes", f"{self.dtypes} makes no {op.name}", f"{op.name} takes {op.dtypes_help}")
        if self.layout not in op.layouts:
            allowed = f"allowed: {' '.join(map(str, op.layouts))}"
            raise self._wrong("layout", f"{op.name} cannot be {self.layout}", allowed)
        self._check_shape()
        self._check_epilogue()
        if self.op.name == "linears":
            self._check_linears()
        if self.flags:
            self._check_flags()

    def _check_shape(self) -> None:
        op, shape = self.op, self.shape
        m, n, k, batch = shape.m, shape.n, shape.k, shape.batch
        if op.batch == "never" and batch is not None:
            raise self._wrong("shape", f"{op.name} has no batch", "give MxNxK")
        if op.batch == "always" and batch is None:
            raise self._wrong("shape", f"{op.name} needs a batch", "give BxMxNxK")
        sizes = (m, n, k) if batch is None else (batch, m, n, k)
        for index, size in enumerate(sizes):
            if type(size) is not int or size < 0:
                raise self._wrong("shape", f"{size!r} is not a size", "an integer, 0 or more", index)
            if size > _LARGEST:
                raise self._wrong("shape", f"{size} is too large", f"a size is at most {_LARGEST} (2^31 - 1)", index)
        count = 1 if batch is None else batch
        elements = max(count * m * max(n, k), (count if op.batch == "always" else 1) * n * k)
        if elements > _MOST_ELEMENTS:
            problem = f"a matrix of {shape} has {elements} elements"
            raise self._wrong("shape", problem, f"at most {_MOST_ELEMENTS} (2^40) are indexed")
        if self.grouped and count * m > _LARGEST:
            problem = f"{count * m} rows of all groups"
            raise self._wrong("shape", problem, f"the ends of groups are int32: at most {_LARGEST}")

    def _check_epilogue(self) -> None:
        op, names = self.op, [step.name for step in self.epilogue]
        first_pass = requant = ""
        for index, step in enumerate(self.epilogue):
            kind, rank = step.kind, _rank(step)
            if kind in (StepKind.FACTOR, StepKind.BIAS, StepKind.JOIN) and step.name in names[:index]:
                raise self._wrong("epilogue", f"duplicate step: {step}", f"give {step.name} once", index)
            if rank == 0 and step.name not in op.scales:
                takers = " ".join(op.name for op in OPS.values() if step.name in op.scales)
                raise self._wrong("epilogue", f"{op.name} takes no {step.name} scales", f"these do: {takers}", index)
            if step.name in {"alpha", "beta"} and not op.addend:
                allowed = "addmm and baddbmm take it; scale-X goes anywhere"
                raise self._wrong("epilogue", f"{op.name} has no {step.name}", allowed, index)
            if step.name in {"sum", "requant"} and op.name != "qlinear":
                allowed = "qlinear has it" if step.name != "sum" else "write add"
                raise self._wrong("epilogue", f"{op.name} has no {step.name}", allowed, index)
            if kind is StepKind.JOIN:
                if op.name != "linears" or self.shape.batch != 2:
                    problem = f"{step} joins two products"
                    raise self._wrong("epilogue", problem, "linears of shape 2xMxNxK has them", index)
                if first_pass:
                    problem = f"{step} comes after another step"
                    raise self._wrong("epilogue", problem, "it goes first, after the bias", index)
            if step.name == "bias" and step.text and not op.addend:
                raise self._wrong("epilogue", f"{op.name} takes a bias of shape (N,) only", "write bias", index)
            if rank < _PASS_RANK and first_pass:
                problem = f"{step} comes after another step, {first_pass}"
                raise self._wrong("epilogue", problem, "bias, its factors and scales go first", index)
            if rank == _PASS_RANK and requant:
                raise self._wrong("epilogue", f"{step} comes after {requant}", "requant goes last", index)
            first_pass = first_pass or (str(step) if rank == _PASS_RANK else "")
            requant = requant or (str(step) if step.name == "requant" else "")
        scales = [index for index, step in enumerate(self.epilogue) if _rank(step) == 0]
        if op.scales and len(scales) != 1:
            given = " and ".join(str(self.epilogue[index]) for index in scales)
            problem = f"{given} at once" if scales else f"{op.name} needs its scales"
            raise self._wrong("epilogue", problem, f"write one of {' '.join(op.scales)}", max(scales, default=0))
        if op.name == "woq_int4" and self.shape.k % self.group_size:
            problem = f"K={self.shape.k} is no multiple of the group {self.group_size}"
            raise self._wrong("epilogue", problem, "give another K, or a group of 32, 64, 128 or 256", scales[0])
        if op.addend and "bias" not in names:
            raise self._wrong("epilogue", f"{op.name} needs its addend", "add bias, bias-1n, bias-m1 or bias-mn")
        if op.name == "qlinear":
            self._check_qlinear(names)
        if first_pass:
            self._check_chain()

    def _check_qlinear(self, names: list[str]) -> None:
        """The op is one kernel: a binary step, a unary one, and for an 8-bit result the requantisation at its end."""
        integer = not self.dtypes.out.is_float
        chain = [
            step.name if step.kind is not StepKind.BINARY or step.name == "sum" else str(step) for step in self.chain
        ]
        binary, unary = chain[:1], chain[1:]
        if binary and binary[0] in QLINEAR_UNARY:
            binary, unary = [], chain
        known = ("relu",) if binary else QLINEAR_UNARY
        if not set(binary) <= set(QLINEAR_BINARY) or unary not in [[], *([name] for name in known)]:
            allowed = f"one of {' '.join(QLINEAR_UNARY)}, or one of {' '.join(QLINEAR_BINARY)} and then relu"
            place = self.epilogue.index(self.chain[0])
            raise self._wrong("epilogue", f"qlinear has no steps {'+'.join(chain)}", allowed, place)
        if integer != ("requant" in names):
            problem = "an 8-bit result needs its scale" if integer else "a float result is not requantised"
            place = 0 if integer else names.index("requant")
            raise self._wrong("epilogue", problem, f"{'add' if integer else 'drop'} requant", place)
        total = self.step("sum")
        if total is not None and total.text and not integer:
            problem = f"{total} on a float result, whose residual has no scale"
            raise self._wrong("epilogue", problem, "write sum, or an 8-bit result", names.index("sum"))
        for name, dtype in (("static", self.dtypes.a), ("requant", self.dtypes.out), ("sum", self.dtypes.out)):
            step = self.step(name)
            low = 0.0 if dtype.name == "u8" else -128.0
            if step is not None and not dtype.is_float and not low <= step.numbers[1] <= dtype.max_finite:
                problem, allowed = f"{step}: no zero point of {dtype.name}", f"from {low:g} to {dtype.max_finite:g}"
                raise self._wrong("epilogue", problem, allowed, names.index(name))

    def _check_chain(self) -> None:
        """Each step must suit the value that it meets, and make another one of it.

        A move must fit the shape, and no residual may need a copy to lie in the product's places.
        """
        chain, shape, value = self.chain, self.result_shape, self.value_dtype
        deep = chain[0] if self.is_deep else None  # it leaves rows and columns where they are
        shape = shape if deep is None else deep.sizes
        move: Step | None = None
        is_copied = True  # in the order of its dimensions
        for index, step in enumerate(self.epilogue):
            if step not in chain:
                continue
            if step.kind is StepKind.CAST:
                if step.dtype == value:
                    raise self._wrong("epilogue", f"{step}: the value is {value.name} already", f"drop {step}", index)
                value = step.dtype
            elif step.kind in (StepKind.UNARY, StepKind.BINARY) and (not value.is_float or value.bits == 8):
                problem = f"{step} on a value of {value.name}"
                raise self._wrong("epilogue", problem, "cast first, for example cast-f32+relu", index)
            if step.kind is StepKind.BINARY and step.extent and move is not None:
                problem = f"{step} after {move}: rows and columns have moved then"
                raise self._wrong("epilogue", problem, f"put {step} first", index)
            if step.kind is not StepKind.MOVE:
                continue
            self._check_move(index, shape, move or deep)
            if step.name == "dense" and is_copied:
                problem = "dense: nothing was moved since the value was last in order"
                raise self._wrong("epilogue", problem, "write t+dense, or drop dense", index)
            is_copied = step.name == "dense" or (is_copied and step.name == "view")
            move, shape = step, step.moved(shape)

    def _check_move(self, index: int, shape: tuple[int, ...], before: Step | None) -> None:
        """Whether a move fits the shape that it meets, and leaves not everything where it is."""
        step = self.epilogue[index]
        if step.name == "view":
            if before is not None:
                allowed = "one view, before the other moves"
                raise self._wrong("epilogue", f"{step} after {before} would copy", allowed, index)
            if self.has("dyn-m"):
                problem = f"{step} has its sizes, and dyn-m every M"
                raise self._wrong("epilogue", problem, "t and perm go with dyn-m", index)
            if math.prod(step.sizes) != math.prod(shape) or max(step.sizes) > _LARGEST:
                problem = f"{step} has not {math.prod(shape)} elements"
                raise self._wrong("epilogue", problem, f"the result is {_by(shape)}", index)
            is_idle = step.sizes == shape
        else:
            order, places = step.order(len(shape)), tuple(range(len(shape)))
            if tuple(sorted(order)) != places:
                problem = f"{step} does not order the dimensions of {_by(shape)}"
                allowed = f"for example perm-{'_'.join(map(str, reversed(places)))}"
                raise self._wrong("epilogue", problem, allowed, index)
            is_idle = step.name == "perm" and order == places
        if is_idle:
            problem = f"{step} leaves the result of {_by(shape)} as it is"
            raise self._wrong("epilogue", problem, f"drop {step}", index)

    def _check_linears(self) -> None:
        shape = self.shape
        if not 2 <= (shape.batch or 0) <= _MOST_LINEARS:
            allowed = f"write for example 2x{shape.m}x{shape.n}x{shape.k}"
            raise self._wrong("shape", f"linears are two or more products, up to {_MOST_LINEARS}", allowed)
        for index, step in enumerate(self.epilogue):
            if step.kind is StepKind.MOVE or (step.kind is StepKind.BINARY and step.extent):
                raise self._wrong("epilogue", f"linears do not take {step}", f"drop {step}", index)

    def _check_flags(self) -> None:
        for index, flag in enumerate(self.flags):
            if not flag:
                raise self._wrong("flags", "an empty token", "flags tokens are joined by one '+'", index)
            if flag not in ALL_FLAGS:
                problem = f"unknown flag {flag!r}{did_you_mean(flag, ALL_FLAGS)}"
                raise self._wrong("flags", problem, f"known: {' '.join(ALL_FLAGS)}", index)
            if flag in self.flags[:index]:
                raise self._wrong("flags", f"duplicate flag: {flag}", "give it once", index)
            if self.op.name not in _TAKERS.get(flag, OPS):
                problem = f"{self.op.name} does not take {flag}"
                raise self._wrong("flags", problem, f"drop {flag}, or use {' '.join(_TAKERS[flag])}", index)
            for other in _CONTRADICTIONS.get(flag, ()):
                if self.has(other):
                    problem = f"{flag} and {other} contradict each other"
                    raise self._wrong("flags", problem, f"drop {other}", self.flags.index(other))
        for index, flag in enumerate(self.flags):
            for is_broken, problem, allowed in _RULES[flag](self, flag) if flag in _RULES else ():
                if is_broken:
                    raise self._wrong("flags", problem, allowed, index)


# -- flags -----------------------------------------------------------------------------------------


def _ops_but(*names: str) -> tuple[str, ...]:
    return tuple(name for name in OPS if name not in names)


# The ops that take a flag; a flag that is not here goes with any.  A weight that was packed before the program is made
# can be no argument of it, and A of grouped_mm is one matrix where its B are several.
_TAKERS: Final[Mapping[str, tuple[str, ...]]] = {
    "bcast-a": ("bmm", "baddbmm"),
    "bcast-b": ("bmm", "baddbmm", "grouped_mm"),
    "self": _ops_but("linears", "mixed_mm", "woq_int8", "woq_int4", "qlinear", "grouped_mm"),
    "var-b": _ops_but("woq_int4", "qlinear"),
    **dict.fromkeys(("tf32", "reduced"), ("mm", "addmm", "bmm", "baddbmm", "linear", "mixed_mm")),
    **dict.fromkeys(("res-a", "tap", "fork"), _ops_but("linears", "woq_int4", "qlinear")),
    "reduce-range": ("qlinear",),
    "again": ("mm", "bmm", "linear"),
    "fast-acc": ("scaled_mm",),
    **dict.fromkeys(("mid-a", "mid-b"), ("bmm", "baddbmm")),
    "square": ("mm", "bmm"),
    "concat": ("woq_int8",),
    **dict.fromkeys(("in-3d", "flat", *_OF_ONE), ("linears",)),
    "in-4d": ("linear",),
}
# Flags beside which others mean nothing: those to drop.
_CONTRADICTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "self": ("pad-ldb", "off-b", "bcast-b", "const-b", "dyn-m", "square", "mid-b"),
    "square": ("pad-ldb", "off-b", "bcast-b", "const-b", "dyn-m", "mid-b"),
    "const-b": ("var-b",),
    "unfrozen": ("var-b", "self", "square"),
    "mid-a": ("bcast-a",),
    "mid-b": ("bcast-b",),
    "fork": ("tap",),
    "again": ("tap", "fork", "self", "res-a"),
    "concat": ("var-b", "unfrozen"),
    "in-3d": ("dyn-m",),
    "in-4d": ("dyn-m", "tap", "fork", "again", "res-a"),
    "bias-last": ("bias-first",),
    "steps-last": ("steps-first",),
}

# What else can be wrong with a flag: whether it is, the complaint, and what would be right.
_Rules = Iterator[tuple[bool, str, str]]


def _rules_of_self(p: Problem, _: str) -> _Rules:
    shape, name = p.shape, p.op.name
    yield shape.m != shape.n, "self needs M = N", f"write {shape.m}x{shape.m}x{shape.k}"
    yield p.dtypes.a != p.dtypes.b, "self needs one dtype for A and B", "drop self"
    yield p.layout not in (Layout.NT, Layout.TN), "self: B is A transposed", "self goes with nt or tn"
    deep = p.op.batch == "optional" and shape.batch is not None
    yield deep, f"{name} has one B for the whole batch, and self one for each A", "drop self"


def _rules_of_square(p: Problem, _: str) -> _Rules:
    m = p.shape.m
    yield not m == p.shape.n == p.shape.k, "square needs M = N = K", f"write {_but(p.shape, n=m, k=m)}"
    yield p.layout not in (Layout.NN, Layout.TT), "square: B is A", "square goes with nn or tt"


def _rules_of_bcast(p: Problem, flag: str) -> _Rules:
    batch = p.shape.batch or 0
    yield batch < 2, f"{flag}: one matrix for a batch of {batch}", f"give a batch of 2 or more, or drop {flag}"


def _rules_of_precision(p: Problem, flag: str) -> _Rules:
    names = ("f32",) if flag == "tf32" else ("bf16", "f16")
    given = p.input_dtype.name
    yield given not in names, f"{flag} is for products in {' or '.join(names)}, not {given}", f"drop {flag}"


def _rules_of_reduce_range(p: Problem, flag: str) -> _Rules:
    yield p.dtypes.a.name != "u8", f"{flag} is for activations in u8", "write qlinear:u8-..."


def _rules_of_concat(p: Problem, _: str) -> _Rules:
    n = p.shape.n
    yield n % THIRDS != 0, f"concat: N={n} is not the columns of {THIRDS} equal weights", "a multiple of 3"


def _rules_of_unfrozen(p: Problem, _: str) -> _Rules:
    yield not p.constant_b, "unfrozen is about a weight", "add const-b"


def _rules_of_tap(p: Problem, _: str) -> _Rules:
    yield not p.chain, "tap needs a step: it returns the value before the last one", "add one, for example relu"


def _rules_of_fork(p: Problem, _: str) -> _Rules:
    last = p.chain[-2:]
    computes = len(last) == 2 and last[0].kind in (StepKind.UNARY, StepKind.BINARY)
    yield not computes, "fork needs two steps at the end, the first of which computes", "for example relu+sigmoid"
    both = all(step.kind is StepKind.BINARY for step in last)
    yield both, f"fork: {' and '.join(map(str, last))} have a residual each", "let one of the two steps have none"


def _rules_of_again(p: Problem, _: str) -> _Rules:
    yield p.shape.n != p.shape.k, "again needs N = K", f"write {_but(p.shape, k=p.shape.n)}"
    other = bool(p.moves) or not p.dtypes.a == p.dtypes.out == p.result_dtype
    yield other, "again needs a first result that could be A", "drop the steps that move or cast, and autocast"


def _rules_of_res_a(p: Problem, _: str) -> _Rules:
    """A must have the result's shape, and the dtype of the value that it meets."""
    needs = "res-a needs N = K: A has the result's shape then"
    yield p.shape.n != p.shape.k, needs, f"write {_but(p.shape, k=p.shape.n)}"
    dtype = p.dtypes.out
    for step in p.passes:
        if step.kind is StepKind.CAST:
            dtype = step.dtype
        if step.kind is StepKind.BINARY:
            break
    else:
        yield True, "res-a needs a residual", "add add, sub or mul to the epilogue"
        return
    yield step.name == "div", "res-a would divide by A, which holds zeros", "use add, sub or mul first"
    moved = bool(step.extent or p.residuals[0][1])
    yield moved, f"res-a has A's own shape, which {step} does not meet", "use add, sub or mul before any move"
    other = f"res-a needs a value of A's dtype, not {dtype.name}"
    yield dtype != p.dtypes.a, other, "move or drop the cast, or drop res-a"


def _rules_of_in_3d(p: Problem, _: str) -> _Rules:
    uneven = p.shape.m % 2 != 0 or p.layout.a_transposed
    yield uneven, "in-3d halves the rows of A", "give an even M and layout nt"


def _rules_of_flat(p: Problem, _: str) -> _Rules:
    yield not p.has("in-3d"), "flat undoes in-3d", "add in-3d"


def _rules_of_in_4d(p: Problem, _: str) -> _Rules:
    batch = p.shape.batch
    yield not batch or batch % 2 != 0, f"in-4d needs an even batch, not {batch}", "write BxMxNxK with an even B"


def _rules_of_one(p: Problem, flag: str) -> _Rules:
    what = flag.partition("-")[0]
    there = p.step("bias") is not None if what == "bias" else bool(p.passes)
    yield not there, f"{flag}: which {what}?", "give it in the epilogue"
    common = [str(step) for step in p.passes if what == "steps" and step.kind in (StepKind.JOIN, StepKind.CAST)]
    yield bool(common), f"{flag}: {'+'.join(common)} is no step of one product alone", f"drop {flag}"


_RULES: Final[Mapping[str, Callable[[Problem, str], _Rules]]] = {
    "self": _rules_of_self,
    "square": _rules_of_square,
    "bcast-a": _rules_of_bcast,
    "bcast-b": _rules_of_bcast,
    "tf32": _rules_of_precision,
    "reduced": _rules_of_precision,
    "reduce-range": _rules_of_reduce_range,
    "concat": _rules_of_concat,
    "unfrozen": _rules_of_unfrozen,
    "tap": _rules_of_tap,
    "fork": _rules_of_fork,
    "again": _rules_of_again,
    "res-a": _rules_of_res_a,
    "in-3d": _rules_of_in_3d,
    "flat": _rules_of_flat,
    "in-4d": _rules_of_in_4d,
    **dict.fromkeys(_OF_ONE, _rules_of_one),
}


def _but(shape: Shape, **sizes: int) -> Shape:
    return dataclasses.replace(shape, **sizes)


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def canonical_line(line: str) -> str:
    """The canonical spelling of a line that was stored, perhaps by an earlier version; as it is where it is no line."""
    try:
        return Problem.parse(line).line
    except ProblemError:
        return line


# -- reading ---------------------------------------------------------------------------------------
# Each reads the text of one field; the line of its errors is empty, and Problem.parse() fills in what was typed.


def _read_op(text: str) -> Op:
    if text not in OPS:
        problem = f"unknown op {text!r}{did_you_mean(text, OPS)}"
        raise ProblemError("", "op", problem, f"known: {' '.join(OPS)}")
    return OPS[text]


@functools.lru_cache(maxsize=256)
def _read_dtypes(text: str) -> DTypes:
    names = text.split("-")
    for index, name in enumerate(names):
        if name not in DTYPES:
            problem = f"unknown dtype {name!r}{did_you_mean(name, DTYPES)}"
            raise ProblemError("", "dtypes", problem, f"known: {' '.join(DTYPES)}", index)
    if len(names) not in (1, 3):
        raise ProblemError("", "dtypes", f"{len(names)} names", "give one for all, or a-b-out")
    a, b, out = (DTYPES[n] for n in (names if len(names) == 3 else names * 3))
    return DTypes(a, b, out)


def _read_layout(text: str) -> Layout:
    try:
        return Layout(text)
    except ValueError:
        raise ProblemError("", "layout", f"unknown layout {text!r}", "one of nn nt tn tt") from None


def _read_shape(text: str) -> Shape:
    sizes = []
    for index, part in enumerate(text.split("x")):
        if not (part.isascii() and part.isdigit()):
            allowed = "write MxNxK or BxMxNxK, each 0 or more"
            raise ProblemError("", "shape", f"{part!r} is not a size", allowed, index)
        sizes.append(int(part))
    if len(sizes) == 3:
        return Shape(*sizes)
    if len(sizes) == 4:
        batch, m, n, k = sizes
        return Shape(m, n, k, batch)
    raise ProblemError("", "shape", f"{len(sizes)} sizes", "write MxNxK, or BxMxNxK with a batch")


def _read_epilogue(text: str) -> tuple[Step, ...]:
    found = []
    for index, token in enumerate(text.split("+")):
        if not token:
            raise ProblemError("", "epilogue", "an empty token", "epilogue tokens are joined by one '+'", index)
        try:
            found.append(_read_step(token))
        except ProblemError as error:
            raise ProblemError("", error.field, error.problem, error.allowed, index, error.offset) from None
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _read_step(token: str) -> Step:
    name, _, text = token.partition("-")
    return Step(name, text) if text else Step(token)
