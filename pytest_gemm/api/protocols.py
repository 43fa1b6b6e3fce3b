"""What a backend is: the Protocol that every source of kernels implements, and their registry.

A backend is driven in four steps, and each one answers from facts::

    backend.availability(device)          can it run on this machine at all?
    backend.supports(problem)             does it claim this problem?
    prepared = backend.prepare(problem, operands)      compile, once for all distributions
    prepared.run(operands); prepared.proof()           compute, and say what ran

Nothing here imports torch at import time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, Protocol, cast, runtime_checkable

from pytest_gemm.api.proof import Proof
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.outcome import Reason, Unsupported
from pytest_gemm.problem.problem import Problem

if TYPE_CHECKING:
    import torch

    from pytest_gemm.operands.tensors import Operands


@dataclasses.dataclass(frozen=True)
class Availability:
    """Whether a backend can run on this machine.

    Attributes:
        reason: why it cannot, with the command or the part that would change it; ``None`` when it can.
        versions: what a report should name, for instance ``{"g++": "12.2.0"}``.
    """

    reason: Reason | None = None
    versions: tuple[tuple[str, str], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the backend can run."""
        return self.reason is None


@runtime_checkable
class Prepared(Protocol):
    """A compiled problem, ready to run with any operands of it.

    ``contract`` may be sharper than what ``supports`` could know: it is read after ``prepare``.
    """

    contract: Contract

    def run(self, operands: Operands) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Compute the problem on these operands and return a tensor that nobody else writes.

        With the flag ``tap`` it is a tuple of two, in the order of ``Problem.outputs``.  The operands belong to the
        problem that was prepared (with ``dyn-m``: at any M).
        """
        ...

    def proof(self) -> Proof:
        """What the last :meth:`run` executed."""
        ...


@runtime_checkable
class Timeable(Prepared, Protocol):
    """A compiled problem that can be called without what proves and guards a judged run."""

    def timed(self, operands: Operands) -> AbstractContextManager[Callable[[], object]]:
        """A block with the call to time: what a user's program would call, on these operands, without arguments.

        It returns what :meth:`run` would.  Whatever a run does for the judge's sake (poison, rebinding, counting) is
        done before the block or left out.  On CUDA the call can be captured into a graph.
        """
        ...


@runtime_checkable
class Backend(Protocol):
    """A source of kernels.  Implement this to have the whole suite run over yours.

    Example::

        class Mine:
            name = "mine"

            def availability(self, device): return Availability()
            def supports(self, problem):
                return None if problem.op.name == "mm" else Unsupported("op", "mine has mm only")
            def prepare(self, problem, operands): return MinePrepared(problem)

    ``name`` is what ``--gemm-backends`` takes.  A backend that knows which devices it computes on says so
    in an attribute ``devices``, for instance ``("cpu",)``; without one it is asked about both.
    """

    name: str

    def availability(self, device: str) -> Availability:
        """Whether it can run here; cheap, and without importing torch where that is possible."""
        ...

    def supports(self, problem: Problem) -> Unsupported | None:
        """``None`` when the backend claims the problem, otherwise the refusal.  Facts only: nothing runs."""
        ...

    def prepare(self, problem: Problem, operands: Operands) -> Prepared:
        """Compile the problem.  ``operands`` are the first that it will run on."""
        ...


@runtime_checkable
class Caching(Backend, Protocol):
    """A backend whose compiler keeps what it compiled: the suite asks whether it keeps too much."""

    def with_user_caches(self, tag: str) -> Backend:
        """A variant that compiles at every ``prepare`` as a user's process does, with every cache on.

        Args:
            tag: separates these caches from all others; a new one starts empty.  The variant can be pickled.
        """
        ...


@runtime_checkable
class Choosing(Backend, Protocol):
    """A backend that has several candidates for a problem, each of which autotuning could pick.

    The names are stable: the same problem on the same device and release has the same ones, in the same order.
    """

    def choices(self, problem: Problem, operands: Operands) -> tuple[str, ...]:
        """Names of all candidates, each once.  Compiles nothing that autotuning would not.

        Raises:
            Unsupported: when there is none.
        """
        ...

    def prepare_choice(self, problem: Problem, operands: Operands, choice: str) -> Prepared:
        """Like ``prepare``, with this candidate and no other.

        Raises:
            Pruned: when the candidate does not compile for this device, or does not fit it.
        """
        ...


@runtime_checkable
class Parametrised(Choosing, Protocol):
    """A backend whose candidates have settings: more of them can be asked for by name than are listed."""

    def named(self, problem: Problem, operands: Operands, wanted: str) -> tuple[str, ...]:
        """Candidates of this name, or pattern of names, that ``choices()`` does not list; empty where there is none."""
        ...


@runtime_checkable
class Refusing(Choosing, Protocol):
    """A backend that knows candidates which a problem could have by its types, and does not have."""

    def refused(self, problem: Problem, operands: Operands) -> Mapping[str, Reason]:
        """Their names, each with the reason."""
        ...


@runtime_checkable
class Tuning(Backend, Protocol):
    """A backend that can pick one of its candidates in two ways."""

    def picking(self, how: Literal["one", "winner"]) -> Backend:
        """A variant that picks in this way, the same one for the same way.

        Args:
            how: ``one``: by a rule that follows from the problem's line; ``winner``: by benchmarking all of them.
        """
        ...


@runtime_checkable
class Sparing(Tuning, Protocol):
    """A backend that times its candidates itself to pick one, and can leave out some that are known to be slow.

    What is compiled has an attribute ``timings``: seconds a call by candidate, of those that were timed to pick it.
    Not for a backend whose compiler does the picking: what that takes among fewer candidates is no user's pick.
    """

    def sparing(self, names: Iterable[str]) -> Backend:
        """A variant that picks the winner without these candidates; nothing else of it differs."""
        ...


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How somebody who has PyTorch alone comes to a backend's kernel: what a standalone script is written from.

    Attributes:
        how: ``eager``: the program is called; ``compile``: by ``torch.compile``; ``dynamic``: the same for any size;
            ``aoti``: exported, compiled ahead of time into a package, and loaded.
        options: names and values of ``torch._inductor.config`` that force the backend and the candidate.
        constants: names of the program's tensors that are frozen parameters.
        dynamic: dimension that is M, by name of an input, for an artifact for any M.
        hint: the M at which that is compiled.
        caches: PyTorch's caches are on, as they are for a user.
        threads: of the CPU.
        matmul: file and name of a plain function that takes the place of the product, or ``None``.
        setup: statements to execute once torch is there.
        micro_kernel: name of the one micro-kernel of the C++ templates that is left registered; "": all of them.
    """

    how: Literal["eager", "compile", "dynamic", "aoti"] = "eager"
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    constants: tuple[str, ...] = ()
    dynamic: Mapping[str, int] = dataclasses.field(default_factory=dict)
    hint: int = 0
    caches: bool = False
    threads: int = 1
    matmul: tuple[str, str] | None = None
    setup: tuple[str, ...] = ()
    micro_kernel: str = ""


