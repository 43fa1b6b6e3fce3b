"""scaled_mm: fp8 with scales, from the line to the verdict, on a model of a tensor core where there is none."""

from __future__ import annotations

import dataclasses
import math

import oracle
import pytest
import torch
from oracle import computed, interval, make

from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.backends.cutedsl import CuteDslPrepared
from pytest_gemm.backends.inductor.torch_compat import torch_release
from pytest_gemm.judging import verdict as verdict_module
from pytest_gemm.numerics import reference, tensor_core
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.numerics.interval import Interval, insensitive
from pytest_gemm.operands import tensors as factory
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.problem.problem import Problem

FP8 = ("f8e4m3fn", "f8e5m2")
ROWS_ON_CPU = torch_release() >= (2, 13)


def line(shape: str, scaled: str, *, a: str = "f8e4m3fn", b: str = "f8e4m3fn", out: str = "bf16") -> str:
    """``scaled``: the scales, the steps and further fields, as in ``rowwise+bias:m.dynamic``."""
    steps, _, rest = scaled.partition(":")
    scale, _, epilogue = steps.partition("+")
    return ":".join(filter(None, (f"scaled_mm:{a}-{b}-{out}:nt:{shape}", epilogue, f"quant.{scale}", rest)))


# -- a tensor core in few bits -----------------------------------------------------------------------


def tensor_core_sum(a: torch.Tensor, b: torch.Tensor, *, bits: int = 13, promote: int = 0) -> torch.Tensor:
    """A @ B as Hopper adds fp8: 32 products and the sum so far cut at 2^-bits of the largest, the result kept to bits.

    Promoted every ``promote`` products: then the sum goes to one in f32.
    """
    k = a.shape[1]
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32)
    held = total.double()
    exponents = torch.frexp(a)[1][:, :, None] + torch.frexp(b)[1][None]
    for first in range(0, k, 32):
        products = a[:, first : first + 32, None] * b[None, first : first + 32]
        terms = torch.cat([products, held[:, None]], 1)
        # The exponent of a product is that of its unnormalised significand, the sum of its factors'.
        of_terms = torch.cat([exponents[:, first : first + 32] - 2, torch.frexp(held)[1][:, None] - 1], 1)
        largest = torch.where(terms == 0, -1000, of_terms).amax(1, keepdim=True)
        unit = torch.exp2(largest.clamp(min=-500).double() - bits)
        held = (torch.trunc(terms / unit) * unit).sum(1)
        unit = torch.exp2((torch.frexp(held)[1] - 1).double() - bits)
        held = torch.trunc(held / unit) * unit
        if promote and (first + 32) % promote == 0:
            total, held = (total.double() + held).float(), torch.zeros_like(held)
    return (total.double() + held).float()


