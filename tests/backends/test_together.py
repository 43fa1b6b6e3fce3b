"""C++ kernels of several programs in one translation unit: one call of the compiler, and each kernel as it was."""

from __future__ import annotations

import itertools
import os
import random
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from oracle import computed
from torch._inductor.codecache import CppPythonBindingsCodeCache

from pytest_gemm.api.registry import Registry
from pytest_gemm.api.request import DEFAULT
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.backends.inductor.backend import cache_dir
from pytest_gemm.config.config import GemmConfig
from pytest_gemm.core.case_id import CaseId
from pytest_gemm.operands import tensors as operands
from pytest_gemm.plugin.batches import batches
from pytest_gemm.problem.problem import Problem

COMPILER = shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None or "CXX" in os.environ, reason="g++ is not what compiles here")


# Sizes of which no cache has a kernel, other ones for each test.
_SIZES = itertools.count(random.SystemRandom().randrange(100, 10_000))


def alike() -> list[str]:
    """Two problems with one micro-kernel, which g++ compiles in a second and no cache has."""
    m = next(_SIZES)
    return [f"qlinear:u8-i8-f32:nt:{m}x16x33{bias}:quant.static:a.7bit" for bias in ("", ":bias")]


def together(lines: list[str]) -> CppBackend:
    """A backend that has compiled these problems."""
    backend = CppBackend(threads=1)
    problems = map(Problem.parse, lines)
    backend.compile_together([(one, operands.make(one, "int-2", 0), DEFAULT) for one in problems])
    return backend


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a g++ that notes its words, and that lacks a linker the first time where a file says so."""
    folder = tmp_path_factory.mktemp("calls")
    script, log, lacks = folder / "g++", *(shlex.quote(str(folder / name)) for name in ("log", "lacks-a-linker"))
    refuses = f'case "$*" in *-fuse-ld*) rm {lacks} 2>/dev/null && exit 1;; esac'
    script.write_text(f'#!/bin/sh\necho "$*" >> {log}\n{refuses}\nexec {COMPILER} "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return folder


@pytest.fixture
def compiled(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The files of kernels that g++ was asked to compile in this test."""
    monkeypatch.setenv("PATH", f"{compiler}{os.pathsep}{os.environ['PATH']}")
    log = compiler / "log"
    log.write_text("", encoding="utf-8")
    return lambda: re.findall(r"(\S+(?:\.main|kernels)\.cpp) ", log.read_text(encoding="utf-8"))


def result(backend: CppBackend, line: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What a problem's program returns, and what is right."""
    problem = Problem.parse(line)
    given = operands.make(problem, "int-2", 1)
    prepared = backend.prepare(problem, given, DEFAULT)
    made = prepared.run(given)
    assert prepared.proof().objection() is None
    return made.float(), computed(given).float()


@needs_compiler
def test_kernels_of_several_problems_are_one_call_of_the_compiler_and_a_library_has_its_own_alone(
    compiler: Path, compiled: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = [*alike(), f"mm:f32:nn:{next(_SIZES)}x64x64"], f"mm:f32:nn:0x{next(_SIZES)}x16"
    monkeypatch.setattr("pytest_gemm.backends.inductor.together._LINKER", ("-fuse-ld=gold",))
    (compiler / "lacks-a-linker").touch()
    backend = together([*right, wrong])
    assert [Path(path).name for path in compiled()] == ["kernels.cpp"] * 2, "once more without what g++ refuses"
    for line in right:
        torch.testing.assert_close(*result(backend, line))
    assert len(compiled()) == 2, "nothing is left to compile"
    linked = re.findall(r"/(\w+\.main\.so)", (compiler / "log").read_text(encoding="utf-8"))
    assert linked[0] == linked[1], "by the compiler's own linker where the other one fails"
    libraries = [path for name in {*linked} for path in cache_dir().rglob(name)]
    texts = [subprocess.check_output(["objdump", "-dC", path], text=True) for path in libraries]
    assert sorted("".join({*re.findall(r"\balike_(\d+)::", text)}) for text in texts) == ["0", "0", "1"]
    assert [len({*re.findall(r"\bkernel_(\d+)\b", text)}) for text in texts] == [1] * 3
    with pytest.raises(Exception, match="division by zero"):  # as alone
        result(backend, wrong)
    assert compiled()[2].endswith(".main.cpp")


@needs_compiler
def test_what_no_compiler_takes_is_left_to_inductor(
    compiled: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_gemm.backends.inductor.together._SECTIONS", ("-c", "--no-such-option"))
    lines = alike()
    backend = together(lines)
    for line in lines:
        torch.testing.assert_close(*result(backend, line))
    assert [path.endswith(".main.cpp") for path in compiled()] == [False, True, True]


@needs_compiler
def test_what_was_compiled_with_others_is_never_taken_for_a_kernel_alone(
    compiled: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = alike()
    for _ in range(2):  # the second time out of the cache on the disk
        backend = together([first, second])
        for request, others in ((DEFAULT, 1), (DEFAULT.replace(alone=True), 0)):
            problem = Problem.parse(first)
            prepared = backend.prepare(problem, operands.make(problem, "int-2", 1), request)
            assert prepared.proof().compiled_with == others
        monkeypatch.setattr(CppPythonBindingsCodeCache, "cache", {})
    assert [Path(path).name.partition(".")[2] for path in compiled()] == ["cpp", "main.cpp"]


# -- which problems ------------------------------------------------------------------------------------------------


def test_problems_of_the_same_types_are_a_batch_and_workers_share_them_out() -> None:
    registry = Registry()
    for backend in (AtenBackend(), CppBackend()):
        registry.add(backend)
    settings = GemmConfig(registry)
    lines = [f"mm:{dtype}:nn:16x{n}x16" for n in range(8, 72, 8) for dtype in ("f32", "bf16")]
    without = ["int_mm:i8-i8-i32:nn:32x32x32", "mm:f32:nn:4096x4096x4096", "mm:f32:nn:0x16x16"]
    found = batches([CaseId("cpp", line) for line in (*lines, *without)], settings, 2)
    groups = {tuple(line for line in found if found[line] == name) for name in found.values()}
    assert sorted(map(len, groups)) == [4, 4, 4, 4]
    assert all(len({line.split(":")[1] for line in group}) == 1 for group in groups)
    assert batches([CaseId("cpp", line) for line in lines], GemmConfig(registry, level="smoke"), 2) == {}
    assert not found.keys() & {*without}, "cpp has no int_mm, and a large one and an empty one are alone"
    assert batches([CaseId("aten", line) for line in lines], settings, 2) == {}


@needs_compiler
def test_workers_compile_a_batch_at_once_and_judge_each(
    pytester: pytest.Pytester, compiled: Callable[[], list[str]]
) -> None:
    lines = [*alike(), *alike(), *alike()]
    pytester.makepyfile(f"""
        import pytest

        @pytest.mark.gemm(problems={lines}, distributions=["int-2", "rand"])
        def test_it(gemm_case, gemm_check):
            gemm_check(gemm_case)
    """)
    run = pytester.runpytest_subprocess("--gemm-backends=cpp", "-n2")
    run.assert_outcomes(passed=6)
    assert [Path(path).name for path in compiled()].count("kernels.cpp") == 2
