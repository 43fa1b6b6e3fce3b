"""The problem line: both ways, and what a user is told about a wrong one."""

from __future__ import annotations

import dataclasses
import random
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import refuses_line

from pytest_gemm.conformance import matrix
from pytest_gemm.problem.axes import unique
from pytest_gemm.problem.errors import FIELDS, ProblemError
from pytest_gemm.problem.layout import Shape
from pytest_gemm.problem.ops import OPS
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.rules import FLAGS
from pytest_gemm.problem.steps import STEPS, Step


def complaint(line: str) -> ProblemError | None:
    """What the parser says against a line; ``None`` when it can be read."""
    try:
        Problem.parse(line)
    except ProblemError as error:
        return error
    return None


@given(st.text(max_size=40))
def test_no_text_makes_the_parser_fail_in_another_way(text: str) -> None:
    error = complaint(text)
    assert error is None or 0 <= error.column <= len(error.line)


@pytest.mark.parametrize(("line", "field", "column", "words"), [
    ("mmm:f32:nn:1x1x1", "op", 0, ["did you mean 'mm'", "known:"]), ("mm:f3:nn:1x1x1", "dtypes", 3, ["'f3'", "bf16"]),
    ("mm:f32-f16:nn:1x1x1", "dtypes", 3, ["a-b-out"]), ("int_mm:f32:nn:1x1x1", "dtypes", 7, ["i8-i8-i32"]),
    ("mm:f32:nq:1x1x1", "layout", 7, ["nn nt tn tt"]), ("linear:f32:nn:1x1x1", "layout", 11, ["nt"]),
    ("mm:f32:nn:1x1", "shape", 10, ["MxNxK"]), ("mm:f32:nn:2x1x1x1", "shape", 10, ["no batch"]),
    ("bmm:f32:nn:1x1x1", "shape", 11, ["BxMxNxK"]), ("mm:f32:nn:1x1x1:rleu", "epilogue", 16, ["did you mean 'relu'"]),
    ("mm:f32:nn:1x1x1:relu+clamp-2", "epilogue", 27, ["clamp-0_6"]),
    ("mm:f32:nn:1x1x1:cast-f31", "epilogue", 21, ["'f31'", "bf16"]),
    ("mm:f32:nn:1x1x1:alpha-2", "epilogue", 16, ["no alpha"]), ("addmm:f32:nn:1x1x1", "epilogue", 18, ["bias"]),
    ("mm:f32:nn:1x1x1:relu++add", "epilogue", 21, ["one '+'"]),
    ("mm:f32:nn:1x1x1:b.paded", "flags", 18, ["did you mean 'b.padded'"]),
    ("mm:f32:nt:2x1x1:b.alias_t", "flags", 18, ["2x2x1"]), ("mm:f32-f16-f16:nn:1x1x1", "dtypes", 3, ["f32-f32-f16"]),
    ("mm:f16:nn:1x1x1:math.tf32", "flags", 21, ["products in f32"]),
    ("woq_int8:f32-i8-f32:nt:1x1x1:math.tf32", "flags", 34, ["woq_int8 does not take math.tf32", "linear mixed_mm"]),
    ("mm:f32:nn:1x1x1:math.half_partials", "flags", 21, ["products in bf16 or f16"]),
    ("linear:f32:nt:1x1x1:bias:program.multi_output", "flags", 33, ["relu"]),
    ("mm:f16:nn:4x8x16:add:r0.alias", "flags", 24, ["N = K", "4x8x8"]),
    ("mm:f16:nn:4x8x8:relu:r0.alias", "flags", 24, ["residual"]),
    ("mm:f16:nn:4x8x8:div:r0.alias", "flags", 23, ["zeros"]),
    ("mm:f16:nn:4x8x8:cast-f32+add:r0.alias", "flags", 32, ["not f32"]),
    ("mm:f32:nn:1x1x1:relu:m.dynamic:x", "flags", 31, ["unknown flag 'x'", "a line is op:dtypes"]),
    ("mm:f32:nn:2x3x1:add-q", "epilogue", 20, ["'q' does not fit add", "mn n m1"]),
    ("mm:f32:nn:2x3x1:perm-0_2", "epilogue", 16, ["2x3", "perm-1_0"]),
    ("bmm:f32:nn:2x3x4x1:view-2x3x5", "epilogue", 19, ["24 elements", "2x3x4"]),
    ("mm:f32:nn:2x3x1:t+view-6", "epilogue", 18, ["would copy"]),
    ("mm:f32:nn:2x3x1:view-6:m.dynamic", "epilogue", 16, ["t and perm"]),
    ("mm:f32:nn:2x3x1:t+add-n", "epilogue", 18, ["put add-n first"]),
    ("mm:f32:nn:4x8x8:t+add:r0.alias", "flags", 25, ["before any move"]),
    ("linear:f32:nt:3x2x3x1:a.4d", "flags", 24, ["even batch, not 3"]),
    ("bmm:f32:nn:2x2x3x1:a.4d", "flags", 21, ["bmm does not take a.4d"]),
    ("linear:f32:nt:2x2x3x1:relu:a.4d:m.dynamic", "flags", 34, ["drop m.dynamic"]),
    ("mm:f32:nn:2x3x1:relu:program.branching", "flags", 29, ["two steps"]),
    ("mm:f32:nn:2x3x1:add+mul:program.branching", "flags", 32, ["residual each"]),
    ("mm:f32:nn:2x3x1:relu+exp:program.multi_output+branching", "flags", 33, ["contradict",
     "drop program.multi_output"]), ("mm:f32:nn:2x3x1:program.chained", "flags", 24, ["N = K", "2x3x3"]),
    ("addmm:f32:nn:2x3x3:bias:program.chained", "flags", 32, ["addmm does not take program.chained", "mm bmm linear"]),
    ("mm:f32", "layout", 6, ["is missing"]),
    # A step or a flag that the op does not take, or that would change nothing.
    ("mm:f32:nn:8x8x8:quant.static", "quant", 22, ["mm takes no static", "these do: qlinear"]),
    ("mm:f32:nn:8x8x8:relu:quant.dynamic", "quant", 27, ["mm takes no dynamic"]),
    ("mm:f32:nn:8x8x8:beta", "epilogue", 16, ["no beta"]),
    ("mm:f32:nn:8x8x8:cast-f32", "epilogue", 16, ["f32 already", "drop cast-f32"]),
    ("mm:f32:nn:8x8x8:relu+dense", "epilogue", 21, ["nothing was moved"]),
    ("bmm:f32:nn:1x8x8x8:a.padded+broadcast", "flags", 28, ["a batch of 1", "2 or more"]),
    ("grouped_mm:bf16:nt:0x8x8x8:b.broadcast", "flags", 29, ["a batch of 0"]),
    # Twice, and against each other.
    ("addmm:f32:nn:8x8x8:bias+bias-m1", "epilogue", 24, ["duplicate step: bias-m1"]),
    ("addmm:f32:nn:8x8x8:bias+alpha-1+alpha-2", "epilogue", 32, ["duplicate step: alpha-2"]),
    ("mm:f32:nn:8x8x8:a.padded+padded+offset", "flags", 25, ["duplicate flag: a.padded"]),
    ("mm:f32:nn:8x8x8:b.constant+argument", "flags", 27, ["contradict", "drop b.argument"]),
    ("mm:f32:nt:8x8x8:b.padded+alias_t", "flags", 18, ["drop b.padded"]),
    ("mm:f32:nn:8x8x8:a.offset+", "flags", 25, ["one '+'"]),
    ("addmm:f32:nn:8x8x8:bias+relu+alpha-2", "epilogue", 29, ["after another step, relu", "first"]),
    ("qlinear:u8-i8-u8:nt:8x8x8:quant.static+requant+relu", "quant", 47, ["relu is a step of the epilogue"]),
    # A step on a value that has no such operation.
    ("int_mm:i8-i8-i32:nn:8x8x8:t+relu", "epilogue", 28, ["a value of i32", "cast first"]),
    # Numbers.
    ("mm:f32:nn:8x8x8:relu+clamp-5_1", "epilogue", 27, ["'5_1' does not fit clamp", "the lower one first"]),
    ("mm:f32:nn:8x8x8:scale-1e999", "epilogue", 22, ["'1e999' does not fit scale", "1e-30 to 1e30"]),
    ("mm:f32:nn:8x8x8:scale-\u0663", "epilogue", 22, ["does not fit scale"]),
    ("qlinear:u8-i8-f32:nt:8x8x8:bias:quant.static-0.5_-1", "quant", 38, ["no zero point of u8", "from 0 to 255"]),
    ("woq_int4:bf16-i4-bf16:nt:8x8x64:quant.group-0", "quant", 44, ["'0' does not fit group", "256 or 512"]),
    ("woq_int4:bf16-i4-bf16:nt:8x8x64:" + "relu+group-32", "epilogue", 37, ["group-32 is a quantisation parameter"]),
    ("mm:f32:nn:8x8x8:cast-i4", "epilogue", 21, ["'i4'", "bf16"]),
    # Sizes.
    ("mm:f32:nn:99999999999999999999x8x8", "shape", 10, ["99999999999999999999 is too large", "2147483647"]),
    ("bmm:f32:nn:2000000000x8x8x80", "shape", 11, ["1280000000000 elements", "2^40"]),
    ("grouped_mm:bf16:nt:2000000x2000x1x1", "shape", 19, ["rows of all groups", "int32"]),
    ("linears:f32:nt:99999x8x8x8", "shape", 15, ["up to 64"]),
    ("mm:f32:nn:8x8x8:view-" + "1x" * 20 + "64", "epilogue", 21, ["does not fit view"]),
    # A complaint about one token points at that token, of what was typed and not of the canonical line.
    ("mm:f32-f32-f32:nn:008x8x8:relu:math.fast_accumulate:b.argument", "flags", 36, ["scaled_mm"]),
    ("bmm:f32:nn:2x8x8x8:scale-0.50:a.padded+broadcast+3d", "flags", 49, ["bmm does not take a.3d", "use linears"]),
])  # fmt: skip
def test_a_wrong_line_is_told_where_and_what_would_be_right(
    line: str, field: str, column: int, words: list[str]
) -> None:
    with pytest.raises(ProblemError) as caught:
        Problem.parse(line)
    assert (caught.value.field, caught.value.column) == (field, column)
    for word in words:
        assert word in str(caught.value)
    assert str(caught.value).splitlines()[2] == "  " + " " * column + "^"


