"""A failing case as a standalone script, and its picture."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from matplotlib import figure

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import Recipe
from pytest_gemm.api.request import BuildRequest
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.backends.cutlass.backend import CutlassBackend
from pytest_gemm.backends.in_graph import GraphBackend
from pytest_gemm.backends.inductor import naming
from pytest_gemm.core.case_id import CandidateSelection, CaseId, Device, Mode
from pytest_gemm.core.outcome import Outcome, Reason, Status
from pytest_gemm.failures import artifacts, repro
from pytest_gemm.failures.text import Rerun
from pytest_gemm.judging import verdict as verdict_module
from pytest_gemm.judging.case import Case, Evidence, Judged
from pytest_gemm.judging.judge import Judge
from pytest_gemm.numerics import interval as interval_module
from pytest_gemm.numerics import reference as reference_module
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands import tensors
from pytest_gemm.problem.problem import Problem
from pytest_gemm.worker.messages import Ran

MM = Problem.parse("mm:f32:nn:8x16x32")
WRONG = "def mine(a, b):\n    c = a @ b\n    c[..., 4:, :] += 1\n    return c\n"
RIGHT = "def mine(a, b):\n    return a @ b\n"


def judged(
    tmp_path: Path,
    problem: Problem,
    distribution: str,
    text: str = WRONG,
    activations: tuple[str, ...] = (),
    candidate: str = "",
) -> tuple[list[Judged], Case, Path]:
    """What the judge found of a function of a file, by default one which is wrong from row 4 on."""
    path = tmp_path / "mine.py"
    path.write_text(text)
    space: dict[str, Any] = {}
    exec(compile(text, str(path), "exec"), space)
    mine = space["mine"]
    more: dict[str, Any] = {"candidates": ("64x64", candidate), "bind": space.get("bind")} if candidate else {}
    backend = CallableBackend("mine", mine, linear=mine if activations else None, activations=activations, **more)
    case = Case(backend, problem, (distribution,), 0, Device.CPU, CandidateSelection(candidate))
    found = list(Judge().judge(case))
    assert [one.outcome.status for one in found] == [Status.INCORRECT]
    return found, case, path


def saved(folder: Path, found: list[Judged], case: Case, warm: str = "") -> Path:
    """The folder of what was found, without the picture, which takes longer than the rest."""
    with patch.object(artifacts, "draw"):
        artifacts.save(folder / "kept", found, case, Rerun("tests"), warm)
    (place,) = (folder / "kept").iterdir()
    return place


def run(script: Path) -> int:
    """Its exit status; in this process, for torch takes seconds to start."""
    threads = torch.get_num_threads()
    sys.modules.pop("mine", None)  # the file may be another one
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script))
    finally:
        torch.set_num_threads(threads)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(("distribution", "alone"), [("rand", True), ("specials", False)])
def test_a_script_fails_as_the_case_did_and_no_longer_once_it_is_mended(
    tmp_path: Path, distribution: str, alone: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    found, case, source = judged(tmp_path, MM, distribution)
    if not alone:  # no kernel to ask: the failing operands are saved
        found = [Judged(one.outcome, dataclasses.replace(one.evidence, again=None)) for one in found if one.evidence]
    artifacts.save(tmp_path / "kept", found, case, Rerun("tests"))
    (place,) = (tmp_path / "kept").iterdir()
    assert {"report.txt", "repro.py", "error_map.png", "tensors.pt"} <= {one.name for one in place.iterdir()}
    assert (place / "repro.pt").exists() is not alone
    assert run(place / "repro.py") == 1
    said = capsys.readouterr().out
    assert re.search(r"\d+ of 128 elements are wrong; the worst is at \([4-7], \d+\)", said)
    assert re.search(r"expected \S+, actual \S+, bound \S+", said)
    source.write_text(RIGHT)
    assert run(place / "repro.py") == 0
    source.write_text("def mine(a, b):\n    raise ValueError\n")
    assert run(place / "repro.py") == 2


def test_a_script_of_a_compiled_program_has_the_function_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n\nlib = torch.library.Library('of_a_script', 'FRAGMENT')\n"
        "lib.define('cut(Tensor a, Tensor b) -> Tensor')\n"
        "lib.impl('cut', lambda a, b: a[:, :-1] @ b[:-1], 'CPU')\n"
        "lib.impl('cut', lambda a, b: a.new_empty(a.shape[0], b.shape[1]), 'Meta')\n\n\n"
        "def mine(a, b):\n    return torch.ops.of_a_script.cut(a, b)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    module = importlib.import_module("mine")
    backend = GraphBackend("mine", module.mine, graph="of_a_script::cut")
    case = Case(backend, Problem.parse("mm:f32:nn:8x16x33:relu"), ("rand",), 0, Device.CPU, mode=Mode.STATIC)
    place = saved(tmp_path, list(Judge().judge(case)), case)
    text = (place / "repro.py").read_text()
    assert "torch.compile(functools.partial(program, matmul=mine), fullgraph=True)" in text
    module.lib._destroy()  # the script defines the operator again
    assert run(place / "repro.py") == 1
    assert "elements are wrong" in capsys.readouterr().out


@pytest.mark.parametrize("most", [1 << 30, 0])
def test_what_the_ledger_knows_leaves_its_report_unless_all_is_asked_for(tmp_path: Path, most: int) -> None:
    (failed,), case, _ = judged(tmp_path, MM, "rand")
    known = dataclasses.replace(failed.outcome, status=Status.KNOWN_FAILURE, known_failure="an-entry")
    artifacts.save(tmp_path / "kept", [Judged(known, failed.evidence)], case, Rerun("tests"), most=most)
    files = {path.name for path in (tmp_path / "kept").rglob("*.*")}
    said = next((tmp_path / "kept").rglob("report.txt")).read_text()
    assert (files == {"report.txt"}) is ("no further files: the ledger has it as an-entry" in said) is bool(most)


def test_without_matplotlib_the_report_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, case, _ = judged(tmp_path, MM, "rand")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert artifacts.save(tmp_path / "kept", found, case, Rerun("tests")) == ""
    (place,) = (tmp_path / "kept").iterdir()
    assert {one.name for one in place.iterdir()} == {"report.txt", "repro.py", "tensors.pt"}
    said = (place / "report.txt").read_text()
    assert "no error map: matplotlib is not installed: pip install matplotlib" in said


def test_a_full_folder_gets_reports_alone_and_what_is_written_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, case, _ = judged(tmp_path, MM, "rand")
    kept, measured = tmp_path / "kept", list[Path]()
    is_file = Path.is_file

    def noted(path: Path) -> bool:
        measured.append(path)
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", noted)
    monkeypatch.setattr(artifacts, "draw", lambda *_: None)
    for seed in range(4):  # a cause of its own each
        outcomes = [dataclasses.replace(one.outcome, seed=seed, cause=f"cause {seed}") for one in found]
        again = [Judged(outcome, one.evidence) for outcome, one in zip(outcomes, found, strict=True)]
        artifacts.save(kept, again, case, Rerun("tests"), most=1 << 20 if seed < 3 else 1 << 10)
    *whole, last = sorted(kept.iterdir())
    assert all((place / "tensors.pt").exists() for place in whole)
    assert [path.name for path in last.iterdir()] == ["report.txt"]
    assert "kept has reached 0 MB" in (last / "report.txt").read_text()
    assert all(measured.count(place / "tensors.pt") == 1 for place in whole)


OF_SEVERAL = """
def mine(a, b, candidate=""):
    return a @ b + (candidate == "128x64")
