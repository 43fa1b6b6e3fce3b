"""What a failure leaves on disk: a folder a case, and a script for each defect that the ledger knows."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pytest_gemm.api.protocols import ScriptedBackend
from pytest_gemm.failures import error_map, repro
from pytest_gemm.failures import text as text_module
from pytest_gemm.outcome import Unsupported
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs import program
from pytest_gemm.text import first_line

if TYPE_CHECKING:
    from pytest_gemm.failures.text import Rerun
    from pytest_gemm.judging.case import Case, Evidence, Judged
    from pytest_gemm.outcome import Outcome


def save(folder: Path, found: Sequence[Judged], case: Case, rerun: Rerun, warm: str = "") -> str:
    """One folder a failed case.

    ``report.txt`` is what the run said. ``repro.py`` shows the failure with PyTorch alone, with ``repro.pt`` beside it
    where it cannot make its operands itself; where no script can be written the report says why.
    ``error_map.png`` is where the result is wrong, ``generated_code.py`` the generated program where there is one, and
    ``tensors.pt`` the program's inputs by name, the actual result and the accepted interval.

    Args:
        folder: of all artifacts.
        found: outcomes; those with evidence have failed.
        case: that they are of.
        rerun: how to run it again.
        warm: ``here`` or ``elsewhere`` where it was compiled before with other constants, see :class:`pin.Case`.

    Returns:
        why the folder of a case is not complete, a full disk for instance; "" where all was written.
    """
    lost = ""
    for judged in found:
        try:
            if judged.evidence is not None:
                _save_one(folder, judged.outcome, judged.evidence, case, rerun, warm)
        except OSError as error:  # noqa: PERF203  # each case is tried
            lost = lost or str(error)
    return lost


def _save_one(folder: Path, outcome: Outcome, evidence: Evidence, case: Case, rerun: Rerun, warm: str) -> None:
    """The folder of one case."""
    parts = (
        outcome.who,
        outcome.problem,
        outcome.candidate,
        outcome.distribution,
        str(outcome.seed),
        outcome.case.guard,
    )
    place = folder / re.sub(r"[^\w.+-]+", "_", "-".join(filter(None, parts)))
    place.mkdir(parents=True, exist_ok=True)
    text = text_module.failure(outcome, rerun) + "\n"
    try:
        _write_script(place / "repro.py", _script(case, outcome, evidence, warm))
    except Unsupported as none:
        text += f"  no script: {none.reason}\n"
    (place / "report.txt").write_text(text, encoding="utf-8")
    if evidence.source:
        (place / "generated_code.py").write_text(evidence.source, encoding="utf-8")
    tensors = dict(program.args(case.problem, evidence.operands))
    if evidence.actual is not None:
        tensors["actual"] = evidence.actual
    if evidence.interval is not None:
        tensors |= {"lo": evidence.interval.lo, "hi": evidence.interval.hi}
        if evidence.actual is not None and evidence.actual.shape == evidence.interval.lo.shape:
            candidate = ", ".join(outcome.candidates)
            picture = place / "error_map.png"
            error_map.draw(picture, evidence.actual, evidence.interval, outcome.problem, candidate)
    _store(tensors, place / "tensors.pt")


def _store(tensors: Mapping[str, object], path: Path) -> None:
    try:
        torch.save(tensors, path)
    except RuntimeError as error:  # of PyTorch's own writer
        raise OSError(f"{path}: {first_line(error)}") from error


def save_defect(folder: Path, judged: Judged, case: Case, warm: str = "") -> str:
    """The script of a known failure as ``ID.py``, the smallest case that a run meets of each ledger entry.

    A script that is there and is of a case no larger is left alone.

    Returns:
        why it could not be written; "" where nothing went wrong.
    """
    path = folder / f"{judged.outcome.known_failure}.py"
    if judged.evidence is None:
        return ""
    try:
        if path.exists() and (there := _problem_of(path)) is not None and _size(there) <= _size(case.problem):
            return ""
        made = _script(case, judged.outcome, judged.evidence, warm)
        folder.mkdir(parents=True, exist_ok=True)
        _write_script(path, made)
    except Unsupported:
        return ""
    except OSError as error:
        return str(error)
    return ""


def _script(case: Case, outcome: Outcome, evidence: Evidence, warm: str) -> repro.Script:
    """The script of one outcome.

    Raises:
        Unsupported: when there can be none.
    """
    choice = outcome.candidate or (outcome.chosen[0] if len(outcome.chosen) == 1 else "")
    if outcome.chosen and "out of the FX graph cache" in choice:
        choice = ""
    backend = case.backend
    if not isinstance(backend, ScriptedBackend):
        raise Unsupported("no-script", f"{backend.name} does not say how PyTorch alone comes to its kernels")
    with program.cpu_threads(case.threads):
        recipe = backend.recipe(case.problem, evidence.operands, case.request(choice))
    known: Mapping[str, object] = {
        field.name: getattr(evidence, field.name) for field in dataclasses.fields(evidence) if field.name != "source"
    }
    return repro.script(repro.Case(outcome, recipe, warm=warm, **known))  # type: ignore[arg-type]  # fields of one name have one type


def _write_script(path: Path, made: repro.Script) -> None:
    beside = path.with_suffix(".pt")
    beside.unlink(missing_ok=True)
    if made.tensors:
        _store(made.tensors, beside)
    path.write_text(made.text, encoding="utf-8")


def _problem_of(script: Path) -> Problem | None:
    """The problem that a script begins with."""
    found = re.match(r'"""(\S+) on ', script.read_text(encoding="utf-8"))
    return Problem.parse(found[1]) if found else None


def _size(problem: Problem) -> int:
    shape = problem.shape
    return (shape.batch or 1) * (shape.m * shape.n + shape.n * shape.k + shape.m * shape.k)
