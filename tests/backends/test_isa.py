"""Code for another instruction set: which levels there are, how one is forced, and what shows that it was."""

from __future__ import annotations

import contextlib
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import judged

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.api.proof import Generation, Proof
from pytest_gemm.api.protocols import unsupported
from pytest_gemm.api.registry import Registry
from pytest_gemm.api.request import DEFAULT, BuildRequest
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.backends.cpp import backend as cpp
from pytest_gemm.backends.cpp import machine_code, micro_kernels
from pytest_gemm.backends.cpp.backend import CppBackend, compiler
from pytest_gemm.backends.inductor import backend as inductor
from pytest_gemm.backends.inductor import cpu_isa, torch_compat
from pytest_gemm.backends.inductor.compilation import CompileSpec
from pytest_gemm.config import values
from pytest_gemm.config.config import GemmConfig
from pytest_gemm.core.case_id import CaseId, Mode
from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.failures import findings
from pytest_gemm.failures.text import Rerun
from pytest_gemm.ledger.entry import Environment
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.machine import isa as isa_module
from pytest_gemm.machine import processor
from pytest_gemm.operands import tensors
from pytest_gemm.plugin import reports, selection
from pytest_gemm.problem.problem import Problem
from pytest_gemm.record import lines as records

MM = Problem.parse("mm:f32:nn:8x9x10")
TWIN = Outcome(CaseId("cpp", MM.line, mode=Mode.AOTI, isa="avx2"), "rand", 0, Status.INCORRECT)
EPYC = ("fpu", "avx", "avx2", "fma", "f16c", "avx_vnni")
SKYLAKE = (*EPYC, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512ifma")
ICE_LAKE = (*SKYLAKE, "avx512_vnni", "avx512_bitalg")
SAPPHIRE_RAPIDS = (*ICE_LAKE, "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")

HERE = isa_module.isas(processor.cpu().flags)
needs_vectors = pytest.mark.skipif(not HERE, reason="needs an x86 CPU with AVX2")


@pytest.fixture
def shared_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's best level compiles with the commands that native has: what other tests compiled is there already."""
    native = inductor.cache_dir()
    for module in (inductor, cpp):
        monkeypatch.setattr(module, "cache_dir", lambda *_: native)


# -- levels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "levels"),
    [
        (("fpu", "neon"), ()),
        (SKYLAKE[len(EPYC) :], ()),  # a level without those below it is none
        (EPYC, ("avx2",)),
        (SKYLAKE, ("avx2", "avx512")),
        (ICE_LAKE, ("avx2", "avx512", "avx512_vnni")),
        (SAPPHIRE_RAPIDS, ("avx2", "avx512", "avx512_vnni", "amx")),
        ((*SAPPHIRE_RAPIDS, "amx_fp16"), isa_module.ISAS),
    ],
)
def test_which_levels_a_cpu_executes(flags: tuple[str, ...], levels: tuple[str, ...]) -> None:
    assert isa_module.isas(flags) == levels


@pytest.mark.parametrize(
    ("isa", "gone", "kept"),
    [
        ("avx2", {"avx512f", "avx512ifma", "avx512_vnni", "amx_tile", "avx_vnni"}, {"fpu", "avx2", "fma"}),
        ("avx512", {"avx512ifma", "avx512_vnni", "amx_tile", "avx_vnni"}, {"avx2", "avx512f", "avx512vl"}),
        ("avx512_vnni", {"avx512_bf16", "amx_tile"}, {"avx512f", "avx512_vnni"}),
        ("amx", {"amx_fp16"}, {"avx512_bf16", "avx512_fp16", "avx512ifma", "amx_tile", "avx_vnni"}),
        ("amx_fp16", set(), {"amx_fp16", "avx512_fp16"}),
        ("", set(), {"amx_fp16", "avx512_fp16"}),
    ],
)
def test_what_code_of_a_level_may_count_on(isa: str, gone: set[str], kept: set[str]) -> None:
    left = set(isa_module.flags_at((*SAPPHIRE_RAPIDS, "amx_fp16"), isa))
    assert kept <= left
    assert not gone & left


