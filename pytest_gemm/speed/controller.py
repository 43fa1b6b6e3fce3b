"""Speed as a run sees it: fresh processes that time, one after the other, and the verdicts that follow from them.

What one process measures, however often it times, is one observation.  So the run itself times nothing.  It starts
*sessions*: processes of :mod:`pytest_gemm.speed.worker`, each of which answers a request.  First several at
once that compile and judge, so that the compilers' caches are full and what is wrong is known; then one at a time that
measure, alone on the device as far as this program can see to it.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.units import plural
from pytest_gemm.machine import key as key_module
from pytest_gemm.machine import software
from pytest_gemm.machine.environment import resolve
from pytest_gemm.machine.key import Device
from pytest_gemm.run.progress import Display
from pytest_gemm.speed import roofline
from pytest_gemm.speed.baseline import busy, entry, record
from pytest_gemm.speed.baseline import store as store_module
from pytest_gemm.speed.data import Judgement, Peaks, Session, by_case
from pytest_gemm.speed.gate import decide, design, estimates, selection
from pytest_gemm.speed.gate import policy as policy_module
from pytest_gemm.speed.report.rows import Run
from pytest_gemm.speed.request import Group, Project
from pytest_gemm.speed.runner import Runner, SessionFailed, timed_apart

if TYPE_CHECKING:
    from pytest_gemm.config.config import GemmConfig


def edited(base: Sequence[Session], head: Sequence[Session]) -> list[str]:
    """A note on the files of ``torch/_inductor`` that are others in the base environment; empty where none are."""
    names = software.differing(base[0].inductor, head[0].inductor) if base and head else ""
    return [f"files of torch/_inductor that differ between base and head: {names}"] if names else []


def measure(config: GemmConfig, cases: Mapping[CaseId, str], project: Project, display: Display) -> list[Run]:
    """Time the cases and come to verdicts, device by device.

    Args:
        config: of the run.
        cases: name of the test function of each case.
        project: what the sessions load.
        display: for the progress.

    Raises:
        pytest.UsageError: when options contradict each other, the other environment or a baseline cannot be used, or
            no session can measure.
    """
    of_device: dict[str, list[CaseId]] = {}
    for case in cases:
        of_device.setdefault(config.device_of(config.registry[case.backend]), []).append(case)
    found = []
    with tempfile.TemporaryDirectory(prefix="pytest-gemm-") as name:
        scratch = Path(name)
        groups = [Group("head")]
        try:
            if config.speed.against:
                groups.append(Group("base", resolve(config.speed.against)))
        except ValueError as error:
            raise pytest.UsageError(f"--gemm-against={config.speed.against}: {error}") from None
        try:
            for device, those in of_device.items():
                with timed_apart(device, display, config.speed.wait):
                    made = _Measurement(
                        Runner(config, project, display, device, scratch, cases), those, groups
                    ).measure()
                    found.append(made)
                    count = len(made.sessions) + len(made.base)
                    display.line(f"speed: {count} sessions on {device} in {made.seconds:.0f} s")
        except (SessionFailed, entry.BaselineError) as error:
            raise pytest.UsageError(f"speed: {error}") from None
        except OSError as error:  # of a file of the sessions
            raise pytest.UsageError(f"speed: {error.filename or scratch}: {error.strerror}") from None
    return found


class _Measurement:
    """The cases of one device.

    Args:
        runner: starts the sessions.
        cases: in the suite's order.
        groups: the environment that is timed, and the one to compare with where it is no stored baseline.
    """

    def __init__(self, runner: Runner, cases: Sequence[CaseId], groups: Sequence[Group]) -> None:
        speed = runner.config.speed
        self._device: Device = "cuda" if runner.device == "cuda" else "cpu"
        hardware = key_module.hardware_key(self._device, speed.threads)
        self.policy = policy_module.Policy.for_device(runner.device)
        self.made = Run(
            device=runner.device,
            hardware=hardware,
            mode="none" if speed.record else "against" if len(groups) > 1 else "baseline",
            delta=self.policy.delta,
            base_label=groups[-1].environment.label if len(groups) > 1 else "",
            fatal=speed.fatal,
            undecided_share=speed.undecided_share if speed.gating else 1.0,
            record=runner.project.recording,
        )
        self.store = store_module.Store(speed.baselines, hardware)
        self.groups = groups
        self._runner = runner
        self._cases = cases
        if speed.sessions and not speed.record:
            changed = {"screen_sessions": speed.sessions} if len(groups) == 1 else {"screen_pairs": speed.sessions}
            self.policy = dataclasses.replace(self.policy, **changed)
        self._recorded = speed.sessions or entry.SESSIONS  # sessions of a recording

    def measure(self) -> Run:
        """Compile, time and judge."""
        started = time.perf_counter()
        made, runner, speed = self.made, self._runner, self._runner.config.speed
        if made.mode != "against":  # a store that cannot be read is an error before anything is measured
            made.stored = self.store.load_all(dict.fromkeys(case.backend for case in self._cases))
            if speed.record:
                self.store.check()
        try:
            for group in self.groups:
                runner.compile(group, self._cases)
            if speed.record:
                self._sessions(self._cases, self._recorded, "recording")
                self._record()
                made.judgements = self._with_every_case({})
            else:
                self.judge()
        except (KeyboardInterrupt, SessionFailed, entry.BaselineError):
            if speed.record and any(map(busy.is_good, made.sessions)):
                done, all_of = len(made.sessions), self._recorded
                runner.display.line(f"speed: the recording was cut short: {done} of {all_of} sessions are complete")
                runner.display.line(f"speed: to record from these: pytest-gemm baseline record --sessions={done}")
            raise
        order = {case: place for place, case in enumerate(self._cases)}  # each session has another one
        made.judgements = sorted(made.judgements, key=lambda judgement: order[judgement.case.whole])
        made.failed, made.lost = runner.failed, runner.lost
        if names := sorted({name for session in made.base for name in session.shared}):
            made.notes.append(
                f"{made.base_label} has no {', '.join(names)}: both sides imported the project's own, "
                "so a change of that is not measured"
            )
        made.notes += edited(made.base, made.sessions)
        made.software = made.sessions[0].software if made.sessions else {}
        made.peaks = Peaks.of(made.sessions)
        if any(sample.least is None for samples in by_case(made.sessions).values() for sample in samples):
            made.notes.append(
                "no ceiling is known for this machine: an impossible time is told by the measured roofline alone"
            )
        made.seconds = time.perf_counter() - started
        return made

    def judge(self) -> None:
        """Screen, confirm what needs it, and come to verdicts."""
        made, runner, policy, is_paired = self.made, self._runner, self.policy, len(self.groups) > 1

        def before() -> dict[CaseId, tuple[str, ...]]:
            """What was selected for the baselines, or in the base environment."""
            if not is_paired:
                return {case: one.selected for case, one in made.stored.items()}
            return {case: (name,) for case, name in runner.selected["base"].items()}

        self._sessions(self._cases, (policy.pairs if is_paired else policy.sessions)[0], "screening")
        if not (first := len(made.sessions)):
            return
        how = design.Design(policy, None if is_paired else record.stored(made.stored, made.sessions[0]))

        def confirming(cases: tuple[CaseId, ...], count: int) -> tuple[estimates.Readings, estimates.Readings]:
            if not (done := len(made.sessions) - first):
                again = selection.changes(before(), made.sessions).keys() & cases
                for group in self.groups:
                    runner.select_again(group, again)
            wanted = list(dict.fromkeys(case.whole for case in cases))
            self._sessions(wanted, count - done, "confirming")
            return estimates.pair_readings(made.base[first:], made.sessions[first:])

        screened = how.screen(*estimates.pair_readings(made.base, made.sessions))
        judgements = how.confirm(screened, confirming)
        made.anchor = screened.anchor
        selected = selection.changes(before(), made.sessions)
        made.judgements = [
            dataclasses.replace(one, selection=selected.get(one.case, "")) for one in self._with_every_case(judgements)
        ]
        if is_paired:
            return
        if not made.stored:
            made.notes.append(str(self.store.no_baseline(made.record)))
        elif other := sum(one.contract != made.sessions[0].contract for one in made.stored.values()):
            made.notes.append(f"{other} baselines were timed in another way and do not compare: record them again")

    def _sessions(self, cases: Sequence[CaseId], count: int, what: str) -> None:
        """Time the cases in ``count`` sessions of each group.

        Which group begins changes from pair to pair, so that a drift hits both alike.  A recording ends on a machine
        that stays busy.
        """
        unit = "session" if len(self.groups) == 1 else "pair"
        speed, made = self._runner.config.speed, self.made
        for number in range(1, count + 1):
            if not self._runner.left(cases):
                break
            index = len(made.sessions)
            groups = self.groups[:: 1 if index % 2 else -1]
            found = self._runner.sessions(groups, cases, index, f"{what}, {unit} {number} of {count}")
            for name, session in found.items():
                (made.base if name == "base" else made.sessions).append(session)
            if speed.record and not speed.force and busy.is_hopeless(made.sessions):
                raise SessionFailed(
                    f"--gemm-record ended after {plural(len(made.sessions), 'session')} of {self._recorded}: the "
                    "machine is busy, and the last ones were disturbed; end what else computes here and record again, "
                    "or give --gemm-record=force"
                )
        made.sessions = roofline.without_impossible(made.sessions)
        for session in made.sessions:
            self._runner.note_failures(session.samples)

    def _with_every_case(self, judgements: Mapping[CaseId, Judgement]) -> list[Judgement]:
        """The judgements on the timed cases; one without a judgement is compared with nothing."""
        timed = estimates.readings(self.made.sessions).items()
        return [judgements.get(case) or decide.no_baseline(case, some, "this run records") for case, some in timed]

    def _record(self) -> None:
        """Store what was measured; a case that got slower only if it was accepted."""
        made, force, head = self.made, self._runner.config.speed.force, self.made.sessions
        if not head:
            return
        done, made.refused = record.record_sessions(self.store, head, self.policy, k=self._recorded, force=force)
        if done:
            made.notes += [f"baselines in {self.store.place}:", *map(str, done)]
        made.stored = self.store.load_all({key.backend for key in by_case(head)})