@pytest.mark.parametrize(("line", "words"), [
    # Scales of A and B.
    ("scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:16x16x16:bias", "needs its scales"),
    ("scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:16x16x16:quant.rowwise+tensorwise", "rowwise and tensorwise at once"),
    ("mm:bf16:nt:16x16x16:quant.rowwise", "these do: scaled_grouped_mm .* da8w8 scaled_mm"),
    ("scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:16x16x16:quant.tensorwise+result-4", "about an fp8 result"),
    ("scaled_mm:f8e4m3fn:nt:16x16x16:quant.rowwise", "write tensorwise"),
    ("scaled_mm:f8e4m3fn:nt:16x16x32:quant.mx", "an fp8 result has no mx"),
    ("scaled_mm:f8e4m3fn:nt:16x16x16:bias:quant.tensorwise", "an fp8 result has no bias"),
    ("scaled_mm:f8e4m3fn:nt:16x16x16:quant.tensorwise+result-3", "a power of two"),
    ("scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:16x16x16:quant.blocks-128_128", "so many rows of A and columns of B"),
    ("scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:16x16x16:quant.blocks:math.fast_accumulate", "drop math.fast_accumulate"),
    ("scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:16x16x16:quant.blocks-128_1:m.dynamic", "blocks of A have 128 rows"),
    ("scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:64x64x256:quant.blocks:program.v2", "4 blocks of K at once"),
    ("scaled_mm:f8e4m3fn:nt:64x64x64:quant.tensorwise:program.v2", "no scale of an fp8 result"),
    ("scaled_grouped_mm:f8e4m3fn-f8e4m3fn-bf16:nt:4x32x48x64:quant.rowwise+result-4", "takes no result"),
    ("scaled_grouped_mm_k:f8e4m3fn-f8e4m3fn-bf16:nt:4x32x48x64:quant.rowwise:m.dynamic", "has one size"),
    # Block-scaled formats.
    ("scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:16x16x48:quant.mx", "not divided by blocks of 32"),
    ("scaled_mm:f4e2m1fn-f4e2m1fn-f32:nt:16x16x24:quant.nv", "not divided by blocks of 16"),
    ("scaled_mm:f4e2m1fn-f4e2m1fn-bf16:nt:16x16x32:quant.mx", "add program.v2"),
    ("scaled_mm:f4e2m1fn-f4e2m1fn-bf16:nt:16x16x32:quant.nv-2", "add program.v2"),
    ("scaled_mm:f4e2m1fn-f4e2m1fn-f32:nt:16x16x32:quant.nv-3", "nv-2"),
    ("scaled_mm:f4e2m1fn-f4e2m1fn-f32:nt:16x16x32:quant.rowwise", "write mx, nv or nv-2"),
    ("scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:16x16x32:quant.nv", "about f4e2m1fn"),
    ("scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:16x16x32:quant.mx:m.dynamic", "drop m.dynamic"),
    # 8-bit and 4-bit integers.
    ("qlinear:u8-i8-u8:nt:3x4x5:quant.static", "add requant"),
    ("qlinear:u8-i8-f32:nt:3x4x5:quant.static+requant", "drop requant"),
    ("qlinear:u8-i8-f32:nt:3x4x5:sum-0.5_3:quant.static", "sum-0.5_3 on a float result.*write sum"),
    ("qlinear:u8-i8-u8:nt:3x4x5:sum-0.5_-1:quant.static+requant", "no zero point of u8.*from 0 to 255"),
    ("qlinear:u8-i8-u8:nt:3x4x5:sum-0_3:quant.static+requant", "'0_3' does not fit sum"),
    ("qlinear:u8-i8-f32:nt:3x4x5:relu+add:quant.static", "add sum and then relu"),
    ("qlinear:u8-i8-f32:nt:3x4x5:add+gelu:quant.static", "add sum and then relu"),
    ("qlinear:u8-i8-f32:nt:3x4x5:quant.static-0.5_1.5", "above 0 and an integer"),
    ("qlinear:i8-i8-f32:nt:3x4x5:quant.static:a.7bit", "a.7bit is for products in u8"),
    ("woq_int4:bf16-i4-bf16:nt:3x64x65:quant.group-32", "no multiple of the group"),
    ("woq_int8:bf16-i8-bf16:nt:3x64x128:program.concat", "N=64 is not the columns of 3 equal weights"),
    ("woq_int8:bf16-i8-bf16:nt:3x48x128:b.argument:program.concat", "drop b.argument"),
    ("da8w4:bf16-i4-bf16:nt:3x16x128:quant.group-64", "the group is all of K=128"),
    ("da8w4:f32-i4-f32:nt:3x16x0:quant.group-64", "a row without elements has no scale"),
    ("woq_int4:bf16-i4-bf16:nt:3x64x512:quant.group-512", "woq_int4 has no group of 512.*32, 64, 128 or 256"),
    ("woq:f32-i4-f32:nt:3x4x65:quant.group-64+nf4", "blocks of NF4 would go on in the next row"),
    ("woq:f32-u8-f32:nt:3x4x64:quant.group-64+nf4", "write f32-i4-f32"),
    ("woq:f32-i4-f32:nt:3x4x64:quant.group-64+nf4+zeros", "nf4 has no zero points; drop zeros"),
    ("woq:bf16-i4-bf16:nt:3x4x64:quant.group-32+inside-q8_0", "write f32-i4-f32 or f32-i8-f32"),
    ("woq:f32-i4-f32:nt:3x4x64:quant.group-64+inside-q8_0", "write group-32.inside-q8_0"),
    ("woq:f32-i8-f32:nt:3x4x48:quant.group-32+inside-q8_0", "K=48 is not made of blocks of 32"),
    ("woq:f32-i8-f32:nt:3x4x0:quant.columnwise+inside-row", "a row without elements has no scale"),
    ("woq:f32-i4-f32:nt:3x4x64:quant.group-32+inside-q4", "'q4' does not fit inside"),
    ("qlinear:u8-i8-f32:nt:3x4x5:quant.static+bias_codes", "bias_codes is about a bias.*add bias"),
    ("da8w8:i8-i8-f32:nt:3x4x64:quant.rowwise+zeros", "da8w8 takes no zeros.*these do: woq"),
    # Several products, and sums of two.
    ("linears:f32:nt:3x17x65x97:gated-silu", "joins two products"),
    ("linears:f32:nt:2x17x65x97:gated-tanh", "one of silu gelu"),
    ("linears:f32:nt:2x17x65x97:gated-silu:steps.first", "no step of one product"),
    ("linears:f32:nt:2x17x65x97:relu:steps.first+last", "contradict"),
    ("linears:f32:nt:2x17x65x97:bias.first", "needs a bias"), ("linears:f32:nt:2x17x65x97:a.3d", "even M"),
    ("linears:f32:nt:2x16x65x97:out.2d", "add a.3d"), ("mm_plus_mm:bf16:nn:33x40x97", "two equal halves"),
    ("linear_dgrad:f32:nn:4x4x4:m.dynamic", "has fixed sizes"),
    # Flags.
    ("bmm:f32:nn:3x16x16x16:b.broadcast+batch_middle", "contradict"), ("mm:f32:nn:4x4x4:a.relu+floor", "contradict"),
    ("mm:f32:nn:4x4x4:b.alias:a.relu", "contradict"), ("mm:f32:nn:16x16x8:b.alias", "write 16x16x16"),
    ("bmm:f32:nt:3x16x16x16:b.alias", "nn or tt"),
    ("addmm:f32:nn:4x5x6:bias:out.given+addend", "write bias-mn"), ("mm:f32:nn:4x6x6:out.alias", "add out.given"),
    ("addmm:f32-f32-bf16:nn:4x5x6:bias-mn:out.given+addend", "addend of the result's dtype"),
    ("mm:f32:nn:4x5x6:out.given+alias", "write 4x5x5"), ("mm:f16-f16-f32:nn:4x6x6:out.given+alias", "not f32"),
    ("mm:f32:nn:4x6x6:a.relu:out.given+alias", "contradict"), ("mm:f32:nn:4x6x6:bias.offset", "needs a bias"),
    ("addmm:f32:nn:4x5x6:bias-mn:bias.offset:out.given+addend", "drop out.addend"),
])  # fmt: skip
def test_what_has_no_meaning_for_an_op_is_refused(line: str, words: str) -> None:
    refuses_line(line, words)


