"""What each library uses of a processor's instruction sets."""

from __future__ import annotations

import platform
import subprocess
import sys
from typing import Final

import pytest

from pytest_gemm.machine import code_key, isa, processor
from pytest_gemm.machine.key import hardware_key
from pytest_gemm.machine.processor import Cpu

_AVX512: Final = ("sse4_1", "sse4_2", "avx", "avx2", "fma", "f16c")
CASCADE_LAKE: Final = (*_AVX512, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni")
GENOA: Final = (*CASCADE_LAKE, "avx512_bf16")
XEON: Final = (*GENOA, "avx512_fp16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16")
# AMX without AVX512_FP16, as a virtual machine may show it.
HIDDEN: Final = tuple(flag for flag in XEON if flag != "avx512_fp16")
ALDER_LAKE: Final = (*_AVX512, "avx_vnni")


@pytest.fixture(autouse=True)
def no_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("cap", "flags", "has", "lacks"),
    [
        ("", CASCADE_LAKE, "onednn:avx512_vnni", "onednn:avx512_bf16"),
        ("", GENOA, "onednn:avx512_bf16", "onednn:amx_bf16"),
        ("", XEON, "onednn:amx_bf16", "onednn:amx_fp16"),
        ("", HIDDEN, "onednn:avx512_bf16", "onednn:amx_bf16"),  # oneDNN's level is incomplete
        ("", HIDDEN, "amx_bf16", "avx512_fp16"),  # generated code needs no level of oneDNN's
        ("", XEON, "aten:avx512f", "aten:avx512_vnni"),
        ("ONEDNN_MAX_CPU_ISA=AVX512_CORE", XEON, "onednn:avx512f", "onednn:avx512_vnni"),
        ("DNNL_MAX_CPU_ISA=avx512_core_vnni", XEON, "onednn:avx512_vnni", "onednn:avx512_bf16"),
        ("ONEDNN_MAX_CPU_ISA=AVX2", XEON, "onednn:avx2", "onednn:avx_vnni"),
        ("ONEDNN_MAX_CPU_ISA=AVX2_VNNI", ALDER_LAKE, "onednn:avx_vnni", "onednn:avx512f"),
        ("ONEDNN_MAX_CPU_ISA=AVX512_CORE_AMX", CASCADE_LAKE, "onednn:avx512_vnni", "onednn:amx_tile"),
        ("ONEDNN_MAX_CPU_ISA=AVX2", XEON, "amx_bf16", "onednn:avx512f"),  # generated code is not capped
        ("ONEDNN_MAX_CPU_ISA=FASTEST", XEON, "onednn:amx_bf16", "onednn:amx_fp16"),  # oneDNN does not know it
        ("ATEN_CPU_CAPABILITY=avx2", XEON, "avx2", "avx512f"),
        ("ATEN_CPU_CAPABILITY=avx2", XEON, "onednn:amx_bf16", "aten:avx512f"),
        ("ATEN_CPU_CAPABILITY=avx512", XEON, "amx_bf16", "aten:amx_bf16"),
        ("ATEN_CPU_CAPABILITY=default", XEON, "sse4_2", "avx2"),
        ("MKL_ENABLE_INSTRUCTIONS=AVX2", XEON, "mkl:avx2", "mkl:avx512f"),
        ("ATEN_CPU_CAPABILITY=default", XEON, "cpu:amx_int8", "aten:avx2"),  # cpuinfo asks the processor
    ],
)
def test_the_words_of_a_processor(
    monkeypatch: pytest.MonkeyPatch, cap: str, flags: tuple[str, ...], has: str, lacks: str
) -> None:
    if cap:
        monkeypatch.setenv(*cap.split("="))
    words = isa.words(flags, "", "x86_64")
    assert has in words
    assert lacks not in words
    assert words[0] == "x86_64"


def test_a_level_that_code_is_generated_for_is_that_of_onednn_s_questions_too() -> None:
    words = isa.words(XEON, "avx2", "x86_64")
    assert {"avx2", "onednn:avx2"} <= set(words)
    assert not {"avx512f", "onednn:avx512f"} & set(words)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are x86's levels")
@pytest.mark.parametrize("cap", ["", "AVX2", "AVX512_CORE", "AVX512_CORE_BF16", "AVX512_CORE_FP16"])
def test_onednn_and_aten_agree(monkeypatch: pytest.MonkeyPatch, cap: str) -> None:
    if cap:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", cap)
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    words = isa.words(processor.cpu().flags, "", "x86_64")
    program = (
        "import torch; print(torch.ops.mkldnn._is_mkldnn_bf16_supported(), torch.backends.cpu.get_cpu_capability())"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    level = next((name for name in ("avx512f", "avx2") if f"aten:{name}" in words), "default")
    assert said == [str("onednn:avx512f" in words), {"avx512f": "AVX512"}.get(level, level.upper())]


def test_times_under_a_cap_have_a_key_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    xeon = Cpu("Intel Xeon 8480C", "", XEON)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX")
    assert hardware_key("cpu", 4, on=xeon) == "intel-xeon-8480c-amx-4c"  # it takes nothing away
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "avx2")
    assert hardware_key("cpu", 4, on=xeon) == "intel-xeon-8480c-amx-4c"  # the newer name is set
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "avx2")
    assert hardware_key("cpu", 4, on=xeon) == "intel-xeon-8480c-amx-onednn-avx2-mkl-avx2-4c"


def test_code_compiled_under_a_cap_is_not_taken_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "cpu", lambda: Cpu("Intel Xeon 8480C", "", XEON))
    code_key.code_key.cache_clear()
    free = code_key.code_key()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    code_key.code_key.cache_clear()
    capped = code_key.code_key()
    code_key.code_key.cache_clear()
    assert capped != free
