"""Hypothesis strategies for problems, distributions and trials, for ``--gemm-fuzz`` and for tests of your own.

::

    from hypothesis import given
    from pytest_gemm.fuzzing import strategies

    @given(strategies.problems(ops=["mm", "linear"]))
    def test_mine(problem): ...

Every problem that comes out can be written as a line and read back, and operands of it can be made.  With a backend
given, only what it supports is drawn.  An example shrinks towards the smallest line: one problem instead of several, no
flag, no epilogue, ``mm``, ``f32``, ``nn``, dimensions of 1.

Dimensions come from one list, :data:`SIZES`: all of 1 to 20, one below, at and one above multiples of what kernels
tile and vectorise by, a few long ones, and 0.

Needs Hypothesis, which the package itself does not: ``pip install hypothesis``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

try:
    from hypothesis import reject
    from hypothesis import strategies as st
except ModuleNotFoundError as error:
    text = "pytest_gemm.fuzzing.strategies needs Hypothesis, which is not installed: pip install hypothesis"
    raise ModuleNotFoundError(text, name="hypothesis") from error

from pytest_gemm.api.protocols import Backend
from pytest_gemm.api.request import DEFAULT
from pytest_gemm.operands.distributions import DISTRIBUTIONS, distributions_for
from pytest_gemm.problem.axes import unique
from pytest_gemm.problem.dtypes import DTYPES, DTypes
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.layout import Layout, Shape
from pytest_gemm.problem.ops import OPS, Op
from pytest_gemm.problem.ops.grouped_mm import ALIGNMENT
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.rules import FLAGS, rank_of, takes
from pytest_gemm.problem.steps import STEPS, Step, StepKind

# In the order in which they shrink: 0 is a case of its own, not the smallest one, so it stands last.
SIZES: Final = (
    *range(1, 21),
    *(23, 24, 25, 31, 32, 33, 40, 47, 48, 49, 56, 63, 64, 65, 72, 80, 95, 96, 97, 100, 112, 127, 128, 129, 136, 144),
    *(160, 191, 192, 193, 255, 256, 257, 264, 384, 385, 512, 1000, 1024, 2664, 4096, 16384),
    0,
)  # fmt: skip

# The order in which dtypes shrink; the others follow in that of the table.
_DTYPES: Final = ("f32", "bf16", "f16", "f64", *(d for d in DTYPES if d not in {"f32", "bf16", "f16", "f64"}))

# What the defaults of a step's numbers are multiplied by: powers of two, and others; only alpha and beta are made 0.
_FACTORS: Final = (1.0, 2.0, 0.5, -1.0, 0.3, 0.0)
# Eager PyTorch truncates a cast to an integer, and has no operations on 8-bit floats.
_CASTS: Final = ("f32", "bf16", "f16")
# Permutations of a batched result.
_PLACES: Final = ("1_0_2", "2_0_1")
_BATCHES: Final = (1, 2, 3, 4, 5, 0)
_LONGEST_CHAIN: Final = 4
_MOST_FLAGS: Final = 3
# Further M of an artifact for any M.
_MORE_M: Final = 4

# Largest number of elements of a result, and of products: what the reference computes in milliseconds.
_ELEMENTS: Final = 1 << 16
_WORK: Final = 1 << 22


def _steps(name: str) -> Iterator[Step]:
    """A step with some of its parameters; none for a view, whose sizes depend on the result."""
    spec = STEPS[name]
    factors = [factor for factor in _FACTORS if factor or spec.kind is StepKind.FACTOR]
    numbers = ["_".join(f"{factor * number:g}" for number in spec.numbers) for factor in factors]
    choices = _CASTS if spec.kind is StepKind.CAST else spec.choices
    for text in choices or (_PLACES if spec.places else numbers):
        with contextlib.suppress(ProblemError):  # numbers that do not fit
            yield Step(name, text)


_STEPS: Final = tuple(dict.fromkeys(step for name in STEPS for step in _steps(name)))


@dataclasses.dataclass(frozen=True)
class Form:
    """An op in given dtypes, with the layouts that fit."""

    op: Op
    dtypes: DTypes
    layouts: tuple[Layout, ...]


@dataclasses.dataclass(frozen=True)
class Trial:
    """What is judged in one go: one artifact, so that a compile is paid once.

    Attributes:
        problems: one problem; with dynamic sizes several that differ in these only.
        distributions: names of distributions, each of which applies to all of the problems.
        seed: of all values.
    """

    problems: tuple[Problem, ...]
    distributions: tuple[str, ...]
    seed: int = 0


def size_of(trial: Trial) -> tuple[int, ...]:
    """What makes one trial smaller than another, the weightiest first; compare these as tuples."""
    problem = trial.problems[0]
    shape = problem.shape
    sizes = (shape.m, shape.n, shape.k, *(() if shape.batch is None else (shape.batch,)))
    return (
        len(trial.problems),
        len(problem.steps) + len(problem.flags),
        list(OPS).index(problem.op.name),
        sum(_order(problem.dtypes)[1:]),
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
    for op in (op for op in OPS.values() if op.name in wanted):
        for dtypes in sorted((DTypes.parse(text.split("-")) for text in op.dtypes), key=_order):
            layouts = tuple(
                layout for layout in op.layouts if backend is None or _supports(backend, op, dtypes, layout)
            )
            found += [Form(op, dtypes, layouts)] if layouts else []
    return tuple(found)


def _at(problem: Problem, size: int, work: int) -> Problem | None:
    """The problem with this value of its dynamic sizes, ``None`` where it is none or too much work."""
    try:
        other = problem.resized(dict.fromkeys(problem.dynamic, size))
    except ProblemError:
        return None
    shape = other.shape
    return other if _within(shape.m, shape.n, shape.k, shape.batch, work) == shape else None


def _order(dtypes: DTypes) -> tuple[int, ...]:
    """Where dtypes stand in the order in which they shrink."""
    names = (dtypes.a.name, dtypes.b.name, dtypes.out.name)
    return len(set(names)), *map(_DTYPES.index, names)


def _supports(backend: Backend, op: Op, dtypes: DTypes, layout: Layout) -> bool:
    """Whether the backend supports at least one of some plain problems of this form."""
    plain = _plain(op, dtypes, layout, Shape(128, 64, 128, 3 if op.batch == "always" else None))
    changed = (_with(plain, change) for change in (Step("bias"), "b.argument", "b.constant"))
    return any(backend.supports(problem, DEFAULT) is None for problem in (plain, *changed))


def _plain(op: Op, dtypes: DTypes, layout: Layout, shape: Shape) -> Problem:
    """The problem with nothing but the steps without which the op is none, and the first scales that fit the dtypes."""
    requant = (Step("requant"),) if op.fused_steps and not dtypes.out.is_float else ()
    first, *others = ((Step(name), *requant) for name in op.scales) if op.scales else [requant]
    make = functools.partial(Problem, op, dtypes, layout, shape, (Step("bias"),) if op.addend else ())
    for quant in others if dtypes.a.is_packed else ():
        with contextlib.suppress(ProblemError):
            return make(quant=quant)
    return make(quant=first)


def _with(problem: Problem, change: Step | str) -> Problem:
    """The problem with one more step, parameter or flag; unchanged where the grammar does not take them together.

    A parameter takes the place of another one: a bias of another shape, other scales.  A flag brings the step and the
    flags that it needs, and sizes that it needs equal become the smallest of them.
    """
    try:
        if isinstance(change, str):
            flag = FLAGS[change]
            stepped = _with(problem, Step(*flag.step.split("-"))) if flag.step else problem
            flags = (*problem.flags, *(name for name in flag.needs if not problem.has(name)), change)
            equal = {size for flag in flags for size in FLAGS[flag].equal}
            least = min((getattr(problem.shape, size) for size in equal), default=0)
            shape = dataclasses.replace(problem.shape, **dict.fromkeys(equal, least))
            return dataclasses.replace(stepped, shape=shape, flags=flags)
        group = _group(problem.op, change)
        field = "quant" if change.kind is StepKind.QUANT else "epilogue"
        kept = (step for step in getattr(problem, field) if not group or _group(problem.op, step) != group)
        changed: dict[str, Any] = {field: (*kept, change)}
        return dataclasses.replace(problem, **changed)
    except ProblemError:
        return problem


def _group(op: Op, step: Step) -> str:
    """The steps of which a problem has at most one; "" for those of which it may have several."""
    if step.name in op.scales:
        return "scales"
    return step.name if step.kind is StepKind.QUANT or rank_of(step) < rank_of(Step("relu")) else ""


# -- strategies --------------------------------------------------------------------------------------


def problems(
    backend: Backend | None = None, *, ops: Iterable[str] = (), work: int = _WORK
) -> st.SearchStrategy[Problem]:
    """Problems of every op that operands exist for, or of those that a backend supports.

    Args:
        backend: draw only what it ``supports``; ``None``: everything.
        ops: names of ops to draw from; empty: all.
        work: how many products M N K (times the batch) a problem may have at most; longer K are cut to it.

    Returns:
        A strategy; an empty one where the backend supports nothing.
    """
    by_op: dict[str, list[Form]] = {}
    for form in forms(backend, ops):
        by_op.setdefault(form.op.name, []).append(form)
    if not by_op:
        return st.nothing()

    @st.composite
    def one(draw: st.DrawFn) -> Problem:
        form = draw(st.sampled_from(by_op[draw(st.sampled_from(list(by_op)))]))
        return _problem(draw, form, work)

    made = one().filter(lambda problem: bool(distributions_for(problem)))
    return made if backend is None else made.filter(lambda problem: backend.supports(problem, DEFAULT) is None)


def _problem(draw: st.DrawFn, form: Form, work: int) -> Problem:
    """One problem, field by field; what contradicts an earlier field is left out, not drawn again."""
    op = form.op
    layout = draw(st.sampled_from(form.layouts))
    m, n, k = (draw(st.sampled_from(SIZES)) for _ in range(3))
    batches = _BATCHES[1:-1] if op.several else _BATCHES
    batch = draw(st.sampled_from({"never": (None,), "optional": (None, *batches), "always": batches}[op.batch]))
    problem = _plain(op, form.dtypes, layout, _fitting(form, _within(m, n, k, batch, work)))
    for some in _changes(op):
        for change in draw(some):
            problem = _with(problem, change)
    return problem


@functools.cache  # Hypothesis looks through each new strategy, which takes as long as the draw
def _changes(op: Op) -> tuple[st.SearchStrategy[Sequence[Step | str]], ...]:
    """Steps and flags: of each group of steps one at most, of the others a chain."""
    groups: dict[str, list[Step]] = {}
    for step in _STEPS:
        if takes(op, step.name):
            groups.setdefault(_group(op, step), []).append(step)
    passes = groups.pop("")
    flags = [name for name, flag in FLAGS.items() if flag.every or name in op.flags]
    return (
        *(st.lists(st.sampled_from(group), max_size=1) for group in groups.values()),
        st.lists(st.sampled_from(passes), max_size=_LONGEST_CHAIN),
        st.lists(st.sampled_from(flags), max_size=_MOST_FLAGS),
    )


def _fitting(form: Form, shape: Shape) -> Shape:
    """The shape with whole groups of K, or blocks of four bits, and with elements where the op needs them."""
    op, sizes = form.op, {"m": shape.m, "n": shape.n, "k": shape.k}
    if op.quantises_a:
        sizes = {name: max(1, size) for name, size in sizes.items()}
    if form.dtypes.a.is_packed and op.ragged:
        sizes |= {"m": -(-max(1, shape.m) // ALIGNMENT) * ALIGNMENT, "batch": max(1, shape.batch or 1)}
    unit = 128 if "group" in op.scales else 32 if form.dtypes.a.is_packed else op.summands
    sizes["k"] = -(-sizes["k"] // unit) * unit
    if op.quantises_a and form.dtypes.a.name == "bf16":
        sizes["k"] = unit  # one group
    return dataclasses.replace(shape, **sizes)


def _within(m: int, n: int, k: int, batch: int | None, work: int) -> Shape:
    """These sizes, cut to what is quickly judged: first the longer of M and N, then K."""
    count = max(1, 1 if batch is None else batch)
    most = max(1, min(_ELEMENTS, work) // count)
    if m * n > most:
        m, n = (min(m, max(1, most // n)), n) if m >= n else (m, min(n, max(1, most // m)))
        n = min(n, max(1, most // max(1, m)))
    return Shape(m, n, min(k, max(1, work // max(1, m * n * count))), batch)


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
    one = problems(backend, ops=ops, work=work)

    @st.composite
    def trial(draw: st.DrawFn) -> Trial:
        first = draw(one)
        sizes = draw(st.lists(st.sampled_from(SIZES), max_size=_MORE_M)) if first.dynamic else []
        others = [other for size in sizes if (other := _at(first, size, work)) is not None]
        supported = (one for one in others if backend is None or backend.supports(one, DEFAULT) is None)
        together = unique((first, *supported))
        names = [name for name in draw(distributions(first)) if all(name in distributions_for(p) for p in together)]
        if not names:
            reject()
        return Trial(together, tuple(names), draw(st.integers(0, 999)))

    return trial()
