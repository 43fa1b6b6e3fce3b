"""A sum of two bf16 products on a CPU with AVX-512 and without AVX512_BF16: an infinity at the end of either half makes the row NaN.

As aten-bf16-odd-k: A's halves are slices of 65 columns, and oneDNN pads each to an even number and multiplies the infinity
by the zero of the padding.
ONEDNN_MAX_CPU_ISA=AVX512_CORE shows it on a newer CPU.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys
import torch

wrong = 0
for k in (130, 132):
    for end in (k // 2 - 1, k - 1):
        a, b = torch.ones(33, k, dtype=torch.bfloat16), torch.ones(k, 65, dtype=torch.bfloat16)
        a[3, end] = float("inf")
        c = a[:, : k // 2] @ b[: k // 2] + a[:, k // 2 :] @ b[k // 2 :]
        count = int(c.isnan().sum())
        wrong += count
        print(f"K = 2 x {k // 2}, infinity in column {end}: {count} elements are NaN, expected none and {int((c == torch.inf).sum()) + count} infinities")
sys.exit(int(wrong > 0))
