"""torch.compile with freezing: an int8 product with scales, an activation and then an addition ends the compile.

Needs torch alone.  Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""
import sys
import traceback
import torch, torch._inductor.config

weight = torch.nn.Parameter(torch.randint(-100, 100, (32, 40), dtype=torch.int8), requires_grad=False)
scales = torch.nn.Parameter(torch.rand(32) / 1000, requires_grad=False)


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.scales = weight, scales

    def forward(self, a, scale, addend):
        return (torch._int_mm(a, self.weight.mT).to(torch.float32) * scale * self.scales).relu() + addend


a, scale = torch.randint(-100, 100, (20, 40), dtype=torch.int8), torch.tensor(0.01)
try:
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        torch.compile(Module())(a, scale, torch.rand(20, 32))
except Exception:
    traceback.print_exc()
    sys.exit(1 if "qlinear_post_op_fusion" in traceback.format_exc() else 2)
print("it came to its end")