def on_model(operands: factory.Operands, **how: int) -> torch.Tensor:
    """The whole program with :func:`tensor_core_sum` for a product, where all operands are finite."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return tensor_core_sum(a.double(), b.double(), **how)

    return computed(operands, product)


def judged(
    operands: factory.Operands, actual: torch.Tensor, contract: Contract
) -> tuple[verdict_module.Comparison, Interval]:
    found = interval(operands, contract)
    return verdict_module.compare(actual, found, operands.problem, operands), found


# -- operands ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "scales", "shape"),
    [(a, b, scales, "7x16x512") for a in FP8 for b in FP8 for scales in ("tensorwise", "rowwise")]
    + [("f8e4m3fn", "f8e4m3fn", "rowwise", shape) for shape in ("33x48x64", "3x16x16384")],
)
def test_an_exact_distribution_is_exact_on_a_tensor_core_of_few_bits(a: str, b: str, scales: str, shape: str) -> None:
    text = line(shape, f"{scales}+bias", a=a, b=b, out="f32")
    problem = Problem.parse(text)
    for distribution in ("int-1", "int-2", "one-hot", "k-cover", "tile-map"):
        o = make(text, distribution)
        assert [scale.dim() for scale in oracle.scales(o)] == [2 if scales == "rowwise" else 0] * 2
        contract = dataclasses.replace(tensor_core.contract(problem), promote_every=0)
        verdict, found = judged(o, on_model(o), contract)
        assert found.tier == "exact", distribution
        assert torch.equal(found.lo, found.hi)
        assert interval(dataclasses.replace(o, scale_a=0.75 * oracle.scales(o)[0]), contract).tier != "exact"
        assert verdict.ok, distribution
        assert insensitive(problem, found) is None, distribution


def test_scales_tell_rows_from_columns_and_a_factor_from_its_reciprocal() -> None:
    for distribution in ("int-2", "rand"):
        a, b = (scale.flatten() for scale in oracle.scales(make(line("64x64x64", "rowwise"), distribution)))
        for vector in (a, b):
            assert (vector[1:] != vector[:-1]).double().mean() > 0.5
            assert (vector != 1).double().mean() > 0.5
        assert not torch.equal(a, b)
        assert all(float(scale) != 1 for scale in oracle.scales(make(line("64x64x64", "tensorwise"), distribution)))


def test_what_surrounds_fp8_is_nan_and_padded_rows_stay_aligned() -> None:
    o = make("scaled_mm:f8e4m3fn-f8e5m2-bf16:nt:17x32x48:quant.rowwise:a.padded:b.padded", "rand")
    for guarded in o.buffers:
        around = guarded.storage.clone()
        around.as_strided(guarded.view.size(), guarded.view.stride(), guarded.view.storage_offset()).fill_(float("nan"))
        assert around.float().isnan().all(), guarded.name
    assert o.a.stride() == (64, 1)
    assert o.b.stride() == (1, 64)
    assert o.guards_intact()


def test_an_infinity_is_planted_where_the_dtype_has_one() -> None:
    o = make(line("64x64x64", "rowwise", a="f8e4m3fn", b="f8e5m2"), "specials")
    assert o.a.float().isnan().any()
    assert not o.a.float().isinf().any()
    assert o.b.float().isinf().any()
    assert not o.finite


def test_subnormals_of_fp8_are_a_distribution_of_their_own() -> None:
    for name, smallest in (("f8e4m3fn", 2.0**-6), ("f8e5m2", 2.0**-14)):
        o = make(line("16x32x64", "tensorwise", a=name), "rand-small")
        assert (o.a.float().abs() <= smallest).all()
        assert (o.a.float() != 0).all()
        assert o.scale is not None
        assert 2.0**-6 < float((reference.reference(o.problem, o).c * o.scale).abs().mean()) < 2.0**6


def test_with_dyn_m_what_is_constant_does_not_depend_on_m() -> None:
    for scales in ("tensorwise", "rowwise"):
        few, many = (make(f"{line(f'{m}x32x64', f'{scales}+bias')}:m.dynamic", "rand") for m in (3, 40))
        assert torch.equal(oracle.scales(few)[1], oracle.scales(many)[1])
        assert torch.equal(few.b.float(), many.b.float())


def test_a_long_sum_that_must_be_promoted_meets_positive_data_early() -> None:
    long, short = Problem.parse(line("16x16x2048", "rowwise")), Problem.parse(line("16x16x1024", "rowwise"))
    assert distributions_for(long)[:3] == ("int-2", "rand", "rand-positive")
    assert "rand-positive" not in distributions_for(short)[:4]
    fast = Problem.parse(line("16x16x8192", "rowwise:math.fast_accumulate"))
    assert "rand-positive" not in distributions_for(fast)


# -- the bound ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "fast", "promoted"), [
    (32, 33 * 2.0**-13, 33 * 2.0**-13 + 2.0**-24), (128, 4 * 33 * 2.0**-13, 4 * 33 * 2.0**-13 + 2.0**-24),
    (8192, 256 * 33 * 2.0**-13, 4 * 33 * 2.0**-13 + 64 * 2.0**-24),
])  # fmt: skip
def test_the_hard_bound_of_fp8(k: int, fast: float, promoted: float) -> None:
    for epilogue, expected in (("rowwise:math.fast_accumulate", fast), ("rowwise", promoted)):
        contract = tensor_core.contract(Problem.parse(line(f"16x16x{k}", epilogue)))
        assert contract.theta(k) == pytest.approx(expected, rel=1e-12)


def test_a_half_type_is_not_promoted() -> None:
    contract = Contract(alignment_bits=25, chunk=16)
    assert contract.theta(1000) == math.ceil(1000 / 16) * (16 * 2.0**-25 + 2.0**-23)


@pytest.mark.parametrize("shape", ["16x32x64", "16x32x512", "8x8x4096"])
@pytest.mark.parametrize("promote", [0, 128])
@pytest.mark.parametrize("epilogue", ["rowwise", "tensorwise+bias"])
def test_a_tensor_core_of_few_bits_keeps_its_contract(shape: str, promote: int, epilogue: str) -> None:
    text = line(shape, epilogue + (":math.fast_accumulate" if not promote else ""), out="f32")
    problem = Problem.parse(text)
    for distribution in set(distributions_for(problem)) - {"specials"}:
        o = make(text, distribution)
        verdict, found = judged(o, on_model(o, promote=promote), tensor_core.contract(problem))
        assert verdict.ok, (distribution, verdict.mismatch)
        assert insensitive(problem, found) is None, distribution


@pytest.mark.parametrize("out", ["f32", "bf16"])
def test_a_sum_that_must_be_promoted_and_is_not_is_caught(out: str) -> None:
    text = line("8x16x4096", "tensorwise", out=out)
    o = make(text, "rand-positive")
    contract = tensor_core.contract(Problem.parse(text))
    assert judged(o, on_model(o, promote=128), contract)[0].ok
    assert not judged(o, on_model(o), contract)[0].ok


@pytest.mark.parametrize(("bits", "tier"), [(21, "hard"), (22, "exact")])
def test_an_alignment_that_cuts_the_terms_leaves_nothing_exact(bits: int, tier: str) -> None:
    o = make("mm:f16:nn:16x16x512", "int-2")
    assert interval(o, Contract(alignment_bits=bits, chunk=32)).tier == tier


# Of a sum of one the roundings of the scales are all that there is.
@pytest.mark.parametrize(("k", "epilogue"), [(1, "rowwise"), (512, "rowwise+bias")])
def test_scales_may_be_applied_before_or_after_the_sum_in_any_order(k: int, epilogue: str) -> None:
    o = make(line(f"64x64x{k}", epilogue, out="f32"), "rand")
    bias = torch.zeros(1) if o.bias is None else o.bias
    a, b, (sa, sb) = o.a.float(), o.b.float(), oracle.scales(o)
    c = a @ b
    for actual in (c * sa * sb, c * sb * sa, c * (sa * sb), (a * sa) @ (b * sb)):
        assert judged(o, actual + bias, Contract())[0].ok
    assert not judged(o, c * sa.bfloat16().float() * sb + bias, Contract())[0].ok


def test_a_product_that_is_rounded_before_it_is_scaled_is_wrong() -> None:
    o = make(line("33x48x512", "rowwise"), "rand")
    c, (sa, sb) = o.a.float() @ o.b.float(), oracle.scales(o)
    once, twice = c * sa * sb, c.bfloat16().float() * sa * sb
    for epilogue in ("eager", "either", "fused"):
        contract = Contract(epilogue=epilogue)
        assert judged(o, once.bfloat16(), contract)[0].ok
        assert not judged(o, twice.bfloat16(), contract)[0].ok


def test_what_leaves_the_range_of_f16_is_infinite() -> None:
    o = make(line("16x32x64", "tensorwise", out="f16"), "rand")
    oracle.scales(o)[0].fill_(2.0**15)
    right = computed(o, lambda a, b: a.float() @ b.float())
    assert right.isinf().any()
    assert judged(o, right, Contract())[0].ok
    saturated = right.nan_to_num(posinf=65504.0, neginf=-65504.0)
    assert not judged(o, saturated, Contract())[0].ok


@pytest.mark.parametrize("flag", ["", ":math.fast_accumulate"])
def test_the_program_asks_for_fast_accumulation_where_the_problem_allows_it(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    o = make(line("16x32x64", "tensorwise+bias" + flag), "rand")
    seen: dict[str, object] = {}

    def scaled(a: torch.Tensor, b: torch.Tensor, **given: object) -> torch.Tensor:
        seen.update(given)
        return torch.zeros(a.shape[0], b.shape[1])

    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    computed(o, None)
    assert (seen["use_fast_accum"], seen["out_dtype"]) == (flag != "", torch.bfloat16)
    assert all(seen[name] is getattr(o, name) for name in ("bias", "scale_a", "scale_b"))


# -- the backends ------------------------------------------------------------------------------------


def test_an_operator_of_fp8_is_asked_for_f32_and_its_result_scaled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is faked: its operators need a GPU."""
    asked: list[torch.dtype] = []

    def matmul(_self: CuteDslPrepared, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        asked.extend((a.dtype, b.dtype))
        return a.float() @ b.float()

    monkeypatch.setattr(CuteDslPrepared, "_matmul", matmul)
    o = make(line("16x32x64", "rowwise+bias:math.fast_accumulate"), "rand")
    prepared = CuteDslPrepared(o.problem)
    verdict, _ = judged(o, prepared.run(o), prepared.contract)
    assert verdict.ok
    assert asked == [torch.float8_e4m3fn] * 2


# -- scales of blocks --------------------------------------------------------------------------------

BLOCKS = ("blocks", "blocks-1_1", "blocks-128_1")


def on_block_model(operands: factory.Operands) -> torch.Tensor:
    """As cuBLASLt on Hopper: each 128 products in few bits, their sum scaled and added to one in f32."""
    given, shape, (scale_a, scale_b) = operands, operands.problem.shape, oracle.scales(operands)
    total = torch.zeros(shape.m, shape.n)
    for block in range(-(-shape.k // 128)):
        k = slice(128 * block, 128 * block + 128)
        held = tensor_core_sum(given.a[:, k].double(), given.b[k].double())
        rows = torch.arange(shape.m) // (128 if scale_a.shape[0] < shape.m else 1)
        columns = torch.arange(shape.n) // (128 if scale_b.shape[1] < shape.n else 1)
        total += held * scale_a[rows, block][:, None] * scale_b[block, columns]
    return total.to(torch.bfloat16)


@pytest.mark.parametrize(("edge", "size"), [("", 128), ("+edge-64", 64)])
@pytest.mark.parametrize("scales", BLOCKS)
def test_scales_of_blocks_are_those_of_their_elements(scales: str, edge: str, size: int) -> None:
    o = make(f"scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:130x144x300:quant.{scales}{edge}", "rand")
    scale_a, scale_b = oracle.scales(o)
    i, k, j = (torch.arange(length) for length in (130, 300, 144))
    wide_a = o.a.double() * scale_a[i if scale_a.shape[0] == 130 else i // size][:, k // size]
    wide_b = o.b.double() * scale_b[k // size][:, j if scale_b.shape[1] == 144 else j // size]
    assert torch.equal(reference.reference(o.problem, o).c, wide_a @ wide_b)


@pytest.mark.parametrize("scales", BLOCKS)
@pytest.mark.parametrize("shape", ["16x32x520", "130x20x200"])
def test_a_tensor_core_with_scales_of_blocks_keeps_its_contract(scales: str, shape: str) -> None:
    problem = Problem.parse(line(shape, scales))
    contract = dataclasses.replace(tensor_core.contract(problem, library=True), epilogue="eager")
    for distribution in ("int-2", "rand", "rand-positive", "k-cover", "rand-wide"):
        o = make(str(problem), distribution)
        compared, found = judged(o, on_block_model(o), contract)
        assert compared.mismatch is None, (distribution, compared.mismatch)
        assert found.tier == "exact" or not distribution.startswith("int"), distribution


def test_scales_of_blocks_lie_as_cublas_wants_them() -> None:
    strides = {"blocks": ((1, 130), (1, 3)), "blocks-1_1": ((1, 130), (144, 1)), "blocks-128_1": ((3, 1), (144, 1))}
    for scales, expected in strides.items():
        found = oracle.scales(make(line("130x144x300", scales), "rand"))
        assert tuple(scale.stride() for scale in found) == expected


# -- a result in fp8 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("result", ["", "+result-4", "+result-0.125"])
def test_an_fp8_result_is_scaled_and_rounded_once(result: str) -> None:
    problem = Problem.parse(f"scaled_mm:f8e4m3fn:nt:17x48x512:quant.tensorwise{result}")
    contract = Contract("f32", "eager")
    for distribution in distributions_for(problem):
        o = make(str(problem), distribution)
        factor = problem.result_factor("cpu")
        sums = (o.a.double() @ o.b.double()) * (math.prod(s.double() for s in oracle.scales(o)) * factor)
        assert judged(o, sums.to(torch.float8_e4m3fn), contract)[0].ok, distribution
        twice = (sums * factor if factor != 1.0 else sums * 2.0).to(torch.float8_e4m3fn)
        assert not judged(o, twice, contract)[0].ok, distribution


# -- torch.nn.functional.scaled_mm ---------------------------------------------------------------------


@pytest.mark.parametrize("scales", ["tensorwise", "rowwise", "tensorwise+bias", "rowwise+bias+relu"])
@pytest.mark.skipif(not ROWS_ON_CPU, reason="before torch 2.13 a CPU takes tensorwise scales only")
def test_the_function_with_recipes_gives_what_the_other_one_gives(scales: str) -> None:
    for shape in ("17x48x128", "1x16x64"):
        first, second = (Problem.parse(line(shape, scales + v2)) for v2 in ("", ":program.v2"))
        o = make(first.line, "rand")
        renamed = dataclasses.replace(o, problem=second)
        prepared = AtenBackend().prepare(second, renamed)
        try:
            results = [prepared.run(renamed), AtenBackend().prepare(first, o).run(o)]
        except RuntimeError as error:
            pytest.skip(f"PyTorch has no product of fp8 for this CPU: {error}")
        assert torch.equal(*results)
        assert "_scaled_mm_v2" in " ".join(prepared.proof().executed)
