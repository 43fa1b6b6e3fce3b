"""OpenVINO on a CPU: a MatMul by a constant with K = 0 returns uninitialised memory, not zeros.

Needs openvino alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys

import numpy as np
import openvino as ov
from openvino import opset13 as ops

found = []
for constant in (False, True):
    x, w = ops.parameter([64, 0], ov.Type.f32), np.zeros((0, 64), np.float32)
    y = ops.constant(w) if constant else ops.parameter([0, 64], ov.Type.f32)
    model = ov.Model([ops.matmul(x, y, False, False)], [x] if constant else [x, y])
    compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for _ in range(8):
        junk = np.full((64, 64), 7.0, np.float32)
        del junk
        made = compiled([np.zeros((64, 0), np.float32), w][: 1 if constant else 2])[0]
        found.append((constant, int((made != 0).sum())))
    print(f"{'constant' if constant else 'input'}: elements that are not 0, in 8 calls: {[n for _, n in found[-8:]]}")
sys.exit(int(any(n for _, n in found)))
