"""The sentences of a verdict on speed: every reason of the gate, as code, text and remedy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_gemm.outcome import Reason

if TYPE_CHECKING:
    from pytest_gemm.speed.gate.evidence import Claim, Evidence, View
    from pytest_gemm.speed.gate.policy import Policy


def percent(change: float) -> str:
    """A change in percent."""
    return f"{100 * change:.1f}%"


def words(log_change: float) -> str:
    """A difference of logarithms of times in words: ``5.0% slower``."""
    change = math.expm1(log_change)
    return f"{percent(abs(change))} {'slower' if change >= 0 else 'faster'}"


def interval(view: View) -> str:
    """An estimate with its interval."""
    low, high = view.interval()
    return f"{words(view.estimate)} [{100 * math.expm1(low):+.1f}%, {100 * math.expm1(high):+.1f}%]"


def many(count: int, unit: str) -> str:
    """A count with its unit."""
    return f"{count} {unit}" + ("" if count == 1 else "s")


def seen(view: View, sessions: int, unit: str) -> str:
    """An estimate with its interval and the sessions that it rests on."""
    return f"{interval(view)} over {many(sessions, unit)}"


# -- cases that are not decided by a test ------------------------------------------------------------------------


def without_baseline(against: str) -> Reason:
    """There is nothing to compare with."""
    return Reason("no-baseline", f"there is nothing to compare with: {against}")


def thin_baseline(usable: int, policy: Policy) -> Reason:
    """The baseline has too few sessions."""
    text = f"the baseline has {many(usable, 'usable session')}; {policy.fewest_stored} are needed"
    return Reason("thin-baseline", text, "record it again, with more sessions")


def too_few(lost: Sequence[str], count: int, needed: int, unit: str) -> Reason:
    """Too few sessions are usable; ``lost`` is what disturbed the others."""
    if not lost:
        text = f"an estimate in {many(count, unit)}; {needed} are needed"
        return Reason("too-few", text, "see why the other sessions have none")
    text = f"{len(lost)} of {many(count, unit)} disturbed ({lost[0]}); {needed} undisturbed ones are needed"
    return Reason("disturbed", text, "run again on an idle machine")


# -- the machine as a whole --------------------------------------------------------------------------------------


def comparators_moved(move: float, along: int, count: int) -> Reason:
    """The comparators' median case moved since the baseline."""
    return Reason(
        "anchor-shift",
        f"the comparators' median case is {words(move)} than in the baseline ({along} of {count} moved that way): a "
        "slower case must be slower both by time alone and as a ratio",
        "the machine or the comparator changed; record again when that is meant to stay",
    )


def all_moved(move: float, alike: int, count: int) -> Reason:
    """All cases moved alike, and none has a comparator."""
    return Reason(
        "anchor-shift",
        f"all cases moved alike: {alike} of {count} are about {words(move)} than in the baseline, and there is no "
        "comparator that could tell the machine from the code",
        "time a comparator, or run base against head",
    )


def comparators_differ(whole: View) -> Reason:
    """Head's comparators differ from base's."""
    text = f"head's comparators are {interval(whole)} against base's (median case): all is judged by time alone"
    return Reason("anchor-shift", text)


def without_comparator(told: str, move: float) -> Reason:
    """A case without a comparator, where the machine moved."""
    text = f"{told}; without a comparator that cannot be told from the machine, {words(move)} as a whole"
    return Reason("anchor-shift", text, "give the case a comparator, or run base against head")


def comparator_moved(e: Evidence, unit: str) -> Reason:
    """The ratio moved and the time did not, so the comparator changed."""
    ratio = interval(e.ratio) if e.ratio else ""
    comparator = words(e.comparator.estimate) if e.comparator else ""
    return Reason(
        "anchor-shift",
        f"as a ratio {ratio}, by time alone {seen(e.raw, e.sessions, unit)}: the comparator is {comparator}",
        "record again, or run base against head",
    )


# -- the verdict on a case ---------------------------------------------------------------------------------------


def within(e: Evidence, told: str) -> Reason:
    """No slow-down beyond the tolerance."""
    return Reason("within", f"{told}; {percent(e.minimum_effect)} slower would have been seen")


def to_confirm(told: str) -> Reason:
    """The screen's suspicion."""
    return Reason("to-confirm", f"{told}: has to be confirmed", "let the confirmation run")


def underpowered(e: Evidence, policy: Policy, told: str) -> Reason:
    """The noise hides a change."""
    least = f"less than {percent(e.minimum_effect)}" if math.isfinite(e.minimum_effect) else "anything"
    return Reason(
        "underpowered",
        f"{told}; {least} slower would go unseen, and {percent(policy.underpowered_from)} is the most that may",
        "record more sessions, or on a quieter machine",
    )


def far(policy: Policy, told: str) -> Reason:
    """A slow-down that no disturbance explains."""
    return Reason(
        "far",
        f"{told}; most were disturbed, and yet each was more than {1 + policy.far:g} times as slow as what it is "
        "compared with",
    )


def beyond_guard(policy: Policy, told: str) -> Reason:
    """Every session is beyond the guard."""
    return Reason("guard", f"{told}, beyond the guard of {percent(policy.guard)} in each, whatever the noise")


def confirmed(e: Evidence, claim: Claim, policy: Policy, told: str, unit: str, *, mirrored: bool) -> Reason:
    """Slower, faster, or drifted: what the confirmation found."""
    view, limit = claim.needed[0]
    beyond = sum(change > limit for change in view.changes)
    often = f"in {beyond} of {many(len(view.changes), unit)} (p {claim.p_value:.1g})"
    if claim.code == "drift":
        total = words(view.estimate + math.log1p(policy.drift) - limit)
        text = f"{total} than in the first epoch, beyond the {percent(policy.drift)} of drift {often}; {told}"
        return Reason("drift", text)
    text = f"{told}, by more than {percent(policy.delta)} {often}"
    if len(claim.needed) > 1:
        text += f"; by time alone {interval(e.raw)}"
    if mirrored:
        return Reason("faster-confirmed", text, "record it, so that it is kept")
    return Reason("slower-confirmed", text)


def not_confirmed(policy: Policy, told: str, *, is_open: bool) -> Reason:
    """The suspicion went away, or it may still be true."""
    if is_open:
        text = f"{told}: it may be more than the tolerated {percent(policy.delta)}, but not surely"
        return Reason("not-confirmed", text, "run again with more sessions")
    return Reason("not-confirmed", f"{told}: what the screen saw did not recur")