def test_at_its_best_level_a_cpu_is_what_it_is() -> None:
    zen4 = (*ICE_LAKE, "avx512_bf16", "avx_vnni")
    assert isa_module.flags_at(zen4, "avx512_vnni") == zen4
    assert "avx512_bf16" not in isa_module.flags_at(zen4, "avx512")


# -- the option ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "here", "isas", "lacking"),
    [
        ("", SKYLAKE, (), ()),
        ("native", EPYC, ("",), ()),
        ("avx512,native,avx2", SKYLAKE, ("avx512", "", "avx2"), ()),
        ("all", SKYLAKE, ("avx2", "avx512"), ("avx512_vnni", "amx", "amx_fp16")),
        ("native,all", EPYC, ("", "avx2"), ("avx512", "avx512_vnni", "amx", "amx_fp16")),
        ("all", ("neon",), (), isa_module.ISAS),
    ],
)
def test_the_levels_that_are_asked_for(
    text: str, here: tuple[str, ...], isas: tuple[str, ...], lacking: tuple[str, ...]
) -> None:
    assert values.isas(text, isa_module.isas(here)) == (isas, lacking)


def test_a_level_that_is_not_in_the_cpu_is_an_error() -> None:
    with pytest.raises(ValueError, match="this CPU does not execute amx; it can: native, avx2, avx512, all"):
        values.isas("avx2,amx", isa_module.isas(SKYLAKE))


def test_what_all_left_out_is_said_in_the_summary() -> None:
    settings = GemmConfig(Registry(), isa=((), ("amx", "amx_fp16")))
    (note,) = settings.notes
    assert note.endswith("does not execute: amx, amx_fp16")


# -- a variant is a case of its own -----------------------------------------------------------------------------------


def test_only_what_generates_code_for_the_cpu_has_variants() -> None:
    mine = CallableBackend("mine", torch.matmul, frozenset({"f32"}), True, None, True)
    asked: Any = SimpleNamespace(
        isas=("avx2", ""), modes=(), thread_axis=(), machine_of=lambda _: None, device_of=lambda _: "cpu"
    )

    def levels(backend: CppBackend | CallableBackend | AtenBackend) -> list[str]:
        return [case.isa for case in selection._axes(backend, asked, timed=False)]

    assert levels(CppBackend()) == ["avx2", ""]
    for other in (mine, AtenBackend()):
        assert levels(other) == [""]
        assert unsupported(other, MM, DEFAULT) is None
        reason = unsupported(other, MM, BuildRequest(isa="avx2"))
        assert reason is not None
        assert f"{other.name} generates no code for the CPU" in reason.reason.text


def test_a_level_shows_in_id_report_rerun_line_junit_and_record() -> None:
    assert str(CaseId("cpp", MM.line, isa="avx512_vnni")) == f"cpp@avx512_vnni-{MM.line}"
    case = CaseId("cpp", MM.line, mode=Mode.CPP_WRAPPER, isa="avx2")
    assert selection.case_id(f"test_it.py::test_product[{case}]") == case
    text = findings.text(findings.Finding([TWIN]), Rerun("test_it.py").line(TWIN))
    assert f"incorrect: {MM.line} on cpp@aoti@avx2: " in text
    assert text.endswith("--gemm-isa=avx2")
    assert records.from_record(records.to_record(TWIN)) == TWIN
    assert ("gemm_isa", "avx2") in reports.junit_properties([TWIN])


@pytest.mark.parametrize(
    ("patterns", "isa", "speaks"),
    [
        ('["avx2", "!avx512*"]', "avx2", True),  # generated as where there is no AVX-512
        ('["avx2", "!avx512*"]', "avx512", False),
        ('["avx2", "!avx512*"]', "", False),
        ('"avx512*"', "avx2", False),
        ('"amx_bf16"', "avx512_vnni", False),
        ('["avx512_vnni", "!amx*"]', "avx512_vnni", True),
        ('"amx_bf16"', "amx", True),
    ],
)
def test_the_ledger_s_instruction_sets_are_those_that_the_kernel_was_generated_for(
    tmp_path: Path, patterns: str, isa: str, speaks: bool
) -> None:
    path = tmp_path / "ledger.toml"
    path.write_text(f'[[known-failure]]\nid = "x"\nreason = "y"\nbackend = "cpp"\nisa = {patterns}\n')
    xeon = Environment("2.13.0", SAPPHIRE_RAPIDS)
    found = Ledger.load(path).match(TWIN, MM, xeon.at(isa))
    assert bool(found) is speaks


