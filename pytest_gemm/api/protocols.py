"""What a backend implements; docs/how-to/adding-a-backend.md is the guide.

A backend is used in four steps::

    backend.availability(device)                              can it run on this machine?
    backend.supports(problem, request)                        does it support this problem?
    prepared = backend.prepare(problem, operands, request)    compile, once for all distributions
    prepared.run(operands); prepared.proof()                  compute, and report what ran

Nothing here imports torch at import time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, runtime_checkable

from pytest_gemm.api.proof import Proof
from pytest_gemm.api.request import BuildRequest, Capability, honours
from pytest_gemm.core.outcome import Outcome, Reason, Unsupported
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.problem.problem import Problem

if TYPE_CHECKING:
    import torch

    from pytest_gemm.operands.tensors import Operands
    from pytest_gemm.storage.kernel_store import Job, Store


@dataclasses.dataclass(frozen=True)
class Availability:
    """Whether a backend can run on this machine.

    Attributes:
        reason: why it cannot, with the command or the part that would change it; ``None`` when it can.
        versions: what a report should name, for instance ``(("g++", "12.2.0"),)``.
    """

    reason: Reason | None = None
    versions: tuple[tuple[str, str], ...] = ()

    @classmethod
    def lacking(cls, code: str, text: str, remedy: str = "") -> Availability:
        """That it cannot run, with the parts of the reason."""
        return cls(Reason(code, text, remedy))

    @property
    def ok(self) -> bool:
        """Whether the backend can run."""
        return self.reason is None


def no_device(name: str, devices: tuple[str, ...], device: str) -> Reason | None:
    """Why a backend of these devices cannot compute on one, from the cheapest facts on: device files before torch."""
    if device not in devices:
        own = " and ".join(devices)
        article = "the " if own == "cpu" else ""
        return Reason("device", f"{name} computes on {article}{own}, not on {device}", f"--gemm-device={devices[0]}")
    if device == "cpu":
        return None
    if not any(Path("/dev").glob("nvidia[0-9]*")) and shutil.which("nvidia-smi") is None:
        return Reason("no-cuda-device", "there is no CUDA device", "run on a machine with an NVIDIA GPU and its driver")
    import torch

    if torch.version.cuda is None and not torch.cuda.is_available():
        text = f"torch {torch.__version__} is built without CUDA"
        return Reason("no-cuda-torch", text, "install a build of PyTorch for CUDA")
    if not torch.cuda.is_available():
        return Reason("no-cuda-device", "PyTorch sees no CUDA device", "check nvidia-smi and CUDA_VISIBLE_DEVICES")
    return None


@runtime_checkable
class Prepared(Protocol):
    """A compiled problem, ready to run with any operands of it.

    ``contract`` may be sharper than what is known before the problem is compiled: it is read after ``prepare``.

    Optional members:
        constant_b: ``True`` where B is part of what was compiled.  Without it a run sees what was written to the memory
            of B since the run before, as by ``weight.copy_()``: the judge writes other values there.
        timed(operands): a context manager that yields the call to time, without arguments: what a user's program
            would call.  It returns what :meth:`run` would.  Whatever a run does for the judge (poison, rebinding,
            counting) is done before the block or left out.  On CUDA the call can be captured into a graph.
        pruned: candidates that were left out on the way to the selected one, ``Mapping[str, Reason]``.
        timings: seconds a call of the candidates that were benchmarked to select one, ``Mapping[str, float]``.
        source: text of the generated program.
    """

    contract: Contract

    def run(self, operands: Operands) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Compute the problem on these operands and return a tensor that nothing else writes.

        Of a program of two results (``program.multi_output``) it is a tuple, in the order of ``Problem.outputs``.  The
        operands belong to the problem that was prepared (with dynamic sizes: at any).
        """

    def proof(self) -> Proof:
        """What the last :meth:`run` executed."""


