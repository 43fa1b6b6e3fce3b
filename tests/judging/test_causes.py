"""The name of a cause is that of the planted bug, whichever distribution found it, or there is none."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mutants
import oracle
import pytest
import torch
from mutants import BIAS, BIAS_RELU, PLAIN, SMALL, Control, Planted
from studies import causes, mutant_study

from pytest_gemm.core.case_id import Device
from pytest_gemm.failures import findings
from pytest_gemm.judging import coded, explain, recompute, repeated, verdict
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.locate import Wrong
from pytest_gemm.judging.recompute import Sample
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.problem.problem import Problem
from pytest_gemm.storage.datafile import document

TABLE = document(Path(explain.__file__).with_name("causes.toml"))

# Mutants, and how many of the quick distributions name them.
NAMED = [
    ("k-tail-dropped", PLAIN["f32"], 4),
    ("k-tail-dropped", PLAIN["bf16"], 4),
    ("split-k-slice-dropped", PLAIN["f32"], 4),
    ("k-doubled", PLAIN["f32"], 3),
    ("bias-missing", BIAS["bf16"], 4),
    ("bias-shifted", BIAS["f32"], 4),
    ("relu-before-bias", BIAS_RELU["f32"], 3),
    ("alpha-and-beta-exchanged", mutants.ADDMM["f32"], 3),
    ("addend-not-read", mutants.ADDEND["f32"], 3),
    ("addend-twice-from-the-second-call-on", mutants.ADDEND["f32"], 3),
    ("addend-read-in-the-last-tile-again", mutants.ADDEND["f32"], 3),
    ("addend-read-by-each-part", mutants.ADDEND["bf16"], 3),
    ("addend-read-after-the-product", mutants.ADDEND["f32"], 3),
    ("a-overwritten-by-tiles", mutants.OVER_A["f32"], 2),
    ("out-written-by-rows", mutants.OUT_BY_COLUMNS["f32"], 2),
    ("bias-rounded-down", mutants.OFFSET_BIAS["f32"], 3),
    ("rows-shifted", PLAIN["f32"], 2),
    ("int8-read-unsigned", PLAIN["i8"], 2),
    ("int8-lowest-clipped", PLAIN["i8"], 1),
    ("scale-of-the-next-group", mutants.WOQ["i4"], 2),
    ("scale-of-the-next-group", mutants.Q8_0["i8"], 2),
    ("zero-of-the-next-group", mutants.WOQ["i4"], 3),
    ("zeros-one-off", mutants.WOQ["u8"], 3),
    ("short-group-as-the-one-before", mutants.WOQ["i4"], 2),
    ("group-boundary-early", mutants.WOQ["i4"], 2),
    ("codes-cut-off", mutants.Q8_0["i8"], 1),
    ("step-of-the-row", mutants.Q8_0["i8"], 1),
    ("table-entries-exchanged", mutants.NF4["i4"], 2),
    ("bias-codes-missing", mutants.BIAS_CODES["u8"], 3),
    ("activation-as-its-weight", mutants.HALF_WEIGHT["f32"], 1),
    ("absmax-mistyped", mutants.ABSMAX["f32"], 3),
    ("wrong-shape", PLAIN["f32"], 1),
    ("packed-by-address", SMALL["f32"], 1),
    ("raises", PLAIN["f32"], 1),
]


@pytest.mark.parametrize(("name", "template", "at_least"), NAMED, ids=[f"{n}-{t[:14]}" for n, t, _ in NAMED])
def test_the_planted_cause_is_named(name: str, template: str, at_least: int) -> None:
    found = causes.named(None, name, template.format(k=1000))
    said = {one.distribution: one.cause for one in found}
    assert sum(one.verdict == "right" for one in found) >= at_least, said
    assert all(one.verdict != "wrong" for one in found), said


@pytest.mark.slow
@pytest.mark.parametrize("k", [31, 127, 1000])
@pytest.mark.parametrize("is_last_kept", [False, True])
def test_a_tail_is_a_tail_on_any_data(k: int, *, is_last_kept: bool) -> None:
    def tail(a: mutants.Tensor, b: mutants.Tensor) -> mutants.Tensor:
        ks = [*range(k // 16 * 16), *[k - 1] * is_last_kept]
        return mutants.right(a[..., ks], b[..., ks, :])

    line = f"mm:f32:nn:17x65x{k}"
    problem, backend = Problem.parse(line), Planted("tail", Control("a tail", mutants.product(tail), {"": line}))
    case = Case(backend, problem, distributions_for(problem), 0, Device.CPU)
    said = {o.distribution: o.cause for o in mutant_study.judge().outcomes(case) if o.status.is_failure}
    assert set(said.values()) <= {"K tail", ""}, said
    assert list(said.values()).count("K tail") >= 8, said


@pytest.mark.parametrize("distribution", ["rand", "k-cover"])
def test_a_search_without_success_takes_each_sample_once(distribution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of ranges of k are tried on one sample: of right elements it was taken anew for each."""
    taken = []

    def counted(wrong: Wrong, **how: Any) -> Sample | None:
        taken.append(how)
        return sample_of(wrong, **how)

    sample_of = Sample.of
    monkeypatch.setattr(Sample, "of", counted)
    right = oracle.make("mm:f32:nn:33x65x400", distribution, 3)
    span = oracle.interval(right)
    wrong = oracle.computed(right)
    wrong[:20] += right.a[:20, :200] @ right.b[:200] * right.a[:20, 200:201].sign()
    found = verdict.compare(wrong, span, right.problem, right).mismatch
    assert found is not None
    assert found.cause == ""
    assert 1 <= len(taken) <= 2


