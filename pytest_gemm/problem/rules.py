"""What contradicts itself in a problem: rules about its fields, and the table of flags, ``flags.toml``.

A rule is a row: whether it is broken, the complaint, and what would be right.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from pytest_gemm.core.text import did_you_mean
from pytest_gemm.problem.dtypes import DType
from pytest_gemm.problem.errors import GRAMMAR, ProblemError
from pytest_gemm.problem.facts import Facts, by
from pytest_gemm.problem.ops import OPS, Op
from pytest_gemm.problem.ops.grouped_mm import ALIGNMENT
from pytest_gemm.problem.steps import STEPS, Step, StepKind
from pytest_gemm.storage.datafile import TableFile
from pytest_gemm.storage.errors import FileError

# What a size is indexed by, 32 bits in BLAS and in kernels, and what the elements of a matrix are counted in.
_LARGEST: Final = 2**31 - 1
_MOST_ELEMENTS: Final = 2**40
# Where the parameters of the product stand in a canonical epilogue; everything else follows in the order given.
_RANKS: Final = {"bias": 0, "alpha": 1, "beta": 2, "gated": 3}
_PASS: Final = 4
_COMPUTING: Final = (StepKind.UNARY, StepKind.BINARY, StepKind.REDUCE)
_ONCE: Final = (StepKind.FACTOR, StepKind.QUANT, StepKind.BIAS, StepKind.JOIN)

_OF_GROUPS: Final = {"m": "rows", "n": "columns", "k": "products"}

_Rules = Iterator[tuple[bool, str, str]]


def _refuse(field: str, index: int, rules: _Rules) -> None:
    """Raise for the first rule that the token breaks."""
    for is_broken, problem, allowed in rules:
        if is_broken:
            raise ProblemError(field, problem, allowed, index)


def rank_of(step: Step) -> int:
    """Where a step stands in a canonical epilogue: parameters of the product first."""
    return _RANKS.get(step.name, _PASS)


def check(p: Facts) -> None:
    """Check a problem.

    Raises:
        ProblemError: for the first contradiction, and for the first token that would have no effect; without a line.
    """
    op = p.op
    if str(p.dtypes) not in op.dtypes:
        raise ProblemError("dtypes", f"{op.name} does not take {p.dtypes}", f"it takes {' '.join(op.dtypes)}")
    if p.layout not in op.layouts:
        raise ProblemError("layout", f"{op.name} cannot be {p.layout}", f"allowed: {' '.join(map(str, op.layouts))}")
    _check_shape(p)
    for field in ("epilogue", "quant"):
        _check_steps(p, field)
    if op.addend and p.step("bias") is None:
        raise ProblemError("epilogue", f"{op.name} needs its addend", "add bias, bias-1n, bias-m1 or bias-mn")
    for field, index, problem, allowed in op.check(p):
        raise ProblemError(field, problem, allowed, index)
    _check_chain(p)
    _check_flags(p)


def _check_shape(p: Facts) -> None:
    op, shape = p.op, p.shape
    m, n, k, batch = shape.m, shape.n, shape.k, shape.batch
    if op.batch == "never" and batch is not None:
        raise ProblemError("shape", f"{op.name} has no batch", "give MxNxK")
    if op.batch == "always" and batch is None:
        raise ProblemError("shape", f"{op.name} needs a batch", "give BxMxNxK")
    for index, size in enumerate((m, n, k) if batch is None else (batch, m, n, k)):
        if type(size) is not int or size < 0:
            raise ProblemError("shape", f"{size!r} is not a size", "an integer, 0 or more", index)
        if size > _LARGEST:
            raise ProblemError("shape", f"{size} is too large", f"a size is at most {_LARGEST} (2^31 - 1)", index)
    count = 1 if batch is None else batch
    elements = max(count * m * max(n, k), (count if op.batch == "always" else 1) * n * k)
    if elements > _MOST_ELEMENTS:
        problem = f"a matrix of {shape} has {elements} elements"
        raise ProblemError("shape", problem, f"at most {_MOST_ELEMENTS} (2^40) are indexed")
    if op.grouped and p.ends > _LARGEST:
        problem = f"{p.ends} {_OF_GROUPS[op.ragged]} of all groups"
        raise ProblemError("shape", problem, f"the ends of groups are int32: at most {_LARGEST}")


# -- steps and quantisation parameters ---------------------------------------------------------------


def takes(op: Op, name: str) -> bool:
    """Whether problems of an op can have a step of this name."""
    spec = STEPS[name]
    if spec.needs:
        return bool(getattr(op, spec.needs))
    return spec.kind is not StepKind.QUANT or name in op.scales


def _check_steps(p: Facts, field: str) -> None:
    """Check each token of a field on its own, and which stand together."""
    op, steps = p.op, p.quant if field == "quant" else p.epilogue
    earlier: list[str] = []
    first_pass = ""
    for index, step in enumerate(steps):
        _refuse(field, index, _rules_of_step(p, step, field, earlier, first_pass))
        earlier.append(step.name)
        first_pass = first_pass or (str(step) if rank_of(step) == _PASS else "")
    scales = [index for index, step in enumerate(steps) if step.name in op.scales]
    if field == "quant" and op.scales and len(scales) != 1:
        given = " and ".join(str(steps[index]) for index in scales)
        problem = f"{given} at once" if scales else f"{op.name} needs its scales"
        raise ProblemError(field, problem, f"write one of {' '.join(op.scales)}", max(scales, default=0))


def _rules_of_step(p: Facts, step: Step, field: str, earlier: list[str], first_pass: str) -> _Rules:
    op, name, is_quant = p.op, step.name, step.kind is StepKind.QUANT
    what = "a quantisation parameter" if is_quant else "a step of the epilogue"
    yield (
        is_quant != (field == "quant"),
        f"{step} is {what}",
        f"write {':quant.' if is_quant else ':'}{step} behind the shape",
    )
    yield step.kind in _ONCE and name in earlier, f"duplicate step: {step}", f"give {name} once"
    if not takes(op, name):
        takers = " ".join(other.name for other in OPS.values() if takes(other, name))
        yield True, f"{op.name} takes no {name}", f"these do: {takers}"
    joins = step.kind is StepKind.JOIN and p.shape.batch != 2
    yield joins, f"{step} joins two products", "linears of shape 2xMxNxK has them"
    is_wide = name == "bias" and step.text != "" and not op.addend
    yield is_wide, f"{op.name} takes a bias of shape (N,) only", "write bias"
    is_late = not is_quant and rank_of(step) < _PASS and first_pass != ""
    yield is_late, f"{step} comes after another step, {first_pass}", "bias, its factors and gated go first"


def _check_chain(p: Facts) -> None:
    """Each step must suit the value that it meets, and make another one of it.

    A move must fit the shape, and no residual may need a copy to lie in the product's places.
    """
    chain, value = p.chain, p.value_dtype
    shape, deep = (p.deep_shape, chain[0]) if p.is_deep else (p.result_shape, None)
    move: Step | None = None
    is_copied = True  # in the order of its dimensions
    for index, step in enumerate(p.epilogue):
        if step not in chain:
            continue
        if step.kind is not StepKind.VIEW:
            _refuse("epilogue", index, _rules_of_pass(step, value, move))
            _refuse("epilogue", index, _rules_of_reduction(p, step, value))
            value = step.makes(value)
            continue
        _refuse("epilogue", index, _rules_of_move(p, step, shape, move or deep, is_copied))
        is_copied = step.name == "dense" or (is_copied and step.name == "view")
        move, shape = step, step.moved(shape)


def _rules_of_pass(step: Step, value: DType, move: Step | None) -> _Rules:
    """A step on a value of a dtype that a step has moved."""
    if step.kind is StepKind.CAST:
        yield step.dtype == value, f"{step}: the value is {value.name} already", f"drop {step}"
    computes = step.kind in _COMPUTING and (not value.is_float or value.bits == 8)
    yield computes, f"{step} on a value of {value.name}", "cast first, for example cast-f32+relu"
    misfit = step.kind is StepKind.BINARY and step.extent != "" and move is not None
    yield misfit, f"{step} after {move}: rows and columns have moved then", f"put {step} first"
    plain = f"{step.name}-{step.extent}" if step.extent else step.name
    yield step.operand == value, f"{step}: the value is {value.name} already", f"write {plain}"


def _rules_of_reduction(p: Facts, step: Step, value: DType) -> _Rules:
    """A sum ends an epilogue, and is one of rows and columns of the product or of A."""
    if step.kind is StepKind.REDUCE:
        others = p.chain[p.chain.index(step) + 1 :]
        yield bool(others), f"{step} leaves one line of the result for {'+'.join(map(str, others))}", f"put {step} last"
        moves = "+".join(map(str, p.view_steps))
        yield bool(moves), f"{step} sums rows or columns, which {moves} moves", f"drop {moves}"
        yield value.name == "f64", f"{step} sums in f32, and the value is f64", "write cast-f32 before it"
        is_coded = bool(p.op.scales) or p.op.converts or p.dtypes.a.name == "f64"
        yield step.text == "k" and is_coded, f"{step} sums A as the product multiplies it", "A in f32, bf16 or f16"


def _rules_of_move(p: Facts, step: Step, shape: tuple[int, ...], before: Step | None, is_copied: bool) -> _Rules:
    """A move fits the shape that it meets; one that leaves everything where it is can mislead a compiler, too."""
    if step.name == "view":
        yield before is not None, f"{step} after {before} would copy", "one view, before the other moves"
        for size in p.dynamic:
            word = f"{size}.dynamic"
            yield True, f"{step} has fixed sizes, and {word} any {size.upper()}", f"t and perm go with {word}"
        misfit = math.prod(step.sizes) != math.prod(shape) or max(step.sizes) > _LARGEST
        yield misfit, f"{step} has not {math.prod(shape)} elements", f"the result is {by(shape)}"
    else:
        places = tuple(range(len(shape)))
        misfit = tuple(sorted(step.order(len(shape)))) != places
        example = f"for example perm-{'_'.join(map(str, reversed(places)))}"
        yield misfit, f"{step} does not order the dimensions of {by(shape)}", example
    is_idle = step.name == "dense" and is_copied
    yield is_idle, "dense: nothing was moved since the value was last in order", "write t+dense, or drop dense"


# -- flags -------------------------------------------------------------------------------------------


def _alias_t(p: Facts) -> _Rules:
    yield p.dtypes.a != p.dtypes.b, "needs one dtype for A and B", "drop b.alias_t"
    is_shared = p.op.batch == "optional" and p.shape.batch is not None
    yield is_shared, f"needs a B for each A, and {p.op.name} has one for the whole batch", "drop b.alias_t"


def _broadcast(p: Facts) -> _Rules:
    batch = p.shape.batch or 0
    yield batch < 2, f"is one matrix for a batch of {batch}", "give a batch of 2 or more, or drop it"


def _batch_middle(p: Facts, rows: int) -> _Rules:
    is_idle = (p.shape.batch or 0) <= 1 and rows <= 1
    yield is_idle, "changes nothing for one row", "give a batch of 2 or more, or drop it"


def _expanded(p: Facts, side: str) -> _Rules:
    size = p.shape.m if side == "a" else p.shape.n
    yield size < 2, f"is one line for {size}", f"give {'M' if side == 'a' else 'N'} of 2 or more, or drop it"


def _tail(p: Facts, rows: str, *, is_batched: bool) -> _Rules:
    size = "batch" if is_batched else rows
    name = "a batch" if is_batched else f"an {size.upper()}" if size in "mn" else "a K"
    yield size in p.dynamic, f"takes one off {name} that is not known", f"drop {size}.dynamic"


def _cut(p: Facts, length: str) -> _Rules:
    problem = f"cuts stored rows of length {length.upper()}, which is not known"
    yield length in p.dynamic, problem, f"use another layout, or drop {length}.dynamic"


def _given_out(p: Facts) -> _Rules:
    steps = "+".join(map(str, p.chain))
    yield bool(steps), f"writes the product, and {steps} would make another tensor of it", "write out.copied"


def _copied_out(p: Facts) -> _Rules:
    moves = "+".join(map(str, (*p.view_steps, *filter(None, [p.reduction]))))
    yield bool(moves), f"has the product's own shape, which {moves} changes", f"drop {moves}"


def _form_of_out(p: Facts) -> _Rules:
    yield not p.has_out, "is about a given tensor", "add out.given or out.copied"


def _addend_out(p: Facts) -> _Rules:
    problem = f"needs an addend of the result's dtype, and {p.dtypes} converts it"
    yield p.autocast, problem, f"write {p.dtypes.a.name} or {p.dtypes.out.name}"


def _out_is_a(p: Facts) -> _Rules:
    result = p.result_dtype
    yield p.dtypes.a != result, f"needs a result of A's dtype, not {result.name}", f"write {p.dtypes.a.name}"


def _branching(p: Facts) -> _Rules:
    last = p.chain[-2:]
    computes = len(last) == 2 and last[0].kind in (StepKind.UNARY, StepKind.BINARY)
    yield not computes, "needs two steps at the end, the first of which computes", "for example relu+sigmoid"
    both = all(step.kind is StepKind.BINARY for step in last)
    problem = f"cannot end with {' and '.join(map(str, last))}, which have a residual each"
    yield both, problem, "let one of the two steps have none"


def _chained(p: Facts) -> _Rules:
    changed = bool(p.view_steps) or p.reduction is not None
    other = changed or not p.dtypes.a == p.dtypes.out == p.result_dtype
    yield other, "needs a first result that could be A", "drop the steps that move, sum or cast, and autocast"


def _residual_is_a(p: Facts) -> _Rules:
    """A must have the result's shape, and the dtype of the value that it meets."""
    if not p.residuals:
        yield True, "needs a residual", "add add, sub or mul to the epilogue"
        return
    step, moves = p.residuals[0]
    yield step.name == "div", "cannot be used with div: A contains zeros", "use add, sub or mul first"
    moved = bool(step.extent or moves)
    yield moved, f"has A's own shape, which {step} does not meet", "use add, sub or mul before any move"
    dtype = p.residual_dtype(step, p.value_dtypes[p.passes.index(step)])
    yield dtype != p.dtypes.a, f"needs a residual of A's dtype, not {dtype.name}", "move or drop the cast"


