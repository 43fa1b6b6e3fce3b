"""LiteRT's FULLY_CONNECTED and BATCH_MATMUL on the CPU (XNNPACK) as the backend ``litert``.

Requirements: ai-edge-litert
Run: PYTHONPATH=examples pytest -p litert_backend --pyargs pytest_gemm.conformance --gemm-backends=litert

FULLY_CONNECTED is a product with a weight of N x K, which is a constant here (XNNPACK packs it), and a batch goes to
BATCH_MATMUL as two inputs; their sums are in f32 (https://ai.google.dev/edge/litert/models/ops_compatibility).  While
a model runs subnormal numbers count as zeros, as the comment of Interpreter::Invoke says
(https://github.com/tensorflow/tensorflow/blob/master/tensorflow/lite/core/interpreter.cc).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.core.outcome import Unsupported


def run(op: str, given: list[Any], shapes: list[Any]) -> Any:
    """The result of a model of one operator: its inputs, of which the second is a constant where the op has one."""
    import flatbuffers
    import torch
    from ai_edge_litert import schema_py_generated as schema
    from ai_edge_litert.interpreter import Interpreter

    model, graph, code, operator = schema.ModelT(), schema.SubGraphT(), schema.OperatorCodeT(), schema.OperatorT()
    constant = op == "FULLY_CONNECTED"
    model.version, model.buffers, model.subgraphs, model.operatorCodes = 3, [schema.BufferT()], [graph], [code]
    code.builtinCode = code.deprecatedBuiltinCode = getattr(schema.BuiltinOperator, op)
    operator.inputs, operator.outputs = [0, 1], [2]
    name = "FullyConnectedOptions" if constant else "BatchMatMulOptions"
    operator.builtinOptionsType = getattr(schema.BuiltinOptions, name)
    operator.builtinOptions = getattr(schema, f"{name}T")()
    graph.operators, graph.outputs, graph.inputs, graph.tensors = [operator], [2], [0] if constant else [0, 1], []
    for index, shape in enumerate(shapes):
        tensor = schema.TensorT()
        tensor.shape, tensor.type, tensor.buffer, tensor.name = list(shape), schema.TensorType.FLOAT32, 0, str(index)
        graph.tensors.append(tensor)
    if constant:
        model.buffers.append(schema.BufferT())
        model.buffers[1].data, graph.tensors[1].buffer = np.ascontiguousarray(given[1]).view(np.uint8).ravel(), 1
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    made = Interpreter(model_content=bytes(builder.Output()), num_threads=torch.get_num_threads())
    made.allocate_tensors()
    for index in graph.inputs:
        made.set_tensor(index, np.ascontiguousarray(given[index]))
    made.invoke()
    return torch.from_numpy(made.get_tensor(2))


def matmul(a: Any, b: Any) -> Any:
    """The product of two matrices or of two batches of them."""
    op, weight = ("FULLY_CONNECTED", b.mT) if b.dim() == 2 else ("BATCH_MATMUL", b)
    return run(op, [a.numpy(), weight.numpy()], [a.shape, weight.shape, (*a.shape[:-1], b.shape[-1])])


class LiteRtBackend(CallableBackend):
    """The backend."""

    devices = ("cpu",)

    def supports(self, problem: Any, request: Any = None) -> Unsupported | None:
        """All but empty batches."""
        if problem.shape.batch is not None and (problem.shape.is_empty or problem.shape.k == 0):
            return Unsupported("empty", "XNNPACK fails to reshape an empty batch")
        return super().supports(problem)


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    how: dict[str, Any] = {"distributions": ("ai-edge-litert",), "imports": ("ai_edge_litert.interpreter",)}
    registry.add(LiteRtBackend("litert", matmul, ("f32",), flushes=True, **how))
