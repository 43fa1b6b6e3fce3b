"""torch.compile with freezing: an int8 product with scales to which a tensor is added overwrites that tensor.

The product becomes a quantised linear that adds in place, and the caller's own tensor is what it returns.  Where that is
bf16 and the result f32, what comes back is bf16.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys
import torch, torch._inductor.config

torch.manual_seed(0)
weight = torch.nn.Parameter(torch.randint(-100, 100, (32, 40), dtype=torch.int8), requires_grad=False)
scales = torch.nn.Parameter(torch.rand(32) / 1000, requires_grad=False)


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.scales = weight, scales

    def forward(self, a, scale, addend):
        return torch._int_mm(a, self.weight.mT).to(torch.float32) * scale * self.scales + addend


a, scale, wrong = torch.randint(-100, 100, (20, 40), dtype=torch.int8), torch.tensor(0.01), 0
for dtype in (torch.float32, torch.bfloat16):
    addend = torch.rand(20, 32).to(dtype)
    before = addend.clone()
    torch._dynamo.reset()
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        got = torch.compile(Module())(a, scale, addend)
    is_same = torch.equal(addend, before)
    print(f"{dtype}: the addend is {'as it was' if is_same else 'overwritten'}; the result is {got.dtype}, expected torch.float32")
    wrong += not is_same or got.dtype != torch.float32
sys.exit(int(wrong > 0))
