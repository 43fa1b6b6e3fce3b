"""Sessions in which the comparators alone were faster or slower than usual: these count by time.

A library may be in a state of its own for as long as a session lasts: on two cores of an EPYC whose threads slept while
they waited, ATen's products by MKL and oneDNN took 20% longer in one session of six, and the templates beside them did
not.  As a ratio, such a session says that every case became faster, and hides a slow-down.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.speed.gate import estimates
from pytest_gemm.speed.gate.estimates import Reading, Readings, Stored
from pytest_gemm.speed.gate.policy import Policy


def usual(some: Readings) -> dict[CaseId, Reading]:
    """The median session of each case that has a comparator throughout."""
    found = {}
    for case, readings in some.items():
        known = estimates.undisturbed(readings)
        if known and (comparator := estimates.median_comparator(known)) is not None:
            found[case] = Reading(statistics.median(one.subject for one in known), comparator)
    return found


def mended(some: Readings, usually: Mapping[CaseId, Reading], policy: Policy) -> Readings:
    """The readings, with the usual time of the comparator in sessions whose comparators alone have moved.

    That is a session whose median case has moved by more than ``policy.anchor_shift`` in the comparator's time, and not
    half as much in the subject's, from the other sessions given: all of them may be slower.  Where most sessions are so
    the comparators have changed, and nothing is mended.
    """
    own = usual(some)
    moves: dict[int, list[tuple[float, float]]] = {}
    for case, readings in some.items():
        for one in readings if case in usually and case in own else ():
            if one.comparator is not None and (was := usually[case].comparator):
                move = math.log(one.subject / own[case].subject), math.log(one.comparator / was)
                moves.setdefault(one.session, []).append(move)
    off = {number for number, found in moves.items() if _is_off(found, policy)}
    if not off or 2 * len(off) > len(moves):
        return some

    def as_usual(case: CaseId, one: Reading) -> Reading:
        is_off = one.session in off and one.comparator is not None and case in usually
        return dataclasses.replace(one, comparator=usually[case].comparator) if is_off else one

    return {case: [as_usual(case, one) for one in readings] for case, readings in some.items()}


def _is_off(moves: Iterable[tuple[float, float]], policy: Policy) -> bool:
    subject, comparator = (statistics.median(some) for some in zip(*moves, strict=True))
    return bool(abs(comparator) > math.log1p(policy.anchor_shift) and abs(comparator - subject) > abs(comparator) / 2)


def mended_baselines(stored: Mapping[CaseId, Stored], policy: Policy) -> dict[CaseId, Stored]:
    """The same of baselines, whose sessions are in one order in all cases."""
    numbered = {
        case: [dataclasses.replace(reading, session=number) for number, reading in enumerate(one.readings)]
        for case, one in stored.items()
    }
    found = mended(numbered, usual(numbered), policy)
    return {case: dataclasses.replace(one, readings=tuple(found[case])) for case, one in stored.items()}
