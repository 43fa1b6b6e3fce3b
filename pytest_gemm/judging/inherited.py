"""Whose fault a failure is: set beside what PyTorch's own product gives of the same operands."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Outcome, Phase, Status
from pytest_gemm.judging import verdict
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.results import digest_of
from pytest_gemm.judging.sampled import ResultVerdict
from pytest_gemm.numerics.interval import Interval
from pytest_gemm.numerics.reference import widened
from pytest_gemm.problem.problem import Problem

PRODUCT: Final = "PyTorch's own product"
"""As sentences and causes call it."""

# Where a failure was, which is another phase where a backend calls its kernel once before it runs.
_WHERE: Final = re.compile(f" in (?:{'|'.join(sorted(Phase, key=len, reverse=True))})\\b")


@dataclasses.dataclass(frozen=True)
class Theirs:
    """What PyTorch's own product gave, held to its own contract; nothing where it was not run.

    Attributes:
        results: what it returned, in the program's form.
        verdicts: on each of them.
        ended: how it ended where it returned nothing.
        died: the process that it ran in has ended.
    """

    results: tuple[torch.Tensor, ...] = ()
    verdicts: Sequence[ResultVerdict] = ()
    ended: Outcome | None = None
    died: bool = False

    def differently(self) -> str:
        """A sentence on a failure of another kind; "" where it is right."""
        wrong = next((one.comparison.mismatch for one in self.verdicts if not one.comparison.ok), None)
        failed = self.ended is not None and self.ended.status.is_failure
        how = wrong.summary() if wrong else self.ended.why if self.ended and failed else ""
        return how and f"{PRODUCT} {'fails' if failed else 'is wrong'} here too, in another way: {how}"

    def apart(
        self,
        place: int,
        output: Problem,
        result: torch.Tensor,
        judged: ResultVerdict,
        others: Mapping[str, torch.Tensor],
    ) -> tuple[ResultVerdict, str, str]:
        """Take out of a wrong result the elements that PyTorch's own has wrong too, with the same values.

        Args:
            place: of the result among those of the program.
            output: the problem that it answers.
            result: all of it.
            judged: the verdict on it.
            others: as in :func:`verdict.compare`.

        Returns:
            The verdict on the other wrong elements, or the old one where there are none or all are others; the cause
            where there are none, else ""; a sentence on PyTorch's own, "" where that is right.
        """
        theirs = self.verdicts[place] if place < len(self.verdicts) else None
        wrong, their_wrong = judged.comparison.mismatch, theirs.comparison.mismatch if theirs else None
        if wrong is None or theirs is None or their_wrong is None:
            return judged, "", self.differently()
        rest, interval, count = judged.comparison, judged.interval, 0
        if judged.note:  # other lines of it were looked at
            count = wrong.count * (digest_of([result]) == digest_of([self.results[place]]))
        elif rest.is_comparable and theirs.comparison.is_comparable:
            assert isinstance(judged.actual, torch.Tensor)
            assert isinstance(theirs.actual, torch.Tensor)
            interval, count = _free_of_shared(judged.actual, interval, theirs.actual, theirs.interval)
            rest = verdict.compare(judged.actual, interval, output, judged.operands, others=others) if count else rest
        if not count:
            return judged, "", self.differently()
        if rest.ok or judged.note:
            how, shown = _due(wrong), dataclasses.replace(wrong, cause="")
            judged = dataclasses.replace(judged, comparison=dataclasses.replace(judged.comparison, mismatch=shown))
            text = _inherits(f"is wrong here too: {how}, in the same elements with the same values")
            return judged, f"{PRODUCT}: {how}", text
        text = f"{PRODUCT} is wrong here too: {_due(their_wrong)}, in {count} further elements with the same values"
        return dataclasses.replace(judged, comparison=rest, interval=interval), "", text

    def of_ended(self, outcome: Outcome) -> Outcome:
        """A crash, or a call without an end, with what PyTorch's own product did."""
        theirs, text = self.ended, self.differently()
        if theirs is not None and theirs.status is outcome.status:
            what, own = (_WHERE.sub("", one.reason.text, 1) if one.reason else "" for one in (theirs, outcome))
            if outcome.status is Status.TIMED_OUT or what == own:
                return inheriting(outcome, f"ends here too: {what}", what.rpartition(": ")[2])
        return dataclasses.replace(outcome, details="\n".join(filter(None, (text, outcome.details))))


def inheriting(outcome: Outcome, what: str, cause: str) -> Outcome:
    """A failure that PyTorch's own product has too, which its details begin with.

    Args:
        outcome: of the kernel.
        what: PyTorch's product does, in words.
        cause: the same, short.
    """
    details = "\n".join(filter(None, (_inherits(what), outcome.details)))
    return dataclasses.replace(outcome, details=details, inherited=True, cause=f"{PRODUCT}: {cause}")


def is_pytorch(case: Case) -> bool:
    """Whether a case is what others are set beside."""
    return case.backend.name == "aten" and not case.mode.is_compiled


def of_pytorch(outcome: Outcome) -> Outcome:
    """A failure that PyTorch's own product has too as one of the backend ``aten``, by which the ledger knows it."""
    case = CaseId("aten", outcome.problem, threads=outcome.case.threads)
    return dataclasses.replace(outcome, case=case, chosen=(), configuration=(), test="test_product")


def _inherits(what: str) -> str:
    return f"{PRODUCT} {what}; your kernel inherits it if it calls PyTorch's"


def _same(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Which elements have the same value, NaN or not, zeros of the same sign."""
    x, y = widened(x), widened(y)
    return ((x == y) & (x.signbit() == y.signbit())) | (x.isnan() & y.isnan())


def _free_of_shared(
    actual: torch.Tensor, interval: Interval, theirs: torch.Tensor, their_interval: Interval
) -> tuple[Interval, int]:
    """An interval in which anything is right where both results have the same wrong value; and how many these are."""
    x, y, same, count = widened(actual), widened(theirs), _same(actual, theirs), 0
    # Zeros of the wrong sign show in a result without other wrong elements alone.
    while number := int((both := verdict.rejected(x, interval) & verdict.rejected(y, their_interval) & same).sum()):
        interval, their_interval = (
            dataclasses.replace(one, lo=one.lo.masked_fill(both, -math.inf), hi=one.hi.masked_fill(both, math.inf))
            for one in (interval, their_interval)
        )
        count += number
    return interval, count


def _due(wrong: verdict.Mismatch) -> str:
    """What is wrong with an element, short and stable."""
    kinds = ["NaN" if math.isnan(x) else f"{x:g}" if math.isinf(x) else "" for x in (wrong.actual, wrong.expected)]
    if not any(kinds):
        return "zeros of the wrong sign" if wrong.code == "zero-sign" else wrong.name or "wrong numbers"
    return f"{kinds[0] or 'a number'} where {kinds[1] or 'a number'} is due"
