"""Choose the problems of quick by the code that they reach: ``python tests/studies/cover.py PART... [--write]``.

The parts are those of ``reach.py``, of all problems of full.  The cheapest problems are chosen that reach every branch
of Inductor's GEMM code and every feature of generated programs which full reaches, in each class of data types, a
second time where that costs little; which have what :func:`facts` lists: with each backend each op, data type, layout,
kind of step and flag, and in each op and data types long, square, shifted and cut sizes; and which hold a line of each
template of ``inductor_products.toml``.  No known defect has a part in it.

Prints ``docs/results/quick.md``: what each level reaches.  ``--write`` makes ``conformance/cases/quick.toml``, what
reaches most first.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import functools
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from coverage.parser import PythonParser

sys.path.insert(0, str(Path(__file__).parents[1]))

from studies import lines as lines_of
from studies import pairs
from studies.meter import FILES
from studies.reach import Reach, class_of
from template_mutants.patches import folder

from pytest_gemm.api.protocols import Backend
from pytest_gemm.api.request import BuildRequest
from pytest_gemm.backends.builtin import BUILTIN
from pytest_gemm.backends.cpp import micro_kernels
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.conformance import matrix, models
from pytest_gemm.core.text import show
from pytest_gemm.problem import shapes
from pytest_gemm.problem.ops.op import PROLOGUES
from pytest_gemm.problem.problem import Problem
from pytest_gemm.tools.doctor import _SMOKE

CHOSEN: Final = matrix.CASES / "quick.toml"
# Seconds of a problem beside its compile, for each backend of a GPU that takes it, and for a billion products.
_EACH: Final = 0.08
_ON_GPU: Final = 0.1
_FOR_BILLION: Final = 3.0
# Seconds to compile a kernel of C++ with others, and for a million characters of its text; as autotuning alone.
_COMPILE: Final = 0.5
_FOR_TEXT: Final = 8.5
_ALONE: Final = 2.0
# What a problem costs that quick has already, of its price: so that a new choice changes little.
_STAYS: Final = 0.8
# How many demands a problem has to meet a second time for each second that it costs.
_WORTH: Final = 40.0
# Problems of smoke, and the sizes that they have.
_FIRST_TASTE: Final = 20
# Of each device: the backend whose code is reached, and what begins the facts that only others have.
_DEVICES: Final = {
    "cpu": ("cpp", tuple(f"fact {name}: " for name in ("triton", "cutlass", "cutedsl", "nvgemm"))),
    "cuda": ("triton", ("fact cpp: ",)),
}
_PLAIN_SIZES: Final = (16, 1024)
# Share of full's problems from which on an op is frequent, and ops that autotuning has to have in each class of types.
_FREQUENT: Final = 0.01
_PLAIN: Final = ("mm", "linear", "bmm")
# A size beyond 16 bits.
_LONG: Final = 1 << 16
# From which on K is cut into slices, and of which a result has several tiles.
_MANY: Final = 2048
_TILE: Final = 64
# Rows of the tiles of GPU kernels.
_TILES: Final = (64, 128, 256)
# An operand that does not begin where its memory does.
_SHIFTED: Final = ("offset", "tail", "sliced")
_OF_GPUS: Final = {"triton", "cutlass", "cutedsl", "nvgemm"}

# What is asked of a choice: the problems that meet a demand, by its name.
Demands = Mapping[str, frozenset[str]]


def _taken(problem: Problem) -> list[str]:
    """The backends that take a problem, each on the hardware that it is made for."""
    return [backend.name for backend in _backends() if backend.supports(problem, BuildRequest()) is None]


@functools.cache
def _backends() -> tuple[Backend, ...]:
    return tuple(kind() for kind in BUILTIN)


def facts(problem: Problem, taken: Sequence[str]) -> set[str]:
    """What a choice has to have of a problem, whatever code it reaches: for kernels that are not of Inductor's code."""
    op, shape, flags, own = problem.op.name, problem.shape, problem.flags, pairs.facts(problem)
    kind = f"{op} {class_of(problem.line)}"
    long = [f"long {size}" for size in ("batch", "m", "n", "k") if (getattr(shape, size) or 0) > _LONG]
    also = {
        "square": shape.m == shape.n,
        "of one product": shape.k == 1,
        "of many products": shape.k >= _MANY,
        "of several tiles": min(shape.m, shape.n) >= _TILE,
        "of many matrices": (shape.batch or 0) > _TILE,
        "of sizes in a range": bool(problem.dynamic),
        "shifted": any(flag.endswith(_SHIFTED) for flag in flags),
        "over its operand": "out.alias" in flags,
        "large": min(shape.n, shape.k) >= models.LARGE,
        "empty": shape.is_empty or not shape.k,
    }
    words = {
        f"{op} {problem.dtypes}",
        f"{op} {problem.layout}",
        *flags,
        *(f"step {step.name}" for step in problem.steps),
    }
    words |= {
        f"{op} {word}"
        for word in (*(step.name for step in problem.quant), *long, *(word for word, is_so in also.items() if is_so))
    }
    words |= {f"{op} {facet} {value}" for facet, value in own if facet in {"step", "bias"}}
    words |= {f"{kind} tail of {size}" for size in "mnk" if getattr(shape, size) % 8}
    for name in {*taken} & {*_OF_GPUS, "cpp"}:
        words |= {f"{name}: {word}" for word in (f"{op} {problem.dtypes}", *flags, *long)}
        words |= {f"{name}: step {step.name}" for step in problem.steps}
    # A kernel of a GPU is told what to assume of its operands' memory by their sizes and strides.
    words |= {f"{name}: {op} {flag}" for name in {*taken} & _OF_GPUS for flag in flags if flag[:2] in {"a.", "b."}}
    if "cpp" in taken and shape.k and not shape.is_empty:
        split = _blocking(problem)
        words |= _cache_blocks(problem) | {f"cpp: {kind} {split}"}
        words |= {f"cpp: {flag} {split}" for flag in flags if flag.endswith(".dynamic")}
    words |= {f"{op} {flag}" for flag in flags if flag.startswith("math.")}
    if shape.m <= 8 and shape.n <= _TILE and shape.k >= _MANY:
        words.add(f"{kind} of few rows and columns, many products")
    bias = problem.step("bias")
    if bias and not flags and not problem.passes:
        alone = {"square": shape.m == shape.n, "alpha alone": problem.alpha != 1 and problem.beta == 1}
        words |= {
            f"{word}, bias {bias.text or 'n'}, {class_of(problem.line)}" for word, is_so in alone.items() if is_so
        }
    for tile in _TILES:
        if abs(shape.m - tile) <= 8:
            where = "at" if shape.m == tile else "below" if shape.m < tile else "above"
            words |= {f"{name}: rows {where} {tile}" for name in {*taken} & _OF_GPUS}
    return words


