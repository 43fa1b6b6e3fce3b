"""The shapes file: sets of problems by axes, chosen by level, device and name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_gemm.api.ops import OpRegistry
from pytest_gemm.problem import axes, shapes
from pytest_gemm.problem.axes import TemplateError
from pytest_gemm.problem.shapes import ShapeError

SHIPPED = Path(__file__).parents[2] / "perf" / "shapes.toml"


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


def test_axes_share_lists_count_and_vary_together(tmp_path: Path) -> None:
    (tmp_path / "axes.toml").write_text('floats = ["f32", "bf16"]\n')
    path = written(
        tmp_path,
        """
[[set]]
name = "a"
problems = ["mm:{dtype}:nn:{m}x1x1", "mm:{out}:nn:8x8x8:a.offset:{flag}"]
dtype = ["@floats"]
m = [1, "4..5"]
case = [{ out = "f32", flag = "math.tf32" }, { out = "bf16", flag = "" }]
exclude = ["mm:bf16:*:4x*"]
""",
    )
    (one,) = shapes.read(path)
    assert [p.line for p in one.problems] == [
        *("mm:f32:nn:1x1x1", "mm:f32:nn:4x1x1", "mm:f32:nn:5x1x1", "mm:bf16:nn:1x1x1", "mm:bf16:nn:5x1x1"),
        *("mm:f32:nn:8x8x8:math.tf32:a.offset", "mm:bf16:nn:8x8x8:a.offset"),
    ]


def test_what_is_spread_depends_on_values_and_not_on_their_places() -> None:
    def spread(**more: list[axes.Value]) -> dict[str, str]:
        of = {"dtype": ["f32", "f16", "bf16"], "m": [*range(8)], "shape": ["2x2", "4x4", "8x8"], **more}
        lines = axes.lines(["{dtype} {m} {shape}"], of, ["shape"])
        return dict(line.rsplit(" ", 1) for line in lines)

    found = spread()
    assert len(found) == 3 * 8
    assert set(found.values()) == {"2x2", "4x4", "8x8"}
    assert spread(dtype=["bf16", "f32", "f64", "f16"]).items() >= found.items()
    assert spread(shape=["8x8", "2x2", "4x4"]) == found
    grown = spread(shape=["2x2", "3x3", "4x4", "8x8"])
    assert {shape for point, shape in grown.items() if shape != found[point]} == {"3x3"}


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
[[set]]
name = "layer"
level = "models"
problems = ["mm:f32:nn:4x4x4"]
""",
    )

    def lines(wanted: tuple[str, ...], level: str, device: str) -> list[str]:
        return [str(p.shape) for p in shapes.select(path, wanted, level, device, tmp_path)]

    assert lines((), "quick", "cpu") == ["1x1x1"]
    assert lines((), "full", "cpu") == ["1x1x1", "2x2x2"]
    assert lines((), "models", "cpu") == ["4x4x4"]  # a level of its own
    assert lines((), "huge", "cpu") == []
    assert lines((), "quick", "cuda") == ["3x3x3"]
    assert lines(("large",), "quick", "cuda") == ["2x2x2", "1x1x1"]
    assert lines(("mine.toml", "gpu"), "quick", "cuda") == ["3x3x3"]


def test_a_draw_deals_sizes_and_axes_to_a_number_of_lines(tmp_path: Path) -> None:
    def drawn(**more: object) -> list[str]:
        given = {"lines": 32, "m": "1..500", "n": "8..64/8", "most": 16_000, **more}
        table = ", ".join(f"{key} = {value!r}" for key, value in given.items())
        template = HEAD + "problem = 'mm:{dtype}:nn:{m}x{n}x1'\ndtype = ['f32', 'f16']\n"
        folder = tmp_path / str(given.get("seed", "own"))
        folder.mkdir(exist_ok=True)
        (one,) = shapes.read(written(folder, f"{template}draw = {{ {table} }}\n"))
        return [problem.line for problem in one.problems]

    found = [line.split(":") for line in drawn()]
    sizes = [tuple(map(int, shape.split("x"))) for *_, shape in found]
    assert {m % 32 for m, _, _ in sizes} == {*range(32)}
    assert {m.bit_length() for m, _, _ in sizes} == {*range(1, 10)}
    assert sorted(n for _, n, _ in sizes) == [n for n in range(8, 65, 8) for _ in range(4)]
    assert max(m * n for m, n, _ in sizes) <= 16_000
    assert sum(dtypes == "f16" for _, dtypes, *_ in found) == 16
    assert drawn(seed="b") != drawn(seed="") == [":".join(line) for line in found]


