"""What a run is compared with: stored baselines, or sessions of another environment that pair with its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from pytest_gemm.case_id import CaseId
from pytest_gemm.speed.data import Judgement
from pytest_gemm.speed.gate import decide, pairs
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
        """The judgements of all cases, look by look.

        Args:
            screened: what the screen concluded.
            more: readings of base and head for the open cases, after how many sessions of the confirmation, or pairs.
        """

        def look(cases: tuple[CaseId, ...], count: int, known: Screened, last: bool) -> dict[CaseId, Judgement]:
            base, head = ({case: some[case] for case in cases if case in some} for some in more(cases, count))
            if self.stored is None:
                return pairs.confirm(base, head, known, self.policy, last=last)
            return stored_module.confirm(self.stored, head, known, self.policy, last=last)

        policy = self.policy
        sessions = policy.confirm_pairs if self.stored is None else policy.confirm_sessions
        return decide.by_looks(screened, policy, sessions, look)
