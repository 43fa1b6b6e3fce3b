"""The machine and its software: the one place that reads ``/proc/cpuinfo`` and asks nvidia-smi.

No torch is imported and no CUDA context is made, so a controller that must not touch a device can ask too.  What a
system does not tell is empty, zero or ``None``; nothing here raises.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Final, Literal

__all__ = [
    "DISTRIBUTIONS",
    "ISAS",
    "ISA_NAMES",
    "Cpu",
    "Gpu",
    "cpu",
    "cpu_mhz",
    "gpus",
    "hardware_key",
    "flags_at",
    "flags_of",
    "isa_level",
    "isas",
    "last_level_cache",
    "query_gpus",
    "read_cpuinfo",
    "read_gpus",
    "read_migs",
    "software",
    "visible_gpu",
]

Device = Literal["cpu", "cuda"]

# -- the CPU ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cpu:
    """What Linux says of the CPU.

    Attributes:
        model: the name as the vendor wrote it, ``AMD EPYC 7763 64-Core Processor``; "" on Arm, which has none.
        generation: what tells two CPUs apart whose name does not: ``f25m1`` (family and model) on x86, ``41d40``
            (implementer and part, hexadecimal) on Arm; "" where unknown.
        flags: instruction sets as Linux spells them, ``avx512f``.
        logical: cores that the system schedules on.
        physical: cores without their hyper-threads; ``None`` where the system does not tell.
    """

    model: str = ""
    generation: str = ""
    flags: tuple[str, ...] = ()
    logical: int = 0
    physical: int | None = None

    @property
    def name(self) -> str:
        """The model, or whatever else Python knows of the processor."""
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
    places = {(c["physical id"], c["core id"]) for c in cores if "physical id" in c and "core id" in c}
    return Cpu(
        model=first.get("model name", ""),
        generation=generation,
        flags=tuple(first.get("flags", first.get("Features", "")).split()),
        logical=len(cores),
        physical=len(places) or None,
    )


@functools.cache
def cpu() -> Cpu:
    """The CPU of this machine; an empty :class:`Cpu` where there is no ``/proc/cpuinfo``."""
    try:
        return read_cpuinfo(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return Cpu()


def cpu_mhz(proc: Path = Path("/proc/cpuinfo"), root: Path = Path("/sys/devices/system/cpu")) -> tuple[float, ...]:
    """Clock of each core that this process may run on, in MHz, as it is now; empty where the system does not tell.

    A virtual machine is often told the nominal clock, whatever the core does.
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


# Names of instruction sets in a hardware key by what their presence shows, the best first: the levels between which the
# rate of a matrix product changes by a factor.
_ISA_LEVELS: Final = (
    ("amx_tile", "amx"),
    ("avx512_bf16", "avx512-bf16"),
    ("avx512_vnni", "avx512-vnni"),
    ("avx512f", "avx512"),
    ("avx2", "avx2"),
    ("avx", "avx"),
    ("sse4_2", "sse4"),
    ("sme", "sme"),
    ("sve2", "sve2"),
    ("sve", "sve"),
    ("asimd", "neon"),
)


def isa_level(flags: Sequence[str]) -> str:
    """The best instruction set among ``flags`` under its name in a hardware key; the architecture where none is known.

    Example::

        >>> isa_level(("fpu", "avx2", "avx512f", "avx512_vnni"))
        'avx512-vnni'
    """
    return next((name for flag, name in _ISA_LEVELS if flag in flags), _slug(platform.machine()))


# The levels for which Inductor generates different code on x86, the lowest first, each with the flags that it adds to
# those before it (Linux's names).  It has no level of its own for AVX512_BF16, which an AMX machine has.
_LEVELS: Final[Mapping[str, tuple[str, ...]]] = {
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    "avx512_vnni": ("avx512_vnni",),
    "amx": ("amx_tile", "amx_bf16", "amx_int8"),
    "amx_fp16": ("amx_fp16",),
}

