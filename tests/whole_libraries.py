"""All of torch and matplotlib that an inner run loads, for tests that run pytest in their own process.

pytester forgets on return which modules an inner run imported.  torch can be loaded only once in a process, and of
matplotlib and the worker some modules would stay behind that know the classes of those which are gone.
"""

import matplotlib.backends.backend_agg
import matplotlib.backends.backend_svg
import matplotlib.figure  # noqa: F401  # loads most of the others
import tabulate  # noqa: F401
import torch
import torch._dynamo
import torch._inductor.compile_fx
import torch._inductor.runtime.autotune_cache
import torch._inductor.test_operators

import pytest_gemm.run.check
import pytest_gemm.speed.controller
import pytest_gemm.worker.process
import pytest_gemm.worker.server  # noqa: F401
from pytest_gemm.api.executed import record_products

with record_products():
    torch.mm(torch.ones(1, 1), torch.ones(1, 1))
torch._dynamo.list_backends()
