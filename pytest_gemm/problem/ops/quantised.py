"""Products of which A and B are quantised: qlinear, da8w8 and scaled_mm.

- qlinear: ``onednn::qlinear_pointwise``, one kernel with its steps and the requantisation of its result.
- da8w8: a linear whose input and weight are int8 with scales, as torchao writes it in eager PyTorch.
- scaled_mm: fp8 operands with scales for the whole tensor, for each row of A and column of B, or for blocks; MXFP8,
  MXFP4 and NVFP4.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any, Final

from pytest_gemm.problem.dtypes import DType
from pytest_gemm.problem.layout import Layout
from pytest_gemm.problem.ops.microscaled import decoded
from pytest_gemm.problem.ops.op import (
    GIVEN,
    OUTPUTS,
    SLICED,
    Complaints,
    Matmul,
    Op,
    Problem,
    Tensor,
    Tensors,
    dtype_of,
    given_out,
    triples,
)
from pytest_gemm.problem.steps import BLOCK_K, QLINEAR_BINARY, QLINEAR_UNARY, Step, StepKind


def _scale_and_zero(p: Problem, t: Tensors) -> Any:
    """A's scale and zero point: numbers of the program where they are static, else tensors."""
    static = p.step("static")
    return static.numbers if static else (t["scale_a"], t["zero_a"])


def _bias(torch: Any, p: Problem, t: Tensors) -> Tensor | None:
    """The bias as PyTorch's op takes it, in float."""
    if not p.step("bias_codes"):
        return t.get("bias")
    return t["bias"].to(torch.float32) * (t["scale_b"] * _scale_and_zero(p, t)[0])


def _qlinear(torch: Any, p: Problem, t: Tensors) -> Tensor:
    """The overload that the problem's scales and steps need; ``b`` is packed, but for ``program.pt2e``.

    A static scale and zero point are numbers of the program, as the quantiser of PyTorch 2 writes them; a dynamic one
    are tensors.  The weight is symmetric and has a scale for each column.
    """
    if p.has("program.pt2e"):
        return _written(torch, p, t)
    is_static, requant = p.step("static") is not None, p.step("requant")
    scale, zero = _scale_and_zero(p, t)
    out_scale, out_zero = requant.numbers if requant else (1.0, 0.0)
    binary = next((step for step in p.passes if step.kind is StepKind.BINARY), None)
    unary = next((step for step in p.passes if step.kind is StepKind.UNARY), None)
    name, _, algorithm = (unary.spec.onednn if unary else "none").partition("/")
    numbers = list(unary.numbers) if unary else []
    before = (t["a"], scale, int(zero) if is_static else zero, t["b"], t["scale_b"], t["zero_b"])
    after = (_bias(torch, p, t), out_scale, int(out_zero), dtype_of(torch, p))
    op = torch.ops.onednn.qlinear_pointwise
    if binary is None:
        return (op.default if is_static else op.tensor)(*before, *after, name, numbers, algorithm)
    own, own_zero = binary.numbers or (1.0, 0.0)
    overload = op.binary if is_static else op.binary_tensor
    return overload(
        *before, _addend(p, t, binary), *after, own, int(own_zero), binary.name, 1.0, name, numbers, algorithm
    )


def _addend(p: Problem, t: Tensors, step: Step) -> Tensor:
    """The residual of a step; a copy for ``sum``, which is written over, or with ``r0.view`` a view of one."""
    if not step.numbers:
        return t["r0"]
    if not p.has("r0.view"):
        return t["r0"].clone()
    *batch, _, n = p.result_shape
    return t["r0"].flatten().clone().view(*batch, -1, n)


def _limits(dtype: DType) -> tuple[int, int]:
    """The least and the largest code of an 8-bit type."""
    return (0, 255) if dtype.name == "u8" else (-128, 127)