# Names that Linux gives to what matters to a matrix product, and those of CUDA's architectures.
ISA_NAMES: Final = (
    *(flag for flag, _ in _ISA_LEVELS),
    *(flag for flags in _LEVELS.values() for flag in flags),
    *("sse", "sse2", "ssse3", "sse4_1", "avx_vnni", "avx_vnni_int8"),
    *("avx_vnni_int16", "avx_ifma", "avx_ne_convert", "avx10_1", "avx10_2"),
    *("avx512ifma", "avx512vbmi", "avx512_vbmi2", "avx512_bitalg"),
    *("avx512_vpopcntdq", "avx512_fp16", "amx_complex", "amx_avx512"),
    *("fp", "fphp", "asimdhp", "asimddp", "asimdfhm", "i8mm", "bf16"),
    *("svei8mm", "svebf16", "svef32mm", "svef64mm", "sve2p1", "sve_b16b16", "sme2"),
    *("smef32f32", "smef16f32", "smeb16f32", "smei8i32"),
    *("fpsimd", "neon", "vfpv4"),
    *(f"sm_{number}" for number in (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103)),
    *(f"sm_{number}" for number in (110, 120, 121)),
)

# Names of these levels, the lowest first: values of ``--gemm-isa``.
ISAS: Final = tuple(_LEVELS)


def flags_of(level: str) -> tuple[str, ...]:
    """Flags that an x86 machine of a level has for certain; none for another word.

    Args:
        level: as :func:`isa_level` calls it.

    Example::

        >>> flags_of("avx512-vnni")[-3:]
        ('avx512dq', 'avx512vl', 'avx512_vnni')
    """
    name = {"avx512-vnni": "avx512_vnni", "avx512-bf16": "avx512_vnni"}.get(level, level)
    return tuple(flag for one in ISAS[: ISAS.index(name) + 1] for flag in _LEVELS[one]) if name in ISAS else ()


def isas(flags: Sequence[str]) -> tuple[str, ...]:
    """The levels of :data:`ISAS` that a CPU with these flags executes, the lowest first.

    Example::

        >>> isas(("avx2", "fma", "f16c", "avx512f"))
        ('avx2',)
    """
    found: list[str] = []
    for name, needed in _LEVELS.items():
        if not set(needed) <= set(flags):
            break
        found.append(name)
    return tuple(found)


def flags_at(flags: Sequence[str], isa: str) -> tuple[str, ...]:
    """Of these flags those that code of a level may count on: what a machine that ends there would have.

    Args:
        flags: of the CPU.
        isa: one of :data:`ISAS`; "" for the machine's own, which keeps all of them, as its best level does.
    """
    if not isa or isas(flags)[-1:] == (isa,):
        return tuple(flags)
    if isa == "amx":  # such a machine has all of AVX-512 that is older
        return tuple(flag for flag in flags if flag not in _LEVELS["amx_fp16"])
    kept = {flag for name in ISAS[: ISAS.index(isa) + 1] for flag in _LEVELS[name]}
    return tuple(flag for flag in flags if flag in kept or not flag.startswith(("avx512", "avx10", "avx_", "amx")))


