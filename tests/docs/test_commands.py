"""Every command of README, CONTRIBUTING and the pages is run by a study, or is marked with what it needs.

The text of a command comes from its page.  It runs in a copy of this repository, or in a user's project where it is
about one, with what the pages have before it: records, baselines, environments.  Two tables declare the rest, by
regular expressions, and each of their rows has to match a command:

* :data:`NEEDS`: what a command needs that is not here; it is skipped with this reason, and only parsed.
* :data:`CHANGED`: what is given for a placeholder, and how a run is made small where that changes nothing of what is
  shown.
"""

from __future__ import annotations

import dataclasses
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import known_cpu
import pytest
from documents import ROOT, commands
from made_up_sessions import CONFTEST as MADE_UP_SESSIONS
from msgspec.structs import replace
from warm_processes import Programs

from pytest_gemm.machine import isa
from pytest_gemm.speed.data import read_session, session_text

SMALL: Final = "mm:f32:nn:64x64x64"

NEEDS: Final = {
    r"-backends=\S*(triton|cutlass|cutedsl|nvgemm)": "a CUDA device",
    r"^python3 -m venv": "a package index, and minutes: .ci/run does the same",
    r"\bpip install|-m pip ": "a package index",
    r"^git clone|^twine upload": "a network",
    r"^mkdocs serve": "somebody who ends it; .ci/lint builds the same site",
    r"^git (init|add|commit)|^pytest test_speed\.py|baseline accept 'mine": ("the steps before it on its page"),
    r"^git diff": "a remote repository",
    r"-backends=vendor": "the distribution of its page; tests/examples has it",
    r"-p onnxruntime_backend": "ONNX Runtime; tests/examples runs it where it is installed",
    r"-p nvmath_backend": "a CUDA device and nvmath-python; tests/examples runs it where they are",
    r"^python examples/results\.py": "records of libraries; tests/examples makes a page of some",
    r"pytest-gemm merge": "the shards of its page; tests/plugin/test_merge.py has some",
    r"^git ls-files -z": "it changes files of this repository; test_installation.py runs it",
    r"-candidates='CppMicro\*,": "half a minute of compilation; tests/backends/test_micro_kernels.py has such patterns",
    r"pytest tests": "minutes: .ci/run runs these tests",
    r"python tests/\w+\.py$": "what it writes anew, files of this repository that tests compare",
    r"^python tests/studies/": "the folder tests; tests of their own run these scripts",
    r"^(UPLOAD=yes )?\.ci/": "minutes: CI runs these scripts",
    r"-level=huge": "60 GB of memory",
    r"-backends=onednn": "the file of its page; tests/backends/test_onednn.py runs it",
    r"^python repro\.py": "a failure; tests/failures runs what it leaves",
    r"pytest_gemm\.speed\.worker REQUEST": "the request of a run",
}

# Small problems by op, that of mm for a command that names none.
OPS: Final = {
    "mm": SMALL,
    "bmm": "bmm:f32:nn:2x17x33x40",
    "linear": "linear:f32:nt:17x33x64",
    "int_mm": "int_mm:i8-i8-i32:nt:32x32x64",
    "woq_int8": "woq_int8:bf16-i8-bf16:nt:16x64x128",
    "grouped_mm": "grouped_mm:bf16:nt:4x64x96x128",
}

# Placeholders, and what makes a run small: (in which commands, what is replaced, by what, why).
CHANGED: Final = [
    (r"LINE", r"\bLINE(,\.\.\.)?", SMALL, "a placeholder"),
    (r"COMMAND", "COMMAND", "explain", "a placeholder"),
    (r"MODULE", "MODULE:FACTORY", "models.py:llama", "a placeholder"),
    (r"SESSIONS_DIR", "SESSIONS_DIR", "sessions", "a placeholder"),
    (r"baseline accept", "$", " --samples=slower", "the recording of its page was the last one"),
    (r"-n \S+", r"-n (auto|\d+)", "-n 0", "workers of xdist import PyTorch each; .ci/run has them"),
    (r"fuzz=\d+", r"fuzz=\d+", "fuzz=1 --gemm-ops=mm", "so many seconds, of an op without known defects"),
    (r"-modes=", ",cpp-wrapper,aoti", "", "half a minute of compilation; tests/judging/test_modes.py has them"),
    (r"-threads=1,2,all", "1,2,all,7", "1,2", "two numbers stand for the others"),
    (r"-threads=4/2", "4/2,.*", "4/2", "two numbers stand for the others"),
    (r"-isa=(all|native)", "isa=[a-z0-9,]+", "isa=avx2", "one instruction set stands for the others"),
    (r"-problem=[^,\s]+,", r"(-problem=[^,\s]+),\S+", r"\1", "one problem stands for the others"),
    (r"64x512x512|1000x1024x1000", r"\d+x\d+x\d+", "17x65x128", "the size changes the time alone"),
    (r"-(fuzz|guard|junit-xml)|(old|new)/bin|-level=full", "(aten,)?cpp", "aten", "ATen compiles nothing"),
    (r"pytest( perf| --pyargs pytest_gemm\.perf)", "$", " --gemm-undecided=100", "times are made up"),
    (r"pytest( perf| --pyargs pytest_gemm\.perf)(?!.*-sessions)", "$", " --gemm-sessions=2", "a gate needs more"),
    (
        r"pytest( perf| --pyargs pytest_gemm\.perf)(?!.*-(allow|record))",
        "$",
        " --gemm-allow=slower,no-baseline",
        "times are made up",
    ),
    (r"pytest --pyargs pytest_gemm\.perf", "$", " --gemm-backends=aten", "one backend stands for the others"),
]
# Others than these have one problem, of the first op that they name.
MANY: Final = re.compile(r"--help|-problem=|-fuzz=|-shapes=")

