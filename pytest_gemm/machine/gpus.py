"""The GPUs of this machine, as nvidia-smi lists them."""

from __future__ import annotations

import csv
import dataclasses
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

# -- GPUs ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What nvidia-smi says of a GPU.

    Attributes:
        index: as nvidia-smi counts.
        uuid: ``GPU-...``.
        name: ``NVIDIA H200``.
        driver: version of the driver, ``580.95.05``.
        capability: compute capability, ``9.0``.
        power_limit: in W; ``None`` where it cannot be read.
        mig: the profile of the instance that is used, ``1g.18gb``; "" for a whole GPU.
    """

    index: int
    uuid: str
    name: str
    driver: str
    capability: str
    power_limit: float | None = None
    mig: str = ""

    @property
    def architecture(self) -> str:
        """The digits that compilers put after ``sm_``, ``90``; "" where the capability is not known."""
        digits = self.capability.replace(".", "")
        return digits if digits.isdigit() else ""


_GPU_FIELDS: Final = ("index", "uuid", "name", "driver_version", "compute_cap", "power.limit")


def _nvidia_smi(*arguments: str, timeout: float = 60.0) -> str:
    """What nvidia-smi prints; "" when there is none or it fails.

    The first call on a machine that keeps no driver state loads the driver, which takes seconds for each GPU.
    """
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=timeout, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def query_gpus(fields: Sequence[str], *, select: str = "", timeout: float = 60.0) -> list[dict[str, str]]:
    """``nvidia-smi --query-gpu`` as one mapping from field to text for each GPU; empty when it cannot be asked.

    Args:
        fields: names that ``nvidia-smi --help-query-gpu`` lists; numbers come without their unit.
        select: index, UUID or bus address of one GPU; "" for all.
        timeout: seconds.
    """
    only = ("-i", select) if select else ()
    text = _nvidia_smi(f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", *only, timeout=timeout)
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    return [dict(zip(fields, map(str.strip, row), strict=True)) for row in rows if len(row) == len(fields)]


def read_gpus(rows: Sequence[Mapping[str, str]]) -> list[Gpu]:
    """GPUs of what :func:`query_gpus` gave for their fields; a row without an index is no GPU."""
    return [
        Gpu(
            index=int(row["index"]),
            uuid=row["uuid"],
            name=row["name"],
            driver=row["driver_version"],
            capability=row["compute_cap"],
            power_limit=_number(row["power.limit"]),
        )
        for row in rows
        if row["index"].isdigit()
    ]


def read_migs(listing: str) -> list[tuple[str, str, str]]:
    """MIG instances of the text of ``nvidia-smi -L``: UUID of the GPU, UUID of the instance, and its profile."""
    found, gpu = [], ""
    for line in listing.splitlines():
        if whole := re.match(r"GPU \d+:.*\(UUID: (\S+)\)", line):
            gpu = whole[1]
        elif part := re.match(r"\s+MIG (\S+)\s.*\(UUID: (\S+)\)", line):
            found.append((gpu, part[2], part[1]))
    return found


def gpus(select: str = "") -> list[Gpu]:
    """The GPUs of this machine, whole; empty without nvidia-smi.

    Args:
        select: index or UUID of one GPU; "" for all.
    """
    return read_gpus(query_gpus(_GPU_FIELDS, select=select))


def visible_gpu() -> Gpu | None:
    """The GPU, or the part of one, that CUDA calls device 0: the first of ``CUDA_VISIBLE_DEVICES``, or of all.

    A number there is taken as nvidia-smi counts, which is CUDA's order under ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` and
    wherever all GPUs are alike.
    """
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    migs = read_migs(_nvidia_smi("-L"))
    if wanted.startswith("MIG-"):
        # A UUID may be shortened, as long as it is unique.
        gpu, _, profile = next((one for one in migs if one[1].startswith(wanted)), ("", "", ""))
        found = gpus(gpu) if gpu else []
    else:
        found = gpus(wanted)
        # Where a GPU is cut into instances, CUDA takes the first.
        profile = next((name for gpu, _, name in migs if found and gpu == found[0].uuid), "")
    return dataclasses.replace(found[0], mig=profile) if found else None


# -- the hardware key ------------------------------------------------------------------------------------------


def _number(text: str) -> float | None:
    """A number, or ``None`` for what nvidia-smi writes in place of one (``[N/A]``)."""
    try:
        return float(text)
    except ValueError:
        return None
