"""A module ``pynvml`` that knows an H200, and an A100 in two parts."""

from __future__ import annotations

import types
from typing import Any


class NVMLError(Exception):
    """What every function raises for what it does not know."""


_GPUS: list[dict[str, Any]] = [
    {"uuid": "GPU-aaa", "name": "NVIDIA H200", "capability": (9, 0), "watts": 700.0, "mhz": 1980, "parts": []},
    {
        "uuid": "GPU-bbb",
        "name": "NVIDIA A100-SXM4-40GB",
        "capability": (8, 0),
        "parts": [
            {"uuid": "MIG-111", "name": "NVIDIA A100-SXM4-40GB MIG 3g.20gb"},
            {"uuid": "MIG-222", "name": "NVIDIA A100-SXM4-40GB MIG 1g.5gb"},
        ],
    },
]


def module(count: int = 2, **more: Any) -> types.ModuleType:
    """The module, with the first so many GPUs and further functions."""

    def of(key: str, factor: float = 1) -> Any:
        def read(handle: dict[str, Any]) -> Any:
            if key not in handle:
                raise NVMLError("Not Supported")
            return handle[key] if factor == 1 else int(handle[key] * factor)

        return read

    def part(handle: dict[str, Any], index: int) -> dict[str, Any]:
        if index >= len(handle["parts"]):
            raise NVMLError("Not Found")
        found: dict[str, Any] = handle["parts"][index]
        return found

    found = types.ModuleType("pynvml")
    vars(found).update(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=_GPUS.__getitem__,
        nvmlSystemGetDriverVersion=lambda: "580.95.05",
        nvmlDeviceGetUUID=of("uuid"),
        nvmlDeviceGetName=of("name"),
        nvmlDeviceGetCudaComputeCapability=of("capability"),
        nvmlDeviceGetPowerManagementLimit=of("watts", 1e3),
        nvmlDeviceGetMaxClockInfo=lambda handle, _: of("mhz")(handle),
        NVML_CLOCK_SM=1,
        nvmlDeviceGetMaxMigDeviceCount=lambda _handle: 7,
        nvmlDeviceGetMigDeviceHandleByIndex=part,
    )
    vars(found).update(more)
    return found


def without_a_driver() -> types.ModuleType:
    """The module on a machine without a driver."""

    def fail() -> None:
        raise NVMLError("NVML Shared Library Not Found")

    return module(nvmlInit=fail)
