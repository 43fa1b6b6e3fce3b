"""Failures grouped by their likely cause: one bug is one finding, however many problems it breaks.

The tests of a kernel fail in dozens for one bug.  A finding has the failures of one backend with one status and one
cause, the condition that separates its problems from those that passed, and the simplest problem to begin with.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.core.units import plural
from pytest_gemm.failures.text import named
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem

# A problem and candidate of one backend.
_Key: TypeAlias = tuple[str, str]
# Backend, status, and cause or code of the reason.
_Way: TypeAlias = tuple[str, Status, str]

# A condition holds for this share of the failures, and for no more than that of the passes.
_COVERED: Final = 0.9
_PASSES: Final = 0.1
# Failures and passes below which any condition would be chance.
_EVIDENCE: Final = 4
# By how much a second feature has to improve the separation, failures covered minus passes covered.
_SECOND: Final = 0.05
# Causes that share this part of their problems, in other input distributions, are one bug.
_SHARED: Final = 0.5
# Share of a finding's failures that have its cause; a rarer one is chance.
_NAMES: Final = 0.2
# Causes that head a finding before all others, and after all others.
_RACE: Final = "race or leftover state"
_ZERO: Final = "sign of zero"
# Codes that say nothing to a user.
_PLAIN: Final = {"outside-bound": "wrong values, cause not recognised", "nan": "NaN, cause not recognised"}
# A size above which a problem is not simple.
_LARGE: Final = 4096
# How many times more problems put a finding without a name before one with a name.
_NAMED_FIRST: Final = 3
# Further problems that a text names.
_NAMED: Final = 3


@dataclasses.dataclass(frozen=True)
class Finding:
    """Failures of one likely cause on one backend.

    Attributes:
        outcomes: the failures, in the order of the run.
        cause: name of what was computed instead; "" where nothing is certain.
        condition: what separates the failed problems from the passed ones, with the counts: ``K % 8 > 1: 50 of 51
            failures, 3 of 165 passes``; "" where nothing separates them well.
    """

    outcomes: Sequence[Outcome]
    cause: str = ""
    condition: str = ""

    @functools.cached_property
    def simplest(self) -> Outcome:
        """The failure with the simplest problem, a plain small product in f32, of those that have the cause."""
        return min(
            self.outcomes, key=lambda one: (one.cause == _ZERO, one.cause != self.cause, _complexity(one.problem))
        )

    @property
    def who(self) -> str:
        """The backend with what was asked for."""
        return self.simplest.who

    @property
    def title(self) -> str:
        """The verdict and the cause, or else the code of the reason: ``incorrect: K tail``."""
        return title(self.simplest, self.cause)

    @functools.cached_property
    def problems(self) -> Sequence[str]:
        """The problem lines, the simplest first."""
        lines = sorted({one.problem for one in self.outcomes} - {self.simplest.problem}, key=_complexity)
        return [self.simplest.problem, *lines]


def title(outcome: Outcome, cause: str = "") -> str:
    """The verdict on a failure, and its cause or the code of its reason."""
    what = cause or outcome.cause or _PLAIN.get(outcome.code, outcome.code)
    return ": ".join(filter(None, (str(outcome.ended), what)))


def findings(outcomes: Iterable[Outcome]) -> list[Finding]:
    """The failures of a run, the findings with most problems first, and those that are PyTorch's last.

    Args:
        outcomes: of a run; what passed tells which condition separates.
    """
    ways: dict[_Way, list[Outcome]] = defaultdict(list)
    right: dict[str, set[_Key]] = defaultdict(set)
    wrong: dict[str, set[_Key]] = defaultdict(set)
    for one in outcomes:
        if one.status.is_failure:
            ways[one.who, one.status, one.cause or _unexplained(one)].append(one)
            wrong[one.who].add(_key(one))
        elif one.status is Status.PASSED:
            right[one.who].add(_key(one))
    found = []
    for who in dict.fromkeys(who for who, *_ in ways):
        # A result without elements is right whatever the kernel does.
        passed = sorted(key for key in right[who] - wrong[who] if not {"M = 0", "N = 0"} & _features(key))
        for group in _merged([some for way, some in ways.items() if way[0] == who], passed, sorted(wrong[who])):
            heading = [one.cause for one in group if one.cause != _ZERO] or [_ZERO]
            ranked = sorted(Counter(filter(None, heading)).items(), key=lambda one: (one[0] != _RACE, -one[1]))
            cause = next((name for name, count in ranked if count >= _NAMES * len(heading)), "")
            held = condition(set(map(_key, group)), passed, cause, sorted(wrong[who]))
            found.append(Finding(group, cause, held.text))

    def rank(one: Finding) -> tuple[bool, bool, bool, int]:
        # What is named tells more than what is not, which is often the same bug on numbers that do not show it.
        weight = _NAMED_FIRST if one.cause else 1
        is_empty = all(re.search(r":(\d+x)*0x|x0\b", problem) for problem in one.problems)
        return one.simplest.inherited, one.cause == _ZERO, is_empty, -weight * len(one.problems)

    return sorted(found, key=rank)


def _key(one: Outcome) -> _Key:
    return one.problem, one.candidate


def _unexplained(one: Outcome) -> str:
    """A reason without the numbers of its problem: two different exceptions are two findings."""
    return "" if one.status is Status.INCORRECT else re.sub(r"\d+", "0", f"{one.code} {one.why}")


def _merged(groups: Sequence[Sequence[Outcome]], passed: Sequence[_Key], failed: Sequence[_Key]) -> list[list[Outcome]]:
    """Groups of one backend, joined where one bug explains both, the largest first.

    One bug looks different with other input distributions and sizes.  So a smaller group joins a larger one that has
    most of its problems too, or, of wrong results, whose condition they fulfil.
    """
    kept: list[tuple[list[Outcome], set[_Key], Condition]] = []
    for group in sorted(groups, key=lambda some: (some[0].cause == _ZERO, -len(set(map(_key, some))))):
        by_home: dict[int, list[Outcome]] = defaultdict(list)
        keys, is_wrong = set(map(_key, group)), group[0].status is Status.INCORRECT
        like = group[0].status, group[0].inherited  # what is PyTorch's joins nothing of the kernel's own
        homes = [n for n, (some, *_) in enumerate(kept) if (some[0].status, some[0].inherited) == like]
        for n in homes:
            _, theirs, held = kept[n]
            fits = sum(key in theirs or (is_wrong and held.fits(key)) for key in keys)
            if len(keys & theirs) >= _SHARED * len(keys) or fits >= _COVERED * len(keys):
                by_home[n] += group
                break
        else:
            for one in group:
                fit = (n for n in homes if _key(one) in kept[n][1] or kept[n][2].fits(_key(one)))
                by_home[-1 if one.cause or not is_wrong else next(fit, -1)].append(one)
        if rest := by_home.pop(-1, []):
            rest_keys = set(map(_key, rest))
            kept.append((rest, rest_keys, condition(rest_keys, passed, rest[0].cause, failed)))
        for n, joining in by_home.items():
            kept[n][0].extend(joining)
    return [some for some, *_ in kept]


# -- what separates failed from passed problems --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Condition:
    """Features of problems that hold together, with what they cover; without features it holds for nothing."""

    features: tuple[str, ...] = ()
    covered: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def text(self) -> str:
        """``K % 8 > 1: 50 of 51 failures, 3 of 165 passes``."""
        hit, failed, held, passed = self.covered
        words = " and ".join(self.features)
        return words and f"{words}: {hit} of {plural(failed, 'failure')}, {held} of {plural(passed, 'pass', 'passes')}"

    def fits(self, key: _Key) -> bool:
        """Whether the condition holds for a problem."""
        return bool(self.features) and set(self.features) <= _features(key)


def condition(
    failed: Iterable[_Key], passed: Sequence[_Key], cause: str = "", others: Sequence[_Key] = ()
) -> Condition:
    """The simplest predicate over the facts of a problem that separates the failed problems from the passed ones.

    Of several that separate as well one that the cause names wins: K for a K tail, ``bias`` for a missing bias; and
    then the one that holds for most of the ``others``, failures that may look different.
    """
    failed = sorted(failed)
    if min(len(failed), len(passed)) < _EVIDENCE:
        return Condition()
    hits, held, beside = _masks(failed), _masks(passed), _masks(others)

    def gain(features: tuple[str, ...]) -> float:
        return _share(hits, features, len(failed)) - _share(held, features, len(passed))

    common = [one for one in hits if hits[one].bit_count() >= _COVERED * len(failed)]
    if not common:
        return Condition()

    def ranked(one: str) -> tuple[object, ...]:
        numbers = [int(number) for number in re.findall(r"\d+", one)]  # K % 8 > 0 before K % 64 > 0, which it implies
        words = one.split()
        return words[0] not in cause.split(), len(words), -beside.get(one, 0).bit_count(), numbers, one

    rank = {one: ranked(one) for one in common}
    best: tuple[str, ...] = min(((one,) for one in common), key=lambda some: (-round(gain(some), 2), rank[some[0]]))
    pairs = [(a, b) for a in common for b in common if rank[a] < rank[b]]
    if pairs and _share(held, best, len(passed)) > _SECOND:
        two = min(pairs, key=lambda some: (-round(gain(some), 2), rank[some[0]], rank[some[1]]))
        best = two if gain(two) > gain(best) + _SECOND else best
    hit, kept = (round(_share(masks, best, n) * n) for masks, n in ((hits, len(failed)), (held, len(passed))))
    is_good = hit >= _COVERED * len(failed) and kept <= min(_PASSES * len(passed), hit)
    return Condition(best, (hit, len(failed), kept, len(passed))) if is_good else Condition()


def _masks(keys: Sequence[_Key]) -> dict[str, int]:
    """For each feature the problems that have it, as bits."""
    found: dict[str, int] = defaultdict(int)
    for place, key in enumerate(keys):
        for feature in _features(key):
            found[feature] |= 1 << place
    return found


def _share(masks: Mapping[str, int], features: Iterable[str], count: int) -> float:
    """Of that many problems the share that has all the features."""
    bits = (1 << count) - 1
    for feature in features:
        bits &= masks.get(feature, 0)
    return bits.bit_count() / count


@functools.cache
def _features(key: _Key) -> frozenset[str]:
    """What is true of a problem and its candidate, each in words."""
    line, candidate = key
    found = {f"candidate {candidate}"} if candidate else set()
    try:
        problem = Problem.parse(line)
    except ProblemError:
        return frozenset(found)
    shape = problem.shape
    for name, size in (("M", shape.m), ("N", shape.n), ("K", shape.k)):
        found |= {f"{name} = {size}"} if size <= 1 else set()
        for step in (2, 4, 8, 16, 32, 64):
            rest = size % step
            found.add(f"{name} % {step} {'> 0' if rest else '= 0'}")
            found |= {f"{name} % {step} > 1"} if rest > 1 else set()
        for power in range(4, 14):
            found.add(f"{name} {'>=' if size >= 1 << power else '<'} {1 << power}")
    for step in (16, 64):
        is_whole = not any(size % step for size in (shape.m, shape.n, shape.k))
        found.add(f"M, N and K % {step} = 0" if is_whole else f"M, N or K % {step} > 0")
    a, out = problem.dtypes.a.name, problem.dtypes.out.name
    found |= {problem.op.name, f"layout {problem.layout}", f"A in {a}", f"result in {out}"}
    found |= {"result in f16 or bf16"} if out in {"f16", "bf16"} else set()
    found |= {"a batch"} if shape.batch is not None else set()
    found |= {step.name for step in problem.steps} | {*problem.flags}
    return frozenset(found)


@functools.cache
def _complexity(line: str) -> tuple[object, ...]:
    """Orders problems: plain small products of f32 come first."""
    try:
        problem = Problem.parse(line)
    except ProblemError:
        return 1 << 20, line
    shape, types = problem.shape, {problem.dtypes.a.name, problem.dtypes.b.name, problem.dtypes.out.name}
    words = len(problem.steps) + 2 * len(problem.flags) + (problem.op.name != "mm") + (shape.batch is not None)
    words += max(shape.m, shape.n, shape.k) > _LARGE
    words += min(shape.m, shape.n, shape.k) <= 1  # of which no cause can be seen
    size = shape.m * shape.n * shape.k * (shape.batch or 1)
    return words, types != {"f32"}, str(problem.layout) != "nn", size, line


# -- in words --------------------------------------------------------------------------------------------------


def text(finding: Finding, rerun: str, tests: int = 0) -> str:
    """A finding in at most a dozen lines.

    Args:
        finding: what failed.
        rerun: the command that runs :attr:`Finding.simplest` again.
        tests: how many tests failed of it; 0 where that goes unsaid.
    """
    one, problems = finding.simplest, finding.problems
    reason = one.reason.text if one.reason else ""
    count = plural(len(problems), "problem") + (f" in {plural(tests, 'test')}" if tests > len(problems) else "")
    said = reason.removeprefix(f"{finding.cause}: ")  # of an exception the cause is its type
    details = textwrap.indent(textwrap.dedent(one.details.removeprefix(reason).strip("\n")), "  ", lambda _: True)
    lines = [f"{finding.title}: {one.problem} on {one.who}: {said}", *details.splitlines()]
    of_it = [other for other in finding.outcomes if other.problem == one.problem]
    kernels = ", ".join(dict.fromkeys(name for other in of_it for name in other.kernels)) or "unknown"
    distributions = named("distribution", (other.distribution or "-" for other in of_it))
    examples = ", ".join(problems[1 : 1 + _NAMED]) + (", ..." if len(problems) > 1 + _NAMED else "")
    others = dict.fromkeys(other.cause for other in finding.outcomes if other.cause not in {"", finding.cause})
    others = {} if finding.cause == _RACE else others  # what one call shows may be chance
    facts = [
        named("candidate", (other.candidate for other in of_it)),
        f"kernel {kernels}; {distributions}, seed {one.seed}",
        one.batch,
        one.sampled,
        one.case.guard and f"operands and results {one.case.guard} at guard pages",
        one.eager and f"beside eager: {one.eager.rpartition('; ')[2]}",  # no ulp apart from a wrong result
        one.known_failure and f"known failure: {one.known_failure}",
        one.reason and one.reason.remedy and f"remedy: {one.reason.remedy}",
        finding.condition and f"condition: {finding.condition}",
        others and f"other failures look like: {', '.join(others)}",
        examples and f"in all {count}; further ones: {examples}",
        f"rerun: {rerun}",
    ]
    return "\n".join([*lines, *(f"  {fact}" for fact in facts if fact)])
