"""Operands: reproducible to the byte, guarded in poison, exact where they say so, and telling."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from oracle import make

from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.operands import memory, random_streams, views
from pytest_gemm.operands import tensors as factory
from pytest_gemm.operands.distributions import DISTRIBUTIONS, distributions_for
from pytest_gemm.operands.dtypes import torch_dtype
from pytest_gemm.operands.integers import tile_map_period
from pytest_gemm.operands.random_streams import Lines
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import StepKind
from pytest_gemm.programs.program import args, build

EXACT = [name for name, distribution in DISTRIBUTIONS.items() if distribution.exact]


def accumulator_bits(problem: Problem) -> int:
    if problem.has("math.half_partials"):
        return problem.dtypes.out.precision
    return {"f64": 53, "i32": 31}.get(problem.dtypes.out.name, 24)


# -- reproducible -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "distribution", "digest"),
    [
        ("mm:f32:nt:5x3x7", "rand", "a=5b298956a2c1111712bad27f6d0f44f7 b=9960bcbb77b3ab841f258cb99a0badeb"),
        ("mm:bf16:nn:5x3x7", "int-2", "a=9f8784a6048ca0142ef220f265dd83c6 b=5e1fca3e4dc35cecf9334909e7fe5cf5"),
        ("int_mm:i8-i8-i32:nt:5x3x7", "int-2", "a=79428e12793ada12c2db610daf4b67ad b=5cddcea40f425ca08195a62f8ce75249"),
        ("mm:f64:tt:5x3x7", "rand-wide", "a=f957f9ec52d0489a67cfa43ebfcc4436 b=e22de702ffcfd2bc543cf4c67431459c"),
        ("mm:f16:nt:5x3x7", "one-hot", "a=b2799a95c7e1dc328509b155c307003b b=9af7bcc83eaea85fbb82adfe39aa1b9f"),
    ],
)
def test_the_same_bytes_on_every_machine(line: str, distribution: str, digest: str) -> None:
    assert make(line, distribution, seed=11).digest() == digest


def test_dyn_m_changes_no_value_and_a_constant_is_the_same_for_every_m() -> None:
    line = "linear:bf16:nt:{}x24x40:bias+relu"
    for distribution in distributions_for(Problem.parse(line.format(8))):
        eight = make(line.format(8), distribution)
        assert make(line.format(8) + ":m.dynamic", distribution).digest() == eight.digest()
        seven = make(line.format(7) + ":m.dynamic", distribution)
        constants = [(args(o.problem, o)["b"], args(o.problem, o)["bias"]) for o in (seven, eight)]
        for some, same in zip(*constants, strict=True):
            assert torch.equal(_bits(some), _bits(same)), distribution  # specials hold NaN


# -- guarded -----------------------------------------------------------------------------------------

LAYOUTS = [
    "mm:f32:nn:5x3x7", "mm:bf16:tt:5x3x7:a.padded+offset:b.padded+offset", "mm:f16:nt:5x3x7:a.padded:b.padded",
    "int_mm:i8-i8-i32:tn:5x3x7:a.padded:b.offset", "mixed_mm:f16-u8-f16:nt:5x3x7:b.padded",
    "bmm:f32:nt:4x5x3x7:a.padded+broadcast", "baddbmm:f32:nn:4x5x3x7:bias-mn:b.padded+offset+broadcast",
    "linear:f32:nt:4x5x3x7:bias+add:a.padded", "mm:f32:nt:5x5x7:a.padded+offset:b.alias_t",
    "mm:f32:nn:5x3x7:a.tail:b.sliced", "mm:bf16:tt:5x3x7:a.offset+sliced:b.offset+tail",
    "bmm:f16:nt:4x5x3x7:a.tail:b.strided", "linear:f32:nt:4x5x3x7:bias:a.strided:b.tail",
    "addmm:bf16:nn:5x3x7:bias:out.given+padded+offset", "int_mm:i8-i8-i32:nn:5x3x7:out.copied+padded",
    "bmm:f16:nt:4x5x3x7:out.given+transposed", "mm:f32:nn:0x3x7", "mm:f32:nt:5x0x7:a.padded:b.padded",
    "mm:f32:tn:5x3x0:a.padded:b.padded", "bmm:f32:nn:0x5x3x7", "linear:f32:nt:4x5x3x7:bias:bias.offset",
    "baddbmm:bf16:nn:4x5x3x7:bias-mn:out.given+padded+offset+addend", "bmm:f32:tn:4x5x7x7:a.padded:out.given+alias",
]  # fmt: skip
# Operands that have other shapes than the matrices of the line.
COMPOSED = ["da8w4:bf16-i4-bf16:nt:3x5x64:bias:quant.group-64"]


def poison_bytes(flat: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which elements of a storage are NaN, or for integers one of the two extremes at its place."""
    if flat.is_floating_point():
        return np.asarray(flat.isnan())
    values = flat.numpy().astype(np.int64)
    info = torch.iinfo(flat.dtype)
    low = info.min if info.min else info.max - 1
    return np.asarray(values == np.where(np.arange(len(values)) % 2 == 0, low, info.max))


