"""torch._scaled_mm on CUDA returns zeros where K = 0, also where it has a bias to add.

Seen on torch 2.13.0+cu130, H200; needs compute capability 8.9.  torch.addmm returns the bias there.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""
import sys
import traceback

import torch

try:
    a = torch.empty(16, 0, dtype=torch.float8_e4m3fn, device="cuda")
    b = torch.empty(32, 0, dtype=torch.float8_e4m3fn, device="cuda").t()
    unit = torch.ones((), device="cuda")
    bias = torch.full((32,), 0.5, dtype=torch.bfloat16, device="cuda")
    c = torch._scaled_mm(a, b, scale_a=unit, scale_b=unit, bias=bias, out_dtype=torch.bfloat16)
    wrong = int((c != bias).sum())
except Exception:
    traceback.print_exc()
    sys.exit(2)
print(f"{wrong} of 512 elements are not the bias")
sys.exit(int(wrong > 0))
