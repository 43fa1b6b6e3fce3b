"""woq_int8:f32-i8-f32:nt:4x8x2 on cpp: InductorError in prepare: LoweringException: NotImplementedError: Pointwise

Seen on torch 2.15.0+cu132, distribution int-2, seed 0.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""
import sys, traceback
import torch, torch._inductor.config

OPTIONS = {'max_autotune': True, 'max_autotune_gemm_backends': 'CPP', 'freezing': True, 'compile_threads': 1,
           'fx_graph_cache': False}


def tensor(shape, stride, offset, dtype, seed):
    n = torch.arange(offset + 1 + sum((s - 1) * t for s, t in zip(shape, stride)))
    i = 31 * n * n + 17 * n + seed
    return (i % 1021 % 5 - 2).to(dtype).as_strided(shape, stride, offset)


def program(a, b, scale):
    _weight_int8pack_mm = torch._weight_int8pack_mm(a, b, scale)
    return _weight_int8pack_mm


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
given = dict(a=tensor((4, 2), (2, 1), 0, torch.float32, 1), b=tensor((8, 2), (2, 1), 0, torch.int8, 2),
             scale=tensor((8,), (1,), 0, torch.float32, 3))
try:
    actual = run(**given)
except Exception as error:
    traceback.print_exc()
    sys.exit(1 if type(error).__name__ == 'InductorError' else 2)
print("it came to its end")
sys.exit(0)
