"""The files of a failure, for every op, flag, view and step that a problem line may have."""

from __future__ import annotations

import functools
import re
import runpy
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.api.request import DEFAULT, BuildRequest
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.conformance import matrix
from pytest_gemm.core.case_id import CaseId, Device
from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.failures import artifacts, findings, repro
from pytest_gemm.failures.text import Rerun, folder_name
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs import program
from pytest_gemm.run.known import eager_refusal

OPS = sorted({problem.op.name for problem in matrix.products("quick")})
# A of four dimensions, with addends of the shape of the result or moved.
DEEP = (
    "linear:f32:nt:6x17x5x12:bias+relu+add:a.4d",
    "linear:f32:nt:4x3x5x12:relu+add:a.4d:b.padded",
    "linear:f32:nt:4x3x5x12:bias+mul-n+t:a.4d+padded",
)


class Spoiled(AtenBackend):
    """PyTorch's own products, of which the last element of each result is wrong."""

    def prepare(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> Any:
        prepared: Any = super().prepare(problem, operands, request)
        run = prepared.run

        def spoiled(given: Operands) -> Any:
            made = run(given)
            for one in made if isinstance(made, tuple) else (made,):
                one[(-1,) * one.dim()] = 77 if one.element_size() > 1 else 1
            return made

        prepared.run = spoiled
        return prepared


@functools.cache
def kinds() -> dict[str, list[Problem]]:
    """By op, of the cases of the suite the cheapest ones that together have each of its flags, and each step."""
    refused, known, found = AtenBackend().unsupported, set[tuple[str, str]](), defaultdict[str, list[Problem]](list)
    dies = eager_refusal(Ledger.load(Path(matrix.__file__).with_name("known_failures.toml")))
    for problem in sorted(matrix.products("full"), key=lambda one: (one.shape.flops, one.line)):
        kind = {(problem.op.name, part) for part in ("", *problem.flags)}
        kind |= {("", str(step).rstrip("-_0123456789.x")) for step in problem.epilogue}
        if kind - known and problem.shape.flops and not (refused(problem, "cpu") or dies(problem, "cpu")):
            known |= kind
            found[problem.op.name].append(problem)
    return found


def run(script: Path) -> object:
    """Its exit status; in this process, for torch takes seconds to start."""
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script))
    return ended.value.code


def written(problem: Problem, folder: Path, backend: AtenBackend | CallableBackend) -> str:
    """The report of a failure of a problem, whose files are all there; "" where any result is right."""
    case = Case(backend, problem, distributions_for(problem)[:1], 0, Device.CPU)
    failed = [one for one in Judge().judge(case) if one.evidence is not None]
    with patch.object(artifacts, "draw"):  # takes longer than the rest
        assert artifacts.save(folder, failed, case, Rerun("tests")) == ""
    if not failed:
        return ""
    (place,) = folder.iterdir()
    report = (place / "report.txt").read_text()
    # What the package, PyTorch and Python raise of themselves is no reason.
    assert not re.search(r"^  no [\w. ]+: \w+(Error|Exception)", report, re.MULTILINE)
    assert (place / "tensors.pt").exists()
    assert (place / "repro.py").exists() is ("no script" not in report)
    return report


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_a_failure_of_any_kind_has_its_files_and_a_script_that_runs(op: str, tmp_path: Path) -> None:
    reports = [written(problem, tmp_path / str(number), Spoiled()) for number, problem in enumerate(kinds()[op])]
    assert 2 * sum(map(bool, reports)) >= len(reports)
    # With PyTorch alone nothing is spoiled; whether its product is right here is no matter of the script.
    assert [str(script) for script in tmp_path.glob("*/*/repro.py") if run(script) not in {0, 1}] == []


@pytest.mark.parametrize("line", DEEP)
def test_a_script_of_a_deep_product_makes_its_own_operands(line: str, tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    source.write_text("def mine(a, b):\n    return a[..., :8] @ b[..., :8, :]\n")
    space: dict[str, Any] = {}
    exec(compile(source.read_text(), source, "exec"), space)
    assert "no script" not in written(Problem.parse(line), tmp_path / "kept", CallableBackend("mine", space["mine"]))
    (script,) = tmp_path.glob("kept/*/repro.py")
    assert not script.with_suffix(".pt").exists()
    sys.modules.pop("mine", None)
    assert run(script) == 1


def test_no_file_replaces_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> Any:
        raise KeyError("a defect")

    for owner, name in ((repro, "_rendered"), (artifacts, "draw"), (program, "args")):
        case = Case(Spoiled(), Problem.parse("mm:f32:nn:4x5x6"), ("rand",), 0, Device.CPU)
        failed = list(Judge().judge(case))
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fails)
            assert artifacts.save(tmp_path / name, failed, case, Rerun("tests")) == ""
        (report,) = (tmp_path / name).glob("*/report.txt")
        assert re.search(r"^  no [\w. ]+: KeyError: 'a defect'$", report.read_text(), re.MULTILINE)
    with monkeypatch.context() as patched:
        patched.setattr(findings, "text", fails)
        assert artifacts.save(tmp_path, failed, case, Rerun("tests")) == "KeyError: 'a defect'"


def test_a_long_name_is_a_folder_and_another_one_another_folder() -> None:
    lines = ["mm:f32:nn:4x5x6:" + "relu+" * 60 + last for last in ("relu", "gelu")]
    names = {folder_name(Outcome(CaseId("mine", line), "rand", 0, Status.PASSED)) for line in lines}
    assert len(names) == 2
    assert max(map(len, names)) <= 255
