"""FlagGems: addmm with an addend without dimensions raises, where torch.addmm broadcasts it.

Needs flag-gems, torch for CUDA and a GPU.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys

import flag_gems
import torch

a, one = torch.ones(16, 16, device="cuda"), torch.ones((), device="cuda")
try:
    mine = flag_gems.addmm(one, a, a)
    print(f"{mine[0, 0]}, torch {torch.addmm(one, a, a)[0, 0]}")
    sys.exit(int(not torch.equal(mine, torch.addmm(one, a, a))))
except IndexError as error:
    print(f"IndexError: {error}")
    sys.exit(1)
