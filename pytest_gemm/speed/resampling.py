"""Runs of the gate, resampled from stored sessions of one code: whole sessions, without replacement."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from pytest_gemm.case_id import CaseId
from pytest_gemm.outcome import Verdict
from pytest_gemm.speed.data import Judgement, Sample, Session
from pytest_gemm.speed.gate import design, estimates
from pytest_gemm.speed.gate.design import Design
from pytest_gemm.speed.gate.estimates import Reading, Screened, Stored
from pytest_gemm.speed.gate.policy import Policy

_SUITE: Final = 200


def _slowed(some: Iterable[Reading], factor: float) -> list[Reading]:
    return [dataclasses.replace(r, subject=factor * r.subject) for r in some]


class Sessions:
    """The sessions as tables: one reading, or none, a case and session."""

    def __init__(self, sessions: Sequence[Session], cases: Collection[CaseId]) -> None:
        self.samples: list[dict[CaseId, Sample]] = [
            {s.case: s for s in session.samples if s.is_timed and s.case in cases} for session in sessions
        ]
        self.cases = tuple(cases)
        self._are_interleaved = [session.is_interleaved for session in sessions]
        self._readings = [
            {case: Reading(s.estimate, s.comparator_estimate, s.disturbed) for case, s in by.items()}
            for by in self.samples
        ]

    def take(self, numbers: Iterable[int]) -> dict[CaseId, list[Reading]]:
        """The readings of these sessions by case, numbered in this order."""
        found: dict[CaseId, list[Reading]] = {case: [] for case in self.cases}
        for position, number in enumerate(numbers):
            for case, reading in self._readings[number].items():
                found[case].append(dataclasses.replace(reading, session=position))
        return found

    def take_pairs(
        self, base: Sequence[int], head: Sequence[int]
    ) -> tuple[dict[CaseId, list[Reading]], dict[CaseId, list[Reading]]]:
        """The readings of the sessions of two groups, as the gate reads pairs."""
        then, now = self.take(base), self.take(head)
        for position, (one, other) in enumerate(zip(base, head, strict=True)):
            if self._are_interleaved[one] and self._are_interleaved[other]:
                estimates.compare_windows(now, self.samples[one], self.samples[other], position)
        return then, now


@dataclasses.dataclass(frozen=True)
class Resample:
    """One run, drawn.

    Attributes:
        design: stored baselines, or base against head.
        base_first, base_more: the base's readings in the pairs of the screen and of the confirmation, by case.
        first, more: the head's readings of screen and confirmation, by case.
    """

    design: Design
    base_first: Mapping[CaseId, list[Reading]]
    base_more: Mapping[CaseId, list[Reading]]
    first: Mapping[CaseId, list[Reading]]
    more: Mapping[CaseId, list[Reading]]

    def idle(self) -> tuple[Screened, dict[CaseId, Judgement]]:
        """The A/A run."""
        screened = self.design.screen(self.base_first, self.first)
        return screened, self._confirm(self.more, screened)

    def _confirm(self, head: Mapping[CaseId, list[Reading]], screened: Screened) -> dict[CaseId, Judgement]:
        """The gate's confirmation by these readings of the head, look by look."""

        def until(some: Mapping[CaseId, list[Reading]], cases: Iterable[CaseId], count: int) -> design.Readings:
            return {case: some[case][:count] for case in cases if case in some}

        return self.design.confirm(
            screened, lambda cases, count: (until(self.base_more, cases, count), until(head, cases, count))
        )

    def finds(self, cases: Collection[CaseId], change: float, idle: Screened) -> set[CaseId]:
        """Which of the cases are called slower when each of them, alone, is slower by ``change``.

        They are screened together, for a case's screen knows nothing of the others' subjects, and confirmed one by one,
        beside the cases that the A/A run ``idle`` confirms.
        """
        first = {c: _slowed(x, 1 + change) if c in cases else x for c, x in self.first.items()}
        screened = self.design.screen(self.base_first, first)
        found = set()
        for case in cases:
            if case not in screened.slower:
                continue
            slower = (case, *(c for c in idle.slower if c != case))
            judgements = {**idle.judgements, case: screened.judgements[case]}
            alone = dataclasses.replace(screened, slower=slower, faster=(), judgements=judgements)
            head = {c: self.more[c] for c in slower} | {case: _slowed(self.more[case], 1 + change)}
            if self._confirm(head, alone)[case].verdict is Verdict.SLOWER:
                found.add(case)
        return found


def stored_run(table: Sessions, order: Sequence[int], policy: Policy, k: int) -> Resample:
    """Baseline, screen and confirmation from one order of the sessions."""
    end = k + policy.screen_sessions
    parts = order[:k], order[k:end], order[end : end + policy.confirm_sessions]
    then, first, more = map(table.take, parts)
    stored = {case: Stored(case, tuple(some)) for case, some in then.items()}
    return Resample(Design(policy, stored), {}, {}, first, more)


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
    (base_first, first), (base_more, more) = (table.take_pairs(*numbers) for numbers in parts)
    return Resample(Design(policy), base_first, base_more, first, more)


def suite_run(table: Sessions, rng: np.random.Generator, policy: Policy, k: int) -> Resample:
    """A run of 200 cases: copies of the suite, each with an order of the sessions of its own."""
    stored: dict[CaseId, Stored] = {}
    first: dict[CaseId, list[Reading]] = {}
    more: dict[CaseId, list[Reading]] = {}
    for copy in range(-(-_SUITE // len(table.cases))):
        part = stored_run(table, [int(i) for i in rng.permutation(len(table.samples))], policy, k)
        for case in table.cases[: _SUITE - len(stored)]:
            name = dataclasses.replace(case, candidate=f"{case.candidate}#{copy}")
            stored[name] = dataclasses.replace((part.design.stored or {})[case], case=name)
            first[name], more[name] = part.first[case], part.more[case]
    return Resample(Design(policy, stored), {}, {}, first, more)
