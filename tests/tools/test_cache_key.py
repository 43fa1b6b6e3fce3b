"""``pytest-gemm cache key``: the name under which a CI keeps what was compiled."""

from __future__ import annotations

import time
from importlib import metadata
from pathlib import Path

import pytest

from pytest_gemm.machine.code_key import code_key
from pytest_gemm.tools import cli


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert cli.main(["cache", "key"]) == 0
    return dict(line.split("=", 1) for line in capsys.readouterr().out.splitlines())


def test_the_key_follows_what_was_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    nothing = printed(capsys)
    assert nothing["folder"] == str(tmp_path / "pytest-gemm")
    assert metadata.version("torch") in nothing["prefix"]
    assert code_key() in nothing["prefix"]
    assert "key" not in nothing

    folder = tmp_path / "pytest-gemm" / "inductor-2.13" / "ab"
    folder.mkdir(parents=True)
    (folder / "cabc.main.so").touch()
    first = printed(capsys)["key"]
    assert first.startswith(nothing["prefix"])
    (folder / "cdef.py").touch()
    (folder / "cabc.lock").touch()
    assert printed(capsys)["key"] == first, "a run writes these anew: nothing to save"
    (folder / "cdef.main.so").touch()
    assert printed(capsys)["key"] != first


def test_a_month_begins_with_no_kernels_of_the_last_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = printed(capsys)["prefix"]
    later = time.gmtime(time.time() + 32 * 86400.0)
    monkeypatch.setattr(time, "gmtime", lambda: later)
    assert printed(capsys)["prefix"] not in {now, ""}


def test_without_torch_there_is_no_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(SystemExit) as ended:
        cli.main(["cache", "key"])
    assert ended.value.code == cli.USAGE_ERROR
    assert "install torch first" in capsys.readouterr().err
