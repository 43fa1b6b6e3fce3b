"""The examples judge the libraries that are installed here, and a mistake in an example is found and named."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from oracle import judged

from pytest_gemm.api.callable import CallableBackend, CallablePrepared
from pytest_gemm.api.registry import Registry
from pytest_gemm.api.request import BuildRequest
from pytest_gemm.api.shipped import Shipped
from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Outcome, Status, Unsupported
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.operands import tensors
from pytest_gemm.problem.problem import Problem
from pytest_gemm.record.lines import Head, plain, to_record
from pytest_gemm.speed.data import Sample, Session, session_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parents[2] / "examples"
PROBLEMS = {
    "numpy": [
        "mm:f32:nn:17x65x127",
        "mm:f64:tn:17x65x127",
        "bmm:f32:nn:3x32x16x24",
        "linear:f32:nt:17x65x127:bias+gelu",
    ],
    "onnxruntime": [
        "mm:f32:nn:17x65x127",
        "int_mm:u8-i8-i32:nt:33x65x2064",
        "qlinear:u8-i8-u8:nt:17x65x128:quant.static+requant-0.37_230",
        "woq_int8:f32-i8-f32:nt:17x65x127",
        "woq:f32-i4-f32:nt:17x65x200:quant.group-16+zeros",
        "addmm:f32:nn:64x64x128:bias-m1+alpha-0.5+beta-2+relu",
        "linear:f16:nt:17x65x128:bias+gelu+add",
    ],
    "jax": [
        "mm:f32:nn:17x65x127",
        "mm:f16:nn:17x65x127",
        "int_mm:i8-i8-i32:nt:17x64x128",
        "linear:f32:nt:64x64x128:bias+scale-0.25",
        "addmm:bf16:nn:64x64x128:bias-m1+alpha-0.5+beta-2+silu",
    ],
    "bitsandbytes": ["int_mm:i8-i8-i32:nt:17x64x128", "woq:bf16-i4-bf16:nt:17x64x128:quant.group-64+nf4"],
    "fbgemm": ["qlinear:u8-i8-u8:nt:17x65x128:bias+relu:quant.static+requant-0.37_230"],
    "mkl": ["addmm:bf16:nn:33x65x127:bias-mn+alpha-0.5", "int_mm:i8-i8-i32:nt:17x64x128", "mm:f64:tt:17x65x127"],
    "opencv": ["mm:f32:tt:17x65x127", "addmm:f64:nn:33x65x127:bias-m1+alpha-0.5+beta-2"],
    "quanto": ["woq_int8:f32-i8-f32:nt:17x65x127", "da8w8:i8-i8-f16:nt:33x65x127:quant.columnwise"],
    "torchao": [
        "int_mm:i8-i8-i32:nt:17x64x128",
        "da8w8:i8-i8-bf16:nt:17x65x128:quant.rowwise",
        "woq_int8:bf16-i8-bf16:nt:17x64x128",
        "woq_int4:f32-i4-f32:nt:4x48x192:quant.group-64",
    ],
    "ggml": [
        "mm:f32:nn:17x65x127",
        "woq:f32-i8-f32:nt:17x65x128:quant.group-32+inside-q8_0",
        "woq:f32-i4-f32:nt:1x65x1024:quant.group-32+inside-q8_0",
    ],
    "blis": ["mm:f32:nn:17x65x127", "mm:f32:tt:17x65x127", "mm:f64:nt:17x65x127", "bmm:f32:nn:3x32x16x24"],
    "iree": ["mm:f32:nn:17x65x127", "mm:bf16:nt:17x65x127", "mm:f16:nn:17x65x127", "int_mm:i8-i8-i32:nt:17x64x128"],
    "litert": ["mm:f32:nn:17x65x127", "bmm:f32:nn:3x32x16x24"],
    "mlx": ["mm:f32:nn:17x65x127", "mm:bf16:nt:17x65x127", "mm:f64:nn:17x65x127", "woq_int8:f32-i8-f32:nt:17x65x128"],
    "mnn": ["mm:f32:nn:17x65x127", "bmm:f32:nn:3x32x16x24"],
    "ncnn": ["mm:f32:nn:17x65x127", "bmm:f32:nn:3x32x16x24"],
    "openvino": [
        "mm:f32:nn:17x65x127",
        "mm:bf16:nt:17x65x127",
        "bmm:f16:nn:3x32x16x24",
        "woq_int8:f32-i8-f32:nt:17x65x127",
    ],
    "tensorflow": [
        "mm:f32:nn:17x65x127",
        "mm:bf16:nt:17x65x127",
        "mm:f16:nn:17x65x127",
        "int_mm:u8-i8-i32:nt:17x64x128",
    ],
    "tinygrad": [
        "mm:f32:nn:17x65x127",
        "mm:f64:nn:17x65x127",
        "bmm:f16:nn:3x32x16x24",
        "int_mm:i8-i8-i32:nt:17x64x128",
    ],
}
# Kernels that are written in their file; without a GPU that of CUDA is not judged.
KERNELS = {
    "c": ["mm:f32:tn:17x65x127", "linear:f32:nt:17x65x127:bias+relu"],
    "numba": ["mm:f64:nt:17x65x127:a.padded", "linear:f32:nt:17x65x127:bias+relu"],
    "triton-mine": ["mm:f16:tn:17x65x127", "linear:f32:nt:17x65x127:bias+relu"],
}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[ModuleType, Any]]:
    """An example's module and its backend, or a skip where its library is not installed."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name: str) -> tuple[ModuleType, Any]:
        package = name.partition("-")[0]
        if name in {"numba", "triton-mine"}:  # imported by the file, as its user does
            pytest.importorskip(package)
            monkeypatch.setenv("TRITON_INTERPRET", "1")  # the file sets it, and what it sets would stay
        module = importlib.import_module(f"{package}_{'kernel' if name in KERNELS else 'backend'}")
        registry = Registry()
        module.pytest_gemm_register_backends(registry)
        backend: Any = registry[name]
        if reason := backend.availability("cpu").reason:
            pytest.skip(f"{reason.text}: {reason.remedy}")
        return module, backend

    return load


