"""torch.compile drops the scale_result of _scaled_mm: an fp8 result is returned unscaled.

torch 2.13.0, 2.14.1 and 2.15.0.  Inductor's lowering of _scaled_mm takes the argument and does not hand it on.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys

import torch

a, b = (torch.full((32, 64), 0.5).to(torch.float8_e4m3fn) for _ in range(2))
one, scale = torch.ones(()), torch.tensor(4.0)


def program(a, b):
    return torch._scaled_mm(a, b.t(), one, one, scale_result=scale, out_dtype=torch.float8_e4m3fn)


eager, compiled = program(a, b).float(), torch.compile(program, fullgraph=True)(a, b).float()
print(f"eager {eager[0, 0]:g}, compiled {compiled[0, 0]:g}")
sys.exit(int(not torch.equal(eager, compiled)))