@pytest.mark.parametrize(
    ("size", "dtype", "cause"),
    [(1, torch.float16, "all was multiplied and added in f16"), (32, torch.float32, "the sum was held in f16")],
)
def test_sums_held_in_f16_are_named_though_the_result_is_f32(size: int, dtype: torch.dtype, cause: str) -> None:
    right = oracle.make("mm:f32:nn:33x65x127", "rand", 3)
    held = torch.zeros(33, 65, dtype=torch.float16)
    for a, b in zip(right.a.to(dtype).split(size, 1), right.b.to(dtype).split(size), strict=True):
        held = (held + (a.double() @ b.double()).to(dtype)).half()
    found = verdict.compare(held.float(), oracle.interval(right), right.problem, right).mismatch
    assert found is not None
    assert (found.name, found.cause) == ("f16 sums", cause)


def test_every_name_is_in_the_table() -> None:
    known = {*TABLE["names"], *TABLE["codes"].values()}
    assert {*repeated.NAMES, findings._RACE, findings._ZERO} <= known
    text = "".join(Path(str(module.__file__)).read_text(encoding="utf-8") for module in (coded, explain, recompute))
    written = set(re.findall(r'(?:yield |\()"([^"]+ [^"]+)", f?"', text)) - {"unexpected NaN"}
    assert len(written) > 25
    assert {name for name in written if not name.endswith(" missing")} <= known


@pytest.mark.parametrize("k", range(1, 6))
def test_a_few_products_have_ranges_too(k: int) -> None:
    right = oracle.make(f"mm:f32:nn:33x65x{k}", "rand", 3)
    wrong = oracle.computed(right)
    wrong += right.a[:, -1:] @ right.b[-1:]
    found = verdict.compare(wrong, oracle.interval(right), right.problem, right).mismatch
    assert found is not None
    assert found.name in {"K tail twice", "constant factor"}


@pytest.mark.parametrize("size", ["8x16x0", "1x1x0", "0x16x8", "16x0x8", "1x1x1"])
@pytest.mark.parametrize(
    "form",
    [
        "mm:f32:nn:{}",
        "int_mm:i8-i8-i32:nn:{}",
        "addmm:bf16:nn:{}:bias+alpha-0.5",
        "linear:f32:nt:{}:bias+relu",
        "bmm:f16:tt:3x{}",
        "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:{}:quant.rowwise",
        "woq_int8:bf16-i8-bf16:nt:{}",
    ],
)
def test_a_failure_of_an_empty_problem_is_explained(form: str, size: str) -> None:
    for distribution in distributions_for(Problem.parse(form.format(size)))[:4]:
        right = oracle.make(form.format(size), distribution)
        span, ones = oracle.interval(right), torch.ones_like(oracle.computed(right))
        for x in (ones + 99, *((ones * math.nan, ones / 0) if ones.is_floating_point() else ())):
            found = verdict.compare(x, span, right.problem, right)
            assert found.ok == (x.numel() == 0)
            view = Wrong(x.double(), torch.ones_like(x, dtype=torch.bool), span, right.problem, right, {})
            if x.numel():
                list(explain._causes(view, x, whole=True))  # all of them, whichever fits


