"""Which problems a backend supports, and the words and codes of its refusals."""

from __future__ import annotations

import itertools

import pytest
import torch
from oracle import make, on_meta, says

from pytest_gemm.api.request import DEFAULT, BuildRequest
from pytest_gemm.backends.aten import AtenBackend, AtenPrepared
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.backends.cutedsl import CuteDslBackend
from pytest_gemm.backends.cutlass.backend import CutlassBackend
from pytest_gemm.backends.inductor import torch_compat
from pytest_gemm.backends.inductor.backend import InductorBackend
from pytest_gemm.backends.inductor.bindings import dynamic_dimensions
from pytest_gemm.backends.nvgemm import NvgemmBackend
from pytest_gemm.backends.triton import TritonBackend
from pytest_gemm.core.case_id import Mode
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.problem.problem import Problem

FP8 = "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:"
FP8_WIDE = "scaled_mm:f8e4m3fn-f8e4m3fn-f32:nt:"
GROUPED = "grouped_mm:bf16:nt:4x64x96x128"
SCALED_GROUPED = "scaled_grouped_mm:f8e4m3fn-f8e4m3fn-bf16:nt:4x32x48x64:quant.rowwise"
MXFP8 = f"{FP8}64x64x64:quant.mx"
MXFP4 = "scaled_mm:f4e2m1fn-f4e2m1fn-bf16:nt:64x64x64:quant.mx:program.v2"
NVFP4 = "scaled_mm:f4e2m1fn-f4e2m1fn-f32:nt:64x64x64:quant.nv"
NVFP4_2 = "scaled_mm:f4e2m1fn-f4e2m1fn-bf16:nt:64x64x64:quant.nv-2:program.v2"
MICRO = (MXFP8, MXFP4, NVFP4, NVFP4_2)
SCALED_FORMS = tuple(SCALED_GROUPED.replace("grouped_mm", form) for form in (
    "grouped_mm", "grouped_mm_n", "grouped_mm_k", "grouped_bmm",
))  # fmt: skip
NOT_ON_CPU = (*MICRO, *SCALED_FORMS, f"{FP8}64x64x256:quant.blocks")

# Words of each refusal; "" for a problem that is supported.
CLAIMS = {
    AtenBackend: {
        "grouped_mm:bf16:nt:4x64x96x100": "rows of A are 100 elements apart",
        "grouped_mm:bf16:nn:4x64x100x64": "rows of B are 100 elements apart",
        "grouped_mm:bf16:nn:3x16x40x0:a.padded": "rows of A are 9 elements apart",
        "grouped_mm:f64:nt:4x64x96x64": "not f64",
        "grouped_mm_k:bf16:nt:4x32x40x65": "rows of A are 260 elements apart",
        "grouped_mm_n:bf16:nn:4x33x41x64": "rows of B are 164 elements apart",
        "grouped_mm_n:bf16:nn:4x33x42x64": "",
        "mm_plus_mm:bf16:nn:33x40x96": "",
    },
    TritonBackend: {
        f"{FP8}17x48x64:bias:quant.rowwise:math.fast_accumulate": "",
        "scaled_mm:f8e5m2-f8e5m2-f32:nt:17x48x64:quant.rowwise": "",
        f"{FP8}17x48x16:quant.rowwise": "",
        f"{FP8}17x40x64:quant.rowwise": "multiples of 16",
        f"{GROUPED}:relu": "",
        "grouped_mm_k:bf16:nt:4x32x64x64": "",
        "grouped_mm:f16:nt:4x64x96x128": "bf16 only",
        "grouped_mm:bf16:nt:4x64x96x100": "elements apart",
        f"{GROUPED}:b.offset": "TMA",
        SCALED_GROUPED: "",
        SCALED_GROUPED.replace("x48x", "x40x"): "N=40: _scaled_grouped_mm needs multiples of 16",
        "scaled_grouped_mm_k:f8e4m3fn-f8e4m3fn-bf16:nt:4x32x48x6:quant.rowwise": "K=24",
        "scaled_grouped_mm_k:f8e4m3fn-f8e4m3fn-bf16:nt:4x32x48x64:quant.rowwise:a.padded": "",
        "mm_plus_mm:bf16:nn:33x40x96": "",
        "da8w8:i8-i8-f32:nt:64x64x128:quant.rowwise": "ATen and C++ candidates only",
    },
    CutlassBackend: {
        f"{FP8}17x48x64:bias:quant.rowwise": "",
        f"{FP8_WIDE}17x48x64:quant.rowwise": "not f32",
        GROUPED: "no CUTLASS candidate",
        "mm_plus_mm:bf16:nn:33x40x96": "no CUTLASS candidate",
    },
    CuteDslBackend: {
        f"{FP8_WIDE}17x48x64:bias:quant.rowwise:math.fast_accumulate": "",
        f"{FP8}17x48x64:quant.rowwise": "few bits",
        "scaled_mm:f8e4m3fn-f8e5m2-bf16:nt:17x48x64:quant.rowwise:math.fast_accumulate": "one dtype",
        GROUPED: "Blackwell",
    },
    NvgemmBackend: {
        "grouped_mm:bf16:nn:4x64x96x128": "column-major",
        "grouped_bmm:bf16:nt:4x32x64x64": "no NVGEMM candidate",
        SCALED_GROUPED: "no NVGEMM candidate",
    },
    CppBackend: {
        f"{FP8}17x48x64:quant.tensorwise": "no C",
        GROUPED: "no C++ candidate",
        "mm_plus_mm:bf16:nn:33x40x96": "ATen and Triton candidates only",
        "mm_plus_mm:f32:tn:33x40x96:b.constant": "contiguous rows",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "line", "words"), [(kind, *row) for kind, rows in CLAIMS.items() for row in rows.items()]
)
def test_a_backend_supports_what_it_computes_and_says_why_not(backend: type, line: str, words: str) -> None:
    says(backend().supports(Problem.parse(line), DEFAULT), words)


