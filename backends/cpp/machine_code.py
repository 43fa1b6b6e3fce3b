"""Machine code of compiled kernels: which vectors and matrix units of an x86 CPU it uses, by disassembling it.

What a kernel was generated for stands in its compile command; what it became stands here.  GNU's ``objdump`` or LLVM's
is used, one of which a C++ compiler brings along.  No torch is imported.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from pytest_gemm.machine.isa import ISAS
from pytest_gemm.storage.datafile import document

_TABLE: Final = document(Path(__file__).with_name("machine_code.toml"))["unit"]
_UNITS: Final[Mapping[str, re.Pattern[str]]] = {unit["name"]: re.compile(unit["mark"]) for unit in _TABLE}
_LEVELS: Final[Mapping[str, str]] = {unit["name"]: unit["level"] for unit in _TABLE if "level" in unit}

_SECONDS: Final = 120.0


class CodeError(RuntimeError):
    """Machine code that cannot be read: there is no disassembler, or it fails."""


def disassembler() -> str:
    """Path of ``objdump`` or ``llvm-objdump``, "" where there is neither."""
    return shutil.which("objdump") or shutil.which("llvm-objdump") or ""


def units(text: str) -> frozenset[str]:
    """What a disassembly has: ``ymm zmm evex vnni bf16 amx amx_fp16``, and ``brgemm`` for calls of oneDNN's.

    Args:
        text: in AT&T syntax, a line for each instruction.
    """
    return frozenset(name for name, mark in _UNITS.items() if mark.search(text))


def level(found: Iterable[str]) -> str:
    """The lowest of ``machine.isa.ISAS`` that executes code with these units, "" where none has to."""
    return max((_LEVELS[name] for name in found if name in _LEVELS), key=ISAS.index, default="")


def units_of(path: Path) -> frozenset[str]:
    """The units in the code of a compiled library; read once for each file.

    Raises:
        CodeError: when it cannot be read.
    """
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise CodeError(f"{path} cannot be read: {error.strerror}") from None
    return _units_of(path, changed)


@functools.lru_cache(maxsize=4096)
def _units_of(path: Path, _changed: int) -> frozenset[str]:
    tool = disassembler()
    if not tool:
        raise CodeError("neither objdump nor llvm-objdump is there")
    try:
        done = subprocess.run(
            [tool, "-d", "--no-show-raw-insn", str(path)], capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CodeError(f"{tool} cannot read {path}: {error}") from None
    return units(done.stdout)
