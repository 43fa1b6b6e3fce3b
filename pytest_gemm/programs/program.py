"""The PyTorch program of a problem: what a user would have written, and what every backend computes.

``args(problem, operands)`` are its tensors in order and ``build(problem)`` the function over them.  Eager
ATen runs it as it is, Inductor compiles it, a plain callable replaces the matrix product in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from pytest_gemm.operands import prologues, views
from pytest_gemm.operands.dtypes import torch_dtype
from pytest_gemm.problem.ops.op import called
from pytest_gemm.problem.ops.woq import THIRDS
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import Step, StepKind

if TYPE_CHECKING:
    from pytest_gemm.operands.tensors import Operands


Matmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# It returns a tensor; for ``multi_output``, ``branching`` and ``chained`` a tuple of two; for ``linears`` a tuple of as
# many as there are products.
Program = Callable[..., Any]


def args(problem: Problem, operands: Operands) -> dict[str, torch.Tensor]:
    """The program's tensors by name, in the order of the fields of :class:`Operands`.

    They are a, b, scale_a, zero_a, scale, zero_b, quantisation, offs, bias, out, r0.  ``b`` is the stored N x K weight
    for the weight ops, not packed, the (K, N) view otherwise.  Where the program makes A or B itself, it is the larger
    tensor, as it is stored.  ``b`` is absent where B is A, and so is ``r0`` for ``r0.alias``.  With ``out.addend``
    there is ``out`` and no ``bias``, with ``out.alias`` ``a`` and no ``out``.  Of a residual that is looked up ``r0``
    is the table and ``i0`` the index.  ``linears`` have a weight and a bias for each product: b0, b1 ...; with
    ``program.concat`` there are b0 and scale0 to b2 and scale2, views of B and of its scales.  With ``groups.labels``
    there is ``labels`` in place of ``offs``, and with ``groups.masked`` ``counts``.
    """
    op, found, tensors = problem.op, dict[str, torch.Tensor](), operands.tensors
    if problem.has("groups.labels"):
        del tensors["offs"]
    if problem.has("out.addend"):
        del tensors["bias"]
    elif problem.has("out.alias"):
        tensors["a"] = tensors.pop("out")
    for field, x in tensors.items():
        name = "scale" if field == "scale_b" and op.converts and not op.coded else field
        if name == "a":
            found[name] = views.given_whole(problem, name, x) if problem.view_of(name) else _deep(problem, x)
        elif name == "b":
            if problem.view_of(name):
                found[name] = views.given_whole(problem, name, x)
            elif not problem.b_is_a:
                weight = x.mT if op.weight or op.several else x
                found |= _numbered(name, weight) if op.several else _thirds(problem, name, weight)
        elif name == "bias" and op.several:
            own = _numbered(name, x[:, 0])
            found |= {n: bias for i, (n, bias) in enumerate(own.items()) if problem.is_one_of("bias", i)}
        elif name == "bias" and problem.step("bias") == Step("bias", "xn"):
            found[name] = x.expand(problem.result_shape)
        else:
            found |= _thirds(problem, name, x)
    for index, residual in enumerate(operands.residuals):
        if index > 0 or not problem.has("r0.alias"):
            found[f"r{index}"] = views.taken(problem, index, residual)
    for index, (table, rows) in operands.lookups.items():
        found |= {f"r{index}": table, f"i{index}": _deep(problem, rows)}
    return found


def _deep(problem: Problem, x: torch.Tensor) -> torch.Tensor:
    """With the batch or the rows as the program has them."""
    return x.unflatten(0, (2, -1)) if problem.is_deep or problem.has("a.3d") else x


def _numbered(name: str, parts: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{name}{index}": part for index, part in enumerate(parts)}


def _thirds(problem: Problem, name: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensor, or what ``program.concat`` makes of a weight and of its scales."""
    parts = problem.has("program.concat") and name in {"b", "scale"}
    return _numbered(name, x.chunk(THIRDS)) if parts else {name: x}


