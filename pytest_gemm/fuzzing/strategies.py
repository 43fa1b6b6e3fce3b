"""Hypothesis strategies for problems, distributions and trials, for ``--gemm-fuzz`` and for tests of your own.

::

    from hypothesis import given
    from pytest_gemm.fuzzing import strategies

    @given(strategies.problems(ops=["mm", "linear"]))
    def test_mine(problem): ...

Every problem that comes out can be written as a line and read back, and operands of it can be made.  With a backend
given, only what it claims is drawn.  An example shrinks towards the smallest line: one problem instead of several, no
flag, no epilogue, ``mm``, ``f32``, ``nn``, dimensions of 1.

Dimensions come from one list, :data:`SIZES`: all of 1 to 20, one below, at and one above multiples of what kernels
tile and vectorise by, a few long ones, and 0.

Needs Hypothesis, which the package itself does not: ``pip install hypothesis``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from itertools import product
from typing import Final

try:
    from hypothesis import reject
    from hypothesis import strategies as st
except ModuleNotFoundError as error:
    text = "pytest_gemm.fuzzing.strategies needs Hypothesis, which is not installed: pip install hypothesis"
    raise ModuleNotFoundError(text, name="hypothesis") from error

from pytest_gemm.api.protocols import Backend
from pytest_gemm.api.request import DEFAULT
from pytest_gemm.operands.distributions import DISTRIBUTIONS, distributions_for
from pytest_gemm.problem.dtypes import DTYPES, DTypes
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.layout import Layout, Shape
from pytest_gemm.problem.ops import OPS, Op
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import QLINEAR_UNARY, Step, StepKind

# In the order in which they shrink: 0 is a case of its own, not the smallest one, so it stands last.
SIZES: Final = (
    *range(1, 21),
    *(23, 24, 25, 31, 32, 33, 40, 47, 48, 49, 56, 63, 64, 65, 72, 80, 95, 96, 97, 100, 112, 127, 128, 129, 136, 144),
    *(160, 191, 192, 193, 255, 256, 257, 264, 384, 385, 512, 1000, 1024, 2664, 4096, 16384),
    0,
)  # fmt: skip

# The order in which dtypes shrink; the others follow in that of the table.
_DTYPES: Final = ("f32", "bf16", "f16", "f64", *(d for d in DTYPES if d not in {"f32", "bf16", "f16", "f64"}))

# One text a step, in the order in which they shrink.  Numbers that are powers of two, and others.
_PASSES: Final = (
    *("relu", "add", "mul", "sub", "div", "cast-f32", "cast-bf16", "cast-f16", "scale-0.125", "scale-0.3"),
    *("gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "exp", "hardswish", "hardsigmoid", "leaky_relu-0.1"),
    *("clamp--1_2", "clamp-0_6", "t", "add-n", "mul-n", "mul-m1", "add-at", "perm-1_0_2", "perm-2_0_1"),
)  # fmt: skip
_LONGEST_CHAIN: Final = 3
_FACTORS: Final = ("", "0.5", "2", "-1", "0.3", "0")
_MOST_FLAGS: Final = 3
_GROUPS: Final = ("32", "64", "128")
# Further M of an artifact for any M.
_MORE_M: Final = 4

# Largest number of elements of a result, and of products: what the reference computes in milliseconds.
_ELEMENTS: Final = 1 << 16
_WORK: Final = 1 << 22


@dataclasses.dataclass(frozen=True)
class Form:
    """An op in given dtypes: what decides which layouts, steps and flags make sense."""

    op: Op
    dtypes: DTypes
    layouts: tuple[Layout, ...]


@dataclasses.dataclass(frozen=True)
class Trial:
    """What is judged in one go: one artifact, so that a compile is paid once.

    Attributes:
        problems: one problem; with ``m.dynamic`` several that differ in M only.
        distributions: names of distributions, each of which applies to all of the problems.
        seed: of all values.
    """

    problems: tuple[Problem, ...]
    distributions: tuple[str, ...]
    seed: int = 0

    def to_text(self) -> str:
        """The trial as one line of JSON; :meth:`from_text` reads it."""
        lines = [problem.line for problem in self.problems]
        return json.dumps({"problems": lines, "distributions": self.distributions, "seed": self.seed})

    @classmethod
    def from_text(cls, text: str) -> Trial:
        """Read a trial.

        Raises:
            ValueError: when it is none, or none any more: the grammar may have changed since.
        """
        data = json.loads(text)
        try:
            found = (
                tuple(map(Problem.parse, data["problems"])),
                tuple(map(str, data["distributions"])),
                int(data["seed"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a trial: {text}") from error
        if not (found[0] and found[1]) or not set(found[1]) <= DISTRIBUTIONS.keys():
            raise ValueError(f"not a trial: {text}")
        return cls(*found)


def size_of(trial: Trial) -> tuple[int, ...]:
    """What makes one trial smaller than another, the weightiest first; compare these as tuples."""
    problem = trial.problems[0]
    shape = problem.shape
    sizes = (shape.m, shape.n, shape.k, *(() if shape.batch is None else (shape.batch,)))
    return (
        len(trial.problems),
        len(problem.epilogue) + len(problem.flags),
        list(OPS).index(problem.op.name),
        sum(_DTYPES.index(d.name) for d in (problem.dtypes.a, problem.dtypes.b, problem.dtypes.out)),
        list(Layout).index(problem.layout),
        len(trial.distributions),
        sum(SIZES.index(size) if size in SIZES else size for size in sizes),
        sum(p.shape.m for p in trial.problems),
        sum(map(list(DISTRIBUTIONS).index, trial.distributions)),
        trial.seed,
    )


# -- what there is to draw from ----------------------------------------------------------------------


def forms(backend: Backend | None = None, ops: Iterable[str] = ()) -> tuple[Form, ...]:
    """Ops and dtypes, in the order in which they shrink, with their layouts.

    Args:
        backend: leave out those of which it supports no plain product; ``None``: leave out none.
        ops: names of ops; empty: all that operands and a program exist for.
    """
    wanted = frozenset(ops) or frozenset(OPS)
    found = []
    for op in OPS.values():
        if op.name not in wanted:
            continue
        triples = ((a, b, out) for a, b, out in product(_DTYPES, repeat=3) if op.dtypes(a, b, out))
        uniform_first = sorted(triples, key=lambda names: len(set(names)))
        for a, b, out in uniform_first:
            dtypes = DTypes(DTYPES[a], DTYPES[b], DTYPES[out])
            layouts = tuple(layout for layout in op.layouts if _claims(backend, op, dtypes, layout))
            if layouts:
                found.append(Form(op, dtypes, layouts))
    return tuple(found)


def _claims(backend: Backend | None, op: Op, dtypes: DTypes, layout: Layout) -> bool:
    """Whether the backend claims at least one of some harmless problems of this form."""
    if backend is None:
        return True
    epilogue = _needed(op, dtypes)
    shape = Shape(64, 64, 64, 3 if op.batch == "always" else None)
    plain = Problem(op, dtypes, layout, shape, epilogue)
    other = (
        plain
        if op.pack is not None
        else dataclasses.replace(plain, flags=("b.argument",) if op.constant_b else ("b.constant",))
    )
    biased = dataclasses.replace(plain, epilogue=epilogue if op.addend else (*epilogue, Step("bias")))
    return any(backend.supports(problem, DEFAULT) is None for problem in (plain, other, biased))


def _needed(op: Op, dtypes: DTypes) -> tuple[Step, ...]:
    """The steps without which the op is none."""
    if "group" in op.scales:
        return (Step("group", _GROUPS[0]),)
    requant = (Step("requant"),) if op.fused_steps and not dtypes.out.is_float else ()
    return (Step("bias"),) if op.addend else (Step(op.scales[0]), *requant) if op.scales else ()


def _flags_of(form: Form) -> tuple[str, ...]:
    """Flags that may make sense, in the order in which they shrink; :func:`_fitting` has the last word."""
    op, names = form.op, {form.dtypes.a.name, form.dtypes.b.name}
    found = [
        "a.padded",
        "b.padded",
        "a.offset",
        "b.offset",
        "b.argument" if op.constant_b else "b.constant",
        "m.dynamic",
        "program.multi_output",
        "program.branching",
    ]
    found.append("r0.alias")
    found += [flag for flag in _SOME_OPS if flag in op.flags and (len(names) == 1 or flag != "b.alias_t")]
    found += [flag for flag in ("math.tf32", "math.half_partials") if _makes_sense(form, flag)]
    return tuple(found)


_UNBIASED: Final = frozenset({"int_mm", "woq_int8"})
# Flags of some ops, in the order in which they shrink.
_SOME_OPS: Final = (
    *("b.broadcast", "a.broadcast", "b.alias_t", "math.fast_accumulate", "a.7bit"),
    *("bias.first", "bias.last", "steps.first", "steps.last"),
)


def _makes_sense(form: Form, flag: str) -> bool:
    """Whether the grammar takes a flag of the product's precision."""
    shape = Shape(1, 1, 128, 1 if form.op.batch == "always" else None)
    try:
        Problem(form.op, form.dtypes, form.layouts[0], shape, _needed(form.op, form.dtypes), (flag,))
    except ProblemError:
        return False
    return True


