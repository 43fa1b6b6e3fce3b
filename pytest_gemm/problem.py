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
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
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
    "did_you_mean",
]


class ProblemError(ValueError):
    """A problem line that cannot be read, or that contradicts itself.

    The message is one paragraph for a user: it names the field, points at the character, and says
    what would be right.

    Attributes:
        line: the whole line as given.
        field: which field is wrong: ``op``, ``dtypes``, ``layout``, ``shape``, ``epilogue``, ``flags``.
        column: 0-based offset of the offending character in ``line``.
    """

    def __init__(self, line: str, field: str, column: int, problem: str, allowed: str) -> None:
        self.line = line
        self.field = field
        self.column = column
        pointer = " " * column + "^"
        super().__init__(f"{field}: {problem}; {allowed}\n  {line}\n  {pointer}")


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
        text: its parameter as written, "" when there is none.
    """

    name: str
    text: str = ""

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


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """What the grammar allows after a step's name."""

    kind: StepKind
    # "", "numbers", "dtype", "shape" (the first of ``choices`` goes unwritten), "choice" or "places"
    parameter: str = ""
    defaults: tuple[float, ...] = ()
    choices: tuple[str, ...] = ()
    help: str = ""


_BIAS_SHAPES: Final = ("n", "1n", "m1", "mn")
_RESIDUAL_SHAPES: Final = ("mn", "n", "m1", "at")

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
    "clamp": StepSpec(StepKind.UNARY, "numbers", (-1.0, 1.0), help="clamp-0_6: bounds LOW_HIGH"),
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
        help="sum: adds to a residual in place, as the op qlinear can; sum-0.5_3: SCALE_ZEROPOINT of one in 8 bits",
    ),
    "cast": StepSpec(StepKind.CAST, "dtype", help="cast-f32: result in another dtype"),
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
    "group": StepSpec(StepKind.FACTOR, "numbers", (128.0,), help="group-64: K elements that share a scale"),
    "static": StepSpec(
        StepKind.FACTOR,
        "numbers",
        (0.0078125, 7.0),
        help="static-0.02_7: SCALE_ZEROPOINT of A, constants of the program",
    ),
    "dynamic": StepSpec(StepKind.FACTOR, help="scale and zero point of A are tensors that are computed"),
    "requant": StepSpec(
        StepKind.FACTOR, "numbers", (0.5, 3.0), help="requant-0.5_3: SCALE_ZEROPOINT of an 8-bit result"
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

# Flags that speak of one of several products.
_OF_ONE: Final = ("bias-first", "bias-last", "steps-first", "steps-last")
_UNIFORM_HELP: Final = "one of f64 f32 f16 bf16"
_FLOAT_HELP: Final = f"{_UNIFORM_HELP}, f32-f32-bf16 or f32-f32-f16 (converted first, as autocast does)"

# How many weights the flag concat speaks of: as many as Inductor's pattern has.
THIRDS: Final = 3
# Ops that take a weight in a packed form, which is made before the program is.
_PACKED: Final = frozenset({"qlinear", "woq_int4"})
# Ops that add a bias of shape (N,) themselves.
OWN_BIAS: Final = frozenset({"linear", "linears", "qlinear", "da8w8", "scaled_mm"})
# Steps that the op qlinear takes behind its product, each in the order binary, unary.
QLINEAR_UNARY: Final = ("relu", "gelu", "gelu_tanh", "silu", "tanh", "hardswish", "leaky_relu", "clamp")
QLINEAR_BINARY: Final = ("add", "sum")

# Ops whose product PyTorch can be told to compute with less precision, by the flags tf32 and reduced.
_PRECISION_OPS: Final = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "mixed_mm"})

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

