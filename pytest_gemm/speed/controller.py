"""Speed as a run sees it: fresh processes that time, one after the other, and the verdicts that follow from them.

What one process says, however often it times, is one observation.  So the run itself times nothing.  It starts
*sessions*: processes of :mod:`pytest_gemm.speed.worker`, each of which answers a request.  First several at
once that compile and judge, so that the compilers' caches are full and what is wrong is known; then one at a time that
measure, alone on the device as far as this program can see to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import shlex
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_gemm.case_id import CaseId
from pytest_gemm.machine import key as key_module
from pytest_gemm.outcome import Reason, Verdict
from pytest_gemm.run.terminal import Display
from pytest_gemm.speed.baseline import entry, record
from pytest_gemm.speed.baseline import store as store_module
from pytest_gemm.speed.data import Judgement, Peaks, Session, by_case
from pytest_gemm.speed.gate import decide, estimates, pairs, selection
from pytest_gemm.speed.gate import policy as policy_module
from pytest_gemm.speed.gate import stored as stored_module
from pytest_gemm.speed.group import Group, resolve
from pytest_gemm.speed.report import rows
from pytest_gemm.speed.request import Project
from pytest_gemm.speed.runner import Measured, Runner, SessionFailed, Timed, named, timed_apart

if TYPE_CHECKING:
    from pytest_gemm.config import GemmConfig, SpeedConfig


# -- a run ---------------------------------------------------------------------------------------------------


def measure(
    config: GemmConfig, cases: Collection[Timed], project: Project, display: Display, *, whole: bool
) -> list[Measured]:
    """Time the cases and come to verdicts, device by device.

    Args:
        config: of the run.
        cases: backend and problem line of each.
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
    for case in dict.fromkeys(cases):
        of_device.setdefault(config.device_of(config.registry[case[0]]), []).append(case)
    found = []
    with tempfile.TemporaryDirectory(prefix="pytest-gemm-") as name:
        scratch = Path(name)
        base = resolve(config.speed.against, scratch) if config.speed.against else None
        try:
            for device, those in of_device.items():
                with timed_apart(device, display, config.speed.wait):
                    found.append(_measure(config, those, project, display, device, base, scratch, whole=whole))
        except (SessionFailed, entry.BaselineError) as error:
            raise pytest.UsageError(f"speed: {error}") from None
    return found


def _measure(
    config: GemmConfig,
    cases: list[Timed],
    project: Project,
    display: Display,
    device: str,
    base: Group | None,
    scratch: Path,
    *,
    whole: bool,
) -> Measured:
    policy = policy_module.Policy.for_device(device)
    if (count := config.speed.sessions) and not config.speed.record:
        changed = {"screen_pairs": count} if base is not None else {"screen_sessions": count}
        policy = dataclasses.replace(policy, **changed)
    runner = Runner(config, project, display, device, scratch)
    hardware = key_module.hardware_key("cuda" if device == "cuda" else "cpu", config.speed.threads)
    made = Measured(device, hardware, record=project.recording)
    clock = _Clock(made.seconds)
    store = store_module.Store(config.speed.baselines, hardware)
    if base is None:  # a store that cannot be read is said before anything is measured
        made.stored = store.load_all(dict.fromkeys(backend for backend, _ in cases))
    try:
        head = Group("head")
        with clock("compile"):
            for group in (head, *([base] if base else [])):
                runner.compile(group, cases)
        made.notes += runner.notes
        if config.speed.record:
            made.mode = "record"
            with clock("record"):
                _sessions(runner, head, cases, config.speed.sessions or entry.SESSIONS, made, "recording")
            _record(config, store, made, policy)
            made.judgements = _with_every_case({}, made)
        elif base is not None:
            made.mode = "against"
            _against(runner, head, base, cases, policy, made, clock)
        else:
            made.mode = "baseline"
            _gate(runner, head, cases, policy, store, made, clock)
    except (KeyboardInterrupt, SessionFailed, entry.BaselineError):
        for line in _cut_short(config, runner, made, project):
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


