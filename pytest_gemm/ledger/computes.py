"""What defective kernels compute in place of the right result, by the name that an entry of the ledger gives.

``judging.imitations`` recomputes each of them.  This module is read while tests are collected, and knows no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

COMPUTES: Final[Mapping[str, str]] = {
    # -- another operand ---------------------------------------------------------------------------
    "weight-from-storage-start": "B is read from the beginning of its storage, wherever it starts",
    "weight-before": "B is the one of the compile before, which the tests of new weights make with the next seed",
    "rows-of-a-adjacent": "the rows of A are read as if nothing lay between them, whatever their stride",
    "last-stride-of-a": "the stride between two elements of a row of A is taken for 1",
    "rows-of-b-adjacent": "the same of the rows in which B is stored",
    "columns-of-first-block": "in each cache block of B the columns of its first register block are those of all",
    "strides-swapped": "A or B is read with the strides of the other layout, or with a stride of 0 for its rows",
    "no-product": "the product is left out: the result is what is added to it",
    "no-bias": "the bias is left out; a residual may be read with the strides of the transposed result",
    "whole-steps-of-k": "the products behind the last whole 32, 64 or 128 of K, or of a group's K, are left out",
    "beta-ignored": "beta is taken for 1",
    "unscaled-result": "the scale of an fp8 result is left out",
    "block-scales-by-rows": "scales of blocks are read row by row, those of squares by the number of the tile",
    "block-scales-by-four": "the scales of a column of squares are read as if padded to a multiple of four",
    "rows-of-out-adjacent": "the result is written as if the given tensor were contiguous",
    # -- other arithmetic --------------------------------------------------------------------------
    "slice-of-k": "each element has the products of one slice of K, of 2 to 64 equal ones",
    "pairs-saturate": "products of u8 and i8 (i8 shifted by 128) are added in pairs that saturate at 16 bits",
    "fast-accumulation": "an fp8 product is summed in the tensor core alone, with fewer bits",
    "truncated": "a wrong element is the number next to the right one, toward zero",
    "rounded-through-f16": "a wrong element was rounded to f16 and then to the type of the result",
    "flushed-to-zero": "a wrong element is 0, and the right one is below 2^-120",
    "precision-of-f32": "a wrong element is right to the precision of f32",
    "precision-of-11-bits": "a wrong element is right to 11 bits, or one number of its type off",
    # -- what is wrong about the elements ----------------------------------------------------------
    "nan": "each wrong element is NaN",
    "nan-of-next-row": "each wrong element is NaN, and the next row of A begins with NaN or an infinity",
    "nan-of-last-infinity": "each wrong element is NaN, and its row of A ends with an infinity",
    "nan-of-bias": "each wrong element is NaN, where the bias is NaN or an infinity",
    "number-for-nan": "each wrong element is a number where NaN is right",
    "first-block-right": "the first 4 rows are right in the first 16 columns: the first thread's block",
    "beyond-2-31": "the worst element lies beyond the first 2^31 of the result",
}
