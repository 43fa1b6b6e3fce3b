"""Cases judged with guard pages, in a process that may die of it.

The process is kept from case to case, for importing torch and compiling cost seconds.  When one dies in a case, a new
one is asked again, with one operand at a page at a time: those that kill it alone are named.
"""

from __future__ import annotations

import base64
import dataclasses
import pickle
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from pytest_gemm.api.protocols import Backend
from pytest_gemm.core.outcome import Activity, Outcome, Phase, Reason, Status
from pytest_gemm.core.text import described
from pytest_gemm.isolation.journal import Position, death
from pytest_gemm.isolation.worker import Death, Service, Worker
from pytest_gemm.run.state import eager_refusal

if TYPE_CHECKING:
    from pytest_gemm.config import GemmConfig
    from pytest_gemm.judging.case import Case
    from pytest_gemm.operands.guard_pages import GuardPages


# What the processor says to a program that touches a page that is not its own.
_FAULTS: Final = frozenset({-signal.SIGSEGV, -signal.SIGBUS})


class GuardedJudge:
    """Judges cases in a process of its own, with operands and results at guard pages; one of these a test process.

    Created before this process computes, see ``isolation.worker``.

    Args:
        config: what the run was asked for.
    """

    def __init__(self, config: GemmConfig) -> None:
        self._config = config
        self._keeper = Worker(config, _answer, eager=eager_refusal(config.ledger))

    def judge(self, case: Case) -> list[Outcome]:
        """The outcomes of a case, first with everything ending at a page, then with everything beginning at one."""
        from pytest_gemm.operands.guard_pages import SIDES, GuardPages

        if (refusal := self._refusal(case)) is not None:
            return [Outcome(case.id(), "", case.seed, Status.UNSUPPORTED, refusal)]
        found: list[Outcome] = []
        for side in SIDES:
            outcomes = self._ask(case, GuardPages(side))
            if isinstance(outcomes, Death):
                outcomes = [self._blamed(case, GuardPages(side), outcomes)]
            found += [dataclasses.replace(o, case=dataclasses.replace(o.case, guard=side)) for o in outcomes]
            if all(o.status is Status.UNSUPPORTED for o in outcomes):
                return found[:1]
        return found

    def close(self) -> None:
        """End the process."""
        self._keeper.close()

    # -- parts ---------------------------------------------------------------------------------------

    def _refusal(self, case: Case) -> Reason | None:
        """Why a case cannot be judged this way."""
        if case.device != "cpu":
            return Reason("guard-device", "guard pages are the CPU's", "on CUDA see --gemm-guard=memcheck")
        if not case.distributions:
            return Reason("no-operands", f"operands of {case.problem.op.name} cannot be built yet")
        try:
            self._sent(case)
        except Exception as error:  # pickle raises whatever an object's own methods do
            text = f"this {case.backend.name} cannot be sent to the process in which it may die: {described(error)}"
            return Reason("guard-process", text)
        return None

    def _sent(self, case: Case) -> dict[str, object]:
        """The case for the other process, which has the registered backends; any other backend is sent as it is."""
        backend, registry = case.backend, self._config.registry
        registered = backend.name in registry.names() and registry[backend.name] is backend
        return {**vars(case), "backend": backend.name if registered else pickle.dumps(backend)}

    def _ask(self, case: Case, pages: GuardPages) -> list[Outcome] | Death:
        """The outcomes of the other process, or how it ended."""
        sent = base64.b64encode(pickle.dumps((self._sent(case), pages)))
        outcomes, end = self._keeper.ask({"case": sent.decode()})
        return outcomes if end is None else end

    def _blamed(self, case: Case, pages: GuardPages, end: Death) -> Outcome:
        """The outcome of a case that has killed its process, with the operands that alone are enough for it."""
        from pytest_gemm.operands import tensors
        from pytest_gemm.operands.guard_pages import ALLOCATED, GuardPages

        position = end.position or Position(activity=Activity(case.id(), Phase.CASE, seed=case.seed))
        outcome = death(position, end.status)
        if end.status not in _FAULTS or position.ended:
            return outcome
        given = tensors.make(case.problem, outcome.distribution or case.distributions[0], case.seed, case.device)
        case = dataclasses.replace(case, distributions=(outcome.distribution or case.distributions[0],))
        if isinstance(self._ask(case, GuardPages(pages.side, frozenset())), Death):
            return outcome  # it needs no page for that
        names = [*(buffer.name for buffer in given.buffers), *ALLOCATED]
        named = [n for n in names if isinstance(self._ask(case, GuardPages(pages.side, frozenset({n}))), Death)]
        where = "past the end of" if pages.side == "end" else "before the beginning of"
        what = " and of ".join(named) or "an operand (none of them alone, when it was tried again)"
        kernel = ", ".join(outcome.kernels) or case.backend.name
        text = f"{kernel} touches memory {where} {what}: {_signal(end.status)} at a guard page"
        return dataclasses.replace(outcome, reason=Reason("page-guard", text))


def _signal(status: int | None) -> str:
    return signal.Signals(-status).name if status is not None and status < 0 else "it died"


# Backends that were sent, by what was sent: the same one for every case, with what it has compiled.
_SENT: dict[bytes, Backend] = {}
_NO_EAGER: Final = "eager is not run: what ends this process has to be the case"


def _answer(service: Service, request: dict[str, Any]) -> Iterator[Outcome]:
    """What the other process does with a case."""
    from pytest_gemm.judging.case import Case
    from pytest_gemm.judging.judge import Judge

    fields, pages = pickle.loads(base64.b64decode(request["case"]))
    sent = fields.pop("backend")
    if isinstance(sent, bytes) and sent not in _SENT:
        _SENT[sent] = pickle.loads(sent)
    backend = _SENT[sent] if isinstance(sent, bytes) else service.config.registry[sent]
    known = service.config.ledger.statements
    judge = Judge(lambda *_: _NO_EAGER, watch=service.watch, pages=pages, statements=known)
    return (judged.outcome for judged in judge.judge(Case(backend, **fields)))
