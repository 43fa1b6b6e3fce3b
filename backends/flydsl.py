"""``flydsl``: Inductor's FlyDSL templates, which are for one GPU of AMD's (PyTorch 2.15 and later, under ROCm)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from pytest_gemm.api.protocols import Availability
from pytest_gemm.api.request import Selection
from pytest_gemm.backends.inductor.backend import InductorBackend, installed, no_device

# The one GPU that Inductor's templates are written for, see use_flydsl_gemm_template in torch/_inductor/utils.py.
_GPU = "gfx950"
# The device file of AMD's driver.
_DRIVER = Path("/dev/kfd")
_MACHINE = f"run on a machine with an AMD Instinct MI350 or MI355 ({_GPU}), with a ROCm build of PyTorch 2.15"


class FlydslBackend(InductorBackend):
    """The FlyDSL candidates alone.  To ROCm's PyTorch an AMD GPU is a ``cuda`` device."""

    name: str = "flydsl"
    inductor_name: str = "FLYDSL"
    devices: tuple[str, ...] = ("cuda",)
    selection: Selection = Selection.ONE
    rules = ("inductor-on-cuda", "flydsl")

    def availability(self, device: str) -> Availability:
        """From the cheapest fact on: AMD's driver, what this torch is built for and has, the package, the GPU."""
        if device not in self.devices:
            return Availability(no_device(self.name, self.devices, device))
        if not _DRIVER.exists():
            return Availability.lacking(
                "no-rocm-device", f"FlyDSL is for AMD's {_GPU}, and there is no AMD GPU", _MACHINE
            )
        return self.installation()

    def installation(self) -> Availability:
        """A ROCm build of PyTorch that has the templates, the package ``flydsl``, and the GPU."""
        import torch

        from pytest_gemm.backends.inductor import torch_compat

        if torch.version.hip is None:
            text = f"FlyDSL is for ROCm, and torch {torch.__version__} is built without it"
            return Availability.lacking("no-rocm-torch", text, "install a build of PyTorch for ROCm")
        if not torch_compat.has_flydsl():
            text = f"Inductor of torch {torch.__version__} has no FlyDSL templates"
            return Availability.lacking("no-flydsl-templates", text, "install PyTorch 2.15 or newer")
        if importlib.util.find_spec("flydsl") is None:
            return Availability.lacking(
                "no-flydsl", "the package flydsl is not installed", "pip install 'flydsl==0.3.*'"
            )
        if not torch.cuda.is_available():
            return Availability.lacking("no-rocm-device", "PyTorch sees no AMD GPU", "check rocm-smi")
        properties: Any = torch.cuda.get_device_properties()
        gpu = str(getattr(properties, "gcnArchName", "")).partition(":")[0]
        if gpu != _GPU:
            return Availability.lacking("gpu", f"Inductor's FlyDSL templates are for {_GPU}, not {gpu}", _MACHINE)
        return Availability(versions=installed("flydsl"))
