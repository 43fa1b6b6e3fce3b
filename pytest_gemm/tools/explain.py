"""``pytest-gemm explain LINE``: a problem in words, the shapes and strides of its tensors, and its PyTorch program."""

from __future__ import annotations

import argparse
import pkgutil
import textwrap

from pytest_gemm.api.ops import OpRegistry
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.core.text import show
from pytest_gemm.failures.repro import traced
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.operands.tensors import make
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.rules import FLAGS
from pytest_gemm.programs import program


def explain(line: str) -> str:
    """A problem in words and shapes, with the program that PyTorch runs and the distributions that fit.

    Args:
        line: a problem line.

    Raises:
        ProblemError: when it is none.
    """
    problem = Problem.parse(line)
    shape, dtypes = problem.shape, problem.dtypes
    batch = "" if shape.batch is None else f", {shape.batch} of them"
    found = [
        problem.line,
        "",
        f"{problem.op.name}: {problem.op.help}",
        f"({shape.m}, {shape.k}) @ ({shape.k}, {shape.n}){batch}",
        f"A is {dtypes.a.name}, B is {dtypes.b.name}, the product is {dtypes.out.name}; layout {problem.layout}",
        f"B is {'A' if problem.b_is_a else 'a constant of the program' if problem.constant_b else 'an argument'}",
    ]
    found += [f"  {step}: {step.spec.help}" for step in problem.steps]
    found += [f"  {flag}: {FLAGS[flag].help}" for flag in problem.flags]
    if CppBackend().supports(problem) is None:
        found.append("cpp: quick may compile its kernel with others, and judges it again alone where it fails")
    return "\n".join([*found, "", *_tensors(problem)]) + "\n"


def _tensors(problem: Problem) -> list[str]:
    """Name, dtype, shape and strides of each tensor, those of the results, the distributions that fit, the program."""
    names = distributions_for(problem)
    if not names:
        return ["no input distribution fits"]
    tensors = program.args(problem, make(problem, names[0], 0))
    rows = [
        f"  {name:<8} {str(t.dtype).removeprefix('torch.'):<13} {tuple(t.shape)!s:<18} strides {t.stride()}"
        for name, t in tensors.items()
    ]
    rows += [f"  {'result':<8} {one.result_dtype.torch_name:<13} {one.returned_shape}" for one in problem.outputs]
    try:
        source = traced(problem, list(tensors), matmul=False)
    except Unsupported as error:
        source = str(error)
    return ["tensors", *rows, "", "input distributions", f"  {' '.join(names)}", "", textwrap.indent(source, "  ")]


def run(args: argparse.Namespace) -> int:
    """Print the explanation of each line."""
    if args.plugin:
        try:
            pkgutil.resolve_name(f"{args.plugin}:pytest_gemm_register_ops")(registry=OpRegistry())
        except (ImportError, AttributeError) as error:
            raise ValueError(f"-p {args.plugin}: {error}") from None
    show("\n".join(map(explain, args.lines)))
    return 0
