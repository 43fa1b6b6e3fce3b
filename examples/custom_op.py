"""A custom operator in programs of ``torch.compile`` and AOTInductor: the backend ``custom-op``.

Requirements: numpy
Run: PYTHONPATH=examples pytest -p custom_op --pyargs pytest_gemm.conformance --gemm-backends=custom-op
and with --gemm-modes=static in a compiled program
"""

import numpy as np
import torch

from pytest_gemm.backends.in_graph import GraphBackend


@torch.library.custom_op("example::matmul", mutates_args=())
def operator(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product by numpy's BLAS, which Inductor cannot look into."""
    with np.errstate(all="ignore"):  # NaN and infinities are values like others
        return torch.from_numpy(np.matmul(a.numpy(), b.numpy()))


@operator.register_fake
def _(a, b):
    return a.new_empty(*a.shape[:-1], b.shape[-1])


def matmul(a, b):
    """What a program calls: Inductor fuses what is around it."""
    return operator(a, b)


def pytest_gemm_register_backends(registry):
    """Register the backend; the name of the operator is looked for in the compiled program."""
    registry.add(GraphBackend("custom-op", matmul, ("f32", "f64"), graph="example::matmul"))
