"""The example of docs/how-to/adding-a-backend.md: it passes, it is what the page shows, and it stays short."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from oracle import judged

from pytest_gemm.api.registry import Registry
from pytest_gemm.api.settings import configure
from pytest_gemm.core.outcome import Status

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch is built without oneDNN")

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "onednn.py"


@pytest.mark.parametrize("weight", ["plain", "packed"])
@pytest.mark.parametrize("line", ["mm:f32:nn:33x17x40", "linear:f32:nt:5x25x33:bias+relu"])
def test_its_products_pass_and_are_proved(monkeypatch: pytest.MonkeyPatch, weight: str, line: str) -> None:
    registry = Registry()
    monkeypatch.syspath_prepend(FILE.parent)
    registry.add(backend := importlib.import_module("onednn").OneDnnBackend())
    configure(backend, {"weight": weight})
    outcomes = judged(registry["onednn"], line, "int-2", "rand")
    assert [outcome.status for outcome in outcomes] == [Status.PASSED] * 2
    assert outcomes[0].kernels == ("mkldnn._linear_pointwise.default",)


def test_the_page_shows_the_file_which_is_short() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert text in (ROOT / "docs" / "how-to" / "adding-a-backend.md").read_text(encoding="utf-8")