@pytest.mark.parametrize("line", [*LAYOUTS, *COMPOSED])
def test_every_byte_outside_the_view_is_poison(line: str) -> None:
    operands = make(line, "int-1")
    assert operands.guards_intact()
    for guarded in operands.buffers:
        outside = np.ones(guarded.storage.numel(), dtype=bool)
        reachable = torch.arange(guarded.storage.numel()).as_strided(
            guarded.view.size(), guarded.view.stride(), guarded.view.storage_offset()
        )
        outside[reachable.numpy().ravel()] = False
        assert poison_bytes(guarded.storage)[outside].all(), guarded.name
        band = 512 // guarded.storage.element_size()
        assert outside[:band].all(), guarded.name
        assert outside[-band:].all(), guarded.name
        if guarded.storage.is_floating_point() and guarded.name != "out":
            assert not guarded.view.isnan().any(), guarded.name


@pytest.mark.parametrize("distribution", distributions_for(Problem.parse("grouped_mm_n:f32:nn:0x1000x1x1")))
def test_a_product_without_groups_has_operands(distribution: str) -> None:
    assert make("grouped_mm_n:f32:nn:0x1000x1x1", distribution).b.numel() == 0


@pytest.mark.parametrize("line", LAYOUTS)
def test_shapes_and_strides_are_those_of_the_layout(line: str) -> None:
    problem = Problem.parse(line)
    operands = factory.make(problem, "int-1", 0)
    shape, lead = problem.shape, () if problem.shape.batch is None else (problem.shape.batch,)
    assert operands.a.shape == (*lead, shape.m, shape.k)
    assert operands.b.shape == ((shape.k, shape.n) if problem.op.name == "linear" else (*lead, shape.k, shape.n))
    gap = 2 * 128 // problem.dtypes.a.bits  # 16 bytes on both sides of a slice
    pad_a, pad_b = (8 * problem.has(f"{x}.padded") + gap * problem.has(f"{x}.sliced") for x in "ab")
    one_a, one_b = (1 + problem.has(f"{x}.strided") for x in "ab")
    row_a, row_b = one_a * max(shape.k, 1) + pad_a, one_b * max(shape.n, 1) + pad_b
    column_a, column_b = one_a * max(shape.m, 1) + pad_a, one_b * max(shape.k, 1) + pad_b
    assert operands.a.stride()[-2:] == ((one_a, column_a) if problem.layout.a_transposed else (row_a, one_a))
    if problem.has("b.alias_t"):
        assert operands.b.data_ptr() == operands.a.data_ptr()
        assert operands.b.stride() == operands.a.mT.stride()
    else:
        assert operands.b.stride()[-2:] == ((one_b, column_b) if problem.layout.b_transposed else (row_b, one_b))
    for flag, tensor in (("a.broadcast", operands.a), ("b.broadcast", operands.b)):
        if problem.has(flag):
            assert tensor.stride(0) == 0
    for flag, tensor in (("a.offset", operands.a), ("b.offset", operands.b)):
        offset = 1 if problem.has(flag) or (problem.has("b.alias_t") and problem.has("a.offset")) else 0
        cut = {"sliced": gap // 2, "tail": max(tensor.stride())}  # of a batch a matrix, otherwise a row
        offset += cut.get(problem.view_of(flag[0]), 0)
        assert (tensor.storage_offset() - offset) * tensor.element_size() % 64 == 0


@pytest.mark.parametrize("line", [line for line in LAYOUTS if any(w in line for w in ("tail", "sliced", "strided"))])
def test_the_program_makes_the_operand_of_what_it_takes(line: str) -> None:
    problem = Problem.parse(line)
    operands = factory.make(problem, "rand", 0)
    tensors = args(problem, operands)
    for name, operand in (("a", operands.a), ("b", operands.b)):
        if not problem.view_of(name):
            continue
        made = views.cut(problem, name, tensors[name])
        made = made.mT if name == "b" and problem.op.weight else made
        assert made.data_ptr() == operand.data_ptr()
        assert (made.shape, made.stride()) == (operand.shape, operand.stride())
        assert int(tensors[name].isnan().sum()) == tensors[name].numel() - operand.numel()


def test_a_write_anywhere_is_noticed_and_named() -> None:
    operands = make("linear:f32:nt:5x3x7:bias:a.padded", "rand")
    before = operands.digest()
    assert operands.changed(before) == ()
    operands.b[2, 1] += 1
    assert operands.changed(before) == ("b",)
    assert operands.guards_intact()
    operands.buffers[0].storage[-1] = 0.0
    assert operands.changed(before) == ("a", "b")
    assert not operands.guards_intact()


# -- exact ------------------------------------------------------------------------------------------

DTYPE_LINES = [
    "mm:f32:nt:9x8x{}", "mm:f16:nt:9x8x{}", "mm:bf16:nn:9x8x{}", "mm:f64:nt:9x8x{}", "int_mm:i8-i8-i32:nt:9x8x{}",
    "int_mm:i8-i8-i32:nt:9x8x{}:cast-f16", "mixed_mm:f16-i8-f16:nt:9x8x{}", "mixed_mm:u8-f32-f32:nt:9x8x{}",
    "woq_int8:bf16-i8-bf16:nt:9x8x{}", "woq_int8:f16-i8-f16:nt:9x8x{}:bias+mul",
    "addmm:f16:nn:9x8x{}:bias-mn+alpha-4+beta-2", "addmm:f32:nn:9x8x{}:bias+beta-0.5",
    "linear:bf16:nt:9x8x{}:bias+gelu", "linear:f16:nt:9x8x{}:bias+exp", "mm:f32:nt:8x8x{}:b.alias_t",
    "mm:f16:tn:8x8x{}:b.alias_t", "mm:f32:nt:9x8x{}:math.tf32", "mixed_mm:f32-i8-f32:nt:9x8x{}:mul:math.tf32",
    "mm:f16:nt:9x8x{}:math.half_partials", "addmm:bf16:nn:9x8x{}:bias+beta-2:math.half_partials",
    "linear:f32-f32-bf16:nt:9x8x{}:bias+gelu", "addmm:f32-f32-f16:nn:9x8x{}:bias-mn+alpha-4",
]  # fmt: skip


@pytest.mark.parametrize("k", [1, 7, 1000, 8200])
@pytest.mark.parametrize("line", DTYPE_LINES)
def test_exact_distributions_sum_exactly_in_the_accumulator(line: str, k: int) -> None:
    problem = Problem.parse(line.format(k))
    bits = accumulator_bits(problem)
    for distribution in set(EXACT) & set(distributions_for(problem)):
        o = factory.make(problem, distribution, 3)
        a, b = o.a.double(), o.b.double()
        scale = 1.0 if o.scale_b is None else o.scale_b.double()
        grid = 0.0 if o.bias is None else abs(problem.beta) * o.bias.double().abs()
        assert (a.abs() @ b.abs() * scale + grid).max() <= 2.0**bits * o.quantum, distribution
        # Products row 0 times all columns, each on the grid.
        products = a[0][:, None] * b * scale / o.quantum
        assert torch.equal(products, products.round()), distribution
        if o.bias is not None:
            assert torch.equal(o.bias.double() / o.quantum, (o.bias.double() / o.quantum).round()), distribution
        assert not o.zero_mean
        assert o.finite


@pytest.mark.parametrize("half", ["bf16", "f16"])
def test_exact_operands_lose_nothing_when_autocast_converts_them(half: str) -> None:
    problem = Problem.parse(f"addmm:f32-f32-{half}:nn:33x40x1000:bias")
    for distribution in set(EXACT) & set(distributions_for(problem)):
        o = factory.make(problem, distribution, 3)
        assert o.bias is not None
        for tensor in (o.a, o.b, o.bias):
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor.to(torch_dtype(problem.dtypes.out)).float(), tensor), distribution
    # Random ones have bits to lose.
    o = factory.make(problem, "rand", 3)
    assert not torch.equal(o.a.to(torch_dtype(problem.dtypes.out)).float(), o.a)


