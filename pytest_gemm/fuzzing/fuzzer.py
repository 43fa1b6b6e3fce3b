"""Fuzzing: draw trials until the time is up, shrink what fails, remember it, and go on behind it.

Hypothesis draws (``strategies``) and shrinks.  Each draw is a
search of its own, so that there is a next one behind a failure, which counts what is known by now and looks for
something else.  A *defect* is told
from others by op, dtypes, status and reason code: what fails alike in another shape is counted, not shrunk again.

Shrunk trials are kept in the database of the user's Hypothesis profile (``.hypothesis/examples`` by default), as text
and not as Hypothesis' own choices, so that they outlive a change of the strategies.  The next run begins with them, and
forgets those that pass.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from hypothesis import HealthCheck, Phase, Verbosity, given, reject, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from pytest_gemm.api.protocols import Backend
from pytest_gemm.failures import text as text_module
from pytest_gemm.fuzzing.server import PROPERTY
from pytest_gemm.fuzzing.strategies import Trial, forms, size_of, trials
from pytest_gemm.outcome import Outcome, Status

if TYPE_CHECKING:
    from hypothesis.database import ExampleDatabase


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
        before: whether an earlier run had found it.
    """

    outcome: Outcome
    trial: Trial
    drawn: str
    shrinks: int = 0
    complete: bool = True
    again: int = 0
    before: bool = False


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
        reported: properties that do not hold and need not, by their sentence.
        known: outcomes by the entry of the ledger that explains them.
        refused: outcomes that were refused late, by reason.
        mistrusted: problems whose data could tell nothing.
        defects: what is new.
        compile_seconds: of all compiles, shrinking included.
        mended: trials of earlier runs that pass now.
    """

    backend: str
    device: str
    seconds: float = 0.0
    trials: int = 0
    problems: set[str] = dataclasses.field(default_factory=set)
    cases: Counter[Status] = dataclasses.field(default_factory=Counter)
    reported: Counter[str] = dataclasses.field(default_factory=Counter)
    known: Counter[str] = dataclasses.field(default_factory=Counter)
    refused: Counter[str] = dataclasses.field(default_factory=Counter)
    mistrusted: list[str] = dataclasses.field(default_factory=list)
    defects: list[Defect] = dataclasses.field(default_factory=list)
    compile_seconds: float = 0.0
    mended: list[str] = dataclasses.field(default_factory=list)


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
class _Shrink:
    """A failure on its way to its smallest form.

    Attributes:
        key: of the failure that was drawn; its status and reason code stay, op and dtypes may become smaller.
        until: when its time is up.
        drawn: the first problem of the trial that was drawn.
        found: every trial that fails like that, with its outcome.
        judged: how many were judged.
    """

    key: Key
    until: float
    drawn: str
    found: dict[Trial, Outcome] = dataclasses.field(default_factory=dict)
    judged: int = 0


class Fuzzer:
    """Fuzzes one backend.

    Args:
        backend: whose kernels are judged.
        device: where it computes; for the report.
        judge: gives the outcomes of a trial, as the ledger leaves them.
        seed_: the same seed draws the same trials.
        ops: names of ops to draw from; empty: all.
        store: where shrunk trials are kept, ``None``: nowhere.
        tell: is called with each trial and each defect.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        backend: Backend,
        device: str,
        judge: Callable[[Trial], Sequence[Outcome]],
        *,
        seed_: int = 0,
        ops: tuple[str, ...] = (),
        store: ExampleDatabase | None = None,
        tell: Callable[[Findings, Defect | None], object] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.findings = Findings(backend.name, device)
        self._backend = backend
        self._judge_trial = judge
        self._seed = seed_
        self._ops = ops
        self._store = store
        self._tell = tell
        self._clock = clock
        self._until = 0.0
        self._shrink_seconds = 0.0
        self._covered: dict[Key, Defect] = {}
        self._drawn = _random(trials(backend, ops=ops))
        self._memory: dict[Trial, list[Outcome]] = {}
        self._shrink: _Shrink | None = None

    def run(self, seconds: float) -> Findings:
        """Draw and judge until ``seconds`` have passed: one trial at least, and the one at hand to its end."""
        started = self._clock()
        self._until = started + seconds
        self._shrink_seconds = max(min(_SHRINK_SECONDS, seconds), _SHRINK_SHARE * seconds)
        self._replay()
        number = 0
        claims = bool(forms(self._backend, self._ops))
        while claims and (not self.findings.trials or self._clock() < self._until):
            self._search(number)
            number += 1
        self.findings.seconds = self._clock() - started
        return self.findings

    # -- what earlier runs found -------------------------------------------------------------------

    @property
    def _place(self) -> bytes:
        return f"pytest-gemm/{self._backend.name}/{self.findings.device}".encode()

    def _replay(self) -> None:
        """Judge what is kept: it is still wrong, or is forgotten."""
        if self._store is None:
            return
        for kept in sorted(self._store.fetch(self._place)):
            if self._clock() >= self._until:
                return
            try:
                trial = Trial.from_text(kept.decode())
            except ValueError:  # of another version of the grammar
                self._store.delete(self._place, kept)
                continue
            if self._ops and trial.problems[0].op.name not in self._ops:
                continue
            outcomes = self._judged(trial, count=True)
            failed = [o for o in outcomes if o.status in _FAILED]
            if failed:
                self._keep(Defect(failed[0], trial, trial.problems[0].line, before=True), map(_key, failed))
            elif all(o.status in {Status.PASSED, Status.PRUNED, Status.UNSUPPORTED} for o in outcomes):
                self._store.delete(self._place, kept)
                self.findings.mended.append(trial.problems[0].line)

    # -- searching ---------------------------------------------------------------------------------

    def _search(self, number: int) -> None:
        """Draw one trial, judge it, and shrink it if it fails in a new way."""
        self._shrink = None

        # One valid example a call: Hypothesis follows each random example with variations of it otherwise, and every
        # one of them would be a compile.  And so a draw depends on its number alone, not on what came of others.
        @seed(random.Random(f"{self._seed} {number}").getrandbits(64))
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
        except (_FailedError, Unsatisfiable):  # the latter: a backend that claims next to nothing
            pass
        if (shrink := self._shrink) is None:
            return
        smallest = min(shrink.found, key=size_of)
        defect = Defect(shrink.found[smallest], smallest, shrink.drawn, shrink.judged, complete)
        self._keep(defect, [shrink.key, *map(_key, shrink.found.values())] if complete else [shrink.key])
        self._shrink = None

    def _fails(self, trial: Trial) -> bool:
        """Whether what was drawn, or what Hypothesis made smaller, is what it is to look for."""
        if self._shrink is not None:
            return self._still_fails(self._shrink, trial)
        if trial in self._memory:
            return False
        outcomes = self._judged(trial, count=True)
        for outcome in outcomes:
            if outcome.status not in _FAILED:
                continue
            key = _key(outcome)
            if key in self._covered:
                self._covered[key].again += 1
                continue
            until = self._clock() + self._shrink_seconds
            self._shrink = _Shrink(key, until, trial.problems[0].line, {trial: outcome})
            return True
        return False

    def _still_fails(self, shrink: _Shrink, trial: Trial) -> bool:
        """Whether a trial fails like the one that is shrunk, and not like a defect that is known."""
        known = trial in self._memory
        if not known:
            if self._clock() >= shrink.until:
                raise _TimeIsUp
            shrink.judged += 1
        for outcome in self._judged(trial, count=False):
            key = _key(outcome)
            if outcome.status in _FAILED and key[2:] == shrink.key[2:] and key not in self._covered:
                shrink.found.setdefault(trial, outcome)
                return True
        return False

    # -- keeping -----------------------------------------------------------------------------------

    def _judged(self, trial: Trial, *, count: bool) -> list[Outcome]:
        """The outcomes of a trial, judged once: what a flaky kernel does the second time is not asked."""
        if trial in self._memory:
            return self._memory[trial]
        outcomes = list(self._judge_trial(trial))
        # Only what failed is asked for again.
        self._memory[trial] = [outcome for outcome in outcomes if outcome.status in _FAILED]
        self.findings.compile_seconds += sum(outcome.seconds.compile for outcome in outcomes)
        if count:
            self._count(trial, outcomes)
            self._tell(self.findings, None)
        return outcomes

    def _count(self, trial: Trial, outcomes: Sequence[Outcome]) -> None:
        found = self.findings
        found.trials += 1
        found.problems.update(problem.line for problem in trial.problems)
        for outcome in outcomes:
            found.cases[outcome.status] += 1
            if outcome.known_failure:
                found.known[outcome.known_failure] += 1
            elif outcome.status is Status.UNSUPPORTED and outcome.reason is not None:
                found.refused[outcome.reason.text] += 1
            elif outcome.status is Status.MISTRUSTED and outcome.problem not in found.mistrusted:
                found.mistrusted.append(f"{outcome.problem}, distribution {outcome.distribution}, seed {outcome.seed}")
            elif outcome.test == PROPERTY and outcome.status is Status.PASSED and outcome.details:
                found.reported[outcome.details.partition(":")[0]] += 1

    def _keep(self, defect: Defect, keys: Iterable[Key]) -> None:
        """A defect is done with: tell it, remember it, and do not look for it again."""
        for key in keys:
            self._covered.setdefault(key, defect)
        self.findings.defects.append(defect)
        if self._store is not None:
            self._store.save(self._place, defect.trial.to_text().encode())
        self._tell(self.findings, defect)


