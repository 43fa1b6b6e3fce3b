"""The operations: :data:`OPS`, a module for each, or for those that differ in little.

A new op is one module with an ``Op``, and its name in the list of modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pytest_gemm.problem.ops import da8w8, dense, grouped_mm, linears, qlinear, scaled_mm, woq_int4, woq_int8
from pytest_gemm.problem.ops.op import HALVES as HALVES
from pytest_gemm.problem.ops.op import Op as Op

OPS: Final[Mapping[str, Op]] = {
    op.name: op
    for op in (
        *dense.PRODUCTS,
        linears.OP,
        dense.INT_MM,
        dense.MIXED_MM,
        woq_int8.OP,
        woq_int4.OP,
        qlinear.OP,
        da8w8.OP,
        scaled_mm.OP,
        grouped_mm.OP,
    )
}
