"""ggml's matrix product on the CPU as the backend ``ggml``: f32, and weights of Q8_0 and Q4_0.

Requirements: pywhispercpp (a wheel with ggml's shared libraries, which ctypes loads)
Run: PYTHONPATH=examples pytest -p ggml_backend --pyargs pytest_gemm.conformance --gemm-backends=ggml --gemm-ops=woq,mm

A weight is blocks of 32 codes, of 8 or of 4 bits, each with a scale in f16.  ggml quantises A to Q8_0 itself, adds up
products of codes in int32, multiplies by both scales and adds up in f32: ``quant.group-32+inside-q8_0``
(https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h, ``block_q8_0`` and ``block_q4_0``).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import weakref
from collections.abc import Callable
from typing import Any

# enum ggml_type.
F32, Q4_0, Q8_0 = 0, 2, 8


class Memory(ctypes.Structure):
    """``struct ggml_init_params``."""

    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@functools.cache
def ggml() -> Callable[..., Any]:
    """``call(name, *arguments)`` of a function of ggml's: the pointer, or the number, that it returns."""
    files = importlib.metadata.files("pywhispercpp") or ()
    paths = [next(str(f.locate()) for f in files if f.match(f"*.libs/libggml-{part}-*")) for part in ("base", "cpu")]
    libraries = [ctypes.CDLL(path, ctypes.RTLD_GLOBAL) for path in paths]

    def call(name: str, *arguments: Any) -> Any:
        function = next(getattr(one, name) for one in libraries if hasattr(one, name))
        function.restype = ctypes.c_void_p
        return function(*arguments)

    call("ggml_cpu_init")
    return call


def product(kind: int, weight: Any, n: int, a: Any) -> Callable[[], Any]:
    """A graph of one product, as a call: A by the N rows of a weight of a type, which is given by its bytes."""
    import torch

    call, (m, k) = ggml(), a.shape
    size = weight.nbytes + 16 * (a.nbytes + 4 * m * n) + (1 << 22)  # with room for the codes of A
    context = ctypes.c_void_p(call("ggml_init", Memory(size, None, False)))
    new = functools.partial(call, "ggml_new_tensor_2d", context)
    b, given = (ctypes.c_void_p(new(t, *map(ctypes.c_int64, (k, rows)))) for t, rows in ((kind, n), (F32, m)))
    made = ctypes.c_void_p(call("ggml_mul_mat", context, b, given))
    graph = ctypes.c_void_p(call("ggml_new_graph", context))
    call("ggml_build_forward_expand", graph, made)
    ctypes.memmove(call("ggml_get_data", b), weight.data_ptr(), weight.nbytes)

    def mul_mat() -> Any:
        x, result = a.contiguous(), torch.empty(m, n)
        ctypes.memmove(call("ggml_get_data", given), x.data_ptr(), x.nbytes)
        if status := call("ggml_graph_compute_with_ctx", context, graph, torch.get_num_threads()):
            raise RuntimeError(f"ggml_graph_compute_with_ctx returned {status}")
        ctypes.memmove(result.data_ptr(), call("ggml_get_data", made), result.nbytes)
        return result

    weakref.finalize(mul_mat, call, "ggml_free", context)
    return mul_mat


def blocks(codes: Any, scales: Any) -> tuple[int, Any]:
    """The type and the bytes of a weight of codes, (N, K), and scales in f16, (N, K / 32)."""
    import torch

    each, is_q4 = codes.unflatten(1, (-1, 32)), codes.dtype is torch.uint8
    data = each[..., :16] | (each[..., 16:] << 4) if is_q4 else each.view(torch.uint8)
    return (Q4_0 if is_q4 else Q8_0), torch.cat([scales.unsqueeze(-1).view(torch.uint8), data], -1).contiguous()


def bind(problem: Any, t: Any) -> Callable[[], Any] | None:
    """A weight of Q8_0 or Q4_0 by an A that ggml quantises."""
    ggml()  # loaded before anything is judged
    if problem.a_rule != "q8_0" or problem.epilogue or problem.flags or problem.shape.is_empty:
        return None
    return product(*blocks(t["b"], t["scale_b"]), problem.shape.n, t["a"])


def matmul(a: Any, b: Any) -> Any:
    """The product of two f32 matrices."""
    return product(F32, b.mT.contiguous(), b.shape[1], a)() if a.numel() and b.numel() else a @ b


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    how = {"dtypes": ("f32",), "batched": False, "distributions": ("pywhispercpp",)}
    registry.add_callable("ggml", matmul, bind=bind, **how)
