"""Machines that users have, as whose code can be compiled: ``machines.toml``."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclasses.dataclass(frozen=True)
class Machine:
    """What generated code depends on; a row has the fields of a CPU or those of a GPU, 0 and "" for the others.

    Attributes:
        name: what ``run.machine`` takes.
        help: what it is.
        threads: CPU threads of PyTorch.
        l1d, l2, l3: data cache of a core, in KiB.
        isa: one of ``machine.isa.ISAS``.
        multiprocessors: of the GPU.
        shared_memory: that a block may have, in KiB.
    """

    name: str
    help: str
    threads: int = 0
    l1d: int = 0
    l2: int = 0
    l3: int = 0
    isa: str = ""
    multiprocessors: int = 0
    shared_memory: int = 0

    def __str__(self) -> str:
        return f"{self.name} ({self.help})"


@functools.cache
def machines() -> Mapping[str, Machine]:
    """The table, by name."""
    rows = tomllib.loads(Path(__file__).with_name("machines.toml").read_text(encoding="utf-8"))
    return {name: Machine(name, **row) for name, row in rows.items()}
