"""``pytest-gemm bisect``: the first of several environments that gives a wrong result, or is slower than the first one.

A bisect follows one failure.  So both ends are judged first, and what is neither good nor this failure is skipped.  At
the border both environments are judged again: a result that does not repeat is no answer.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_gemm.problem.problem import Problem
from pytest_gemm.text import show
from pytest_gemm.tools.trial import TEST, Failure, Trial, Trials, Tried, Word

Judge = Callable[[int], Trial]
"""Judges the environment of a number, from 0."""


class Refused(Exception):
    """There is no answer; the message says why."""


@dataclasses.dataclass
class Bisection:
    """The search.

    Attributes:
        labels: of the environments, the good one first.
        judge: judges one of them; the first that it is asked for, the last one, has the failure to follow.
        write: takes a line of the report.
        steps: what was judged, in its order: phase, number of the environment, trial.
    """

    labels: Sequence[str]
    judge: Judge
    write: Callable[[str], object]
    steps: list[tuple[str, int, Trial]] = dataclasses.field(default_factory=list)

    def run(self, repeat: int) -> tuple[int, int]:
        """The last good environment and the first bad one; those between them were skipped.

        Raises:
            Refused: when the ends do not differ, or the border does not repeat.
        """
        self._check_ends()
        good, bad = self._search()
        self._repeat(good, bad, repeat)
        return good, bad

    def name(self, number: int) -> str:
        """An environment for people: its number from 1, and its label."""
        return f"{number + 1} ({self.labels[number]})"

    def _judge(self, phase: str, number: int, left: str = "") -> Trial:
        trial = self.judge(number)
        self.steps.append((phase, number, trial))
        self.write(f"{phase}{left}: {self.name(number)} is {said(trial)}")
        return trial

    def _check_ends(self) -> None:
        last = len(self.labels) - 1
        bad, good = self._judge("end", last), self._judge("end", 0)
        first, final = self.name(0), self.name(last)
        for name, trial in ((final, bad), (first, good)):
            if trial.word is Word.SKIP and trial.failure is None:
                raise Refused(f"{name} cannot be judged, and the first and the last have to be")
        if (good.word, bad.word) == (Word.GOOD, Word.BAD):
            return
        if good.word is bad.word is Word.GOOD:
            raise Refused(f"both ends are good: name an environment last that is bad, not {final}")
        if good.word is bad.word is Word.BAD:
            raise Refused(f"both ends fail in the same way: name an environment first that is good, not {first}")
        if bad.word is Word.GOOD:
            raise Refused(f"{first} fails and {final} does not: give them in the other order")
        if bad.word is Word.SKIP:
            raise Refused(f"{final} does not have the failure that is followed")
        raise Refused(f"{first} fails as well, in another way: name an environment first that is good")

    def _search(self) -> tuple[int, int]:
        good, bad, skipped, step = 0, len(self.labels) - 1, set[int](), 0
        while left := [i for i in range(good + 1, bad) if i not in skipped]:
            step += 1
            _, middle = min((abs(2 * i - good - bad), i) for i in left)
            trial = self._judge(f"step {step}", middle, f" ({len(left)} left)")
            if trial.word is Word.GOOD:
                good = middle
            elif trial.word is Word.BAD:
                bad = middle
            else:
                skipped.add(middle)
        return good, bad

    def _repeat(self, good: int, bad: int, repeat: int) -> None:
        wanted = {good: Word.GOOD, bad: Word.BAD}
        trials = [(i, self._judge("again", i)) for _ in range(repeat) for i in wanted]
        for number, word in wanted.items():
            words = [trial.word for i, trial in trials if i == number]
            if (count := words.count(word)) < len(words):
                often = f"{count} of {len(words)} times" if count else f"none of {len(words)} times"
                raise Refused(f"{self.name(number)} was {word}, and {often} when it was judged again: it is flaky")


def said(trial: Trial) -> str:
    """A trial in one line."""
    word = "skipped" if trial.word is Word.SKIP else str(trial.word)
    return f"{word} ({trial.text})" if trial.text else word


# -- the command ------------------------------------------------------------------------------------------------


def run(given: argparse.Namespace) -> int:
    """Search, or judge one environment; returns 1 where there is no answer, and that of :class:`Word` for one."""
    options = [f"--gemm-backends={given.backend}", f"--gemm-problem={Problem.parse(given.problem).line}"]
    options += [f"--gemm-candidates={given.candidate}"] if given.candidate else []
    options += [*(f"--gemm-set={text}" for text in given.set), *given.pytest]
    listed = _checked(given)
    with tempfile.TemporaryDirectory(prefix="pytest-gemm-") as name:
        scratch = Path(name)
        tried = [Tried(label, text, scratch) for label, text in listed]
        judge = _Judge(given, Trials(options, scratch), tried)
        if given.one:
            trial = judge(len(tried) - 1)
            show("\n".join(filter(None, (f"{tried[-1].label} is {said(trial)}", trial.details))) + "\n")
            return trial.word.value
        return _report(given, judge, tried)


class _Judge:
    """Judges the environments of a command.

    Attributes:
        followed: the failure that is followed; ``None`` before it is known, and of a slow-down.
    """

    def __init__(self, given: argparse.Namespace, trials: Trials, tried: Sequence[Tried]) -> None:
        self._given = given
        self._trials = trials
        self._tried = tried
        self.followed = Failure.parse(given.failure) if given.failure else None

    def __call__(self, number: int) -> Trial:
        percent, tried = self._given.slower_than, self._tried
        if percent is not None:
            if number == 0:
                return Trial(Word.GOOD, "the others are compared with it")
            return self._trials.slower(tried[number], tried[0], percent)
        trial = self._trials.wrong(tried[number], self._given.test or TEST, self.followed)
        self.followed = self.followed or trial.failure
        return trial


def _checked(given: argparse.Namespace) -> list[tuple[str, str]]:
    """The environments with their labels.

    Raises:
        ValueError: for arguments that are wrong, or contradict each other.
    """
    is_timed = given.slower_than is not None
    if is_timed and given.slower_than <= 0:
        raise ValueError(f"--slower-than={given.slower_than:g}: give a percentage above 0")
    for option in ("failure", "test"):
        if is_timed and getattr(given, option):
            raise ValueError(f"--{option} is about wrong results: leave it out with --slower-than")
    if given.failure:
        Failure.parse(given.failure)
    if given.repeat < 1:
        raise ValueError(f"--repeat={given.repeat}: the border is judged again once at least")
    found = [*(_listed(given.environments) if given.environments else ()), *((text, text) for text in given.env)]
    for _, text in found:
        if not Path(text).exists() and shutil.which(text) is None:
            raise ValueError(f"{text}: there is no such interpreter, virtual environment, wheel or folder")
    least = 1 if given.one and not is_timed else 2
    if len(found) < least or (given.one and len(found) > least):
        one = "two environments, the good one first" if is_timed else "one environment"
        wanted = f"--one takes {one}" if given.one else "give two at least, the good one first"
        raise ValueError(f"{len(found)} environment(s) are given; {wanted}")
    return found


def _listed(path: Path) -> list[tuple[str, str]]:
    """The environments of a file, with their labels.

    Raises:
        ValueError: for a line of other than one or two words.
    """
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
        if len(words) > 2:
            raise ValueError(f"{path}:{number}: give ENV, or LABEL ENV; a path with blanks needs quotes")
        if words:
            found.append((words[0], words[-1]))
    return found


def _report(given: argparse.Namespace, judge: _Judge, tried: Sequence[Tried]) -> int:
    """Search and report, as text and as JSON."""
    search = Bisection([one.label for one in tried], judge, _tell)
    facts: dict[str, Any] = {}
    try:
        good, bad = search.run(given.repeat)
    except Refused as error:
        facts["refused"] = str(error)
        lines = [f"no answer: {error}"]
    else:
        versions = [tried[i].versions() for i in (good, bad)]
        facts |= {"last_good": good + 1, "first_bad": bad + 1, "versions": versions}
        names = " or ".join(map(search.name, range(good + 1, bad + 1)))
        lines = [f"the first bad environment is {names}{', of which all but the last were skipped' * (bad > good + 1)}"]
        lines += [f"the last good one is {search.name(good)}", *differing(*versions)]
        lines.append(f"to reproduce: {_reproduce(given, judge.followed, tried[0].text, tried[bad].text)}")
    show("\n".join(lines) + "\n")
    if given.json:
        facts |= {
            "problem": given.problem,
            "backend": given.backend,
            "failure": str(judge.followed or ""),
            "environments": list(search.labels),
            "steps": [
                {"phase": phase, "environment": number + 1, "word": str(trial.word), "text": trial.text}
                for phase, number, trial in search.steps
            ],
        }
        given.json.write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return int("refused" in facts)


def _tell(line: str) -> None:
    show(f"{line}\n")
    sys.stdout.flush()  # the next line may take minutes


def differing(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """What differs between two environments, a line for each name."""
    changed = {name: (before.get(name, "-"), after.get(name, "-")) for name in sorted(before.keys() | after.keys())}
    lines = [f"  {name}: {old} -> {new}" for name, (old, new) in changed.items() if old != new]
    return ["what differs between them:", *(lines or ["  no version that is known"])]


def _reproduce(given: argparse.Namespace, followed: Failure | None, good: str, bad: str) -> str:
    """The command that judges the first bad environment alone."""
    words = ["pytest-gemm", "bisect", "--one", f"--problem={given.problem}", f"--backend={given.backend}"]
    percent = f"{given.slower_than:g}" if given.slower_than else ""
    single = {"candidate": given.candidate, "slower-than": percent, "test": given.test, "failure": followed}
    words += [f"--{name}={value}" for name, value in single.items() if value]
    words += [f"--{name}={text}" for name in ("set", "pytest") for text in getattr(given, name)]
    return shlex.join([*words, *([good] if percent else []), bad])
