"""linear:f32:nt:0x17x64x128 on cpp: InductorError in prepare: CppCompileError: C++ compile error

Seen on torch 2.13.0+cpu, distribution int-2, seed 0.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""
import sys, traceback
import torch, torch._inductor.config

OPTIONS = {'max_autotune': True, 'max_autotune_gemm_backends': 'CPP', 'freezing': True, 'compile_threads': 1,
           'fx_graph_cache': False, 'autotune_local_cache': False}


def tensor(shape, stride, offset, dtype, seed):
    n = torch.arange(offset + 1 + sum((s - 1) * t for s, t in zip(shape, stride)))
    i = 31 * n * n + 17 * n + seed
    return (i % 1021 % 5 - 2).to(dtype).as_strided(shape, stride, offset)


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


def run(a, **constants):
    with torch.no_grad(), torch._inductor.config.patch(OPTIONS):
        return torch.compile(Module(constants), fullgraph=True)(a)


torch.set_num_threads(2)
torch._functorch.config.enable_autograd_cache = False
given = dict(a=tensor((0, 17, 128), (2176, 128, 1), 0, torch.float32, 1), b=tensor((64, 128), (128, 1), 0,
             torch.float32, 2))
try:
    actual = run(**given)
except Exception:
    traceback.print_exc()
    sys.exit(1 if 'InductorError' in traceback.format_exc() else 2)
print("it came to its end")
sys.exit(0)
