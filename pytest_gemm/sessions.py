"""Speed as a run sees it: fresh processes that time, one after the other, and the verdicts that follow from them.

What one process says, however often it times, is one observation.  So the run itself times nothing.  It starts
*sessions*: its own command again, in a process that answers a request (``measure``).  First several at
once that compile and judge, so that the compilers' caches are full and what is wrong is known; then one at a time that
measure, alone on the device as far as this program can see to it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import pickle
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_gemm import __version__, baseline, gate, speed_report, turns
from pytest_gemm.api.protocols import Sparing, Tuning
from pytest_gemm.config import cores
from pytest_gemm.machine import gpus
from pytest_gemm.machine import key as key_module
from pytest_gemm.measure import LOST, NOW, SESSION, Request
from pytest_gemm.outcome import Reason, Status
from pytest_gemm.run.progress import Display
from pytest_gemm.speed import (
    CaseKey,
    Ceilings,
    Judgement,
    Sample,
    Session,
    SessionError,
    Verdict,
    by_case,
    read_session,
    sample_line,
    session_line,
)
from pytest_gemm.storage import files

if TYPE_CHECKING:
    from pytest_gemm.config import GemmConfig, SpeedConfig

__all__ = [
    "Arm",
    "Command",
    "Measured",
    "SessionFailed",
    "Timed",
    "as_run",
    "measure",
    "offer",
    "offered",
    "resolve",
    "share",
    "shared",
    "slow",
]

Timed = tuple[str, str]  # backend and problem line of a case

# What a recording has no use for.
_ITS_GATE: Final = tuple(
    f"--gemm-{name}" for name in ("sessions", "gate", "no-baseline", "undecided", "undecided-share")
)
# Fewer cases than this are compiled by the first session itself.
_WORTH_WHILE: Final = 4
# A candidate that took this many times as long as the fastest one, when several processes compiled and timed at once,
# is not the fastest one alone; and so many of the fastest by then are timed alone in any case.
_FAR: Final = 1.5
_SHORTEST_LIST: Final = 8
# A session that loses its process goes on in another one; a run does not follow a machine into the abyss.
_RESTARTS: Final = 20

# OpenMP's threads stay on the cores that they begin on: unbound, both threads of a run have been seen on one core.
_BOUND: Final = {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}
# Large pages where the system has them: which small pages a process gets, and so what falls on the same lines of a
# cache, is chance, and the same in all of its readings.  The first is PyTorch's, the second the C library's.
_HUGE_PAGES: Final = {"THP_MEM_ALLOC_ENABLE": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@dataclasses.dataclass(frozen=True)
class Command:
    """How the run was started.

    Attributes:
        arguments: pytest's, as given.
        folder: where.
        xdist: whether ``-n`` is known.
    """

    arguments: tuple[str, ...]
    folder: Path
    xdist: bool

    def session(self, folder: Path, threads: int) -> list[str]:
        """Arguments of a session that finds its request in ``folder``."""
        return [
            *_without_the_run_s_own(self.arguments),
            *(["-n", "0"] if self.xdist else []),
            "--benchmark-disable",
            "--maxfail=0",
            f"--gemm-threads={threads}",
            f"--gemm-session={folder}",
        ]

    def recording(self, threads: int) -> str:
        """The command that records baselines of the same cases."""
        plain = _without(_without_the_run_s_own(self.arguments), *_ITS_GATE)
        own = [] if threads == cores() else [f"--gemm-threads={threads}"]
        return shlex.join(["pytest", *plain, *own, "--gemm-record"])


def _without(arguments: Sequence[str], *options: str) -> list[str]:
    """The arguments without these options and their values."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in options:
        own.add_argument(option)
    return own.parse_known_args(list(arguments))[1]


