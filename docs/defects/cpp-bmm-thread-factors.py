"""bmm:f32:nn:2x20x24x16 on cpp: the process ends: 'Not all partitions are assigned.'

Candidate CppMicroGemmFP32Vec-4x24x1,threads=2.1.1.  Seen on torch 2.13.0+cpu, filling int-2, seed 0.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""
import ctypes, mmap, subprocess, sys, traceback
import torch, torch._inductor.config

OPTIONS = {'max_autotune': True, 'max_autotune_gemm_backends': 'CPP', 'freezing': False, 'compile_threads': 1,
           'cpp.threads': 2, 'cpp.gemm_thread_factors': '2,1,1', 'fx_graph_cache': False}


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


def program(a, b):
    bmm = torch.bmm(a, b)
    return bmm


def run(a, b):
    with torch.no_grad(), torch._inductor.config.patch(OPTIONS):
        return torch.compile(program, fullgraph=True)(a, b)


import torch._inductor.compile_fx  # first: what is below it imports each other in a circle
from torch._inductor.codegen import cpp_micro_gemm as micro  # leave one register blocking registered
kept = {kind: [c for c in configs if kind.__name__ == 'CppMicroGemmFP32Vec' and c.register_blocking == (4, 24, 1)]
        for kind, configs in micro.micro_gemm_configs.items()}
micro.micro_gemm_configs = kept
torch.set_num_threads(2)
torch._functorch.config.enable_autograd_cache = False
if "child" not in sys.argv:
    status = subprocess.run([sys.executable, __file__, "child"]).returncode
    print("the process ended with status", status)
    sys.exit(int(status != 0))
given = dict(a=tensor((2, 20, 16), (320, 16, 1), 0, torch.float32, 1), b=tensor((2, 16, 24), (384, 24, 1), 0,
             torch.float32, 2))
try:
    actual = run(**given)
except Exception as error:
    traceback.print_exc()
    sys.exit(2)
print("it came to its end")
sys.exit(0)
