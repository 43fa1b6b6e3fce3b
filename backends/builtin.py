"""The backends that come with the package, in the order in which ``auto`` runs those that it runs."""

from __future__ import annotations

from collections.abc import Callable

from pytest_gemm.api.protocols import Backend
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.backends.cutedsl import CuteDslBackend
from pytest_gemm.backends.cutlass.backend import CutlassBackend
from pytest_gemm.backends.max_autotune import MaxAutotuneBackend
from pytest_gemm.backends.nvgemm import NvgemmBackend
from pytest_gemm.backends.triton import TritonBackend

BUILTIN: tuple[Callable[[], Backend], ...] = (
    AtenBackend,
    CppBackend,
    TritonBackend,
    CutlassBackend,
    CuteDslBackend,
    NvgemmBackend,
    MaxAutotuneBackend,
)
