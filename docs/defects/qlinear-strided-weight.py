"""onednn::qlinear_prepack takes a weight with a gap between its rows for a contiguous one.

Needs torch only.  Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""

import sys
import traceback

import torch

torch.set_num_threads(1)
op = torch.ops.onednn
m, n, k = 4, 32, 64


def product(w: torch.Tensor) -> torch.Tensor:
    """1 @ w.T in f32."""
    x, zeros = torch.ones(m, k, dtype=torch.uint8), torch.zeros(n, dtype=torch.int32)
    packed = op.qlinear_prepack(w, None)
    return op.qlinear_pointwise(
        x, 1.0, 0, packed, torch.ones(n), zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )


try:
    wide = (torch.arange(n * (k + 8)) % 7 - 3).to(torch.int8).reshape(n, k + 8)
    view = wide[:, :k]
    expected, strided, dense = view.sum(1).float(), product(view)[0], product(view.contiguous())[0]
    print(f"contiguous: {int((dense != expected).sum())} of {n} columns are wrong")
    print(f"a view of {k} of {k + 8} columns: {int((strided != expected).sum())} of {n} columns are wrong")
    status = int(not torch.equal(strided, expected))
except Exception:
    traceback.print_exc()
    status = 2
sys.exit(status)
