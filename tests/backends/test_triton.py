"""Where Triton's templates round, read in their text, and the verdicts on kernels that round elsewhere."""

from __future__ import annotations

import dataclasses
import os
import re
import textwrap
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import judged

from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import Availability
from pytest_gemm.backends.inductor import triton_code
from pytest_gemm.backends.inductor.triton_code import Rounding
from pytest_gemm.backends.triton import TritonBackend
from pytest_gemm.conformance import matrix
from pytest_gemm.core.case_id import Device
from pytest_gemm.core.outcome import Status
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.problem import Problem
from pytest_gemm.run import admission

# -- the text --------------------------------------------------------------------------------------------

# What the templates of torch 2.13.0 and 2.11.0 end with; loads without their masks.
LOOP = """
acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC_TYPE)
for k_idx in range(0, tl.cdiv(K, BLOCK_K)):
    a = tl.load(A + (xindex))
    b = tl.load(B + (xindex))
    acc += tl.dot(a, b, allow_tf32=ALLOW_TF32, out_dtype=ACC_TYPE)
"""
RELU = """
tmp0 = acc.to(tl.bfloat16)
tmp1 = tmp0.to(tl.float32)
tmp2 = tl.full([1], 0, tl.int32)
tmp3 = triton_helpers.maximum(tmp2, tmp1)
tl.store(out_ptr1 + (xindex), tmp3, mask)
"""
BIAS_GELU = """
tmp0 = tl.load(in_ptr0 + (idx_n)).to(tl.float32)
tmp1 = acc + tmp0
tmp2 = tmp1.to(tl.bfloat16)
tmp3 = tmp2.to(tl.float32)
tmp4 = tmp3.to(tl.float32)
tmp5 = tl.full([1], 0.5, tl.float32)
tmp6 = tmp4 * tmp5
tmp9 = libdevice.erf(tmp4 * 0.7071067811865476)
tmp12 = tmp6 * (tmp9 + 1.0)
tmp13 = tmp12.to(tl.float32)
tl.store(out_ptr1 + (xindex), tmp13, mask)
"""
SCALED_BIAS = """
tmp0 = tl.load(in_ptr2 + (0))
tmp1 = tl.broadcast_to(tmp0, [BLOCK_M, BLOCK_N])
tmp2 = tl.load(in_ptr3 + (0))
tmp3 = tl.broadcast_to(tmp2, [BLOCK_M, BLOCK_N])
tmp4 = tl.load(in_ptr4 + (idx_n)).to(tl.float32)
tmp5 = tmp1 * tmp3
tmp6 = acc * tmp5
tmp7 = tmp6 + tmp4
tmp8 = tmp7.to(tl.bfloat16)
tmp9 = tmp8.to(tl.float32)
tmp10 = triton_helpers.maximum(0, tmp9)
tl.store(out_ptr1 + (xindex), tmp10, mask)
"""
ALPHA = """
tmp0 = tl.load(in_ptr0 + (xindex)).to(tl.float32)
tmp1 = tl.full([1], 0.5, tl.float32)
tmp2 = acc * tmp1
tmp3 = tmp2 + tmp0
tmp4 = tmp3.to(tl.float16)
tmp5 = tmp4.to(tl.float32)
tl.store(out_ptr1 + (xindex), tmp5 * tl.load(in_ptr3 + (xindex)), mask)
"""
ONCE = """
tmp0 = tl.load(in_ptr2 + (xindex)).to(tl.float32)
tmp1 = acc * tmp0
tl.store(out_ptr1 + (xindex), tmp1, mask)
"""
NARROW_STORE = "tl.store(out_ptr1 + (xindex), acc.to(tl.bfloat16), mask)\n"
AFTER_A_STEP = """
tmp0 = triton_helpers.maximum(0, acc)
tmp1 = tmp0.to(tl.bfloat16)
tmp2 = tmp1.to(tl.float32) * 0.5
tl.store(out_ptr1 + (xindex), tmp2, mask)
"""


