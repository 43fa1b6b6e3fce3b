"""Which pairs of facts the problems of a level have together: ``python tests/studies/pairs.py [LEVEL]``.

    python tests/studies/pairs.py --additions    # problems for conformance/cases/pairs.toml

A defect often needs two facts: an offset in a bmm, a bias of a column with any M.  All pairs of values of two facets
are counted that a problem can have.  Whether one can is asked of the parser, which knows what contradicts itself, and
of the rules of the backends: a problem with both facts is written, and some backend has to support it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from pytest_gemm.api.request import BuildRequest
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.conformance import matrix
from pytest_gemm.core.case_id import Device, Mode
from pytest_gemm.core.text import show
from pytest_gemm.problem.axes import LEVELS
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.ops import OPS, Op
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.rules import FLAGS
from pytest_gemm.problem.steps import StepKind

# A facet and one of its values.
Fact = tuple[str, str]
Pair = frozenset[Fact]

NONE: Final = "none"
_OPERANDS: Final = ("a.", "b.", "r0.", "out.")
_KINDS: Final[Mapping[StepKind, str]] = {
    StepKind.FACTOR: "factor",
    StepKind.UNARY: "unary",
    StepKind.BINARY: "residual",
    StepKind.CAST: "cast",
    StepKind.JOIN: "join",
    StepKind.VIEW: "view",
    StepKind.REDUCE: "reduction",
}
# How a line has a step of a kind: the first that fits.
_STEPS: Final[Mapping[str, tuple[str, ...]]] = {
    "factor": ("alpha-0.5+beta-2",),
    "unary": ("relu", "gelu"),
    "residual": ("add", "sum", "mul"),
    "cast": ("cast-f32", "cast-bf16"),
    "join": ("gated-silu",),
    "view": ("t", "view-{all}"),
    "reduction": ("sums-m", "squares-n"),
}
_BIASES: Final = ("n", "1n", "m1", "mn")
_MODES: Final = tuple(mode.value for mode in Mode if mode is not Mode.OWN)
# Sizes with a tail, sizes that every alignment divides, equal ones, and a row for a weight of 4 bits.
_SIZES: Final = ("18x65x127", "16x64x128", "64x64x64")
_BATCHES: Final = ("4x",)
# What a word means nothing without.
_NEEDED: Final[Mapping[str, str]] = {
    "out.2d": "a.3d",
    "out.padded": "out.copied",
    "out.offset": "out.copied",
    "out.transposed": "out.copied",
    "out.addend": "out.given",
    "out.alias": "out.given",
}
# Facets of which a problem has one value.
_SINGLE: Final = frozenset({"op", "dtypes", "layout", "bias"})


def facts(problem: Problem) -> tuple[Fact, ...]:
    """The facts of a problem, without the modes in which it can be judged."""
    bias = problem.step("bias")
    operands = [flag for flag in problem.flags if flag.startswith(_OPERANDS)]
    steps = dict.fromkeys(_KINDS[step.kind] for step in problem.steps if step.kind in _KINDS)
    return (
        ("op", problem.op.name),
        ("dtypes", str(problem.dtypes)),
        ("layout", str(problem.layout)),
        *(("operands", word) for word in operands or [NONE]),
        *(("step", kind) for kind in steps or [NONE]),
        ("bias", NONE if bias is None else bias.text or "n"),
        *(("dynamic", size) for size in problem.dynamic or [NONE]),
    )


@functools.cache
def supported(problem: Problem, mode: str = "") -> bool:
    """Whether some backend supports a problem in a mode, on some device.

    ATen alone is asked, eager or as ``torch.compile`` calls it: it has every product that another backend has.
    """
    aten = AtenBackend()
    return any(
        aten.supports(problem, BuildRequest(device=device, mode=Mode(mode))) is None
        and aten.unsupported(problem, device) is None
        for device in Device
    )


# -- what there is -------------------------------------------------------------------------------------------


def universe() -> tuple[Fact, ...]:
    """Every value of every facet."""
    dtypes = dict.fromkeys(name for op in OPS.values() for name in op.dtypes)
    layouts = dict.fromkeys(str(layout) for op in OPS.values() for layout in op.layouts)
    values: Mapping[str, Iterable[str]] = {
        "op": OPS,
        "dtypes": dtypes,
        "layout": layouts,
        "operands": (NONE, *(flag for flag in FLAGS if flag.startswith(_OPERANDS))),
        "step": (NONE, *_STEPS),
        "bias": (NONE, *_BIASES),
        "dynamic": (NONE, "m", "n", "k", "batch"),
        "mode": _MODES,
    }
    return tuple((facet, value) for facet, found in values.items() for value in found)


@functools.cache
def feasible() -> Mapping[Pair, Problem]:
    """Every pair that a problem can have, with such a problem."""
    found: dict[Pair, Problem] = {}
    for first, second in itertools.combinations(universe(), 2):
        pair = frozenset((first, second))
        if not _contradict(first, second) and (made := _witness(pair)) is not None:
            found[pair] = made
    return found


def _contradict(first: Fact, second: Fact) -> bool:
    """Whether no problem has both, by the facets alone."""
    same = first[0] == second[0]
    return same and (first[0] in {*_SINGLE, "mode"} or NONE in {first[1], second[1]})


def _witness(pair: Pair) -> Problem | None:
    """A problem with both facts that some backend supports; ``None`` where there is none."""
    mode = next((value for facet, value in pair if facet == "mode"), "")
    wanted = {fact for fact in pair if fact[0] != "mode"}
    return next((p for p in problems_with(wanted) if wanted <= set(facts(p)) and supported(p, mode)), None)


def problems_with(wanted: Collection[Fact]) -> Iterator[Problem]:
    """Problems written with these facts, where the parser takes them."""
    by_facet: dict[str, list[str]] = defaultdict(list)
    for facet, value in wanted:
        if value != NONE or facet in _SINGLE:
            by_facet[facet].append(value)
    for op in OPS.values():
        if op.name not in by_facet.get("op", OPS) or not _takes(op, by_facet):
            continue
        dtypes = by_facet.get("dtypes") or _common_first(op, wanted)
        layouts = by_facet.get("layout", [str(layout) for layout in op.layouts])
        for size, dtype, layout in itertools.product(_SIZES, dtypes, layouts):
            made = map(_parsed, _lines(op, dtype, layout, size, by_facet))
            yield from (problem for problem in made if problem is not None)


def _parsed(line: str) -> Problem | None:
    try:
        return Problem.parse(line)
    except ProblemError:
        return None


def _common_first(op: Op, wanted: Collection[Fact]) -> list[str]:
    """The dtypes of an op, those of most backends first; facts begin at different ones."""
    common = [name for name in op.dtypes if "f64" not in name]
    start = zlib.crc32(repr(sorted(wanted)).encode()) % max(1, len(common))
    return [*common[start:], *common[:start], *(name for name in op.dtypes if name not in common)]


def _takes(op: Op, by_facet: Mapping[str, Sequence[str]]) -> bool:
    """Whether nothing about the op alone is against it: most of what cannot be ends here."""
    words = [*by_facet.get("operands", ()), *(f"{size}.dynamic" for size in by_facet.get("dynamic", ()))]
    known = all(FLAGS[word].every or word in op.flags for word in words)
    apart = all(other not in FLAGS[word].excludes for word in words for other in words)
    layouts = {str(layout) for layout in op.layouts}
    return (
        known and apart and {*by_facet.get("dtypes", ())} <= {*op.dtypes} and {*by_facet.get("layout", ())} <= layouts
    )


def _lines(op: Op, dtypes: str, layout: str, size: str, by_facet: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Lines of an op with these facts, with and without what some of them need beside them."""
    words = list(by_facet.get("operands", ()))
    has_bias = op.addend or "factor" in by_facet.get("step", ())
    own_bias = "mn" if "out.addend" in words else "n" if has_bias else NONE
    bias = next(iter(by_facet.get("bias", ())), own_bias)
    biases = [] if bias == NONE else ["bias" if bias == "n" else f"bias-{bias}"]
    kinds = sorted(by_facet.get("step", ()), key=list(_STEPS).index)
    if "r0.alias" in words and "residual" not in kinds:
        kinds.append("residual")
    dynamic = [f"{one}.dynamic" for one in by_facet.get("dynamic", ())]
    needed = dict.fromkeys(_NEEDED[word] for word in words if word in _NEEDED)
    if "out.given" in needed:
        needed.pop("out.copied", None)
    words += [other for other in needed if other not in words]
    quants: Sequence[str] = [f"quant.{name}" for name in _scales(op, dtypes)] or [""]
    batches = {"never": ("",), "always": _BATCHES, "optional": ("", *_BATCHES)}[op.batch]
    arguments = ([], ["b.argument"]) if "b.argument" not in words else ([],)
    for batch, own, quant in itertools.product(batches, arguments, quants):
        everything = "x".join((batch + size).split("x")[:-1])  # B x M x N, or M x N
        count = functools.reduce(lambda x, y: x * y, map(int, everything.split("x")))
        for steps in itertools.product(*(_STEPS[kind] for kind in kinds)):
            epilogue = "+".join([*biases, *(step.format(all=count) for step in steps)])
            grouped = [f"{subject}.{'+'.join(found)}" for subject, found in _by_subject([*words, *own, *dynamic])]
            yield ":".join(filter(None, [op.name, dtypes, layout, batch + size, epilogue, quant, *grouped]))


