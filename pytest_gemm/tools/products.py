"""The problem lines of the products that a model has executed.

A line takes along what follows its product pointwise: as long as one operator alone reads the value, a second tensor
that it meets was made before the product, and the problem line has a word for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from torch.fx import Node
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from pytest_gemm.api.executed import is_product
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.ops import OPS
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import BLOCK_K, STEPS, Step, StepKind
from pytest_gemm.tools.capture import Places, is_constant, is_view, name_of, places, root

# Namespaces whose operators multiply nothing, except products and the operators that _OTHERS names.
_KNOWN: Final = frozenset({"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional"})
_OTHERS: Final = re.compile(r"conv|attention|transformer|rnn|lstm|gru|bilinear|cdist")
# Bytes at which a vector or TMA begins to load.
_ALIGNED: Final = 16
# Of two dtypes with one type of torch the first: a packed weight is no tensor of codes.
_NAMES: Final = {dtype.torch_name: dtype.name for dtype in [*DTYPES.values()][::-1]}


class Inexpressible(Exception):
    """A product without a problem line; the message says why."""


def problem_of(call: Node) -> Problem | str:
    """The problem of an operator and of what follows it, or why it has none; "" where it multiplies nothing."""
    operator, name = str(call.target), name_of(call)
    namespace = operator.partition(".")[0]
    if namespace == "aten" and name in _READ:
        try:
            return _with_steps(call, _READ[name](call))
        except (Inexpressible, ProblemError) as error:
            return error.problem if isinstance(error, ProblemError) else str(error)
    if is_product(operator) or (namespace in _KNOWN and _OTHERS.search(name)):
        return "no op of a problem line computes it"
    return "" if namespace in _KNOWN else "what it computes is not known"


def flops_of(call: Node) -> int | None:
    """Operations of a product as PyTorch counts them, ``None`` where it does not."""
    packet = str(call.target).rpartition(".")[0].removesuffix("_for_cpu")
    count = next((count for op, count in flop_registry.items() if str(op) == packet), None)
    shapes = tree_map_only(Node, lambda x: x.meta["places"].shape, ((*call.args,), {**call.kwargs}))
    made = call.meta["places"].shape if "places" in call.meta else None
    return None if count is None else int(count(*shapes[0], **shapes[1], out_val=made))


# -- the product -------------------------------------------------------------------------------------------------------


def _dtype(x: Node) -> str:
    name = _NAMES.get(torch_name := str(places(x).dtype).removeprefix("torch."))
    if name is None:
        raise Inexpressible(f"a problem line has no {torch_name}")
    return name


def _side(x: Places, begin: int, side: str) -> tuple[bool, list[str]]:
    """Whether each matrix is stored transposed, and the words about where it lies.

    A view that the program makes inside of a larger tensor, which begins at ``begin``, is ``sliced`` or ``tail``.
    """
    (rows, columns), (row, column) = x.shape[-2:], x.strides[-2:]
    ways = [(False, rows, columns, row, column), (True, columns, rows, column, row)]
    # A row or a column can be either: a B of one column is taken for a transposed weight.
    ways.sort(key=lambda way: (way[1] > 1 and way[3] != way[2], way[0] != (side == "b" and columns == 1)))
    ways = [way for way in ways if (way[4] == 1 or way[2] <= 1) and (way[3] >= way[2] or way[1] <= 1)]
    if not ways:
        raise Inexpressible(f"{side.upper()} of shape {x.shape} has strides {x.strides}")
    is_t, lines, length, pitch, _ = ways[0]
    words, between = [], x.strides[0] if len(x.shape) > 2 and x.shape[0] > 1 else pitch
    if between == 0:
        words.append("broadcast")
    elif between < pitch and lines > 1:
        words, pitch = ["batch_middle"], between
    is_aligned = x.offset * x.dtype.itemsize % _ALIGNED == 0
    if lines > 1 and pitch > length:
        words.append("sliced" if x.offset > begin else "padded")
    elif x.offset > begin and is_aligned:
        words.append("tail")
    return is_t, [f"{side}.{word}" for word in (words if is_aligned else [*words, "offset"])]


def _operands(call: Node) -> list[Any]:
    """A and B: ``addmm`` and ``baddbmm`` have an addend before them."""
    return list(call.args[1:3] if name_of(call) in {"addmm", "baddbmm"} else call.args[:2])


def _as_k_by_n(call: Node, b: Node) -> Places:
    """Where B lies, of weights as the K x N that is multiplied by."""
    found = places(b)
    if name_of(call) == "_weight_int8pack_mm":
        return found._replace(shape=found.shape[::-1], strides=found.strides[::-1])
    if name_of(call).startswith("_weight_int4pack_mm"):  # the scales are (K / group, N, 2)
        k, n = places(_operands(call)[0]).shape[1], places(call.args[3]).shape[1]
        return found._replace(shape=(k, n), strides=(1, k))
    return found


def _with_conversions(op: str, a: Node, b: Node, out: str) -> tuple[str, str]:
    """The op and its dtypes, with the conversions of autocast or of an integer side, which are in the problem."""
    if op.startswith("woq_int"):
        return op, f"{out}-i{op[-1]}-{out}"
    names = [_dtype(x.all_input_nodes[0] if name_of(x) == "_to_copy" else x) for x in (root(a), root(b))]
    if op in {"mm", "linear"} and len(integers := {"i8", "u8"} & {*names}) == 1:
        return "mixed_mm", "-".join([*(name if name in integers else out for name in names), out])
    converted = "-".join([*names, out])
    return op, converted if converted in OPS[op].dtypes else f"{_dtype(a)}-{_dtype(b)}-{out}"


def _product(call: Node, op: str, *steps: str, words: tuple[str, ...] = (), groups: int = 0) -> Problem:
    """The problem of an operator that multiplies (..., M, K) by (..., K, N).

    Args:
        call: the operator.
        op: of the problem; ``linear`` and ``mixed_mm`` are found here.
        steps: the bias and its factors.
        words: quantisation and flags that do not follow from the operands.
        groups: how many of them divide a dimension, 0 where none is.
    """
    a, b = _operands(call)
    x, y, b_is_constant = places(a), _as_k_by_n(call, b), is_constant(b)
    (a_t, a_words), (b_t, b_words) = _side(x, places(root(a)).offset, "a"), _side(y, places(root(b)).offset, "b")
    if op in {"mm", "addmm"} and b_t and b_is_constant and steps in {(), ("bias",)} and "out" not in call.kwargs:
        op = "linear"
    op, dtypes = _with_conversions(op, a, b, _dtype(call))
    sizes = {"m": x.shape[-2], "n": y.shape[-1], "k": x.shape[-1] * (1 + DTYPES[dtypes.partition("-")[0]].is_packed)}
    if ragged := OPS[op].ragged:
        if sizes[ragged] % groups:
            raise Inexpressible(f"{ragged.upper()} of {sizes[ragged]} in {groups} groups: no whole mean size")
        sizes[ragged] //= groups
    batch = [groups] if groups else [one.shape[0] for one in (x, y) if len(one.shape) > 2][:1]
    if b_is_constant != OPS[op].constant_b:
        b_words.append("b.constant" if b_is_constant else "b.argument")
    shape = "x".join(map(str, [*batch, *sizes.values()]))
    head = ":".join([op, dtypes, "nt"[a_t] + "nt"[b_t], shape, *["+".join(steps)] * bool(steps)])
    words = (*words, *a_words, *b_words, *["out.given"] * ("out" in call.kwargs))
    with contextlib.suppress(ProblemError):
        return Problem.parse(":".join([head, *words]))
    # An op may lack words for a constant B, and for where in a larger tensor an operand begins.
    words = tuple(word.replace("sliced", "padded") for word in words if word[2:] not in {"tail", "constant"})
    return Problem.parse(":".join([head, *words]))


def _with_addend(call: Node) -> Problem:
    addend, whole = places(call.args[0]), places(call).shape
    m, n = whole[-2:]
    forms = {(): "bias-0", (m, 1): "bias-m1", whole: "bias-mn", (1, n): "bias-1n", (n,): "bias"}
    if addend.shape not in forms:
        raise Inexpressible(f"an addend of shape {addend.shape}")
    is_expanded = addend.shape == whole == (m, n) and m > 1 and addend.strides == (0, 1)
    given = [(name, call.kwargs.get(name, 1)) for name in ("alpha", "beta")]
    factors = [f"{name}-{_number(factor)}" for name, factor in given if factor != 1]
    return _product(call, name_of(call), "bias-xn" if is_expanded else forms[addend.shape], *factors)


def _scaled(call: Node) -> Problem:
    """Of fp8 or f4, with scales for all, for rows and columns, or for blocks."""
    a, b, x, y, bias, factor, _, is_fast = (*call.args, *(None,) * 8)[:8]
    if factor is not None:
        raise Inexpressible("the value of scale_result is part of a problem line, and is not read")
    ((m, k), (_, n)), (x, y) = (places(a).shape, places(b).shape), (places(x), places(y))
    rows, blocks, columns = (-(-size // BLOCK_K) for size in (m, k, n))
    kinds: Mapping[object, str] = {
        ((m, blocks), (blocks, columns)): "blocks-1_128",
        ((rows, blocks), (blocks, n)): "blocks-128_1",
        ((m, blocks), (blocks, n)): "blocks-1_1",
        ((m, 1), (1, n)): "rowwise",
    }
    micro = {"torch.float8_e8m0fnu": "mx", "torch.float8_e4m3fn": "nv"}.get(str(x.dtype))
    kind = "tensorwise" if {*x.shape, *y.shape} <= {1} else micro or kinds.get((x.shape, y.shape))
    if kind is None:
        raise Inexpressible(f"scales of shapes {x.shape} and {y.shape}")
    words = (f"quant.{kind}", "math.fast_accumulate")[: 1 + bool(is_fast)]
    return _product(call, "scaled_mm", *["bias"] * (bias is not None), words=words)


def _grouped(call: Node) -> Problem:
    is_scaled = name_of(call) == "_scaled_grouped_mm"
    ends, bias, _, _, is_fast = (*call.args[4 if is_scaled else 2 :], *(None,) * 5)[:5]
    if bias is not None:
        raise Inexpressible("a problem line has no bias of groups")
    forms: Mapping[object, str] = {
        (2, 3): "grouped_mm",
        (3, 2): "grouped_mm_n",
        (2, 2): "grouped_mm_k",
        (3, 3): "grouped_bmm",
    }
    op = forms[tuple(len(places(x).shape) for x in _operands(call))]
    groups = 0 if ends is None else places(ends).shape[0]
    words = ("quant.rowwise", "math.fast_accumulate")[: is_scaled + bool(is_fast)]
    return _product(call, f"scaled_{op}" if is_scaled else op, words=words, groups=groups)


_READ: Final[Mapping[str, Callable[[Node], Problem]]] = {
    "mm": lambda call: _product(call, "mm"),
    "bmm": lambda call: _product(call, "bmm"),
    "_int_mm": lambda call: _product(call, "int_mm"),
    "addmm": _with_addend,
    "baddbmm": _with_addend,
    "_scaled_mm": _scaled,
    "_grouped_mm": _grouped,
    "_scaled_grouped_mm": _grouped,
    "_weight_int8pack_mm": lambda call: _product(call, "woq_int8"),
    **dict.fromkeys(
        ("_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu"),
        lambda call: _product(call, "woq_int4", words=(f"quant.group-{call.args[2]}",)),
    ),
}


# -- what follows it ---------------------------------------------------------------------------------------------------


def _with_steps(call: Node, problem: Problem) -> Problem:
    """The problem with the steps that follow.

    A conversion at the end belongs to what reads it, unless that is the caller of the model.
    """
    value, a = call, root(_operands(call)[0])
    while len(value.users) == 1 and "places" in (reader := next(iter(value.users))).meta:
        is_whole = math.prod(places(reader).shape) == math.prod(places(value).shape)
        if not (is_view(reader) and is_whole and _is_dense(places(reader))):
            step, other = _step(reader, value, call, problem)
            is_a = other is not None and root(other) is a and not problem.residuals
            longer = (_longer(problem, step, "r0.alias") if is_a else None) or _longer(problem, step)
            if longer is None:
                break
            problem = longer
        value = reader
    returned = {reader.op for reader in value.users} == {"output"}
    while problem.epilogue and problem.epilogue[-1].kind is StepKind.CAST and not returned:
        problem = dataclasses.replace(problem, epilogue=problem.epilogue[:-1])
    return problem


def _is_dense(x: Places) -> bool:
    sizes = [(size, stride) for size, stride in zip(x.shape, x.strides, strict=True) if size != 1]
    return all(stride == math.prod(size for size, _ in sizes[at + 1 :]) for at, (_, stride) in enumerate(sizes))


def _longer(problem: Problem, step: str, *flags: str) -> Problem | None:
    """The problem with a step more, ``None`` where it cannot have it."""
    with contextlib.suppress(ProblemError):
        epilogue = (*problem.epilogue, Step.parse(step))
        return dataclasses.replace(problem, epilogue=epilogue, flags=(*problem.flags, *flags))
    return None


def _step(reader: Node, value: Node, product: Node, problem: Problem) -> tuple[str, Node | None]:
    """The step that an operator is, "" where it is none, and the second tensor of it."""
    name, made, x = name_of(reader).removesuffix("_"), places(reader), places(value)
    args: list[Any] = [*reader.args, None]
    first, rest = args[0], args[1:-1]
    if name == "_to_copy" and made.strides == x.strides:
        return f"cast-{_NAMES.get(str(made.dtype)[6:])}", None
    if (made.shape, made.dtype) != (x.shape, x.dtype) or not {*reader.kwargs} <= {"approximate"}:
        return "", None
    if name in {"add", "sub", "mul", "div"} and len(reader.all_input_nodes) == 2:
        (other,) = {*reader.all_input_nodes} - {value}
        is_step = (first is value or name in {"add", "mul"}) and places(other).dtype == x.dtype
        return _residual(name, x, other, product, problem) if is_step else "", other
    if not all(isinstance(one, (int, float)) for one in rest):
        return "", None
    if name in {"mul", "div"} and rest:
        factor = rest[0] if name == "mul" else 1 / rest[0] if rest[0] else math.inf
        return f"scale-{_number(factor)}", None
    words = {"hardtanh": "clamp", "gelu": "gelu_tanh" if reader.kwargs.get("approximate") == "tanh" else "gelu"}
    name = words.get(name, name)
    is_step = name in STEPS and STEPS[name].kind is StepKind.UNARY
    return "-".join([name, *(["_".join(map(_number, rest))] if rest else [])]) if is_step else "", None


def _residual(name: str, x: Places, other: Node, product: Node, problem: Problem) -> str:
    """The step that meets a second tensor; "" where a problem line has none like it, or it is made later."""
    given, n = places(other).shape, problem.shape.n
    shape, is_whole = _essence(given), _essence(given) == _essence(x.shape)
    if root(other).op != "get_attr" and not root(other) < product:
        return ""
    if shape == (n,) == x.shape[-1:] and (not is_whole or len(given) == 1):
        is_bias = name == "add" and is_constant(other) and not problem.epilogue and not problem.quant
        return "bias" if is_bias else f"{name}-n"
    each = x.shape[:-1] if problem.shape.batch is None else x.shape[-2:-1]
    is_column = shape == _essence((*each, 1)) and x.shape[-1] == n
    return name if is_whole else f"{name}-m1" if is_column else ""


def _essence(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without the ones that it begins with."""
    return shape[next((place for place, size in enumerate(shape) if size != 1), len(shape)) :]


def _number(x: Any) -> str:
    return repr(float(x)).replace("e+", "e")