USERS: Final = re.compile(r"--pyargs|=mine")
"""Commands of a user's project; others are of a copy of this repository."""

PROJECT: Final = """
def pytest_gemm_register_backends(registry):
    registry.add_callable("mine", lambda a, b: a @ b)
"""
OTHERS: Final = """
    registry.add_callable("onednn", lambda a, b: a @ b)
    registry.add_callable("vendor", lambda a, b: a @ b)
"""
TEST: Final = f"""
import pytest

@pytest.mark.gemm(problems=["{SMALL}"])
def test_product(gemm_case, gemm_check):
    gemm_check(gemm_case)
"""

SHAPES: Final = """
[[set]]
name = "attention"
help = "what our model multiplies"
device = "cpu"
problem = "bmm:{dtype}:nt:2x16x16x64"
dtype = ["f32"]
"""
MODEL: Final = """
import torch

def llama():
    return torch.nn.Linear(16, 32), (torch.ones(4, 16),)
"""


@dataclasses.dataclass(frozen=True)
class Shown:
    """A command of the pages.

    Attributes:
        text: as it stands there.
        run: what is run.
        where: its pages and lines.
        needs: what is not here; it is not run.
    """

    text: str
    run: str
    where: str
    needs: str = ""


def _all_shown() -> list[Shown]:
    """The commands of the pages, each once."""
    places: dict[str, list[str]] = {}
    for one in commands():
        places.setdefault(one.text, []).append(f"{one.page}:{one.line}")
    return [_shown(text, " ".join(where)) for text, where in places.items()]


def _shown(text: str, where: str) -> Shown:
    needs = next((needs for pattern, needs in NEEDS.items() if re.search(pattern, text)), "")
    changed = text
    for pattern, replaced, by, _ in CHANGED:
        if not needs and re.search(pattern, text):
            changed = re.sub(replaced, by, changed, count=1)
    if not needs and re.search(r"pytest (?!gemm)", changed) and not MANY.search(text):
        ops = re.search(r"-ops=(\S+)", changed)
        line = OPS.get(ops[1].partition(",")[0] if ops else "mm")
        changed += f" --gemm-problem={line}" if line else ""
    return Shown(text, changed, where, needs)


SHOWN: Final = _all_shown()
RUNS: Final = [one for one in SHOWN if "--gemm-" in one.text and re.match(r"\S*pytest ", one.text)]