def _four_dimensions(p: Facts) -> _Rules:
    batch = p.shape.batch
    yield not batch or batch % 2 != 0, f"needs an even batch, not {batch}", "write BxMxNxK with an even B"


def _argument(p: Facts) -> _Rules:
    yield p.constant_b, "is about the sizes of an argument, and B is a constant", "add b.argument, or drop it"


def _any_batch(p: Facts) -> _Rules:
    yield p.shape.batch is None, "needs a batch", "write BxMxNxK, or drop it"
    is_constant = p.constant_b and p.op.batch == "always"
    yield is_constant, "is about the sizes of arguments, and B is a constant", "drop it, or what makes B a constant"


def _own_bias(p: Facts) -> _Rules:
    yield p.step("bias") is None, "needs a bias", "give it in the epilogue"


def _own_steps(p: Facts) -> _Rules:
    yield not p.passes, "needs steps", "give them in the epilogue"
    met = zip(p.passes, p.value_dtypes, strict=False)
    common = [str(step) for step, dtype in met if step.kind is StepKind.JOIN or step.makes(dtype) != dtype]
    yield bool(common), f"does not go with {'+'.join(common)}, which is no step of one product", "drop one of them"


def _several_groups(p: Facts) -> _Rules:
    count = p.shape.batch or 0
    yield count < 2, f"is about several groups, not {count}", "give a batch of 2 or more, or drop it"
    divided = p.op.ragged or "m"
    yield getattr(p.shape, divided) == 0, "divides nothing", f"give an {divided.upper()} of 1 or more, or drop it"


