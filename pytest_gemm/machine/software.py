"""Versions of the software that decides what a kernel is and how fast it runs."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import zlib
from collections.abc import Iterable, Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Final

from packaging.version import InvalidVersion, Version

from pytest_gemm.machine.gpus import gpus
from pytest_gemm.machine.key import Device

# Distributions whose versions decide what is computed, and how fast; those that are not installed are left out.
PACKAGES: Final = ("torch", "triton", "nvidia-cutlass", "nvidia-cutlass-dsl", "nvidia-cutlass-operators")
# The newest release of PyTorch that this version was tested with.
NEWEST_TORCH: Final = "2.15"
# The oldest release that is supported, as pyproject.toml has it.
OLDEST_TORCH: Final = "2.11"
# Only what a GPU runs depends on these.
_CUDA_DISTRIBUTIONS: Final = ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12")


def installed(names: Iterable[str]) -> dict[str, str]:
    """Versions of distributions; those that are not installed are left out."""
    versions = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def software(device: Device) -> dict[str, str]:
    """Versions by name of what may change a time on ``device``; what is not installed is left out.

    Python and the distributions of :data:`PACKAGES`; for CUDA the driver, the CUDA that torch was built with,
    cuBLAS and the nvcc on the path; for the CPU the C++ compiler that Inductor calls.
    """
    versions = {"python": platform.python_version()}
    versions |= installed((*PACKAGES, *(_CUDA_DISTRIBUTIONS if device == "cuda" else ())))
    if device == "cpu":
        return versions | compiler()
    driver = next((gpu.driver for gpu in gpus()), "")
    found = {"cuda": _torch_cuda(), "driver": driver, "nvcc": nvcc("nvcc")}
    return versions | {name: version for name, version in found.items() if version}


def unknown_torch() -> str:
    """What to say of an installed torch that is newer than :data:`NEWEST_TORCH`, "" of any other; imports nothing."""
    version, release = _installed_torch()
    known = f"torch {version} is newer than {NEWEST_TORCH}, the newest release that pytest-gemm was tested with"
    return f"{known}: it is judged by the code that it generates" if release > Version(NEWEST_TORCH).release else ""


def old_torch() -> str:
    """What to say of an installed torch that is older than :data:`OLDEST_TORCH`, "" of any other; imports nothing."""
    version, release = _installed_torch()
    known = f"torch {version} is older than {OLDEST_TORCH}, the oldest release that pytest-gemm supports"
    is_old = release and release < Version(OLDEST_TORCH).release
    return f"{known}: pip install 'torch>={OLDEST_TORCH}'" if is_old else ""


def _installed_torch() -> tuple[str, tuple[int, ...]]:
    """The version of the installed torch, and the first two numbers of it; none where it cannot be read."""
    try:
        version = metadata.version("torch")
        return version, Version(version).release[:2]
    except (metadata.PackageNotFoundError, InvalidVersion):
        return "", ()


def onednn() -> str:
    """The oneDNN that torch was built with, from its header; "" where it is not there."""
    text = _file_of_torch("include/oneapi/dnnl/dnnl_version.h")
    return ".".join(re.findall(r"^#define DNNL_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)$", text, re.MULTILINE))


def _torch_cuda() -> str:
    """The CUDA that torch was built with."""
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", _file_of_torch("version.py"), re.MULTILINE)
    return found[1] if found else ""


def inductor() -> dict[str, str]:
    """A digest of each file of the installed ``torch/_inductor`` that is a program or a template, by its path there."""
    found = {}
    for root in _folders_of_torch():
        for folder, _, names in os.walk(top := Path(root, "_inductor")):
            for path in (Path(folder, name) for name in names if name.endswith((".py", ".jinja"))):
                with contextlib.suppress(OSError):
                    found[path.relative_to(top).as_posix()] = f"{zlib.crc32(path.read_bytes()):08x}"
    return found


def differing(before: Mapping[str, str], after: Mapping[str, str], most: int = 8) -> str:
    """The files by which two installed ``torch/_inductor`` differ, at most so many by name; "" where one is unknown."""
    both = {**before, **after} if before and after else {}
    names = sorted(name for name in both if before.get(name) != after.get(name))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if names[most:] else "")


def _folders_of_torch() -> Iterable[str]:
    """Where torch is installed; finding a package imports nothing."""
    spec = util.find_spec("torch")
    return (spec.submodule_search_locations or ()) if spec else ()


def _file_of_torch(name: str) -> str:
    """The text of a file of torch, "" where it is not there."""
    for folder in _folders_of_torch():
        with contextlib.suppress(OSError):
            return Path(folder, name).read_text(encoding="utf-8")
    return ""


def nvcc(program: str) -> str:
    """The version of a CUDA compiler, ``13.0.88``; "" where it is not there or does not tell."""
    found = re.search(r"release [\d.]+, V([\d.]+)", _output(program, "--version"))
    return found[1] if found else ""


def compiler() -> dict[str, str]:
    """The compiler that ``CXX`` names, else g++ or c++, with its version."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "c++")):
        if version := version_of(name):
            return {Path(name).name: version}
    return {}


def version_of(compiler: str) -> str:
    """The version of a C++ compiler; "" where it is not there or does not tell."""
    # gcc prints its full version for the first option; other compilers know the second only.
    found = re.search(r"\d+(?:\.\d+)*", _output(compiler, "-dumpfullversion", "-dumpversion"))
    return found[0] if found else ""


def _output(program: str, *arguments: str) -> str:
    """What a program prints; "" when it is not installed or fails."""
    path = shutil.which(program)
    if path is None:
        return ""
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
