"""torch.bmm on CUDA with K = 1: offsets of 32 bits, and the last of so many matrices are never written.

pytorch/pytorch pull 196431: torch 2.13 and 2.14.1.  8209 results of 512 x 512 are 2^31 elements and 17 matrices.
Needs torch and a CUDA device with 10 GiB.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys
import torch

batch, m, n = 8209, 512, 512
a, b = torch.ones(batch, m, 1, device="cuda"), torch.ones(batch, 1, n, device="cuda")
poison = torch.full((batch, m, n), float("nan"), device="cuda")  # what the allocator hands out next
del poison
c = torch.bmm(a, b)
wrong = [i for i in range(batch) if not bool((c[i] == 1).all())]
print(f"{len(wrong)} of {batch} matrices are wrong" + (f", from {wrong[0]} to {wrong[-1]}" if wrong else ""))
sys.exit(int(bool(wrong)))
