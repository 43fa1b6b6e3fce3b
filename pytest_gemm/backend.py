"""What a backend is: the Protocol that every source of kernels implements, and their registry.

A backend is driven in four steps, and each one answers from facts::

    backend.availability(device)          can it run on this machine at all?
    backend.supports(problem)             does it claim this problem?
    prepared = backend.prepare(problem, operands)      compile, once for all fillings
    prepared.run(operands); prepared.proof()           compute, and say what ran

Nothing here imports torch at import time.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, Literal, Protocol, cast, runtime_checkable

from pytest_gemm import device_kernels
from pytest_gemm.machine.isa import ISAS
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.outcome import Reason, Unsupported
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.errors import did_you_mean
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


# What the machine code of a C++ template has to contain, by its micro-kernel; the others need what their vectors do.
_MICRO_KERNELS: Final[Mapping[str, str]] = {
    "CppMicroGemmAMX": "amx",
    "CppMicroGemmWoQInt4Amx": "amx",
    "CppMicroGemmAVX512VNNI": "vnni",
    "CppMicroBrgemm": "brgemm",
    "CppMicroGemmRef": "",
}


@dataclasses.dataclass(frozen=True)
class Generation:
    """For which instruction set of the CPU a program was generated and compiled, as three witnesses have it.

    Attributes:
        asked: one of ``machine.isa.ISAS``.
        compiled: levels of the compile commands that made its libraries; "" is a command that names none.
        level: the lowest level that executes all of the libraries' machine code; "" for code without vectors.
        units: what that code has: ``ymm``, ``zmm``, ``vnni``, ``bf16``, ``amx``, ``amx_fp16``, ``brgemm``.
        counted: Inductor's counters of micro-kernels that rose while it generated the program.
    """

    asked: str
    compiled: tuple[str, ...]
    level: str
    units: tuple[str, ...]
    counted: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.asked}: {self._units}"

    @property
    def _units(self) -> str:
        return ", ".join(self.units) or "no vectors"

    def objection(self, chosen: Sequence[str]) -> Reason | None:
        """Why this is not code of the level that was asked for, or not of the micro-kernel that was chosen.

        Args:
            chosen: candidates, ``CppMicroGemmFP32Vec-8x48x1``.
        """
        if set(self.compiled) != {self.asked}:
            seen = " and ".join(name or "no instruction set" for name in self.compiled) or "nobody knows what"
            return Reason("other-isa", f"asked for {self.asked}, the code was compiled for {seen}")
        if self.level and ISAS.index(self.level) > ISAS.index(self.asked):
            text = f"asked for {self.asked}, the machine code needs {self.level} (it has {self._units})"
            return Reason("other-isa", text)
        if self.counted and ISAS.index(self.asked) < ISAS.index("amx"):  # it counts AMX's alone
            return Reason("other-isa", f"asked for {self.asked}, Inductor's {', '.join(self.counted)} rose")
        vectors = "zmm" if ISAS.index(self.asked) >= ISAS.index("avx512") else "ymm"
        for name in chosen:
            unit = _MICRO_KERNELS.get(name.partition("-")[0], vectors)
            if unit and unit not in self.units:
                text = f"{name} at {self.asked} needs {unit}, the machine code has {self._units}"
                return Reason("other-micro-kernel", text)
        return None


@dataclasses.dataclass(frozen=True)
class Proof:
    """Evidence of what computed a result, gathered in four independent ways.

    Attributes:
        chosen: callers that the selection picked, ``("CppMicroGemmFP32Vec",)``.
        generated: kernels that the generated program defines.
        executed: kernels seen to execute during the last run.
        foreign: matrix products of somebody else seen to execute (``aten.mm``): a fallback.
        profiled: names of the kernels that the device's own profiler saw, in order; ``None`` where it was not asked.
        device_kernel: pattern (``re``) of the backend's own kernels among these; "" where any name will do.
        around_library: whether what was chosen is a program around a library's product (decompose-K), whose kernels
            may then be among these.
        configuration: what the generated code says of each product's blockings, where the backend can read it.
        contradiction: where the generated code is not that of the candidate that was asked for, in words.
        provable: ``False`` where there is nothing to prove, for a plain callable.
        wanted: pattern (``re``) of the one choice that has to be chosen; "" where any of the backend's will do.
        generation: for which instruction set the code was generated, where one was asked for.
        fused: whether the product's own kernel did the whole epilogue; ``None`` without one, or where nobody knows.
        fusions: steps that Inductor's scheduler has fused into C++ templates; a lowering may have fused others before.
    """

    chosen: tuple[str, ...] = ()
    generated: tuple[str, ...] = ()
    executed: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    profiled: tuple[str, ...] | None = None
    device_kernel: str = ""
    around_library: bool = False
    configuration: tuple[str, ...] = ()
    contradiction: str = ""
    provable: bool = True
    wanted: str = ""
    generation: Generation | None = None
    fused: bool | None = None
    fusions: int = 0

    @property
    def kernels(self) -> tuple[str, ...]:
        """What ran, by name: the executed kernels with the choice that they came from.

        Of eager code, which names operators only, the products that the profiler saw stand beside them.
        """
        if not self.provable and self.profiled:
            return self.executed + tuple(f"[{name}]" for name in device_kernels.libraries(self.profiled))
        code = f" [{self.generation}]" if self.generation is not None else ""
        executed = tuple(f"{name}{code}" for name in self.executed)
        if self.chosen and len(self.chosen) == len(self.executed):
            pairs = zip(self.executed, self.chosen, strict=True)
            return tuple(f"{e}{code}" if c == e else f"{e} ({c}){code}" for e, c in pairs)
        return executed + tuple(f"({c})" for c in self.chosen)

    def objection(self) -> Reason | None:
        """Why the evidence does not show that the backend computed the result; ``None`` when it does."""
        if self.foreign:
            return Reason("foreign-kernel", f"the product was computed by {', '.join(self.foreign)}")
        if not self.provable:
            return None
        for name in ("chosen", "generated", "executed"):
            if not getattr(self, name):
                return Reason(f"nothing-{name}", f"no kernel of the backend was {name}")
        if self.wanted and (len(self.chosen) > 1 or not re.match(self.wanted, self.chosen[0])):
            return Reason(
                "other-template", f"the products were computed by {', '.join(self.chosen)}, not by one template"
            )
        if self.generation is not None and (objection := self.generation.objection(self.chosen)) is not None:
            return objection
        if self.contradiction:
            return Reason("another-candidate", self.contradiction)
        return self._profiled_objection()

    def _profiled_objection(self) -> Reason | None:
        if self.profiled is None:
            return None
        if not self.around_library and (library := device_kernels.libraries(self.profiled)):
            return Reason("foreign-kernel", f"the device executed a library's product: {', '.join(library)}")
        if not any(re.search(self.device_kernel, name) for name in self.profiled):
            seen = ", ".join(map(device_kernels.short, self.profiled)) or "nothing"
            return Reason(
                "nothing-profiled", f"the device executed no kernel of the backend ({self.device_kernel}) but {seen}"
            )
        return None


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
        """A twin that compiles at every ``prepare`` as a user's process does, with every cache on.

        Args:
            tag: separates these caches from all others; a new one starts empty.  The twin can be pickled.
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
            Dropped: when the candidate does not compile for this device, or does not fit it.
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
        """A twin that picks in this way, the same one for the same way.

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
        """A twin that picks the winner without these candidates; nothing else of it differs."""
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
        """A twin that is reached in this one of :data:`MODES`, the same one for the same mode.

        Raises:
            Unsupported: when the backend, the device or this release of PyTorch has no such mode.
        """
        ...


def in_mode(backend: Backend, mode: str, device: str) -> Backend:
    """The twin of a backend in a mode; the backend itself for "", its own way.

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
        """A twin that generates for this one of ``machine.isa.ISAS``, the same one for the same level.

        Raises:
            Unsupported: when this machine, its compiler or this release of PyTorch cannot.
        """
        ...


