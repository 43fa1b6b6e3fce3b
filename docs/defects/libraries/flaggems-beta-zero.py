"""FlagGems: addmm and baddbmm with beta = 0 multiply the addend, and its NaN reaches the result.

torch.addmm ignores it ("if beta is 0, then the content of input will be ignored").  Needs flag-gems, torch for CUDA and a
GPU.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys

import flag_gems
import torch

a = torch.ones(2, 16, 16, device="cuda", dtype=torch.bfloat16)
c = torch.full_like(a, float("nan"))
found = {
    "addmm": (flag_gems.addmm(c[0], a[0], a[0], beta=0), torch.addmm(c[0], a[0], a[0], beta=0)),
    "baddbmm": (flag_gems.baddbmm(c, a, a, beta=0), torch.baddbmm(c, a, a, beta=0)),
}
for name, (mine, wanted) in found.items():
    print(f"{name}: {int(mine.isnan().sum())} of {mine.numel()} elements are NaN; torch: {int(wanted.isnan().sum())}")
sys.exit(int(any(mine.isnan().any() for mine, _ in found.values())))
