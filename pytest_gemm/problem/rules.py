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
    yield shape.m != shape.n, "b.alias_t needs M = N", f"write {shape.m}x{shape.m}x{shape.k}"
    yield p.dtypes.a != p.dtypes.b, "b.alias_t needs one dtype for A and B", "drop b.alias_t"
    yield p.layout not in (Layout.NT, Layout.TN), "b.alias_t: B is A transposed", "b.alias_t goes with nt or tn"
    deep = p.op.batch == "optional" and shape.batch is not None
    yield deep, f"{name} has one B for the whole batch, and b.alias_t one for each A", "drop b.alias_t"


def _rules_of_square(p: Problem, _: str) -> _Rules:
    m = p.shape.m
    yield not m == p.shape.n == p.shape.k, "b.alias needs M = N = K", f"write {_but(p.shape, n=m, k=m)}"
    yield p.layout not in (Layout.NN, Layout.TT), "b.alias: B is A", "b.alias goes with nn or tt"


def _rules_of_bcast(p: Problem, flag: str) -> _Rules:
    batch = p.shape.batch or 0
    yield batch < 2, f"{flag}: one matrix for a batch of {batch}", f"give a batch of 2 or more, or drop {flag}"


def _rules_of_precision(p: Problem, flag: str) -> _Rules:
    names = ("f32",) if flag == "math.tf32" else ("bf16", "f16")
    given = p.input_dtype.name
    yield given not in names, f"{flag} is for products in {' or '.join(names)}, not {given}", f"drop {flag}"


def _rules_of_reduce_range(p: Problem, flag: str) -> _Rules:
    yield p.dtypes.a.name != "u8", f"{flag} is for activations in u8", "write qlinear:u8-..."


def _rules_of_concat(p: Problem, _: str) -> _Rules:
    n = p.shape.n
    yield n % THIRDS != 0, f"program.concat: N={n} is not the columns of {THIRDS} equal weights", "a multiple of 3"


def _rules_of_unfrozen(p: Problem, _: str) -> _Rules:
    yield not p.constant_b, "b.parameter is about a weight", "add b.constant"


def _rules_of_tap(p: Problem, _: str) -> _Rules:
    yield (
        not p.chain,
        "program.multi_output needs a step: it returns the value before the last one",
        "add one, for example relu",
    )


def _rules_of_fork(p: Problem, _: str) -> _Rules:
    last = p.chain[-2:]
    computes = len(last) == 2 and last[0].kind in (StepKind.UNARY, StepKind.BINARY)
    yield (
        not computes,
        "program.branching needs two steps at the end, the first of which computes",
        "for example relu+sigmoid",
    )
    both = all(step.kind is StepKind.BINARY for step in last)
    yield (
        both,
        f"program.branching: {' and '.join(map(str, last))} have a residual each",
        "let one of the two steps have none",
    )


def _rules_of_again(p: Problem, _: str) -> _Rules:
    yield p.shape.n != p.shape.k, "program.chained needs N = K", f"write {_but(p.shape, k=p.shape.n)}"
    other = bool(p.view_steps) or not p.dtypes.a == p.dtypes.out == p.result_dtype
    yield (
        other,
        "program.chained needs a first result that could be A",
        "drop the steps that move or cast, and autocast",
    )


def _rules_of_res_a(p: Problem, _: str) -> _Rules:
    """A must have the result's shape, and the dtype of the value that it meets."""
    needs = "r0.alias needs N = K: A has the result's shape then"
    yield p.shape.n != p.shape.k, needs, f"write {_but(p.shape, k=p.shape.n)}"
    dtype = p.dtypes.out
    for step in p.passes:
        if step.kind is StepKind.CAST:
            dtype = step.dtype
        if step.kind is StepKind.BINARY:
            break
    else:
        yield True, "r0.alias needs a residual", "add add, sub or mul to the epilogue"
        return
    yield step.name == "div", "r0.alias would divide by A, which holds zeros", "use add, sub or mul first"
    moved = bool(step.extent or p.residuals[0][1])
    yield moved, f"r0.alias has A's own shape, which {step} does not meet", "use add, sub or mul before any move"
    other = f"r0.alias needs a value of A's dtype, not {dtype.name}"
    yield dtype != p.dtypes.a, other, "move or drop the cast, or drop r0.alias"


def _rules_of_in_3d(p: Problem, _: str) -> _Rules:
    uneven = p.shape.m % 2 != 0 or p.layout.a_transposed
    yield uneven, "a.3d halves the rows of A", "give an even M and layout nt"


def _rules_of_flat(p: Problem, _: str) -> _Rules:
    yield not p.has("a.3d"), "out.2d undoes a.3d", "add a.3d"


def _rules_of_in_4d(p: Problem, _: str) -> _Rules:
    batch = p.shape.batch
    yield not batch or batch % 2 != 0, f"a.4d needs an even batch, not {batch}", "write BxMxNxK with an even B"


