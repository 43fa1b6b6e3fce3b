"""Two releases or two environments in one report: ``pytest-gemm compare BEFORE AFTER``."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_gemm.compare import report, runs
from pytest_gemm.compare.runs import Run
from pytest_gemm.core.text import show
from pytest_gemm.storage import files


def run(given: argparse.Namespace) -> int:
    """Print the report; returns 1 where a case is newly wrong or slower or the later run did not end."""
    before, after = _load(given.before, given.after)
    found = report.compared(before, after)
    if given.html is not None:
        files.replace(given.html, found.html().encode(errors="backslashreplace"))
    show(found.text(markdown=given.markdown, whole=given.all))
    return int(found.is_bad)


def _load(*paths: Path) -> tuple[Run, Run]:
    """Both runs.

    Raises:
        ValueError: for what is no run; of an environment, with the command that makes its record.
    """
    pythons = [None if path.is_dir() and (path / "run.jsonl").exists() else runs.interpreter(path) for path in paths]
    other = next((runs.load(path).record.run for path, one in zip(paths, pythons, strict=True) if not one), None)
    for path, python in zip(paths, pythons, strict=True):
        if python:
            raise ValueError(
                f"{path}: is an environment, not a run record; make its record by `{runs.recipe(python, other)}` "
                "and name DIR in its place"
            )
    before, after = map(runs.load, paths)
    return before, after
