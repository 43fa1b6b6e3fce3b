"""Sessions recorded as baselines."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Reason, Verdict
from pytest_gemm.problem.problem import Problem
from pytest_gemm.speed import roofline
from pytest_gemm.speed.baseline.entry import MICRO, SESSIONS, Baseline
from pytest_gemm.speed.baseline.store import Change, Store, names
from pytest_gemm.speed.data import Judgement, Peaks, Sample, Session, by_case

if TYPE_CHECKING:
    from pytest_gemm.speed.gate.estimates import Stored
    from pytest_gemm.speed.gate.policy import Policy


# -- for the gate --------------------------------------------------------------------------------------------------


def stored(baselines: Mapping[CaseId, Baseline], now: Session) -> dict[CaseId, Stored]:
    """What the gate compares a run with.

    A baseline that was timed in another way is left out; recording it again replaces it.  One of other software is
    compared, and its note names the difference.  Of one that was recorded beside another comparator only the subject's
    time is left.

    Args:
        baselines: of the run's hardware key.
        now: a session of the run.
    """
    comparators = {sample.case: sample.comparator_name for sample in now.samples if sample.is_timed}

    def seen(one: Baseline) -> Stored:
        note = _software_note(one.software, now.software)
        if comparators.get(one.case, one.comparator) == one.comparator:
            return one.stored(note)
        beside = f"recorded beside {one.comparator or 'no comparator'}"
        return one.without_comparator().stored("; ".join(filter(None, [note, beside])))

    return {case: seen(one) for case, one in baselines.items() if one.contract == now.contract}


def got_slower(
    baselines: Mapping[CaseId, Baseline], sessions: Sequence[Session], policy: Policy
) -> dict[CaseId, Judgement]:
    """Cases that the sessions of a recording find slower than what is stored, by the rules of the gate.

    The first sessions screen and all others confirm, so that no session is used twice.  Where too few of them, or of
    those that are stored, are usable to judge a case, it counts as slower when its time seems to be beyond the
    tolerance: recording less must not be a way around ``pytest-gemm baseline accept``.

    Args:
        baselines: what is stored on the sessions' hardware key.
        sessions: of the recording.
        policy: of the gate.
    """
    from pytest_gemm.speed.gate import design, estimates

    if not sessions:
        return {}
    known = stored(baselines, sessions[0])
    how, count = design.Design(policy, known), policy.screen_sessions
    screened = how.screen({}, estimates.readings(sessions[:count]))
    judgements = how.look({}, estimates.readings(sessions[count:]), screened)

    def seems_slower(judgement: Judgement) -> bool:
        estimated = [one.estimate for one in timed.get(judgement.case, ()) if not one.disturbed]
        limit = baselines[judgement.case].median_us * MICRO * (1.0 + policy.delta)
        return bool(estimated) and statistics.median(estimated) > limit

    timed = by_case(sessions)
    return {
        case: one
        for case, one in judgements.items()
        if one.verdict is Verdict.SLOWER
        or (one.reason.code in {"to-confirm", "too-few", "disturbed", "thin-baseline"} and seems_slower(one))
    }


def _software_note(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What differs between the software of the baseline and that of the run; "" for nothing."""
    versions = [(name, then.get(name, "absent"), now.get(name, "absent")) for name in sorted({*then, *now})]
    differing = [f"{name} {old} (now {new})" for name, old, new in versions if old != new]
    return f"recorded with {', '.join(differing)}" if differing else ""


# -- from sessions -------------------------------------------------------------------------------------------------


def recordable(
    sessions: Sequence[Session], *, k: int = SESSIONS, disturbed: float = 0.2, force: bool = False
) -> Reason | None:
    """Why these sessions make no baseline; ``None`` when they do.

    Args:
        sessions: of one group.
        k: how many are needed.
        disturbed: tolerated share of timed samples that are disturbed (other load, throttling).  A busy machine is
            busy for the samples as well that happened to look quiet.
        force: a changed tree, a busy machine and few sessions are no objections.  Sessions that do not belong
            together never make a baseline.
    """
    for name, found in (
        ("hardware key", {s.hardware for s in sessions}),
        ("timing contract", {s.contract for s in sessions}),
        ("commit", {s.commit for s in sessions}),
        ("software", {", ".join(f"{n} {v}" for n, v in sorted(s.software.items())) for s in sessions}),
    ):
        if len(found) > 1:
            text = f"the sessions differ in their {name}: {' / '.join(sorted(found))}"
            return Reason("mixed-sessions", text, "measure all of them again")
    if force and sessions:
        return None
    if len(sessions) < k:
        text = f"{len(sessions)} of {k} sessions were measured"
        return Reason("too-few-sessions", text, f"measure the others too, {_FORCE}")
    if sessions[0].commit.endswith("+dirty"):
        text = f"working tree is dirty ({sessions[0].commit}), so the results would not be reproducible"
        return Reason("dirty-tree", text, f"commit first, {_FORCE}")
    timed = [sample for session in sessions for sample in session.samples if sample.is_timed]
    disturbed_samples = [sample for sample in timed if sample.disturbed]
    if len(disturbed_samples) > disturbed * len(timed):
        usual, _ = Counter(sample.disturbed for sample in disturbed_samples).most_common(1)[0]
        text = f"{len(disturbed_samples)} of {len(timed)} samples were disturbed, for instance: {usual}"
        remedy = "measure on a quiet machine; --gemm-record=force stores the cases with enough undisturbed sessions"
        return Reason("disturbed", text, remedy)
    return None


