"""The first steps that the pages show, each started as its user starts it: with these words and no others."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from textwrap import dedent

import pytest
from documents import ROOT, commands

pytestmark = pytest.mark.slow

# cpp takes no f64, so that a run of all backends compiles nothing.
LINE = "mm:f64:nn:8x16x32"
CONFTEST = """
    def pytest_gemm_register_backends(registry):
        registry.add_callable("mine", lambda a, b: a @ b, dtypes=("f64",))
"""
TEST = f"""
    import pytest

    @pytest.mark.gemm(problems=["{LINE}"])
    def test_product(gemm_case, gemm_check):
        gemm_check(gemm_case)
"""
INI = "[pytest]\ngemm_backends = mine\ngemm_level = smoke\ngemm_set =\n    run.files=1\n"
MINE = "--gemm-backends=mine"
CASE = f"mine-{LINE}"
FOLDERS = {"project": (CONFTEST, TEST), "project/below": (), "registers": (CONFTEST,), "tests": (TEST,), "empty": ()}

# Where pytest is started, the ini file there, its words, the exit status and a line that is shown.
FLOWS = {
    "no argument": ("project", "", "", 0, "*2 passed*"),
    "no argument, all in the ini file": ("project", INI, "", 0, "gemm: backends mine; level smoke,*"),
    "addopts": ("project", f"[pytest]\naddopts = {MINE} --gemm-seed=3\n", "", 0, "gemm: * seed 3,*"),
    "one backend": ("project", "", MINE, 0, "mine *mm *1 *"),
    "without plugins": ("project", "", f"-p no:xdist -p no:cacheprovider -p no:benchmark {MINE}", 0, "*1 passed*"),
    "collect only": ("project", "", "--co -q", 0, f"test_it.py::test_product[[]{CASE}]"),
    "a node id": ("project", "", f"test_it.py::test_product[{CASE}]", 0, "*1 passed*"),
    "from the folder above": ("", "", f"project --rootdir=empty {MINE}", 0, "*1 passed*"),
    "from a folder below": ("project/below", "", f".. {MINE}", 0, "*1 passed*"),
    "only a conftest": ("registers", "", "", 5, "no case was selected here; *: pytest --pyargs *"),
    "no conftest": ("tests", "", "", 0, "*1 passed*"),
    "an empty folder": ("empty", "", "--gemm-backends=cpp,cutlass", 10, "*: pytest --pyargs pytest_gemm.conformance"),
}


@pytest.fixture
def start(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., pytest.RunResult]:
    """Start pytest in a folder; pytester's own way would add an option."""
    for folder, files in FOLDERS.items():
        place = pytester.mkdir(folder)
        for text in files:
            (place / ("conftest.py" if text is CONFTEST else "test_it.py")).write_text(dedent(text))

    def run(folder: object, words: Sequence[str]) -> pytest.RunResult:
        monkeypatch.chdir(pytester.path / str(folder))
        return pytester.run(*pytester._getpytestargs(), *words)

    return run


@pytest.mark.parametrize("flow", FLOWS)
def test_a_first_step_works(pytester: pytest.Pytester, start: Callable[..., pytest.RunResult], flow: str) -> None:
    folder, ini, words, status, shown = FLOWS[flow]
    if ini:
        (pytester.path / folder / "pytest.ini").write_text(ini)
    result = start(folder, words.split())
    assert result.ret == status
    result.stdout.fnmatch_lines([shown])


def shown_commands() -> list[str]:
    """The pages' shortest commands of a project of one's own, and what tox starts in a clone."""
    mine = rf"pytest( --pyargs pytest_gemm\.conformance)?( {MINE})?( --gemm-level=smoke)?"
    pages = dict.fromkeys(one.text for one in commands() if re.fullmatch(mine, one.text))
    tox = re.findall(r"conformance: (pytest .*?) *\{posargs", (ROOT / "tox.ini").read_text(encoding="utf-8"))
    return [*pages, *tox, "pytest"]


@pytest.mark.parametrize("command", shown_commands())
def test_a_command_of_the_pages_collects_its_tests(
    start: Callable[..., pytest.RunResult], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "--co -q -p no:cacheprovider")
    result = start("project" if MINE in command else ROOT, command.split()[1:])
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"*test_product[[]{'mine' if MINE in command else 'aten'}-*:*"])
