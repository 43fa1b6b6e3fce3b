"""mm:f32:nn:1x64x64 on triton: 64 of 64 elements differ from the exact result

Candidate triton_mm_persistent_tma-16x64x64,s4,w4.  Seen on torch 2.11.0+cu130, here with small integers.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong.
"""
import sys, traceback
import torch, torch._inductor.config

OPTIONS = {'max_autotune': True, 'max_autotune_gemm_backends': 'TRITON', 'freezing': False, 'compile_threads': 1,
           'shape_padding': False, 'triton.num_decompose_k_splits': 0, 'triton.enable_persistent_tma_matmul': True,
           'test_configs.autotune_choice_name_regex': '^triton_mm_persistent_tma_\\d+$',
           'test_configs.autotune_choice_desc_regex':
           "(?=.*\\bBLOCK_M='?16\\b)(?=.*\\bBLOCK_N='?64\\b)(?=.*\\bBLOCK_K='?64\\b)(?=.*\\bnum_stages='?4\\b)(?=.*\\bnum_warps='?4\\b)",
           'fx_graph_cache': False}


def tensor(shape, stride, offset, dtype, seed):
    n = torch.arange(offset + 1 + sum((s - 1) * t for s, t in zip(shape, stride)))
    i = 31 * n * n + 17 * n + seed
    return (i % 1021 % 5 - 2).to(dtype).to("cuda").as_strided(shape, stride, offset)


def program(a, b):
    mm = torch.mm(a, b)
    return mm


def run(a, b):
    with torch.no_grad(), torch._inductor.config.patch(OPTIONS):
        return torch.compile(program, fullgraph=True)(a, b)


torch.set_num_threads(3)
torch._functorch.config.enable_autograd_cache = False
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
given = dict(a=tensor((1, 64), (64, 1), 0, torch.float32, 1), b=tensor((64, 64), (64, 1), 0, torch.float32, 2))
try:
    actual = run(**given)
    torch.cuda.synchronize()
except Exception as error:
    traceback.print_exc()
    sys.exit(2)
actual = actual.double().cpu()
expected = program(**{n: t.double() for n, t in given.items()}).cpu()
bound = torch.full_like(expected, 0.00045013427734375)  # the largest that any element may be off
wrong = ~((actual - expected).abs() <= bound)
error = (actual - expected).abs().nan_to_num(nan=float('inf')).masked_fill(~wrong, -1)
at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
print(f"{int(wrong.sum())} of {wrong.numel()} elements are wrong; the worst is at {at}:")
print(f"expected {expected[at]:.9g}, actual {actual[at]:.9g}, bound {bound[at]:.3g}")
sys.exit(int(bool(wrong.any())))
