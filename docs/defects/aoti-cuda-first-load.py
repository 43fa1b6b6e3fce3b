"""The first package of AOTInductor that a process compiles and loads on CUDA kills it with a segmentation fault.

Seen on torch 2.11.0+cu130, 2.13.0+cu130, 2.14.1+cu130 and 2.15.0+cu132, Hopper, Python 3.12,
with empty caches: in load_pt2, before the kernel runs.  A process that finds the package's code compiled goes on.  Needs torch, a CUDA GPU and a C++ compiler.  Exit status: 1 the failure
is there, 0 it is not, 2 something else went wrong.
"""
import os, subprocess, sys, tempfile

CHILD = """
import sys, torch

class Product(torch.nn.Module):
    def forward(self, a, b):
        return a @ b

args = tuple(torch.ones(64, 64, device="cuda", dtype=torch.float16) for _ in range(2))
path = torch._inductor.aoti_compile_and_package(torch.export.export(Product(), args), package_path=sys.argv[1])
assert (torch._inductor.aoti_load_package(path)(*args) == 64).all()
"""
with tempfile.TemporaryDirectory() as folder:
    child = subprocess.run([sys.executable, "-c", CHILD, folder + "/product.pt2"], capture_output=True, text=True,
                           env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder})
print(child.stderr[-2000:], f"the process ended with status {child.returncode}", sep="\n")
sys.exit({0: 0, -11: 1}.get(child.returncode, 2))
