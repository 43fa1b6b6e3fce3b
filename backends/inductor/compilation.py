"""One compilation: how it is requested, and what it shows of itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from pytest_gemm.api.request import DEFAULT, BuildRequest
from pytest_gemm.core.case_id import Mode
from pytest_gemm.core.outcome import Reason

if TYPE_CHECKING:
    import torch

# A candidate: a number, counted round; a name; or, of a program that is compiled again, the names that were selected,
# of which each of its selections has one.  None: Inductor selects.
Wanted: TypeAlias = int | str | tuple[str, ...] | None


@dataclasses.dataclass
class CompileLog:
    """What a backend has compiled.

    Attributes:
        compiles: how often the compiler ran; a list of candidates is no compile.
    """

    compiles: int = 0


@dataclasses.dataclass(frozen=True)
class CompileSpec:
    """How to compile: Inductor's options, where its caches live, and what may be answered from them.

    ``threads`` holds while compiling and running: blocking reads it, and Dynamo guards on it.
    ``request`` is what the engine asked for.
    ``candidate`` compiles that one of the candidates instead of benchmarking all, see :data:`Wanted`.
    A number that leads to a candidate which is pruned gives way to the next one, a name does not.  The name is
    Inductor's, without ``suffix``: what the options add to it (``,cache=2.2.8``).
    ``multiprocessors`` is how many a GPU is taken to have; 0: those that it has, or the requested machine.
    ``device_kernel`` is the pattern of the kernels' names on the device, "" where they are those of the generated code.
    ``wanted`` is the pattern of the one candidate that has to be chosen, "" where any will do.
    ``matmul`` is a user's function that multiplies in the program, ``None`` for PyTorch's operator.
    ``log`` counts the compiles.
    """

    inductor_name: str
    options: Mapping[str, Any]
    directory: str
    threads: int
    request: BuildRequest = DEFAULT
    candidate: Wanted = None
    suffix: str = ""
    multiprocessors: int = 0
    device_kernel: str = ""
    wanted: str = ""
    matmul: Callable[..., Any] | None = None
    log: CompileLog = dataclasses.field(default_factory=CompileLog)

    @property
    def mode(self) -> Mode:
        """How the program is reached."""
        return self.request.mode

    @property
    def cache_tag(self) -> str:
        """Separates the entries of a user's caches, whose keys have no candidate or machine; "" where they are off."""
        caches, candidate = self.request.user_caches, self.request.candidate
        return "-".join(filter(None, (caches, candidate, self.request.machine))) if caches else ""


@dataclasses.dataclass(frozen=True)
class Packing:
    """One call of a C++ template's own weight packing, ready to be replayed.

    Attributes:
        source: the K x N (or batched) tensor that was packed.
        packed: what the template made of it, the tensor that became a constant of the program.
        replay: the same code with the same arguments on another tensor of that shape and dtype.
    """

    source: torch.Tensor
    packed: torch.Tensor
    replay: Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass
class Session:
    """What was seen while something compiled.

    Attributes:
        choices: names of all candidates that the selection was given.
        candidate: the one of them that was left, where one was requested.
        failed: candidates that a compile or a benchmark of the selection failed on, with the exception or, where
            Inductor does not report it, the reason.  Inductor leaves them out silently.
        pruned: candidates that were left out, with the reason; for the artifact.
        timings: seconds that the selection measured, by candidate; empty where nothing was benchmarked.
        chosen: names of those that became a node of the program.
        foreign: those of ``chosen`` that are ATen, MKL or oneDNN calls.
        subgraphs: those of ``chosen`` that are programs of their own, with a product of ATen inside (decompose-K).
        empty: ops for which the selection had no candidate at all.
        modules: generated Python modules, in order of loading.
        libraries: paths of the compiled C++.
        levels: the instruction set that each of its compile commands names, see :func:`level_of`.
        packings: replayable weight packings.
        counted: Inductor's counters of micro-kernels that rose, ``cpp_micro_gemm_amx_counter``.
        fusions: nodes that the scheduler fused into C++ templates.  What a lowering made part of a template is not
            among them (oneDNN's linear with its ``relu``, in a dtype that oneDNN has on this machine).
        compiled_with: as of :class:`Proof`.
        graph_skipped: PyTorch made no CUDA graph of the program, which mutates its inputs, for example.
    """

    choices: list[str] = dataclasses.field(default_factory=list)
    candidate: str = ""
    failed: dict[str, Exception | Reason] = dataclasses.field(default_factory=dict)
    pruned: dict[str, Reason] = dataclasses.field(default_factory=dict)
    timings: dict[str, float] = dataclasses.field(default_factory=dict)
    chosen: list[str] = dataclasses.field(default_factory=list)
    foreign: list[str] = dataclasses.field(default_factory=list)
    subgraphs: list[str] = dataclasses.field(default_factory=list)
    empty: list[str] = dataclasses.field(default_factory=list)
    modules: list[ModuleType] = dataclasses.field(default_factory=list)
    libraries: list[str] = dataclasses.field(default_factory=list)
    levels: list[str] = dataclasses.field(default_factory=list)
    packings: list[Packing] = dataclasses.field(default_factory=list)
    counted: tuple[str, ...] = ()
    fusions: int = 0
    compiled_with: int = 0
    graph_skipped: bool = False
