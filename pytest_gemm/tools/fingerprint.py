"""``pytest-gemm fingerprint``: how each backend computes, as tables and as files.

Small products whose results name the arithmetic that computed them.  Each probe plants values in the operands of one
compiled problem so that the result, read bit by bit, can only have come about in one way: ``1 + 2^-24 - 1`` is 0 in
float32, ``1 + 1.5 * 2^-24 - 1`` is 2^-23 where sums round to nearest and 0 where they are cut.  A :class:`Column` is a
problem; all of its probes share its artifact, for a compile may take a minute and a product takes microseconds.
``docs/explanation/fingerprint.md`` has every probe with its formula and its source.

What a backend declares (``backend.Contract``) is compared with what was seen: a bound that follows from the seen
arithmetic and is larger than the declared one is a *finding*.  What is merely worth knowing is a *remark*.

A worker process computes the columns and sends each when it is complete: a kernel that ends its process costs only the
later columns of its backend.  A file holds the fingerprint of a backend on one hardware key, beside its baselines; the
next run lists what an update has changed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import json
import textwrap
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import pytest

from pytest_gemm import __version__, records
from pytest_gemm.api.protocols import Backend
from pytest_gemm.api.request import DEFAULT
from pytest_gemm.case_id import CaseId
from pytest_gemm.isolation.worker import Service, Worker
from pytest_gemm.machine import software
from pytest_gemm.machine.key import hardware_key
from pytest_gemm.outcome import Activity, Phase, Pruned, Unsupported
from pytest_gemm.problem.problem import Problem
from pytest_gemm.run import progress
from pytest_gemm.run.progress import Display
from pytest_gemm.storage import files
from pytest_gemm.text import table as text_table
from pytest_gemm.tools import backend_command
from pytest_gemm.tools.backend_command import WIDTH, Unanswered, answers, ticking
from pytest_gemm.tools.examination import Examination
from pytest_gemm.tools.probes import PROBES, Bench, Column, Print, columns_for

if TYPE_CHECKING:
    from pytest_gemm.config import GemmConfig

_FORMAT: Final = 1


def run(given: argparse.Namespace) -> int:
    """Show how each backend computes; returns 1 for a finding, and where a named backend cannot run."""
    options = (f"--gemm-level={given.level}", f"--gemm-baselines={given.baselines}")
    output = given.output.absolute() if given.output else None
    return backend_command.show(given, functools.partial(report, output=output), options)


@dataclasses.dataclass
class Fingerprint:
    """What is known of one backend on one device.

    Attributes:
        backend, device: whose, and where.
        hardware: the hardware key.
        date: ISO 8601, UTC.
        software: versions by name.
        columns: what was found of each.
        broken: why columns are missing: a signal, an exception, a limit; "" when all is there.  Not stored.
        format: of the file.
    """

    backend: str
    device: str
    hardware: str
    date: str
    software: dict[str, str]
    columns: list[Print]
    broken: str = ""
    format: Literal[1] = _FORMAT


def report(config: GemmConfig, display: Display, output: Path | None = None) -> bool:
    """Write everything, backend by backend, and store it where that was asked for.

    Args:
        config: which backends are asked, at which level, and where the stored fingerprints are.
        display: takes lines and progress.
        output: folder to store them in; ``None``: nowhere.

    Returns:
        Whether all is well: no finding, nothing broken, and every backend that was named can run
        (``--allow-missing`` forgives that).

    Raises:
        pytest.UsageError: when a stored fingerprint cannot be read; before anything is computed, which takes minutes.
    """
    healthy, stored, write = True, {}, display.line
    for backend in config.backends:
        key = hardware_key("cuda" if config.device_of(backend) == "cuda" else "cpu", config.speed.threads)
        path = path_of(output or config.speed.baselines, key, backend.name)
        try:
            stored[backend.name] = path, key, load(path)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise pytest.UsageError(f"{path}: {why}; restore the file, or delete it") from None
    with contextlib.closing(Worker(config, _answer)) as worker:
        for backend in config.backends:
            path, key, old = stored[backend.name]
            started = time.perf_counter()
            found, missing = _computed(worker, config, backend, key, display)
            seconds = time.perf_counter() - started
            write("")
            head = f"{found.backend} on {found.device} ({key})"
            if missing:
                write(f"{head}: cannot run: {missing}")
                healthy = healthy and not (config.named and "missing" not in config.allow)
                continue
            write(f"{head}: {sum(one.products for one in found.columns)} products in {seconds:.0f} s")
            lines = [*table(found.columns), *sentences(found), *(_comparison(old, found) if old else ())]
            if output is not None and found.columns:
                if not found.broken:
                    save(path, found)
                lines.append(f"not stored, for it is not complete: {path}" if found.broken else f"stored: {path}")
            for line in lines:
                write(line)
            healthy = healthy and not found.broken and not any(one.findings for one in found.columns)
    return healthy


def _comparison(old: Fingerprint, new: Fingerprint) -> list[str]:
    """The sentences about an update."""
    texts = changes(old.columns, new.columns)
    updates = [
        f"{name} {old.software.get(name, 'none')} -> {version}"
        for name, version in new.software.items()
        if old.software.get(name) != version
    ]
    since = f"since {old.date[:10]}" + (f" ({', '.join(updates)})" if updates else "")
    if not texts:
        return [f"the arithmetic has not changed {since}"]
    return [f"the arithmetic has changed {since}:", *_wrapped(texts)]


# -- computing ---------------------------------------------------------------------------------------------------


def _computed(
    worker: Worker, config: GemmConfig, backend: Backend, key: str, display: Display
) -> tuple[Fingerprint, str]:
    """The fingerprint of a backend, and why the backend cannot run here; "" when it can."""
    device = config.device_of(backend)
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    versions = {"pytest-gemm": __version__, **software.software("cuda" if device == "cuda" else "cpu")}
    found, missing = Fingerprint(backend.name, device, key, date, versions, []), ""
    count, started = len(columns_for(backend, config.level)), time.perf_counter()

    def show() -> None:
        done = len(found.columns)
        rest = (time.perf_counter() - started) * (count - done) / done if done else None
        display.progress(f"fingerprint of {backend.name}: column {done + 1} of {count}{progress.left(rest)}")

    try:
        for answer in ticking(answers(worker, backend=backend.name), show):
            if isinstance(answer, str):
                missing = answer
            else:
                found.columns.append(records.typed(answer, Print))
    except Unanswered as error:
        found.broken = str(error)
    return found, missing


def _answer(service: Service, request: Mapping[str, Any]) -> Iterator[object]:
    """In the worker process: each column as it is complete, or why the backend cannot run."""
    config = service.config
    backend = config.registry[request["backend"]]
    device = config.device_of(backend)
    with service.watch(Activity(CaseId(backend.name, ""), Phase.COMPILE)):
        if (reason := backend.availability(device).reason) is not None:
            yield reason.text
        else:
            yield from map(records.plain, take(backend, device, config.level))


def take(backend: Backend, device: str, level: str = "quick") -> Iterator[Print]:
    """The fingerprint of a backend, column by column.

    Args:
        backend: whose.
        device: where it computes.
        level: ``quick`` leaves out rare columns where each is a compile, see :func:`columns_for`.
    """
    for column in columns_for(backend, level):
        started = time.perf_counter()
        try:
            found = examine(backend, column, device)
        except Exception as error:  # of a compiler or a kernel under test; the columns behind it are asked all the same
            first = next(iter(str(error).strip().splitlines()), "")
            found = Print(column.name, column.line, findings=[f"it raised {type(error).__name__}: {first}"])
        found.traits = {name: found.traits[name] for name in PROBES if name in found.traits}
        found.seconds = round(time.perf_counter() - started, 2)
        yield found


def _bench(backend: Backend, problem: Problem, device: str) -> Bench:
    """The problem, compiled and run once.

    Raises:
        Unsupported, Pruned: when the backend does not compute it.
    """
    if (refusal := backend.supports(problem, DEFAULT)) is not None:
        raise refusal
    from pytest_gemm.operands import tensors

    given = tensors.make(problem, "rand", 0, device)
    prepared = backend.prepare(problem, given, DEFAULT)
    prepared.run(given)
    return Bench(prepared, given)


def examine(backend: Backend, column: Column, device: str) -> Print:
    """One column of a backend's fingerprint, with its refusal where there is one."""
    problem = column.problem
    found = Print(column.name, problem.line)
    try:
        bench = _bench(backend, problem, device)
    except (Unsupported, Pruned) as refusal:
        found.refusal = refusal.reason.text
        return found
    proof = bench.prepared.proof()
    found.kernels = proof.kernels
    if (objection := proof.objection()) is not None:
        found.findings.append(f"it is not the backend that computes: {objection.text}")
    examination = Examination(bench, found)
    examination.run(is_long=column.long)
    if column.aux:
        for wanted, probe in (
            (column.one_row, examination.batch_invariance),
            (column.clamped, examination.epilogue),
        ):
            with contextlib.suppress(Unsupported, Pruned):
                other = _bench(backend, wanted, device)
                probe(other)
                found.products += other.products
    found.products += bench.products
    return found


