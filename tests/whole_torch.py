"""All of torch that an inner run loads, for tests that run pytest in their own process.

pytester forgets on return which modules an inner run imported, and torch can be loaded only once in a process.
"""

import torch
import torch._dynamo
import torch._inductor.test_operators

from pytest_gemm.executed import record_products

with record_products():
    torch.mm(torch.ones(1, 1), torch.ones(1, 1))
