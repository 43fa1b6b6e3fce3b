"""The CPU, as Linux describes it.  What a system does not report is empty or zero; nothing here raises.

``/proc/cpuinfo`` is read here and not by py-cpuinfo, which takes more than a second and lists instruction sets under
further names: hardware keys, and patterns over instruction sets, would change with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import platform
import re
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Cpu:
    """A CPU.

    Attributes:
        model: the name as the vendor wrote it, ``AMD EPYC 7763 64-Core Processor``; "" on Arm, which has none.
        generation: what tells two CPUs apart whose name does not: ``f25m1`` (family and model) on x86, ``41d40``
            (implementer and part, hexadecimal) on Arm; "" where unknown.
        flags: instruction sets as Linux spells them, ``avx512f``.
        logical: cores that the system schedules on.
    """

    model: str = ""
    generation: str = ""
    flags: tuple[str, ...] = ()
    logical: int = 0

    @property
    def name(self) -> str:
        """The model, or else what Python reports of the processor."""
        return self.model or platform.processor() or platform.machine()


def read_cpuinfo(text: str) -> Cpu:
    """The CPU of the text of ``/proc/cpuinfo``: a paragraph of ``field : value`` for each logical core."""
    cores: list[dict[str, str]] = []
    for paragraph in text.split("\n\n"):
        pairs = (line.partition(":") for line in paragraph.splitlines())
        fields = {name.strip(): value.strip() for name, _, value in pairs}
        if "processor" in fields:
            cores.append(fields)
    if not cores:
        return Cpu()
    first = cores[0]
    generation = ""
    if "cpu family" in first:
        generation = f"f{first['cpu family']}m{first.get('model', '')}"
    elif "CPU part" in first:
        generation = (first.get("CPU implementer", "") + first["CPU part"]).replace("0x", "")
    return Cpu(
        model=first.get("model name", ""),
        generation=generation,
        flags=tuple(first.get("flags", first.get("Features", "")).split()),
        logical=len(cores),
    )


@functools.cache
def cpu() -> Cpu:
    """The CPU of this machine; an empty :class:`Cpu` where there is no ``/proc/cpuinfo``."""
    try:
        return read_cpuinfo(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return Cpu()


def cpu_mhz(proc: Path = Path("/proc/cpuinfo"), root: Path = Path("/sys/devices/system/cpu")) -> tuple[float, ...]:
    """Clock of each core that this process may run on, in MHz, now; empty where the system does not report it.

    A virtual machine often reads the nominal clock.
    """
    cores = sorted(os.sched_getaffinity(0))
    scaled = []
    for core in cores:
        with contextlib.suppress(OSError, ValueError):
            scaled.append(int((root / f"cpu{core}" / "cpufreq" / "scaling_cur_freq").read_text()) / 1e3)
    if scaled:
        return tuple(scaled)
    try:
        text = proc.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ()
    pairs = re.findall(r"^processor\s*:\s*(\d+)$.*?^cpu MHz\s*:\s*([\d.]+)$", text, re.MULTILINE | re.DOTALL)
    return tuple(float(mhz) for core, mhz in pairs if int(core) in cores)


def last_level_cache(root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Bytes of last-level cache that this process's cores reach together; 0 where the system does not report it.

    A CPU of several core complexes has a last-level cache for each; those of the cores that this process may run on
    are added.
    """
    found: dict[str, int] = {}
    for core in os.sched_getaffinity(0):
        levels: list[tuple[int, str, int]] = []
        for index in (root / f"cpu{core}" / "cache").glob("index[0-9]*"):
            with contextlib.suppress(OSError, ValueError):
                size = re.fullmatch(r"(\d+)([KMG]?)", (index / "size").read_text().strip())
                if size:
                    amount = int(size[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[size[2]]
                    shared = (index / "shared_cpu_list").read_text().strip()
                    levels.append((int((index / "level").read_text()), shared, amount))
        if levels:
            _, shared, amount = max(levels)
            found[shared] = amount
    return sum(found.values())


def slug(text: str) -> str:
    """``text`` in the characters of a folder: lower-case letters, digits, and single dashes between them."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
