"""Whose fault a failure is: PyTorch's own product, planted here with a defect, fails in the same way or in another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from oracle import judged

import pytest_gemm
from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.failures import findings
from pytest_gemm.judging import judge
from pytest_gemm.ledger.entry import Environment
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.problem.problem import Problem
from pytest_gemm.record.lines import from_record, to_record
from pytest_gemm.run import known

LINE = "mm:f32:nn:16x24x32"
ENTRY = 'backend = "aten"\ntest = "test_product"\nwhere = { dtypes = "f32" }\ntorch = ">=2.11"\n'
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def right(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double()).to(a.dtype)


def theirs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """NaN in column 3 of all rows but the first."""
    c = right(a, b)
    c[..., 1:, 3] = torch.nan
    return c


def besides(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    k = a.shape[-1] // 24 * 24
    return torch.where(theirs(a, b).isnan(), torch.nan, right(a[..., :k], b[..., :k, :]))


def elsewhere(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = right(a, b)
    c[..., 1:, 5] = torch.nan
    return c


def minus_zeros(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = theirs(a, b)
    return torch.where(c == 0, -0.0 * torch.ones_like(c), c)


def raises(_: torch.Tensor, __: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("out of registers")


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Product], None]:
    return lambda product: monkeypatch.setattr(judge, "_ATEN", CallableBackend("aten", product))


@pytest.mark.parametrize(
    ("pytorch", "mine", "title", "says"),
    [
        (theirs, theirs, "incorrect: PyTorch's own product: NaN where a number is due", "wrong here too: NaN where a"),
        (
            minus_zeros,
            minus_zeros,
            "incorrect: PyTorch's own product: NaN where a number is due",
            "your kernel inherit",
        ),
        (theirs, besides, "incorrect: K tail", "a number is due, in 15 further elements with the same values"),
        (theirs, elsewhere, "incorrect: stray NaN", "wrong here too, in another way: 15 of 384 elements are NaN"),
        (right, theirs, "incorrect: stray NaN", ""),
        (raises, theirs, "incorrect: stray NaN", "fails here too, in another way: RuntimeError in run: out of regi"),
        (raises, raises, "crashed: PyTorch's own product: out of registers", "ends here too: RuntimeError: out of"),
        (theirs, raises, "crashed: RuntimeError in run", "wrong here too, in another way: 15 of 384"),
    ],
)
def test_the_headline_is_of_whose_fault_it_is(
    plant: Callable[[Product], None], pytorch: Product, mine: Product, title: str, says: str
) -> None:
    plant(pytorch)
    # int-1 has zeros whose sign is judged, behind other wrong elements.
    (outcome,) = judged(CallableBackend("mine", mine), LINE, "int-1" if mine is minus_zeros else "int-2")
    assert findings.title(outcome) == title
    assert outcome.inherited == ("PyTorch's" in title)
    lines = outcome.details.splitlines()
    assert says in "\n".join(lines[:2])
    assert bool(says) == ("PyTorch's own product" in outcome.details)
    assert from_record(to_record(outcome)) == outcome


def test_elements_that_both_leave_unwritten_need_not_have_the_same_values(plant: Callable[[Product], None]) -> None:
    def unwritten(a: torch.Tensor, b: torch.Tensor, times: int = 1) -> torch.Tensor:
        c = torch.empty(times, a.shape[0], b.shape[1])[0]  # NaN lies where the judge expects the result
        c[:3] = right(a[:3], b)
        return c

    plant(unwritten)
    (outcome,) = judged(CallableBackend("mine", lambda a, b: unwritten(a, b, 4)), LINE, "int-2")
    assert outcome.inherited
    assert "in the same elements" in outcome.details.splitlines()[1]


def test_of_a_large_result_all_of_it_is_compared(plant: Callable[[Product], None]) -> None:
    plant(theirs)
    sampled = judge.Judge(reference="sampled")
    outcomes = [judged(CallableBackend("mine", f), LINE, "int-2", judge=sampled)[0] for f in (theirs, besides)]
    assert [one.inherited for one in outcomes] == [True, False]
    assert all(one.sampled and "PyTorch's own product is wrong here too" in one.details for one in outcomes)


def test_pytorchs_findings_are_apart_and_come_last(plant: Callable[[Product], None]) -> None:
    plant(theirs)

    def corner(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        c = theirs(a, b)
        c[:1, :1] += 1 if len(a) == 16 else 0
        return c

    lines = (LINE, *(f"mm:f32:nn:{m}x24x32" for m in range(17, 22)))
    outcomes = [one for line in lines for one in judged(CallableBackend("mine", corner), line, "int-2", "rand")]
    own, inherited = findings.findings(outcomes)
    assert own.problems == [LINE]
    assert (inherited.title, len(inherited.problems)) == (
        "incorrect: PyTorch's own product: NaN where a number is due",
        5,
    )


def test_the_entry_of_pytorchs_defect_is_named(plant: Callable[[Product], None], tmp_path: Path) -> None:
    plant(theirs)
    path = tmp_path / "ledger.toml"
    path.write_text(f'[[known-failure]]\nid = "their-nan"\nreason = "a NaN in column 3"\n{ENTRY}says = "*are NaN*"\n')
    ledger, problem = Ledger.load(path), Problem.parse(LINE)

    def explained(product: Product) -> Outcome:
        outcomes = judged(CallableBackend("mine", product), LINE, "int-2")
        (found,), use = known.explain(outcomes, problem, ledger, Environment("2.13.0"))
        assert (found.status, use) == (Status.INCORRECT, {})
        return found

    assert "known failure of PyTorch their-nan: a NaN in column 3" in explained(theirs).details.splitlines()[2]
    assert "their-nan" not in explained(elsewhere).details


def test_the_screen_of_check_begins_with_it(plant: Callable[[Product], None]) -> None:
    plant(theirs)

    def mine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:  # a closure is called in this process
        return theirs(a, b)

    found = pytest_gemm.check(mine, dtypes=["f32"], problem=LINE)
    title = "incorrect: PyTorch's own product: NaN where a number is due"
    assert found.text.startswith(title)
    assert "PyTorch's own product is wrong here too: NaN where a number is due" in " ".join(found.text.split())
    assert (found.verdict, found.status, found.to_dict()["outcomes"][0]["inherited"]) == (title, 1, True)
