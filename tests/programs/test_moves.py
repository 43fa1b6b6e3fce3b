"""Epilogues that do more than compute: results in other places, two results, residuals of other shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mutants import Control, Plant, Planted, Tensors, whole
from oracle import judged

from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.judging.judge import Judge
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands import tensors as operands
from pytest_gemm.operands import views
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import Step
from pytest_gemm.programs import program

MOVED = (
    "linear:f32:nt:33x65x127:bias+relu+t+add", "linear:bf16:nt:12x64x16:bias+view-3x4x8x8+perm-0_2_1_3+mul",
    "linear:f16:nt:2x17x33x64:bias+gelu+perm-2_0_1+sub:program.multi_output", "bmm:f32:nn:3x4x5x60:perm-1_0_2+mul",
    "grouped_mm:bf16:nt:4x64x96x128:relu+t+add", "mm:f32:nn:24x24x24:relu+t:program.multi_output",
    "int_mm:i8-i8-i32:nt:32x64x64:cast-f32+mul-n+add-m1+t", "mm:f16:nn:17x40x50:mul-n+gelu+add-m1",
    "mm:f32:nn:30x40x50:relu+add:program.branching", "mm:bf16:nn:30x40x50:sub-m1+mul+t:program.branching",
    "addmm:f16:nn:33x64x64:bias+add+relu:r0.alias:program.branching", "mm:f32-f32-bf16:nn:20x40x100:mul-n+relu+t",
    "linear:f16:nt:2x17x33x64:mul-at+relu+t", "mm:f32:nn:24x33x64:relu+t+dense+add",
    "addmm:f32:nn:17x40x50:bias+add-at+sub:program.multi_output",
    "mm:f16:nn:20x40x100:cast-f32+mul:program.multi_output",
    "bmm:f32-f32-bf16:nn:3x20x40x100:relu:program.multi_output",
    "int_mm:i8-i8-i32:nt:32x64x64:cast-f32+add:program.multi_output",
    "linear:f32:nt:6x17x33x64:bias+relu+add+mul-n+add-m1:a.4d",
    "linear:bf16:tt:4x17x33x64:mul-at+perm-2_0_1_3+sub:a.4d",
)  # fmt: skip
AGAIN = (
    "linear:f32:nt:17x64x64:bias+relu:program.chained",
    "linear:bf16:tt:2x17x65x65:bias+add+gelu:program.chained",
    "mm:f16:nn:33x48x48:a.padded:program.chained",
    "mm:f32:tt:16x12x12:silu:b.halved:program.chained",
    "bmm:bf16:nn:3x17x64x64:mul:program.chained",
)


TWO = "mm:f32:nn:20x40x100:relu+gelu:program.multi_output"


@pytest.fixture(autouse=True)
def exact_int_mm(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own saturates where oneDNN is capped (aten-int-mm-saturates)."""
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: a.int() @ b.int())


def eager(
    line: str = "", given: Callable[[Tensors], Tensors] = dict, made: Callable[[Any], Any] = lambda c: c
) -> Plant:
    """Eager PyTorch on another problem's program, or with something done to its tensors or results."""
    return whole(lambda t, problem: made(program.build(Problem.parse(line) if line else problem)(**given(t))))


def planted_in(plant: Plant, line: str, reference: str = "auto") -> list[Outcome]:
    backend = Planted("planted", Control("", plant, {"": line}, Contract(epilogue="eager")))
    return judged(backend, line, "int-2", "rand", judge=Judge(reference=reference))


def changed(place: int) -> Callable[[Any], Any]:
    """One element of a result, or of one of two."""

    def spoil(made: Any) -> Any:
        (made[place] if isinstance(made, tuple) else made)[7, 3] += 1.0
        return made

    return spoil


@pytest.mark.parametrize(
    ("line", "reference"), [*((m, r) for m in MOVED for r in ("full", "sampled")), *((a, "sampled") for a in AGAIN)]
)
def test_a_right_result_passes_wherever_it_is_stored(line: str, reference: str) -> None:
    outcomes = planted_in(eager(), line, reference)
    assert [o.status for o in outcomes] == [Status.PASSED] * 2, outcomes
    if line in AGAIN or reference == "full":
        assert all("bit-equal" in o.eager and "apart" not in o.eager for o in outcomes)