def _without_the_run_s_own(arguments: Sequence[str]) -> list[str]:
    """The arguments without those that are the run's alone: where it reports, how it is shared out, when it stops."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flags in (
        ("-n", "--numprocesses"),
        ("--dist",),
        ("--tx",),
        ("--maxprocesses",),
        ("--maxfail",),
        ("--junitxml", "--junit-xml"),
        ("--gemm-threads",),
        *(
            (f"--gemm-{name}",)
            for name in ("run-record", "coverage", "report", "summary", "samples", "accept", "reason", "against")
        ),
        *((f"--benchmark-{name}",) for name in ("json", "save", "csv", "storage", "compare-fail", "sort", "group-by")),
        *((f"--benchmark-{name}",) for name in ("columns", "name", "timer", "min-rounds", "min-time", "max-time")),
    ):
        own.add_argument(*flags)
    for name in ("compare", "histogram", "cprofile", "warmup"):
        own.add_argument(f"--benchmark-{name}", nargs="?")
    for name in ("record", "force", "prune"):
        own.add_argument(f"--gemm-{name}", nargs="?")
    for flags in (
        ("-x", "--exitfirst"),
        ("--stepwise", "--sw"),
        ("--pdb",),
        *((f"--benchmark-{name}",) for name in ("only", "skip", "enable", "autosave", "verbose", "quiet", "save-data")),
    ):
        own.add_argument(*flags, action="store_true")
    return own.parse_known_args(list(arguments))[1]


# -- the other environment ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Arm:
    """An environment that is measured.

    Attributes:
        name: ``head`` or ``base``.
        python: its interpreter.
        first: folder to import from before all others; ``None``: nothing special.
        label: for people.
    """

    name: str
    python: str = sys.executable
    first: Path | None = None
    label: str = "this environment"


def resolve(text: str, scratch: Path) -> Arm:
    """The arm that ``--gemm-against`` names.

    Args:
        text: an interpreter, a virtual environment, a wheel, or a folder to import from first.
        scratch: where a wheel is unpacked.

    Raises:
        pytest.UsageError: when it is none of these, or its interpreter has another pytest-gemm or none.
    """
    flag = f"--gemm-against={text}"
    path = Path(text).absolute()
    arm = Arm("base", label=text)
    if path.is_file() and path.suffix == ".whl":
        target = scratch / "wheel"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise pytest.UsageError(f"{flag}: pip cannot unpack the wheel: {done.stderr.strip()[-300:]}")
        arm = dataclasses.replace(arm, first=target)
    elif path.is_dir() and (python := path / "bin" / "python").exists():
        arm = dataclasses.replace(arm, python=str(python))
    elif path.is_dir():
        arm = dataclasses.replace(arm, first=path)
    elif (found := shutil.which(text)) is not None:
        arm = dataclasses.replace(arm, python=found)
    else:
        raise pytest.UsageError(
            f"{flag}: name an interpreter, a virtual environment, a wheel, or a folder to import from first"
        )
    if arm.first is not None and not (arm.first / "torch" / "__init__.py").is_file():
        raise pytest.UsageError(
            f"{flag}: holds no torch, so both sides would run the same one; name where one is installed "
            "(pip install --target), or a virtual environment"
        )
    if arm.python != sys.executable:
        has_torch = "import importlib.util as u; assert u.find_spec('torch'), 'no torch'"
        asked = [arm.python, "-c", f"import pytest_gemm; print(pytest_gemm.__version__); {has_torch}"]
        try:
            done = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise pytest.UsageError(f"{flag}: {arm.python} does not run: {error}") from None
        version = done.stdout.strip()
        if done.returncode and version == __version__:
            raise pytest.UsageError(f"{flag}: holds no torch: {arm.python} -m pip install torch")
        if done.returncode or version != __version__:
            has = f"has pytest-gemm {version}" if version and not done.returncode else "has no pytest-gemm"
            raise pytest.UsageError(
                f"{flag}: {has}, and both arms need {__version__}: {arm.python} -m pip install the same pytest-gemm"
            )
    return arm


# -- what comes out ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Measured:
    """What a run measured on one device, and what follows.

    Attributes:
        device, hardware: where.
        record: the command that records baselines of its cases.
        mode: ``baseline``, ``against`` or ``record``.
        sessions: of the head, those of the confirmation included.
        base: of the other environment.
        failed: cases without a figure: the sample that says why.
        judgements: of every timed case.
        stored: the baselines that were compared with.
        anchor: the comparators moved as a whole.
        refused: cases that were to be recorded and were not, with the reason.
        notes: further sentences about the run.
        seconds: by the clock, and by phase.
        lost: why a file is not complete that was asked for, by the option with its value.
    """

    device: str
    hardware: str = ""
    record: str = ""
    mode: str = "baseline"
    sessions: list[Session] = dataclasses.field(default_factory=list)
    base: list[Session] = dataclasses.field(default_factory=list)
    failed: dict[Timed, Sample] = dataclasses.field(default_factory=dict)
    judgements: dict[CaseKey, Judgement] = dataclasses.field(default_factory=dict)
    stored: dict[CaseKey, baseline.Baseline] = dataclasses.field(default_factory=dict)
    anchor: Reason | None = None
    refused: dict[CaseKey, str] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    lost: dict[str, str] = dataclasses.field(default_factory=dict)

    def samples(self, timed: Timed) -> list[Sample]:
        """All samples of a case, of the head, in order."""
        return [s for session in self.sessions for s in session.samples if (s.case.backend, s.case.problem) == timed]

    def judged(self, timed: Timed) -> list[Judgement]:
        """The verdicts on a case: one for each choice."""
        return [j for key, j in self.judgements.items() if (key.backend, key.problem) == timed]


# -- running sessions ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _alone(device: str, display: Display, wait: float = 0.0) -> Iterator[None]:
    """No other run of this user times on the device meanwhile; the system lets go of it when this process dies.

    The CPU is one device.  A GPU is known by its UUID, so that two of them can be timed at once.
    """
    gpu = gpus.visible_gpu() if device == "cuda" else None

    def waiting(holder: str, seconds: float) -> None:
        limit = f" of {wait:g} s (--gemm-wait)" if wait else " s"
        display.progress(f"speed: {holder} is timing on {device}; waiting for it, {seconds:.0f}{limit}")

    with contextlib.ExitStack() as stack:
        try:
            path = files.private_folder() / f"{gpu.uuid if gpu else device}.lock"
            stack.enter_context(files.locked(path, wait, waiting))
        except files.LockTimeoutError as error:
            # Timing beside another run would give figures of both: going on without the lock is no choice.
            raise pytest.UsageError(
                f"speed: {error}: another run is timing on {device}; wait until it ends or end it, "
                "or raise --gemm-wait (seconds, 0: without a limit)"
            ) from None
        except OSError as error:
            raise pytest.UsageError(f"speed: the lock of {device} cannot be taken: {error}") from None
        yield


class _Runner:
    """Starts sessions and reads what they leave."""

    def __init__(self, config: GemmConfig, command: Command, display: Display, device: str, scratch: Path) -> None:
        self._config = config
        self._command = command
        self._display = display
        self._device = device
        self._scratch = scratch
        self._count = 0
        self._samples = config.speed.samples or scratch / f"samples-{device}"
        self._samples.mkdir(parents=True, exist_ok=True)
        self.commit = _commit(config.speed.root)
        self.failed: dict[Timed, Sample] = {}
        self._pinned: dict[str, dict[str, tuple[str, ...]]] = {"head": {}, "base": {}}
        self.before: dict[CaseKey, tuple[str, ...]] = {}
        self.ceilings: Ceilings | None = None
        self.notes: list[str] = []
        self.lost: dict[str, str] = {}

    def compile(self, arm: Arm, cases: Sequence[Timed]) -> None:
        """Have several processes compile and judge the cases at once; what fails needs no timing.

        Backends that pick a candidate by timing do it here, in one process and alone on the device, and all sessions
        time that candidate: what a session says is then of a kernel, and what was picked is said once.
        """
        jobs = min(self._config.jobs, -(-len(cases) // _WORTH_WHILE))
        # On a CPU Inductor's own rule picks; whether anything was timed shows once it is compiled.
        tuned = {case for case in cases if self._device != "cpu" and isinstance(self._config.registry[case[0]], Tuning)}
        crowded: list[Sample] = []
        if jobs > 1:
            crowded = self._compile(arm, cases, jobs, "compiling and judging")
            tuned = {(s.case.backend, s.case.problem) for s in crowded if s.ranking}
        if self._config.choices in {"", "winner"} and (todo := [case for case in self.left(cases) if case in tuned]):
            self._pick(arm, todo, crowded)

    def _pick(self, arm: Arm, cases: Sequence[Timed], crowded: Sequence[Sample]) -> None:
        """Have backends pick their candidates; ``crowded`` is what they measured when all were at work at once."""
        started = time.perf_counter()
        spared = {
            _key(sample.case): names
            for sample in crowded
            if isinstance(self._config.registry[sample.case.backend], Sparing)
            and (names := slow(sample, max(_SHORTEST_LIST, 1 + self._config.speed.regret)))
        }
        alone = [s for s in self._compile(arm, cases, 1, "picking candidates for", spared) if s.ranking]
        for sample in alone:
            if sample.picked:
                others = (name for name in sample.ranking if name not in sample.picked)
                self._pinned[arm.name][_key(sample.case)] = (sample.picked[0], *others)
        if alone:
            seconds = time.perf_counter() - started
            self.notes.append(f"picking in {arm.label} took {seconds:.0f} s: {_timed_alone(alone, spared)}")

    def _compile(
        self,
        arm: Arm,
        cases: Sequence[Timed],
        jobs: int,
        what: str,
        spared: Mapping[str, Sequence[str]] | None = None,
    ) -> list[Sample]:
        # Dealt out backend by backend: one has much more to compile than another, and each process gets some of both.
        dealt = sorted(cases, key=lambda case: case[0]) if jobs > 1 else cases
        requests = [Request(tuple(dealt[i::jobs]), self._device, timed=False, spared=spared or {}) for i in range(jobs)]
        open_ = [_Open(self, arm, request) for request in requests]
        with contextlib.ExitStack() as stack:
            for one in open_:
                stack.enter_context(one)
            while sum(not one.poll() for one in open_):  # all of them are asked each time
                done = sum(one.done for one in open_)
                self._display.progress(f"speed: {what} {done} of {len(cases)} cases on {arm.label}")
                time.sleep(0.2)
        samples = [sample for one in open_ for sample in one.result().samples]
        self._note_failures(samples)
        return samples

    def left(self, cases: Iterable[Timed]) -> list[Timed]:
        """The cases that have not failed."""
        return [case for case in cases if case not in self.failed]

    def pick_again(self, arm: Arm, cases: Iterable[CaseKey]) -> None:
        """Have the candidates of these cases picked anew, where a backend picks by timing.

        A pick is one observation as well: what a confirmation times is to have been picked twice.
        """
        names = [(key.backend, key.problem) for key in cases if _key(key) in self._pinned[arm.name]]
        if todo := self.left(dict.fromkeys(names)):
            self.compile(arm, todo)

    def picked(self, arm: Arm) -> dict[CaseKey, tuple[str, ...]]:
        """What the backends that pick by timing have picked."""
        found = {}
        for key, candidates in self._pinned[arm.name].items():
            backend, problem = key.split(" ", 1)
            found[CaseKey(backend, problem)] = candidates[:1]
        return found

    def session(self, arm: Arm, cases: Sequence[Timed], index: int, label: str) -> Session:
        """One session over the cases that have not failed."""
        with self._open(arm, cases, index) as one:
            while not one.poll():
                self._display.progress(f"speed: {label}, {one.now or 'starting'}")
                time.sleep(0.2)
        return self._ended(one, arm, index)

    def pair(self, arms: tuple[Arm, Arm], cases: Sequence[Timed], index: int, label: str) -> dict[str, Session]:
        """A session of each arm, the first of which begins.

        On a CPU both processes live at once and time in alternation, a window each, so that they meet the same
        neighbours.  A GPU has none, and two processes would share its memory: there one session follows the other.
        """
        if self._device != "cpu":
            return {arm.name: self.session(arm, cases, index, f"{label}, {arm.label}") for arm in arms}
        ends = turns.pair()
        with contextlib.ExitStack() as stack:
            try:
                pair = [
                    stack.enter_context(self._open(arm, cases, index, end=end.fileno(), begins=arm is arms[0]))
                    for arm, end in zip(arms, ends, strict=True)
                ]
            finally:
                for end in ends:  # the processes have them; one that dies is to be the last to hold its own
                    end.close()
            while sum(not one.poll() for one in pair):  # both of them are asked each time
                now = next((one.now for one in pair if one.now), "starting")
                self._display.progress(f"speed: {label}, {now}")
                time.sleep(0.2)
        return {arm.name: self._ended(one, arm, index) for arm, one in zip(arms, pair, strict=True)}

    def _open(
        self, arm: Arm, cases: Sequence[Timed], index: int, *, end: int | None = None, begins: bool = False
    ) -> _Open:
        request = Request(
            tuple(self._shuffled(self.left(cases), index)),
            self._device,
            arm.name,
            index,
            ceilings=self.ceilings,
            pinned=self._pinned[arm.name],
            before={_key(key): picked[0] for key, picked in self.before.items() if len(picked) == 1 and not key.choice}
            if arm.name == "head"
            else {},
            commit=self.commit if arm.name == "head" else "",
            turns=end,
            begins=begins,
        )
        return _Open(self, arm, request)

    def _ended(self, one: _Open, arm: Arm, index: int) -> Session:
        session = one.result()
        if not session.ceilings.disturbed:  # the next session tries again otherwise
            self.ceilings = session.ceilings
        self._note_failures(session.samples)
        try:
            one.keep(self._samples / f"{self._device}-{arm.name}-{index:03}.jsonl")
        except OSError as error:  # the session itself has been read
            self.lost.setdefault(f"--gemm-samples={self._samples}", error.strerror or str(error))
        return session

    def rescued(self) -> Path:
        """Folder of the samples so far, which outlives the run: the user's, or else one among the temporary ones."""
        if self._config.speed.samples is None:
            safe = Path(tempfile.mkdtemp(prefix="pytest-gemm-samples-"))
            self._samples = Path(shutil.copytree(self._samples, safe, dirs_exist_ok=True))
        return self._samples

    def _shuffled(self, cases: Sequence[Timed], index: int) -> list[Timed]:
        """Another order each time, so that no case always comes after the same one.

        The backends of a problem stay together: they share its operands and its reference.
        """
        problems: dict[str, list[Timed]] = {}
        for case in cases:
            problems.setdefault(case[1], []).append(case)
        chance = random.Random(f"{self._config.seed} {index}")
        groups = list(problems.values())
        chance.shuffle(groups)
        for group in groups:
            chance.shuffle(group)
        return list(itertools.chain.from_iterable(groups))

    def _note_failures(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            # A candidate that was dropped, or that the ledger forbids to run, is none of the others' faults.
            withheld = sample.status is Status.KNOWN_FAILURE and bool(sample.case.choice)
            if sample.status not in {Status.PASSED, Status.DROPPED} and not withheld:
                self.failed.setdefault((sample.case.backend, sample.case.problem), sample)

    def start(self, arm: Arm, request: Request, folder: Path) -> subprocess.Popen[bytes]:
        """A process that answers the request."""
        request.write(folder)
        environment = dict(os.environ)
        if self._device == "cpu" and request.timed:
            environment = {**_BOUND, **_HUGE_PAGES, **environment}
        if arm.first is not None:
            before = environment.get("PYTHONPATH")
            environment["PYTHONPATH"] = os.pathsep.join([str(arm.first), *([before] if before else [])])
        arguments = self._command.session(folder, self._config.speed.threads)
        with (folder / "log.txt").open("ab") as log:
            return subprocess.Popen(
                [arm.python, "-m", "pytest", *arguments],
                cwd=self._command.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=() if request.turns is None else (request.turns,),
            )

    def folder(self) -> Path:
        """A new one for a session."""
        self._count += 1
        made = self._scratch / f"{self._device}-{self._count:03}"
        made.mkdir()
        return made


def slow(sample: Sample, fewest: int) -> tuple[str, ...]:
    """The candidates that a backend need not time again when it is alone, by what it measured among others at work.

    Others make a figure worse by chance: it is good enough to tell who cannot be the fastest, and no better.  What
    failed among them is not here, and is tried again.

    Args:
        sample: of the case, with its ranking.
        fewest: so many of the fastest are timed again in any case.
    """
    if not sample.ranking_seconds:
        return ()
    limit = _FAR * sample.ranking_seconds[0]
    ranked = list(zip(sample.ranking, sample.ranking_seconds, strict=True))
    return tuple(name for name, seconds in ranked[fewest:] if seconds > limit)


def _timed_alone(samples: Iterable[Sample], spared: Mapping[str, Sequence[str]]) -> str:
    """How many candidates each backend timed alone, of how many that it had timed before."""
    totals: dict[str, tuple[int, int, int]] = {}
    for sample in samples:
        backend = sample.case.backend
        alone, others, cases = totals.get(backend, (0, 0, 0))
        more = len(spared.get(_key(sample.case), ()))
        totals[backend] = alone + len(sample.ranking), others + more, cases + 1
    parts = []
    for backend, (alone, others, cases) in totals.items():
        count = f"{alone} of {alone + others}" if others else f"all {alone}"
        why = f"; the others took over {_FAR}x of the fastest when several processes were at it" if others else ""
        parts.append(f"{backend} timed {count} candidates of {speed_report.plural(cases, 'case')} alone{why}")
    return ". ".join(parts)


class _Open:
    """A session under way, over as many processes as it takes."""

    def __init__(self, runner: _Runner, arm: Arm, request: Request) -> None:
        self._runner = runner
        self._arm = arm
        self._request = request
        self._folder = runner.folder()
        self._parts: list[Session] = []
        self._crashed: list[Sample] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._started = time.perf_counter()
        self._files: list[Path] = []

    def __enter__(self) -> _Open:
        self._process = self._runner.start(self._arm, self._request, self._folder)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    @property
    def done(self) -> int:
        """How many cases have a sample by now."""
        before = sum(len(part.samples) for part in self._parts) + len(self._crashed)
        if self._process is None:
            return before
        try:
            return before + (self._folder / SESSION).read_text(encoding="utf-8").count('{"sample"')
        except OSError:
            return before

    @property
    def now(self) -> str:
        """The case at work; "" between two cases."""
        try:
            return (self._folder / NOW).read_text(encoding="utf-8")
        except OSError:
            return ""

    def poll(self) -> bool:
        """Whether it has ended; a process that died in a case is replaced by one for the cases behind it."""
        if self._process is None:
            return True
        status = self._process.poll()
        if status is None:
            return False
        self._process = None
        part = self._read(status)
        self._parts.append(part)
        if part.complete:
            return True
        if status != LOST:
            self._crashed.append(self._culprit(status))
        seen = {(s.case.backend, s.case.problem) for s in (*self._all(), *self._crashed)}
        rest = tuple(case for case in self._request.cases if case not in seen)
        if not rest:
            return True
        if len(self._parts) > _RESTARTS:
            raise SessionFailed(
                f"{_RESTARTS} processes died one after the other while they timed; the last log:", self._log()
            )
        # The other session of a pair has gone on alone.
        self._request = dataclasses.replace(self._request, cases=rest, ceilings=part.ceilings, turns=None)
        self._folder = self._runner.folder()
        self._process = self._runner.start(self._arm, self._request, self._folder)
        return False

    def result(self) -> Session:
        """All that it measured, as of one process."""
        first = self._parts[0]
        return dataclasses.replace(
            first, samples=(*self._all(), *self._crashed), seconds=time.perf_counter() - self._started, complete=True
        )

    def keep(self, path: Path) -> None:
        """Copy the readings; of a session that lost its process, what all of its processes wrote as one."""
        if len(self._files) == 1:
            shutil.copyfile(self._files[0], path)
            return
        whole = self.result()
        end = json.dumps({"end": {"seconds": round(whole.seconds, 3)}}) + "\n"
        path.write_text("".join([session_line(whole), *map(sample_line, whole.samples), end]), encoding="utf-8")

    def _all(self) -> list[Sample]:
        return [sample for part in self._parts for sample in part.samples]

    def _read(self, status: int) -> Session:
        file = self._folder / SESSION
        if not file.exists():
            raise SessionFailed(f"a session ended with status {status} before it had begun; its log:", self._log())
        self._files.append(file)
        try:
            part = read_session(file)
        except SessionError as error:
            raise SessionFailed(str(error), self._log()) from None
        if not part.complete and status != LOST and not (self._folder / NOW).exists():
            raise SessionFailed(f"a session ended with status {status} between two cases; its log:", self._log())
        return part

    def _culprit(self, status: int) -> Sample:
        backend, _, line = (self._folder / NOW).read_text(encoding="utf-8").partition(" ")
        how = f"signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"status {status}"
        reason = Reason("process-died", f"the process that timed it ended with {how}")
        return Sample(CaseKey(backend, line), self._request.device, Status.CRASHED, reason)

    def _log(self) -> str:
        try:
            text = (self._folder / "log.txt").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-30:])


