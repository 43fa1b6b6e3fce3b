"""The candidates that Triton's templates give on a Hopper that is not there, as JSON by problem line.

    python tests/pretended_hopper.py LINE...

For a process of its own: Inductor keeps what it learned of the device.
"""

from __future__ import annotations

import json
import logging
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch._inductor.compile_fx  # first: what is below it imports each other in a circle
import torch._inductor.config as inductor_config
import torch.utils._triton
import triton
from torch._inductor.kernel import mm_grouped
from triton.backends.compiler import GPUTarget

from pytest_gemm.backends.cutlass import compat
from pytest_gemm.backends.cutlass.backend import _without_memory
from pytest_gemm.backends.triton import TritonBackend
from pytest_gemm.problem.problem import Problem

_TMA = ("has_triton_tma_device", "has_triton_stable_tma_api", "has_triton_tensor_descriptor_host_tma")


# What Triton and Inductor ask of a driver, with the sizes of an H100 that bound a kernel.
_SIZES = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}
_DRIVER = SimpleNamespace(
    utils=SimpleNamespace(get_device_properties=lambda *_: _SIZES),
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_device_capability=lambda *_: (9, 0),
)


def main(lines: list[str]) -> None:
    """Print the names of the candidates of each problem."""
    logging.disable(logging.CRITICAL)
    triton.runtime.driver.set_active(_DRIVER)
    for name in _TMA:
        setattr(torch.utils._triton, name, lambda *_, **__: True)
    backend, found = TritonBackend(), dict[str, Any]()
    # Constants are not folded: that would compute on the device.
    asked = inductor_config.patch({"cuda.arch": "90", "cuda.version": "13.0", "joint_graph_constant_folding": False})
    able = patch.object(mm_grouped, "can_use_triton_kernel", lambda *_, **__: True)
    with compat._device_set("90a"), asked, able, patch("torch.cuda.get_device_capability", lambda *_: (9, 0)):
        for line in lines:
            problem = Problem.parse(line)
            found[line] = backend.candidates(problem, _without_memory(problem)).names
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
