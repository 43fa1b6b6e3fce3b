"""A problem compiled by Inductor once, and run with any operands: the working half of ``inductor.py``.

With freezing, the weight is a constant of the generated program: packed into the layout of the micro-kernel at
compile time.  Compiling again for every filling would cost hundreds of times more than computing, so an
artifact *rebinds*: the compile runs on stand-in constants of the same geometry and random contents, the
template's own packing call is recorded, and for new operands that very code packs the new weight into the
module's constant.  Before an artifact may do so it has shown that the replay on the stand-ins gives every
constant of the module bit for bit, and that every constant operand is accounted for.  Where it has not
(a bias of up to 8 elements is written into the kernel's text, for example) each set of constants is compiled
anew: correct and slower, and counted in ``recompiles``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch
from weakref import finalize

import torch

from pytest_gemm.api.executed import products_in_source, record_products
from pytest_gemm.api.proof import Generation, Proof
from pytest_gemm.backends import machine_code, micro_kernels, torch_compat
from pytest_gemm.machine import isa as isa_module
from pytest_gemm.machine import processor
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.numerics.precision import settings
from pytest_gemm.operands import guard_pages
from pytest_gemm.outcome import Dropped, Reason, Unsupported, first_line
from pytest_gemm.problem.ops import THIRDS
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs import program

if TYPE_CHECKING:
    from pytest_gemm.operands.tensors import Operands

__all__ = [
    "Artifact",
    "CalledPrepared",
    "CompileSpec",
    "InductorPrepared",
    "Listed",
    "RecompileError",
    "constant_names",
    "list_choices",
    "listing",
    "m_dimensions",
    "poison",
    "stand_in",
]

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
    if problem.op.name == "linears":
        count = problem.shape.batch or 0
        return frozenset(f"{name}{index}" for name in ("b", "bias") for index in range(count))
    if problem.has("concat"):
        names = {f"{name}{index}" for name in ("b", "scale") for index in range(THIRDS)}
    if problem.op.name in {"qlinear", "da8w8", "woq_int4"}:
        names |= {"scale_b", "zero_b", "affine"}
    if step is not None and step.text not in {"m1", "mn"}:
        names.add("bias")
    return frozenset(names)


def m_dimensions(problem: Problem) -> dict[str, int]:
    """For every input of a ``dyn-m`` program the dimension that is M."""
    found = {"a": 0 if problem.shape.batch is None or problem.grouped else 1}
    if problem.op.name == "linears":
        rows = 0 if problem.step("gated") is not None else 1
        return {"a": 0, **{f"r{i}": rows for i in range(len(problem.residuals))}}
    if problem.step("rowwise") is not None:
        found["scale_a"] = found["a"]
    rank = len(problem.result_shape)
    for index, (own, moves) in enumerate(problem.residuals):
        if own.text == "n":
            continue
        place = 0 if own.text == "m1" else found["a"]
        for move in moves:
            place = move.order(rank).index(place)
        found[f"{'i' if own.text == 'at' else 'r'}{index}"] = place
    step = problem.step("bias")
    if step is not None and step.text in {"m1", "mn"}:
        batched = step.text == "mn" and problem.shape.batch is not None
        found["bias"] = 1 if batched else 0
    return found


def stand_in(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """A tensor of the same geometry (shape, strides, alignment) with distinct random contents.

    Its storage is no larger than the view needs, and it begins where a parameter of its own would: at offset 0,
    or as many elements past a 64-byte boundary as ``tensor`` lies (the flag ``off-b``), never behind a guard band.
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


class _Program(torch.nn.Module):
    """The problem's program with its constants as frozen parameters."""

    def __init__(self, problem: Problem, constants: Tensors, inputs: tuple[str, ...]) -> None:
        super().__init__()
        packed = "b" in constants  # an argument is packed by the program itself
        for name, tensor in (program.packed(problem, dict(constants)) if packed else constants).items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        self._build = program.build(problem, is_packed=packed)
        self._constants = tuple(constants)
        self._inputs = inputs

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        tensors = dict(zip(self._inputs, args, strict=True))
        tensors.update((name, getattr(self, name)) for name in self._constants)
        result: torch.Tensor = self._build(**tensors)
        return result