def database() -> ExampleDatabase | None:
    """Where the user's Hypothesis keeps examples; ``None`` where it keeps none, as in its profile for CI."""
    found: ExampleDatabase | None = settings().database
    return found


# -- what is said ----------------------------------------------------------------------------------


def failure(defect: Defect, rerun: Callable[[Defect], text_module.Rerun]) -> str:
    """A defect as the report of a failed test has it, with how it was found."""
    line = ",".join(problem.line for problem in defect.trial.problems)
    case = dataclasses.replace(defect.outcome.case, problem=line)
    told = text_module.failure(dataclasses.replace(defect.outcome, case=case), rerun(defect))
    how = f"drawn as {defect.drawn}, made smaller in {defect.shrinks} trial(s)"
    if defect.before:
        how = "found by an earlier run, and kept"
    elif not defect.complete:
        how += ", not to the end: its time was up"
    if defect.again:
        how += f"; {defect.again} more failed alike"
    head, *rest = told.splitlines()
    return "\n".join([head, *rest[:-1], f"  {how}", rest[-1]])


def found_line(defect: Defect) -> str:
    """A defect in one line, for the moment when it is found."""
    outcome = defect.outcome
    reason = outcome.reason.text if outcome.reason else ""
    return f"{outcome.problem} on {outcome.backend}: {outcome.status}: {reason}"


