"""A matrix product in CUDA C++ that adds a bias and applies relu itself: the backend ``cuda-mine``.

Requirements: torch for CUDA, nvcc, ninja
Run: PYTHONPATH=examples pytest -p cuda_kernel --pyargs pytest_gemm.conformance --gemm-backends=cuda-mine
"""

import functools
from typing import Any

import torch

SOURCE = """
#include <c10/cuda/CUDAStream.h>
__global__ void kernel(int64_t m, int64_t n, int64_t k, const float *a, int64_t am, int64_t ak, const float *b,
                       int64_t bk, int64_t bn, const float *bias, bool relu, float *c) {
    int64_t i = blockIdx.x * 16 + threadIdx.x, j = blockIdx.y * 16 + threadIdx.y;
    if (i >= m || j >= n) return;
    float sum = 0;
    for (int64_t p = 0; p < k; p++) sum += a[i * am + p * ak] * b[p * bk + j * bn];
    if (bias) sum += bias[j];
    c[i * n + j] = relu && sum < 0 ? 0 : sum;  // NaN stays NaN
}
torch::Tensor gemm(torch::Tensor a, torch::Tensor b, std::optional<torch::Tensor> bias, bool relu) {
    auto m = a.size(0), n = b.size(1); auto c = torch::empty({m, n}, a.options());
    if (m && n) kernel<<<dim3((m + 15) / 16, (n + 15) / 16), dim3(16, 16), 0, c10::cuda::getCurrentCUDAStream()>>>(
        m, n, a.size(1), a.data_ptr<float>(), a.stride(0), a.stride(1), b.data_ptr<float>(), b.stride(0), b.stride(1),
        bias ? bias->data_ptr<float>() : nullptr, relu, c.data_ptr<float>());
    return c;
}"""


@functools.cache
def module() -> Any:
    """The compiled module, which PyTorch keeps between runs."""
    from torch.utils.cpp_extension import load_inline

    declared = "torch::Tensor gemm(torch::Tensor, torch::Tensor, std::optional<torch::Tensor>, bool);"
    return load_inline("cuda_kernel", declared, SOURCE, functions=["gemm"])


def matmul(a: torch.Tensor, b: torch.Tensor, bias: Any = None, activation: str | None = None) -> Any:
    """The product of two matrices in f32, which the kernel reads in their own strides."""
    return module().gemm(a, b, bias, activation == "relu")


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    how: dict[str, Any] = {"dtypes": ("f32",), "batched": False, "devices": ("cuda",)}
    registry.add_callable("cuda-mine", matmul, linear=matmul, activations=("relu",), **how)
