"""Judgements in another process, which may die with a kernel: trials of fuzzing, and cases at guard pages.

::

    this process                 keeper                          judge
    asks, reports                forks one judge after another   compiles, runs, compares
          |  a request, as a line of JSON                          |
          |------------------------------------------------------->|
          |<------------------------------- outcomes, line by line |
          |<---- "it died, with this status" --|   (if it does)

All three share one socket.  The keeper has imported torch and has computed nothing, so a new judge costs a fork, not an
interpreter; and it is forked before anybody has asked for a CUDA device, which no child could use any more otherwise.
Being a fork, a judge has every backend that was registered, also a function of a conftest.py that no other interpreter
could import.
What a judge was doing when it died stands in its diary (``watch.py``), and its limits are those of every test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import json
import os
import signal
import socket
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pytest_gemm import session
from pytest_gemm.api.protocols import Backend
from pytest_gemm.failures.text import Rerun
from pytest_gemm.isolation.journal import Diaries, Diary, Words, death
from pytest_gemm.isolation.limits import Watch
from pytest_gemm.outcome import Activity, Outcome, Reason, Status
from pytest_gemm.problem.problem import Problem
from pytest_gemm.records import from_record, to_record

if TYPE_CHECKING:
    from pytest_gemm.config import GemmConfig
    from pytest_gemm.judging.case import Case
    from pytest_gemm.judging.judge import Judge
    from pytest_gemm.ledger.entry import Environment
    from pytest_gemm.strategies import Trial

__all__ = ["PRODUCT", "PROPERTY", "Death", "Elsewhere", "Keeper", "Service", "judged"]

# The tests that run a trial again, and under whose names the ledger is asked.
PRODUCT: Final = "test_product"
PROPERTY: Final = "test_properties"

# Requests after which a judge is replaced: a compiler keeps something of every program it has made.
_TRIALS: Final = 300
# Characters of what a dying process said that are shown.
_LAST_WORDS: Final = 600


@dataclasses.dataclass(frozen=True)
class Death:
    """The end of a judge in the middle of a request.

    Attributes:
        words: its last words; ``None`` where it was in no case.
        status: its exit status, negative for a signal.
        said: the end of what it wrote to stderr.
    """

    words: Words | None
    status: int
    said: str


@dataclasses.dataclass(frozen=True)
class Service:
    """What a judge answers a request with."""

    config: GemmConfig
    judge: Judge
    diary: Diary
    watch: Watch


Answer = Callable[[Service, "dict[str, Any]"], Iterator[Outcome]]


class Keeper:
    """A process that forks judges, one after the other, who answer requests.

    Created before this process has asked any backend whether it is available: see the module.

    Args:
        config: what the run was asked for.
        answer: is called in a judge for each request.

    Attributes:
        deaths: how many judges have ended in the middle of a request.
    """

    def __init__(self, config: GemmConfig, answer: Answer) -> None:
        self.deaths = 0
        self._diaries = Diaries()
        self._errors = self._diaries.folder / "stderr"
        self._errors.touch()
        here, there = socket.socketpair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns when there are threads; none of them is needed there
            self._keeper = os.fork()
        if self._keeper == 0:
            here.close()
            _keep(config, answer, there, self._diaries.folder, self._errors)
        there.close()
        self._socket = here
        self._lines = here.makefile("rb")

    def ask(self, request: Mapping[str, object]) -> tuple[list[Outcome], Death | None]:
        """The outcomes that a judge answers with, and how it ended if it did.

        Raises:
            RuntimeError: when there is nobody any more to judge, or a judge failed outside of a case.
        """
        said = self._errors.stat().st_size
        outcomes: list[Outcome] = []
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            for message in self._messages():
                if "outcome" in message:
                    outcomes.append(from_record(message["outcome"]))
                elif "error" in message:
                    raise RuntimeError(f"the process that judges failed outside of a case:\n{message['error']}")
                elif "exit" in message:
                    self.deaths += 1
                    words = self._diaries.words(message["process"])
                    known = words if words is not None and words.activity is not None else None
                    return outcomes, Death(known, message["exit"], self._tail(said))
                elif message["leaves"]:
                    next(message for message in self._messages() if "exit" in message)
                    return outcomes, None
                else:
                    return outcomes, None
        except OSError:
            pass
        raise RuntimeError(f"the process that starts the judges is gone: {self._tail(said) or 'nothing is known'}")

    def _messages(self) -> Iterator[dict[str, Any]]:
        for line in self._lines:
            try:
                message = json.loads(line)
            except ValueError:  # half a line of a process that died in it
                continue
            assert isinstance(message, dict)
            yield message

    def _tail(self, said: int) -> str:
        """What was written to stderr since then, the end of it."""
        with self._errors.open("rb") as file:
            file.seek(said)
            return file.read().decode(errors="replace").strip()[-_LAST_WORDS:]

    def close(self) -> None:
        """End the processes, whatever they are doing, and remove what they left."""
        self._lines.close()
        self._socket.close()
        try:
            os.killpg(self._keeper, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(self._keeper, signal.SIGKILL)  # it had not come to founding its group
        os.waitpid(self._keeper, 0)
        self._diaries.close()


class Elsewhere:
    """Judges trials in a process of its own, and starts another one when that is gone.

    Args:
        config: what the run was asked for.
    """

    def __init__(self, config: GemmConfig) -> None:
        self._config = config
        self._keeper = Keeper(config, _trial)

    @property
    def deaths(self) -> int:
        """How many processes have ended in the middle of a trial."""
        return self._keeper.deaths

    def judge(self, backend: Backend, trial: Trial, rerun: Rerun | None = None) -> list[Outcome]:
        """The outcomes of a trial, as the ledger leaves them; the last one may be the death of the process.

        Args:
            backend: whose kernels they are.
            trial: what to judge.
            rerun: how to run it again; with it, what fails is kept in the folder of ``--gemm-artifacts``.

        Raises:
            RuntimeError: when there is nobody any more to judge.
        """
        request: dict[str, object] = {"backend": backend.name, "trial": trial.to_text()}
        if rerun is not None:
            request["rerun"] = dataclasses.astuple(rerun)
        outcomes, end = self._keeper.ask(request)
        return outcomes if end is None else [*outcomes, self._dead(backend, trial, end)]

    def _dead(self, backend: Backend, trial: Trial, end: Death) -> Outcome:
        """How the case ended that a process died with."""
        harness = Activity(backend.name, trial.problems[0].line, "the harness", seed=trial.seed)
        words = end.words or Words(activity=harness)
        outcome = death(words, end.status)
        details = "\n".join(filter(None, (outcome.details, end.said)))
        outcome = dataclasses.replace(outcome, test=PRODUCT, details=details)
        device = self._config.device_of(backend)
        env = session.environment_elsewhere(words.environment, device, self._config.threads)
        return session.explain([outcome], Problem.parse(outcome.problem), self._config.ledger, env)[0][0]

    def close(self) -> None:
        """End the processes."""
        self._keeper.close()


# -- in the keeper ---------------------------------------------------------------------------------


def _keep(config: GemmConfig, answer: Answer, there: socket.socket, folder: Path, errors: Path) -> NoReturn:
    """Fork judges, one after the other, until nobody listens any more."""
    try:
        os.setpgid(0, 0)  # out of reach of Ctrl-C; with its judges and their compilers it is ended as one
        null, said = os.open(os.devnull, os.O_RDWR), os.open(errors, os.O_WRONLY | os.O_APPEND)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.dup2(said, 2)
        _cover_others(null, there.fileno())
        faulthandler.disable()  # it would write to a file of the parent's
        import pytest_gemm.judging.judge  # noqa: F401  # for the judges, who need not import torch any more

        number = 0
        while True:
            name = f"judge-{number}"
            judge = os.fork()
            if judge == 0:
                _serve(config, answer, there, folder, name)
                os._exit(0)
            _, status = os.waitpid(judge, 0)
            message = {"exit": os.waitstatus_to_exitcode(status), "process": name}
            there.sendall(b"\n" + json.dumps(message).encode() + b"\n")
            number += 1
    except OSError:  # nobody listens
        os._exit(0)
    except BaseException:  # nothing may go on in a copy of pytest
        os.write(2, traceback.format_exc().encode())
        os._exit(1)


def _cover_others(null: int, ours: int) -> None:
    """Put nothing in the place of other pipes and sockets: who waits for their end would wait for this process."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(entry) not in {0, 1, 2, ours} and os.readlink(f"/proc/self/fd/{entry}")[:4] in {"pipe", "sock"}:
                os.dup2(null, int(entry))


