"""The command for baselines: show, diff, prune, record, accept."""

from __future__ import annotations

import argparse
import contextlib
import operator
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.text import did_you_mean, show, table
from pytest_gemm.speed import roofline
from pytest_gemm.speed.baseline.entry import RESTORE, SESSIONS, Baseline, BaselineError, parse
from pytest_gemm.speed.baseline.record import got_slower, record_sessions
from pytest_gemm.speed.baseline.store import NAME, SUFFIX, Store, hardware_keys, names, percent, time_text
from pytest_gemm.speed.data import Session, read_session
from pytest_gemm.speed.gate.policy import Policy
from pytest_gemm.storage import cache

# -- comparing two states of the store -----------------------------------------------------------------------------


Tree = Mapping[str, Mapping[CaseId, Baseline]]  # by hardware key


def read_tree(source: str, repo: Path = Path(), inside: str = "baselines") -> Tree:
    """All baselines of a folder or of a git revision, by hardware key.

    Args:
        source: a folder of hardware keys, or else a revision.
        repo: a folder of the repository that the revision is of.
        inside: where the store lies in the revision, from the repository's root.

    Raises:
        BaselineError: when it is neither, or holds a file that cannot be read.
    """
    folder = Path(source)
    if folder.is_dir():
        if any(folder.glob(f"*{SUFFIX}")):
            raise BaselineError(folder, 0, "is the folder of one hardware key", f"give its parent, {folder.parent}")
        return {key: Store(folder, key).load_all() for key in hardware_keys(folder)}
    commit = _git(repo, source, "rev-parse", "--verify", "--quiet", f"{source}^{{commit}}").strip()
    listing = _git(repo, source, "ls-tree", "-r", "-z", "--name-only", "--full-tree", commit, "--", f"{inside}/")
    found: dict[str, dict[CaseId, Baseline]] = {}
    for name in filter(None, listing.split("\0")):
        hardware, _, file = name.removeprefix(f"{inside}/").partition("/")
        backend = file.removesuffix(SUFFIX)
        if backend == file or not NAME.fullmatch(backend):
            continue
        text = _git(repo, source, "show", f"{commit}:{name}")
        kept = parse(text, backend, f"{source}:{name}")
        found.setdefault(hardware, {}).update((case, one.baseline) for case, one in kept.items())
    return found


def _git(repo: Path, source: str, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(repo), *words], capture_output=True, check=True)
        return done.stdout.decode("utf-8")
    except FileNotFoundError:
        raise BaselineError(source, 0, "is no folder, and there is no git", "install git, or give a folder") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode("utf-8", "replace").strip()
        problem = f"is neither a folder nor a revision of {repo.resolve()}" + (f" ({said})" if said else "")
        raise BaselineError(source, 0, problem, "give one of them") from None
    except UnicodeDecodeError:
        raise BaselineError(source, 0, f"git {' '.join(words)} gave no UTF-8", RESTORE) from None


def difference_rows(old: Tree, new: Tree) -> list[list[str]]:
    """A table of the cases that differ, the worst slow-down first; then the incomparable, the added, the removed."""
    found = [
        (hardware, case, old.get(hardware, {}).get(case), new.get(hardware, {}).get(case))
        for hardware in sorted({*old, *new})
        for case in sorted({*old.get(hardware, {}), *new.get(hardware, {})})
    ]
    found = [one for one in found if one[2] != one[3]]
    several = len({hardware for hardware, *_ in found}) > 1
    rows = []
    for hardware, case, then, now in found:
        change = None
        if then and now and then.contract == now.contract:
            change = now.median_us / then.median_us - 1.0
        order = (3 if now is None else 2 if then is None else 1 if change is None else 0), -(change or 0.0)
        speedups = f"{_speedup(then)} -> {_speedup(now)}"
        row = [
            f"{hardware} {case}" if several else str(case),
            time_text(then.median_us) if then else "-",
            time_text(now.median_us) if now else "-",
            "-" if change is None else percent(change),
            "-" if speedups == "- -> -" else speedups,
            _note(then, now),
        ]
        rows.append((order, row))
    head = ["case", "old", "new", "change", "speed-up", "note"]
    return [head, *(row for _, row in sorted(rows, key=operator.itemgetter(0)))]


