"""torch.compile with freezing: a PT2E linear to which a tensor is added overwrites that tensor, also where the program adds a copy.

relu(linear(dequantised) + addend) becomes a quantised linear that adds in place ("sum"), and the caller's own tensor is what
it returns.  Inductor takes the copy out of the program.  Where the addend is bf16 and the result f32, what comes back is bf16.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys
import torch, torch._inductor.config, torch.ao.quantization.fx._decomposed

torch.manual_seed(0)
q, (rows, n, k) = torch.ops.quantized_decomposed, (17, 64, 128)


class Module(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        parts = torch.randint(-100, 100, (n, k), dtype=torch.int8), torch.rand(n) / 100, torch.zeros(n, dtype=torch.int32)
        self.w, self.s, self.z = (torch.nn.Parameter(x, requires_grad=False) for x in parts)
        self.dtype = dtype

    def forward(self, a, addend):
        a = q.dequantize_per_tensor.default(a, 0.01, 7, 0, 255, torch.uint8).to(self.dtype)
        w = q.dequantize_per_channel.default(self.w, self.s, self.z, 0, -128, 127, torch.int8).to(self.dtype)
        return torch.relu(torch.nn.functional.linear(a, w) + addend.clone())


wrong = 0
for dtype, added in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)):
    module, a = Module(dtype), torch.randint(0, 128, (rows, k), dtype=torch.uint8)
    addend = torch.randn(rows, n).to(added)
    before, expected = addend.clone(), module(a, addend)
    torch._dynamo.reset()
    with torch.no_grad(), torch._inductor.config.patch(freezing=True, fx_graph_cache=False):
        got = torch.compile(module)(a, addend)
    is_same = torch.equal(addend, before)
    print(f"{dtype} + {added}: the addend is {'as it was' if is_same else 'overwritten'}; the result is {got.dtype}, expected {expected.dtype}")
    wrong += not is_same or got.dtype != expected.dtype
sys.exit(int(wrong > 0))
