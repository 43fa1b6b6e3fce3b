"""The drawn sets: a kernel that is wrong at one size of a dimension meets a line, whatever the draw."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from oracle import exact, judged
from studies import sizes

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.conformance import matrix
from pytest_gemm.core.outcome import Status
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.layout import Shape

# The families of which full holds every residue modulo 256; N and K of scaled ones in multiples of 16.
FAMILIES = ("mm", "linear", "addmm", "bmm", "int_mm", "woq_int8", "scaled")
MODULI = (8, 16, 32, 64, 128, 256)


@pytest.fixture(params=range(5))
def redrawn(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The files of the suite with another draw."""
    for path in matrix.CASES.glob("*.toml"):
        text = path.read_text(encoding="utf-8")
        seeded = re.sub(r"^draw = \{", f'draw = {{ seed = "{request.param}",', text, flags=re.MULTILINE)
        if seeded != text or path.stem == "axes":
            (tmp_path / path.name).write_text(seeded, encoding="utf-8")
    return tmp_path


def test_each_residue_octave_and_batch_meets_a_line_in_every_draw(redrawn: Path) -> None:
    found = {one.name: one for one in sizes.drawn(redrawn, "full")}
    for one in found.values():
        for column in one.columns:
            assert len(set(column.octaves)) == 1, (one.name, column.axis)
    for family in FAMILIES:
        for column in found[f"{family}-drawn-full"].columns:
            step = column.possible.step
            for modulus in MODULI if column.axis != "batch" else ():
                met = {size // step % modulus for size in column.met}
                assert met == {size // step % modulus for size in column.possible}, (family, column.axis, modulus)
                assert step > 1 or len(met) == modulus
    assert {*found["bmm-drawn-batches"].columns[0].met} == {*range(1, 65)}


def test_the_quick_level_draws_each_residue_modulo_16_and_each_octave() -> None:
    (one,) = sizes.drawn(matrix.CASES, "quick")
    assert len(one.problems) == 16
    for column in one.columns:
        assert column.modulus == 16
        assert len(set(column.octaves)) == 1
    assert {str(p.layout) for p in one.problems} == {"nn", "nt", "tn", "tt"}


@functools.cache
def drawn_at_full() -> tuple[sizes.Drawn, ...]:
    return tuple(sizes.drawn(matrix.CASES, "full"))


@pytest.mark.usefixtures("unexplained")
@pytest.mark.parametrize(
    ("op", "is_wrong"),
    [
        pytest.param("mm", lambda s: s.k % 64 == 37, id="mm-k-37-of-64"),
        pytest.param("mm", lambda s: s.k.bit_length() == 12, id="mm-k-2048-to-4095"),
        pytest.param("linear", lambda s: s.n % 256 == 255, id="linear-n-255-of-256"),
        pytest.param("addmm", lambda s: s.m % 256 == 192, id="addmm-m-192-of-256"),
        pytest.param("bmm", lambda s: s.batch == 7, id="bmm-batch-7"),
    ],
)
def test_a_kernel_that_is_wrong_at_one_size_alone_is_caught(op: str, is_wrong: Callable[[Shape], bool]) -> None:
    def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        batch = a.shape[0] if a.ndim == 3 else None
        c = exact(a, b)
        if is_wrong(Shape(a.shape[-2], b.shape[-1], a.shape[-1], batch)):
            c[..., -1, -1] = c[..., 0, 0]
        return c

    backend = CallableBackend("wrong-at-one-size", kernel, dtypes=DTYPES)
    (whole,) = (one for one in drawn_at_full() if one.name == f"{op}-drawn-full")
    problems = sorted((p for p in whole.problems if backend.supports(p) is None), key=lambda p: p.shape.flops)
    chosen = [next(p for p in problems if p.op.name == op and is_wrong(p.shape) is wrong) for wrong in (True, False)]
    wrong, right = ({outcome.status for outcome in judged(backend, p.line, "rand")} for p in chosen)
    assert (wrong, right) == ({Status.INCORRECT}, {Status.PASSED})


def test_the_page_is_made_of_the_sets() -> None:
    page = Path(__file__).parents[2] / "docs" / "results" / "sizes.md"
    assert page.read_text(encoding="utf-8") == sizes.page()