def _flatten(module: _Program, inputs: tuple[str, ...]) -> torch.nn.Module:
    """The program as straight-line code, what a user would have written by hand.

    Dynamo then traces half a dozen lines instead of this package's dispatch, and every artifact has a
    code object of its own, so that Dynamo's limits on recompiling one function never count two artifacts.
    """
    graph = torch.fx.Graph()
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    tensors = {name: torch.fx.Proxy(graph.placeholder(name), tracer) for name in inputs}
    tensors.update((n, torch.fx.Proxy(graph.get_attr(n), tracer)) for n in module._constants)
    result: Any = module._build(**cast("Any", tensors))  # a Proxy stands for a tensor
    graph.output(tuple(one.node for one in result) if isinstance(result, tuple) else result.node)
    return torch.fx.GraphModule(module, graph)


# -- rebinding -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Binding:
    """How one constant of the generated module follows from the program's constants."""

    attribute: str
    source: str
    recipe: Callable[[torch.Tensor], torch.Tensor]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and torch_compat.same_bits(a, b)


def _geometry_kept(
    like: torch.Tensor, recipe: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """``recipe`` with a result of exactly the strides that the generated code was compiled for."""
    stride = like.stride()

    def kept(new: torch.Tensor) -> torch.Tensor:
        made = recipe(new)
        if made.stride() == stride:
            return made
        return torch.empty_strided(made.shape, stride, dtype=made.dtype, device=made.device).copy_(made)

    return kept


_VIEWS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda t: t,
    lambda t: t.mT if t.dim() > 1 else t,
)


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


def _replay(
    packing: torch_compat.Packing, view: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor
) -> torch.Tensor:
    # A weight of another type has been converted before it was packed (mixed_mm).
    return packing.replay(view(tensor).to(packing.source.dtype))


def _candidates(
    constant: torch.Tensor, packings: list[torch_compat.Packing], tensor: torch.Tensor
) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Ways in which ``constant`` may have been made of ``tensor``, the likeliest first."""
    found: list[Callable[[torch.Tensor], torch.Tensor]] = []
    for view in _VIEWS:
        found.extend(
            functools.partial(_replay, packing, view)
            for packing in packings
            if packing.packed.shape == constant.shape and packing.source.shape == view(tensor).shape
        )
        found.append(view)
        found.extend(functools.partial(_adapted, constant, view, adapt) for adapt in _ADAPTATIONS)
    return found


def _stand_ins(names: Iterable[str], tensors: Tensors) -> dict[str, torch.Tensor]:
    """Stand-ins of these constants; a symmetric weight's zero points stay 0, which decides what may be compiled."""
    return {n: torch.zeros_like(tensors[n]) if n == "zero_b" else stand_in(tensors[n], next(_seeds)) for n in names}


def _bindings(
    module: ModuleType, session: torch_compat.Session, constants: Tensors, ignorable: frozenset[str]
) -> tuple[list[_Binding], str]:
    """Recipes for all constants of ``module``, or the reason why there are none.

    Args:
        module: generated for ``constants``.
        session: what was seen while it was.
        constants: the program's constants by parameter name.
        ignorable: constants that the program need not contain (the bias of ``beta = 0``).
    """
    names = _referenced(module)
    made: list[_Binding] = []
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


def _explain(
    attribute: str, constant: torch.Tensor, session: torch_compat.Session, constants: Tensors
) -> _Binding | None:
    for source, tensor in constants.items():
        for recipe in _candidates(constant, session.packings, tensor):
            try:
                value = recipe(tensor)
            except (RuntimeError, AssertionError):  # a shape that does not fit is merely not this way
                continue
            if value.shape == constant.shape and torch_compat.same_bits(value, constant):
                return _Binding(attribute, source, _geometry_kept(constant, recipe))
    return None


def _referenced(module: ModuleType) -> list[str]:
    """Names of the tensors among the module's globals that its entry function reads."""
    entry: Any = module.call
    code = getattr(entry, "__func__", entry).__code__
    return [n for n in dict.fromkeys(code.co_names) if isinstance(getattr(module, n, None), torch.Tensor)]


# -- one compile -------------------------------------------------------------------------------------------


