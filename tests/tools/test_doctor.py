"""``pytest-gemm doctor`` as its users meet it; a backend that kills or holds up its process is one line."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from warm_processes import Programs

from pytest_gemm.api.protocols import Availability
from pytest_gemm.api.registry import Registry
from pytest_gemm.conformance import matrix
from pytest_gemm.tools import doctor as doctor_module

BACKENDS = """
    import os, time
    from pytest_gemm.api.protocols import Availability
    from pytest_gemm.core.outcome import Reason

    class Broken:
        devices = ("cpu",)
        def __init__(self, name, act): self.name, self._act = name, act
        def availability(self, device): return self._act() or Availability(versions=(("thing", "1.2"),))
        def supports(self, problem, request=None): return None
        def prepare(self, problem, operands, request=None): raise AssertionError("not reached")

    def pytest_gemm_register_backends(registry):
        registry.add_callable("good", lambda a, b: (a.double() @ b.double()).to(a.dtype))
        registry.add(Broken("dies", os.abort))
        registry.add(Broken("hangs", lambda: time.sleep(600)))
        registry.add(Broken("raises", lambda: 1 / 0))
        registry.add(Broken("lacks", lambda: Availability(Reason("no-part", "the part is not there", "buy one"))))
"""


@pytest.fixture
def doctor(pytester: pytest.Pytester, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setattr(sys, "executable", programs.python)
    pytester.makeconftest(BACKENDS)
    pytester.makepyfile("def test_never_run(): assert False")
    return pytester


def screen(pytester: pytest.Pytester, *options: str) -> tuple[int, str]:
    """Exit code and text; a process of its own, because the doctor forks."""
    result = pytester.run(sys.executable, "-m", "pytest_gemm.tools.cli", "doctor", *options)
    return int(result.ret), result.stdout.str() + result.stderr.str()


@pytest.mark.slow
def test_a_healthy_backend_shows_its_smoke_product_and_nothing_else_runs(
    doctor: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    code, text = screen(doctor, "--backends=good")
    assert code == 0, text
    assert "can run: mm:f16:nt:32x64x128 passed" in text
    assert "<locals>.<lambda>\n" in text  # the kernel
    assert "torch 2." in text
    assert "CPU: " in text
    assert "onednn is capped at sse41 by the environment" in text
    assert "test_never_run" not in text


def test_the_smoke_products_are_of_the_level_quick_so_that_a_run_of_it_has_compiled_them() -> None:
    assert {*doctor_module._SMOKE} <= {problem.line for problem in matrix.products("quick")}


def test_a_wrong_smoke_product_is_incorrect() -> None:
    registry = Registry()
    registry.add_callable("off", lambda a, b: a @ b + 1)
    config: Any = SimpleNamespace(registry=registry, device_of=lambda _: "cpu")
    assert doctor_module._can_run(config, None, "off") == [(f"with torch {torch.__version__}", "")]
    text, said = doctor_module._product(config, None, "off")[0]
    assert text.startswith("FAILED: mm:f16:nt:32x64x128 incorrect: ")
    assert said == "failed"


def test_a_release_that_is_known_to_be_wrong_is_named() -> None:
    versions = (("nvidia-cutlass-dsl", "4.5.1"), ("nvidia-cutlass-operators", "0.1.0"))
    backend = SimpleNamespace(name="dsl", devices=("cpu",), availability=lambda _: Availability(versions=versions))
    registry: Any = SimpleNamespace(shipped=tuple, origin=lambda _: None, named=lambda _: backend)
    config: Any = SimpleNamespace(registry=registry, device_of=lambda _: "cpu")
    lines = [text for text, _ in doctor_module._can_run(config, None, "dsl")]
    assert lines[0] == "with nvidia-cutlass-dsl 4.5.1, nvidia-cutlass-operators 0.1.0"
    assert lines[1].startswith("warning: nvidia-cutlass-dsl 4.5.1 drops predicated copies on CUDA 13")
    assert len(lines) == 2


@pytest.mark.slow
def test_what_breaks_or_hangs_is_one_check(doctor: pytest.Pytester) -> None:
    code, text = screen(doctor, "--backends=dies,hangs,raises,lacks,good", "--timeout=4")
    assert code == 1, text
    for name, words in (
        ("dies", "FAILED: the kernel's process died in compile: SIGABRT (Aborted)"),
        ("raises", "FAILED: ZeroDivisionError: division by zero"),
        ("lacks", "cannot run: the part is not there (buy one)"),
        ("good", "can run: mm:f16:nt:32x64x128 passed"),
        ("hangs", "FAILED: no answer within 4 s; for more time give --timeout=SECONDS"),
    ):
        assert re.search(rf"^{name} +cpu +[0-9.]+ s  .*{re.escape(words)}", text, re.MULTILINE), (name, text)
    assert text.index("\nhangs ") > text.index("\ngood ")  # which did not wait for it
    assert text.splitlines()[-1].endswith("can run: good; cannot run: lacks; FAILED: dies hangs raises")


@pytest.mark.slow
def test_a_named_backend_that_cannot_run_is_red_unless_it_may_be_missing(doctor: pytest.Pytester) -> None:
    code, text = screen(doctor, "--backends=lacks")
    assert code == 1, text
    code, text = screen(doctor, "--backends=lacks", "--allow-missing")
    assert code == 0, text
    assert text.splitlines()[-1].endswith("cannot run: lacks")


@pytest.mark.slow
def test_wrong_input_is_one_message(doctor: pytest.Pytester) -> None:
    code, text = screen(doctor, "--backends=mien")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "--gemm-backends=mien: unknown backend 'mien'" in text
    assert "Traceback" not in text
