"""woq_int8:bf16-i8-bf16:nt:1x16x32:a.offset on aten: not run, it can kill the process: torch._weight_int8pack_mm in
bf16 loads A as if it began at a multiple of 16 bytes: a segmentation fault where it does not

Seen on torch 2.13.0+cpu, filling -, seed 0.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""
import ctypes, mmap, subprocess, sys, traceback
import torch



def tensor(shape, stride, offset, dtype, seed):
    n = torch.arange(offset + 1 + sum((s - 1) * t for s, t in zip(shape, stride)))
    i = 31 * n * n + 17 * n + seed
    flat = (i % 1021 % 5 - 2).to(dtype)
    if not flat.numel():
        return flat.as_strided(shape, stride, offset)
    room = -(-flat.nbytes // 64) * 64 if offset else flat.nbytes  # a view stays as unaligned as it is
    size = -(-flat.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + 2 * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + mmap.PAGESIZE + size), mmap.PAGESIZE, 0)  # nobody may touch it
    here = torch.frombuffer(memory, dtype=dtype, offset=mmap.PAGESIZE + size - room, count=flat.numel())
    return here.copy_(flat).as_strided(shape, stride, offset)


def program(a, b, scale):
    _weight_int8pack_mm = torch._weight_int8pack_mm(a, b, scale)
    return _weight_int8pack_mm


torch.set_num_threads(1)
if "child" not in sys.argv:
    status = subprocess.run([sys.executable, __file__, "child"]).returncode
    print("the process ended with status", status)
    sys.exit(1 if status < 0 else 2 * (status > 0))
given = dict(a=tensor((1, 32), (32, 1), 1, torch.bfloat16, 1), b=tensor((16, 32), (32, 1), 0, torch.int8, 2),
             scale=tensor((16,), (1,), 0, torch.bfloat16, 3))
try:
    actual = program(**given)
except Exception as error:
    traceback.print_exc()
    sys.exit(2)
print("it came to its end")
sys.exit(0)
