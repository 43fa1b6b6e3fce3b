"""qlinear:u8-i8-f16:nt:17x64x128:add:quant.static:a.7bit on aten: RuntimeError in run: could not create a
primitive descriptor for the matmul primitive. Run workload with environment variable ONEDNN_VERBOSE=all to get
additional diagnostic information.

Seen on torch 2.13.0+cpu, filling int-2, seed 0.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""
import sys, traceback
import torch



def tensor(shape, stride, offset, dtype, seed):
    n = torch.arange(offset + 1 + sum((s - 1) * t for s, t in zip(shape, stride)))
    i = 31 * n * n + 17 * n + seed
    return (i % 1021 % 5 - 2).to(dtype).as_strided(shape, stride, offset)


def program(a, b, scale_b, zero_b, r0):
    qlinear_prepack = torch.ops.onednn.qlinear_prepack(b, None)
    qlinear_pointwise_binary = torch.ops.onednn.qlinear_pointwise.binary(a, 0.0078125, 7, qlinear_prepack, scale_b, zero_b, r0, None, 1.0, 0, torch.float16, 1.0, 0, 'add', 1.0, 'none', [], '')
    return qlinear_pointwise_binary


torch.set_num_threads(1)
given = dict(a=tensor((17, 128), (128, 1), 0, torch.uint8, 1), b=tensor((64, 128), (128, 1), 0, torch.int8, 2),
             scale_b=tensor((64,), (1,), 0, torch.float32, 3), zero_b=tensor((64,), (1,), 0, torch.int32, 4),
             r0=tensor((17, 64), (64, 1), 0, torch.float16, 5))
try:
    actual = program(**given)
except Exception as error:
    traceback.print_exc()
    sys.exit(1 if type(error).__name__ == 'RuntimeError' else 2)
print("it came to its end")
sys.exit(0)
