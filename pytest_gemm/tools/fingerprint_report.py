"""``pytest-gemm fingerprint``: how each backend computes, as tables that a kernel engineer reads, and as files.

Each backend is asked in a process of its own, as by the doctor, and writes down a column as soon as it is known: a
kernel that kills its process costs the columns after it.  A file holds the fingerprint of a backend on one hardware
key, beside its baselines; the next run says what an update has changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import os
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import pytest

from pytest_gemm import __version__
from pytest_gemm.machine import key as key_module
from pytest_gemm.machine import software as software_module
from pytest_gemm.problem.axes import LEVELS
from pytest_gemm.storage import files
from pytest_gemm.tools import doctor, screen_of_backends
from pytest_gemm.tools.fingerprint import changes, take
from pytest_gemm.tools.probes import PROBES, Print

if TYPE_CHECKING:
    from pytest_gemm.api.protocols import Backend
    from pytest_gemm.config import GemmConfig


_WIDTH: Final = 118
_FORMAT: Final = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``pytest-gemm fingerprint``."""
    screen_of_backends.add_arguments(parser)
    parser.add_argument("--level", default="quick", choices=LEVELS, help="how many columns (default: quick)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="store the fingerprints there, by hardware key")
    parser.add_argument(
        "--baselines", default="baselines", metavar="DIR", help="stored ones to compare with (default: baselines)"
    )


def run(given: argparse.Namespace) -> int:
    """Show how each backend computes; returns 1 for a finding, and where a named backend cannot run."""
    options = (f"--gemm-level={given.level}", f"--gemm-baselines={given.baselines}")
    output = given.output.absolute() if given.output else None
    return screen_of_backends.show(given, functools.partial(report, output=output), options)


@dataclasses.dataclass
class Fingerprint:
    """What is known of one backend on one device.

    Attributes:
        backend, device: whose, and where.
        key: the hardware key.
        prints: its columns.
        missing: why the backend cannot run here; "" when it can.
        broken: why columns are missing: a signal, an exception, a limit; "" when all is there.
        software: versions by name.
        date: ISO 8601, UTC.
    """

    backend: str
    device: str
    key: str
    prints: list[Print] = dataclasses.field(default_factory=list)
    missing: str = ""
    broken: str = ""
    software: dict[str, str] = dataclasses.field(default_factory=dict)
    date: str = ""

    @property
    def sound(self) -> bool:
        """Whether everything was asked and nothing contradicts the contract."""
        return not self.broken and not any(found.findings for found in self.prints)


def report(config: GemmConfig, write: Callable[[str], object], output: Path | None = None) -> bool:
    """Write everything, backend by backend, and store it where that was asked for.

    Args:
        config: which backends are asked, at which level, and where to store.
        write: takes a line.
        output: folder to store them in; ``None``: nowhere.

    Returns:
        Whether all is well: no finding, nothing broken, and every backend that was named can run
        (``--allow-missing`` forgives that).
    """
    healthy = True
    stored = {backend.name: _stored(config, backend, output) for backend in config.backends}
    for backend in config.backends:
        started = time.perf_counter()
        found = _ask(config, backend)
        seconds = time.perf_counter() - started
        write("")
        head = f"{found.backend} on {found.device} ({found.key})"
        if found.missing:
            write(f"{head}: cannot run: {found.missing}")
            healthy = healthy and not (config.named and "missing" not in config.allow)
            continue
        products = sum(one.products for one in found.prints)
        write(f"{head}: {products} products in {seconds:.0f} s")
        lines = [*table(found.prints), *sentences(found)]
        for line in lines + _compared(config, stored[backend.name], found, output):
            write(line)
        healthy = healthy and found.sound
    return healthy


def _key(config: GemmConfig, device: str) -> str:
    return key_module.hardware_key("cuda" if device == "cuda" else "cpu", config.speed.threads)


def _stored(config: GemmConfig, backend: Backend, output: Path | None) -> Fingerprint | None:
    """The stored fingerprint of a backend.

    Raises:
        pytest.UsageError: when it cannot be read; before anything is asked, which takes minutes.
    """
    path = path_of(output or config.speed.baselines, _key(config, config.device_of(backend)), backend.name)
    try:
        return load(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise pytest.UsageError(f"{path}: {why}; restore the file, or delete it") from None


def _compared(config: GemmConfig, old: Fingerprint | None, found: Fingerprint, output: Path | None) -> list[str]:
    """What changed against the stored fingerprint; stores the new one where that was asked for."""
    path = path_of(output or config.speed.baselines, found.key, found.backend)
    lines = _comparison(old, found) if old is not None else []
    if output is not None and found.prints:
        if found.broken:
            lines.append(f"not stored, for it is not complete: {path}")
        else:
            save(path, found)
            lines.append(f"stored: {path}")
    return lines


def _comparison(old: Fingerprint, new: Fingerprint) -> list[str]:
    """The sentences about an update."""
    said = changes(old.prints, new.prints)
    updates = [
        f"{name} {old.software.get(name, 'none')} -> {version}"
        for name, version in new.software.items()
        if old.software.get(name) != version
    ]
    since = f"since {old.date[:10]}" + (f" ({', '.join(updates)})" if updates else "")
    if not said:
        return [f"the arithmetic has not changed {since}"]
    return [f"the arithmetic has changed {since}:", *(line for text in said for line in _wrapped(text))]


# -- asking ----------------------------------------------------------------------------------------------------


def _ask(config: GemmConfig, backend: Backend) -> Fingerprint:
    device = config.device_of(backend)
    handle, name = tempfile.mkstemp(prefix="pytest-gemm-", suffix=".jsonl")
    os.close(handle)
    notes = Path(name)
    try:
        answer = doctor.in_child(
            lambda: _columns(backend, device, config.threads, config.level, notes), config.compile_timeout or None
        )
        text = notes.read_text(encoding="utf-8")
    finally:
        notes.unlink(missing_ok=True)
    records = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    found = Fingerprint(
        backend.name, device, _key(config, device), broken=answer.get("error", ""), missing=answer.get("missing", "")
    )
    if not found.missing:
        found.prints = [Print.from_dict(record) for record in records]
    found.software = {"pytest-gemm": __version__, **software_module.software("cuda" if device == "cuda" else "cpu")}
    found.date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return found


def _columns(backend: Backend, device: str, threads: int, level: str, notes: Path) -> dict[str, Any]:
    """In the child: a line of JSON for each column, as soon as it is known."""
    reason = backend.availability(device).reason
    if reason is not None:
        return {"missing": reason.text}
    import torch

    torch.set_num_threads(threads)
    with notes.open("a", encoding="utf-8") as file:
        for found in take(backend, device, level):
            file.write(json.dumps(found.to_dict()) + "\n")
            file.flush()
    return {}


# -- text --------------------------------------------------------------------------------------------------------


def table(prints: Sequence[Print], width: int = _WIDTH) -> list[str]:
    """Rows of probes under columns of dtypes, in as many tables as fit ``width``; refused columns are left out."""
    shown = [found for found in prints if found.traits]
    label = max(map(len, PROBES)) + 2
    lines: list[str] = []
    while shown:
        taken: list[tuple[Print, int]] = []
        used = label
        while shown:
            cells = [shown[0].column, *shown[0].traits.values()]
            size = max(map(len, cells)) + 2
            if taken and used + size > width:
                break
            taken.append((shown.pop(0), size))
            used += size
        rows = [("", [found.column for found, _ in taken])]
        for probe in PROBES:
            cells = [found.traits.get(probe, "-") for found, _ in taken]
            if any(cell != "-" for cell in cells):
                rows.append((probe, cells))
        for name, cells in rows:
            padded = "".join(cell.rjust(size) for cell, (_, size) in zip(cells, taken, strict=True))
            lines.append(f"{name:<{label}}{padded}")
        lines.append("")
    return lines


def sentences(found: Fingerprint) -> list[str]:
    """Findings first, then what is remarkable, with the columns that it holds for; then refusals and what broke."""
    lines = []
    for one in found.prints:
        for text in one.findings:
            lines += _wrapped(f"FINDING {one.column}: {text} ({one.problem}, {', '.join(one.kernels)})")
    remarks: dict[str, list[str]] = {}
    for one in found.prints:
        for text in one.remarks:
            remarks.setdefault(text, []).append(one.column)
    for text, columns in remarks.items():
        lines += _wrapped(f"{', '.join(columns)}: {text}")
    refusals: dict[str, list[str]] = {}
    for one in found.prints:
        if one.refusal:
            refusals.setdefault(one.refusal, []).append(one.column)
    for text, columns in refusals.items():
        lines += _wrapped(f"{', '.join(columns)}: refused: {text}")
    if found.broken:
        lines += _wrapped(f"BROKEN after {len(found.prints)} columns: {found.broken}")
    return lines


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


# -- files -------------------------------------------------------------------------------------------------------


def path_of(folder: Path, key: str, backend: str) -> Path:
    """Where the fingerprint of a backend is kept: beside its baselines."""
    return folder / key / f"{backend}.fingerprint.json"


@dataclasses.dataclass
class _File:
    """The content of a fingerprint's file, as :func:`save` writes it."""

    format: Literal[1]
    backend: str
    device: str
    hardware: str
    date: str
    software: dict[str, str]
    columns: list[Print]


def save(path: Path, found: Fingerprint) -> None:
    """Write it whole or not at all; sorted and indented, so that a diff of two shows what changed."""
    columns = []
    for one in found.prints:
        column = one.to_dict()
        del column["seconds"]  # the only figure that no two runs share
        columns.append(column)
    content = {
        "format": _FORMAT,
        "backend": found.backend,
        "device": found.device,
        "hardware": found.key,
        "date": found.date,
        "software": found.software,
        "columns": columns,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, (json.dumps(content, indent=1) + "\n").encode())


def load(path: Path) -> Fingerprint | None:
    """A stored fingerprint; ``None`` where there is none.

    Raises:
        ValueError: for a file that is none.
        OSError: for one that cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    import msgspec

    try:
        found = msgspec.json.decode(text, type=_File)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not a fingerprint of format {_FORMAT}: {error}") from None
    return Fingerprint(
        found.backend, found.device, found.hardware, found.columns, software=found.software, date=found.date
    )
