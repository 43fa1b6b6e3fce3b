"""addmm:f32:nn:16x0x16:bias+alpha-0.5+beta-2 on cpp: the product was computed by addmm

Seen on torch 2.13.0+cpu, filling int-2, seed 0.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""
import re, sys, traceback
import torch, torch._inductor.config
from torch._inductor.select_algorithm import ExternKernelCaller
from torch._inductor.utils import run_and_get_code

OPTIONS = {'max_autotune': True, 'max_autotune_gemm_backends': 'CPP', 'freezing': True, 'compile_threads': 1,
           'fx_graph_cache': False}


def tensor(shape, stride, offset, dtype, seed):
    n = torch.arange(offset + 1 + sum((s - 1) * t for s, t in zip(shape, stride)))
    i = 31 * n * n + 17 * n + seed
    return (i % 1021 % 5 - 2).to(dtype).as_strided(shape, stride, offset)


def program(a, b, bias):
    addmm = torch.addmm(bias, a, b, beta = 2.0, alpha = 0.5)
    return addmm


class Module(torch.nn.Module):
    def __init__(self, constants):
        super().__init__()
        for name, value in constants.items():
            self.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))

    def forward(self, a):
        return program(a=a, **dict(self.named_parameters()))


def run(a, **constants):
    with torch.no_grad(), torch._inductor.config.patch(OPTIONS):
        return run_and_get_code(torch.compile(Module(constants), fullgraph=True), a)[1]


torch.set_num_threads(1)
torch._functorch.config.enable_autograd_cache = False
found, node = set(), ExternKernelCaller.output_node  # what is chosen of ATen's own kernels, and called
ExternKernelCaller.output_node = lambda self: (found.add(self.name), node(self))[1]
given = dict(a=tensor((16, 16), (16, 1), 0, torch.float32, 1), b=tensor((16, 0), (1, 1), 0, torch.float32, 2),
             bias=tensor((0,), (1,), 0, torch.float32, 3))
try:
    actual = run(**given)
except Exception as error:
    traceback.print_exc()
    sys.exit(2)
found |= set(re.findall(r"extern_kernels\.\w+|aoti_torch_\w*mm\w*", "".join(actual)))
print("products of somebody else:", ", ".join(sorted(found)) or "none")
sys.exit(int(bool(found)))
