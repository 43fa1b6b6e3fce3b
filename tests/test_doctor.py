"""``--gemm-doctor`` as its users meet it; a backend that kills or holds up the process that asks it is one line."""

from __future__ import annotations

import pytest

BACKENDS = """
    import os, time
    from pytest_gemm.backend import Availability
    from pytest_gemm.outcome import Reason

    class Broken:
        devices = ("cpu",)
        def __init__(self, name, act): self.name, self._act = name, act
        def availability(self, device): return self._act() or Availability(versions=(("thing", "1.2"),))
        def supports(self, problem): return None
        def prepare(self, problem, operands): raise AssertionError("not reached")

    def pytest_gemm_register_backends(registry):
        registry.add_callable("good", lambda a, b: a @ b)
        registry.add_callable("off", lambda a, b: a @ b + 1)
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
    result = pytester.runpytest_subprocess("--gemm-doctor", *options)
    return int(result.ret), result.stdout.str() + result.stderr.str()


def test_a_healthy_backend_shows_its_smoke_product_and_nothing_else_runs(doctor: pytest.Pytester) -> None:
    code, text = screen(doctor, "--gemm-backends=good,aten")
    assert code == 0, text
    assert "mm:f16:nt:128x96x64 passed" in text
    assert "kernel aten.mm.default" in text
    assert "torch 2." in text
    assert "CPU: " in text
    assert "test_never_run" not in text


def test_a_wrong_smoke_product_is_red(doctor: pytest.Pytester) -> None:
    code, text = screen(doctor, "--gemm-backends=off")
    assert code == 1, text
    assert "incorrect" in text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dies", "its process was killed by SIGABRT"),
        ("hangs", "no answer within 3 s"),
        ("raises", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_backend_that_breaks_the_examination_is_one_line_of_it(
    doctor: pytest.Pytester, name: str, words: str
) -> None:
    code, text = screen(doctor, f"--gemm-backends={name},lacks,good", "--gemm-compile-timeout=3")
    assert code == 1, text
    assert words in text
    assert "the part is not there" in text  # those after it are asked all the same


def test_a_named_backend_that_cannot_run_is_red_unless_that_is_forgiven(doctor: pytest.Pytester) -> None:
    code, text = screen(doctor, "--gemm-backends=lacks")
    assert code == 1, text
    assert "cannot run: the part is not there" in text
    assert "to run it: buy one" in text
    code, text = screen(doctor, "--gemm-backends=lacks", "--gemm-missing=skip")
    assert code == 0, text


def test_it_does_not_share_its_work(doctor: pytest.Pytester) -> None:
    code, text = screen(doctor, "-n", "2")
    assert code == int(pytest.ExitCode.USAGE_ERROR)
    assert "--gemm-doctor asks one backend after the other: leave out -n" in text
