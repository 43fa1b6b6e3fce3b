"""The run record: a file of JSON lines.

It begins with a line about the run (versions, machine, command), has a line for every outcome, and ends with a line
of totals.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_gemm import __version__
from pytest_gemm.core.outcome import Outcome, Reason
from pytest_gemm.machine import gpus as gpus_module
from pytest_gemm.machine import isa, processor, software
from pytest_gemm.record.records import from_record, typed

# Further distributions whose versions a record has; those that are not installed are left out.
_DISTRIBUTIONS = ("pytest", "pytest-xdist")


@dataclasses.dataclass(frozen=True)
class Provenance:
    """What ran, when and on what.

    Attributes:
        date: when it began.
        command: with pytest's arguments.
        versions: of distributions, of the compiler or of CUDA, and of the oneDNN in torch, by name.
        machine, cpu, isa, gpus: of the hardware.
        threads: CPU threads of a process, 0 where it is unknown.
    """

    date: str = "no date"
    command: tuple[str, ...] = ("?",)
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    machine: str = ""
    cpu: str = "unknown machine"
    isa: str = ""
    gpus: tuple[str, ...] = ()
    threads: int = 0

    @classmethod
    def of(cls, arguments: Sequence[str], *, gpus: bool, threads: int = 0) -> Provenance:
        """Of this process.

        Args:
            arguments: pytest's.
            gpus: name the GPUs too.
            threads: CPU threads of a process.
        """
        versions = {"pytest-gemm": __version__, **software.software("cuda" if gpus else "cpu")}
        versions |= {"onednn": version} if (version := software.onednn()) else {}
        versions |= software.installed(_DISTRIBUTIONS)
        cpu = processor.cpu()
        return cls(
            date=time.strftime("%Y-%m-%d %H:%M:%S %z"),
            command=("pytest", *arguments),
            versions=versions,
            machine=platform.machine(),
            cpu=f"{cpu.model}, {cpu.logical} logical cores" if cpu.model else platform.processor(),
            isa=isa.isa_level(cpu.flags),
            gpus=tuple(f"{gpu.name}, {gpu.driver}, {gpu.capability}" for gpu in gpus_module.gpus()) if gpus else (),
            threads=threads,
        )

    @classmethod
    def joined(cls, found: Sequence[Provenance]) -> Provenance:
        """Of several that judge one run: the first, from the earliest date; of several machines all are named."""

        def all_of(name: str) -> str:
            return ", ".join(dict.fromkeys(map(operator.attrgetter(name), found)))

        threads = {one.threads for one in found}
        return dataclasses.replace(
            found[0],
            date=min(one.date for one in found),
            machine=all_of("machine"),
            cpu=all_of("cpu"),
            isa=all_of("isa"),
            gpus=max((one.gpus for one in found), key=len),
            threads=threads.pop() if len(threads) == 1 else 0,
        )


@dataclasses.dataclass(frozen=True)
class Terms:
    """What the verdict depends on, of what a run was asked for.

    Attributes:
        backends: names of the selected ones.
        named: whether the user named them.
        allow: what does not fail the run.
        fuzz: whether it draws its problems.
        candidates: which candidates are judged.
        entries: ids of the ledger's entries.
    """

    backends: tuple[str, ...] = ()
    named: bool = False
    allow: tuple[str, ...] = ()
    fuzz: bool = False
    candidates: str = ""
    entries: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Division:
    """What a shard knows of the run that it is a part of.

    Attributes:
        digest: of the ids of all tests of the run, in any order.
        tests: their number.
        places: of the shard's own tests among them, by their ids.
    """

    digest: str = ""
    tests: int = 0
    places: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Shard:
    """What the verdict of the whole run needs of one of its shards, besides outcomes and totals.

    Attributes:
        number, total: it is shard ``number`` of ``total``.
        digest, tests: of the :class:`Division`.
        places: for each outcome, the place of its test among all tests.
        options: those that decide what is judged, as text.
        terms: of the verdict.
        status: exit status that pytest alone would have given it.
        narrowed, missing, use, asked, failed, reruns, lost: as in ``state.RunState``.
    """

    number: int
    total: int
    digest: str
    tests: int
    places: tuple[int, ...]
    options: Mapping[str, str]
    terms: Terms
    status: int
    narrowed: bool
    missing: Mapping[str, Reason]
    use: Mapping[str, Mapping[str, int]]
    asked: tuple[str, ...]
    failed: tuple[int, ...]
    reruns: int
    lost: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Totals:
    """The last line of a record; a run that was killed has none.

    Attributes:
        wall_seconds: duration of the run.
        processes: how many processes judged.
        notes: facts of the run as a whole.
        red: what turned it red without being a test's failure.
        shard: which part of a run it is, ``None`` for a whole run.
    """

    wall_seconds: float
    processes: int
    notes: tuple[str, ...] = ()
    red: tuple[str, ...] = ()
    shard: Shard | None = None


@dataclasses.dataclass(frozen=True)
class Record:
    """One run.

    Attributes:
        run: the first line.
        outcomes: in their order.
        totals: the last line, ``None`` where the run did not end.
        torn: half a line at the end was left out.
    """

    run: Provenance
    outcomes: tuple[Outcome, ...]
    totals: Totals | None = None
    torn: bool = False


def read(path: Path) -> Record:
    """Read the file of a record; errors as of :func:`load`, with the file's name."""
    try:
        return load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not UTF-8") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def load(text: str) -> Record:
    """Read a record; a run that was killed has no totals, and may have half a line at its end.

    Raises:
        ValueError: for a line that does not belong in a record, with its number and the key.
    """
    run, totals, torn = None, None, False
    outcomes: list[Outcome] = []
    *lines, rest = text.split("\n")
    for number, line in enumerate([*lines, rest] if rest else lines, 1):
        try:
            data = typed(json.loads(line, parse_constant=_not_json), dict[str, Any])
            if "run" in data:
                run = typed(data["run"], Provenance)
            elif "totals" in data:
                totals = typed(data["totals"], Totals)
            else:
                outcomes.append(from_record(data))
        except (ValueError, RecursionError) as error:  # noqa: PERF203  # it names the line
            if isinstance(error, json.JSONDecodeError) and number > len(lines):
                torn = True
                break
            raise ValueError(f"line {number} is no line of a run record: {error}") from None
    if run is None and not outcomes:
        raise ValueError("it has no line of a run record")
    return Record(run or Provenance(), tuple(outcomes), totals, torn)
