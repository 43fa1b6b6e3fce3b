"""Two interleaved sides: never both at once, whatever becomes of the other side."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import pytest

from pytest_gemm.speed import lockstep


class Busy:
    """Notes who did something, whether anybody else was at it, and how much was done when a side left its round."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.left: list[int] = []
        self.collisions = 0
        self._at_work = threading.Lock()

    def __call__(self, name: str) -> None:
        if not self._at_work.acquire(blocking=False):
            self.collisions += 1
            return
        time.sleep(0.002)
        self.done.append(name)
        self._at_work.release()


def side(busy: Busy, name: str, descriptor: int, rounds: Sequence[int], *, first: bool) -> None:
    with contextlib.closing(lockstep.Interleaving(descriptor, first=first)) as mine:
        for windows in rounds:
            with mine.round():
                for _ in range(windows):
                    with mine.window():
                        busy(name)
            busy.left.append(len(busy.done))


def both(rounds: Sequence[int], others: Sequence[int]) -> Busy:
    """What two threads, each with its end, did."""
    busy = Busy()
    ends = [end.detach() for end in socket.socketpair()]
    threads = [
        threading.Thread(target=side, args=(busy, "a", ends[0], rounds), kwargs={"first": True}, daemon=True),
        threading.Thread(target=side, args=(busy, "b", ends[1], others), kwargs={"first": False}, daemon=True),
    ]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return busy


def test_windows_alternate_and_the_first_side_begins() -> None:
    busy = both([5, 3], [5, 3])
    assert "".join(busy.done) == "ab" * 8
    assert busy.collisions == 0


@pytest.mark.parametrize(
    ("rounds", "others"), [([6], [2]), ([2], [6]), ([4, 4], [1, 4]), ([3, 3, 3], [3]), ([3], [0, 3, 3])]
)
def test_a_side_with_more_to_do_goes_on_alone_and_misses_nothing(rounds: list[int], others: list[int]) -> None:
    busy = both(rounds, others)
    assert (busy.done.count("a"), busy.done.count("b")) == (sum(rounds), sum(others))


def test_neither_side_leaves_a_round_before_both_are_done() -> None:
    """Who has timed everything judges its results; that is work, too."""
    busy = both([2], [6])
    assert "".join(busy.done) == "ababbbbb"
    assert busy.left == [8, 8]


@pytest.mark.parametrize("how", ["os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_the_death_of_the_other_process_ends_no_session(how: str) -> None:
    mine, other = socket.socketpair()
    code = f"""
import os, sys
from pytest_gemm.speed.lockstep import Interleaving
side = Interleaving(int(sys.argv[1]), first=True)
with side.round(), side.window():
    {how}
"""
    with subprocess.Popen([sys.executable, "-c", code, str(other.fileno())], pass_fds=[other.fileno()]):
        other.close()
        busy = Busy()
        side(busy, "a", mine.detach(), [3, 2], first=False)
    assert len(busy.done) == 5