def _written(torch: Any, p: Problem, t: Tensors) -> Tensor:
    """A linear of what the codes mean, in the operators that the quantiser of PyTorch 2 puts into a program."""
    importlib.import_module("torch.ao.quantization.fx._decomposed")  # it registers them
    q, out = torch.ops.quantized_decomposed, p.dtypes.out
    scale, zero = _scale_and_zero(p, t)
    is_static, limits = p.step("static") is not None, _limits(p.dtypes.a)
    of_tensor = q.dequantize_per_tensor.default if is_static else q.dequantize_per_tensor.tensor
    codes = getattr(torch, p.dtypes.a.torch_name)
    a = of_tensor(t["a"], scale, int(zero) if is_static else zero, *limits, codes)
    b = q.dequantize_per_channel.default(t["b"], t["scale_b"], t["zero_b"], 0, -128, 127, torch.int8)
    if out.name == "bf16":
        a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
    x = torch.nn.functional.linear(a, b, t.get("bias"))
    coded = (*_limits(out), dtype_of(torch, p))
    for step in p.passes:
        if step.kind is not StepKind.BINARY:
            x = step.apply(torch, x, None)
        elif step.numbers and not out.is_float:
            x = x + q.dequantize_per_tensor.default(t["r0"], step.numbers[0], int(step.numbers[1]), *coded)
        else:
            x = x + _addend(p, t, step)
    requant = p.step("requant")
    if requant is None:
        return x
    return q.quantize_per_tensor.default(x, requant.numbers[0], int(requant.numbers[1]), *coded)


def _around_qlinear(torch: Any, p: Problem, t: Tensors, matmul: Matmul) -> Tensor:
    """The same with ``matmul`` for the integer product, and everything around it in eager f32."""
    scale, zero = _scale_and_zero(p, t)
    both = t["scale_b"] * scale
    sums = t["b"].to(torch.float32).sum(1)
    x = matmul(_rows(p, t["a"]), t["b"].mT).to(torch.float32) * both - both * zero * sums
    x = x if p.shape.batch is None else x.unflatten(0, t["a"].shape[:-1])
    if (bias := _bias(torch, p, t)) is not None:
        x = x + bias.to(torch.float32)
    for step in p.passes:
        x = step.apply(torch, x, t["r0"].to(torch.float32) if step.kind is StepKind.BINARY else None)
    out, requant = dtype_of(torch, p), p.step("requant")
    if requant is None:
        return x.to(out)
    return (torch.round(x * (1.0 / requant.numbers[0])) + requant.numbers[1]).clamp(*_limits(p.dtypes.out)).to(out)


def _derived(torch: Any, p: Problem, t: Tensors) -> Tensors:
    """The products of both scales, and the sums of B's columns that make up for A's zero point.

    With the factors that are constants, and the constants in the program's text (``":"`` in front).  Also of ``da8w8``,
    which Inductor turns into a qlinear.
    """
    if "b" not in t:
        return {}
    sums = torch.sum(t["b"].mT.to(torch.float32), dim=0)
    static = p.step("static")
    # Without static ones a symmetric A has the zero point 0, and the scale 1 where A's rows are scaled later.
    numbers = static.numbers if static else (1.0, 0.0)
    scale, zero = torch.tensor(numbers[0]), torch.tensor(int(numbers[1]), dtype=torch.int32)
    both = scale * t["scale_b"].to(torch.float32)
    found = {":scale": scale, ":zero": zero, "scale_b:both": both, "b+scale_b:sums": sums * both * zero}
    return found if static else {**found, "b:sums": sums}


