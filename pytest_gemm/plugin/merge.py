"""The shards of a run as one run, with its verdict: ``pytest-gemm merge DIR DIR DIR --output=DIR``."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import operator
import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import pytest
from packaging.version import Version

from pytest_gemm import __version__
from pytest_gemm.api import settings as api_settings
from pytest_gemm.compare import runs
from pytest_gemm.core.text import show
from pytest_gemm.failures import scripts as scripts_module
from pytest_gemm.ledger.ledger import LedgerUse
from pytest_gemm.plugin import review
from pytest_gemm.record import record, records
from pytest_gemm.record.record import Provenance, Record, Shard
from pytest_gemm.run.state import Red, RunState

# What pytest says of a run that went through all its tests; anything else has ended it early.
_ENDED: Final = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
_JUNIT: Final = "junit.xml"


@dataclasses.dataclass(frozen=True)
class Part:
    """One shard.

    Attributes:
        folder: of its files.
        record: its run record.
        seconds, processes, notes: of its totals.
        shard: what it knows of the whole.
    """

    folder: Path
    record: Record
    seconds: float
    processes: int
    notes: tuple[str, ...]
    shard: Shard


def run(given: argparse.Namespace) -> int:
    """Write and print what one run would have; returns its exit status.

    Raises:
        ValueError: where the folders are not the shards of one run, or one is missing.
    """
    parts = sorted(map(_load, given.shards), key=lambda part: part.shard.number)
    _check(parts)
    output = api_settings.folder(str(given.output))
    assert output is not None
    if any(output == part.folder.absolute() for part in parts):
        raise ValueError(f"--output={given.output}: is the folder of a shard; name another one")
    state = _state(parts)
    run_of = Provenance.joined([part.record.run for part in parts])
    run_of = dataclasses.replace(run_of, command=tuple(_whole_command(run_of.command, given.output)))
    says = _pytest_says([part.shard.status for part in parts])
    state.open_record(output / "run.jsonl", run_of)
    _write_record(state, parts, says)
    for name in ("summary.md", _JUNIT):
        (output / name).unlink(missing_ok=True)  # of an earlier merge
    _write_summary(state, output)
    _write_failures(state, parts, output)
    _write_junit(state, parts, output / _JUNIT)
    status = state.status(says)
    last = f"{len(parts)} shards of {parts[0].shard.tests} tests are one run in {given.output}: exit status {status}"
    show("\n".join([*state.summary(), *state.incomplete(), *_early(parts), last]) + "\n")
    return status


# -- the set of shards -----------------------------------------------------------------------------------------------


def _load(path: Path) -> Part:
    """A shard by its folder.

    Raises:
        ValueError: for anything else, with what to do.
    """
    found = record.read(runs.file_of(path))
    totals = found.totals
    if totals is None or found.torn:
        raise ValueError(f"{path}: the run did not end, so outcomes are missing; run this shard again")
    if totals.shard is None:
        raise ValueError(f"{path}: is a whole run; name folders of runs with --gemm-shard=K/N")
    folder = path if path.is_dir() else path.parent
    return Part(folder, found, totals.wall_seconds, totals.processes, totals.notes, totals.shard)


def _check(parts: Sequence[Part]) -> None:
    """Refuse what are not all shards of one run.

    Raises:
        ValueError: naming the folder, or the shard that is missing.
    """
    first, total = parts[0], parts[0].shard.total
    for part, other in zip(parts[1:], parts, strict=False):
        if part.shard.total != other.shard.total:
            raise ValueError(f"{part.folder}: is a shard of {part.shard.total}, and {other.folder} is one of {total}")
        if part.shard.number == other.shard.number:
            raise ValueError(f"{part.folder} and {other.folder}: both are shard {part.shard.number} of {total}")
    for part in parts[1:]:
        if differs := _difference(first, part):
            raise ValueError(f"{part.folder}: {differs}; all shards of a run need the same")
    there = {part.shard.number for part in parts}
    if missing := [f"{number}/{total}" for number in range(1, total + 1) if number not in there]:
        raise ValueError(
            f"shard {', '.join(missing)} is missing, so there is no verdict; run it with --gemm-shard={missing[0]}, "
            "and name its folder too"
        )
    for name, here in (("pytest-gemm", __version__), ("torch", metadata.version("torch"))):
        ran = first.record.run.versions.get(name, here)
        if Version(ran).public != Version(here).public:
            raise ValueError(f"the shards ran with {name} {ran}, and this environment has {here}: merge with {ran}")


def _difference(first: Part, part: Part) -> str:
    """How a shard differs from the first one; "" where they are of one run."""
    for what, a, b in (
        ("option", first.shard.options, part.shard.options),
        ("version of", first.record.run.versions, part.record.run.versions),
    ):
        for name in sorted(a.keys() | b.keys()):
            if a.get(name) != b.get(name):
                ours, others = (one.get(name) or "nothing" for one in (b, a))
                return f"{what} {name} is {ours}, and {others} in {first.folder}"
    if first.shard.terms != part.shard.terms:
        return f"other backends are selected, or the ledger has other entries, than in {first.folder}"
    if (first.shard.digest, first.shard.tests) != (part.shard.digest, part.shard.tests):
        return f"it is of other tests, or they were divided by other recorded seconds, than in {first.folder}"
    return ""


# -- the run that they are -------------------------------------------------------------------------------------------


def _state(parts: Sequence[Part]) -> RunState:
    """Of the whole run, without its outcomes."""
    shards = [part.shard for part in parts]
    use = LedgerUse()
    for shard in shards:
        use.merge(shard.use)
    return RunState(
        terms=shards[0].terms,
        missing={name: reason for shard in shards for name, reason in shard.missing.items()},
        use=use,
        narrowed=any(shard.narrowed for shard in shards),
        notes=_notes(parts),
        lost={name: why for shard in shards for name, why in shard.lost.items()},
        asked={name for shard in shards for name in shard.asked},
        failed={Red(kind) for shard in shards for kind in shard.failed},
        reruns=sum(shard.reruns for shard in shards),
        processes={f"{part.shard.number}-{process}" for part in parts for process in range(part.processes)},
        took=max(part.seconds for part in parts),
    )


def _notes(parts: Sequence[Part]) -> list[str]:
    """The notes of all shards, then those of some with the number of the shard."""
    common = [note for note in parts[0].notes if all(note in part.notes for part in parts)]
    return common + [
        f"shard {part.shard.number}: {note}" for part in parts for note in part.notes if note not in common
    ]


def _pytest_says(statuses: Sequence[int]) -> int:
    """The exit status that pytest would have given the whole run."""
    if early := [status for status in statuses if status not in _ENDED]:
        return early[0]
    ran = set(statuses) - {pytest.ExitCode.NO_TESTS_COLLECTED}
    return max(ran, default=pytest.ExitCode.NO_TESTS_COLLECTED)


def _early(parts: Sequence[Part]) -> list[str]:
    """A line for each shard that ended before its tests did."""
    return [
        f"shard {part.shard.number} of {part.shard.total} ended early, with pytest's exit status {part.shard.status}"
        for part in parts
        if part.shard.status not in _ENDED
    ]


def _whole_command(command: Iterable[str], output: Path) -> Iterable[str]:
    """The command of a shard without its number, and with this output."""
    words = iter(command)
    for word in words:
        flag, has_value, _ = word.partition("=")
        if flag in {"--gemm-shard", "--gemm-output"} and not has_value:
            next(words, "")
        if flag == "--gemm-output":
            yield f"--gemm-output={output}"
        elif flag != "--gemm-shard":
            yield word


# -- files -----------------------------------------------------------------------------------------------------------


def _write_record(state: RunState, parts: Sequence[Part], says: int) -> None:
    """The outcomes, in the order in which one process would have judged them, and the totals."""
    placed = [pair for part in parts for pair in zip(part.shard.places, part.record.outcomes, strict=True)]
    placed.sort(key=operator.itemgetter(0))
    processes = set(state.processes)
    state.absorb((records.to_record(outcome) for _, outcome in placed), {}, "merge", "")
    state.processes = processes
    state.close_record(says)


def _write_summary(state: RunState, output: Path) -> None:
    path = output / "summary.md"
    if text := state.markdown():
        with state.writing(path):
            path.write_text(text, encoding="utf-8")


def _write_failures(state: RunState, parts: Sequence[Part], output: Path) -> None:
    """The files of failures, and of each ledger entry the script of its smallest case."""
    scripts: dict[str, list[Path]] = defaultdict(list)
    for part in parts:
        if (source := part.folder / "failures").is_dir():
            with state.writing(output / "failures"):
                shutil.copytree(source, output / "failures", dirs_exist_ok=True)
        for script in sorted((part.folder / "known-failures").glob("*.py")):
            scripts[script.name].append(script)
    if not scripts:
        return
    target = output / "known-failures"
    order = {outcome.problem: i for i, outcome in reversed([*enumerate(state.outcomes)])}
    for found in scripts.values():
        script = scripts_module.smallest(found, order)
        with state.writing(target):
            target.mkdir(exist_ok=True)
            for file in (script, script.with_suffix(".pt")):
                if file.exists():
                    shutil.copy(file, target)


def _write_junit(state: RunState, parts: Sequence[Part], path: Path) -> None:
    """The JUnit files as one, where every shard has one: all tests, and the verdict of the whole run."""
    files = [part.folder / _JUNIT for part in parts]
    if not all(file.is_file() for file in files):
        return
    try:
        suites = [suite for file in files for suite in ElementTree.parse(file).iter("testsuite")]
    except ElementTree.ParseError as error:
        raise ValueError(f"a {_JUNIT} of the shards is not XML: {error}") from None
    cases = [case for suite in suites for case in suite.iter("testcase") if case.get("classname") != review.JUNIT]
    own = [case for suite in suites for case in suite.iter("testcase") if case.get("classname") == review.JUNIT]
    allowed = {case.get("name"): case for case in own if case.find("skipped") is not None}
    cases += [*_causes(state, path), *allowed.values()]
    whole = copy.copy(suites[0])
    whole[:] = cases
    counts = {f"{name}s" if name != "skipped" else name: name for name in ("error", "failure", "skipped")}
    for key, name in counts.items():
        whole.set(key, str(sum(case.find(name) is not None for case in cases)))
    whole.set("tests", str(len(cases)))
    whole.set("time", f"{max(float(suite.get('time', 0)) for suite in suites):.3f}")
    root = ElementTree.Element("testsuites", name="pytest tests")
    root.append(whole)
    with state.writing(path):
        ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _causes(state: RunState, path: Path) -> list[ElementTree.Element]:
    """What turns the run red without being a test, as pytest writes a test."""
    from _pytest.junitxml import LogXML

    xml = LogXML(str(path), None, family="xunit2")
    for cause in state.reds():
        review.add_case(xml, cause, "failed", cause.text)
    return [reporter.to_xml() for reporter in xml.node_reporters_ordered]
