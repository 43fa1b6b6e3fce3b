"""The GPUs of this machine, as NVML describes them.  No CUDA context is made."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU, or an instance of one.

    Attributes:
        index: as NVML and nvidia-smi count.
        uuid: ``GPU-...``.
        name: ``NVIDIA H200``.
        driver: version of the driver, ``580.95.05``.
        capability: compute capability, ``9.0``; "" where it cannot be read.
        power_limit: in W; ``None`` where it cannot be read.
        mig: the profile of the instance that is used, ``1g.18gb``; "" for a whole GPU.
        highest_clock: that its multiprocessors can have, in Hz; 0 where it cannot be read.
    """

    index: int
    uuid: str
    name: str
    driver: str
    capability: str
    power_limit: float | None = None
    mig: str = ""
    highest_clock: float = 0.0

    @property
    def architecture(self) -> str:
        """The digits that compilers put after ``sm_``, ``90``; "" where the capability is not known."""
        digits = self.capability.replace(".", "")
        return digits if digits.isdigit() else ""


def gpus() -> list[Gpu]:
    """The GPUs of this machine, whole; empty without a driver."""
    return [gpu for gpu, _ in _read_all()]


def visible_gpu() -> Gpu | None:
    """The GPU, or the part of one, that CUDA calls device 0: the first of ``CUDA_VISIBLE_DEVICES``, or of all.

    A number there is an index of NVML, which is CUDA's order under ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` and wherever all
    GPUs are alike.  A UUID may be shortened, as long as it is unique.
    """
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    for gpu, instances in _read_all():
        # Where a GPU is cut into instances, CUDA takes the first.
        profiles = [instances[uuid] for uuid in instances if uuid.startswith(wanted) or not wanted.startswith("MIG-")]
        if profiles if wanted.startswith("MIG-") else wanted == str(gpu.index) or gpu.uuid.startswith(wanted):
            return dataclasses.replace(gpu, mig=profiles[0] if profiles else "")
    return None


def _read_all() -> list[tuple[Gpu, dict[str, str]]]:
    """Each GPU with the profiles of its MIG instances by UUID; empty without a driver.

    The first call on a machine that keeps no driver state loads the driver, which takes seconds for each GPU.
    """
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        return [_read(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:  # a GPU that was lost
        return []
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Any, index: int) -> tuple[Gpu, dict[str, str]]:
    def ask(function: Callable[..., Any], *arguments: Any, unknown: Any = "") -> Any:
        try:
            return function(*arguments)
        except nvml.NVMLError:  # this GPU, or this driver, does not report it
            return unknown

    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    milliwatts = ask(nvml.nvmlDeviceGetPowerManagementLimit, handle, unknown=None)
    gpu = Gpu(
        index,
        uuid=ask(nvml.nvmlDeviceGetUUID, handle),
        name=ask(nvml.nvmlDeviceGetName, handle),
        driver=ask(nvml.nvmlSystemGetDriverVersion),
        capability=".".join(map(str, ask(nvml.nvmlDeviceGetCudaComputeCapability, handle))),
        power_limit=None if milliwatts is None else milliwatts / 1e3,
        highest_clock=1e6 * ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM, unknown=0.0),
    )
    places = range(ask(nvml.nvmlDeviceGetMaxMigDeviceCount, handle, unknown=0))
    instances = [ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place) for place in places]
    # An instance's name is that of its GPU, "MIG", and its profile.
    found = [(ask(nvml.nvmlDeviceGetUUID, one), ask(nvml.nvmlDeviceGetName, one)) for one in instances if one != ""]
    return gpu, {uuid: name.split(" ")[-1] for uuid, name in found}
