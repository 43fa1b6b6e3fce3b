"""What is shipped: one top-level package with its data, and a plugin that costs other people nothing."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LEFTOVERS = [
    "build/lib/pytest_gemm/stray.py",
    "dist/pytest_gemm-0.0.9.tar.gz",
    ".venv/pyvenv.cfg",
    "pytest_gemm/stray.log",
    "tests/__pycache__/conftest.cpython-311.pyc",
    "tests/plugin/run.run-record.jsonl",
]


def python(*arguments: str, cwd: Path) -> str:
    """Run this Python and return what it wrote; a failure shows it."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with what builds, runs and editors leave: the build writes beside its sources."""
    folder = tmp_path_factory.mktemp("source") / "repository"
    shutil.copytree(
        ROOT, folder, ignore=shutil.ignore_patterns("__pycache__", ".*_cache", ".git", ".venv", "build", "dist")
    )
    for leftover in LEFTOVERS:
        (folder / leftover).parent.mkdir(parents=True, exist_ok=True)
        (folder / leftover).touch()
    return folder


@pytest.fixture(scope="module")
def archives(source: Path) -> Path:
    """The folder of an sdist and of the wheel that is built from it: a wheel from a used folder takes in its build/lib.

    Without isolation: the build backend is the installed one, so that no network is needed.
    """
    folder = source.parent / "archives"
    python("-m", "build", "--no-isolation", "--outdir", str(folder), cwd=source)
    return folder


@pytest.fixture(scope="module")
def wheel(archives: Path) -> Path:
    (path,) = archives.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def packed(archives: Path) -> set[str]:
    """Paths inside the source archive."""
    (path,) = archives.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_string(archive.read(name).decode())


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


def test_nothing_stray_is_inside(names: set[str]) -> None:
    suffixes = {Path(name).suffix for name in names if ".dist-info/" not in name}
    assert suffixes <= {".py", ".toml", ".typed", ".jinja", ".css", ".js"}
    assert not [name for name in names if "stray" in name or "tests/" in name or "baselines/" in name]


def test_the_source_archive_has_what_a_clone_has(packed: set[str]) -> None:
    folders = ("tests", "docs", "baselines", "pytest_gemm", "conformance", "perf", "backends", ".ci", ".github")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    kept = {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}
    assert len(kept) > 500
    assert not sorted(kept - packed)
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "tox.ini", "conftest.py"} <= packed


def test_the_source_archive_has_no_leftovers(packed: set[str]) -> None:
    assert not packed & set(LEFTOVERS)
    assert not [name for name in packed if name.endswith(".pyc")]


def test_the_metadata_names_plugin_and_licence(wheel: Path, names: set[str], metadata: Message) -> None:
    (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    with zipfile.ZipFile(wheel) as archive:
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    assert "[pytest11]\ngemm = pytest_gemm.plugin.plugin\n" in entry_points
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert f"{info}/licenses/LICENSE" in names
    assert {"Framework :: Pytest", "Typing :: Typed"} <= set(metadata.get_all("Classifier", []))


def test_every_address_is_one_repository(metadata: Message) -> None:
    addresses = dict(line.split(", ") for line in metadata.get_all("Project-URL", []))
    assert {"Source", "Documentation", "Changelog", "Issues"} <= addresses.keys()
    assert all(address.startswith(addresses["Source"]) for address in addresses.values())


def test_no_link_of_the_long_description_is_relative(metadata: Message) -> None:
    text = metadata.get_payload()
    assert isinstance(text, str)
    assert metadata["Description-Content-Type"] == "text/markdown"
    targets = re.findall(r"\]\(([^)]*)\)", text) + re.findall(r'(?:src|srcset|href)="([^"]*)"', text)
    assert len(targets) > 15
    assert not [target for target in targets if not target.startswith("https://")]


def test_every_link_of_the_long_description_leads_to_a_file(metadata: Message) -> None:
    base = re.escape(f"{dict(line.split(', ') for line in metadata.get_all('Project-URL', []))['Source']}/")
    text = str(metadata.get_payload())
    paths = re.findall(rf"{base}(?:blob|raw)/v{re.escape(metadata['Version'])}/([^)#\"]+)", text)
    assert len(paths) > 15
    assert not [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("[a page](docs/a.md#part)", "[a page](URL/blob/v0.1.0/docs/a.md#part)"),
        ("[below](#below)", "[below](URL/blob/v0.1.0/README.md#below)"),
        ("![a picture](docs/a.png)", "![a picture](URL/raw/v0.1.0/docs/a.png)"),
        ("[![a](docs/a.png)](docs/a.md)", "[![a](URL/raw/v0.1.0/docs/a.png)](URL/blob/v0.1.0/docs/a.md)"),
        ('<img src="docs/a.svg" alt="">', '<img src="URL/raw/v0.1.0/docs/a.svg" alt="">'),
        ("[there](https://example.org/a.md)", "[there](https://example.org/a.md)"),
        ("    values[0](docs)", "    values[0](docs)"),
        ("```\nvalues[0](docs)\n```\n[a](b)", "```\nvalues[0](docs)\n```\n[a](URL/blob/v0.1.0/b)"),
    ],
)
def test_links_become_absolute(written: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str] = {}
    monkeypatch.setattr("setuptools.setup", given.update)
    (tmp_path / "pytest_gemm").mkdir()
    (tmp_path / "pytest_gemm" / "__init__.py").write_text('__version__ = "0.1.0"\n', encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text('project.urls.Source = "https://host/URL"\n', encoding="utf-8")
    (tmp_path / "README.md").write_text(written, encoding="utf-8")
    runpy.run_path(str(shutil.copy(ROOT / "setup.py", tmp_path)))
    assert given["long_description"].replace("https://host/URL", "URL") == shown


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
    "module", ["plugin.plugin", "config.config", "ledger.ledger", "problem.problem", "api.protocols", "report.terminal"]
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