def _rules_of_one(p: Problem, flag: str) -> _Rules:
    what = flag.partition(".")[0]
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
        stream: its name in the keys of random streams; renaming it would change the operands of every problem.
        help: what it says.
        every: whether it fits every op; other flags fit the ops that name them.
        excludes: flags that contradict it, or mean nothing beside it.
        rules: further rules, given the problem and the flag.
    """

    stream: str
    help: str
    every: bool = False
    excludes: tuple[str, ...] = ()
    rules: Callable[[Problem, str], _Rules] | None = None

    def takers(self, name: str) -> tuple[str, ...]:
        """The ops that take it under its ``name``."""
        return tuple(op.name for op in OPS.values() if self.every or name in op.flags)


FLAGS: Final[Mapping[str, Flag]] = {
    "m.dynamic": Flag("dyn-m", "one artifact compiled for any M", every=True),
    "a.padded": Flag("pad-lda", "A's rows are wider than K: the gap must not be read", every=True),
    "b.padded": Flag("pad-ldb", "B's rows are wider than they need to be", every=True),
    "a.offset": Flag("off-a", "A starts one element into its storage: an unaligned base", every=True),
    "b.offset": Flag("off-b", "B starts one element into its storage", every=True),
    "a.broadcast": Flag("bcast-a", "A is one matrix expanded over the batch (stride 0)", rules=_rules_of_bcast),
    "b.broadcast": Flag("bcast-b", "B is one matrix expanded over the batch (stride 0)", rules=_rules_of_bcast),
    "b.alias_t": Flag(
        "self",
        "B is A transposed: A @ A.T on one storage",
        excludes=("b.padded", "b.offset", "b.broadcast", "b.constant", "m.dynamic", "b.alias", "b.batch_middle"),
        rules=_rules_of_self,
    ),
    "b.constant": Flag("const-b", "B is a constant that the compiler may pack", every=True, excludes=("b.argument",)),
    "b.argument": Flag("var-b", "B is an argument, not a constant"),
    "math.tf32": Flag("tf32", "f32 may be multiplied as TF32; without the flag it may not", rules=_rules_of_precision),
    "math.half_partials": Flag(
        "reduced",
        "partial sums may be stored in the product's half type; without the flag they may not",
        rules=_rules_of_precision,
    ),
    "r0.alias": Flag("res-a", "the first residual is A itself: an operand that is read twice", rules=_rules_of_res_a),
    "program.multi_output": Flag(
        "tap", "the value before the last step is returned too: a program of two results", rules=_rules_of_tap
    ),
    "a.7bit": Flag(
        "reduce-range",
        "A holds 7 of the 8 bits of u8: what PyTorch quantises to for processors that add pairs in 16 bits",
        rules=_rules_of_reduce_range,
    ),
    "program.branching": Flag(
        "fork",
        "the last two steps read one value, and each makes a result: a program of two results",
        excludes=("program.multi_output",),
        rules=_rules_of_fork,
    ),
    "program.chained": Flag(
        "again",
        "the result is multiplied by B once more: a program of two products and two results",
        excludes=("program.multi_output", "program.branching", "b.alias_t", "r0.alias"),
        rules=_rules_of_again,
    ),
    "math.fast_accumulate": Flag(
        "fast-acc",
        "fp8 products may be added with the few bits that a tensor core keeps; without the flag they may not",
    ),
    "a.batch_middle": Flag(
        "mid-a", "A's batch lies in the middle of its memory: a permuted view", excludes=("a.broadcast",)
    ),
    "b.batch_middle": Flag("mid-b", "B's batch lies in the middle of its memory", excludes=("b.broadcast",)),
    "b.alias": Flag(
        "square",
        "B is A itself: A @ A on one storage",
        excludes=("b.padded", "b.offset", "b.broadcast", "b.constant", "m.dynamic", "b.batch_middle"),
        rules=_rules_of_square,
    ),
    "b.parameter": Flag(
        "unfrozen",
        "B is a parameter that freezing has not made a constant: one in a package of AOTInductor's only",
        every=True,
        excludes=("b.argument", "b.alias_t", "b.alias"),
        rules=_rules_of_unfrozen,
    ),
    "program.concat": Flag(
        "concat",
        "B's columns are those of three weights, each of which the program multiplies by on its own",
        excludes=("b.argument", "b.parameter"),
        rules=_rules_of_concat,
    ),
    "a.3d": Flag(
        "in-3d",
        "the input of linears is 3-D: its rows are those of two matrices",
        excludes=("m.dynamic",),
        rules=_rules_of_in_3d,
    ),
    "out.2d": Flag("flat", "with in-3d: the program makes its results 2-D again", rules=_rules_of_flat),
    "a.4d": Flag(
        "in-4d",
        "the input of a linear is 4-D: its batch is that of two dimensions, the first of size 2",
        excludes=("m.dynamic", "program.multi_output", "program.branching", "program.chained", "r0.alias"),
        rules=_rules_of_in_4d,
    ),
    "bias.first": Flag("bias-first", "of linears only the first has the bias", rules=_rules_of_one),
    "bias.last": Flag(
        "bias-last", "of linears only the last has the bias", excludes=("bias.first",), rules=_rules_of_one
    ),
    "steps.first": Flag(
        "steps-first",
        "the steps are those of the first of linears only; the others are returned as they are",
        rules=_rules_of_one,
    ),
    "steps.last": Flag(
        "steps-last", "the steps are those of the last of linears only", excludes=("steps.first",), rules=_rules_of_one
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
            word = name and not name.endswith(".")
            problem = f"unknown flag {name!r}{did_you_mean(name, FLAGS)}" if word else "an empty token"
            allowed = f"known: {' '.join(FLAGS)}" if word else "words are joined by one '+'"
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