# One dimension or flag per line of the table keeps the error messages honest: they are made from it.
_PLACES: Final[Mapping[str, str]] = {"perm": r"\d(_\d)+", "view": r"\d+(x\d+)*"}
_STEP_TOKEN: Final = re.compile(r"([a-z_]+)(?:-(.+))?\Z")
_FIELDS: Final = ("op", "dtypes", "layout", "shape", "epilogue", "flags")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint in brackets for a word that is nearly one of ``known``; "" where none is near."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is to be computed: op, dtypes, layout, shape, epilogue and flags.

    ``str(problem)`` is its canonical line and ``Problem.parse(str(problem)) == problem``.  A problem
    says nothing about values (filling, seed) or about who computes it (backend).

    Raises:
        ProblemError: when the parts contradict each other.
    """

    op: Op
    dtypes: DTypes
    layout: Layout
    shape: Shape
    epilogue: tuple[Step, ...] = ()
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        order = list(ALL_FLAGS)
        object.__setattr__(self, "flags", tuple(sorted(set(self.flags), key=order.index)))
        self._check()

    @functools.cached_property
    def line(self) -> str:
        """The canonical text; also the problem's id."""
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
        sizes = (2, (self.shape.batch or 0) // 2, self.shape.m, self.shape.n)
        deep = (Step("view", "x".join(map(str, sizes))),) if self.has("in-4d") else ()
        return deep + tuple(
            s for s in self.epilogue if s.kind is not StepKind.FACTOR and not (own_bias and s.kind is StepKind.BIAS)
        )

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
        return _Parser(line).problem()

    def _check(self) -> None:
        """Refuse contradictions; the column points at the field of the canonical line."""

        def fail(field: str, problem: str, allowed: str) -> None:
            line = self.line
            parts = line.split(":")
            index = min(_FIELDS.index(field), len(parts) - 1)
            column = sum(len(p) + 1 for p in parts[:index])
            raise ProblemError(line, field, column, problem, allowed)

        op, names = self.op, (self.dtypes.a.name, self.dtypes.b.name, self.dtypes.out.name)
        if not op.dtypes(*names):
            fail("dtypes", f"{self.dtypes} makes no {op.name}", f"{op.name} takes {op.dtypes_help}")
        if self.layout not in op.layouts:
            fail("layout", f"{op.name} cannot be {self.layout}", f"allowed: {' '.join(map(str, op.layouts))}")
        if op.batch == "never" and self.shape.batch is not None:
            fail("shape", f"{op.name} has no batch", "give MxNxK")
        if op.batch == "always" and self.shape.batch is None:
            fail("shape", f"{op.name} needs a batch", "give BxMxNxK")
        if self.has("in-4d"):
            self._check_deep(fail)
        self._check_epilogue(fail)
        self._check_flags(fail)

    def _check_deep(self, fail: Callable[[str, str, str], None]) -> None:
        if self.op.name != "linear":
            fail("flags", f"in-4d is not supported by {self.op.name}", "use linear")
        if not self.shape.batch or self.shape.batch % 2:
            fail("flags", f"in-4d needs an even batch, not {self.shape.batch}", "write BxMxNxK with an even B")
        for flag in ("dyn-m", "tap", "fork", "again", "res-a"):
            if self.has(flag):
                fail("flags", f"in-4d does not support {flag}", f"drop {flag}")

    def _check_epilogue(self, fail: Callable[[str, str, str], None]) -> None:
        seen_pass = False
        for index, step in enumerate(self.epilogue):
            if step.kind in (StepKind.FACTOR, StepKind.BIAS) and step in self.epilogue[:index]:
                fail("epilogue", f"{step} stands twice", "once is enough")
            if step.name in {"alpha", "beta"} and not self.op.addend:
                fail(
                    "epilogue", f"{self.op.name} has no {step.name}", "addmm and baddbmm take it; scale-X goes anywhere"
                )
            if step.name in {"tensorwise", "rowwise", "group"} and step.name not in self.op.scales:
                takers = " ".join(op.name for op in OPS.values() if step.name in op.scales)
                fail("epilogue", f"{self.op.name} takes no {step.name} scales", f"these do: {takers}")
            if step.kind is StepKind.JOIN:
                if self.op.name != "linears" or self.shape.batch != 2:
                    fail("epilogue", f"{step} joins two products", "linears of shape 2xMxNxK has them")
                if seen_pass:
                    fail("epilogue", f"{step} comes after another step", "it goes first, after the bias")
            if step.name in {"static", "requant", "sum"} and (step.numbers[0] <= 0.0 or step.numbers[1] % 1.0):
                fail(
                    "epilogue",
                    f"{step} is no scale and zero point",
                    f"write {step.name}-0.5_3: above 0, and an integer",
                )
            if step.kind is StepKind.BIAS and seen_pass:
                fail("epilogue", f"{step} comes after another step", "bias goes first, factors beside it")
            if step.name == "bias" and step.text not in {"", "n"} and not self.op.addend:
                fail("epilogue", f"{self.op.name} takes a bias of shape (N,) only", "write bias")
            seen_pass = seen_pass or step.kind not in (StepKind.FACTOR, StepKind.BIAS)
        self._check_moves(fail)
        scales = [step for step in self.epilogue if step.name in self.op.scales]
        if self.op.scales and len(scales) != 1:
            problem = f"{' and '.join(map(str, scales))} at once" if scales else f"{self.op.name} needs its scales"
            fail("epilogue", problem, f"write one of {' '.join(self.op.scales)}")
        if self.op.name == "qlinear":
            self._check_qlinear(fail)
        for name in ("sum", "requant"):
            if self.step(name) is not None and self.op.name != "qlinear":
                fail("epilogue", f"{self.op.name} has no {name}", "qlinear has it" if name != "sum" else "write add")
        if self.op.name == "woq_int4" and (self.group_size < 1 or self.shape.k % self.group_size):
            fail("epilogue", f"K={self.shape.k} is no multiple of the group {self.group_size}", "add group-32 or so")
        if self.op.addend and self.step("bias") is None:
            fail("epilogue", f"{self.op.name} needs its addend", "add bias, bias-1n, bias-m1 or bias-mn")
        if self.op.name == "int_mm" and any(s.kind in (StepKind.UNARY, StepKind.BINARY) for s in self.epilogue):
            first = self.epilogue[0]
            if first.kind is not StepKind.CAST:
                fail("epilogue", f"{first} on an int32 product", "cast first, for example cast-f32+relu")

    def _check_qlinear(self, fail: Callable[[str, str, str], None]) -> None:
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
            fail("epilogue", f"qlinear has no steps {'+'.join(chain)}", allowed)
        if integer != (self.step("requant") is not None):
            problem = "an 8-bit result needs its scale" if integer else "a float result is not requantised"
            fail("epilogue", problem, f"{'add' if integer else 'drop'} requant")
        total = self.step("sum")
        if total is not None and total.text and not integer:
            fail("epilogue", f"{total} on a float result, whose residual has no scale", "write sum, or an 8-bit result")
        for name, dtype in (("static", self.dtypes.a), ("requant", self.dtypes.out), ("sum", self.dtypes.out)):
            step = self.step(name)
            low = 0.0 if dtype.name == "u8" else -128.0
            if step is not None and not dtype.is_float and not low <= step.numbers[1] <= dtype.max_finite:
                fail("epilogue", f"{step}: no zero point of {dtype.name}", f"from {low:g} to {dtype.max_finite:g}")

    def _check_moves(self, fail: Callable[[str, str, str], None]) -> None:
        """A move must fit the shape that it meets, and no residual may need a copy to lie in the product's places."""
        shape = self.result_shape
        moves: list[Step] = []
        for step in self.chain:
            # The view of in-4d leaves rows and columns where they are.
            if step.kind is StepKind.BINARY and step.extent and len(moves) > self.has("in-4d"):
                fail("epilogue", f"{step} after {moves[-1]}: rows and columns have moved then", f"put {step} first")
            if step.kind is not StepKind.MOVE:
                continue
            if step.name == "view":
                if moves:
                    fail("epilogue", f"{step} after {moves[-1]} would copy", "one view, before the other moves")
                if self.has("dyn-m"):
                    fail("epilogue", f"{step} has its sizes, and dyn-m every M", "t and perm go with dyn-m")
                if math.prod(step.sizes) != math.prod(shape):
                    fail("epilogue", f"{step} has not {math.prod(shape)} elements", f"the result is {_by(shape)}")
            elif sorted(step.order(len(shape))) != list(range(len(shape))):
                named = "_".join(map(str, reversed(range(len(shape)))))
                fail("epilogue", f"{step} does not order the dimensions of {_by(shape)}", f"for example perm-{named}")
            moves.append(step)
            shape = step.moved(shape)

    def _check_flags(self, fail: Callable[[str, str, str], None]) -> None:
        shape = self.shape
        if self.has("self"):
            if shape.m != shape.n:
                fail("flags", "self needs M = N", f"write {shape.m}x{shape.m}x{shape.k}")
            if self.dtypes.a != self.dtypes.b:
                fail("flags", "self needs one dtype for A and B", "drop self")
            if self.layout not in (Layout.NT, Layout.TN):
                fail("flags", "B is A transposed", "self goes with nt or tn")
            if self.op.batch == "optional" and shape.batch is not None:
                fail("flags", f"{self.op.name} has one B for the whole batch, and self one for each A", "drop self")
            for other in ("pad-ldb", "off-b", "bcast-b", "const-b", "dyn-m"):
                if self.has(other):
                    fail("flags", f"self and {other} contradict each other", f"drop {other}")
        self._check_views(fail)
        if self.op.name == "linears":
            self._check_linears(fail)
        elif found := [flag for flag in ("in-3d", "flat", *_OF_ONE) if self.has(flag)]:
            fail("flags", f"{found[0]} speaks of several products of one input", "linears has it")
        if self.has("const-b") and self.has("var-b"):
            fail("flags", "const-b and var-b contradict each other", "keep one")
        for flag in ("bcast-a", "bcast-b"):
            if self.has(flag) and (self.op.batch != "always"):
                fail("flags", f"{flag} needs a batch", "use bmm or baddbmm")
        if self.grouped:
            for flag in ("self", "bcast-a"):
                if self.has(flag):
                    fail("flags", f"{flag}: the A of grouped_mm is one matrix, its B are several", f"drop {flag}")
        if self.has("reduce-range") and (self.op.name != "qlinear" or self.dtypes.a.name != "u8"):
            fail("flags", "reduce-range speaks of quantised activations in u8", "qlinear:u8-... has it")
        if self.has("concat"):
            if self.op.name != "woq_int8":
                fail("flags", "concat speaks of weights in int8", "woq_int8 has it; linears for float ones")
            if shape.n % THIRDS:
                fail("flags", f"concat: N={shape.n} is not the columns of {THIRDS} equal weights", "a multiple of 3")
            for flag in ("var-b", "self", "again", "unfrozen"):
                if self.has(flag):
                    fail("flags", f"concat and {flag}: the {THIRDS} weights are parameters", f"drop {flag}")
        if self.op.name in _PACKED:
            for flag in ("var-b", "self", "tap", "fork", "res-a"):
                if self.has(flag):
                    fail("flags", f"{flag}: {self.op.name} takes a weight that was packed before", f"drop {flag}")
        if self.has("fast-acc") and self.op.name != "scaled_mm":
            fail("flags", "fast-acc speaks of fp8 products", "scaled_mm has it")
        self._check_precision(fail)
        if self.has("tap") and not self.chain:
            fail("flags", "tap needs a step: it returns the value before the last one", "add one, for example relu")
        if self.has("fork"):
            self._check_fork(fail)
        if self.has("again"):
            self._check_again(fail)
        if self.has("res-a"):
            self._check_residual(fail)

    def _check_views(self, fail: Callable[[str, str, str], None]) -> None:
        """Batches in the middle, A with itself, and parameters that are not frozen."""
        shape = self.shape
        for flag, other in (("mid-a", "bcast-a"), ("mid-b", "bcast-b")):
            if self.has(flag) and self.op.name not in {"bmm", "baddbmm"}:
                fail("flags", f"{flag} needs a batch of both", "use bmm or baddbmm")
            if self.has(flag) and self.has(other):
                fail("flags", f"{flag} and {other} contradict each other", "keep one")
        if self.has("square"):
            if not shape.m == shape.n == shape.k:
                fail("flags", "square needs M = N = K", f"write {dataclasses.replace(shape, n=shape.m, k=shape.m)}")
            if self.dtypes.a != self.dtypes.b or self.op.name not in {"mm", "bmm"}:
                fail("flags", "square needs one dtype for A and B", "use mm or bmm of one dtype")
            if self.layout not in (Layout.NN, Layout.TT):
                fail("flags", "B is A", "square goes with nn or tt")
            for other in ("self", "pad-ldb", "off-b", "bcast-b", "mid-b", "const-b", "dyn-m"):
                if self.has(other):
                    fail("flags", f"square and {other} contradict each other", f"drop {other}")
        if self.has("self") and self.has("mid-b"):
            fail("flags", "self and mid-b contradict each other", "drop mid-b: B lies as A does")
        if self.has("unfrozen") and not self.constant_b:
            fail("flags", "unfrozen speaks of a weight", "drop var-b, or add const-b")

    def _check_linears(self, fail: Callable[[str, str, str], None]) -> None:
        shape = self.shape
        if (shape.batch or 0) < 2:
            fail("shape", "linears are two or more products", f"write 2x{shape.m}x{shape.n}x{shape.k}")
        for flag in ("self", "square", "bcast-a", "bcast-b", "tap", "fork", "again", "res-a"):
            if self.has(flag):
                fail("flags", f"{flag} is nothing that linears have", f"drop {flag}")
        for step in self.chain:
            if step.kind is StepKind.MOVE or (step.kind is StepKind.BINARY and step.extent):
                fail("epilogue", f"{step} is nothing that linears have", f"drop {step}")
        if self.has("in-3d") and (shape.m % 2 or self.has("dyn-m") or self.layout.a_transposed):
            fail("flags", "in-3d halves the rows of A", "give an even M and layout nt, and drop dyn-m")
        if self.has("flat") and not self.has("in-3d"):
            fail("flags", "flat undoes in-3d", "add in-3d")
        for what, there in (("bias", self.step("bias") is not None), ("steps", bool(self.passes))):
            flags = [flag for flag in (f"{what}-first", f"{what}-last") if self.has(flag)]
            if flags and (not there or len(flags) > 1):
                fail("flags", f"{' and '.join(flags)}: which {what}?", "keep one, and give them in the epilogue")
        if self.has("steps-first") or self.has("steps-last"):
            for step in self.passes:
                if step.kind in (StepKind.JOIN, StepKind.CAST):
                    fail("flags", f"{step} is no step of one product alone", "drop the flag")

    def _check_fork(self, fail: Callable[[str, str, str], None]) -> None:
        if self.has("tap"):
            fail("flags", "tap and fork: each names another two results", "keep one")
        last = self.chain[-2:]
        if len(last) < 2 or last[0].kind not in (StepKind.UNARY, StepKind.BINARY):
            fail("flags", "fork needs two steps at the end, the first of which computes", "for example relu+sigmoid")
        if all(step.kind is StepKind.BINARY for step in last):
            fail("flags", f"{last[0]} and {last[1]} have a residual each", "let one of the two steps have none")

    def _check_again(self, fail: Callable[[str, str, str], None]) -> None:
        for flag in ("tap", "fork", "self", "res-a"):
            if self.has(flag):
                fail("flags", f"{flag} and again: the program has two results already", f"drop {flag}")
        if self.op.name not in {"mm", "linear", "bmm"} or self.dtypes.a != self.dtypes.out:
            fail("flags", f"again multiplies the result by B, which {self.op.name} cannot", "use mm, linear or bmm")
        if self.shape.n != self.shape.k:
            fail("flags", "again needs N = K", f"write {dataclasses.replace(self.shape, k=self.shape.n)}")
        if self.moves or self.result_dtype != self.dtypes.a:
            fail("flags", "again needs a first result that could be A", "drop the steps that move or cast")

    def _check_precision(self, fail: Callable[[str, str, str], None]) -> None:
        for flag, names in (("tf32", frozenset({"f32"})), ("reduced", _HALVES)):
            if self.has(flag) and (self.op.name not in _PRECISION_OPS or self.input_dtype.name not in names):
                takers = " ".join(sorted(_PRECISION_OPS))
                fail(
                    "flags",
                    f"{flag} speaks of products in {' or '.join(sorted(names))}",
                    f"these ops have it: {takers}",
                )

    def _check_residual(self, fail: Callable[[str, str, str], None]) -> None:
        """``res-a``: A must have the result's shape, and the dtype of the value that it meets."""
        if self.shape.n != self.shape.k:
            wanted = dataclasses.replace(self.shape, k=self.shape.n)
            fail("flags", "res-a needs N = K: A has the result's shape then", f"write {wanted}")
        dtype = self.dtypes.out
        for step in self.passes:
            if step.kind is StepKind.CAST:
                dtype = step.dtype
            if step.kind is StepKind.BINARY:
                break
        else:
            fail("flags", "res-a needs a residual", "add add, sub or mul to the epilogue")
            return
        if step.name == "div":
            fail("flags", "res-a would divide by A, which holds zeros", "use add, sub or mul first")
        if step.extent or self.residuals[0][1]:
            fail("flags", f"res-a has A's own shape, which {step} does not meet", "use add, sub or mul before any move")
        if dtype != self.dtypes.a:
            fail("flags", f"res-a needs a value of A's dtype, not {dtype.name}", "move or drop the cast, or drop res-a")


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


class _Parser:
    """Cuts a line at ``:`` and remembers where every piece began, for the error's pointer."""

    def __init__(self, line: str) -> None:
        self.line = line.strip()
        pieces = self.line.split(":")
        if len(pieces) > len(_FIELDS):
            column = sum(len(p) + 1 for p in pieces[: len(_FIELDS)])
            raise ProblemError(self.line, "flags", column, "too many fields", f"the fields are {':'.join(_FIELDS)}")
        starts = [sum(len(p) + 1 for p in pieces[:i]) for i in range(len(pieces))]
        self.fields = dict(zip(_FIELDS, zip(pieces, starts, strict=True), strict=False))

    def fail(self, field: str, offset: int, problem: str, allowed: str) -> ProblemError:
        """An error at ``offset`` characters into ``field``."""
        start = self.fields[field][1] if field in self.fields else len(self.line)
        return ProblemError(self.line, field, start + offset, problem, allowed)

    def text(self, field: str) -> str:
        """A mandatory field."""
        if field not in self.fields or not self.fields[field][0]:
            raise self.fail(field, 0, "is missing", f"a line is {':'.join(_FIELDS[:4])}[:epilogue[:flags]]")
        return self.fields[field][0]

    def problem(self) -> Problem:
        """The whole line."""
        op_name = self.text("op")
        if op_name not in OPS:
            raise self.fail("op", 0, f"unknown op {op_name!r}{did_you_mean(op_name, OPS)}", f"known: {' '.join(OPS)}")
        dtypes, layout, shape = self.dtypes(), self.layout(), self.shape()
        steps = tuple(self.step(token, offset) for token, offset in self.tokens("epilogue"))
        flags = tuple(self.flag(token, offset) for token, offset in self.tokens("flags"))
        try:
            return Problem(OPS[op_name], dtypes, layout, shape, steps, flags)
        except ProblemError as error:
            # The same complaint, pointing into the text that the user typed.
            head, _, _ = str(error).partition("\n")
            problem, _, allowed = head.removeprefix(f"{error.field}: ").rpartition("; ")
            raise self.fail(error.field, 0, problem, allowed) from None

    def dtypes(self) -> DTypes:
        text = self.text("dtypes")
        names = text.split("-")
        offset = 0
        for name in names:
            if name not in DTYPES:
                hint = did_you_mean(name, DTYPES)
                raise self.fail("dtypes", offset, f"unknown dtype {name!r}{hint}", f"known: {' '.join(DTYPES)}")
            offset += len(name) + 1
        if len(names) not in (1, 3):
            raise self.fail("dtypes", 0, f"{len(names)} names", "give one for all, or a-b-out")
        a, b, out = (DTYPES[n] for n in (names if len(names) == 3 else names * 3))
        return DTypes(a, b, out)

    def layout(self) -> Layout:
        text = self.text("layout")
        try:
            return Layout(text)
        except ValueError:
            raise self.fail("layout", 0, f"unknown layout {text!r}", "one of nn nt tn tt") from None

    def shape(self) -> Shape:
        text = self.text("shape")
        offset = 0
        sizes = []
        for part in text.split("x"):
            if not (part.isascii() and part.isdigit()):
                raise self.fail("shape", offset, f"{part!r} is not a size", "write MxNxK or BxMxNxK, each 0 or more")
            sizes.append(int(part))
            offset += len(part) + 1
        if len(sizes) == 3:
            m, n, k = sizes
            return Shape(m, n, k)
        if len(sizes) == 4:
            batch, m, n, k = sizes
            return Shape(m, n, k, batch)
        raise self.fail("shape", 0, f"{len(sizes)} sizes", "write MxNxK, or BxMxNxK with a batch")

    def tokens(self, field: str) -> list[tuple[str, int]]:
        """The ``+`` separated tokens of an optional field with their offsets."""
        text = self.fields.get(field, ("", 0))[0]
        if not text:
            return []
        # A plus sign that follows a digit and an "e" belongs to a number (1e+3); the grammar has none.
        tokens, offset = [], 0
        for token in text.split("+"):
            if not token:
                raise self.fail(field, offset, "an empty token", f"{field} tokens are joined by one '+'")
            tokens.append((token, offset))
            offset += len(token) + 1
        return tokens

    def step(self, token: str, offset: int) -> Step:
        match = _STEP_TOKEN.match(token)
        name, text = (match[1], match[2] or "") if match else (token, "")
        if name not in STEPS:
            known = " ".join(STEPS)
            raise self.fail("epilogue", offset, f"unknown step {name!r}{did_you_mean(name, STEPS)}", f"known: {known}")
        spec = STEPS[name]
        at = offset + len(name) + 1
        if not spec.parameter and text:
            raise self.fail("epilogue", at, f"{name} takes no parameter", f"write {name}")
        if spec.parameter == "shape" and text and text not in spec.choices:
            kind = "bias" if spec.kind is StepKind.BIAS else "residual"
            raise self.fail("epilogue", at, f"unknown {kind} shape {text!r}", f"one of {' '.join(spec.choices)}")
        if spec.parameter == "choice" and text not in spec.choices:
            raise self.fail("epilogue", at, f"unknown {text!r}", f"write {name}- and one of {' '.join(spec.choices)}")
        if spec.parameter == "places" and not re.fullmatch(_PLACES[name], text):
            raise self.fail("epilogue", at, f"{text!r} does not fit {name}", spec.help)
        if spec.parameter == "dtype" and text not in DTYPES:
            raise self.fail("epilogue", at, f"{text!r} is no dtype", f"write {name}-DTYPE, one of {' '.join(DTYPES)}")
        if spec.parameter == "numbers" and text:
            self.check_numbers(name, text, at, spec)
        canonical = "" if spec.parameter == "shape" and text == spec.choices[0] else text
        return Step(name, canonical)

    def check_numbers(self, name: str, text: str, at: int, spec: StepSpec) -> None:
        parts = text.split("_")
        good = len(parts) == len(spec.defaults) and all(re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", p) for p in parts)
        if not good:
            raise self.fail("epilogue", at, f"{text!r} does not fit {name}", spec.help)

    def flag(self, token: str, offset: int) -> str:
        if token not in ALL_FLAGS:
            hint = did_you_mean(token, ALL_FLAGS)
            raise self.fail("flags", offset, f"unknown flag {token!r}{hint}", f"known: {' '.join(ALL_FLAGS)}")
        return token
