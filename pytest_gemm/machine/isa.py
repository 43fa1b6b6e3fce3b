"""Instruction sets: which levels this processor has, the flags of each, and what each library uses of them."""

from __future__ import annotations

import functools
import os
import platform
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pytest_gemm.machine.processor import slug

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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
    return next((name for flag, name in _ISA_LEVELS if flag in flags), slug(platform.machine()))


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
    """Keep the flags guaranteed at a level: those of a machine whose best level it is.

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


# -- what a library uses of it -------------------------------------------------------------------------------

# What multiplies for PyTorch beside the code that Inductor generates, ""; cpu is the processor itself, which ATen asks
# before it calls oneDNN.
LIBRARIES: Final = ("cpu", "aten", "onednn", "mkl")
# What a cap can take away; the rest of a processor's flags stays.
_VECTOR: Final = re.compile(r"avx|amx|fma|f16c")


@functools.cache
def _libraries() -> dict[str, Any]:
    """The table, each level with all of its flags."""
    table = tomllib.loads(Path(__file__).with_name("libraries.toml").read_text(encoding="utf-8"))
    for row in table.values():
        flags: dict[str, frozenset[str]] = {}
        for name, level in row["level"].items():
            flags[name] = frozenset(level.get("flags", ())) | flags.get(level.get("on"), frozenset())
        row["level"] = flags
    return table


def _cap(library: str) -> str:
    """The level at which the environment caps a library; "" for none, as for a value that the library does not know."""
    row = _libraries()[library or "inductor"]
    value = next(filter(None, map(os.environ.get, row["variables"])), "").lower()
    return value if value in row["level"] else ""


def caps(flags: Sequence[str]) -> dict[str, str]:
    """The level at which the environment caps a library, by library, where it takes something away from these flags."""
    return {name: _cap(name) for name in LIBRARIES if used(flags, name) != used(flags, name, capped=False)}


def used(flags: Sequence[str], library: str = "", *, capped: bool = True) -> tuple[str, ...]:
    """The flags of a processor that a library uses: those of its complete levels below its cap.

    A level counts as a whole: oneDNN uses no AMX where a virtual machine hides AVX512_FP16, which its level has too.

    Args:
        flags: of the processor.
        library: one of :data:`LIBRARIES`; "": generated code.
        capped: by the environment; ``False``: as it would be without.

    Example::

        >>> os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"
        >>> used(("sse4_1", "avx", "avx2", "fma", "f16c", "avx512f"), "onednn")
        ('sse4_1', 'avx', 'avx2', 'fma', 'f16c')
    """
    row, cap = _libraries()[library or "inductor"], _cap(library) if capped else ""
    if row["uses_all"] and not cap:
        return tuple(flags)
    levels: Collection[frozenset[str]] = row["level"].values()
    most = row["level"][cap] if cap else frozenset().union(*levels)
    complete = [level for level in levels if level <= most and level <= set(flags)]
    allowed = frozenset().union(*complete)
    return tuple(flag for flag in flags if flag in allowed or not _VECTOR.match(flag))


def words(flags: Sequence[str], isa: str, architecture: str) -> tuple[str, ...]:
    """The words of a processor in a ledger: its architecture, flags of generated code, and ``LIBRARY:FLAG``.

    Args:
        flags: of the processor.
        isa: what code is generated for, one of :data:`ISAS`; "": what Inductor takes.
        architecture: as ``platform.machine`` names it.
    """
    generated = flags_at(flags, isa) if isa else used(flags)
    named = [flag for flag in flags_at(flags, isa) if flag in ISA_NAMES]
    libraries = (f"{library}:{flag}" for library in LIBRARIES for flag in used(named, library))
    return (architecture, *generated, *libraries)
