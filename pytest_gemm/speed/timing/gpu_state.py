"""Clocks, temperatures and throttling of a GPU while it is timed."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, Final, Protocol

from pytest_gemm.machine import gpus


@dataclasses.dataclass(frozen=True)
class GpuState:
    """What a GPU said of itself; ``None`` for what it did not.

    Attributes:
        sm_mhz, memory_mhz: clocks.
        watts: power that it draws.
        celsius: its temperature.
        reasons: bits that say why the clock is what it is, see :data:`_REASONS`.
    """

    sm_mhz: float | None = None
    memory_mhz: float | None = None
    watts: float | None = None
    celsius: float | None = None
    reasons: int = 0


class Probe(Protocol):
    """Reads the state of a GPU.

    Attributes:
        quick: whether it takes less than a millisecond, so that it can be asked after every reading.
    """

    quick: bool

    def read(self) -> GpuState | None:
        """The state now; ``None`` when it cannot be read."""
        ...


# Bits of nvmlClocksEventReasons (nvml.h) in words.  An idle GPU and clocks that somebody set are no event.
REASONS: Final = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}
SW_POWER_CAP: Final = 0x04
THROTTLES: Final = (0x08, 0x20, 0x40, 0x80)

# SM clocks come in steps of 15 MHz, about 1%: a difference of two steps is one.
CLOCKS_DIFFER: Final = 0.02


class _Nvml:
    """NVML through the module ``pynvml`` (distribution nvidia-ml-py): microseconds a reading."""

    quick = True

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        self._gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
        # The function's name before and after driver 535.
        self._reasons = getattr(
            nvml,
            "nvmlDeviceGetCurrentClocksEventReasons",
            getattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None),
        )

    def read(self) -> GpuState | None:
        nvml, gpu = self._nvml, self._gpu

        def ask(question: Callable[..., Any] | None, *arguments: Any) -> Any:
            if question is None:
                return None
            try:
                return question(gpu, *arguments)
            except nvml.NVMLError:  # this GPU does not tell: a MIG instance has no clock of its own
                return None

        milliwatts = ask(nvml.nvmlDeviceGetPowerUsage)
        return GpuState(
            sm_mhz=ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            memory_mhz=ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
            watts=None if milliwatts is None else milliwatts / 1e3,
            celsius=ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            reasons=ask(self._reasons) or 0,
        )


class _Blind:
    """Nothing can be read of the GPU."""

    quick = False

    def read(self) -> GpuState | None:
        return None


def probe_of() -> Probe:
    """A reader of the GPU that CUDA calls device 0."""
    gpu = gpus.visible_gpu()
    if gpu is None:
        return _Blind()
    with contextlib.suppress(Exception):  # of an NVML that does not know the GPU
        return _Nvml(importlib.import_module("pynvml"), gpu.uuid)
    return _Blind()
