"""linear:f16:nt:128x256x8192:bias on cutlass: not run, it can kill the process: while it is autotuned, a kernel
that takes A, B and the bias is given the bias, A and B: it reads B out of the bias's memory, an illegal access
where B is large (results are not concerned)

Seen on torch 2.11.0+cu130, filling -, seed 0.
Needs torch and nvcc, CUTLASS's sources in TORCHINDUCTOR_CUTLASS_DIR.  Exit status: 1 the failure is there, 0 it is
not, 2 something else went wrong.
"""
import subprocess, sys, traceback
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


def program(a, b, bias):
    linear = torch._C._nn.linear(a, b, bias)
    return linear


def run(a, b, bias):
    with torch.no_grad(), torch._inductor.config.patch(OPTIONS):
        return torch.compile(program, fullgraph=True)(a, b, bias)


torch.set_num_threads(5)
torch._functorch.config.enable_autograd_cache = False
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
if "child" not in sys.argv:
    status = subprocess.run([sys.executable, __file__, "child"]).returncode
    print("the process ended with status", status)
    sys.exit(int(status != 0))
given = dict(a=tensor((128, 8192), (8192, 1), 0, torch.float16, 1), b=tensor((256, 8192), (8192, 1), 0,
             torch.float16, 2), bias=tensor((256,), (1,), 0, torch.float16, 3))
try:
    actual = run(**given)
    torch.cuda.synchronize()
except Exception as error:
    traceback.print_exc()
    sys.exit(2)
print("it came to its end")
sys.exit(0)
