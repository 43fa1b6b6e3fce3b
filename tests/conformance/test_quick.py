"""How quick is chosen, and what it finds of the defects that had no part in the choice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import known_cpu
import pytest
from studies import cover, matrix
from studies.reach import Reach, class_of

REACH = Path(__file__).parents[1] / "studies" / "reach.py"


def chosen(
    costs: Mapping[str, float], demands: Mapping[str, str], kept: Sequence[str] = (), *, again: bool = True
) -> list[str]:
    asked = {name: frozenset(lines.split()) for name, lines in demands.items()}
    return cover.choice(costs, asked, kept, again=again)


def test_the_choice_meets_every_demand_and_has_nothing_needless() -> None:
    demands = {"one": "a b", "two": "b c", "three": "c"}
    assert chosen({"a": 1, "b": 9, "c": 1}, demands, again=False) in (["a", "c"], ["c", "a"])
    # "b" is taken first, and the others make it needless.
    wide = {"one": "a b", "two": "b c", "three": "c d", "four": "a"}
    assert "b" not in chosen({"a": 2, "b": 0.5, "c": 1, "d": 9}, wide, again=False)


def test_what_is_kept_is_chosen_and_a_second_time_where_it_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    demands = dict.fromkeys("stuvw", "a b")
    assert sorted(chosen({"a": 1, "b": 1, "c": 1}, demands, kept=["c"], again=False)) in (["a", "c"], ["b", "c"])
    monkeypatch.setattr(cover, "_WORTH", 5.0)
    assert sorted(chosen({"a": 1, "b": 1}, demands)) == ["a", "b"]
    assert len(chosen({"a": 1, "b": 2}, demands)) == 1


def test_code_that_the_same_problems_of_a_class_reach_is_one_demand() -> None:
    lines = ["mm:f16:nn:8x8x8", "mm:bf16:nn:8x8x8", "mm:f32:nn:8x8x8"]
    masks = {("cpp", "x.py", (1, 2)): 0b111, ("cpp", "x.py", (2, 3)): 0b011, ("cpp", "x.py", (2, 4)): 0b111}
    asked = cover.reached(Reach(lines, masks, {}, {}), {"cpp"})
    assert sorted(map(sorted, asked.values())) == [["mm:bf16:nn:8x8x8", "mm:f16:nn:8x8x8"], ["mm:f32:nn:8x8x8"]]
    assert class_of("scaled_mm:f8e5m2-f8e4m3fn-f16:nt:8x16x16:quant.tensorwise") == "f8-f8-half"


def test_a_problem_reaches_the_code_of_its_steps_and_types(tmp_path: Path) -> None:
    known_cpu.copy_to(tmp_path / "inductor")
    lines = tmp_path / "lines"
    first, *others = ["mm:f32:nn:17x65x127", "linear:bf16:nt:17x65x97:bias+hardswish", "mm:f64:nn:17x65x127"]
    lines.write_text("\n".join([first, *others]), encoding="utf-8")
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, str(REACH), "cpp", f"--lines={lines}"]
    text = subprocess.run(command, capture_output=True, check=True, env=environment, text=True).stdout
    (tmp_path / "part").write_text(text, encoding="utf-8")
    assert [json.loads(line)["line"] for line in text.splitlines()] == [first, *others]

    reach = Reach.read([tmp_path / "part"])
    assert reach.lines == [first, others[0]], "cpp has no kernel of f64"
    of = {place: {*reach.of(mask)} for (_, file, place), mask in reach.masks.items() if file == "generated"}
    assert of["at::vec::maximum"] == {others[0]}
    hardswish = cover.functions("codegen/cpp_utils.py")["create_epilogue_with_attr"]
    in_it = [
        mask
        for (_, file, place), mask in reach.masks.items()
        if file == "codegen/cpp_utils.py" and place[0] in range(*hardswish)
    ]
    assert in_it
    assert {line for mask in in_it for line in reach.of(mask)} == {others[0]}
    assert any(file.startswith("jinja/") for _, file, _ in reach.masks)


def test_the_matrix_of_wrong_kernels_is_read_as_it_is_written(tmp_path: Path) -> None:
    stored, rows = tmp_path / "matrix.json", matrix.read()
    stored.write_text(matrix.written(rows), encoding="utf-8")
    assert matrix.read(stored) == rows
