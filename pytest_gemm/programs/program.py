"""The PyTorch program of a problem: what a user would have written, and what every backend computes.

``args(problem, operands)`` are its tensors in order and ``build(problem)`` the function over them.  Eager
ATen runs it as it is, Inductor compiles it, a plain callable replaces the matrix product in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from pytest_gemm.operands import views
from pytest_gemm.operands.dtypes import torch_dtype
from pytest_gemm.problem.ops.woq import THIRDS
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import Step, StepKind

if TYPE_CHECKING:
    from pytest_gemm.operands.tensors import Operands


Matmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# A tensor, for ``tap``, ``fork`` and ``again`` a tuple of two, for ``linears`` one of as many as there are products.
Program = Callable[..., Any]


@contextlib.contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """A block in which PyTorch has so many CPU threads, more than there are cores too; 0 changes nothing."""
    before = torch.get_num_threads()
    if count in {0, before}:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def args(problem: Problem, operands: Operands) -> dict[str, torch.Tensor]:
    """The program's tensors by name, in order: a, b, scale_a, zero_a, scale, zero_b, quantisation, offs, bias, r0 ...

    ``b`` is the stored N x K weight for the weight ops, not packed, the (K, N) view otherwise; it is absent where
    B is A, and so is ``r0`` for ``r0.alias``.  Of a residual that is looked up ``r0`` is the table and ``i0`` the
    index.  ``linears`` have a weight and a bias for each product: b0, b1 ...; with ``program.concat`` there are b0 and
    scale0 to b2 and scale2, views of B and of its scales.
    """
    if problem.op.several:
        return _args_of_linears(problem, operands)

    def deep(x: torch.Tensor) -> torch.Tensor:
        """With the batch as the program has it."""
        return x.unflatten(0, (2, -1)) if problem.is_deep else x

    found: dict[str, torch.Tensor] = {"a": deep(operands.a)}
    if not problem.b_is_a:
        found["b"] = operands.b.mT if problem.op.weight else operands.b
    if operands.scale_a is not None:
        found["scale_a"] = operands.scale_a
    if operands.zero_a is not None:
        found["zero_a"] = operands.zero_a
    if operands.scale_b is not None:
        found["scale" if problem.op.converts else "scale_b"] = operands.scale_b
    if operands.zero_b is not None:
        found["zero_b"] = operands.zero_b
    if operands.quantisation is not None:
        found["quantisation"] = operands.quantisation
    if operands.offs is not None:
        found["offs"] = operands.offs
    if problem.has("program.concat"):
        weights, scales = found.pop("b").chunk(THIRDS), found.pop("scale").chunk(THIRDS)
        found |= {f"b{index}": weight for index, weight in enumerate(weights)}
        found |= {f"scale{index}": scale for index, scale in enumerate(scales)}
    if operands.bias is not None:
        found["bias"] = operands.bias
    for index, residual in enumerate(operands.residuals):
        if index > 0 or not problem.has("r0.alias"):
            found[f"r{index}"] = views.taken(problem, index, residual)
    for index, (table, rows) in operands.lookups.items():
        found |= {f"r{index}": table, f"i{index}": deep(rows)}
    return found


def _args_of_linears(problem: Problem, operands: Operands) -> dict[str, torch.Tensor]:
    """One input, and what belongs to each of its products."""
    a = operands.a
    found = {"a": a.unflatten(0, (2, -1)) if problem.has("a.3d") else a}
    found.update((f"b{index}", weight.mT) for index, weight in enumerate(operands.b))
    if operands.bias is not None:
        own = (index for index in range(len(operands.b)) if problem.is_one_of("bias", index))
        found.update((f"bias{index}", operands.bias[index, 0]) for index in own)
    found.update((f"r{index}", residual) for index, residual in enumerate(operands.residuals))
    return found


def packed(problem: Problem, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of :func:`args` with the weight packed where the op takes a packed one."""
    if problem.op.pack is None:
        return tensors
    return {**tensors, "b": problem.op.pack(torch, problem, tensors["b"])}


