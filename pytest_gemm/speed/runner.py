"""Processes that time, started one after another or side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import signal
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import pytest
from msgspec.structs import replace

from pytest_gemm.api.request import Capability, honours
from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Reason, Status
from pytest_gemm.machine import gpus, processor
from pytest_gemm.machine.environment import THIS
from pytest_gemm.run.progress import Display
from pytest_gemm.speed.baseline import entry
from pytest_gemm.speed.data import Peaks, Sample, Session, SessionError, read_session, session_text
from pytest_gemm.speed.request import LOST, NOW, REQUEST, SESSION, UNWRITTEN, Group, Project, Request, TimedCase
from pytest_gemm.storage import cache, files

if TYPE_CHECKING:
    from pytest_gemm.config.config import GemmConfig


# Fewer cases than this are compiled by the first session itself.
_WORTH_WHILE: Final = 4
# A session that loses its process goes on in another one; a run does not restart them without end.
_RESTARTS: Final = 20

# OpenMP's threads stay on the cores that they begin on: unbound, both threads of a run have been seen on one core.
_BOUND: Final = {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}
# Large pages where the system has them: which small pages a process gets, and so what falls on the same lines of a
# cache, is chance, and the same in all of its readings.  The first is PyTorch's, the second the C library's.
_HUGE_PAGES: Final = {"THP_MEM_ALLOC_ENABLE": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


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
            # Timing beside another run would give estimates of both: going on without the lock is no choice.
            raise pytest.UsageError(
                f"speed: {error}: another run is timing on {device}; wait until it ends or end it, "
                "or raise --gemm-set=speed.wait (seconds, 0: without a limit)"
            ) from None
        except OSError as error:
            raise pytest.UsageError(f"speed: the lock of {device} cannot be taken: {error}") from None
        yield


@dataclasses.dataclass
class Runner:
    """Starts sessions and reads what they leave.

    Attributes:
        config: of the run.
        project: what the sessions load.
        display: for the progress.
        device: where all cases compute.
        scratch: for the folders of the sessions.
        tests: name of the test function of each case.
        failed: of each case that failed, the sample with the reason.
        lost: see :class:`rows.Run`.
        selected: candidates that the backends which select by timing have selected, by group and case.
        peaks: of the machine, once a session has measured them.
        samples: folder that keeps the sessions' files.
        commit: of the head.
    """

    config: GemmConfig
    project: Project
    display: Display
    device: str
    scratch: Path
    tests: Mapping[CaseId, str] = dataclasses.field(default_factory=dict)
    failed: dict[CaseId, Sample] = dataclasses.field(default_factory=dict)
    lost: dict[str, str] = dataclasses.field(default_factory=dict)
    selected: dict[str, dict[CaseId, str]] = dataclasses.field(default_factory=lambda: defaultdict(dict))
    peaks: Peaks | None = None

    def __post_init__(self) -> None:
        self.samples = self.config.speed.samples or self.scratch / f"samples-{self.device}"
        speed, samples = self.config.speed, self.samples
        try:
            if speed.record:
                sessions = speed.sessions or entry.SESSIONS
                cache.keep_recording(
                    cache.Recording(samples=samples, baselines=speed.baselines, sessions=sessions, force=speed.force)
                )
            samples.mkdir(parents=True, exist_ok=True)
            for earlier in samples.glob(f"{self.device}-*.jsonl"):  # of another run
                earlier.unlink()
        except OSError as error:
            self.lost[str(samples)] = error.strerror or str(error)
        self.commit = _commit(self.config.speed.root)
        self._count = itertools.count(1)

    def compile(self, group: Group, cases: Sequence[CaseId]) -> None:
        """Have several processes compile and judge the cases at once; what fails needs no timing.

        Backends that select a candidate by timing do it here, in one process and alone on the device, and all sessions
        time that candidate: an estimate is then of one kernel, and the selection is reported once.
        """
        jobs = min(self.config.jobs, -(-len(cases) // _WORTH_WHILE))
        # On a CPU Inductor's own rule selects; whether anything was timed shows once it is compiled.
        registry, on_device = self.config.registry, self.device != "cpu"
        tuned = {case for case in cases if on_device and honours(registry[case.backend], Capability.SELECTION)}
        if jobs > 1:
            crowded = self._compile(group, cases, jobs, "compiling and judging")
            tuned = {sample.case.whole for sample in crowded if sample.ranking}
        if self.config.wanted_candidates in {"", "winner"} and (
            todo := [case for case in self.left(cases) if case in tuned]
        ):
            self._select(group, todo)

    def _select(self, group: Group, cases: Sequence[CaseId]) -> None:
        """Have backends select their candidates, one case after the other."""
        for sample in self._compile(group, cases, 1, "selecting candidates for"):
            if sample.ranking and sample.selected:
                self.selected[group.name][sample.case.whole] = sample.selected[0]

    def _compile(self, group: Group, cases: Sequence[CaseId], jobs: int, what: str) -> list[Sample]:
        # Dealt out backend by backend: one has much more to compile than another, and each process gets some of both.
        dealt = sorted(cases, key=attrgetter("backend")) if jobs > 1 else cases
        wanted = [TimedCase(case, self.tests.get(case, "")) for case in dealt]
        requests = [Request(tuple(wanted[i::jobs]), self.device, timed=False) for i in range(jobs)]

        def said(processes: Sequence[_Open]) -> str:
            done = sum(one.done for one in processes)
            return f"{what} {done} of {len(cases)} cases on {group.environment.label}"

        samples = [s for one in self._run([(group, one) for one in requests], said) for s in one.result().samples]
        self.note_failures(samples)
        return samples

    def _run(
        self,
        wanted: Iterable[tuple[Group, Request]],
        said: Callable[[Sequence[_Open]], str],
        ends: Sequence[socket.socket] = (),
    ) -> Sequence[_Open]:
        """Have these requests answered at the same time; ``ends`` are the sockets that only the processes may keep."""
        with contextlib.ExitStack() as stack:
            try:
                processes = [stack.enter_context(_Open(self, group, request)) for group, request in wanted]
            finally:
                for end in ends:
                    end.close()
            while sum(not one.poll() for one in processes):  # all of them are polled each time
                self.display.progress(f"speed: {said(processes)}")
                time.sleep(0.2)
        return processes

    def left(self, cases: Iterable[CaseId]) -> list[CaseId]:
        """The cases that have not failed."""
        return [case for case in cases if case not in self.failed]

    def select_again(self, group: Group, cases: Iterable[CaseId]) -> None:
        """Have the candidates of these cases selected anew, where a backend selects by timing.

        A selection is one observation as well: what a confirmation times is to have been selected twice.
        """
        selected = self.selected[group.name].keys() & {case.whole for case in cases}
        if todo := self.left(sorted(selected)):
            self.compile(group, todo)

    def sessions(self, groups: Sequence[Group], cases: Sequence[CaseId], index: int, label: str) -> dict[str, Session]:
        """A session of each group over the cases that have not failed; the first group begins.

        On a CPU two processes live at once and time in alternation, a window each, so that they meet the same
        neighbours.  A GPU has none, and two processes would share its memory: there one session follows the other.
        """
        if len(groups) > 1 and self.device != "cpu":
            found = [self.sessions([group], cases, index, f"{label}, {group.environment.label}") for group in groups]
            return {name: session for one in found for name, session in one.items()}
        ends = socket.socketpair() if len(groups) > 1 else ()
        order, wanted = self._shuffled(self.left(cases), index), []
        for group, end in itertools.zip_longest(groups, ends):
            selected = self.selected[group.name]
            request = Request(
                tuple(TimedCase(case, self.tests.get(case, ""), selected.get(case, "")) for case in order),
                self.device,
                group.name,
                index,
                peaks=self.peaks,
                commit=self.commit if group.name == "head" else "",
                socket=None if end is None else end.fileno(),
                begins=group is groups[0],
            )
            wanted.append((group, request))

        def said(processes: Sequence[_Open]) -> str:
            return f"{label}, {next((now for one in processes if (now := one.now)), 'starting')}"

        processes = self._run(wanted, said, ends)
        return {group.name: self._ended(one) for group, one in zip(groups, processes, strict=True)}

    def _ended(self, one: _Open) -> Session:
        session = one.result()
        if not session.peaks.disturbed:  # the next session tries again otherwise
            self.peaks = session.peaks
        self.note_failures(session.samples)
        self.write_session(session)
        return session

    def write_session(self, session: Session) -> None:
        """Keep the file of a session that has been read."""
        file = self.samples / f"{self.device}-{session.group}-{session.index:03}.jsonl"
        try:
            files.replace(file, session_text(session).encode(), durable=False)
        except OSError as error:
            self.lost.setdefault(str(self.samples), error.strerror or str(error))

    def _shuffled(self, cases: Sequence[CaseId], index: int) -> list[CaseId]:
        """Another order each time, so that no case always comes after the same one.

        The backends of a problem stay together: they share its operands and its reference.
        """
        problems: dict[str, list[CaseId]] = {}
        for case in cases:
            problems.setdefault(case.problem, []).append(case)
        chance = random.Random(f"{self.config.seed} {index}")
        groups = chance.sample(list(problems.values()), len(problems))
        return [case for group in groups for case in chance.sample(group, len(group))]

    def note_failures(self, samples: Iterable[Sample]) -> None:
        """Time the cases that failed no more, and keep the first failure of each."""
        for sample in samples:
            # A candidate that was pruned, or that the ledger forbids to run, is none of the others' faults.
            withheld = sample.status is Status.KNOWN_FAILURE and bool(sample.case.candidate)
            if sample.status not in {Status.PASSED, Status.PRUNED} and not withheld:
                self.failed.setdefault(sample.case.whole, sample)

    def start(self, group: Group, request: Request) -> tuple[subprocess.Popen[bytes], Path]:
        """A process that answers the request, and the folder of its answer."""
        folder = self.scratch / f"{self.device}-{next(self._count):03}"
        folder.mkdir()
        other = "" if group.environment == THIS else group.environment.folder
        (folder / REQUEST).write_bytes(msgspec.json.encode(replace(request, project=self.project, environment=other)))
        environment = {**(processor.environment_as_found() if request.timed else os.environ), "PYTEST_ADDOPTS": ""}
        if self.device == "cpu" and request.timed:
            environment = {**_BOUND, **_HUGE_PAGES, **environment}
        with (folder / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                [group.environment.python, "-m", "pytest_gemm.speed.worker", str(folder / REQUEST)],
                cwd=self.project.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=() if request.socket is None else (request.socket,),
            )
        return process, folder


class _Open:
    """A session under way, over as many processes as it takes."""

    def __init__(self, runner: Runner, group: Group, request: Request) -> None:
        self._runner = runner
        self._group = group
        self._request = request
        self._parts: list[Session] = []
        self._samples: list[Sample] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._started = time.perf_counter()

    def __enter__(self) -> _Open:
        self._process, self._folder = self._runner.start(self._group, self._request)
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
        now = self._text(SESSION).count('{"sample"') if self._process is not None else 0
        return len(self._samples) + now

    @property
    def now(self) -> str:
        """The case at work; "" between two cases."""
        return self._text(NOW)

    def _text(self, name: str) -> str:
        """What is in a file of the process; "" where there is none."""
        try:
            return (self._folder / name).read_text(encoding="utf-8", errors="replace")
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
        self._samples += part.samples
        if part.complete:
            return True
        if status != LOST:
            self._samples.append(self._culprit(status))
        seen = {sample.case.whole for sample in self._samples}
        rest = tuple(case for case in self._request.cases if case.case not in seen)
        if not rest:
            return True
        if len(self._parts) > _RESTARTS:
            raise self._failed(f"{_RESTARTS} processes died one after the other while they timed; the last log:")
        # The other session of a pair has gone on alone.
        self._request = replace(self._request, cases=rest, peaks=part.peaks, socket=None)
        self._process, self._folder = self._runner.start(self._group, self._request)
        return False

    def result(self) -> Session:
        """All that it measured, as of one process."""
        seconds = time.perf_counter() - self._started
        return replace(self._parts[0], samples=tuple(self._samples), seconds=seconds, complete=True)

    def _read(self, status: int) -> Session:
        file = self._folder / SESSION
        if not file.exists():
            raise self._failed(f"a session ended with status {status} before it had begun; its log:")
        if unwritten := self._text(UNWRITTEN):
            self._runner.lost |= msgspec.json.decode(unwritten)
        try:
            part = read_session(file)
        except SessionError as error:
            raise self._failed(str(error)) from None
        if not part.complete and status != LOST and not self.now:
            raise self._failed(f"a session ended with status {status} between two cases; its log:")
        return part

    def _culprit(self, status: int) -> Sample:
        backend, _, line = self.now.partition(" ")
        how = f"signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"status {status}"
        reason = Reason("process-died", f"the process that timed it ended with {how}")
        return Sample(CaseId(backend, line), self._request.device, Status.CRASHED, reason)

    def _failed(self, text: str) -> SessionFailed:
        return SessionFailed("\n".join([text, *self._text("log.txt").splitlines()[-30:]]))


class SessionFailed(Exception):
    """A session that measured nothing, with the end of its output; no case is the cause."""


def _commit(root: Path) -> str:
    """The commit of the tree around ``root``, with ``+dirty`` when a tracked file differs; "" outside of git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError):
            return ""
        return done.stdout.strip()

    head = git("rev-parse", "--short=12", "HEAD")
    # Baselines may change while they are recorded; they do not change what is measured.
    changed = head and git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)baselines")
    return f"{head}+dirty" if changed else head