def _check_qlinear(p: Problem) -> Complaints:
    """The op is one kernel: a binary step, a unary one, and for an 8-bit result the requantisation at its end."""
    is_integer = not p.dtypes.out.is_float
    # A residual of another shape than the result's is no step of the op.
    chain = [str(step) if step.kind is StepKind.BINARY and not step.numbers else step.name for step in p.chain]
    binary, unary = ([], chain) if chain[:1] and chain[0] in QLINEAR_UNARY else (chain[:1], chain[1:])
    known = ("relu",) if binary else QLINEAR_UNARY
    if not set(binary) <= set(QLINEAR_BINARY) or unary not in [[], *([name] for name in known)]:
        allowed = f"one of {' '.join(QLINEAR_UNARY)}, or one of {' '.join(QLINEAR_BINARY)} and then relu"
        yield "epilogue", p.epilogue.index(p.chain[0]), f"qlinear has no steps {'+'.join(chain)}", allowed
    names = [step.name for step in p.quant]
    if p.has("program.pt2e") and p.dtypes.out.name == "f16":
        yield "dtypes", 0, "program.pt2e: the quantiser of PyTorch 2 has no f16", "another result, or drop program.pt2e"
    if p.has("r0.view") and p.step("sum") is None:
        yield "flags", p.flags.index("r0.view"), "r0.view is about a sum in place", "add sum, or drop r0.view"
    if is_integer and "requant" not in names:
        yield "quant", 0, "an 8-bit result needs its scale", "add requant"
    if "bias_codes" in names and p.step("bias") is None:
        yield "quant", names.index("bias_codes"), "bias_codes is about a bias", "add bias"
    if not is_integer and "requant" in names:
        yield "quant", names.index("requant"), "a float result is not requantised", "drop requant"
    for field, steps in (("epilogue", p.epilogue), ("quant", p.quant)):
        for index, step in enumerate(steps):
            if step.name == "sum" and step.text and not is_integer:
                yield field, index, f"{step} on a float result, whose residual has no scale", "write sum"
            dtype = p.dtypes.a if step.name == "static" else p.dtypes.out
            low, high = _limits(dtype)
            has_zero = step.name in {"static", "requant", "sum"} and not dtype.is_float
            if has_zero and not low <= step.numbers[1] <= high:
                yield field, index, f"{step}: no zero point of {dtype.name}", f"from {low} to {high}"


def _rows(p: Problem, x: Tensor) -> Tensor:
    """A tensor with a row for each of M, which may be 3-D, as one matrix of rows."""
    return x if p.shape.batch is None else x.flatten(0, -2)


def _around_da8w8(torch: Any, p: Problem, t: Tensors, matmul: Matmul) -> Tensor:
    """The int32 product times A's and B's scales: in their type, which is f32 where the result is f16.

    Largest magnitudes are f32, and what their codes are divided by is one factor behind them, as in bitsandbytes'
    ``int8_mm_dequant``.

    Where A is 3-D it is reshaped after the scales and before the bias, as a quantised linear does.
    """
    scale_a = _rows(p, t["scale_a"]) if p.step("rowwise") is not None else t["scale_a"]
    c = matmul(_rows(p, t["a"]), t["b"].mT)
    x = c.to(t["scale_a"].dtype) * scale_a * t["scale_b"]
    x = x * p.result_factor("") if p.step("absmax") else x
    x = x if p.shape.batch is None else x.reshape(p.shape.batch, t["a"].shape[1], p.shape.n)
    return (x + t["bias"] if "bias" in t else x).to(dtype_of(torch, p))


_RECIPES: Final = {"tensorwise": "TensorWise", "rowwise": "RowWise", "mx": "BlockWise1x32", "nv": "BlockWise1x16"}


def recipes(torch: Any, p: Problem, t: Tensors) -> dict[str, Any]:
    """The arguments by which ``torch.nn.functional.scaled_mm`` and ``scaled_grouped_mm`` are told what each scale is.

    They take scales of blocks of B by rows of B.T, and those of squares as they lie in memory.
    """
    functional = torch.nn.functional
    none, swizzled = functional.SwizzleType.NO_SWIZZLE, functional.SwizzleType.SWIZZLE_32_4_4
    found: dict[str, Any] = {}
    for side, index in (("a", 0), ("b", 1)):
        scale = t[f"scale_{side}"]
        if blocks := p.scale_blocks:
            is_square = blocks[index] > 1
            recipe = "BlockWise128x128" if is_square else "BlockWise1x128"
            scale = scale.mT if is_square == (side == "a") else scale
        else:
            recipe = next(_RECIPES[step.name] for step in p.quant if step.name in _RECIPES)
        scales, kinds = [scale], [getattr(functional.ScalingType, recipe)]
        swizzles = [swizzled if p.micro_block and not p.has("program.unswizzled") else none]
        if p.has_whole_scales:
            scales.append(t[f"whole_{side}"])
            kinds.append(functional.ScalingType.TensorWise)
            swizzles.append(none)
        found |= {f"scale_{side}": scales, f"scale_recipe_{side}": kinds, f"swizzle_{side}": swizzles}
    return {**found, "output_dtype": dtype_of(torch, p), "use_fast_accum": p.has("math.fast_accumulate")}


