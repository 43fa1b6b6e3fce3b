"""The hooks of pytest-gemm.  There is one: everything else is an option or a fixture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
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
