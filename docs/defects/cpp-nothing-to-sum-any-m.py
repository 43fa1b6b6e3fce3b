"""A linear with K = 0, compiled for any number of rows by Inductor's C++ template, ends the process by SIGFPE.

Seen on torch 2.13.0 (CPU build) without AVX-512, with 2 threads; with one thread the result is whatever was in memory.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""
import subprocess, sys
import torch, torch._inductor.config

OPTIONS = {"max_autotune": True, "max_autotune_gemm_backends": "CPP", "freezing": True, "fx_graph_cache": False}


def run(a):
    with torch.no_grad(), torch._inductor.config.patch(OPTIONS):
        module = torch.nn.Linear(0, 16, bias=False, dtype=a.dtype)
        torch._dynamo.mark_dynamic(a, 0)
        return torch.compile(module.eval())(a)


if "child" not in sys.argv:
    died = subprocess.run([sys.executable, __file__, "child"]).returncode
    print(f"the process ended with status {died}")
    sys.exit(1 if died == -8 else {0: 0, 1: 1}.get(died, 2))
torch.set_num_threads(2)
result = run(torch.empty(17, 0, dtype=torch.bfloat16))
print(f"{int((result != 0).sum())} of {result.numel()} elements are not zero")
sys.exit(int(bool((result != 0).any())))
