"""One run of Inductor's compiler: the program with one set of constants inside, and what became of its candidates."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

from pytest_gemm.api.executed import products_in_source, record_products
from pytest_gemm.backends.cpp import micro_kernels
from pytest_gemm.backends.inductor import generated_code, together, torch_compat
from pytest_gemm.backends.inductor.bindings import (
    Tensors,
    constant_names,
    dynamic_dimensions,
    marking,
    stand_ins,
    straight_line,
)
from pytest_gemm.backends.inductor.compilation import CompileSpec, Session, Wanted
from pytest_gemm.backends.inductor.hooks import patched
from pytest_gemm.core.outcome import Pruned, Reason, Unsupported
from pytest_gemm.core.text import causes, first_line
from pytest_gemm.numerics.precision import cpu_threads, settings
from pytest_gemm.problem.problem import Problem

# Modes in which C++ calls the kernels: calls cannot be counted, and are read in the program's text.
IN_CPP = frozenset({"aoti", "cpp-wrapper"})


# -- one compile -------------------------------------------------------------------------------------------


class _Counted:
    """A generated kernel that notes its calls.  The list is cleared at the start of a run.

    With ``threads`` it has so many CPU threads, whatever it was compiled for.
    """

    __slots__ = ("calls", "kernel", "name", "threads")

    def __init__(self, name: str, kernel: Callable[..., Any], calls: list[str], threads: int = 0) -> None:
        self.name, self.kernel, self.calls, self.threads = name, kernel, calls, threads

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(self.name)
        with cpu_threads(self.threads):
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


def uncounted(modules: tuple[ModuleType, ...]) -> contextlib.AbstractContextManager[None]:
    """Let these generated modules call their kernels directly."""
    globals_of = ((module, name, value) for module in modules for name, value in vars(module).items())
    return patched([(module, name, it.kernel) for module, name, it in globals_of if isinstance(it, _Counted)])


@dataclasses.dataclass
class Compiled:
    """What one run of the compiler made, with one set of constants inside; ``source``: the wrapper with its kernels."""

    function: Callable[..., torch.Tensor]
    inputs: tuple[str, ...]
    session: Session
    modules: tuple[ModuleType, ...]
    kernels: dict[str, bool]
    foreign: tuple[str, ...]
    order: tuple[str, ...]
    calls: list[str]
    source: str
    in_cpp: bool

    @property
    def templates(self) -> tuple[str, ...]:
        """Generated kernels that are matrix product templates."""
        return tuple(name for name, template in self.kernels.items() if template)

    @functools.cached_property
    def products(self) -> tuple[micro_kernels.Product, ...]:
        """What the text shows of the C++ templates' products."""
        return micro_kernels.products(self.source)


def _source(module: ModuleType) -> str:
    assert module.__file__ is not None
    with open(module.__file__, encoding="utf-8") as file:
        return file.read()


@contextlib.contextmanager
def calling(problem: Problem, spec: CompileSpec) -> Iterator[None]:
    """Call the compiled program as it was compiled, and never compile it again."""
    # A package of AOTInductor's runs with any number of threads.  Dynamo guards on it: kernels get it, see _Counted.
    threads = spec.request.run_threads if spec.mode == "aoti" else 0
    with cpu_threads(threads or spec.threads), settings(problem), torch.no_grad(), torch_compat.never_recompile():
        yield


@contextlib.contextmanager
def _compiling(
    problem: Problem, spec: CompileSpec, candidate: Wanted = None, listing: bool = False
) -> Iterator[Session]:
    """A session under the problem's settings: templates read them, and Dynamo guards on them."""
    with cpu_threads(spec.threads), settings(problem), torch_compat.session(spec, candidate, listing) as seen:
        yield seen


def constant_tensors(problem: Problem, tensors: Tensors, spec: CompileSpec) -> tuple[str, ...]:
    """Names of the tensors that become constants: without freezing a parameter is an argument like any other."""
    # A package of AOTInductor's holds parameters as constants, frozen or not.
    constant = spec.options.get("freezing") or (spec.mode == "aoti" and problem.has("b.parameter"))
    names = constant_names(problem) if constant else frozenset()
    return tuple(n for n in tensors if n in names)


