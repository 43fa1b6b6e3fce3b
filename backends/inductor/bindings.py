"""How the arguments of a compiled program are made from the operands of a problem."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

from pytest_gemm.backends.inductor.compilation import Packing, Session
from pytest_gemm.backends.inductor.hooks import hooked
from pytest_gemm.problem.ops.op import called
from pytest_gemm.problem.ops.woq import THIRDS
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs import program

Tensors = Mapping[str, torch.Tensor]


class RecompileError(RuntimeError):
    """A compiled program met operands of its own problem and wanted to compile again."""


def constant_names(problem: Problem) -> frozenset[str]:
    """Which of the program's tensors are constants of the compiled program.

    With a constant weight its scale and its bias are constants too, as in ``torch.nn.Linear``; not a bias with
    a row for every M, which belongs to the input.  Residuals are inputs.
    """
    if not problem.constant_b:
        return frozenset()
    step = problem.step("bias")
    names = {"b", "scale"}
    if problem.op.several:
        count = problem.shape.batch or 0
        return frozenset(f"{name}{index}" for name in ("b", "bias") for index in range(count))
    if problem.has("program.concat"):
        names = {f"{name}{index}" for name in ("b", "scale") for index in range(THIRDS)}
    if problem.op.int8 or problem.group_size:
        names |= {"scale_b", "zero_b", "quantisation"}
    if step is not None and step.text not in {"m1", "mn", "0", "xn"}:
        names.add("bias")
    return frozenset(names)


def dynamic_dimensions(problem: Problem) -> dict[str, dict[int, str]]:
    """The dimensions of the program's tensors that are dynamic sizes, by name of the tensor: ``{"a": {0: "m"}}``."""
    if not problem.dynamic:  # the dimensions of a view are no sizes of the product
        return {}
    found = {
        name: {place: size for place, size in enumerate(sizes) if size in problem.dynamic}
        for name, sizes in _sizes(problem).items()
    }
    return {name: places for name, places in found.items() if places}


def marking(problem: Problem) -> str:
    """The function of ``torch._dynamo`` that marks a dimension as a dynamic size."""
    return "mark_unbacked" if problem.has("m.unknown") else "mark_dynamic"


def _sizes(problem: Problem) -> dict[str, tuple[str, ...]]:
    """What each dimension of the program's tensors is: one of ``m n k batch``, or "" for anything else."""
    op, has_batch = problem.op, problem.shape.batch is not None
    batch = ("batch",) if has_batch and not problem.op.grouped else ()
    result: tuple[str, ...] = (*batch, "m", "n")
    if op.several:
        result = ("m", "n") if problem.step("gated") is not None else result
        return {"a": ("m", "k"), **{f"r{index}": result for index in range(len(problem.residuals))}}
    # What the program cuts A or B out of comes as it is stored, a weight always does.
    a = ("k", "m") if problem.view_of("a") and problem.layout.a_transposed else ("m", "k")
    is_stored = op.weight or (problem.view_of("b") and problem.layout.b_transposed)
    found: dict[str, tuple[str, ...]] = {"a": (*batch, *a)}
    found["b"] = (*(batch if op.batch == "always" else ()), *(("n", "k") if is_stored else ("k", "n")))
    if problem.step("rowwise") is not None or problem.scale_blocks:
        # A grouped product has as many scales as rows, and no second dimension.
        by_rows = op.rounds_once and has_batch and not problem.scale_blocks
        found["scale_a"] = (*batch, "m") if by_rows else (*batch, "m", "")
    if problem.has("groups.labels"):
        found["labels"] = ("m",)
    if problem.has("groups.masked"):
        found["counts"] = ("batch",)
    if problem.has_out and not problem.has("out.alias"):
        found["out"] = result
    for index, (own, moves) in enumerate(problem.residuals):
        if own.extent == "at":
            found |= {f"r{index}": ("", "n"), f"i{index}": result[:-1]}
            continue
        moved = result
        for move in moves:
            moved = tuple(moved[place] for place in move.order(len(moved)))
        found[f"r{index}"] = {"n": ("n",), "m1": ("m", "")}.get(own.extent, moved)
    if (step := problem.step("bias")) is not None and not problem.has("out.addend"):
        found["bias"] = {"": ("n",), "1n": ("", "n"), "m1": ("m", ""), "mn": result, "xn": result, "0": ()}[step.text]
    return found


