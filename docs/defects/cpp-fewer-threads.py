"""Inductor's C++ GEMM template, compiled for all cores and run with one thread, leaves out the blocks of the others.

pytorch/pytorch issue 168965: torch 2.11.  Since 2.13 the threads share a loop over the blocks.  torch.compile guards on
the number of threads and would compile again; a package of AOTInductor's does not.
Needs torch, a C++ compiler and two cores.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys
import tempfile
import torch

options = {"max_autotune": True, "max_autotune_gemm_backends": "CPP", "freezing": True}
x, linear = torch.randn(256, 64), torch.nn.Linear(64, 256, bias=False)
with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
    program = torch.export.export(linear, (x,))
    path = f"{folder}/linear.pt2"
    torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=options)
    compiled = torch._inductor.aoti_load_package(path)
    torch.set_num_threads(1)
    torch.full((256, 256), float("nan"))  # what the allocator hands out next
    wrong = int((~torch.isclose(compiled(x), linear(x), rtol=1e-4, atol=1e-5)).sum())
print(f"{wrong} of {256 * 256} elements are wrong")
sys.exit(int(wrong > 0))