@pytest.mark.parametrize("backend", [TritonBackend, CutlassBackend, CuteDslBackend, NvgemmBackend])
@pytest.mark.parametrize("line", MICRO)
def test_no_template_takes_block_scaled_formats(backend: type, line: str) -> None:
    assert backend().supports(Problem.parse(line), DEFAULT) is not None


INT4 = "woq_int4:bf16-i4-bf16:nt:9x64x256:quant.group-64"
F32 = "linears:f32:nt:2x16x32x52"


@pytest.mark.parametrize(("line", "level", "mode", "code"), [
    ("qlinear:u8-i8-f16:nt:17x64x128:quant.static", "avx2", "", "dtype"),
    ("qlinear:u8-i8-f32:nt:17x64x128:add:quant.dynamic", "avx2", "", "dynamic"),
    ("qlinear:u8-i8-f32:nt:17x8x128:quant.static", "avx2", "", "few-columns"),
    ("woq_int4:f32-i4-f32:nt:17x64x128:quant.group-32", "avx2", "", "dtype"),
    ("woq_int4:bf16-i4-bf16:nt:17x48x128:quant.group-32", "avx2", "", "int4-shape"),
    (INT4, "avx2", "", "isa"), (INT4, "avx512", "", ""), (INT4, "amx", "", ""),
    ("woq_int8:f16-i8-f16:nt:17x192x128:program.concat", "avx2", "", "dtype"),
    (f"{F32}:gated-silu:m.dynamic", "amx", "", ""), (f"{F32}:gated-silu", "amx", "", "mkl-linear"),
    (f"{F32}:gated-silu", "amx", "aoti", ""), (F32, "amx", "dynamic", ""),
    (f"{F32}:b.argument:m.dynamic", "amx", "", "weight-not-constant"),
    ("linears:f32-f32-bf16:nt:2x16x32x52:bias", "amx", "", ""),
    # From the level on at which oneDNN computes half types.
    ("linears:f16:nt:2x16x32x52", "avx512_vnni", "", "isa"), ("linears:f16:nt:2x16x32x52", "amx", "", ""),
    ("linears:bf16:nt:2x16x32x52", "avx2", "", "isa"), ("linears:bf16:nt:2x16x32x52", "avx512", "", ""),
    ("mm_plus_mm:bf16:nn:33x40x96:b.constant", "avx2", "", "isa"),
    ("mm_plus_mm:f32:nt:33x40x96:b.constant", "", "", ""),
    ("mm:f32:nn:16x32x52:b.parameter", "amx", "", "weight-not-constant"),
    ("mm:f32:nn:16x32x52:b.parameter", "amx", "aoti", ""),
    ("bmm:f32:nn:3x16x32x52:b.constant+parameter", "amx", "", ""),
    ("bmm:f32:nn:3x16x32x52:b.constant", "amx", "dynamic", ""),
    ("bmm:f32:nn:3x16x32x52:b.constant+parameter", "amx", "dynamic", "dynamic-nk"),
    ("bmm:f32:nn:3x16x32x52:b.batch_middle", "amx", "", ""),
    ("bmm:f32:nn:3x16x32x52:a.batch_middle", "amx", "", "a-strided"),
])  # fmt: skip
def test_cpp_refuses_what_the_lowerings_do_not_take(
    line: str, level: str, mode: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda: True)
    request = BuildRequest(isa=level, mode=Mode(mode))
    refusal = InductorBackend.supports(CppBackend(), Problem.parse(line), request)  # whatever this CPU executes
    assert (refusal.reason.code if refusal else "") == code