"""
WITH_BIND = """
def bind(problem, t, candidate=""):
    return (lambda: mine(t["a"], t["b"], candidate) + t["bias"]) if problem.op.name == "addmm" else None
"""


@pytest.mark.parametrize("line", ["mm:f32:nn:8x16x32", "addmm:f32:nn:8x16x32:bias"])
@pytest.mark.parametrize("text", [OF_SEVERAL, OF_SEVERAL + WITH_BIND])
def test_a_script_and_a_rerun_name_the_candidate(tmp_path: Path, line: str, text: str) -> None:
    found, case, source = judged(tmp_path, Problem.parse(line), "rand", text, candidate="128x64")
    place = saved(tmp_path, found, case)
    assert re.search(r"Candidate 128x64.*Needs torch and pytest-gemm", (place / "repro.py").read_text(), re.DOTALL)
    assert "--gemm-candidates=128x64" in (place / "report.txt").read_text()
    assert run(place / "repro.py") == 1
    source.write_text(text.replace('(candidate == "128x64")', "0"))
    assert run(place / "repro.py") == 0


@pytest.mark.parametrize("line", ["linear:f32:nt:8x16x32:bias+relu", "mm:f32:nn:8x16x32"])
def test_a_script_calls_a_decorated_function_and_a_linear_by_their_names(
    tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "decorators_beside.py").write_text(
        "import functools\n\ndef decorated(f):\n    return functools.wraps(f)(lambda *x: f(*x) + 1)\n"
    )
    source = """