@pytest.mark.parametrize("line", ["mm:f32:nn:" + "9" * 5000 + "x8x8", "mm:f32:nn:8x8x8:" + "relu+" * 2000 + "relu"])
def test_a_line_without_end_is_refused(line: str) -> None:
    with pytest.raises(ProblemError, match=rf"a line of {len(line)} characters; up to 1000 are read"):
        Problem.parse(line)


@pytest.mark.parametrize(("typed", "canonical"), [
    ("mm:f32-f32-f32:nn:1x1x1:bias-n:a.padded:m.dynamic", "mm:f32:nn:1x1x1:bias:a.padded:m.dynamic"),
    (" mm:f32:nn:008x01x1::\n", "mm:f32:nn:8x1x1"), ("mm:f32:nn:2x3x1:scale-0.5", "mm:f32:nn:2x3x1:scale"),
    ("mm:f32:nn:2x3x1:scale-0.50", "mm:f32:nn:2x3x1:scale"), ("mm:f32:nn:2x3x1:scale-5e-1", "mm:f32:nn:2x3x1:scale"),
    ("mm:f32:nn:2x3x1:scale-02.50", "mm:f32:nn:2x3x1:scale-2.5"),
    ("mm:f32:nn:2x3x1:scale-2e0", "mm:f32:nn:2x3x1:scale-2"),
    ("mm:f32:nn:2x3x1:scale-0.0000001", "mm:f32:nn:2x3x1:scale-1e-7"),
    ("mm:f32:nn:2x3x1:scale-100000000000000000000", "mm:f32:nn:2x3x1:scale-1e20"),
    ("mm:f32:nn:2x3x1:scale-1e30+scale--1e-30", "mm:f32:nn:2x3x1:scale-1e30+scale--1e-30"),
    ("mm:f32:nn:2x3x1:scale-0.1000000000000000055", "mm:f32:nn:2x3x1:scale-0.1"),
    ("mm:f32:nn:2x3x1:clamp--0_6.0", "mm:f32:nn:2x3x1:clamp-0_6"),
    ("mm:f32:nn:2x3x1:clamp--1_1+leaky_relu-0.01", "mm:f32:nn:2x3x1:clamp+leaky_relu"),
    ("mm:f32:nn:2x3x1:add-mn", "mm:f32:nn:2x3x1:add"), ("mm:f32:nn:2x3x1:view-06", "mm:f32:nn:2x3x1:view-6"),
    ("mm:f32:nn:2x3x1:relu+perm-1_0", "mm:f32:nn:2x3x1:relu+t"),
    ("linear:f32:nt:2x3x4x1:perm-0_2_1", "linear:f32:nt:2x3x4x1:t"),
    ("mm:f32:nn:2x3x1:view-1x2x3x1+perm-0_1_3_2", "mm:f32:nn:2x3x1:view-1x2x3x1+t"),
    ("linear:f32:nt:2x3x4x1:perm-1_0_2", "linear:f32:nt:2x3x4x1:perm-1_0_2"),
    ("addmm:f32:nn:2x3x1:bias+alpha-1", "addmm:f32:nn:2x3x1:bias"),
    ("addmm:f32:nn:2x3x1:alpha+bias+beta-1.0", "addmm:f32:nn:2x3x1:bias"),
    ("addmm:f32:nn:2x3x1:beta-2+alpha-0.50+bias-m1+relu", "addmm:f32:nn:2x3x1:bias-m1+alpha-0.5+beta-2+relu"),
    ("qlinear:u8-i8-u8:nt:2x3x1:bias:quant.requant-0.5_3+static-0.0078125_7.0",
     "qlinear:u8-i8-u8:nt:2x3x1:bias:quant.static+requant"),
    ("qlinear:u8-i8-f32:nt:2x3x1:sum-1_0:quant.static", "qlinear:u8-i8-f32:nt:2x3x1:sum:quant.static"),
    ("woq_int4:bf16-i4-bf16:nt:2x3x128:bias:quant.group-128", "woq_int4:bf16-i4-bf16:nt:2x3x128:bias:quant.group"),
    ("scaled_mm:f8e5m2-f8e5m2-f32:nt:2x3x1:bias:quant.rowwise",
     "scaled_mm:f8e5m2-f8e5m2-f32:nt:2x3x1:bias:quant.rowwise"),
    ("linear:f32:nt:2x3x1:b.constant", "linear:f32:nt:2x3x1"),
    ("linear:f32:nt:2x3x1:bias:b.constant+parameter", "linear:f32:nt:2x3x1:bias:b.parameter"),
    ("linear:f32:nt:2x3x1:b.argument", "linear:f32:nt:2x3x1:b.argument"),
    ("bmm:f32:nn:2x3x1x1:b.argument", "bmm:f32:nn:2x3x1x1"),
    ("bmm:f32:nn:2x3x1x1:b.constant", "bmm:f32:nn:2x3x1x1:b.constant"),
    ("mm:f32:nt:2x2x1:b.alias_t+argument", "mm:f32:nt:2x2x1:b.alias_t"),
    ("mm:f32:nn:2x2x2:exp:b.argument+alias", "mm:f32:nn:2x2x2:exp:b.alias"),
])  # fmt: skip
def test_one_problem_has_one_spelling(typed: str, canonical: str) -> None:
    assert Problem.parse(typed).line == canonical
    assert Problem.parse(canonical).line == canonical
    assert Problem.parse(typed) == Problem.parse(canonical)