def last_level_cache(root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Bytes of last-level cache that this process's cores reach together; 0 where the system does not tell.

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


def _slug(text: str) -> str:
    """``text`` in the characters of a folder: lower-case letters, digits, and single dashes between them."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


# What vendors write around the name of a model.
_DECORATION: Final = re.compile(
    r"\((?:r|tm)\)|\bcpu\b|\bprocessor\b|\b\d+-core\b|@.*|w(?:ith |/ )radeon.*", re.IGNORECASE
)


def _cpu_slug(found: Cpu) -> str:
    """The model without decoration; with the generation where the name is that of a whole family.

    Virtual machines are often told no more than ``AMD EPYC`` or ``Intel Xeon Processor``, whatever they run on.
    """
    name = _slug(_DECORATION.sub(" ", found.model)) or _slug(platform.machine())
    tells = any(letter.isdigit() for letter in name) and bool(found.model)
    return name if tells or not found.generation else f"{name}-{found.generation}"


def hardware_key(device: Device, cores: int, *, on: Cpu | Gpu | None = None) -> str:
    """The name under which figures of this hardware are kept: what must agree for two times to be compared.

    For the CPU: model, best instruction set, cores in use: ``amd-epyc-7763-avx2-4c``.  For CUDA: name of the GPU,
    compute capability, power limit and MIG profile: ``nvidia-h200-sm90-700w``.  A part that cannot be read is left
    out.  Always a legal folder name of ``[a-z0-9-]``.

    Args:
        device: where the case computes.
        cores: threads that compute; without influence on the key of a GPU.
        on: another machine's hardware; this one's when ``None``.

    Returns:
        ``cuda-unknown`` where nvidia-smi does not tell of a GPU.
    """
    if device == "cpu":
        found = on if isinstance(on, Cpu) else cpu()
        return "-".join([_cpu_slug(found), isa_level(found.flags), f"{cores}c"])
    gpu = on if isinstance(on, Gpu) else visible_gpu()
    if gpu is None:
        return "cuda-unknown"
    parts = [_slug(gpu.name)]
    if gpu.architecture:
        parts.append(f"sm{gpu.architecture}")
    if gpu.power_limit is not None:
        parts.append(f"{gpu.power_limit:.0f}w")
    if gpu.mig:
        parts.append(f"mig-{_slug(gpu.mig)}")
    return "-".join(filter(None, parts))


# -- software --------------------------------------------------------------------------------------------------

# Distributions whose versions decide what is computed, and how fast; those that are not installed are left out.
DISTRIBUTIONS: Final = ("torch", "triton", "nvidia-cutlass", "nvidia-cutlass-dsl", "nvidia-cutlass-operators")
# Only what a GPU runs depends on these.
_CUDA_DISTRIBUTIONS: Final = ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12")


def software(device: Device) -> dict[str, str]:
    """Versions by name of whatever may change a time on ``device``; what is not there is left out.

    Python and the distributions of :data:`DISTRIBUTIONS`; for CUDA the driver, the CUDA that torch was built with,
    cuBLAS and the nvcc on the path; for the CPU the C++ compiler that Inductor calls.
    """
    versions = {"python": platform.python_version()}
    for name in (*DISTRIBUTIONS, *(_CUDA_DISTRIBUTIONS if device == "cuda" else ())):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    asks: dict[str, Callable[[], str]] = {"cuda": _torch_cuda, "driver": _driver, "nvcc": _nvcc}
    for name, ask in asks.items() if device == "cuda" else ():
        if answer := ask():
            versions[name] = answer
    return versions if device == "cuda" else versions | _compiler()


def _driver() -> str:
    return next((gpu.driver for gpu in gpus()), "")


def _torch_cuda() -> str:
    """The CUDA that torch was built with, from the text of ``torch/version.py``; finding a package imports nothing."""
    spec = util.find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        with contextlib.suppress(OSError):
            text = Path(folder, "version.py").read_text(encoding="utf-8")
            if found := re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE):
                return found[1]
    return ""


def _nvcc() -> str:
    found = re.search(r"release [\d.]+, V([\d.]+)", _said_by("nvcc", "--version"))
    return found[1] if found else ""


def _compiler() -> dict[str, str]:
    """The compiler that ``CXX`` names, else g++ or c++, with its version."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "c++")):
        # gcc gives its full version to the first option; a compiler that only knows the second answers to that.
        if found := re.search(r"\d+(?:\.\d+)+", _said_by(name, "-dumpfullversion", "-dumpversion")):
            return {Path(name).name: found[0]}
    return {}


def _said_by(program: str, *arguments: str) -> str:
    """What a program prints; "" when there is none or it fails."""
    path = shutil.which(program)
    if path is None:
        return ""
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
