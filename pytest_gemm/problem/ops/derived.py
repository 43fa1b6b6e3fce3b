"""Products that PyTorch makes of something else: the gradients of a linear, and convolutions.

- linear_dgrad: the gradient of a linear's input, of the gradient of its output (A) and its weight (B).
- linear_wgrad: the gradient of its weight, of the gradient of its output (A, transposed) and its input (B).
- conv2d: a convolution of 1x1; A holds the image pixels by channels, stored by channels (tt) or by pixels (nt).
- conv2d_3x3: one of 3x3 with a padding of 1: a row of the result is the sum of 9 pixels, each with K channels.
"""

from __future__ import annotations

import math
from typing import Any, Final

from pytest_gemm.problem.layout import Layout
from pytest_gemm.problem.ops.op import (
    FLOATS,
    OUTPUTS,
    Complaints,
    Matmul,
    Op,
    Problem,
    Tensor,
    Tensors,
    around_dense,
    called,
)

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


def _height(pixels: int) -> int:
    """Of an image with so many pixels: the one that makes it nearest to a square."""
    return next((h for h in range(math.isqrt(pixels), 0, -1) if pixels % h == 0), 1)


def _image(p: Problem, a: Tensor) -> Tensor:
    """The rows of A as the pixels of an image, or of several."""
    height = _height(p.shape.m)
    return a.mT.unflatten(-1, (height, p.shape.m // height))


def _conv2d(torch: Any, p: Problem, t: Tensors) -> Tensor:
    side = p.op.window
    weight = t["b"][:, :, None, None] if side == 1 else t["b"].unflatten(1, (-1, side, side))
    made = torch.nn.functional.conv2d(_image(p, t["a"]), weight, t.get("bias"), padding=side // 2)
    return made.flatten(-2).mT


def unfolded(torch: Any, p: Problem, a: Tensor) -> Tensor:
    """The window of each pixel as a row, channel by channel, with zeros beyond the edges of the image."""
    return torch.nn.functional.unfold(_image(p, a), p.op.window, padding=p.op.window // 2).mT


def _around_window(torch: Any, p: Problem, t: Tensors, matmul: Matmul) -> Tensor:
    return around_dense(torch, p, {**t, "a": unfolded(torch, p, t["a"])}, matmul)


def _check_window(p: Problem) -> Complaints:
    yield from _check_fixed(p)
    if p.shape.is_empty or not p.shape.k:
        yield "shape", 0, "an image without pixels, channels or filters", "give sizes of 1 or more"


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
    Op(
        "conv2d",
        "optional",
        _FLOATS,
        _conv2d,
        help="a convolution of 1x1: A holds the image pixels, stored by channels (tt) or by pixels (nt)",
        layouts=(Layout.NT, Layout.TT),
        own_bias=True,
        weight=True,
        check=_check_fixed,
        flags=("b.argument", *OUTPUTS),
    ),
    Op(
        "conv2d_3x3",
        "optional",
        _FLOATS,
        _conv2d,
        _around_window,
        help="a convolution of 3x3 with a padding of 1",
        layouts=(Layout.NT, Layout.TT),
        own_bias=True,
        weight=True,
        window=3,
        check=_check_window,
        flags=("b.argument", *OUTPUTS[1:]),
    ),
)