# -- the proof -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "units", "level"),
    [
        ("vaddps 8(%rax),%ymm1,%ymm0", {"ymm"}, "avx2"),
        ("vfmadd231ps %zmm1,%zmm2,%zmm3", {"zmm"}, "avx512"),
        ("vmovups (%rax),%ymm17", {"ymm", "evex"}, "avx512"),
        ("vmovups (%rax),%xmm1{%k1}{z}", {"evex"}, "avx512"),
        ("vpdpbusd %zmm1,%zmm2,%zmm3", {"zmm", "vnni"}, "avx512_vnni"),
        ("vcvtneps2bf16 %zmm1,%ymm2", {"zmm", "ymm", "bf16"}, "amx"),
        ("tdpbf16ps %tmm2,%tmm1,%tmm0", {"amx"}, "amx"),
        ("tdpfp16ps %tmm2,%tmm1,%tmm0", {"amx", "amx_fp16"}, "amx_fp16"),
        ("call 1030 <_ZN2at6native7cpublas6brgemmElll@plt>", {"brgemm"}, ""),
        ("mov %rax,%rbx", set(), ""),
    ],
)
def test_units_are_read_in_machine_code(text: str, units: set[str], level: str) -> None:
    found = machine_code.units(f" 10:\t{text}\n")
    assert found == units
    assert machine_code.level(found) == level


@pytest.mark.compiler
@needs_vectors
def test_a_library_is_disassembled(tmp_path: Path) -> None:
    source, library = tmp_path / "tiles.cpp", tmp_path / "tiles.so"
    source.write_text("#include <immintrin.h>\nvoid f() { _tile_zero(0); }\n__m512 g(__m512 a) { return a + a; }\n")
    flags = ("-O1", "-shared", "-fPIC", "-mavx512f", "-mamx-tile")
    subprocess.run([compiler(), *flags, str(source), "-o", str(library)], check=True)
    assert machine_code.units_of(library) == {"zmm", "amx"}
    with pytest.raises(machine_code.CodeError, match="cannot be read"):
        machine_code.units_of(tmp_path / "none.so")


