"""FBGEMM in PyTorch packs a NaN of a weight in f16 as -65504: the product is a number.

Needs torch alone.  Exit status: 1 the failure is there, 0 it is not.
"""

import sys
import warnings

import torch

warnings.simplefilter("ignore")
weight = torch.ones(16, 64)
weight[0, 0] = float("nan")
packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
made = torch.ops.quantized.linear_dynamic_fp16(torch.ones(1, 64), packed)[0, 0].item()
print(f"a sum of 63 ones and a NaN is {made}")
sys.exit(int(made == made))