def _aligned_groups(p: Facts) -> _Rules:
    text = f"needs {_OF_GROUPS[p.op.ragged]} of all groups in multiples of {ALIGNMENT}, not {p.ends}"
    yield p.ends % ALIGNMENT != 0 or p.ends == 0, text, f"give sizes whose product is a multiple of {ALIGNMENT}"
    yield p.micro_block > 0, "is what groups with scales of small blocks are anyway", "drop groups.aligned"


def _unowned_rows(p: Facts) -> _Rules:
    unit = ALIGNMENT if p.has("groups.aligned") or p.micro_block else 1
    yield p.ends < 2 * unit, f"leaves {unit} of {p.ends} rows or more without a group", f"give {2 * unit} or more"
    moves = "+".join(map(str, p.view_steps))
    is_lost = p.is_partial and bool(moves)
    yield is_lost, f"has rows that are not judged, which {moves} moves", "add groups.zeroed, or drop the steps"


# What follows the name of the flag.
_RULES: Final[Mapping[str, Callable[[Facts], Iterable[tuple[bool, str, str]]]]] = {
    **dict.fromkeys(("a.broadcast", "b.broadcast"), _broadcast),
    "b.alias_t": _alias_t,
    "a.batch_middle": lambda p: _batch_middle(p, p.shape.k if p.layout.a_transposed else p.shape.m),
    "b.batch_middle": lambda p: _batch_middle(p, p.shape.n if p.layout.b_transposed else p.shape.k),
    "b.parameter": lambda p: [(not p.constant_b, "is about a weight", "add b.constant")],
    "r0.alias": _residual_is_a,
    "a.3d": lambda p: [(p.shape.m % 2 != 0 or p.layout.a_transposed, "halves the rows of A", "give an even M and nt")],
    "a.4d": _four_dimensions,
    "a.tail": lambda p: _tail(p, "k" if p.layout.a_transposed else "m", is_batched=p.shape.batch is not None),
    "b.tail": lambda p: _tail(p, "n" if p.layout.b_transposed else "k", is_batched=p.op.batch == "always"),
    **dict.fromkeys(("a.sliced", "a.strided"), lambda p: _cut(p, "m" if p.layout.a_transposed else "k")),
    **dict.fromkeys(("b.sliced", "b.strided"), lambda p: _cut(p, "k" if p.layout.b_transposed else "n")),
    "a.expanded": lambda p: _expanded(p, "a"),
    "b.expanded": lambda p: _expanded(p, "b"),
    "out.given": _given_out,
    "out.copied": _copied_out,
    **dict.fromkeys(("out.padded", "out.offset", "out.transposed"), _form_of_out),
    "out.addend": _addend_out,
    "out.alias": _out_is_a,
    "out.2d": lambda p: [(not p.has("a.3d"), "undoes a.3d", "add a.3d")],
    "program.multi_output": lambda p: [(not p.chain, "needs a step behind the value", "for example relu")],
    "program.branching": _branching,
    "program.unswizzled": lambda p: [(not p.micro_block, "is about scales of mx and nv", "write quant.mx or quant.nv")],
    "program.chained": _chained,
    **dict.fromkeys(("n.dynamic", "k.dynamic"), _argument),
    "batch.dynamic": _any_batch,
    **dict.fromkeys(("bias.first", "bias.last", "bias.offset"), _own_bias),
    **dict.fromkeys(("steps.first", "steps.last"), _own_steps),
    **dict.fromkeys(("groups.crowded", "groups.sparse", "groups.single", "groups.masked"), _several_groups),
    "groups.aligned": _aligned_groups,
    "groups.unowned": _unowned_rows,
}


