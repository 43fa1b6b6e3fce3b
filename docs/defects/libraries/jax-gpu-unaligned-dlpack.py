"""JAX on a GPU: from_dlpack takes memory at an address that is no multiple of 16 bytes, and each use of the array raises.

Needs jax[cuda13], torch for CUDA and a GPU.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys

import jax
import torch
from jax import numpy as jnp

failed = 0
memory = torch.ones(17 * 127 + 4, device="cuda", dtype=torch.float32)
for start in (0, 1, 4):
    a = jnp.from_dlpack(memory[start:][: 17 * 127].view(17, 127))
    try:
        print(f"{4 * start} bytes further: {jax.block_until_ready(jnp.matmul(a, a.T))[0, 0]}")
    except Exception as error:
        failed += 1
        print(f"{4 * start} bytes further: {type(error).__name__}: {error}")
sys.exit(int(failed > 0))
