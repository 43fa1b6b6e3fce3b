"""linears:f32:nt:2x2x8x4096:m.dynamic on cpp with cpp.gemm_max_k_slices: half of K is missing

Two linears of one input, put together by cpp.enable_grouped_gemm_template, with two threads.  Each thread has half of K
and stores its own sum; nothing adds the two.  All elements of the operands are 1, so each result is K.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""
import sys, traceback
import torch, torch._inductor.config

K = 4096
OPTIONS = {'max_autotune': True, 'max_autotune_gemm_backends': 'CPP', 'freezing': True, 'compile_threads': 1,
           'cpp.enable_grouped_gemm_template': True, 'cpp.gemm_max_k_slices': 2, 'fx_graph_cache': False}


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(K, 8, bias=False)
        self.second = torch.nn.Linear(K, 8, bias=False)

    def forward(self, x):
        return self.first(x), self.second(x)


torch.set_num_threads(2)
torch._functorch.config.enable_autograd_cache = False
module = Two().eval()
x = torch.ones(2, K)
torch._dynamo.mark_dynamic(x, 0)  # linears of f32 with a fixed M are MKL's
try:
    with torch.no_grad(), torch._inductor.config.patch(OPTIONS):
        for parameter in module.parameters():
            parameter.fill_(1)
        results = torch.compile(module, fullgraph=True)(x)
        if not torch._dynamo.utils.counters['inductor']['cpp_grouped_gemm_template']:
            raise RuntimeError("the linears were not put together")
except Exception:
    traceback.print_exc()
    sys.exit(2)
found = torch.cat(results)
print(f"{int((found != K).sum())} of {found.numel()} elements are wrong: {found.unique().tolist()} instead of {K}")
sys.exit(int(bool((found != K).any())))
