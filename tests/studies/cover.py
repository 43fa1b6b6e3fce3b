"""Choose the problems of quick by what they find: ``python tests/studies/cover.py [--write]``.

The cheapest problems are chosen among which each defect of ``matrix.json`` is found by two, and each wrong kernel by
one of each op and data types that find it; which have what :func:`facts` lists, whatever they find: with each backend
each op, data type, layout, kind of step and flag, and in each op and data types long, square, shifted and cut sizes;
and which hold a line of each defect of ``history.toml`` and of each template of ``inductor_products.toml``.  Prints
``docs/results/quick.md``: how many defects of each class they find, also when the class was held out of the choice.
``--write`` makes ``conformance/cases/quick.toml``, what finds most first.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from scipy import optimize, sparse

sys.path.insert(0, str(Path(__file__).parents[1]))

from studies import history, pairs, products
from studies.matrix import Rows, read
from template_mutants import table

from pytest_gemm.api.request import BuildRequest
from pytest_gemm.backends.builtin import BUILTIN
from pytest_gemm.conformance import matrix, models
from pytest_gemm.core.text import show
from pytest_gemm.problem import shapes
from pytest_gemm.problem.axes import QUICK
from pytest_gemm.problem.problem import Problem
from pytest_gemm.tools.doctor import _SMOKE

CHOSEN: Final = matrix.CASES / "quick.toml"
# How many problems have to find a defect of a kind, where as many do; of a place in a template that a problem reaches
# it is not known whether the problem finds it.
_TIMES: Final = {"kernel": 2, "template": 2, "ledger": 2, "reached": 2}
_DEFECTS: Final = ("kernel ", "in ", "template ", "ledger ", "reached ")
# Seconds of a problem beside its compile, and for each backend of a GPU that takes it.  The first compile of a process
# has much in it that is none of the problem's.
_EACH: Final = 0.05
_ON_GPU: Final = 0.1
_MOST: Final = 6.0
# Seconds for which a problem is chosen because of one kernel in one op and data type.
_WORTH: Final = 1.0
# A size beyond 16 bits.
_LONG: Final = 1 << 16
# From which on K is cut into slices, and of which a result has several tiles.
_MANY: Final = 2048
_TILE: Final = 64
# Epilogues that libraries have in one kernel.
_FUSED: Final = {"bias+relu", "bias+gelu"}
# An operand that does not begin where its memory does.
_SHIFTED: Final = ("offset", "tail", "sliced")
_OF_GPUS: Final = {"triton", "cutlass", "cutedsl", "nvgemm"}
# By which an alpha on the bias is told from other causes, and at whose sizes wrong kernels of ``mutants.py`` begin.
_TELLING: Final = (
    "addmm:f32:nn:17x65x127:bias+alpha-0.5",
    "mm:f32:nn:5x3x65601",
    "linear:f32:nt:6x17x65x96:bias+relu+add:a.4d",
)
_GROUPS: Final = ("*mm:?32*", "*mm:*16*", "linear*", "*bmm*", "grouped*", "*int_mm*", "woq*", "q*", "scaled*")

# What is asked of a choice: for each demand how many of its problems.
Demands = dict[str, tuple[int, frozenset[str]]]


def _taken(problem: Problem) -> list[str]:
    """The backends that take a problem, each on the hardware that it is made for."""
    return [one.name for one in (make() for make in BUILTIN) if one.supports(problem, BuildRequest()) is None]


def facts(problem: Problem, taken: Sequence[str]) -> set[str]:
    """What a choice has to keep of a problem, whatever it finds."""
    op, kind, shape = problem.op.name, f"{problem.op.name} {problem.dtypes}", problem.shape
    own, flags, bias = pairs.facts(problem), problem.flags, dict(pairs.facts(problem))["bias"]
    long = [f"long {size}" for size in ("batch", "m", "n", "k") if (getattr(shape, size) or 0) > _LONG]
    steps = "+".join(step.name for step in problem.steps)
    also = {
        "square": shape.m == shape.n,
        "of one product": shape.k == 1,
        "of many products": shape.k >= _MANY,
        "of several tiles": min(shape.m, shape.n) >= _TILE,
        "of many matrices": (shape.batch or 0) > _TILE,
        "of sizes in a range": bool(problem.dynamic),
        "shifted": any(flag.endswith(_SHIFTED) for flag in flags),
        "over its operand": "out.alias" in flags,
        "bias, unary": bias != pairs.NONE and ("step", "unary") in own,
        steps: steps in _FUSED and not any(flag.startswith("program") for flag in flags),
    }
    words = {kind, f"{op} {problem.layout}", *flags, *(f"step {step}" for step in problem.steps)}
    words |= {f"{flag} of {one}" for flag in flags if flag.startswith("math") for one in (op, problem.dtypes)}
    words |= {f"{op} {facet} {value}" for facet, value in own if facet in {"operands", "dynamic"}}
    if min(shape.n, shape.k) >= models.LARGE:
        words |= {f"{op} large", *(f"large {step.name}" for step in problem.quant)}
    words |= {f"{kind} {word}" for word in (problem.layout, *problem.quant, *long)}
    words |= {f"{kind} bias {bias}"} if problem.beta else set()
    words |= {f"{kind} {value}" for facet, value in own if facet == "step" and value != "view"}
    words |= {f"{kind} tail of {size}" for size in "mnk" if getattr(shape, size) % 8}
    words |= {f"{kind} {word}" for word, is_so in also.items() if is_so}
    words |= {f"few lines {problem.dtypes}"} if shape.m <= 8 and shape.n <= 64 and 5120 <= shape.k <= 14336 else set()
    words |= {f"square with a column {problem.dtypes}"} if shape.m == shape.n and "bias-m1" in problem.line else set()
    for name in {*taken} & {*_OF_GPUS, "cpp"}:
        words |= {f"{name}: {op} without {size}" for size in ("batch", "m", "n", "k") if getattr(shape, size) == 0}
        words |= {f"{name}: {word}" for word in (kind, f"{op} {problem.layout}", *flags, *long)}
        words |= {f"{name}: step {step.name}" for step in problem.steps}
        words |= {f"{name}: {op} {value}" for facet, value in own if facet == "step"}
        words |= {f"{name}: {op} bias {bias}, ignored"} if problem.beta == 0 else set()
        words |= {f"{name}: {op} packed"} if "b.constant" in flags and shape.n > _TILE else set()
        words |= {f"{name}: {problem.dtypes.out.name} {flag}" for flag in flags if flag.startswith("program")}
        words |= {f"{name}: {kind} {flag}" for flag in flags if flag.endswith(_SHIFTED)}
    if "cutlass" in taken:
        is_edge = _TILE - 8 <= shape.m <= 4 * _TILE + 8 and min(shape.m % _TILE, -shape.m % _TILE) <= 8
        words |= {f"cutlass: M = {shape.m}"} if is_edge else set()
        is_alone = op == "mm" and len(problem.passes) == 1  # a bias keeps CUTLASS from fusing
        words |= {f"cutlass: {kind} {step}" for step in problem.passes} if is_alone else set()
    return words


def demands(rows: Rows, known: Mapping[str, set[str]]) -> Demands:
    """What is asked of a choice of these problems, of which these facts are known."""
    who: dict[str, set[str]] = defaultdict(set)
    for line, row in rows.items():
        kind = ":".join(line.split(":", 2)[:2])
        for name in row.found:
            who[name].add(line)
            if name.startswith("kernel"):
                who[f"in {kind}: {name}"].add(line)
        for fact in known[line]:
            who[f"fact {fact}"].add(line)
    named = {f"history {bug.id}": bug.lines for bug in history.BUGS if bug.level == QUICK}
    named |= {f"product {one.names[0]}": one.lines for one in products.PRODUCTS}
    for name, lines in named.items():
        if some := {*lines} & {*rows}:
            who[f"line of {name}"] = some
            who[name] |= some
    times = {name: _TIMES.get(name.partition(" ")[0], 1) for name in who}
    return {name: (min(len(some), times[name]), frozenset(some)) for name, some in who.items()}


class Costs(NamedTuple):
    """Seconds of problems: what each takes itself, and what those take together that share a compiled artifact."""

    own: dict[str, float]
    together: dict[str, float]
    artifact: dict[str, str]

    @classmethod
    def of(cls, rows: Rows, taken: Mapping[str, Sequence[str]]) -> Costs:
        """Those of a run; the problem of an artifact that came first had all of its compile."""
        artifact = {line: Problem.parse(line).at_hints.line for line in rows}
        own = {line: _EACH + _ON_GPU * len({*taken[line]} & _OF_GPUS) for line in rows}
        together: dict[str, float] = defaultdict(float)
        for line, row in rows.items():
            together[artifact[line]] = max(together[artifact[line]], min(row.seconds, _MOST))
        return cls(own, dict(together), artifact)

    def total(self, lines: Iterable[str]) -> float:
        """What a run of these problems takes, on one core."""
        some = [*lines]
        return sum(self.own[one] for one in some) + sum(self.together[one] for one in {self.artifact[i] for i in some})


def choice(costs: Costs, asked: Demands, kept: Collection[str] = ()) -> list[str]:
    """The cheapest problems that meet the demands, with those that are kept whatever they find.

    That a kernel is found in one op and data type is worth :data:`_WORTH` seconds, and all else whatever it costs.
    """
    soft = [name for name in asked if name.startswith("in ")]
    names = [*costs.own, *costs.together, *soft]
    place = {name: i for i, name in enumerate([*(("problem", one) for one in costs.own), *costs.together, *soft])}
    entries: list[tuple[int, int, float]] = []
    for i, (name, (_, some)) in enumerate(asked.items()):
        entries += [(i, place["problem", line], 1.0) for line in some]
        entries += [(i, place[name], 1.0)] if name in place else []
    for i, line in enumerate(costs.own, len(asked)):  # a problem needs its artifact
        entries += [(i, place[costs.artifact[line]], 1.0), (i, place["problem", line], -1.0)]
    y, x, values = zip(*entries, strict=True)
    least = [float(times) for times, _ in asked.values()] + [0.0] * len(costs.own)
    found = optimize.milp(
        np.array([*costs.own.values(), *costs.together.values(), *([_WORTH] * len(soft))]),
        integrality=np.array([1] * len(costs.own) + [0] * (len(names) - len(costs.own))),
        bounds=optimize.Bounds(np.array([float(name in kept) for name in names]), np.ones(len(names))),
        constraints=optimize.LinearConstraint(sparse.csr_array((values, (y, x))), lb=np.array(least)),
        options={"mip_rel_gap": 0.0005, "time_limit": 60},
    )
    assert found.x is not None, found.message
    return [line for line, value in zip(costs.own, found.x, strict=False) if value > 0.5]


def in_order(groups: Iterable[Collection[str]], costs: Costs, asked: Demands) -> dict[str, list[str]]:
    """The problems of each group, that which finds most in its time first, with the defects that none before finds."""
    found: dict[str, list[str]] = {}
    known: set[str] = set()
    for lines in groups:
        mine = {line: {name for name in asked if is_defect(name) and line in asked[name][1]} for line in lines}
        while mine:
            best = max(mine, key=lambda line: sum(map(_weight, mine[line] - known)) / costs.total([line]))
            new = mine.pop(best) - known
            known |= new
            found[best] = sorted(new)
    return found


def _weight(name: str) -> float:
    """How much a defect counts that no earlier problem has found: in another op and data type it is hardly another."""
    return 0.01 if name.startswith("in ") else 1.0


def is_defect(name: str) -> bool:
    return name.startswith(_DEFECTS)


# -- classes of defects ------------------------------------------------------------------------------------------


@functools.cache
def _classes() -> dict[str, Callable[[str], bool]]:
    """Classes of defects by name, each with whether a demand belongs to it."""
    import mutants

    files = {f"template {one.name}": one.file for one in table.load("cpp")}
    shapes_ = {f"kernel {name}": one.plant.__qualname__.partition(".")[0] for name, one in mutants.MUTANTS.items()}
    found: dict[str, Callable[[str], bool]] = {
        "known failures": lambda name: name.startswith("ledger"),
        "history": lambda name: "history " in name,
    }
    for file in sorted(set(files.values())):
        found[f"templates: {file}"] = functools.partial(_is_of_file, files, file)
    for shape in sorted(set(shapes_.values())):
        found[f"kernels: {shape}"] = functools.partial(_is_of_shape, shapes_, shape)
    for group in _GROUPS:
        found[f"kernels in {group}"] = functools.partial(_is_in, group)
    return found


def _is_of_file(files: Mapping[str, str], file: str, name: str) -> bool:
    return files.get(name.replace("reached", "template")) == file


def _is_of_shape(shapes_: Mapping[str, str], shape: str, name: str) -> bool:
    return shapes_.get(name.partition(": ")[2] or name) == shape


def _is_in(group: str, name: str) -> bool:
    return fnmatch.fnmatchcase(name, f"in {group}: *")


def rate(lines: Collection[str], asked: Demands, is_in: Callable[[str], bool]) -> tuple[int, int]:
    """How many defects of a class these problems find, of how many."""
    own = [some for name, (_, some) in asked.items() if is_in(name) and not name.startswith(("reached", "line of"))]
    return sum(not some.isdisjoint(lines) for some in own), len(own)


def first_red(lines: Sequence[str], costs: Costs, asked: Demands) -> float:
    """The median over all defects of the seconds to the first problem that finds one, on one core."""
    ends = {line: costs.total(lines[: i + 1]) for i, line in enumerate(lines)}
    found = (some & {*lines} for name, (_, some) in asked.items() if is_defect(name))
    return statistics.median(min(ends[line] for line in some) for some in found if some)


# -- the command -------------------------------------------------------------------------------------------------


def _devices() -> dict[str, tuple[str, ...]]:
    """For which devices each problem of full is meant."""
    found: dict[str, tuple[str, ...]] = {}
    for device in ("cpu", "cuda"):
        for problem in matrix.products("full", device):
            found[problem.line] = (*found.get(problem.line, ()), device)
    return found


def written(order: Mapping[str, Sequence[str]], smoke: Collection[str], drawn: Collection[str]) -> str:
    """The file of cases: the level smoke, and a set for each device, with what each problem is the first to find."""
    devices, parts = _devices(), []
    groups = {"both": ("cpu", "cuda"), "cpu": ("cpu",), "cuda": ("cuda",)}
    sets = {name: [one for one in order if devices[one] == of and one not in drawn] for name, of in groups.items()}
    heads = {"smoke": f'help = "{_SMOKE_HELP}"\nlevel = "smoke"\n', "both": f'help = "{_HELP}"\n'}
    for name, some in {"smoke": [*smoke], **sets}.items():
        body = "".join(f'    "{one}",{_why(order[one])}\n' for one in some if name == "smoke" or one not in smoke)
        head = heads.get(name, f'help = "{_HELP}"\ndevice = "{name}"\n')
        parts += [f'[[set]]\nname = "{name}"\n{head}problems = [\n{body}]\n'] if body else []
    return "\n".join([_HEAD, *parts])


_SMOKE_HELP: Final = "a first look at a backend: a problem or two of each frequent op, with a tail or with a step"
_HELP: Final = "chosen by what they find"
_HEAD: Final = """\
# The problems of quick, chosen from those of full by what they find and what they cost, what finds most first:
# "python tests/studies/cover.py --write" makes this file of tests/studies/matrix.json.  Behind a problem stands how
# many defects it is the first to find, and one of them.  Others find such defects in an op and data types that no
# problem before has, or stand for a step or a flag.
"""


_PAGE: Final = """\
# Quick: what its problems find

