"""A rerun line, typed literally in the folder where it was printed, reaches the same failure."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest
from warm_processes import Programs

pytestmark = pytest.mark.slow

BACKEND = """
    import os

    def off(a, b):
        return a @ b + 1

    def leaves(a, b):
        os._exit(3)

    def pytest_addoption(parser):
        parser.addoption("--kernel", default="")
        parser.getgroup("mine").addoption("--with-mine", action="store_true")

    def pytest_configure(config):
        off.named = config.getoption("--kernel")

    def pytest_gemm_register_backends(registry):
        if off.named:
            registry.add_callable("mine", {"off": off, "leaves": leaves}[off.named])
"""
ALWAYS = BACKEND.replace('config.getoption("--kernel")', '"off"')
TEST = """
    import pytest

    @pytest.mark.gemm(problems=["mm:f32:nn:8x16x32"])
    def test_product(gemm_case, gemm_check):
        gemm_check(gemm_case)
"""
INI = "[pytest]\ntestpaths = tests\npythonpath = lib\n"
SHIPPED = """
    class Wrong:
        name = "mine"
        def availability(self, device):
            from pytest_gemm.api.protocols import Availability
            return Availability()
        def supports(self, problem, request=None):
            return None
        def prepare(self, problem, operands, request=None):
            raise ValueError("planted")
"""
ENTRY = "[pytest_gemm.backends]\nmine = shipped:Wrong\n"
SUITE = "--pyargs pytest_gemm.conformance --gemm-problem=mm:f32:nn:8x16x32"

# Files of the project, the command without --gemm-backends, and what the rerun line has to keep of it.
PROJECTS = {
    "conftest": ({"conftest.py": ALWAYS, "test_it.py": TEST}, "pytest -q", ""),
    "conftest-of-the-suite": ({"conftest.py": ALWAYS}, f"pytest {SUITE}", ""),
    "conftest-elsewhere": (
        {"kernels/conftest.py": ALWAYS},
        f"pytest kernels {SUITE}",
        "kernels '--ignore-glob=kernels/*'",
    ),
    "conftest-beside": (
        {"kernels/conftest.py": ALWAYS, "suite/test_it.py": TEST},
        "pytest kernels suite -n1",
        "kernels '--ignore-glob=kernels/*'",
    ),
    "plugin": (
        {"mine.py": BACKEND, "test_it.py": TEST},
        "python -m pytest -v -p mine --kernel off --with-mine --durations 3",
        "-p mine --kernel off --with-mine",
    ),
    "plugin-that-ends-a-suite": ({"mine.py": BACKEND}, f"python -m pytest -p mine --kernel=leaves {SUITE}", "-p mine"),
    "ini": (
        {
            "lib/wrong.py": ALWAYS,
            "conf/my.ini": INI,
            "tests/conftest.py": "from wrong import *",
            "tests/test_it.py": TEST,
        },
        "pytest -c conf/my.ini --rootdir=. -o 'pythonpath=../lib other' tests --confcutdir .",
        "-c conf/my.ini --rootdir=. -o 'pythonpath=../lib other' --confcutdir .",
    ),
    "entry-point": (
        {"lib/shipped.py": SHIPPED, "lib/mine-1.0.dist-info/entry_points.txt": ENTRY, "test_it.py": TEST},
        "pytest",
        "",
    ),
}


# The others are studies: a project each takes three seconds.
OFTEN = {"conftest-of-the-suite", "ini"}


@pytest.mark.parametrize(
    ("files", "command", "kept"),
    [
        pytest.param(*project, id=name, marks=() if name in OFTEN else pytest.mark.study)
        for name, project in PROJECTS.items()
    ],
)
def test_it_fails_again(
    pytester: pytest.Pytester,
    programs: Programs,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    command: str,
    kept: str,
) -> None:
    for name, text in files.items():
        path = pytester.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    for folder in pytester.path.glob("lib/*.dist-info"):
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
        monkeypatch.setenv("PYTHONPATH", str(folder.parent))
    monkeypatch.setenv("PATH", f"{Path(programs.python).parent}{os.pathsep}{os.environ['PATH']}")
    failures: list[str] = []
    for _ in range(2):
        result = pytester.run("sh", "-c", command if failures else f"{command} --gemm-backends=mine", timeout=300)
        shown = [line.removeprefix("E   Failed: ") for line in (*result.outlines, *result.errlines)]
        failures.append(next(line for line in shown if ": mm:f32:nn:8x16x32 on mine: " in line))
        assert result.ret == 1
        command = next(line for line in shown if line.startswith("  rerun: ")).removeprefix("  rerun: ")
        assert kept in command
    assert failures[0] == failures[1]
    assert "incorrect" in failures[0] or "planted" in failures[0] or "exit status 3" in failures[0]
