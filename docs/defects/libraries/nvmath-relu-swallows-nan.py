"""nvmath-python: the epilogs RELU and RELU_BIAS of cuBLASLt in f16 make 0 of a NaN, those of bf16 and f32 keep it.

Needs nvmath-python, torch for CUDA and a GPU.  Which kernel cuBLASLt chooses depends on the GPU and the shape: on an H200
that of f16 was cutlass_75_wmma_tensorop_f16_s161616gemm_f16_32x32_64x1_tn_align1.  Exit status: 1 the failure is there, 0
it is not.
"""
import sys

import torch
from nvmath.linalg.advanced import MatmulEpilog, matmul

lost = {}
for dtype in (torch.float16, torch.bfloat16, torch.float32):
    a, weight = torch.ones(19, 65, device="cuda", dtype=dtype), torch.ones(49, 65, device="cuda", dtype=dtype)
    a[3, 7] = float("nan")
    bias = {"bias": torch.ones(49, device="cuda", dtype=dtype)}
    result = matmul(weight, a.mT, epilog=MatmulEpilog.RELU_BIAS, epilog_inputs=bias).mT
    lost[dtype] = 49 - int(result[3].isnan().sum())
    print(f"{dtype}: {lost[dtype]} of 49 elements of the row with a NaN are numbers: {result[3, 0]}")
sys.exit(int(any(lost.values())))
