"""False alarms and power of the gate on a machine: ``python tests/studies/calibrate.py SESSIONS_DIR > calibration.md``.

Many sessions of the same code (an A/A study) give the rate of false alarms of the gate; multiplying one case's readings
by 1.05 gives its power for a slow-down of 5%, by 1 + its minimum detectable effect shows whether that is true.  Runs
are sampled from the sessions without replacement, whole sessions at a time, which preserves what the cases of one
process have in common.  With ``--then DIR`` the sessions of the first folder are stored and those of DIR, of another
day, are judged.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import jinja2
import numpy as np
from scipy import stats

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Verdict
from pytest_gemm.speed.data import Judgement, Sample, Session, by_case, read_session
from pytest_gemm.speed.gate import estimates, selection
from pytest_gemm.speed.gate.design import Design
from pytest_gemm.speed.gate.estimates import Reading, Readings, Screened, Stored
from pytest_gemm.speed.gate.policy import Policy

PLANTED: Final = (0.02, 0.03, 0.05, 0.08, 0.10)
"""Slow-downs that are planted, as fractions; beside them each case's own minimum detectable effect (``None``)."""

CLASSES: Final = ("< 0.3 ms", "0.3 to 3 ms", ">= 3 ms")
"""Classes of kernels by the time of a call."""

STORED: Final = "gate, stored baseline"
AGAINST: Final = "gate, base against head"
SUITE: Final = "gate, stored, 200 cases"

_RULES: Final = (STORED, SUITE, AGAINST)  # as calibration.md.jinja explains them

_SUITE: Final = 200  # cases of a composed suite
_POWER_RUNS: Final = 100  # planting is a run for every slow-down; this many bound a share of 0.95 to within 0.05
_ROUNDS: Final = 4  # a quarter of the cases is slowed down at once, so that the median case stays what it is
_PRESENT: Final = 0.9  # share of the sessions that must have a case


@dataclasses.dataclass
class Score:
    """How the gate did, in one of its uses.

    Attributes:
        runs: A/A runs.
        red: runs with a case that was called slower.
        flagged: cases that were called slower, over all runs.
        faster: cases that were called faster, over all runs.
        undecided: cases that were left undecided, over all runs.
        judged: cases that were judged, over all runs.
        confirmed: cases that had to be confirmed, over all runs.
        found, planted: slow-downs that were found and that were planted, by size (``None``: the printed effect) and
            class of duration.
    """

    runs: int = 0
    red: int = 0
    flagged: int = 0
    faster: int = 0
    undecided: int = 0
    judged: int = 0
    confirmed: int = 0
    found: Counter[tuple[float | None, str]] = dataclasses.field(default_factory=Counter)
    planted: Counter[tuple[float | None, str]] = dataclasses.field(default_factory=Counter)

    def count(self, screened: Screened, judgements: Mapping[CaseId, Judgement]) -> None:
        """Count a run."""
        verdicts = Counter(judgement.verdict for judgement in judgements.values())
        self.runs += 1
        self.red += verdicts[Verdict.SLOWER] > 0
        self.flagged += verdicts[Verdict.SLOWER]
        self.judged += len(judgements)
        self.faster += verdicts[Verdict.FASTER]
        self.undecided += verdicts[Verdict.UNDECIDED]
        self.confirmed += len(screened.wanted)

    def plant(self, change: float | None, kind: str, *, found: bool) -> None:
        """Count a planted slow-down."""
        self.planted[change, kind] += 1
        self.found[change, kind] += found

    @property
    def red_bound(self) -> float:
        """Upper end of the one-sided 95% interval of the share of red runs (Clopper and Pearson)."""
        return float(stats.binomtest(self.red, self.runs, alternative="less").proportion_ci(0.95).high)


@dataclasses.dataclass
class CaseFacts:
    """What the sessions show of one case.

    Attributes:
        seconds: median over the sessions of their estimates.
        raw, ratio: session-to-session scale of the logarithm of the time and of the ratio (1.4826 MAD).
        weights: how often each share of the comparator was chosen.
        effects: minimum detectable effects that the gate stated, one a run, by its use.
    """

    seconds: float
    raw: float
    ratio: float | None
    weights: Counter[float] = dataclasses.field(default_factory=Counter)
    effects: dict[str, list[float]] = dataclasses.field(default_factory=lambda: defaultdict(list))

    def detectable(self, use: str) -> float | None:
        """Median of the effects in a use of the gate."""
        return statistics.median(self.effects[use]) if self.effects[use] else None

    @property
    def kind(self) -> str:
        """The class of duration."""
        return CLASSES[(self.seconds >= 0.3e-3) + (self.seconds >= 3e-3)]


