"""torch.mm in f16 and bf16 on CUDA leaves out what remains of a long K after whole steps of cuBLAS's kernel.

A is 1, and so is B behind the last whole 64 of K: each element has to be K % 64.  Which K show it depends on the version of cuBLAS,
on the GPU and on the strides: the first K and the strides are those of the case that showed it, on torch 2.13.0+cu130, H200.
Found there; by hand, not yet run alone.  Needs torch alone.  Exit status: 1 the failure is there, 0 it is not, 2 something else
went wrong.
"""
import sys
import traceback

import torch

WHOLE = 32768


def short(k, dtype):
    """How many of the products are left out of the worst element."""
    a, b = torch.ones(8, WHOLE, dtype=dtype, device="cuda"), torch.zeros(WHOLE, 16, dtype=dtype, device="cuda")
    b[k - k % 64 : k] = 1
    return k % 64 - int((a[:, :k] @ b[:k]).min())


try:
    lengths = [17928, *range(1032, WHOLE, 64), *range(1040, WHOLE, 256)]
    cut = [(k, dtype, n) for dtype in (torch.float16, torch.bfloat16) for k in lengths if (n := short(k, dtype))]
except Exception:
    traceback.print_exc()
    sys.exit(2)
for k, dtype, n in cut[:20]:
    print(f"8x16x{k} in {dtype}: the last {n} of {k % 64} products behind whole steps are missing")
print(f"{len(cut)} of {2 * len(lengths)} products are wrong")
sys.exit(int(bool(cut)))
