"""``pytest-gemm judge``: one kernel on one screen, and ``pytest_gemm.check``."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pytest_gemm
from pytest_gemm.numerics import tensor_core
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.problem.problem import Problem
from pytest_gemm.record.lines import from_record
from pytest_gemm.tools import cli, judgement
from pytest_gemm.tools.kernel import Kernel, KernelBackend

KERNELS = """
import ctypes, time, torch

def right(a, b):
    return torch.from_numpy(a.double().numpy() @ b.double().numpy()).to(a.dtype)

def partly(a, b):
    return right(a, b) if a.shape[-1] % 2 else a @ b

def tail(a, b):
    k = a.shape[-1] // 8 * 8
    return right(a[..., :k], b[..., :k, :])

def linear(x, weight, bias):
    return x @ weight.t() + bias

def no_bias(x, weight, bias):
    return x @ weight.t()

def into(a, b, out):
    torch.mm(a, b, out=out)

def arrays(a, b):
    import numpy as np
    return np.matmul(a, b)

def even(a, b):
    if a.shape[1] % 2:
        raise ValueError("K must be even")
    return a @ b

def wide(a, b):
    return (a @ b).double()

def inside(a, b):
    return (a.float() @ b.float()).to(a.dtype)

def double(a, b):
    if a.dtype != torch.float64:
        raise TypeError("only f64")
    return a @ b

def writes(a, b):
    return a.mul_(2) @ b / 2

def tf32(a, b):
    cut = lambda x: (x.view(torch.int32) & ~0x1FFF).view(torch.float32)
    return cut(a) @ cut(b)

kept = {}

def replays(a, b):
    key = a.data_ptr(), a.dtype, a.shape, *a.flatten()[:8].tolist(), *b.flatten()[:8].tolist()
    if key not in kept:
        kept[key] = a @ b
    return kept[key].clone()

def hangs(a, b):
    time.sleep(60)

def dies(a, b):
    ctypes.string_at(0)
"""
PROBLEM = "--problem=mm:f32:nn:17x65x127"
LINEAR = "--problem=linear:f32:nt:17x65x127:bias"
Told = dict[str, Any]
Run = Callable[..., Told]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Judges a function of ``KERNELS``, and returns what is printed as JSON."""
    (tmp_path / "kernels_of_a_user.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)

    def judged(name: str, *options: str) -> Told:
        status = cli.main(["judge", f"kernels_of_a_user.py:{name}", "--json", *options])
        told: Told = json.loads(capsys.readouterr().out)
        assert told["status"] == status
        return told

    return judged


@pytest.mark.slow
def test_a_right_kernel_is_timed_and_a_wrong_one_is_one_finding(run: Run) -> None:
    right = run("right", "--problem=mm:f32:nn:96x128x256")
    assert (right["headline"], right["status"], right["takes"]["batched"]) == ("right (1 of 1 problem)", 0, True)
    assert right["takes"]["dtypes"] == ["f32", "f16", "bf16"]
    assert all(one["low"] <= one["ratio"] <= one["high"] for one in right["speed"])
    assert right["speed"] or "busy" in right["untimed"]
    assert "kernels_of_a_user" not in sys.modules
    wrong = run("tail", "--budget=none", "--sizes=24x16x16,8x24x20,17x8x24,8x8x9,16x40x31,12x8x40")
    assert (wrong["status"], wrong["speed"], len(wrong["findings"])) == (1, [], 1)
    assert re.match(r"K % \d+ > [01]: (\d+) of \1 failures, 0 of", wrong["findings"][0]["condition"])
    assert from_record(wrong["findings"][0]["simplest"]).status.is_failure
    page = (Path(__file__).parents[2] / "docs" / "reference" / "judge.md").read_text()
    assert set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE)) == set(right) == set(wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "verdict", "takes"),
    [
        ("linear", [LINEAR], "right", "(a, b of (N, K), bias)"),
        ("no_bias", [LINEAR], "incorrect", "(a, b of (N, K), bias)"),
        ("into", [PROBLEM], "right", "(a, b, out)"),
        ("arrays", [PROBLEM], "right", "(a, b) of NumPy arrays"),
        ("even", [PROBLEM], "not judged", "(a, b)"),
        ("wide", [PROBLEM], "incorrect: wrong dtype", "(a, b)"),
        ("writes", [PROBLEM], "incorrect: inputs written", "(a, b)"),
        ("tf32", [PROBLEM], "incorrect", "(a, b)"),
        ("replays", [PROBLEM], "incorrect: replayed", "(a, b)"),
        ("hangs", ["--time-limit=1"], "timed-out", "(a, b)"),
        ("dies", [], "crashed", "(a, b)"),
    ],
)
def test_what_it_takes_and_what_is_wrong_with_it(
    run: Run, name: str, options: list[str], verdict: str, takes: str
) -> None:
    told = run(name, *options)
    assert told["verdict"].startswith(verdict)
    assert told["takes"]["arguments"] == name + takes
    assert told["status"] == {"right": 0, "not judged": 10}.get(verdict, 1)
    if name == "even":
        assert told["refused"]["ValueError: K must be even"] == [PROBLEM.partition("=")[2]]
    if name == "tf32":
        assert told["arithmetic"]["tf32"]


@pytest.mark.slow
def test_what_calls_aten_is_not_timed_beside_it(run: Run) -> None:
    told = run("partly", "--problem=mm:f32:nn:96x128x256")
    assert (told["status"], told["calls"], told["speed"]) == (0, "aten::mm", [])
    assert told["untimed"] == "its product is ATen's"
    assert run("partly", "--problem=mm:f32:nn:96x128x255")["calls"] == ""


