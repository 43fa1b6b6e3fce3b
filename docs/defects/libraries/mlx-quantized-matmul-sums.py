"""mlx.core.quantized_matmul on the CPU adds up in the operands' type: 4096 ones are 256 in bf16 and 2048 in f16.

Needs mlx[cpu] alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys

import mlx.core as mx

k = 4096
wrong = 0
for dtype in (mx.float32, mx.bfloat16, mx.float16):
    w, scales, biases = mx.quantize(mx.ones((32, k), dtype=dtype), group_size=32, bits=8)
    assert mx.all(mx.dequantize(w, scales, biases, group_size=32, bits=8) == 1)
    x = mx.ones((4, k), dtype=dtype)
    made = mx.quantized_matmul(x, w, scales, biases, transpose=True, group_size=32, bits=8, stream=mx.cpu)
    dense = mx.matmul(x, mx.ones((k, 32), dtype=dtype), stream=mx.cpu)
    print(f"{dtype}: quantized_matmul {made[0, 0].item()}, matmul {dense[0, 0].item()}, exact {k}")
    wrong += made[0, 0].item() != k
sys.exit(int(wrong > 0))
