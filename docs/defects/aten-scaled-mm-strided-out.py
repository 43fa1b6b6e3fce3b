"""torch._scaled_mm on the CPU with out=: the strides of the given tensor are ignored, as if it were contiguous.

torch 2.13 on a CPU with AMX.  A tensor stored by columns gets its own transpose's elements; of one that is a part of a
wider one the rows are written into the gap, over memory of others.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys
import torch

one, wrong = torch.ones(()), 0
a = torch.arange(6.0).view(3, 2).to(torch.float8_e4m3fn)
b = torch.eye(2).to(torch.float8_e4m3fn)  # the product is A
for name, out in (("stored by columns", torch.zeros(2, 3).t()), ("columns 0 and 1 of 4", torch.zeros(3, 4)[:, :2])):
    torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.float32, out=out)
    print(f"{name}: {out.tolist()}, expected {a.float().tolist()}")
    wrong += not torch.equal(out, a.float())
sys.exit(int(wrong > 0))
