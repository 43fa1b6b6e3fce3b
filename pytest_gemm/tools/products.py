"""The problem lines of the products that a model has executed.

A line takes along what follows its product pointwise: as long as one operator alone reads the value, a second tensor
that it meets was made before the product, and the problem line has a word for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch.utils._pytree import tree_leaves

from pytest_gemm.api.executed import is_product
from pytest_gemm.problem.dtypes import DTYPES, DTypes
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.layout import Layout, Shape
from pytest_gemm.problem.ops import OPS
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import BLOCK_K, STEPS, Step, StepKind
from pytest_gemm.tools.capture import Call, Value

# Namespaces whose operators multiply nothing but what these name, and what "is_product" says.
_KNOWN: Final = frozenset({"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional"})
_OTHERS: Final = re.compile(r"conv|attention|transformer|rnn|lstm|gru|bilinear|cdist")
# Bytes at which a vector or TMA begins to load.
_ALIGNED: Final = 16
# Of two dtypes with one type of torch the first: a packed weight is no tensor of codes.
_NAMES: Final = {dtype.torch_name: dtype.name for dtype in reversed(DTYPES.values())}


class Inexpressible(Exception):
    """A product without a problem line; the message says why."""


def problem_of(call: Call) -> Problem | None:
    """The problem of an operator and of what follows it; ``None`` where it multiplies nothing.

    Raises:
        Inexpressible: for a product without a problem line, and an operator that may be one.
    """
    namespace = str(call.func).rpartition(".")[0].partition(".")[0]
    if namespace == "aten" and call.name in _READ:
        try:
            return _with_steps(call, _READ[call.name](call))
        except ProblemError as error:
            raise Inexpressible(error.problem) from None
    if is_product(str(call.func)) or (namespace in _KNOWN and _OTHERS.search(call.name)):
        raise Inexpressible("no op of a problem line computes it")
    if namespace not in _KNOWN:
        raise Inexpressible("what it computes is not known")
    return None


# -- the product -------------------------------------------------------------------------------------------------------


def _dtype(x: Value) -> str:
    name = str(x.dtype).removeprefix("torch.")
    if name not in _NAMES:
        raise Inexpressible(f"a problem line has no {name}")
    return _NAMES[name]


def _side(x: Value, side: str) -> tuple[bool, list[str]]:
    """Whether each matrix is stored transposed, and the words about where it lies.

    A view that the program makes inside of a larger tensor is ``sliced`` or ``tail``.
    """
    (rows, columns), (row, column) = x.shape[-2:], x.strides[-2:]
    ways = [(False, rows, columns, row, column), (True, columns, rows, column, row)]
    # One row, or one column, can be either; a weight is taken for transposed then.
    ways.sort(key=lambda way: (way[1] > 1 and way[3] != way[2], way[0] != (side == "b")))
    for is_t, lines, length, pitch, element in ways:
        if (element == 1 or length <= 1) and (pitch >= length or lines <= 1):
            break
    else:
        raise Inexpressible(f"{side.upper()} of shape {x.shape} has strides {x.strides}")
    words, between = [], x.strides[0] if len(x.shape) > 2 and x.shape[0] > 1 else pitch
    if between == 0:
        words.append("broadcast")
    elif between < pitch and lines > 1:
        words, pitch = ["batch_middle"], between
    starts_inside = x.offset > x.root.offset
    is_aligned = x.offset * x.dtype.itemsize % _ALIGNED == 0
    if lines > 1 and pitch > length:
        words.append("sliced" if starts_inside else "padded")
    elif starts_inside and is_aligned:
        words.append("tail")
    return is_t, [f"{side}.{word}" for word in (words if is_aligned else [*words, "offset"])]


def _before(x: Value) -> str:
    """The dtype from which it was converted; its own where it was not."""
    maker = x.root.maker
    return _dtype(maker.inputs[0] if maker is not None and maker.name == "_to_copy" else x)


def _with_conversions(op: str, a: Value, b: Value, out: str) -> tuple[str, str]:
    """The op and its dtypes, with the conversions of autocast or of an integer side, which are in the problem."""
    names = [_before(a), _before(b)]
    if op in {"mm", "linear"} and len(integers := {"i8", "u8"} & {*names}) == 1:
        return "mixed_mm", "-".join([*(name if name in integers else out for name in names), out])
    converted = "-".join([*names, out])
    return op, converted if converted in OPS[op].dtypes else "-".join([_dtype(a), _dtype(b), out])


def _product(
    call: Call, op: str, a: Value, b: Value, *steps: str, quant: str = "", groups: int = 0, dtypes: str = "", **on: bool
) -> Problem:
    """The problem of an operator that multiplies ``a``, (..., M, K), by ``b``, (..., K, N).

    Args:
        call: the operator.
        op: of the problem; ``linear`` and ``mixed_mm`` are found here.
        a, b: the operands.
        steps: the bias and its factors.
        quant: what the scales are.
        groups: how many of them divide a dimension, 0 where none is.
        dtypes: of the problem, where they are not those of operands and result.
        on: further flags.
    """
    (a_t, a_words), (b_t, b_words) = _side(a, "a"), _side(b, "b")
    if op in {"mm", "addmm"} and b_t and b.is_constant and steps in {(), ("bias",)}:
        op = "linear"
    op, dtypes = (op, dtypes) if dtypes else _with_conversions(op, a, b, _dtype(call.made[0]))
    types = DTypes.parse(dtypes.split("-"))
    sizes = {"m": a.shape[-2], "n": b.shape[-1], "k": a.shape[-1] * (1 + types.a.is_packed)}
    if ragged := OPS[op].ragged:
        if sizes[ragged] % groups:
            raise Inexpressible(f"{ragged.upper()} of {sizes[ragged]} in {groups} groups: no whole mean size")
        sizes[ragged] //= groups
    batch = groups or next((x.shape[0] for x in (a, b) if len(x.shape) > 2), None)
    if b.is_constant != OPS[op].constant_b:
        b_words.append("b.constant" if b.is_constant else "b.argument")
    flags = [*a_words, *b_words, *(name.replace("_", ".", 1) for name, is_on in on.items() if is_on)]
    layout = Layout("nt"[a_t] + "nt"[b_t])
    parts = OPS[op], types, layout, Shape(batch=batch, **sizes), tuple(map(Step.parse, steps))
    scales = (Step.parse(quant),) if quant else ()
    with contextlib.suppress(ProblemError):
        return Problem(*parts, tuple(flags), scales)
    # Without what this op has no words for: which constant B is, and where in a larger tensor an operand begins.
    flags = [flag.replace("sliced", "padded") for flag in flags if flag[2:] not in {"tail", "constant"}]
    return Problem(*parts, tuple(flags), scales)


def _with_addend(op: str, call: Call, a: str, b: str) -> Problem:
    given, whole = call.named, call.made[0].shape
    addend, (m, n) = given["self"], whole[-2:]
    forms = {(): "bias-0", (m, 1): "bias-m1", whole: "bias-mn", (1, n): "bias-1n", (n,): "bias"}
    if addend.shape not in forms:
        raise Inexpressible(f"an addend of shape {addend.shape}")
    is_expanded = addend.shape == whole == (m, n) and m > 1 and addend.strides == (0, 1)
    factors = [f"{name}-{_number(given[name])}" for name in ("alpha", "beta") if given.get(name, 1) != 1]
    return _product(call, op, given[a], given[b], "bias-xn" if is_expanded else forms[addend.shape], *factors)


def _scaled(call: Call) -> Problem:
    """Of fp8 or f4, with scales for all, for rows and columns, or for blocks; of the second version they are lists."""
    given = call.named
    if given.get("scale_result") is not None:
        raise Inexpressible("the value of scale_result is part of a problem line, and is not read")
    a, b, ((x, *wholes), (y, *_)) = given["self"], given["mat2"], (tree_leaves(given[f"scale_{side}"]) for side in "ab")
    (m, k), n = a.shape, b.shape[1]
    rows, blocks, columns = (-(-size // BLOCK_K) for size in (m, k, n))
    kinds = {
        ((m, blocks), (blocks, columns)): "blocks-1_128",
        ((rows, blocks), (blocks, n)): "blocks-128_1",
        ((m, blocks), (blocks, n)): "blocks-1_1",
        ((m, 1), (1, n)): "rowwise",
    }
    micro = {"torch.float8_e8m0fnu": "mx", "torch.float8_e4m3fn": "nv-2" if wholes else "nv"}
    quant = "tensorwise" if {*x.shape, *y.shape} <= {1} else micro.get(str(x.dtype)) or kinds.get((x.shape, y.shape))
    if quant is None:
        raise Inexpressible(f"scales of shapes {x.shape} and {y.shape}")
    flags = {"math_fast_accumulate": given.get("use_fast_accum", False), "program_v2": call.name.endswith("v2")}
    return _product(call, "scaled_mm", a, b, *["bias"] * (given.get("bias") is not None), quant=quant, **flags)


def _grouped(call: Call) -> Problem:
    given = call.named
    a, b, ends = given["self"], given["mat2"], given.get("offs")
    if given.get("bias") is not None:
        raise Inexpressible("a problem line has no bias of groups")
    forms = {(2, 3): "grouped_mm", (3, 2): "grouped_mm_n", (2, 2): "grouped_mm_k", (3, 3): "grouped_bmm"}
    op, groups = forms[len(a.shape), len(b.shape)], ends.shape[0] if ends is not None else 0
    if "scale_a" not in given:
        return _product(call, op, a, b, groups=groups)
    is_fast = given.get("use_fast_accum", False)
    return _product(call, f"scaled_{op}", a, b, quant="rowwise", groups=groups, math_fast_accumulate=is_fast)


def _int8_weight(call: Call) -> Problem:
    a, b = call.args[:2]
    weight = dataclasses.replace(b, shape=b.shape[::-1], strides=b.strides[::-1])
    return _product(call, "woq_int8", a, weight, dtypes=f"{_dtype(a)}-i8-{_dtype(a)}")


def _int4_weight(call: Call) -> Problem:
    """The weight is packed: its scales, (K / group, N, 2), tell its shape."""
    a, b, group, scales = call.args
    weight = dataclasses.replace(b, shape=(a.shape[1], scales.shape[1]), strides=(1, a.shape[1]))
    return _product(call, "woq_int4", a, weight, quant=f"group-{group}", dtypes=f"{_dtype(a)}-i4-{_dtype(a)}")


_READ: Final[Mapping[str, Callable[[Call], Problem]]] = {
    "mm": lambda call: _product(call, "mm", *call.args[:2]),
    "addmm": lambda call: _with_addend("addmm", call, "mat1", "mat2"),
    "bmm": lambda call: _product(call, "bmm", *call.args[:2]),
    "baddbmm": lambda call: _with_addend("baddbmm", call, "batch1", "batch2"),
    "_int_mm": lambda call: _product(call, "int_mm", *call.args[:2]),
    **dict.fromkeys(("_scaled_mm", "_scaled_mm_v2"), _scaled),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm"), _grouped),
    "_weight_int8pack_mm": _int8_weight,
    **dict.fromkeys(("_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu"), _int4_weight),
}


# -- what follows it ---------------------------------------------------------------------------------------------------


def _with_steps(call: Call, problem: Problem) -> Problem:
    """The problem with the steps that follow.  A conversion is one where a step or the caller of the model reads it."""
    value, kept = call.made[0], problem
    while len(value.readers) == 1 and (reader := value.readers[0]) is not None and reader.made and reader.args:
        made = reader.made[0]
        if reader.is_view and _is_dense(made) and math.prod(made.shape) == math.prod(value.shape):
            value = made
            continue
        step, other = _step(reader, value, call, problem)
        a = next(call.named[name] for name in ("batch1", "mat1", "self") if name in call.named)
        is_a = other is not None and other.root is a.root and math.prod(other.shape) == math.prod(a.shape)
        longer = _longer(problem, step, ("r0.alias",) if is_a and not problem.residuals else ())
        if longer is None:
            break
        value, problem = made, longer
        if problem.epilogue[-1].kind is not StepKind.CAST or value.readers == [None]:
            kept = problem
    return kept


def _is_dense(x: Value) -> bool:
    sizes = [size for size in x.shape if size != 1]
    strides = [stride for size, stride in zip(x.shape, x.strides, strict=True) if size != 1]
    return strides == [math.prod(sizes[place + 1 :]) for place in range(len(sizes))]


def _longer(problem: Problem, step: str, flags: tuple[str, ...]) -> Problem | None:
    """The problem with a step more, ``None`` where it cannot have it."""
    for more in (flags, ())[not flags :] if step else ():
        with contextlib.suppress(ProblemError):
            epilogue, flags = (*problem.epilogue, Step.parse(step)), (*problem.flags, *more)
            return dataclasses.replace(problem, epilogue=epilogue, flags=flags)
    return None


def _step(reader: Call, value: Value, product: Call, problem: Problem) -> tuple[str, Value | None]:
    """The step that an operator is, "" where it is none, and the second tensor of it."""
    name, made, (first, *rest) = reader.name.removesuffix("_"), reader.made[0], reader.args
    if name == "_to_copy" and made.strides == value.strides:
        return f"cast-{_NAMES.get(str(made.dtype)[6:])}", None
    if (made.shape, made.dtype) != (value.shape, value.dtype) or not {*reader.kwargs} <= {"approximate"}:
        return "", None
    is_binary = name in {"add", "sub", "mul", "div"}
    if is_binary and isinstance(rest[0], Value):
        other = rest[0] if first is value else first
        is_step = (first is value or name in {"add", "mul"}) and other.dtype == value.dtype
        return _residual(name, value, other, product, problem) if is_step else "", other
    if not all(isinstance(one, (int, float)) for one in rest):
        return "", None
    if name in {"mul", "div"}:
        factor = rest[0] if name == "mul" else 1 / rest[0] if rest[0] else math.inf
        return f"scale-{_number(factor)}", None
    words = {"hardtanh": "clamp", "gelu": "gelu_tanh" if reader.kwargs.get("approximate") == "tanh" else "gelu"}
    name = words.get(name, name)
    is_step = name in STEPS and STEPS[name].kind is StepKind.UNARY
    return "-".join([name, *(["_".join(map(_number, rest))] if rest else [])]) if is_step else "", None


def _residual(name: str, value: Value, other: Value, product: Call, problem: Problem) -> str:
    """The step that meets a second tensor; "" where a problem line has none like it, or it is made later."""
    n, shape = problem.shape.n, _without_leading_ones(other.shape)
    if other.root.maker is not None and other.root.maker.index > product.index:
        return ""
    if shape == _without_leading_ones(value.shape):
        return name
    if value.shape[-1] != n:
        return ""
    if shape == (n,):
        is_bias = name == "add" and other.is_constant and not problem.epilogue and not problem.quant
        return "bias" if is_bias and not problem.op.addend else f"{name}-n"
    each = value.shape[:-1] if problem.shape.batch is None else value.shape[-2:-1]
    return f"{name}-m1" if shape == _without_leading_ones((*each, 1)) else ""


def _without_leading_ones(shape: Sequence[int]) -> tuple[int, ...]:
    first = next((place for place, size in enumerate(shape) if size != 1), len(shape))
    return tuple(shape[first:])


def _number(x: Any) -> str:
    return repr(float(x)).replace("e+", "e")