def test_every_example_is_judged_here() -> None:
    on_cpu = {path.name for path in FOLDER.glob("*_backend.py") if "on_cuda" not in path.read_text(encoding="utf-8")}
    assert on_cpu == {f"{name}_backend.py" for name in PROBLEMS}


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in PROBLEMS.items() for line in lines])
def test_a_library_is_right(example: Callable[[str], Any], name: str, line: str) -> None:
    _, backend = example(name)
    outcomes = judged(backend, line)
    assert outcomes
    assert [(o.distribution, o.reason) for o in outcomes if o.status is not Status.PASSED] == []


def test_ggml_with_the_scales_of_other_blocks_is_named(
    example: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, backend = example("ggml")
    right = module.blocks
    monkeypatch.setattr(module, "blocks", lambda codes, scales: right(codes, scales.roll(1, 1)))
    wrong = [o for o in judged(backend, PROBLEMS["ggml"][1]) if o.status is Status.INCORRECT]
    assert len(wrong) >= 3
    assert {(o.cause, o.composed) for o in wrong} == {("neighbouring group", False)}


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in KERNELS.items() for line in lines])
def test_a_kernel_computes_bias_and_activation_itself_and_leaves_a_script(
    example: Callable[[str], Any], name: str, line: str
) -> None:
    module, backend = example(name)
    outcomes = judged(backend, line)
    assert [(o.distribution, o.reason) for o in outcomes if o.status is not Status.PASSED] == []
    assert {(o.composed, o.kernels) for o in outcomes} == {(False, ("matmul",))}
    problem = Problem.parse(line)
    recipe = backend.recipe(problem, tensors.make(problem, "int-2", 0))
    assert recipe.matmul == (module.__file__, "matmul")
    assert bool(recipe.call) is bool(problem.epilogue)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*_kernel.py")), ids=lambda path: path.name)
