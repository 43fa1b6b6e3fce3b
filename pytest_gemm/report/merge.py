"""The shards of a run as one run, with its verdict: ``pytest-gemm merge DIR DIR DIR --output=DIR``."""

from __future__ import annotations

import argparse
import dataclasses
import operator
import shutil
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.version import Version

from pytest_gemm import __version__
from pytest_gemm.api import settings as api_settings
from pytest_gemm.core.text import show
from pytest_gemm.failures import text
from pytest_gemm.record import reader
from pytest_gemm.record.lines import Head, Totals, merge_use
from pytest_gemm.record.reader import Run
from pytest_gemm.record.writer import Writer
from pytest_gemm.report import review, terminal
from pytest_gemm.verdict import ENDED, verdict

# What pytest says of a run that collected nothing.
_NOTHING: Final = 5


def run(given: argparse.Namespace) -> int:
    """Write and print what one run would have; returns its exit status.

    Raises:
        ValueError: where the folders are not the shards of one run, or one is missing.
    """
    parts = sorted(map(_load, given.shards), key=lambda part: part.head.shard)
    _check(parts)
    output = api_settings.folder(str(given.output))
    assert output is not None
    if any(output == _folder(part).absolute() for part in parts):
        raise ValueError(f"--output={given.output}: is the folder of a shard; name another one")
    writer = Writer(concatenated(parts))
    whole = writer.run
    outcomes, whole.outcomes = whole.outcomes, []
    with writer.writing(output / "failures"):
        text.remove(output)
    writer.open(output / "run.jsonl")
    writer.add(outcomes)
    writer.end()
    with writer.writing(output / "summary.md"):
        (output / "summary.md").write_text(review.markdown([whole], review.title(whole)), encoding="utf-8")
    for source in (_folder(part) / "failures" for part in parts):
        if source.is_dir():
            with writer.writing(output / "failures"):
                shutil.copytree(source, output / "failures", dirs_exist_ok=True)
    status, _ = verdict(whole)
    tests = parts[0].totals.division.tests
    last = f"{len(parts)} shards of {tests} tests are one run in {given.output}: exit status {status}"
    show("\n".join([*terminal.summary(whole), *terminal.incomplete(whole), *_early(parts), last]) + "\n")
    return status


# -- the set of shards -----------------------------------------------------------------------------------------------


def _load(path: Path) -> Run:
    """A shard by its folder.

    Raises:
        ValueError: for anything else, with what to do.
    """
    found = reader.read(path)
    if not found.ended:
        raise ValueError(f"{path}: the run did not end, so outcomes are missing; run this shard again")
    if not found.head.shards:
        raise ValueError(f"{path}: is a whole run; name folders of runs with --gemm-shard=K/N")
    return found


def _folder(part: Run) -> Path:
    return part.path.parent if part.path else Path()


def _check(parts: Sequence[Run]) -> None:
    """Refuse what are not all shards of one run.

    Raises:
        ValueError: naming the folder, or the shard that is missing.
    """
    first, total = parts[0], parts[0].head.shards
    for part, other in zip(parts[1:], parts, strict=False):
        folder, others = _folder(part), _folder(other)
        if part.head.shards != other.head.shards:
            raise ValueError(f"{folder}: is a shard of {part.head.shards}, and {others} is one of {other.head.shards}")
        if part.head.shard == other.head.shard:
            raise ValueError(f"{folder} and {others}: both are shard {part.head.shard} of {total}")
    for part in parts[1:]:
        if differs := _difference(first, part):
            raise ValueError(f"{_folder(part)}: {differs}; all shards of a run need the same")
    there = {part.head.shard for part in parts}
    if missing := [f"{number}/{total}" for number in range(1, total + 1) if number not in there]:
        raise ValueError(
            f"shard {', '.join(missing)} is missing, so there is no verdict; run it with --gemm-shard={missing[0]}, "
            "and name its folder too"
        )
    for name, here in (("pytest-gemm", __version__), ("torch", metadata.version("torch"))):
        ran = first.head.versions.get(name, here)
        if Version(ran).public != Version(here).public:
            raise ValueError(f"the shards ran with {name} {ran}, and this environment has {here}: merge with {ran}")


