"""Eager mm(c, b, out=c) and bmm(c, b, out=c) on the CPU: the operand is overwritten before it is read, without an error.

PyTorch's "Out Notes" call out= numerically equivalent to computing the result and copying it, and name no exception.
torch 2.13: f32 and f64 are zeros (MKL clears the result first), bf16 and f16 partly wrong by size and layout (oneDNN);
torch.compile is right.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys
import torch

wrong = 0
for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
    for function, batch in ((torch.mm, ()), (torch.bmm, (3,))):
        n = torch.arange(66 * 66).reshape(66, 66)
        a, b = ((n * k % 7 - 3).to(dtype).repeat(*batch, 1, 1) for k in (3, 5))
        right, c = function(a, b), a.clone()
        function(c, b, out=c)
        if not torch.equal(c, right):
            wrong += 1
            bad, zeros = int((c != right).sum()), int((c == 0).sum())
            print(f"{function.__name__}(c, b, out=c) in {dtype}: {bad} of {c.numel()} elements are wrong, {zeros} are 0")
sys.exit(int(wrong > 0))
