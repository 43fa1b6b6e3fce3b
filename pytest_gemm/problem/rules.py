"""Flags: what each of them says, what it applies to, and which exclude each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.layout import Layout, Shape
from pytest_gemm.problem.ops import OPS
from pytest_gemm.problem.ops.woq_int8 import THIRDS
from pytest_gemm.problem.steps import StepKind
from pytest_gemm.text import did_you_mean

if TYPE_CHECKING:
    from pytest_gemm.problem.problem import Problem

# What can be wrong with a flag: whether it is, the complaint, and what would be right.
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


def _but(shape: Shape, **sizes: int) -> Shape:
    return dataclasses.replace(shape, **sizes)


@dataclasses.dataclass(frozen=True)
class Flag:
    """A fact about operands, result or arithmetic that the other fields do not hold.

    Attributes:
        help: what it says.
        every: whether it fits every op; other flags fit the ops that name them.
        excludes: flags that contradict it, or mean nothing beside it.
        rules: further rules, given the problem and the flag.
    """

    help: str
    every: bool = False
    excludes: tuple[str, ...] = ()
    rules: Callable[[Problem, str], _Rules] | None = None

    def takers(self, name: str) -> tuple[str, ...]:
        """The ops that take it under its ``name``."""
        return tuple(op.name for op in OPS.values() if self.every or name in op.flags)


FLAGS: Final[Mapping[str, Flag]] = {
    "dyn-m": Flag("one artifact compiled for any M", every=True),
    "pad-lda": Flag("A's rows are wider than K: the gap must not be read", every=True),
    "pad-ldb": Flag("B's rows are wider than they need to be", every=True),
    "off-a": Flag("A starts one element into its storage: an unaligned base", every=True),
    "off-b": Flag("B starts one element into its storage", every=True),
    "bcast-a": Flag("A is one matrix expanded over the batch (stride 0)", rules=_rules_of_bcast),
    "bcast-b": Flag("B is one matrix expanded over the batch (stride 0)", rules=_rules_of_bcast),
    "self": Flag(
        "B is A transposed: A @ A.T on one storage",
        excludes=("pad-ldb", "off-b", "bcast-b", "const-b", "dyn-m", "square", "mid-b"),
        rules=_rules_of_self,
    ),
    "const-b": Flag("B is a constant that the compiler may pack", every=True, excludes=("var-b",)),
    "var-b": Flag("B is an argument, not a constant"),
    "tf32": Flag("f32 may be multiplied as TF32; without the flag it may not", rules=_rules_of_precision),
    "reduced": Flag(
        "partial sums may be stored in the product's half type; without the flag they may not",
        rules=_rules_of_precision,
    ),
    "res-a": Flag("the first residual is A itself: an operand that is read twice", rules=_rules_of_res_a),
    "tap": Flag("the value before the last step is returned too: a program of two results", rules=_rules_of_tap),
    "reduce-range": Flag(
        "A holds 7 of the 8 bits of u8: what PyTorch quantises to for processors that add pairs in 16 bits",
        rules=_rules_of_reduce_range,
    ),
    "fork": Flag(
        "the last two steps read one value, and each makes a result: a program of two results",
        excludes=("tap",),
        rules=_rules_of_fork,
    ),
    "again": Flag(
        "the result is multiplied by B once more: a program of two products and two results",
        excludes=("tap", "fork", "self", "res-a"),
        rules=_rules_of_again,
    ),
    "fast-acc": Flag(
        "fp8 products may be added with the few bits that a tensor core keeps; without the flag they may not"
    ),
    "mid-a": Flag("A's batch lies in the middle of its memory: a permuted view", excludes=("bcast-a",)),
    "mid-b": Flag("B's batch lies in the middle of its memory", excludes=("bcast-b",)),
    "square": Flag(
        "B is A itself: A @ A on one storage",
        excludes=("pad-ldb", "off-b", "bcast-b", "const-b", "dyn-m", "mid-b"),
        rules=_rules_of_square,
    ),
    "unfrozen": Flag(
        "B is a parameter that freezing has not made a constant: one in a package of AOTInductor's only",
        every=True,
        excludes=("var-b", "self", "square"),
        rules=_rules_of_unfrozen,
    ),
    "concat": Flag(
        "B's columns are those of three weights, each of which the program multiplies by on its own",
        excludes=("var-b", "unfrozen"),
        rules=_rules_of_concat,
    ),
    "in-3d": Flag(
        "the input of linears is 3-D: its rows are those of two matrices", excludes=("dyn-m",), rules=_rules_of_in_3d
    ),
    "flat": Flag("with in-3d: the program makes its results 2-D again", rules=_rules_of_flat),
    "in-4d": Flag(
        "the input of a linear is 4-D: its batch is that of two dimensions, the first of size 2",
        excludes=("dyn-m", "tap", "fork", "again", "res-a"),
        rules=_rules_of_in_4d,
    ),
    "bias-first": Flag("of linears only the first has the bias", rules=_rules_of_one),
    "bias-last": Flag("of linears only the last has the bias", excludes=("bias-first",), rules=_rules_of_one),
    "steps-first": Flag(
        "the steps are those of the first of linears only; the others are returned as they are", rules=_rules_of_one
    ),
    "steps-last": Flag(
        "the steps are those of the last of linears only", excludes=("steps-first",), rules=_rules_of_one
    ),
}


def check_flags(p: Problem) -> None:
    """Check a problem's flags against the table.

    Raises:
        ProblemError: for the first flag that is unknown, given twice, not for the op or contradicts another field.
    """
    for index, name in enumerate(p.flags):
        flag = FLAGS.get(name)
        if flag is None:
            problem = f"unknown flag {name!r}{did_you_mean(name, FLAGS)}" if name else "an empty token"
            allowed = f"known: {' '.join(FLAGS)}" if name else "flags tokens are joined by one '+'"
            raise ProblemError(p.text(), "flags", problem, allowed, index)
        if name in p.flags[:index]:
            raise ProblemError(p.text(), "flags", f"duplicate flag: {name}", "give it once", index)
        if not flag.every and name not in p.op.flags:
            allowed = f"drop {name}, or use {' '.join(flag.takers(name))}"
            raise ProblemError(p.text(), "flags", f"{p.op.name} does not take {name}", allowed, index)
        for other in flag.excludes:
            if p.has(other):
                problem = f"{name} and {other} contradict each other"
                raise ProblemError(p.text(), "flags", problem, f"drop {other}", p.flags.index(other))
    for index, name in enumerate(p.flags):
        rules = FLAGS[name].rules
        for is_broken, problem, allowed in rules(p, name) if rules else ():
            if is_broken:
                raise ProblemError(p.text(), "flags", problem, allowed, index)


def by(shape: tuple[int, ...]) -> str:
    """Extents joined by ``x``."""
    return "x".join(map(str, shape))