def test_a_level_at_the_head_is_that_of_the_sets_without_one(tmp_path: Path) -> None:
    own = LINES.replace("'a'", "'own'") + "level = 'quick'\n"
    path = written(tmp_path, f"level = 'full'\n{LINES}{own}")
    assert [(one.name, one.level) for one in shapes.read(path)] == [("a", "full"), ("own", "quick")]
    assert [one.name for one in shapes.read(path, "quick")] == ["own"]


HEAD = "[[set]]\nname = 'a'\n"
DRAWN = HEAD + "problem = 'mm:f32:nn:{m}x1x1'\ndraw = "
TEMPLATE = HEAD + "problem = 'mm:f32:nn:{m}x1x1'\n"
LINES = HEAD + "problems = ['mm:f32:nn:1x1x1']\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("", 0, "has no sets; a file of problems consists of [[set]] tables"),
        ("[[shape]]\nname = 'a'\n", 1, "unknown table 'shape'; entries are [[set]]"),
        ("set = 1\n", 1, "set is not a list of tables; write [[set]]"),
        ("[[set]\n", 1, "is not TOML"),
        ("[[set]]\nname = 'A B'\nproblems = []\n", 2, "name is 'A B'; a set needs a name of lower-case letters"),
        ("[[set]]\n", 1, "name is missing"),
        (HEAD + "device = 'tpu'\n", 3, 'device is \'tpu\'; it is "cpu", "cuda" or both'),
        (HEAD + "level = 'slow'\n", 3, "level is 'slow'; it is one of smoke, quick, full, exhaustive, huge, models"),
        (HEAD + "help = 1\n", 3, "help is 1; write a text"),
        (HEAD, 1, "it has no problems; give either 'problem', a template with axes, or 'problems'"),
        (LINES + "problem = 'mm:f32:nn:1x1x1'\n", 4, "it has both; give either"),
        (HEAD + "problems = []\n", 3, "problems is []; write a list of problem lines"),
        (HEAD + "problems = 'mm:f32:nn:1x1x1'\n", 3, "problems is 'mm:f32:nn:1x1x1'; write a list"),
        (HEAD + "problems = ['mm:f33:nn:1x1x1']\n", 3, "problem 'mm:f33:nn:1x1x1': dtypes: unknown dtype 'f33'"),
        (LINES + "m = [1]\n", 4, "no template has {m}; delete this axis, or use it"),
        (LINES + "levle = 'full'\n", 4, "unknown key 'levle' (did you mean 'level'?)"),
        (HEAD + "problem = 5\n", 3, "problem is 5; write a problem line with axes in braces"),
        (TEMPLATE, 3, "the template has {m}, which is no axis; axes of this set: none"),
        (TEMPLATE + "m = 4\n", 4, "the axis 'm' is 4; an axis is a list of texts, numbers and tables of them"),
        (TEMPLATE + "m = [1979-05-27]\n", 4, "the axis 'm' is [datetime.date(1979, 5, 27)]"),
        (TEMPLATE + "m = [1.5]\n", 3, "problem 'mm:f32:nn:1.5x1x1': shape:"),
        (TEMPLATE + f"m = [1{9999 * '0'}]\n", 0, "cannot be read (Exceeds the limit"),
        (TEMPLATE + f"m = {9999 * '['}{9999 * ']'}\n", 0, "cannot be read (maximum recursion depth exceeded"),
        (TEMPLATE + "m = [1]\nlevles = ['full']\n", 5, "unknown key 'levles' (did you mean 'level'?)"),
        (
            TEMPLATE.replace("{m}", "{m}{n}{k}") + "".join(f"{axis} = [{100 * '1, '}]\n" for axis in "mnk"),
            3,
            "the axes make more than 100000 problems",
        ),
        (TEMPLATE + "m = ['@sizes']\n", 4, "the axis 'm': no list '@sizes'; see axes.toml"),
        (TEMPLATE + "m = [1]\nspread = ['n']\n", 5, "spread has 'n', which is no axis"),
        (TEMPLATE + "m = [1]\nexclude = ['mm:bf16:*']\n", 5, "exclude 'mm:bf16:*' matches no line; delete it"),
        (DRAWN + "{ m = '1..9' }\n", 4, "lines is missing; write how many lines are drawn"),
        (DRAWN + "{ lines = 9.5, m = '1..9' }\n", 4, "lines is 9.5; write how many lines are drawn"),
        (DRAWN + "{ lines = 9 }\n", 4, 'draw has no sizes; write m = "1..1023" in it'),
        (DRAWN + "{ lines = 9, m = '9..1' }\n", 4, "m is '9..1'; write \"LOW..HIGH\""),
        (DRAWN + "{ lines = 9, m = [1] }\n", 4, 'm is [1]; write "LOW..HIGH"'),
        (DRAWN + "{ lines = 9, m = '8..9', n = '1..9' }\n", 4, "no template has {n}"),
        (DRAWN + "{ lines = 9, m = '8..99', most = 4 }\n", 4, "no exchange of sizes between the lines"),
        (DRAWN + "{ lines = 9, m = '1..9' }\nspread = ['m']\n", 5, "a set with draw has spread; delete it"),
        (LINES + LINES, 5, "two sets are called 'a'; names are unique"),
    ],
)
def test_a_file_that_is_wrong_names_the_line_and_what_would_be_right(
    tmp_path: Path, text: str, line: int, says: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ShapeError) as caught:
        shapes.read(path)
    assert str(caught.value).startswith(f"{path}:{line}: " if line else f"{path}: ")
    assert says in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("word", ["{dtype:>999999999}", "{dtype.__class__}", "{dtype[0]}", "{dtype!r}", "{}", "{0}"])
