"""mm:bf16:nn:17x65x127:b.offset on cpp: 1104 of 1105 elements differ from the exact result

Candidate CppMicroGemmFP32Vec-4x24x1.  Seen on torch 2.13.0+cpu, here with small integers.
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


def program(a, b):
    mm = torch.mm(a, b)
    return mm


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


torch.set_num_threads(1)
torch._functorch.config.enable_autograd_cache = False
given = dict(a=tensor((17, 127), (127, 1), 0, torch.bfloat16, 1), b=tensor((127, 65), (65, 1), 1, torch.bfloat16,
             2))
try:
    actual = run(**given)
except Exception as error:
    traceback.print_exc()
    sys.exit(2)
actual = actual.double().cpu()
expected = program(**{n: t.double() for n, t in given.items()}).cpu()
bound = torch.full_like(expected, 0.001556396484375)  # the largest that any element may be off
wrong = ~((actual - expected).abs() <= bound)
error = (actual - expected).abs().nan_to_num(nan=float('inf')).masked_fill(~wrong, -1)
at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
print(f"{int(wrong.sum())} of {wrong.numel()} elements are wrong; the worst is at {at}:")
print(f"expected {expected[at]:.9g}, actual {actual[at]:.9g}, bound {bound[at]:.3g}")
sys.exit(int(bool(wrong.any())))