def _scaled_mm(torch: Any, p: Problem, t: Tensors) -> Tensor:
    if p.has("program.v2"):
        return torch.nn.functional.scaled_mm(t["a"], t["b"], bias=t.get("bias"), **recipes(torch, p, t))
    step = p.step("result")
    scale_result = {"scale_result": torch.full((), step.numbers[0], device=t["a"].device)} if step else {}
    return torch._scaled_mm(
        t["a"],
        t["b"],
        scale_a=t["scale_a"],
        scale_b=t["scale_b"],
        bias=t.get("bias"),
        out_dtype=dtype_of(torch, p),
        use_fast_accum=p.has("math.fast_accumulate"),
        **scale_result,
        **given_out(t),
    )


def of_blocks(torch: Any, p: Problem, t: Tensors, dtype: Any) -> Iterator[Tensor]:
    """A and B in a dtype, with the scales of their blocks multiplied into them."""
    for name in "ab":
        x, scale = t[name], t[f"scale_{name}"]
        yield decoded(torch, p, name, x, scale, dtype) if p.micro_block else x.to(dtype) * _each(p, name, scale)


def _each(p: Problem, name: str, scale: Tensor) -> Tensor:
    """The scales of blocks of A or B, ``name``, for each of its elements."""
    rows, columns = p.scale_blocks
    shape, (tall, wide) = (p.ends if p.op.ragged == "m" else p.shape.m, p.shape.k), (rows, p.block_size)
    if name == "b":
        shape, (tall, wide) = (p.shape.k, p.shape.n), (p.block_size, columns)
    return scale.repeat_interleave(tall, -2).repeat_interleave(wide, -1)[..., : shape[0], : shape[1]]


# What scales of blocks do not go with: they are multiplied by in the loop, so tensor cores hold no whole sum.
_NOT_BLOCKS: Final = ("math.fast_accumulate", "b.alias_t")
# What block-scaled formats do not go with: the order of their scales has one place for each line.
_NOT_MICRO: Final = (*_NOT_BLOCKS, *SLICED, "m.dynamic", "b.constant")


def scales_of(p: Problem) -> tuple[int, Step]:
    """The step that says what the scales are, and where it stands."""
    return next((index, step) for index, step in enumerate(p.quant) if step.name in p.op.scales)


def check_formats(p: Problem) -> Complaints:
    """MXFP8 is fp8 with scales of 32 elements, MXFP4 and NVFP4 are f4 with scales of 32 or 16."""
    (place, step), is_f4, block = scales_of(p), p.dtypes.a.is_packed, p.micro_block
    if is_f4 and not block:
        yield "quant", place, f"{p.dtypes.a.name} has scales of blocks of its own", "write mx, nv or nv-2"
    if step.name == "nv" and not is_f4:
        yield "quant", place, f"{step} is about f4e2m1fn", "write mx"
    for index, other in enumerate(p.quant):
        if other.name == "edge" and not p.scale_blocks:
            yield "quant", index, f"{other} is about blocks", f"write blocks+{other}"
    for flag in _NOT_MICRO if block else _NOT_BLOCKS if p.scale_blocks else ():
        if p.has(flag):
            yield "flags", p.flags.index(flag), f"{flag} does not go with {step}", f"drop {flag}"
    if block and p.shape.k % block:
        place = 2 if p.shape.batch is None else 3
        yield "shape", place, f"K={p.shape.k} is not divided by blocks of {block}", f"give a multiple of {block}"


def _check_scaled(p: Problem) -> Complaints:
    """An fp8 result is that of scales for the whole tensor, and has no bias and no steps."""
    (place, step), is_f4, is_fp8, blocks = scales_of(p), p.dtypes.a.is_packed, p.dtypes.out.bits == 8, p.scale_blocks
    yield from check_formats(p)
    if is_fp8 and step.name != "tensorwise":
        yield "quant", place, f"an fp8 result has no {step}", "write tensorwise"
    if is_fp8 and p.step("bias"):
        yield "epilogue", 0, "an fp8 result has no bias", "drop bias"
    for index, other in enumerate(p.quant):
        if other.name == "result" and not is_fp8:
            yield "quant", index, f"{other} is about an fp8 result", f"drop {other}"
    if p.has("m.dynamic") and blocks and blocks[0] > 1:
        yield "flags", p.flags.index("m.dynamic"), "m.dynamic: the blocks of A have 128 rows", "write blocks"
    if p.has("program.v2"):
        yield from _check_v2(p)
    elif (is_f4 and step.name == "mx") or p.has_whole_scales:
        name = "MXFP4" if step.name == "mx" else "NVFP4 with scales for whole tensors"
        yield "quant", place, f"only torch.nn.functional.scaled_mm takes {name}", "add program.v2"


