"""qlinear:u8-i8-f32:nt:16x16x0:quant.static:a.7bit on aten: not run, it can kill the process: with K = 0
onednn::qlinear_pointwise divides an integer by zero: the process dies of SIGFPE

Seen on torch 2.13.0+cpu, filling -, seed 0.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""
import ctypes, mmap, subprocess, sys, traceback
import torch



def tensor(shape, stride, offset, dtype, seed):
    n = torch.arange(offset + 1 + sum((s - 1) * t for s, t in zip(shape, stride)))
    i = 31 * n * n + 17 * n + seed
    flat = (i % 1021 % 5 - 2).to(dtype)
    size = -(-flat.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + 2 * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + mmap.PAGESIZE + size), mmap.PAGESIZE, 0)  # nobody may touch it
    here = torch.frombuffer(memory, dtype=dtype, offset=mmap.PAGESIZE + size - flat.nbytes, count=flat.numel())
    return here.copy_(flat).as_strided(shape, stride, offset)


def program(a, b, scale_b, zero_b):
    qlinear_prepack = torch.ops.onednn.qlinear_prepack(b, None)
    qlinear_pointwise_default = torch.ops.onednn.qlinear_pointwise.default(a, 0.0078125, 7, qlinear_prepack, scale_b, zero_b, None, 1.0, 0, torch.float32, 'none', [], '')
    return qlinear_pointwise_default


torch.set_num_threads(1)
if "child" not in sys.argv:
    status = subprocess.run([sys.executable, __file__, "child"]).returncode
    print("the process ended with status", status)
    sys.exit(int(status != 0))
given = dict(a=tensor((16, 0), (1, 1), 0, torch.uint8, 1), b=tensor((16, 0), (1, 1), 0, torch.int8, 2),
             scale_b=tensor((16,), (1,), 0, torch.float32, 3), zero_b=tensor((16,), (1,), 0, torch.int32, 4))
try:
    actual = program(**given)
except Exception as error:
    traceback.print_exc()
    sys.exit(2)
print("it came to its end")
sys.exit(0)
