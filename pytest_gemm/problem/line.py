"""The fields of a problem line, read one by one."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from pytest_gemm.problem.dtypes import DTYPES, DTypes
from pytest_gemm.problem.errors import SUBJECTS, Fields, ProblemError
from pytest_gemm.problem.layout import Layout, Shape
from pytest_gemm.problem.ops import OPS, Op
from pytest_gemm.problem.steps import Step, StepKind
from pytest_gemm.text import did_you_mean

if TYPE_CHECKING:
    from pytest_gemm.problem.problem import Problem

# Characters that a line may have.
LONGEST: Final = 1000
# What a size is indexed by, 32 bits in BLAS and in kernels, and what the elements of a matrix are counted in.
LARGEST: Final = 2**31 - 1

# The order of the steps that are parameters of the product: the scales, the bias and its factors before what is done
# to the result, the requantisation behind it.
_SCALES: Final = ("tensorwise", "rowwise", "columnwise", "group", "static", "dynamic")
_RANKS: Final[Mapping[str, int]] = {**dict.fromkeys(_SCALES, 0), "bias": 1, "alpha": 2, "beta": 3, "requant": 5}
PASS_RANK: Final = 4


def rank_of(step: Step) -> int:
    """Where a step stands in a canonical epilogue: parameters of the product first, the requantisation last."""
    return _RANKS.get(step.name, PASS_RANK)


SWAPPED: Final = Step("t")


# -- reading ---------------------------------------------------------------------------------------
# Each reads the text of one field; the line of its errors is empty, and Problem.parse() fills in what was typed.


def read_op(text: str) -> Op:
    """The operation of that name."""
    if text not in OPS:
        problem = f"unknown op {text!r}{did_you_mean(text, OPS)}"
        raise ProblemError("", "op", problem, f"known: {' '.join(OPS)}")
    return OPS[text]


@functools.lru_cache(maxsize=256)
def read_dtypes(text: str) -> DTypes:
    """The data types of ``a-b-out``, or of one name for all three."""
    names = text.split("-")
    for index, name in enumerate(names):
        if name not in DTYPES:
            problem = f"unknown dtype {name!r}{did_you_mean(name, DTYPES)}"
            raise ProblemError("", "dtypes", problem, f"known: {' '.join(DTYPES)}", index)
    if len(names) not in (1, 3):
        raise ProblemError("", "dtypes", f"{len(names)} names", "give one for all, or a-b-out")
    a, b, out = (DTYPES[n] for n in (names if len(names) == 3 else names * 3))
    return DTypes(a, b, out)


def read_layout(text: str) -> Layout:
    """The layout of two letters."""
    try:
        return Layout(text)
    except ValueError:
        raise ProblemError("", "layout", f"unknown layout {text!r}", "one of nn nt tn tt") from None


def read_shape(text: str) -> Shape:
    """The extents of ``MxNxK`` or ``BxMxNxK``."""
    sizes = []
    for index, part in enumerate(text.split("x")):
        if not (part.isascii() and part.isdigit()):
            allowed = "write MxNxK or BxMxNxK, each 0 or more"
            raise ProblemError("", "shape", f"{part!r} is not a size", allowed, index)
        sizes.append(int(part))
    if len(sizes) == 3:
        return Shape(*sizes)
    if len(sizes) == 4:
        batch, m, n, k = sizes
        return Shape(m, n, k, batch)
    raise ProblemError("", "shape", f"{len(sizes)} sizes", "write MxNxK, or BxMxNxK with a batch")


def read_steps(fields: Fields) -> tuple[Step, ...]:
    """The steps of the epilogue with the quantisation parameters around them, in the order of :data:`fields.steps`."""
    found = []
    for index, token in enumerate(fields.steps):
        if not token:
            raise ProblemError("", "epilogue", "an empty token", "tokens are joined by one '+'", index)
        try:
            step = _read_step(token)
        except ProblemError as error:
            raise ProblemError("", error.field, error.problem, error.allowed, index, error.offset) from None
        if (step.kind is StepKind.QUANT) != (token in fields.quant):
            is_quant = step.kind is StepKind.QUANT
            problem = f"{step} is {'a quantisation parameter' if is_quant else 'a step of the epilogue'}"
            allowed = f"write :quant.{step}" if is_quant else f"write :{step} behind the shape"
            raise ProblemError("", "epilogue", problem, allowed, index)
        found.append(step)
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _read_step(token: str) -> Step:
    name, _, text = token.partition("-")
    return Step(name, text) if text else Step(token)


# -- writing ---------------------------------------------------------------------------------------


def write(problem: Problem) -> str:
    """The line of a problem's fields."""
    parts = [problem.op.name, str(problem.dtypes), str(problem.layout), str(problem.shape)]
    epilogue = [str(step) for step in problem.epilogue if step.kind is not StepKind.QUANT]
    words: dict[str, list[str]] = {}
    for token in (*(f"quant.{step}" for step in problem.epilogue if step.kind is StepKind.QUANT), *problem.flags):
        subject, _, word = token.partition(".")
        words.setdefault(subject, []).append(word)
    order = sorted(words, key=lambda one: SUBJECTS.index(one) if one in SUBJECTS else len(SUBJECTS))
    return ":".join(
        [*parts, *(["+".join(epilogue)] if epilogue else []), *(f"{s}.{'+'.join(words[s])}" for s in order)]
    )
