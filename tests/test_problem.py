"""The problem line: both ways, and what a user is told about a wrong one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gemm.problem import ALL_FLAGS, DTYPES, OPS, STEPS, DTypes, Layout, Problem, ProblemError, Shape, Step

SIZES = st.integers(0, 70_000)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    name = draw(st.sampled_from(sorted(STEPS)))
    spec = STEPS[name]
    if spec.parameter == "dtype":
        return Step(name, draw(st.sampled_from(["f32", "f16", "bf16"])))
    if spec.parameter == "shape":
        return Step(name, draw(st.sampled_from(["", *spec.choices[1:]])))
    if spec.parameter == "places":
        return Step(name, draw(st.sampled_from(["1_0", "2_0_1"] if name == "perm" else ["6", "2x3x1"])))
    if spec.parameter == "numbers" and draw(st.booleans()):
        numbers = st.integers(-40, 40).map(lambda n: f"{n / 8:g}")
        return Step(name, "_".join(draw(st.tuples(*[numbers] * len(spec.defaults)))))
    return Step(name)


@st.composite
def problems(draw: st.DrawFn) -> Problem | None:
    """Any problem; ``None`` where the parts contradict each other."""
    op = draw(st.sampled_from(sorted(OPS.values(), key=lambda o: o.name)))
    triples = [(a, b, o) for a in DTYPES for b in DTYPES for o in DTYPES if op.dtypes(a, b, o)]
    dtypes = DTypes(*(DTYPES[name] for name in draw(st.sampled_from(triples))))
    batch = None if op.batch == "never" else draw(SIZES)
    shape = Shape(draw(SIZES), draw(SIZES), draw(SIZES), batch)
    epilogue = tuple(draw(st.lists(steps(), max_size=4)))
    if op.addend:
        epilogue = (Step("bias"), *(s for s in epilogue if s.name != "bias"))
    flags = tuple(draw(st.lists(st.sampled_from(sorted(ALL_FLAGS)), max_size=3)))
    try:
        return Problem(op, dtypes, draw(st.sampled_from(list(Layout))), shape, epilogue, flags)
    except ProblemError:
        return None


@given(problems())
def test_every_problem_is_read_back_from_its_line(problem: Problem | None) -> None:
    if problem is not None:
        assert Problem.parse(str(problem)) == problem
        assert not set(str(problem)) - set("abcdefghijklmnopqrstuvwxyz0123456789:+-._")


def complaint(line: str) -> ProblemError | None:
    """What the parser says against a line; ``None`` when it can be read."""
    try:
        Problem.parse(line)
    except ProblemError as error:
        return error
    return None


@given(st.text(max_size=40))
def test_no_text_makes_the_parser_fail_in_another_way(text: str) -> None:
    error = complaint(text)
    assert error is None or 0 <= error.column <= len(error.line)


@given(problems(), st.data())
def test_a_mutilated_line_is_read_or_refused_at_a_character(problem: Problem | None, data: st.DataObject) -> None:
    if problem is None:
        return
    at = data.draw(st.integers(0, len(problem.line) - 1))
    line = problem.line[:at] + data.draw(st.sampled_from("x:+-_9q")) + problem.line[at + 1 :]
    error = complaint(line)
    assert error is None or error.field in {"op", "dtypes", "layout", "shape", "epilogue", "flags"}


@pytest.mark.parametrize(
    ("line", "field", "column", "words"),
    [
        ("mmm:f32:nn:1x1x1", "op", 0, ["did you mean 'mm'", "known:"]),
        ("mm:f3:nn:1x1x1", "dtypes", 3, ["'f3'", "bf16"]),
        ("mm:f32-f16:nn:1x1x1", "dtypes", 3, ["a-b-out"]),
        ("mm:f32-x-f32:nn:1x1x1", "dtypes", 7, ["'x'"]),
        ("int_mm:f32:nn:1x1x1", "dtypes", 7, ["i8-i8-i32"]),
        ("mm:f32:nq:1x1x1", "layout", 7, ["nn nt tn tt"]),
        ("linear:f32:nn:1x1x1", "layout", 11, ["nt"]),
        ("mm:f32:nn:1x1", "shape", 10, ["MxNxK"]),
        ("mm:f32:nn:1x-1x1", "shape", 12, ["'-1'"]),
        ("mm:f32:nn:2x1x1x1", "shape", 10, ["no batch"]),
        ("bmm:f32:nn:1x1x1", "shape", 11, ["BxMxNxK"]),
        ("mm:f32:nn:1x1x1:rleu", "epilogue", 16, ["did you mean 'relu'"]),
        ("mm:f32:nn:1x1x1:relu+clamp-2", "epilogue", 27, ["clamp-0_6"]),
        ("mm:f32:nn:1x1x1:cast-f31", "epilogue", 21, ["'f31'", "bf16"]),
        ("mm:f32:nn:1x1x1:alpha-2", "epilogue", 16, ["no alpha"]),
        ("addmm:f32:nn:1x1x1", "epilogue", 18, ["bias"]),
        ("mm:f32:nn:1x1x1:relu++add", "epilogue", 21, ["one '+'"]),
        ("mm:f32:nn:1x1x1::pad-ldq", "flags", 17, ["did you mean 'pad-ld"]),
        ("mm:f32:nt:2x1x1::self", "flags", 17, ["2x2x1"]),
        ("linear:f32:nt:3x2x2x1::self", "flags", 23, ["drop self"]),
        ("mm:f32-f16-f16:nn:1x1x1", "dtypes", 3, ["f32-f32-f16"]),
        ("mm:f16:nn:1x1x1::tf32", "flags", 17, ["products in f32"]),
        ("mm:f32-f32-f16:nn:1x1x1::tf32", "flags", 25, ["products in f32"]),
        ("woq_int8:f32-i8-f32:nt:1x1x1::tf32", "flags", 30, ["linear mixed_mm mm"]),
        ("mm:f32:nn:1x1x1::reduced", "flags", 17, ["products in bf16 or f16"]),
        ("linear:f32:nt:1x1x1:bias:tap", "flags", 25, ["relu"]),
        ("mm:f16:nn:4x8x16:add:res-a", "flags", 21, ["N = K", "4x8x8"]),
        ("mm:f16:nn:4x8x8:relu:res-a", "flags", 21, ["residual"]),
        ("mm:f16:nn:4x8x8:div:res-a", "flags", 20, ["zeros"]),
        ("mm:f16:nn:4x8x8:cast-f32+add:res-a", "flags", 29, ["not f32"]),
        ("mm:f32:nn:1x1x1:relu:dyn-m:x", "flags", 27, ["too many fields"]),
        ("mm:f32:nn:2x3x1:add-q", "epilogue", 20, ["residual shape", "mn n m1"]),
        ("mm:f32:nn:2x3x1:t-1", "epilogue", 18, ["write t"]),
        ("mm:f32:nn:2x3x1:perm", "epilogue", 21, ["perm-1_0_2"]),
        ("mm:f32:nn:2x3x1:perm-0_2", "epilogue", 16, ["2x3", "perm-1_0"]),
        ("bmm:f32:nn:2x3x4x1:view-2x3x5", "epilogue", 19, ["24 elements", "2x3x4"]),
        ("mm:f32:nn:2x3x1:t+view-6", "epilogue", 16, ["would copy"]),
        ("mm:f32:nn:2x3x1:view-6:dyn-m", "epilogue", 16, ["t and perm"]),
        ("mm:f32:nn:2x3x1:t+add-n", "epilogue", 16, ["put add-n first"]),
        ("mm:f32:nn:4x8x8:t+add:res-a", "flags", 22, ["before any move"]),
        ("linear:f32:nt:3x2x3x1::in-4d", "flags", 23, ["even batch, not 3"]),
        ("linear:f32:nt:2x3x1::in-4d", "flags", 21, ["even batch, not None", "BxMxNxK"]),
        ("bmm:f32:nn:2x2x3x1::in-4d", "flags", 20, ["not supported by bmm"]),
        ("linear:f32:nt:2x2x3x1:relu:dyn-m+in-4d", "flags", 27, ["drop dyn-m"]),
        ("mm:f32:nn:2x3x1:relu:fork", "flags", 21, ["two steps"]),
        ("mm:f32:nn:2x3x1:t+relu:fork", "flags", 23, ["computes"]),
        ("mm:f32:nn:2x3x1:add+mul:fork", "flags", 24, ["residual each"]),
        ("mm:f32:nn:2x3x1:relu+exp:tap+fork", "flags", 25, ["keep one"]),
        ("mm:f32:nn:2x3x1::again", "flags", 17, ["N = K", "2x3x3"]),
        ("mm:f32:nn:2x3x3:t:again", "flags", 18, ["could be A"]),
        ("addmm:f32:nn:2x3x3:bias:again", "flags", 24, ["mm, linear or bmm"]),
        ("mm:f32:nn:2x3x3:relu:tap+again", "flags", 21, ["drop tap"]),
        ("mm:f32", "layout", 6, ["is missing"]),
    ],
)
def test_a_wrong_line_is_told_where_and_what_would_be_right(
    line: str, field: str, column: int, words: list[str]
) -> None:
    with pytest.raises(ProblemError) as caught:
        Problem.parse(line)
    assert (caught.value.field, caught.value.column) == (field, column)
    for word in words:
        assert word in str(caught.value)
    assert str(caught.value).splitlines()[2] == "  " + " " * column + "^"


def test_one_line_has_one_spelling() -> None:
    assert str(Problem.parse("mm:f32-f32-f32:nn:1x1x1:bias-n:pad-lda+dyn-m")) == "mm:f32:nn:1x1x1:bias:dyn-m+pad-lda"


@pytest.mark.parametrize(
    ("line", "autocast", "dtype"),
    [
        ("mm:f32-f32-bf16:nn:1x1x1", True, "bf16"),
        ("addmm:f32-f32-f16:nn:1x1x1:bias", True, "f16"),
        ("mm:f32:nn:1x1x1", False, "f32"),
        ("mixed_mm:i8-f16-f16:nn:1x1x1", False, "f16"),
        ("int_mm:i8-i8-i32:nt:1x1x1", False, "i8"),
    ],
)
def test_the_dtype_in_which_a_product_is_multiplied(line: str, autocast: bool, dtype: str) -> None:
    problem = Problem.parse(line)
    assert (problem.autocast, problem.input_dtype.name) == (autocast, dtype)


@pytest.mark.parametrize(
    ("line", "outputs"),
    [
        ("mm:f32:nn:1x1x1:relu", ["mm:f32:nn:1x1x1:relu"]),
        ("mm:f32:nn:1x1x1:relu:tap", ["mm:f32:nn:1x1x1", "mm:f32:nn:1x1x1:relu"]),
        (
            "addmm:f16:nn:4x8x8:bias+alpha-2+add+gelu:dyn-m+res-a+tap",
            ["addmm:f16:nn:4x8x8:bias+alpha-2+add:dyn-m+res-a", "addmm:f16:nn:4x8x8:bias+alpha-2+add+gelu:dyn-m+res-a"],
        ),
        # Without its residual the tapped problem has nothing that could be A.
        ("mm:f16:nn:4x8x8:add:res-a+tap", ["mm:f16:nn:4x8x8", "mm:f16:nn:4x8x8:add:res-a"]),
        ("linear:f16:nt:4x8x8:bias+cast-f32:tap", ["linear:f16:nt:4x8x8:bias", "linear:f16:nt:4x8x8:bias+cast-f32"]),
        ("mm:f32:nn:4x8x2:relu+t:tap", ["mm:f32:nn:4x8x2:relu", "mm:f32:nn:4x8x2:relu+t"]),
        ("mm:f32:nn:4x8x2:mul+relu+add:fork", ["mm:f32:nn:4x8x2:mul+relu", "mm:f32:nn:4x8x2:mul+add"]),
        (
            "linear:f32:tt:4x8x8:bias+relu:pad-lda+again",
            ["linear:f32:tt:4x8x8:bias+relu:pad-lda", "linear:f32:nt:4x8x8:bias"],
        ),
        ("mm:f32:nn:4x8x8:add+relu:fork+res-a", ["mm:f32:nn:4x8x8:add:res-a", "mm:f32:nn:4x8x8:relu"]),
    ],
)
def test_a_tapped_program_answers_two_problems(line: str, outputs: list[str]) -> None:
    assert [str(p) for p in Problem.parse(line).outputs] == outputs


@pytest.mark.parametrize(
    ("line", "judged", "returned"),
    [
        ("mm:f32:nn:4x8x2:relu+t+add", (4, 8), (8, 4)),
        ("linear:f32:nt:2x4x8x3:perm-2_0_1", (2, 4, 8), (8, 2, 4)),
        ("mm:f32:nn:4x8x2:view-2x2x4x2+perm-0_2_1_3+t", (4, 8), (2, 4, 2, 2)),
        ("grouped_mm:bf16:nt:2x4x8x8:t", (8, 8), (8, 8)),
    ],
)
def test_a_result_is_returned_in_other_places_than_it_is_judged(
    line: str, judged: tuple[int, ...], returned: tuple[int, ...]
) -> None:
    problem = Problem.parse(line)
    assert (problem.result_shape, problem.returned_shape) == (judged, returned)


def test_what_the_rooms_ask_of_a_problem() -> None:
    problem = Problem.parse("addmm:bf16:nt:8x256x2664:bias-m1+alpha-0.5+beta-2+relu+add+cast-f32")
    assert (problem.alpha, problem.beta, problem.bias_shape) == (0.5, 2.0, (8, 1))
    assert [str(s) for s in problem.passes] == ["relu", "add", "cast-f32"]
    assert (problem.result_dtype.name, problem.result_shape) == ("f32", (8, 256))
    assert problem.constant_b
    assert not Problem.parse("bmm:f32:nn:2x3x4x5").constant_b
    assert [str(s) for s in Problem.parse("mm:f32:nn:1x1x1:bias+relu").passes] == ["bias", "relu"]
