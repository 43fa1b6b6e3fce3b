"""int8_mm_dequant of bitsandbytes on a CPU multiplies by 6.200124e-05 for 1 / 127^2 = 6.2000124e-05: a digit is missing.

Needs bitsandbytes and torch.  Exit status: 1 the failure is there, 0 it is not.
"""

import sys

import bitsandbytes  # noqa: F401  # registers the operators
import torch

sums = torch.full((1, 1), 127 * 127, dtype=torch.int32)
one = torch.ones(1)
made = torch.ops.bitsandbytes.int8_mm_dequant.default(sums, one, one, dtype=torch.float32).item()
print(f"127 * 127 with statistics of 1: {made!r}, expected 1.0 within 2^-22 = 2.4e-07")
sys.exit(int(abs(made - 1.0) > 2.0**-22))