# The template of grouped_mm from torch 2.13 on multiplies in a function of its own.
IN_A_FUNCTION = """
@triton.jit
def do_mma(a, b, accumulator):
    accumulator += tl.dot(a, b.T)
    return accumulator
@triton.jit
def triton_tem_fused_0(A, B, out_ptr1):
    accumulator = do_mma(tl.load(A), tl.load(B), tl.zeros((16, 16), dtype=tl.float32))
    c = accumulator.to(tl.float32)
    tmp0 = c.to(tl.bfloat16)
    tmp1 = tmp0.to(tl.float32)
    tl.store(out_ptr1, tmp1 + tl.load(in_ptr2), mask)
"""


def kernel(end: str) -> str:
    """The text of a kernel with this end, in a persistent loop as the templates for TMA have it."""
    body = textwrap.indent(f"for tile in range(1):{textwrap.indent(LOOP + end, '    ')}", "    ")
    return f"import triton\n@triton.jit\ndef triton_tem_fused_0(A, B, out_ptr1):\n{body}"


def test_a_product_in_a_function_is_followed() -> None:
    assert triton_code.roundings(IN_A_FUNCTION) == (Rounding("bf16", 0, True),)


@pytest.mark.parametrize("text", ["for x in\n", IN_A_FUNCTION.replace("tl.dot", "tl.another_dot")])
def test_a_text_without_a_product_that_is_stored_is_unreadable(text: str) -> None:
    with pytest.raises(triton_code.UnreadableError):
        triton_code.roundings(text)


def program(*ends: str) -> str:
    """A generated program of these kernels and a pointwise one."""
    kernels = [*(kernel(end) for end in ends), "def triton_poi(x):\n    y = x.to(tl.bfloat16)\n    z = y * 2\n"]
    return "\n".join(
        f"k{i} = async_compile.triton('k{i}', '''\n{text}\n''', device_str='cuda')" for i, text in enumerate(kernels)
    )


@pytest.mark.parametrize(
    ("line", "ends", "epilogue", "rounds_at"),
    [
        ("mm:bf16:nn:32x40x256:relu", [RELU], "fused", 0),
        ("mm:f16:nn:32x40x256:relu", [RELU.replace("bfloat16", "float16")], "fused", 0),
        ("mm:bf16:nn:32x40x256:relu", [NARROW_STORE], "fused", None),
        ("mm:bf16:nn:32x40x256:mul", [ONCE], "fused", None),
        ("mm:bf16:nn:32x40x256:mul", [ONCE.replace("acc *", "acc.to(tl.float32) *")], "fused", None),
        ("addmm:f16:nn:32x40x256:bias+alpha-0.5+mul", [ALPHA], "fused", 0),
        ("linear:bf16:nt:32x40x256:bias+gelu", [BIAS_GELU], "fused", 0),
        ("mm:bf16:nn:32x40x256:bias+gelu", [BIAS_GELU], "fused", 1),  # made one addmm by Inductor
        ("scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:32x48x256:bias+relu:quant.tensorwise", [SCALED_BIAS], "fused", 0),
        ("mm:bf16:nn:32x40x256:mul+gelu", [BIAS_GELU], "either", None),  # a factor is no addend
        ("linear:bf16:nt:32x40x256:bias+gelu", [RELU], "either", None),  # the bias comes behind the rounding
        ("mm:f16:nn:32x40x256:relu", [RELU], "either", None),  # to another type than the product's
        ("mm:bf16:nn:32x40x256:relu+mul", [AFTER_A_STEP], "either", None),
        ("mm:bf16:nn:32x40x256:relu", [RELU, BIAS_GELU], "either", None),
        ("mm:bf16:nn:32x40x256:relu", ["this is no Python with tl.dot\n"], "either", None),
    ],
)
def test_the_contract_follows_the_text(line: str, ends: list[str], epilogue: str, rounds_at: int | None) -> None:
    found = triton_code.placed(Contract(), Problem.parse(line), program(*ends))
    assert (found.epilogue, found.rounds_at) == (epilogue, rounds_at)