@pytest.mark.parametrize("k", [1, 1000, 16384])
@pytest.mark.parametrize("line", DTYPE_LINES)
def test_no_result_overflows(line: str, k: int) -> None:
    problem = Problem.parse(line.format(k))
    chain = [problem.dtypes.out] + [s.dtype for s in problem.epilogue if s.kind is StepKind.CAST]
    for distribution in set(distributions_for(problem)) - {"specials"}:
        o = factory.make(problem, distribution, 3)
        product = o.a.double() @ o.b.double() * (1.0 if o.scale_b is None else o.scale_b.double())
        addend = 0.0 if o.bias is None else problem.beta * o.bias.double()
        value = problem.alpha * product + addend
        if o.residuals:
            value = value * o.residuals[0].double()
        if problem.step("exp"):
            value = value.exp()
        assert value.abs().max() <= min(d.max_finite for d in chain), distribution


def test_int_2_has_extremes_of_int8() -> None:
    o = make("int_mm:i8-i8-i32:nt:64x48x100", "int-2")
    assert {-128, 127, 0, 1} <= set(o.a.unique().tolist())


def test_one_hot_gives_rows_of_b_with_full_significands() -> None:
    for dtype in ("f32", "f16", "bf16", "f64"):
        o = make(f"mm:{dtype}:nt:9x8x40", "one-hot")
        assert torch.equal((o.a != 0).sum(1), torch.ones(9, dtype=torch.int64))
        picked = o.b[o.a.float().argmax(1)]
        assert torch.equal(o.a.double() @ o.b.double(), picked.double())
        odd = (o.b.double() / o.quantum) % 2
        assert 0.3 < odd.mean() < 0.7
        assert o.b.double().abs().max() >= 2 ** (DTYPES[dtype].precision - 1) * o.quantum