def summary(found: Findings) -> list[str]:
    """What came of one backend, in the lines of the terminal's summary."""
    cases, compiles = sum(found.cases.values()), f"{found.compile_seconds:.0f} s were compiles"
    before = sum(defect.before for defect in found.defects)
    drawn = f"{len(found.problems)} problems in {found.trials} trials, {cases} cases"
    new = f"{len(found.defects)} defects" + (f" ({before} known from earlier runs)" if before else "")
    counts = (
        f"{found.cases[Status.PASSED]} passed",
        f"{found.cases[Status.UNSUPPORTED]} unsupported",
        f"{sum(found.known.values())} known failures",
        f"{len(found.mistrusted)} could not be told",
        new,
    )
    lines = [
        f"{found.backend} on {found.device}: {drawn} judged in {found.seconds:.0f} s, of which {compiles}",
        f"  {', '.join(counts)}",
    ]
    lines += [f"  defect {found_line(defect)}; {defect.again} more failed alike" for defect in found.defects]
    lines += [f"  known failure {name}: {count}" for name, count in found.known.most_common()]
    lines += [f"  not supported, {count}: {text}" for text, count in found.refused.most_common(_NAMED)]
    lines += [f"  could tell nothing: {line}" for line in found.mistrusted[:_NAMED]]
    lines += [f"  not so in {count}, which is no error: {text}" for text, count in found.reported.most_common()]
    lines += [f"  passes now, and is forgotten: {line}" for line in found.mended]
    if not found.trials:
        lines.append("  nothing was drawn: it claims nothing that can be")
    return lines
