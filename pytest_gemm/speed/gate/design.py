"""What a run is compared with: stored baselines, or sessions of another environment that pair with its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from pytest_gemm.case_id import CaseId
from pytest_gemm.speed.data import Judgement
from pytest_gemm.speed.gate import pairs
from pytest_gemm.speed.gate import stored as stored_module
from pytest_gemm.speed.gate.estimates import Reading, Screened, Stored
from pytest_gemm.speed.gate.policy import Policy

Readings = Mapping[CaseId, Sequence[Reading]]


@dataclasses.dataclass(frozen=True)
class Design:
    """Screen and confirmation of one kind of run.

    Attributes:
        policy: of the gate.
        stored: the baselines; ``None`` where the readings of base and head are compared in pairs.
    """

    policy: Policy
    stored: Mapping[CaseId, Stored] | None = None

    def screen(self, base: Readings, head: Readings) -> Screened:
        """Judge the first sessions; ``base`` is without effect where baselines are stored."""
        if self.stored is None:
            return pairs.screen(base, head, self.policy)
        return stored_module.screen(self.stored, head, self.policy)

    def confirm(
        self, screened: Screened, more: Callable[[tuple[CaseId, ...], int], tuple[Readings, Readings]]
    ) -> dict[CaseId, Judgement]:
        """The judgements of all cases, looked at as often as :meth:`Policy.looks` says.

        Args:
            screened: what the screen concluded.
            more: readings of base and head for the open cases, after how many sessions of the confirmation, or pairs.
        """
        policy = self.policy
        judgements = dict(screened.judgements)
        counts = policy.looks(policy.confirm_pairs if self.stored is None else policy.confirm_sessions)
        for count in counts:
            cases, known = screened.wanted, screened.judgements
            if not cases:
                break
            base, head = ({case: some[case] for case in cases if case in some} for some in more(cases, count))
            last = count == counts[-1]
            if self.stored is None:
                found = pairs.confirm(base, head, screened, policy, last=last)
            else:
                found = stored_module.confirm(self.stored, head, screened, policy, last=last)
            judgements.update((case, found[case]) for case in cases)
            screened = dataclasses.replace(
                screened,
                slower=tuple(case for case in screened.slower if found[case] == known[case]),
                faster=tuple(case for case in screened.faster if found[case] == known[case]),
            )
        return judgements
