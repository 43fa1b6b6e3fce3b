"""A bf16 product on a CPU with AVX-512 and without AVX512_BF16: an infinity at the end of a row of A makes the row NaN.

K is odd; oneDNN pads it to an even number and multiplies the infinity by the zero of the padding.
ONEDNN_MAX_CPU_ISA=AVX512_CORE shows it on a newer CPU.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys
import torch

wrong = 0
for k in (7, 127, 128):
    a, b = torch.ones(17, k, dtype=torch.bfloat16), torch.ones(k, 65, dtype=torch.bfloat16)
    a[3, -1] = float("inf")
    for name, c in (("mm", torch.mm(a, b)), ("bmm", torch.bmm(a.expand(4, 17, k), b.expand(4, k, 65)))):
        count = int(c.isnan().sum())
        wrong += count
        print(f"{name} with K = {k}: {count} elements are NaN, expected none and {int((c.float() == torch.inf).sum()) + count} infinities")
sys.exit(int(wrong > 0))
