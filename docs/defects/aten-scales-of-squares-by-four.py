"""torch._scaled_mm on CUDA with scales for squares of 128 x 128 of B: cuBLASLt takes the scales of a column of squares by fours.

Two squares along K: the scales of the second 128 columns are read from behind the first's, outside of the tensor where there
are no more columns.  K of a multiple of 512 is right.  Seen on torch 2.15.0+cu132, H100; needs compute capability 9.0 and CUDA
12.9.  Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""
import sys, traceback
import torch

m, n, k = 64, 256, 256
a = torch.ones(m, k, device="cuda").to(torch.float8_e4m3fn)
b = torch.ones(n, k, device="cuda").to(torch.float8_e4m3fn).t()
scale_a = torch.ones(k // 128, m, device="cuda").t()
poison = torch.full((64,), float("nan"), device="cuda")
scale_b = poison.as_strided((k // 128, n // 128), (1, k // 128)).fill_(1)
try:
    c = torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16)
    torch.cuda.synchronize()
except Exception:
    traceback.print_exc()
    sys.exit(2)
wrong = (c != k).any(0)
print(f"{int(wrong.sum())} of {n} columns are wrong")
sys.exit(int(bool(wrong.any())))
