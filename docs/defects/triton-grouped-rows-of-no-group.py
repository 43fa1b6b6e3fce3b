"""torch.compile of a grouped product whose rows behind the last group are made 0: with Triton's template they are not written.

The selection is fused into the template, which writes the rows of groups alone.  Rows that belong to no group are what
serving pads a batch of tokens with.  Seen on torch 2.11.0+cu130 and 2.15.0+cu132, H100; needs compute capability 9.0.
Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""
import sys, traceback
import torch

torch._inductor.config.max_autotune = True
torch._inductor.config.max_autotune_gemm_backends = "TRITON"
groups, rows, n, k, owned = 8, 136, 96, 128, 119


def program(a, b, ends):
    mine = torch.arange(rows, device="cuda") < ends[-1]
    return torch.where(mine[:, None], torch._grouped_mm(a, b, offs=ends), 0.0)


try:
    a = torch.ones(rows, k, device="cuda", dtype=torch.bfloat16)
    b = torch.ones(groups, n, k, device="cuda", dtype=torch.bfloat16).mT
    ends = torch.tensor([10, 20, 30, 40, 60, 80, 100, owned], device="cuda", dtype=torch.int32)
    assert bool((program(a, b, ends)[owned:] == 0).all()), "eager is wrong too"
    compiled = torch.compile(program)
    compiled(a, b, ends)
    torch.full((rows, n), float("nan"), device="cuda", dtype=torch.bfloat16)  # memory that the next result may get
    got = compiled(a, b, ends)
    torch.cuda.synchronize()
except Exception:
    traceback.print_exc()
    sys.exit(2)
wrong = (got[owned:] != 0).any(1)
print(f"{int(wrong.sum())} of {rows - owned} rows of no group are not 0")
sys.exit(int(bool(wrong.any())))
