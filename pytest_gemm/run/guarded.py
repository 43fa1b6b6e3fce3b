"""Cases judged with guard pages: operands and results lie at pages that kill the kernel's process.

When it dies in a case, the case is judged again with one operand at a page at a time: those that kill it alone are
named.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from pytest_gemm.core.case_id import CandidateSelection
from pytest_gemm.core.outcome import Outcome, Reason, Status
from pytest_gemm.operands.guard_pages import ALLOCATED, SIDES, GuardPages

if TYPE_CHECKING:
    from pytest_gemm.config.config import GemmConfig
    from pytest_gemm.judging.case import Case, Judged
    from pytest_gemm.worker.process import Workers

# What the processor says to a program that touches a page that is not its own.
_FAULTS: Final = frozenset({-signal.SIGSEGV, -signal.SIGBUS})
_NO_EAGER: Final = "eager is not run: what ends the process has to be the case"


class GuardedJudge:
    """Judges cases with operands and results at guard pages.

    Args:
        config: what the run was asked for.
        workers: the processes of the kernels.
    """

    def __init__(self, config: GemmConfig, workers: Workers) -> None:
        self._config = config
        self._workers = workers

    def judge(self, case: Case) -> Iterator[Judged]:
        """The outcomes of a case, first with everything ending at a page, then with everything beginning at one."""
        from pytest_gemm.judging.case import Judged

        if (refusal := _refusal(case)) is not None:
            yield Judged(Outcome(case.id(), "", case.seed, Status.UNSUPPORTED, refusal))
            return
        for side in SIDES:
            refused = True
            for judged in self._judged(case, GuardPages(side)):
                outcome = judged.outcome
                refused = refused and outcome.status is Status.UNSUPPORTED
                if self._died(case):
                    outcome = self._blamed(case, side, outcome)
                of_side = dataclasses.replace(outcome, case=dataclasses.replace(outcome.case, guard=side))
                yield dataclasses.replace(judged, outcome=of_side)
            if refused:
                return

    # -- parts ---------------------------------------------------------------------------------------

    def _judged(self, case: Case, pages: GuardPages) -> Iterator[Judged]:
        from pytest_gemm.judging.judge import Judge

        known = self._config.ledger.statements
        judge = Judge(lambda *_: _NO_EAGER, pages=pages, statements=known, workers=self._workers)
        self._workers(case.backend).ended = None
        return judge.judge(case)

    def _died(self, case: Case) -> bool:
        """Whether a process has died of a page since it was asked before."""
        worker = self._workers(case.backend)
        ended, worker.ended = worker.ended, None
        return ended in _FAULTS

    def _dies(self, case: Case, pages: GuardPages) -> bool:
        return sum(self._died(case) for _ in self._judged(case, pages)) > 0  # all of them: a process ends with each

    def _blamed(self, case: Case, side: str, outcome: Outcome) -> Outcome:
        """The outcome of a case that has killed its process, with the operands that alone are enough for it."""
        from pytest_gemm.backends.aten import AtenBackend
        from pytest_gemm.judging.case import Case
        from pytest_gemm.judging.inherited import inheriting, is_pytorch
        from pytest_gemm.operands import tensors

        distribution = outcome.distribution or case.distributions[0]
        candidates = CandidateSelection(outcome.candidate) if outcome.candidate else case.candidates
        case = dataclasses.replace(case, distributions=(distribution,), candidates=candidates)
        at_pages = GuardPages("end" if side == "end" else "begin", frozenset())
        if self._dies(case, at_pages):
            return outcome  # it needs no page for that
        given = tensors.make(case.problem, distribution, case.seed, case.device)
        names = [*(buffer.name for buffer in given.buffers), *ALLOCATED]
        named = [name for name in names if self._dies(case, dataclasses.replace(at_pages, only=frozenset({name})))]
        where = "past the end of" if side == "end" else "before the beginning of"
        what = " and of ".join(named) or "an operand (none of them alone, when it was tried again)"
        kernel = ", ".join(outcome.kernels) or case.backend.name
        how = outcome.reason.text.rpartition(": ")[2] if outcome.reason else ""
        touched = f"memory {where} {what}: {how} at a guard page"
        outcome = dataclasses.replace(outcome, reason=Reason("page-guard", f"{kernel} touches {touched}"))
        aten = Case(AtenBackend(), case.problem, case.distributions, case.seed, case.device, threads=case.threads)
        if is_pytorch(case) or not self._dies(aten, dataclasses.replace(at_pages, only=frozenset(named))):
            return outcome
        return inheriting(outcome, f"touches {touched}", f"touches {touched.partition(':')[0]}")


def _refusal(case: Case) -> Reason | None:
    """Why a case cannot be judged this way."""
    if case.device != "cpu":
        return Reason("guard-device", "guard pages are the CPU's", "on CUDA run pytest under compute-sanitizer")
    if not case.distributions:
        return Reason("no-operands", f"operands of {case.problem.op.name} cannot be built yet")
    return None