def test_a_text_that_is_not_there_is_judged_either_way() -> None:
    """AOTInductor's programs call Triton's kernels as machine code."""
    called = "kernels.triton_tem_fused_mm_relu_0(stream, arg0_1, arg1_1, buf0);\n"
    found = triton_code.placed(Contract(), Problem.parse("mm:bf16:nn:32x40x256:relu"), called)
    assert found.epilogue == "either"
    cpp = triton_code.placed(Contract(), Problem.parse("mm:bf16:nn:32x40x256:relu"), "cpp_fused_mm_0(X, W, Y);\n")
    assert cpp == Contract()


# -- the verdict -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Kernel:
    """A fused kernel in f32 that rounds its sum before the first step, or does not; prepared for one problem."""

    problem: Problem
    rounds: bool
    contract: Contract

    def run(self, operands: Operands) -> Any:
        """The product, its bias, and the steps of the problem's line."""
        dtype, made = operands.a.dtype, operands.a.float() @ operands.b.float()
        if operands.bias is not None:
            made += operands.bias.float()
        made = made.to(dtype).float() if self.rounds else made
        residuals = iter(operands.residuals)
        for step in self.problem.passes:
            made = made * next(residuals).float() if step.name == "mul" else getattr(F, step.name)(made)
        return made.to(dtype)

    def proof(self) -> Proof:
        """A function of Python ran because it was called."""
        return Proof(executed=("kernel",), provable=False)


@dataclasses.dataclass
class Rounds:
    """A backend of such kernels."""

    rounds: bool
    contract: Contract
    name: str = "rounds"
    devices = ("cpu",)

    def availability(self, device: str) -> Availability:
        """Everywhere."""
        return Availability()

    def supports(self, problem: Problem, request: object = None) -> None:
        """All."""

    def prepare(self, problem: Problem, operands: Operands, request: object = None) -> Kernel:
        """Nothing to compile."""
        return Kernel(problem, self.rounds, self.contract)


BEFORE_2_13, FROM_2_13 = Contract(), Contract(rounds_at=0)


@pytest.mark.parametrize(
    "line", ["mm:bf16:nn:32x40x256:mul", "mm:f16:nn:32x40x64:silu+mul", "linear:bf16:nt:32x40x256:bias+gelu"]
)
@pytest.mark.parametrize(
    ("contract", "rounds", "statuses"),
    [
        (FROM_2_13, True, {Status.PASSED}),
        (FROM_2_13, False, {Status.PASSED, Status.INCORRECT}),
        (BEFORE_2_13, False, {Status.PASSED}),
        (BEFORE_2_13, True, {Status.PASSED, Status.INCORRECT}),
    ],
)
def test_a_rounding_that_is_left_out_or_added_is_caught(
    line: str, contract: Contract, rounds: bool, statuses: set[Status]
) -> None:
    found = judged(Rounds(rounds, contract), line)
    assert {one.status for one in found} == statuses, found


def test_a_sum_that_was_rounded_is_exact_behind_it() -> None:
    """Small integers: the sum has no error, so the kernel's result is one number and not two."""
    for rounds, contract in ((True, BEFORE_2_13), (False, FROM_2_13)):
        found = judged(Rounds(rounds, contract), "mm:bf16:nn:32x40x256:mul")
        assert "exact" in {one.tier for one in found if one.status is Status.INCORRECT}, found


# -- the template itself ---------------------------------------------------------------------------------

WIDE, NARROW = "INDEX_DTYPE : tl.constexpr = tl.int64", "INDEX_DTYPE : tl.constexpr = tl.int32"

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: Triton compiles for one")


def as_it_is(text: str) -> str:
    return text


def narrowed(text: str) -> str:
    """A template's text without its offsets of 64 bits."""
    return text.replace(WIDE, NARROW)


def rounded_otherwise(text: str) -> str:
    """A template's text with the rounding of its sum left out, or with one where it has none."""
    pair = re.compile(r"^( +)(\w+) = (\w+)\.to\(tl\.b?float16\)\n +(\w+) = \2\.to\(tl\.float32\)$", re.MULTILINE)
    if pair.search(text):
        return pair.sub(r"\1\4 = \3", text)
    return re.sub(r"^( +)(?=tmp0 = )", r"\1acc = acc.to(tl.bfloat16).to(tl.float32)\n\1", text, flags=re.MULTILINE)