def changes(old: Sequence[Print], new: Sequence[Print]) -> list[str]:
    """What differs between a stored fingerprint and this one: a sentence for each probe of each column in both.

    ``drift`` and ``error slope`` follow from the rest and depend on the threads, so only the others count.
    """
    before = {(found.column, found.problem): found for found in old}
    texts = []
    for found in new:
        was = before.get((found.column, found.problem))
        if was is None:
            continue
        if bool(was.refusal) != bool(found.refusal):
            now = f"not supported any more ({found.refusal})" if found.refusal else "supported now"
            texts.append(f"{found.column}: {now}")
            continue
        for probe in PROBES:
            a, b = was.traits.get(probe, "-"), found.traits.get(probe, "-")
            if a != b and probe not in {"drift", "error slope"}:
                texts.append(f"{found.column}: {probe} was {a} and is {b}")
    return texts


# -- text --------------------------------------------------------------------------------------------------------


def table(prints: Sequence[Print], width: int = WIDTH) -> list[str]:
    """Rows of probes under columns of dtypes, in as many tables as fit ``width``; unsupported columns are left out."""
    tables: list[list[Print]] = []
    left = 0
    for found in prints:
        if found.traits:
            size = max(map(len, (found.column, *found.traits.values()))) + 2
            if size > left:
                tables.append([])
                left = width - max(map(len, PROBES)) - 2
            tables[-1].append(found)
            left -= size
    lines = []
    for columns in tables:
        rows = [(probe, *(found.traits.get(probe, "-") for found in columns)) for probe in PROBES]
        head = ("", *(found.column for found in columns))
        shown = [row for row in rows if set(row[1:]) != {"-"}]
        lines += [*text_table(head, shown, range(1, len(head))), ""]
    return lines


