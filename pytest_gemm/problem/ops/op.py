"""The type of an operation: its grammar, its program and the facts that other packages read."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final

from pytest_gemm.problem.layout import Layout

# A Problem, whose type is made of ops; a torch.Tensor, and the tensors of a program by name.  Modules that collection
# imports must not import torch: the functions of an op are given the module.
Problem = Any
Tensor = Any
Tensors = dict[str, Any]
Matmul = Callable[[Tensor, Tensor], Tensor]
# What may be wrong with a problem of the op: the field, the index of the token, the complaint, what would be right.
Complaints = Iterator[tuple[str, int, str, str]]

FLOATS: Final = ("f64", "f32", "f16", "bf16")
HALVES: Final = frozenset({"f16", "bf16"})
# One float type, or f32 that the program converts to a half type, as autocast does.
FLOATS_AND_AUTOCAST: Final = (*FLOATS, "f32-f32-bf16", "f32-f32-f16")
# Half types whose product is not rounded to them: out_dtype=torch.float32.
WIDENED: Final = ("bf16-bf16-f32", "f16-f16-f32")

# Flags of every op whose program has one product and one result at its end, what the program may do to A and B before
# the product, and what less precision is allowed.
OUTPUTS: Final = ("r0.alias", "program.multi_output", "program.branching")
PROLOGUES: Final = ("a.relu", "a.floor", "a.tril", "b.relu", "b.floor", "b.halved")
PRECISION: Final = ("math.tf32", "math.half_partials")
# Operands that the program takes as views of larger tensors; a kernel for 8 bits needs rows of adjacent elements.
SLICED: Final = ("a.tail", "b.tail", "a.sliced", "b.sliced")
VIEWS: Final = (*SLICED, "a.aligned", "b.aligned", "a.strided", "b.strided", "a.expanded", "b.expanded")

# A given tensor for the result, and how it lies.
GIVEN: Final = ("out.given", "out.copied", "out.padded", "out.offset", "out.transposed")


def called(torch: Any, name: str, function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """A call, or the line of it in a program that is written down, for functions that take no stand-ins for tensors.

    Args:
        torch: the module.
        name: of the result in the program.
        function: what is called.
        args: its arguments.
    """
    if isinstance(args[0], torch.fx.Proxy):
        return args[0].tracer.create_proxy("call_function", function, args, {}, name=name)
    return function(*args)


def wide_out(torch: Any, p: Problem) -> dict[str, Any]:
    """The argument ``out_dtype`` of an operator whose result is wider than its operands."""
    return {"out_dtype": torch.float32} if p.widens else {}


def given_out(t: Tensors) -> Tensors:
    """The argument ``out`` of an operator, where the program has one."""
    return {"out": t["out"]} if "out" in t else {}


def triples(a: str, b: str, out: str) -> tuple[str, ...]:
    """Every combination of dtypes of A, B and the product, which are separated by spaces, as a problem line has it."""
    found = itertools.product(a.split(), b.split(), out.split())
    return tuple(three[0] if len({*three}) == 1 else "-".join(three) for three in found)


def around_dense(torch: Any, p: Problem, t: Tensors, matmul: Matmul) -> Tensor:
    """``alpha * a @ b + beta * bias`` with ``matmul`` for the product, everything else in eager PyTorch."""
    a, b = t["a"], t["b"].mT if p.op.weight else t["b"]
    if p.op.converts:
        out = dtype_of(torch, p)
        a, b = a.to(out), b.to(out)
    elif p.widens:  # exact, and the sum is rounded once
        a, b = a.to(torch.float32), b.to(torch.float32)
    if p.op.batch == "optional" and p.shape.batch is not None:
        c = matmul(a.flatten(0, -2), b).unflatten(0, a.shape[:-1])
    else:
        c = matmul(a, b)
    if "bias" not in t or not (p.op.addend or p.op.own_bias):
        return c
    # beta = 0 ignores the addend altogether, NaN included (BLAS, and torch.addmm's documentation).
    c = c if p.alpha == 1.0 else c * p.alpha
    return c if p.beta == 0.0 else c + (t["bias"] if p.beta == 1.0 else t["bias"] * p.beta)


def dtype_of(torch: Any, p: Problem) -> Any:
    """The torch dtype of the product."""
    return getattr(torch, p.dtypes.out.torch_name)


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation under its ATen-style name: one table entry with all that is known about it.

    ``native`` and ``around`` receive the module ``torch``, the problem and the program's tensors by name, ``b`` also
    where B is A.

    Attributes:
        name: the key of ``OPS``.
        batch: ``"never"``, ``"always"`` or ``"optional"``.
        dtypes: what the dtypes of a problem can be, as its line has them; a backend may support fewer.
        native: the product with its own addend, as a user writes it.
        around: the same with a given matrix product, everything around it in eager PyTorch.
        help: what it computes.
        constant_b: whether B is a weight, constant for the compiler, unless a flag says otherwise.
        addend: whether the op itself takes a bias operand C (``beta * C + alpha * A @ B``).
        own_bias: whether the op itself adds a bias of shape (N,).
        layouts: layouts that can be expressed.
        scales: quantisation steps, of which a problem needs one.
        flags: flags that the op takes, beyond those that fit every op.
        weight: whether the second argument is the N x K weight as stored, not its K x N view.
        converts: whether the program converts an integer side to the product's type.
        weight_scales: whether B has scales for its columns.
        scale_dtype: dtype of the scales by that of the result.
        int8: whether both sides are 8-bit integers whose product is scaled.
        zero_points: whether A has a zero point.
        fused_steps: whether the op computes its steps itself, in f32, and requantises an 8-bit result.
        rounds_once: whether the op is one kernel that keeps f32 up to its store.
        several: whether there is one product for each matrix of the batch, all of one A.
        ragged: the dimension that is divided into groups of uneven sizes, ``m``, ``n`` or ``k``; "" for none.
        summands: of how many products the result is the sum; each has its share of K.
        quantises_a: whether the op itself quantises each row of A to 8 bits.
        coded: whether B is codes with scales of groups of K, (N, groups), and where the line has them zero points.
        absmax: whether scales can be largest magnitudes.
        pack: the N x K weight in the form that the op takes, of the program's tensors, where a user packs it once;
            ``None`` for no packing.
        derived: what a compiler makes of constants of the program, by what it makes it of.
        check: complaints about a problem that only this op has.
        lacks: why a group of ``backends/rules.toml``, ``cpp`` or ``triton``, has no kernel of a problem; "": it has.
        outside: whether a hook has registered it; then its exact product is that of ``around``.
    """

    name: str
    batch: str
    dtypes: tuple[str, ...]
    native: Callable[[Any, Problem, Tensors], Tensor]
    around: Callable[[Any, Problem, Tensors, Matmul], Tensor] = around_dense
    help: str = ""
    constant_b: bool = True
    addend: bool = False
    own_bias: bool = False
    layouts: tuple[Layout, ...] = tuple(Layout)
    scales: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    weight: bool = False
    converts: bool = False
    weight_scales: bool = False
    scale_dtype: Callable[[str], str] = lambda _: "f32"
    int8: bool = False
    zero_points: bool = False
    fused_steps: bool = False
    rounds_once: bool = False
    several: bool = False
    ragged: str = ""
    summands: int = 1
    quantises_a: bool = False
    coded: bool = False
    absmax: bool = False
    pack: Callable[[Any, Problem, Tensors], Tensor] | None = None
    derived: Callable[[Any, Problem, Tensors], Tensors] | None = None
    check: Callable[[Problem], Complaints] = lambda _: iter(())
    lacks: Callable[[Problem, str], str] = lambda *_: ""
    outside: bool = False

    @property
    def fp8_result(self) -> bool:
        """Whether the result can be fp8, which has a scale of its own."""
        return any(dtypes.rpartition("-")[2].startswith("f8") for dtypes in self.dtypes)

    @property
    def grouped(self) -> bool:
        """Whether a dimension is divided into groups of uneven sizes."""
        return self.ragged != ""

    @property
    def blocked(self) -> bool:
        """Whether it takes scales of blocks."""
        return "blocks" in self.scales

    @property
    def reducible(self) -> bool:
        """Whether rows and columns of its result, or of each of a batch, can be summed by the program."""
        return not (self.grouped or self.several or self.fused_steps)

    @property
    def batched(self) -> bool:
        """Whether it multiplies a batch of A by a batch of B, matrix by matrix."""
        return self.batch == "always" and not self.grouped and not self.several
