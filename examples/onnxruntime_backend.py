"""ONNX Runtime's products on the CPU (MLAS), with bias and steps as one model, as the backend ``onnxruntime``.

Requirements: onnxruntime onnx
Run: PYTHONPATH=examples pytest -p onnxruntime_backend --pyargs pytest_gemm.conformance --gemm-backends=onnxruntime

https://onnx.ai/onnx/operators/ defines MatMul, MatMulInteger (int32 sums) and QLinearMatMul (rounded to nearest even,
saturated).  MatMulNBits of com.microsoft (ContribOperators.md) decodes blocks of K to f32 and multiplies in f32: one
more rounding for each weight.  B is an initializer, as in a model: MLAS packs it when the session is made.  A problem
of f32 or f16 is one model (``onnx_graph.py``); in f16 a node converts to f32 and back, or several do together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from onnx_graph import Graph, session, takes

from pytest_gemm.api.callable import CallableBackend, CallablePrepared, plain
from pytest_gemm.api.proof import Proof
from pytest_gemm.numerics.contract import Contract


def model(op: str, constants: dict[str, Any], **attributes: int) -> Callable[[Any], Any]:
    """A model of one operator, of which A alone is an input.  A session, of a type of A, packs the constants."""
    import onnxruntime
    import torch
    from onnx import helper, numpy_helper

    @functools.cache
    def made(kind: Any, rank: int) -> Any:
        weights = [numpy_helper.from_array(np.ascontiguousarray(x), name) for name, x in constants.items()]
        domain = "com.microsoft" if op == "MatMulNBits" else ""
        node = helper.make_node(op, ["a", *constants], ["c"], domain=domain, **attributes)
        given = helper.make_tensor_value_info("a", helper.np_dtype_to_tensor_dtype(kind), [None] * rank)
        graph = helper.make_graph([node], "product", [given], [helper.make_empty_tensor_value_info("c")], weights)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        text = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
        return onnxruntime.InferenceSession(text, providers=["CPUExecutionProvider"])

    def run(a: Any) -> Any:
        return torch.from_numpy(made(a.numpy().dtype, a.ndim).run(None, {"a": a.contiguous().numpy()})[0])

    return run


def n_bits(problem: Any, t: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]] | None:
    """The constants and the attributes of MatMulNBits, of codes with a scale for each block of K; else ``None``."""
    has_other = problem.step("nf4") or problem.step("inside") or problem.dtypes.a.name == "bf16"
    if problem.op.name not in {"woq", "woq_int8"} or has_other:
        return None
    size = problem.group_size if problem.step("group") else 32  # a column's scale is that of each of its blocks
    codes, (n, k), bits = t["b"].numpy(), t["b"].shape, 4 if problem.dtypes.b.name == "i4" else 8
    blocks = -(-k // size)
    codes = codes.view(np.uint8) ^ 128 if codes.dtype == np.int8 else codes
    scales = t["scale"][:, None] if "scale" in t else t["scale_b"]
    weight = {"b": np.pad(codes, ((0, 0), (0, blocks * size - k))).reshape(n, blocks, size)}
    weight["s"] = np.ascontiguousarray(scales.expand(n, blocks).numpy())
    if "zero_b" in t:
        zeros = t["zero_b"].expand(n, blocks).numpy().view(np.uint8)
        weight["z"] = zeros ^ 128 if problem.dtypes.b.name == "i8" else zeros
    if bits == 4:  # two in a byte, the first one its lower half
        odd = {"z": np.pad(weight["z"], ((0, 0), (0, blocks % 2)))} if "z" in weight else {}
        pairs = {name: x[..., ::2] | x[..., 1::2] << 4 for name, x in {"b": weight["b"], **odd}.items()}
        weight = {**weight, **pairs}
    return weight, {"K": k, "N": n, "bits": bits, "block_size": size}


class OnnxRuntimePrepared(CallablePrepared):
    """One model, QLinearMatMul or MatMulNBits in place of the program; where none fits, the product alone."""

    fused: bool | None = None

    def bind(self, operands: Any) -> Callable[[], Any]:
        """Make the session, and return its run."""
        import torch

        t, p = self.arguments(operands), self.problem
        if not p.epilogue and not p.flags and p.step("static") and p.dtypes.a == p.dtypes.out:
            (sa, za), (sc, zc), column = p.step("static").numbers, p.step("requant").numbers, t["scale_b"].numpy()
            kind, zero = np.dtype(p.dtypes.a.torch_name).type, np.zeros_like(column, np.int8)
            after_a = {"as": np.float32(sa), "az": kind(za), "b": t["b"].mT.numpy(), "bs": column, "bz": zero}
            product = model("QLinearMatMul", {**after_a, "cs": np.float32(sc), "cz": kind(zc)})
            return functools.partial(self.own(product, "QLinearMatMul"), t["a"])
        if plain(p) and not p.epilogue and (weight := n_bits(p, t)):
            self.contract = Contract("f32", "fused", input_error=2.0**-24)
            return functools.partial(self.own(model("MatMulNBits", weight[0], **weight[1]), "MatMulNBits"), t["a"])
        if takes(p):
            self.contract = Contract("f32", "fused" if p.dtypes.a.name == "f32" else "either")
            run, name, is_one_node = session(Graph(p, t))
            own, self.fused = self.own(run, name), is_one_node if p.epilogue else None
            return lambda: torch.from_numpy(own())
        return super().bind(operands)

    def proof(self) -> Proof:
        """What the optimised model executes, and whether one node does all of it."""
        return dataclasses.replace(super().proof(), fused=self.fused)


class OnnxRuntimeBackend(CallableBackend):
    """The backend."""

    def prepare(self, problem: Any, operands: Any, request: Any = None) -> OnnxRuntimePrepared:
        """Import the library, which reads the environment and draws random numbers, and compile nothing."""
        __import__("onnx"), __import__("onnxruntime")
        return OnnxRuntimePrepared(self, problem)


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    facts: Any = {"dtypes": ("f32", "f64", "f16", "u8", "i8"), "distributions": ("onnxruntime", "onnx")}
    facts["pack"] = lambda b: model("MatMul" if b.is_floating_point() else "MatMulInteger", {"b": b.numpy()})
    registry.add(OnnxRuntimeBackend("onnxruntime", lambda a, packed: packed(a), **facts))
