"""What the ledger says of a case: whether it may run, and whether its failure is known."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pytest_gemm.core.outcome import WITHHELD, Outcome, Reason, Status
from pytest_gemm.ledger.entry import Environment
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.machine import processor
from pytest_gemm.problem.problem import Problem
from pytest_gemm.record.lines import Use

if TYPE_CHECKING:
    from pytest_gemm.judging.case import Case


def environment(device: str) -> Environment:
    """What the ledger's predicates may ask about this process; imports torch."""
    import torch

    return dataclasses.replace(_installed(device), threads=torch.get_num_threads())


def environment_of(case: Case) -> Environment:
    """The same as a case sees it that has CPU threads of its own, or code for a lower instruction set."""
    return environment(case.device).at(case.isa, case.threads, case.run_threads)


def withheld(ledger: Ledger, case: Case, test: str, candidate: str = "") -> Outcome | None:
    """The outcome of what the ledger forbids to run, because it can kill the process; ``None`` where it may run.

    Called before a case runs: in a test, while fuzzing, and in a session that times it.

    Args:
        ledger: of the run.
        case: what is to be run.
        test: name of the test function.
        candidate: the one candidate of it that is meant, "" for the case as a whole.
    """
    entry = ledger.applicable(case.backend.name, case.problem, test, environment_of(case), candidate, case.mode)
    if entry is None:
        return None
    reason = Reason(WITHHELD, f"not run, it can kill the process: {entry.reason}")
    return Outcome(case.id(candidate), "", case.seed, Status.KNOWN_FAILURE, reason, known_failure=entry.id)


@functools.cache  # a process that has lost its device cannot be asked again
def _installed(device: str) -> Environment:
    """What of it stays as it is while the process lives."""
    import torch

    isa = processor.cpu().flags
    if device == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        isa = (f"sm_{major}{minor}",)
    return Environment(torch=torch.__version__, isa=isa, device=device)


def eager_refusal(ledger: Ledger) -> Callable[[Problem, str], str]:
    """Why eager ATen does not run a problem on a device, in words; "" where it does."""

    def refusal(problem: Problem, device: str) -> str:
        from pytest_gemm.backends.aten import AtenBackend

        if ledger.applicable("aten", problem, "test_product", environment(device)) is not None:
            return "eager is not run: it can kill the process"
        # Some of what eager refuses would be a fault of the device if it were tried.
        refused = AtenBackend().unsupported(problem, device)
        return f"eager cannot: {refused}" if refused else ""

    return refusal


def inherited(outcome: Outcome, problem: Problem, ledger: Ledger, env: Environment) -> Outcome:
    """A failure that PyTorch's own product has too, with the entry that knows it; any other one as it is."""
    from pytest_gemm.judging.inherited import PRODUCT, of_pytorch

    entry = ledger.match(of_pytorch(outcome), problem, env) if outcome.inherited else None
    if entry is None:
        return outcome
    lines = outcome.details.split("\n")
    place = 1 + next(place for place, line in enumerate(lines) if PRODUCT in line)
    lines.insert(place, f"  known failure of PyTorch {entry.id}: {entry.reason}{entry.link and f' ({entry.link})'}")
    return dataclasses.replace(outcome, details="\n".join(lines))


def explain(
    outcomes: Sequence[Outcome], problem: Problem, ledger: Ledger, env: Environment
) -> tuple[list[Outcome], Use]:
    """Turn failures that the ledger knows into known failures, and count how its entries fared."""
    use: Use = {}
    explained = []
    for outcome in outcomes:
        entry = ledger.note(use, outcome, problem, env)
        if entry is None:
            others = [one.id for one in ledger.covering(outcome, problem, env) if outcome.status in one.status]
            text = f"  the known failure {others[0]} has this case, and states another failure" if others else ""
            details = "\n".join(filter(None, (outcome.details, text)))
            explained.append(inherited(dataclasses.replace(outcome, details=details), problem, ledger, env))
        else:
            known = dataclasses.replace(outcome, status=Status.KNOWN_FAILURE, failed_as=outcome.status)
            explained.append(dataclasses.replace(known, known_failure=entry.id))
    return explained, use
