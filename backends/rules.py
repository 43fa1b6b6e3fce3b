"""What the backends do not support: the rules of ``rules.toml``, and the conditions that they are made of.

A rule is a table with ``code``, ``text`` and ``remedy`` of the reason, and conditions, all of which have to hold.  A
condition is a key of :data:`_CONDITIONS` with its value, or ``not_`` and the key; ``when`` names one that only code
can express.  The texts are formats of ``p``, the problem; ``r``, the request; and ``found``, what the last condition
with an answer found, the flag for instance.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from pytest_gemm.api.request import DEFAULT, BuildRequest
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.machine import isa as isa_module
from pytest_gemm.machine import processor
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import StepKind
from pytest_gemm.storage.datafile import document

_REASON: Final = frozenset({"code", "text", "remedy"})


@functools.cache
def groups() -> dict[str, list[dict[str, Any]]]:
    """The rules by group."""
    return document(Path(__file__).with_name("rules.toml"))


def check(names: tuple[str, ...], problem: Problem, request: BuildRequest) -> Unsupported | None:
    """The reason of the first rule that holds, ``None`` where a problem is supported.

    Args:
        names: of groups, in the order in which they are read.
        problem: whether it is supported.
        request: how it would be built.
    """
    if text := next(filter(None, (problem.op.lacks(problem, name) for name in names)), ""):
        return Unsupported("no-candidate", text)
    for rule in itertools.chain.from_iterable(groups()[name] for name in names):
        found: object = ""
        for key in (key for key in rule if key not in _REASON):
            if not (holds := _holds(key, rule[key], problem, request)):
                break
            found = found if holds is True else holds
        else:
            texts = (rule.get(key, "").format(p=problem, r=request, found=found) for key in ("text", "remedy"))
            return Unsupported(rule["code"], *texts)
    return None


def _holds(key: str, value: Any, problem: Problem, request: BuildRequest) -> object:
    """What a condition finds; one that begins with ``not_`` holds where the other finds nothing."""
    if key.startswith("not_"):
        return not _CONDITIONS[key.removeprefix("not_")](value, problem, request)
    return _CONDITIONS[key](value, problem, request)


def executes(isa: str, request: BuildRequest) -> bool:
    """Whether code may be of this instruction set: that of the level that is generated for, or what Inductor takes."""
    if request.isa:
        return isa_module.ISAS.index(isa) <= isa_module.ISAS.index(request.isa)
    return isa in isa_module.isas(isa_module.used(processor.cpu().flags))


# -- conditions that only code can express ---------------------------------------------------------------


def decomposed(problem: Problem, device: str) -> str:
    """Why Inductor writes a product as multiplications and sums before any backend is tried, "" where it does not.

    From ``torch/_inductor/decomposition.py`` (mm, addmm, bmm) and ``kernel/bmm.py`` (tuned_bmm) of torch 2.13,
    and confirmed on it; before, an outer product could have one row or column.  With a dynamic size, a size that is 1
    at run time is not 1 at compile time, which the group ``any-m`` has dealt with.
    """
    op, m, n, k = problem.op, problem.rows, problem.shape.n, problem.shape.k
    cpu = device == "cpu"
    if op.name == "grouped_bmm" or op.rounds_once:
        return ""
    if op.batched:
        if op.addend:
            return ""
        if k == 1:
            return "K=1 is an outer product"
        return f"a batch of products with {'M' if m == 1 else 'N'}=1 is bound by memory" if cpu and 1 in (m, n) else ""
    if op.grouped or op.scales or op.weight_scales or not problem.dtypes.out.is_float or 0 in (m, n):
        return ""
    outer = k == 1 and 1 not in (m, n)
    if cpu and m == n == 1:
        return "M=N=1 is a dot product"
    if cpu and problem.adds_bias:
        return "M=1 with K and N up to 16 is small" if m == 1 and k <= 16 and n <= 16 else ""
    if cpu:
        is_outer = outer or (k == 1 and _torch_below([2, 13], problem, DEFAULT))
        return "K=1 is an outer product of up to 32 elements" if is_outer and m + n <= 32 else ""
    return "K=1 is an outer product" if outer else ""


def _rows_for_tma(problem: Problem, _: BuildRequest) -> str:
    """The operand whose rows do not begin at multiples of 16 bytes, with what TMA needs of them."""
    shape, layout = problem.shape, problem.layout
    unit = 128 // problem.input_dtype.bits
    rows = {
        "A": (shape.m if layout.a_transposed else shape.k, unit),
        "B": (shape.k if layout.b_transposed else shape.n, unit),
        "the result": (shape.n, 128 // problem.dtypes.out.bits),
    }
    for name, (length, multiple) in rows.items():
        if length % multiple:
            return f"rows of {name} are {length} elements long: TMA needs a multiple of {multiple}"
    return ""


def _grouped_rows(problem: Problem, _: BuildRequest) -> str:
    """The operand of ``_grouped_mm`` whose rows do not begin at multiples of 16 bytes."""
    shape, unit = problem.shape, 128 // problem.dtypes.a.bits
    gap = 16 if problem.op.scales else 8
    n, k = (problem.ends if problem.op.ragged == name else getattr(shape, name) for name in "nk")
    lengths = {
        "A": shape.m if problem.layout.a_transposed else k,
        "B": k if problem.layout.b_transposed else n,
    }
    for name, length in lengths.items():
        # A row of no elements has a stride of one; the gap is that of operands/tensors.py.
        stride = max(length, 1) + (gap if problem.has(f"{name.lower()}.padded") else 0)
        if stride % unit:
            needs = f"_{'scaled_' if problem.op.scales else ''}grouped_mm needs a multiple of {unit}"
            return f"rows of {name} are {stride} elements apart: {needs}"
    return ""


def _scaled_groups(problem: Problem, _: BuildRequest) -> str:
    """The size of a scaled grouped product, of all groups where it is divided, that is no multiple of 16."""
    sizes = {name: problem.ends if problem.op.ragged == name else getattr(problem.shape, name) for name in "nk"}
    return next((f"{name.upper()}={size}" for name, size in sizes.items() if size % 16), "")


def _cublas_before_12_9(_problem: Problem, _request: BuildRequest) -> str:
    """The version of CUDA that PyTorch was built with, where it is too old; otherwise ""."""
    import torch

    built = torch.version.cuda or ""
    return built if built and tuple(map(int, built.split(".")[:2])) < (12, 9) else ""


def _lacks_scaled_mm_v2(_problem: Problem, _request: BuildRequest) -> bool:
    """Whether the CPU has no kernel for it, as with torch 2.11."""
    import torch

    return not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU")


def _lacks_onednn(problem: Problem, request: BuildRequest) -> tuple[str, str] | None:
    """Where oneDNN does not compute the half type of linears, and the level from which on it does."""
    import torch

    from pytest_gemm.backends.inductor.cpu_isa import ONEDNN_FROM

    half = problem.input_dtype.name
    supported: Any = getattr(torch.ops.mkldnn, f"_is_mkldnn_{'fp16' if half == 'f16' else 'bf16'}_supported")
    least = ONEDNN_FROM[half]
    if executes(least, request) and supported():
        return None
    return f"at {request.isa}" if request.isa else "on this processor", least


def _unpacked_a(problem: Problem, _: BuildRequest) -> str:
    """The flag for which matrices of A are not contiguous."""
    flags = ["a.padded", "a.sliced", "a.strided"]
    if problem.shape.batch != 1 and problem.shape.m != 1:
        flags.append("a.batch_middle")
    return next(filter(problem.has, flags), "")


def _unfolded_a(problem: Problem, _: BuildRequest) -> str:
    """The flag for which a linear of matrices becomes a bmm that has no C++ kernel: expanded weights, or one column.

    From ``should_fold`` in ``torch/_decomp/decompositions.py``: rows are put together where nothing lies between them,
    or where there is one, or nothing to multiply.  A batch of one needs no expanded weight.
    """
    batch, m, n, k = problem.shape.batch, problem.shape.m, problem.shape.n, problem.shape.k
    if not batch or not m or not k or batch * m == 1 or (batch == 1 and 1 not in (n, k)):
        return ""
    return next(filter(problem.has, ("a.padded", "a.sliced", "a.strided")), "")


def _strided_out(problem: Problem, _: BuildRequest) -> bool:
    """Whether a given result, or the A that it is written over, has gaps or is not stored by rows."""
    *batch, rows, columns = problem.result_shape
    over_a = problem.has("out.alias")
    by_columns = problem.layout.a_transposed if over_a else problem.has("out.transposed")
    lines, count = columns if by_columns else rows, math.prod(batch)
    is_padded = problem.has("a.padded" if over_a else "out.padded") and (lines > 1 or count > 1)
    is_mixed = over_a and problem.has("a.batch_middle") and lines > 1 and count > 1
    return is_padded or is_mixed or (by_columns and rows > 1 and columns > 1)


_WHEN: Final[Mapping[str, Callable[[Problem, BuildRequest], object]]] = {
    "decomposed-on-cpu": lambda p, _: decomposed(p, "cpu"),
    "decomposed-on-cuda": lambda p, _: decomposed(p, "cuda"),
    "rows-for-tma": _rows_for_tma,
    "grouped-rows": _grouped_rows,
    "scaled-groups": _scaled_groups,
    "other-threads": lambda _, r: r.run_threads > 0,
    "scales-of-rows": lambda p, _: p.scale_blocks == (1, 128) or (p.scale_blocks == (1, 1) and p.shape.m > 1),
    "squares-of-a": lambda p, _: p.scale_blocks is not None and p.scale_blocks[0] > 1,
    "cublas-before-12.9": _cublas_before_12_9,
    "scaled-addend": lambda p, _: p.alpha != 1.0 or p.beta != 1.0,
    "no-onednn": _lacks_onednn,
    "no-scaled-mm-v2": _lacks_scaled_mm_v2,
    "unpacked-a": _unpacked_a,
    "unfolded-a": _unfolded_a,
    "a-columns": lambda p, _: p.layout.a_transposed and (p.shape.m != 1 or p.has("a.padded")),
    "b-not-constant": lambda p, _: "" if p.constant_b else next(filter(p.has, ("b.alias_t", "b.alias")), "b.argument"),
    "out-strided": _strided_out,
    "sums-of-a": lambda p, _: p.reduction is not None and p.reduction.text == "k",
    "binary-step": lambda p, _: any(step.kind is StepKind.BINARY for step in p.passes),
}


def _older(least: list[int], _problem: Problem, _request: BuildRequest) -> str:
    import torch

    is_older = torch.cuda.is_available() and torch.cuda.get_device_capability() < tuple(least)
    return ".".join(map(str, least)) if is_older else ""


def _torch_below(release: list[int], _problem: Problem, _request: BuildRequest) -> bool:
    from pytest_gemm.backends.inductor.torch_compat import torch_release

    return torch_release() < tuple(release)


def _other_capability(majors: list[int], _problem: Problem, _request: BuildRequest) -> str:
    """The compute capability of the device, where there is one and its first number is none of these; otherwise ""."""
    import torch

    if not torch.cuda.is_available():
        return ""
    found = torch.cuda.get_device_capability()
    return "" if found[0] in majors else ".".join(map(str, found))


def _size(problem: Problem, name: str) -> int:
    sizes = problem.shape
    return {"m": sizes.m, "n": sizes.n, "k": sizes.k, "batch": sizes.batch or 0, "rows": problem.rows}[name]


_CONDITIONS: Final[Mapping[str, Callable[[Any, Problem, BuildRequest], object]]] = {
    # Names of ops, or patterns.
    "ops": lambda names, p, _: any(fnmatch.fnmatchcase(p.op.name, name) for name in names),
    "dtypes": lambda names, p, _: str(p.dtypes) in names,
    "a": lambda names, p, _: p.dtypes.a.name in names,
    "input": lambda names, p, _: p.input_dtype.name in names,
    "out": lambda names, p, _: p.dtypes.out.name in names,
    "layouts": lambda names, p, _: p.layout.value in names,
    "flags": lambda names, p, _: next(filter(p.has, names), ""),
    "steps": lambda names, p, _: any(map(p.step, names)),
    "modes": lambda names, _, r: r.mode in names,
    "devices": lambda names, _, r: r.device in names,
    # Properties of the problem, "op.batched" for instance.
    "facts": lambda names, p, _: all(operator.attrgetter(name)(p) for name in names),
    "empty": lambda _value, p, _: p.shape.is_empty or p.shape.k == 0,
    # Sizes: m n k batch rows.
    "below": lambda sizes, p, _: all(_size(p, name) < size for name, size in sizes.items()),
    "above": lambda sizes, p, _: all(_size(p, name) > size for name, size in sizes.items()),
    "multiples": lambda sizes, p, _: not any(_size(p, name) % size for name, size in sizes.items()),
    "groups": lambda sizes, p, _: p.group_size in sizes,
    "capability_below": _older,
    "capability_not": _other_capability,
    "torch_below": _torch_below,
    "torch_from": lambda release, p, r: not _torch_below(release, p, r),
    "isa_below": lambda isa, _, r: not executes(isa, r),
    "when": lambda name, p, r: _WHEN[name](p, r),
}