def test_braces_hold_the_name_of_an_axis_and_nothing_else(tmp_path: Path, word: str) -> None:
    text = HEAD + f"problem = 'mm:{word}:nn:1x1x1'\ndtype = ['f32']\n"
    with pytest.raises(ShapeError, match=r"toml:\d: (no template has \{dtype\}|the template has)"):
        shapes.read(written(tmp_path, text))
    with pytest.raises(TemplateError, match=re.escape(f"the template has {word}")):
        axes.lines([f"mm:{word}:nn:1x1x1"], {"dtype": ["f32"]})


def test_an_unknown_name_lists_the_sets(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match=r"lama: no set \(did you mean 'llama'\?\) and no file; sets are cpu-linear"):
        shapes.select(SHIPPED, ("lama",), "quick", "cpu", tmp_path)


def test_a_set_that_there_is_not_is_an_error_of_collection(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest("--pyargs", "pytest_gemm.perf", "--gemm-backends=aten", "--gemm-shapes=lama")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*--gemm-shapes: lama: no set (did you mean 'llama'?) and no file; sets are cpu-*"])


def test_a_file_that_is_absent_ends_a_run_with_workers_before_it_begins(pytester: pytest.Pytester) -> None:
    given = ("--pyargs", "pytest_gemm.perf", "--gemm-backends=aten", "--gemm-shapes=none.toml", "-n", "2")
    result = pytester.runpytest(*given)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert len(result.errlines) < 4, "one message and no traceback"
    result.stderr.fnmatch_lines(["ERROR: --gemm-shapes: *none.toml: cannot be read (No such file or directory); *"])


def test_a_new_run_in_this_process_reads_files_again(tmp_path: Path) -> None:
    text = '[[set]]\nname = "a"\nproblem = "mm:f32:nn:{m}x8x4"\nm = [1]\n'
    for m in ("1", "2"):
        (one,) = shapes.read(written(tmp_path, text.replace("[1]", f"[{m}]")))
        assert [p.line for p in one.problems] == [f"mm:f32:nn:{m}x8x4"]
        OpRegistry()
