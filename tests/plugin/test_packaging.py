"""What is shipped: one top-level package with its data, and a plugin that costs other people nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def python(*arguments: str, cwd: Path) -> str:
    """Run this Python and return what it wrote; a failure shows it."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources: the build writes beside them, and tests may run in parallel."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pytest_gemm", "backends", "conformance", "perf"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    # Folders of the repository that must stay out of the wheel.
    for name in ("tests", "baselines"):
        (source / name).mkdir()
        (source / name / "stray.py").touch()
    for name in ("pyproject.toml", "README.md", "LICENSE", "conftest.py"):
        shutil.copy(ROOT / name, source)
    # Without isolation: the build backend is the installed one, so that no network is needed.
    python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), cwd=source)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    """Paths inside the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_only_top_level_name_is_the_package(names: set[str]) -> None:
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"pytest_gemm"}
    assert len(top) == 2


@pytest.mark.parametrize("folder", ["pytest_gemm", "backends", "conformance", "perf"])
def test_every_module_is_inside_at_its_installed_name(names: set[str], folder: str) -> None:
    target = "pytest_gemm" if folder == "pytest_gemm" else f"pytest_gemm/{folder}"
    suffixes = {".py", ".toml", ".typed", ".jinja"}
    sources = [path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    assert sources
    assert {f"{target}/{path.relative_to(ROOT / folder)}" for path in sources} <= names


def test_the_ledger_and_the_type_marker_are_inside(names: set[str]) -> None:
    assert "pytest_gemm/conformance/known_failures.toml" in names
    assert "pytest_gemm/py.typed" in names


def test_the_metadata_names_plugin_and_licence(wheel: Path, names: set[str]) -> None:
    (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    with zipfile.ZipFile(wheel) as archive:
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
    assert "[pytest11]\ngemm = pytest_gemm.plugin\n" in entry_points
    assert "License-Expression: BSD-3-Clause" in metadata
    assert f"{info}/licenses/LICENSE" in names


def test_an_installed_wheel_works_away_from_the_repository(wheel: Path, tmp_path: Path) -> None:
    unpacked = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    # An editable install has an import hook that would answer first.
    code = (
        f"import sys; sys.path[:0] = [{str(unpacked)!r}]; sys.meta_path[:] = "
        "[f for f in sys.meta_path if 'editable' not in str(f).lower()]\n"
        "import pytest_gemm.ledger.ledger, pytest_gemm.conformance, pathlib\n"
        "folder = pathlib.Path(pytest_gemm.conformance.__file__).parent\n"
        "pytest_gemm.ledger.ledger.Ledger.load(folder / 'known_failures.toml')\n"
        "sys.stdout.write(str(folder))"
    )
    assert python("-c", code, cwd=tmp_path) == str(unpacked / "pytest_gemm" / "conformance")


@pytest.mark.parametrize(
    "module",
    [
        "plugin",
        "config",
        "hookspec",
        "problem.axes",
        "ledger.ledger",
        "problem.problem",
        "api.protocols",
        "run.terminal",
    ],
)
def test_importing_what_every_pytest_run_imports_leaves_torch_alone(module: str, tmp_path: Path) -> None:
    code = f"import pytest_gemm.{module}, sys; sys.stdout.write(str(sorted({{'torch', 'numpy'}} & sys.modules.keys())))"
    assert python("-c", code, cwd=tmp_path) == "[]"


def test_a_run_of_other_peoples_tests_leaves_torch_alone(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "def pytest_gemm_register_backends(registry):\n    registry.add_callable('mine', lambda a, b: a @ b)\n",
        encoding="utf-8",
    )
    (tmp_path / "test_other.py").write_text(
        "import sys\n\n\ndef test_other(request):\n"
        "    assert request.config.pluginmanager.has_plugin('gemm')\n"
        "    assert 'torch' not in sys.modules\n",
        encoding="utf-8",
    )
    out = python("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path)
    assert "1 passed" in out
    assert "GEMM backends" not in out


def test_help_leaves_torch_alone(tmp_path: Path) -> None:
    code = (
        "import sys, pytest; code = pytest.main(['--help']); "
        "sys.exit(code or ('torch was imported' if 'torch' in sys.modules else 0))"
    )
    assert "--gemm-backends" in python("-c", code, cwd=tmp_path)