class SessionFailed(Exception):
    """A session that measured nothing, with the end of what it said; no case is to blame."""

    def __init__(self, text: str, log: str) -> None:
        super().__init__(f"{text}\n{log}" if log else text)


def _commit(root: Path) -> str:
    """The commit of the tree around ``root``, with ``+dirty`` when a tracked file differs; "" outside of git."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=60, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    if not head:
        return ""
    # Baselines may change while they are recorded; they do not change what is measured.
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)baselines")
    return f"{head}+dirty" if changed else head


# -- a run ---------------------------------------------------------------------------------------------------


def measure(
    config: GemmConfig, cases: Collection[Timed], command: Command, display: Display, *, whole: bool
) -> list[Measured]:
    """Time the cases and come to verdicts, device by device.

    Args:
        config: of the run.
        cases: backend and problem line of each.
        command: that started the run.
        display: for the progress.
        whole: the cases are all of a suite's, so that a baseline of another case is one that the suite no longer has.

    Raises:
        pytest.UsageError: when options contradict each other, the other environment or a baseline cannot be used, or
            no session can measure.
    """
    if config.speed.prune and not whole:
        raise pytest.UsageError(
            "--gemm-prune drops what the suite no longer has, so it needs the whole suite: give "
            "--gemm-level=exhaustive and nothing that selects a part of it, or drop single cases with "
            "python -m pytest_gemm.baseline prune"
        )
    of_device: dict[str, list[Timed]] = {}
    for case in dict.fromkeys(cases):
        of_device.setdefault(config.device_of(config.registry[case[0]]), []).append(case)
    found = []
    with tempfile.TemporaryDirectory(prefix="pytest-gemm-") as name:
        scratch = Path(name)
        base = resolve(config.speed.against, scratch) if config.speed.against else None
        try:
            for device, those in of_device.items():
                with _alone(device, display, config.speed.wait):
                    found.append(_measure(config, those, command, display, device, base, scratch, whole=whole))
        except (SessionFailed, baseline.BaselineError) as error:
            raise pytest.UsageError(f"speed: {error}") from None
    return found


def _measure(
    config: GemmConfig,
    cases: list[Timed],
    command: Command,
    display: Display,
    device: str,
    base: Arm | None,
    scratch: Path,
    *,
    whole: bool,
) -> Measured:
    policy = gate.Policy.for_device(device)
    if (count := config.speed.sessions) and not config.speed.record:
        changed = {"screen_pairs": count} if base is not None else {"screen_sessions": count}
        policy = dataclasses.replace(policy, **changed)
    runner = _Runner(config, command, display, device, scratch)
    hardware = key_module.hardware_key("cuda" if device == "cuda" else "cpu", config.speed.threads)
    made = Measured(device, hardware, record=command.recording(config.speed.threads))
    clock = _Clock(made.seconds)
    store = baseline.Store(config.speed.baselines, hardware)
    if base is None:  # a store that cannot be read is said before anything is measured
        made.stored = store.load_all(dict.fromkeys(backend for backend, _ in cases))
    try:
        head = Arm("head")
        with clock("compile"):
            for arm in (head, *([base] if base else [])):
                runner.compile(arm, cases)
        made.notes += runner.notes
        if config.speed.record:
            made.mode = "record"
            with clock("record"):
                _sessions(runner, head, cases, config.speed.sessions or baseline.SESSIONS, made, "recording")
            _record(config, store, made, policy)
            made.judgements = _with_every_case({}, made)
        elif base is not None:
            made.mode = "against"
            _against(runner, head, base, cases, policy, made, clock)
        else:
            made.mode = "baseline"
            _gate(runner, head, cases, policy, store, made, clock)
    except (KeyboardInterrupt, SessionFailed, baseline.BaselineError):
        for line in _cut_short(config, runner, made, command):
            display.line(f"speed: {line}")
        raise
    made.failed, made.lost = runner.failed, runner.lost
    order = {case: place for place, case in enumerate(cases)}  # each session has another one
    made.judgements = dict(sorted(made.judgements.items(), key=lambda pair: order[pair[0].backend, pair[0].problem]))
    if whole:
        _tidy(config, store, cases, made)
    display.line(
        f"speed: {len(made.sessions) + len(made.base)} sessions on {device} in {sum(made.seconds.values()):.0f} s"
    )
    return made


def _cut_short(config: GemmConfig, runner: _Runner, made: Measured, command: Command) -> list[str]:
    """What is left of a run that does not come to its end, and the command that records from it."""
    speed, done = config.speed, len(made.sessions)
    if not speed.record:
        kept = f"are in {speed.samples}" if speed.samples else "are not kept; --gemm-samples=DIR keeps them"
        what, whose = ("session is", "its") if done == 1 else ("sessions are", "their")
        return [f"cut short on {made.device}: {done} {what} complete" + (f", {whose} samples {kept}" if done else "")]
    asked = speed.sessions or baseline.SESSIONS
    first = f"the recording on {made.device} was cut short: {done} of {asked} sessions are complete"
    if not done:
        return [f"{first}, so there is nothing to record from"]
    folder = runner.rescued()
    stay = "" if speed.samples else ", a folder that stays until you delete it"
    words = ["python", "-m", "pytest_gemm.baseline", "record", str(folder), f"--sessions={min(done, asked)}"]
    place = speed.baselines.absolute()
    if place != command.folder.absolute() / "baselines":
        words.append(f"--baselines={place}")
    words += ["--force"] * speed.force + [f"--accept={case}" for case in speed.accept]
    words += [f"--reason={speed.reason}"] * bool(speed.reason)
    return [f"{first}; their samples are in {folder}{stay}", f"to record from these: {shlex.join(words)}"]


class _Clock:
    """Adds up seconds by phase: ``with clock("screen"): ...``."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started


