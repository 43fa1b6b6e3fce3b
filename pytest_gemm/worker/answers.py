"""What a worker in another process says: data whose types are checked."""

from __future__ import annotations

from typing import Any

import msgspec

from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import Candidates
from pytest_gemm.core.outcome import Misconduct, Reason
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.numerics.tensor_core import widest
from pytest_gemm.worker import memory
from pytest_gemm.worker.messages import Built, Job


class Refusal(msgspec.Struct, frozen=True):
    """An exception that has a reason."""

    kind: str
    reason: Reason


class Failure(msgspec.Struct, frozen=True):
    """Any other exception."""

    kind: str
    line: str
    details: str
    memory: Reason | None
    lost: Reason | None


class RanForm(msgspec.Struct, frozen=True):
    """A run.

    Attributes:
        forms: of its results.
        number: by which the worker finds them again; 0: it does not keep them.
        left: how many bytes of them wait to be fetched on the device; else they follow.
        proof, contract, objection: as of ``Ran``.
    """

    forms: list[memory.Form]
    number: int
    left: int = 0
    proof: Proof | None = None
    contract: Contract | None = None
    objection: Reason | None = None


def held(job: Job, stated: Contract) -> Contract:
    """The contract that a worker states, where it is within one that is registered here.

    Raises:
        Misconduct: where it is wider than each.
    """
    contracts = getattr(job.backend, "contracts", None)
    known = contracts(job.problem, job.request) if contracts else widest(job.problem, job.request.device)
    wider = [own.wider(stated, job.problem.terms) for own in known]
    if not all(wider):
        return stated
    name, own = wider[-1], known[-1]
    text = f"the kernel's process states {name}={getattr(stated, name)!r}, and {getattr(own, name)!r} is registered"
    raise Misconduct("contract-widened", text, "register it, or return it from contracts() of the backend's class")


class Answer(msgspec.Struct, frozen=True):
    """What a worker says: one of these, or nothing."""

    refusal: Refusal | None = None
    failure: Failure | None = None
    defect: str = ""
    built: Built | None = None
    candidates: Candidates | None = None
    ran: RanForm | None = None
    refused: str = ""
    said: Any = None
