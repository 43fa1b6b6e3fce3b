"""Names as the profiler of an H200 gave them (torch 2.11, CUDA 13.0), and what they prove."""

from __future__ import annotations

import dataclasses

import pytest

from pytest_gemm.api import device_kernels
from pytest_gemm.api.proof import Proof

CUBLAS = [
    "nvjet_sm90_hsh_64x8_64x16_1x2_h_bz_NNT",
    "nvjet_sm90_qqtst_128x128_128x6_1x1_h_bz_coopA_algo2_ovscale_TNT",
    "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize256x128x8_stage3_warpsize4x2x1_ffma_aligna4_alignc4_execute_kernel",
    (
        "void cutlass::Kernel2<cutlass_75_wmma_tensorop_f16_s161616gemm_f16_32x32_64x1_nn_align1>"
        "(cutlass_75_wmma_tensorop_f16_s161616gemm_f16_32x32_64x1_nn_align1::Params)"
    ),
    (
        "void cutlass::Kernel2<cutlass_80_tensorop_i16832gemm_s8_64x64_128x6_tn_align16>"
        "(cutlass_80_tensorop_i16832gemm_s8_64x64_128x6_tn_align16::Params)"
    ),
    (
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float, float, float, float, false>"
        "(cublasGemvParamsEx<int, cublasGemvTensorStridedBatched<float const> >)"
    ),
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __half, float, __half, false>(long, float*)",
    "_bmm_outer_product_kernel",  # torch/_native/ops/bmm_outer_product/triton_kernels.py, from torch 2.13 on
]
OTHERS = [
    "triton_tem_fused_mm_0",
    "triton_poi_fused_relu_1",
    "kernel_cutlass_kernel_cutlassoperatorsproviderscutedslgemmimplementationssm90_static_persistent_implSm90_0",
    (
        "void at::native::vectorized_elementwise_kernel<8, at::native::FillFunctor<c10::Half>, std::array<char*, 1ul> >"
        "(int, at::native::FillFunctor<c10::Half>, std::array<char*, 1ul>)"
    ),
    (
        "void cutlass::device_kernel<cutlass3x_sm90_tensorop_gemm_f16_f16_f32_void_f16_64x64_0_tnn_align8>"
        "(cutlass3x_sm90_tensorop_gemm_f16_f16_f32_void_f16_64x64_0_tnn_align8::Params)"
    ),
]


@pytest.mark.parametrize("name", CUBLAS)
def test_a_product_of_a_library_is_known_by_its_name(name: str) -> None:
    assert device_kernels.libraries([name]) == (device_kernels.short(name),)


@pytest.mark.parametrize("name", OTHERS)
def test_no_other_kernel_is_taken_for_one(name: str) -> None:
    assert device_kernels.libraries([name]) == ()


def test_short_names_can_be_read() -> None:
    assert device_kernels.short(OTHERS[3]) == "at::native::vectorized_elementwise_kernel"
    assert device_kernels.short(OTHERS[4]).startswith("cutlass3x_sm90_tensorop_gemm_f16_f16_f32_void_f16_64x64")
    assert device_kernels.short(CUBLAS[5]) == "internal::gemvx::kernel"
    assert device_kernels.short("triton_tem_fused_mm_0") == "triton_tem_fused_mm_0"


PROOF = Proof(
    chosen=("triton_mm(64x32x128,s4,w8)",),
    generated=("triton_tem_fused_mm_0",),
    executed=("triton_tem_fused_mm_0",),
    device_kernel="^triton_tem_fused_mm_0$",
)


EAGER = Proof(executed=("aten.bmm.default",), provable=False)
NATIVE = dataclasses.replace(EAGER, device_kernel=r"^_bmm_outer_product_kernel\b")  # PyTorch's own, in Triton


@pytest.mark.parametrize(
    ("proof", "seen", "code", "named"),
    [
        (PROOF, None, "", ""),
        (PROOF, ("triton_tem_fused_mm_0", "triton_poi_fused_relu_1"), "", ""),
        (PROOF, ("triton_tem_fused_mm_0", CUBLAS[0]), "foreign-kernel", "nvjet_sm90_hsh"),
        (PROOF, (), "nothing-profiled", "triton_tem_fused_mm_0"),
        (PROOF, ("triton_poi_fused_relu_1",), "nothing-profiled", "triton_poi_fused_relu_1"),
        (EAGER, (), "", ""),  # of an empty product
        (NATIVE, None, "", ""),
        (NATIVE, ("_bmm_outer_product_kernel",), "", ""),
        (NATIVE, (CUBLAS[0],), "nothing-profiled", "_bmm_outer_product_kernel"),
    ],
)
def test_a_fallback_is_what_the_device_did_not_run_or_what_a_library_ran(
    proof: Proof, seen: tuple[str, ...] | None, code: str, named: str
) -> None:
    objection = dataclasses.replace(proof, profiled=seen).objection()
    assert (objection.code if objection else "") == code
    assert named in str(objection)


def test_eager_code_names_the_librarys_kernel_beside_the_operator() -> None:
    proof = Proof(executed=("aten.mm.default",), provable=False, profiled=(OTHERS[3], CUBLAS[0]))
    assert proof.objection() is None
    assert proof.kernels == ("aten.mm.default", "[nvjet_sm90_hsh_64x8_64x16_1x2_h_bz_NNT]")


def test_without_a_device_the_profiler_is_said_not_to_work() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device: its profiler is tested by running the suite on it")
    assert not device_kernels.works()
