"""int_mm:i8-i8-i32:nt:32x64x128:cast-f32 on cutlass: InductorError in prepare: NotImplementedError: Unsupported
data type: torch_dtype=torch.int32

Seen on torch 2.11.0+cu130, filling int-2, seed 0.
Needs torch and nvcc, CUTLASS's sources in TORCHINDUCTOR_CUTLASS_DIR.  Exit status: 1 the failure is there, 0 it is
not, 2 something else went wrong.
"""
import sys, traceback
import torch, torch._inductor.config

OPTIONS = {'max_autotune': True, 'max_autotune_gemm_backends': 'CUTLASS', 'freezing': False, 'compile_threads': 1,
           'shape_padding': False, 'triton.num_decompose_k_splits': 0, 'cuda.cuda_cxx': '/usr/local/cuda/bin/nvcc',
           'benchmark_epilogue_fusion': False, 'cutlass.cutlass_epilogue_fusion_enabled': True,
           'cutlass.cutlass_op_allowlist_regex': 'align(8|16)_.*warpspecialized.*epi_tma',
           'cutlass.cutlass_max_profiling_swizzle_options': [1], 'fx_graph_cache': False}


def tensor(shape, stride, offset, dtype, seed):
    n = torch.arange(offset + 1 + sum((s - 1) * t for s, t in zip(shape, stride)))
    i = 31 * n * n + 17 * n + seed
    return (i % 1021 % 5 - 2).to(dtype).to("cuda").as_strided(shape, stride, offset)


def program(a, b):
    _int_mm = torch._int_mm(a, b)
    to = _int_mm.to(torch.float32)
    return to


def run(a, b):
    with torch.no_grad(), torch._inductor.config.patch(OPTIONS):
        return torch.compile(program, fullgraph=True)(a, b)


torch.set_num_threads(5)
torch._functorch.config.enable_autograd_cache = False
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
given = dict(a=tensor((32, 128), (128, 1), 0, torch.int8, 1), b=tensor((128, 64), (1, 128), 0, torch.int8, 2))
try:
    actual = run(**given)
    torch.cuda.synchronize()
except Exception as error:
    traceback.print_exc()
    sys.exit(1 if type(error).__name__ == 'InductorError' else 2)
print("it came to its end")
sys.exit(0)