@pytest.mark.slow
def test_a_budget_and_a_shapes_file(run: Run) -> None:
    few = run("right", "--budget=0.001")
    assert (few["verdict"], few["cut"], few["status"]) == ("not judged", "limit 0.001 s", 10)
    assert few["not_judged"][0] == "mm:f32:nn:64x128x192"
    lines = ["mm:f32:nn:17x40x24", "linear:bf16:nt:8x24x16:bias+relu"]
    Path("served.toml").write_text(f'[[set]]\nname = "served"\nproblems = {json.dumps(lines)}\n')
    served = run("right", "--problem=served.toml")
    assert (served["verdict"], list(dict.fromkeys(one["problem"] for one in served["outcomes"]))) == ("right", lines)


@pytest.mark.slow
def test_f64_is_judged_where_no_other_float_works_or_where_it_is_asked_for(run: Run) -> None:
    by_accident = run("inside", PROBLEM)
    assert (by_accident["verdict"], by_accident["takes"]["dtypes"]) == ("right", ["f32", "f16", "bf16"])
    assert run("inside", "--dtypes=f64", PROBLEM.replace("f32", "f64"))["status"] == 1
    alone = run("double", PROBLEM.replace("f32", "f64"))
    assert (alone["verdict"], alone["takes"]["dtypes"]) == ("right", ["f64"])


def test_on_cuda_the_sums_may_be_those_of_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    problem = Problem.parse("mm:f16:nn:16x16x64")

    def contract(**more: Any) -> Contract:
        return KernelBackend("mine", Kernel("a.py:mine"), ["f16"], **more).contract(problem, own=True)

    assert contract(devices=("cuda",)) == dataclasses.replace(
        tensor_core.contract(problem, library=True), epilogue="either"
    )
    assert contract(devices=("cuda",)).alignment_bits > 0
    assert contract(devices=("cuda",), accumulate="f64").alignment_bits == contract().alignment_bits == 0


@pytest.mark.slow
@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["right"], "FILE.py:FUNCTION"),
        (["nothing.py:right"], "nothing.py: there is no such file"),
        (["kernels_of_a_user.py:missing"], "has no function 'missing'"),
        (["broken.py:f"], "SyntaxError"),
        (["fails.py:f"], "--op="),
        (["kernels_of_a_user.py:right", "--dtypes=f33"], "known: f32 f16 bf16 f64 i8"),
        (["kernels_of_a_user.py:right", "--time-limit=0"], "--time-limit=0: give seconds above 0"),
        (["kernels_of_a_user.py:right", "--budget=0"], "--budget=0: give seconds above 0"),
        (["kernels_of_a_user.py:right", "--budget=long"], "--budget=long: give seconds above 0, or none"),
        (["kernels_of_a_user.py:right", "--problem=none.toml"], "--problem=none.toml: there is no such file"),
        (["lib.so:f", "--signature=int f(char** a)"], "--signature=int f(char** a): cannot hand over 'char** a'"),
    ],
)
def test_wrong_input_is_one_message(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("lib.so").touch()
    Path("broken.py").write_text("def f(a, b)\n")
    Path("fails.py").write_text("def f(a, b):\n    raise RuntimeError('not today')\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(["judge", *arguments])
    assert ended.value.code == cli.USAGE_ERROR
    assert says in capsys.readouterr().err


def _last_row(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = a @ b
    c[-1:] = 0
    return c


@pytest.mark.slow
def test_check_in_a_test_gives_the_screen() -> None:
    with pytest.raises(TypeError, match=r"no option budgt=3 \(did you mean 'budget'\?\)"):
        pytest_gemm.check(_last_row, budgt=3)
    closure = pytest_gemm.check(lambda a, b: a @ b, problem="mm:f32:nn:17x65x127")
    assert closure.ok
    for dtypes in (["f32"], "f32"):  # a text is one as the option has it
        found = pytest_gemm.check(_last_row, problem="mm:f32:nn:17x65x127", dtypes=dtypes)
        with pytest.raises(AssertionError, match="never computed: mm:f32:nn:17x65x127"):
            assert found, found.text


class _Silent(BaseException):
    def __str__(self) -> str:
        raise RuntimeError


def _raises(_a: torch.Tensor, _b: torch.Tensor) -> None:
    raise _Silent


@pytest.mark.slow
def test_what_a_first_call_raises_ends_no_process_whatever_it_is() -> None:
    with pytest.raises(ValueError, match="no first call worked: _Silent: "):
        pytest_gemm.check(_raises, dtypes=["f32"])


@pytest.mark.slow
@pytest.mark.usefixtures("run")
def test_the_screen_is_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--sizes=16x24x17,8x24x9"
    assert cli.main(["judge", "kernels_of_a_user.py:tail", sizes, "--budget=none"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= judgement.LINES
    assert max(map(len, lines)) <= judgement.COLUMNS
    assert lines[0].startswith("incorrect: K tail")
    assert any(line.startswith("  rerun: pytest-gemm judge kernels_of_a_user.py:tail --problem=") for line in lines)


@pytest.mark.parametrize(
    ("text", "may"),
    [
        ("import torch\n\ndef f(a, b):\n    return a @ b\n", False),
        ("import numba\nf = numba.njit(lambda a, b: a)\n", True),
        ("from a_library.ops import f\n", True),  # may name one where it is not looked at
    ],
)
def test_a_first_call_has_longer_where_it_may_compile(text: str, may: bool, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(text)
    assert Kernel(f"{tmp_path}/mine.py:f").may_compile is may
    assert Kernel("a_module:f").may_compile
