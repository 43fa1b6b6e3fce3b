"""What the distributions of ``--gemm-level=quick`` find among wrong kernels, and that they accuse no right one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from mutants import (
    CONTROLS,
    Control,
    Mutant,
    Plant,
    Planted,
    afterwards,
    blocks,
    empty_sum,
    exact,
    fixed_point,
    flushed_below,
    in_parts,
    inputs,
    product,
    store,
    through,
    working,
)
from studies import mutant_study

from pytest_gemm.core.case_id import Device
from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.operands import tensors as factory
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.plugin.selection import DISTRIBUTIONS
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.problem import Problem

Tensor = torch.Tensor


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def judge() -> Judge:
    return mutant_study.judge()


def quick(judge: Judge, entry: Mutant | Control, line: str) -> list[Outcome]:
    """All outcomes at the quick level."""
    problem = Problem.parse(line)
    distributions = distributions_for(problem)[: DISTRIBUTIONS["quick"]]
    planted = Planted("it", dataclasses.replace(entry, lines={"it": line}))
    return judge.outcomes(Case(planted, problem, distributions, 0, Device.CPU))


# -- wrong kernels ------------------------------------------------------------------------------------


def clipped_above(limit: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.where(x.isfinite(), x.clamp(-limit, limit), x)


def raised(a: Tensor, b: Tensor) -> Tensor:
    """A is scaled to have room below, and the result back: what is already large overflows."""
    return store(exact(a.float() * 2.0**90, b) * 2.0**-90, a)


def in_scaled_f16(a: Tensor, b: Tensor) -> Tensor:
    """Both operands in f16, each scaled by its largest element: what is much smaller is lost."""
    scales = [2.0 ** -round(math.log2(float(x.double().nan_to_num(0, 0, 0).abs().amax()))) for x in (a, b)]
    x, y = (t.float().mul(s).half().float() for t, s in zip((a, b), scales, strict=True))
    return store(torch.matmul(x, y) / math.prod(scales), a)


def no_subnormals(x: Tensor) -> Tensor:
    return flushed_below(torch.finfo(x.dtype).smallest_normal)(x)


def zeros(sign: float) -> Plant:
    """Zeros of one sign."""
    return afterwards(lambda c: torch.where(c == 0, sign * torch.zeros_like(c), c))


def rounded_beyond(change: Callable[[Tensor, float], Tensor]) -> Plant:
    """Finite sums go through ``change(sum, largest)`` before they are rounded to the type of the result."""

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        c = torch.matmul(a.double(), b.double())
        return store(torch.where(c.isfinite(), change(c, torch.finfo(a.dtype).max), c).float(), a)

    return product(matmul)


def read_into_the_next(a: Tensor, b: Tensor) -> Tensor:
    """K is rounded up to 4: the last elements are those of the next line, and the other side has zeros there."""
    if a.shape[-2] == 1:  # B's lines
        return read_into_the_next(b.mT, a.mT).mT
    more = -a.shape[-1] % 4
    behind = F.pad(a[..., 1:, :more], (0, 0, 0, 1))  # the last line is read with care
    return store(exact(torch.cat([a, behind], -1), F.pad(b, (0, 0, 0, more))), a)


def last_infinity_times_zero(a: Tensor, b: Tensor) -> Tensor:
    """An odd K is filled up by zeros on one side alone."""
    rows, columns = a[..., -1:].isinf(), b[..., -1:, :].isinf()
    return store(torch.where(rows if a.shape[-2] > 1 else columns, torch.nan, exact(a, b)), a)


def fp8_clipped(limit: float) -> Plant:
    return inputs(lambda x: clipped_above(limit)(x.float()))


_BF16 = through(torch.bfloat16)
_FP8 = (
    "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:17x48x512:quant.rowwise",
    "scaled_mm:f8e4m3fn-f8e4m3fn-f32:nt:1x64x64:quant.tensorwise",
)
_EDGES = ("mm:f16:nn:20x40x64", "linear:f16:nt:1x64x1000:bias+relu", "mm:bf16:nt:33x65x127", "bmm:bf16:nn:3x9x16x40")
_TAILS = ("mm:bf16:nn:17x65x127", "mm:f32:nt:33x1x1001", "linear:f16:nt:1x64x65:bias", "bmm:f32:nt:2x3x24x7")
_LONG = ("mm:f32:nn:20x40x512", "mm:f32:nn:20x40x8200", "linear:f32:nt:1x64x4096:bias", "bmm:f32:tn:2x9x17x1000")
_WIDE = (
    "mm:f32:nn:20x40x256",
    "mm:bf16:nt:20x40x1000",
    "linear:bf16:nt:16x32x64:bias+gelu",
    "mm:f32:nn:9x7x64:math.tf32",
)

WRONG: dict[str, tuple[Plant, tuple[str, ...]]] = {
    "f32 as three products of bf16": (in_parts(_BF16, ((0, 0), (0, 1), (1, 0))), _LONG),
    "f32 as two bf16": (in_parts(_BF16, ((0, 0), (0, 1), (1, 0), (1, 1))), _LONG),
    "fixed point of 16 bits": (fixed_point(16), ("mm:f32:nn:20x40x8200",)),
    "inputs are clipped at 2^36": (inputs(clipped_above(2.0**36)), _WIDE),
    "inputs below 2^-36 are dropped": (inputs(flushed_below(2.0**-36)), _WIDE),
    "f64 inputs are clipped at 2^128": (inputs(clipped_above(2.0**128)), ("mm:f64:nn:20x40x256",)),
    "f64 inputs below 2^-126 are dropped": (inputs(flushed_below(2.0**-126)), ("mm:f64:nn:20x40x256",)),
    "A is scaled by 2^90": (product(raised), _WIDE[:2]),
    "bf16 by f16 with scales": (product(in_scaled_f16), ("mm:bf16:nn:20x40x512",)),
    "subnormal inputs count as 0": (
        inputs(no_subnormals),
        ("mm:f32:nn:20x40x512", "mm:f16:nn:20x40x512", "addmm:f32:nt:8x8x2000:bias+beta-0.5", "mm:f16:nn:1x40x64"),
    ),
    "subnormal f16 results are dropped": (
        afterwards(flushed_below(2.0**-14)),
        ("mm:f16:nn:20x40x64", "mm:f16:nn:24x40x8200"),
    ),
    "subnormal f32 results are dropped": (
        afterwards(no_subnormals),
        ("mm:f32:nn:20x40x512", "mm:f32:nt:1x64x1000", "mm:f32:nn:64x1x100", "bmm:f32:tn:2x9x17x8"),
    ),
    "what overflows becomes the largest number": (
        rounded_beyond(lambda c, most: c.clamp(-most, most)),
        (*_EDGES, "mm:f32:nn:20x40x64"),
    ),
    "all beyond the largest number is infinite": (
        rounded_beyond(lambda c, most: torch.where(c.abs() > most, c * torch.inf, c)),
        _EDGES,
    ),
    "e4m3 ends at 240": (fp8_clipped(240.0), _FP8),
    "e4m3 ends at 256": (fp8_clipped(256.0), _FP8),
    "448 is NaN": (inputs(lambda x: torch.where(x.float().abs() == 448.0, torch.nan, x.float())), _FP8),
    "e5m2 ends at 49152": (fp8_clipped(49152.0), (_FP8[0].replace("-f8e4m3fn-", "-f8e5m2-"),)),
    "a line is read into the next": (product(read_into_the_next), _TAILS),
    "an infinity at the end of a line meets what fills it up": (product(last_infinity_times_zero), _TAILS),
    "a zero has no sign": (
        zeros(1.0),
        ("mm:f16:nn:20x40x64", "mm:f32:nn:20x40x512:mul", "mm:bf16:nn:20x40x512:scale--2"),
    ),
    "a sum that is zero is -0": (
        zeros(-1.0),
        ("mm:f32:nn:20x40x512", "mm:bf16:nn:20x40x64", "mm:f64:nn:20x40x64", "mm:f16:nn:4x4x0", "mm:f32:nn:9x9x9:relu"),
    ),
}


@pytest.mark.usefixtures("unexplained")
@pytest.mark.parametrize(
    ("name", "line"), [(name, line) for name, (_, lines) in WRONG.items() for line in lines], ids=lambda x: x
)
def test_quick_finds(judge: Judge, name: str, line: str) -> None:
    found = [o for o in quick(judge, Mutant("", WRONG[name][0]), line) if o.status is not Status.PASSED]
    assert found
    assert {o.status for o in found} == {Status.INCORRECT}
    if "zero" in name:
        assert {o.reason.code for o in found if o.reason is not None} == {"zero-sign"}


# -- right kernels ------------------------------------------------------------------------------------


def from_the_first_product(a: Tensor, b: Tensor) -> Tensor:
    """No sum begins at +0: products of -0 alone add up to -0."""
    a, b = a.to(working(a)), b.to(working(b))
    if not a.shape[-1]:
        return store(empty_sum(a, b), a)
    total = a[..., :1] * b[..., :1, :]
    for x, y in blocks(a[..., 1:], b[..., 1:, :], 1):
        total = total + x * y
    return total


def fused(a: Tensor, b: Tensor) -> Tensor:
    """One fused multiply-add after the other: a product that underflows gives its sign to a sum that is zero."""
    total = empty_sum(a, b)
    for x, y in blocks(a.to(working(a)), b.to(working(b)), 1):
        whole = x.double() * y.double()
        wide = total.double() + whole
        total = torch.where((wide == 0) & (total == 0), total + whole.to(total.dtype), wide.to(total.dtype))
    return total


ORDERS: dict[str, Control] = {
    "from the first product": Control("", product(lambda a, b: store(from_the_first_product(a, b), a))),
    "fused": Control("", product(lambda a, b: store(fused(a, b), a))),
    **CONTROLS,
}


# Epilogues that turn signs.
_TURNING = ("mm:f32:nn:20x40x7:mul+sub", "mm:f16:nt:17x33x9:scale--2+relu", "addmm:f32:nn:9x9x5:bias+alpha--1")


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDERS)
def test_quick_accuses_no_right_kernel(judge: Judge, name: str) -> None:
    own, ks = [*ORDERS[name].lines.values()], (1, 2, 64)
    if len(own) > 3:  # each in turn
        turn = [*ORDERS].index(name)
        lines = [line.format(k=ks[(i + turn) % 3]) for i, line in enumerate(own)]
    else:
        lines = [line.format(k=k) for line in own for k in ks]
    is_special = all(line.startswith(("woq", "da8w8", "qlinear")) or ":out." in line for line in lines)
    lines += () if "tensor" in name or is_special else _TURNING
    found = [(line, o) for line in lines for o in quick(judge, ORDERS[name], line)]
    assert len(found) >= 10
    assert not [(line, o.distribution, o.details) for line, o in found if o.status is not Status.PASSED]


# -- the operands themselves --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line", ["mm:f32:nn:20x40x256", "linear:bf16:nt:20x40x300:bias", "grouped_mm:f16:nt:3x20x40x64"]
)
def test_huge_meets_tiny_and_the_products_are_as_ever(line: str) -> None:
    o = factory.make(Problem.parse(line), "specials", 3)
    a, b = o.a.double(), o.b.double().movedim(-2, 0).flatten(1)  # by k
    dtype = DTYPES[line.split(":")[1]]
    a[:, len(b) // 2] = b[len(b) // 2] = 0.0  # where results overflow
    tops = a.nan_to_num(0, 0, 0).abs().amax(0), b.nan_to_num(0, 0, 0).abs().amax(1)
    far = 2.0**10 if dtype.name == "f16" else 2.0**36
    assert (tops[0] > far).any()
    assert (tops[1] > far).any()
    assert (tops[0] * tops[1] < 2.0).all()
    if dtype.name != "bf16":
        smallest = 2.0**dtype.emin
        assert ((a != 0) & (a.abs() < smallest)).sum() > 10
        assert ((b != 0) & (b.abs() < smallest)).sum() > 10


def test_what_must_not_depend_on_m_does_not() -> None:
    for line in ("mm:f32:nn:{}x24x64", "mm:f64:nn:{}x24x64", "mm:f16:nt:{}x24x64"):
        first, other = (factory.make(Problem.parse(line.format(m)), "specials", 3).b for m in (20, 33))
        assert torch.equal(first.nan_to_num(0.5), other.nan_to_num(0.5))


def test_a_long_line_of_f32_has_one_element_that_two_bf16_do_not_hold() -> None:
    o = factory.make(Problem.parse("mm:f32:nn:30x40x2000"), "int-2", 3)
    lost = o.a - _BF16(o.a) - _BF16(o.a - _BF16(o.a))
    assert int((lost != 0).any(1).sum()) > 8
    assert float((o.a.abs().double() @ o.b.abs().double()).max()) <= 2.0**24


@pytest.mark.parametrize("line", [f"mm:bf16:{alias}" for alias in ("nn:33x33x33:b.alias", "nt:9x9x33:b.alias_t")])
def test_an_infinity_of_a_matrix_never_meets_its_subnormal(line: str) -> None:
    for seed in range(8):
        given = factory.make(Problem.parse(line), "specials", seed, Device.CPU)
        infinite = [x.isinf().double() for x in (given.a, given.b)]
        subnormal = [((x != 0) & (x.abs() < 2.0**-126)).double() for x in (given.a, given.b)]
        assert not (infinite[0] @ subnormal[1] + subnormal[0] @ infinite[1]).any()
