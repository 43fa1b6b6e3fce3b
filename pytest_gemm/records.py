"""Outcomes as records: one line of JSON each, and the properties of a JUnit report."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from pytest_gemm.outcome import Outcome, Reason, Seconds, Status

# -- the run record --------------------------------------------------------------------------------


def to_record(outcome: Outcome) -> dict[str, Any]:
    """An outcome as plain JSON data; what crosses from xdist's workers, and a line of the run record."""
    record = dataclasses.asdict(outcome)
    record["status"] = str(outcome.status)
    record["kernels"] = list(outcome.kernels)
    record["chosen"] = list(outcome.chosen)
    record["configuration"] = list(outcome.configuration)
    if outcome.ratio is not None and not math.isfinite(outcome.ratio):
        record["ratio"] = "inf"  # JSON has no infinity
    return record


def from_record(record: Mapping[str, Any]) -> Outcome:
    """The outcome of a record made by :func:`to_record`; unknown keys are ignored."""
    names = {field.name for field in dataclasses.fields(Outcome)}
    data = {key: value for key, value in record.items() if key in names}
    data["status"] = Status(data["status"])
    data["reason"] = Reason(**data["reason"]) if data.get("reason") else None
    data["kernels"] = tuple(data.get("kernels", ()))
    data["chosen"] = tuple(data.get("chosen", ()))
    data["configuration"] = tuple(data.get("configuration", ()))
    data["seconds"] = Seconds(**data.get("seconds", {}))
    if data.get("ratio") == "inf":
        data["ratio"] = math.inf
    return Outcome(**data)


def record_line(record: Mapping[str, Any]) -> str:
    """A record as one line of the run record, keys sorted so that two runs can be diffed."""
    return json.dumps(record, sort_keys=True) + "\n"


def junit_properties(records: Iterable[Mapping[str, Any]]) -> list[tuple[str, object]]:
    """What a JUnit report says of a test: backend, candidates, kernels, status, worst error/bound."""
    outcomes = [from_record(record) for record in records]
    if not outcomes:
        return []
    kernels = dict.fromkeys(kernel for o in outcomes for kernel in o.kernels)
    ratios = [o.ratio for o in outcomes if o.ratio is not None]
    return [
        ("gemm_backend", outcomes[0].backend),
        ("gemm_problem", outcomes[0].problem),
        *([("gemm_mode", outcomes[0].mode)] if outcomes[0].mode else []),
        *([("gemm_threads", outcomes[0].threads)] if outcomes[0].threads else []),
        *([("gemm_isa", outcomes[0].isa)] if outcomes[0].isa else []),
        ("gemm_choice", ", ".join(dict.fromkeys(name for o in outcomes for name in candidates(o)))),
        ("gemm_kernel", ", ".join(kernels)),
        ("gemm_status", str(status_of(outcomes))),
        ("gemm_error_over_bound", ratio_text(max(ratios, default=None))),
    ]


def ratio_text(ratio: float | None) -> str:
    """An error/bound ratio for a table."""
    if ratio is None:
        return "-"
    if math.isnan(ratio) or math.isinf(ratio):
        return "inf"
    return f"{ratio:.3g}"


def status_of(outcomes: Iterable[Outcome]) -> Status:
    """The worst status among the outcomes of one problem."""
    return min((o.status for o in outcomes), key=_SEVERITY.index, default=Status.NOT_RUN)


def candidates(outcome: Outcome) -> tuple[str, ...]:
    """The candidates that an outcome speaks of: the one that was asked for, or those that were chosen."""
    return (outcome.choice,) if outcome.choice else outcome.chosen


_SEVERITY = (
    Status.CRASHED,
    Status.TIMED_OUT,
    Status.INCORRECT,
    Status.FALLBACK,
    Status.MISTRUSTED,
    Status.KNOWN_FAILURE,
    Status.PASSED,
    Status.PRUNED,
    Status.UNSUPPORTED,
    Status.NOT_RUN,
)
