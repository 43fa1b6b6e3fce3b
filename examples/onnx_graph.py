"""A problem as one ONNX model for ONNX Runtime, and what its graph optimisation fused; of ``onnxruntime_backend``.

https://onnx.ai/onnx/operators/ defines the nodes.  The optimisations are those of
https://onnxruntime.ai/docs/performance/model-optimizations/graph-optimizations.html, all of them as by default: the
optimised model, which a session writes to a file, names the nodes that run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

OPS = {"mm", "addmm", "bmm", "baddbmm", "linear"}
# Words of flags that say where an operand lies, and not what is computed of it.
LAYOUTS = {"padded", "offset", "argument", "constant", "parameter", "dynamic"}
NODES = {"relu": "Relu", "gelu": "Gelu", "gelu_tanh": "Gelu", "sigmoid": "Sigmoid", "tanh": "Tanh", "exp": "Exp"}
NODES |= {"silu": "Sigmoid", "hardswish": "HardSwish", "hardsigmoid": "HardSigmoid", "leaky_relu": "LeakyRelu"}
NODES |= {"clamp": "Clip", "scale": "Mul", "cast": "Cast", "alpha": "Mul", "beta": "Mul", "bias": "Add"}
NODES |= {"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div"}
Session = Callable[..., Any]


def takes(problem: Any) -> bool:
    """Whether this file has a graph of the problem."""
    has_rest = {flag.partition(".")[2] for flag in problem.flags} - LAYOUTS or problem.autocast or problem.widens
    known = all(step.name in NODES and step.extent != "at" for step in problem.epilogue)
    types = str(problem.dtypes) in {"f32", "f16"} and problem.result_dtype.name in {"f32", "f16"}
    return problem.op.name in OPS and not has_rest and known and types


class Graph:
    """The nodes of a problem, its constants (weight, bias) and its inputs (A and the residuals), as numpy's arrays."""

    def __init__(self, problem: Any, tensors: dict[str, Any]) -> None:
        self.nodes: list[Any] = []
        arrays = {name: x.contiguous().numpy() for name, x in tensors.items()}
        self.constants = {name: arrays.pop(name) for name in ("b", "bias") if name in arrays}
        self.inputs, self.value, self.kind = arrays, "", self.constants["b"].dtype
        owns = "bias" in self.constants and (problem.op.addend or problem.op.own_bias)
        if owns and problem.shape.batch is None:
            factors = {"alpha": problem.alpha, "beta": problem.beta, "transB": int(problem.op.weight)}
            self.add("Gemm", "a", "b", "bias", **factors)
        else:
            if problem.op.weight:
                self.constants["b"] = np.ascontiguousarray(self.constants["b"].T)
            self.add("MatMul", "a", "b")
            if owns:
                self._addend(problem)
        residuals = iter([name for name in self.inputs if name != "a"])
        for step in problem.chain:
            self._step(step, residuals)

    def add(self, op: str, *inputs: str, **attributes: Any) -> None:
        """Append a node, whose result is then the value."""
        from onnx import helper

        self.value = f"x{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [self.value], **attributes))

    def constant(self, number: float) -> str:
        """The name of a constant without dimensions."""
        name = f"k{len(self.constants)}"
        self.constants[name] = np.array(number, self.kind)
        return name

    def _addend(self, problem: Any) -> None:
        self.add("Mul", self.value, self.constant(problem.alpha))
        if problem.beta:
            before = self.value
            self.add("Mul", "bias", self.constant(problem.beta))
            self.add("Add", before, self.value)

    def _step(self, step: Any, residuals: Any) -> None:
        before, op = self.value, NODES[step.name]
        if step.name == "cast":
            self.kind = np.dtype(step.dtype.torch_name)
            self.add(op, before, to={"f32": 1, "f16": 10}[step.dtype.name])
        elif step.name in {"bias", "add", "sub", "mul", "div"}:
            self.add(op, before, "bias" if step.name == "bias" else next(residuals))
        elif op in {"Clip", "Mul"}:
            self.add(op, before, *map(self.constant, step.numbers))
        else:
            own = {"Gelu": {"approximate": "tanh" if step.name == "gelu_tanh" else "none"}}
            own |= {"HardSigmoid": {"alpha": 1 / 6, "beta": 0.5}, "LeakyRelu": {"alpha": sum(step.numbers)}}
            self.add(op, before, **own.get(op, {}))
        if step.name == "silu":
            self.add("Mul", before, self.value)


def session(graph: Graph) -> tuple[Session, str, bool]:
    """The run of an optimised model, the names of its nodes, and whether one node computes everything."""
    import onnx
    import onnxruntime
    from onnx import helper, numpy_helper

    kind = helper.np_dtype_to_tensor_dtype
    given = [helper.make_tensor_value_info(name, kind(x.dtype), x.shape) for name, x in graph.inputs.items()]
    weights = [numpy_helper.from_array(x, name) for name, x in graph.constants.items()]
    made = helper.make_graph(graph.nodes, "problem", given, [helper.make_empty_tensor_value_info(graph.value)], weights)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath, options.log_severity_level = str(Path(folder, "optimised.onnx")), 3
        own = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        ran = onnx.load(options.optimized_model_filepath).graph.node
    names = list(map(_named, ran))
    computing = [name for name in names if name not in {"Cast", "Reshape"}]
    return lambda: own.run(None, graph.inputs)[0], f"graph: {', '.join(names)}", len(computing) == 1


def _named(node: Any) -> str:
    """A node with the activation that was fused into it."""
    fused: Iterable[str] = [one.s.decode() for one in node.attribute if one.name == "activation"]
    return node.op_type + "".join(f"({one})" for one in fused)
