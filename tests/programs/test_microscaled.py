"""MXFP8, MXFP4 and NVFP4: packing, the order of scales and the oracle, against a model of their own bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import oracle
import pytest
import torch
from oracle import computed, make

from pytest_gemm.numerics import reference, tensor_core
from pytest_gemm.operands import tensors as factory
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.operands.memory import packed
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.problem import Problem
from pytest_gemm.speed.roofline import work

Array = npt.NDArray[np.float64]

MXFP8 = "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:{}:quant.mx"
MXFP4 = "scaled_mm:f4e2m1fn-f4e2m1fn-bf16:nt:{}:quant.mx:program.v2"
NVFP4 = "scaled_mm:f4e2m1fn-f4e2m1fn-f32:nt:{}:quant.nv"
NVFP4_2 = "scaled_mm:f4e2m1fn-f4e2m1fn-bf16:nt:{}:quant.nv-2:program.v2"
COUNTED = "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:{}:quant.mx:program.v2+unswizzled"
FORMATS = (MXFP8, MXFP4, NVFP4, NVFP4_2, COUNTED)
every_format = pytest.mark.parametrize("text", FORMATS, ids=["mxfp8", "mxfp4", "nvfp4", "nvfp4-2", "unswizzled"])

# As a kernel decodes them: e2m1 from sign, exponent and fraction; e4m3 and e8m0 likewise.
Byte = Callable[[int], float]


def e2m1(code: int) -> float:
    exponent, fraction = code >> 1 & 3, code & 1
    size = fraction / 2 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1)
    return -size if code & 8 else size


def e4m3(code: int) -> float:
    exponent, fraction = code >> 3 & 15, code & 7
    if code & 127 == 127:
        return float("nan")
    size = fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return -size if code & 128 else size


def e8m0(code: int) -> float:
    return float("nan") if code == 255 else 2.0 ** (code - 127)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A product out of the bytes of the operands, element by element; each attribute is a mistake that it may make."""

    swaps_nibbles: bool = False
    ignores_swizzle: bool = False
    next_block: bool = False
    swaps_scales: bool = False
    bias_of_scale: int = 0
    forgets_whole: bool = False

    def __call__(self, o: Operands) -> torch.Tensor:
        p = o.problem
        scales = oracle.scales(o)[:: -1 if self.swaps_scales else 1]
        # Swapped on both sides, the halves of a byte would still meet their own.
        a = self._lines(p, o.a, scales[0], is_swapped=self.swaps_nibbles)
        b = self._lines(p, o.b.mT, scales[1])
        c = a @ b.T
        if o.whole_a is not None and o.whole_b is not None and not self.forgets_whole:
            c = c * (float(o.whole_a) * float(o.whole_b))
        return torch.from_numpy(c).to(getattr(torch, p.dtypes.out.torch_name))

    def _lines(self, p: Problem, x: torch.Tensor, scale: torch.Tensor, *, is_swapped: bool = False) -> Array:
        raw = x.contiguous().view(torch.uint8).numpy()
        block = 32 if p.step("mx") else 16
        if p.dtypes.a.bits == 4:
            halves = (raw >> 4, raw & 15) if is_swapped else (raw & 15, raw >> 4)
            values = np.stack(halves, -1).reshape(raw.shape[0], -1)
        else:
            values = raw
        table = np.array([(e2m1 if p.dtypes.a.bits == 4 else e4m3)(code) for code in range(256)])
        of_scale = np.array([(e8m0 if p.step("mx") else e4m3)(code) for code in range(256)])
        flat, is_flat = scale.view(torch.uint8).flatten().numpy(), scale.dim() == 1
        blocks = values.shape[1] // block
        line, column = np.meshgrid(np.arange(len(values)), np.arange(blocks), indexing="ij")
        if self.next_block:
            column = (column + 1) % blocks
        if self.ignores_swizzle == is_flat:
            place = line * (-(-blocks // 4) * 4 if is_flat else blocks) + column
        else:
            tile = (line // 128) * -(-blocks // 4) + column // 4
            place = (tile * 512 + line % 32 * 16 + line % 128 // 32 * 4 + column % 4) % len(flat)
        found: Array = table[values] * of_scale[(flat[place].astype(int) + self.bias_of_scale) % 256].repeat(block, 1)
        return found


def is_right(o: Operands, actual: torch.Tensor) -> bool:
    contract = dataclasses.replace(tensor_core.contract(o.problem, library=True), epilogue="eager")
    return oracle.is_right(o, actual, contract)


@every_format
@pytest.mark.parametrize("shape", ["16x16x32", "130x272x160", "1x48x512"])
def test_each_distribution_finds_a_right_kernel_right(text: str, shape: str) -> None:
    problem = Problem.parse(text.format(shape))
    assert len(distributions_for(problem)) >= 8
    for distribution in distributions_for(problem):
        o = factory.make(problem, distribution, 1)
        with np.errstate(invalid="ignore"):
            actual = Kernel()(o)
        assert is_right(o, actual), distribution
        assert is_right(o, computed(o, lambda a, b: a.double() @ b.double())), distribution


MISTAKES = {
    "nibbles": Kernel(swaps_nibbles=True),
    "swizzle": Kernel(ignores_swizzle=True),
    "block": Kernel(next_block=True),
    "sides": Kernel(swaps_scales=True),
    "exponent": Kernel(bias_of_scale=1),
    "whole": Kernel(forgets_whole=True),
}


@pytest.mark.usefixtures("unexplained")
@every_format
@pytest.mark.parametrize(("mistake", "distribution"), [*zip(MISTAKES, ["rand", "int-2"] * 3, strict=True)])
def test_each_mistake_is_found(text: str, mistake: str, distribution: str) -> None:
    o = make(text.format("144x144x256"), distribution)
    if (mistake == "nibbles" and o.problem.dtypes.a.bits == 8) or (mistake == "whole" and o.whole_a is None):
        assert is_right(o, MISTAKES[mistake](o))  # there are none
        return
    assert not is_right(o, MISTAKES[mistake](o))


def test_every_code_is_packed_as_it_is() -> None:
    codes = np.arange(16)
    values = np.array([[e2m1(int(code)) for code in codes]])
    assert packed(values).tolist() == [[int(low | high << 4) for low, high in codes.reshape(-1, 2)]]


def test_what_lies_between_two_codes_goes_to_the_nearest_and_then_to_the_even_one() -> None:
    values = np.array([0.2, 0.3, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 100.0, -0.25, -0.75])
    stored = packed(values[None])[0]
    found = [e2m1(int(code)) for byte in stored for code in (byte & 15, byte >> 4)]
    assert found == [0.0, 0.5, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.0, -1.0]


@every_format
def test_scales_are_those_of_the_format(text: str) -> None:
    o = make(text.format("130x48x192"))
    scale_a, _ = oracle.scales(o)
    is_mx = o.problem.step("mx") is not None
    assert scale_a.dtype == (torch.float8_e8m0fnu if is_mx else torch.float8_e4m3fn)
    assert scale_a.shape == ((130, 6) if o.problem.has("program.unswizzled") else (256 * (8 if is_mx else 12),))
    assert len(scale_a.view(torch.uint8).unique()) > 3
    assert (o.whole_a is not None) == ("nv-2" in text)
    assert o.guards_intact()
    assert o.clone().digest() == o.digest()


@every_format
def test_scales_keep_their_exact_values(text: str) -> None:
    """Sums of an exact distribution are exact, so no scale was rounded."""
    for distribution in ("int-1", "int-2", "one-hot"):
        o = make(text.format("33x48x1024"), distribution)
        made = reference.as_multiplied(o.problem, o)[0] / o.quantum
        assert o.quantum > 0
        assert torch.equal(made, made.round())


def test_bytes_are_counted_as_they_are_stored() -> None:
    assert work(Problem.parse(NVFP4.format("128x64x256"))).bytes == (128 + 64) * (256 / 2 + 16) + 128 * 64 * 4
    assert work(Problem.parse(MXFP8.format("128x64x256"))).bytes == (128 + 64) * (256 + 8) + 128 * 64 * 2
