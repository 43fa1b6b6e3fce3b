"""Operands that change between timed calls, and what each result has to show of it.

Before every timed call a *strip* of A, a run of neighbouring elements, is overwritten in place with other elements of
A; or several, one in each part of its rows, where a measurement has the same ones throughout.  A kernel that returns
an earlier result, or keeps one by the address or by some elements of its operands, is wrong then, however its call
knows that it is timed.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from pytest_gemm.core.outcome import Misconduct
from pytest_gemm.judging.results import words
from pytest_gemm.worker.calls import has_bits, ordinary
from pytest_gemm.worker.inline import as_tuple

if TYPE_CHECKING:
    from pytest_gemm.operands.tensors import Operands

# What a strip holds in turn: its own elements first.  More than the calls of a window of any kernel that takes longer
# than to look its operands up would; a prime, so that two sets of operands do not keep step.
_CONTENTS: Final = 997
# Elements of a strip: enough that a result in a narrow type shows them among thousands.
_WIDTH: Final = 16
# Seconds in which a thread that computes late would have come further.
_LATE: Final = 0.05

Results = tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Strip:
    """Where A changes, and into what.

    Attributes:
        index: of the first element of A.
        dim: along which the strip runs.
        width: how many elements.
        contents: the bits of each content, one a row, on A's device.
    """

    index: tuple[int, ...]
    dim: int
    width: int
    contents: torch.Tensor

    @classmethod
    def of(cls, a: torch.Tensor, seed: int, count: int, bank: torch.Tensor | None = None) -> tuple[Strip, ...]:
        """Strips of A by chance, the same for the same elements and seed; none where A cannot change.

        Args:
            a: as it is given.
            seed: of the places.
            count: one in each of so many equal parts of the rows; fewer where they would overlap.
            bank: see :func:`_bank`, where it is known.
        """
        if not a.numel() or a.is_conj() or a.is_neg() or not has_bits(a):
            return ()
        bits, chance = words(a), random.Random(seed)
        near = [dim for dim, stride in enumerate(bits.stride()) if stride == 1 and bits.shape[dim] > 1]
        dim, rows = near[-1] if near else bits.dim() - 1, max(0, bits.dim() - 2)
        width = min(_WIDTH, bits.shape[dim]) if near else 1
        places = [size - (width - 1 if at == dim else 0) for at, size in enumerate(bits.shape)]
        height = width if dim == rows else 1
        count = min(count, max(1, places[rows] // height))
        bank, made = _bank(a) if bank is None else bank, []
        for part in range(count):
            index = [chance.randrange(size) for size in places]
            first, last = (places[rows] * at // count for at in (part, part + 1))
            index[rows] = chance.randrange(first, last if part == count - 1 else last - height + 1)
            contents = bank[:, :width].clone()
            made.append(cls(tuple(index), dim, width, contents))
            contents[0] = made[-1].place(a)
        return tuple(made)

    def place(self, a: torch.Tensor) -> torch.Tensor:
        """The strip in the memory of A, or of other operands of its shape and strides."""
        bits = words(a)
        line = bits[tuple(slice(None) if dim == self.dim else at for dim, at in enumerate(self.index))]
        return line.narrow(0, self.index[self.dim], self.width)

    def lines(self, a: torch.Tensor) -> slice:
        """The rows of A, and of its product, that it is part of."""
        rows = self.index[a.dim() - 2]
        return slice(rows, rows + (self.width if self.dim == a.dim() - 2 else 1))


def _bank(a: torch.Tensor) -> torch.Tensor:
    """The bits of elements of A by chance: contents of a strip, each a row."""
    bits, generator = words(a), torch.Generator().manual_seed(0)
    places = [torch.randint(size, (_CONTENTS, _WIDTH), generator=generator) for size in bits.shape]
    return bits[tuple(place.to(bits.device) for place in places)]


class Doubt(msgspec.Struct, frozen=True):
    """A timed result that only a judgement can tell from a wrong one.

    Attributes:
        seed, count, content: of the strips that were in A.
        is_kept: it is the result of other operands, bit for bit.
    """

    seed: int
    count: int
    content: int
    is_kept: bool


def change(given: Operands, doubt: Doubt) -> None:
    """Give A the elements that it had in the call."""
    for strip in Strip.of(given.a, doubt.seed, doubt.count):
        strip.place(given.a).copy_(strip.contents[doubt.content])


class Changing:
    """Sets of operands whose A changes, and the results that the timed calls have returned.

    Args:
        sets: operands of equal values; a call of each comes in turn.
        count: strips at a time.

    Attributes:
        doubt: the last result in doubt, those of a kept result before others; ``None`` without one.
        doubted: the results.
        first: copies of the first results of the operands as they are given; ``None`` until there are any.
    """

    def __init__(self, sets: Sequence[Operands], count: int = 1) -> None:
        self._sets = sets
        self._count = count
        self._chance = random.SystemRandom()
        self._strips: tuple[Strip, ...] = ()
        self._bank: torch.Tensor | None = None
        self._seed = 0
        # A result that is accumulated into an operand depends on all calls before it.
        self._is_compared = not sets[0].problem.in_place
        self.first: Results | None = None
        self.doubt: Doubt | None = None
        self.doubted: Results = ()

    def move(self) -> None:
        """Restore A, and go on with other strips."""
        self.restore()
        self._seed = self._chance.randrange(1 << 31)
        a = self._sets[0].a
        if self._bank is None and a.numel() and not (a.is_conj() or a.is_neg()):
            self._bank = _bank(a)
        self._strips = Strip.of(a, self._seed, self._count, self._bank)
        self._places = [[strip.place(one.a) for strip in self._strips] for one in self._sets]
        self._every = [place for places in self._places for place in places]
        self._aside = [strip.contents[0].clone() for strip in self._strips]

    def restore(self) -> None:
        """Give A what it held at first."""
        self.write(0)

    def write(self, content: int, aside: int = 0) -> None:
        """Write one content to all sets, and put one aside."""
        if self._strips:
            # In few launches: on a GPU there may be 64 sets.
            torch._foreach_copy_(self._every, [strip.contents[content] for strip in self._strips] * len(self._sets))
            torch._foreach_copy_(self._aside, [strip.contents[aside] for strip in self._strips])

    def put(self, index: int) -> None:
        """Write what was put aside to one set, by a launch that a graph can hold."""
        if self._strips:
            torch._foreach_copy_(self._places[index], self._aside)

    def memory(self) -> tuple[list[memoryview], list[bytes]]:
        """The first strip of each set in the memory of a CPU, and the bytes of each content."""
        if not self._strips:
            return [memoryview(bytearray())] * len(self._sets), [b""] * _CONTENTS
        contents = self._strips[0].contents.numpy()
        step = contents.nbytes // _CONTENTS
        every = contents.tobytes()
        rows = [every[at : at + step] for at in range(0, len(every), step)]
        return [place.numpy().data.cast("B") for place, *_ in self._places], rows

    def next_content(self) -> int:
        """Which content the last call of a reading has: that of the given operands in half of them and at first."""
        if self.first is None or self._chance.random() < 0.5:
            return 0
        return self.other_content(0)

    def other_content(self, content: int) -> int:
        """A content that the calls before may have: that of the given operands, or where that is taken any other."""
        return 0 if content else self._chance.randrange(1, _CONTENTS)

    def see(self, made: Any, content: int) -> None:
        """Compare what the last call of a reading has returned, right after it.

        The same operands have to give the same bits, other ones others in the rows of the strip alone.  What does not
        is a doubt: a kernel need not be deterministic, and a strip may be without effect.

        Raises:
            Misconduct: for what is no ordinary tensor, and for a result that changes although no call is made.
        """
        if not self._is_compared:
            return
        own = tuple(map(ordinary, as_tuple(made)))
        if not all(map(has_bits, own)):
            return
        if self.first is None:
            if content == 0:
                self.first = tuple(map(torch.clone, own))
            return
        if self._agrees(own, content):
            return
        copies = tuple(map(torch.clone, own))
        if self.doubt is None:
            time.sleep(_LATE)
            if not all(map(_equal, own, copies)):
                text = "the result of a timed call was written after the call had returned"
                raise Misconduct("written-after-return", text, "wait for every thread and stream before returning")
        changed = content != 0 and bool(self._strips)
        is_kept = changed and len(own) == len(self.first) and all(map(_equal, own, self.first))
        if self.doubt is None or is_kept or not self.doubt.is_kept:
            self.doubt, self.doubted = Doubt(self._seed, self._count, content, is_kept), copies

    def _agrees(self, own: Results, content: int) -> bool:
        """Whether results are as like the first ones as their content is."""
        assert self.first is not None
        if [(x.shape, x.dtype) for x in own] != [(x.shape, x.dtype) for x in self.first]:
            return False
        if content == 0 or not self._strips:
            return all(map(_equal, own, self.first))
        a, x, y = self._sets[0].a, own[0], self.first[0]
        if self._sets[0].problem.op.grouped or len(own) > 1 or x.dim() < 2 or x.shape[-2] != a.shape[-2]:
            return not all(map(_equal, own, self.first))
        changed = [strip.lines(a) for strip in self._strips]  # from the first row to the last
        edges = [0, *(edge for rows in changed for edge in (rows.start, rows.stop)), x.shape[-2]]
        others = all(_equal(x[..., i:j, :], y[..., i:j, :]) for i, j in zip(edges[::2], edges[1::2], strict=True))
        return others and not any(_equal(x[..., rows, :], y[..., rows, :]) for rows in changed)


def _equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether all bits are equal, of tensors of one shape and dtype."""
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(words(x), words(y))
