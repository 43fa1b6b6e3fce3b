"""The PyTorch program of a problem: what a user would have written, and what every backend computes.

``args(problem, operands)`` are its tensors in order and ``build(problem)`` the function over them.  Eager
ATen runs it as it is, Inductor compiles it, a plain callable replaces the matrix product in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from pytest_gemm import moves
from pytest_gemm.problem import DType, Problem, Step, StepKind

if TYPE_CHECKING:
    from pytest_gemm.operands import Operands

__all__ = ["PROGRAMS", "WEIGHT_OPS", "Matmul", "Program", "apply_step", "args", "build", "torch_dtype"]

Matmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# A tensor, or for ``tap``, ``fork`` and ``again`` a tuple of two.
Program = Callable[..., Any]


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of ``dtype``."""
    found = getattr(torch, dtype.torch_name)
    assert isinstance(found, torch.dtype)
    return found


# Ops that have a program; the others come with their operands.
PROGRAMS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "linear", "int_mm", "mixed_mm", "woq_int8", "scaled_mm", "grouped_mm"}
)

# Ops whose second argument is the N x K weight as stored, not its K x N view.
WEIGHT_OPS = frozenset({"linear", "woq_int8", "woq_int4", "qlinear"})


def args(problem: Problem, operands: Operands) -> dict[str, torch.Tensor]:
    """The program's tensors by parameter name, in order: a, b, scale_a, scale, offs, bias, r0, r1 ..., i0, i1 ...

    ``b`` is the stored N x K weight for the weight ops, the (K, N) view otherwise; it is absent for ``self``, and so is
    ``r0`` for ``res-a``.  Of a residual that is looked up ``r0`` is the table and ``i0`` the index.
    """
    found: dict[str, torch.Tensor] = {"a": operands.a}
    if not problem.has("self"):
        found["b"] = operands.b.mT if problem.op.name in WEIGHT_OPS else operands.b
    if operands.scale_a is not None:
        found["scale_a"] = operands.scale_a
    if operands.scale_b is not None:
        found["scale" if operands.scale_a is None else "scale_b"] = operands.scale_b
    if operands.offs is not None:
        found["offs"] = operands.offs
    if operands.bias is not None:
        found["bias"] = operands.bias
    for index, residual in enumerate(operands.residuals):
        if index > 0 or not problem.has("res-a"):
            found[f"r{index}"] = moves.taken(problem, index, residual)
    for index, (table, rows) in operands.lookups.items():
        found |= {f"r{index}": table, f"i{index}": rows}
    return found


def apply_step(step: Step, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """One pass of an epilogue on ``x`` as eager PyTorch writes it."""
    numbers = step.numbers
    unary: dict[str, Callable[[], torch.Tensor]] = {
        "relu": lambda: F.relu(x),
        "gelu": lambda: F.gelu(x),
        "gelu_tanh": lambda: F.gelu(x, approximate="tanh"),
        "silu": lambda: F.silu(x),
        "sigmoid": lambda: torch.sigmoid(x),
        "tanh": lambda: torch.tanh(x),
        "exp": lambda: torch.exp(x),
        "hardswish": lambda: F.hardswish(x),
        "hardsigmoid": lambda: F.hardsigmoid(x),
        "leaky_relu": lambda: F.leaky_relu(x, numbers[0]),
        "clamp": lambda: torch.clamp(x, numbers[0], numbers[1]),
        "scale": lambda: x * numbers[0],
    }
    if step.name in unary:
        return unary[step.name]()
    if step.kind is StepKind.CAST:
        return x.to(torch_dtype(step.dtype))
    assert residual is not None, step
    binary: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "add": torch.add,
        "sub": torch.sub,
        "mul": torch.mul,
        "div": torch.div,
        "bias": torch.add,
    }
    return binary[step.name](x, residual)