def _check_v2(p: Problem) -> Complaints:
    """The function with recipes has no scale of the result, and takes scales of squares for 4 blocks of K at once."""
    place, blocks = p.flags.index("program.v2"), p.scale_blocks
    if p.dtypes.out.bits == 8:
        yield "flags", place, "torch.nn.functional.scaled_mm has no scale of an fp8 result", "drop program.v2"
    if blocks and max(blocks) > 1 and -(-p.shape.k // BLOCK_K) % 4:
        problem = f"torch.nn.functional.scaled_mm takes scales of squares for 4 blocks of K at once, not K={p.shape.k}"
        yield "flags", place, problem, "give a K of 512, 1024 ..., or drop program.v2"


def _around_scaled_mm(torch: Any, p: Problem, t: Tensors, matmul: Matmul) -> Tensor:
    """fp8 holds neither the sum nor the scaled sum: ``matmul`` gives f32, and the result is rounded once.

    Scales of blocks are multiplied by before the sum.
    """
    if p.micro_block or p.scale_blocks:
        c = matmul(*of_blocks(torch, p, t, torch.float32)) * (
            t["whole_a"] * t["whole_b"] if p.has_whole_scales else 1.0
        )
    else:
        factor = p.result_factor(t["a"].device.type)
        c = matmul(t["a"], t["b"]).to(torch.float32) * t["scale_a"] * t["scale_b"] * factor
    return (c + t["bias"].to(torch.float32) if "bias" in t else c).to(dtype_of(torch, p))


# A linear whose input and weight are 8-bit integers.
_of_int8: Final = functools.partial(
    Op, own_bias=True, layouts=(Layout.NT,), weight=True, weight_scales=True, int8=True, derived=_derived
)

OPS: Final = (
    _of_int8(
        "qlinear",
        "optional",
        triples("u8 i8", "i8", "f32 f16 bf16 u8 i8"),
        _qlinear,
        _around_qlinear,
        help="onednn::qlinear_pointwise: 8-bit operands, steps and requantisation in one kernel",
        scales=("static", "dynamic"),
        zero_points=True,
        fused_steps=True,
        pack=lambda torch, _, t: torch.ops.onednn.qlinear_prepack(t["b"], None),
        check=_check_qlinear,
        flags=("a.7bit", "r0.view", "program.pt2e", "batch.dynamic"),
    ),
    _of_int8(
        "da8w8",
        "optional",
        triples("i8", "i8", "f32 f16 bf16"),
        lambda torch, p, t: _around_da8w8(torch, p, t, torch._int_mm),
        _around_da8w8,
        help="a linear of i8 input and i8 weight with scales, by torch._int_mm as torchao writes it",
        scales=("rowwise", "columnwise"),
        scale_dtype=lambda out: "bf16" if out == "bf16" else "f32",
        absmax=True,
        flags=("b.alias_t", "b.argument", *OUTPUTS),
    ),
    Op(
        "scaled_mm",
        "never",
        (
            *triples("f8e4m3fn f8e5m2", "f8e4m3fn f8e5m2", "f32 f16 bf16"),
            "f8e4m3fn",
            "f8e5m2-f8e4m3fn-f8e4m3fn",
            *triples("f4e2m1fn", "f4e2m1fn", "f32 f16 bf16"),
        ),
        _scaled_mm,
        _around_scaled_mm,
        help="torch._scaled_mm: fp8, MXFP8, MXFP4 and NVFP4",
        constant_b=False,
        own_bias=True,
        rounds_once=True,
        layouts=(Layout.NT,),
        scales=("tensorwise", "rowwise", "blocks", "mx", "nv"),
        check=_check_scaled,
        flags=(
            "b.alias_t",
            "b.argument",
            *OUTPUTS,
            *SLICED,
            *GIVEN,
            "math.fast_accumulate",
            "program.v2",
            "program.unswizzled",
        ),
    ),
)
