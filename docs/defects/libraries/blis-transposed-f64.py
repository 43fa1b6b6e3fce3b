"""blis.py.gemm of cython-blis with trans1 or trans2 in f64 takes sizes of the matrices that are not transposed.

The result has the wrong shape and memory beside the matrices is read.  Each product runs in a process of its own.
Needs blis alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import subprocess
import sys

PRODUCT = """
import numpy as np
from blis.py import gemm
a, b = np.ones((17, 127), {dtype!r}), np.ones((127, 65), {dtype!r})
made = gemm(np.ascontiguousarray(a.T), b, trans1=True)
print(made.shape, "right" if made.shape == (17, 65) and (made == 127).all() else "wrong")
"""
answers = {}
for dtype in ("f", "d"):
    ran = subprocess.run([sys.executable, "-c", PRODUCT.format(dtype=dtype)], capture_output=True, text=True, check=False)
    answers[dtype] = ran.stdout.strip() or f"the process ended with status {ran.returncode}"
    print(f"{'f32' if dtype == 'f' else 'f64'}: {answers[dtype]}")
sys.exit(int(not answers["d"].endswith("right")))
