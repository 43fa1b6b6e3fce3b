"""0.5 * bias - a @ b on Hopper: ptxas leaves the product out where the sign of its sum is flipped as an integer.

CUDA 12.8's and 12.9's assembler, as Triton 3.5 to 3.8 brings it.  LLVM writes -x beside a fused multiply-add as
"xor.b32 x, x, 0x80000000"; where x comes straight out of an unrolled loop of wgmma, ptxas replaces every wgmma by one
that reads and writes nothing.  abs(a @ b) + bias, by "and.b32", ends alike.  CUDA 13.0's ptxas is right; name it in
TRITON_PTXAS_PATH.  Needs triton alone, and no GPU: the machine code is read.
Exit status: 1 the failure is there, 0 it is not.
"""
import subprocess, sys, tempfile
from pathlib import Path
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def product(bias, a_ptr, b_ptr, out, K: tl.constexpr, ABS: tl.constexpr, PLAIN: tl.constexpr):
    m, n, k = tl.arange(0, 64), tl.arange(0, 16), tl.arange(0, 16)
    acc = tl.zeros((64, 16), dtype=tl.float32)
    for i in range(0, K // 16):
        a = tl.load(a_ptr + m[:, None] + 64 * (k + 16 * i)[None, :])
        b = tl.load(b_ptr + (k + 16 * i)[:, None] + K * n[None, :])
        acc += tl.dot(a, b, out_dtype=tl.float32)
    c = tl.load(bias + tl.broadcast_to(n[None, :], [64, 16])).to(tl.float32)
    if PLAIN:
        acc = acc + c
    elif ABS:
        acc = tl.abs(acc) + c
    else:
        acc = 0.5 * c - acc
    tl.store(out + 16 * m[:, None] + n[None, :], acc)


def dropped(k, absolute=False, plain=False):
    """How many of a kernel's wgmma instructions are empty, and how many it has."""
    given = ("bias", "a_ptr", "b_ptr", "out")
    constants = dict(K=k, ABS=absolute, PLAIN=plain)
    signature = dict.fromkeys(given, "*bf16") | dict.fromkeys(constants, "constexpr")
    source = ASTSource(product, signature, constants, {(i,): [["tt.divisibility", 16]] for i in range(4)})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_stages": 2, "num_warps": 4})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        text = subprocess.run([triton.knobs.nvidia.nvdisasm.path, file.name], capture_output=True, text=True, check=True)
    found = [line for line in text.stdout.splitlines() if "HGMMA" in line]
    return sum(" RZ, gdesc[URZ]" in line for line in found), len(found)


wrong = 0
for k in (32, 64, 1024):
    for words, what in (("a @ b + bias", {"plain": True}), ("0.5 * bias - a @ b", {}), ("abs(a @ b) + bias", {"absolute": True})):
        empty, all_ = dropped(k, **what)
        wrong += empty
        print(f"triton {triton.__version__}, K = {k}: {words}: {empty} of {all_} wgmma instructions are empty")
sys.exit(int(wrong > 0))
