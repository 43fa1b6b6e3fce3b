"""Outcomes as records: one line of JSON each, and the properties of a JUnit report.

msgspec checks the types; it is imported with the first record, not when pytest starts.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Outcome, Status

T = TypeVar("T")

_CASE: Final = tuple(field.name for field in dataclasses.fields(CaseId))

# -- the run record --------------------------------------------------------------------------------


def plain(value: object) -> Any:
    """A dataclass as JSON data: dictionaries, lists, strings and numbers."""
    import msgspec

    return msgspec.to_builtins(value, enc_hook=str)  # of a subclass of str, such as torch's version


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
    """An outcome as JSON data, the keys of its case among its own; what crosses from xdist's workers."""
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


def junit_properties(records: Iterable[Mapping[str, Any]], verdicts: Iterable[str] = ()) -> list[tuple[str, object]]:
    """What a JUnit report says of a test: backend, candidates, kernels, status, worst error/bound, why, the gate."""
    outcomes = [from_record(record) for record in records]
    if not outcomes:
        return []
    case = outcomes[0].case
    ratios = [o.ratio for o in outcomes if o.ratio is not None]
    asked = {"mode": case.mode.value, "threads": case.threads, "run_threads": case.run_threads, "isa": case.isa}
    properties: dict[str, object] = {
        "backend": case.backend,
        "problem": case.problem,
        **{name: value for name, value in asked.items() if value},
        "candidate": ", ".join(dict.fromkeys(name for o in outcomes for name in o.candidates)),
        "kernel": ", ".join(dict.fromkeys(kernel for o in outcomes for kernel in o.kernels)),
        "status": str(status_of(outcomes)),
        "error_over_bound": ratio_text(max(ratios, default=None)),
    }
    ended = next((o for o in outcomes if o.status is status_of(outcomes)), outcomes[0])
    why = {"code": ended.code, "reason": ended.reason and ended.why, "known_failure": ended.known_failure}
    properties |= {name: value for name, value in {**why, "verdict": ", ".join(verdicts)}.items() if value}
    return [(f"gemm_{name}", value) for name, value in properties.items()]


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


_SEVERITY = (
    Status.CRASHED,
    Status.TIMED_OUT,
    Status.INCORRECT,
    Status.FALLBACK,
    Status.IMPOSSIBLE,
    Status.MISTRUSTED,
    Status.KNOWN_FAILURE,
    Status.PASSED,
    Status.PRUNED,
    Status.UNSUPPORTED,
    Status.NOT_RUN,
)
