"""A recording that a busy machine ends: which of its sessions are good."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pytest_gemm.speed.data import Session

# Share of a session's samples beyond which it counts as disturbed; as many such sessions in a row end a recording.
_DISTURBED: Final = 0.5
_IN_A_ROW: Final = 3


def is_good(session: Session) -> bool:
    """Whether the machine was quiet for most of its samples."""
    timed = [sample for sample in session.samples if sample.is_timed]
    return sum(bool(sample.disturbed) for sample in timed) <= _DISTURBED * len(timed)


def is_hopeless(sessions: Sequence[Session]) -> bool:
    """Whether a recording that goes on would be one of a busy machine: the last sessions were all disturbed."""
    return len(sessions) >= _IN_A_ROW and not any(map(is_good, sessions[-_IN_A_ROW:]))