Made by `python tests/studies/cover.py` of `tests/studies/matrix.json`;
[how quick is chosen](../how-to/adding-a-case.md#choose-the-level).

Seconds are those of one run of aten,cpp with empty caches and two workers on a shared machine (AMD EPYC, two cores,
torch 2.13.0 CPU, 2026-11-26), of all workers together. Of 55 problems that were added the same day they are those of a
second run, divided by 1.5: so much longer took the problems that were in both. "To red" is the median over the mutants
of C++ templates of the seconds until the first problem fails that is known to find it, in the order of the files and on
one core.

"Held out": found by a choice that knew nothing of the class. A kernel counts once for each op and data types that find
it, and a defect of the history where its imitation is caught in an op of its lines. Of the problems that find a mutant
of a template only those that were run with it are known, so that these rates are lower bounds: what a choice held out
seemed to miss was run on it, and added.

| problems | number | seconds | to red |
|---|---|---|---|
"""


def _why(first: Sequence[str]) -> str:
    names = [name for name in first if not name.startswith("in ")]
    return f"  # {len(names)}: {names[0]}" if names else ""


def main() -> int:
    """Print what is found by class, before and after."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {CHOSEN.name} as well")
    given = parser.parse_args()
    rows = read()
    problems = {line: Problem.parse(line) for line in rows}
    taken = {line: _taken(problem) for line, problem in problems.items()}
    costs = Costs.of(rows, taken)
    asked = demands(rows, {line: facts(problem, taken[line]) for line, problem in problems.items()})
    drawn = [p.line for one in shapes.read(matrix.CASES / "mm.toml") if one.name == "mm-drawn" for p in one.problems]
    smoke = [p.line for p in matrix.products("smoke")]
    kept = {*_SMOKE, *drawn, *smoke, *_TELLING}
    chosen = choice(costs, asked, kept)
    order = in_order([smoke, [one for one in chosen if one not in smoke]], costs, asked)

    show(_PAGE)
    templates = {name: how for name, how in asked.items() if name.startswith("template ") and "," not in name}
    for name, lines in (("all of the matrix", [*rows]), ("chosen", [*order])):
        seconds = sum(costs.together[one] for one in {costs.artifact[line] for line in lines})
        red = first_red(lines, costs, templates)
        show(f"| {name} | {len(lines)} | {seconds:.0f} | {red:.0f} |\n")
    show("\n| class | defects | found by all | by the chosen | held out |\n|---|---|---|---|---|\n")
    for name, is_in in _classes().items():
        left = {one: how for one, how in asked.items() if not is_in(one)}
        (before, count), (after, _) = (rate(some, asked, is_in) for some in (rows, chosen))
        held, _ = rate(choice(costs, left, kept), asked, is_in)
        if count:
            show(f"| {name} | {count} | {before / count:.1%} | {after / count:.1%} | {held / count:.1%} |\n")
    if given.write:
        CHOSEN.write_text(written(order, [one for one in order if one in smoke], drawn), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
