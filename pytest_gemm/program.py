"""The PyTorch program of a problem: what a user would have written, and what every backend computes.

``args(problem, operands)`` are its tensors in order and ``build(problem)`` the function over them.  Eager
ATen runs it as it is, Inductor compiles it, a plain callable replaces the matrix product in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pytest_gemm.problem import DType, Problem, Step, StepKind

if TYPE_CHECKING:
    from pytest_gemm.operands import Operands

__all__ = ["PROGRAMS", "WEIGHT_OPS", "Matmul", "Program", "apply_step", "args", "build", "torch_dtype"]

Matmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Program = Callable[..., torch.Tensor]


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of ``dtype``."""
    found = getattr(torch, dtype.torch_name)
    assert isinstance(found, torch.dtype)
    return found


# Ops that have a program; the others come with their operands.
PROGRAMS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "int_mm", "mixed_mm", "woq_int8"})

# Ops whose second argument is the N x K weight as stored, not its K x N view.
WEIGHT_OPS = frozenset({"linear", "woq_int8", "woq_int4", "qlinear"})


def args(problem: Problem, operands: Operands) -> dict[str, torch.Tensor]:
    """The program's tensors by parameter name, in order: a, b, scale, bias, r0, r1 ...

    ``b`` is the stored N x K weight for the weight ops, the (K, N) view otherwise; it is absent for ``self``.
    """
    found: dict[str, torch.Tensor] = {"a": operands.a}
    if not problem.has("self"):
        found["b"] = operands.b.mT if problem.op.name in WEIGHT_OPS else operands.b
    if operands.scale_b is not None:
        found["scale"] = operands.scale_b
    if operands.bias is not None:
        found["bias"] = operands.bias
    for index, residual in enumerate(operands.residuals):
        found[f"r{index}"] = residual
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
            c = matmul(a.reshape(-1, a.shape[-1]), b).reshape(*a.shape[:-1], b.shape[-1])
        else:
            c = matmul(a, b)
        if op == "woq_int8":
            return c * t["scale"]
        if not has_bias or not (problem.op.addend or op == "linear"):
            return c
        bias = t["bias"]
        # beta = 0 ignores the addend altogether, NaN included (BLAS, and torch.addmm's documentation).
        c = c if alpha == 1.0 else c * alpha
        return c if beta == 0.0 else c + (bias if beta == 1.0 else bias * beta)

    def native(t: dict[str, torch.Tensor]) -> torch.Tensor:
        a = t["a"]
        b = a.mT if problem.has("self") else t["b"]
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
    passes = problem.passes

    def program(**tensors: torch.Tensor) -> torch.Tensor:
        x = product(tensors)
        index = 0
        for step in passes:
            residual = None
            if step.kind is StepKind.BIAS:
                residual = tensors["bias"]
            elif step.kind is StepKind.BINARY:
                residual = tensors[f"r{index}"]
                index += 1
            x = apply_step(step, x, residual)
        return x

    return program
