"""How a problem is to be built: what the engine hands a backend beside the problem and its operands."""

from __future__ import annotations

import dataclasses
import enum
from typing import Final

from pytest_gemm.core.case_id import Device, Mode


class Selection(str, enum.Enum):
    """How a backend selects one of its candidates.  ``OWN`` is the backend's own way."""

    OWN = ""
    ONE = "one"  # by a rule that depends on the problem's line alone; nothing is benchmarked
    WINNER = "winner"  # the fastest, by benchmarking


class Capability(str, enum.Enum):
    """A field of :class:`BuildRequest` that a backend honours; without it the field has its default."""

    SELECTION = "selection"
    MODE = "mode"
    ISA = "isa"
    MACHINE = "machine"
    USER_CACHES = "user_caches"
    """``test_caches.py`` runs: a problem is prepared twice, the second time with other values in the same memory."""
    THREADS = "threads"
    """No field: what is prepared may be called by other threads than the one that prepares, and by several at once."""


@dataclasses.dataclass(frozen=True)
class BuildRequest:
    """How a problem is to be built.  A backend that declares no capabilities may ignore it.

    Attributes:
        device: where the operands are.
        candidate: name of the one candidate to build; in a request for a list, a name or a pattern (``fnmatch``) of
            some.  "": the backend selects one, or lists all.
        selection: how it selects one.
        mode: how a user's program reaches the kernel.
        isa: instruction set of the CPU to generate code for, one of ``machine.isa.ISAS``; "": the machine's own.
        machine: name of the one of ``machine.machines`` to compile as on, whose instruction set ``isa`` is then; a CPU
            that does not execute that one compiles and runs nothing.  "": this machine.
        user_caches: compile at every ``prepare`` as a user's process does, with every cache on.  The tag separates
            these caches from all others; "" is without.
        run_threads: CPU threads with which the program is run, where these are not those that it is compiled with; 0:
            the same.  A backend that sets PyTorch's number in a run has to heed it.
        alone: no kernel of it may have been compiled with those of other problems, see ``protocols.Together``.
    """

    device: Device = Device.CPU
    candidate: str = ""
    selection: Selection = Selection.OWN
    mode: Mode = Mode.OWN
    isa: str = ""
    machine: str = ""
    user_caches: str = ""
    run_threads: int = 0
    alone: bool = False

    def replace(self, **changes: object) -> BuildRequest:
        """This request with other values of some fields."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]  # checked by the fields' own types


DEFAULT: Final = BuildRequest()


def honours(backend: object, capability: Capability) -> bool:
    """Whether a backend declares a capability."""
    return bool(capability in getattr(backend, "capabilities", ()))
