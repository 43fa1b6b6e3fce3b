"""The policy of the gate: thresholds and levels of significance."""

from __future__ import annotations

import dataclasses
from typing import Final

WEIGHTS: Final = (1.0, 0.5, 0.0)

POWER: Final = 0.95


@dataclasses.dataclass(frozen=True)
class Policy:
    """What the gate tolerates and how sure it has to be.  All changes are fractions: 0.02 is 2%.

    Attributes:
        delta: slow-down that is tolerated; the null hypothesis is "at most this".
        screen_sessions: processes that look at every case.
        confirm_sessions: further processes that look at the cases that the screen selected out, in all.
        first_look: after so many of these, or pairs, what is clear already is settled and only the rest goes on.
        screen_pairs, confirm_pairs: the same for base against head; a pair is one process of each.
        screen_level: level of the screen's test, a case.
        confirm_level: level of the confirmation, over all cases that are confirmed (Holm), shared by its two looks.
        floor: least session-to-session standard deviation of the log estimate that is believed.
        underpowered_from: a case whose minimum detectable effect is above this stays undecided.
        anchor_shift: move of the comparators' median case from which on they are no anchor any more.
        guard: a slow-down beyond this in every session is red whatever the noise is.
        far: a slow-down beyond this, from the slowest stored session to the fastest new one, is red although the new
            sessions were disturbed.
        drift: tolerated slow-down since the first epoch.
        fewest_stored: sessions that a baseline needs to be tested against.
        stray: share of the sessions that are faster than their spread explains (and of those that are slower).
        stray_by: by how much at most.
        day: least standard deviation of what moves a case, and of what moves the machine, between recording and run.
        of_session: the same of a case as a share of what moves it from session to session.
        beside: how many other cases are usually confirmed, by noise, beside one that became slower.
    """

    delta: float = 0.02
    screen_sessions: int = 4
    confirm_sessions: int = 16
    first_look: int = 6
    screen_pairs: int = 4
    confirm_pairs: int = 12
    screen_level: float = 0.30
    confirm_level: float = 0.02
    floor: float = 0.003
    underpowered_from: float = 0.10
    anchor_shift: float = 0.03
    guard: float = 0.15
    far: float = 3.0
    drift: float = 0.05
    fewest_stored: int = 5
    stray: float = 0.025
    stray_by: float = 0.04
    day: float = 0.003
    of_session: float = 0.6
    beside: int = 5

    @property
    def sessions(self) -> tuple[int, int]:
        """Sessions of screen and confirmation."""
        return self.screen_sessions, self.confirm_sessions

    @property
    def pairs(self) -> tuple[int, int]:
        """Pairs of screen and confirmation."""
        return self.screen_pairs, self.confirm_pairs

    def looks(self, sessions: int) -> tuple[int, ...]:
        """After how many sessions, or pairs, of a confirmation of ``sessions`` it is judged.

        Twice, unless the second look would see hardly more than the first.
        """
        return (self.first_look, sessions) if sessions >= 1.5 * self.first_look else (sessions,)

    @classmethod
    def for_device(cls, device: str) -> Policy:
        """The default of a device, ``cpu`` or ``cuda``."""
        return _DEVICES[device]


_DEVICES: Final = {
    "cpu": Policy(),
    "cuda": Policy(
        delta=0.01,
        screen_sessions=2,
        confirm_sessions=12,
        screen_pairs=3,
        screen_level=0.10,
        confirm_level=0.01,
        anchor_shift=0.01,
        of_session=0.0,
        beside=0,
    ),
}
