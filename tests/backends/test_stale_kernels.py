"""Compiled kernels on disk: used by another process, and never believed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import known_cpu
import pytest

from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.storage import digests

pytestmark = pytest.mark.skipif(not CppBackend().availability("cpu").ok, reason="cpp cannot run here")

LINES = ("linear:f32:nt:16x32x64:relu", "linear:f32:nt:16x32x64:tanh")


def judged(pytester: pytest.Pytester, **outcomes: int) -> str:
    """Judge the problems in a process of its own; returns what it said."""
    names = ("--pyargs", "pytest_gemm.conformance.test_products", "--rootdir=.", "-p", "no:cacheprovider")
    result = pytester.runpytest_subprocess(
        *names, "--gemm-backends=cpp", f"--gemm-problem={','.join(LINES)}", "--gemm-distributions=int-2"
    )
    found = {name: count for name, count in result.parseoutcomes().items() if name in {"passed", "failed"}}
    assert found == outcomes, result.stdout.str()
    return result.stdout.str()


def kernels(folder: Path) -> dict[Path, int]:
    """The compiled kernels with the time of their compile."""
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*.so")) if is_product(path)}


def is_product(library: Path) -> bool:
    source = library.with_suffix("").with_suffix("").with_suffix(".main.cpp")
    return source.exists() and "micro_gemm" in source.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.study
def test_a_planted_kernel_is_caught(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known_cpu.copy_to(tmp_path / "caches")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "caches"))
    judged(pytester, passed=2)
    made = kernels(tmp_path)
    assert len(made) == 2
    first, second = (path.read_bytes() for path in made)
    for path, other in zip(made, (second, first), strict=True):
        path.unlink()  # the file that a process has loaded stays as it is
        path.write_bytes(other)
        digests.digest_of(path).write_text(digests.digest(path))
    planted = kernels(tmp_path)
    judged(pytester, failed=2)
    assert kernels(tmp_path) == planted  # another process takes them as they are


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    half = len(data) // 2
    return data[:half] + bytes([data[half] ^ 16]) + data[half + 1 :]


DAMAGE: tuple[Callable[[bytes], bytes], ...] = (cut, flipped, flipped, lambda _: b"")  # of each file


@pytest.mark.study
def test_damaged_files_are_made_again(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known_cpu.copy_to(tmp_path / "caches")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "caches"))
    judged(pytester, passed=2)
    made = [file for path in kernels(tmp_path) for file in (path, path.with_suffix(".cpp"))]
    assert len(made) == 4
    texts = {path: path.read_bytes() for path in made}
    for (path, data), damage in zip(texts.items(), DAMAGE, strict=True):
        path.unlink()
        path.write_bytes(damage(data))
    judged(pytester, passed=2)
    assert all(path.read_bytes() != damage(data) for (path, data), damage in zip(texts.items(), DAMAGE, strict=True))
    assert all(path.read_bytes() == data for path, data in texts.items() if path.suffix == ".cpp")