def _sessions(
    runner: _Runner, arm: Arm, cases: Sequence[Timed], count: int, made: Measured, what: str
) -> list[Session]:
    fresh = []
    for number in range(1, count + 1):
        if not runner.left(cases):
            break
        session = runner.session(arm, cases, len(made.sessions), f"{what}, session {number} of {count}")
        fresh.append(session)
        made.sessions.append(session)
    return fresh


def _pairs(
    runner: _Runner, head: Arm, base: Arm, cases: Sequence[Timed], count: int, made: Measured, what: str
) -> tuple[list[Session], list[Session]]:
    """Sessions of both arms in alternation; who begins changes from pair to pair, so that a drift hits both alike."""
    fresh: dict[str, list[Session]] = {"head": [], "base": []}
    for number in range(1, count + 1):
        if not runner.left(cases):
            break
        index = len(made.sessions)
        arms = (base, head) if index % 2 == 0 else (head, base)
        for name, session in runner.pair(arms, cases, index, f"{what}, pair {number} of {count}").items():
            fresh[name].append(session)
        made.sessions += fresh["head"][-1:]
        made.base += fresh["base"][-1:]
    return fresh["base"], fresh["head"]


def _key(case: CaseKey) -> str:
    return f"{case.backend} {case.problem}"


def _named(keys: Iterable[CaseKey]) -> list[Timed]:
    return list(dict.fromkeys((key.backend, key.problem) for key in keys))


