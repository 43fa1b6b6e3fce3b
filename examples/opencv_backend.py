"""OpenCV's ``cv2.gemm`` on the CPU as the backend ``opencv``.

Requirements: opencv-python-headless
Run: PYTHONPATH=examples pytest -p opencv_backend --pyargs pytest_gemm.conformance --gemm-backends=opencv

https://docs.opencv.org/4.x/d2/de8/group__core__array.html#gacb6e64071dffe36434e1e7ee79e7cb35: the result is
``alpha * op(src1) * op(src2) + beta * op(src3)`` for floating-point matrices of one type, and a flag transposes each of
the three.  src3 has the shape of the result, or there is none.  The type of the sums is not documented, so the contract
has that of the matrices.  A transposed view is given as the matrix that it is a view of, with the flag.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from pytest_gemm.api.callable import CallableBackend, plain
from pytest_gemm.core.outcome import Unsupported


def product(a: Any, b: Any, alpha: float = 1.0, c: Any = None, beta: float = 0.0) -> Any:
    """``alpha * a @ b + beta * c`` of tensors."""
    import cv2
    import torch

    flags, given = 0, []
    for x, flag in ((a, cv2.GEMM_1_T), (b, cv2.GEMM_2_T), (c, cv2.GEMM_3_T)):
        is_view = x is not None and x.stride(-1) != 1 and x.stride(-2) == 1
        flags |= flag if is_view else 0
        given.append(None if x is None else (x.mT if is_view else x).numpy())
    return torch.from_numpy(cv2.gemm(given[0], given[1], alpha, given[2], beta, flags=flags))


def bind(problem: Any, tensors: Mapping[str, Any]) -> Callable[[], Any] | None:
    """addmm and a linear with a bias, which is made a matrix."""
    if problem.op.name not in {"addmm", "linear"} or problem.chain or not plain(problem) or "bias" not in tensors:
        return None
    b = tensors["b"].mT if problem.op.weight else tensors["b"]
    bias = tensors["bias"].expand(problem.result_shape) if problem.beta else None
    bias = bias if bias is None or 1 in bias.stride()[-1:] else bias.contiguous()
    return functools.partial(product, tensors["a"], b, problem.alpha, bias, problem.beta)


class OpenCvBackend(CallableBackend):
    """The backend."""

    def supports(self, problem: Any, request: Any = None) -> Unsupported | None:
        """Products of matrices that have elements."""
        if problem.shape.is_empty or problem.shape.k == 0:
            return Unsupported("empty", "cv2.gemm takes no matrix without elements", "give other sizes")
        return super().supports(problem)


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    facts: Any = {"batched": False, "distributions": ("opencv-python-headless",), "imports": ("cv2",), "bind": bind}
    registry.add(OpenCvBackend("opencv", product, ("f32", "f64"), devices=("cpu",), **facts))