_FORCE: Final = "or give --gemm-record=force"


def record_sessions(
    store: Store,
    sessions: Sequence[Session],
    policy: Policy,
    *,
    k: int = SESSIONS,
    force: bool = False,
    accept: Collection[str] = (),
    reason: str = "",
) -> tuple[list[Change], dict[CaseId, str]]:
    """Store what sessions measured.

    Args:
        store: of their hardware.
        sessions: of one group.
        policy: of the gate, for what is detectable and what got slower.
        k: how many sessions are needed.
        force: see :func:`recordable`.
        accept: patterns of cases that got slower and are to be stored, and no others; empty: all that did not.
        reason: why they may be slower.

    Returns:
        What was done, and a sentence for each timed case that was to be recorded and was not.
    """
    timed = by_case(sessions)
    slower = got_slower(store.load_all({key.backend for key in timed}), sessions, policy)
    wanted = {case for case in slower if any(names(one, case) for one in accept)} if accept else timed.keys()
    objection = recordable(sessions, k=k, force=force)
    if objection is not None:
        return [], dict.fromkeys(wanted, f"not recorded: {objection}")
    least = min(len(sessions), k)
    # One disturbed session of a dozen is left out, and the case is recorded all the same.
    baselines, left_out = from_sessions(sessions, k=max(1, least - least // 4), policy=policy)
    entries = [one for one in baselines if one.case in wanted]
    done = store.record(entries, slower=slower.keys(), accept=accept, reason=reason)
    refused = {key: f"not recorded: {key}: {why}" for key, why in left_out.items() if not accept or key in wanted}
    refused |= {one.new.case: f"not recorded: {one.new.case}: {one.text}" for one in done if one.kind == "refused"}
    return done, refused


def from_sessions(
    sessions: Sequence[Session], *, k: int = SESSIONS, policy: Policy | None = None
) -> tuple[list[Baseline], dict[CaseId, Reason]]:
    """Baselines of the cases of several sessions, one estimate a session.

    Args:
        sessions: of one group, all of one hardware key, contract and commit (:func:`recordable` checks that).
        k: undisturbed sessions that a case needs; one with fewer is left out.  More are all used.
        policy: of the gate, for the minimum detectable effect.

    Returns:
        The baselines, sorted by case, and why the other cases cannot be recorded.
    """
    samples: dict[CaseId, list[Sample]] = defaultdict(list)
    for session in sessions:
        for case, sample in {sample.case: sample for sample in session.samples}.items():  # one estimate a session
            samples[case].append(sample)
    baselines: list[Baseline] = []
    left_out: dict[CaseId, Reason] = {}
    for case in sorted(samples):
        good = [sample for sample in samples[case] if sample.is_timed and not sample.disturbed]
        names = {sample.comparator_name if sample.comparator else "" for sample in good}
        if len(good) < k:
            left_out[case] = _too_few(samples[case], len(good), k)
        elif len(names) > 1:
            text = f"its comparator differs between sessions: {' / '.join(name or 'none' for name in sorted(names))}"
            left_out[case] = Reason("mixed-comparators", text)
        else:
            baselines.append(_entry(good, sessions[0], Peaks.of(sessions)))
    if policy is not None:
        from pytest_gemm.speed.gate.design import minimum_effect

        seen = minimum_effect({one.case: one.stored() for one in baselines}, policy)
        baselines = [replace(one, minimum_effect=seen.get(one.case)) for one in baselines]
    return baselines, left_out


def _too_few(samples: Sequence[Sample], good: int, k: int) -> Reason:
    """Why a case has fewer estimates than it needs: the most frequent cause in full."""
    causes = Counter(
        f"disturbed: {sample.disturbed}" if sample.is_timed else f"{sample.status}: {sample.reason or 'no reason'}"
        for sample in samples
        if sample.disturbed or not sample.is_timed
    )
    cause = "; {1} of them {0}".format(*causes.most_common(1)[0]) if causes else ""
    return Reason("too-few-estimates", f"{good} of {len(samples)} sessions gave an estimate, {k} are needed{cause}")


def _entry(samples: Sequence[Sample], session: Session, peaks: Peaks) -> Baseline:
    """The baseline of one case."""
    case = samples[0].case
    problem = Problem.parse(case.problem)
    work = roofline.work(problem)
    least = roofline.limit(work, roofline.dtype_name(problem), peaks)
    comparators = [sample.comparator_estimate for sample in samples]
    subject_us = tuple(sample.estimate / MICRO for sample in samples)
    seconds = statistics.median(subject_us) * MICRO
    return Baseline(
        backend=case.backend,
        problem=case.problem,
        candidate=case.candidate,
        subject_us=subject_us,
        comparator=samples[0].comparator_name if samples[0].comparator else "",
        comparator_us=tuple(one / MICRO for one in comparators if one is not None),
        spread=statistics.median(sample.spread for sample in samples),
        selected=tuple(sorted({name for sample in samples for name in sample.selected})),
        tflops=work.flops / seconds / 1e12,
        gbs=work.bytes / seconds / 1e9,
        roofline=least and least[0] / seconds,
        contract=session.contract,
        software=session.software,
        commit=session.commit,
        date=session.date,
        epochs=(),
    )
