"""Cases of gigabytes take turns: what each needs, who waits, and who is refused."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest

from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.core.case_id import Device
from pytest_gemm.judging.case import Case
from pytest_gemm.problem.problem import Problem
from pytest_gemm.run import admission

GIB = 1 << 30


@pytest.fixture(autouse=True)
def ten_gib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with 10 GiB to give, and a folder that no other test shares."""
    monkeypatch.setattr(admission, "free", lambda _: 10 * GIB / admission._SHARE)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gc.freeze()  # the memory that is given back is searched, and with it what all other tests have left


@pytest.mark.parametrize(
    ("line", "least", "most"),
    [
        ("mm:f32:nn:1000x1000x1000", 0, 0),
        ("mm:f32:nn:8000x8000x64", 3, 4),  # each result is kept, and a copy of it
        ("mm:bf16:nt:32768x131072x1024", 25, 28),  # three results of 8 GiB, and five times 0.3 GiB of operands
        ("bmm:f32:nn:8209x512x512x1", 25, 28),
        ("mm:f16:nn:1048600x16x2056", 20, 23),
        ("mm:bf16:nn:46352x46360x32:add", 32, 35),
    ],
)
def test_what_a_case_needs_follows_from_its_sizes(line: str, least: int, most: int) -> None:
    case = Case(AtenBackend(), Problem.parse(line), ("int-1", "rand"), 0, Device.CUDA)
    assert least * GIB <= admission.needed(case) <= most * GIB


def test_what_there_never_is_is_refused_with_both_sizes() -> None:
    with admission.admitted(11 * GIB, "cpu") as refusal:
        assert refusal is not None
        assert refusal.code == "too-little-memory"
        assert "needs 11.0 GiB of memory, and there are 10.0 GiB" in refusal.text
    with admission.admitted(10 * GIB, "cpu") as refusal:
        assert refusal is None
    with admission.admitted(0, "cpu") as refusal:
        assert refusal is None


@pytest.mark.parametrize(("gib", "expected"), [(8, ["first", "second"]), (2, ["second", "first"])])
def test_a_large_case_waits_for_another_process_and_small_ones_run_at_once(
    gib: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "4")
    order = []

    def second() -> None:
        with admission.admitted(gib * GIB, "cpu"):
            order.append("second")

    with admission.admitted(gib * GIB, "cpu"):
        other = threading.Thread(target=second)
        other.start()
        other.join(0.3)
        order.append("first")
    other.join()
    assert order == expected


def test_a_lost_device_ends_a_large_case_in_no_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def emptied() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.empty_cache", emptied)
    with admission.admitted(GIB, "cpu") as refusal:
        assert refusal is None
    with admission.admitted(10 * GIB, "cpu") as refusal:  # nothing of the first one is still held
        assert refusal is None
