"""bmm:f32:nn:2x64x64x512 on cpp: 4096 of 8192 elements differ from the exact result

Candidate CppMicroGemmFP32Vec-4x16x1,cache=2.2.8.  Seen on torch 2.13.0+cpu, here with small integers.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""
import sys, traceback
import torch, torch._inductor.config

OPTIONS = {'max_autotune': True, 'max_autotune_gemm_backends': 'CPP', 'freezing': False, 'compile_threads': 1,
           'cpp.gemm_cache_blocking': '2,2,8', 'fx_graph_cache': False}


def tensor(shape, stride, offset, dtype, seed):
    n = torch.arange(offset + 1 + sum((s - 1) * t for s, t in zip(shape, stride)))
    i = 31 * n * n + 17 * n + seed
    return (i % 1021 % 5 - 2).to(dtype).as_strided(shape, stride, offset)


def program(a, b):
    bmm = torch.bmm(a, b)
    return bmm


def run(a, b):
    with torch.no_grad(), torch._inductor.config.patch(OPTIONS):
        return torch.compile(program, fullgraph=True)(a, b)


import torch._inductor.compile_fx  # first: what is below it imports each other in a circle
from torch._inductor.codegen import cpp_micro_gemm as micro  # leave one register blocking registered
kept = {kind: [c for c in configs if kind.__name__ == 'CppMicroGemmFP32Vec' and c.register_blocking == (4, 16, 1)]
        for kind, configs in micro.micro_gemm_configs.items()}
micro.micro_gemm_configs = kept
torch.set_num_threads(1)
torch._functorch.config.enable_autograd_cache = False
given = dict(a=tensor((2, 64, 512), (32768, 512, 1), 0, torch.float32, 1), b=tensor((2, 512, 64), (32768, 64, 1), 0,
             torch.float32, 2))
try:
    actual = run(**given)
except Exception as error:
    traceback.print_exc()
    sys.exit(2)
actual = actual.double().cpu()
expected = program(**{n: t.double() for n, t in given.items()}).cpu()
bound = torch.full_like(expected, 0.023712158203125)  # the largest that any element may be off
wrong = ~((actual - expected).abs() <= bound)
error = (actual - expected).abs().nan_to_num(nan=float('inf')).masked_fill(~wrong, -1)
at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
print(f"{int(wrong.sum())} of {wrong.numel()} elements are wrong; the worst is at {at}:")
print(f"expected {expected[at]:.9g}, actual {actual[at]:.9g}, bound {bound[at]:.3g}")
sys.exit(int(bool(wrong.any())))