def _by_group(matmul: Matmul, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The rows of each group times that group's B; nobody is asked for the product of no rows."""
    pieces, first = [a.new_empty((0, b.shape[-1]))], 0
    for group, last in enumerate(offs.tolist()):
        if last > first:
            pieces.append(matmul(a[first:last], b[group]))
        first = last
    return torch.cat(pieces)


def _product(problem: Problem, matmul: Matmul | None) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    """The product with its own addend, before any pass; with ``matmul`` in place of PyTorch's if given."""
    op, alpha, beta = problem.op.name, problem.alpha, problem.beta
    has_bias = problem.step("bias") is not None
    out = torch_dtype(problem.dtypes.out)
    a_float, b_float = problem.dtypes.a.is_float, problem.dtypes.b.is_float

    def plain(t: dict[str, torch.Tensor]) -> torch.Tensor:
        """Through ``matmul``: everything else in eager PyTorch."""
        assert matmul is not None
        a = t["a"]
        b = t["a"].mT if problem.has("self") else t["b"].mT if op in WEIGHT_OPS else t["b"]
        if op in {"mixed_mm", "woq_int8"}:
            a, b = a.to(out), b.to(out)
        if op == "linear" and a.dim() == 3:
            c = matmul(a.flatten(0, 1), b).reshape(*a.shape[:-1], b.shape[-1])
        elif op == "grouped_mm":
            c = _by_group(matmul, a, b, t["offs"])
        else:
            c = matmul(a, b)
        if op == "woq_int8":
            return c * t["scale"]
        if op == "scaled_mm":
            # fp8 holds neither the sum nor what the scales make of it: ``matmul`` gives f32, and it is rounded once.
            c = c.to(torch.float32) * t["scale_a"] * t["scale_b"]
            return (c + t["bias"].to(torch.float32) if has_bias else c).to(out)
        if not has_bias or not (problem.op.addend or op == "linear"):
            return c
        bias = t["bias"]
        # beta = 0 ignores the addend altogether, NaN included (BLAS, and torch.addmm's documentation).
        c = c if alpha == 1.0 else c * alpha
        return c if beta == 0.0 else c + (bias if beta == 1.0 else bias * beta)

    def native(t: dict[str, torch.Tensor]) -> torch.Tensor:
        a = t["a"]
        own = a if op in WEIGHT_OPS else a.mT
        b = own if problem.has("self") else t["b"]
        if op == "addmm":
            return torch.addmm(t["bias"], a, b, beta=beta, alpha=alpha)
        if op == "baddbmm":
            return torch.baddbmm(t["bias"], a, b, beta=beta, alpha=alpha)
        if op == "bmm":
            return torch.bmm(a, b)
        if op == "linear":
            return F.linear(a, b, t["bias"] if has_bias else None)
        if op == "int_mm":
            return torch._int_mm(a, b)
        if op == "mixed_mm":
            return torch.mm(a if a_float else a.to(out), b if b_float else b.to(out))
        if op == "woq_int8":
            return torch._weight_int8pack_mm(a, b, t["scale"])
        if op == "scaled_mm":
            return torch._scaled_mm(
                a,
                b,
                scale_a=t["scale_a"],
                scale_b=t["scale_b"],
                bias=t["bias"] if has_bias else None,
                out_dtype=out,
                use_fast_accum=problem.has("fast-acc"),
            )
        if op == "grouped_mm":
            return F.grouped_mm(a, b, offs=t["offs"])
        assert op == "mm", f"{op} has no program yet"
        return torch.mm(a, b)

    return plain if matmul is not None else native


def build(problem: Problem, matmul: Matmul | None = None) -> Program:
    """The function over the tensors of :func:`args`, passed by keyword.

    Args:
        problem: what to compute.
        matmul: a replacement for the matrix product; everything around it stays eager PyTorch.
    """
    product = _product(problem, matmul)
    chain, forks = problem.chain, problem.has("fork")

    def program(**tensors: torch.Tensor) -> Any:
        if problem.has("res-a"):
            tensors["r0"] = tensors["a"]
        if problem.autocast:
            half = torch_dtype(problem.input_dtype)
            tensors.update((name, tensors[name].to(half)) for name in ("a", "b", "bias") if name in tensors)
        x = tapped = product(tensors)
        index = 0
        for place, step in enumerate(chain):
            residual = None
            if step.kind is StepKind.BIAS:
                residual = tensors["bias"]
            elif step.kind is StepKind.BINARY:
                residual = tensors[f"r{index}"]
                if step.text == "at":
                    residual = F.embedding(tensors[f"i{index}"], residual)
                index += 1
            before = tapped if forks and place == len(chain) - 1 else x
            moving = step.kind is StepKind.MOVE
            tapped, x = x, moves.forth(before, [step]) if moving else apply_step(step, before, residual)
        if problem.has("again"):
            return x, product({**tensors, "a": x})
        return (tapped, x) if problem.has("tap") or forks else x

    return program
