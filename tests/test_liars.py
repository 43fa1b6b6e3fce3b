"""The harness is tested by liars: each planted bug is caught, and no honest backend is accused."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from liars import BIAS_LIARS, GROUP_LIARS, HONEST, LIARS, NEEDS_VECTORS, SCALE_LIARS

pytestmark = pytest.mark.xdist_group("liars")  # they read one run, which each worker would make for itself

CONFTEST = """
    import sys
    sys.path.insert(0, {here!r})
    import liars

    def pytest_gemm_register_backends(registry):
        liars.register(registry)
"""

SUITE = """
    import pytest

    @pytest.mark.gemm(problems={lines!r})
    def test_product(gemm_case, gemm_check):
        gemm_check(gemm_case)
"""

# K with a tail, K long enough for the partial sums to matter, N with a tail.
LINES = [
    *(f"mm:{dtype}:nn:20x40x{k}" for dtype in ("f32", "bf16", "f16") for k in (250, 1000, 8200)),
    *(f"mm:{dtype}:nn:20x40x250::pad-lda" for dtype in ("f32", "bf16", "f16")),
    *(f"linear:{dtype}:nt:20x40x250:bias" for dtype in ("f32", "bf16", "f16")),
]
# fp8 is no plain product: its scales and sums have liars of their own.
SCALED_LINES = [
    "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:20x40x250:tensorwise+bias",
    "scaled_mm:f8e4m3fn-f8e5m2-bf16:nt:40x40x250:rowwise",
    "scaled_mm:f8e5m2-f8e4m3fn-f32:nt:40x40x1000:rowwise",
]
GROUPED_LINES = ["grouped_mm:bf16:nt:4x20x40x248", "grouped_mm:bf16:nn:3x33x40x1000"]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """One run over all of them; outcomes by backend and problem."""
    import subprocess
    import sys
    import textwrap

    folder = tmp_path_factory.mktemp("liars")
    (folder / "conftest.py").write_text(textwrap.dedent(CONFTEST.format(here=str(Path(__file__).parent))))
    lines = LINES + SCALED_LINES + GROUPED_LINES
    (folder / "test_suite.py").write_text(textwrap.dedent(SUITE.format(lines=lines)))
    own = [*SCALE_LIARS, *GROUP_LIARS, "honest-scales"]
    names = ",".join([*HONEST, *LIARS, *BIAS_LIARS, "silent-fallback", *own])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=no",
        f"--gemm-backends={names}",
        "--gemm-run-record=run.jsonl",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for line in (folder / "run.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "backend" not in record:  # the head and the totals
            continue
        found[record["backend"], record["problem"]].append(record)
    return found


def statuses(outcomes: list[dict[str, Any]]) -> set[str]:
    return {o["status"] for o in outcomes}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_backend_passes(judged: dict[tuple[str, str], list[dict[str, Any]]], name: str) -> None:
    for line in LINES + GROUPED_LINES:
        outcomes = judged[name, line]
        assert statuses(outcomes) == {"passed"}, outcomes
        assert len(outcomes) >= 4


def test_a_liar_spoils_nothing_for_the_next_backend(judged: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    # "cached-result" comes after "inputs-written" and is right the first time that it sees a shape.
    assert judged["cached-result", LINES[0]][0]["status"] == "passed"


@pytest.mark.parametrize("name", LIARS)
def test_a_liar_is_caught_at_every_k_and_dtype_where_it_lies(
    judged: dict[tuple[str, str], list[dict[str, Any]]], name: str
) -> None:
    liar = LIARS[name]
    concerned = [line for line in LINES if line.split(":")[1] in liar.dtypes and (not liar.flags or liar.flags in line)]
    assert concerned
    for line in concerned:
        caught = statuses(judged[name, line]) & {"incorrect", "crashed"}
        assert caught, f"{name} got away with {line}: {judged[name, line]}"
        if liar.code:
            assert liar.code in {o["reason"]["code"] for o in judged[name, line] if o["reason"]}


@pytest.mark.parametrize("name", BIAS_LIARS)
def test_a_wrong_bias_is_caught(judged: dict[tuple[str, str], list[dict[str, Any]]], name: str) -> None:
    for line in LINES:
        expected = {"incorrect"} if "bias" in line else {"unsupported"}
        assert expected <= statuses(judged[name, line])


@pytest.mark.parametrize("name", SCALE_LIARS)
def test_wrong_scales_are_caught(judged: dict[tuple[str, str], list[dict[str, Any]]], name: str) -> None:
    for line in SCALED_LINES:
        # Two scalars commute.
        shows = "rowwise" in line or name not in NEEDS_VECTORS
        assert ("incorrect" in statuses(judged[name, line])) == shows, judged[name, line]


def test_right_scales_pass(judged: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    for line in SCALED_LINES:
        assert statuses(judged["honest-scales", line]) == {"passed"}, judged["honest-scales", line]


@pytest.mark.parametrize("name", GROUP_LIARS)
def test_wrong_groups_are_caught(judged: dict[tuple[str, str], list[dict[str, Any]]], name: str) -> None:
    for line in GROUPED_LINES:
        assert "incorrect" in statuses(judged[name, line]), judged[name, line]


def test_a_plain_product_is_not_asked_for_fp8(judged: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    outcomes = judged["reversed-order", SCALED_LINES[0]]
    assert statuses(outcomes) == {"unsupported"}
    assert "scales" in outcomes[0]["reason"]["text"]


def test_a_right_result_by_somebody_else_is_a_fallback(judged: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    for line in LINES:
        if "bias" in line:
            assert statuses(judged["silent-fallback", line]) == {"fell-back"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("k-tail-dropped", "the products with k in [240, 250) of K = 250 are missing"),
        ("k-off-by-one", "the products with k = 249 of K = 250 are missing"),
        ("k-doubled", "k = 125 of K = 250"),
        ("split-k-slice-dropped", "slice 3 of 4 of K"),
        ("tile-swap", "the 16x16 tile at (0, 0) holds the answer of the tile at (0, 16)"),
        ("tf32-inputs", "A and B were truncated to TF32"),
        ("bf16-detour", "a detour through bf16"),
        ("cached-result", "filling int-2, seed 0"),
        ("tail-unwritten", "every bad element has column >= 32"),
        ("padded-stride-ignored", "row >= 1"),
        ("bias-missing-on-last-tile", "every bad element has column >= 32"),
        ("bias-missing-on-last-tile", "the bias is missing"),
        ("bias-shifted", "the bias is shifted: column j has that of column j - 1"),
        ("reciprocal-scale", "the reciprocal of the scale of B was applied"),
        ("scale-of-a-forgotten", "the scale of A was not applied"),
        ("scales-exchanged", "the scales of A's rows and B's columns are exchanged"),
        ("scale-transposed", "the scales of A run along the columns of the result"),
        ("group-edge-off-by-one", "every bad element is in the last row of its group"),
        ("group-edge-off-by-one", "these rows were multiplied by the B of the group after"),
        ("group-stride-zero", "these rows were multiplied by the B of group 0"),
    ],
)
def test_a_mismatch_is_located(judged: dict[tuple[str, str], list[dict[str, Any]]], name: str, words: str) -> None:
    texts = [o["details"] for (backend, _), group in judged.items() if backend == name for o in group if o["details"]]
    assert texts
    assert any(words in text for text in texts), "\n".join(texts)
