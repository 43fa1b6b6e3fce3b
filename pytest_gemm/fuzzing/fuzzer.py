"""Fuzzing: draw trials until the time is up, shrink what fails, and go on with what has not failed yet.

Hypothesis draws (``strategies``) and shrinks.  Each draw is a search of its own: a search after a failure counts what
is known by now and looks for something else.  A *defect* is told from others by op, dtypes, status and reason code.
What fails alike in another shape is counted, not shrunk again.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import jinja2
from hypothesis import HealthCheck, Phase, Verbosity, given, reject, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from pytest_gemm.api.protocols import Backend
from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.failures import findings
from pytest_gemm.fuzzing.strategies import Trial, forms, size_of, trials

# The tests that run a trial again, and under whose names the ledger knows its cases.
PRODUCT: Final = "test_product"

# Op, dtypes, status, reason code.
Key = tuple[str, str, str, str]

# How long one defect is shrunk: a share of the time that the backend has, and so many seconds if it has them.
_SHRINK_SHARE: Final = 0.15
_SHRINK_SECONDS: Final = 20.0
# Problems that are named where nothing could be told.
_NAMED: Final = 3

_FAILED: Final = frozenset(status for status in Status if status.is_failure) - {Status.MISTRUSTED}


@dataclasses.dataclass
class Defect:
    """Something new that is wrong, in its smallest form.

    Attributes:
        outcome: how the smallest trial ends.
        trial: the smallest one found.
        drawn: the problem line that was drawn when it was found.
        shrinks: how many trials were judged to make it smaller.
        complete: whether the shrinking came to its own end, not to that of its time.
        again: how many more trials failed alike.
        keys: of what was drawn, and of everything that was found on the way to the smallest form.
    """

    outcome: Outcome
    trial: Trial
    drawn: str
    shrinks: int = 0
    complete: bool = True
    again: int = 0
    keys: list[Key] = dataclasses.field(default_factory=list)

    @property
    def whole(self) -> Outcome:
        """The outcome with all problems of its trial, as they are run again."""
        line = ",".join(problem.line for problem in self.trial.problems)
        return dataclasses.replace(self.outcome, case=dataclasses.replace(self.outcome.case, problem=line))


@dataclasses.dataclass
class Findings:
    """What came of fuzzing one backend.

    Attributes:
        backend: its name.
        device: where it computed.
        seconds: how long it took, wall clock.
        trials: how many were drawn and judged; shrinking is not counted.
        problems: lines of the problems judged.
        cases: outcomes, by status; shrinking is not counted.
        known: outcomes by the entry of the ledger that explains them.
        mistrusted: problems whose data could tell nothing.
        defects: what is new.
    """

    backend: str
    device: str
    seconds: float = 0.0
    trials: int = 0
    problems: set[str] = dataclasses.field(default_factory=set)
    cases: Counter[Status] = dataclasses.field(default_factory=Counter)
    known: Counter[str] = dataclasses.field(default_factory=Counter)
    mistrusted: list[str] = dataclasses.field(default_factory=list)
    defects: list[Defect] = dataclasses.field(default_factory=list)


@st.composite
def _random(draw: st.DrawFn, strategy: st.SearchStrategy[Trial]) -> Trial:
    """The strategy without its smallest example, with which Hypothesis begins and would be content."""
    if draw(st.integers(0, 2**32)) == 0:
        reject()
    return draw(strategy)


class _TimeIsUp(BaseException):
    """Ends a search from inside a trial; no exception that Hypothesis would take for a failure."""


class _FailedError(Exception):
    """A trial that is to be shrunk."""


def _key(outcome: Outcome) -> Key:
    op, dtypes, *_ = outcome.problem.split(":")
    return op, dtypes, str(outcome.status), outcome.reason.code if outcome.reason else ""


@dataclasses.dataclass
class Fuzzer:
    """Fuzzes one backend.

    Attributes:
        backend: whose kernels are judged.
        device: where it computes; for the report.
        judge: gives the outcomes of a trial, as the ledger leaves them.
        seed: the same seed draws the same trials.
        ops: names of ops to draw from; empty: all.
        tell: is called with each trial and each defect.
        clock: seconds, never going back.
    """

    backend: Backend
    device: str
    judge: Callable[[Trial], Sequence[Outcome]]
    seed: int = 0
    ops: tuple[str, ...] = ()
    tell: Callable[[Findings, Defect | None], object] = lambda *_: None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.findings = Findings(self.backend.name, self.device)
        self._shrink_seconds = self._shrink_until = 0.0
        self._covered: dict[Key, Defect] = {}
        self._drawn = _random(trials(self.backend, ops=self.ops))
        self._memory: dict[Trial, list[Outcome]] = {}
        self._shrinking: Defect | None = None

    def run(self, seconds: float) -> Findings:
        """Draw and judge until ``seconds`` have passed: one trial at least, and the one at hand to its end."""
        started = self.clock()
        self._shrink_seconds = max(min(_SHRINK_SECONDS, seconds), _SHRINK_SHARE * seconds)
        number = 0
        can_draw = bool(forms(self.backend, self.ops))
        while can_draw and (not self.findings.trials or self.clock() < started + seconds):
            self._search(number)
            number += 1
        self.findings.seconds = self.clock() - started
        return self.findings

    def _search(self, number: int) -> None:
        """Draw one trial, judge it, and shrink it if it fails in a new way."""
        self._shrinking = None

        # One valid example a call: Hypothesis follows each random example with variations of it otherwise, and every
        # one of them would be a compile.  And so a draw depends on its number alone, not on what came of others.
        @seed(random.Random(f"{self.seed} {number}").getrandbits(64))
        @settings(
            max_examples=1,
            database=None,
            deadline=None,
            derandomize=False,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
            print_blob=False,
            report_multiple_bugs=False,
        )
        @given(self._drawn)
        def search(trial: Trial) -> None:
            if self._fails(trial):
                raise _FailedError

        complete = True
        try:
            search()
        except _TimeIsUp:
            complete = False
        except (_FailedError, Unsatisfiable):  # the latter: a backend that supports next to nothing
            pass
        if (defect := self._shrinking) is not None:
            self._shrinking = None
            defect.complete, defect.keys = complete, defect.keys if complete else defect.keys[:1]
            self._keep(defect)

    def _fails(self, trial: Trial) -> bool:
        """Whether what was drawn fails in a new way, or what Hypothesis made smaller fails like what was drawn."""
        if self._shrinking is not None:
            return self._still_fails(self._shrinking, trial)
        if trial in self._memory:
            return False
        for outcome in self._judged(trial, is_drawn=True):
            key = _key(outcome)
            if outcome.status in _FAILED and key not in self._covered:
                self._shrink_until = self.clock() + self._shrink_seconds
                self._shrinking = Defect(outcome, trial, trial.problems[0].line, keys=[key])
                return True
            if outcome.status in _FAILED:
                self._covered[key].again += 1
        return False

    def _still_fails(self, defect: Defect, trial: Trial) -> bool:
        """Whether a trial fails like the defect, and not like another one that is known."""
        if trial not in self._memory:
            if self.clock() >= self._shrink_until:
                raise _TimeIsUp
            defect.shrinks += 1
        for outcome in self._judged(trial, is_drawn=False):
            key = _key(outcome)
            # Op and dtypes may become smaller.
            if outcome.status in _FAILED and key[2:] == defect.keys[0][2:] and key not in self._covered:
                defect.keys.append(key)
                if size_of(trial) < size_of(defect.trial):
                    defect.trial, defect.outcome = trial, outcome
                return True
        return False

    def _judged(self, trial: Trial, *, is_drawn: bool) -> list[Outcome]:
        """The outcomes of a trial, judged once: what a flaky kernel does the second time is not asked."""
        if trial in self._memory:
            return self._memory[trial]
        outcomes = list(self.judge(trial))
        # Only what failed is asked for again.
        self._memory[trial] = [outcome for outcome in outcomes if outcome.status in _FAILED]
        if is_drawn:
            self._count(trial, outcomes)
            self.tell(self.findings, None)
        return outcomes

    def _count(self, trial: Trial, outcomes: Sequence[Outcome]) -> None:
        found = self.findings
        found.trials += 1
        found.problems.update(problem.line for problem in trial.problems)
        for outcome in outcomes:
            found.cases[outcome.status] += 1
            if outcome.known_failure:
                found.known[outcome.known_failure] += 1
            elif outcome.status is Status.MISTRUSTED and outcome.problem not in found.mistrusted:
                found.mistrusted.append(f"{outcome.problem}, distribution {outcome.distribution}, seed {outcome.seed}")

    def _keep(self, defect: Defect) -> None:
        """A defect is done with: tell it, and do not look for it again."""
        self._covered = {**dict.fromkeys(defect.keys, defect), **self._covered}
        self.findings.defects.append(defect)
        self.tell(self.findings, defect)


# -- texts -----------------------------------------------------------------------------------------


def failure(defect: Defect, rerun: str) -> str:
    """A defect as the report of a failed test has it, with how it was found."""
    found = findings.Finding([defect.whole], defect.outcome.cause)
    *lines, command = findings.text(found, rerun).splitlines()
    how = f"drawn as {defect.drawn}, made smaller in {defect.shrinks} trial(s)"
    if not defect.complete:
        how += ", not to the end: its time was up"
    if defect.again:
        how += f"; {defect.again} more failed alike"
    return "\n".join([*lines, f"  {how}", command])


def found_line(defect: Defect) -> str:
    """A defect in one line, for the moment when it is found."""
    outcome = defect.outcome
    reason = outcome.reason.text if outcome.reason else ""
    return f"{outcome.problem} on {outcome.backend}: {outcome.status}: {reason}"


def summary(found: Findings) -> list[str]:
    """What came of one backend, in the lines of the terminal's summary."""
    text = Path(__file__).with_name("summary.txt.jinja").read_text(encoding="utf-8")
    template = jinja2.Template(text, trim_blocks=True, lstrip_blocks=True)
    lines: str = template.render(vars(found), status=Status, named=_NAMED, line=found_line)
    return lines.splitlines()