@pytest.mark.parametrize(
    ("line", "planted", "says"),
    [
        # Without its move: another shape, or the same one with its elements in the wrong places.
        ("mm:f32:nn:20x40x100:relu+t", eager("mm:f32:nn:20x40x100:relu"), "(20, 40), expected (40, 20)"),
        ("mm:f32:nn:24x24x100:relu+t", eager("mm:f32:nn:24x24x100:relu"), "576 elements"),
        ("bmm:f32:nn:4x4x4x100:perm-1_0_2", eager("bmm:f32:nn:4x4x4x100:perm-2_1_0"), "64 elements"),
        (
            "mm:f32:nn:24x32x100:view-2x12x32+t",
            eager("mm:f32:nn:24x32x100:view-2x12x32"),
            "(2, 12, 32), expected (2, 32, 12)",
        ),
        # A 4-D input whose batch is flattened.
        ("linear:f32:nt:6x5x7x9:a.4d", eager(made=lambda c: c.flatten(0, 1)), "(6, 5, 7), expected (2, 3, 5, 7)"),
        # A residual in the product's places instead of the moved value's; a row that is taken for a column.
        ("mm:f32:nn:24x24x100:t+add", eager(given=lambda t: {**t, "r0": t["r0"].mT}), "576 elements"),
        ("mm:f32:nn:24x24x100:mul-n", eager(given=lambda t: {**t, "r0": t["r0"][:, None]}), "576 elements"),
        ("mm:f32:nn:24x24x100:mul-m1", eager(given=lambda t: {**t, "r0": t["r0"][:, 0]}), "576 elements"),
        # The second of two steps reads what the first one made.
        (
            "mm:f32:nn:24x32x100:relu+add:program.branching",
            eager("mm:f32:nn:24x32x100:relu+add:program.multi_output"),
            "the second result: ",
        ),
        (
            "mm:f32:nn:24x32x100:relu+t:program.branching",
            eager("mm:f32:nn:24x32x100:relu+t:program.multi_output"),
            "the second result: ",
        ),
        ("mm:f32:nn:24x32x100:relu+exp:program.branching", eager(made=lambda made: made[0]), "1 results came back"),
        # Another row of the table; a second product of something else than the first one's result.
        ("mm:f32:nn:24x32x100:add-at", eager(given=lambda t: {**t, "i0": t["i0"].roll(1)}), "768 elements"),
        ("mm:f32:nn:24x40x40:relu:program.chained", eager(made=lambda made: (made[0], made[0])), "the second result: "),
        ("mm:f32:nn:24x40x40:program.chained", eager(made=lambda made: (made[0] + 1, made[1])), "the first result: "),
        ("mm:f32:nn:24x40x40:program.chained", eager(made=lambda made: (made[0][1:], made[1])), "shape (23, 40)"),
        # One of two results is wrong, they are exchanged, or there is another number of them.
        (TWO, eager(made=changed(0)), "the intermediate value: 1 of 800 elements"),
        (TWO, eager(made=changed(1)), "the result: 1 of 800 elements"),
        (TWO, eager(made=lambda made: made[::-1]), "the intermediate value: "),
        (TWO, eager(made=lambda made: made[1]), "1 results came back"),
        (TWO, eager(made=lambda made: (*made, made[0])), "3 results came back"),
    ],
)
def test_a_wrong_result_is_found(line: str, planted: Plant, says: str) -> None:
    outcomes = planted_in(planted, line)
    assert {o.status for o in outcomes} <= {Status.INCORRECT, Status.CRASHED}
    assert all(o.reason is not None and says in o.reason.text for o in outcomes), [o.reason for o in outcomes]


def test_places_in_a_report_are_the_products_and_it_says_so() -> None:
    (first, *_) = planted_in(eager(made=changed(0)), "mm:f32:nn:20x40x100:relu+t")
    assert "at (3, 7)" in first.details
    assert first.details.endswith("(indices before view step t)")


