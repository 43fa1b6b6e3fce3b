"""Processes that time, started one after another or side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from msgspec.structs import replace

from pytest_gemm.api.request import Capability, honours
from pytest_gemm.case_id import CaseId
from pytest_gemm.machine import gpus
from pytest_gemm.outcome import Reason, Status
from pytest_gemm.run.terminal import Display
from pytest_gemm.speed import lockstep
from pytest_gemm.speed.baseline import entry
from pytest_gemm.speed.data import (
    Judgement,
    Peaks,
    Sample,
    Session,
    SessionError,
    end_line,
    read_session,
    sample_line,
    session_line,
)
from pytest_gemm.speed.group import Group
from pytest_gemm.speed.report import units
from pytest_gemm.speed.request import LOST, NOW, SESSION, Project, Request
from pytest_gemm.storage import files

if TYPE_CHECKING:
    from pytest_gemm.config import GemmConfig


Timed = tuple[str, str]  # backend and problem line of a case
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
    judgements: dict[CaseId, Judgement] = dataclasses.field(default_factory=dict)
    stored: dict[CaseId, entry.Baseline] = dataclasses.field(default_factory=dict)
    anchor: Reason | None = None
    refused: dict[CaseId, str] = dataclasses.field(default_factory=dict)
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
def timed_apart(device: str, display: Display, wait: float = 0.0) -> Iterator[None]:
    """No other run of this user times on the device meanwhile; the system lets go of it when this process dies.

    The CPU is one device.  A GPU is known by its UUID, so that two of them can be timed at once.
    """
    gpu = gpus.visible_gpu() if device == "cuda" else None

    def waiting(holder: str, seconds: float) -> None:
        limit = f" of {wait:g} s (speed.wait)" if wait else " s"
        display.progress(f"speed: {holder} is timing on {device}; waiting for it, {seconds:.0f}{limit}")

    with contextlib.ExitStack() as stack:
        try:
            path = files.private_folder() / f"{gpu.uuid if gpu else device}.lock"
            stack.enter_context(files.locked(path, wait, waiting))
        except files.LockTimeoutError as error:
            # Timing beside another run would give figures of both: going on without the lock is no choice.
            raise pytest.UsageError(
                f"speed: {error}: another run is timing on {device}; wait until it ends or end it, "
                "or raise --gemm-set=speed.wait (seconds, 0: without a limit)"
            ) from None
        except OSError as error:
            raise pytest.UsageError(f"speed: the lock of {device} cannot be taken: {error}") from None
        yield


class Runner:
    """Starts sessions and reads what they leave."""

    def __init__(self, config: GemmConfig, project: Project, display: Display, device: str, scratch: Path) -> None:
        self._config = config
        self._project = project
        self._display = display
        self._device = device
        self._scratch = scratch
        self._count = 0
        self.samples = config.speed.samples or scratch / f"samples-{device}"
        self.samples.mkdir(parents=True, exist_ok=True)
        for earlier in self.samples.glob(f"{device}-*.jsonl"):  # of another run
            earlier.unlink()
        self.commit = _commit(config.speed.root)
        self.failed: dict[Timed, Sample] = {}
        self._pinned: dict[str, dict[str, tuple[str, ...]]] = {"head": {}, "base": {}}
        self.before: dict[CaseId, tuple[str, ...]] = {}
        self.peaks: Peaks | None = None
        self.notes: list[str] = []
        self.lost: dict[str, str] = {}

    def compile(self, group: Group, cases: Sequence[Timed]) -> None:
        """Have several processes compile and judge the cases at once; what fails needs no timing.

        Backends that pick a candidate by timing do it here, in one process and alone on the device, and all sessions
        time that candidate: what a session says is then of a kernel, and what was selected is said once.
        """
        jobs = min(self._config.jobs, -(-len(cases) // _WORTH_WHILE))
        # On a CPU Inductor's own rule selects; whether anything was timed shows once it is compiled.
        registry, on_device = self._config.registry, self._device != "cpu"
        tuned = {case for case in cases if on_device and honours(registry[case[0]], Capability.SELECTION)}
        crowded: list[Sample] = []
        if jobs > 1:
            crowded = self._compile(group, cases, jobs, "compiling and judging")
            tuned = {(s.case.backend, s.case.problem) for s in crowded if s.ranking}
        if self._config.choices in {"", "winner"} and (todo := [case for case in self.left(cases) if case in tuned]):
            self._pick(group, todo, crowded)

    def _pick(self, group: Group, cases: Sequence[Timed], crowded: Sequence[Sample]) -> None:
        """Have backends pick their candidates; ``crowded`` is what they measured when all were at work at once."""
        started = time.perf_counter()
        spared = {
            case_key(sample.case): names
            for sample in crowded
            if honours(self._config.registry[sample.case.backend], Capability.PRUNED)
            and (names := slow(sample, max(_SHORTEST_LIST, 1 + self._config.speed.regret)))
        }
        alone = [s for s in self._compile(group, cases, 1, "selecting candidates for", spared) if s.ranking]
        for sample in alone:
            if sample.selected:
                others = (name for name in sample.ranking if name not in sample.selected)
                self._pinned[group.name][case_key(sample.case)] = (sample.selected[0], *others)
        if alone:
            seconds = time.perf_counter() - started
            self.notes.append(f"selecting in {group.label} took {seconds:.0f} s: {_timed_alone(alone, spared)}")

    def _compile(
        self,
        group: Group,
        cases: Sequence[Timed],
        jobs: int,
        what: str,
        spared: Mapping[str, tuple[str, ...]] | None = None,
    ) -> list[Sample]:
        # Dealt out backend by backend: one has much more to compile than another, and each process gets some of both.
        dealt = sorted(cases, key=lambda case: case[0]) if jobs > 1 else cases
        requests = [Request(tuple(dealt[i::jobs]), self._device, timed=False, spared=spared or {}) for i in range(jobs)]
        open_ = [_Open(self, group, request) for request in requests]
        with contextlib.ExitStack() as stack:
            for one in open_:
                stack.enter_context(one)
            while sum(not one.poll() for one in open_):  # all of them are asked each time
                done = sum(one.done for one in open_)
                self._display.progress(f"speed: {what} {done} of {len(cases)} cases on {group.label}")
                time.sleep(0.2)
        samples = [sample for one in open_ for sample in one.result().samples]
        self._note_failures(samples)
        return samples

    def left(self, cases: Iterable[Timed]) -> list[Timed]:
        """The cases that have not failed."""
        return [case for case in cases if case not in self.failed]

    def select_again(self, group: Group, cases: Iterable[CaseId]) -> None:
        """Have the candidates of these cases selected anew, where a backend selects by timing.

        A pick is one observation as well: what a confirmation times is to have been selected twice.
        """
        names = [(key.backend, key.problem) for key in cases if case_key(key) in self._pinned[group.name]]
        if todo := self.left(dict.fromkeys(names)):
            self.compile(group, todo)

    def selected(self, group: Group) -> dict[CaseId, tuple[str, ...]]:
        """What the backends that pick by timing have selected."""
        found = {}
        for key, candidates in self._pinned[group.name].items():
            backend, problem = key.split(" ", 1)
            found[CaseId(backend, problem)] = candidates[:1]
        return found

    def session(self, group: Group, cases: Sequence[Timed], index: int, label: str) -> Session:
        """One session over the cases that have not failed."""
        with self._open(group, cases, index) as one:
            while not one.poll():
                self._display.progress(f"speed: {label}, {one.now or 'starting'}")
                time.sleep(0.2)
        return self._ended(one, group, index)

    def pair(self, groups: tuple[Group, Group], cases: Sequence[Timed], index: int, label: str) -> dict[str, Session]:
        """A session of each group, the first of which begins.

        On a CPU both processes live at once and time in alternation, a window each, so that they meet the same
        neighbours.  A GPU has none, and two processes would share its memory: there one session follows the other.
        """
        if self._device != "cpu":
            return {group.name: self.session(group, cases, index, f"{label}, {group.label}") for group in groups}
        ends = lockstep.pair()
        with contextlib.ExitStack() as stack:
            try:
                pair = [
                    stack.enter_context(self._open(group, cases, index, end=end.fileno(), begins=group is groups[0]))
                    for group, end in zip(groups, ends, strict=True)
                ]
            finally:
                for end in ends:  # the processes have them; one that dies is to be the last to hold its own
                    end.close()
            while sum(not one.poll() for one in pair):  # both of them are asked each time
                now = next((one.now for one in pair if one.now), "starting")
                self._display.progress(f"speed: {label}, {now}")
                time.sleep(0.2)
        return {group.name: self._ended(one, group, index) for group, one in zip(groups, pair, strict=True)}

    def _open(
        self, group: Group, cases: Sequence[Timed], index: int, *, end: int | None = None, begins: bool = False
    ) -> _Open:
        request = Request(
            tuple(self._shuffled(self.left(cases), index)),
            self._device,
            group.name,
            index,
            peaks=self.peaks,
            pinned=self._pinned[group.name],
            before={
                case_key(key): selected[0]
                for key, selected in self.before.items()
                if len(selected) == 1 and not key.candidate
            }
            if group.name == "head"
            else {},
            commit=self.commit if group.name == "head" else "",
            socket=end,
            begins=begins,
        )
        return _Open(self, group, request)

    def _ended(self, one: _Open, group: Group, index: int) -> Session:
        session = one.result()
        if not session.peaks.disturbed:  # the next session tries again otherwise
            self.peaks = session.peaks
        self._note_failures(session.samples)
        try:
            one.keep(self.samples / f"{self._device}-{group.name}-{index:03}.jsonl")
        except OSError as error:  # the session itself has been read
            self.lost.setdefault(str(self.samples), error.strerror or str(error))
        return session

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
            withheld = sample.status is Status.KNOWN_FAILURE and bool(sample.case.candidate)
            if sample.status not in {Status.PASSED, Status.PRUNED} and not withheld:
                self.failed.setdefault((sample.case.backend, sample.case.problem), sample)

    def start(self, group: Group, request: Request, folder: Path) -> subprocess.Popen[bytes]:
        """A process that answers the request."""
        file = replace(request, project=self._project).write(folder)
        environment = {**os.environ, "PYTEST_ADDOPTS": ""}
        if self._device == "cpu" and request.timed:
            environment = {**_BOUND, **_HUGE_PAGES, **environment}
        if group.first is not None:
            before = environment.get("PYTHONPATH")
            environment["PYTHONPATH"] = os.pathsep.join([str(group.first), *([before] if before else [])])
        with (folder / "log.txt").open("ab") as log:
            return subprocess.Popen(
                [group.python, "-m", "pytest_gemm.speed.worker", str(file)],
                cwd=self._project.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=() if request.socket is None else (request.socket,),
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
        more = len(spared.get(case_key(sample.case), ()))
        totals[backend] = alone + len(sample.ranking), others + more, cases + 1
    parts = []
    for backend, (alone, others, cases) in totals.items():
        count = f"{alone} of {alone + others}" if others else f"all {alone}"
        why = f"; the others took over {_FAR}x of the fastest when several processes were at it" if others else ""
        parts.append(f"{backend} timed {count} candidates of {units.plural(cases, 'case')} alone{why}")
    return ". ".join(parts)


class _Open:
    """A session under way, over as many processes as it takes."""

    def __init__(self, runner: Runner, group: Group, request: Request) -> None:
        self._runner = runner
        self._arm = group
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
        self._request = replace(self._request, cases=rest, peaks=part.peaks, socket=None)
        self._folder = self._runner.folder()
        self._process = self._runner.start(self._arm, self._request, self._folder)
        return False

    def result(self) -> Session:
        """All that it measured, as of one process."""
        first = self._parts[0]
        return replace(
            first, samples=(*self._all(), *self._crashed), seconds=time.perf_counter() - self._started, complete=True
        )

    def keep(self, path: Path) -> None:
        """Copy the readings; of a session that lost its process, what all of its processes wrote as one."""
        if len(self._files) == 1:
            shutil.copyfile(self._files[0], path)
            return
        whole = self.result()
        path.write_text(
            "".join([session_line(whole), *map(sample_line, whole.samples), end_line(whole.seconds)]), encoding="utf-8"
        )

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
        return Sample(CaseId(backend, line), self._request.device, Status.CRASHED, reason)

    def _log(self) -> str:
        try:
            text = (self._folder / "log.txt").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-30:])


class SessionFailed(Exception):
    """A session that measured nothing, with the end of its output; no case is the cause."""

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


def case_key(case: CaseId) -> str:
    """A case as reports name it."""
    return f"{case.backend} {case.problem}"


def named(keys: Iterable[CaseId]) -> list[Timed]:
    """Backend and problem of each case, once."""
    return list(dict.fromkeys((key.backend, key.problem) for key in keys))
