"""The hooks of pytest-gemm.  Everything else is an option or a fixture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_gemm.api.ops import OpRegistry
    from pytest_gemm.api.registry import Registry


@pytest.hookspec
def pytest_gemm_register_backends(registry: Registry) -> None:
    """Register backends, in a ``conftest.py`` or a plugin.

    A function is enough::

        def pytest_gemm_register_backends(registry):
            registry.add_callable("mine", my_matmul)

    and an object that follows :class:`~pytest_gemm.api.protocols.Backend` can do everything::

        def pytest_gemm_register_backends(registry):
            registry.add(MyBackend())

    Then ``pytest --pyargs pytest_gemm.conformance --gemm-backends=mine`` runs the suite over it.
    """


@pytest.hookspec
def pytest_gemm_register_ops(registry: OpRegistry) -> None:
    """Register operations and their cases, in a ``conftest.py`` or a plugin.

    For example::

        def pytest_gemm_register_ops(registry):
            registry.add(Op("causal_mm", ...), cases=Path(__file__).with_name("causal_mm.toml"))

    It is called in every process of a run, before ``pytest_gemm_register_backends``.
    """
