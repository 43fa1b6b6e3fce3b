"""A pytest plugin that proves a GEMM backend of PyTorch right and keeps it fast.

Nothing else is imported here: pytest loads the plugin in every run, also in those that test no GEMM.
"""

import importlib
from collections.abc import Callable
from typing import Any

__version__ = "0.1.0"


def check(function: Callable[..., Any], **options: Any) -> Any:
    """Judge a kernel as ``pytest-gemm judge`` does, from a notebook or a test.

    Example::

        found = pytest_gemm.check(matmul)
        assert found, found.text

    A function that can be found by its module and its name is called in a process of its own.  A lambda, a closure, and
    any function once this process has started CUDA are called in this process: a crash of theirs ends it, and no limit
    ends them.

    Args:
        function: of A and B, perhaps of a bias, and of a result to write to.
        options: those of the command: ``op``, ``dtypes`` (names), ``device``, ``problem`` (a line or a shapes file),
            ``seed``, ``limit`` (seconds of a call), ``budget`` (seconds after which no further problem is begun; by
            default all are judged, and no clock decides), ``confined`` (its process has no rights outside of a folder
            of its own), and what says what it takes: ``multiple_of``, ``square``, ``sizes``, ``a``, ``beta``,
            ``accumulate``, ``epilogue``, ``flushes`` and ``deterministic``.

    Returns:
        What is known of it: true where it is right; ``ok``, ``verdict``, ``text`` (its repr, the screen), ``findings``
        and ``to_dict()``, what ``--json`` prints.

    Raises:
        ValueError: when its first calls do not show what it takes, and where torch is too old.
    """
    if old := importlib.import_module("pytest_gemm.machine.software").old_torch():
        raise ValueError(old)
    return importlib.import_module("pytest_gemm.tools.judge").check(function, **options)
