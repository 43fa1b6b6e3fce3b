"""Locks that name their holder, the user's folder among the temporary files, and files replaced as a whole."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from pathlib import Path

import pytest

from pytest_gemm.storage import files


def test_a_lock_names_its_holder_and_is_not_waited_for_beyond_the_limit(tmp_path: Path) -> None:
    path, seen = tmp_path / "lock", []
    with files.locked(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        started = time.monotonic()
        with (
            pytest.raises(files.LockTimeoutError, match=rf"process {os.getpid()} holds {path} for more than 0.3 s"),
            files.locked(path, 0.3, lambda holder, _: seen.append(holder)),
        ):
            pass
        assert time.monotonic() - started < 5.0
    assert set(seen) == {f"process {os.getpid()}"}
    with files.locked(path, -1.0):
        pass


def test_a_shared_lock_keeps_the_exclusive_one_out_and_no_other_reader(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, second = files.shared(path), files.shared(path)
    os.close(first)
    with pytest.raises(files.LockTimeoutError, match="another process holds"), files.locked(path, -1.0):
        pass
    os.close(second)
    with files.locked(path, -1.0):
        pass


@pytest.mark.parametrize("taking", [files.shared, lambda path: files.locked(path).__enter__()])
def test_a_lock_follows_no_link(tmp_path: Path, taking: object) -> None:
    precious, path = tmp_path / "precious", tmp_path / "lock"
    precious.write_text("kept")
    path.symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        taking(path)  # type: ignore[operator]
    assert precious.read_text() == "kept"


def test_the_private_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = files.private_folder()
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    made.chmod(0o777)
    assert stat.S_IMODE(files.private_folder().stat().st_mode) == 0o700
    made.rmdir()
    made.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="is a link or belongs to another user; remove it, or set TMPDIR"):
        files.private_folder()
    made.unlink()
    made.mkdir()
    other = os.getuid() + 1
    made.rename(tmp_path / f"pytest-gemm-{other}")
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(PermissionError, match="belongs to another user"):
        files.private_folder()


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    files.replace(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_is_made_and_an_error_names_the_file(tmp_path: Path) -> None:
    files.replace(tmp_path / "site" / "index.html", b"new")
    assert (tmp_path / "site" / "index.html").read_bytes() == b"new"
    below = tmp_path / "site" / "index.html" / "below.html"
    with pytest.raises(OSError, match=f"Not a directory: '{below}'"):
        files.replace(below, b"new")


def test_what_is_stored_behind_a_link_is_replaced_there(tmp_path: Path) -> None:
    stored, common = tmp_path / "stored.json", tmp_path / "common"
    common.mkdir()
    stored.symlink_to(common / "cpp.json")
    files.replace(stored, b"new")
    assert stored.is_symlink()
    assert (common / "cpp.json").read_bytes() == b"new"
    assert [path.name for path in common.iterdir()] == ["cpp.json"]
