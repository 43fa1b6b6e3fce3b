"""The registry of backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, Literal

from pytest_gemm.api.protocols import Backend
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.text import did_you_mean

if TYPE_CHECKING:
    import torch


_DEVICES: Final = ("cpu", "cuda")
# Types of partial sums that a function can be registered with.
_SUMS: Final = ("f64", "f32", "f16")


class RegistryError(ValueError):
    """A backend that cannot be registered, or a name that is not registered."""


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
            raise RegistryError(f"backend {name!r}: devices is {devices!r}; give some of {_DEVICES}")
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
            RegistryError: when the name is taken or malformed, or an argument is not of its kind.
        """
        if not callable(matmul):
            raise RegistryError(f"backend {name!r}: matmul is {matmul!r}; give a function of A and B")
        given: object = dtypes
        if isinstance(given, str) or not isinstance(given, Iterable) or not (dtypes := tuple(given)):
            raise RegistryError(f'backend {name!r}: dtypes is {dtypes!r}; give names, as ("f32", "bf16")')
        for dtype in dtypes:
            if dtype not in DTYPES:
                hint = did_you_mean(str(dtype), DTYPES)
                raise RegistryError(f"backend {name!r}: unknown dtype {dtype!r}{hint}; known: {', '.join(DTYPES)}")
        if accumulate not in {*_SUMS, None}:
            raise RegistryError(f"backend {name!r}: accumulate is {accumulate!r}; give one of {', '.join(_SUMS)}")
        for flag, value in (("batched", batched), ("deterministic", deterministic)):
            if not isinstance(value, bool):
                raise RegistryError(f"backend {name!r}: {flag} is {value!r}; give True or False")
        from pytest_gemm.api.callable import CallableBackend  # needs torch at run time only

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