def at_isa(backend: Backend, isa: str) -> Backend:
    """The twin of a backend at an instruction set; the backend itself for "", the machine's own.

    Raises:
        Unsupported: when there is none.
    """
    if not isa:
        return backend
    if isinstance(backend, Leveled):
        return backend.at_isa(isa)
    raise Unsupported("isa", f"{backend.name} generates no code for the CPU: it has no {isa}", "leave out --gemm-isa")


def tuned(backend: Backend, choices: str) -> Backend:
    """The twin that picks its candidate as a value of ``--gemm-choices`` says, or the backend where there is none."""
    if choices in {"one", "winner"} and isinstance(backend, Tuning):
        return backend.picking(cast("Literal['one', 'winner']", choices))
    return backend


def names_candidates(choices: str) -> bool:
    """Whether a value of ``--gemm-choices`` is a pattern of candidates' names."""
    return choices not in {"", "one", "winner", "all"} and not choices.isdigit()


@runtime_checkable
class Configurable(Backend, Protocol):
    """A backend that has options of its own on the command line."""

    def configure(self, options: Mapping[str, str]) -> None:
        """Take what concerns it, before anything else is asked.

        Args:
            options: every option's value as text, by its name without ``--gemm-``.
        """
        ...


_DEVICES: Final = ("cpu", "cuda")
# Types of partial sums that a function can be registered with.
_SUMS: Final = ("f64", "f32", "f16")


