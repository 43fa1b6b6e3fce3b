"""Two interleaved processes: never both time at once, and neither for long.

What a neighbour on the same machine does to a kernel lasts from milliseconds to minutes.  Two sessions one after the
other meet different neighbours, which adds to their difference.  Two sessions that alternate after every window of a
fraction of a second meet the same ones.

The processes share the two ends of a socket and nothing else.  A process that ends, however it ends, closes its end,
and the other one goes on alone.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Final

_READY: Final = b"r"
_YOURS: Final = b"y"
_DONE: Final = b"d"


class Interleaving:
    """One side of the alternation.

    Args:
        descriptor: of this process's end; it is owned from now on, and no process that is started later inherits it.
            ``None``: there is no other side.
        first: this side begins every round.

    Example::

        sides = Interleaving(descriptor, first=True)
        with sides.round():              # begins when the other side is as far
            for window in windows:
                with sides.window():     # begins when the other side has ended its window
                    measure(window)
        sides.close()
    """

    def __init__(self, descriptor: int | None, *, first: bool) -> None:
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
        self._end = None if descriptor is None else socket.socket(fileno=descriptor)
        self._first = first
        self._is_alone = False
        self._is_mine = first

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """The block in which both sides alternate; it begins when both are there and ends when both are done."""
        self._is_alone = False
        self._send(_READY)
        while not self._is_alone and self._receive() != _READY:
            pass  # windows that were offered to this side after it had finished
        self._is_mine = self._first
        try:
            yield
        finally:
            self._send(_DONE)
            while not self._is_alone and self._receive() != _DONE:
                pass

    @contextlib.contextmanager
    def window(self) -> Iterator[None]:
        """The block of one side, while the other one waits."""
        if not self._is_mine and not self._is_alone and self._receive() == _DONE:
            self._is_alone = True
        try:
            yield
        finally:
            self._is_mine = False
            self._send(_YOURS)

    def close(self) -> None:
        """This side has no further window."""
        if self._end is not None:
            self._end.close()

    def _send(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # the other side is gone; receiving will show it
            if self._end is not None:
                self._end.sendall(word)

    def _receive(self) -> bytes:
        word = b""
        with contextlib.suppress(OSError):
            word = self._end.recv(1) if self._end is not None else b""
        self._is_alone = self._is_alone or not word
        return word
