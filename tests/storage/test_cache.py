"""What is kept between runs: its entries, how long they stay, and that nothing goes while a process uses it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_gemm.backends.inductor import backend
from pytest_gemm.storage import cache, files, kernel_store

DAY = 86400.0
HASH = "c" + 50 * "a"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of our own, which this process does not hold."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = cache.home()
    made.mkdir()
    return made


def keep(path: Path, days: float = 0.0, size: int = 0) -> Path:
    """A file that was last used so many days ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(size * b"x")
    used = time.time() - days * DAY
    os.utime(path, (used, used))
    return path


def test_what_belongs_together_goes_together(home: Path) -> None:
    folder = home / "inductor-2.13" / "ab"
    keep(folder / "cabc.cpp", 40)
    keep(folder / "cabc.main.so", 1)  # used yesterday: it and its source stay
    keep(folder / "cdef.main.so", 40)
    keep(folder / "cdef.cpp", 31)
    keep(home / "inductor-2.13" / "triton" / "0" / HASH / "one.json", 40)
    keep(home / "inductor-2.13" / "triton" / "0" / HASH / "two.cubin", 1)
    keep(home / "inductor-2.13" / "fxgraph" / HASH / "deep" / "one", 40)
    keep(home / "cutlass-kernels" / "123.o", 40)
    keep(home / "cutlass-kernels" / "123.json", 40)
    found = {tuple(sorted(path.name for path in entry)) for entry in cache.entries(home)}
    assert found == {
        ("cabc.cpp", "cabc.main.so"),
        ("cdef.cpp", "cdef.main.so"),
        (HASH,),
        ("123.json", "123.o"),
    }
    cache.tidy()
    left = sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())
    assert left == [
        ".lock",
        ".tidied",
        "inductor-2.13/ab/cabc.cpp",
        "inductor-2.13/ab/cabc.main.so",
        f"inductor-2.13/triton/0/{HASH}/one.json",
        f"inductor-2.13/triton/0/{HASH}/two.cubin",
    ]
    assert not (home / "cutlass-kernels").exists(), "no empty folder stays"


def test_links_are_removed_and_not_followed(home: Path, tmp_path: Path) -> None:
    precious = keep(tmp_path / "precious" / "file", 100)
    tree = home / "inductor-2.13" / "cutlass-tree"
    tree.mkdir(parents=True)
    (tree / "include").symlink_to(precious.parent)
    os.utime(tree / "include", (0, 0), follow_symlinks=False)
    cache.tidy()
    assert precious.exists()
    assert not tree.exists()


def test_a_run_tidies_once_a_day_and_never_beside_another(home: Path) -> None:
    old = home / "inductor-2.13" / "ab" / "c1.so"
    keep(old, 40)
    reader = files.shared(home / ".lock")
    cache.tidy()
    assert old.exists(), "a process uses the folder"
    os.close(reader)
    cache.tidy()
    assert not old.exists()
    keep(old, 40)
    cache.tidy()
    assert old.exists(), "done today"
    os.utime(home / ".tidied", (0, 0))
    cache.tidy()
    assert not old.exists()


def test_whoever_asks_for_the_folder_holds_it_until_the_process_ends(home: Path) -> None:
    old = keep(home / "inductor-2.13" / "ab" / "c1.so", 40)
    code = (
        "from pytest_gemm.backends.cutlass import backend; backend.kernel_cache_dir(); "
        "print('ready', flush=True); input()"
    )
    using = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert using.stdout is not None
    assert using.stdout.readline() == "ready\n"
    cache.tidy()
    assert old.exists()
    using.communicate("\n")
    cache.tidy()
    assert not old.exists()


def test_inductor_s_caches_are_in_the_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert backend.cache_dir().is_relative_to(home)
    with pytest.raises(files.LockTimeoutError), files.locked(home / ".lock", -1.0):
        pass
    os.close(cache._shared.pop(home))


def test_a_kernel_that_is_used_is_young(tmp_path: Path) -> None:
    store = kernel_store.Store(tmp_path)
    job = kernel_store.Job("text", kernel_store.Toolchain("nvcc", "13", "h", architecture="90a"))
    made = keep(tmp_path / f"{job.key}.o", 40, size=100)
    assert store.obtain(job) == made
    assert made.stat().st_mtime > time.time() - DAY


@pytest.mark.study
def test_a_compiler_finds_its_way_with_half_of_its_files_gone(
    home: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    case = ("--gemm-backends=cpp", "--gemm-problem=linear:f32:nt:8x64x64:relu")
    options = ("-p", "no:cacheprovider", "-k", "test_product", "--pyargs", "pytest_gemm.conformance", *case)
    assert pytester.runpytest_subprocess(*options).ret == 0
    found = list(cache.entries(home))
    assert len(found) > 1
    for number, entry in enumerate(found):
        for path in entry:
            for file in [path, *path.rglob("*")]:
                if number % 2:
                    os.utime(file, (0, 0))
    os.utime(home / ".tidied", (0, 0))
    cache.tidy()
    assert len(list(cache.entries(home))) == len(found) - len(found) // 2
    assert pytester.runpytest_subprocess(*options).ret == 0