def test_a_problem_that_is_made_of_parts_is_canonical_too() -> None:
    plain = Problem.parse("addmm:f32:nn:2x2x1:bias-m1+alpha-0.5:math.tf32:a.padded")
    steps = [Step("alpha", "0.50"), Step("bias", "m1"), Step("beta", "1.0")]
    made = Problem(plain.op, plain.dtypes, plain.layout, Shape(2, 2, 1), steps, ["math.tf32", "b.constant", "a.padded"])  # type: ignore[arg-type]  # any sequence
    assert made == plain
    assert made.line == plain.line
    bare = dataclasses.replace(plain, op=OPS["mm"], epilogue=[], flags=[])  # type: ignore[arg-type]  # any sequence
    assert hash(bare) == hash(Problem.parse("mm:f32:nn:2x2x1"))
    assert Step("scale", "5e-1") == Step("scale")
    assert Step("bias", "n") == Step("bias")


@pytest.mark.parametrize(("change", "words"), [
    ({"flags": ("a.padded", "a.padded")}, "duplicate flag"), ({"flags": ("pad-ldq",)}, "unknown flag"),
    ({"shape": Shape(-1, 2, 3)}, "'-1'|-1 is not a size"),
    ({"shape": Shape(2, 2.0, 3)}, "2.0 is not a size"),  # type: ignore[arg-type]  # on purpose
    ({"shape": Shape(2, True, 3)}, "True is not a size"),
    ({"epilogue": (Step("static"),)}, "static is a quantisation parameter"),
    ({"quant": (Step("static"),)}, "takes no static"), ({"layout": "nn"}, "cannot be nn"),
])  # fmt: skip
def test_parts_that_make_no_problem_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ProblemError, match=words):
        dataclasses.replace(Problem.parse("mm:f32:nn:2x2x3"), **change)


