"""The name of what turns generated C++ into machine code."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_gemm.machine import code_key as module
from pytest_gemm.machine import processor, software

HERE = module.code_key()


@pytest.fixture(autouse=True)
def asked_again() -> Iterator[None]:
    module.code_key.cache_clear()
    yield
    module.code_key.cache_clear()


def test_another_cpu_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = dataclasses.replace(processor.cpu(), flags=processor.cpu().flags[1:])
    monkeypatch.setattr(processor, "cpu", lambda: fewer)
    assert module.code_key() != HERE


def test_another_compiler_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "compiler", lambda: {"g++": "99.1.0"})
    assert module.code_key() != HERE


def test_another_build_of_torch_has_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    headers = list(module._headers())
    assert {"vec_base.h", "cpp_prefix.h"} <= {path.name for path in headers}
    changed = tmp_path / headers[0].name
    changed.write_bytes(headers[0].read_bytes() + b"\n")
    monkeypatch.setattr(module, "_headers", lambda: iter([changed, *headers[1:]]))
    assert module.code_key() != HERE
