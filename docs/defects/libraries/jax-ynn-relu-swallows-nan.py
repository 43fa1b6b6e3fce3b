"""XLA on a CPU with element-wise YNNPACK fusions makes 0 of a NaN in a relu; without them it keeps the NaN.

Needs jax alone.  Exit status: 1 the failure is there, 0 it is not.
"""

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_DOT,LIBRARY_FUSION_TYPE_ELTWISE"

import jax
from jax import numpy as jnp

a, b = jnp.full((64, 128), jnp.nan), jnp.ones((128, 64))
program = jax.jit(lambda a, b: jnp.maximum(a @ b, 0.0)).lower(a, b).compile()
made = float(program(a, b)[0, 0])
print(f"max(NaN, 0) behind a product is {made}, in {'__ynn_fusion' if '__ynn_fusion' in program.as_text() else 'XLA'}")
sys.exit(int(made == 0.0))