@pytest.mark.parametrize("place", [0, 1])
def test_each_of_two_results_is_the_same_the_second_time(place: int) -> None:
    """In its last bit only, within the bound: one run alone would show nothing."""
    calls = iter(range(100))

    def spoil(results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x = results[place]
        results[place].copy_(torch.where(x > 0, torch.nextafter(x, x + 1), x) if next(calls) == 2 else x)
        return results

    outcomes = planted_in(eager(made=spoil), TWO)
    assert outcomes[-1].code == "not-deterministic"
    assert [o.status for o in outcomes[:2]] == [Status.PASSED] * 2


@pytest.mark.parametrize("line", MOVED)
def test_residuals_are_views_and_come_back_to_the_product(line: str) -> None:
    """A copy would take the NaN around an operand away, and with it what shows that a kernel reads too far."""
    problem = Problem.parse(line)
    given = operands.make(problem, "rand", 0)
    tensors = program.args(problem, given)
    for index, residual in enumerate(given.residuals):
        if index == 0 and problem.has("r0.alias"):
            continue
        taken = tensors[f"r{index}"]
        if index in given.lookups:
            assert torch.equal(taken[tensors[f"i{index}"].long()].view(residual.shape), residual)
            assert len(tensors[f"i{index}"].unique()) > 4  # of eleven rows
            continue
        assert taken.untyped_storage().data_ptr() == residual.untyped_storage().data_ptr()
        assert torch.equal(views.residual_of(problem, index, taken), residual)
        assert taken.is_contiguous() or any(move.name == "view" for move in problem.view_steps)
    assert given.guards_intact()


@pytest.mark.parametrize(
    ("text", "shape"),
    [("t", (3, 4)), ("perm-2_0_1", (3, 4, 5)), ("view-2x6+t", (3, 4)), ("view-2x2x3+perm-1_2_0", (3, 4))],
)
def test_back_is_the_inverse_of_forth(text: str, shape: tuple[int, ...]) -> None:
    steps = [Step(*part.partition("-")[::2]) for part in text.split("+")]
    x = torch.randn(shape)
    moved = views.forth(x, steps)
    assert not torch.equal(moved.flatten(), x.flatten())
    assert torch.equal(views.back(moved, shape, steps), x)


@pytest.mark.parametrize("line", [
    "linear:f32:nt:2x16x32x48:bias+gelu+perm-2_0_1+sub:m.dynamic", "linear:f32:nt:2x16x32x48:relu+t+add+mul:m.dynamic",
    "mm:f32:tn:17x33x48:mul-m1+add-n+t+add:a.padded:m.dynamic", "bmm:f32:tt:3x16x32x48:add+perm-1_2_0+mul:m.dynamic",
])  # fmt: skip
def test_an_artifact_for_any_m_is_compiled_for_operands_of_the_same_geometry(line: str) -> None:
    problem = Problem.parse(line)
    first, tensors = CppBackend()._first(problem, operands.make(problem, "rand", 0))
    wanted = program.args(first, operands.make(first, "rand", 0))
    assert {name: (t.shape, t.stride()) for name, t in tensors.items()} == {
        name: (t.shape, t.stride()) for name, t in wanted.items()
    }


@pytest.mark.compiler
@pytest.mark.parametrize(("line", "fused", "fusions"), [
    ("linear:f32:nt:5x17x33:bias+relu+t+add", True, 1),
    ("linear:f32:nt:5x17x33:bias+relu+add:program.branching", True, 2),
    ("linear:f32:nt:5x17x33:bias+relu+t+dense", False, 0), ("mm:f32:nn:5x17x33", None, 0),
])  # fmt: skip
def test_an_outcome_says_whether_the_template_did_the_epilogue(line: str, fused: bool | None, fusions: int) -> None:
    (outcome,) = judged(CppBackend(threads=1), line, "rand", candidates="one")
    assert (outcome.status, outcome.fused, outcome.fusions) == (Status.PASSED, fused, fusions)
