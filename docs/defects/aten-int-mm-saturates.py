"""torch._int_mm on a processor with VNNI where ONEDNN_MAX_CPU_ISA keeps oneDNN from it: pairs of products saturate.

Start it with ONEDNN_MAX_CPU_ISA=AVX2 or AVX512_CORE.  A processor without VNNI is right: PyTorch does not ask oneDNN there.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys
import torch

a, b = torch.full((17, 64), 127, dtype=torch.int8), torch.full((64, 32), 127, dtype=torch.int8)
c = torch._int_mm(a, b)
print(f"expected {127 * 127 * 64}, actual {int(c[0, 0])}")
sys.exit(int(bool((c != 127 * 127 * 64).any())))
