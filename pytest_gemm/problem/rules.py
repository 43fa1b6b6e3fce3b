"""What a flag applies to, and which flags exclude each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from pytest_gemm.problem.layout import Layout, Shape
from pytest_gemm.problem.ops import OF_ONE, OPS, THIRDS
from pytest_gemm.problem.steps import StepKind

if TYPE_CHECKING:
    from pytest_gemm.problem.problem import Problem


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


# -- flags -----------------------------------------------------------------------------------------


def _ops_but(*names: str) -> tuple[str, ...]:
    return tuple(name for name in OPS if name not in names)


# The ops that take a flag; a flag that is not here goes with any.  A weight that was packed before the program is made
# can be no argument of it, and A of grouped_mm is one matrix where its B are several.
TAKERS: Final[Mapping[str, tuple[str, ...]]] = {
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
    **dict.fromkeys(("in-3d", "flat", *OF_ONE), ("linears",)),
    "in-4d": ("linear",),
}
# Flags beside which others mean nothing: those to drop.
CONTRADICTIONS: Final[Mapping[str, tuple[str, ...]]] = {
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


RULES: Final[Mapping[str, Callable[[Problem, str], _Rules]]] = {
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
    **dict.fromkeys(OF_ONE, _rules_of_one),
}


def _but(shape: Shape, **sizes: int) -> Shape:
    return dataclasses.replace(shape, **sizes)


def by(shape: tuple[int, ...]) -> str:
    """Extents joined by ``x``."""
    return "x".join(map(str, shape))
