"""torch._int_mm on CUDA of a result of more than 2^31 elements: CUBLAS_STATUS_NOT_SUPPORTED.

Seen on torch 2.15.0+cu132, H100.  Needs a CUDA device with 10 GiB.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys
import torch

a = torch.ones(46352, 64, dtype=torch.int8, device="cuda")
b = torch.ones(46360, 64, dtype=torch.int8, device="cuda").t()
try:
    c = torch._int_mm(a, b)
except RuntimeError as error:
    print(error)
    sys.exit(1)
print("the last element is", int(c[-1, -1]))
