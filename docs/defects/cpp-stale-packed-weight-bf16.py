"""linear:bf16:nt:17x65x127:bias+relu on cpp: 794 of 1105 elements outside the bound

Candidate cpp_fused_addmm_relu_0 out of the FX graph cache.  Seen on torch 2.13.0+cpu, here with small integers.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""
import os, sys, tempfile, traceback
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp())  # caches that start empty
import torch, torch._inductor.config

OPTIONS = {'max_autotune': True, 'max_autotune_gemm_backends': 'CPP', 'freezing': True, 'compile_threads': 1}

def tensor(shape, stride, offset, dtype, seed):
    n = torch.arange(offset + 1 + sum((s - 1) * t for s, t in zip(shape, stride)))
    i = 31 * n * n + 17 * n + seed
    return (i % 1021 % 5 - 2).to(dtype).as_strided(shape, stride, offset)

def program(a, b, bias):
    linear = torch._C._nn.linear(a, b, bias)
    relu = torch.nn.functional.relu(linear, inplace = False)
    return relu

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
given = dict(a=tensor((17, 127), (127, 1), 0, torch.bfloat16, 1), b=tensor((65, 127), (127, 1), 0, torch.bfloat16,
             2), bias=tensor((65,), (1,), 0, torch.bfloat16, 3))
try:
    other = {**given, **dict(b=tensor((65, 127), (127, 1), 0, torch.bfloat16, 102), bias=tensor((65,), (1,), 0,
        torch.bfloat16, 103))}
    run(**other)  # fills the caches
    torch.compiler.reset()
    actual = run(**given)
except Exception as error:
    traceback.print_exc()
    sys.exit(2)
actual = actual.double().cpu()
expected = program(**{n: t.double() for n, t in given.items()}).cpu()
bound = torch.full_like(expected, 0.0016021728515625)  # the largest that any element may be off
wrong = ~((actual - expected).abs() <= bound)
error = (actual - expected).abs().nan_to_num(nan=float('inf')).masked_fill(~wrong, -1)
at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
print(f"{int(wrong.sum())} of {wrong.numel()} elements are wrong; the worst is at {at}:")
print(f"expected {expected[at]:.9g}, actual {actual[at]:.9g}, bound {bound[at]:.3g}")
sys.exit(int(bool(wrong.any())))
