"""What is made once for all workers of a cold run, beside their start."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gemm.backends.inductor import ahead


@pytest.mark.compiler
@pytest.mark.study
def test_a_machine_that_has_nothing_is_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    process = ahead.start()
    assert process is not None
    assert process.wait(300) == 0
    assert list(tmp_path.glob("pytest-gemm/inductor-*/*/loads/*")), "what this CPU executes"
    assert ahead.start() is None
