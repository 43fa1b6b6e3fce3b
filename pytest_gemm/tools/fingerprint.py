"""The numerical fingerprint of a backend: small products whose answers name the arithmetic that computed them.

Each probe plants values in the operands of one compiled problem so that the result, read bit by bit, can only have come
about in one way: ``1 + 2^-24 - 1`` is 0 in float32, ``1 + 1.5 * 2^-24 - 1`` is 2^-23 where sums round to nearest and 0
where they are cut.  A :class:`Column` is a problem; all of its probes share its artifact, for a compile may take a
minute and a product takes microseconds.  ``docs/fingerprint.md`` has every probe with its formula and its source.

What a backend declares (``backend.Contract``) is held against what was seen: a bound that follows from
the seen arithmetic and is larger than the declared one is a *finding*.  What is merely worth knowing is a *remark*.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from pytest_gemm.api.protocols import Backend
from pytest_gemm.api.request import DEFAULT
from pytest_gemm.outcome import Pruned, Unsupported
from pytest_gemm.problem.problem import Problem
from pytest_gemm.tools.examination import Examination
from pytest_gemm.tools.probes import PROBES, Bench, Column, Print, columns_for


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
    before = {found.column: found for found in old}
    said = []
    for found in new:
        was = before.get(found.column)
        if was is None or was.problem != found.problem:
            continue
        if bool(was.refusal) != bool(found.refusal):
            now = f"refused now ({found.refusal})" if found.refusal else "computed now, and was refused"
            said.append(f"{found.column}: {now}")
            continue
        for probe in PROBES:
            a, b = was.traits.get(probe, "-"), found.traits.get(probe, "-")
            if a != b and probe not in {"drift", "error slope"}:
                said.append(f"{found.column}: {probe} was {a} and is {b}")
    return said
