"""linear:f32:nt:17x49x65:bias+relu:m.dynamic on inductor: incorrect: relu(NaN) is 0

A frozen linear for any number of rows becomes oneDNN's ``_linear_pointwise`` with the step inside, and oneDNN's relu
(hardtanh, hardsigmoid) makes a number of a NaN.  Eager PyTorch keeps the NaN.

Needs torch alone.  Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""
import sys
import torch, torch._inductor.config

OPTIONS = {'freezing': True, 'max_autotune': True, 'max_autotune_gemm_backends': 'ATEN', 'fx_graph_cache': False}
STEPS = {'relu': torch.nn.ReLU(), 'hardtanh': torch.nn.Hardtanh(), 'hardsigmoid': torch.nn.Hardsigmoid()}

torch.manual_seed(0)
x = torch.randn(17, 65)
x[3, 5] = float("nan")
wrong = []
for name, step in STEPS.items():
    model = torch.nn.Sequential(torch.nn.Linear(65, 49), step).eval()
    with torch.no_grad(), torch._inductor.config.patch(OPTIONS):
        compiled = torch.compile(model, dynamic=True)(x)
        eager = model(x)
    print(f"{name}: eager has {int(eager.isnan().sum())} NaN, compiled {int(compiled.isnan().sum())}")
    if not torch.equal(eager.isnan(), compiled.isnan()):
        wrong.append(name)
sys.exit(int(bool(wrong)))