def _gate(
    runner: _Runner,
    head: Arm,
    cases: list[Timed],
    policy: gate.Policy,
    store: baseline.Store,
    made: Measured,
    clock: _Clock,
) -> None:
    runner.before = {key: line.picked for key, line in made.stored.items()}
    with clock("screen"):
        first = _sessions(runner, head, cases, policy.screen_sessions, made, "screening")
    if not first:
        return
    stored = baseline.stored(made.stored, first[0])
    screened = gate.screen(stored, gate.readings(first), policy)
    more: list[Session] = []

    def look(cases: tuple[CaseKey, ...], count: int, known: gate.Screened, last: bool) -> dict[CaseKey, Judgement]:
        with clock("confirm"):
            if not more:
                runner.pick_again(head, set(cases).intersection(gate.moved(runner.before, first)))
            more.extend(_sessions(runner, head, _named(cases), count - len(more), made, "confirming"))
        return gate.confirm(stored, _only(gate.readings(more), cases), known, policy, last=last)

    judgements = gate.by_looks(screened, policy, policy.confirm_sessions, look)
    made.anchor = screened.anchor
    made.judgements = _with_every_case(gate.annotate(judgements, runner.before, made.sessions), made)
    if not made.stored:
        made.notes.append(str(store.no_baseline(made.record)))
    elif other := baseline.incomparable(made.stored, first[0]):
        made.notes.append(f"{len(other)} baselines were timed in another way and do not compare: record them anew")


