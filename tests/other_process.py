"""What a process of its own is asked to do; it has to find this by its name."""

import os
import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

from pytest_gemm.backends.cutlass import backend

T = TypeVar("T")


def under(environment: Mapping[str, str], function: Callable[..., T], *arguments: object) -> T:
    """Call a function with this environment instead of the one that the process was started with."""
    os.environ.clear()
    os.environ.update(environment)
    # What was found out for somebody else: which compiler there is, and which candidates.
    backend._setup.cache_clear()
    if "torch._inductor.utils" in sys.modules:
        sys.modules["torch._inductor.utils"].clear_caches()
    return function(*arguments)
