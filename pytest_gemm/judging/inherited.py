"""Whose fault a failure is: set beside what PyTorch's own product gives of the same operands."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Outcome, Phase, Status
from pytest_gemm.judging import verdict
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.repeated import UNWRITTEN
from pytest_gemm.judging.results import digest_of
from pytest_gemm.judging.sampled import ResultVerdict
from pytest_gemm.numerics.interval import Interval
from pytest_gemm.numerics.reference import widened
from pytest_gemm.problem.problem import Problem

PRODUCT: Final = "PyTorch's own product"
"""As sentences and causes call it."""

# Bytes that show what is left unwritten.
_FILLS: Final = (0x44, 0x7E)
_VALUES: Final = "with the same values"
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
        again: gives the result of a place once more, with fresh memory filled with a byte; ``None`` for what is right.
    """

    results: tuple[torch.Tensor, ...] = ()
    verdicts: Sequence[ResultVerdict] = ()
    ended: Outcome | None = None
    died: bool = False
    again: Callable[[int, int], torch.Tensor | None] | None = None

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
            interval, count = _free_of_shared(judged, theirs)
            rest = verdict.compare(judged.actual, interval, output, judged.operands, others=others) if count else rest
        if not count:
            return judged, "", self.differently()
        if rest.ok or judged.note:
            shown = dataclasses.replace(wrong, name=their_wrong.name, cause="")
            how = _due(shown)
            judged = dataclasses.replace(judged, comparison=dataclasses.replace(judged.comparison, mismatch=shown))
            return judged, f"{PRODUCT}: {how}", _inherits(f"is wrong here too: {how}, in the same elements {_VALUES}")
        text = f"{PRODUCT} is wrong here too: {_due(their_wrong)}, in {count} further elements {_VALUES}"
        return dataclasses.replace(judged, comparison=rest, interval=interval), "", text

    def leaves_unwritten(self, place: int, judged: ResultVerdict, call: Callable[[int], torch.Tensor | None]) -> str:
        """The sentence on PyTorch's own where it leaves the same elements unwritten, with any values; or "".

        Args:
            place: as of :meth:`apart`.
            judged: the same.
            call: makes the kernel's call again, with fresh memory filled with a byte.
        """
        if judged.note or self.again is None or place >= len(self.verdicts) or self.verdicts[place].comparison.ok:
            return ""
        bad = verdict.rejected(widened(_tensor(judged.actual)), judged.interval)
        for fill in _FILLS:
            x, y = call(fill), self.again(place, fill)
            if x is None or y is None or not bool(_same(widened(x), widened(y))[bad].all()):
                return ""
        return _inherits(f"is wrong here too: {UNWRITTEN.name}, in the same elements")

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
    return isinstance(case.backend, AtenBackend) and not case.mode.is_compiled


def of_pytorch(outcome: Outcome) -> Outcome:
    """A failure that PyTorch's own product has too as one of the backend ``aten``, by which the ledger knows it."""
    case = CaseId("aten", outcome.problem, threads=outcome.case.threads)
    return dataclasses.replace(outcome, case=case, chosen=(), configuration=(), test="test_product")


def _inherits(what: str) -> str:
    return f"{PRODUCT} {what}; your kernel inherits it if it calls PyTorch's"


def _free_of_shared(judged: ResultVerdict, theirs: ResultVerdict) -> tuple[Interval, int]:
    """An interval in which anything is right where both results have the same wrong value; and how many these are."""
    x, y, count = widened(_tensor(judged.actual)), widened(_tensor(theirs.actual)), 0
    same = _same(x, y)
    interval, their_interval = judged.interval, theirs.interval
    # Zeros of the wrong sign show in a result without other wrong elements alone.
    while number := int((both := verdict.rejected(x, interval) & verdict.rejected(y, their_interval) & same).sum()):
        interval, their_interval = (
            dataclasses.replace(one, lo=one.lo.masked_fill(both, -math.inf), hi=one.hi.masked_fill(both, math.inf))
            for one in (interval, their_interval)
        )
        count += number
    return interval, count


def _same(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Which elements have the same value, zeros of the same sign."""
    return ((x == y) & (x.signbit() == y.signbit())) | (x.isnan() & y.isnan())


def _tensor(actual: object) -> torch.Tensor:
    """A result that was comparable."""
    assert isinstance(actual, torch.Tensor)
    return actual


def _due(wrong: verdict.Mismatch) -> str:
    """What is wrong with an element, short and stable."""
    kinds = ["NaN" if math.isnan(x) else f"{x:g}" if math.isinf(x) else "" for x in (wrong.actual, wrong.expected)]
    if not any(kinds):
        return "zeros of the wrong sign" if wrong.code == "zero-sign" else wrong.name or "wrong numbers"
    return f"{kinds[0] or 'a number'} where {kinds[1] or 'a number'} is due"
