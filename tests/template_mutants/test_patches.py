"""The changes of a mutation study: where they are made, and what proves that a place was used."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import known_cpu
import pytest

from template_mutants import patches, report, table
from template_mutants.patches import MARK, NotInReleaseError, Patch, changed
from template_mutants.study import Study, Verdict, in_turn

SOURCE = '''import math

TEXT = r"""
{{ head(
    "a") }}
for (int k = 0; k < K; ++k) {
"""


def rows(m, n):
    if m > n:
        return m
    elif m == n:
        return 0
    return m + n
'''


def _patch(old: str, new: str, **how: str) -> Patch:
    return Patch("it", "codegen/it.py", old, new, **how)


def test_a_change_of_a_text_is_marked_by_a_comment_of_its_language() -> None:
    in_c = changed(SOURCE, [_patch("k < K", "k <= K", comment="/*")])
    assert f"/*{MARK}it*/for (int k = 0; k <= K; ++k) {{" in in_c
    in_python = changed(SOURCE, [_patch("k < K", "k <= K")])
    assert f"for (int k = 0; k <= K; ++k) {{  # {MARK}it\n" in in_python


def test_a_mark_stands_outside_of_an_expression_of_jinja() -> None:
    assert f'/*{MARK}it*/{{{{ head(\n    "b") }}}}' in changed(SOURCE, [_patch('"a"', '"b"', comment="/*")])
    assert f'"b") }}}}  # {MARK}it\n' in changed(SOURCE, [_patch('"a"', '"b"')])


def test_a_mark_stands_in_front_of_a_condition_of_jinja() -> None:
    text = "a = 1\n    {% if FAST %}\nb = 2\n{% endif %}\n"
    patch = Patch("it", "kernel/templates/it.py.jinja", "{% if FAST %}", "{% if True %}")
    assert changed(text, [patch]).splitlines()[:2] == [f"a = 1  # {MARK}it", "    {% if True %}"]


@pytest.mark.parametrize(("old", "new"), [("m + n", "m - n"), ("m == n", "m != n"), ("return m\n", "return n\n")])
def test_a_change_of_python_is_marked_by_a_call(old: str, new: str) -> None:
    text = changed(SOURCE, [_patch(old, new)])
    ast.parse(text)
    assert new in text
    assert text.count('__template_mutant__("it")') == 1


def test_marks_alone_change_nothing_else() -> None:
    text = changed(SOURCE, [_patch("m + n", "m - n")], only_marks=True)
    assert text.replace('    __template_mutant__("it")\n', "") == SOURCE


def test_a_text_that_is_not_there_is_of_another_release() -> None:
    with pytest.raises(NotInReleaseError):
        changed(SOURCE, [_patch("k <= L", "")])


def test_a_text_that_stands_twice_needs_what_precedes_it() -> None:
    with pytest.raises(ValueError, match="not unique"):
        changed(SOURCE, [_patch("return", "yield")])
    assert "yield 0" in changed(SOURCE, [_patch("return", "yield", after="elif")])


@pytest.mark.parametrize("backend", table.BACKENDS)
def test_the_mutants_of_the_table_are_python_in_this_release(backend: str) -> None:
    mutants = table.load(backend)
    there, missing = table.in_release(mutants)
    assert len(there) > len(missing)
    assert [one for one in mutants if one.null], "controls"
    assert all(one.imitates for one in mutants)


def test_problems_of_all_kinds_come_early() -> None:
    lines = ["mm:f32:nn:8x8x8", "mm:f32:nn:9x8x8", "mm:bf16:nn:8x8x8", "bmm:f32:nn:2x8x8x8"]
    assert set(in_turn(lines)[:2]) > {"bmm:f32:nn:2x8x8x8"}
    assert set(in_turn(lines)) == set(lines)


def _verdict(name: str, verdict: str) -> Verdict:
    mutant = next(one for one in table.load("cpp") if one.name == name)
    return Verdict(name, mutant.digest, "quick", verdict, "mm:f32:nn:8x8x8" if verdict == "killed" else "")


def test_the_report_counts_controls_apart(tmp_path: Path) -> None:
    mutants = table.load("cpp")
    control = next(one.name for one in mutants if one.null)
    found = [_verdict("m-tail", "killed"), _verdict("n-tail", "survived"), _verdict(control, "survived")]
    assert report.summary(mutants, [], found).splitlines() == [
        "1 of 2 mutants killed that are reached and not equivalent",
        "0 not reached, 0 not in this release",
        "0 of 1 null mutants found; 0 equivalent found",
        "survived: n-tail",
    ]
    (tmp_path / "cpp-2.13.0").mkdir()
    log = "".join(f"{json.dumps(vars(one))}\n" for one in found)
    (tmp_path / "cpp-2.13.0" / "verdicts.jsonl").write_text(log)
    text = report.page(tmp_path)
    assert "| quick | 2 | 1 | 50.0% | 1 | 0 | 0 | 1, 0 |" in text


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


def test_a_process_without_patches_is_left_alone() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(patches.__file__).parent / "hook")}
    environment.pop(patches.FILE, None)
    code = "import sys; print(any('template' in type(one).__module__ for one in sys.meta_path))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
