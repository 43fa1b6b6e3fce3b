"""torch.compile with freezing: a product of integers by a constant weight ends the compile ("weight's dtype should be float").

The pass that packs constant weights for MKL leaves f64 out, and takes integers.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""
import sys
import torch, torch._inductor.config

OPTIONS = {"freezing": True, "fx_graph_cache": False}


class Module(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        weight = torch.randint(-9, 9, (64, 32)).to(dtype)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, a):
        return torch.mm(a, self.weight)


status = 0
for dtype in (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8):
    module, a = Module(dtype), torch.randint(-9, 9, (16, 64)).to(dtype)
    torch._dynamo.reset()
    try:
        with torch.no_grad(), torch._inductor.config.patch(OPTIONS):
            got = torch.compile(module)(a)
        print(f"{dtype}: compiled, and {'right' if torch.equal(got, module(a)) else 'wrong'}")
    except Exception as error:
        known = "reorder_linear_weight" in str(error)
        status = max(status, 1 if known else 2)
        print(f"{dtype}: {type(error).__name__}: {str(error).strip().splitlines()[1 if known else 0]}")
sys.exit(status)
