"""The candidates of a problem, listed without compiling them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pytest_gemm.backends.inductor import compilation, torch_compat
from pytest_gemm.backends.inductor.artifact import (
    CompileSpec,
    constant_tensors,
    entry_point,
    example_inputs,
    threads_for,
    traced,
)
from pytest_gemm.backends.inductor.bindings import Tensors, stand_ins
from pytest_gemm.numerics.precision import settings
from pytest_gemm.outcome import Reason
from pytest_gemm.problem.problem import Problem


@dataclasses.dataclass(frozen=True)
class Listed:
    """The candidates of a program.

    Attributes:
        names: of all that can be compiled, in Inductor's order, its own selection of the C++ templates first.
        unsupported: micro-kernels of the C++ templates that are of the program's types and left out, with the reason.
    """

    names: tuple[str, ...]
    unsupported: Mapping[str, Reason] = dataclasses.field(default_factory=dict)


def list_candidates(problem: Problem, tensors: Tensors, spec: CompileSpec) -> Listed:
    """The candidates that Inductor has for the program; compiles none of them."""
    seen = listing(problem, tensors, spec)
    return Listed(tuple(dict.fromkeys(seen.choices)), seen.unsupported)


def listing(problem: Problem, tensors: Tensors, spec: CompileSpec) -> compilation.Session:
    """What Inductor's first selection for the program was given; compiles and runs nothing."""
    constants = stand_ins(constant_tensors(problem, tensors, spec), tensors)
    inputs = example_inputs(tensors, constants)
    module, args = traced(problem, tensors, constants)
    with (
        threads_for(spec.threads),
        settings(problem),
        torch_compat.session(
            spec.options, directory=spec.directory, listing=True, isa=spec.request.isa, beyond=spec.beyond
        ) as seen,
    ):
        try:
            function, _ = entry_point(problem, module, args, inputs, spec)
            function(*args)
        except Exception as error:
            if not torch_compat.listed(error):
                raise  # something else ended the compile
    return seen
