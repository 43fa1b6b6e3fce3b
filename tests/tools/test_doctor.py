"""``pytest-gemm doctor`` as its users meet it; a backend that kills or holds up its process is one line."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_gemm.api.registry import Registry
from pytest_gemm.isolation.journal import Journal
from pytest_gemm.isolation.worker import Service
from pytest_gemm.judging.judge import Judge
from pytest_gemm.tools import doctor as doctor_module

BACKENDS = """
    import os, time
    from pytest_gemm.api.protocols import Availability
    from pytest_gemm.outcome import Reason

    class Broken:
        devices = ("cpu",)
        def __init__(self, name, act): self.name, self._act = name, act
        def availability(self, device): return self._act() or Availability(versions=(("thing", "1.2"),))
        def supports(self, problem, request=None): return None
        def prepare(self, problem, operands, request=None): raise AssertionError("not reached")

    def pytest_gemm_register_backends(registry):
        registry.add_callable("good", lambda a, b: a @ b)
        registry.add(Broken("dies", os.abort))
        registry.add(Broken("hangs", lambda: time.sleep(600)))
        registry.add(Broken("raises", lambda: 1 / 0))
        registry.add(Broken("lacks", lambda: Availability(Reason("no-part", "the part is not there", "buy one"))))
"""


@pytest.fixture
def doctor(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(BACKENDS)
    pytester.makepyfile("def test_never_run(): assert False")
    return pytester


def screen(pytester: pytest.Pytester, *options: str) -> tuple[int, str]:
    """Exit code and text; a process of its own, because the doctor forks."""
    result = pytester.run(sys.executable, "-m", "pytest_gemm.tools.cli", "doctor", *options)
    return int(result.ret), result.stdout.str() + result.stderr.str()


@pytest.mark.slow
def test_a_healthy_backend_shows_its_smoke_product_and_nothing_else_runs(doctor: pytest.Pytester) -> None:
    code, text = screen(doctor, "--backends=aten")
    assert code == 0, text
    assert "mm:f16:nt:128x96x64 passed" in text
    assert "kernel aten.mm.default" in text
    assert "torch 2." in text
    assert "CPU: " in text
    assert "test_never_run" not in text


def test_a_wrong_smoke_product_is_incorrect() -> None:
    registry = Registry()
    registry.add_callable("off", lambda a, b: a @ b + 1)
    config: Any = SimpleNamespace(registry=registry, device_of=lambda _: "cpu")
    service = Service(config, Judge(), Journal(), lambda _: contextlib.nullcontext())  # type: ignore[arg-type]
    told = [*doctor_module._answer(service, {"backend": "off"})]
    assert told[0] == (f"can run: torch {torch.__version__}", "")
    assert told[1][0].startswith("mm:f16:nt:128x96x64 incorrect: ")
    assert told[1][1] == "failed"  # which turns the report red, see below


@pytest.mark.slow
def test_what_breaks_the_examination_is_one_line_of_it_and_the_others_are_asked(doctor: pytest.Pytester) -> None:
    code, text = screen(doctor, "--backends=dies,hangs,raises,lacks,good", "--timeout=3")
    assert code == 1, text
    lines = iter(text.splitlines())
    for name, words in (
        ("dies", "FAILED: its process died: SIGABRT (Aborted)"),
        ("hangs", "no answer within 3 s"),
        ("raises", "ZeroDivisionError: division by zero"),
        ("lacks", "cannot run: the part is not there"),
        ("", "to run it: buy one"),
        ("good", " "),  # whatever it says in this time
    ):
        assert any(line.startswith(name or " ") and words in line for line in lines), (name, text)


@pytest.mark.parametrize(
    ("state", "options", "well"),
    [
        ("", {}, True),
        ("failed", {}, False),
        ("failed", {"allow": {"missing"}}, False),
        ("missing", {}, False),
        ("missing", {"allow": {"missing"}}, True),
        ("missing", {"named": False}, True),
    ],
)
def test_the_report_is_red_for_what_is_broken_and_for_a_named_backend_that_cannot_run(
    monkeypatch: pytest.MonkeyPatch, state: str, options: dict[str, Any], well: bool
) -> None:
    monkeypatch.setattr(doctor_module, "Worker", lambda *_: SimpleNamespace(close=lambda: None))
    told = {"fact": [("CPU: fast", "")], "backend": [("can run", ""), ("the rest", state)]}
    monkeypatch.setattr(doctor_module, "answers", lambda _worker, _limit=None, **asked: told[next(iter(asked))])
    config: Any = SimpleNamespace(
        **{"backends": [SimpleNamespace(name="mine")], "named": True, "allow": set(), **options},
        device_of=lambda _: "cpu",
        timeout=1.0,
        generates=False,
    )
    lines: list[str] = []
    assert doctor_module.report(config, lines.append) is well
    assert lines[-2:] == ["mine       cpu   can run", "                 the rest"]


@pytest.mark.slow
def test_wrong_input_is_one_message(doctor: pytest.Pytester) -> None:
    code, text = screen(doctor, "--backends=mien")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "--gemm-backends=mien: unknown backend 'mien'" in text
    assert "Traceback" not in text
