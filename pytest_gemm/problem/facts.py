"""The fields of a problem, and the facts that follow from them."""

from __future__ import annotations

import dataclasses
import functools
import itertools

from pytest_gemm.problem.dtypes import DTYPES, DType, DTypes
from pytest_gemm.problem.layout import Layout, Shape
from pytest_gemm.problem.ops.op import HALVES, PROLOGUES, Op
from pytest_gemm.problem.steps import BLOCK_K, Step, StepKind


@dataclasses.dataclass(frozen=True)
class Facts:
    """The fields of a problem, which may contradict each other; :class:`~pytest_gemm.problem.problem.Problem` checks.

    Attributes:
        op, dtypes, layout, shape: the product.
        epilogue: what is done to it, with bias, alpha and beta in front.
        flags: keys of :data:`~pytest_gemm.problem.rules.FLAGS`.
        quant: scales and zero points.
    """

    op: Op
    dtypes: DTypes
    layout: Layout
    shape: Shape
    epilogue: tuple[Step, ...] = ()
    flags: tuple[str, ...] = ()
    quant: tuple[Step, ...] = ()

    def has(self, flag: str) -> bool:
        """Whether the problem carries ``flag``, a key of :data:`~pytest_gemm.problem.rules.FLAGS`."""
        return flag in self.flags

    def step(self, name: str) -> Step | None:
        """The first step or quantisation parameter called ``name``, or ``None``."""
        return next((s for s in (*self.epilogue, *self.quant) if s.name == name), None)

    @property
    def steps(self) -> tuple[Step, ...]:
        """Scales, epilogue and requantisation: what happens to the product, in this order."""
        last = [step for step in self.quant if step.name == "requant"]
        return (*(step for step in self.quant if step not in last), *self.epilogue, *last)

    @property
    def dynamic(self) -> tuple[str, ...]:
        """The sizes for which one artifact serves any value: some of ``m n k batch``."""
        return tuple(size for size in ("m", "n", "k", "batch") if self.has(f"{size}.dynamic"))

    def _number(self, name: str, absent: float) -> float:
        """The first number of a step or quantisation parameter."""
        step = self.step(name)
        return step.numbers[0] if step else absent

    @property
    def alpha(self) -> float:
        """Factor of the product; 1 where none is given."""
        return self._number("alpha", 1.0)

    @property
    def beta(self) -> float:
        """Factor of the bias operand of addmm and baddbmm; 1 where none is given."""
        return self._number("beta", 1.0)

    @property
    def bias_shape(self) -> tuple[int, ...] | None:
        """Shape of the bias operand, ``None`` without one.  addmm's default is (N,), which ``bias-xn`` expands."""
        step = self.step("bias")
        if step is None:
            return None
        m, n, batch = self.shape.m, self.shape.n, self.shape.batch
        if self.op.several:  # one for each product
            return (batch or 0, 1, n)
        n = self.ends if self.op.ragged == "n" else n
        if batch is not None and step.text == "mn":
            return self.result_shape
        return {"": (n,), "xn": (n,), "0": (), "1n": (1, n), "m1": (m, 1), "mn": (m, n)}[step.text]

    @property
    def chain(self) -> tuple[Step, ...]:
        """The steps applied to the product one after the other: no alpha, beta or bias that the op itself adds.

        With ``a.4d`` the product itself has the shape of a first ``view``.
        """
        own = {StepKind.FACTOR, *([StepKind.BIAS] if self.op.addend or self.op.own_bias else [])}
        steps = tuple(s for s in self.epilogue if s.kind not in own)
        return (Step("view", by(self.deep_shape)), *steps) if self.is_deep else steps

    @property
    def is_deep(self) -> bool:
        """Whether A is 4-D."""
        return self.has("a.4d") and "a.4d" in self.op.flags

    @property
    def deep_shape(self) -> tuple[int, ...]:
        """Shape of the product of a 4-D A."""
        return 2, (self.shape.batch or 0) // 2, self.shape.m, self.shape.n

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
        """Element type of the result: f32 of sums, else what the last step makes."""
        if self.reduction is not None:
            return DTYPES["f32"]
        return functools.reduce(lambda dtype, step: step.makes(dtype), self.epilogue, self.dtypes.out)

    @property
    def reduction(self) -> Step | None:
        """The step that makes one row or one column of the result; ``None`` where there is none."""
        return next((step for step in self.epilogue if step.kind is StepKind.REDUCE), None)

    @property
    def value_dtype(self) -> DType:
        """Element type of the value that bias and steps meet: that of the product, f32 before it is requantised."""
        return self.dtypes.out if self.dtypes.out.is_float or not self.op.fused_steps else DTYPES["f32"]

    @property
    def value_dtypes(self) -> tuple[DType, ...]:
        """Element type of the value before each of :attr:`passes`, and behind the last."""
        return (*itertools.accumulate(self.passes, lambda d, step: step.makes(d), initial=self.value_dtype),)

    def residual_dtype(self, step: Step, dtype: DType) -> DType:
        """Element type of a step's residual, where the step meets a value of ``dtype``.

        That is ``dtype``, or what the step names.  The residual of ``sum`` into 8 bits is the result: codes with their
        own scale.
        """
        if step.operand is not None:
            return step.operand
        return dtype if step.name != "sum" or self.dtypes.out.is_float else self.dtypes.out

    def view_of(self, side: str) -> str:
        """What the program makes A or B of: ``tail``, ``sliced``, ``strided``; "" where it takes it as it is."""
        return next((word for word in ("tail", "sliced", "strided") if self.has(f"{side}.{word}")), "")

    @property
    def has_out(self) -> bool:
        """Whether the program takes the tensor that its result is written to."""
        return self.has("out.given") or self.has("out.copied")

    @property
    def in_place(self) -> str:
        """The operand whose values the given tensor holds before a run, ``bias`` or ``a``; "" where it holds none."""
        return "bias" if self.has("out.addend") else "a" if self.has("out.alias") else ""

    @property
    def bias_dtype(self) -> DType:
        """Element type of the bias operand."""
        if self.step("bias_codes"):
            return DTYPES["i32"]
        return self.dtypes.a if self.autocast else self.value_dtype

    @property
    def b_is_a(self) -> bool:
        """Whether B is A, as it is or transposed: one storage for both."""
        return self.has("b.alias_t") or self.has("b.alias")

    @property
    def group_size(self) -> int:
        """Elements along K that share a scale of B, 0 where the op has no groups; the last group may be shorter."""
        if self.op.coded and not self.step("group"):
            return max(self.shape.k, 1)
        return int(self._number("group", 0))

    @property
    def scale_dtype(self) -> DType:
        """Element type of the scales: f16 in Q8_0, f32 of largest magnitudes, of other codes that of A."""
        if self.a_rule == "q8_0":
            return DTYPES["f16"]
        if self.step("nf4") or self.step("absmax"):
            return DTYPES["f32"]
        return self.dtypes.a if self.op.coded else DTYPES[self.op.scale_dtype(self.dtypes.out.name)]

    @property
    def a_rule(self) -> str:
        """How the op itself quantises A, a key of :data:`~pytest_gemm.numerics.dynamic.RULES`; "" where it does not."""
        step = self.step("inside")
        return step.text if step else "steps" if self.op.quantises_a else ""

    @property
    def scale_blocks(self) -> tuple[int, int] | None:
        """Rows of A and columns of B that share the scale of a block of K; ``None`` without blocks."""
        step = self.step("blocks")
        if step is None:
            return None
        rows, columns = (1 if size == 1.0 else self.block_size for size in step.numbers)
        return rows, columns

    @property
    def block_size(self) -> int:
        """Elements of K, and of the side of a square, that share a scale of :attr:`scale_blocks`."""
        step = self.step("edge")
        return int(step.text) if step else BLOCK_K

    @property
    def micro_block(self) -> int:
        """Elements of K that share a swizzled scale: 32 in MXFP8 and MXFP4, 16 in NVFP4; 0 without such scales."""
        return 32 if self.step("mx") else 16 if self.step("nv") else 0

    @property
    def has_whole_scales(self) -> bool:
        """Whether A and B each have a scale for the whole tensor beside those of blocks."""
        return self._number("nv", 0.0) == 2.0

    def result_factor(self, device: str) -> float:
        """What multiplies a scaled product beside its scales: 1 / 127^2 of largest magnitudes, the scale of fp8."""
        if self.step("absmax"):
            return 1.0 / 127.0**2
        scale = self._number("result", 1.0)
        return 1.0 / scale if device == "cpu" else scale

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
    def ends(self) -> int:
        """How long the dimension is that is divided into groups: the mean size of a group times their number."""
        size: int = getattr(self.shape, self.op.ragged)
        return (self.shape.batch or 0) * size

    @property
    def is_partial(self) -> bool:
        """Whether there are rows of the result of which nothing is promised: those that no group owns."""
        return self.has("groups.unowned") and not self.has("groups.zeroed")

    @property
    def terms(self) -> int:
        """How many products a sum can have: K, or where K is divided into groups, all of it."""
        return self.ends if self.op.ragged == "k" else self.shape.k

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
        """Shape of the tensor that the program returns: :attr:`judged_shape` after :attr:`view_steps`."""
        shape = self.judged_shape
        for step in self.view_steps:
            shape = step.moved(shape)
        return shape

    @property
    def judged_shape(self) -> tuple[int, ...]:
        """:attr:`result_shape`, with 1 for what :attr:`reduction` sums over."""
        shape = list(self.result_shape)
        if self.reduction is not None:
            shape[self.reduction.dim] = 1
        return tuple(shape)

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Shape of the value in the product's own coordinates, where it is judged; of ``linears`` of all results."""
        m, n, batch = self.shape.m, self.shape.n, self.shape.batch
        if batch is None or self.step("gated") is not None:
            return (m, n)
        grouped = {"m": (batch * m, n), "n": (m, batch * n)}
        return grouped.get(self.op.ragged, (batch, m, n))

    def prologues(self, operands: str) -> tuple[str, ...]:
        """What the program does to ``a``, ``b`` or any of ``ab`` before it multiplies: flags without the operand."""
        return tuple(flag[2:] for flag in self.flags if flag in PROLOGUES and flag[0] in operands)

    @property
    def autocast(self) -> bool:
        """Whether the operands are f32 and the program itself converts them to the half type of its product.

        That is what ``torch.autocast`` makes of a product: ``f32-f32-bf16``.  The bias is converted with them.
        """
        return self.dtypes.a.name == self.dtypes.b.name == "f32" and self.dtypes.out.name in HALVES

    @property
    def widens(self) -> bool:
        """Whether the op keeps the f32 of a product of half types: ``out_dtype=torch.float32``."""
        a, b, out = self.dtypes.a.name, self.dtypes.b.name, self.dtypes.out.name
        return a == b and a in HALVES and out == "f32"

    @property
    def input_dtype(self) -> DType:
        """Element type of A when the product's kernel reads it.

        The program converts f32 under autocast and the integer side of a weight-only or mixed product first.
        """
        return self.dtypes.out if self.autocast or self.op.converts else self.dtypes.a

    @property
    def constant_b(self) -> bool:
        """Whether B is a constant of the compiled program (a weight) rather than an argument."""
        return self.has("b.constant") or (self.op.constant_b and not (self.has("b.argument") or self.b_is_a))

    @property
    def frozen(self) -> bool:
        """Whether freezing has made a constant of B; without, it is one in a program that is packaged."""
        return self.constant_b and not self.has("b.parameter")


def by(shape: tuple[int, ...]) -> str:
    """Extents joined by ``x``."""
    return "x".join(map(str, shape))
