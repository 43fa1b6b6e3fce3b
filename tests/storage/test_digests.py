"""What is damaged on the disk is found and removed; what is whole is left alone."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_gemm.backends.inductor import stored
from pytest_gemm.storage import digests

ELF = b"\x7fELF" + bytes(36) + struct.pack("<Q10xHH2x", 64, 64, 3) + bytes(3 * 64)
TEXT = b"precompiled"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(digests, "_whole", {})  # a new process
    (tmp_path / "store" / "locks").mkdir(parents=True)
    return tmp_path / "store"


class Builder:
    """What Inductor compiles one file with."""

    def __init__(self, path: Path) -> None:
        self.path, self.builds = path, 0

    def get_target_file_path(self) -> str:
        return str(self.path)

    def build(self, lock: str, builders: list[Builder]) -> None:
        assert lock
        for builder in builders:
            if not builder.path.exists():
                builder.path.write_bytes(ELF if builder.path.suffix == ".so" else TEXT)
                builder.builds += 1


def emptied(data: bytes) -> bytes:
    return data[:0]


def cut(data: bytes) -> bytes:
    return data[:-1]


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "of-another-tool"])
@pytest.mark.parametrize("damage", [emptied, cut, flipped])
@pytest.mark.parametrize("name", ["kernel.so", "header.h.gch"])
def test_a_damaged_file_is_built_once_more(
    store: Path, monkeypatch: pytest.MonkeyPatch, name: str, damage: Callable[[bytes], bytes], recorded: bool
) -> None:
    builder, lock = Builder(store / name), str(store / "locks" / "a.lock")
    stored.compiled(builder.build, lock, [builder])
    stored.compiled(builder.build, lock, [builder])
    assert builder.builds == 1
    good = builder.path.read_bytes()
    builder.path.write_bytes(damage(good))
    if not recorded:
        digests.digest_of(builder.path).unlink()
    monkeypatch.setattr(digests, "_whole", {})
    stored.compiled(builder.build, lock, [builder])
    # Without a digest it is known of a library how long it has to be, and of no other file.
    if recorded or damage is emptied or (damage is cut and name.endswith(".so")):
        assert (builder.builds, builder.path.read_bytes()) == (2, good)
    else:
        assert builder.builds == 1


def test_a_text_that_differs_is_written_again_and_what_follows_it_stays(store: Path) -> None:
    path = store / "ab" / "program.py"

    def write(content: str, extension: str) -> tuple[str, str]:
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            path.write_text(content)
        return extension, str(path)

    for damage in ("x = 1\n# compiled by\n", "", "x = ", "x = 3\n"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(damage)
        assert stored.written(write, "x = 1\n", "py") == ("py", str(path))
        assert path.read_text() == (damage if damage.startswith("x = 1\n") else "x = 1\n")


def test_a_damaged_answer_of_the_cpu_is_asked_for_again(store: Path) -> None:
    builder = Builder(store / "probe.so")
    builder.path.write_bytes(ELF[:-1])
    assert stored.probed(Builder.get_target_file_path, builder) == str(builder.path)
    assert builder.path.exists()  # elsewhere another process may be writing it
    with stored.probing():
        assert stored.probed(Builder.get_target_file_path, builder) == str(builder.path)
    assert not builder.path.exists()
