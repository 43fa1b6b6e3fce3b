"""What the gate says of the sessions of two runs: those before stand in for a baseline, those after are judged."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Verdict
from pytest_gemm.core.units import plural, seconds_text, signed
from pytest_gemm.report.cases import Row, Section
from pytest_gemm.speed.data import Judgement, Session, by_case
from pytest_gemm.speed.gate import estimates
from pytest_gemm.speed.gate.design import Design
from pytest_gemm.speed.gate.estimates import Readings, Stored
from pytest_gemm.speed.gate.policy import Policy
from pytest_gemm.speed.report.rows import change_text


def sections(before: Sequence[Session], after: Sequence[Session]) -> list[Section]:
    """Slower, faster and undecided cases."""
    found: list[Judgement] = []
    notes: list[str] = []
    without = [name for name, some in (("before", before), ("after", after)) if not some]
    if without:
        where = "a run of pytest perf with --gemm-output=DIR leaves them in DIR/samples"
        notes.append(f"Not compared: no times {' and '.join(without)}; {where}.")
    else:
        kinds = {_kind(session) for session in (*before, *after)}
        for kind in sorted(kinds):
            pair = [[session for session in some if _kind(session) == kind] for some in (before, after)]
            if all(pair):
                found += judgements(*pair)
            else:
                count = plural(len(pair[0] or pair[1]), "session")
                notes.append(f"{count} of {' / '.join(kind)} are in one run only and compare with nothing.")
        same = [one.change or 0.0 for one in found if one.verdict is Verdict.SAME]
        span = f", by {signed(min(same))}% to {signed(max(same))}%" if same else ""
        notes.append(f"Compared by the rules of the gate: {plural(len(found), 'case')}, {len(same)} the same{span}.")
    helps = {
        Verdict.SLOWER: "Cases that the gate finds slower, and that were so in most sessions.",
        Verdict.FASTER: "Cases that the gate finds faster.",
        Verdict.UNDECIDED: "Cases whose times are too few or too noisy for a verdict.",
    }
    made = []
    for verdict, help_ in helps.items():
        title = "speed undecided" if verdict is Verdict.UNDECIDED else str(verdict)
        rows = [_row(one) for one in _ordered(found) if one.verdict is verdict]
        is_slower = verdict is Verdict.SLOWER
        made.append(Section(title, help_, rows, notes if is_slower else (), is_bad=is_slower))
    return made


def _kind(session: Session) -> tuple[str, str, str]:
    """What has to be equal for two sessions to be compared."""
    device = next((sample.device for sample in session.samples), "cpu")
    return session.hardware, device, session.contract


def judgements(before: Sequence[Session], after: Sequence[Session]) -> list[Judgement]:
    """The gate's on all cases that both have: the first sessions after are its screen, the others its confirmation."""
    cases = [case for case in by_case(before) if case in by_case(after)]
    policy = Policy.for_device(before[0].samples[0].device)
    end = policy.screen_sessions
    parts = before, after[:end], after[end : end + policy.confirm_sessions]
    then, first, more = ({case: found.get(case, []) for case in cases} for found in map(estimates.readings, parts))
    design = Design(policy, {case: Stored(case, tuple(some)) for case, some in then.items()})
    screened = design.screen({}, first)

    def confirming(wanted: tuple[CaseId, ...], count: int) -> tuple[Readings, Readings]:
        return {}, {case: more[case][:count] for case in wanted}

    found = design.confirm(screened, confirming) if len(after) > end else screened.judgements
    return [found[case] for case in cases]


def _ordered(found: Sequence[Judgement]) -> list[Judgement]:
    """The largest change first."""
    return sorted(found, key=lambda one: -abs(math.log1p(one.change or 0.0)))


def _row(one: Judgement) -> Row:
    times = f"{seconds_text(one.stored_seconds)} -> {seconds_text(one.seconds)}, {change_text(one)}"
    return Row(one.case, one.reason.code, times)
