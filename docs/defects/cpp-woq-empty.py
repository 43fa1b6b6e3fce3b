"""torch.compile with freezing and max_autotune: _weight_int8pack_mm without columns, or without rows, ends the compile.

N = 0: the frozen scale of no elements becomes part of the program's text, and the lowering makes two buffers of it.
M = 0: it makes two of the scale, too, or with a short K chooses no blocking.  Eager mode returns an empty tensor.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys
import torch, torch._inductor.config

OPTIONS = {"freezing": True, "max_autotune": True, "max_autotune_gemm_backends": "CPP", "fx_graph_cache": False}


class Product(torch.nn.Module):
    def __init__(self, n, k):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(n, k, dtype=torch.int8), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.ones(n), requires_grad=False)

    def forward(self, a):
        return torch._weight_int8pack_mm(a, self.weight, self.scale)


wrong = 0
for m, n, k in ((11, 0, 512), (0, 16, 512), (11, 16, 512)):
    product, a = Product(n, k), torch.ones(m, k)
    torch._dynamo.reset()
    try:
        with torch.no_grad(), torch._inductor.config.patch(OPTIONS):
            print(f"{m} x {n}: compiled, {tuple(torch.compile(product)(a).shape)}")
    except Exception as error:
        wrong += 1
        print(f"{m} x {n}: {type(error).__name__}: {str(error).strip().splitlines()[0]}; eager gives {tuple(product(a).shape)}")
sys.exit(int(wrong > 0))
