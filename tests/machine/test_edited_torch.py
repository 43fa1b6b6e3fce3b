"""A torch whose files were edited has its release's version: digests of ``torch/_inductor`` tell it apart."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import recorded_runs

from pytest_gemm.machine import software
from pytest_gemm.record import reader
from pytest_gemm.record.lines import Head
from pytest_gemm.report import diff, merge
from pytest_gemm.speed import controller
from pytest_gemm.speed.data import Session
from pytest_gemm.speed.report import page, text
from pytest_gemm.speed.report.rows import Run

FILES = ("lowering.py", "kernel/mm.py", "kernel/templates/triton_mm.py.jinja", "codegen/cpp_gemm_template.py")
CHANGED = ("codegen/cpp_gemm_template.py", "kernel/new.py", "kernel/templates/triton_mm.py.jinja", "lowering.py")


@pytest.fixture
def heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Head]:
    """Heads of runs with two torches: of the second a program and a template are edited, one is new, one is gone."""
    found = []
    for name in ("before", "after"):
        root = tmp_path / name / "torch"
        for file in FILES:
            path = root / "_inductor" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"# {file}\n")
        for other in ("_inductor/mm.pyc", "nn/functional.py"):  # no source, or another part of torch
            (root / other).parent.mkdir(exist_ok=True)
            (root / other).write_text(name)
        if name == "after":
            (root / "_inductor" / CHANGED[0]).write_text("# edited\n")
            (root / "_inductor" / CHANGED[1]).touch()
            (root / "_inductor" / CHANGED[2]).write_text("")
            (root / "_inductor" / CHANGED[3]).unlink()
        spec = SimpleNamespace(submodule_search_locations=[str(root)])
        with monkeypatch.context() as patched:
            patched.setattr("importlib.util.find_spec", lambda _, spec=spec: spec)
            found.append(dataclasses.replace(recorded_runs.RUN, inductor=Head.of((), gpus=False).inductor))
    return found


def written(folder: Path, head: Head) -> reader.Run:
    return reader.read(recorded_runs.write(folder, recorded_runs.outcomes(), head))


def test_compare_names_the_files_that_differ(heads: list[Head], tmp_path: Path) -> None:
    before, after = (written(tmp_path / f"run{place}", head) for place, head in enumerate(heads))
    assert set(before.head.inductor) == {*FILES}
    found = diff.compared(before, after)
    for shown in (found.text(), found.html()):
        assert ", ".join(CHANGED) in shown
        assert "kernel/mm.py" not in shown
    assert "_inductor" not in diff.compared(before, before).text()
    many = dataclasses.replace(before.head, inductor={f"{i}.py": "x" for i in range(9)})
    assert "0.py, 1.py, 2.py, 3.py, 4.py, 5.py, 6.py, 7.py and 5 more" in software.differing(
        before.head.inductor, many.inductor
    )


def test_a_record_without_digests_is_read_and_differs_in_none(heads: list[Head], tmp_path: Path) -> None:
    runs = [written(tmp_path / f"run{place}", head) for place, head in enumerate(heads)]
    assert runs[0].path is not None
    first, *rest = runs[0].path.read_text().splitlines(keepends=True)
    data: dict[str, Any] = json.loads(first)
    del data["run"]["inductor"]
    runs[0].path.write_text("".join([json.dumps(data) + "\n", *rest]))
    old = reader.read(runs[0].path)
    assert old.head.inductor == {}
    assert "_inductor" not in diff.compared(old, runs[1]).text()


def test_shards_of_two_torches_are_not_one_run(heads: list[Head], tmp_path: Path) -> None:
    runs = [written(tmp_path / f"run{place}", head) for place, head in enumerate(heads)]
    assert merge._difference(*runs).startswith("file of torch/_inductor: codegen/cpp_gemm_template.py is ")
    assert merge._difference(runs[0], runs[0]) == ""


def test_the_speed_page_names_the_files_that_differ(heads: list[Head]) -> None:
    base, head = (Session("a-key", inductor=one.inductor) for one in heads)
    run = Run(sessions=[head], base=[base], mode="against", notes=controller.edited([base], [head]))
    said = f"files of torch/_inductor that differ between base and head: {', '.join(CHANGED)}"
    assert all(said in shown for shown in (page.page(run, "title"), text.markdown(run, "title").replace("\\", "")))
    assert controller.edited([base], [base]) == controller.edited([], [head]) == []
    assert controller.edited([Session("a-key")], [head]) == []
