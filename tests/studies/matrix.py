"""Which problems find which defects, and what each costs: ``python tests/studies/matrix.py MAKE > PART``.

    matrix.py kernels --piece 3/8      # wrong kernels as callables, which compile nothing
    matrix.py run RECORD               # what a run of aten,cpp met: its seconds, micro-kernels and known failures
    matrix.py templates STATE          # C++ templates: what a survey reaches, and what the mutants' runs have found
    matrix.py join PART...             # all parts as one, which is stored as matrix.json

A part is a list of JSON: a line for each problem, with what it finds and its seconds.  Pieces can be made on several
machines.  The problems are those of a level, by default of all that quick was chosen from.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from studies import history, lines
from template_mutants.study import _records

from pytest_gemm.conformance import matrix
from pytest_gemm.core.text import show
from pytest_gemm.problem.axes import LEVELS
from pytest_gemm.problem.problem import Problem
from pytest_gemm.record import reader

STORED: Final = Path(__file__).with_name("matrix.json")
# Shapes of mutants whose bug is in the product, which any program can have.
_ANYWHERE: Final = {"product", "corrupted", "stored", "afterwards"}
# Multiplications of a problem from which only the mutants run that are made for it.
_LARGE: Final = 1 << 25
_PAGE: Final = Path(__file__).parents[2] / "docs" / "results" / "template-mutants.md"
_KILLED: Final = re.compile(r"^\| (\S+) \|.*\| quick \| killed \| `(.+?)`", re.MULTILINE)


class Row(msgspec.Struct):
    """What one problem finds.

    Attributes:
        found: kinds and names of defects, ``kernel k-tail-dropped``.
        seconds: that it took a run of aten,cpp, compiles among them.
    """

    found: set[str] = msgspec.field(default_factory=set)
    seconds: float = 0.0


Rows = dict[str, Row]


# -- kernels -----------------------------------------------------------------------------------------------------


def _form(problem: Problem) -> tuple[object, ...]:
    """What a mutant of a whole program asks of a problem: all but data types and sizes, dynamic ones too."""
    flags = [flag for flag in problem.flags if not flag.endswith(".dynamic")]
    return problem.op.name, [step.name for step in problem.steps], flags


@functools.cache
def _entries() -> dict[str, tuple[Any, set[str], list[tuple[object, ...]]]]:
    """Mutants whose bug is in the numbers and depends on the problem, and imitations of the history, by name.

    Each with its own lines, and with the forms, or the beginnings of forms, of problems that its program is made for:
    any where its bug is in the product, and any of its ops where it imitates a defect.
    """
    import mutants
    from imitations import IMITATIONS

    every = {f"kernel {name}": one for name, one in mutants.MUTANTS.items()}
    for bug in history.BUGS:
        if bug.imitation and bug.calls == 1:
            own = {line: line for line in bug.imitated}
            every[f"history {bug.id}"] = mutants.Mutant(bug.wrong, IMITATIONS[bug.imitation], own)
    found = {}
    for name, one in every.items():
        templates = set(one.lines.values())
        if one.code or templates <= {*mutants.SMALL.values(), *mutants.MIB.values()}:
            continue
        mine = [Problem.parse(line) for *_, line in one.problems((256,))]
        shape = one.plant.__qualname__.partition(".")[0]
        length = int(name.startswith("history")) if shape in _ANYWHERE else 3
        found[name] = (one, {p.line for p in mine}, [_form(p)[:length] for p in mine] or [()])
    return found


def _found(line: str) -> list[str]:
    """The mutants that a problem finds with the distributions of quick, in single calls."""
    import torch
    from mutants import product, right

    from pytest_gemm.judging import verdict
    from pytest_gemm.judging.truth import Truth
    from pytest_gemm.numerics.contract import Contract
    from pytest_gemm.operands import tensors, views
    from pytest_gemm.operands.distributions import distributions_for
    from pytest_gemm.operands.groups import of_groups
    from pytest_gemm.plugin.selection import DISTRIBUTIONS
    from pytest_gemm.programs import program

    torch.set_num_threads(1)
    problem = Problem.parse(line)
    names = distributions_for(problem)[: DISTRIBUTIONS["quick"]]
    truths = [Truth(made, made.digest()) for made in (tensors.make(problem, name, 0) for name in names)]
    sums = {"f64": Contract("f64"), "i32": Contract("i32")}.get(problem.dtypes.out.name, Contract())
    contract = dataclasses.replace(sums, epilogue="eager")

    def results(plant: Any) -> Iterator[tuple[torch.Tensor, ...]]:
        run = plant(problem)
        for truth in truths:
            given = truth.operands.clone()
            made = run(program.args(problem, given))
            found = of_groups(given, views.in_product(problem, made if isinstance(made, tuple) else (made,)))
            yield program.gathered(problem, found)

    def same(x: torch.Tensor, y: torch.Tensor) -> bool:
        return x.shape == y.shape and torch.equal(*(one.contiguous().view(torch.uint8) for one in (x, y)))

    def finds(plant: Any, right: Sequence[tuple[torch.Tensor, ...]] = ()) -> bool:
        """Whether a result is outside of its interval; what raises is a mutant that does not fit the problem."""
        with contextlib.suppress(Exception):
            for place, made in enumerate(results(plant)):
                if right and all(map(same, made, right[place])):
                    continue
                for one, (output, used, interval) in zip(made, truths[place].answers(made, contract), strict=False):
                    is_result = verdict.not_comparable(one, output, used) is None
                    if is_result and bool(verdict.rejected(one.double(), interval).any()):
                        return True
        return False

    size = problem.shape.m * problem.shape.n * problem.shape.k * (problem.shape.batch or 1)
    any_product, known, found = False, [], []
    with contextlib.suppress(Exception):
        known = list(results(product(right)))
        any_product = size < _LARGE and not finds(product(right))
    for name, (mutant, own, forms) in _entries().items():
        fits = any(_form(problem)[: len(one)] == one and (len(one) == 3 or any_product) for one in forms)
        if (line in own or (fits and size < _LARGE)) and finds(mutant.plant, known):
            found.append(name)
    return found


def kernels(problems: Sequence[Problem], workers: int) -> Iterator[tuple[str, Row]]:
    """What each problem finds among the kernel mutants; each in a process of its own."""
    from studies.mutant_study import Ended, apart

    every = [problem.line for problem in problems]
    for first in range(0, len(every), 8 * workers):
        some = every[first : first + 8 * workers]
        answers = apart([functools.partial(_found, line) for line in some], workers)
        for line, answer in zip(some, answers, strict=True):
            if isinstance(answer, Ended):
                sys.stderr.write(f"{line}: {answer.how}\n")
            yield line, Row(set() if isinstance(answer, Ended) else set(answer))


# -- runs and templates ------------------------------------------------------------------------------------------


def of_run(path: Path) -> Rows:
    """What a run met: micro-kernels, known failures, and the seconds of each problem, those of its compiles too."""
    rows: Rows = defaultdict(Row)
    for one in reader.read(path).outcomes:
        if one.test != "test_product":
            continue
        row = rows[one.problem]
        row.seconds += one.seconds.compile + one.seconds.run + one.seconds.reference
        for blocking in one.configuration:  # CppMicroGemmFP32Vec-8x48x1:f32-f32-f32:17x65x127,kslices=2,threads=1
            kernel, *axes = blocking.split(",")
            name, dtypes, _ = kernel.split(":")
            split = [axis for axis, value in (axis.split("=") for axis in axes) if value != "1"]
            row.found |= {f"micro {name} {what}" for what in (dtypes, *split)}
        if one.known_failure:
            row.found.add(f"ledger {one.known_failure}")
    return rows


def of_templates(state: Path) -> Rows:
    """Mutants that a problem reaches, and those that it kills.

    Args:
        state: a folder of ``template_mutant_study.py``; its page tells what killed each mutant before.
    """
    rows: Rows = defaultdict(Row)
    for part in _PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        for name, line in _KILLED.findall(part):
            rows[line].found.add(f"template {name}" if part.startswith("C++") else f"template {part[:7]}{name}")
    for path in state.glob("survey-*.jsonl"):
        for one in _records(path):
            rows[one["line"]].found |= {f"reached {name}" for name in one["reached"]}
    for path in state.glob("runs/*/out/run.jsonl"):
        for outcome in reader.read(path).outcomes:
            if outcome.status.is_failure:
                rows[outcome.problem].found.add(f"template {path.parts[-3]}")
    return rows


# -- the matrix --------------------------------------------------------------------------------------------------


def read(path: Path = STORED) -> Rows:
    """The stored matrix: a line for each op and data types, with a number whose bits are the defects of the first."""
    names, kinds = json.loads(path.read_text(encoding="utf-8"))
    return {
        f"{kind}:{rest}": Row({name for i, name in enumerate(names) if int(bits, 16) >> i & 1}, seconds)
        for kind, problems in kinds.items()
        for rest, (seconds, bits) in problems.items()
    }


def written(rows: Rows) -> str:
    """The matrix as :func:`read` takes it."""
    names = sorted(set().union(*(row.found for row in rows.values())))
    bit = {name: 1 << i for i, name in enumerate(names)}
    kinds: dict[str, dict[str, tuple[float, str]]] = defaultdict(dict)
    for line, row in rows.items():
        op, dtypes, rest = line.split(":", 2)
        kinds[f"{op}:{dtypes}"][rest] = round(row.seconds, 2), f"{sum(bit[name] for name in row.found):x}"
    body = ",\n".join(f"{json.dumps(kind)}: {json.dumps(problems)}" for kind, problems in kinds.items())
    return f"[{json.dumps(names)},\n{{\n{body}\n}}]\n"


def joined(parts: Iterable[Rows], problems: Iterable[Problem]) -> Rows:
    """All parts as one, of these problems in their order."""
    rows = {problem.line: Row() for problem in problems}
    for part in parts:
        for line, row in part.items():
            if line in rows:
                rows[line].found |= row.found
                rows[line].seconds = max(rows[line].seconds, row.seconds)
    return rows


def main() -> int:
    """Print a part, or the matrix."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("make", choices=("kernels", "run", "templates", "join"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--piece", default="1/1", metavar="I/N", help="the I-th of N parts of the problems")
    parser.add_argument("--level", choices=LEVELS, default="full", help="of the problems (default: full)")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes at a time (default: 1)")
    given = parser.parse_args()
    if given.make == "kernels":
        piece, pieces = map(int, given.piece.split("/"))
        for line, row in kernels(matrix.products(given.level)[piece - 1 :: pieces], given.workers):
            show(json.dumps([line, msgspec.to_builtins(row)]) + "\n")
            sys.stdout.flush()
        return 0
    if given.make == "join":
        parts = [
            {line: msgspec.convert(row, Row) for line, row in map(json.loads, path.read_text("utf-8").splitlines())}
            for path in given.files
        ]
        wanted = set().union(*parts)
        return lines.printed(written(joined(parts, (p for p in matrix.products("full") if p.line in wanted))), ())
    rows = (of_run if given.make == "run" else of_templates)(given.files[0])
    show("".join(json.dumps([line, msgspec.to_builtins(row)]) + "\n" for line, row in rows.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