def test_what_is_refused_for_its_rows_is_what_torch_refuses() -> None:
    for k, n, layout in ((100, 96, "nt"), (64, 100, "nn"), (64, 100, "nt"), (72, 8, "nn")):
        for flags in ("", ":a.padded", ":b.padded"):
            o = make(f"grouped_mm:bf16:{layout}:3x8x{n}x{k}{flags}")
            refused = AtenBackend().supports(o.problem) is not None
            try:
                AtenPrepared(o.problem).run(o)
                failed = False
            except RuntimeError:
                failed = True
            assert failed == refused, o.problem


# -- eager PyTorch on devices that are not there -------------------------------------------------------


@pytest.mark.parametrize("line", NOT_ON_CPU)
def test_a_cpu_has_no_kernel_and_says_so(line: str) -> None:
    o = make(line)
    says(AtenBackend().unsupported(o.problem, "cpu"), "on CUDA only")
    with pytest.raises((ValueError, RuntimeError)):  # as PyTorch does
        AtenPrepared(o.problem).run(o)


def test_rows_are_refused_on_a_cpu_that_does_not_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_compat, "torch_release", lambda: (2, 11))
    says(AtenBackend().unsupported(Problem.parse(f"{FP8}16x16x16:quant.rowwise"), "cpu"), "before torch 2.13")


@pytest.mark.parametrize(("line", "capability", "words"), [
    (f"{FP8}17x48x64:quant.rowwise", 90, ""), (f"{FP8}1x16x32:bias:quant.tensorwise", 90, ""),
    (f"{FP8}17x40x64:quant.rowwise", 90, "multiples of 16"), (f"{FP8}17x48x72:quant.rowwise", 90, "multiples of 16"),
    ("scaled_mm:f8e5m2-f8e5m2-bf16:nt:17x48x64:quant.rowwise", 90, "f8e5m2 by f8e5m2"),
    (f"{FP8_WIDE}17x48x64:bias:quant.tensorwise", 90, "adds no bias"),
    (f"{FP8}17x48x64:quant.tensorwise:a.offset", 90, "addresses"),
    (f"{FP8_WIDE}16x16x64:quant.rowwise", 80, "8.9"), (f"{FP8_WIDE}16x16x64:quant.rowwise", 100, "9.0"),
    (f"{FP8}64x64x256:quant.blocks", 90, ""), (f"{FP8}64x64x256:quant.blocks", 100, "9.0 only"),
    ("grouped_mm:bf16:nt:4x64x96x64:a.offset", 90, "16 bytes"),
    (SCALED_GROUPED, 89, "9.0"), (SCALED_GROUPED, 90, ""), (SCALED_GROUPED, 100, ""), (SCALED_GROUPED, 120, "9.0"),
    *((line, capability, "compute capability 10") for line in MICRO for capability in (90, 120)),
    *((line, 100, "") for line in MICRO),
])  # fmt: skip
def test_a_gpu_is_told_what_it_lacks(line: str, capability: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: divmod(capability, 10))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    says(AtenBackend().unsupported(Problem.parse(line), "cuda"), words)