@runtime_checkable
class Scripted(Backend, Protocol):
    """A backend whose failures can be shown by a script that needs PyTorch alone."""

    def recipe(self, problem: Problem, operands: Operands, choice: str) -> Recipe:
        """How a script comes to the kernel of this candidate; "" where the backend chose and nobody knows whom.

        Raises:
            Unsupported: when no such script can be written.
        """
        ...


@runtime_checkable
class Moded(Backend, Protocol):
    """A backend that can be reached in several modes."""

    def in_mode(self, mode: str, device: str) -> Backend:
        """A variant that is reached in this one of :data:`MODES`, the same one for the same mode.

        Raises:
            Unsupported: when the backend, the device or this release of PyTorch has no such mode.
        """
        ...


def in_mode(backend: Backend, mode: str, device: str) -> Backend:
    """The variant of a backend in a mode; the backend itself for "", its own way.

    Raises:
        Unsupported: when there is none.
    """
    if not mode:
        return backend
    if isinstance(backend, Moded):
        return backend.in_mode(mode, device)
    if mode == "eager":
        return backend
    raise Unsupported("mode", f"{backend.name} is called as it is: it has no mode {mode}", "--gemm-modes=eager")


@runtime_checkable
class Leveled(Backend, Protocol):
    """A backend that generates code for an instruction set of the CPU, and can do so for a lower one than it has."""

    def at_isa(self, isa: str) -> Backend:
        """A variant that generates for this one of ``machine.isa.ISAS``, the same one for the same level.

        Raises:
            Unsupported: when this machine, its compiler or this release of PyTorch cannot.
        """
        ...


def at_isa(backend: Backend, isa: str) -> Backend:
    """The variant of a backend at an instruction set; the backend itself for "", the machine's own.

    Raises:
        Unsupported: when there is none.
    """
    if not isa:
        return backend
    if isinstance(backend, Leveled):
        return backend.at_isa(isa)
    raise Unsupported("isa", f"{backend.name} generates no code for the CPU: it has no {isa}", "leave out --gemm-isa")


def tuned(backend: Backend, choices: str) -> Backend:
    """The variant that selects its candidate as ``--gemm-choices`` says, or the backend where there is none."""
    if choices in {"one", "winner"} and isinstance(backend, Tuning):
        return backend.picking(cast("Literal['one', 'winner']", choices))
    return backend


def names_candidates(choices: str) -> bool:
    """Whether a value of ``--gemm-choices`` is a pattern of candidates' names."""
    return choices not in {"", "one", "winner", "all"} and not choices.isdigit()