@dataclasses.dataclass(frozen=True)
class Flag:
    """A fact about operands, result or arithmetic that the other fields do not hold; see ``flags.toml``."""

    stream: str
    help: str
    every: bool = False
    excludes: Sequence[str] = ()
    equal: str = ""
    layouts: Sequence[str] = ()
    input: Sequence[str] = ()
    needs: Sequence[str] = ()
    step: str = ""

    def rules(self, p: Facts, name: str) -> _Rules:
        """The rules of the table, then those of a function."""
        sizes = {size: getattr(p.shape, size) for size in self.equal}
        first = dataclasses.replace(p.shape, **dict.fromkeys(sizes, next(iter(sizes.values()), 0)))
        yield len({*sizes.values()}) > 1, f"{name} needs {' = '.join(self.equal.upper())}", f"write {first}"
        for given, right in ((str(p.layout), self.layouts), (p.input_dtype.name, self.input)):
            is_other = bool(right) and given not in right
            yield is_other, f"{name} is for products in {' or '.join(right)}, not {given}", f"drop {name}"
        for other in self.needs:
            yield not p.has(other), f"{name} needs {other}", f"add {other}, or drop {name}"
        lacks = self.step not in {"", *map(str, p.epilogue)}
        yield lacks, f"{name} needs {self.step}", f"write {self.step} in the epilogue"
        for is_broken, problem, allowed in _RULES[name](p) if name in _RULES else ():
            yield is_broken, f"{name} {problem}", allowed