@dataclasses.dataclass
class Study:
    """All that was counted.

    Attributes:
        hardware: the hardware key of the sessions.
        sessions: how many there were.
        later: sessions of another day that were judged; 0 where these are the same.
        policy: of the gate.
        stored_sessions: of a baseline.
        pairs: pairs of neighbouring sessions; too few of them leave base against head out.
        scores: by the use of the gate.
        cases: by case.
        left_out: cases that too few sessions have, with their number.
        changed: cases of which another candidate was selected on the other day, with what was and is.
    """

    hardware: str
    sessions: int
    policy: Policy
    stored_sessions: int
    pairs: int
    later: int = 0
    scores: dict[str, Score] = dataclasses.field(default_factory=lambda: defaultdict(Score))
    cases: dict[CaseId, CaseFacts] = dataclasses.field(default_factory=dict)
    left_out: dict[CaseId, int] = dataclasses.field(default_factory=dict)
    changed: dict[CaseId, str] = dataclasses.field(default_factory=dict)


def load(folder: Path) -> list[Session]:
    """The sessions in a folder (``*.jsonl``), in order of time; interrupted ones are left out.

    Raises:
        ValueError: for a folder without any, and for sessions that cannot be compared.
    """
    sessions = [read_session(path) for path in sorted(folder.rglob("*.jsonl"))]
    sessions = [s for s in sessions if s.complete and s.samples]
    machines = {(s.hardware, s.contract, sample.device) for s in sessions for sample in s.samples}
    if len(machines) != 1:
        raise ValueError(f"{folder} needs sessions of one hardware key, contract and device, and has {machines}")
    return sorted(sessions, key=lambda s: (s.date, s.index))


# -- runs of the gate, resampled: whole sessions, without replacement ---------------------------------------------


def _slowed(some: Iterable[Reading], factor: float) -> list[Reading]:
    return [dataclasses.replace(r, subject=factor * r.subject) for r in some]


_Pair: TypeAlias = tuple[dict[CaseId, list[Reading]], dict[CaseId, list[Reading]]]  # of base and head


class Sessions:
    """The sessions as tables: one reading, or none, a case and session."""

    def __init__(self, sessions: Sequence[Session], cases: Collection[CaseId]) -> None:
        self.samples: list[dict[CaseId, Sample]] = [
            {s.case: s for s in session.samples if s.is_timed and s.case in cases} for session in sessions
        ]
        self.cases = tuple(cases)
        self._are_interleaved = [session.is_interleaved for session in sessions]
        self._readings = [estimates.readings([session]) for session in sessions]

    def take(self, numbers: Iterable[int]) -> dict[CaseId, list[Reading]]:
        """The readings of these sessions by case, numbered in this order."""
        found: dict[CaseId, list[Reading]] = {case: [] for case in self.cases}
        for position, number in enumerate(numbers):
            for case, (reading,) in self._readings[number].items():
                if case in found:
                    found[case].append(dataclasses.replace(reading, session=position))
        return found

    def take_pairs(self, base: Sequence[int], head: Sequence[int]) -> _Pair:
        """The readings of the sessions of two groups, as the gate reads pairs."""
        then, now = self.take(base), self.take(head)
        for position, (one, other) in enumerate(zip(base, head, strict=True)):
            if self._are_interleaved[one] and self._are_interleaved[other]:
                estimates.compare_windows(now, self.samples[one], self.samples[other], position)
        return then, now


_Tables: TypeAlias = tuple[Sessions, Sessions | None]  # what is stored, and what is judged where that is another day


@dataclasses.dataclass(frozen=True)
class Resample:
    """One run, drawn.

    Attributes:
        design: stored baselines, or base against head.
        first, more: readings of base and head in the screen and in the confirmation, by case; no base's where
            baselines are stored.
    """

    design: Design
    first: _Pair
    more: _Pair

    def idle(self) -> tuple[Screened, dict[CaseId, Judgement]]:
        """The A/A run."""
        screened = self.design.screen(*self.first)
        return screened, self._confirm(self.more[1], screened)

    def _confirm(self, head: Mapping[CaseId, list[Reading]], screened: Screened) -> dict[CaseId, Judgement]:
        """The gate's confirmation by these readings of the head, look by look."""

        def until(cases: Iterable[CaseId], count: int) -> tuple[Readings, Readings]:
            base, now = ({case: some[case][:count] for case in cases if case in some} for some in (self.more[0], head))
            return base, now

        return self.design.confirm(screened, until)

    def finds(self, changes: Mapping[CaseId, float], idle: Screened) -> set[CaseId]:
        """Which of the cases are called slower when each of them, alone, is slower by that.

        They are screened together, because a case's screen does not depend on the others' subjects.  They are confirmed
        one by one, beside the cases that the A/A run ``idle`` confirms.
        """
        (base, first), (_, more) = self.first, self.more
        screened = self.design.screen(base, {c: _slowed(x, 1 + changes.get(c, 0.0)) for c, x in first.items()})
        found = set()
        for case, change in changes.items():
            if case not in screened.slower:
                continue
            slower = (case, *(c for c in idle.slower if c != case))
            judgements = {**idle.judgements, case: screened.judgements[case]}
            alone = dataclasses.replace(screened, slower=slower, faster=(), judgements=judgements)
            head = {c: more[c] for c in slower} | {case: _slowed(more[case], 1 + change)}
            if self._confirm(head, alone)[case].verdict is Verdict.SLOWER:
                found.add(case)
        return found


