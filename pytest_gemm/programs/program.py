"""The PyTorch program of a problem: what a user would have written, and what every backend computes.

``args(problem, operands)`` are its tensors in order and ``build(problem)`` the function over them.  Eager
ATen runs it as it is, Inductor compiles it, a plain callable replaces the matrix product in it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from pytest_gemm.operands import views
from pytest_gemm.operands.dtypes import torch_dtype
from pytest_gemm.problem.ops import PACKED_OPS, THIRDS, WEIGHT_OPS
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
    """The program's tensors by name, in order: a, b, scale_a, zero_a, scale, zero_b, affine, offs, bias, r0 ..., i0 ...

    ``b`` is the stored N x K weight for the weight ops, not packed, the (K, N) view otherwise; it is absent for
    ``self``, and so is ``r0`` for ``res-a``.  Of a residual that is looked up ``r0`` is the table and ``i0`` the index.
    ``linears`` have a weight and a bias for each product: b0, b1 ...; with ``concat`` there are b0 and scale0 to b2
    and scale2, views of B and of its scales.
    """
    if problem.op.name == "linears":
        return _args_of_linears(problem, operands)

    def deep(x: torch.Tensor) -> torch.Tensor:
        """With the batch as the program has it."""
        return x.unflatten(0, (2, -1)) if problem.is_deep else x

    found: dict[str, torch.Tensor] = {"a": deep(operands.a)}
    if not problem.b_is_a:
        found["b"] = operands.b.mT if problem.op.name in WEIGHT_OPS else operands.b
    if operands.scale_a is not None:
        found["scale_a"] = operands.scale_a
    if operands.zero_a is not None:
        found["zero_a"] = operands.zero_a
    if operands.scale_b is not None:
        found["scale" if problem.op.name == "woq_int8" else "scale_b"] = operands.scale_b
    if operands.zero_b is not None:
        found["zero_b"] = operands.zero_b
    if operands.affine is not None:
        found["affine"] = operands.affine
    if operands.offs is not None:
        found["offs"] = operands.offs
    if problem.has("concat"):
        weights, scales = found.pop("b").chunk(THIRDS), found.pop("scale").chunk(THIRDS)
        found |= {f"b{index}": weight for index, weight in enumerate(weights)}
        found |= {f"scale{index}": scale for index, scale in enumerate(scales)}
    if operands.bias is not None:
        found["bias"] = operands.bias
    for index, residual in enumerate(operands.residuals):
        if index > 0 or not problem.has("res-a"):
            found[f"r{index}"] = views.taken(problem, index, residual)
    for index, (table, rows) in operands.lookups.items():
        found |= {f"r{index}": table, f"i{index}": deep(rows)}
    return found


def _args_of_linears(problem: Problem, operands: Operands) -> dict[str, torch.Tensor]:
    """One input, and what belongs to each of its products."""
    a = operands.a
    found = {"a": a.unflatten(0, (2, -1)) if problem.has("in-3d") else a}
    found.update((f"b{index}", weight.mT) for index, weight in enumerate(operands.b))
    if operands.bias is not None:
        own = (index for index in range(len(operands.b)) if problem.is_one_of("bias", index))
        found.update((f"bias{index}", operands.bias[index, 0]) for index in own)
    found.update((f"r{index}", residual) for index, residual in enumerate(operands.residuals))
    return found


def apply_step(step: Step, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """One pass of an epilogue on ``x`` as eager PyTorch writes it."""
    if step.kind is StepKind.CAST:
        return x.to(torch_dtype(step.dtype))
    function = step.spec.function
    assert function is not None, step
    made: torch.Tensor = function(F, x, *([] if residual is None else [residual]), *step.numbers)
    return made


def pack(problem: Problem, weight: torch.Tensor) -> torch.Tensor:
    """The N x K weight of a :data:`PACKED_OPS` op in the form that the op takes.

    ``qlinear``: oneDNN's own format.  ``woq_int4``: two codes of 0 to 15 in a byte, in an order that is ATen's business
    and depends on the processor.
    """
    made: torch.Tensor
    if problem.op.name == "qlinear":
        made = torch.ops.onednn.qlinear_prepack(weight, None)
    else:
        made = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.to(torch.int32).contiguous(), 1)
    return made


def packed(problem: Problem, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of :func:`args` with the weight packed where the op asks for it."""
    if problem.op.name not in PACKED_OPS:
        return tensors
    return {**tensors, "b": pack(problem, tensors["b"])}