# -- strategies --------------------------------------------------------------------------------------


def problems(
    backend: Backend | None = None, *, ops: Iterable[str] = (), work: int = _WORK
) -> st.SearchStrategy[Problem]:
    """Problems of every op that operands exist for, or of those that a backend claims.

    Args:
        backend: draw only what it ``supports``; ``None``: everything.
        ops: names of ops to draw from; empty: all.
        work: how many products M N K (times the batch) a problem may have at most; longer K are cut to it.

    Returns:
        A strategy; an empty one where the backend claims nothing.
    """
    by_op: dict[str, list[Form]] = {}
    for form in forms(backend, ops):
        by_op.setdefault(form.op.name, []).append(form)
    if not by_op:
        return st.nothing()
    made = _problem(_Forms(by_op), work).filter(lambda problem: bool(distributions_for(problem)))
    return made if backend is None else made.filter(lambda problem: backend.supports(problem, DEFAULT) is None)


class _Forms:
    """Forms by op.  Hypothesis shows a strategy with all its arguments, in full for a dataclass and a dictionary."""

    def __init__(self, by_op: dict[str, list[Form]]) -> None:
        self.by_op = by_op

    def __repr__(self) -> str:
        return f"<forms of {' '.join(self.by_op)}>"


@st.composite
def _problem(draw: st.DrawFn, given: _Forms, work: int) -> Problem:
    """One problem, field by field; what contradicts an earlier field is left out, not drawn again."""
    form = draw(st.sampled_from(given.by_op[draw(st.sampled_from(list(given.by_op)))]))
    op, dtypes = form.op, form.dtypes
    layout = draw(st.sampled_from(form.layouts))
    m, n, k, batch = (draw(st.sampled_from(SIZES)) for _ in range(4))
    epilogue = (*_own_steps(draw, op), *_chain(draw, form))
    wanted = draw(st.lists(st.sampled_from(_flags_of(form)), max_size=_MOST_FLAGS))
    flags = _fitting(form, layout, epilogue, wanted)
    if "b.alias_t" in flags:
        n = m
    batched = op.batch == "always" or (op.batch == "optional" and draw(st.booleans()) and "b.alias_t" not in flags)
    several = op.several or not {"a.broadcast", "b.broadcast"}.isdisjoint(flags)
    batch = max(2, min(batch, 5)) if several else min(batch, 5)
    shape = _within(m, n, k, batch if batched else None, work, square="b.alias_t" in flags)
    group = next((int(step.numbers[0]) for step in epilogue if step.name == "group"), 1)
    shape = dataclasses.replace(shape, k=-(-shape.k // group) * group)
    if "r0.alias" in flags:
        k = min(shape.n, max(1, work // max(1, shape.m * shape.n * (shape.batch or 1))))
        shape = dataclasses.replace(shape, k=k, n=k, m=k if "b.alias_t" in flags else shape.m)
    return Problem(op, dtypes, layout, shape, epilogue, flags)


def _within(m: int, n: int, k: int, batch: int | None, work: int, *, square: bool) -> Shape:
    """These sizes, cut to what is quickly judged: first the longer of M and N, then K."""
    most = max(1, min(_ELEMENTS, work) // max(1, 1 if batch is None else batch))
    if square:
        m = n = min(m, int(most**0.5))
    elif m * n > most:
        m, n = (min(m, max(1, most // n)), n) if m >= n else (m, min(n, max(1, most // m)))
        n = min(n, max(1, most // max(1, m)))
    longest = max(1, work // max(1, m * n * max(1, 1 if batch is None else batch)))
    return Shape(m, n, min(k, longest), batch)


def _own_steps(draw: st.DrawFn, op: Op) -> tuple[Step, ...]:
    """Scales, the bias with its shape, alpha and beta."""
    steps: list[Step] = []
    if "group" in op.scales:
        steps.append(Step("group", draw(st.sampled_from(_GROUPS))))
    elif op.scales:
        steps.append(Step(draw(st.sampled_from(op.scales))))
    if op.addend:
        steps.append(Step("bias", draw(st.sampled_from(("", "1n", "m1", "mn")))))
        factors = {name: draw(st.sampled_from(_FACTORS)) for name in ("alpha", "beta")}
        steps += [Step(name, number) for name, number in factors.items() if number]
    elif op.name not in _UNBIASED and draw(st.booleans()):
        steps.append(Step("bias"))
    return tuple(steps)


def _chain(draw: st.DrawFn, form: Form) -> tuple[Step, ...]:
    """The steps that follow; a cast to what the value is already is no step, and an int32 is cast first."""
    value = form.dtypes.out.name
    found: list[Step] = []
    if form.op.fused_steps:
        binary = draw(st.sampled_from(("", "add", "sum" if form.dtypes.out.is_float else "sum-0.25_5")))
        unary = draw(st.sampled_from(("", "relu") if binary else ("", *QLINEAR_UNARY)))
        steps = tuple(Step(*name.partition("-")[::2]) for name in (binary, unary) if name)
        return steps if form.dtypes.out.is_float else (*steps, Step("requant"))
    for token in draw(st.lists(st.sampled_from(_PASSES), max_size=_LONGEST_CHAIN)):
        name, _, parameter = token.partition("-")
        step = Step(name, parameter)
        moved = any(other.kind is StepKind.VIEW for other in found)
        if step.name == "perm" and (form.op.batch != "always" or form.op.grouped):
            continue  # a matrix has two dimensions
        if step.kind is StepKind.BINARY and parameter and moved:
            continue  # a row or a column is met before any move
        if form.op.several and (step.kind is StepKind.VIEW or (step.kind is StepKind.BINARY and parameter)):
            continue
        if value == "i32" and step.kind is not StepKind.CAST:
            found.append(Step("cast", value := "f32"))
        if step.kind is StepKind.CAST:
            if parameter == value:
                continue
            value = parameter
        found.append(step)
    return tuple(found)


def _fitting(form: Form, layout: Layout, epilogue: tuple[Step, ...], wanted: list[str]) -> tuple[str, ...]:
    """Of these flags those that the grammar takes together, the earlier ones first.

    Its own rules decide: each is tried on a shape of equal sizes, which meets those about sizes.
    """
    shape = Shape(8, 8, 128 if "group" in form.op.scales else 8, 2 if form.op.batch == "always" else None)
    found: tuple[str, ...] = ()
    for flag in dict.fromkeys(wanted):
        try:
            Problem(form.op, form.dtypes, layout, shape, epilogue, (*found, flag))
        except ProblemError:
            continue
        found = (*found, flag)
    return found


def distributions(problem: Problem) -> st.SearchStrategy[tuple[str, ...]]:
    """Some of the distributions that apply to a problem, each once; at least one."""
    # Not "unique" to Hypothesis: it draws each from those that are left, and one less changes the others.
    names = distributions_for(problem)
    return st.lists(st.sampled_from(names), min_size=1, max_size=len(names)).map(
        lambda some: tuple(dict.fromkeys(some))
    )


def trials(backend: Backend | None = None, *, ops: Iterable[str] = (), work: int = _WORK) -> st.SearchStrategy[Trial]:
    """Problems with distributions and a seed; several M where one artifact serves them all.

    Args:
        backend: draw only what it ``supports``; ``None``: everything.
        ops: names of ops to draw from; empty: all.
        work: as in :func:`problems`.
    """
    return _trial(problems(backend, ops=ops, work=work), backend, work)


@st.composite
def _trial(draw: st.DrawFn, one: st.SearchStrategy[Problem], backend: Backend | None, work: int) -> Trial:
    problem = draw(one)
    found = {problem.line: problem}
    if problem.has("m.dynamic"):
        for m in draw(st.lists(st.sampled_from(SIZES), max_size=_MORE_M)):
            shape = problem.shape
            within = _within(m, shape.n, shape.k, shape.batch, work, square=False)
            other = problem.with_m(within.m)
            if (
                within.n == shape.n
                and within.k == shape.k
                and (backend is None or backend.supports(other, DEFAULT) is None)
            ):
                found[other.line] = other
    together = tuple(found.values())
    names = draw(distributions(problem))
    names = tuple(name for name in names if all(name in distributions_for(other) for other in together))
    if not names:
        reject()
    return Trial(together, names, draw(st.integers(0, 999)))
