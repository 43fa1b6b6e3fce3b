"""The suite as on other processors: each library capped alone, by the variables that it reads.

``python tests/studies/caps.py [--level=quick] [--tests] [CAP ...]`` writes the table of docs/results/caps.md, and ends
with 1 where a run failed.  A CAP is ``ONEDNN_MAX_CPU_ISA=AVX2``; without one all that this processor has.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

from pytest_gemm.core.outcome import Status
from pytest_gemm.core.text import show
from pytest_gemm.machine import isa, processor
from pytest_gemm.record import reader

_LEVELS: Final = {
    "ONEDNN_MAX_CPU_ISA": (
        *("SSE41", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16", "AVX512_CORE_FP16"),
    ),
    "ATEN_CPU_CAPABILITY": ("default", "avx2", "avx512"),
    "MKL_ENABLE_INSTRUCTIONS": ("AVX2",),
}
# Under these the project's own tests run with --tests: what most users' processors were, and ATen without AVX-512.
_OF_TESTS: Final = ("ONEDNN_MAX_CPU_ISA=AVX512_CORE", "ATEN_CPU_CAPABILITY=avx2")


def environment(cap: str) -> dict[str, str]:
    """The environment of a process under a cap, ``VARIABLE=LEVEL``; "" for none."""
    variable, _, level = cap.partition("=")
    free = {name: value for name, value in os.environ.items() if name not in _LEVELS}
    return free | ({variable: level} if cap else {})


def takes_something(cap: str) -> bool:
    """Whether this processor has what a cap takes away."""
    variable, _, level = cap.partition("=")
    before = os.environ.get(variable)
    os.environ[variable] = level
    try:
        return bool(isa.caps(processor.cpu().flags))
    finally:
        os.environ.pop(variable)
        if before is not None:
            os.environ[variable] = before


def row(cap: str, level: str) -> tuple[list[object], list[str], int]:
    """The line of the table, the failures of unknown cause, and the exit status of a run of the suite under a cap."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--gemm-backends=aten,cpp", "--gemm-device=cpu", f"--gemm-level={level}", f"--gemm-output={folder}"]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", *words, "-n", "auto"]
        done = subprocess.run(
            [*command, "pytest_gemm.conformance"], env=environment(cap), stdout=subprocess.DEVNULL, check=False
        )
        run = reader.read(Path(folder))
    counts = Counter(outcome.status for outcome in run.outcomes)
    red = [outcome for outcome in run.outcomes if outcome.status.is_failure]
    entries = len({outcome.known_failure for outcome in run.outcomes if outcome.known_failure})
    shown = [counts[status] for status in (Status.PASSED, Status.KNOWN_FAILURE, Status.UNSUPPORTED)]
    failures = [f"{outcome.status} {outcome.backend} {outcome.problem} {outcome.distribution}" for outcome in red]
    name = cap or "none"
    seconds = f"{run.totals.wall_seconds:.0f}"
    return [f"`{name}`", *shown, entries, len(red), done.returncode, seconds], failures, done.returncode


def main() -> int:
    """Run, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("caps", nargs="*", metavar="CAP")
    parser.add_argument("--level", default="quick")
    parser.add_argument("--tests", action="store_true", help=f"the project's tests under {' and '.join(_OF_TESTS)} too")
    given = parser.parse_args()
    every = ["", *(f"{name}={level}" for name, levels in _LEVELS.items() for level in levels)]
    caps = given.caps or [cap for cap in every if not cap or takes_something(cap)]
    status = 0
    heads = ["cap", "passed", "known failures", "unsupported", "entries", "failed", "status", "seconds"]
    show(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n")
    for cap in caps:
        cells, failures, returned = row(cap, given.level)
        show(f"| {' | '.join(map(str, cells))} |\n")
        sys.stdout.flush()  # each takes minutes
        status |= returned
        for failure in failures:
            sys.stderr.write(f"{cap or 'no cap'}: {failure}\n")
    for cap in _OF_TESTS if given.tests else ():
        command = [sys.executable, "-m", "pytest", "tests", "-q", "-n", "auto"]
        status |= subprocess.run(command, env=environment(cap), check=False).returncode
    return int(bool(status))


if __name__ == "__main__":
    sys.exit(main())
