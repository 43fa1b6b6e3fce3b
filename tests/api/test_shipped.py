"""Backends that installed distributions ship, as their users meet them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import known_cpu
import pytest
from warm_processes import Programs

from pytest_gemm.api.registry import Registry, RegistryError
from pytest_gemm.api.shipped import Shipped

KERNEL = """
    import sys
    from pytest_gemm.api.callable import CallableBackend
    from pytest_gemm.api.settings import Setting
    sys.stderr.write("LOADED\\n")

    class Vendor(CallableBackend):
        settings = {"tile": Setting("32", "N", "rows of a tile")}
        def configure(self, values):
            sys.stderr.write(f"TILE {values['tile']}\\n")

    def backend():
        return Vendor("vendor", lambda a, b: a @ b, ("f32",))

    def ends():
        sys.exit(3)
"""


def install(folder: Path, distribution: str, entries: str) -> None:
    """A distribution as pip leaves it: a module and a .dist-info."""
    info = folder / f"{distribution.replace('-', '_')}-1.2.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
    info.joinpath("entry_points.txt").write_text(f"[pytest_gemm.backends]\n{entries}\n")


@pytest.fixture
def site(pytester: pytest.Pytester, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path with the distribution's module."""
    folder = pytester.mkdir("site")
    pytester.makepyfile(**{"site/gemm_vendor": KERNEL})
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(sys, "executable", programs.python)
    known_cpu.copy_to(known_cpu.of_home())
    return folder


def run(pytester: pytest.Pytester, *words: str) -> tuple[int, str]:
    """Exit status and text of a process."""
    result = pytester.run(sys.executable, "-m", *words)
    return int(result.ret), result.stdout.str() + result.stderr.str()


def suite(pytester: pytest.Pytester, *options: str) -> tuple[int, str]:
    """The same of the suite with one problem."""
    words = ("--pyargs", "pytest_gemm.conformance.test_products", "--gemm-problem=mm:f32:nn:8x8x8", "-q")
    return run(pytester, "pytest", *words, *options)


@pytest.mark.slow
def test_a_shipped_backend_is_judged_when_it_is_named_and_is_in_the_record(
    pytester: pytest.Pytester, site: Path
) -> None:
    install(site, "gemm-vendor", "vendor = gemm_vendor:backend")
    code, text = suite(pytester, "--gemm-backends=vendor", "--gemm-set=vendor.tile=64", "--gemm-output=out")
    assert code == 0, text
    assert "TILE 64" in text
    first = json.loads((pytester.path / "out" / "run.jsonl").read_text().splitlines()[0])
    assert first["run"]["versions"]["gemm-vendor"] == "1.2"


@pytest.mark.slow
def test_nothing_of_it_is_imported_unless_it_is_asked_for(pytester: pytest.Pytester, site: Path) -> None:
    install(site, "gemm-vendor", "vendor = gemm_vendor:backend")
    code, text = suite(pytester, "--gemm-backends=aten", "--gemm-output=out")
    assert code == 0, text
    assert "LOADED" not in text
    assert "gemm-vendor" not in (pytester.path / "out" / "run.jsonl").read_text()


def listed(pytester: pytest.Pytester) -> tuple[int, str]:
    """What the doctor says of all, without those that come with the package, of which each takes its time."""
    program = """
from pytest_gemm.config import config
from pytest_gemm.tools import cli
config.BUILTIN = config.BUILTIN[:1]
raise SystemExit(cli.main(["doctor", "--", "--gemm-known-failures=none"]))
"""
    result = pytester.run(sys.executable, "-c", program)
    return int(result.ret), result.stdout.str() + result.stderr.str()


WHERE = "gemm-vendor 1.2, entry point {0} of pytest_gemm.backends: {1}; install another version of gemm-vendor, or "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("vendor = gemm_vendor:missing", "its import raised AttributeError: module 'gemm_vendor' has no attribute"),
        pytest.param("vendor = gemm_vendor:ends", "the call raised SystemExit: 3", marks=pytest.mark.study),
        pytest.param("vendor = gemm_vendor:sys.path", "list is no backend", marks=pytest.mark.study),
    ],
)
def test_a_broken_one_is_one_sentence_with_its_origin(
    pytester: pytest.Pytester, site: Path, entry: str, message: str
) -> None:
    install(site, "gemm-vendor", entry)
    code, text = suite(pytester, "--gemm-backends=vendor")
    assert code == 4, text
    start, _, remedy = WHERE.format(entry, "\0").partition("\0")
    assert f"--gemm-backends=vendor: {start}{message}" in text
    assert remedy in text
    assert "Traceback" not in text


@pytest.mark.slow
@pytest.mark.study
def test_two_of_one_name_are_both_named_and_the_others_run(pytester: pytest.Pytester, site: Path) -> None:
    install(site, "gemm-vendor", "vendor = gemm_vendor:backend\naten = gemm_vendor:backend")
    install(site, "gemm-seller", "vendor = gemm_vendor:backend")
    code, text = suite(pytester, "--gemm-backends=vendor")
    assert code == 4
    assert "gemm-seller 1.2, entry point vendor = gemm_vendor:backend of pytest_gemm.backends: two backends are" in text
    assert "called 'vendor': gemm-vendor 1.2 (gemm_vendor:backend) ships another one" in text
    code, text = suite(pytester, "--gemm-backends=aten")
    assert code == 4
    assert "two backends are called 'aten': another one is registered" in text
    code, text = suite(pytester, "--gemm-ops=mm")
    assert code == 0, text
    assert "gemm-vendor" not in text


@pytest.mark.slow
def test_the_doctor_lists_each_with_its_origin(pytester: pytest.Pytester, site: Path) -> None:
    install(site, "gemm-vendor", "vendor = gemm_vendor:backend\nbroken = gemm_none:backend")
    code, text = listed(pytester)
    assert code == 1, text
    assert "of gemm-vendor 1.2 (gemm_vendor:backend), on cpu" in text
    assert re.search(r"^broken +\d+\.\d s  FAILED: gemm-vendor 1.2, entry point broken = gemm_none:backend", text, re.M)
    assert re.search("can run: .*vendor", text)


def test_the_doctor_asks_for_what_is_not_loaded() -> None:
    registry = Registry()
    registry.ship([Shipped("vendor", "gemm_none:backend", "gemm-vendor", "1.2")])
    assert registry.names() == ("vendor",)
    assert [*registry] == []
    assert registry.origin("vendor") is None
    with pytest.raises(RegistryError, match="its import raised ModuleNotFoundError"):
        registry.named("vendor")
    with pytest.raises(RegistryError, match=r"unknown backend 'vendro' .did you mean 'vendor'"):
        registry["vendro"]