def _cut_short(config: GemmConfig, runner: Runner, made: Measured, project: Project) -> list[str]:
    """What is left of a run that does not come to its end, and the command that records from it."""
    speed, done = config.speed, len(made.sessions)
    if not speed.record:
        kept = f"are in {speed.samples}" if speed.samples else "are not kept; --gemm-output=DIR keeps them"
        what, whose = ("session is", "its") if done == 1 else ("sessions are", "their")
        return [f"cut short on {made.device}: {done} {what} complete" + (f", {whose} samples {kept}" if done else "")]
    asked = speed.sessions or entry.SESSIONS
    first = f"the recording on {made.device} was cut short: {done} of {asked} sessions are complete"
    if not done:
        return [f"{first}, so there is nothing to record from"]
    folder = runner.samples
    words = [
        "pytest-gemm",
        "baseline",
        "record",
        str(folder),
        f"--sessions={min(done, asked)}",
    ]
    place = speed.baselines.absolute()
    if place != Path(project.folder).absolute() / "baselines":
        words.append(f"--baselines={place}")
    words += ["--force"] * speed.force
    return [f"{first}; their samples are in {folder}", f"to record from these: {shlex.join(words)}"]


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
    runner: Runner, group: Group, cases: Sequence[Timed], count: int, made: Measured, what: str
) -> list[Session]:
    fresh = []
    for number in range(1, count + 1):
        if not runner.left(cases):
            break
        session = runner.session(group, cases, len(made.sessions), f"{what}, session {number} of {count}")
        fresh.append(session)
        made.sessions.append(session)
    return fresh


def _pairs(
    runner: Runner, head: Group, base: Group, cases: Sequence[Timed], count: int, made: Measured, what: str
) -> tuple[list[Session], list[Session]]:
    """Sessions of both groups in alternation; who begins changes from pair to pair, so that a drift hits both alike."""
    fresh: dict[str, list[Session]] = {"head": [], "base": []}
    for number in range(1, count + 1):
        if not runner.left(cases):
            break
        index = len(made.sessions)
        groups = (base, head) if index % 2 == 0 else (head, base)
        for name, session in runner.pair(groups, cases, index, f"{what}, pair {number} of {count}").items():
            fresh[name].append(session)
        made.sessions += fresh["head"][-1:]
        made.base += fresh["base"][-1:]
    return fresh["base"], fresh["head"]


def _gate(
    runner: Runner,
    head: Group,
    cases: list[Timed],
    policy: policy_module.Policy,
    store: store_module.Store,
    made: Measured,
    clock: _Clock,
) -> None:
    runner.before = {key: line.selected for key, line in made.stored.items()}
    with clock("screen"):
        first = _sessions(runner, head, cases, policy.screen_sessions, made, "screening")
    if not first:
        return
    stored = record.stored(made.stored, first[0])
    screened = stored_module.screen(stored, estimates.readings(first), policy)
    more: list[Session] = []

    def look(cases: tuple[CaseId, ...], count: int, known: estimates.Screened, last: bool) -> dict[CaseId, Judgement]:
        with clock("confirm"):
            if not more:
                runner.select_again(head, set(cases).intersection(selection.changed(runner.before, first)))
            more.extend(_sessions(runner, head, named(cases), count - len(more), made, "confirming"))
        return stored_module.confirm(stored, _only(estimates.readings(more), cases), known, policy, last=last)

    judgements = decide.by_looks(screened, policy, policy.confirm_sessions, look)
    made.anchor = screened.anchor
    made.judgements = _with_every_case(selection.annotate(judgements, runner.before, made.sessions), made)
    if not made.stored:
        made.notes.append(str(store.no_baseline(made.record)))
    elif other := record.incomparable(made.stored, first[0]):
        made.notes.append(f"{len(other)} baselines were timed in another way and do not compare: record them again")


