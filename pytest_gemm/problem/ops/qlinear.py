"""qlinear: ``onednn::qlinear_pointwise``, one kernel with its steps and the requantisation of its result."""

from __future__ import annotations

from typing import Any, Final

from pytest_gemm.problem.layout import Layout
from pytest_gemm.problem.ops.op import Complaints, Matmul, Op, Problem, Tensor, Tensors, dtype_of
from pytest_gemm.problem.steps import QLINEAR_BINARY, QLINEAR_UNARY, StepKind


def _scale_and_zero(p: Any, t: Tensors) -> Any:
    """A's scale and zero point: numbers of the program where they are static, else tensors."""
    static = p.step("static")
    return static.numbers if static else (t["scale_a"], t["zero_a"])


def _native(torch: Any, p: Any, t: Tensors) -> Tensor:
    """The overload that the problem's scales and steps need; ``b`` is packed.

    A static scale and zero point are numbers of the program, as the quantiser of PyTorch 2 writes them; a dynamic one
    are tensors.  The weight is symmetric and has a scale for each column.
    """
    is_static, requant = p.step("static") is not None, p.step("requant")
    scale, zero = _scale_and_zero(p, t)
    out_scale, out_zero = requant.numbers if requant else (1.0, 0.0)
    binary = next((step for step in p.passes if step.kind is StepKind.BINARY), None)
    unary = next((step for step in p.passes if step.kind is StepKind.UNARY), None)
    name, _, algorithm = (unary.spec.onednn if unary else "none").partition("/")
    numbers = list(unary.numbers) if unary else []
    before = (t["a"], scale, int(zero) if is_static else zero, t["b"], t["scale_b"], t["zero_b"])
    after = (t.get("bias"), out_scale, int(out_zero), dtype_of(torch, p))
    op = torch.ops.onednn.qlinear_pointwise
    if binary is None:
        return (op.default if is_static else op.tensor)(*before, *after, name, numbers, algorithm)
    # "sum" writes into its operand, which must not change.
    other, (own, own_zero) = (t["r0"].clone(), binary.numbers) if binary.numbers else (t["r0"], (1.0, 0.0))
    overload = op.binary if is_static else op.binary_tensor
    return overload(*before, other, *after, own, int(own_zero), binary.name, 1.0, name, numbers, algorithm)


def _around(torch: Any, p: Any, t: Tensors, matmul: Matmul) -> Tensor:
    """The same with ``matmul`` for the integer product, and everything around it in eager f32."""
    scale, zero = _scale_and_zero(p, t)
    both = t["scale_b"] * scale
    sums = t["b"].to(torch.float32).sum(1)
    x = matmul(t["a"], t["b"].mT).to(torch.float32) * both - both * zero * sums
    if "bias" in t:
        x = x + t["bias"].to(torch.float32)
    for step in p.passes:
        x = step.apply(torch, x, t["r0"].to(torch.float32) if step.kind is StepKind.BINARY else None)
    out, requant = dtype_of(torch, p), p.step("requant")
    if requant is None:
        return x.to(out)
    info = torch.iinfo(out)
    return (torch.round(x * (1.0 / requant.numbers[0])) + requant.numbers[1]).clamp(info.min, info.max).to(out)


def derived(torch: Any, p: Any, t: Tensors) -> Tensors:
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


def _check(p: Problem) -> Complaints:
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
    if is_integer and "requant" not in names:
        yield "quant", 0, "an 8-bit result needs its scale", "add requant"
    if not is_integer and "requant" in names:
        yield "quant", names.index("requant"), "a float result is not requantised", "drop requant"
    for field, steps in (("epilogue", p.epilogue), ("quant", p.quant)):
        for index, step in enumerate(steps):
            if step.name == "sum" and step.text and not is_integer:
                yield field, index, f"{step} on a float result, whose residual has no scale", "write sum"
            dtype = p.dtypes.a if step.name == "static" else p.dtypes.out
            low = 0.0 if dtype.name == "u8" else -128.0
            has_zero = step.name in {"static", "requant", "sum"} and not dtype.is_float
            if has_zero and not low <= step.numbers[1] <= dtype.max_finite:
                yield field, index, f"{step}: no zero point of {dtype.name}", f"from {low:g} to {dtype.max_finite:g}"


OP: Final = Op(
    "qlinear",
    "never",
    lambda a, b, out: a in {"u8", "i8"} and b == "i8" and out in {"f32", "f16", "bf16", "u8", "i8"},
    "u8 or i8, i8, and one of f32 f16 bf16 u8 i8, for example u8-i8-f32",
    _native,
    _around,
    own_bias=True,
    layouts=(Layout.NT,),
    scales=("static", "dynamic"),
    weight=True,
    weight_scales=True,
    int8=True,
    zero_points=True,
    fused_steps=True,
    pack=lambda torch, _, weight: torch.ops.onednn.qlinear_prepack(weight, None),
    derived=derived,
    check=_check,
    flags=("a.7bit",),
)
