"""What quick finds of the defects that the stored matrix knows, and that it is the choice made of it."""

from __future__ import annotations

from pathlib import Path

from studies import cover, matrix

from pytest_gemm.conformance import matrix as suite

ROWS = matrix.read()
PAGE = Path(__file__).parents[2] / "docs" / "results" / "quick.md"


def test_every_defect_is_found_by_two_problems_where_two_find_it() -> None:
    quick = {problem.line for problem in suite.products("quick")}
    who: dict[str, set[str]] = {}
    for line, row in ROWS.items():
        for name in row.found:
            who.setdefault(name, set()).add(line)
    assert len(who) > 200
    lost = [name for name, some in who.items() if len(some & quick) < min(2, len(some)) and cover.is_defect(name)]
    assert not lost


def test_nearly_each_wrong_kernel_is_found_in_each_op_and_data_types() -> None:
    quick = {problem.line for problem in suite.products("quick")}

    def kinds(lines: set[str]) -> set[tuple[str, str]]:
        pairs = ((":".join(line.split(":")[:2]), name) for line in lines & {*ROWS} for name in ROWS[line].found)
        return {pair for pair in pairs if pair[1].startswith("kernel")}

    assert len(kinds(quick)) >= 0.995 * len(kinds({*ROWS}))


def test_the_matrix_is_read_as_it_is_written(tmp_path: Path) -> None:
    stored = tmp_path / "matrix.json"
    stored.write_text(matrix.written(ROWS), encoding="utf-8")
    assert matrix.read(stored) == ROWS


def test_a_choice_that_knew_nothing_of_a_class_finds_all_but_a_hundredth_of_it() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.endswith("% |")]
    assert len(rows) > 20
    assert not {name: held for name, *_, held in rows if float(held.rstrip("% |")) < 99}