# -- decoders ---------------------------------------------------------------------------------------


def test_k_cover_notices_every_k() -> None:
    for line in ("mm:f32:nt:3x200x1000", "mm:f32:nt:3x2x1000", "mm:bf16:nt:3x1x1000", "mixed_mm:f16-u8-f16:nt:3x2x500"):
        problem = Problem.parse(line)
        o = factory.make(problem, "k-cover", 0)
        a, b = o.a.double(), o.b.double()
        right = a @ b
        for k in range(problem.shape.k):
            wrong = right - a[:, k : k + 1] * b[k : k + 1]
            assert not torch.equal(wrong, right), (line, k)


@pytest.mark.parametrize("line", [
    "mm:f32:nt:33x65x7", "mm:f16:nn:100x200x2", "mm:bf16:tn:50x70x9", "int_mm:i8-i8-i32:nt:200x300x4",
    "bmm:f32:nn:2x4x5x6",
])  # fmt: skip
def test_tile_map_tells_where_an_element_came_from(line: str) -> None:
    problem = Problem.parse(line)
    o = factory.make(problem, "tile-map", 0)
    c = o.a.double() @ o.b.double()
    assert torch.equal(c, c.to(torch_dtype(problem.dtypes.out)).double())
    rows, columns = tile_map_period(problem)
    c = c.reshape(-1, problem.shape.m, problem.shape.n)[0]
    for i in range(0, problem.shape.m, 3):
        for j in range(0, problem.shape.n, 7):
            assert c[i, j].item() == i % rows * columns + j % columns + 1
    if problem.shape.m * problem.shape.n <= 2**24 and problem.dtypes.out.name == "f32":
        assert (rows, columns) == (problem.shape.m, problem.shape.n)
    # Tiles that lie 16, 32 or 64 apart never look alike.
    for step in (16, 32, 64):
        assert step % rows or step >= problem.shape.m
        assert step % columns or step >= problem.shape.n