def test_a_kernel_has_fewer_than_40_lines_and_is_on_the_page(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line]) < 40
    page = FOLDER.parent / "docs" / "how-to" / "kernels.md"
    assert f"`examples/{path.name}`" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*_backend.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_says_what_it_needs(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 120
    assert "\nRequirements: " in text
    assert "\nRun: " in text
    assert "https://" in text


def test_each_known_failure_of_a_library_has_a_script_and_a_thread_or_report() -> None:
    found = FOLDER.parent / "docs" / "defects" / "libraries"
    ledgers = sorted((FOLDER / "known_failures").iterdir())
    assert ledgers
    for entry in (entry for ledger in ledgers for entry in Ledger.load(ledger).entries):
        assert (found / f"{entry.id}.py").exists()
        assert entry.link or (found / f"{entry.id}.md").exists()
    table = (found / "README.md").read_text(encoding="utf-8")
    files = {path.name for path in found.iterdir() if path.is_file()}
    assert set(re.findall(r"\]\(([\w-]+\.(?:py|md))\)", table)) == files - {"README.md"}


def test_a_lost_k_tail_is_named(example: Callable[[str], Any]) -> None:
    _, backend = example("numpy")
    right = backend.matmul

    def without_tail(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        k = a.shape[-1] // 32 * 32
        made: torch.Tensor = right(a[..., :k], b[..., :k, :])
        return made

    backend.matmul = without_tail
    outcomes = judged(backend, "mm:f32:nn:17x65x127")
    assert {o.status for o in outcomes} == {Status.INCORRECT}
    assert any("the products with k in [96, 127) of K = 127 are missing" in o.details for o in outcomes)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda scales: scales[::-1], "the scales of the columns are in reverse order"),
        (lambda scales: np.roll(scales, 1, 0), "the scales are shifted: column j has that of column j - 1"),
        (lambda scales: np.roll(scales, -1, 0), "the scales are shifted: column j has that of column j + 1"),
        (lambda scales: np.full_like(scales, scales[0]), "every column has the scale of column 0"),
    ],
)
@pytest.mark.parametrize(
    "line", ["qlinear:u8-i8-u8:nt:17x65x128:quant.static+requant-0.37_230", "woq_int8:f32-i8-f32:nt:17x64x64"]
)
def test_the_scale_of_another_column_is_named(
    example: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, line: str, other: Callable[[Any], Any], words: str
) -> None:
    module, backend = example("onnxruntime")
    right = module.model

    def with_other_scales(op: str, constants: dict[str, Any], **attributes: int) -> Any:
        name = "bs" if op == "QLinearMatMul" else "s"  # a row of which has the scales of a column's blocks
        return right(op, {**constants, name: other(constants[name])}, **attributes)

    monkeypatch.setattr(module, "model", with_other_scales)
    outcomes = judged(backend, line)
    assert Status.INCORRECT in {o.status for o in outcomes}
    assert any(words in o.details for o in outcomes)


