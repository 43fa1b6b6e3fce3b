"""Two linears of one input, the second with a bias that the first one makes, on cpp: InductorError: AssertionError

With cpp.enable_grouped_gemm_template, grouped_gemm_pass makes one node of both products without asking whether one needs
the other's result: the graph has a cycle then, and its topological sort ends the compile.  M is a symbol, so that linears
of f32 are oneDNN's; those of bf16 are on a processor with AVX-512.
Seen on torch 2.13.0+cpu.  Needs torch alone.  Exit status: 1 the failure is there, 0 it is not, 2 something else went
wrong.
"""

import sys
import traceback

import torch
import torch._inductor.config

OPTIONS = {
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP",
    "freezing": True,
    "compile_threads": 1,
    "cpp.enable_grouped_gemm_template": True,
    "fx_graph_cache": False,
}


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(32, 48), torch.nn.Linear(32, 48, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.first(x)
        return y, torch.nn.functional.linear(x, self.second.weight, y.sum(0))


torch.set_num_threads(1)
torch.manual_seed(0)
block, x = Block().eval(), torch.randn(18, 32)
torch._dynamo.mark_dynamic(x, 0)
try:
    with torch.no_grad(), torch._inductor.config.patch(OPTIONS):
        actual = torch.compile(block)(x)
except Exception as error:
    traceback.print_exc()
    sys.exit(1 if "AssertionError" in str(error) else 2)
for one, other in zip(actual, block(x), strict=True):
    torch.testing.assert_close(one, other)
sys.exit(0)
