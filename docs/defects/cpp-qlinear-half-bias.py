"""An int8 product with scales and a bias in f16, compiled with the C++ templates: two assertions of Inductor's.

2-D: the pass that looks for a residual behind qlinear_pointwise asserts f32 or bf16 of what it matches.
3-D: the bias is handed to the template, whose epilogue asserts the same of it.
Needs torch and a C++ compiler.  Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""

import sys
import traceback

import torch
import torch._inductor.config
import torch._inductor.exc

torch.set_num_threads(1)
n, k = 64, 128


class Scaled(torch.nn.Module):
    """Computed in f32 from f16's point of view: product, scales, bias, conversion."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randint(-128, 128, (n, k), dtype=torch.int8), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.rand(n) * 1e-4, requires_grad=False)
        self.bias = torch.nn.Parameter(torch.randn(n).half(), requires_grad=False)

    def forward(self, a: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = torch._int_mm(a.reshape(-1, k), self.weight.mT).to(torch.float32) * scale * self.scale
        return (x.reshape(*a.shape[:-1], n) + self.bias).to(torch.float16)


status = 0
options = {
    "freezing": True,
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP",
    "compile_threads": 1,
    "fx_graph_cache": False,
}
for shape in ((32, k), (2, 17, k)):
    torch._dynamo.reset()
    a, scale = torch.randint(-128, 128, shape, dtype=torch.int8), torch.tensor(0.5)
    module = Scaled()
    try:
        with torch.no_grad(), torch._inductor.config.patch(options):
            made = torch.compile(module)(a, scale)
            print(shape, "compiled; largest difference to eager", float((made - module(a, scale)).abs().max()))
    except Exception as error:
        text = traceback.format_exc()
        print(shape, type(error).__name__, "AssertionError" if "AssertionError" in text else text)
        status = max(status, 1 if "AssertionError" in text else 2)
sys.exit(status)
