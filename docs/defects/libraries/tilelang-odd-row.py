"""TileLang: a pipelined copy out of a tensor of one row with an odd number of 16-bit elements does not compile.

Two rows compile, and so does one without a pipeline.  Needs tilelang (and the torch that it needs) alone: the CUDA source
is generated for sm_90 without a GPU.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys

import tilelang
from tilelang import language as T
from tilelang import tvm


def product(m, stages, n=64, k=97):
    @T.prim_func
    def program(a: T.Tensor((m, k), "bfloat16"), b: T.Tensor((n, k), "bfloat16"), c: T.Tensor((m, n), "bfloat16")):
        with T.Kernel(1, T.ceildiv(m, 64), threads=128) as (x, y):
            of_a, of_b = T.alloc_shared((64, 32), "bfloat16"), T.alloc_shared((64, 32), "bfloat16")
            sums = T.alloc_fragment((64, 64), "float32")
            T.clear(sums)
            for i in T.Pipelined(T.ceildiv(k, 32), num_stages=stages):
                T.copy(a[y * 64, i * 32], of_a)
                T.copy(b[x * 64, i * 32], of_b)
                T.gemm(of_a, of_b, sums, transpose_B=True)
            T.copy(sums, c[y * 64, x * 64])

    return program


failed = []
target = tvm.target.Target({"kind": "cuda", "arch": "sm_90"})
for m, stages in ((2, 3), (1, 0), (1, 3)):
    try:
        with target:
            tilelang.lower(product(m, stages), target=target, enable_device_compile=False)
        print(f"M={m}, {stages} stages: compiled")
    except Exception as error:
        failed.append((m, stages))
        print(f"M={m}, {stages} stages: {type(error).__name__}: {str(error)[:90]}")
sys.exit(int(failed != []))
