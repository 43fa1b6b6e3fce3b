"""What a worker in another process says: data whose types are checked."""

from __future__ import annotations

from typing import Any

import msgspec

from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import Candidates
from pytest_gemm.core.outcome import Reason
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.worker import memory
from pytest_gemm.worker.messages import Built


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
        proof, contract: as of ``Ran``.
    """

    forms: list[memory.Form]
    number: int
    left: int = 0
    proof: Proof | None = None
    contract: Contract | None = None


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