def _against(
    runner: Runner,
    head: Group,
    base: Group,
    cases: list[Timed],
    policy: policy_module.Policy,
    made: Measured,
    clock: _Clock,
) -> None:
    runner.before = runner.selected(base)
    with clock("screen"):
        first_base, first_head = _pairs(runner, head, base, cases, policy.screen_pairs, made, "screening")
    screened = pairs.screen(*estimates.pair_readings(first_base, first_head), policy)
    more: tuple[list[Session], list[Session]] = ([], [])

    def look(cases: tuple[CaseId, ...], count: int, known: estimates.Screened, last: bool) -> dict[CaseId, Judgement]:
        with clock("confirm"):
            if not more[0]:
                again = set(cases).intersection(selection.changed(runner.before, first_head))
                for side in (head, base):
                    runner.select_again(side, again)
                runner.before = runner.selected(base)
            fresh = _pairs(runner, head, base, named(cases), count - len(more[0]), made, "confirming")
        for group, some in zip(more, fresh, strict=True):
            group.extend(some)
        of_base, of_head = (_only(some, cases) for some in estimates.pair_readings(*more))
        return pairs.confirm(of_base, of_head, known, policy, last=last)

    judgements = decide.by_looks(screened, policy, policy.confirm_pairs, look)
    made.anchor = screened.anchor
    made.judgements = _with_every_case(selection.annotate(judgements, runner.before, made.sessions), made)


def _only(
    found: Mapping[CaseId, list[estimates.Reading]], cases: Collection[CaseId]
) -> dict[CaseId, list[estimates.Reading]]:
    return {case: found[case] for case in cases if case in found}


def _with_every_case(judgements: Mapping[CaseId, Judgement], made: Measured) -> dict[CaseId, Judgement]:
    """The judgements in the order of measurement; a timed case that the gate said nothing of has no baseline."""
    found = {}
    for key, samples in by_case(made.sessions).items():
        found[key] = judgements.get(key) or Judgement(
            key,
            Verdict.NO_BASELINE,
            Reason("no-baseline", "nothing is stored for it on this hardware"),
            seconds=samples[0].estimate,
            comparator_seconds=samples[0].comparator_estimate,
            sessions=len(samples),
        )
    return found


def _tidy(config: GemmConfig, store: store_module.Store, cases: Collection[Timed], made: Measured) -> None:
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
            f"{len(gone)} baselines are of no case of the suite ({names}): --gemm-record=prune drops them"
        )


def _record(config: GemmConfig, store: store_module.Store, made: Measured, policy: policy_module.Policy) -> None:
    """Store what was measured; a case that got slower only if it was accepted."""
    speed = config.speed
    if not made.sessions:
        return
    done, made.refused = record.record_sessions(
        store,
        made.sessions,
        policy,
        k=speed.sessions or entry.SESSIONS,
        force=speed.force,
    )
    if lines := done.lines():
        made.notes += [f"baselines in {store.place}:", *lines]
    made.stored = store.load_all({key.backend for key in by_case(made.sessions)})


def as_run(made: Measured, speed: SpeedConfig) -> rows.Run:
    """What the reports need to know of it, and of what fails the run."""
    policy = policy_module.Policy.for_device(made.device)
    mode: Any = made.mode if made.mode in {"baseline", "against"} else "none"
    inside = sum(sum(s.phases.values()) for session in (*made.sessions, *made.base) for s in session.samples)
    whole = sum(made.seconds.values())
    history = {key: tuple(rows.Past(*past) for past in line.history) for key, line in made.stored.items()}
    return rows.Run(
        judgements=tuple(made.judgements.values()),
        sessions=tuple(made.sessions),
        hardware=made.hardware,
        software=made.sessions[0].software if made.sessions else {},
        peaks=Peaks.of(made.sessions),
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


def offer(folder: Path, cases: Iterable[tuple[str, str, str]]) -> None:
    """A worker says which cases its tests want timed; all workers collect the same."""
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as file:
        json.dump(list(cases), file)
    os.replace(file.name, folder / _OFFER)


def offered(folder: Path) -> list[tuple[str, str, str]]:
    """What the first worker said."""
    path = folder / _OFFER
    return [(backend, line, test) for backend, line, test in json.loads(path.read_bytes())] if path.exists() else []


def share(folder: Path, measured: list[Measured]) -> None:
    """The process that measured leaves it for the workers, whose tests come later."""
    (folder / _SHARED).write_bytes(pickle.dumps(measured))


def shared(folder: Path) -> list[Measured]:
    """What was measured, in a worker."""
    path = folder / _SHARED
    measured: list[Measured] = pickle.loads(path.read_bytes()) if path.exists() else []
    return measured
