"""Code compiled as on another machine: its sizes are in the code, and what this CPU does not execute is not loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_gemm.api.request import DEFAULT, BuildRequest
from pytest_gemm.backends.cpp import machine_code
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.backends.inductor import as_machine
from pytest_gemm.backends.inductor.backend import Space
from pytest_gemm.backends.triton import TritonBackend
from pytest_gemm.conformance import matrix
from pytest_gemm.core.case_id import Device
from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.machine import isa as isa_module
from pytest_gemm.machine import processor
from pytest_gemm.machine.machines import machines
from pytest_gemm.numerics.precision import cpu_threads
from pytest_gemm.operands import tensors
from pytest_gemm.problem.problem import Problem

# B's block of a register's columns is larger than any L1, so that its K is cut by that.
LONG = Problem.parse("mm:f32:nn:4x32x2048")
MM = Problem.parse("mm:bf16:nn:64x64x64")
HERE = isa_module.isas(processor.cpu().flags)


def request(machine: str) -> BuildRequest:
    return BuildRequest(isa=machines()[machine].isa, machine=machine)


@pytest.mark.compiler
@pytest.mark.skipif("avx2" not in HERE, reason="needs an x86 CPU with AVX2")
def test_threads_and_caches_of_the_machine_are_in_the_code_and_it_is_right() -> None:
    found = {}
    for name in ("ryzen-7735u", "core-13700h"):
        given, machine = tensors.make(LONG, "int-2", 0), machines()[name]
        with cpu_threads(machine.threads):
            prepared = CppBackend().prepare(LONG, given, request(name))
            assert torch.equal(prepared.run(given), given.a @ given.b)
        (threads,) = set(re.findall(r"num_threads = (\d+);", prepared.source))
        (blocks,) = set(re.findall(r"Kc_blocks = (\d+);", prepared.source))
        (columns,) = set(re.findall(r"Nr = (\d+);", prepared.source))
        assert int(threads) == machine.threads
        found[name] = int(blocks) * int(columns)
    # The template gives a block of B 0.8 of L1, in f32.
    assert 0.97 < found["ryzen-7735u"] * 4 / (0.8 * 32 * 1024) <= 1
    assert 0.97 < found["core-13700h"] * 4 / (0.8 * 48 * 1024) <= 1


@pytest.mark.compiler
@pytest.mark.slow
def test_code_that_this_cpu_does_not_execute_is_compiled_and_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import cpp_builder

    monkeypatch.setattr(isa_module, "isas", lambda _: ())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def judged(line: str) -> Outcome:
        asked: dict[str, Any] = {"threads": 8, "isa": "avx2", "machine": "ryzen-7735u"}
        case = Case(CppBackend(), Problem.parse(line), ("int-2",), 0, Device.CPU, **asked)
        (outcome,) = Judge().outcomes(case)
        return outcome

    outcome = judged("mm:f32:nn:8x9x10")
    assert outcome.status is Status.UNSUPPORTED
    assert outcome.reason is not None
    assert outcome.reason.text == "compiled for avx2 as on ryzen-7735u; this CPU does not execute it"
    libraries = [*tmp_path.rglob("*.main.so")]
    assert {unit for one in libraries for unit in machine_code.units_of(one)} & {"ymm", "zmm"} == {"ymm"}

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no such flag")

    monkeypatch.setattr(cpp_builder, "run_compile_cmd", fails)
    assert judged("mm:f32:nn:8x9x11").status is Status.CRASHED


def test_inductor_reads_the_sizes_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.compile_fx
    from torch._inductor import utils
    from torch._inductor.kernel import mm_grouped
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.template_heuristics import triton as heuristics

    real: Any = DeviceProperties("cuda", 0, 100, 90)
    monkeypatch.setattr(DeviceProperties, "create", classmethod(lambda *_: real))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def read(machine: str, count: int = 0) -> tuple[object, ...]:
        with as_machine.believing(machine, count):
            exceeds: Any = heuristics.CUDAConfigHeuristic()._get_exceeding_shared_memory_checker(False, 0)
            tile = heuristics.GemmConfig(128, 128, 64, 4, 8)  # 128 KiB in two bytes
            big = utils.is_big_gpu(torch.device("cuda", 0))
            return utils.get_num_sms(), big, mm_grouped.get_gpu_shared_memory() >> 10, exceeds(tile, 2)

    assert read("h100") == (132, True, 227, False)
    assert read("l4") == (58, False, 99, True)
    assert read("h100", 3)[0] == 3


def test_a_script_has_the_sizes_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.utils

    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is None:
        pytest.skip("this release of PyTorch has no torch.cpu.get_capabilities")
    with cpu_threads(128):
        recipe = CppBackend().recipe(LONG, tensors.make(LONG, "int-2", 0), request("epyc-9755"))
    assert recipe.threads == 128
    monkeypatch.setattr(torch.cpu, "get_capabilities", capabilities)  # so that it is restored
    monkeypatch.setattr(torch._inductor.utils, "get_max_num_sms", None)
    exec("\n".join([*(line for line in recipe.setup if "known" in line), *as_machine.setup("l4")]), {"torch": torch})
    assert torch.cpu.get_capabilities()["l1d_cache_size"] == 48 * 1024
    assert torch._inductor.utils.get_max_num_sms() == 58


def test_lines_of_the_quick_level_meet_one_three_and_all_multiprocessors() -> None:
    backend = TritonBackend()
    lines = [p for p in matrix.products("quick") if backend.supports(p) is None]
    counts = [backend.space_of_one(p, number).multiprocessors for number, p in enumerate(lines * 20)]
    assert set(counts) == {0, 1, 3}
    large = Problem.parse("mm:bf16:nt:4096x4096x4096")
    assert {backend.space_of_one(large, number).multiprocessors for number in range(4000)} == {0}


def test_a_number_of_multiprocessors_is_part_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, name = TritonBackend(), "triton_mm_persistent_tma-64x64x64,s2,w4"
    monkeypatch.setattr(TritonBackend, "_list", lambda *_: (name,))
    given = tensors.make(MM, "int-2", 0)
    asked = DEFAULT.replace(candidate=f"{name[:24]}*,NUM_SMS=3")
    assert backend.candidates(MM, given, asked).named == (f"{name},NUM_SMS=3",)
    space = backend._space_of(MM, given, DEFAULT.replace(candidate=f"{name},NUM_SMS=3"))
    assert (space.suffix, space.multiprocessors) == (",NUM_SMS=3", 3)
    assert backend._spec(MM, DEFAULT, space).multiprocessors == 3
    as_h100 = BuildRequest(machine="h100")
    assert {backend.space_of_one(MM, number, as_h100).multiprocessors for number in range(4000)} == {0}
    assert backend._spec(MM, DEFAULT, Space()).multiprocessors == 0
