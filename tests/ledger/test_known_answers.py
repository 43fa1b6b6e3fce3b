"""What an entry states about a failure: the known wrong answer is known, another one in its place is a new failure."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from imitations import IMITATIONS as PROGRAMS
from mutants import Control, Mutant, Plant, Planted, Tensors, afterwards, corrupted, exact, product, right, store, whole
from torch import Tensor

from pytest_gemm.core.case_id import CaseId, Device
from pytest_gemm.core.outcome import Outcome, Reason, Status
from pytest_gemm.judging import imitations
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.ledger.computes import COMPUTES
from pytest_gemm.ledger.entry import Environment
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands import tensors
from pytest_gemm.problem.problem import Problem
from pytest_gemm.run.known import explain

SHIPPED: Final = Path(__file__).parents[2] / "conformance" / "known_failures.toml"


def instead(name: str, changed: Callable[[Tensor], Tensor]) -> Plant:
    """One operand is read in another way."""

    def spoil(t: Tensors, _: Problem) -> None:
        t[name] = changed(t[name])

    return corrupted(spoil)


def strided(*strides: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.as_strided(x.shape, strides)


def cut_off(c: Tensor) -> Tensor:
    """Rounded to bf16 toward zero."""
    return (c.float().view(torch.int32) & -(1 << 16)).view(torch.float32).bfloat16()


def of_the_next_seed(t: Tensors, problem: Problem) -> None:
    t["b"] = tensors.make(problem, "rand", 1).b.mT


def first_columns(b: Tensor) -> Tensor:
    return b[..., torch.arange(64) // 32 * 32 + torch.arange(64) % 16]


def whole_steps_of_one_group(t: Tensors, _: Problem) -> None:
    """As cuBLAS 13 had it on an H200: of the third group, 17928 long."""
    t["a"] = t["a"].index_fill(1, torch.arange(28784, 28792), 0)


def by_blocks_of_4(a: Tensor) -> Tensor:
    """Each block of K begins where it does, and its columns are read with a stride of 1, of a copy without gaps."""
    row, k = torch.arange(a.shape[0])[:, None], torch.arange(a.shape[1])
    return a.mT.flatten()[row + k // 4 * 4 * a.shape[0] + k % 4]


def in_rows(t: Tensors, _: Problem) -> Tensor:
    """The result is written as if the given tensor were contiguous."""
    t["out"].as_strided((17, 33), (33, 1)).copy_(exact(t["a"], t["b"]))
    return t["out"]


def of_adjacent_rows(problem: Problem) -> Callable[[Tensors], Any]:
    """Pairs of products saturate, and a weight with gaps is read without."""
    run = PROGRAMS["pairs-saturate"](problem)
    return lambda t: run({**t, "b": strided(126, 1)(t["b"])})


EAGER: Final = Contract(epilogue="eager")
FAST: Final = Contract(alignment_bits=13, chunk=16, promote_every=128)
# The name of a wrong answer, a problem, a program with that answer, distributions, and the contract where it matters.
_KNOWN: Final[tuple[tuple[Any, ...], ...]] = (
    (
        "weight-from-storage-start",
        "mm:f32:nn:17x33x48:b.offset",
        instead("b", lambda b: b.as_strided(b.shape, b.stride(), 0)),
    ),
    ("weight-before", "linear:f32:nt:17x33x48", corrupted(of_the_next_seed), ("rand",)),
    ("rows-of-a-adjacent", "mm:f32:nn:17x33x48:a.padded", instead("a", strided(48, 1))),
    ("last-stride-of-a", "mm:f32:tn:17x33x48", instead("a", strided(1, 1))),
    ("last-stride-of-a", "mm:f32-f32-bf16:tn:17x33x24:a.padded", instead("a", by_blocks_of_4)),
    ("rows-of-b-adjacent", "linear:f32:nt:17x33x48:b.padded", instead("b", strided(48, 1))),
    ("columns-of-first-block", "bmm:f32:nn:3x17x64x48", instead("b", first_columns)),
    ("strides-swapped", "mm:f32:nn:1x33x48", instead("a", strided(1, 0))),
    (
        "no-product",
        "addmm:f32:nn:17x33x48:bias+alpha--1+beta-0.5",
        whole(lambda t, p: (t["bias"] * p.beta).repeat(17, 1)),
    ),
    ("no-bias", "linear:f32:nt:17x33x48:bias+relu", instead("bias", torch.zeros_like)),
    (
        "no-bias",
        "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:16x16x0:bias:quant.tensorwise",
        whole(lambda *_: torch.zeros(16, 16, dtype=torch.bfloat16)),
    ),
    ("whole-steps-of-k", "mm:f32:nn:17x33x200", product(lambda a, b: right(a[:, :192], b[:192]))),
    ("whole-steps-of-k", "grouped_mm_k:f16:nn:4x8x16x8192", corrupted(whole_steps_of_one_group), ("k-cover",)),
    (
        "beta-ignored",
        "baddbmm:bf16:nn:3x17x33x40:bias+alpha-0+beta-0.5",
        whole(lambda t, _: t["bias"].expand(3, 17, 33).clone()),
    ),
    (
        "unscaled-result",
        "scaled_mm:f8e4m3fn:nt:33x64x128:quant.tensorwise+result-4",
        instead("scale_b", lambda scale: scale * 4),
    ),
    (
        "block-scales-by-four",
        "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:64x384x384:quant.blocks",
        instead("scale_b", strided(1, 4)),
    ),
    ("rows-of-out-adjacent", "mm:f32:nn:17x33x48:out.given+transposed", whole(in_rows)),
    ("slice-of-k", "mm:f32:nn:17x33x96", product(lambda a, b: right(a[:, :48], b[:48]))),
    ("pairs-saturate", "int_mm:i8-i8-i32:nt:32x64x128", PROGRAMS["pairs-saturate"], ("int-2", "rand")),
    ("pairs-saturate", "qlinear:u8-i8-f32:nt:17x65x126:quant.static", PROGRAMS["pairs-saturate"], ("rand",)),
    ("pairs-saturate", "da8w8:i8-i8-f32:nt:2x17x65x126:quant.rowwise", PROGRAMS["pairs-saturate"], ("rand",)),
    (
        "fast-accumulation",
        "scaled_mm:f8e4m3fn-f8e4m3fn-f32:nt:17x33x8192:quant.tensorwise",
        product(lambda a, b: exact(a, b) * (1 - 2.0**-4)),
        ("rand-positive",),
        FAST,
    ),
    *(
        ("truncated", f"mm:bf16:nn:17x33x48{steps}", product(lambda a, b: cut_off(exact(a, b))), ("rand",), EAGER)
        for steps in ("", ":gelu")
    ),
    *(
        (
            "rounded-through-f16",
            f"mm:bf16:nn:64x64x48{steps}",
            product(lambda a, b: exact(a, b).half().bfloat16()),
            ("rand",),
            EAGER,
        )
        for steps in ("", ":scale-3")
    ),
    (
        "flushed-to-zero",
        "mixed_mm:bf16-i8-bf16:nn:40x33x1",
        afterwards(lambda c: torch.where(c.abs() < 2.0**-126, torch.zeros_like(c), c)),
        ("specials",),
    ),
    ("precision-of-f32", "mm:f64:nn:17x33x48", product(lambda a, b: (a @ b).float().double()), ("rand",)),
    ("precision-of-11-bits", "mm:f32:nn:17x33x48:tanh", afterwards(lambda c: c * (1 + 2.0**-11)), ("rand",)),
    ("nan", "mm:f32:nn:17x33x48", afterwards(lambda c: c.index_fill(0, torch.tensor([3]), torch.nan))),
    ("nan-of-next-row", "mm:bf16:nn:120x136x16:b.argument", PROGRAMS["nan-of-the-row-behind"], ("specials",)),
    (
        "nan-of-next-row",
        "mm_plus_mm:bf16:nt:33x65x26",
        PROGRAMS["nan-of-the-row-behind"],
        ("specials",),
        Contract(slices=2, partials="out"),
    ),
    (
        "nan-of-last-infinity",
        "mm:bf16:nn:17x65x127",
        whole(lambda t, _: store(exact(t["a"], t["b"]).where(~t["a"][:, -1:].isinf(), torch.nan), t["a"])),
        ("specials",),
    ),
    (
        "nan-of-last-infinity",
        "mm_plus_mm:bf16:nt:33x65x4",
        product(lambda a, b: store(exact(a, b).where(~a[:, -1:].isinf(), torch.nan), a)),
        ("specials",),
        Contract(slices=2, partials="out"),
    ),
    ("nan-of-bias", "addmm:f32:nn:17x65x127:bias+beta-0", PROGRAMS["bias-times-zero"], ("specials",)),
    (
        "number-for-nan",
        "mm:f32:nn:17x65x127",
        afterwards(lambda c: c.nan_to_num(3.0, torch.inf, -torch.inf)),
        ("specials",),
    ),
    ("first-block-right", "mm:f32:nn:128x96x192", PROGRAMS["blocks-of-missing-threads"]),
)
KNOWN: Final[list[tuple[str, str, Plant, tuple[str, ...], Contract | None]]] = [
    (name, line, plant, (*more[:1], ("int-2", "rand"))[0], (*more[1:], None)[0]) for name, line, plant, *more in _KNOWN
]


def another(c: Tensor) -> Tensor:
    """A result whose first elements are those of another problem."""
    wrong = c.double()
    wrong[..., 0, :4] = 3 * wrong[..., 0, :4] + 16
    wrong[..., 0, :4] = torch.where(wrong[..., 0, :4].isfinite(), wrong[..., 0, :4], 5.0)
    return wrong.to(c.dtype)


def judged(
    name: str,
    line: str,
    plant: Plant,
    distributions: tuple[str, ...],
    contract: Contract | None,
    reference: str = "auto",
) -> list[Outcome]:
    """The wrong results of a planted program, compared with one known wrong answer."""
    entry = Mutant("", plant, {"": line}) if contract is None else Control("", plant, {"": line}, contract)
    backend = Planted("planted", entry)
    judge = Judge(reference=reference, statements=lambda *_: tuple(name.split(" ")))
    case = Case(backend, Problem.parse(line), distributions, 0, Device.CPU)
    return [o for o in judge.outcomes(case) if o.status is Status.INCORRECT]


@pytest.mark.parametrize("known", KNOWN, ids=[known[0] for known in KNOWN])
def test_the_known_answer_is_told_from_another_one_in_its_place(known: tuple[Any, ...], tmp_path: Path) -> None:
    name, line, plant, distributions, contract = known
    file = tmp_path / "ledger.toml"
    file.write_text(
        f'[[known-failure]]\nid = "x"\nreason = "r"\nbackend = "planted"\ncomputes = "{name}"\nproblem = "{line}"\n'
    )
    ledger, problem = Ledger.load(file), Problem.parse(line)
    assert ledger.statements(Outcome(CaseId("planted", line), "rand", 0, Status.INCORRECT), problem) == (name,)

    def statuses(plant: Plant) -> set[Status]:
        found = judged(name, line, plant, distributions, contract)
        assert found, "the kernel is right"
        explained = explain(found, problem, ledger, Environment("2.13.0"))[0]
        said = "the known failure x has this case, and states another failure"
        assert all((said in outcome.details) is (outcome.status is Status.INCORRECT) for outcome in explained)
        return {outcome.status for outcome in explained}

    assert statuses(plant) == {Status.KNOWN_FAILURE}
    assert statuses(afterwards(another)) == {Status.INCORRECT}


def test_a_slice_of_k_is_known_by_sample() -> None:
    ((name, line, plant, *_),) = (known for known in KNOWN if known[0] == "slice-of-k")
    for kernel, imitates in ((plant, (name,)), (afterwards(another), ())):
        found = judged(name, line, kernel, ("int-2", "rand"), None, "sampled")
        assert [outcome.imitates for outcome in found] == [imitates] * 2


def test_slices_of_k_are_of_whole_register_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imitations.Failure, "tile", (16, 16, 32), raising=False)
    plant = product(lambda a, b: right(a[:, :64], b[:64]))  # three slices of four blocks: two of them are of two
    assert [one.imitates for one in judged("slice-of-k", "mm:f32:nn:17x33x100", plant, ("rand",), None)] == [
        ("slice-of-k",)
    ]


def test_two_defects_at_once_are_both_known() -> None:
    names, line = "rows-of-b-adjacent pairs-saturate", "qlinear:u8-i8-f32:nt:17x65x126:quant.static:b.padded"
    for plant, imitates in ((of_adjacent_rows, tuple(names.split(" "))), (afterwards(another), ())):
        assert {one.imitates for one in judged(names, line, plant, ("int-2", "rand"), None)} == {imitates}


def test_the_next_row_of_the_one_input_of_linears_is_known() -> None:
    name, plant = "nan-of-next-row", PROGRAMS["nan-of-the-row-behind"]
    found = judged(name, "linears:bf16:nt:2x120x136x16", plant, ("specials",), None)
    assert [one.imitates for one in found] == [(name,)]


def test_a_weight_that_is_no_constant_is_not_the_one_before() -> None:
    line, plant = "linear:f32:nt:17x33x48:b.argument", corrupted(of_the_next_seed)
    assert [one.imitates for one in judged("weight-before", line, plant, ("rand",), None)] == [()]


def test_pairs_saturate_at_16_bits_on_either_side() -> None:
    a, b = torch.full((1, 3), 255.0).double(), torch.tensor([[127.0, -128.0], [127.0, -128.0], [1.0, 1.0]]).double()
    assert imitations.saturated(a, b).tolist() == [[32767.0 + 255.0, -32768.0 + 255.0]]


def test_a_row_is_quantised_by_the_numbers_behind_its_last_nan() -> None:
    a = torch.tensor([[9.0, torch.nan, 1.0, -2.0], [5.0, torch.nan, 3.0, 4.0], [1e30, 5.0, torch.nan, torch.nan]])
    assert imitations._without_nan(a).tolist() == [
        [1.0, -2.0, 1.0, -2.0],
        [4.0, 4.0, 3.0, 4.0],
        [-255.0, 0.0, -255.0, -255.0],
    ]


def test_in_bf16_a_row_is_quantised_by_all_of_its_numbers() -> None:
    a = torch.tensor([[9.0, torch.nan, 1.0, -2.0], [0.3, torch.nan, -0.3, 0.0]], dtype=torch.bfloat16)
    for aside, code in ((-1e-3, a[1, 0]), (1e-3, a[1, 2])):  # the zero point of the second row is a tie
        assert imitations._without_nan(a, aside).tolist() == [[9.0, 9.0, 1.0, -2.0], [*a[1, :1], code, *a[1, 2:]]]


def test_a_wrong_result_that_was_not_compared_is_known_by_what_it_says() -> None:
    (entry,) = (one for one in Ledger.load(SHIPPED).entries if one.id == "aten-scaled-mm-strided-out")
    beside = Outcome(
        CaseId("aten", "x"), "rand", 0, Status.INCORRECT, Reason("written-beside", "the kernel wrote beside")
    )
    assert entry.explains(beside)
    assert not entry.explains(dataclasses.replace(beside, reason=Reason("nondeterministic", "")))
    assert not entry.explains(dataclasses.replace(beside, imitates=()))


def test_each_answer_has_a_name_a_sentence_and_a_test() -> None:
    page = (SHIPPED.parents[1] / "docs" / "how-to" / "known-failures.md").read_text(encoding="utf-8")
    assert page.endswith("".join(f"| `{name}` | {sentence} |\n" for name, sentence in COMPUTES.items()))
    assert list(COMPUTES) == list(imitations.IMITATIONS)
    # tests/judging/test_block_scales.py has the tiles of that template.
    assert {known[0] for known in KNOWN} | {"beyond-2-31", "block-scales-by-rows"} == set(COMPUTES)


@pytest.mark.parametrize(("index", "expected"), [((8191, 511, 511), False), ((8192, 0, 0), True)])
def test_what_lies_beyond_2_31_elements(index: tuple[int, ...], expected: bool) -> None:
    problem = Problem.parse("bmm:f32:nn:8209x512x512x1")
    wrong = types.SimpleNamespace(comparison=types.SimpleNamespace(mismatch=types.SimpleNamespace(index=index)))
    given = types.SimpleNamespace(problem=problem)
    failure = imitations.Failure(given, (), Contract(), 0, wrong)  # type: ignore[arg-type]
    assert imitations.IMITATIONS["beyond-2-31"](failure) is expected


@pytest.mark.parametrize(
    ("stated", "reason", "details", "expected"),
    [
        (
            "says = \"*KeyError: 'D'*\"",
            Reason("prepare-KeyError", "KeyError in prepare: 'D'"),
            "x\nKeyError: 'D'",
            True,
        ),
        (
            "says = \"*KeyError: 'D'*\"",
            Reason("prepare-KeyError", "KeyError in prepare: 'E'"),
            "x\nKeyError: 'E'",
            False,
        ),
        ('says = ["a*", "foreign-kernel"]', Reason("foreign-kernel", "the product was computed by addmm"), "", True),
        ('unstated = "memory"', Reason("x", "y"), "", True),
    ],
)
def test_a_crash_that_says_something_else_is_a_new_failure(
    tmp_path: Path, stated: str, reason: Reason, details: str, expected: bool
) -> None:
    file = tmp_path / "ledger.toml"
    file.write_text(
        f'[[known-failure]]\nid = "x"\nreason = "r"\nbackend = "cpp"\nstatus = "crashed"\n{stated}\nwhere.op = "mm"\n'
    )
    line = "mm:f32:nn:1x1x1"
    outcome = Outcome(CaseId("cpp", line), "rand", 0, Status.CRASHED, reason, details=details)
    assert (Ledger.load(file).match(outcome, Problem.parse(line), Environment("2.13.0")) is not None) is expected


def test_a_wrong_result_that_was_not_compared_is_none_that_is_stated() -> None:
    (entry,) = (one for one in Ledger.load(SHIPPED).entries if one.id == "triton-scales-of-blocks")
    wrong = Outcome(CaseId("triton", "scaled_mm"), "rand", 0, Status.INCORRECT, Reason("not-deterministic", "r"))
    assert not entry.explains(wrong)
    assert entry.explains(dataclasses.replace(wrong, imitates=("block-scales-by-rows",)))


def test_each_shipped_entry_states_its_failure_or_why_not() -> None:
    for entry in Ledger.load(SHIPPED).entries:
        if entry.crashes or entry.unstated:
            continue
        # What is refused before it is compared has a code, and no number to compute.
        is_code = entry.says.patterns[0] in {"result-is-input", "written-beside"}
        wrong = Status.INCORRECT not in entry.status or not entry.computes.is_open or is_code
        other = entry.status == {Status.INCORRECT} or not entry.says.is_open
        assert wrong, f"{entry.id}: computes = ... or unstated = ..."
        assert other, f"{entry.id}: says = ... or unstated = ..."