def _started(
    problem: Problem, tensors: Tensors, constants: Tensors, spec: CompileSpec
) -> tuple[Callable[..., torch.Tensor], str]:
    """The program as a user of the mode calls it, after a call that compiles it with these constants inside.

    That call ends at a kernel that waits for a compiler, see :mod:`together`.

    Returns:
        the program, and its generated text where no Python module has it.
    """
    inputs = tuple(name for name in tensors if name not in constants)
    args = [tensors[name] for name in inputs]
    dims = dynamic_dimensions(problem)
    if dims:
        # Tensors of our own, as the mark is an attribute; and no views, of whose base Dynamo would make sizes symbols.
        args = [t.detach() for t in args]
        mark = getattr(torch._dynamo.decorators, marking(problem))
        for name, t in zip(inputs, args, strict=True):
            for place in dims.get(name, ()):
                mark(t, place)
    module = straight_line(problem, constants, inputs, spec.matmul)
    if spec.mode == "aoti":
        function, text = torch_compat.ahead_of_time(module, args, [dims.get(name, {}) for name in inputs], spec.options)
    else:
        function, text = torch.compile(module, fullgraph=True, dynamic=spec.mode == "dynamic" or None), ""
    try:
        function(*args)
    except Exception as error:
        if not together.stopped_by(error):
            raise
    return function, text


def compile_once(
    problem: Problem, tensors: Tensors, constants: Tensors, spec: CompileSpec
) -> Generator[None, None, Compiled]:
    """Compile the program with these constants inside, and run it once on the inputs.

    It pauses when the program is generated: kernels of it may wait for a compiler, see :mod:`together`.
    """
    pruned: dict[str, Reason] = {}
    candidate = spec.candidate
    while True:
        with _compiling(problem, spec, candidate) as seen:
            try:
                skipped = torch_compat.graphs_skipped()
                function, text = _started(problem, tensors, constants, spec)
                seen.graph_skipped = torch_compat.graphs_skipped() > skipped  # PyTorch counts a program once
                break
            except Exception as error:
                after_failure(problem, spec, seen, error, pruned)
                # Inductor drops such a candidate when it benchmarks; the next one takes its place.
                assert isinstance(candidate, int)
                assert isinstance(spec.candidate, int)
                candidate += 1
                if candidate - spec.candidate >= len(set(seen.choices)):  # an impossible one never fails
                    raise _all_pruned(pruned) from error
    if isinstance(spec.candidate, str) and not torch_compat.sees_selections():
        text = f"no candidate can be selected: torch {torch.__version__} has no selection that can be watched"
        raise Unsupported("selection-unseen", text)
    if isinstance(spec.candidate, str) and seen.choices and spec.candidate not in seen.chosen:
        raise Unsupported("unknown-candidate", f"Inductor has no candidate {spec.candidate} for {problem}")
    pruned.update((name, left_out(why)) for name, why in seen.failed.items() if name not in seen.chosen)
    seen.failed.clear()  # the exceptions hold their frames, and these the graph
    seen.pruned.update(pruned)
    modules = tuple({id(m): m for m in seen.modules}.values())
    yield
    source = text or "\n".join(map(_source, modules))
    in_cpp = generated_code.cpp_program(source) if spec.mode in IN_CPP else None
    kernels: dict[str, bool] = dict(in_cpp.kernels) if in_cpp else {}
    calls: list[str] = []
    for loaded in modules:
        for name, template in generated_code.kernels_of(_source(loaded)).items():
            kernels[name] = template
            kernel = getattr(loaded, name, None)
            if isinstance(kernel, _Counted):  # the module served an earlier compile of the same program
                kernel = kernel.kernel
            if isinstance(kernel, together.Waiting):
                kernel = kernel.load()
            seen.compiled_with = max(seen.compiled_with, together.compiled_with(kernel))
            # Functions for C++, objects with a method run() for Triton and the CuTe DSL, libraries for CUTLASS.
            if kernel is not None:
                setattr(loaded, name, _Counted(name, kernel, calls, spec.request.run_threads))
    # Once more, now that the kernels are counted: this shows their order and what went through the dispatcher.
    inputs = tuple(name for name in tensors if name not in constants)
    with calling(problem, spec), record_products() as observed:
        function(*(tensors[name] for name in inputs))
    order = tuple(calls) if in_cpp is None else in_cpp.calls
    foreign = dict.fromkeys((*observed, *products_in_source(source), *(in_cpp.foreign if in_cpp else ())))
    return Compiled(function, inputs, seen, modules, kernels, tuple(foreign), order, calls, source, in_cpp is not None)


