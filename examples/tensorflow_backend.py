"""TensorFlow's matrix product on the CPU (oneDNN and Eigen) as the backend ``tensorflow``.

Requirements: tensorflow-cpu
Run: PYTHONPATH=examples pytest -p tensorflow_backend --pyargs pytest_gemm.conformance --gemm-backends=tensorflow

matmul takes f32, f64, bf16 and f16 and returns their type, and i8 or u8 with ``output_type=int32``
(https://www.tensorflow.org/api_docs/python/tf/linalg/matmul).  Nothing is said of the sum's type, so it is f32, f64 for
f64, int32 for i8.  On a CPU subnormal numbers count as zeros: TensorFlow's own test asserts it
(https://github.com/tensorflow/tensorflow/blob/v1.2.1/tensorflow/python/kernel_tests/denormal_test.py).

Operands are shared through DLPack.  A strided one is copied first, and so is one that is not aligned to 64 bytes, of
which TensorFlow's products end the process.
"""

from __future__ import annotations

from typing import Any

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.api.dlpack import hand_over, take_back


def matmul(a: Any, b: Any) -> Any:
    """The product of two matrices or of two batches of them."""
    import tensorflow as tf

    def taken(one: Any) -> Any:
        return tf.experimental.dlpack.from_dlpack(one.__dlpack__())

    x, y = (hand_over(one, taken, compact=True, align=64) for one in (a, b))
    return take_back(tf.matmul(x, y, output_type=None if a.is_floating_point() else tf.int32), a)


class TensorFlowBackend(CallableBackend):
    """The backend."""

    devices = ("cpu",)


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    dtypes = ("f32", "f64", "bf16", "f16", "i8", "u8")
    # The import reads the environment and draws random numbers.
    how: dict[str, Any] = {"distributions": ("tensorflow-cpu",), "imports": ("tensorflow",)}
    registry.add(TensorFlowBackend("tensorflow", matmul, dtypes, flushes=True, **how))