def _speedup(one: Baseline | None) -> str:
    return "-" if one is None or one.speedup is None else f"{one.speedup:.2f}x"


def _note(then: Baseline | None, now: Baseline | None) -> str:
    """Added, removed, not comparable, another selected candidate, why a slow-down was accepted."""
    if now is None or then is None:
        return "removed" if now is None else "added"
    notes = []
    if now.epoch > then.epoch and now.reason:
        notes.append(now.reason)
    elif then.contract != now.contract:
        notes.append(f"timed in another way ({then.contract or '-'} -> {now.contract or '-'})")
    if then.selected != now.selected:
        notes.append(f"selected {' '.join(then.selected) or '-'} -> {' '.join(now.selected) or '-'}")
    return "; ".join(notes)


# -- the command line ----------------------------------------------------------------------------------------------


def _show(given: argparse.Namespace) -> list[str]:
    keys = hardware_keys(given.dir)
    if not keys:
        raise BaselineError(given.dir, 0, "holds no baselines", "record some: pytest perf --gemm-record")
    rows = [["hardware key", "backend", "cases", "sessions", "recorded", "torch"]]
    for key in keys:
        store = Store(given.dir, key)
        for backend in store.backends():
            found = store.load(backend).values()
            counts = sorted({len(one.subject_us) for one in found})
            days = sorted({one.date[:10] for one in found})
            versions = sorted({one.software.get("torch", "?") for one in found})
            rows.append([key, backend, str(len(found)), _range(counts), _range(days), ", ".join(versions)])
    return _lines(rows)


def _range(values: Sequence[object]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]}..{values[-1]}"


def _diff(given: argparse.Namespace) -> list[str]:
    old, new = (read_tree(source, given.repo, given.inside.strip("/")) for source in (given.old, given.new))
    if not any(old.values()) and not any(new.values()):
        remedy = "give folders of hardware keys, or --inside for where the revisions have them"
        raise BaselineError(f"{given.old} and {given.new}", 0, "hold no baselines", remedy)
    rows = difference_rows(old, new)
    total = len({(key, case) for tree in (old, new) for key, cases in tree.items() for case in cases})
    if len(rows) == 1:
        return [f"no difference in {total} case(s)"]
    return [*_lines(rows, markdown=given.markdown), "", f"{len(rows) - 1} of {total} case(s) differ"]


def _lines(rows: Sequence[Sequence[str]], *, markdown: bool = False) -> list[str]:
    """A table, the first row being its head; all columns but the first and the last are numbers."""
    body = [[cell.replace("|", "\\|") for cell in row] for row in rows[1:]] if markdown else rows[1:]
    return table(rows[0], body, range(1, len(rows[0]) - 1), markdown=markdown)


def _prune(given: argparse.Namespace) -> list[str]:
    store = Store(given.dir, given.hardware)
    if not store.place.is_dir():
        raise BaselineError(store.place, 0, "does not exist", f"known: {', '.join(hardware_keys(given.dir)) or 'none'}")
    cases = store.load_all()
    for pattern in _unknown(given.cases, cases):
        hint = did_you_mean(pattern, map(str, cases))
        raise BaselineError(store.place, 0, f"no case {pattern!r}{hint}", "nothing was deleted")
    return [f"deleted {case}" for case in store.delete(lambda case: any(names(one, case) for one in given.cases))]


def _unknown(patterns: Sequence[str], cases: Iterable[CaseId]) -> list[str]:
    """The patterns that no case answers to."""
    return [pattern for pattern in patterns if not any(names(pattern, case) for case in cases)]