def stored_run(tables: _Tables, rng: np.random.Generator, policy: Policy, k: int) -> Resample:
    """Baseline, screen and confirmation from one order of the sessions, or the latter two from those of another day."""
    table, later = tables
    order = [int(i) for i in rng.permutation(len(table.samples))]
    after = order[k:] if later is None else [int(i) for i in rng.permutation(len(later.samples))]
    end = policy.screen_sessions
    then = table.take(order[:k])
    first, more = map((later or table).take, (after[:end], after[end : end + policy.confirm_sessions]))
    stored = {case: Stored(case, tuple(some)) for case, some in then.items()}
    return Resample(Design(policy, stored), ({}, first), ({}, more))


def pair_run(table: Sessions, rng: np.random.Generator, policy: Policy) -> Resample:
    """Screen and confirmation from neighbouring sessions, which of the two is the base being chance.

    Interleaved sessions have come in pairs, and are neighbours in order of time.
    """
    begin = int(rng.integers(2)) if len(table.samples) % 2 else 0
    pairs = [(i, i + 1) for i in range(begin, len(table.samples) - 1, 2)]
    drawn = [pairs[i][:: int(rng.choice((1, -1)))] for i in rng.permutation(len(pairs))]
    base, head = zip(*drawn, strict=True)
    end = policy.screen_pairs
    stop = end + policy.confirm_pairs
    parts = (base[:end], head[:end]), (base[end:stop], head[end:stop])
    return Resample(Design(policy), *(table.take_pairs(*numbers) for numbers in parts))


