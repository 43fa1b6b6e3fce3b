"""torch._scaled_mm on a processor with AMX where ONEDNN_MAX_CPU_ISA leaves oneDNN no fp8 kernel: it raises.

Start it with ONEDNN_MAX_CPU_ISA=AVX512_CORE.  A processor without AMX is right: PyTorch does not ask oneDNN there.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys
import torch

a, one = torch.ones(32, 64).to(torch.float8_e4m3fn), torch.ones(())
try:
    print("a product of ones:", float(torch._scaled_mm(a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)[0, 0]))
except RuntimeError as error:
    print(error)
    sys.exit(1)
