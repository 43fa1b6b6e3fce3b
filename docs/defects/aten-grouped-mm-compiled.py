"""grouped_mm:f32:nn:3x17x36x64 on aten@static: TorchRuntimeError in prepare: RuntimeError when making fake tensor
call

Seen on torch 2.13.0+cpu, filling int-2, seed 0.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""
import sys, traceback
import torch, torch._inductor.config

OPTIONS = {'compile_threads': 1, 'fx_graph_cache': False}


def tensor(shape, stride, offset, dtype, seed):
    n = torch.arange(offset + 1 + sum((s - 1) * t for s, t in zip(shape, stride)))
    i = 31 * n * n + 17 * n + seed
    return (i % 1021 % 5 - 2).to(dtype).as_strided(shape, stride, offset)


def program(a, b, offs):
    _grouped_mm = torch._grouped_mm(a, b, offs = offs, bias = None, out_dtype = None)
    return _grouped_mm


def run(a, b, offs):
    with torch.no_grad(), torch._inductor.config.patch(OPTIONS):
        return torch.compile(program, fullgraph=True)(a, b, offs)


torch.set_num_threads(1)
torch._functorch.config.enable_autograd_cache = False
given = dict(a=tensor((51, 64), (64, 1), 0, torch.float32, 1), b=tensor((3, 64, 36), (2304, 36, 1), 0,
             torch.float32, 2), offs=tensor((3,), (1,), 0, torch.int32, 3))
try:
    actual = run(**given)
except Exception as error:
    traceback.print_exc()
    sys.exit(1 if type(error).__name__ == 'TorchRuntimeError' else 2)
print("it came to its end")
sys.exit(0)