def _record(given: argparse.Namespace) -> list[str]:
    """Record from sessions that a run has kept: one that was cut short, or that ran where the store is not.

    With names of cases only these are recorded, although they got slower.

    Raises:
        ValueError: when no case of the recording answers to a name, or none that got slower.
    """
    samples = given.samples or cache.last_recording()
    whole, lines = _complete_sessions(samples)
    folder, count, force = _terms(given)
    of_hardware: dict[str, list[Session]] = {}  # a run may time on the CPU and on a GPU
    for one in whole:
        of_hardware.setdefault(one.hardware, []).append(one)
    parts = []
    for hardware, some in of_hardware.items():
        device = next((sample.device for one in some for sample in one.samples), "cpu")
        parts.append((Store(folder, hardware), some, Policy.for_device(device)))
    if given.cases:
        _check_accept(given.cases, samples, parts)
    for store, some, policy in parts:
        done, refused = record_sessions(
            store, some, policy, k=count, force=force, accept=given.cases, reason=given.reason
        )
        if given.cases and not (done.stored or refused):
            continue
        lines.append(f"baselines in {store.place}:" if done.stored else f"nothing was recorded in {store.place}:")
        # What a run calls --gemm-record=force is --force here.
        others = [why for case, why in refused.items() if case not in {one.new.case for one in done.refused}]
        told = (*done.lines(), *dict.fromkeys(others))
        lines += [line.replace("--gemm-record=force", "--force") for line in told]
        given.status |= bool(refused) or not done.stored
    return lines


def _terms(given: argparse.Namespace) -> tuple[Path, int, bool]:
    """The store, how many sessions, and whether by force: as given, or else as the last recording has it.

    A recording becomes the last one, so that the command that it prints accepts from it.
    """
    known = cache.kept_terms() if given.samples is None else {}
    folder = given.baselines or Path(known.get("baselines", "baselines"))
    count, force = given.sessions or known.get("sessions", SESSIONS), given.force or known.get("force", False)
    if not given.cases:
        with contextlib.suppress(OSError):
            if given.samples.resolve() != cache.last_recording().resolve():
                cache.begin_recording(given.samples)
            cache.keep_terms(baselines=str(folder.absolute()), sessions=count, force=force)
    return folder, count, force


def _check_accept(
    patterns: Sequence[str], samples: Path, parts: Sequence[tuple[Store, Sequence[Session], Policy]]
) -> None:
    """Raise an error for the first pattern of no case that waits to be accepted."""
    cases = sorted({sample.case for _, some, _ in parts for one in some for sample in one.samples})
    for pattern in _unknown(patterns, cases):
        raise ValueError(f"no case {pattern!r} in {samples}{did_you_mean(pattern, map(str, cases))}")
    stored: list[CaseId] = []
    slower: list[CaseId] = []
    for store, some, policy in parts:
        known = store.load_all()
        stored += known
        slower += got_slower(known, some, policy)
    for pattern in _unknown(patterns, slower):
        folder = parts[0][0].folder
        if _unknown([pattern], stored):
            remedy = "name its store with --baselines=DIR, or record it with --gemm-record"
            raise BaselineError(folder, 0, f"holds no baseline of {pattern} that could be slower", remedy)
        problem = f"{pattern} is not slower than its baseline, so that nothing waits to be accepted"
        raise BaselineError(folder, 0, problem, "record it with --gemm-record")


def _complete_sessions(folder: Path) -> tuple[list[Session], list[str]]:
    """The sessions of a folder that came to their end, and a line for each of the others.

    Raises:
        BaselineError: when none of them timed anything.
    """
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise BaselineError(
            folder,
            0,
            "holds no sessions (*.jsonl)",
            "record first, or name the samples folder of a run's --gemm-output",
        )
    read = {file: read_session(file) for file in files}
    lines = [f"{file.name} did not come to its end and is left out" for file, one in read.items() if not one.complete]
    whole = roofline.without_impossible([one for one in read.values() if one.complete])
    if not any(sample.is_timed for one in whole for sample in one.samples):
        raise BaselineError(folder, 0, "holds no session that timed anything", "see why the run ended")
    return whole, lines


_TASKS = {"show": _show, "diff": _diff, "prune": _prune, "record": _record, "accept": _record}


def run(given: argparse.Namespace) -> int:
    """Run one task; returns 1 when a case was not recorded, 0 otherwise."""
    if (sessions := getattr(given, "sessions", None)) is not None and sessions < 1:
        raise ValueError(f"--sessions={sessions}: give 1 or more")
    given.status = 0
    if given.task == "record":
        given.cases, given.reason = (), ""
    show("\n".join(_TASKS[given.task](given)) + "\n")
    return int(given.status)