def _against(
    runner: _Runner,
    head: Arm,
    base: Arm,
    cases: list[Timed],
    policy: gate.Policy,
    made: Measured,
    clock: _Clock,
) -> None:
    runner.before = runner.picked(base)
    with clock("screen"):
        first_base, first_head = _pairs(runner, head, base, cases, policy.screen_pairs, made, "screening")
    screened = gate.screen_pair(*gate.pair_readings(first_base, first_head), policy)
    more: tuple[list[Session], list[Session]] = ([], [])

    def look(cases: tuple[CaseKey, ...], count: int, known: gate.Screened, last: bool) -> dict[CaseKey, Judgement]:
        with clock("confirm"):
            if not more[0]:
                again = set(cases).intersection(gate.moved(runner.before, first_head))
                for side in (head, base):
                    runner.pick_again(side, again)
                runner.before = runner.picked(base)
            fresh = _pairs(runner, head, base, _named(cases), count - len(more[0]), made, "confirming")
        for arm, some in zip(more, fresh, strict=True):
            arm.extend(some)
        of_base, of_head = (_only(some, cases) for some in gate.pair_readings(*more))
        return gate.confirm_pair(of_base, of_head, known, policy, last=last)

    judgements = gate.by_looks(screened, policy, policy.confirm_pairs, look)
    made.anchor = screened.anchor
    made.judgements = _with_every_case(gate.annotate(judgements, runner.before, made.sessions), made)


