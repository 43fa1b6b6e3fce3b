"""bmm:f16:nn:3x64x128x64:relu:program.multi_output on cpp: InductorError in prepare: AssertionError:

Seen on torch 2.13.0+cpu, filling int-2, seed 0.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""
import sys, traceback
import torch, torch._inductor.config

OPTIONS = {'max_autotune': True, 'max_autotune_gemm_backends': 'CPP', 'freezing': False, 'compile_threads': 1,
           'fx_graph_cache': False}


def tensor(shape, stride, offset, dtype, seed):
    n = torch.arange(offset + 1 + sum((s - 1) * t for s, t in zip(shape, stride)))
    i = 31 * n * n + 17 * n + seed
    return (i % 1021 % 5 - 2).to(dtype).as_strided(shape, stride, offset)


def program(a, b):
    bmm = torch.bmm(a, b)
    relu = torch.nn.functional.relu(bmm, inplace = False)
    return (bmm, relu)


def run(a, b):
    with torch.no_grad(), torch._inductor.config.patch(OPTIONS):
        return torch.compile(program, fullgraph=True)(a, b)


torch.set_num_threads(1)
torch._functorch.config.enable_autograd_cache = False
given = dict(a=tensor((3, 64, 64), (4096, 64, 1), 0, torch.float16, 1), b=tensor((3, 64, 128), (8192, 128, 1), 0,
             torch.float16, 2))
try:
    actual = run(**given)
except Exception as error:
    traceback.print_exc()
    sys.exit(1 if type(error).__name__ == 'InductorError' else 2)
print("it came to its end")
sys.exit(0)
