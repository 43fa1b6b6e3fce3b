"""The lines of a run record: one about the run, one for every outcome, and one of totals.

A file has one JSON object a line; outcomes also cross from xdist's workers in that form.  msgspec checks the types; it
is imported with the first record, not when pytest starts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from pytest_gemm import __version__
from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Outcome, Reason
from pytest_gemm.machine import gpus as gpus_module
from pytest_gemm.machine import isa, processor, software

T = TypeVar("T")

Use: TypeAlias = dict[str, dict[str, int]]
"""How often each entry of the ledger applied, by its id: it ``failed`` as stated, ``differed``, or ``passed``."""

_CASE: Final = tuple(field.name for field in dataclasses.fields(CaseId))
# Further distributions whose versions a record has; those that are not installed are left out.
_DISTRIBUTIONS: Final = ("pytest", "pytest-xdist")


@dataclasses.dataclass(frozen=True)
class Terms:
    """What the verdict depends on, of what a run was asked for.

    Attributes:
        backends: names of the selected ones.
        named: whether the user named them.
        allow: what does not fail the run.
        fuzz: whether it draws its problems.
        candidates: which candidates are judged.
        entries: ids of the ledger's entries that are stale where all of their cases pass.
    """

    backends: tuple[str, ...] = ()
    named: bool = False
    allow: tuple[str, ...] = ()
    fuzz: bool = False
    candidates: str = ""
    entries: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Head:
    """The first line of a record: what ran, when and on what.

    Attributes:
        date: when it began.
        command: with pytest's arguments.
        versions: of distributions, of the compiler or of CUDA, and of the oneDNN in torch, by name.
        inductor: digests of the files of torch's ``_inductor`` by path; an edited torch has its release's version.
        machine, cpu, isa, gpus: of the hardware.
        threads: CPU threads of a process, 0 where it is unknown.
        compiled_as: the machine as on which code was compiled, "" for this one.
        terms: of the verdict.
        options: those that decide what is judged, as text.
        shard, shards: K and N of shard K of N; 0 of a whole run.
    """

    date: str = "no date"
    command: tuple[str, ...] = ("?",)
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    inductor: Mapping[str, str] = dataclasses.field(default_factory=dict)
    machine: str = ""
    cpu: str = "unknown machine"
    isa: str = ""
    gpus: tuple[str, ...] = ()
    threads: int = 0
    compiled_as: str = ""
    terms: Terms = Terms()
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    shard: int = 0
    shards: int = 0

    @property
    def hardware(self) -> tuple[str, ...]:
        """CPU and GPUs, and as on which machine code was compiled."""
        return (self.cpu, *self.gpus, *([f"compiled as on {self.compiled_as}"] if self.compiled_as else []))

    @classmethod
    def of(cls, arguments: Sequence[str], *, gpus: bool, **further: Any) -> Head:
        """Of this process.

        Args:
            arguments: pytest's.
            gpus: name the GPUs too.
            further: values of other fields.
        """
        versions = {"pytest-gemm": __version__, **software.software("cuda" if gpus else "cpu")}
        versions |= {"onednn": version} if (version := software.onednn()) else {}
        versions |= software.installed(_DISTRIBUTIONS) | further.pop("versions", {})
        cpu = processor.cpu()
        return cls(
            date=time.strftime("%Y-%m-%d %H:%M:%S %z"),
            command=("pytest", *arguments),
            versions=versions,
            inductor=software.inductor(),
            machine=platform.machine(),
            cpu=f"{cpu.model}, {cpu.logical} logical cores" if cpu.model else platform.processor(),
            isa=", ".join([isa.isa_level(cpu.flags), *map(" up to ".join, isa.caps(cpu.flags).items())]),
            gpus=tuple(f"{gpu.name}, {gpu.driver}, {gpu.capability}" for gpu in gpus_module.gpus()) if gpus else (),
            **further,
        )


@dataclasses.dataclass(frozen=True)
class Division:
    """What a shard knows of the run that it is a part of.

    Attributes:
        digest: of the ids of all tests of the run, in any order.
        tests: their number.
    """

    digest: str = ""
    tests: int = 0


@dataclasses.dataclass
class Totals:
    """The last line of a record, which grows while the run goes on; the record of a run that was killed has none.

    Attributes:
        wall_seconds: duration of the run.
        processes: how many processes judged.
        notes: facts of the run as a whole, one sentence each.
        status: exit status that pytest alone would have given the run.
        narrowed: only a part of the tests was asked for, so that no entry of the ledger can be called stale.
        missing: backends asked for that cannot run here.
        use: how often each entry of the ledger applied.
        lost: why a file is not complete that was asked for, by their paths.
        undecided: the timed cases as a whole were left undecided, beyond what ``--gemm-undecided`` allows.
        asked: names of the backends of which a test was run.
        failed: why tests failed, as ``verdict.Red``.
        reruns: attempts at a test that another one followed, as pytest-rerunfailures makes them; they do not count.
        division: what a shard knows of the run that it is a part of.
        uncalled: what authors of backends wrote out when registering them and no case called, by backend.
        places: for each outcome of a shard, the place of its test among all tests.
    """

    wall_seconds: float = 0.0
    processes: int = 0
    notes: list[str] = dataclasses.field(default_factory=list)
    status: int = 0
    narrowed: bool = False
    missing: dict[str, Reason] = dataclasses.field(default_factory=dict)
    use: Use = dataclasses.field(default_factory=dict)
    lost: dict[str, str] = dataclasses.field(default_factory=dict)
    undecided: bool = False
    asked: set[str] = dataclasses.field(default_factory=set)
    failed: set[int] = dataclasses.field(default_factory=set)
    reruns: int = 0
    division: Division = dataclasses.field(default_factory=Division)
    uncalled: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    places: tuple[int, ...] = ()


def merge_use(use: Use, other: Use) -> None:
    """Add counts to others."""
    for name, counts in other.items():
        use[name] = dict(Counter(use.get(name, {})) + Counter(counts))


# -- as JSON -------------------------------------------------------------------------------------------------------


def plain(value: object) -> Any:
    """A dataclass as JSON data: dictionaries, lists, strings and numbers."""
    import msgspec

    return msgspec.to_builtins(value, enc_hook=str, order="deterministic")  # a hook for torch's version, a kind of str


def typed(data: object, kind: type[T]) -> T:
    """The dataclass of JSON data as :func:`plain` made it; unknown keys are ignored.

    Raises:
        ValueError: for a missing key or a value of another type: ``seed: Expected `int`, got `str```.
    """
    import msgspec

    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        raise ValueError(": ".join(filter(None, (path.strip(".`"), text)))) from None


def to_record(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON data, the keys of its case among its own."""
    record = plain(outcome)
    if outcome.ratio is not None and not math.isfinite(outcome.ratio):
        record["ratio"] = "inf"  # JSON has no infinity
    return {**record.pop("case"), **record}


def from_record(record: Mapping[str, Any]) -> Outcome:
    """The outcome of a record made by :func:`to_record`; unknown keys are ignored.

    Raises:
        ValueError: as :func:`typed`.
    """
    data = {**record, "case": {name: record[name] for name in _CASE if name in record}}
    if data.get("ratio") == "inf":
        data["ratio"] = math.inf
    return typed(data, Outcome)


def record_line(record: Mapping[str, Any]) -> str:
    """A record as one line of the run record, keys sorted so that two runs can be diffed."""
    return json.dumps(record, sort_keys=True) + "\n"