def _scales(op: Op, dtypes: str) -> list[str]:
    requant = "+requant" if op.fused_steps and dtypes.rsplit("-", maxsplit=1)[-1] in {"u8", "i8"} else ""
    return [f"{name}{'-32' if name == 'group' else ''}{requant}" for name in op.scales]


def _by_subject(words: Iterable[str]) -> list[tuple[str, list[str]]]:
    found: dict[str, list[str]] = {}
    for word in words:
        subject, _, own = word.partition(".")
        found.setdefault(subject, []).append(own)
    return list(found.items())


# -- what is covered -----------------------------------------------------------------------------------------


def covered(problems: Sequence[Problem]) -> frozenset[Pair]:
    """The pairs that some supported problem has, those with a mode in which it can be judged among them."""
    found: set[Pair] = set()
    modes: set[Pair] = set()
    for problem in problems:
        if not supported(problem):
            continue
        own = facts(problem)
        found.update(frozenset(pair) for pair in itertools.combinations(own, 2))
        for mode in _MODES:
            new = {frozenset((fact, ("mode", mode))) for fact in own} - modes
            if new and supported(problem, mode):
                modes |= new
    return frozenset(found | modes)


def missing(problems: Sequence[Problem]) -> dict[Pair, Problem]:
    """The pairs that could be had and no problem has, each with a problem that has it."""
    have = covered(problems)
    return {pair: problem for pair, problem in feasible().items() if pair not in have}


def additions(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """Problems that have all pairs which these do not have; one covers several."""
    left, found = missing(problems), []
    while left:
        problem = next(iter(left.values()))
        found.append(problem)
        have = covered([problem])
        left = {pair: one for pair, one in left.items() if pair not in have}
    return tuple(found)


def main() -> None:
    """Print how many pairs a level covers, and what it leaves out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("level", nargs="?", choices=LEVELS, default="full", help="of the suite (default: full)")
    parser.add_argument("--additions", action="store_true", help="print problem lines that have the missing pairs")
    given = parser.parse_args()
    problems = matrix.products(given.level)
    if given.additions:
        show("".join(f"{problem.line}\n" for problem in additions(problems)))
        return
    left = missing(problems)
    named = sorted(f"{' with '.join(' '.join(fact) for fact in sorted(pair))}: {one}" for pair, one in left.items())
    all_of_them = len(feasible())
    show("\n".join([f"{given.level} covers {all_of_them - len(left)} of {all_of_them} pairs; it lacks", *named]) + "\n")


if __name__ == "__main__":
    main()