def _parts(a: torch.Tensor, b: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [x.double() @ y.double() for x, y in zip(a.split(size, 1), b.split(size, 0), strict=True)]


def _held(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    total = torch.zeros_like(parts[0], dtype=dtype)
    for part in parts:
        total = (total + part.float()).to(dtype)
    return total


def _wrapped(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


def _added(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, parts)


I8 = "int_mm:i8-i8-i32:nn:17x65x{}"
SUMS: list[tuple[str, str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = [
    ("f32 sums", I8.format(4100), lambda a, b: _held(_parts(a, b, 96), torch.float32)),
    ("f32 sums", I8.format(4100), lambda a, b: (a.double() @ b.double()).float()),
    ("i16 wrap", I8.format(250), lambda a, b: _wrapped(a.double() @ b.double(), 16)),
    ("i16 wrap", I8.format(700), lambda a, b: _added(_wrapped(part, 16) for part in _parts(a, b, 48))),
    ("i8 wrap", I8.format(127), lambda a, b: _added(_wrapped(part, 8) for part in _parts(a, b, 2))),
    ("saturated", I8.format(700), lambda a, b: _added(x.clamp(-32768, 32767) for x in _parts(a, b, 4))),
    ("bf16 sums", "mm:bf16:nn:17x65x127", lambda a, b: _held(_parts(a, b, 1), torch.bfloat16)),
    ("bf16 sums", "mm:f32:nn:17x65x700", lambda a, b: _held(_parts(a, b, 128), torch.bfloat16)),
    ("bf16 sums", "mm:bf16:nn:17x65x700", lambda a, b: _added(part.bfloat16().float() for part in _parts(a, b, 117))),
    ("f16 sums", "mm:f16:nn:17x65x700", lambda a, b: _held([part.half() for part in _parts(a, b, 104)], torch.float16)),
    ("f16 sums", "mm:f32:nn:17x65x127", lambda a, b: _added(part.half().float() for part in _parts(a, b, 64))),
]


@pytest.mark.parametrize(("name", "line", "product"), SUMS, ids=[f"{i} {name}" for i, (name, *_) in enumerate(SUMS)])
def test_sums_of_a_narrow_type_are_named(
    name: str, line: str, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    said = []
    for distribution in distributions_for(Problem.parse(line))[:4]:
        right = oracle.make(line, distribution)
        wrong = product(right.a, right.b).to(oracle.computed(right).dtype)
        found = verdict.compare(wrong, oracle.interval(right), right.problem, right).mismatch
        said += [found.name] if found else []
    assert name in said
    assert {*said} <= {name, "", "overflow", f"rounded through {name.split(maxsplit=1)[0]}"}


@pytest.mark.parametrize("line", ["mm:{}:nn:33x70x200", "mm:{}:tt:33x70x200", "bmm:{}:nt:3x33x70x200"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", ["M tail", "N tail", "K tail"])
def test_a_tail_of_one_dimension_is_not_named_after_another(name: str, dtype: str, line: str) -> None:
    line = line.format(dtype)
    for distribution in distributions_for(Problem.parse(line))[:4]:
        right = oracle.make(line, distribution)
        wrong = oracle.computed(right, mutants.right)
        part = oracle.computed(right, lambda a, b: mutants.right(a[..., :192], b[..., :192, :]))
        rows, columns = slice(32 * (name == "M tail"), None), slice(64 * (name == "N tail"), None)
        wrong[..., rows, columns] = part[..., rows, columns]
        found = verdict.compare(wrong, oracle.interval(right), right.problem, right).mismatch
        # The NaN of an infinity times zero may be all that the last row, of zeros and one number, lacks.
        same = {name, "", "never computed", *(("last row", "NaN swallowed") if name == "M tail" else ())}
        assert found is None or found.name in same