def suite_run(tables: _Tables, rng: np.random.Generator, policy: Policy, k: int) -> Resample:
    """A run of 200 cases: copies of the suite, each with an order of the sessions of its own."""
    stored: dict[CaseId, Stored] = {}
    first: dict[CaseId, list[Reading]] = {}
    more: dict[CaseId, list[Reading]] = {}
    cases = tables[0].cases
    for copy in range(-(-_SUITE // len(cases))):
        part = stored_run(tables, rng, policy, k)
        for case in cases[: _SUITE - len(stored)]:
            name = dataclasses.replace(case, candidate=f"{case.candidate}#{copy}")
            stored[name] = dataclasses.replace((part.design.stored or {})[case], case=name)
            first[name], more[name] = part.first[1][case], part.more[1][case]
    return Resample(Design(policy, stored), ({}, first), ({}, more))


# -- the study ---------------------------------------------------------------------------------------------------


def calibrate(
    sessions: Sequence[Session],
    *,
    runs: int = 300,
    seed: int = 0,
    stored: int = 12,
    later: Sequence[Session] = (),
) -> Study:
    """Draw A/A runs from the sessions, plant slow-downs, and count.

    Args:
        sessions: of one code on one machine, in order of time.
        runs: A/A runs to draw; the first 100 of them get the planted slow-downs too.
        seed: of the draws.
        stored: sessions of a baseline.
        later: sessions of another day, which are judged by what is stored of the others.  A case whose autotuner
            selected something else then is another kernel, and left out.

    Raises:
        ValueError: when there are too few sessions for one draw.
    """
    policy = Policy.for_device(sessions[0].samples[0].device)
    needed = stored + policy.screen_sessions + policy.confirm_sessions
    if later and (len(sessions) < stored or len(later) < needed - stored):
        raise ValueError(
            f"{len(sessions)} and {len(later)} sessions are too few: a run takes {stored} of the first day and "
            f"{needed - stored} of the second; measure more, or store fewer"
        )
    if not later and len(sessions) < needed:
        raise ValueError(
            f"{len(sessions)} sessions are too few: a run takes {needed} ({stored} stored, {policy.screen_sessions} to "
            f"screen, {policy.confirm_sessions} to confirm); measure more, or store fewer"
        )
    counts = _counts(sessions)
    present = [case for case, count in counts.items() if count >= _PRESENT * len(sessions)]
    changed: dict[CaseId, str] = {}
    if later:
        known, before = _counts(later), {case: some[0].selected for case, some in by_case(sessions).items()}
        changed = selection.changes(before, later)
        present = [case for case in present if case not in changed and known[case] >= _PRESENT * len(later)]
    if not present:
        raise ValueError(f"no case has an estimate in {_PRESENT:.0%} of the {len(sessions)} sessions")
    table = Sessions(sessions, present)
    tables = table, Sessions(later, present) if later else None
    pairs = len(sessions) // 2
    study = Study(sessions[0].hardware, len(sessions), policy, stored, pairs, len(later))
    study.changed = changed
    study.left_out = {case: count for case, count in counts.items() if case not in {*present, *changed}}
    study.cases = {case: _facts(table, case) for case in present}
    rng = np.random.default_rng(seed)
    for run in range(runs):
        plant = run < _POWER_RUNS
        draw = stored_run(tables, rng, policy, stored)
        screened = _gate_run(study, STORED, draw, plant=plant)
        for case, weight in screened.learnt.weights.items():
            study.cases[case].weights[weight] += 1
        study.scores[SUITE].count(*suite_run(tables, rng, policy, stored).idle())
        if pairs >= policy.screen_pairs + policy.confirm_pairs:
            _gate_run(study, AGAINST, pair_run(table, rng, policy), plant=plant)
    return study


def _counts(sessions: Iterable[Session]) -> Counter[CaseId]:
    """How many sessions have an estimate, by case."""
    return Counter(s.case for session in sessions for s in session.samples if s.is_timed)


def _facts(table: Sessions, case: CaseId) -> CaseFacts:
    def scale(values: Sequence[float]) -> float:
        return float(stats.median_abs_deviation(np.log(values), scale="normal"))

    some = [by[case] for by in table.samples if case in by]
    ratios = [s.estimate / s.comparator_estimate for s in some if s.comparator_estimate is not None]
    seconds = [s.estimate for s in some]
    ratio = scale(ratios) if len(ratios) == len(some) else None
    return CaseFacts(statistics.median(seconds), scale(seconds), ratio)


def _gate_run(study: Study, name: str, draw: Resample, *, plant: bool) -> Screened:
    score = study.scores[name]
    screened, judgements = draw.idle()
    score.count(screened, judgements)
    for case, judgement in screened.judgements.items():
        if judgement.minimum_effect is not None:
            study.cases[case].effects[name].append(judgement.minimum_effect)
    if plant:
        printed = {case: one.minimum_effect for case, one in screened.judgements.items() if one.minimum_effect}
        for change in (*PLANTED, None):
            changes = [(c, printed.get(c) if change is None else change) for c in study.cases]
            slowed = [(case, by) for case, by in changes if by is not None]
            for first in range(_ROUNDS):
                some = dict(slowed[first::_ROUNDS])
                found = draw.finds(some, screened)
                for case in some:
                    score.plant(change, study.cases[case].kind, found=case in found)
    return screened


# -- the page ----------------------------------------------------------------------------------------------------


def page(study: Study) -> str:
    """The study as Markdown."""
    scores = {name: study.scores[name] for name in _RULES if name in study.scores}
    runs = next(iter(scores.values())).runs
    environment = jinja2.Environment(  # Markdown
        loader=jinja2.FileSystemLoader(Path(__file__).parent), lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("calibration.md.jinja").render(
        study=study,
        scores=scores,
        runs=runs,
        planted=(*PLANTED, None),
        planted_runs=min(runs, _POWER_RUNS),
        classes=CLASSES,
        kinds=Counter(facts.kind for facts in study.cases.values()),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the study of the sessions; wrong input ends with one message."""
    parser = argparse.ArgumentParser(description="Estimate false alarms and power of the speed gate from sessions.")
    parser.add_argument("sessions", type=Path, help="folder of session files (*.jsonl), all of the same code")
    parser.add_argument("--runs", type=int, default=300, help="A/A runs to sample (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (default: 0)")
    parser.add_argument("--stored", type=int, default=12, help="sessions of a baseline (default: 12)")
    parser.add_argument("--then", type=Path, metavar="DIR", help="sessions of another day, judged by those stored")
    given = parser.parse_args(arguments)
    try:
        sessions, later = load(given.sessions), load(given.then) if given.then else []
        kinds = {(s.hardware, s.contract) for s in (*sessions, *later)}
        if len(kinds) != 1:
            raise ValueError(f"both folders need sessions of one hardware key and contract, and have {kinds}")
        study = calibrate(sessions, runs=given.runs, seed=given.seed, stored=given.stored, later=later)
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.write(page(study))


if __name__ == "__main__":
    main()
