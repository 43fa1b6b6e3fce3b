"""torch._weight_int8pack_mm in bf16 with AVX-512 loads the weight as if it began at a multiple of 16 bytes.

Needs torch alone.  Exit status: 1 the failure (a segmentation fault) is there, 0 it is not.
"""
import subprocess
import sys

import torch

if "child" not in sys.argv:
    status = subprocess.run([sys.executable, __file__, "child"]).returncode
    print("the process ended with status", status)
    sys.exit(int(status < 0))
a, scale = torch.ones(3, 32).bfloat16(), torch.ones(13).bfloat16()
torch._weight_int8pack_mm(a, torch.ones(13 * 32 + 1, dtype=torch.int8)[1:].view(13, 32), scale)