def _blocking(problem: Problem) -> str:
    """Whether the C++ kernel has Inductor's own blocking, or what of it is another."""
    backend = CppBackend(threads=1)
    space = backend.space_of_one(problem.at_hints, backend.by_line(problem))
    return "own blocking" if not space.suffix else space.suffix.strip(",").partition("=")[0]


def _cache_blocks(problem: Problem) -> set[str]:
    """Of the C++ kernel's cache blocks, what they are of packed batches, and where in groups of K they begin."""
    backend, shape, group = CppBackend(threads=1), problem.shape, problem.group_size
    asked = micro_kernels.split(backend.space_of_one(problem.at_hints, backend.by_line(problem)).suffix)
    if asked is None or asked[1].cache is None:
        return set()
    (_, n, k), axes, words = asked[1].cache, asked[1], set[str]()
    if problem.op.name == "bmm" and problem.has("b.constant") and n > 1 and shape.n > 96:
        words.add("cpp: several blocks of N of a packed batch in a cache block")
    # With more threads than blocks of 4 x 64 the heuristic takes blocks of 32 along K, on every CPU with AVX-512.
    if (
        group > 32
        and problem.line.startswith("woq_int4:bf16")
        and math.prod(axes.threads or ()) > -(-shape.m // 4) * shape.n // 64
    ):
        parts = k, -(-shape.k // 32 // (axes.factors or (1, 1, 1))[2])
        words.add(
            f"cpp: int4 blocks of K {'at' if all(part * 32 % group == 0 for part in parts) else 'within'} a group"
        )
    return words


def reached(
    reach: Reach, backends: Collection[str], known: Collection[tuple[str, object]] = (), by_class: bool = True
) -> Demands:
    """What is asked of a choice by code: a demand for all elements that the same problems of a class reach.

    Args:
        reach: what was measured.
        backends: whose programs count.
        known: elements that do not count, by file.
        by_class: whether each class of data types has to reach them.
    """
    classes: dict[str, int] = defaultdict(int)
    for i, line in enumerate(reach.lines):
        classes[class_of(line) if by_class else "any"] |= 1 << i
    names: dict[int, str] = {}
    for (backend, file, place), mask in reach.masks.items():
        if backend.partition("-")[0] in backends and (file, place) not in known:
            for of, mine in classes.items():
                if both := mask & mine:
                    names.setdefault(both, f"code {file} {_place(place)}, {of}")
    return {name: frozenset(reach.of(mask)) for mask, name in names.items()}


def _place(place: object) -> str:
    return str(place[0] if place[0] > 0 else place[1]) if isinstance(place, tuple) else str(place)


class Costs(NamedTuple):
    """Seconds on one core, with empty caches: of a problem, and of one whose candidates are benchmarked as well.

    Attributes:
        own: of each problem on the CPU.
        tuned: of those that ``inductor`` was measured with.
        on_gpu: on a GPU.
    """

    own: dict[str, float]
    tuned: dict[str, float]
    on_gpu: dict[str, float]

    @classmethod
    def of(cls, reach: Reach, taken: Mapping[str, Sequence[str]]) -> Costs:
        """Estimates: a compile takes what its text is long, and judging a part of all products."""
        costs = cls({}, {}, {})
        for line, names in taken.items():
            shape = Problem.parse(line).shape
            judged = _EACH + shape.m * shape.n * shape.k * (shape.batch or 1) * 1e-9 * _FOR_BILLION
            size = reach.sizes.get(("cpp", line))
            costs.own[line] = judged + (0.0 if size is None else _COMPILE + size * 1e-6 * _FOR_TEXT)
            costs.on_gpu[line] = judged + _ON_GPU * len({*names} & _OF_GPUS)
            if ("inductor", line) in reach.sizes:
                costs.tuned[line] = reach.seconds["inductor", line] + _ALONE * (size is not None) + judged
        return costs

    def on(self, device: str, line: str, elsewhere: bool) -> float:
        """Those of a problem on a device; less where the other device has it, too, so that there are fewer of them."""
        return self.own[line] if device == "cpu" else self.on_gpu[line] * (1.0 if elsewhere else 1.3)


def choice(costs: Mapping[str, float], asked: Demands, kept: Sequence[str] = (), *, again: bool = True) -> list[str]:
    """Problems that meet all demands, what meets most in its time first, without those that the others make needless.

    ``again``: a second time a demand is met where :data:`_WORTH` of them are met for a second.
    """
    lines = [*costs]
    place = {line: i for i, line in enumerate(lines)}
    who = [np.array([place[line] for line in some if line in place], dtype=int) for some in asked.values()]
    met: list[list[int]] = [[] for _ in lines]
    for demand, some in enumerate(who):
        for i in map(int, some):
            met[i].append(demand)
    meets = [np.array(some, dtype=int) for some in met]
    price = np.array([costs[line] for line in lines])
    wanted = [place[line] for line in kept if line in place]
    first = [*wanted]
    chosen: list[int] = []
    times = np.zeros(len(who), dtype=int)
    for goal in (1, 2) if again else (1,):
        gain = np.zeros(len(lines))
        for demand in map(int, np.flatnonzero(times < goal)):
            gain[who[demand]] += 1
        gain[chosen] = 0
        while True:
            best = first.pop(0) if first else int((gain / price).argmax())
            if best not in wanted and (gain[best] <= 0 or (goal > 1 and gain[best] / price[best] < _WORTH)):
                break
            if best in chosen:
                if not first:
                    break
                continue
            chosen.append(best)
            for demand in meets[best]:
                times[demand] += 1
                if times[demand] == goal:
                    gain[who[demand]] -= 1
            gain[best] = 0
        if goal == 1:
            chosen = _needed(chosen, meets, times, wanted, price)
    return [lines[i] for i in chosen]


def _needed(
    chosen: list[int], meets: Sequence[np.ndarray], times: np.ndarray, kept: Collection[int], price: np.ndarray
) -> list[int]:
    """The chosen without those whose demands others meet, the dearest first; ``times`` is what the rest meets."""
    needed = [*chosen]
    for i in sorted(chosen, key=lambda i: -price[i]):
        if i not in kept and (times[meets[i]] > 1).all():
            times[meets[i]] -= 1
            needed.remove(i)
    return needed


def in_order(lines: Collection[str], costs: Mapping[str, float], asked: Demands) -> dict[str, list[str]]:
    """The problems, what meets most in its time first, each with the demands that none before it meets."""
    mine: dict[str, set[str]] = {line: set() for line in lines}
    for name, some in asked.items():
        for line in some & mine.keys():
            mine[line].add(name)
    order: dict[str, list[str]] = {}
    known: set[str] = set()
    while mine:
        best = max(mine, key=lambda line: len(mine[line] - known) / costs[line])
        order[best] = sorted(mine.pop(best) - known)
        known.update(order[best])
    return order


# -- what each level reaches -------------------------------------------------------------------------------------


class Branches(NamedTuple):
    """The branches of a file of Inductor: places where a line goes on in several ways."""

    arcs: frozenset[tuple[int, int]]
    lines: dict[int, int]

    @classmethod
    def of(cls, file: str) -> Branches:
        """Those of an installed file, without those that end a function.

        ``lines`` has the first line of the statement of each line.
        """
        parser = PythonParser(filename=str(folder() / file))
        parser.parse_source()
        several = {line for line, count in parser.exit_counts().items() if count > 1}
        first = {line: parser.first_line(line) for line in range(1, parser.text.count("\n") + 2)}
        return cls(frozenset(arc for arc in parser.arcs() if arc[0] in several), first)

    def among(self, arcs: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
        """Which of them are among measured ones."""
        return {(self.lines.get(a, a), self.lines.get(b, b)) for a, b in arcs} & self.arcs


def functions(file: str) -> dict[str, tuple[int, int]]:
    """The functions of a file by name, with the first and the last line of their bodies."""
    tree = ast.parse((folder() / file).read_text(encoding="utf-8"))
    spans: dict[str, tuple[int, int]] = {}

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                name = f"{prefix}{child.name}"
                if isinstance(child, ast.FunctionDef):
                    spans[name] = (child.body[0].lineno, child.end_lineno or 0)
                walk(child, f"{name}.")

    walk(tree, "")
    return spans


def page(reach: Reach, levels: Mapping[str, Collection[str]], own: Own) -> str:
    """What each level and PyTorch's own tests reach, as Markdown.

    Args:
        reach: what was measured.
        levels: the problems of a level, by its name; those of autotuning with ``inductor`` in front.
        own: what PyTorch's own tests reach.
    """
    arcs: dict[str, dict[str, set[Any]]] = defaultdict(lambda: {name: set() for name in levels})
    bits = {
        (name, tuned): sum(1 << i for i, line in enumerate(reach.lines) if f"{tuned}{line}" in lines)
        for name, lines in levels.items()
        for tuned in ("", "inductor ")
    }
    for (backend, file, place), mask in reach.masks.items():
        for name in levels:
            if mask & bits[name, "inductor " * (backend == "inductor")]:
                arcs["jinja" if file.startswith("jinja") else file][name].add((file, place))
    rows: list[dict[str, Any]] = []
    idle: dict[str, list[str]] = {"neither": [], "theirs": []}
    for file in sorted(path.relative_to(folder()).as_posix() for name in FILES for path in folder().glob(name)):
        if "flex" in file or not (arcs[file] or own.arcs.get(file)):
            continue
        branches = Branches.of(file)
        sets = [{place for _, place in arcs[file][name]} for name in levels]
        theirs = {(begin, end) for begin, end in own.arcs.get(file, ())}
        rows.append(
            {
                "file": file,
                "branches": len(branches.arcs),
                "reached": [len(branches.among(some)) for some in (*sets, theirs)],
            }
        )
        ours, both = ({line for arc in some for line in arc} for some in (sets[-1], sets[-1] | theirs))
        spans = functions(file)
        for kind, lines in (("neither", both), ("theirs", ours)):
            unrun = [name for name, (begin, end) in spans.items() if lines.isdisjoint(range(begin, end + 1))]
            idle[kind] += [f"{file}:{name}" for name in unrun if name.rpartition(".")[0] not in unrun]
    idle["theirs"] = [name for name in idle["theirs"] if name not in idle["neither"]]
    asked = reached(reach, {"cpp", "triton"})
    return lines_of.page(
        "quick.md.jinja",
        torch=metadata.version("torch"),
        heads=[f"{name} ({sum(not line.startswith('inductor') for line in lines)})" for name, lines in levels.items()],
        rows=rows,
        total=sum(row["branches"] for row in rows),
        totals=[sum(counts) for counts in zip(*(row["reached"] for row in rows), strict=True)],
        templates=[len(arcs["jinja"][name]) for name in levels],
        generated=[len(arcs["generated"][name]) for name in levels],
        demands=[sum(not some.isdisjoint(lines) for some in asked.values()) for lines in levels.values()],
        own_sample=own.sample,
        unreached=_explained(idle["neither"]),
        theirs=idle["theirs"],
    )


def _explained(names: Iterable[str]) -> list[tuple[str, str]]:
    """Functions that nothing reaches, by the reason of ``unreached.toml``."""
    groups: dict[str, list[str]] = defaultdict(list)
    table = lines_of.read("unreached.toml", Unreached)
    for name in names:
        why = next(
            (row.why for row in table if any(fnmatch.fnmatchcase(name, one) for one in row.names)), "not looked at"
        )
        groups[why].append(name)
    return [(", ".join(f"`{name}`" for name in some), why) for why, some in sorted(groups.items())]


class Own(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What PyTorch's own tests reach: which of them were run, and arcs by file."""

    sample: str = "not run"
    arcs: dict[str, list[tuple[int, int]]] = {}


class Unreached(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why no problem reaches some functions: patterns of ``FILE:FUNCTION``, and the reason."""

    names: tuple[str, ...]
    why: str


# -- the command -------------------------------------------------------------------------------------------------


def written(
    order: Mapping[str, Sequence[str]],
    chosen: Mapping[str, Collection[str]],
    smoke: Collection[str],
    drawn: Collection[str],
    tuned: Mapping[str, Collection[str]],
) -> str:
    """The file of cases: the level smoke, a set for each device, and what runs as autotuning selects."""
    sets: dict[str, list[str]] = {"smoke": [*smoke], "both": [], "cpu": [], "cuda": []}
    for line in order:
        devices = [device for device, lines in chosen.items() if line in lines]
        if line not in drawn and line not in smoke:
            sets["both" if len(devices) > 1 else devices[0]].append(line)
    parts = [_HEAD]
    for name, lines in {**sets, **tuned}.items():
        body = "".join(f'    "{line}",{"" if name in tuned else _why(order[line])}\n' for line in lines)
        parts.append(f'[[set]]\nname = "{name}"\n{_KEYS[name]}problems = [\n{body}]\n')
    return "\n".join(parts)


def _why(demands: Sequence[str]) -> str:
    return f"  # {len(demands)}: {demands[0]}" if demands else ""


_CHOSEN_BY: Final = 'help = "chosen by the code that they reach"\n'
_BY_INDUCTOR: Final = "run by inductor, too, where no backends are named"
_KEYS: Final = {
    "smoke": 'help = "a first look at a backend: plain problems, of each frequent op and what reaches most"\n'
    'level = "smoke"\n',
    "both": _CHOSEN_BY,
    "cpu": f'{_CHOSEN_BY}device = "cpu"\n',
    "cuda": f'{_CHOSEN_BY}device = "cuda"\n',
    "autotuned": f'help = "{_BY_INDUCTOR}: what it alone reaches, and each op"\ndevice = "cpu"\n',
    "autotuned-on-gpu": f'help = "{_BY_INDUCTOR}: each op"\ndevice = "cuda"\n',
}
_HEAD: Final = """\
# The problems of quick, chosen from those of full by the code that they reach and what they cost, what reaches most
# first: "python tests/studies/cover.py PART... --write" makes this file.  Behind a problem stands how many demands it
# is the first to meet, and one of them: code in a class of data types, or a fact of a problem line.
"""


def main() -> int:
    """Print what each level reaches."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="+", type=Path)
    parser.add_argument("--own", type=Path, help="what PyTorch's own tests reach: JSON, arcs by file")
    parser.add_argument("--write", action="store_true", help=f"write {CHOSEN.name} as well")
    asked = parser.parse_args()
    reach = Reach.read(asked.parts)
    if asked.write:
        CHOSEN.write_text(_chosen(reach), encoding="utf-8")
        shapes.forget()
    levels: dict[str, Collection[str]] = {
        level: {p.line for p in matrix.products(level)} | {f"inductor {p.line}" for p in matrix.autotuned(level)}
        for level in ("smoke", "quick", "full")
    }
    own = msgspec.json.decode(asked.own.read_bytes(), type=Own) if asked.own else Own()
    show(page(reach, levels, own))
    return 0


def _chosen(reach: Reach) -> str:
    """Choose, and write the file of cases."""
    problems = {p.line: p for p in matrix.products("full")}
    taken = {line: _taken(problem) for line, problem in problems.items()}
    costs = Costs.of(reach, taken)
    words: dict[str, set[str]] = defaultdict(set)
    for line, problem in problems.items():
        for word in facts(problem, taken[line]):
            words[f"fact {word}"].add(line)
    code = {device: reached(reach, {backend}) for device, (backend, _) in _DEVICES.items()}
    every = {name: frozenset(lines) for name, lines in words.items()} | {
        k: v for one in code.values() for k, v in one.items()
    }
    smoke = first_taste(problems, costs.own, every)
    drawn = [p.line for one in shapes.read(matrix.CASES / "mm.toml") if one.name == "mm-drawn" for p in one.problems]
    before = {p.line: _STAYS for p in matrix.products("quick")}
    chosen: dict[str, list[str]] = {}
    for device, (_, others) in _DEVICES.items():
        here = [p.line for p in matrix.products("full", device)]
        price = {line: costs.on(device, line, line in chosen.get("cpu", ())) * before.get(line, 1.0) for line in here}
        mine = {name: lines for name, lines in every.items() if name.startswith("fact") and not name.startswith(others)}
        kept = [line for line in (*_SMOKE, *smoke, *drawn) if line in here]
        chosen[device] = choice(price, {**mine, **code[device]}, kept)

    # Of autotuning what it alone reaches, in whatever types, and what users run it on.
    elsewhere = {(file, place) for backend, file, place in reach.masks if backend != "inductor"}
    alone: dict[str, set[str]] = defaultdict(set)
    alone |= {name: {*lines} for name, lines in reached(reach, {"inductor"}, elsewhere, False).items()}
    for line in costs.tuned:
        op = problems[line].op.name
        alone[f"op {op}"].add(line)
        alone[f"dynamic {problems[line].dynamic}"].add(line)
        if op in _PLAIN:
            alone[f"{op} {class_of(line)}"].add(line)
        for word in _tuned_facts(problems[line]):
            alone[word].add(line)
    more = {
        line: seconds + (0.0 if line in chosen["cpu"] else costs.own[line]) for line, seconds in costs.tuned.items()
    }
    tuned = choice(more, {name: frozenset(lines) for name, lines in alone.items()}, again=False)
    chosen["cpu"] += [line for line in tuned if line not in chosen["cpu"]]
    order = in_order([*dict.fromkeys(line for lines in chosen.values() for line in lines)], costs.own, every)
    sets = {"autotuned": [line for line in order if line in tuned], "autotuned-on-gpu": _on_gpu(order, problems, taken)}
    return written(order, chosen, smoke, drawn, sets)


def _tuned_facts(problem: Problem) -> set[str]:
    """What autotuning meets beside its code: it benchmarks candidates on operands that it makes by their layouts.

    Other passes make the program of a weight that freezing packs than of an argument.
    """
    is_turned = {"a": problem.layout.a_transposed, "b": problem.layout.b_transposed}
    behind = " behind a weight" * problem.frozen
    steps = (f"step {s.kind.name}{' of another type' * (s.operand is not None)}{behind}" for s in problem.steps)
    flags = (f"flag {flag} {is_turned[flag[0]] if flag in PROLOGUES else ''}" for flag in problem.flags)
    return {*steps, *flags}


def _on_gpu(order: Iterable[str], problems: Mapping[str, Problem], taken: Mapping[str, Sequence[str]]) -> list[str]:
    """Of each op that Triton takes, and of each class of types of a plain one, a line without a flag but any size."""
    first: dict[str, str] = {}
    for line in order:
        problem = problems[line]
        if "triton" in taken[line] and all(flag.endswith(".dynamic") for flag in problem.flags):
            name = f"{problem.op.name} {class_of(line)}" if problem.op.name in _PLAIN else problem.op.name
            first.setdefault(f"{name} {bool(problem.dynamic)}" if problem.op.name == "mm" else name, line)
    return [*dict.fromkeys(first.values())]


def _is_plain(problem: Problem) -> bool:
    """Whether it is small, and nothing in it is rare: a product, with a bias and an activation at most."""
    steps = {value for facet, value in pairs.facts(problem) if facet == "step"}
    is_small = all(_PLAIN_SIZES[0] <= getattr(problem.shape, size) <= _PLAIN_SIZES[1] for size in "mnk")
    return is_small and not problem.flags and steps <= {pairs.NONE, "unary"} and problem.beta != 0


def first_taste(problems: Mapping[str, Problem], costs: Mapping[str, float], asked: Demands) -> list[str]:
    """The problems of smoke: plain and small ones, of each frequent op the first, and what reaches most.

    One whose sizes are no multiples of a tile comes before the others, and usual data types and layouts come first.
    """
    kinds = Counter(map(_kind, problems.values()))
    usual = Counter(map(_form, problems.values()))
    frequent = [kind for kind in kinds if kinds[kind] >= _FREQUENT * kinds.total()]
    plain = [line for line, problem in problems.items() if _kind(problem) in frequent and _is_plain(problem)]
    order = in_order(plain, costs, asked)
    first: dict[str, str] = {}
    for line in sorted(order, key=lambda line: (not _has_tails(problems[line]), -usual[_form(problems[line])])):
        first.setdefault(_kind(problems[line]), line)
    return [*dict.fromkeys((*first.values(), *order))][:_FIRST_TASTE]


def _form(problem: Problem) -> str:
    return f"{problem.op.name} {problem.dtypes} {problem.layout}"


def _kind(problem: Problem) -> str:
    return f"mm {problem.dtypes}" if problem.op.name == "mm" else problem.op.name


def _has_tails(problem: Problem) -> bool:
    return bool(problem.shape.m % 16 and problem.shape.n % 16 and problem.shape.k % 8)


if __name__ == "__main__":
    raise SystemExit(main())