class RegistryError(ValueError):
    """A backend that cannot be registered, or a name that nobody registered."""


class Registry:
    """The backends of a run, by name, in the order of registration."""

    def __init__(self) -> None:
        self._backends: dict[str, Backend] = {}

    def add(self, backend: Backend) -> None:
        """Register a backend object.

        Raises:
            RegistryError: when the name is taken, malformed, or the object lacks a method.
        """
        name = getattr(backend, "name", None)
        if isinstance(backend, type):
            raise RegistryError(f"{backend.__name__} is a class: register an object of it, {backend.__name__}()")
        if not isinstance(name, str) or not name.replace("-", "_").isidentifier() or name == "auto":
            raise RegistryError(
                f"a backend needs a name of letters, digits and dashes, other than 'auto'; got {name!r}"
            )
        missing = [m for m in ("availability", "supports", "prepare") if not callable(getattr(backend, m, None))]
        if missing:
            raise RegistryError(f"backend {name!r} ({type(backend).__name__}) lacks {', '.join(missing)}()")
        if name in self._backends:
            raise RegistryError(f"two backends are called {name!r}: choose another name")
        devices = getattr(backend, "devices", ("cpu",))
        if isinstance(devices, str) or not isinstance(devices, Iterable) or not {*devices} or {*devices} - {*_DEVICES}:
            raise RegistryError(f'backend {name!r}: devices is {devices!r}; give some of {_DEVICES}, ("cpu",) say')
        self._backends[name] = backend

    def add_callable(
        self,
        name: str,
        matmul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        dtypes: Iterable[str] = ("f32", "f16", "bf16"),
        batched: bool = True,
        accumulate: Literal["f64", "f32", "f16"] | None = None,
        deterministic: bool = True,
    ) -> None:
        """Register a plain function ``matmul(a, b) -> c``; bias and epilogue are added by eager PyTorch.

        Example for a ``conftest.py``::

            def pytest_gemm_register_backends(registry):
                registry.add_callable("mine", my_matmul)

        Args:
            name: what ``--gemm-backends`` takes.
            matmul: gets A (..., M, K) and B (..., K, N) as strided tensors and returns (..., M, N) in the
                product's dtype (int32 for int8).
            dtypes: dtype names of A and B that it takes.
            batched: whether it takes 3-D tensors.
            accumulate: type of its partial sums, what the bound is derived from; by default f64 for a product in f64
                and f32 for any other.
            deterministic: whether the same call again gives the same bits.

        Raises:
            RegistryError: when the name is taken or malformed, or an argument is not what is asked for.
        """
        if not callable(matmul):
            raise RegistryError(f"backend {name!r}: matmul is {matmul!r}; give a function of A and B")
        given: object = dtypes
        if isinstance(given, str) or not isinstance(given, Iterable) or not (dtypes := tuple(given)):
            raise RegistryError(f'backend {name!r}: dtypes is {dtypes!r}; give names of dtypes, ("f32", "bf16") say')
        for dtype in dtypes:
            if dtype not in DTYPES:
                hint = did_you_mean(str(dtype), DTYPES)
                raise RegistryError(f"backend {name!r}: unknown dtype {dtype!r}{hint}; known: {', '.join(DTYPES)}")
        if accumulate not in {*_SUMS, None}:
            raise RegistryError(f"backend {name!r}: accumulate is {accumulate!r}; give one of {', '.join(_SUMS)}")
        for flag, value in (("batched", batched), ("deterministic", deterministic)):
            if not isinstance(value, bool):
                raise RegistryError(f"backend {name!r}: {flag} is {value!r}; give True or False")
        from pytest_gemm.plain import CallableBackend  # needs torch at run time only

        self.add(CallableBackend(name, matmul, frozenset(dtypes), batched, accumulate, deterministic))

    def __getitem__(self, name: str) -> Backend:
        try:
            return self._backends[name]
        except KeyError:
            hint = did_you_mean(name, self._backends)
            raise RegistryError(f"unknown backend {name!r}{hint}; known: {', '.join(self._backends)}") from None

    def __iter__(self) -> Iterator[Backend]:
        return iter(self._backends.values())

    def names(self) -> tuple[str, ...]:
        """All names in order of registration."""
        return tuple(self._backends)