# -- in a judge ------------------------------------------------------------------------------------


def _serve(config: GemmConfig, answer: Answer, there: socket.socket, folder: Path, name: str) -> None:
    """Judge what comes through the socket."""
    import torch

    from pytest_gemm.judging.judge import Judge

    torch.set_num_threads(config.threads)
    diary = Diary(folder, name)
    assert diary.stacks is not None
    faulthandler.enable(file=diary.stacks, all_threads=False)
    watch = Watch(config.timeout, config.compile_timeout, diary, fence=diary.stacks)
    service = Service(config, Judge(session.eager_is_safe(config.ledger), watch), diary, watch)

    def say(**message: object) -> None:
        there.sendall(json.dumps(message).encode() + b"\n")

    for count, line in enumerate(there.makefile("rb"), 1):
        diary.begin(f"request {count}")
        try:
            for outcome in answer(service, json.loads(line)):
                say(outcome=to_record(outcome))
        except Exception:  # of ours: the process that asks has to know
            say(error=traceback.format_exc())
            continue
        watch.rest()
        diary.end()
        leaves = count >= _TRIALS or any(map(service.judge.has_lost, ("cpu", "cuda")))
        say(end=True, leaves=leaves)
        if leaves:
            return


def _trial(service: Service, request: dict[str, Any]) -> Iterator[Outcome]:
    """The outcomes of a trial."""
    from pytest_gemm.strategies import Trial

    config, judge = service.config, service.judge
    backend, trial = config.registry[request["backend"]], Trial.from_text(request["trial"])
    keep = functools.partial(_keep_evidence, config, judge, request.get("rerun"))
    return judged(config, judge, backend, trial, service.diary.open_call, keep)