class _Counted:
    """A generated kernel that notes its calls.  The list is cleared at the start of a run."""

    __slots__ = ("calls", "kernel", "name")

    def __init__(self, name: str, kernel: Callable[..., Any], calls: list[str]) -> None:
        self.name, self.kernel, self.calls = name, kernel, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(self.name)
        return self.kernel(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Triton's kernels are objects of which the wrapper calls kernel.run(...); CUTLASS's are libraries, and the
        # wrapper calls the function in them, which has the kernel's name.
        value = getattr(self.kernel, name)
        if name not in {"run", self.name} or not callable(value):
            return value

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(self.name)
            return value(*args, **kwargs)

        return counted


@contextlib.contextmanager
def _uncounted(modules: tuple[ModuleType, ...]) -> Iterator[None]:
    """Let these generated modules call their kernels directly."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            for name, value in list(vars(module).items()):
                if isinstance(value, _Counted):
                    stack.enter_context(patch.object(module, name, value.kernel))
        yield


# Every byte of memory that a generated program gets: NaN as a float of any width, -1 as an integer.
_POISON = 0xFF


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` after every byte of its storage became poison, between the elements of a strided one too."""
    storage: Any = tensor.untyped_storage()
    if storage.nbytes():
        storage.fill_(_POISON)  # on the current stream, ahead of the kernels that get it
    return tensor


def _poisoning(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``allocate`` with poison in what it returns."""

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison(guard_pages.moved(allocate(*args, **kwargs), "out"))

    return poisoned


@contextlib.contextmanager
def _poisoned(modules: tuple[ModuleType, ...]) -> Iterator[None]:
    """Let these generated modules find poison in whatever they allocate: results, intermediates, workspaces.

    The allocator hands out the memory of the last result again and again, and an element that is not written, or a
    workspace that is taken for zero, would show the right value of the call before.
    """
    with contextlib.ExitStack() as stack:
        for module in modules:
            for name in torch_compat.allocators_of(module):
                stack.enter_context(patch.object(module, name, _poisoning(getattr(module, name))))
        yield


@dataclasses.dataclass
class _Compiled:
    """What one run of the compiler made, with one set of constants inside."""

    function: Callable[..., torch.Tensor]
    inputs: tuple[str, ...]
    session: torch_compat.Session
    modules: tuple[ModuleType, ...]
    kernels: dict[str, bool]
    foreign_calls: tuple[str, ...]
    observed: tuple[str, ...]
    order: tuple[str, ...]
    calls: list[str]
    text: str = ""
    in_cpp: bool = False

    @property
    def templates(self) -> tuple[str, ...]:
        """Generated kernels that are matrix product templates."""
        return tuple(name for name, template in self.kernels.items() if template)

    @property
    def source(self) -> str:
        """Text of the generated wrapper, with its kernels."""
        return self.text or "\n".join(_source(m) for m in self.modules)

    @functools.cached_property
    def products(self) -> tuple[micro_kernels.Product, ...]:
        """What the text says of the C++ templates' products."""
        return micro_kernels.products(self.source)


def _source(module: ModuleType) -> str:
    assert module.__file__ is not None
    with open(module.__file__, encoding="utf-8") as file:
        return file.read()


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _traced(problem: Problem, tensors: Tensors, constants: Tensors) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """The program with these constants inside as straight-line code, and its arguments, marked where M is dynamic."""
    inputs = _inputs(tensors, constants)
    args = [tensors[n] for n in inputs]
    if problem.has("dyn-m"):
        dims = m_dimensions(problem)
        # Fresh views: the mark is an attribute, and the operands are not ours to mark.
        args = [t.as_strided(t.shape, t.stride(), t.storage_offset()) for t in args]
        for name, t in zip(inputs, args, strict=True):
            if name in dims:
                torch_compat.mark_dynamic(t, dims[name])
    return _flatten(_Program(problem, constants, inputs), inputs), args


def _inputs(tensors: Tensors, constants: Tensors) -> tuple[str, ...]:
    """Names of the tensors that stay arguments of the program, in order."""
    return tuple(n for n in tensors if n not in constants)


def _constants(problem: Problem, tensors: Tensors, spec: CompileSpec) -> tuple[str, ...]:
    """Names of the tensors that become constants: without freezing a parameter is an argument like any other."""
    # A package of AOTInductor's holds parameters as constants, frozen or not.
    constant = spec.options.get("freezing") or (spec.mode == "aoti" and problem.has("unfrozen"))
    names = constant_names(problem) if constant else frozenset()
    return tuple(n for n in tensors if n in names)


@dataclasses.dataclass(frozen=True)
class Listed:
    """The candidates of a program.

    Attributes:
        names: of all that can be compiled, in Inductor's order, its own pick of the C++ templates first.
        refused: micro-kernels of the C++ templates that are of the program's types and left out, with the reason.
    """

    names: tuple[str, ...]
    refused: Mapping[str, Reason] = dataclasses.field(default_factory=dict)


def list_choices(problem: Problem, tensors: Tensors, spec: CompileSpec) -> Listed:
    """The candidates that Inductor has for the program; compiles none of them."""
    seen = listing(problem, tensors, spec)
    return Listed(tuple(dict.fromkeys(seen.choices)), seen.refused_kernels)


def listing(problem: Problem, tensors: Tensors, spec: CompileSpec) -> torch_compat.Session:
    """What Inductor's first selection for the program was given; compiles and runs nothing."""
    constants = _stand_ins(_constants(problem, tensors, spec), tensors)
    inputs = _inputs(tensors, constants)
    module, args = _traced(problem, tensors, constants)
    with (
        _threads(spec.threads),
        settings(problem),
        torch_compat.session(
            spec.options, directory=spec.directory, listing=True, isa=spec.isa, beyond=spec.beyond
        ) as seen,
    ):
        try:
            function, _ = _entry(problem, module, args, inputs, spec)
            function(*args)
        except Exception as error:
            if not torch_compat.listed(error):
                raise  # something else ended the compile
    return seen


def _after_failure(
    problem: Problem, spec: CompileSpec, seen: torch_compat.Session, error: Exception, dropped: dict[str, Reason]
) -> None:
    """A compile has failed: note that its candidate is dropped and return when another one is to be tried.

    Raises:
        Unsupported: when Inductor has no candidate.
        Dropped: when there is none left that could be tried.
        Exception: what the candidate has failed with, when autotuning has no reason to drop it.
    """
    if seen.refused:
        ops = ", ".join(seen.refused)
        text = f"Inductor has no {spec.inductor_name} candidate for {ops} of {problem}"
        raise Unsupported("no-choice", text) from error
    if spec.candidate is None:
        # Inductor has tried them all, and says that no choice is valid.
        causes = {name: why for name, why in seen.failed.items() if isinstance(why, Exception)}
        reasons = {name: reason for name, why in causes.items() if (reason := torch_compat.why_dropped(why))}
        if reasons and set(reasons) >= set(seen.choices):
            raise _all_dropped(reasons) from error
        raise next((why for name, why in causes.items() if name not in reasons), error)
    cause = seen.failed.get(seen.tried)
    if not isinstance(cause, Exception):
        cause = error
    reason = torch_compat.why_dropped(cause)
    # Once a candidate is part of the program, autotuning has no part in it any more: a kernel with its epilogue that
    # nvcc refuses is what a user gets.  (Triton's kernels are another matter: they may have been chosen unseen.)
    if reason is None or (reason.code == "compile-error" and seen.chosen and spec.inductor_name == "CUTLASS"):
        raise cause
    if isinstance(spec.candidate, str):
        raise Dropped(reason.code, reason.text) from error
    dropped[seen.tried] = reason
    if len(dropped) >= len(set(seen.choices)):
        raise _all_dropped(dropped) from error


def _all_dropped(dropped: Mapping[str, Reason]) -> Dropped:
    first, reason = next(iter(dropped.items()))
    return Dropped("all-dropped", f"all {len(dropped)} candidates were dropped, {first} because {reason.text}")


def _left_out(why: Exception | Reason) -> Reason:
    """What becomes of a candidate that Inductor left out after a failure, whatever that was."""
    if isinstance(why, Reason):
        return why
    first = first_line(why)
    return torch_compat.why_dropped(why) or Reason("benchmark-failed", f"{type(why).__name__}: {first}"[:200])


# Modes in which C++ calls the kernels: nobody can count them, and what the program calls is read in it.
_IN_CPP = frozenset({"aoti", "cpp-wrapper"})


def _entry(
    problem: Problem, module: torch.nn.Module, args: list[torch.Tensor], inputs: tuple[str, ...], spec: CompileSpec
) -> tuple[Callable[..., torch.Tensor], str]:
    """The program as a user of the mode calls it, and its generated text where no Python module has it."""
    if spec.mode != "aoti":
        return torch.compile(module, fullgraph=True, dynamic=True if spec.mode == "dynamic" else None), ""
    dims = m_dimensions(problem) if problem.has("dyn-m") else {}
    return torch_compat.ahead_of_time(module, args, [dims.get(name) for name in inputs], spec.options)


def _compile(problem: Problem, tensors: Tensors, constants: Tensors, spec: CompileSpec) -> _Compiled:
    """Compile the program with these constants inside, and run it once on the inputs."""
    inputs = _inputs(tensors, constants)
    dropped: dict[str, Reason] = {}
    candidate = spec.candidate
    while True:
        module, args = _traced(problem, tensors, constants)
        with (
            _threads(spec.threads),
            settings(problem),  # templates read them, and Dynamo guards on them
            torch_compat.session(
                spec.options,
                directory=spec.directory,
                user_caches=spec.user_caches,
                candidate=candidate,
                isa=spec.isa,
            ) as seen,
        ):
            try:
                # In here: it makes Inductor set its folder in the environment.
                function, text = _entry(problem, module, args, inputs, spec)
                function(*args)
                break
            except Exception as error:
                _after_failure(problem, spec, seen, error, dropped)
                # Inductor drops such a candidate when it benchmarks; the next one takes its place.
                assert isinstance(candidate, int)
                candidate += 1
    if isinstance(spec.candidate, str) and seen.choices and spec.candidate not in seen.chosen:
        raise Unsupported("no-such-choice", f"Inductor has no candidate {spec.candidate} for {problem}")
    dropped.update((name, _left_out(why)) for name, why in seen.failed.items() if name not in seen.chosen)
    seen.failed.clear()  # the exceptions hold their frames, and these the graph
    seen.dropped.update(dropped)
    modules = tuple({id(m): m for m in seen.modules}.values())
    source = text or "\n".join(map(_source, modules))
    in_cpp = torch_compat.cpp_program(source) if spec.mode in _IN_CPP else None
    kernels: dict[str, bool] = dict(in_cpp.kernels) if in_cpp else {}
    calls: list[str] = []
    for loaded in modules:
        for name, template in torch_compat.kernels_of(_source(loaded)).items():
            kernels[name] = template
            kernel = getattr(loaded, name, None)
            if isinstance(kernel, _Counted):  # the module served an earlier compile of the same program
                kernel = kernel.kernel
            # Functions for C++, objects with a method run() for Triton and the CuTe DSL, libraries for CUTLASS.
            if kernel is not None:
                setattr(loaded, name, _Counted(name, kernel, calls))
    # Once more, now that the kernels are counted: this shows their order and what went through the dispatcher.
    with (
        _threads(spec.threads),
        settings(problem),
        torch.no_grad(),
        torch_compat.never_recompile(),
        record_products() as observed,
    ):
        function(*args)
    order, foreign = tuple(calls), products_in_source(source)
    if in_cpp is not None:
        order, foreign = in_cpp.calls, tuple(dict.fromkeys((*foreign, *in_cpp.foreign)))
    return _Compiled(
        function, inputs, seen, modules, kernels, foreign, tuple(observed), order, calls, text, in_cpp is not None
    )


@dataclasses.dataclass(frozen=True)
class CompileSpec:
    """How to compile: Inductor's options, where its caches live, and what may be answered from them.

    ``threads`` holds while compiling and running: blocking asks for it, and Dynamo guards on it.
    ``candidate`` compiles that one of the candidates (a number, counted round, or a name) instead of benchmarking all.
    A number that leads to a candidate which is dropped gives way to the next one, a name does not.
    ``choice`` is the whole name of the candidate, with what its options say of it (``,cache=2.2.8``).
    ``mode`` is how the program is reached, one of ``pytest_gemm.api.protocols.MODES``, "" for ``torch.compile``.
    ``device_kernel`` is the pattern of the kernels' names on the device, "" where they are those of the generated code.
    ``wanted`` is the pattern of the one candidate that has to be chosen, "" where any will do.
    ``isa`` is the instruction set of the CPU to generate for, one of ``machine.isa.ISAS``, "" for its own; with
    ``beyond`` it is one that the CPU may not have: candidates can be listed then, and nothing be compiled.
    """

    inductor_name: str
    options: Mapping[str, Any]
    directory: str
    threads: int
    user_caches: str = ""
    rebind: bool = True
    candidate: int | str | None = None
    device_kernel: str = ""
    mode: str = ""
    wanted: str = ""
    isa: str = ""
    beyond: bool = False
    choice: str = ""


# A compile that inlines a tensor of this shape can never be rebound, so the stand-ins are not even tried.
def _inlined(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 0 or (tensor.dim() == 1 and tensor.shape[0] <= 8)


_seeds = itertools.count(20)


class Artifact:
    """A problem compiled for one geometry of operands.

    Attributes:
        rebind_reason: why it cannot be rebound, "" when it can or has no constants.
        compiles: how often the compiler ran for it; 1 unless it cannot be rebound.
    """

    def __init__(self, problem: Problem, tensors: Tensors, spec: CompileSpec) -> None:
        self._recorded: tuple[str, ...] = ()
        self.problem = problem
        self.spec = spec
        self.compiles = 0
        self.rebind_reason = ""
        self._bindings: list[_Binding] = []
        self._bound: tuple[Any, ...] | None = None
        self._kept: list[torch.Tensor] = []
        self._names = _constants(problem, tensors, spec)
        inlined = [n for n in self._names if _inlined(tensors[n])]
        if not self._names:
            self._compiled = self._run_compiler(tensors, {})
        elif not spec.rebind:
            self.rebind_reason = "rebinding is switched off"
        elif inlined:
            self.rebind_reason = f"{', '.join(inlined)} is written into the kernel's text"
        else:
            self._try_to_rebind(tensors)
        if self.rebind_reason:
            self._compile_for(tensors)
        if spec.mode == "cudagraphs":
            self.run(tensors)  # PyTorch may skip the graph: a refusal that has to come before a judged run

    def _run_compiler(self, tensors: Tensors, constants: Tensors) -> _Compiled:
        self.compiles += 1
        made = _compile(self.problem, tensors, constants, self.spec)
        for module in made.modules:
            finalize(self, torch_compat.forget_module, module)
        return made

    def _try_to_rebind(self, tensors: Tensors) -> None:
        constants = _stand_ins(self._names, tensors)
        self._compiled = self._run_compiler(tensors, constants)
        if len(self._compiled.modules) != 1:
            self.rebind_reason = f"{len(self._compiled.modules)} modules were generated"
            return
        ignorable = frozenset({"bias"}) if self.problem.beta == 0.0 else frozenset()
        module = self._compiled.modules[0]
        if "zero_b" in constants:
            ignorable |= {"zero_b"}
        sources = {**constants, **program.derived(self.problem, constants)}
        self._bindings, self.rebind_reason = _bindings(module, self._compiled.session, sources, ignorable)
        # The packings hold the stand-ins; the recipes hold what they need of them.
        self._compiled.session.packings.clear()

    def _compile_for(self, tensors: Tensors) -> None:
        # Copies: the program keeps its constants, and the operands are not its own.
        constants = {n: _copy(tensors[n]) for n in self._names}
        self._compiled = self._run_compiler(tensors, constants)
        self._contents = constants

    def bind(self, tensors: Tensors) -> None:
        """Make these constants those of the program; nothing to do when they are already."""
        if not self._names:
            return
        identity = tuple((t.data_ptr(), t._version, t.shape, t.stride()) for t in (tensors[n] for n in self._names))
        if identity == self._bound:
            return
        if self.rebind_reason:
            if not all(torch_compat.same_bits(tensors[n], self._contents[n]) for n in self._names):
                self._compile_for(tensors)
        else:
            tensors = {**tensors, **program.derived(self.problem, tensors)}
            for binding in self._bindings:
                constant = guard_pages.moved(binding.recipe(tensors[binding.source]), "packed")
                setattr(self._compiled.modules[0], binding.attribute, constant)
        self._bound = identity
        # Alive, so that no other tensor can take their address.
        self._kept = [tensors[n] for n in self._names]

    def run(self, tensors: Tensors) -> torch.Tensor:
        """Compute the program on these tensors, in memory that holds poison.

        Raises:
            RecompileError: when the compiled program's guards refuse them.
        """
        self.bind(tensors)
        compiled = self._compiled
        args = [tensors[n] for n in compiled.inputs]
        compiled.calls.clear()
        try:
            with (
                _threads(self.spec.threads),
                settings(self.problem),
                torch.no_grad(),
                torch_compat.never_recompile(),
                _poisoned(compiled.modules),
            ):
                return compiled.function(*args) if self.spec.mode != "cudagraphs" else self._replayed(args)
        except RuntimeError as error:
            if torch_compat.recompiled(error):
                raise RecompileError(f"{self.problem}: {error}") from error
            raise

    def _replayed(self, args: list[torch.Tensor]) -> Any:
        """The result of a replayed CUDA graph, copied out of the graph's own memory.

        The first calls warm up and record, so it is called until it can only be a replay.  Kernels are called from
        Python while they are recorded and not when they are replayed: those calls are what the proof goes by.  Where
        the two calls of the compile have been enough to record, they are those of the second one.

        Raises:
            Unsupported: when PyTorch has not made a graph of the program.
        """
        calls, skipped = self._compiled.calls, torch_compat.graphs_skipped()
        made: Any = None
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            made = self._compiled.function(*args)
        if torch_compat.graphs_skipped() > skipped:
            raise Unsupported("cudagraphs-skipped", "PyTorch made no CUDA graph of the program")
        if calls:
            self._recorded = tuple(dict.fromkeys(calls))
        calls[:] = self._recorded or self._compiled.order
        return tuple(one.clone() for one in made) if isinstance(made, tuple) else made.clone()

    def proof(self) -> Proof:
        """What the last run executed, what the module defines and what was chosen."""
        compiled = self._compiled
        templates = compiled.templates
        foreign = dict.fromkeys((*compiled.observed, *compiled.foreign_calls))
        if compiled.session.subgraphs:
            # Inductor's own program around a product of ATen's slices: what it generated is the sum of these.
            templates = tuple(compiled.kernels)
            foreign = dict.fromkeys(name for name in foreign if not _multiplies_slices(name))
        chosen = tuple(c for c in compiled.session.chosen if c not in compiled.session.foreign)
        if not compiled.session.choices and self.spec.user_caches:
            # Nothing was selected: the program came out of the FX graph cache, with what was selected back then.
            chosen = tuple(f"{name} out of the FX graph cache" for name in templates)
        wanted = "" if not compiled.session.choices and self.spec.user_caches else self.spec.wanted
        # Where one template has to have computed it, the code has to be that template's, whoever chose.
        asked = self.spec.choice or (chosen[0] if wanted and len(chosen) == 1 else "")
        return Proof(
            chosen=chosen,
            generated=templates,
            executed=tuple(c for c in (compiled.order if compiled.in_cpp else compiled.calls) if c in templates),
            foreign=tuple(dict.fromkeys((*foreign, *compiled.session.foreign))),
            device_kernel=self.spec.device_kernel or rf"^(?:{'|'.join(map(re.escape, templates))})",
            around_library=bool(compiled.session.subgraphs),
            wanted=wanted,
            generation=self._generation,
            configuration=tuple(dict.fromkeys(map(str, self.products))),
            contradiction=micro_kernels.contradiction(self.products, asked),
            fused=self.fused if self.problem.passes and not self.problem.has("again") else None,
            fusions=compiled.session.fusions,
        )

    @functools.cached_property
    def _generation(self) -> Generation | None:
        """What the program was generated for, by its libraries; ``None`` where no instruction set was asked for."""
        if not self.spec.isa or not any(self.kernels.values()):
            return None
        compiled, seen = self._compiled, self._compiled.session
        paths = dict.fromkeys(map(Path, seen.libraries))
        for module in compiled.modules:
            for name in compiled.kernels:
                # The function that Python calls knows the library that it is in.
                kernel = getattr(module, name, None)
                path = getattr(getattr(getattr(kernel, "kernel", kernel), "__self__", None), "__file__", None)
                if path is not None:
                    paths[Path(path)] = None
        units = frozenset[str]().union(*(machine_code.units_of(path) for path in paths if path.is_file()))
        # At the CPU's best level the compiler may use all that it has, and bf16 conversions come without AMX too.
        needed = units - {"bf16"} if isa_module.isas(processor.cpu().flags)[-1:] == (self.spec.isa,) else units
        # Commands that link, and those of constants, have no level.
        levels = tuple(dict.fromkeys(filter(None, seen.levels))) or tuple(dict.fromkeys(seen.levels))
        return Generation(self.spec.isa, levels, machine_code.level(needed), tuple(sorted(units)), seen.counted)

    @property
    def products(self) -> tuple[micro_kernels.Product, ...]:
        """What the generated code says of the C++ templates' products; none where it has none of them."""
        return self._compiled.products

    @property
    def chosen(self) -> tuple[str, ...]:
        """The candidates that the program was made of; one but for a program with several products."""
        return tuple(self._compiled.session.chosen)

    @property
    def fused(self) -> bool:
        """Whether the program ends with its one template kernel, so that nothing is done to a stored result."""
        order = self._compiled.order
        return bool(order) and self._compiled.templates == order[-1:]

    @property
    def kernels(self) -> dict[str, bool]:
        """All generated kernels: name -> whether it is a template.  Pointwise kernels count here."""
        return self._compiled.kernels

    @property
    def choices(self) -> tuple[str, ...]:
        """All candidates that the selection was given."""
        return tuple(self._compiled.session.choices)

    @property
    def dropped(self) -> dict[str, Reason]:
        """Candidates that were left out on the way to the one that runs: name -> why."""
        return dict(self._compiled.session.dropped)

    @property
    def timings(self) -> dict[str, float]:
        """Seconds a call of the candidates that the selection timed, by name; empty where it timed none."""
        return dict(self._compiled.session.timings)

    @property
    def source(self) -> str:
        """Text of the generated program."""
        return self._compiled.source


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = stand_in(tensor, 0)
    if copy.numel():
        # Through the view; an expanded one repeats itself, which is why it is not assigned element by element.
        shape = [1 if s == 0 else n for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
        zeros = [0] * tensor.dim()
        narrow = tuple(slice(z, z + n) for z, n in zip(zeros, shape, strict=True))
        copy[narrow].copy_(tensor[narrow])
    return copy


def _multiplies_slices(name: str) -> bool:
    """Whether this is the batched product that decompose-K asks ATen for: ``aten.bmm.dtype_out``, ``bmm_dtype``."""
    return re.fullmatch(r"(torch\.ops\.)?(aten|extern_kernels)\.bmm(_dtype)?(\.\w+)?", name) is not None


class InductorPrepared:
    """A problem on its artifact; several of them share one where only M (``dyn-m``) differs."""

    def __init__(self, problem: Problem, artifact: Artifact, contract: Contract) -> None:
        self.problem = problem
        self.artifact = artifact
        self.contract = contract

    def run(self, operands: Operands) -> torch.Tensor:
        """Rebind the constants where needed and run; see :meth:`Artifact.run`."""
        return self.artifact.run(program.args(self.problem, operands))

    @contextlib.contextmanager
    def timed(self, operands: Operands) -> Iterator[Callable[[], torch.Tensor]]:
        """A block with the compiled program as a user calls it: constants bound, memory not poisoned, nothing counted.

        PyTorch's threads and switches are those of the problem inside the block, so that a call sets none.
        """
        tensors = program.args(self.problem, operands)
        self.artifact.run(tensors)
        compiled = self.artifact._compiled
        args = [tensors[n] for n in compiled.inputs]
        function = compiled.function
        with (
            _threads(self.artifact.spec.threads),
            settings(self.problem),
            torch.no_grad(),
            torch_compat.never_recompile(),
            _uncounted(compiled.modules),
        ):
            yield lambda: function(*args)

    def proof(self) -> Proof:
        """What the last :meth:`run` executed.  An empty result needs no kernel, so none is asked for."""
        proof = self.artifact.proof()
        return dataclasses.replace(proof, provable=False) if self.problem.shape.is_empty else proof

    @property
    def dropped(self) -> dict[str, Reason]:
        """See :attr:`Artifact.dropped`."""
        return self.artifact.dropped

    @property
    def timings(self) -> dict[str, float]:
        """See :attr:`Artifact.timings`."""
        return self.artifact.timings

    @property
    def source(self) -> str:
        """Text of the generated program, for the artifacts of a failure."""
        return self.artifact.source


class CalledPrepared(InductorPrepared):
    """A compiled program whose products are ATen's own: they are what it is asked for, and nothing has to be proved."""

    def proof(self) -> Proof:
        """The products that the program calls, by what the dispatcher saw and by its text."""
        compiled = self.artifact._compiled
        seen = tuple(dict.fromkeys((*compiled.observed, *compiled.foreign_calls)))
        return Proof(executed=seen or compiled.order, provable=False)