_FILE: Final = TableFile(Path(__file__).with_name("flags.toml"), "flag", FileError)
FLAGS: Final[Mapping[str, Flag]] = {name: Flag(**facts) for name, facts in _FILE.document().items()}


def _check_flags(p: Facts) -> None:
    for index, name in enumerate(p.flags):
        if name.endswith("."):
            raise ProblemError("flags", "an empty token", "words are joined by one '+'", index)
        if name not in FLAGS:
            allowed = f"known: {' '.join(FLAGS)}" if "." in name else f"a line is {GRAMMAR}"
            raise ProblemError("flags", f"unknown flag {name!r}{did_you_mean(name, FLAGS)}", allowed, index)
        if name in p.flags[:index]:
            raise ProblemError("flags", f"duplicate flag: {name}", "give it once", index)
        flag = FLAGS[name]
        if not flag.every and name not in p.op.flags:
            takers = " ".join(op.name for op in OPS.values() if name in op.flags)
            raise ProblemError("flags", f"{p.op.name} does not take {name}", f"drop {name}, or use {takers}", index)
        for other in flag.excludes:
            if p.has(other):
                problem = f"{name} and {other} contradict each other"
                raise ProblemError("flags", problem, f"drop {other}", p.flags.index(other))
    for index, name in enumerate(p.flags):
        _refuse("flags", index, FLAGS[name].rules(p, name))