def _keep_evidence(config: GemmConfig, judge: Judge, rerun: list[Any] | None, case: Case) -> None:
    """Write what failed of a case to the folder of artifacts, where that is wanted and can be done."""
    if config.artifacts is None or rerun is None or judge.has_lost(case.device):
        return
    from pytest_gemm.failures import artifacts

    test, options = rerun
    artifacts.save(config.artifacts, judge.evidence, case, Rerun(test, tuple(options)))


def judged(
    config: GemmConfig,
    judge: Judge,
    backend: Backend,
    trial: Trial,
    begin: Callable[[Environment], object] = lambda _: None,
    judged_case: Callable[[Case], object] = lambda _: None,
) -> Iterator[Outcome]:
    """The outcomes of a trial, as the ledger leaves them: its problems, then their properties if all is well.

    An exception of the harness itself is an outcome, too: fuzzing finds its defects as well.

    Args:
        config: what the run was asked for.
        judge: judges.
        backend: whose kernels they are.
        trial: what to judge.
        begin: is told of every problem where it is judged.
        judged_case: is told of every problem that has been judged, while the judge has its evidence.
    """
    from pytest_gemm.judging.case import Case

    device = config.device_of(backend)
    env = session.environment(device)

    def held(case: Case, choice: str = "") -> Outcome | None:
        return session.withheld(config.ledger, case, PRODUCT, choice)

    def explained(problem: Problem, test: str, judging: Callable[[], Iterator[Outcome]]) -> Iterator[Outcome]:
        try:
            for outcome in judging():
                yield session.explain([dataclasses.replace(outcome, test=test)], problem, config.ledger, env)[0][0]
        except Exception as error:  # in the oracle, in a filling: what a kernel raises has become an outcome
            kind, first = type(error).__name__, next(iter(str(error).splitlines()), "")
            reason = Reason(f"harness-{kind}", f"{kind} in pytest-gemm itself: {first}", "please report it")
            crash = Outcome(backend.name, problem.line, trial.fillings[0], trial.seed, Status.CRASHED, reason)
            yield dataclasses.replace(crash, test=test, details=traceback.format_exc()[-2000:])

    well = True
    for problem in trial.problems:
        begin(env)
        case = Case(backend, problem, trial.fillings, trial.seed, device, config.choices)
        if (withheld := held(case)) is not None:
            well = False
            yield withheld
            continue
        judging = functools.partial(judge.judge, case, withheld=functools.partial(held, case))
        for outcome in explained(problem, PRODUCT, judging):
            well = well and outcome.status in {Status.PASSED, Status.DROPPED}
            yield outcome
        judged_case(case)
    if well and config.choices in {"", "one", "winner"} and not judge.has_lost(device):
        problem = trial.problems[0]
        case = Case(backend, problem, trial.fillings, trial.seed, device, config.choices)
        begin(env)
        for outcome in explained(problem, PROPERTY, functools.partial(judge.relate, case)):
            if outcome.status is not Status.UNSUPPORTED:  # no property need say anything
                yield outcome
        judged_case(case)
