"""Products that PyTorch makes of something else: the gradients of a linear.

- linear_dgrad: the gradient of a linear's input, of the gradient of its output (A) and its weight (B).
- linear_wgrad: the gradient of its weight, of the gradient of its output (A, transposed) and its input (B).
"""

from __future__ import annotations

from typing import Any, Final

from pytest_gemm.problem.layout import Layout
from pytest_gemm.problem.ops.op import FLOATS, OUTPUTS, Complaints, Op, Problem, Tensor, Tensors, called

_FLOATS: Final = FLOATS[1:]


def _dgrad(torch: Any, _: Problem, t: Tensors) -> Tensor:
    def input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
        x = gradient.new_empty(gradient.shape[0], weight.shape[1])  # its values do not matter
        _, pullback = torch.func.vjp(lambda x: torch.nn.functional.linear(x, weight), x)
        return pullback(gradient)[0]

    return called(torch, "gradient", input_gradient, t["a"], t["b"])


def _wgrad(torch: Any, _: Problem, t: Tensors) -> Tensor:
    def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
        weight = gradient.new_empty(gradient.shape[1], x.shape[1])
        _, pullback = torch.func.vjp(lambda weight: torch.nn.functional.linear(x, weight), weight)
        return pullback(gradient)[0]

    return called(torch, "gradient", weight_gradient, t["a"].mT, t["b"])


def _check_fixed(p: Problem) -> Complaints:
    for index, flag in enumerate(p.flags):
        if flag.endswith(".dynamic"):
            yield "flags", index, f"{p.op.name} has fixed sizes", f"drop {flag}"


OPS: Final = (
    Op(
        "linear_dgrad",
        "never",
        _FLOATS,
        _dgrad,
        help="the gradient of a linear's input: A is that of its output, B the weight",
        layouts=(Layout.NN,),
        check=_check_fixed,
        flags=("b.argument", "math.tf32", *OUTPUTS),
    ),
    Op(
        "linear_wgrad",
        "never",
        _FLOATS,
        _wgrad,
        help="the gradient of a linear's weight: A is that of its output, transposed, B the input",
        constant_b=False,
        layouts=(Layout.TN,),
        check=_check_fixed,
        flags=("math.tf32", *OUTPUTS),
    ),
)
