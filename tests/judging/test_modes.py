"""The same case through another entry: which modes there are, what they prove, and where they show."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from oracle import judged
from warm_processes import Programs

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.api.protocols import unsupported
from pytest_gemm.api.request import BuildRequest
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.backends.inductor import generated_code
from pytest_gemm.backends.inductor.artifact import Artifact
from pytest_gemm.backends.inductor.backend import Space
from pytest_gemm.core.case_id import MODES, CaseId, Mode
from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.ledger.entry import Environment
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.operands import tensors
from pytest_gemm.problem.problem import Problem

MM = Problem.parse("mm:f32:nn:8x9x10")
MINE = CallableBackend("mine", torch.matmul, frozenset({"f32"}), True, None, True)
MODED = Outcome(CaseId("cpp", MM.line, mode=Mode.AOTI), "rand", 0, Status.INCORRECT)


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_that_a_backend_lacks_is_refused_with_its_reason(mode: str) -> None:
    lacking = {
        "mine": {"static", "dynamic", "cudagraphs", "aoti", "cpp-wrapper"},
        "cpp": {"eager", "cudagraphs"},
        "aten": {"cudagraphs"},
    }
    for backend in (MINE, CppBackend(), AtenBackend()):
        if mode not in lacking[backend.name]:
            assert unsupported(backend, MM, BuildRequest(mode=Mode(mode))) is None
            continue
        (outcome,) = judged(backend, MM.line, "rand", mode=Mode(mode))
        assert (outcome.status, outcome.mode) == (Status.UNSUPPORTED, mode)
        assert outcome.code == "mode"


@pytest.mark.compiler
def test_compiled_for_any_size_the_template_is_judged_and_proved() -> None:
    outcomes = judged(CppBackend(threads=1), MM.line, "int-2", "rand", mode=Mode.DYNAMIC)
    assert [o.status for o in outcomes] == [Status.PASSED, Status.PASSED]
    assert all("cpp_fused_mm" in o.kernels[0] and o.chosen for o in outcomes)


@pytest.mark.compiler
@pytest.mark.parametrize(
    "line",
    [
        "qlinear:u8-i8-f32:nt:3x16x2:bias:quant.static:a.7bit",  # whose K is a symbol
        "qlinear:u8-i8-f32:nt:3x16x1:bias:quant.static:a.7bit",
        "bmm:f32:nn:3x4x5x6",  # whose N and K are
        "bmm:f32:nn:3x4x5x6:b.constant",
    ],
)
def test_compiled_for_any_size_cpp_claims_what_inductor_has_a_candidate_for(line: str) -> None:
    problem = Problem.parse(line)
    backend, request = CppBackend(threads=1), BuildRequest(mode=Mode.DYNAMIC)
    found = backend._list(problem, tensors.make(problem, "int-2", 0), request, Space())
    assert (backend.supports(problem, request) is None) == any(name.startswith("CppMicro") for name in found)


@pytest.mark.compiler
def test_a_product_under_autocast_that_inductor_writes_itself_may_take_the_operands_as_they_are() -> None:
    outcomes = judged(AtenBackend(), "bmm:f32-f32-bf16:nt:2x9x10x1", "rand", "int-2", mode=Mode.STATIC)
    assert [o.status for o in outcomes] == [Status.PASSED, Status.PASSED]


@pytest.mark.parametrize("counted", [(), ("kernel_1",)])
def test_a_graph_that_the_compile_has_recorded_is_proved_by_the_compile_s_calls(counted: tuple[str, ...]) -> None:
    calls: list[str] = []

    def replay() -> torch.Tensor:
        calls.extend(counted)
        return torch.ones(1)

    artifact = object.__new__(Artifact)  # a graph needs a CUDA device
    artifact._recorded = ()
    artifact._compiled = SimpleNamespace(  # type: ignore[assignment]  # those of its attributes that are asked for
        calls=calls, order=("kernel_0",), function=replay, session=SimpleNamespace(graph_skipped=False)
    )
    assert artifact._replayed([]).item() == 1.0
    assert calls == list(counted[:1] or ("kernel_0",))


PROGRAM = """
void cpp_fused_mm_0(const float* X, const float* W, float* Y);
void cpp_fused_relu_1(float* X);
    cpp_fused_mm_0((const float*)(arg1_1.data_ptr()), (float*)(buf0.data_ptr()));
    cpp_fused_relu_1((float*)(buf0.data_ptr()));
{more}
inline void cpp_fused_mm_0_micro_gemm_kernel(
"""


def test_what_a_program_of_cpp_calls_is_read_in_it() -> None:
    found = generated_code.cpp_program(PROGRAM.format(more=""))
    assert found.kernels == {"cpp_fused_mm_0": True, "cpp_fused_relu_1": False}
    assert found.calls == ("cpp_fused_mm_0", "cpp_fused_relu_1")
    assert not found.foreign


@pytest.mark.parametrize(("call", "name"), [
    ("aoti_torch_cpu_mm_out(buf0, arg0, arg1)", "mm_out"), ("aoti_torch_cpu_addmm_out(buf0, arg0, arg1)", "addmm_out"),
    ("aoti_torch_cpu_mkldnn__linear_pointwise(arg0, arg1)", "mkldnn__linear_pointwise"),
    ("aoti_torch_cpu__mkl_linear(arg0, arg1)", "mkl_linear"), ("aoti_torch_cuda_bmm_out(buf0, arg0)", "bmm_out"),
])  # fmt: skip
def test_somebody_else_s_product_shows_in_a_program_of_cpp(call: str, name: str) -> None:
    (found,) = generated_code.cpp_program(PROGRAM.format(more=f"    AOTI_TORCH_ERROR_CODE_CHECK({call});")).foreign
    assert found.endswith(name)


@pytest.mark.parametrize(
    ("patterns", "explains"), [('"aoti"', True), ('"dynamic"', False), ('"!aoti"', False), ('"*"', True)]
)
def test_a_ledger_entry_may_speak_of_modes(tmp_path: Path, patterns: str, explains: bool) -> None:
    path = tmp_path / "ledger.toml"
    path.write_text(f'[[known-failure]]\nid = "x"\nreason = "y"\nbackend = "cpp"\nmode = {patterns}\n')
    found = Ledger.load(path).match(MODED, MM, Environment(torch.__version__))
    assert bool(found) is explains


@pytest.mark.slow
def test_a_loaded_package_is_let_go_of_when_the_process_ends(programs: Programs) -> None:
    text = """
import ctypes
from pytest_gemm.backends.inductor import torch_compat
class Package:
    def __call__(self): print("called")
    def __del__(self): print("folder removed")
program = torch_compat.until_exit(Package())
program()
ctypes.pythonapi.Py_IncRef(ctypes.py_object(program))  # whom nobody destroys
"""
    done = subprocess.run([programs.python, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["called", "folder removed", ""]