@pytest.mark.parametrize(("name", "text", "words"), [
    ("rleu", "", "did you mean 'relu'"), ("relu", "1", "takes no parameter"),
    ("clamp", "2_1", "does not fit clamp; clamp-0_6: bounds LOW_HIGH, the lower one first"),
    ("scale", "inf", "does not fit"), ("bias", "q", "one of n 1n m1 mn"),
])  # fmt: skip
def test_a_step_that_is_none_cannot_be_made(name: str, text: str, words: str) -> None:
    with pytest.raises(ProblemError, match=words) as caught:
        Step(name, text)
    assert len(str(caught.value).splitlines()) == 1


def lines_in(text: str) -> Iterable[str]:
    """Everything in a text that begins as a problem line does and has a shape."""
    ops = "|".join(sorted(OPS, key=len, reverse=True))
    return re.findall(rf"(?<![\w:])(?:{ops}):[a-z0-9-]+:[nt]{{2}}:[0-9x]+(?::[a-z0-9_.+:-]+)?", text)


def test_what_is_stored_is_canonical() -> None:
    root = Path(__file__).parents[2]
    files = [
        *root.glob("baselines/*/*"),
        *root.glob("docs/results/*"),
        *root.glob("conformance/*.toml"),
        *root.glob("tests/studies/*.toml"),
    ]
    stored = {(line, path.name) for path in files for line in lines_in(path.read_text(encoding="utf-8"))}
    assert len(stored) > 400
    # A line at the end of a sentence, and one that a page cuts short.
    lines = {(line.rstrip(".:"), name) for line, name in stored if "..." not in line}
    assert not [(line, name) for line, name in sorted(lines) if said(line) != line]