def sentences(found: Fingerprint) -> list[str]:
    """Findings first, then what is remarkable, with the columns that it holds for; then refusals and what broke."""
    texts, columns = [], defaultdict[str, list[str]](list)
    for one in found.columns:
        kernels = ", ".join(one.kernels)
        texts += [f"FINDING {one.column}: {text} ({one.problem}, {kernels})" for text in one.findings]
    for one in found.columns:
        for text in one.remarks:
            columns[text].append(one.column)
    for one in found.columns:
        if one.refusal:
            columns[f"unsupported: {one.refusal}"].append(one.column)
    texts += [f"{', '.join(names)}: {text}" for text, names in columns.items()]
    if found.broken:
        texts.append(f"BROKEN after {len(found.columns)} columns: {found.broken}")
    return _wrapped(texts)


def _wrapped(texts: Sequence[str]) -> list[str]:
    wrapper = textwrap.TextWrapper(WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    return [line for text in texts for line in wrapper.wrap(text)]


# -- files -------------------------------------------------------------------------------------------------------


def path_of(folder: Path, key: str, backend: str) -> Path:
    """Where the fingerprint of a backend is kept: beside its baselines."""
    return folder / key / f"{backend}.fingerprint.json"


def save(path: Path, found: Fingerprint) -> None:
    """Write it whole or not at all; sorted and indented, so that a diff of two shows what changed."""
    content = records.plain(found)
    del content["broken"]
    for column in content["columns"]:
        del column["seconds"]  # the only value that no two runs share
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, (json.dumps({"format": content.pop("format"), **content}, indent=1) + "\n").encode())


def load(path: Path) -> Fingerprint | None:
    """A stored fingerprint; ``None`` where there is none.

    Raises:
        ValueError: for a file that is none.
        OSError: for one that cannot be read.
    """
    import msgspec

    try:
        return msgspec.json.decode(path.read_bytes(), type=Fingerprint)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not a fingerprint of format {_FORMAT}: {error}") from None
