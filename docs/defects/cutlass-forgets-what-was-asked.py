"""torch._scaled_mm without fast accumulation on CUTLASS, compiled after the same with it, is summed with it.

torch 2.11 to 2.13, on a Hopper.  The configurations that fit are kept by the operands' layouts alone.
Needs nvcc, and CUTLASS's sources in TORCHINDUCTOR_CUTLASS_DIR.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys
import torch, torch._inductor.config, torch._inductor.select_algorithm, torch._inductor.codegen.cutlass.gemm_template

OPTIONS = {"max_autotune": True, "max_autotune_gemm_backends": "CUTLASS", "fx_graph_cache": False,
           "cutlass.cutlass_max_profiling_configs": 1, "cutlass.cutlass_max_profiling_swizzle_options": [1],
           "cutlass.cutlass_op_allowlist_regex": "128x128x128_1x2x1_.*warpspecialized_(cooperative|pingpong).*epi_tma"}


def product(a, b, scale_a, scale_b, fast):
    return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast)


def compiled(fast):
    torch._dynamo.reset()
    with torch.no_grad(), torch._inductor.config.patch(OPTIONS):
        return torch.compile(product, fullgraph=True)(a, b, *scales, fast)


# Two tensors: for one that is both scales torch 2.11 writes "Variable cannot be defined twice".
scales = torch.ones((), device="cuda"), torch.ones((), device="cuda")
a, b = (torch.rand(64, 8192, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
b = b.t()
exact = a.double() @ b.double()
for order in ((False,), (True, False)):
    torch._inductor.codegen.cutlass.gemm_template.CUTLASSGemmTemplate.filtered_ops_cache.clear()
    for fast in order:
        result = compiled(fast)
    error = ((result.double() - exact).abs() / exact).max().item()
    print("precise" + (", after fast" if len(order) > 1 else " alone"), f"largest relative error {error:.2g}")
    if len(order) == 1:
        alone = error
sys.exit(int(error > 2 * alone))
