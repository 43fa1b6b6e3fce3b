"""torch.compile of addmm with out_dtype=torch.float32 ends the compile: tuned_addmm() takes 3 positional arguments.

torch 2.13.0, 2.14.1 and 2.15.0.  Inductor's lowering of addmm is registered for the overload too, and lacks its argument.
Eager PyTorch has the overload on CUDA only; the compile fails on any device, before anything runs.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
bias = torch.randn(64, device=device)
a, b = (torch.randn(*shape, device=device).bfloat16() for shape in ((33, 128), (128, 64)))


@torch.compile(fullgraph=True)
def program(bias, a, b):
    return torch.addmm(bias, a, b, out_dtype=torch.float32)


try:
    program(bias, a, b)
except Exception as error:
    print(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    sys.exit(int("tuned_addmm" in str(error)))
sys.exit(0)
