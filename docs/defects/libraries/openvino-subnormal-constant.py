"""OpenVINO on a CPU: subnormal numbers of a constant become zeros although CPU_DENORMALS_OPTIMIZATION is off.

Needs openvino alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys

import numpy as np
import openvino as ov
from openvino import opset13 as ops

big, small = np.full((1, 1), 1e38, np.float32), np.full((1, 1), 1e-39, np.float32)
options = {"INFERENCE_PRECISION_HINT": "f32", "CPU_DENORMALS_OPTIMIZATION": "NO"}
x, y = ops.parameter([1, 1], ov.Type.f32), ops.parameter([1, 1], ov.Type.f32)
inputs = ov.Core().compile_model(ov.Model([ops.matmul(x, y, False, False)], [x, y]), "CPU", options)
x = ops.parameter([1, 1], ov.Type.f32)
constant = ov.Core().compile_model(ov.Model([ops.matmul(x, ops.constant(small), False, False)], [x]), "CPU", options)
made = [inputs([big, small])[0].item(), constant([big])[0].item()]
print(f"1e38 * 1e-39 with two inputs: {made[0]}, with a constant: {made[1]}; exact: {1e38 * float(small[0, 0])}")
sys.exit(int(abs(made[1] - 0.1) > 1e-3))
