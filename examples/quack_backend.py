"""quack-kernels' CuTe DSL product with epilogues on CUDA as the backend ``quack``; judged on an H200.

Requirements: quack-kernels==0.6.5 nvidia-cutlass-dsl[cu13]>=4.7 apache-tvm-ffi<0.2 torch-c-dlpack-ext einops; Hopper
Run: PYTHONPATH=examples pytest -p quack_backend --pyargs pytest_gemm.conformance --gemm-backends=quack

https://github.com/Dao-AILab/quack: ``gemm`` is alpha A @ B + bias, ``gemm_add`` alpha A @ B + beta C + bias, and
``gemm_act`` act(alpha A @ B + C + bias) (docstrings of quack/gemm_interface.py).  ``GemmSm90`` (quack/gemm_sm90.py)
takes f16, bf16 and fp8, no f32 and so no TF32, sums in f32 only, and needs rows of multiples of 16 bytes of A, B and
the result.  fp8 leaves the tensor core after each tile of K (``fp8_slow_accum``); alpha is the product of both scales,
so scales are those of whole tensors.  All of it is in f32, and the result is rounded once.

quack refuses CuTe DSL outside of a folder named ``site-packages`` ("no fail-closed semantic key", in its file
gemm_runtime/identity.py).  For ``pip install --target`` give a folder of that name, and put the folder
``nvidia_cutlass_dsl/dsl_packages`` in it on PYTHONPATH too.

``tuned=False``: no benchmark chooses the configuration, so that a case is the same kernel in each run.
"""

from __future__ import annotations

from typing import Any

from pytest_gemm.api.callable import plain
from pytest_gemm.api.request import DEFAULT
from pytest_gemm.backends.on_cuda import CudaCallableBackend
from pytest_gemm.core.outcome import Unsupported

ACTIVATIONS = {"relu": "relu", "silu": "silu", "tanh": "tanh", "gelu_tanh": "gelu_tanh_approx"}


def matmul(a: Any, b: Any) -> Any:
    """The product of two matrices or of two batches of them."""
    from quack.gemm_interface import gemm

    return gemm(a, b, tuned=False)


def fused(problem: Any, a: Any, b: Any, bias: Any = None, scale_a: Any = None, scale_b: Any = None) -> Any:
    """The program in one kernel."""
    import torch
    from quack.gemm_interface import gemm, gemm_act, gemm_add

    if problem.op.addend and problem.beta == 0.0:  # PyTorch's beta=0 ignores the addend; gemm_add multiplies its NaN
        return lambda: gemm(a, b, alpha=problem.alpha, tuned=False)
    if problem.op.addend:
        return lambda: gemm_add(a, b, bias, alpha=problem.alpha, beta=problem.beta, tuned=False)
    if problem.op.name == "scaled_mm":
        out = getattr(torch, problem.dtypes.out.torch_name)
        alpha = (scale_a * scale_b).reshape(1)
        return lambda: gemm(a, b, bias=bias, alpha=alpha, out_dtype=out, tuned=False)
    if not problem.chain:
        return lambda: gemm(a, b.mT, bias=bias, tuned=False)
    act = ACTIVATIONS[problem.chain[0].name]
    return lambda: gemm_act(a, b.mT, bias=bias, activation=act, store_preact=False, tuned=False)[1]


class QuackBackend(CudaCallableBackend):
    """The backend."""

    def bind(self, problem: Any, tensors: Any) -> Any:
        """Linears with a bias and an activation, addmm with an addend of the result's shape, fp8."""
        steps, op = [str(step) for step in problem.epilogue], problem.op
        own = op.addend and steps[:1] == ["bias-mn"] and not problem.chain
        own |= op.name == "linear" and steps != [] and len(problem.chain) < 2 and {*steps} <= {"bias", *ACTIVATIONS}
        own |= op.name == "scaled_mm"
        return fused(problem, **tensors) if own and plain(problem) else None

    def supports(self, problem: Any, request: Any = None) -> Unsupported | None:
        """Products of f16 and bf16, and fp8 with scales of whole tensors, where TMA can load and store the rows."""
        whole = problem.step("tensorwise") and problem.dtypes.out.bits > 8 and not problem.chain
        if problem.op.name == "scaled_mm" and not (whole and plain(problem)):
            return Unsupported("scales", "gemm has one factor, alpha", "write quant.tensorwise, no steps and no flags")
        return super().supports(problem, request or DEFAULT)


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    needs = ("quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi", "einops")
    how: dict[str, Any] = {"distributions": needs, "imports": ("quack.gemm_interface",), "rules": ("tma",)}
    registry.add(QuackBackend("quack", matmul, ("bf16", "f16"), **how))
