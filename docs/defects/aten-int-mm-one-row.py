"""torch._int_mm is wrong for an A or a B of one row whose strides are (1, 1), as those of a transposed column are.

torch 2.13 on a CPU with AMX; with any instruction set that ONEDNN_MAX_CPU_ISA asks for.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import itertools, sys
import torch

wrong = 0
for m, n, k in itertools.product((1, 2), (8, 35), (2, 64)):
    a = torch.randint(-128, 128, (k, m), dtype=torch.int8).t()
    b = torch.randint(-128, 128, (k, n), dtype=torch.int8)
    count = int((torch._int_mm(a, b) != a.int() @ b.int()).sum())
    if count:
        wrong += 1
        print(f"{m}x{n}x{k}: {count} of {m * n} elements are wrong")
a, b = torch.randint(-128, 128, (10, 1), dtype=torch.int8), torch.randint(-128, 128, (10, 1), dtype=torch.int8).t()
count = int((torch._int_mm(a, b) != a.int() @ b.int()).sum())
if count:
    wrong += 1
    print(f"10x10x1: {count} of 100 elements are wrong")
sys.exit(int(wrong > 0))
