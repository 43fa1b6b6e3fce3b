"""ONNX Runtime's products on the CPU (MLAS) as the backend ``onnxruntime``.

Requirements: onnxruntime onnx
Run: PYTHONPATH=examples pytest -p onnxruntime_backend --pyargs pytest_gemm.conformance --gemm-backends=onnxruntime

https://onnx.ai/onnx/operators/ defines MatMul, MatMulInteger (int32 sums) and QLinearMatMul (rounded to nearest even,
saturated).  MatMulNBits of com.microsoft (ContribOperators.md) decodes blocks of K to f32 and multiplies in f32: one
more rounding for each weight.  B is an initializer, as in a model: MLAS packs it when the session is made.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pytest_gemm.api.callable import CallableBackend, CallablePrepared
from pytest_gemm.numerics.contract import Contract

BLOCK = 32  # of MatMulNBits; every block of a column has that column's scale


def run(op: str, a: Any, constants: dict[str, Any], **attributes: int) -> Any:
    """The result of a model of one operator, of which A alone is an input."""
    import onnxruntime
    import torch
    from onnx import helper, numpy_helper

    a, weights = a.numpy(), [numpy_helper.from_array(np.ascontiguousarray(x), name) for name, x in constants.items()]
    domain = "com.microsoft" if op == "MatMulNBits" else ""
    node = helper.make_node(op, ["a", *constants], ["c"], domain=domain, **attributes)
    given = helper.make_tensor_value_info("a", helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
    graph = helper.make_graph([node], "product", [given], [helper.make_empty_tensor_value_info("c")], weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    made = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return torch.from_numpy(made.run(None, {"a": np.ascontiguousarray(a)})[0])


def matmul(a: Any, b: Any) -> Any:
    """MatMul, or of integers MatMulInteger."""
    return run("MatMul" if a.is_floating_point() else "MatMulInteger", a, {"b": b.numpy()})


class OnnxRuntimePrepared(CallablePrepared):
    """QLinearMatMul or MatMulNBits in place of the program; where neither fits, the product alone."""

    def run(self, operands: Any) -> Any:
        """Compute the problem."""
        t, p = self.arguments(operands), self.problem
        plain = not p.epilogue and not p.flags
        if plain and p.op.name == "qlinear" and p.dtypes.a == p.dtypes.out and p.step("static"):
            (sa, za), (sc, zc), column = p.step("static").numbers, p.step("requant").numbers, t["scale_b"].numpy()
            kind, zero = np.dtype(p.dtypes.a.torch_name).type, np.zeros_like(column, np.int8)
            after_a = {"as": np.float32(sa), "az": kind(za), "b": t["b"].mT.numpy(), "bs": column, "bz": zero}
            return run("QLinearMatMul", t["a"], {**after_a, "cs": np.float32(sc), "cz": kind(zc)})
        if plain and p.op.name == "woq_int8" and p.dtypes.a.name == "f32":
            self.contract = Contract("f32", "fused", input_error=2.0**-24)
            n, k = t["b"].shape
            codes = np.full((n, -(-k // BLOCK) * BLOCK), 128, np.uint8)
            codes[:, :k] = t["b"].numpy().view(np.uint8) ^ 128
            scales = np.repeat(t["scale"].numpy().reshape(-1, 1), codes.shape[1] // BLOCK, 1)
            constants = {"b": codes.reshape(n, -1, BLOCK), "s": scales}
            return run("MatMulNBits", t["a"], constants, K=k, N=n, bits=8, block_size=BLOCK)
        return super().run(operands)


class OnnxRuntimeBackend(CallableBackend):
    """The backend."""

    def prepare(self, problem: Any, operands: Any, request: Any = None) -> OnnxRuntimePrepared:
        """Import the library, which reads the environment and draws random numbers, and compile nothing."""
        __import__("onnx"), __import__("onnxruntime")
        return OnnxRuntimePrepared(self, problem)


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    needs = ("onnxruntime", "onnx")
    registry.add(OnnxRuntimeBackend("onnxruntime", matmul, ("f32", "f64", "u8", "i8"), distributions=needs))