def derived(problem: Problem, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a compiler makes of several constants of the program, by what it makes it of: ``"b+scale_b:sums"``."""
    return problem.op.derived(torch, problem, dict(tensors)) if problem.op.derived is not None else {}


def _product(problem: Problem, matmul: Matmul | None) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    """The product with its own addend, before any pass; with ``matmul`` in place of PyTorch's if given."""
    op = problem.op

    def product(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        if problem.b_is_a:
            a = tensors["a"]
            tensors = {**tensors, "b": a if op.weight or problem.has("b.alias") else a.mT}
        made: torch.Tensor
        made = op.native(torch, problem, tensors) if matmul is None else op.around(torch, problem, tensors, matmul)
        return made

    return product


def build(problem: Problem, matmul: Matmul | None = None, *, is_packed: bool = False) -> Program:
    """The function over the tensors of :func:`args`, passed by keyword.

    Args:
        problem: what to compute.
        matmul: a replacement for the matrix product; everything around it stays eager PyTorch.
        is_packed: whether the weight comes packed already (:func:`packed`), where the op takes a packed one.
    """
    if problem.op.several:
        return _linears(problem, matmul)
    product = _product(problem, matmul)
    chain = () if problem.op.fused_steps else problem.chain
    forks = problem.has("program.branching")
    packs = matmul is None and not is_packed

    def program(**tensors: torch.Tensor) -> Any:
        if packs:
            tensors = packed(problem, tensors)
        if problem.has("r0.alias"):
            tensors["r0"] = tensors["a"]
        if problem.autocast:
            half = torch_dtype(problem.input_dtype)
            tensors.update((name, tensors[name].to(half)) for name in ("a", "b", "bias") if name in tensors)
        x = tapped = product(tensors)
        index = 0
        for place, step in enumerate(chain):
            residual = None
            if step.kind is StepKind.BIAS:
                residual = tensors["bias"]
            elif step.kind is StepKind.BINARY:
                residual = tensors[f"r{index}"]
                if step.extent == "at":
                    residual = F.embedding(tensors[f"i{index}"], residual)
                index += 1
            before = tapped if forks and place == len(chain) - 1 else x
            moving = step.kind is StepKind.VIEW
            tapped, x = x, views.forth(before, [step]) if moving else step.apply(torch, before, residual)
        if problem.has("program.chained"):
            return x, product({**tensors, "a": x})
        return (tapped, x) if problem.has("program.multi_output") or forks else x

    return program


def _of_one(tensors: dict[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
    """The tensors of one of the products of ``linears``, under the names of a single one."""
    own = {name: tensors[f"{name}{index}"] for name in ("b", "bias") if f"{name}{index}" in tensors}
    return {"a": tensors["a"], **own}


def _linears(problem: Problem, matmul: Matmul | None) -> Program:
    """Several linears of one input: a tuple of their results, or with ``gated`` the one that is made of two."""
    count, passes = problem.shape.batch or 0, problem.passes
    joined, product = problem.step("gated"), _product(problem, matmul)

    def steps(x: torch.Tensor, tensors: dict[str, torch.Tensor], index: int | None) -> torch.Tensor:
        """The passes but for a join; ``index`` of the product that x is, ``None`` after a join."""
        binaries = 0
        for step in passes:
            if step.kind is StepKind.JOIN:
                continue
            residual = None
            if step.kind is StepKind.BINARY:
                residual = tensors[f"r{binaries}"]
                residual = residual if index is None else residual[index]
                residual = residual.unflatten(0, (2, -1)) if problem.has("a.3d") else residual
                binaries += 1
            x = step.apply(torch, x, residual)
        return x

    def program(**tensors: torch.Tensor) -> Any:
        if problem.autocast:
            half = torch_dtype(problem.input_dtype)
            tensors.update((n, t.to(half)) for n, t in list(tensors.items()) if n.rstrip("0123456789") in _CONVERTED)
        found = [product(_of_one(tensors, index)) for index in range(count)]
        if joined is not None:
            gate = Step(joined.text).apply(torch, found[0], None) * found[1]
            found = [steps(gate, tensors, None)]
        else:
            found = [steps(x, tensors, i) if problem.is_one_of("steps", i) else x for i, x in enumerate(found)]
        if problem.has("out.2d"):
            found = [x.flatten(0, 1) for x in found]
        return found[0] if joined is not None else tuple(found)

    return program


# What autocast converts, by the name of the argument without its number.
_CONVERTED = frozenset({"a", "b", "bias"})


def gathered(problem: Problem, results: tuple[Any, ...]) -> tuple[Any, ...]:
    """The results of a program as they are judged: those of ``linears`` as one tensor, (G, M, N), or (M, N).

    What cannot be put together is returned as it is: the judge says what is wrong with it.
    """
    tensors = [r for r in results if isinstance(r, torch.Tensor)]
    if problem.has("a.3d") and not problem.has("out.2d") and len(tensors) == len(results):
        rows = (2, problem.shape.m // 2)
        results = tuple(r.flatten(0, 1) if r.shape[:2] == rows else r for r in tensors)
    if not problem.several:
        return results
    alike = len(tensors) == len(results) and len({(r.shape, r.dtype, r.device) for r in results}) == 1
    return (torch.stack(results),) if alike else results[:1]