def said(line: str) -> str:
    try:
        return Problem.parse(line).line
    except ProblemError as error:
        return str(error)


def mutated(line: str, rng: random.Random) -> str:
    """The line after one to three edits, as a slip of the hand or a program makes them."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(line) + 1)
        match rng.randrange(7):
            case 0:
                line = line[:at] + line[at + 1 :]
            case 1:
                line = line[:at] + rng.choice("x:+-_.0159eqz \n\u0663\ud800") + line[at:]
            case 2:
                line = line[:at] + rng.choice("x:+-_.0159eqz") + line[at + 1 :]
            case 3:
                line = line[:at] + line[max(0, at - rng.randint(1, 12)) : at] * rng.randint(1, 40) + line[at:]
            case 4:
                token = rng.choice([*STEPS, *FLAGS, "clamp-5_1", "scale-1e999", "perm-1_0", "view-4x4"])
                line = f"{line}+{token}"
            case 5:
                line = f"{line}:{rng.choice(list(FLAGS))}"
            case _:
                tokens = re.split(r"([:+])", line)
                first, second = rng.randrange(len(tokens)), rng.randrange(len(tokens))
                tokens[first], tokens[second] = tokens[second], tokens[first]
                line = "".join(tokens)
    return line


@pytest.mark.slow
def test_no_mutation_of_a_line_is_anything_but_read_or_refused() -> None:
    rng = random.Random(14)
    known = [problem.line for problem in unique(matrix.products("full"))]
    slow, read = [], 0
    for _ in range(5_000):
        line = mutated(rng.choice(known), rng)
        began = time.thread_time()
        error = complaint(line)
        if time.thread_time() - began > 0.005:
            slow.append(line)
        if error is not None:
            assert len(str(error).splitlines()) == 3
            assert 0 <= error.column <= len(error.line)
            assert error.field in FIELDS
        else:
            read += 1
            problem = Problem.parse(line)
            again = Problem.parse(problem.line)
            assert (again, again.line) == (problem, problem.line)
            assert re.fullmatch(r"[a-z0-9:+\-._]+", problem.line)
    assert 125 < read < 4_750
    assert not [line for line in slow if min(seconds(line) for _ in range(5)) > 0.005]


def seconds(line: str) -> float:
    began = time.thread_time()
    complaint(line)
    return time.thread_time() - began


@pytest.mark.parametrize(("line", "autocast", "dtype"), [
    ("mm:f32-f32-bf16:nn:1x1x1", True, "bf16"), ("addmm:f32-f32-f16:nn:1x1x1:bias", True, "f16"),
    ("mm:f32:nn:1x1x1", False, "f32"), ("mixed_mm:i8-f16-f16:nn:1x1x1", False, "f16"),
    ("int_mm:i8-i8-i32:nt:1x1x1", False, "i8"),
])  # fmt: skip
def test_the_dtype_in_which_a_product_is_multiplied(line: str, autocast: bool, dtype: str) -> None:
    problem = Problem.parse(line)
    assert (problem.autocast, problem.input_dtype.name) == (autocast, dtype)


@pytest.mark.parametrize(
    ("line", "outputs"),
    [
        ("mm:f32:nn:1x1x1:relu", ["mm:f32:nn:1x1x1:relu"]),
        ("mm:f32:nn:1x1x1:relu:program.multi_output", ["mm:f32:nn:1x1x1", "mm:f32:nn:1x1x1:relu"]),
        (
            "addmm:f16:nn:4x8x8:bias+alpha-2+add+gelu:r0.alias:m.dynamic:program.multi_output",
            [
                "addmm:f16:nn:4x8x8:bias+alpha-2+add:r0.alias:m.dynamic",
                "addmm:f16:nn:4x8x8:bias+alpha-2+add+gelu:r0.alias:m.dynamic",
            ],
        ),
        # Without its residual the problem of two results has nothing that could be A.
        ("mm:f16:nn:4x8x8:add:r0.alias:program.multi_output", ["mm:f16:nn:4x8x8", "mm:f16:nn:4x8x8:add:r0.alias"]),
        # Nor anything whose address could be odd, where it has no bias.
        (
            "woq_int8:f32-i8-f32:nt:4x8x8:bias:bias.offset:program.multi_output",
            ["woq_int8:f32-i8-f32:nt:4x8x8", "woq_int8:f32-i8-f32:nt:4x8x8:bias:bias.offset"],
        ),
        (
            "linear:f16:nt:4x8x8:bias+cast-f32:program.multi_output",
            ["linear:f16:nt:4x8x8:bias", "linear:f16:nt:4x8x8:bias+cast-f32"],
        ),
        ("mm:f32:nn:4x8x2:relu+t:program.multi_output", ["mm:f32:nn:4x8x2:relu", "mm:f32:nn:4x8x2:relu+t"]),
        ("mm:f32:nn:4x8x2:mul+relu+add:program.branching", ["mm:f32:nn:4x8x2:mul+relu", "mm:f32:nn:4x8x2:mul+add"]),
        (
            "linear:f32:tt:4x8x8:bias+relu:a.padded:program.chained",
            ["linear:f32:tt:4x8x8:bias+relu:a.padded", "linear:f32:nt:4x8x8:bias"],
        ),
        (
            "mm:f32:nn:4x8x8:add+relu:r0.alias:program.branching",
            ["mm:f32:nn:4x8x8:add:r0.alias", "mm:f32:nn:4x8x8:relu"],
        ),
    ],
)
def test_a_multi_output_program_answers_two_problems(line: str, outputs: list[str]) -> None:
    assert [str(p) for p in Problem.parse(line).outputs] == outputs


@pytest.mark.parametrize(("line", "judged", "returned"), [
    ("mm:f32:nn:4x8x2:relu+t+add", (4, 8), (8, 4)), ("linear:f32:nt:2x4x8x3:perm-2_0_1", (2, 4, 8), (8, 2, 4)),
    ("mm:f32:nn:4x8x2:view-2x2x4x2+perm-0_2_1_3+t", (4, 8), (2, 4, 2, 2)),
    ("grouped_mm:bf16:nt:2x4x8x8:t", (8, 8), (8, 8)),
])  # fmt: skip
def test_a_result_is_returned_in_other_places_than_it_is_judged(
    line: str, judged: tuple[int, ...], returned: tuple[int, ...]
) -> None:
    problem = Problem.parse(line)
    assert (problem.result_shape, problem.returned_shape) == (judged, returned)


def test_what_the_rooms_ask_of_a_problem() -> None:
    problem = Problem.parse("addmm:bf16:nt:8x256x2664:bias-m1+alpha-0.5+beta-2+relu+add+cast-f32")
    assert (problem.alpha, problem.beta, problem.bias_shape) == (0.5, 2.0, (8, 1))
    assert [str(s) for s in problem.passes] == ["relu", "add", "cast-f32"]
    assert (problem.result_dtype.name, problem.result_shape) == ("f32", (8, 256))
    assert problem.constant_b
    assert not Problem.parse("bmm:f32:nn:2x3x4x5").constant_b
    assert [str(s) for s in Problem.parse("mm:f32:nn:1x1x1:bias+relu").passes] == ["bias", "relu"]
