"""torch.nn.functional.gelu in bf16 on a CPU with AVX512-BF16: subnormal numbers become 0, which gelu in f32 keeps.

Needs torch alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys

import torch

x = torch.full((64,), -1.5e-38)
half, single = torch.nn.functional.gelu(x.bfloat16()).float(), torch.nn.functional.gelu(x.bfloat16().float())
print(f"gelu({x[0]:g}) is {single[0]:g} in f32 and {half[0]:g} in bf16")
sys.exit(int(bool((half == 0).any())))