# -- random -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_specials_stay_in_a_quarter_of_the_rows_and_columns(dtype: str) -> None:
    o = make(f"mm:{dtype}:nt:40x48x64", "specials")
    assert not o.finite
    bad_rows, bad_columns = ~o.a.isfinite().all(1), ~o.b.isfinite().all(0)
    assert bad_rows.sum() == bad_columns.sum() == 3
    c = o.a.double() @ o.b.double()
    assert c[~bad_rows][:, ~bad_columns].isfinite().all()
    for tensor, edges in ((o.a, 0), (o.b.mT, 2)):
        values = tensor.double()
        assert values.isnan().sum() == (values == math.inf).sum() == (values == -math.inf).sum() == 1
        # A line of -0.0, others but for the smallest normal number, in f16 the smallest subnormal, and the edges of B.
        lines = ((values == 0) & values.signbit()).sum(1) > 50
        assert lines.sum() == {"f32": 2, "f16": 3, "bf16": 1}[dtype] + edges
        tiny = DTYPES[dtype].emin - DTYPES[dtype].precision + 1
        assert (values == 2.0**tiny).any()


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_one_line_stands_for_all_rows_of_a_and_all_columns_of_b(layout: str) -> None:
    o = factory.make(Problem.parse(f"bmm:f32:{layout}:2x5x6x7:a.expanded:b.expanded"), "rand", 0)
    assert (o.a == o.a[:, :1]).all()
    assert (o.b == o.b[..., :1]).all()
    assert (o.a.stride(), o.b.stride()) == (
        (35, 0, 5 if layout[0] == "t" else 1),
        (42, 1 if layout[1] == "t" else 6, 0),
    )
    assert o.a[0, 0].unique().numel() == o.b[0, :, 0].unique().numel() == 7


@pytest.mark.parametrize("line", [
    "mm:f32:nn:3x3x1", "mm:f16:tn:7x5x2", "mm:bf16:nt:33x1x127:a.padded", "bmm:bf16:nn:5x3x4x9:b.broadcast",
    "linear:f32:nt:2x17x65x33:bias", "mixed_mm:f16-i8-f16:nn:9x8x64", "mm:f32-f32-f16:nn:12x10x5:relu+mul",
    "grouped_mm:bf16:nt:3x20x40x64", "mm:bf16:nt:9x9x33:b.alias_t",
])  # fmt: skip
def test_nan_is_first_in_a_row_behind_another_and_infinity_last(line: str) -> None:
    for seed in range(4):
        o = factory.make(Problem.parse(line), "specials", seed)
        for x in (o.a, o.b.mT):
            if x.is_floating_point() and x.shape[-2] > 1:
                lines = x.reshape(-1, *x.shape[-2:])
                assert lines[:, 1:, 0].isnan().any()
                assert lines[..., -1].isinf().any() or x.shape[-2] == 2


