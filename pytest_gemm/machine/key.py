"""The hardware key: the folder of baselines that belongs to this machine."""

from __future__ import annotations

import platform
import re
from typing import Final, Literal

from pytest_gemm.machine.gpus import Gpu, visible_gpu
from pytest_gemm.machine.isa import caps, isa_level
from pytest_gemm.machine.processor import Cpu, cpu, slug

Device = Literal["cpu", "cuda"]


# What vendors write around the name of a model.
_DECORATION: Final = re.compile(
    r"\((?:r|tm)\)|\bcpu\b|\bprocessor\b|\b\d+-core\b|@.*|w(?:ith |/ )radeon.*", re.IGNORECASE
)


def _cpu_slug(found: Cpu) -> str:
    """The model without decoration; with the generation where the name is that of a whole family.

    Virtual machines often report no more than ``AMD EPYC`` or ``Intel Xeon Processor``.
    """
    name = slug(_DECORATION.sub(" ", found.model)) or slug(platform.machine())
    tells = any(letter.isdigit() for letter in name) and bool(found.model)
    return name if tells or not found.generation else f"{name}-{found.generation}"


def hardware_key(device: Device, cores: int, *, on: Cpu | Gpu | None = None) -> str:
    """The name under which times of this hardware are stored: what must agree for two times to be compared.

    For the CPU: model, best instruction set, caps of the libraries, cores in use: ``amd-epyc-7763-avx2-4c``, and
    ``intel-xeon-8480c-amx-onednn-avx2-4c`` with ``ONEDNN_MAX_CPU_ISA=AVX2``.  For CUDA: name of the GPU,
    compute capability, power limit and MIG profile: ``nvidia-h200-sm90-700w``.  A part that cannot be read is left
    out.  Always a legal folder name of ``[a-z0-9-]``.

    Args:
        device: where the case computes.
        cores: threads that compute; without influence on the key of a GPU.
        on: another machine's hardware; this one's when ``None``.

    Returns:
        ``cuda-unknown`` where NVML reports no GPU.
    """
    if device == "cpu":
        found = on if isinstance(on, Cpu) else cpu()
        capped = (f"{library}-{slug(level)}" for library, level in caps(found.flags).items())
        return "-".join([_cpu_slug(found), isa_level(found.flags), *capped, f"{cores}c"])
    gpu = on if isinstance(on, Gpu) else visible_gpu()
    if gpu is None:
        return "cuda-unknown"
    parts = [slug(gpu.name)]
    if gpu.architecture:
        parts.append(f"sm{gpu.architecture}")
    if gpu.power_limit is not None:
        parts.append(f"{gpu.power_limit:.0f}w")
    if gpu.mig:
        parts.append(f"mig-{slug(gpu.mig)}")
    return "-".join(filter(None, parts))
