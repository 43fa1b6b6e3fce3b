"""torch.baddbmm in bf16 and f16 with alpha = 0 ignores beta; with beta = 0 it returns memory that it has not written.

torch 2.13 on a CPU with AMX; f32 is right.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys
import torch

wrong = 0
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    bias, a, b = (torch.ones(3, *shape, dtype=dtype) for shape in ((18, 33), (18, 41), (41, 33)))
    for beta in (0.5, 0.0):
        torch.full((3, 18, 33), 7.0, dtype=dtype)  # what the allocator hands out next
        c = torch.baddbmm(bias, a, b, alpha=0.0, beta=beta)
        if bool((c != beta).any()):
            wrong += 1
            print(f"{dtype}, beta {beta}: {int((c != beta).sum())} of {c.numel()} elements are wrong, the first is {c.flatten()[0]}")
sys.exit(int(wrong > 0))
