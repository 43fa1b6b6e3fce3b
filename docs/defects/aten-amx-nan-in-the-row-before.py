"""A NaN at the start of a row of A reaches the row before it: a product in bf16 by oneDNN on AMX, K no multiple of 32.

torch 2.11 and 2.13 on a CPU with AMX; https://github.com/uxlfoundation/oneDNN/issues/5717.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import itertools, sys
import torch

wrong = 0
for m, n, k in itertools.product((17, 33, 64), (48, 65), (33, 65, 127)):
    a, b = torch.rand(m, k).bfloat16(), torch.rand(k, n).bfloat16()
    a[m // 2, 0] = float("nan")
    with torch.no_grad():
        rows = (a @ b).isnan().any(1).nonzero().flatten().tolist()
    if rows != [m // 2]:
        wrong += 1
        print(f"{m}x{n}x{k}: NaN in row {m // 2} of A, and in rows {rows} of the result")
sys.exit(int(wrong > 0))