@pytest.mark.parametrize("line", [
    "mm:f32:nn:20x40x256", "mm:bf16:nn:1x40x96", "bmm:f16:nn:3x9x8x40", "bmm:f16:nn:3x9x8x40:b.broadcast",
    "mm:f32:nt:30x30x64:b.alias_t", "mixed_mm:bf16-i8-bf16:nn:20x40x64", "grouped_mm:bf16:nt:3x20x40x64",
])  # fmt: skip
def test_each_special_value_meets_a_zero(line: str) -> None:
    o = make(line, "specials")
    a, b = o.a.double(), o.b.double()
    b = b if o.offs is None else b[0]  # all groups have zeros at the same k
    for one, other in ((a, b.mT), (b.mT, a)):
        at = (~one.isfinite()).nonzero()
        for *_, k in at.tolist():
            if k == a.shape[-1] - 1 and other.shape[-2] == 1:
                continue  # the infinity at the end stays one
            assert (other[..., k] == 0).any(), k
    # B must not depend on M.
    if "b.alias_t" not in line and o.offs is None:
        other_m = make(Problem.parse(line).resized({"m": 7}).line, "specials")
        assert torch.equal(o.b.isnan(), other_m.b.isnan())
        assert torch.equal(o.b == 0, other_m.b == 0)


@pytest.mark.parametrize("k", [1000, 1200, 8200])
def test_long_sums_of_int8_leave_what_f32_holds(k: int) -> None:
    o = make(f"int_mm:i8-i8-i32:nn:5x8x{k}", "int-2")
    c = o.a.double() @ o.b.double()
    assert (float(c.abs().max()) > 2**24) == (k > 1024)
    assert (c > 2**24).sum() <= 4  # two rows by two columns
    assert (o.a[1] == 127).any()


@pytest.mark.parametrize("epilogue", ["bias+alpha--1+beta--1+relu", "bias+scale--2+relu", "bias+relu"])
def test_relu_leaves_something_of_a_result_of_one_sign(epilogue: str) -> None:
    o = make(f"addmm:f32:nn:9x18x11:{epilogue}", "k-cover")
    assert o.bias is not None
    sign = -1.0 if "--" in epilogue else 1.0
    assert (sign * (o.a @ o.b) > 0).all()


def test_scales_leave_room_for_the_sum_before_them_and_beta_0_makes_the_addend_nan() -> None:
    o = make("woq_int8:f32-i8-f32:nt:16x16x64", "rand-large")
    assert (o.a.abs().double() @ o.b.abs().double()).max() < 2.0**126
    bias = make("addmm:f32:nn:9x8x7:bias+beta-0", "specials").bias
    assert bias is not None
    assert bias.isnan().all()


def test_random_regimes_are_where_they_say() -> None:
    line = "mm:{}:nt:64x48x256"
    for dtype in ("f32", "f16", "bf16", "f64"):
        o = {f: make(line.format(dtype), f) for f in ("rand", "rand-positive", "rand-wide", "rand-large", "rand-small")}
        a = o["rand"].a.double()
        assert 0.98 < a.abs().max() <= 1
        assert abs(a.mean()) < 0.02
        assert o["rand-positive"].a.min() >= 0
        assert o["rand"].zero_mean > o["rand-positive"].zero_mean
        exponents = torch.frexp(o["rand-wide"].a.double())[1]
        assert exponents.max() - exponents.min() >= 9
        c = {name: (x.a.double() @ x.b.double()).abs() for name, x in o.items()}
        top = {"f16": 2.0**10, "f64": 2.0**380}.get(dtype, 2.0**110)
        assert c["rand-large"].mean() > top
        low = {"f16": 2.0**-8, "f64": 2.0**-390, "f32": 2.0**-70, "bf16": 2.0**-100}[dtype]
        assert c["rand-small"].mean() < low
        if dtype in {"f32", "bf16"}:
            # Every exact product, and so every partial sum, is a multiple of the smallest normal number.
            products = o["rand-small"].a.double()[0][:, None] * o["rand-small"].b.double() * 2.0**126
            assert torch.equal(products, products.round())
        # No operand is subnormal: flushing must not matter.
        for x in o.values():
            values = x.a.double().abs()
            assert values[values > 0].min() >= 2.0 ** DTYPES[dtype].emin or dtype == "f16"