def _only(found: Mapping[CaseKey, list[gate.Reading]], cases: Collection[CaseKey]) -> dict[CaseKey, list[gate.Reading]]:
    return {case: found[case] for case in cases if case in found}


def _with_every_case(judgements: Mapping[CaseKey, Judgement], made: Measured) -> dict[CaseKey, Judgement]:
    """The judgements in the order of measurement; a timed case that the gate said nothing of has no baseline."""
    found = {}
    for key, samples in by_case(made.sessions).items():
        found[key] = judgements.get(key) or Judgement(
            key,
            Verdict.NO_BASELINE,
            Reason("no-baseline", "nothing is stored for it on this hardware"),
            seconds=samples[0].figure,
            comparator_seconds=samples[0].comparator_figure,
            sessions=len(samples),
        )
    return found


def _tidy(config: GemmConfig, store: baseline.Store, cases: Collection[Timed], made: Measured) -> None:
    """Say which baselines are of cases that the suite no longer has, or drop them."""
    gone = [key for key in made.stored if (key.backend, key.problem) not in frozenset(cases)]
    if not gone:
        return
    if config.speed.prune:
        dropped = store.prune(made.stored.keys() - set(gone), {key.backend for key in gone})
        made.notes += [f"pruned {key}" for key in dropped]
    else:
        names = ", ".join(map(str, gone[:3])) + (f" and {len(gone) - 3} more" if len(gone) > 3 else "")
        made.notes.append(
            f"{len(gone)} baselines are of no case of the suite ({names}): --gemm-record --gemm-prune drops them"
        )


