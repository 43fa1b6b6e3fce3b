"""What tests took last time: a record of their seconds, from which a run expects its own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

import pytest

from pytest_gemm.config.config import CONFIG, GemmConfig
from pytest_gemm.machine import processor
from pytest_gemm.storage import cache, files

# Seconds: a shorter run is not recorded.
_WORTH_KEEPING: Final = 10.0
# Options on which the seconds of a test depend that its name does not have.
_OPTIONS: Final = ("level", "candidates", "distributions", "reference", "guard", "threads", "device")
# Tests that are kept of each kind of run; those that ran last.
_MOST: Final = 50_000
# Seconds of a test that is not recorded, and multiplications a second that the reference makes for it.
USUAL: Final = 0.3
_PRODUCTS: Final = 4e8
# Of a size, how much of it tells how many candidates there are: no block of a Triton template is larger.
_WIDEST: Final = 256
_SIZES: Final = re.compile(r":((?:\d+x){2,}\d+)")


def register(config: pytest.Config) -> None:
    """Add the hooks, in the process that reports, of a run that judges."""
    settings = config.stash[CONFIG]
    if not (config.option.collectonly or settings.compile_only or settings.fuzz):
        config.pluginmanager.register(_Durations(config), "gemm-durations")


def path_of(config: GemmConfig) -> Path:
    """The record of runs like this one: with this CPU, this torch and these options."""
    cpu = processor.cpu()
    facts = [cpu.name, str(cpu.logical), metadata.version("torch"), *(config.options[name] for name in _OPTIONS)]
    return cache.home() / "durations" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.json"


def read(path: Path) -> dict[str, float]:
    """The recorded seconds by test; nothing where the file is missing or is no such record."""
    try:
        return {name: float(seconds) for name, seconds in json.loads(path.read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def record(path: Path, seconds: Mapping[str, float]) -> None:
    """Add a run; where the folder cannot be written the next run knows nothing of it."""
    earlier = {name: took for name, took in read(path).items() if name not in seconds}
    kept = [*earlier.items(), *((name, round(took, 3)) for name, took in seconds.items())][-_MOST:]
    with contextlib.suppress(OSError):
        files.replace(path, json.dumps(dict(kept)).encode())


def expected(known: Mapping[str, float], ids: Iterable[str], *, every: bool = False) -> dict[str, float]:
    """Seconds of each test: as recorded, else a guess that grows with its product, as the reference does.

    Args:
        known: what tests took in earlier runs.
        ids: the tests.
        every: every candidate is judged; there are more of them for larger blocks.
    """

    def guess(name: str) -> float:
        if (found := _SIZES.search(name)) is None:
            return USUAL
        sizes = [int(size) for size in found[1].split("x")]
        candidates = math.prod(min(size, _WIDEST).bit_length() for size in sizes[-3:]) / 10 if every else 1
        # To a tenth, so that most tests keep their order.
        return USUAL * candidates + round(math.prod(sizes) / _PRODUCTS, 1)

    return {nodeid: known.get(name := name_of(nodeid), guess(name)) for nodeid in ids}


def name_of(nodeid: str) -> str:
    """A test without the folder that it lies in, which depends on where pytest is started."""
    file, _, rest = nodeid.partition("::")
    return f"{file.rpartition('/')[2]}::{rest}"


class _Durations:
    """Records what the tests took; in the process that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._path = path_of(config.stash[CONFIG])
        self._took: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what a test took."""
        self._took[name_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Record it."""
        if sum(self._took.values()) >= _WORTH_KEEPING:
            record(self._path, self._took)
