"""Speed as a run sees it: fresh processes that time, one after the other, and the verdicts that follow from them.

What one process measures, however often it times, is one observation.  So the run itself times nothing.  It starts
*sessions*: processes of :mod:`pytest_gemm.speed.worker`, each of which answers a request.  First several at
once that compile and judge, so that the compilers' caches are full and what is wrong is known; then one at a time that
measure, alone on the device as far as this program can see to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import shlex
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pytest_gemm.case_id import CaseId
from pytest_gemm.machine import key as key_module
from pytest_gemm.outcome import Reason, Verdict
from pytest_gemm.run.terminal import Display
from pytest_gemm.speed.baseline import entry, record
from pytest_gemm.speed.baseline import store as store_module
from pytest_gemm.speed.data import Judgement, Peaks, Session, by_case
from pytest_gemm.speed.gate import design, estimates, selection
from pytest_gemm.speed.gate import policy as policy_module
from pytest_gemm.speed.report import rows
from pytest_gemm.speed.request import Group, Project, resolve
from pytest_gemm.speed.runner import Measured, Runner, SessionFailed, Timed, timed, timed_apart

if TYPE_CHECKING:
    from pytest_gemm.config import GemmConfig, SpeedConfig


def measure(
    config: GemmConfig, cases: Mapping[Timed, str], project: Project, display: Display, *, whole: bool
) -> list[Measured]:
    """Time the cases and come to verdicts, device by device.

    Args:
        config: of the run.
        cases: name of the test function of each case.
        project: what the sessions load.
        display: for the progress.
        whole: the cases are all of a suite's, so that a baseline of another case is one that the suite no longer has.

    Raises:
        pytest.UsageError: when options contradict each other, the other environment or a baseline cannot be used, or
            no session can measure.
    """
    if config.speed.prune and not whole:
        raise pytest.UsageError(
            "--gemm-record=prune drops what the suite no longer has, so it needs the whole suite: give "
            "--gemm-level=exhaustive and nothing that selects a part of it, or drop single cases with "
            "pytest-gemm baseline prune"
        )
    of_device: dict[str, list[Timed]] = {}
    for case in cases:
        of_device.setdefault(config.device_of(config.registry[case[0]]), []).append(case)
    found = []
    with tempfile.TemporaryDirectory(prefix="pytest-gemm-") as name:
        scratch = Path(name)
        base = resolve(config.speed.against, scratch) if config.speed.against else None
        try:
            for device, those in of_device.items():
                with timed_apart(device, display, config.speed.wait):
                    runner = Runner(config, project, display, device, scratch, cases)
                    one = _Measurement(config, runner, device, those, base)
                    made = one.measure(display, project)
                    if whole:
                        one.tidy()
                    found.append(made)
                    count, seconds = len(made.sessions) + len(made.base), sum(made.seconds.values())
                    display.line(f"speed: {count} sessions on {device} in {seconds:.0f} s")
        except (SessionFailed, entry.BaselineError) as error:
            raise pytest.UsageError(f"speed: {error}") from None
    return found


class _Pairs(NamedTuple):
    """Sessions of the base, where there is one, and of the head."""

    base: list[Session]
    head: list[Session]


class _Measurement:
    """The cases of one device.

    Args:
        config: of the run.
        runner: starts the sessions.
        device: where the cases compute.
        cases: in the suite's order.
        base: the environment to compare with; ``None`` for stored baselines.
    """

    def __init__(
        self, config: GemmConfig, runner: Runner, device: str, cases: Sequence[Timed], base: Group | None
    ) -> None:
        hardware = key_module.hardware_key("cuda" if device == "cuda" else "cpu", config.speed.threads)
        self.policy = policy_module.Policy.for_device(device)
        self.made = Measured(device, hardware)
        self.store = store_module.Store(config.speed.baselines, hardware)
        self.groups = [Group("head"), *([base] if base else [])]
        self._config = config
        self._runner = runner
        self._cases = cases
        if (count := config.speed.sessions) and not config.speed.record:
            changed = {"screen_sessions": count} if base is None else {"screen_pairs": count}
            self.policy = dataclasses.replace(self.policy, **changed)

    def measure(self, display: Display, project: Project) -> Measured:
        """Compile, time and judge."""
        made, runner, speed = self.made, self._runner, self._config.speed
        made.record = project.recording
        made.mode = "record" if speed.record else "baseline" if len(self.groups) == 1 else "against"
        if made.mode != "against":  # a store that cannot be read is an error before anything is measured
            made.stored = self.store.load_all(dict.fromkeys(backend for backend, _ in self._cases))
        try:
            with self._clock("compile"):
                for group in self.groups:
                    runner.compile(group, self._cases)
            made.notes += runner.notes
            if speed.record:
                with self._clock("record"):
                    self._sessions(self._cases, speed.sessions or entry.SESSIONS, "recording", _Pairs([], []))
                self._record()
                made.judgements = self._with_every_case({})
            else:
                self.judge()
        except (KeyboardInterrupt, SessionFailed, entry.BaselineError):
            for line in self._cut_short(project):
                display.line(f"speed: {line}")
            raise
        made.failed, made.lost = runner.failed, runner.lost
        order = {case: place for place, case in enumerate(self._cases)}  # each session has another one
        made.judgements = dict(sorted(made.judgements.items(), key=lambda pair: order[timed(pair[0])]))
        return made

    def judge(self) -> None:
        """Screen, confirm what needs it, and come to verdicts."""
        made, runner, policy, is_paired = self.made, self._runner, self.policy, len(self.groups) > 1
        before = {key: line.selected for key, line in made.stored.items()}
        runner.before = runner.selected(self.groups[-1]) if is_paired else before
        first, more = _Pairs([], []), _Pairs([], [])
        with self._clock("screen"):
            count = policy.screen_pairs if is_paired else policy.screen_sessions
            self._sessions(self._cases, count, "screening", first)
        if not first.head:
            return
        how = design.Design(policy, None if is_paired else record.stored(made.stored, first.head[0]))

        def confirming(cases: tuple[CaseId, ...], count: int) -> tuple[design.Readings, design.Readings]:
            with self._clock("confirm"):
                if not more.head:
                    again = set(cases).intersection(selection.changed(runner.before, first.head))
                    for group in self.groups:
                        runner.select_again(group, again)
                    runner.before = runner.selected(self.groups[-1]) if is_paired else before
                wanted = list(dict.fromkeys(map(timed, cases)))
                self._sessions(wanted, count - len(more.head), "confirming", more)
            return estimates.pair_readings(*more)

        screened = how.screen(*estimates.pair_readings(*first))
        judgements = how.confirm(screened, confirming)
        made.anchor = screened.anchor
        made.judgements = self._with_every_case(selection.annotate(judgements, runner.before, made.sessions))
        if is_paired:
            return
        if not made.stored:
            made.notes.append(str(self.store.no_baseline(made.record)))
        elif other := record.incomparable(made.stored, first.head[0]):
            made.notes.append(f"{len(other)} baselines were timed in another way and do not compare: record them again")

    def tidy(self) -> None:
        """Report the baselines of cases that the suite no longer has, or drop them."""
        made = self.made
        gone = [key for key in made.stored if timed(key) not in frozenset(self._cases)]
        if gone and self._config.speed.prune:
            dropped = self.store.prune(made.stored.keys() - set(gone), {key.backend for key in gone})
            made.notes += [f"pruned {key}" for key in dropped]
        elif gone:
            names = ", ".join(map(str, gone[:3])) + (f" and {len(gone) - 3} more" if len(gone) > 3 else "")
            made.notes.append(
                f"{len(gone)} baselines are of no case of the suite ({names}): --gemm-record=prune drops them"
            )

    def _sessions(self, cases: Sequence[Timed], count: int, what: str, into: _Pairs) -> None:
        """Time the cases in ``count`` sessions of each group.

        Which group begins changes from pair to pair, so that a drift hits both alike.
        """
        made, unit = self.made, "session" if len(self.groups) == 1 else "pair"
        for number in range(1, count + 1):
            if not self._runner.left(cases):
                break
            index = len(made.sessions)
            groups = self.groups[:: 1 if index % 2 else -1]
            found = self._runner.sessions(groups, cases, index, f"{what}, {unit} {number} of {count}")
            for name, sessions, these in (("base", made.base, into.base), ("head", made.sessions, into.head)):
                if name in found:
                    sessions.append(found[name])
                    these.append(found[name])

    def _with_every_case(self, judgements: Mapping[CaseId, Judgement]) -> dict[CaseId, Judgement]:
        """The judgements in the order of measurement; a timed case without one has no baseline."""
        reason = Reason("no-baseline", "nothing is stored for it on this hardware")
        found = {}
        for key, samples in by_case(self.made.sessions).items():
            found[key] = judgements.get(key) or Judgement(
                key,
                Verdict.NO_BASELINE,
                reason,
                seconds=samples[0].estimate,
                comparator_seconds=samples[0].comparator_estimate,
                sessions=len(samples),
            )
        return found

    def _record(self) -> None:
        """Store what was measured; a case that got slower only if it was accepted."""
        made, speed = self.made, self._config.speed
        if not made.sessions:
            return
        k = speed.sessions or entry.SESSIONS
        done, made.refused = record.record_sessions(self.store, made.sessions, self.policy, k=k, force=speed.force)
        if lines := done.lines():
            made.notes += [f"baselines in {self.store.place}:", *lines]
        made.stored = self.store.load_all({key.backend for key in by_case(made.sessions)})

    def _cut_short(self, project: Project) -> list[str]:
        """What is left of a run that does not come to its end, and the command that records from it."""
        speed, device, done = self._config.speed, self.made.device, len(self.made.sessions)
        if not speed.record:
            kept = f"are in {speed.samples}" if speed.samples else "are not kept; --gemm-output=DIR keeps them"
            what, whose = ("session is", "its") if done == 1 else ("sessions are", "their")
            return [f"cut short on {device}: {done} {what} complete" + (f", {whose} samples {kept}" if done else "")]
        asked, folder, place = speed.sessions or entry.SESSIONS, self._runner.samples, speed.baselines.absolute()
        first = f"the recording on {device} was cut short: {done} of {asked} sessions are complete"
        if not done:
            return [f"{first}, so there is nothing to record from"]
        words = ["pytest-gemm", "baseline", "record", str(folder), f"--sessions={min(done, asked)}"]
        if place != Path(project.folder).absolute() / "baselines":
            words.append(f"--baselines={place}")
        words += ["--force"] * speed.force
        return [f"{first}; their samples are in {folder}", f"to record from these: {shlex.join(words)}"]

    @contextlib.contextmanager
    def _clock(self, phase: str) -> Iterator[None]:
        """Adds up the seconds of a phase."""
        started, seconds = time.perf_counter(), self.made.seconds
        yield
        seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - started


def as_run(made: Measured, speed: SpeedConfig) -> rows.Run:
    """What the reports need to know of it, and of what fails the run."""
    mode: Any = made.mode if made.mode in {"baseline", "against"} else "none"
    inside = sum(sum(s.phases.values()) for session in (*made.sessions, *made.base) for s in session.samples)
    whole = sum(made.seconds.values())
    return rows.Run(
        judgements=tuple(made.judgements.values()),
        sessions=tuple(made.sessions),
        hardware=made.hardware,
        software=made.sessions[0].software if made.sessions else {},
        peaks=Peaks.of(made.sessions),
        mode=mode,
        anchor=made.anchor,
        notes=tuple(made.notes),
        history={key: tuple(rows.Past(*past) for past in line.history) for key, line in made.stored.items()},
        seconds=whole,
        harness_seconds=max(0.0, whole - made.seconds.get("compile", 0.0) - inside),
        record=made.record,
        delta=policy_module.Policy.for_device(made.device).delta,
        fatal=speed.fatal,
        undecided_share=speed.undecided_share if speed.gating else 1.0,
    )


# -- between the processes of xdist ----------------------------------------------------------------------------


def share(folder: Path, name: str, value: object) -> None:
    """Leave a value for the other processes of the run: the cases to time, or what was measured."""
    with tempfile.NamedTemporaryFile("wb", dir=folder, delete=False) as file:
        pickle.dump(value, file)
    os.replace(file.name, folder / name)


def shared(folder: Path, name: str) -> Collection[Any]:
    """The value that another process has left under the name; () where none has."""
    path = folder / name
    found: Collection[Any] = pickle.loads(path.read_bytes()) if path.exists() else ()
    return found
