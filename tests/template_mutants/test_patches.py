"""The changes of a mutation study: they are of the installed release, and the study tells mutants from controls."""

from __future__ import annotations

from pathlib import Path

import known_cpu
import pytest
from studies import fix_study

from template_mutants import table
from template_mutants.study import Study


@pytest.mark.parametrize("backend", table.BACKENDS)
def test_the_mutants_of_the_table_are_python_in_this_release(backend: str) -> None:
    mutants = table.load(backend)
    there, missing = table.in_release(mutants)
    assert len(there) > len(missing)
    assert [one for one in mutants if one.null], "controls"
    assert all(one.imitates for one in mutants)


def test_the_fixes_can_be_undone_in_this_release() -> None:
    fixes = fix_study.read()
    there, missing = table.in_release([fix.mutant for fix in fixes])
    assert len(there) > len(missing)
    assert len({fix.name for fix in fixes}) == len(fixes) >= 40
    assert {fix.runs for fix in fixes} <= {*fix_study.ORDER}
    assert all(fix.shown or fix.runs in {"triton", "inductor-cuda"} for fix in fixes)


@pytest.mark.study
def test_a_mutant_is_found_and_a_control_is_not(tmp_path: Path) -> None:
    names = {"micro-k-tail", "null-bias"}
    mutants = [one for one in table.load("cpp") if one.name in names]
    lines = ["mm:f32:nn:17x65x127", "linear:bf16:nt:17x65x127:bias"]
    study = Study("cpp", "quick", lines, tmp_path, jobs=1, most=0)
    for name in ("inductor-survey", "inductor-warm"):
        known_cpu.copy_to(study.folder / name)
    found = {one.mutant: one for one in study.verdicts(mutants, mutants)}
    assert {name: one.verdict for name, one in found.items()} == {"micro-k-tail": "killed", "null-bias": "survived"}
    assert all(one.marked for one in found.values())
    assert found["null-bias"].reaching == 1
    assert study.right([found["micro-k-tail"].problem]) == []
