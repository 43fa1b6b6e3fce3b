"""Inductor has no Triton candidate for a batch above 65535, which is the most that a CUDA grid's third dimension takes.

torch 2.11, triton 3.6, one H100: every candidate fails with "CUDA driver error: invalid argument".
Needs torch and a CUDA device.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys
import torch

torch._inductor.config.max_autotune = True
torch._inductor.config.max_autotune_gemm_backends = "TRITON"
wrong = 0
for batch in (65535, 65601):
    bias, a, b = (torch.randn(batch, *shape, device="cuda") for shape in ((2, 3), (2, 5), (5, 3)))
    torch._dynamo.reset()
    try:
        c = torch.compile(torch.baddbmm, fullgraph=True)(bias, a, b)
    except Exception as error:
        wrong += 1
        print(f"batch {batch}: {type(error).__name__}")
    else:
        print(f"batch {batch}: error {float((c - torch.baddbmm(bias, a, b)).abs().max()):.1g}")
sys.exit(int(wrong > 0))
