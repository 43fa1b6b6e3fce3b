"""How often the named cause of a failure is the planted one: every mutant, every distribution that catches it.

    python tests/studies/causes.py [--out PAGE] [--k K ...] [--mutants PATTERN]

A mutant is judged as in the study of mutants; what is true of it stands in tests/mutants.py, made from what it does.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import fnmatch
import functools
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from mutants import KS, MUTANTS, Planted, causes
from studies import lines
from studies.mutant_study import Catch, apart, judge, prepare

from pytest_gemm.core.case_id import Device
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.plugin.selection import DISTRIBUTIONS
from pytest_gemm.problem.problem import Problem


@dataclasses.dataclass(frozen=True)
class Named:
    """One failure: the mutant, where it was judged, and the cause that was named."""

    mutant: str
    line: str
    distribution: str
    cause: str
    is_first: bool

    @property
    def verdict(self) -> str:
        """``right``, ``none`` or ``wrong``."""
        return "none" if not self.cause else "right" if self.cause in causes(self.mutant) else "wrong"


def named(who: Judge | None, name: str, line: str) -> list[Named]:
    """The failures of a mutant on a problem with the quick distributions, or the first with any where these pass."""
    who, problem = who or judge(), Problem.parse(line)
    found: list[Named] = []
    every = distributions_for(problem)
    for some in (every[: DISTRIBUTIONS["quick"]], every):
        for judged in who.judge(Case(Planted(name, MUTANTS[name]), problem, some, 0, Device.CPU)):
            outcome = judged.outcome
            if Catch.of(outcome) is not None:
                found.append(Named(name, line, outcome.distribution, outcome.cause, not found))
                if some == every:
                    return found
        if found:
            break
    return found


def _of_line(line: str, names: Sequence[str]) -> list[Named]:
    own = any(line in MUTANTS[name].lines.values() for name in names)
    who = None if own else judge()
    if who is not None:
        prepare(who, line, DISTRIBUTIONS["quick"])
    answers = apart([functools.partial(named, who, name, line) for name in names])
    found = [one for answer in answers if isinstance(answer, list) for one in answer]
    sys.stderr.write("".join(f"{one.verdict} {one.mutant} {line} {one.distribution}: {one.cause}\n" for one in found))
    return found


def study(ks: Sequence[int], pattern: str = "*", workers: int = 1) -> list[Named]:
    """All failures; each problem in a process of its own."""
    asked = collections.defaultdict(list)
    for name, mutant in MUTANTS.items():
        if fnmatch.fnmatchcase(name, pattern):
            for _, k, line in mutant.problems():
                if k in ks or line in mutant.lines.values():
                    asked[line].append(name)
    answers = apart([functools.partial(_of_line, line, names) for line, names in asked.items()], workers)
    return [one for answer in answers if isinstance(answer, list) for one in answer]


def _counts(found: Iterable[Named]) -> list[int | str]:
    count = Counter(one.verdict for one in found)
    said = count["right"] + count["wrong"]
    share = f"{count['right'] / said:.0%}" if said else "-"
    return [count["right"], count["none"], count["wrong"], share]


def _rows(found: Sequence[Named]) -> Iterator[tuple[object, ...]]:
    first = [one for one in found if one.is_first]
    yield "the first failure of each mutant and problem", *_counts(first)
    yield "every failure", *_counts(found)
    for distribution in dict.fromkeys(one.distribution for one in found):
        yield f"`{distribution}`", *_counts(one for one in found if one.distribution == distribution)


def page(found: Sequence[Named], ks: Sequence[int]) -> str:
    """The page of Markdown."""
    by_mutant = {name: [one for one in found if one.mutant == name] for name in MUTANTS}
    wrong = Counter((one.mutant, one.cause) for one in found if one.verdict == "wrong")
    return lines.page(
        "causes.md.jinja",
        date=datetime.date.today(),
        versions=f"torch {torch.__version__}, Python {platform.python_version()}",
        ks=ks,
        quick=DISTRIBUTIONS["quick"],
        mutants=len({one.mutant for one in found}),
        summary=list(_rows(found)),
        wrong=[(name, ", ".join(sorted(causes(name))) or "-", cause, n) for (name, cause), n in wrong.most_common()],
        body=[
            (name, MUTANTS[name].what, Counter(one.cause or "-" for one in mine).most_common(4), _counts(mine))
            for name, mine in by_mutant.items()
            if mine
        ],
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Named and planted causes.")
    parser.add_argument("--out", type=Path, help="write the page here (default: standard output)")
    parser.add_argument("--k", type=int, nargs="*", default=KS, help="K of the problems that have it open")
    parser.add_argument("--mutants", default="*", metavar="PATTERN", help="only mutants of such names")
    parser.add_argument("--workers", type=int, default=1, help="processes (1)")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = study(given.k, given.mutants, given.workers)
    text = page(found, given.k)
    if given.out:
        given.out.write_text(text, encoding="utf-8")
        text = ""
    return lines.printed(text, [])


if __name__ == "__main__":
    sys.exit(main())
