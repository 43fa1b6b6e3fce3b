"""The shapes file: sets of problems by axes, chosen by level, device and name."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gemm import shapes
from pytest_gemm.shapes import ShapeError

SHIPPED = Path(__file__).parent.parent / "perf" / "shapes.toml"


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_axes_are_crossed_into_problem_lines(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        '[[set]]\nname = "a"\nproblem = "mm:{dtype}:nn:{m}x{nk}"\ndtype = ["f32", "bf16"]\nm = [1, 16]\nnk = ["8x4"]\n',
    )
    (one,) = shapes.read(path)
    assert [p.line for p in one.problems] == [
        "mm:f32:nn:1x8x4",
        "mm:f32:nn:16x8x4",
        "mm:bf16:nn:1x8x4",
        "mm:bf16:nn:16x8x4",
    ]
    assert one.devices == ("cpu", "cuda")


def test_the_shipped_sets_have_what_the_suite_promises() -> None:
    sets = {one.name: one for one in shapes.read(SHIPPED)}
    assert len(sets["llama"].problems) == 4 * 5 * 3
    assert len(sets["llama-int8"].problems) == len(sets["llama-mixed"].problems) == 4 * 5
    assert {p.shape.m for p in sets["decode"].problems} == {1, 2, 4, 8, 16}
    assert {str(s) for p in sets["fused"].problems for s in p.epilogue} == {"bias", "gelu", "relu", "add"}
    sizes = {p.shape.m for p in sets["square"].problems}
    assert (min(sizes), max(sizes)) == (128, 8192)


def test_a_run_without_names_takes_the_sets_of_its_level_and_device(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
[[set]]
name = "small"
device = "cpu"
problems = ["mm:f32:nn:1x1x1"]
[[set]]
name = "large"
device = "cpu"
level = "full"
problems = ["mm:f32:nn:2x2x2", "mm:f32:nn:1x1x1"]
[[set]]
name = "gpu"
device = "cuda"
problems = ["mm:f32:nn:3x3x3"]
""",
    )

    def lines(wanted: tuple[str, ...], level: str, device: str) -> list[str]:
        return [str(p.shape) for p in shapes.select(path, wanted, level, device, tmp_path)]

    assert lines((), "quick", "cpu") == ["1x1x1"]
    assert lines((), "full", "cpu") == ["1x1x1", "2x2x2"]
    assert lines((), "quick", "cuda") == ["3x3x3"]
    assert lines(("large",), "quick", "cuda") == ["2x2x2", "1x1x1"]
    assert lines(("mine.toml", "gpu"), "quick", "cuda") == ["3x3x3"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "consists of [[set]] tables; found nothing"),
        ("[[shape]]\nname = 'a'\n", "found shape"),
        ("[[set]]\nname = 'A B'\nproblems = []\n", "a set needs a name of lower-case letters"),
        ("[[set]]\nname = 'a'\nproblem = 'mm:f32:nn:{m}x1x1'\n", "asks for 'm', and there is no such axis"),
        ("[[set]]\nname = 'a'\nproblem = 'mm:f32:nn:{m}x1x1'\nm = 4\n", "the axis m is 4; it is a list"),
        ("[[set]]\nname = 'a'\nproblems = ['mm:f33:nn:1x1x1']\n", "f33"),
        ("[[set]]\nname = 'a'\nproblems = ['mm:f32:nn:1x1x1']\nm = [1]\n", "m would cross nothing"),
        ("[[set]]\nname = 'a'\ndevice = 'tpu'\nproblems = []\n", "it is cpu, cuda or both"),
        ("[[set]]\nname = 'a'\nlevel = 'slow'\nproblems = []\n", "it is one of quick, full, exhaustive"),
        ("[[set]]\nname = 'a'\n", "give either 'problem', a template with axes, or 'problems'"),
        ("[[set]]\nname = 'a'\nproblems = []\n[[set]]\nname = 'a'\nproblems = []\n", "two sets are called 'a'"),
        ("[[set]\n", "mine.toml"),
    ],
)
def test_a_file_that_is_wrong_names_the_set_and_what_would_be_right(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ShapeError) as caught:
        shapes.read(written(tmp_path, text))
    assert says in str(caught.value)
    assert "mine.toml" in str(caught.value)


def test_an_unknown_name_lists_the_sets(tmp_path: Path) -> None:
    with pytest.raises(
        ShapeError, match=r"'lama' is no set \(did you mean 'llama'\?\) and no file; sets are cpu-linear"
    ):
        shapes.select(SHIPPED, ("lama",), "quick", "cpu", tmp_path)
