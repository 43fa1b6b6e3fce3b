"""tinygrad: matmul with dtype=float rounds each product of bf16 to bf16 before it is added up in f32.

The same operands converted first give the exact result, in a kernel that loads them as bf16 too.  Needs tinygrad and
clang 15 or later.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys

from tinygrad import Tensor, dtypes

k, one = 512, 1 + 2**-7
a, b = (Tensor.full(s, one, dtype=dtypes.bfloat16, device="CPU").contiguous().realize() for s in ((1, k), (k, 1)))
made = a.matmul(b, dtype=dtypes.float).item()
converted = a.cast(dtypes.float).matmul(b.cast(dtypes.float)).item()
print(f"dtype=float: {made}; converted first: {converted}; exact: {k * one * one}")
sys.exit(int(made != k * one * one))
