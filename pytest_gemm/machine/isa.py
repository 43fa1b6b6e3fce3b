"""Instruction sets: which levels this processor has, and the flags of each."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Final

from pytest_gemm.machine.processor import slug

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
