"""Inductor's C++ template adds slices of K at wrong places where a cache block has several register blocks of N.

Needs torch 2.11 or 2.12 alone; 2.13.0 is right.  All operands are 1, so that each element is K.
Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong; SIGSEGV is the failure, too.
"""
import sys, traceback
import torch, torch._inductor.config

M, N, K = 64, 256, 512
OPTIONS = {"max_autotune": True, "max_autotune_gemm_backends": "CPP", "freezing": True, "fx_graph_cache": False,
           "cpp.threads": 4, "cpp.gemm_thread_factors": "2,1,2", "cpp.gemm_cache_blocking": "1,2,1"}

torch._functorch.config.enable_autograd_cache = False
torch.set_num_threads(4)
module, x = torch.nn.Linear(K, N, bias=False), torch.ones(M, K)
try:
    with torch.no_grad(), torch._inductor.config.patch(OPTIONS):
        module.weight.fill_(1.0)
        actual = torch.compile(module, fullgraph=True)(x)
except Exception:
    traceback.print_exc()
    sys.exit(2)
wrong = actual != K
print(f"{int(wrong.sum())} of {wrong.numel()} elements are wrong: {actual[wrong].flatten()[:4].tolist()} instead of {K}")
sys.exit(int(bool(wrong.any())))
