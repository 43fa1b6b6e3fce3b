"""quack-kernels: gemm_act without elements to sum (K = 0) leaves out bias and C.

Its docstring says act(alpha * A @ B + C + bias); gemm and gemm_add of the same operands keep theirs.  It returns before
a launch, so CPU tensors show it.  Needs quack-kernels (and the torch that it needs) alone.  Exit status: 1 the failure
is there, 0 it is not.
"""
import sys

import torch
from quack.gemm_interface import gemm, gemm_act

a, b = torch.zeros(4, 0, dtype=torch.float16), torch.zeros(0, 8, dtype=torch.float16)
bias, c = torch.ones(8, dtype=torch.float16), torch.ones(4, 8, dtype=torch.float16)
plain = gemm(a, b, bias=bias, tuned=False)
with_bias = gemm_act(a, b, bias=bias, activation="relu", store_preact=False, tuned=False)[1]
with_c = gemm_act(a, b, C=c, activation="relu", store_preact=False, tuned=False)[1]
print(f"gemm with a bias of 1: {plain[0, 0]}; gemm_act: {with_bias[0, 0]}; gemm_act with C of 1: {with_c[0, 0]}")
sys.exit(int(not (torch.equal(with_bias, c) and torch.equal(with_c, c))))