def test_scales_of_blocks_need_a_newer_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    refusal = AtenBackend().unsupported(Problem.parse(f"{FP8}64x64x256:quant.blocks"), "cuda")
    says(refusal, "from CUDA 12.9 on, and this PyTorch has 12.8")


@pytest.mark.parametrize(("line", "words"), [
    (f"{FP8}256x384x1024:quant.blocks-128_1:program.v2", "before torch 2.15"),
    (f"{FP8}256x384x1024:quant.blocks-1_1:program.v2", ""),
])  # fmt: skip
def test_an_older_lowering_refuses_squares_of_a(line: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for release in ((2, 14), (2, 15)):
        monkeypatch.setattr(torch_compat, "torch_release", lambda found=release: found)
        says(TritonBackend().supports(Problem.parse(line)), words if release == (2, 14) else "")


def test_one_kernel_of_cutlass_promotes_fp8_and_slices_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))

    def contract(line: str) -> Contract:
        return AtenPrepared(Problem.parse(line), "cuda").contract

    scaled, groups = contract(f"{FP8}17x48x64:quant.rowwise"), contract(SCALED_GROUPED)
    assert (scaled.alignment_bits, scaled.promote_every) == (13, 128)
    assert (groups.promote_every, groups.slices) == (128, 1)
    own, library = (contract(f"grouped_mm:{dtype}:nt:4x64x96x1024") for dtype in ("bf16", "f16"))
    assert (own.slices, own.or_scalar) == (1, False)
    assert library.slices > 1


def test_templates_claim_their_own_arithmetic_of_fp8() -> None:
    exact, fast = (Problem.parse(f"{FP8}16x16x4096:quant.rowwise{flag}") for flag in ("", ":math.fast_accumulate"))
    assert (TritonBackend().sum(exact).promote_every, CutlassBackend().sum(exact).promote_every) == (256, 128)
    for backend in (TritonBackend(), CutlassBackend()):
        assert backend.sum(fast).promote_every == 0
        assert backend.sum(fast).theta(4096) > 10 * backend.sum(exact).theta(4096)


# -- what a compiler asks -----------------------------------------------------------------------------


@pytest.mark.parametrize("line", [
    f"{FP8}64x128x512:quant.blocks:program.v2", f"{FP8}64x64x256:quant.blocks-1_1:program.v2",
    *(line.replace("64x64x64", "130x96x192") for line in MICRO),
    *(f"{line}{more}" for line, more in itertools.product(SCALED_FORMS, (
        "", ":math.fast_accumulate", ":a.padded:b.padded", ":program.v2",
    ))),
])  # fmt: skip
def test_pytorch_takes_the_shapes_of_what_has_no_kernel_on_a_cpu(line: str) -> None:
    """Its own check of shapes, which the compiler asks, is there without a device."""
    if torch_compat.torch_release() < (2, 14) and ("quant.mx:program.v2" in line or "rowwise:program.v2" in line):
        pytest.skip("before torch 2.14 this check is wrong or missing")
    o = make(line)
    assert on_meta(o).shape == o.problem.result_shape


@pytest.mark.parametrize(("line", "rows"), [
    (f"{FP8}16x32x64:bias+add:quant.rowwise:m.dynamic", ["a", "r0", "scale_a"]),
    (f"{FP8}16x32x64:quant.tensorwise:m.dynamic", ["a"]), (f"{GROUPED}:add:m.dynamic", ["a", "r0"]),
    (f"{SCALED_GROUPED}:m.dynamic", ["a", "scale_a"]),
])  # fmt: skip
def test_what_has_a_row_for_each_of_a_grows_with_m(line: str, rows: list[str]) -> None:
    found = dynamic_dimensions(Problem.parse(line))
    assert {name: found[name] for name in sorted(found)} == {name: {0: "m"} for name in rows}
