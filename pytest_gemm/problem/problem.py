"""A problem is one line of text, both ways: ``op:dtypes:layout:shape[:epilogue][:subject.word+word]...``.

This module is the vocabulary of the whole project: every other package receives a :class:`Problem` and none of them
parses text.  It imports no torch, so that collection stays fast.

Examples::

    mm:f16:nt:512x768x1024
    int_mm:i8-i8-i32:nt:512x1024x2048
    bmm:bf16:nn:4x128x96x192
    linear:f32:nt:1000x1024x1000:bias+gelu:a.padded:m.dynamic
    linear:f32-f32-bf16:nt:32x384x64:bias
    addmm:f32:nn:33x65x127:bias-m1+alpha-0.5+beta-2
    qlinear:u8-i8-bf16:nt:17x64x128:bias+relu:quant.static-0.02_7

The characters are those that ``pytest -k`` and every shell take unquoted.  ``docs/problem-line.md`` lists the words.

A problem has one spelling, the canonical line.  Whatever else means the same is read and shown in it: numbers are
written in their shortest form, a parameter that is the default goes unwritten (``scale-0.50`` is ``scale``), and so do
factors of 1 and ``b.constant`` or ``b.argument`` where the op implies them; bias, alpha and beta stand in this order,
subjects in that of :data:`SUBJECTS`, words in that of :data:`FLAGS`; a ``perm`` that swaps the last two dimensions is
``t``.  A token that would change nothing else is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Final

from pytest_gemm.problem.dtypes import DTYPES, DType, DTypes
from pytest_gemm.problem.errors import FIELDS, GRAMMAR, ProblemError, split
from pytest_gemm.problem.layout import Layout, Shape
from pytest_gemm.problem.line import (
    LARGEST,
    LONGEST,
    PASS_RANK,
    SWAPPED,
    rank_of,
    read_dtypes,
    read_layout,
    read_op,
    read_shape,
    read_steps,
    write,
)
from pytest_gemm.problem.ops import HALVES, OPS, Op
from pytest_gemm.problem.rules import FLAGS, by, check_flags
from pytest_gemm.problem.steps import Step, StepKind

_MOST_ELEMENTS: Final = 2**40


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is to be computed: op, dtypes, layout, shape, epilogue and flags.

    ``str(problem)`` is its canonical line and ``Problem.parse(str(problem)) == problem``.  Fields may be given in any
    order and spelling that the grammar takes; they are canonical afterwards.  A problem says nothing about values
    (distribution, seed) or about who computes it (backend).

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
            swapped = step.name == "perm" and step.order(rank) == SWAPPED.order(rank)
            found.append(SWAPPED if swapped else step)
        return tuple(sorted(found, key=rank_of))

    def _canonical_flags(self) -> tuple[str, ...]:
        """The flags in the order of the table, without the one that says of B what the op implies."""
        implied = "b.constant" if self.op.constant_b and not self.b_is_a else "b.argument"
        return tuple(flag for flag in FLAGS if flag in self.flags and flag != implied)

    @functools.cached_property
    def line(self) -> str:
        """The canonical text; also the problem's id."""
        return self.text()

    def text(self) -> str:
        """The line of the fields as they are: the canonical one after construction."""
        return write(self)

    def __str__(self) -> str:
        return self.line

    # -- facts that several rooms need -----------------------------------------------------------

    def has(self, flag: str) -> bool:
        """Whether the problem carries ``flag``, a key of :data:`FLAGS`."""
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
        if self.op.several:  # one for each product
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
        own_bias = self.op.addend or self.op.own_bias
        steps = tuple(
            s
            for s in self.epilogue
            if s.kind not in (StepKind.FACTOR, StepKind.QUANT) and not (own_bias and s.kind is StepKind.BIAS)
        )
        if not self.is_deep:
            return steps
        return Step("view", by((2, (self.shape.batch or 0) // 2, self.shape.m, self.shape.n))), *steps

    @property
    def is_deep(self) -> bool:
        """Whether A is 4-D."""
        return self.has("a.4d") and "a.4d" in self.op.flags

    @property
    def passes(self) -> tuple[Step, ...]:
        """The steps of :attr:`chain` that compute something."""
        return tuple(s for s in self.chain if s.kind is not StepKind.VIEW)

    @property
    def view_steps(self) -> tuple[Step, ...]:
        """The steps of :attr:`chain` that only move: what lies between the product's shape and the returned one."""
        return tuple(s for s in self.chain if s.kind is StepKind.VIEW)

    @property
    def residuals(self) -> tuple[tuple[Step, tuple[Step, ...]], ...]:
        """Each step with a residual, and the moves that the value has made when it meets it; a copy is none."""
        found: list[tuple[Step, tuple[Step, ...]]] = []
        moves: tuple[Step, ...] = ()
        for step in self.chain:
            if step.kind is StepKind.VIEW and step.name != "dense":
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
        return self.dtypes.out if self.dtypes.out.is_float or not self.op.fused_steps else DTYPES["f32"]

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
    def b_is_a(self) -> bool:
        """Whether B is A, as it is or transposed: one storage for both."""
        return self.has("b.alias_t") or self.has("b.alias")

    @property
    def group_size(self) -> int:
        """Elements along K that share a scale, 0 where the op has no groups."""
        step = self.step("group")
        return int(step.numbers[0]) if step else 0

    @property
    def rows(self) -> int:
        """Rows of a product: M, times the batch where the op takes a 3-D A as one matrix."""
        batch = self.shape.batch if self.op.batch == "optional" else None
        return self.shape.m * (1 if batch is None else batch)

    @property
    def adds_bias(self) -> bool:
        """Whether the op itself adds a bias to the product."""
        return self.op.addend or (self.op.own_bias and self.step("bias") is not None)

    @property
    def grouped(self) -> bool:
        """Whether A's rows belong to groups, each with a B of its own."""
        return self.op.grouped

    @property
    def several(self) -> int:
        """How many tensors the program of ``linears`` returns, of which the judge makes one; 0 for another program."""
        return (self.shape.batch or 0) if self.op.several and self.step("gated") is None else 0

    def is_one_of(self, what: str, index: int) -> bool:
        """Whether product ``index`` of ``linears`` has its own ``bias`` or ``steps``."""
        if self.has(f"{what}.first"):
            return index == 0
        return not self.has(f"{what}.last") or index == (self.shape.batch or 0) - 1

    @property
    def returned_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that the program returns: :attr:`result_shape` after :attr:`view_steps`."""
        shape = self.result_shape
        for step in self.view_steps:
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
        return self.dtypes.a.name == self.dtypes.b.name == "f32" and self.dtypes.out.name in HALVES

    @property
    def input_dtype(self) -> DType:
        """Element type of A when the product's kernel reads it.

        The program converts f32 under autocast and the integer side of a weight-only or mixed product first.
        """
        converted = self.autocast or self.op.converts
        return self.dtypes.out if converted else self.dtypes.a

    @property
    def outputs(self) -> tuple[Problem, ...]:
        """What each result of the program is the answer to: one, or two with ``tap``, ``fork`` and ``again``.

        With ``tap`` the first is the value before the last step, with ``fork`` what the step before the last makes of
        the value that the last one reads too.  These problems share the operands of this one, but for the second of
        ``again``: its A is the first result.
        """
        if self.has("program.chained"):
            layout = Layout.NT if self.layout.b_transposed else Layout.NN
            kept = tuple(
                f
                for f in self.flags
                if f in {"m.dynamic", "b.padded", "b.offset", "b.broadcast", "b.constant", "b.argument"}
            )
            own = tuple(s for s in self.epilogue if s not in self.chain)
            once = dataclasses.replace(self, flags=tuple(f for f in self.flags if f != "program.chained"))
            return (once, dataclasses.replace(self, layout=layout, epilogue=own, flags=kept))
        if not (self.has("program.multi_output") or self.has("program.branching")):
            return (self,)
        chain = self.chain
        places = [index for index, step in enumerate(self.epilogue) if step in chain]
        without_last = self.without(places[-1])
        return (without_last, self.without(places[-2]) if self.has("program.branching") else self.without(None))

    def without(self, place: int | None) -> Problem:
        """The program of one result that lacks the step at this place of the epilogue; ``None``: that lacks none."""
        kept = tuple(step for index, step in enumerate(self.epilogue) if index != place)
        gone = (
            {"program.multi_output", "program.branching"}
            if any(s.kind is StepKind.BINARY for s in kept)
            else {"program.multi_output", "program.branching", "r0.alias"}
        )
        return dataclasses.replace(self, epilogue=kept, flags=tuple(f for f in self.flags if f not in gone))

    @property
    def output_names(self) -> tuple[str, ...]:
        """What a report calls each of :attr:`outputs`; "" for the only one."""
        if self.has("program.branching") or self.has("program.chained"):
            return ("the first result", "the second result")
        return ("the tapped value", "the result") if self.has("program.multi_output") else ("",)

    @property
    def constant_b(self) -> bool:
        """Whether B is a constant of the compiled program (a weight) rather than an argument."""
        if self.has("b.constant"):
            return True
        return self.op.constant_b and not (self.has("b.argument") or self.b_is_a)

    @property
    def frozen(self) -> bool:
        """Whether freezing has made a constant of B; without, it is one in a program that is packaged."""
        return self.constant_b and not self.has("b.parameter")

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
        if len(line) > LONGEST:
            raise ProblemError(
                f"{line[:80]}...", "op", f"a line of {len(line)} characters", f"up to {LONGEST} are read"
            )
        try:
            fields = split(line)
            for place, field in enumerate(FIELDS[:4]):
                if not fields.required[place]:
                    raise ProblemError("", field, "is missing", f"a line is {GRAMMAR}")
            op, dtypes, layout, shape = fields.required
            return cls(
                read_op(op),
                read_dtypes(dtypes),
                read_layout(layout),
                read_shape(shape),
                read_steps(fields),
                fields.flags,
            )
        except ProblemError as error:
            from pytest_gemm.problem.migrate import modern_line

            if (spelling := modern_line(line)) != line:
                problem, allowed = "an earlier version's spelling", f"write {spelling}, or run pytest-gemm migrate FILE"
                raise ProblemError(line, error.field, problem, allowed, error.index) from None
            raise error.on(line) from None  # pointing into the text that the user typed

    # -- contradictions --------------------------------------------------------------------------

    def _wrong(self, field: str, problem: str, allowed: str, index: int = 0) -> ProblemError:
        """An error about a token of a field, by its number: a flag, a step, a size."""
        return ProblemError(self.text(), field, problem, allowed, index)

    def _check(self) -> None:
        op, names = self.op, (self.dtypes.a.name, self.dtypes.b.name, self.dtypes.out.name)
        if not op.dtypes(*names):
            raise self._wrong("dtypes", f"{self.dtypes} makes no {op.name}", f"{op.name} takes {op.dtypes_help}")
        if self.layout not in op.layouts:
            allowed = f"allowed: {' '.join(map(str, op.layouts))}"
            raise self._wrong("layout", f"{op.name} cannot be {self.layout}", allowed)
        self._check_shape()
        self._check_epilogue()
        check_flags(self)

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
            if size > LARGEST:
                raise self._wrong("shape", f"{size} is too large", f"a size is at most {LARGEST} (2^31 - 1)", index)
        count = 1 if batch is None else batch
        elements = max(count * m * max(n, k), (count if op.batch == "always" else 1) * n * k)
        if elements > _MOST_ELEMENTS:
            problem = f"a matrix of {shape} has {elements} elements"
            raise self._wrong("shape", problem, f"at most {_MOST_ELEMENTS} (2^40) are indexed")
        if self.grouped and count * m > LARGEST:
            problem = f"{count * m} rows of all groups"
            raise self._wrong("shape", problem, f"the ends of groups are int32: at most {LARGEST}")

    def _check_epilogue(self) -> None:
        op, names = self.op, [step.name for step in self.epilogue]
        first_pass = requant = ""
        for index, step in enumerate(self.epilogue):
            kind, rank = step.kind, rank_of(step)
            if kind in (StepKind.FACTOR, StepKind.QUANT, StepKind.BIAS, StepKind.JOIN) and step.name in names[:index]:
                raise self._wrong("epilogue", f"duplicate step: {step}", f"give {step.name} once", index)
            if rank == 0 and step.name not in op.scales:
                takers = " ".join(op.name for op in OPS.values() if step.name in op.scales)
                raise self._wrong("epilogue", f"{op.name} takes no {step.name} scales", f"these do: {takers}", index)
            if step.name in {"alpha", "beta"} and not op.addend:
                allowed = "addmm and baddbmm take it; scale-X goes anywhere"
                raise self._wrong("epilogue", f"{op.name} has no {step.name}", allowed, index)
            if step.name in {"sum", "requant"} and not op.fused_steps:
                allowed = "qlinear has it" if step.name != "sum" else "write add"
                raise self._wrong("epilogue", f"{op.name} has no {step.name}", allowed, index)
            if kind is StepKind.JOIN:
                if not op.several or self.shape.batch != 2:
                    problem = f"{step} joins two products"
                    raise self._wrong("epilogue", problem, "linears of shape 2xMxNxK has them", index)
                if first_pass:
                    problem = f"{step} comes after another step"
                    raise self._wrong("epilogue", problem, "it goes first, after the bias", index)
            if step.name == "bias" and step.text and not op.addend:
                raise self._wrong("epilogue", f"{op.name} takes a bias of shape (N,) only", "write bias", index)
            if rank < PASS_RANK and first_pass:
                problem = f"{step} comes after another step, {first_pass}"
                raise self._wrong("epilogue", problem, "bias, its factors and scales go first", index)
            if rank == PASS_RANK and requant:
                raise self._wrong("epilogue", f"{step} comes after {requant}", "requant goes last", index)
            first_pass = first_pass or (str(step) if rank == PASS_RANK else "")
            requant = requant or (str(step) if step.name == "requant" else "")
        scales = [index for index, step in enumerate(self.epilogue) if rank_of(step) == 0]
        if op.scales and len(scales) != 1:
            given = " and ".join(str(self.epilogue[index]) for index in scales)
            problem = f"{given} at once" if scales else f"{op.name} needs its scales"
            raise self._wrong("epilogue", problem, f"write one of {' '.join(op.scales)}", max(scales, default=0))
        if op.addend and "bias" not in names:
            raise self._wrong("epilogue", f"{op.name} needs its addend", "add bias, bias-1n, bias-m1 or bias-mn")
        for field, index, problem, allowed in op.check(self):
            raise self._wrong(field, problem, allowed, index)
        if first_pass:
            self._check_chain()

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
            if step.kind is not StepKind.VIEW:
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
            if self.has("m.dynamic"):
                problem = f"{step} has its sizes, and dyn-m every M"
                raise self._wrong("epilogue", problem, "t and perm go with dyn-m", index)
            if math.prod(step.sizes) != math.prod(shape) or max(step.sizes) > LARGEST:
                problem = f"{step} has not {math.prod(shape)} elements"
                raise self._wrong("epilogue", problem, f"the result is {by(shape)}", index)
            is_idle = step.sizes == shape
        else:
            order, places = step.order(len(shape)), tuple(range(len(shape)))
            if tuple(sorted(order)) != places:
                problem = f"{step} does not order the dimensions of {by(shape)}"
                allowed = f"for example perm-{'_'.join(map(str, reversed(places)))}"
                raise self._wrong("epilogue", problem, allowed, index)
            is_idle = step.name == "perm" and order == places
        if is_idle:
            problem = f"{step} leaves the result of {by(shape)} as it is"
            raise self._wrong("epilogue", problem, f"drop {step}", index)


def canonical_line(line: str) -> str:
    """The canonical spelling of a line that was stored, perhaps by an earlier version; as it is where it is no line."""
    try:
        return Problem.parse(line).line
    except ProblemError:
        return line