# -- where commands run ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Place:
    """Folders that commands run in, as new for each.

    Attributes:
        folder: of all.
        variables: of the commands.
        done: what was run, for some commands differ in what is changed only.
    """

    folder: Path
    variables: dict[str, str]
    done: dict[str, subprocess.CompletedProcess[str]] = dataclasses.field(default_factory=dict)

    def run(self, command: str, where: str = "clone") -> subprocess.CompletedProcess[str]:
        """Run a command of a shell."""
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-o", "pipefail", "-c", command],
            cwd=self.folder / where, env=self.variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False, timeout=300,
        )  # fmt: skip

    def keep(self) -> None:
        """What is there now is what a command finds."""
        for where in ("clone", "project"):
            commit = "git init -q -b main && git add -f . && git commit -q -m ."
            done = self.run(f"{commit} && git update-ref refs/remotes/origin/main HEAD", where)
            assert done.returncode == 0, done.stdout

    def renew(self) -> None:
        """Undo what a command left."""
        for where in ("clone", "project"):
            self.run("git reset -q --hard && git clean -fdxq", where)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> Place:
    """A copy of this repository and a user's project, with the results of a small run and of one that timed."""
    folder = tmp_path_factory.mktemp("commands")
    variables = {
        **os.environ,
        "PATH": os.pathsep.join([str(programs.folder), str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    variables |= {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder / "tmp")}
    variables |= {"GIT_CONFIG_GLOBAL": os.devnull, "PYTEST_ADDOPTS": "-p no:hypothesispytest -p no:cacheprovider"}
    variables |= {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    variables["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    (folder / "tmp").mkdir()
    known_cpu.copy_to(folder / "inductor")
    found = Place(folder, variables)
    _prepare(found, programs)
    return found


def _more_sessions(source: Path, target: Path, number: int, slower: float = 1.0) -> None:
    """As many sessions as if a run had timed longer, of kernels that take so many times as long."""
    target.mkdir(parents=True)
    first = read_session(min(source.glob("*.jsonl")))
    for index in range(number):
        noise = slower * random.Random(index).gauss(1.0, 0.003)
        samples = tuple(replace(one, subject=tuple(noise * x for x in one.subject)) for one in first.samples)
        text = session_text(replace(first, index=index, samples=samples))
        (target / f"cpu-{index:03}.jsonl").write_text(text, encoding="utf-8")


def _prepare(place: Place, programs: Programs) -> None:
    clone, project = place.folder / "clone", place.folder / "project"
    for name in ("backends", "baselines", "conformance", "examples", "perf", "pytest_gemm"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, clone / name)
    with (clone / "conftest.py").open("a") as conftest:
        conftest.write(MADE_UP_SESSIONS)
    project.mkdir()
    (project / "conftest.py").write_text(PROJECT + MADE_UP_SESSIONS)
    (project / "test_shapes.py").write_text(TEST)
    (place.folder / "venv-main").symlink_to(sys.prefix)
    for name in (".venv", "old", "new"):
        (clone / name).mkdir()
        (clone / name / "bin").symlink_to(programs.folder)
    done = place.run(
        f"pytest --gemm-backends=aten,cpp --gemm-problem={SMALL} --gemm-output=out && "
        f"pytest perf --gemm-backends=cpp --gemm-problem={SMALL} --gemm-record --gemm-sessions=3 --gemm-output=speed"
    )
    assert done.returncode == 0, done.stdout
    _more_sessions(clone / "speed" / "samples", clone / "out" / "samples", 12)
    _more_sessions(clone / "speed" / "samples", clone / "sessions", 40)
    _more_sessions(clone / "speed" / "samples", clone / "slower", 12, 1.5)
    for name in ("old-out", "new-out", "out-2.13", "out-2.15", "records/1", "records/2"):
        shutil.copytree(clone / "out", clone / name)
    shutil.copy(clone / "out" / "run.jsonl", clone / "more.jsonl")
    (clone / "site").mkdir()  # the page makes it in its workflow
    (clone / "site" / ".gitkeep").touch()
    (clone / "mine.py").write_text("def matmul(a, b):\n    return a @ b\n")
    for name in ("attention.toml", "llama.toml"):
        (clone / name).write_text(SHAPES)
    (clone / "models.py").write_text(MODEL)
    place.keep()


@pytest.mark.study
@pytest.mark.parametrize("shown", [pytest.param(one, id=one.text) for one in SHOWN])
def test_a_command_of_the_documents(place: Place, shown: Shown) -> None:
    if shown.needs:
        pytest.skip(f"needs: {shown.needs}")
    if shown.run not in place.done:
        place.renew()
        place.done[shown.run] = place.run(shown.run, "project" if USERS.search(shown.text) else "clone")
    done = place.done[shown.run]
    if refused := re.search("this CPU does not execute .*?;", done.stdout):
        pytest.skip(f"needs: another CPU: {refused[0]}")
    assert done.returncode == 0, f"{shown.where}: {shown.run}\n{done.stdout[-5000:]}"


def test_each_row_of_the_tables_matches_a_command() -> None:
    texts = [one.text for one in SHOWN]
    for pattern in (*NEEDS, *(row[0] for row in CHANGED)):
        assert any(re.search(pattern, text) for text in texts), f"no command of the documents matches {pattern}"


@pytest.mark.slow
@pytest.mark.parametrize("shown", [pytest.param(one, id=one.text) for one in RUNS])
def test_the_options_of_a_run_are_accepted(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, shown: Shown
) -> None:
    pytester.makeconftest(PROJECT + OTHERS)
    monkeypatch.setattr(isa, "isas", lambda _flags: isa.ISAS)  # of the machine that the page is about
    for name in ("attention.toml", "llama.toml"):
        (pytester.path / name).write_text(SHAPES)
    words = shlex.split(re.sub(r"(-against=)\S+", rf"\1{sys.prefix}", shown.run))
    options = [word for word in words if word.startswith("--gemm-")]
    pytester.parseconfigure("-p", "no:unraisableexception", *options)