CPU = """HloModule jit_program, is_scheduled=true

%fused_computation (param_0: f32[64,128], param_1: f32[128,64]) -> f32[64,64] {
  ROOT %dot_general.0 = f32[64,64]{1,0} dot(%param_0, %param_1), lhs_contracting_dims={1}
}

%fused_computation.1 (param_0.2: f32[64,64], param_1.5: f32[64]) -> f32[64,64] {
  ROOT %add.0 = f32[64,64]{1,0} add(%mul.0, %param_0.2), metadata={op_name="jit(program)/add"}
}

ENTRY %main.1 (a.1: f32[64,128], b.1: f32[128,64], bias.1: f32[64]) -> f32[64,64] {
  %a.1 = f32[64,128]{1,0} parameter(0), metadata={op_name="a"}
  %ynn_fusion = f32[64,64]{1,0} fusion(%a.1, %b.1), kind=kCustom, calls=%fused_computation, metadata={}
  ROOT %add_fusion = f32[64,64]{1,0} fusion(%bias.1, %ynn_fusion), kind=kLoop, calls=%fused_computation.1, metadata={}
}
"""
GPU = """HloModule jit_program, is_scheduled=true

ENTRY %main.1 (a.1: f32[64,128], b.1: f32[128,64], bias.1: f32[64]) -> f32[64,64] {
  %a.1 = f32[64,128]{1,0} parameter(0), metadata={op_name="a"}
  ROOT %matmul.0 = f32[64,64]{1,0} custom-call(%a.1, %b.1, %bias.1), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"alpha_real":0.5,"beta":0,"epilogue":"BIAS"}}
}
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CPU, ("jit: ynn_fusion(dot), add_fusion", False)),
        (GPU, ("jit: matmul.0(__cublas$lt$matmul BIAS)", True)),
        (CPU.replace("%add.0 = f32[64,64]{1,0} add(", "%dot.1 = f32[64,64]{1,0} dot("), None),
    ],
)
def test_what_xla_fused_is_read_from_its_program(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: tuple[str, bool] | None
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    found = importlib.import_module("xla_program").kernels(text)
    assert found == (expected or ("jit: ynn_fusion(dot), add_fusion(dot)", True))


def test_a_contract_that_keeps_subnormal_numbers_is_broken_by_jax(example: Callable[[str], Any]) -> None:
    _, backend = example("jax")
    backend.flushes = False
    outcomes = judged(backend, "mm:f32:nn:17x65x127")
    assert [o.distribution for o in outcomes if o.status is Status.INCORRECT] == ["specials"]


def test_a_contract_that_flushes_them_is_broken_by_a_kernel_that_keeps_them() -> None:
    registry = Registry()
    registry.add_callable("keeps", torch.matmul, flushes=True)
    outcomes = judged(registry["keeps"], "mm:f32:nn:17x65x127")
    assert [o.distribution for o in outcomes if o.status is Status.INCORRECT] == ["specials"]


def test_the_template_registers_what_its_entry_point_names(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = FOLDER / "template"
    monkeypatch.syspath_prepend(str(folder))
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ((name, value),) = project["entry-points"]["pytest_gemm.backends"].items()
    registry = Registry()
    registry.ship([Shipped(name, value, project["name"], project["version"])])
    outcomes = judged(registry.named(name), "mm:bf16:nt:17x65x128")
    assert {o.status for o in outcomes} == {Status.PASSED}


def test_the_page_of_results_is_made_of_records(pytester: pytest.Pytester) -> None:
    page = pytester.path / "page.md"
    page.write_text("before\n<!-- generated: libraries -->\nold\n<!-- end -->\nafter\n")
    outcomes = [
        Outcome(CaseId("numpy", "mm:f32:nn:8x8x8"), "rand", 0, Status.PASSED),
        Outcome(CaseId("numpy", "mm:f32:nn:8x8x8"), "int-2", 0, Status.INCORRECT),
        Outcome(CaseId("numpy", "mm:f64:nn:8x8x8"), "rand", 0, Status.PASSED),
        Outcome(CaseId("numpy", "mm:f16:nn:8x8x8"), "", 0, Status.UNSUPPORTED),
    ]
    run = {"run": plain(Head(versions={"numpy": "2.4.6"}))}
    lines = [json.dumps(one) for one in (run, *map(to_record, outcomes))]
    (pytester.path / "run.jsonl").write_text("\n".join(lines) + "\n")
    speed = pytester.mkdir("speed") / "samples"
    speed.mkdir()
    for index, seconds in enumerate((1.0, 3.0, 2.0)):
        times: Any = {"subject": (seconds, seconds), "comparator": (2.0, 2.0), "comparator_name": "aten"}
        sample = Sample(CaseId("numpy", "mm:f32:nn:64x64x64"), "cpu", Status.PASSED, **times)
        (speed / f"{index}.jsonl").write_text(session_text(Session("cpu", samples=(sample,))))
    result = pytester.run(sys.executable, FOLDER / "results.py", page, pytester.path, speed.parent)
    assert result.ret == 0
    made = page.read_text()
    assert made.startswith("before\n<!-- generated: libraries -->\n| library")
    assert made.endswith("<!-- end -->\nafter\n")
    cells = [cell.strip() for cell in made.splitlines()[4].split("|")]
    assert cells[1:9] == ["numpy", "2.4.6", "2", "3", "1", "1", "1", "1"]
    head, _, times = [[cell.strip() for cell in line.split("|")] for line in made.splitlines()[6:9]]
    assert head[1:3] == ["time over ATen's", "`mm:f32:nn:64x64x64`"]
    assert times[1:3] == ["numpy", "1.00 (0.50)"]


def test_a_page_without_the_marks_is_an_error(pytester: pytest.Pytester) -> None:
    page = pytester.path / "page.md"
    page.write_text("<!-- generated: libraries -->\nold\n<!-- end -->\n")
    outcome = to_record(Outcome(CaseId("numpy", "mm:f32:nn:8x8x8"), "rand", 0, Status.PASSED))
    (pytester.path / "run.jsonl").write_text(json.dumps(outcome) + "\n")
    result = pytester.run(sys.executable, FOLDER / "results.py", page, pytester.path, "--block=mine")
    assert result.ret == 2
    result.stderr.fnmatch_lines(
        ["*page.md: has no block for the tables; write the lines <!-- generated: mine --> and*"]
    )
    assert "old" in page.read_text()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("onnxruntime", "woq_int8:f32-i8-f32:nt:17x65x127"),
        ("onnxruntime", "mm_plus_mm:f32:nn:17x33x64"),
        ("torchao", "da8w8:i8-i8-bf16:nt:17x65x128:quant.rowwise"),
    ],
)
def test_a_timed_call_computes_what_was_judged(example: Callable[[str], Any], name: str, line: str) -> None:
    problem = Problem.parse(line)
    first, second = (tensors.make(problem, distribution, 0, "cpu") for distribution in ("rand", "int-2"))
    prepared = example(name)[1].prepare(problem, first)
    with prepared.timed(first) as call, prepared.timed(second) as other:
        results = [call(), other(), call()]
    assert all(map(torch.equal, results, [prepared.run(given) for given in (first, second, first)]))


def test_a_run_of_a_subclass_is_what_is_timed() -> None:
    class Doubled(CallablePrepared):
        def run(self, operands: Any) -> torch.Tensor:
            return 2 * super().run(operands)

    problem = Problem.parse("mm:f32:nn:17x33x64")
    given = tensors.make(problem, "rand", 0, "cpu")
    prepared = Doubled(CallableBackend("doubled", torch.matmul), problem)
    with prepared.timed(given) as call:
        assert torch.equal(call(), prepared.run(given))


def test_what_a_function_imports_is_imported_before_its_first_run() -> None:
    registry = Registry()
    registry.add_callable("imports", torch.matmul, imports=("colorsys",))
    sys.modules.pop("colorsys", None)
    problem = Problem.parse("mm:f32:nn:17x33x64")
    registry["imports"].prepare(problem, tensors.make(problem, "rand", 0, "cpu"), BuildRequest())
    assert "colorsys" in sys.modules


def test_what_is_packed_once_is_packed_for_each_run_and_before_a_timed_call() -> None:
    packed: list[torch.Tensor] = []

    def pack(b: torch.Tensor) -> torch.Tensor:
        packed.append(b)
        return b.clone()

    registry = Registry()
    registry.add_callable("packs", torch.matmul, pack=pack)
    problem = Problem.parse("mm_plus_mm:f32:nn:17x33x64")
    assert {o.status for o in judged(registry["packs"], problem.line)} == {Status.PASSED}
    first, second = (tensors.make(problem, name, 0, "cpu") for name in ("rand", "int-2"))
    prepared: Any = registry["packs"].prepare(problem, first, BuildRequest())
    packed.clear()
    with prepared.timed(first) as call, prepared.timed(second) as other:
        assert len(packed) == 2 * 2
        results = [call(), other(), call(), other()]
        assert len(packed) == 2 * 2
        expected = [prepared.run(given) for given in (first, second)]
        assert len(packed) == 4 * 2
    assert all(map(torch.equal, results, 2 * expected))
    with pytest.raises(Unsupported, match="takes a packed B"):
        registry.named("packs").recipe(problem, first)  # type: ignore[attr-defined]
