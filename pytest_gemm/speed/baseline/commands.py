"""The command for baselines: record, accept."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.text import show
from pytest_gemm.speed import roofline
from pytest_gemm.speed.baseline.entry import SESSIONS, BaselineError
from pytest_gemm.speed.baseline.record import got_slower, record_sessions
from pytest_gemm.speed.baseline.store import Store, names
from pytest_gemm.speed.data import Session, read_session
from pytest_gemm.speed.gate.policy import Policy
from pytest_gemm.storage import cache


def _record(given: argparse.Namespace) -> list[str]:
    """Record from sessions that a run has kept: one that was cut short, or that ran where the store is not.

    With names of cases only these are recorded, although they got slower.

    Raises:
        BaselineError: when a name is of no case that got slower.
    """
    terms = _terms(given)
    samples, folder, count, force = terms.samples, terms.baselines, terms.sessions, terms.force
    whole, lines = _complete_sessions(samples)
    of_hardware: dict[str, list[Session]] = {}  # a run may time on the CPU and on a GPU
    for one in whole:
        of_hardware.setdefault(one.hardware, []).append(one)
    parts = []
    for hardware, some in of_hardware.items():
        device = next((sample.device for one in some for sample in one.samples), "cpu")
        parts.append((Store(folder, hardware), some, Policy.for_device(device)))
    slower: list[CaseId] = []
    if given.cases:
        slower = [case for store, some, policy in parts for case in got_slower(store.load_all(), some, policy)]
    for pattern in given.cases:
        if not any(names(pattern, case) for case in slower):
            waiting = f"accept one of: {', '.join(map(str, slower))}" if slower else "record it with --gemm-record"
            text = f"no case {pattern!r} of {samples} is slower than its baseline, so that it could be accepted"
            raise BaselineError(folder, 0, text, waiting)
    for store, some, policy in parts:
        done, refused = record_sessions(
            store, some, policy, k=count, force=force, accept=given.cases, reason=given.reason
        )
        if given.cases and not (done or refused):
            continue
        is_stored = any(one.kind != "refused" for one in done)
        lines.append(f"baselines in {store.place}:" if is_stored else f"nothing was recorded in {store.place}:")
        # What a run calls --gemm-record=force is --force here.
        others = [why for case, why in refused.items() if case not in {one.new.case for one in done}]
        told = (*map(str, done), *dict.fromkeys(others))
        lines += [line.replace("--gemm-record=force", "--force") for line in told]
        given.status |= bool(refused) or not is_stored
    return lines


def _terms(given: argparse.Namespace) -> cache.Recording:
    """The samples, the store, how many sessions, and whether by force: as given, or else as the last recording has it.

    A recording becomes the last one, so that the command that it prints accepts from it.
    """
    known = cache.last_recording() if given.samples is None else None
    known = known or cache.Recording(
        samples=cache.own_recording(), baselines=Path("baselines"), sessions=SESSIONS, force=False
    )
    terms = cache.Recording(
        samples=given.samples or known.samples,
        baselines=given.baselines or known.baselines,
        sessions=given.sessions or known.sessions,
        force=given.force or known.force,
    )
    if not given.cases:
        with contextlib.suppress(OSError):
            cache.keep_recording(terms)
    return terms


def _complete_sessions(folder: Path) -> tuple[list[Session], list[str]]:
    """The sessions of a folder that came to their end, and a line for each of the others.

    Raises:
        BaselineError: when none of them timed anything.
    """
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        remedy = "record first, or name the samples folder of a run's --gemm-output"
        raise BaselineError(folder, 0, "holds no sessions (*.jsonl)", remedy)
    read = {file: read_session(file) for file in files}
    lines = [f"{file.name} did not come to its end and is left out" for file, one in read.items() if not one.complete]
    whole = roofline.without_impossible([one for one in read.values() if one.complete])
    if not any(sample.is_timed for one in whole for sample in one.samples):
        raise BaselineError(folder, 0, "holds no session that timed anything", "see why the run ended")
    return whole, lines


def run(given: argparse.Namespace) -> int:
    """Run one task; returns 1 when a case was not recorded, 0 otherwise."""
    if given.sessions is not None and given.sessions < 1:
        raise ValueError(f"--sessions={given.sessions}: give 1 or more")
    given.status = 0
    if given.task == "record":
        given.cases, given.reason = (), ""
    show("\n".join(_record(given)) + "\n")
    return int(given.status)
