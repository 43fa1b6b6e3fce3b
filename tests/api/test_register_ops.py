"""Operations from outside of the package: judged in every process; a wrong registration names its place."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from oracle import computed, exact, is_right, judged, make, refuses_line, says

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.api.ops import OpRegistry, cases
from pytest_gemm.api.shipped import RegistryError
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.core.outcome import Status
from pytest_gemm.problem.ops.op import Op
from pytest_gemm.problem.problem import Problem
from pytest_gemm.storage.errors import FileError
from pytest_gemm.tools import cli

EXAMPLES = Path(__file__).parents[2] / "examples"
LINE = "causal_mm:bf16:nt:65x17x127:relu"


@pytest.fixture
def registry() -> Iterator[OpRegistry]:
    """One whose ops are forgotten after the test."""
    yield OpRegistry()
    OpRegistry()


@pytest.fixture
def example(registry: OpRegistry, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    found = importlib.import_module("causal_mm")
    found.pytest_gemm_register_ops(registry)
    return found


def without_the_diagonal(_: Problem, t: dict[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
    return lambda: (t["a"] @ t["b"]).tril(-1)


@pytest.mark.parametrize("line", ["causal_mm:f32:nn:33x47x64", LINE.replace("bf16", "f32")])
def test_right_kernels_of_the_example_pass_and_wrong_ones_do_not(example: ModuleType, line: str) -> None:
    mine = CallableBackend("mine", torch.matmul, bind=example.bind)
    assert {o.status for o in (*judged(AtenBackend(), line), *judged(mine, line))} == {Status.PASSED}
    wrong = CallableBackend("wrong", torch.matmul, bind=without_the_diagonal)
    assert Status.INCORRECT in {o.status for o in judged(wrong, line)}


@pytest.mark.parametrize("line", ["conv1x1:bf16:nt:36x33x65:bias+relu", "conv3x3:f32:nt:64x32x72:b.argument"])
def test_a_convolution_is_an_operation(registry: OpRegistry, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    importlib.import_module("conv").pytest_gemm_register_ops(registry)
    mine, wrong = CallableBackend("mine", exact), CallableBackend("wrong", lambda a, b: exact(a, b).roll(1, -1))
    assert {o.status for o in judged(mine, line)} == {Status.PASSED}
    assert Status.INCORRECT in {o.status for o in judged(wrong, line)}
    if "f32" in line:  # where a filter meets an infinity, and what overflows f32 the other way
        in_f32 = CallableBackend("in-f32", lambda a, b: (a[:, :, None] * b).sum(1))
        assert {o.status for o in judged(in_f32, line, "specials")} == {Status.PASSED}
    given = make(line, "int-1")
    assert is_right(given, computed(given, None))
    says(CppBackend().supports(Problem.parse(line)), "Inductor leaves a frozen convolution to oneDNN")


@pytest.mark.parametrize(
    "line", ["conv1x1:f32:nt:6x32x64", "conv3x3:f32:nt:8x32x64", "conv1x1:f32:nt:8x32x64:m.dynamic"]
)
def test_what_is_no_image_is_refused(registry: OpRegistry, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    importlib.import_module("conv").pytest_gemm_register_ops(registry)
    refuses_line(line, "a multiple of|a fixed size")


@pytest.mark.usefixtures("example")
def test_the_next_run_of_a_process_has_forgotten_it() -> None:
    sent = pickle.dumps(Problem.parse(LINE))
    assert pickle.loads(sent) == Problem.parse(LINE)
    assert {one.op.name for one in cases("smoke")} == {"causal_mm"}
    OpRegistry()
    assert not cases("smoke")
    with pytest.raises(LookupError, match="has not loaded the hook pytest_gemm_register_ops that registers causal_mm"):
        pickle.loads(sent)


@pytest.mark.usefixtures("registry")
def test_explain_knows_the_ops_of_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    assert cli.main(["explain", "-p", "causal_mm", LINE]) == 0
    assert "tril = torch.tril(mm)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["explain", "-p", "nowhere", LINE])
    assert "-p nowhere: No module named 'nowhere'" in capsys.readouterr().err


def test_a_program_that_subtracts_products_has_no_bound(registry: OpRegistry, tmp_path: Path) -> None:
    def halves(_: Any, p: Problem, t: dict[str, Any], matmul: Any) -> Any:
        half = p.shape.k // 2
        return matmul(t["a"][:, :half], t["b"][:half]) - matmul(t["a"][:, half:], t["b"][half:])

    (tmp_path / "cases.toml").write_text('[[set]]\nname = "a"\nproblems = ["halves:f32:nn:16x16x32"]\n')
    native = lambda torch, p, t: halves(torch, p, t, torch.mm)  # noqa: E731  # an argument
    registry.add(Op("halves", "never", ("f32",), native, halves), tmp_path / "cases.toml")
    with pytest.raises(ValueError, match=r"op halves: around\(\) subtracts products"):
        judged(AtenBackend(), "halves:f32:nn:16x16x32")


def _op(**changes: Any) -> Any:
    given = Op("mine", "never", ("f32",), lambda torch, _, t: torch.mm(t["a"], t["b"]))
    return dataclasses.replace(given, **changes)


@pytest.mark.parametrize(
    ("op", "text", "says"),
    [
        (_op(name="mm"), "", "op 'mm': two ops have this name"),
        (_op(name="My-op"), "", "op 'My-op': its name needs lower-case letters"),
        (_op(native=None), "", "op 'mine': native is the program: give a function"),
        (_op(scales=("rowwise",)), "", "op 'mine': scales is of an op of the package alone"),
        (_op(dtypes=("f32", "f64")), "", "drop f64"),
        ("mine", "", "str is no Op"),
        (_op(), '[[set]]\nname = "a"\nproblems = ["mine:f32:nn:8x8"]\n', "cases.toml:3: problem 'mine:f32:nn:8x8'"),
        (_op(), '[[set]]\nname = "a"\nproblems = ["mm:f32:nn:8x8x8"]\n', "cases.toml has no problem of it"),
        (_op(), "[[set]\n", "cases.toml:1"),
    ],
)
def test_a_wrong_registration_says_what_is_wrong(
    registry: OpRegistry, tmp_path: Path, op: Any, text: str, says: str
) -> None:
    (tmp_path / "cases.toml").write_text(text)
    with pytest.raises((RegistryError, FileError)) as raised:
        registry.add(op, tmp_path / "cases.toml")
    assert says in str(raised.value)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers", "registry")
def test_a_run_with_workers_judges_its_cases_and_keeps_a_script(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        f"""
        import sys
        sys.path.insert(0, {str(EXAMPLES)!r})
        from causal_mm import pytest_gemm_register_ops
        from wrong import product

        def pytest_gemm_register_backends(registry):
            registry.add_callable("wrong", product)
        """
    )
    pytester.makepyfile(wrong="def product(a, b):\n    return (a @ b).roll(1, 0)\n")
    arguments = ("--pyargs", "pytest_gemm.conformance", "--gemm-backends=aten,wrong", "--gemm-ops=causal_mm")
    result = pytester.runpytest_inprocess(*arguments, "--gemm-level=smoke", "--gemm-output=out", "-n2")
    counts = result.parseoutcomes()
    assert counts.pop("failed") == 6
    # The ledger names what oneDNN makes of bf16 on some processors: pytester reads "1 known-failure" as "known".
    assert counts.pop("passed") + counts.pop("known", 0) == 6
    assert not counts
    result.stdout.fnmatch_lines(["*rerun: *--gemm-backends=wrong*--gemm-problem=causal_mm:*"])
    script = next(iter((pytester.path / "out").rglob("repro.py")))
    program = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    assert pytester.run(sys.executable, "-c", program).ret == 1


def test_a_wrong_registration_names_its_place(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("def pytest_gemm_register_ops(registry):\n    registry.add(5, 'cases.toml')\n")
    result = pytester.runpytest("--gemm-backends=aten")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*pytest_gemm_register_ops: int is no Op*", "*conftest.py:2, in pytest_gemm_register_ops"]
    )
