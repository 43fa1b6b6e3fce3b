"""experts: a mixture of experts, whole: each token goes through the gated layers of the experts that a router chose.

What a user writes with two grouped products is one kernel in vLLM, SGLang, FlashInfer and TensorRT-LLM.
"""

from __future__ import annotations

from typing import Any, Final

from pytest_gemm.problem.layout import Layout
from pytest_gemm.problem.ops.op import Complaints, Matmul, Op, Problem, Tensor, Tensors, dtype_of


def sorted_by_expert(torch: Any, ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The order that brings the choices of all tokens together by expert, and where each expert's end, int32.

    Args:
        torch: the module.
        ids: the experts of each token, (T, k).
        experts: how many there are.
    """
    chosen = ids.flatten()
    order = chosen.argsort(stable=True)
    ends = torch.searchsorted(chosen[order], torch.arange(experts, dtype=ids.dtype, device=ids.device), right=True)
    return order, ends.to(torch.int32)


def _layers(torch: Any, p: Problem, t: Tensors, grouped: Any) -> Tensor:
    """Gather by expert, product, gate, product, and the sum of each token's experts by their weights, in f32."""
    ids = t["ids"]
    order, ends = sorted_by_expert(torch, ids, p.shape.batch)
    gate, up = grouped(t["a"][order // p.choices], t["b"].mT, ends).chunk(2, -1)
    made = grouped(torch.nn.functional.silu(gate) * up, t["down"].mT, ends)
    weighted = made * t["weights"].flatten()[order, None]
    return weighted[order.argsort()].unflatten(0, ids.shape).sum(1).to(dtype_of(torch, p))


def _native(torch: Any, p: Problem, t: Tensors) -> Tensor:
    return _layers(torch, p, t, lambda x, w, ends: torch.nn.functional.grouped_mm(x, w, offs=ends))


def _around(torch: Any, p: Problem, t: Tensors, matmul: Matmul) -> Tensor:
    def grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        """The product of each expert's rows; ``matmul`` is not called for an expert without any."""
        pieces, first = [x.new_empty((0, w.shape[-1]))], 0
        for expert, last in enumerate(ends.tolist()):
            if last > first:
                pieces.append(matmul(x[first:last], w[expert]))
            first = last
        return torch.cat(pieces)

    return _layers(torch, p, t, grouped)


def _check(p: Problem) -> Complaints:
    top, shape = p.step("top"), p.shape
    if top is None:
        yield "epilogue", 0, "experts needs the number of experts of a token", "write top-1, top-2 or more"
    for index, step in enumerate(p.epilogue):
        if step.name != "top":
            yield "epilogue", index, f"experts takes no step {step}", "top-2, for example, stands alone"
    if top is not None and p.choices > shape.batch:
        yield "shape", 0, f"{shape.batch} experts are fewer than {top} chooses", f"write {p.choices} or more"
    if shape.n % 2 or not shape.n:
        yield "shape", 2, f"N={shape.n} has no two halves", "N is the gate and what it multiplies: an even number"
    if not shape.k:
        yield "shape", 3, "K=0", "a token has elements"


OPS: Final = (
    Op(
        "experts",
        "always",
        ("f32", "bf16"),
        _native,
        _around,
        help="mixture of experts: for each token the weighted sum of its experts' (silu(x @ gate) * (x @ up)) @ down",
        constant_b=False,
        layouts=(Layout.NT,),
        flags=("b.argument", "routing.crowded"),
        one_a=True,
        routed=True,
        check=_check,
    ),
)
