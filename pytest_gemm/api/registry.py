"""The registry of backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pytest_gemm.api.protocols import DEVICES, TYPES, Backend
from pytest_gemm.api.shipped import RegistryError, Shipped
from pytest_gemm.core.text import did_you_mean

if TYPE_CHECKING:
    import torch

    from pytest_gemm.problem.problem import Problem


__all__ = ("Registry", "RegistryError")


class Registry:
    """The backends of a run, by name, in the order of registration; behind them those that distributions ship."""

    def __init__(self) -> None:
        self._backends: dict[str, Backend] = {}
        self._shipped: dict[str, list[Shipped]] = {}
        self._loaded: dict[str, Shipped] = {}

    def ship(self, entries: Iterable[Shipped]) -> None:
        """Take what distributions ship; a backend is loaded when its name is looked up."""
        for one in entries:
            self._shipped.setdefault(one.name, []).append(one)

    def shipped(self) -> Mapping[str, Sequence[Shipped]]:
        """The entry points of distributions, by the backend's name."""
        return self._shipped

    def origin(self, name: str) -> Shipped | None:
        """What shipped a backend that is loaded; ``None`` of one that was registered."""
        return self._loaded.get(name)

    def named(self, name: str) -> Backend:
        """The backend that a user names.

        Raises:
            RegistryError: when there is none, when several have the name, and when its distribution is broken.
        """
        entries = self._shipped.get(name, [])
        if entries and (name in self._backends or len(entries) > 1):
            one, *others = entries
            other = f"{others[0]} ships another one" if others else "another one is registered"
            if others or name not in self._loaded:
                raise one.wrong(f"two backends are called {name!r}: {other}")
        return self[name]

    def add(self, backend: Backend) -> None:
        """Register a backend object.

        Raises:
            RegistryError: when the name is taken, malformed, or the object lacks a method.
        """
        name = getattr(backend, "name", None)
        if isinstance(backend, type):
            raise RegistryError(f"{backend.__name__} is a class: register an object of it, {backend.__name__}()")
        if not isinstance(name, str) or not name.replace("-", "_").isidentifier() or name in {"auto", "none"}:
            needs = "a backend needs a name of letters, digits and dashes, other than 'auto' and 'none'"
            raise RegistryError(f"{needs}; got {name!r}")
        missing = [m for m in ("availability", "supports", "prepare") if not callable(getattr(backend, m, None))]
        if missing:
            raise RegistryError(f"backend {name!r} ({type(backend).__name__}) lacks {', '.join(missing)}()")
        if name in self._backends:
            raise RegistryError(f"two backends are called {name!r}: choose another name")
        devices = getattr(backend, "devices", ("cpu",))
        if isinstance(devices, str) or not isinstance(devices, Iterable) or not {*devices} or {*devices} - {*DEVICES}:
            raise RegistryError(f"backend {name!r}: devices is {devices!r}; give some of {DEVICES}")
        self._backends[name] = backend

    def add_callable(
        self,
        name: str,
        matmul: Callable[..., torch.Tensor],
        *,
        dtypes: Iterable[str] = TYPES,
        batched: bool = True,
        accumulate: Literal["f64", "f32", "f16", "bf16"] | None = None,
        deterministic: bool = True,
        distributions: Iterable[str] = (),
        flushes: bool = False,
        pack: Callable[[torch.Tensor], Any] | None = None,
        imports: Iterable[str] = (),
        linear: Callable[..., torch.Tensor] | None = None,
        activations: Iterable[str] = (),
        bind: Callable[..., Callable[[], Any] | None] | None = None,
        candidates: Sequence[str] | Callable[[Problem], Sequence[str]] = (),
        epilogue: Literal["fused", "eager", "either"] = "fused",
        devices: tuple[str, ...] = DEVICES,
        library: bool = False,
        multiple_of: int | tuple[int, int, int] = 1,
        square: bool = False,
        concurrent: bool = False,
    ) -> None:
        """Register a function ``matmul(a, b) -> c``; bias and epilogue are added by eager PyTorch, or by ``bind``.

        It does not take a problem for which it raises ``ValueError`` or ``pytest_gemm.core.outcome.Unsupported``,
        whatever the values: that is unsupported, in its words.

        A run that is not narrowed fails where no case called a dtype, a device, ``linear``, one of its activations or
        ``bind`` that is written out here; smoke has cases of each.

        Example for a ``conftest.py``, of a kernel that adds a bias and applies relu before it rounds::

            def my_kernel(a, b, bias=None, activation=None): ...

            def pytest_gemm_register_backends(registry):
                registry.add_callable("mine", my_kernel, linear=my_kernel, activations=("relu",))

        Args:
            name: what ``--gemm-backends`` takes.
            matmul: gets A (..., M, K) and B (..., K, N) as strided tensors and returns (..., M, N) in the
                product's dtype (int32 for int8).
            dtypes: dtype names of A and B that it takes, by default f32, f16 and bf16.
            batched: whether it takes 3-D tensors.
            accumulate: type of its partial sums, what the bound is derived from; by default f64 for a product in f64
                and f32 for any other.
            deterministic: whether the same call again gives the same bits.
            distributions: what the function needs beside PyTorch, as pip calls it; without it the backend cannot run.
            flushes: whether subnormal numbers of f32 count as zeros.
            pack: what a user does once with a constant B; ``matmul`` gets its result in place of B.  Each judged run
                packs anew, so that no result is that of another B; a timed call has it packed before.
            imports: modules that are imported before the first run, because their import changes the process.
            linear: ``linear(a, b, bias, activation) -> c`` computes ``activation(a @ b + bias)`` in the type of its
                partial sums and rounds once, at the end.  It gets A and B as ``matmul`` does, the bias (N,) in their
                dtype or ``None``, and an activation of ``activations`` or ``None``.  Problems of mm, bmm, addmm and
                linear with a bias (N,), one activation or both are computed by it alone; in others it is not called.
            activations: steps of problem lines that ``linear`` computes: ``("relu", "gelu", "clamp-0_6")``.
            bind: ``bind(problem, tensors) -> call`` gets the problem and the tensors of its program by name, see
                docs/reference/tensors.md, and returns a call without arguments that computes the whole problem; or
                ``None`` where the kernel does not take it: then PyTorch composes the problem around ``matmul``.  What a
                user makes once, as a packed weight, is made in ``bind``, before the call.  ``linear`` is a ``bind``
                for a bias and an activation: give one of both.
            candidates: names of several kernels, or a function of the problem that returns those for it.  ``matmul``,
                ``linear`` and ``bind`` get the keyword ``candidate``: one that ``--gemm-candidates`` selects, or the
                first.
            epilogue: where a call of ``bind`` or ``linear`` rounds: ``fused``, once at the end; ``eager``, after each
                step; ``either``.
            devices: where it computes, by default on both.  On ``("cuda",)`` alone its sums are those of NVIDIA's
                tensor cores, and it is called once before the first run.
            library: with ``devices=("cuda",)``, whether it may call cuBLAS, which may slice K or take no tensor core.
            multiple_of: what M, N and K have to be multiples of: one number, or ``(128, 128, 16)``.
            square: whether M, N and K have to be equal.
            concurrent: whether other threads than the one that prepared it may call it, and several at once; where it
                is, level full has a case of that.

        Raises:
            RegistryError: when the name is taken or malformed, or an argument is not of its kind.
        """
        from pytest_gemm.api.callable import CallableBackend

        given: Any = dtypes, batched, accumulate, deterministic, distributions, flushes, pack, imports
        given += linear, activations, bind, candidates or None, epilogue, devices
        given += library, multiple_of, square, concurrent
        try:
            made = CallableBackend(name, matmul, *given)
        except ValueError as error:
            raise RegistryError(str(error)) from None
        self.add(made)

    def __getitem__(self, name: str) -> Backend:
        if name not in self._backends and name in self._shipped:
            self._load(self._shipped[name][0])
        try:
            return self._backends[name]
        except KeyError:
            hint = did_you_mean(name, self.names())
            raise RegistryError(f"unknown backend {name!r}{hint}; known: {', '.join(self.names())}") from None

    def _load(self, one: Shipped) -> None:
        made: Any = one.load()
        try:
            self.add(made)
        except RegistryError as error:
            raise one.wrong(str(error)) from None
        self._loaded[one.name] = one

    def __iter__(self) -> Iterator[Backend]:
        return iter(self._backends.values())

    def names(self) -> tuple[str, ...]:
        """All names in order of registration, and those of shipped backends that are not loaded."""
        return tuple(dict.fromkeys((*self._backends, *self._shipped)))
