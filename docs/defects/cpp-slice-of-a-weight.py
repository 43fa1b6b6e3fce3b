"""A frozen weight that the program slices is packed from its storage's beginning: every element is wrong.

torch 2.13.0 and 2.15.0, CPU, f32.  Three projections that share one fused weight and split it in forward() are such programs.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys

import torch
import torch._inductor.config

OPTIONS = {"max_autotune": True, "max_autotune_gemm_backends": "CPP", "freezing": True}


class Second(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3 * 64, 128), requires_grad=False)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight[64:128])


torch.manual_seed(0)
module, x = Second(), torch.randn(17, 128)
with torch.no_grad(), torch._inductor.config.patch(OPTIONS):
    actual = torch.compile(module)(x)
error = float((actual - module(x)).abs().max())
print(f"the largest error is {error:.3g}")
sys.exit(int(error > 0.01))