def _difference(first: Run, part: Run) -> str:
    """How a shard differs from the first one; "" where they are of one run."""
    for what, a, b in (
        ("option", first.head.options, part.head.options),
        ("version of", first.head.versions, part.head.versions),
        ("file of torch/_inductor:", first.head.inductor, part.head.inductor),
    ):
        for name in sorted(a.keys() | b.keys()):
            if a.get(name) != b.get(name):
                ours, others = (one.get(name) or "nothing" for one in (b, a))
                return f"{what} {name} is {ours}, and {others} in {_folder(first)}"
    if first.head.terms != part.head.terms:
        return f"other backends are selected, or the ledger has other entries, than in {_folder(first)}"
    if first.totals.division != part.totals.division:
        return f"it is of other tests, or they were divided by other recorded seconds, than in {_folder(first)}"
    return ""


# -- the run that they are -------------------------------------------------------------------------------------------


def concatenated(parts: Sequence[Run]) -> Run:
    """The whole run, with the outcomes in the order in which one process would have judged them."""
    placed = [pair for part in parts for pair in zip(part.totals.places, part.outcomes, strict=True)]
    placed.sort(key=operator.itemgetter(0))
    every = [part.totals for part in parts]
    totals = Totals(
        wall_seconds=max(one.wall_seconds for one in every),
        processes=sum(one.processes for one in every),
        notes=_notes(parts),
        status=_pytest_says([one.status for one in every]),
        narrowed=any(one.narrowed for one in every),
        reruns=sum(one.reruns for one in every),
    )
    for one in every:
        totals.missing |= one.missing
        totals.lost |= one.lost
        totals.asked |= one.asked
        totals.failed |= one.failed
        merge_use(totals.use, one.use)
    for name in totals.asked:
        first, *others = [one.uncalled.get(name, []) for one in every if name in one.asked]
        if left := [part for part in first if all(part in other for other in others)]:
            totals.uncalled[name] = left
    return Run(_head([part.head for part in parts]), [outcome for _, outcome in placed], totals)


def _head(heads: Sequence[Head]) -> Head:
    """The first one, from the earliest date; of several machines all are named."""

    def all_of(name: str) -> str:
        return ", ".join(dict.fromkeys(map(operator.attrgetter(name), heads)))

    threads = {head.threads for head in heads}
    return dataclasses.replace(
        heads[0],
        date=min(head.date for head in heads),
        machine=all_of("machine"),
        cpu=all_of("cpu"),
        isa=all_of("isa"),
        gpus=max((head.gpus for head in heads), key=len),
        threads=threads.pop() if len(threads) == 1 else 0,
        shard=0,
        shards=0,
    )


def _notes(parts: Sequence[Run]) -> list[str]:
    """The notes of all shards, then those of some with the number of the shard."""
    common = [note for note in parts[0].totals.notes if all(note in part.totals.notes for part in parts)]
    return common + [
        f"shard {part.head.shard}: {note}" for part in parts for note in part.totals.notes if note not in common
    ]


def _pytest_says(statuses: Sequence[int]) -> int:
    """The exit status that pytest would have given the whole run."""
    if early := [status for status in statuses if status not in ENDED]:
        return early[0]
    return max(set(statuses) - {_NOTHING}, default=_NOTHING)


def _early(parts: Sequence[Run]) -> list[str]:
    """A line for each shard that ended before its tests did."""
    return [
        f"shard {part.head.shard} of {part.head.shards} ended early, with pytest's exit status {part.totals.status}"
        for part in parts
        if part.totals.status not in ENDED
    ]