# -- candidates that are left out ----------------------------------------------------------------------------


def after_failure(
    problem: Problem, spec: CompileSpec, seen: Session, error: Exception, pruned: dict[str, Reason]
) -> None:
    """A compile has failed: note that its candidate is pruned and return when another one is to be tried.

    Raises:
        Unsupported: when Inductor has no candidate, or its code cannot be executed here.
        Pruned: when Inductor has tried them all, or this one was requested by name.
        Exception: what the candidate has failed with, when autotuning has no reason to drop it.
    """
    if refusal := next((one for one in causes(error) if isinstance(one, Unsupported)), None):
        for module in seen.modules:
            torch_compat.forget_module(module)
        raise refusal
    if seen.empty:
        ops = ", ".join(seen.empty)
        text = f"Inductor has no {spec.inductor_name} candidate for {ops} of {problem}"
        raise Unsupported("no-candidate", text) from error
    if spec.candidate is None:
        # Inductor has tried them all, and raises that no choice is valid.
        errors = {name: why for name, why in seen.failed.items() if isinstance(why, Exception)}
        reasons = {name: reason for name, why in errors.items() if (reason := torch_compat.why_pruned(why))}
        if reasons and set(reasons) >= set(seen.choices):
            raise _all_pruned(reasons) from error
        raise next((why for name, why in errors.items() if name not in reasons), error)
    cause = seen.failed.get(seen.candidate)
    if not isinstance(cause, Exception):
        cause = error
    reason = torch_compat.why_pruned(cause)
    # Once a candidate is part of the program, autotuning has no part in it any more: a kernel with its epilogue that
    # nvcc rejects is what a user gets.  (Triton's kernels are another matter: they may have been chosen unseen.)
    if reason is None or (reason.code == "compile-error" and seen.chosen and spec.inductor_name == "CUTLASS"):
        raise cause
    if not isinstance(spec.candidate, int):
        raise Pruned(reason.code, reason.text) from error
    pruned[seen.candidate] = reason


def _all_pruned(pruned: Mapping[str, Reason]) -> Pruned:
    first, reason = next(iter(pruned.items()))
    return Pruned("all-pruned", f"all {len(pruned)} candidates were pruned, {first} because {reason.text}")


def left_out(why: Exception | Reason) -> Reason:
    """What becomes of a candidate that Inductor left out after a failure, whatever that was."""
    if isinstance(why, Reason):
        return why
    first = first_line(why)
    return torch_compat.why_pruned(why) or Reason("benchmark-failed", f"{type(why).__name__}: {first}"[:200])


# -- lists -------------------------------------------------------------------------------------------------


def list_candidates(problem: Problem, tensors: Tensors, spec: CompileSpec) -> tuple[str, ...]:
    """Names of the candidates that Inductor has for the program, in its order; compiles and runs none of them."""
    constants = stand_ins(constant_tensors(problem, tensors, spec), tensors)
    with _compiling(problem, spec, listing=True) as seen:
        try:
            _started(problem, tensors, constants, spec)
        except Exception as error:
            if not torch_compat.listed(error):
                raise  # something else ended the compile
    return tuple(dict.fromkeys(seen.choices))