@pytest.mark.parametrize(
    ("chosen", "evidence", "code"),
    [
        ("CppMicroGemmFP32Vec-4x24x1", ("avx2", ("avx2",), "avx2", ("ymm",)), ""),
        ("CppMicroGemmFP32Vec-8x48x1", ("avx512", ("avx512",), "avx512", ("ymm", "zmm")), ""),
        ("CppMicroGemmFP32Vec-8x48x1", ("amx", ("amx",), "avx512", ("zmm",)), ""),
        ("CppMicroGemmRef-1x1x1", ("avx2", ("avx2",), "", ()), ""),
        ("CppMicroGemmAVX512VNNI-6x64x4", ("avx512_vnni", ("avx512_vnni",), "avx512_vnni", ("vnni", "zmm")), ""),
        ("CppMicroGemmAMX-32x32x32", ("amx", ("amx",), "amx", ("amx", "zmm"), ("cpp_micro_gemm_amx_counter",)), ""),
        ("CppMicroBrgemm-32x32x32", ("amx_fp16", ("amx_fp16",), "avx512", ("brgemm", "zmm")), ""),
        # The forcing did nothing, or too much.
        ("CppMicroGemmFP32Vec-8x48x1", ("avx2", ("avx512",), "avx512", ("zmm",)), "other-isa"),
        ("CppMicroGemmFP32Vec-4x24x1", ("avx512", ("avx2",), "avx2", ("ymm",)), "other-isa"),
        ("CppMicroGemmFP32Vec-4x24x1", ("avx2", ("avx2", "amx"), "avx2", ("ymm",)), "other-isa"),
        ("CppMicroGemmFP32Vec-4x24x1", ("avx2", (), "", ()), "other-isa"),
        # The command is right, the code is not: -march=native made more of it.
        ("CppMicroGemmFP32Vec-4x24x1", ("avx2", ("avx2",), "avx512", ("evex", "ymm")), "other-isa"),
        ("CppMicroGemmFP32Vec-8x48x1", ("avx512", ("avx512",), "avx512_vnni", ("vnni", "zmm")), "other-isa"),
        (
            "CppMicroGemmFP32Vec-8x48x1",
            ("avx512", ("avx512",), "avx512", ("zmm",), ("cpp_micro_gemm_amx_counter",)),
            "other-isa",
        ),
        # Another micro-kernel than the one that was chosen.
        ("CppMicroGemmAMX-32x32x32", ("amx", ("amx",), "avx512", ("zmm",)), "other-micro-kernel"),
        ("CppMicroGemmAVX512VNNI-6x64x4", ("amx", ("amx",), "amx", ("amx", "zmm")), "other-micro-kernel"),
        ("CppMicroGemmFP32Vec-8x48x1", ("avx512", ("avx512",), "avx2", ("ymm",)), "other-micro-kernel"),
        ("CppMicroGemmWoQInt4Amx-16x64x64", ("amx", ("amx",), "avx512", ("zmm",)), "other-micro-kernel"),
    ],
)
def test_what_shows_that_a_kernel_is_of_a_level(chosen: str, evidence: tuple[Any, ...], code: str) -> None:
    generation = micro_kernels.needing(Generation(*evidence), (chosen,))
    proof = Proof((chosen,), ("cpp_mm",), ("cpp_mm",), generation=generation)
    objection = proof.objection()
    assert (objection.code if objection else "") == code
    assert proof.kernels[0].startswith(f"cpp_mm ({chosen}) [{evidence[0]}: ")


@pytest.mark.parametrize(
    ("command", "level"),
    [
        ("g++ a.cpp -D CPU_CAPABILITY_AVX2 -march=native -mavx2 -mfma", "avx2"),
        ("g++ a.cpp -D CPU_CAPABILITY_AVX512 -mavx512f -mavx512dq -mavx512vl", "avx512"),
        ("g++ a.cpp -D CPU_CAPABILITY_AVX512 -mavx512f -mavx512vnni", "avx512_vnni"),
        ("g++ a.cpp -D CPU_CAPABILITY_AVX512 -mavx512vnni -mamx-tile -mamx-bf16", "amx"),
        ("g++ a.cpp -D CPU_CAPABILITY_AVX512 -mavx512vnni -mamx-tile -mamx-fp16", "amx_fp16"),
        ("g++ a.cpp -march=native", ""),
    ],
)
def test_the_level_that_a_compile_command_asks_for(command: str, level: str) -> None:
    assert cpu_isa.level_of(command) == level


@pytest.mark.compiler
def test_two_levels_share_no_folder_and_no_library() -> None:
    folders = {inductor.cache_dir(isa) for isa in ("", *isa_module.ISAS)}
    assert len(folders) == 1 + len(isa_module.ISAS)
    # One text, one folder, and still a library for each: the commands are part of its name.
    from torch._inductor.codecache import CppCodeCache

    text = '#include <ATen/cpu/vec/vec.h>\nextern "C" int at_vec() { return at::vec::Vectorized<float>::size(); }\n'
    plain = {"cpp_cache_precompile_headers": False}
    paths: set[str] = set()
    for isa in isa_module.ISAS:
        spec = CompileSpec("CPP", plain, str(inductor.cache_dir()), 1, BuildRequest(isa=isa))
        with torch_compat.session(spec) as session:
            CppCodeCache.load_async(text)  # names the library; whoever calls what it returns builds and loads it
            CppCodeCache.load_async(text)  # is there already
        assert set(session.levels) - {""} == {isa}
        assert len(set(session.libraries)) == 1
        assert len(session.libraries) >= 2
        paths |= set(session.libraries)
    assert len(paths) == len(isa_module.ISAS)


