"""FlagGems: mm of empty matrices asserts on Hopper, where torch.mm returns an empty result or zeros.

Needs flag-gems, torch for CUDA and a Hopper GPU.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys

import flag_gems
import torch

failed = 0
for m, n, k in ((0, 16, 16), (16, 0, 16), (16, 16, 0)):
    a, b = (torch.ones(shape, device="cuda", dtype=torch.float16) for shape in ((m, k), (k, n)))
    try:
        right = torch.equal(flag_gems.mm(a, b), torch.mm(a, b))
        print(f"{m} x {n} x {k}: {'as torch.mm' if right else 'not as torch.mm'}")
    except Exception as error:
        right = False
        print(f"{m} x {n} x {k}: {type(error).__name__}: {error}")
    failed += not right
sys.exit(int(failed > 0))
