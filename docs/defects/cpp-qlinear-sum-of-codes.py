"""qlinear:u8-i8-u8:nt:4x16x32:sum-0.25_5:quant.static+requant-0.37_3 on cpp: AssertionError in Inductor's lowering

A quantised linear that adds in place to 8-bit codes (onednn::qlinear_pointwise.binary, "sum"): compiled with
freezing it agrees with eager; with max_autotune, too, the C++ template's epilogue asserts a residual of f32 or bf16.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""
import sys, traceback
import torch, torch._inductor.config


class Program(torch.nn.Module):
    def __init__(self):
        super().__init__()
        weight = torch.ones(16, 32, dtype=torch.int8)
        self.register_buffer("weight", torch.ops.onednn.qlinear_prepack(weight, None))
        self.register_buffer("scales", torch.full((16,), 0.125))
        self.register_buffer("zeros", torch.zeros(16, dtype=torch.int32))

    def forward(self, a, codes):
        return torch.ops.onednn.qlinear_pointwise.binary(
            a, 0.5, 7, self.weight, self.scales, self.zeros, codes.clone(), None, 0.37, 3, torch.uint8, 0.25, 5,
            'sum', 1.0, 'none', [], '')


def run(**options):
    torch._dynamo.reset()
    with torch.no_grad(), torch._inductor.config.patch(freezing=True, fx_graph_cache=False, **options):
        return torch.compile(Program().eval(), fullgraph=True)(a, codes)


torch._functorch.config.enable_autograd_cache = False
a, codes = torch.full((4, 32), 9, dtype=torch.uint8), torch.full((4, 16), 25, dtype=torch.uint8)
try:
    plain = run()
except Exception:
    traceback.print_exc()
    sys.exit(2)
print(f"without max_autotune: {plain.unique().tolist()}")  # 64 * 0.0625 + 20 * 0.25 = 9, and 9 / 0.37 + 3 = 27
try:
    tuned = run(max_autotune=True)
except Exception as error:
    traceback.print_exc()
    sys.exit(1 if type(error).__name__ == 'InductorError' and 'AssertionError' in str(error) else 2)
print(f"with max_autotune: {tuned.unique().tolist()}")
sys.exit(0)