@pytest.mark.compiler
@needs_vectors
@pytest.mark.usefixtures("shared_caches")
def test_at_the_cpu_s_own_level_a_variant_is_judged_and_proved() -> None:
    backend, best = CppBackend(threads=1), HERE[-1]
    outcomes = judged(backend, MM.line, "int-2", "rand", isa=best)
    assert [(o.status, o.who) for o in outcomes] == [(Status.PASSED, f"cpp@{best}")] * 2
    vectors = "ymm" if best == "avx2" else "zmm"
    (kernel,) = outcomes[0].kernels
    assert re.fullmatch(rf"cpp_fused_mm_0 \(CppMicroGemmFP32Vec-\w+\) \[{best}: .*{vectors}\]", kernel)


@pytest.mark.compiler
@needs_vectors
@pytest.mark.usefixtures("shared_caches")
def test_a_variant_whose_forcing_does_nothing_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = "avx512" if HERE[-1] == "avx2" else "avx2"
    monkeypatch.setattr(isa_module, "isas", lambda _: isa_module.ISAS)
    monkeypatch.setattr(cpu_isa, "lacks_isa", lambda _: "")
    monkeypatch.setattr(torch_compat, "generating_for", lambda *_, **__: contextlib.nullcontext())
    (outcome,) = judged(CppBackend(threads=1), MM.line, "rand", isa=asked)
    assert outcome.status is Status.FALLBACK
    assert outcome.reason is not None
    assert outcome.reason.text == f"{asked} was requested, the code was compiled for {HERE[-1]}"


@needs_vectors
def test_a_level_that_the_cpu_or_the_compiler_lacks_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**lies: Any) -> str:
        with monkeypatch.context() as patched:
            for name, value in lies.items():
                patched.setattr(*{"here": (isa_module, "isas"), "lack": (cpu_isa, "lacks_isa"),
                                  "tool": (machine_code, "disassembler")}[name], value)  # fmt: skip
            (outcome,) = judged(CppBackend(), MM.line, "rand", isa="avx2")
        assert outcome.status is Status.UNSUPPORTED
        return str(outcome.reason)

    assert "this CPU does not execute avx2" in refused(here=lambda _: ())
    assert "no compiler for it" in refused(lack=lambda _: "no compiler for it")
    assert "apt-get install binutils" in refused(lack=lambda _: "", tool=lambda: "")


@pytest.mark.compiler
def test_an_empty_linear_with_a_bias_is_not_claimed_below_avx512_where_inductor_has_no_candidate() -> None:
    problem, request = Problem.parse("linear:bf16:nt:16x0x16:bias"), BuildRequest(isa="avx2")
    backend = CppBackend(threads=1)
    found = backend._list(problem, tensors.make(problem, "int-2", 0), request, inductor.Space())
    assert not any(name.startswith("CppMicro") for name in found)
    assert backend.supports(problem, request) is not None


def test_a_cpu_that_runs_a_level_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    asked: list[str] = []

    def vectors(flags: str) -> Any:
        return SimpleNamespace(build_arch_flags=lambda: flags)

    def asks(found: Any, code: str) -> bool:
        asked.append(f"{found.build_arch_flags()} {code}")
        return str(found.build_arch_flags()) != "amx"

    for _ in range(2):  # in two processes
        assert cpu_isa.loads(asks, vectors("avx2"), "code")
        assert not cpu_isa.loads(asks, vectors("amx"), "code")  # for want of a compiler, which may come
        assert cpu_isa.loads(asks, vectors("avx512"), "code")
        assert cpu_isa.loads(asks, vectors("avx512"), "other")
    assert asked == ["avx2 code", "amx code", "avx512 code", "avx512 other", "amx code"]
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
    assert cpu_isa.loads(asks, vectors("avx2"), "code"), "where nothing can be written nothing is remembered"