def derived(problem: Problem, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a compiler makes of several constants of the program, by what it makes it of: ``"b+scale_b:sums"``.

    ``qlinear`` and ``da8w8``, which Inductor turns into one: the products of both scales, the sums of B's columns that
    make up for A's zero point, with the factors that are constants, and the constants in the program's text (``":"`` in
    front).  Of ``concat`` the weights, and their scales, one below the other.
    """
    if problem.has("concat"):  # Inductor's matcher decides in which order
        orders = itertools.product(("b", "scale"), itertools.permutations(range(THIRDS)))
        named = [[f"{name}{index}" for index in order] for name, order in orders]
        return {
            f"{'+'.join(o)}:concat": torch.cat([tensors[name] for name in o]) for o in named if set(o) <= set(tensors)
        }
    if problem.op.name == "woq_int4":
        return {"b:packed": pack(problem, tensors["b"])} if "b" in tensors else {}
    if problem.op.name not in {"qlinear", "da8w8"} or "b" not in tensors:
        return {}
    sums = torch.sum(tensors["b"].mT.to(torch.float32), dim=0)
    static = problem.step("static")
    # Without static ones a symmetric A has the zero point 0, and the scale 1 where A's rows are scaled later.
    numbers = static.numbers if static else (1.0, 0.0)
    scale, zero = torch.tensor(numbers[0]), torch.tensor(int(numbers[1]), dtype=torch.int32)
    both = scale * tensors["scale_b"].to(torch.float32)
    found = {":scale": scale, ":zero": zero, "scale_b:both": both, "b+scale_b:sums": sums * both * zero}
    return found if static else {**found, "b:sums": sums}


def _qlinear(problem: Problem, t: dict[str, torch.Tensor]) -> torch.Tensor:
    """``onednn::qlinear_pointwise`` in the overload that the problem's scales and steps ask for; ``b`` is packed.

    A static scale and zero point are numbers of the program, as the quantiser of PyTorch 2 writes them; a dynamic one
    are tensors.  The weight is symmetric and has a scale for each column.
    """
    static, requant = problem.step("static"), problem.step("requant")
    scale, zero = static.numbers if static else (t["scale_a"], t["zero_a"])
    out_scale, out_zero = requant.numbers if requant else (1.0, 0.0)
    binary = next((step for step in problem.passes if step.kind is StepKind.BINARY), None)
    unary = next((step for step in problem.passes if step.kind is StepKind.UNARY), None)
    name, algorithm = unary.spec.onednn if unary else ("none", "")
    numbers = list(unary.numbers) if unary else []
    before = (t["a"], scale, int(zero) if static else zero, t["b"], t["scale_b"], t["zero_b"])
    after = (t.get("bias"), out_scale, int(out_zero), torch_dtype(problem.dtypes.out))
    op: Any = torch.ops.onednn.qlinear_pointwise
    made: torch.Tensor
    if binary is None:
        made = (op.default if static else op.tensor)(*before, *after, name, numbers, algorithm)
        return made
    # "sum" writes into its operand, which is not ours to change.
    other, (own, own_zero) = (t["r0"].clone(), binary.numbers) if binary.name == "sum" else (t["r0"], (1.0, 0.0))
    overload = op.binary if static else op.binary_tensor
    made = overload(*before, other, *after, own, int(own_zero), binary.name, 1.0, name, numbers, algorithm)
    return made


def _qlinear_around(problem: Problem, t: dict[str, torch.Tensor], matmul: Matmul) -> torch.Tensor:
    """The same with ``matmul`` for the integer product, and everything around it in eager f32."""
    static, requant = problem.step("static"), problem.step("requant")
    scale, zero = static.numbers if static else (t["scale_a"], t["zero_a"])
    both = t["scale_b"] * scale
    sums = t["b"].to(torch.float32).sum(1)
    x = matmul(t["a"], t["b"].mT).to(torch.float32) * both - both * zero * sums
    if problem.step("bias") is not None:
        x = x + t["bias"].to(torch.float32)
    for step in problem.passes:
        x = apply_step(step, x, t["r0"].to(torch.float32) if step.kind is StepKind.BINARY else None)
    out = torch_dtype(problem.dtypes.out)
    if requant is None:
        return x.to(out)
    info = torch.iinfo(out)
    return (torch.round(x * (1.0 / requant.numbers[0])) + requant.numbers[1]).clamp(info.min, info.max).to(out)


def _by_group(matmul: Matmul, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The rows of each group times that group's B; nobody is asked for the product of no rows."""
    pieces, first = [a.new_empty((0, b.shape[-1]))], 0
    for group, last in enumerate(offs.tolist()):
        if last > first:
            pieces.append(matmul(a[first:last], b[group]))
        first = last
    return torch.cat(pieces)


def _rows(problem: Problem, x: torch.Tensor) -> torch.Tensor:
    """A tensor with a row for each of M, which may be 3-D, as one matrix of rows."""
    shape = problem.shape
    return x if shape.batch is None else x.reshape(shape.batch * shape.m, x.shape[-1])


def _thirds(problem: Problem, t: dict[str, torch.Tensor], matmul: Matmul) -> torch.Tensor:
    """Three weights in int8, each converted and multiplied by as a program with three linears does, side by side."""
    out = torch_dtype(problem.dtypes.out)
    products = [matmul(t["a"], t[f"b{index}"].mT.to(out)) * t[f"scale{index}"] for index in range(THIRDS)]
    return torch.cat(products, -1)


def _scaled_integers(problem: Problem, t: dict[str, torch.Tensor], c: torch.Tensor) -> torch.Tensor:
    """An int32 product, 2-D, times A's and B's scales: in their type, which is f32 where the result is f16.

    Reshaped where A is 3-D after the scales and before the bias, as whoever quantises a linear does.
    """
    shape, out = problem.shape, problem.dtypes.out
    scale_a = _rows(problem, t["scale_a"]) if problem.step("rowwise") is not None else t["scale_a"]
    x = c.to(torch.bfloat16 if out.name == "bf16" else torch.float32) * scale_a * t["scale_b"]
    x = x if shape.batch is None else x.reshape(shape.batch, shape.m, shape.n)
    return (x if problem.step("bias") is None else x + t["bias"]).to(torch_dtype(out))


def _product(problem: Problem, matmul: Matmul | None) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    """The product with its own addend, before any pass; with ``matmul`` in place of PyTorch's if given."""
    op, alpha, beta = problem.op.name, problem.alpha, problem.beta
    has_bias = problem.step("bias") is not None
    out = torch_dtype(problem.dtypes.out)
    a_float, b_float = problem.dtypes.a.is_float, problem.dtypes.b.is_float

    def plain(t: dict[str, torch.Tensor]) -> torch.Tensor:
        """Through ``matmul``: everything else in eager PyTorch."""
        assert matmul is not None
        a = t["a"]
        if op == "qlinear":
            return _qlinear_around(problem, t, matmul)
        if problem.has("concat"):
            return _thirds(problem, t, matmul)
        b = t["a"].mT if problem.has("self") else t["a"] if problem.has("square") else t["b"]
        b = b.mT if op in WEIGHT_OPS and not problem.has("self") else b
        if op in {"mixed_mm", "woq_int8"}:
            a, b = a.to(out), b.to(out)
        if op == "linear" and a.dim() > 2:
            c = matmul(a.flatten(0, -2), b).reshape(*a.shape[:-1], b.shape[-1])
        elif op == "grouped_mm":
            c = _by_group(matmul, a, b, t["offs"])
        elif op == "da8w8":
            return _scaled_integers(problem, t, matmul(_rows(problem, a), b))
        else:
            c = matmul(a, b)
        if op == "woq_int8":
            return c * t["scale"]
        if op == "scaled_mm":
            # fp8 holds neither the sum nor what the scales make of it: ``matmul`` gives f32, and it is rounded once.
            c = c.to(torch.float32) * t["scale_a"] * t["scale_b"]
            return (c + t["bias"].to(torch.float32) if has_bias else c).to(out)
        if not has_bias or not (problem.op.addend or op == "linear"):
            return c
        bias = t["bias"]
        # beta = 0 ignores the addend altogether, NaN included (BLAS, and torch.addmm's documentation).
        c = c if alpha == 1.0 else c * alpha
        return c if beta == 0.0 else c + (bias if beta == 1.0 else bias * beta)

    def native(t: dict[str, torch.Tensor]) -> torch.Tensor:
        a = t["a"]
        if problem.has("concat"):
            return _thirds(problem, t, torch.mm)
        own = a if op in WEIGHT_OPS or problem.has("square") else a.mT
        b = own if problem.b_is_a else t["b"]
        if op == "addmm":
            return torch.addmm(t["bias"], a, b, beta=beta, alpha=alpha)
        if op == "baddbmm":
            return torch.baddbmm(t["bias"], a, b, beta=beta, alpha=alpha)
        if op == "bmm":
            return torch.bmm(a, b)
        if op == "linear":
            return F.linear(a, b, t["bias"] if has_bias else None)
        if op == "int_mm":
            return torch._int_mm(a, b)
        if op == "mixed_mm":
            return torch.mm(a if a_float else a.to(out), b if b_float else b.to(out))
        if op == "woq_int8":
            return torch._weight_int8pack_mm(a, b, t["scale"])
        if op == "woq_int4":
            made: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(a, b, problem.group_size, t["affine"])
            return made
        if op == "qlinear":
            return _qlinear(problem, t)
        if op == "da8w8":
            return _scaled_integers(problem, t, torch._int_mm(_rows(problem, a), b.mT))
        if op == "scaled_mm":
            return torch._scaled_mm(
                a,
                b,
                scale_a=t["scale_a"],
                scale_b=t["scale_b"],
                bias=t["bias"] if has_bias else None,
                out_dtype=out,
                use_fast_accum=problem.has("fast-acc"),
            )
        if op == "grouped_mm":
            return F.grouped_mm(a, b, offs=t["offs"])
        assert op == "mm", f"{op} has no program yet"
        return torch.mm(a, b)

    return plain if matmul is not None else native


def build(problem: Problem, matmul: Matmul | None = None, *, is_packed: bool = False) -> Program:
    """The function over the tensors of :func:`args`, passed by keyword.

    Args:
        problem: what to compute.
        matmul: a replacement for the matrix product; everything around it stays eager PyTorch.
        is_packed: whether the weight comes packed already (:func:`packed`), where the op asks for that.
    """
    if problem.op.name == "linears":
        return _linears(problem, matmul)
    product = _product(problem, matmul)
    # The op qlinear has its steps inside.
    chain = () if problem.op.name == "qlinear" else problem.chain
    forks = problem.has("fork")
    packs = problem.op.name in PACKED_OPS and matmul is None and not is_packed

    def program(**tensors: torch.Tensor) -> Any:
        if packs:
            tensors["b"] = pack(problem, tensors["b"])
        if problem.has("res-a"):
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
            moving = step.kind is StepKind.MOVE
            tapped, x = x, views.forth(before, [step]) if moving else apply_step(step, before, residual)
        if problem.has("again"):
            return x, product({**tensors, "a": x})
        return (tapped, x) if problem.has("tap") or forks else x

    return program


def _linears(problem: Problem, matmul: Matmul | None) -> Program:
    """Several linears of one input: a tuple of their results, or with ``gated`` the one that is made of two."""
    count, passes = problem.shape.batch or 0, problem.passes
    joined = problem.step("gated")

    def one(a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if matmul is None:
            return F.linear(a, weight, bias)
        c = matmul(a.flatten(0, -2), weight.mT)
        c = c if bias is None else c + bias
        return c.unflatten(0, (2, -1)) if problem.has("in-3d") else c

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
                residual = residual.unflatten(0, (2, -1)) if problem.has("in-3d") else residual
                binaries += 1
            x = apply_step(step, x, residual)
        return x

    def program(**tensors: torch.Tensor) -> Any:
        if problem.autocast:
            half = torch_dtype(problem.input_dtype)
            tensors.update((n, t.to(half)) for n, t in list(tensors.items()) if n.rstrip("0123456789") in _CONVERTED)
        found = [one(tensors["a"], tensors[f"b{i}"], tensors.get(f"bias{i}")) for i in range(count)]
        if joined is not None:
            gate = apply_step(Step(joined.text), found[0], None) * found[1]
            found = [steps(gate, tensors, None)]
        else:
            found = [steps(x, tensors, i) if problem.is_one_of("steps", i) else x for i, x in enumerate(found)]
        if problem.has("flat"):
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
    if problem.has("in-3d") and not problem.has("flat") and len(tensors) == len(results):
        rows = (2, problem.shape.m // 2)
        results = tuple(r.flatten(0, 1) if r.shape[:2] == rows else r for r in tensors)
    if not problem.several:
        return results
    alike = len(tensors) == len(results) and len({(r.shape, r.dtype, r.device) for r in results}) == 1
    return (torch.stack(results),) if alike else results[:1]
