"""A NaN in the gap between two rows of A reaches the result: a product in bf16 by oneDNN on AMX, K no multiple of 32.

torch 2.13 on a CPU with AMX; https://github.com/uxlfoundation/oneDNN/issues/5717.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import itertools, sys
import torch

wrong = 0
for m, n, k in itertools.product((17, 33), (48, 65), (33, 65, 127)):
    wide = torch.full((m, k + 8), float("nan")).bfloat16()
    a, b = wide[:, :k], torch.rand(k, n).bfloat16()
    a.copy_(torch.rand(m, k))
    with torch.no_grad():
        count = int((a @ b).isnan().sum())
    if count:
        wrong += 1
        print(f"{m}x{n}x{k}: {count} of {m * n} elements are NaN")
sys.exit(int(wrong > 0))
