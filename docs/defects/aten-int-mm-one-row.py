"""torch._int_mm is wrong for an A of one row that is a transposed column: its strides are (1, 1).

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
sys.exit(int(wrong > 0))
