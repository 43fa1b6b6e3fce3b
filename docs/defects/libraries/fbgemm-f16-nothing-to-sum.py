"""FBGEMM in PyTorch returns uninitialised memory for an f32 matrix by an f16 weight with K = 0; zeros are expected.

Needs torch alone.  Exit status: 1 the failure is there, 0 it is not.
"""

import sys
import warnings

import torch

warnings.simplefilter("ignore")
a, packed = torch.ones(64, 0), torch.fbgemm_pack_gemm_matrix_fp16(torch.ones(64, 0))
wrong = 0
for _ in range(20):
    before = torch.full((64, 64), 7.0)  # whose memory the next result gets
    del before
    wrong += int(torch.fbgemm_linear_fp16_weight_fp32_activation(a, packed, None).count_nonzero())
print(f"{wrong} of {20 * 64 * 64} elements are not 0")
sys.exit(int(wrong > 0))