def stand_in(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """A tensor of the same geometry (shape, strides, alignment) with distinct random contents.

    Its storage is no larger than the view needs, and it begins where a parameter of its own would: at offset 0,
    or as many elements past a 64-byte boundary as ``tensor`` lies (the flag ``b.offset``), never behind a guard band.
    """
    generator = torch.Generator().manual_seed(seed)
    offset = tensor.storage_offset() % (64 // tensor.element_size())
    extent = offset + 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    size = max(extent, 0) if tensor.numel() else offset
    storage = torch.zeros(size, dtype=tensor.dtype)
    view = storage.as_strided(tensor.shape, tensor.stride(), offset)
    # Written through the storage: an expanded view has several indices for one element.
    if tensor.dtype.is_floating_point:
        storage.copy_(torch.randn(size, generator=generator))
    else:
        low, high = (0, 255) if tensor.dtype == torch.uint8 else (-127, 127)
        storage.copy_(torch.randint(low, high + 1, (size,), generator=generator))
    return view.to(tensor.device) if tensor.device.type != "cpu" else view


def straight_line(
    problem: Problem, constants: Tensors, inputs: tuple[str, ...], matmul: program.Matmul | None = None
) -> torch.nn.Module:
    """The problem's program as straight-line code, with its constants as frozen parameters.

    That is what a user would have written by hand.  Dynamo traces half a dozen lines instead of this package's
    dispatch, and every artifact has a code object of its own, so that Dynamo's limits on recompiling one function never
    count two artifacts.

    Args:
        problem: what is computed.
        constants: by name; a weight that is an argument is packed by the program itself.
        inputs: names of the tensors that stay arguments, in their order.
        matmul: a function that multiplies in place of PyTorch's operator.  It is called in the program, so that Dynamo
            traces it: a custom operator, or the launch of a kernel.
    """
    is_packed = "b" in constants
    stored = program.packed(problem, dict(constants)) if is_packed and matmul is None else constants
    parameters = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in stored.items()}
    graph = torch.fx.Graph()
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    nodes = {name: graph.placeholder(name) for name in inputs} | {name: graph.get_attr(name) for name in constants}
    tensors: Any = {name: torch.fx.Proxy(node, tracer) for name, node in nodes.items()}  # a Proxy stands for a tensor

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:  # a name in the graph, whatever the function is
        assert matmul is not None
        return matmul(a, b)

    given = None if matmul is None else functools.partial(called, torch, "product", product)
    result: Any = program.build(problem, given, is_packed=is_packed)(**tensors)
    graph.output(tuple(one.node for one in result) if isinstance(result, tuple) else result.node)
    module = torch.fx.GraphModule(parameters, graph)
    # fx's own call reads the traceback of what generated code raises with a generator.  Dynamo is active again by then,
    # tries to compile that, and raises an error of its own in place of the other one.
    type(module).__call__ = torch.nn.Module.__call__  # type: ignore[method-assign]  # each GraphModule has its own class
    return module


# -- packing ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def watch_packing(seen: Session) -> Iterator[None]:
    """Note every packing of a constant weight by a C++ template, with the means to do it again.

    The template of several linears blocks each of its weights and packs what came out.
    """
    blocked: dict[int, tuple[torch.Tensor, torch.Tensor, tuple[Any, ...], Any]] = {}

    def prepare(call: Any, inputs: Any, layout: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(inputs, layout, *args, **kwargs)
        source, packed = inputs[1], result[0][1]
        # Nodes of the graph pass here too: only constants are tensors.
        if isinstance(source, torch.Tensor) and isinstance(packed, torch.Tensor):
            before, after = inputs[0], list(inputs[2:])

            def replay(weight: torch.Tensor) -> torch.Tensor:
                again = call([before, weight, *after], layout, *args, **kwargs)[0][1]
                assert isinstance(again, torch.Tensor)
                return again

            seen.packings.append(Packing(source, packed, replay))
        return result

    def block(call: Any, weight: Any, *args: Any) -> Any:
        made = call(weight, *args)
        if isinstance(weight, torch.Tensor):
            blocked[id(made)] = made, weight, args, call
        return made

    def pack(call: Any, weight: Any, *args: Any) -> Any:
        made = call(weight, *args)
        if id(weight) in blocked and isinstance(made, torch.Tensor):
            _, source, how, block_again = blocked.pop(id(weight))
            seen.packings.append(Packing(source, made, lambda new: call(block_again(new, *how), *args)))
        return made

    template = "torch._inductor.codegen.cpp_gemm_template:CppGemmTemplate"
    grouped = "torch._inductor.codegen.cpp_grouped_gemm_template:CppGroupedGemmTemplate"
    hooks: dict[str, Callable[..., Any]] = {
        f"{template}.prep_weight": prepare,
        f"{grouped}.block_weight": block,
        f"{grouped}.pack_vnni_weight": pack,
    }
    with hooked(hooks, optional=True):
        yield


# -- rebinding -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Binding:
    """How one constant of the generated module follows from the program's constants."""

    attribute: str
    source: str
    recipe: Callable[[torch.Tensor], torch.Tensor]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two dense tensors agree in dtype, shape and every bit (a NaN equals itself)."""
    if a.is_mkldnn or b.is_mkldnn or a.dtype != b.dtype or a.shape != b.shape:
        return False
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.detach().contiguous().view(kind), b.detach().contiguous().view(kind))


def _in_strides(
    recipe: Callable[[torch.Tensor], torch.Tensor], stride: tuple[int, ...], tensor: torch.Tensor
) -> torch.Tensor:
    """What ``recipe`` makes of a tensor, in exactly the strides that the generated code was compiled for."""
    made = recipe(tensor)
    if made.stride() == stride:
        return made
    return torch.empty_strided(made.shape, stride, dtype=made.dtype, device=made.device).copy_(made)


_VIEWS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (lambda t: t, lambda t: t.mT if t.dim() > 1 else t)


# What a compiler does to a constant without changing its values: conversion, broadcast, another shape.
_ADAPTATIONS: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda t, like: t.to(like.dtype),
    lambda t, like: t.expand(like.shape),
    lambda t, like: t.reshape(like.shape),
)


def _adapted(
    like: torch.Tensor,
    view: Callable[[torch.Tensor], torch.Tensor],
    adapt: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    tensor: torch.Tensor,
) -> torch.Tensor:
    return adapt(view(tensor), like)


def _replay(packing: Packing, view: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    # A weight of another type has been converted before it was packed (mixed_mm).
    return packing.replay(view(tensor).to(packing.source.dtype))


def _candidates(
    constant: torch.Tensor, packings: list[Packing], tensor: torch.Tensor
) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Ways in which ``constant`` may have been made of ``tensor``, the likeliest first."""
    for view in _VIEWS:
        for packing in packings:
            if packing.packed.shape == constant.shape and packing.source.shape == view(tensor).shape:
                yield functools.partial(_replay, packing, view)
        yield view
        for adapt in _ADAPTATIONS:
            yield functools.partial(_adapted, constant, view, adapt)


def stand_ins(names: Iterable[str], tensors: Tensors) -> dict[str, torch.Tensor]:
    """Stand-ins of these constants; a symmetric weight's zero points stay 0, which decides what may be compiled."""
    return {n: torch.zeros_like(tensors[n]) if n == "zero_b" else stand_in(tensors[n], next(_seeds)) for n in names}


def bindings(
    module: ModuleType, session: Session, constants: Tensors, ignorable: frozenset[str]
) -> tuple[list[Binding], str]:
    """Recipes for all constants of ``module``, or the reason why there are none.

    Args:
        module: generated for ``constants``.
        session: what was seen while it was.
        constants: the program's constants by parameter name.
        ignorable: constants that the program need not contain (the bias of ``beta = 0``).
    """
    names = _referenced(module)
    made: list[Binding] = []
    for attribute in names:
        constant = getattr(module, attribute)
        if constant.is_mkldnn:
            return [], f"{attribute} is in oneDNN's own format"
        binding = _explain(attribute, constant, session, constants)
        if binding is None:
            return [], f"{attribute} {tuple(constant.shape)} does not follow from the constant operands"
        made.append(binding)
    # What is derived stands for the constants in front of its colon.
    used = {name for b in made for name in b.source.partition(":")[0].split("+")}
    missing = {name for name, t in constants.items() if t.numel() and ":" not in name} - used - ignorable
    if missing:
        return [], f"{', '.join(sorted(missing))} became part of the generated code"
    return made, ""


def _explain(attribute: str, constant: torch.Tensor, session: Session, constants: Tensors) -> Binding | None:
    for source, tensor in constants.items():
        for recipe in _candidates(constant, session.packings, tensor):
            try:
                value = recipe(tensor)
            except (RuntimeError, AssertionError):  # a shape that does not fit is merely not this way
                continue
            if value.shape == constant.shape and same_bits(value, constant):
                return Binding(attribute, source, functools.partial(_in_strides, recipe, constant.stride()))
    return None


def _referenced(module: ModuleType) -> list[str]:
    """Names of the tensors among the module's globals that its entry function reads."""
    entry: Any = module.call
    code = getattr(entry, "__func__", entry).__code__
    return [n for n in dict.fromkeys(code.co_names) if isinstance(getattr(module, n, None), torch.Tensor)]


_seeds = itertools.count(20)
