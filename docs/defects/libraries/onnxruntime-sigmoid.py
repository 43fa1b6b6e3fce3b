"""Sigmoid and QuickGelu of ONNX Runtime in f32 on a CPU have an absolute error: sigmoid(-17.929) is 5.5 times too large.

Needs onnx and onnxruntime.  Exit status: 1 the failure is there, 0 it is not.
"""

import math
import sys

import numpy as np
import onnxruntime
from onnx import helper

x = np.array([-17.929, -9.98, -4.896], np.float32)
given, made = helper.make_tensor_value_info("x", 1, x.shape), helper.make_empty_tensor_value_info("y")
graph = helper.make_graph([helper.make_node("Sigmoid", ["x"], ["y"])], "sigmoid", [given], [made])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
found = session.run(None, {"x": x})[0]
worst = 0.0
for one, value in zip(x.tolist(), found.tolist(), strict=True):
    exact = 1.0 / (1.0 + math.exp(-one))
    worst = max(worst, abs(value - exact) / exact)
    print(f"sigmoid({one:.3f}) is {value:.6e}, exactly {exact:.6e}: off by {abs(value - exact) / exact:.2g}")
sys.exit(int(worst > 1e-5))