from decorators_beside import decorated

def plain(a, b, bias=None, activation=None):
    c = a @ b if bias is None else a @ b + bias
    return c if activation is None else c.relu()

mine = decorated(plain)
"""
    with monkeypatch.context() as patched:
        patched.syspath_prepend(str(tmp_path))
        found, case, path = judged(tmp_path, Problem.parse(line), "rand", source, activations=("relu",))
    monkeypatch.delitem(sys.modules, "decorators_beside")
    place = saved(tmp_path, found, case)
    assert run(place / "repro.py") == 1
    path.write_text(source.replace("= decorated(plain)", "= plain"))
    assert run(place / "repro.py") == 0


@pytest.mark.parametrize("what", ["c.to_sparse()", "c.to('meta')", "torch.quantize_per_tensor(c, 1.0, 0, torch.qint8)"])
def test_a_result_that_cannot_be_drawn_leaves_the_other_files(tmp_path: Path, what: str) -> None:
    source = f"import torch\n\n\ndef mine(a, b):\n    c = a @ b\n    return {what}\n"
    found, case, _ = judged(tmp_path, MM, "rand", source)
    artifacts.save(tmp_path / "kept", found, case, Rerun("tests"))
    (place,) = (tmp_path / "kept").iterdir()
    assert {one.name for one in place.iterdir()} == {"report.txt", "tensors.pt"}
    assert "no script: a script compares elements in memory" in (place / "report.txt").read_text()


def test_a_script_of_zeros_of_the_wrong_sign_fails_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    signed = "import torch\n\n\ndef mine(a, b):\n    c = a @ b\n    return torch.where(c == 0, -c.abs(), c)\n"
    found, case, source = judged(tmp_path, MM, "int-1", signed)
    place = saved(tmp_path, found, case)
    assert run(place / "repro.py") == 1
    assert re.search(r"elements are wrong.*\nexpected 0, actual -0, bound 0", capsys.readouterr().out)
    source.write_text(RIGHT)
    assert run(place / "repro.py") == 0


def wrong(problem: Problem, contract: Contract, *, asked: bool = True) -> Any:
    """Evidence that each element is one too large, and of the same where the kernel can be asked again."""
    given = tensors.make(problem, "int-2", 0)
    interval = interval_module.intervals(problem, given, reference_module.reference(problem, given), contract)[0]
    actual = interval.expected.float() + 1
    ran = Ran((actual,), Proof(), contract)
    return Evidence(given, interval=interval, actual=actual, again=(lambda _: ran) if asked else None)


def failed(line: str, status: Status, code: str, candidate: str = "") -> Outcome:
    return Outcome(CaseId("cpp", line, candidate), "int-2", 0, status, Reason(code, "it failed"))


@pytest.mark.parametrize(
    ("line", "outcome", "warm", "mode", "has"),
    [
        ("mm:f32:nn:0x16x16", (Status.CRASHED, "prepare-InductorError"), "", "", "'InductorError' in traceback"),
        ("addmm:f32:nn:16x8x16:bias", (Status.FALLBACK, "foreign-kernel"), "", "", "run_and_get_code"),
        ("woq_int8:bf16-i8-bf16:nt:4x16x33", (Status.CRASHED, "process-died"), "", "", "mprotect"),
        (
            "linear:bf16:nt:17x65x127:bias+gelu_tanh+add",
            (Status.INCORRECT, "x"),
            "elsewhere",
            "",
            '"first" in sys.argv',
        ),
        ("linear:bf16:nt:17x65x127:bias+gelu_tanh+add", (Status.INCORRECT, "x"), "here", "", "torch.compiler.reset()"),
        ("linear:f32:nt:17x65x127:bias+relu:m.dynamic", (Status.INCORRECT, "x"), "", "", "mark_dynamic(a, 0)"),
        ("mm:f32:nn:17x65x127:m.dynamic+unknown", (Status.INCORRECT, "x"), "", "", "mark_unbacked(a, 0)"),
        ("linear:f32-f32-bf16:nt:32x38x64:bias:a.padded", (Status.INCORRECT, "x"), "", "aoti", "aoti_load_package"),
        ("mm:f16:nn:16x16x16:silu+add:program.multi_output", (Status.INCORRECT, "x"), "", "dynamic", "dynamic=True"),
        ("linear:f32:nt:16x8x16:bias+mul-n+t+add", (Status.INCORRECT, "x"), "", "", "transpose(-2, -1)"),
    ],
)
def test_scripts_are_short_and_python(line: str, outcome: tuple[Status, str], warm: str, mode: str, has: str) -> None:
    problem = Problem.parse(line)
    backend, request = CppBackend(), BuildRequest(mode=Mode(mode), user_caches="tag" if warm and not mode else "")
    evidence = wrong(problem, Contract("f32", "either"), asked=False)
    if outcome[0] is not Status.INCORRECT:
        evidence = Evidence(evidence.operands)
    recipe = backend.recipe(problem, evidence.operands, request)
    made = repro.script(failed(line, *outcome), recipe, evidence, warm)
    assert len(made.text.splitlines()) < repro.LONGEST
    assert max(map(len, made.text.splitlines())) <= 120
    assert has in made.text
    assert bool(made.tensors) is (outcome[0] is Status.INCORRECT)
    compile(made.text, "repro.py", "exec")


@pytest.mark.parametrize("line", ["linear_dgrad:f32:nn:8x16x32:relu", "linear_wgrad:f32:tn:8x16x32:relu"])
@pytest.mark.parametrize("saved", [False, True])
def test_a_script_of_a_gradient_needs_torch_alone(tmp_path: Path, line: str, saved: bool) -> None:
    evidence = wrong(Problem.parse(line), Contract("f32", "either"), asked=not saved)
    made = repro.script(failed(line, Status.INCORRECT, "x"), Recipe("eager"), evidence)
    assert "pytest_gemm" not in made.text
    assert bool(made.tensors) is saved
    (tmp_path / "repro.py").write_text(made.text)
    if saved:
        torch.save(made.tensors, tmp_path / "repro.pt")
    assert run(tmp_path / "repro.py") == 0  # PyTorch's own gradient is right


@pytest.mark.parametrize(
    "line",
    [
        "woq_int8:bf16-i8-bf16:nt:8x16x32",
        "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:8x16x32:bias:quant.tensorwise",
        "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:8x16x32:quant.tensorwise:program.v2",
        "scaled_mm:f4e2m1fn-f4e2m1fn-bf16:nt:8x16x32:quant.nv-2:program.v2",
        "scaled_grouped_mm:f8e4m3fn-f8e4m3fn-bf16:nt:4x8x16x32:quant.rowwise",
    ],
)
def test_a_script_of_narrow_floats_has_the_operands_of_the_case(
    tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled(a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, bias: Any = 0.0, **how: Any) -> Any:
        return ((a.double() @ b.double()) * scale_a * scale_b + bias).to(how["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", scaled)  # PyTorch's own raises where oneDNN is capped
    problem = Problem.parse(line)
    evidence = wrong(problem, Contract("f32", "eager"))
    made = repro.script(failed(line, Status.INCORRECT, "x"), Recipe("eager"), evidence)
    (tmp_path / "repro.py").write_text(made.text)
    torch.save(made.tensors, tmp_path / "repro.pt")
    on_cpu = problem.op.name in {"scaled_mm", "woq_int8"} and not problem.micro_block
    assert run(tmp_path / "repro.py") == (0 if on_cpu else 2)  # PyTorch's own product is right where it has one


@pytest.mark.parametrize(
    ("line", "high", "full"),
    [
        ("mm:f32:nn:16x16x16", False, True),
        ("mm:f32:nn:16x16x16:math.tf32", True, True),
        ("mm:f16:nn:16x16x16:math.half_partials", False, False),
    ],
)
def test_a_script_sets_the_precision_of_the_problem(line: str, high: bool, full: bool) -> None:
    problem = Problem.parse(line)
    given = dataclasses.replace(tensors.make(problem, "int-2", 0), device=Device.CUDA)
    text = repro.script(failed(line, Status.CRASHED, "prepare-X"), Recipe(), Evidence(given)).text
    assert ('torch.set_float32_matmul_precision("high")' in text) is high
    assert ("allow_fp16_reduced_precision_reduction = False" in text) is full


def test_operands_beside_a_guard_page_keep_their_distance_from_an_aligned_address() -> None:
    """And a script whose child ends with an exception has not shown that the process dies."""
    problem = Problem.parse("woq_int8:bf16-i8-bf16:nt:1x16x32:a.offset")
    given = tensors.make(problem, "int-2", 0)
    outcome = failed(problem.line, Status.CRASHED, "process-died")
    text = repro.script(outcome, CppBackend().recipe(problem, given), Evidence(given)).text
    scope: dict[str, Any] = {}
    exec(
        text[: text.index("def program")].replace("import torch, torch._inductor.config", "import torch"), scope
    )  # the function of the script
    tensor = scope["tensor"]
    assert tensor((1, 32), (32, 1), 1, torch.bfloat16, 1).data_ptr() % 64 == 2
    assert (tensor((4, 32), (32, 1), 0, torch.bfloat16, 1).data_ptr() + 256) % 4096 == 0
    assert tensor((17, 0), (1, 1), 0, torch.float32, 1).shape == (17, 0)
    assert "sys.exit(1 if status < 0 else 2 * (status > 0))" in text


def test_a_script_of_cutlass_is_python_and_names_no_folder_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_gemm.backends.cutlass.backend.cutlass_tree", lambda: "/somewhere/cutlass-tree")
    monkeypatch.setattr("pytest_gemm.backends.cutlass.backend.nvcc", lambda: "/usr/local/cuda/bin/nvcc")
    problem = Problem.parse("mm:f16:nn:64x128x64:relu")
    given = tensors.make(problem, "int-2", 0)
    name = f"cutlass3x_sm90_{'f16_' * 20}128x256x64,swizzle=1"  # which Inductor has with a space for the comma
    recipe = CutlassBackend().recipe(problem, given, BuildRequest(candidate=name))
    text = repro.script(failed(problem.line, Status.CRASHED, "prepare-X", name), recipe, Evidence(given)).text
    compile(text, "repro.py", "exec")
    assert "swizzle=1$" in text
    assert "/somewhere" not in text
    assert "TORCHINDUCTOR_CUTLASS_DIR" in str(ast.get_docstring(ast.parse(text)))


def test_a_failure_that_no_script_can_show_says_so(tmp_path: Path) -> None:
    backend = CallableBackend("lambda", lambda a, b: a @ b + 1, frozenset({"f32"}), True, None, True)
    case = Case(backend, MM, ("rand",), 0, Device.CPU)
    found = list(Judge().judge(case))
    place = saved(tmp_path, found, case)
    assert not (place / "repro.py").exists()
    assert "no script: a script loads a function of a file by its name" in (place / "report.txt").read_text()


def test_what_fails_only_after_other_programs_has_no_script(tmp_path: Path) -> None:
    found, case, _ = judged(tmp_path, MM, "rand")
    place = saved(tmp_path, found, case, "others")
    assert "no script: it fails after other programs were compiled" in (place / "report.txt").read_text()


def test_the_script_of_a_known_crash_is_that_of_the_crash() -> None:
    problem = Problem.parse("mm:f32:nn:0x16x16")
    evidence, recipe = Evidence(tensors.make(problem, "int-2", 0)), Recipe("eager")
    crash = failed(problem.line, Status.CRASHED, "prepare-InductorError")
    known = dataclasses.replace(crash, status=Status.KNOWN_FAILURE, known_failure="an-entry", failed_as=crash.status)
    assert repro.script(known, recipe, evidence).text == repro.script(crash, recipe, evidence).text
    assert "1 if 'InductorError' in traceback" in repro.script(known, recipe, evidence).text


DESCRIPTION = (
    "ACC_TYPE='tl.float32', ALLOW_TF32=False, BLOCK_K={k}, BLOCK_M={m}, BLOCK_N=128, EVEN_K=True, GROUP_M=8, "
    "USE_FAST_ACCUM=False, num_stages={stages}, num_warps=8"
)


@pytest.mark.parametrize(
    ("m", "k", "stages", "name", "matches"),
    [
        (64, 32, 4, "triton_mm_17", True),
        (641, 32, 4, "triton_mm_17", False),
        (64, 16, 4, "triton_mm_17", False),
        (64, 32, 5, "triton_mm_17", False),
        (64, 32, 4, "triton_mm_persistent_tma_3", False),
    ],
)
def test_a_candidate_is_forced_by_inductor_s_own_options(m: int, k: int, stages: int, name: str, matches: bool) -> None:
    options = naming.forcing("triton_mm-64x128x32,s4,w8,GROUP_M=8")
    names, descriptions = (options[f"test_configs.autotune_choice_{one}_regex"] for one in ("name", "desc"))
    found = re.search(names, name) and re.search(descriptions, DESCRIPTION.format(m=m, k=k, stages=stages))
    assert bool(found) is matches


def test_forcing_knows_cutlass_and_decompose_k() -> None:
    (pattern,) = naming.forcing("cutlass3x_sm90_64x128,swizzle=2").values()
    assert re.search(pattern, "cutlass3x_sm90_64x128 swizzle=2")
    assert not re.search(pattern, "cutlass3x_sm90_64x128 swizzle=22")
    (pattern,) = naming.forcing("decompose_k_mm_16_split").values()
    assert re.search(pattern, "decompose_k_mm_16_split_4")
    assert not re.search(pattern, "decompose_k_mm_16_splitting")
    operator = "cutedsl.Sm90StaticPersistentGemmOperator_ttt_ABFloat16_BBFloat16_outBFloat16_accFloat32_tile64x64x64"
    (pattern,) = naming.forcing(operator).values()
    assert re.search(pattern, f"nv_universal_gemm {operator}")
    assert not re.search(pattern, f"nv_universal_gemm {operator} swap_ab")
    assert naming.forcing("CppMicroGemmFP32Vec-8x48x1") == {}


@pytest.mark.parametrize(
    ("candidate", "tile"),
    [
        ("triton_mm-64x128x32,s4,w8", (64, 128)),
        ("CppMicroGemmFP32Vec-8x48x1", (8, 48)),
        ("cutlass3x_sm90_tensorop_h64x128x16gemm_f16_f16_f32_f16_f16_128x256x64_2x1x1_0_tnn_align8", (128, 256)),
        ("decompose_k_mm_16_split", None),
    ],
)
def test_the_tile_is_read_out_of_a_candidate_s_name(candidate: str, tile: tuple[int, int] | None) -> None:
    assert artifacts.tile(candidate) == tile


def test_the_map_is_above_one_exactly_where_the_result_is_wrong(tmp_path: Path) -> None:
    given = tensors.make(MM, "rand", 0)
    interval = interval_module.intervals(MM, given, reference_module.reference(MM, given), Contract("f32"))[0]
    actual = interval.expected.clone()
    actual[2, 3] += 1.0
    actual[5, 7] = torch.nan
    found = verdict_module.ratios(actual, interval)
    assert (found > 1).nonzero().tolist() == [[2, 3], [5, 7]]
    assert found[5, 7] == torch.inf
    path = tmp_path / "map.png"
    artifacts.draw(path, actual, interval, "a title", "triton_mm-4x8x32,s4,w8")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("shape", "rows", "columns"),
    [((3, 8, 8), (4, 6), (2, 5)), ((1, 4099), (0, 1), (4000, 4099)), ((1030, 3), *[(0, 2)] * 2)],
)
def test_the_map_shows_the_wrong_elements_at_their_places(
    shape: tuple[int, ...], rows: tuple[int, int], columns: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda made, *_, **__: drawn.append(made))
    expected = torch.zeros(shape, dtype=torch.float64)
    interval: Any = SimpleNamespace(lo=expected - 1, hi=expected + 1, expected=expected)
    actual = expected + 0.5
    actual.view(-1, *shape[-2:])[-1, slice(*rows), slice(*columns)] = 3.0
    if len(shape) > 2:
        actual[0, 0, 0] = 1e9  # the worst element is of another matrix, in which nothing else is wrong
    # torch has no isfinite of fp8
    artifacts.draw(Path("none.png"), actual.to(torch.float8_e4m3fn), interval, "a title")
    axes = drawn[0].axes[0]
    (image,) = axes.images
    left, right, bottom, top = image.get_extent()
    cells = image.get_array()
    for place, (first, last), count, size in (
        (1, columns, cells.shape[1], (right - left) / cells.shape[1]),
        (0, rows, cells.shape[0], (bottom - top) / cells.shape[0]),
    ):
        wrong = (cells > 1).any(axis=1 - place).nonzero()[0]
        assert wrong[0] * size <= first <= wrong[0] * size + size
        assert wrong[-1] * size <= last - 1 <= wrong[-1] * size + size
        assert (count - 1) * size < shape[place - 2] <= count * size
    assert {(axes.get_xlim()[1], axes.get_ylim()[0])} == {(shape[-1] - 0.5, shape[-2] - 0.5)}
    assert all(tick == int(tick) for tick in (*axes.get_xticks(), *axes.get_yticks()))
    colour = image.cmap(image.norm([0.99, 1.2]))
    assert colour[0][0] == colour[0][1] == colour[0][2], "a right element is grey"
    assert colour[1][0] > colour[1][2] + 0.5, "and a wrong one is not"


@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_the_map_and_the_verdict_measure_the_error_alike(shift: float) -> None:
    """Also where the reference itself is not among the accepted values, as where eager rounds in between."""
    given = tensors.make(MM, "rand", 0)
    exact = interval_module.intervals(MM, given, reference_module.reference(MM, given), Contract("f32"))[0]
    interval = dataclasses.replace(exact, lo=exact.expected + shift, hi=exact.expected + shift + 0.5)
    actual = interval.lo + 0.25
    actual[2, 3] += 2.25
    verdict = verdict_module.compare(actual.float(), interval, MM, given)
    assert verdict.ratio == pytest.approx(5.0, rel=1e-4)
    assert float(verdict_module.ratios(actual.float().double(), interval).max()) == verdict.ratio
