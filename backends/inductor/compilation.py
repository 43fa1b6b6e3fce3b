"""What one compilation showed of itself."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import TYPE_CHECKING

from pytest_gemm.outcome import Reason

if TYPE_CHECKING:
    from pytest_gemm.backends.inductor.selection import Packing


@dataclasses.dataclass
class Session:
    """What was seen while something compiled.

    Attributes:
        choices: names of all candidates that the selection was given.
        blockings: for a list of them, see :func:`_blockings`, by name.
        tried: the one of them that was left, where one was asked for.
        failed: candidates that a compile or a benchmark of the selection failed on, with the exception or, where
            Inductor does not report it, the reason.  Inductor leaves them out silently.
        pruned: candidates that were left out, with the reason; for the artifact.
        timings: seconds that the selection measured, by candidate; empty where nothing was benchmarked.
        chosen: names of those that became a node of the program.
        foreign: those of ``chosen`` that are ATen, MKL or oneDNN calls.
        subgraphs: those of ``chosen`` that are programs of their own, with a product of ATen inside (decompose-K).
        refused: ops for which the selection had no candidate at all.
        unsupported: micro-kernels of the program's types and this instruction set that are left out, with why.
        modules: generated Python modules, in order of loading.
        libraries: paths of the compiled C++.
        levels: the instruction set that each of its compile commands names, see :func:`level_of`.
        packings: replayable weight packings.
        counted: Inductor's counters of micro-kernels that rose, ``cpp_micro_gemm_amx_counter``.
        fusions: nodes that the scheduler fused into C++ templates.  What a lowering made part of a template is not
            among them (oneDNN's linear with its ``relu``, in a dtype that oneDNN has on this machine).
    """

    choices: list[str] = dataclasses.field(default_factory=list)
    blockings: dict[str, str] = dataclasses.field(default_factory=dict)
    tried: str = ""
    failed: dict[str, Exception | Reason] = dataclasses.field(default_factory=dict)
    pruned: dict[str, Reason] = dataclasses.field(default_factory=dict)
    timings: dict[str, float] = dataclasses.field(default_factory=dict)
    chosen: list[str] = dataclasses.field(default_factory=list)
    foreign: list[str] = dataclasses.field(default_factory=list)
    subgraphs: list[str] = dataclasses.field(default_factory=list)
    refused: list[str] = dataclasses.field(default_factory=list)
    unsupported: dict[str, Reason] = dataclasses.field(default_factory=dict)
    modules: list[ModuleType] = dataclasses.field(default_factory=list)
    libraries: list[str] = dataclasses.field(default_factory=list)
    levels: list[str] = dataclasses.field(default_factory=list)
    packings: list[Packing] = dataclasses.field(default_factory=list)
    counted: tuple[str, ...] = ()
    fusions: int = 0
