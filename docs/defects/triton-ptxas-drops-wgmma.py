"""addmm:bf16:tt:64x2x31:bias+alpha--1+beta-0.5 on triton: 128 of 128 elements differ from the exact result

Candidate triton_mm-64x16x16,s2,w4.  Seen on torch 2.11.0+cu130, here with small integers.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""
import sys, traceback
import torch, torch._inductor.config

OPTIONS = {'max_autotune': True, 'max_autotune_gemm_backends': 'TRITON', 'freezing': False, 'compile_threads': 1,
           'shape_padding': False, 'triton.num_decompose_k_splits': 0, 'triton.enable_persistent_tma_matmul': True,
           'test_configs.autotune_choice_name_regex': '^triton_mm_\\d+$', 'test_configs.autotune_choice_desc_regex':
           "(?=.*\\bBLOCK_M='?64\\b)(?=.*\\bBLOCK_N='?16\\b)(?=.*\\bBLOCK_K='?16\\b)(?=.*\\bnum_stages='?2\\b)(?=.*\\bnum_warps='?4\\b)",
           'fx_graph_cache': False}


def tensor(shape, stride, offset, dtype, seed):
    n = torch.arange(offset + 1 + sum((s - 1) * t for s, t in zip(shape, stride)))
    i = 31 * n * n + 17 * n + seed
    return (i % 1021 % 5 - 2).to(dtype).to("cuda").as_strided(shape, stride, offset)


def program(a, b, bias):
    addmm = torch.addmm(bias, a, b, beta = 0.5, alpha = -1.0)
    return addmm


def run(a, b, bias):
    with torch.no_grad(), torch._inductor.config.patch(OPTIONS):
        return torch.compile(program, fullgraph=True)(a, b, bias)


torch.set_num_threads(1)
torch._functorch.config.enable_autograd_cache = False
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
given = dict(a=tensor((64, 31), (1, 64), 0, torch.bfloat16, 1), b=tensor((31, 2), (1, 31), 0, torch.bfloat16, 2),
             bias=tensor((2,), (1,), 0, torch.bfloat16, 3))
try:
    actual = run(**given)
    torch.cuda.synchronize()
except Exception as error:
    traceback.print_exc()
    sys.exit(2)
actual = actual.double().cpu()
expected = program(**{n: t.double() for n, t in given.items()}).cpu()
bound = torch.full_like(expected, 0.0)  # the largest that any element may be off
wrong = ~((actual - expected).abs() <= bound)
error = (actual - expected).abs().nan_to_num(nan=float('inf')).masked_fill(~wrong, -1)
at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
print(f"{int(wrong.sum())} of {wrong.numel()} elements are wrong; the worst is at {at}:")
print(f"expected {expected[at]:.9g}, actual {actual[at]:.9g}, bound {bound[at]:.3g}")
sys.exit(int(bool(wrong.any())))
