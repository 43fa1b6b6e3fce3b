"""A quantised linear without VNNI: pairs of u8 x i8 products are added in 16 bits and saturate.

Eager qlinear_pointwise, and torch.compile with freezing, which makes a scaled torch._int_mm one (eager is right there).
Needs torch only.  Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""

import sys
import traceback

import torch
import torch._inductor.config

torch.set_num_threads(1)
op = torch.ops.onednn
m, n, k = 4, 32, 64
zeros = torch.zeros(n, dtype=torch.int32)


class Scaled(torch.nn.Module):
    """An int8 product with a scale for A and one for each column of B."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.scale = torch.nn.Parameter(torch.ones(n), requires_grad=False)

    def forward(self, a: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch._int_mm(a, self.weight.mT).to(torch.float32) * scale * self.scale


def main() -> int:
    wrong = 0
    w = torch.full((n, k), 127, dtype=torch.int8)
    for top in (127, 255):
        x = torch.full((m, k), top, dtype=torch.uint8)
        y = op.qlinear_pointwise(
            x, 1.0, 0, op.qlinear_prepack(w, None), torch.ones(n), zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        print(f"u8 x i8, activations of {top}: expected {top * 127 * k}, actual {float(y[0, 0]):g}")
        wrong += float(y[0, 0]) != top * 127 * k
    a = torch.full((32, k), 100, dtype=torch.int8)
    with torch.no_grad(), torch._inductor.config.patch(freezing=True, compile_threads=1):
        y = torch.compile(Scaled(w))(a, torch.tensor(1.0))
    print(f"torch.compile of a scaled _int_mm, frozen: expected {100 * 127 * k}, actual {float(y[0, 0]):g}")
    return int(wrong > 0 or float(y[0, 0]) != 100 * 127 * k)


try:
    status = main()
except Exception:
    traceback.print_exc()
    status = 2
sys.exit(status)
