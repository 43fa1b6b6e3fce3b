"""torch._scaled_mm into fp8 on a CPU with AVX512-FP16 rounds twice: the f32 sum to f16, and that to fp8.

Sums and scales are exact here up to the store.  Needs torch alone, and a CPU with AVX512-FP16.
Exit status: 1 the failure is there, 0 it is not.
"""
import sys

import torch

fp8 = torch.float8_e4m3fn
a = torch.zeros(16, 64)
a[:, 0], a[:, 1], a[:, 2] = 1, 2.0**-4, 2.0**-9
b = torch.zeros(16, 64)
b[:, 0], b[:, 1], b[:, 2] = 1, 1, 2.0**-3
one = torch.ones(())
made = torch._scaled_mm(a.to(fp8), b.to(fp8).t(), one, one, out_dtype=fp8).float()
exact = a.double() @ b.double().t()
once, twice = exact.float().to(fp8).float(), exact.half().to(fp8).float()
print(f"{exact[0, 0]:.8g} becomes {made[0, 0]:g}; rounded once it is {once[0, 0]:g}, through f16 {twice[0, 0]:g}")
sys.exit(int(not torch.equal(made, once)))
