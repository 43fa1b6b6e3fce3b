"""What tests took in earlier runs on this machine, in the cache folder: how long a run will take."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

from pytest_gemm.config import GemmConfig
from pytest_gemm.machine import processor
from pytest_gemm.storage import cache, files

WORTH_A_LINE: Final = 10.0
"""Seconds: no estimate is shown of a shorter run, and none is recorded."""
# Options on which the seconds of a test depend that its name does not have.
_OPTIONS: Final = ("level", "candidates", "distributions", "reference", "guard", "threads", "device")
# Tests that are kept of each kind of run; those that ran last.
_MOST: Final = 50_000
# Medians in seconds with empty caches, of the tests of the suites and of any other test: two cores of an AMD EPYC.
_USUAL_TEST: Final = 0.3
_USUAL_ANY_SIZE: Final = 0.7
_USUAL: Final = {"test_new_weights_in_another_process": 8.0, "test_new_weights_in_one_process": 2.0}
# Multiplications of numbers that the reference makes in a second, there.
_PRODUCTS: Final = 4e8
_SIZES: Final = re.compile(r":((?:\d+x){2,}\d+)")


@dataclasses.dataclass(frozen=True)
class Taken:
    """What a test took.

    Attributes:
        seconds: of the last runs.
        runs: in how many it was recorded; the first one compiles what the cache has later.
    """

    seconds: float
    runs: int


def path_of(config: GemmConfig, *kind: object) -> Path:
    """The file for runs like this one: with this CPU, this torch and these options.

    Args:
        config: of the run.
        kind: what else the seconds depend on, where they are not those of tests.
    """
    cpu = processor.cpu()
    facts = [cpu.name, str(cpu.logical), metadata.version("torch"), *(config.options[name] for name in _OPTIONS)]
    facts += map(str, kind)
    return cache.home() / "durations" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.json"


def read(path: Path) -> dict[str, Taken]:
    """What is known, by test; nothing where the file is missing or is none of these."""
    try:
        return {name: Taken(float(s), int(n)) for name, (s, n) in json.loads(path.read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def record(path: Path, seconds: Mapping[str, float]) -> None:
    """Add a run; where the folder cannot be written the next run has no estimate."""
    known = read(path)
    for name, took in seconds.items():
        before = known.pop(name, None)
        if before is None or before.runs == 1:  # that one may have compiled
            known[name] = Taken(took, before.runs + 1 if before else 1)
        else:
            known[name] = Taken((before.seconds + took) / 2, before.runs + 1)
    kept = {name: (round(one.seconds, 3), one.runs) for name, one in [*known.items()][-_MOST:]}
    with contextlib.suppress(OSError):
        files.replace(path, json.dumps(kept).encode())


def name_of(nodeid: str) -> str:
    """A test without the folder that it lies in, which depends on where pytest is started."""
    file, _, rest = nodeid.partition("::")
    return f"{file.rpartition('/')[2]}::{rest}"


def expected(known: Mapping[str, Taken], ids: Iterable[str]) -> dict[str, float]:
    """Seconds of each test: as recorded, else as tests of its function and backend usually take, else a guess.

    Args:
        known: by name.
        ids: of pytest.
    """
    kinds: defaultdict[str, list[float]] = defaultdict(list)
    for name, taken in known.items():
        kinds[_kind(name)].append(taken.seconds)
    usual = {kind: statistics.median(seconds) for kind, seconds in kinds.items()}

    def seconds(name: str) -> float:
        if name in known:
            return known[name].seconds
        return _guess(name) if (kind := _kind(name)) not in usual else usual[kind] + _size(name)

    return {nodeid: seconds(name_of(nodeid)) for nodeid in ids}


def _kind(name: str) -> str:
    """File, function and backend of a test."""
    return name.partition("-")[0]


def _guess(name: str) -> float:
    """Where nothing like it is known: an order, longest first, is all that is made of it."""
    function = name.partition("[")[0].rpartition(":")[2]
    return _USUAL.get(function, _USUAL_ANY_SIZE if ".dynamic" in name else _USUAL_TEST) + _size(name)


def _size(name: str) -> float:
    """Seconds that grow with a product, those of the reference; to a tenth, so that most tests keep their order."""
    sizes = _SIZES.search(name)
    return round(math.prod(map(int, sizes[1].split("x"))) / _PRODUCTS, 1) if sizes else 0.0


def estimate(known: Mapping[str, Taken], groups: Iterable[Iterable[str]], workers: int) -> str:
    """How long tests will take, ``about 50 s`` or ``at most 3 min``; "" where too little is known, or for a short time.

    Args:
        known: by test.
        groups: the tests that stay on one worker, together.
        workers: how many share the tests.
    """
    loads, every, asked, found = [], list[Taken](), 0, 0
    for group in groups:
        names = list(group)
        taken = [known[name] for name in names if name in known]
        asked, found = asked + len(names), found + len(taken)
        loads.append(sum(one.seconds for one in taken))
        every += taken
    if not found or found * 2 < asked:
        return ""
    total = sum(loads)
    seconds = max(total / workers, *loads) * asked / found
    if seconds < WORTH_A_LINE:
        return ""
    return f"{hedge(every)} {words(seconds)}"


def hedge(taken: Iterable[Taken]) -> str:
    """``at most`` where most of the time was recorded once, in a run that may have compiled; else ``about``."""
    every = list(taken)
    first = sum(one.seconds for one in every if one.runs == 1)
    return "at most" if first * 2 > sum(one.seconds for one in every) else "about"


def words(seconds: float) -> str:
    """Seconds for people, rounded up: ``50 s``, ``3 min``, ``2.0 h``."""
    if seconds < 95:
        return f"{math.ceil(seconds / 10) * 10} s"
    return f"{math.ceil(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
