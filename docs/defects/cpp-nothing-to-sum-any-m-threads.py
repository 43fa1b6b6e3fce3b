"""linear:bf16:nt:17x2x0:m.dynamic on cpp: not run, it can kill the process: as cpp-nothing-to-sum-any-size-threads,
compiled for any M

Seen on torch 2.13.0+cpu, filling -, seed 0.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""
import ctypes, mmap, subprocess, sys, traceback
import torch, torch._inductor.config
OPTIONS = {'max_autotune': True, 'max_autotune_gemm_backends': 'CPP', 'freezing': True, 'compile_threads': 1,
           'fx_graph_cache': False}
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
def program(a, b):
    linear = torch._C._nn.linear(a, b, None)
    return linear
class Module(torch.nn.Module):
    def __init__(self, constants):
        super().__init__()
        for name, value in constants.items():
            self.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    def forward(self, a):
        return program(a=a, **dict(self.named_parameters()))
def run(a, kept=[], **constants):
    with torch.no_grad(), torch._inductor.config.patch(OPTIONS):
        if not kept:
            kept.append(torch.compile(Module(constants), fullgraph=True))
            torch._dynamo.mark_dynamic(a, 0)
        return kept[0](a)
torch.set_num_threads(2)
torch._functorch.config.enable_autograd_cache = False
if "child" not in sys.argv:
    status = subprocess.run([sys.executable, __file__, "child"]).returncode
    print("the process ended with status", status)
    sys.exit(1 if status < 0 else 2 * (status > 0))
given = dict(a=tensor((17, 0), (1, 1), 0, torch.bfloat16, 1), b=tensor((2, 0), (1, 1), 0, torch.bfloat16, 2))
first = dict(given)
try:
    for name, dim in {'a': 0}.items():  # compiled at M = 61
        first[name] = given[name].narrow(dim, 0, 1).repeat_interleave(61, dim)
    run(**first)
    actual = run(**given)
except Exception as error:
    traceback.print_exc()
    sys.exit(2)
print("it came to its end")
sys.exit(0)
