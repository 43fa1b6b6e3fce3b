"""torch._weight_int8pack_mm in bf16 loads the rows of A as if each began at an aligned address: a segmentation fault.

The rows of a padded A are 1000 elements apart, K is 992.  torch 2.13 on a CPU with AMX.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import subprocess, sys

PRODUCT = """
import torch
wide = torch.rand(40, 1000).bfloat16()
weight = torch.randint(-128, 128, (33, 992), dtype=torch.int8)
torch._weight_int8pack_mm(wide[:, :992], weight, torch.rand(33).bfloat16())
"""
status = subprocess.run([sys.executable, "-c", PRODUCT], check=False).returncode
print(f"exit status of the product: {status}")
sys.exit(int(status != 0))
