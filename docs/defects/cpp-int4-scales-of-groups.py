"""Inductor's C++ template of int4 weights is wrong where a cache block of K begins within a group (AVX-512).

The block follows from the number of threads and the caches.  Here it is asked for: 19 blocks of 32 products, where a group
has 128; with one thread a block has 128 of its own.  All weights are 1, so that each group's scale is the only thing that can be wrong.  A block without it is right.
Needs torch alone and a CPU with AVX-512.  Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""
import sys, traceback
import torch, torch._inductor.config

K, N, GROUP = 4096, 64, 128
OPTIONS = {"max_autotune": True, "max_autotune_gemm_backends": "CPP", "freezing": True, "fx_graph_cache": False,
           "cpp.gemm_cache_blocking": "1,1,19"}


class Product(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.full((N, K), 9, dtype=torch.int32), 1))
        scales = torch.arange(1, K // GROUP + 1).float()[:, None, None].expand(-1, N, 1)
        self.register_buffer("scales", torch.cat([scales, torch.zeros_like(scales)], -1).bfloat16().contiguous())

    def forward(self, x):
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.weight, GROUP, self.scales)


torch._functorch.config.enable_autograd_cache = False
torch.set_num_threads(2)
module, x = Product(), torch.ones(1, K, dtype=torch.bfloat16)
try:
    with torch.no_grad(), torch._inductor.config.patch(OPTIONS):
        actual = torch.compile(module, fullgraph=True)(x)
except Exception:
    traceback.print_exc()
    sys.exit(2)
expected = float(GROUP * sum(range(1, K // GROUP + 1)))
wrong = (actual.float() / expected - 1).abs() > 0.01
print(f"{int(wrong.sum())} of {wrong.numel()} elements are wrong: {actual.flatten()[0].item()} instead of {expected}")
sys.exit(int(bool(wrong.any())))