def packed(problem: Problem, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of :func:`args` with the weight packed where the op takes a packed one."""
    if problem.op.pack is None or problem.has("program.pt2e"):
        return tensors
    return {**tensors, "b": problem.op.pack(torch, problem, tensors)}


def derived(problem: Problem, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a compiler makes of constants of the program, by what it makes it of: ``"b+scale_b:sums"``."""
    found = {} if problem.op.derived is None else dict(problem.op.derived(torch, problem, dict(tensors)))
    if "b" in tensors and problem.prologues("b"):
        found["b:prologue"] = prologues.after(problem, "b", tensors["b"])
    return found


def _converted(problem: Problem, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What autocast makes of A, of each B and of each bias."""
    if not problem.autocast:
        return tensors
    half = torch_dtype(problem.input_dtype)
    names = [name for name in tensors if name.rstrip("0123456789") in {"a", "b", "bias"}]
    return {**tensors, **{name: tensors[name].to(half) for name in names}}


def _product(problem: Problem, tensors: dict[str, torch.Tensor], matmul: Matmul | None) -> torch.Tensor:
    """The product with its own addend, before any pass; with ``matmul`` in place of PyTorch's if given."""
    op = problem.op
    if problem.b_is_a:
        a = tensors["a"]
        tensors = {**tensors, "b": a if op.weight or problem.has("b.alias") else a.mT}
    if problem.has("groups.labels"):
        tensors = {**tensors, "offs": called(torch, "ends", _ends, tensors["labels"], problem.shape.batch)}
    made: torch.Tensor
    if matmul is None:
        kept = {name: x for name, x in tensors.items() if name != "out" or problem.has("out.given")}
        made = op.native(torch, problem, kept)
    else:
        made = op.around(torch, problem, tensors, matmul)
        made = tensors["out"].copy_(made) if problem.has("out.given") else made
    if problem.has("groups.masked"):
        made = called(torch, "masked", _masked, made, tensors["counts"])
    elif problem.has("groups.zeroed"):
        made = called(torch, "masked", _masked, made, tensors["offs"][-1])
    return made


def _ends(labels: torch.Tensor, groups: int) -> torch.Tensor:
    """Where groups end, of the group of each row; a negative one is that of no group."""
    mine = torch.arange(groups, device=labels.device)
    return ((labels >= 0)[:, None] & (labels[:, None] <= mine)).sum(0, dtype=torch.int32)


def _masked(c: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Zeros in the rows of each matrix beyond its count."""
    rows = torch.arange(c.shape[-2], device=c.device)
    return torch.where((rows < counts[..., None])[..., None], c, 0.0)


def build(problem: Problem, matmul: Matmul | None = None, *, is_packed: bool = False) -> Program:
    """The function over the tensors of :func:`args`, passed by keyword.

    Args:
        problem: what to compute.
        matmul: a replacement for the matrix product; everything around it stays eager PyTorch.
        is_packed: whether the weight comes packed already (:func:`packed`), where the op takes a packed one.
    """
    if problem.op.several:
        return _linears(problem, matmul)
    chain = () if problem.op.fused_steps else problem.chain
    forks = problem.has("program.branching")

    def program(**tensors: torch.Tensor) -> Any:
        if matmul is None and not is_packed:
            tensors = packed(problem, tensors)
        tensors |= {name: views.cut(problem, name, tensors[name]) for name in ("a", "b") if problem.view_of(name)}
        if problem.has("r0.alias"):
            tensors["r0"] = tensors["a"]
        if problem.has("out.addend"):
            tensors["bias"] = tensors["out"]
        elif problem.has("out.alias"):
            tensors["out"] = tensors["a"]
        tensors = _converted(problem, tensors)
        tensors |= {name: prologues.after(problem, name, tensors[name]) for name in "ab" if problem.prologues(name)}
        x = first = _product(problem, tensors, matmul)
        index = 0
        for place, step in enumerate(chain):
            residual = tensors["bias"] if step.kind is StepKind.BIAS else None
            if step.kind is StepKind.BINARY:
                residual = tensors[f"r{index}"]
                if step.extent == "at":
                    residual = F.embedding(tensors[f"i{index}"], residual)
                index += 1
            before = first if forks and place == len(chain) - 1 else x
            before = tensors["a"] if step == Step("sums", "k") else before
            moving = step.kind is StepKind.VIEW
            first, x = x, views.forth(before, [step]) if moving else step.apply(torch, before, residual)
        if problem.has("out.copied"):
            return tensors["out"].copy_(x)
        if problem.has("program.chained"):
            return x, _product(problem, {**tensors, "a": x}, matmul)
        return (first, x) if problem.has("program.multi_output") or forks else x

    return program


def _linears(problem: Problem, matmul: Matmul | None) -> Program:
    """Several linears of one input: a tuple of their results, or with ``gated`` the one that is made of two."""
    passes, joined = [step for step in problem.passes if step.kind is not StepKind.JOIN], problem.step("gated")

    def product(tensors: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        own = {name: tensors[f"{name}{index}"] for name in ("b", "bias") if f"{name}{index}" in tensors}
        return _product(problem, {"a": tensors["a"], **own}, matmul)

    def steps(x: torch.Tensor, residuals: Iterator[torch.Tensor]) -> torch.Tensor:
        for step in passes:
            residual = _deep(problem, next(residuals)) if step.kind is StepKind.BINARY else None
            x = step.apply(torch, x, residual)
        return x

    def program(**tensors: torch.Tensor) -> Any:
        tensors = _converted(problem, tensors)
        found = [product(tensors, index) for index in range(problem.shape.batch or 0)]
        residuals = [tensors[f"r{index}"] for index in range(len(problem.residuals))]
        if joined is not None:
            gate = Step(joined.text).apply(torch, found[0], None) * found[1]
            found = [steps(gate, iter(residuals))]
        else:
            for index in range(len(found)):
                if problem.is_one_of("steps", index):
                    found[index] = steps(found[index], (residual[index] for residual in residuals))
        if problem.has("out.2d"):
            found = [x.flatten(0, 1) for x in found]
        return found[0] if joined is not None else tuple(found)

    return program


def gathered(problem: Problem, results: tuple[Any, ...]) -> tuple[Any, ...]:
    """The results of a program as they are judged: those of ``linears`` as one tensor, (G, M, N), or (M, N).

    What cannot be put together is returned as it is: the judge reports it.
    """
    tensors = [r for r in results if isinstance(r, torch.Tensor)]
    if problem.has("a.3d") and not problem.has("out.2d") and len(tensors) == len(results):
        rows = (2, problem.shape.m // 2)
        results = tuple(r.flatten(0, 1) if r.shape[:2] == rows else r for r in tensors)
    if not problem.several:
        return results
    alike = len(tensors) == len(results) and len({(r.shape, r.dtype, r.device) for r in results}) == 1
    return (torch.stack(results),) if alike else results[:1]
