"""bitsandbytes on a CPU: 4-bit weights whose rows are no whole number of blocks get the scales of other blocks.

quantize_4bit counts its blocks through the whole matrix, the CPU kernel of dequantize_4bit from each row's start.  Needs
bitsandbytes (and the torch that it needs) alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys

import bitsandbytes.functional as F
import torch

wrong = 0
for rows, columns in ((64, 128), (64, 96), (64, 97)):
    w = torch.eye(rows, columns)  # 0 and 1 are exact in NF4
    w[::2] *= 2.0  # a block has one of two scales, or 0
    given = F.quantize_4bit(w, blocksize=64, quant_type="nf4")
    flat = F.quantize_4bit(w.reshape(1, -1), blocksize=64, quant_type="nf4")
    made, whole = F.dequantize_4bit(*given), F.dequantize_4bit(*flat).reshape(rows, columns)
    print(f"{rows}x{columns}: largest error {(made - w).abs().max():.1f}, as one row {(whole - w).abs().max():.1f}")
    wrong += not torch.equal(made, w)
sys.exit(int(wrong > 0))