def _record(config: GemmConfig, store: baseline.Store, made: Measured, policy: gate.Policy) -> None:
    """Store what was measured; a case that got slower only if it was accepted."""
    speed = config.speed
    if not made.sessions:
        return
    done, made.refused = baseline.record_sessions(
        store,
        made.sessions,
        policy,
        k=speed.sessions or baseline.SESSIONS,
        force=speed.force,
        accept=speed.accept,
        reason=speed.reason,
    )
    if lines := done.lines():
        made.notes += [f"baselines in {store.place}:", *lines]
    made.stored = store.load_all({key.backend for key in by_case(made.sessions)})


def as_run(made: Measured, speed: SpeedConfig) -> speed_report.Run:
    """What the reports need to know of it, and of what fails the run."""
    policy = gate.Policy.for_device(made.device)
    mode: Any = made.mode if made.mode in {"baseline", "against"} else "none"
    inside = sum(sum(s.phases.values()) for session in (*made.sessions, *made.base) for s in session.samples)
    whole = sum(made.seconds.values())
    history = {key: tuple(speed_report.Past(*past) for past in line.history) for key, line in made.stored.items()}
    return speed_report.Run(
        judgements=tuple(made.judgements.values()),
        sessions=tuple(made.sessions),
        hardware=made.hardware,
        software=made.sessions[0].software if made.sessions else {},
        ceilings=Ceilings.of(made.sessions),
        mode=mode,
        anchor=made.anchor,
        notes=tuple(made.notes),
        history=history,
        seconds=whole,
        harness_seconds=max(0.0, whole - made.seconds.get("compile", 0.0) - inside),
        record=made.record,
        delta=policy.delta,
        fatal=speed.fatal,
        undecided_share=speed.undecided_share if speed.gating else 1.0,
    )


# -- between the processes of xdist ----------------------------------------------------------------------------

_OFFER: Final = "cases.json"
_SHARED: Final = "measured.pickle"


def offer(folder: Path, cases: Iterable[Timed]) -> None:
    """A worker says which cases its tests want timed; all workers collect the same."""
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as file:
        json.dump(list(cases), file)
    os.replace(file.name, folder / _OFFER)


def offered(folder: Path) -> list[Timed]:
    """What the first worker said."""
    path = folder / _OFFER
    return [(backend, line) for backend, line in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []


def share(folder: Path, measured: list[Measured]) -> None:
    """The process that measured leaves it for the workers, whose tests come later."""
    (folder / _SHARED).write_bytes(pickle.dumps(measured))


def shared(folder: Path) -> list[Measured]:
    """What was measured, in a worker."""
    path = folder / _SHARED
    measured: list[Measured] = pickle.loads(path.read_bytes()) if path.exists() else []
    return measured
