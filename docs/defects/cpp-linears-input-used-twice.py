"""A linear and a relu of one input on cpp: InductorError: IndexError in grouped_gemm_pass

With cpp.enable_grouped_gemm_template, _is_valid_grouped_gemm_fusion asks the first user of a linear's input for its
second argument, whatever that user is: a relu has none (IndexError), of a softmax or a view it is no node
(AttributeError).  One linear is enough.  M is a symbol, so that a linear of f32 is one of oneDNN's; linears of bf16 are
on a processor with AVX-512.
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
        self.linear = torch.nn.Linear(32, 48)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(x), self.linear(x)


torch.set_num_threads(1)
torch.manual_seed(0)
block, x = Block().eval(), torch.randn(18, 32)
torch._dynamo.mark_dynamic(x, 0)
try:
    with torch.no_grad(), torch._inductor.config.patch(OPTIONS):
        actual = torch.compile(block)(x)
except Exception as error:
    traceback.print_exc()
    sys.exit(1 if "IndexError" in str(error) else 2)
for one, other in zip(actual, block(x), strict=True):
    torch.testing.assert_close(one, other)
sys.exit(0)
