"""With ``--gemm-fuzz=SECONDS``: problems that nobody has written down.  One test a backend, and the only ones that run.

What it finds is run again by ``test_products`` and ``test_properties``, as its rerun lines say.
"""

from __future__ import annotations

from collections.abc import Callable


def test_fuzz(gemm_fuzz: Callable[[], None]) -> None:
    gemm_fuzz()
