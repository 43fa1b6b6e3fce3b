"""Inductor's Triton mm addresses a result of 2^32 elements in 32 bits.

pytorch/pytorch issue 189054: torch 2.11.  An address that has lost its upper bits is another row, or no memory at all.
Needs torch, triton and a CUDA device with 12 GiB.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys
import torch

torch._inductor.config.max_autotune = True
torch._inductor.config.max_autotune_gemm_backends = "TRITON"
m, n, k = 32768, 131072, 1024
a = torch.randint(-1, 2, (m, k), device="cuda", dtype=torch.bfloat16)
b = torch.randint(-1, 2, (n, k), device="cuda", dtype=torch.bfloat16).T
try:
    c = torch.compile(torch.mm, fullgraph=True)(a, b)
    torch.cuda.synchronize()
except Exception as error:
    print(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    sys.exit(1)
# Sums of -1, 0 and 1 stay below 256, so that both products are exact in bf16.
wrong = [i for i in range(0, m, 512) if not torch.equal(c[i : i + 512], a[i : i + 512] @ b)]
print(f"{len(wrong)} of {m // 512} blocks of 512 rows are wrong" + (f", the first from row {wrong[0]}" if wrong else ""))
sys.exit(int(bool(wrong)))
