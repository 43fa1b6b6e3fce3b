"""OpenVINO on a CPU: a MatMul in bf16 by a constant without columns does not compile; in f32 it does.

Needs openvino alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys

import openvino as ov
from openvino import opset13 as ops

failed = 0
for kind in ("f32", "bf16"):
    dtype = getattr(ov.Type, kind)
    x, w = ops.parameter([16, 16], dtype), ops.constant(ov.Tensor(dtype, [16, 0]))
    try:
        ov.Core().compile_model(ov.Model([ops.matmul(x, w, False, False)], [x]), "CPU", {"INFERENCE_PRECISION_HINT": kind})
        print(f"{kind}: compiles")
    except RuntimeError as error:
        print(f"{kind}: {str(error).strip().splitlines()[-1]}")
        failed += 1
sys.exit(int(failed > 0))
