"""A recording that a busy machine ends: which of its sessions are good, and who disturbed the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import psutil

from pytest_gemm.speed.data import Session

# Share of a session's samples beyond which it counts as disturbed; as many such sessions in a row end a recording.
_DISTURBED: Final = 0.5
_IN_A_ROW: Final = 3
# Processes that used less of a core are not named, and no more than so many are.
_LEAST: Final = 0.05
_NAMED: Final = 3


def is_good(session: Session) -> bool:
    """Whether the machine was quiet for most of its samples."""
    timed = [sample for sample in session.samples if sample.is_timed]
    return sum(bool(sample.disturbed) for sample in timed) <= _DISTURBED * len(timed)


def is_hopeless(sessions: Sequence[Session]) -> bool:
    """Whether a recording that goes on would be one of a busy machine: the last sessions were all disturbed."""
    return len(sessions) >= _IN_A_ROW and not any(map(is_good, sessions[-_IN_A_ROW:]))


def processor_milliseconds() -> Counter[str]:
    """CPU time of all processes that can be seen, by name and number; without this one and those that it started."""
    this = psutil.Process()
    own = {this.pid, *(child.pid for child in this.children(recursive=True))}
    # What may not be read is None.
    every = [(one.pid, one.info["name"], one.info["cpu_times"]) for one in psutil.process_iter(["name", "cpu_times"])]
    return Counter(
        {f"{name} (process {pid})": round(1e3 * (t.user + t.system)) for pid, name, t in every if t and pid not in own}
    )


def busiest(before: Counter[str], seconds: float) -> str:
    """Who used the cores in the ``seconds`` since :func:`processor_milliseconds`, the busiest first, in words."""
    used = (processor_milliseconds() - before).most_common(_NAMED)
    named = [f"{who} {spent / seconds / 1e3:.2f} cores" for who, spent in used if spent >= 1e3 * _LEAST * seconds]
    return ", ".join(named) or "no process that can be seen here: another guest of the host, or short ones"