# -- telling ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "epilogue",
    ["", ":bias+relu", ":sigmoid", ":bias+gelu", ":tanh", ":clamp-0_6", ":exp", ":relu+mul", ":div", ":add+relu"],
)
@pytest.mark.parametrize("shape", ["24x16x1000", "7x33x1", "1x48x256"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_results_are_neither_silent_nor_all_alike(dtype: str, shape: str, epilogue: str) -> None:
    problem = Problem.parse(f"mm:{dtype}:nt:{shape}{epilogue}")
    wide = Problem.parse(f"mm:f64:nt:{shape}{epilogue}")
    for distribution in set(distributions_for(problem)) - {"specials", "k-cover"}:
        o = factory.make(problem, distribution, 5)
        made = build(wide)(**{name: t.double() for name, t in args(problem, o).items()})
        c = made.to(torch_dtype(problem.dtypes.out))
        assert c.isfinite().all()
        assert (c != 0).double().mean() >= 0.1, distribution
        assert len(c.unique()) >= 3 or problem.shape.k == 1 or c.numel() < 10, distribution


def test_a_shifted_bias_shows_and_residuals_have_the_dtype_of_the_chain() -> None:
    o = make("mm:f32:nt:4x64x100:bias+mul+cast-bf16+div", "int-1")
    assert o.bias is not None
    for shift in (1, 2, 8, 16, 32):
        assert (o.bias[shift:] != o.bias[:-shift]).all()
    assert [r.dtype for r in o.residuals] == [torch.float32, torch.bfloat16]
    assert all(r.shape == (4, 64) for r in o.residuals)
    mantissa, _ = torch.frexp(o.residuals[1].double().abs())
    assert (mantissa == 0.5).all()


def test_what_cannot_be_made_is_refused_with_a_reason() -> None:
    with pytest.raises(Unsupported, match="exp of an integer product"):
        make("int_mm:i8-i8-i32:nt:4x4x4:cast-f32+exp", "rand")
    assert distributions_for(Problem.parse("int_mm:i8-i8-i32:nt:4x4x4:cast-f32+exp")) == ()
    with pytest.raises(Unsupported, match="cast-i8"):
        make("mm:f32:nt:4x4x4:cast-i8", "rand")
    with pytest.raises(Unsupported, match="tile-map does not apply"):
        make("mm:f32:nt:4x4x1", "tile-map")
    with pytest.raises(ValueError, match="did you mean 'k-cover'"):
        make("mm:f32:nt:4x4x4", "k-cove")


def test_the_most_telling_distribution_comes_first() -> None:
    names = distributions_for(Problem.parse("mm:f32:nt:33x65x127"))
    assert names[:3] == ("int-2", "rand", "k-cover")
    assert set(names) == set(DISTRIBUTIONS)
    assert set(distributions_for(Problem.parse("int_mm:i8-i8-i32:nt:4x4x4"))) == {*EXACT, "rand"}


# -- large ones -----------------------------------------------------------------------------------------


@pytest.fixture
def few_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few as are drawn of a large operand: 16 lines here."""
    monkeypatch.setattr(random_streams, "_DRAWN", 64)


@pytest.mark.usefixtures("few_are_drawn")
@pytest.mark.parametrize(
    "line", ["mm:f32:nt:90x70x64", "mm:bf16:tn:90x70x65:a.padded:b.padded", "bmm:f32:nn:3x40x70x33"]
)
@pytest.mark.parametrize("distribution", ["int-2", "int-1", "rand"])
def test_a_large_operand_is_made_of_few_lines_and_keeps_its_distribution_s_promise(
    line: str, distribution: str
) -> None:
    made = make(line, distribution, 1)
    a, b = made.a.double(), made.b.double()
    for lines in (a.reshape(-1, a.shape[-1]), b.mT.reshape(-1, b.shape[-2])):
        # Rotated, and no two alike.
        assert len(lines.sort(1).values.unique(dim=0)) <= 16
        assert len(lines.unique(dim=0)) == len(lines)
    if made.quantum:
        assert float((a.abs() @ b.abs()).amax()) <= made.magnitude_bound * made.quantum <= 2**24 * made.quantum
    assert made.guards_intact()
    again = make(line, distribution, 1)
    assert again.digest() == made.digest() != make(line, distribution, 2).digest()


@pytest.mark.usefixtures("few_are_drawn")
def test_a_large_constant_and_a_large_residual_are_the_same_for_every_m() -> None:
    few, many = (make(f"mm:f32:nn:{m}x70x64:add", "rand", 1) for m in (20, 90))
    assert torch.equal(few.b, many.b)
    assert many.residuals[0].shape == (90, 70)
    assert len(many.residuals[0].unique(dim=0)) == 90


@pytest.mark.parametrize(("line", "distribution"), [
    ("addmm:f32:tn:17x24x40:bias-1n+add:a.padded:b.offset", "int-2"), ("mm:f32:nt:24x24x40:add:b.alias_t", "rand"),
    ("bmm:bf16:nn:3x8x16x16:add:b.broadcast:r0.alias", "rand"),
    ("scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:32x32x32:bias:quant.rowwise", "int-1"),
    ("grouped_mm:bf16:nt:4x16x16x32", "rand"),
])  # fmt: skip
def test_a_clone_is_the_same_elsewhere(line: str, distribution: str) -> None:
    made = make(line, distribution, 1)
    other = made.clone()
    assert other.digest() == made.digest()
    assert other.guards_intact()
    pairs = list(zip(args(made.problem, made).items(), args(other.problem, other).items(), strict=True))
    for (name, x), (same, y) in pairs:
        assert name == same
        assert x.stride() == y.stride()
        assert torch.equal(_bits(x), _bits(y))
        assert x.data_ptr() != y.data_ptr()
        assert x.data_ptr() % 64 == y.data_ptr() % 64
    other.a.zero_()
    assert other.changed(made.digest()) == ("a",)
    assert made.changed(make(line, distribution, 1).digest()) == ()
    # B that is A, and a residual that is A, still are.
    assert (other.b.data_ptr() == other.a.data_ptr()) == (made.b.data_ptr() == made.a.data_ptr())
    if made.residuals:
        assert (other.residuals[0].data_ptr() == other.a.data_ptr()) == (
            made.residuals[0].data_ptr() == made.a.data_ptr()
        )


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def test_the_hash_of_large_storages_notices_every_byte_and_what_changes_places() -> None:
    x = torch.arange(200_003, dtype=torch.float32).to(torch.float16)
    before = memory._checksum(x)
    assert memory._checksum(x.clone()) == before
    for place in (0, 1, 131_071, 131_072, 199_999, 200_002):
        raw = x.clone().view(torch.uint8)
        raw[2 * place] ^= 1
        assert memory._checksum(raw.view(torch.float16)) != before
    swapped = x.clone()
    swapped[[10, 11, 70_010, 70_011]] = x[[70_010, 70_011, 10, 11]]
    assert memory._checksum(swapped) != before
    flipped = x.clone()
    flipped[[11, 13, 70_001, 70_003]] *= -1.0
    assert memory._checksum(flipped) != before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize(("shape", "transposed"), [((300, 7, 9), False), ((300, 8, 5), True), ((257, 3, 1), False)])
def test_many_small_matrices_are_filled_as_few_are(
    monkeypatch: pytest.MonkeyPatch, dtype: str, shape: tuple[int, int, int], transposed: bool
) -> None:
    k = shape[1] if transposed else shape[2]
    lines = Lines(np.arange(5 * k, dtype=np.float32).reshape(5, k) % 100, shape, transposed)
    found = [torch.zeros(shape).to(getattr(torch, dtype)) for _ in range(2)]
    for few, view in zip((1 << 20, 256), found, strict=True):
        monkeypatch.setattr("pytest_gemm.operands.random_streams._FEW", few)
        lines.write(view)
    assert torch.equal(*(x.float() for x in found))
