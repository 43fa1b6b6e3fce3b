"""OpenVINO on a CPU: compile_model with CPU_DENORMALS_OPTIMIZATION leaves FTZ and DAZ set in the thread that called it.

numpy flushes subnormal numbers afterwards, and so does a model that is compiled later without the option.  Needs openvino
alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys

import numpy as np
import openvino as ov
from openvino import opset13 as ops

BIG, SMALL = np.full((1, 1), 1e38, np.float32), np.full((1, 1), 1e-39, np.float32)


def compiled(**options):
    x, y = (ops.parameter([1, 1], ov.Type.f32) for _ in range(2))
    model = ov.Model([ops.matmul(x, y, False, False)], [x, y])
    return ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32", **options})


def products():
    return (BIG * SMALL).item(), compiled()([BIG, SMALL])[0].item()


before = products()
compiled(CPU_DENORMALS_OPTIMIZATION="YES")
after = products()
print(f"1e38 * 1e-39 by numpy and by a model without the option: {before} before, {after} after")
sys.exit(int(after != before))
