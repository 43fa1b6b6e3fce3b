"""The operations: :data:`OPS`.  A module has an op, or several that differ in little.

A new op is one module with an ``Op``, and its name in the list of modules.
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping
from typing import Final

from pytest_gemm.problem.ops import da8w4, dense, derived, grouped_mm, quantised, woq
from pytest_gemm.problem.ops.op import Op as Op

_MODULES: Final = (dense, woq, quantised, da8w4, grouped_mm, derived)

OPS: Final[Mapping[str, Op]] = {op.name: op for module in _MODULES for op in module.OPS}


def _named(name: str) -> Op:
    return OPS[name]


# An op is pickled by its name: its functions have none.
copyreg.pickle(Op, lambda op: (_named, (op.name,)))