@runtime_checkable
class Backend(Protocol):
    """A source of kernels.  Implement this to have the whole suite run over yours.

    Attributes:
        name: what ``--gemm-backends`` takes.

    Optional members:
        devices: where it computes, ``("cpu",)`` for instance; without it, on both.
        distributions: names of installed distributions that compute; a run record has their versions.
        capabilities: which fields of a :class:`BuildRequest` it honours, a set of :class:`Capability`.
        settings, configure(values): see ``api.settings``.
        on_request: ``True``: ``auto`` leaves it out, only its name selects it.
        contracts(problem, request): what bounds the contract that a :class:`Prepared` states in the kernel's process,
            of which it has to be within one; without it those of ``tensor_core.widest``.
        constant_b: whether a :class:`Prepared` may have B as part of what was compiled; without it such a problem is
            prepared anew for other values.
    """

    name: str

    def availability(self, device: str) -> Availability:
        """Whether it can run here; cheap, and without importing torch where that is possible."""

    def supports(self, problem: Problem, request: BuildRequest) -> Unsupported | None:
        """``None`` when the backend supports the problem, otherwise the reason.  Facts only: nothing runs."""

    def prepare(self, problem: Problem, operands: Operands, request: BuildRequest) -> Prepared:
        """Compile the problem as requested.  ``operands`` are the first that it will run on.

        Raises:
            Unsupported: when only the compiler knows that it does not support the problem, or when there is no
                candidate of the requested name.
            Pruned: when the candidate does not compile for this device, or does not fit it.
        """


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The candidates of a problem, each of which the backend's selection could take.

    Attributes:
        names: of all, each once; the same problem on the same device and release has the same ones, in one order.
        named: what ``request.candidate`` means where none of these has the name or the pattern.
    """

    names: tuple[str, ...]
    named: tuple[str, ...] = ()


@runtime_checkable
class CandidateBackend(Backend, Protocol):
    """A backend that has several candidates for a problem, and prepares the one that ``request.candidate`` names."""

    def candidates(self, problem: Problem, operands: Operands, request: BuildRequest) -> Candidates:
        """The candidates; compiles nothing that the backend's own selection would not.

        Raises:
            Unsupported: when there is none.
        """


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a program with PyTorch alone reaches a backend's kernel: what a repro script is written from.

    Attributes:
        how: ``eager``: the program is called; ``compile``: by ``torch.compile``; ``dynamic``: the same for any size;
            ``aoti``: exported, compiled ahead of time into a package, and loaded.
        options: names and values of ``torch._inductor.config`` that force the backend and the candidate.
        constants: names of the program's tensors that are frozen parameters.
        dynamic: the dimensions of inputs, by name, that are dynamic sizes, each with the size.
        marked: by which function of ``torch._dynamo.decorators`` they are.
        hints: the sizes at which that is compiled.
        caches: PyTorch's caches are on, as they are for a user.
        threads: of the CPU.
        matmul: file and name of a plain function that takes the place of the product, or ``None``.
        call: with it, the source of a function of the program's tensors that computes the whole problem by that
            function, which it calls ``mine``; "" where it computes the product alone.
        setup: statements to execute once torch is there.
        needs: what the script needs beside PyTorch, for its first lines.
    """

    how: Literal["eager", "compile", "dynamic", "aoti"] = "eager"
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    constants: tuple[str, ...] = ()
    dynamic: Mapping[str, Mapping[int, str]] = dataclasses.field(default_factory=dict)
    marked: str = "mark_dynamic"
    hints: Mapping[str, int] = dataclasses.field(default_factory=dict)
    caches: bool = False
    threads: int = 1
    matmul: tuple[str, str] | None = None
    call: str = ""
    setup: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


@runtime_checkable
class ScriptedBackend(Backend, Protocol):
    """A backend whose failures can be shown by a script that needs PyTorch alone."""

    def recipe(self, problem: Problem, operands: Operands, request: BuildRequest) -> Recipe:
        """How a script reaches the kernel of ``request.candidate``; "" where the selected one is not known.

        Raises:
            Unsupported: when no such script can be written.
        """


@runtime_checkable
class Together(Backend, Protocol):
    """A backend that compiles the kernels of several problems sooner together than one by one.

    ``Proof.compiled_with`` says so of a program.  A failure of one is judged again with ``request.alone``.
    """

    def compile_together(self, jobs: Iterable[tuple[Problem, Operands, BuildRequest]]) -> None:
        """Compile several problems, each of which is prepared later; nothing of them runs, and none is an error."""


# The defaults of ``Registry.add_callable``: these objects, and not equal ones, say that nothing was written out.
TYPES: Final = ("f32", "f16", "bf16")
DEVICES: Final = ("cpu", "cuda")


class Part(NamedTuple):
    """What the author of a backend wrote out when registering it; a run says which of it no case called.

    Attributes:
        name: as a message has it, ``relu in activations=``; "" of what holds by default, which need not be called.
        called: whether a problem calls it: with its outcome whether it did, with ``None`` whether it may.
        lines: problems that call it, for a level that has none, and for smoke.
        picky: it may refuse any problem, so a run asks it for one of each op and one with each step.
        device: where it computes, of a part of ``devices=``; else "".
    """

    name: str
    called: Callable[[Problem, Outcome | None], bool]
    lines: tuple[str, ...] = ()
    picky: bool = False
    device: str = ""


@runtime_checkable
class Promising(Backend, Protocol):
    """A backend that knows what its author wrote out."""

    def promised_parts(self) -> Sequence[Part]:
        """The parts that a run of the whole suite has to call."""


@runtime_checkable
class Compiling(Backend, Protocol):
    """A backend that can compile kernels before anything runs.  It can be pickled."""

    @property
    def store(self) -> Store:
        """Where its kernels are kept."""

    def compiles_ahead(self) -> Availability:
        """Whether it can compile here; no device is needed for that."""

    def jobs(
        self,
        problem: Problem,
        request: BuildRequest,
        architecture: str,
        select: Callable[[tuple[str, ...]], tuple[str, ...]] | None = None,
    ) -> list[Job]:
        """The kernels that a problem needs: of the candidates selected by name, or as ``prepare`` selects."""


def unsupported(backend: Backend, problem: Problem, request: BuildRequest) -> Unsupported | None:
    """Why a backend does not support a problem as requested: by its capabilities, then by ``supports``."""
    name = backend.name
    if request.isa and not honours(backend, Capability.ISA):
        text = f"{name} generates no code for the CPU: it has no {request.isa}"
        return Unsupported("isa", text, "leave out --gemm-isa")
    if request.mode.is_compiled and not honours(backend, Capability.MODE):
        text = f"{name} is called as it is: it has no mode {request.mode}"
        return Unsupported("mode", text, "--gemm-modes=eager")
    return backend.supports(problem, request)


@contextlib.contextmanager
def timed(prepared: Prepared, operands: Operands) -> Iterator[Callable[[], object]]:
    """The call to time: what ``prepared.timed`` yields, or else ``run`` with all that it does."""
    own: Any = getattr(prepared, "timed", None)
    if own is None:
        yield lambda: prepared.run(operands)
        return
    with own(operands) as call:
        yield call
