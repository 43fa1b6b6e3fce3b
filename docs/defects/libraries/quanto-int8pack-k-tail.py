"""optimum-quanto on a CPU gives a bf16 linear with an i8 weight to an ATen kernel that is wrong where K % 16 > 0.

Needs optimum-quanto and torch.  Exit status: 1 the failure is there, 0 it is not.
"""

import subprocess
import sys

SCRIPT = """
import optimum.quanto, torch
a, b = torch.ones(3, 1000, dtype=torch.bfloat16), torch.ones(64, 1000, dtype=torch.int8)
made = torch.ops.quanto.qbytes_mm(a, b, torch.ones(64, 1, dtype=torch.bfloat16))
wrong = int((made != 1000).sum())
print(f"{wrong} of {made.numel()} sums of 1000 ones are not 1000: {made.flatten()[:3].tolist()}")
raise SystemExit(int(wrong > 0))
"""
# What the kernel reads behind the operands decides: a number, NaN, or the end of the process.
ended = subprocess.run([sys.executable, "-c", SCRIPT], check=False).returncode
print(f"exit status {ended}")
sys.exit(int(ended != 0))
