"""The identity of a case: the one type by which outcomes, journals, samples and baselines name what was asked for."""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import hashlib
from collections.abc import Sequence
from typing import Final


class Word(str, enum.Enum):
    """An enumeration whose members are their words, also in a text."""

    def __str__(self) -> str:
        return str(self.value)


class Device(Word):
    """Where a case computes."""

    CPU = "cpu"
    CUDA = "cuda"


class Mode(Word):
    """How a user's program reaches a kernel; see docs/reference/modes.md.  ``OWN`` is the backend's own way."""

    OWN = ""
    EAGER = "eager"
    STATIC = "static"
    DYNAMIC = "dynamic"
    CUDAGRAPHS = "cudagraphs"
    AOTI = "aoti"
    CPP_WRAPPER = "cpp-wrapper"

    @property
    def is_compiled(self) -> bool:
        """Whether a program of ``torch.compile`` or AOTInductor is asked for."""
        return self not in {Mode.OWN, Mode.EAGER}


# The modes that can be asked for.
MODES: Final = tuple(mode.value for mode in Mode if mode is not Mode.OWN)


# Words that select candidates; whatever else is given is a number or a pattern of their names.
SELECTIONS: Final = ("one", "winner", "half", "all")
# No more candidates than this are halved.
_MANY: Final = 32


def _digest(text: str) -> int:
    return hashlib.blake2b(text.encode(), digest_size=1).digest()[0]


@dataclasses.dataclass(frozen=True)
class CandidateSelection:
    """Which of a backend's candidates are judged.

    Attributes:
        text: as the option has it: ``one`` or ``winner`` (the backend selects), ``all``, ``half``, a number, a pattern
            of names, or "" for the backend's own way.
    """

    text: str = ""

    @property
    def by_backend(self) -> bool:
        """Whether the backend selects one candidate."""
        return self.text in {"", "one", "winner"}

    @property
    def by_name(self) -> bool:
        """Whether it is a pattern of names."""
        return not (self.by_backend or self.is_of_all or self.text.isdigit())

    @property
    def is_of_all(self) -> bool:
        """Whether each candidate is judged, be it with every second problem."""
        return self.text in {"all", "half"}

    def of(self, names: Sequence[str], problem: str) -> tuple[str, ...]:
        """The selected names.

        A number selects that many at even distances, the first and the last among them; ``half`` of many about every
        second one, others for each problem.

        Args:
            names: of all candidates.
            problem: the line of their problem.
        """
        if self.by_name:
            return tuple(name for name in names if fnmatch.fnmatchcase(name, self.text))
        if self.text == "half" and len(names) > _MANY:
            return tuple(name for name in names if _digest(f"{problem} {name}") % 2)
        count = len(names) if self.is_of_all else int(self.text)
        if count >= len(names):
            return tuple(names)
        steps = max(count - 1, 1)
        return tuple(names[round(i * (len(names) - 1) / steps)] for i in range(count))


def threads_text(compiled: int, run: int) -> str:
    """Numbers of CPU threads as ``--gemm-threads`` has them: ``4``, or ``4/2`` where a run has other ones."""
    return f"{compiled}/{run}" if run else str(compiled)


@dataclasses.dataclass(frozen=True, order=True)
class CaseId:
    """What is judged or timed.

    Attributes:
        backend: name of the backend.
        problem: the canonical problem line.
        candidate: the candidate that was asked for by name; "" where the backend selects one.
        mode: how the kernel is reached.
        isa: instruction set that the kernel is generated for, one of ``machine.isa.ISAS``; "": the machine's own.
        threads: CPU threads of the case, where several numbers were asked for; 0: those of the run.
        guard: which end of the operands is at a guard page, ``end`` or ``begin``; "": ordinary memory.
        run_threads: CPU threads with which a kernel is run that was compiled for ``threads``; 0: the same.
    """

    backend: str
    problem: str
    candidate: str = ""
    mode: Mode = Mode.OWN
    isa: str = ""
    threads: int = 0
    guard: str = ""
    run_threads: int = 0

    @property
    def who(self) -> str:
        """The backend with what was asked for: ``cpp``, ``cpp@aoti``, ``cpp@aoti@avx2@2t``, ``cpp@4/2t``."""
        threads = f"{threads_text(self.threads, self.run_threads)}t" if self.threads else ""
        return "@".join(filter(None, (self.backend, self.mode.value, self.isa, threads)))

    @property
    def whole(self) -> CaseId:
        """The case that a candidate is of."""
        return dataclasses.replace(self, candidate="")

    def __str__(self) -> str:
        return f"{self.who}-{self.problem}" + (f"@{self.candidate}" if self.candidate else "")