def changed(
    line: str, distributions: tuple[str, ...], folder: str, change: Callable[[str], str]
) -> tuple[set[Status], list[str]]:
    """The statuses of a problem whose templates' texts are changed, and the texts as they were.

    In a process of its own: a kernel that writes at a wrong address takes the device with it.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    from torch._inductor.async_compile import AsyncCompile

    compiled, texts = AsyncCompile.triton, []

    def triton(self: Any, name: str, text: str, *args: Any, **kwargs: Any) -> Any:
        texts.append(text)
        return compiled(self, name, change(text) if "tl.dot" in text else text, *args, **kwargs)

    AsyncCompile.triton = triton  # the process is this test's
    case = Case(TritonBackend(), Problem.parse(line), distributions, 0, Device.CUDA)
    return {outcome.status for outcome in Judge().outcomes(case)}, texts


def changed_apart(*args: Any) -> tuple[set[Status], list[str]]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(changed, *args).result()


@pytest.mark.gpu
@pytest.mark.slow
@needs_cuda
@pytest.mark.parametrize("change", [as_it_is, rounded_otherwise])
def test_a_template_that_runs_otherwise_than_its_text_is_caught(tmp_path: Path, change: Callable[[str], str]) -> None:
    line = "mm:bf16:nn:128x96x192:mul"
    statuses, texts = changed_apart(line, distributions_for(Problem.parse(line)), str(tmp_path), change)
    assert any("tl.dot" in text for text in texts)
    assert statuses == ({Status.PASSED} if change is as_it_is else {Status.PASSED, Status.INCORRECT})


@pytest.mark.gpu
@pytest.mark.slow
@needs_cuda
@pytest.mark.parametrize("line", ["mm:f16:nn:46352x46360x32", "bmm:bf16:nt:8209x512x512x64"])
@pytest.mark.parametrize("change", [as_it_is, narrowed])
def test_a_template_without_its_offsets_of_64_bits_is_caught(
    tmp_path: Path, line: str, change: Callable[[str], str]
) -> None:
    need = admission.needed(Case(TritonBackend(), Problem.parse(line), ("int-1",), 0, Device.CUDA))
    if need > (free := admission.free("cuda")):
        pytest.skip(f"needs {need >> 30} GiB of the device's memory, and {free >> 30} GiB are free")
    try:
        statuses, texts = changed_apart(line, ("int-1",), str(tmp_path), change)
    except BrokenProcessPool:
        statuses, texts = {Status.CRASHED}, [WIDE]
    if not any(WIDE in text for text in texts):
        pytest.skip("this release of PyTorch has no offsets of 64 bits in its templates")
    if change is as_it_is:
        assert statuses == {Status.PASSED}
    else:
        assert statuses & {Status.INCORRECT, Status.CRASHED}


# -- decompose-K -----------------------------------------------------------------------------------------


def splits(line: str, by_line: int) -> object:
    options = dict(TritonBackend().space_of_one(Problem.parse(line), by_line).options)
    return options.get("triton.num_decompose_k_splits", 0)


def test_every_second_long_product_is_decomposed_and_no_other_one() -> None:
    assert [splits("mm:bf16:nt:16x16x4096", number) for number in range(4)] == [0, 10, 0, 10]
    for line in ("mm:bf16:nt:16x256x4096", "addmm:bf16:nn:16x16x4096:bias", "bmm:bf16:nn:2x16x16x4096"):
        assert not splits(line, 1)


def test_the_quick_level_has_some_products_that_are_decomposed_and_some_that_are_not() -> None:
    long = [p for p in matrix.products("quick") if splits(p.line, 1) and TritonBackend().supports(p) is None]
    seen = [splits(p.line, zlib.crc32(p.line.encode())) for p in long]
    assert 2 <= sum(map(bool, seen)) < len(long)
