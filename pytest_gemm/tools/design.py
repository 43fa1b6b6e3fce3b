"""The problems that a kernel is judged by, in their order."""

from __future__ import annotations

import contextlib
from typing import Final

from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem
from pytest_gemm.tools.judgement import Judgement
from pytest_gemm.tools.kernel import Form

# Sizes, M x N x K: simple ones, then each dimension 1, odd, and not a multiple of a tile; empty ones; larger ones.
_SIZES: Final = (
    *("16x16x16", "32x48x64", "32x48x65", "32x65x64", "33x48x64", "1x48x64", "32x1x64", "32x48x1", "1x1x1", "3x5x17"),
    *("17x65x127", "64x64x1000", "31x1x1004", "8x16x0", "0x16x8", "16x0x8", "128x128x128", "130x258x514"),
)
_FEW: Final = ("32x48x64", "1x48x64", "17x65x127", "64x64x1000")
_LARGE: Final = ("256x512x1000", "512x512x512")
_BATCHED: Final = ("2x16x32x64", "3x17x65x127")


def problems_for(found: Judgement, form: Form) -> list[Problem]:
    """Problems of a form: the simplest first, the largest last."""
    own, strided = ("nt", ("tt",)) if form.weight else ("nn", ("nt", "tn", "tt"))
    first, *others = found.dtypes
    groups = [
        (first, own, _SIZES),
        *((first, layout, _FEW[::2]) for layout in strided),
        *((dtype, own, _FEW) for dtype in others),
        *((dtype, own, _BATCHED) for dtype in found.dtypes if found.batched and found.op != "bmm"),
        (first, own, _LARGE),
    ]
    problems = []
    for dtype, layout, size in ((dtype, layout, size) for dtype, layout, sizes in groups for size in sizes):
        is_batch = found.op == "bmm" or size in _BATCHED
        op = "bmm" if is_batch else "int_mm" if dtype[0] == "i" else form.op
        line = f"{op}:{dtype}:{layout}:{'2x' * (found.op == 'bmm')}{size}{':bias' * ('bias' in form.roles)}"
        with contextlib.suppress(ProblemError):  # an op has its own rules, as int_mm of a transposed A
            problems.append(Problem.parse(line))
    return problems
