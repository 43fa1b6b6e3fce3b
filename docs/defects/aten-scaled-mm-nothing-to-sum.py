"""torch._scaled_mm on the CPU returns memory that it has not written where K = 0; the sum of nothing is 0.

torch 2.13 on a CPU with AMX.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys
import torch

one, wrong = torch.ones(()), 0
for _ in range(20):
    torch.full((16, 32), float("nan"), dtype=torch.bfloat16)  # what the allocator hands out next
    a = torch.empty(16, 0, dtype=torch.float8_e4m3fn)
    b = torch.empty(32, 0, dtype=torch.float8_e4m3fn).t()
    c = torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    wrong = max(wrong, int((c != 0).sum()))
print(f"{wrong} of 512 elements are not 0")
sys.exit(int(wrong > 0))
