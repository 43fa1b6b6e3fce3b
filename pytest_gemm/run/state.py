"""The state of a run: what was judged, what the ledger explains, what goes to disk.

Workers of pytest-xdist judge; their outcomes travel as plain records on pytest's reports and are put
together in the one process that writes the summary and the run record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gemm.config.config import has_cuda_device
from pytest_gemm.core.case_id import CandidateSelection
from pytest_gemm.core.outcome import WITHHELD, Outcome, Reason, Status, Verdict
from pytest_gemm.ledger.entry import Environment
from pytest_gemm.ledger.ledger import Ledger, LedgerUse
from pytest_gemm.machine import processor, software
from pytest_gemm.problem.problem import Problem
from pytest_gemm.record import records as records_module
from pytest_gemm.record.record import Division, Provenance, Shard, Terms, Totals
from pytest_gemm.record.records import plain
from pytest_gemm.run import review, terminal

if TYPE_CHECKING:
    from pytest_gemm.config.config import GemmConfig
    from pytest_gemm.judging.case import Case


class Red(enum.IntEnum):
    """Why a run is red.  The values are its exit status; of several reasons the least one counts."""

    CASE = 1
    """A test failed: a wrong result, a crash, a limit, a fallback; or a kernel ended the process.  pytest's own."""
    BACKEND = 10
    """A named backend did not run or judged no case, a device was lost, or no candidate is called as asked for."""
    SLOWER = 11
    """A timed case is slower than its baseline, or than the environment of ``--gemm-against``."""
    NO_BASELINE = 12
    """A timed case has no baseline: store one with ``--gemm-record``."""
    UNDECIDED = 13
    """More of the timed cases stayed undecided than ``--gemm-undecided`` allows."""
    LEDGER = 14
    """A known failure no longer fails: its entry applied to cases that ran, and none failed."""
    FILE = 15
    """A file that was asked for, by ``--gemm-output`` for instance, could not be written."""

    @classmethod
    def of(cls, report: pytest.TestReport) -> Red:
        """Why a test failed: for its speed alone, or for anything else."""
        judged = getattr(report, "gemm", {})
        if report.when != "call" or any(Status(one["status"]).is_failure for one in judged.get("outcomes", ())):
            return cls.CASE
        slow = {str(Verdict.SLOWER): cls.SLOWER, str(Verdict.NO_BASELINE): cls.NO_BASELINE}
        slow[str(Verdict.UNDECIDED)] = cls.UNDECIDED
        return min((slow[one] for one in judged.get("verdicts", ()) if one in slow), default=cls.CASE)


@dataclasses.dataclass(frozen=True)
class Cause:
    """What turns a run red without being a test's failure.

    Attributes:
        red: its kind.
        name: of what it is about: a backend, an entry of the ledger, a file.
        text: a sentence.
    """

    red: Red
    name: str
    text: str


@dataclasses.dataclass
class RunState:
    """Everything the summary is made from, in the process that writes it.

    Attributes:
        terms: of the verdict.
        options: those that decide what is judged, as text.
        shard: K and N where this is shard K of N: what needs the outcomes of all shards is left to their merge.
        division: what a shard has of the whole; known when the tests are collected.
        outcomes: in the order in which they came in.
        tests: ids of the tests of the outcomes.
        missing: backends asked for that cannot run here.
        use: how the ledger's entries fared.
        narrowed: only a part of the tests was asked for, so that no entry can be called stale.
        notes: further facts of the run as a whole, one sentence each, for the summary and the record.
        lost: why a file is not complete that was asked for, by their paths; makes the run red.
        undecided: the timed cases as a whole were left undecided, beyond what ``--gemm-undecided`` allows.
        asked: names of the backends of which a test was run.
        failed: why tests failed.
        reruns: attempts at a test that another one followed, as pytest-rerunfailures makes them; they do not count.
        record: file of the run record; ``None`` before :meth:`open_record`, and where none is written.
        run: what runs, and where; known after :meth:`open_record`.
        took: how long a run took that is over; 0: it goes on.
    """

    terms: Terms = dataclasses.field(default_factory=Terms)
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    shard: tuple[int, int] | None = None
    division: Division = dataclasses.field(default_factory=Division)
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    tests: list[str] = dataclasses.field(default_factory=list)
    missing: dict[str, Reason] = dataclasses.field(default_factory=dict)
    use: LedgerUse = dataclasses.field(default_factory=LedgerUse)
    narrowed: bool = False
    notes: list[str] = dataclasses.field(default_factory=list)
    lost: dict[str, str] = dataclasses.field(default_factory=dict)
    undecided: bool = False
    asked: set[str] = dataclasses.field(default_factory=set)
    failed: set[Red] = dataclasses.field(default_factory=set)
    reruns: int = 0
    record: Path | None = None
    run: Provenance = dataclasses.field(default_factory=Provenance)
    processes: set[str] = dataclasses.field(default_factory=set)
    started: float = dataclasses.field(default_factory=time.perf_counter)
    took: float = 0.0

    @classmethod
    def of(cls, config: GemmConfig, *, narrowed: bool = False) -> RunState:
        """At the start of a run."""
        terms = Terms(
            tuple(backend.name for backend in config.backends),
            config.named,
            config.allow,
            bool(config.fuzz),
            config.wanted_candidates,
            tuple(entry.id for entry in config.ledger.entries),
        )
        made = cls(terms, config.deciding, config.shard, narrowed=narrowed)
        if config.lacking:
            missing = ", ".join(config.lacking)
            made.notes.append(f"--gemm-isa=all left out what this CPU does not execute: {missing}")
        return made

    @property
    def wall_seconds(self) -> float:
        """How long the run has taken so far."""
        return self.took or time.perf_counter() - self.started

    def open_record(self, path: Path | None, run: Provenance) -> None:
        """Start the run record with a line about the run."""
        self.record, self.run = path, run
        self._record(lambda: [{"run": plain(self.run)}], "w")

    def close_record(self, pytest_says: int = 0) -> None:
        """End the run record with its totals: a record without them is one of a run that did not end.

        Args:
            pytest_says: the exit status that pytest has decided.
        """
        red = tuple(cause.text for cause in self.reds())
        shard = self._as_shard(*self.shard, pytest_says) if self.shard else None
        totals = Totals(self.wall_seconds, len(self.processes), tuple(self.notes), red, shard)
        self._record(lambda: [{"totals": plain(totals)}])

    def _as_shard(self, number: int, total: int, pytest_says: int) -> Shard:
        """What the merge needs of this shard."""
        whole = self.division
        return Shard(
            *(number, total, whole.digest, whole.tests),
            places=tuple(whole.places.get(test, whole.tests) for test in self.tests),
            options=self.options,
            terms=self.terms,
            status=int(pytest_says),
            narrowed=self.narrowed,
            missing=self.missing,
            use=self.use.to_dict(),
            asked=tuple(sorted(self.asked)),
            failed=tuple(sorted(self.failed)),
            reruns=self.reruns,
            lost=self.lost,
        )

    def _record(self, records: Callable[[], Iterable[Mapping[str, Any]]], mode: str = "a") -> None:
        """Add lines to the run record, unless it has lost some before: behind half a line nothing can be read."""
        path = self.record
        if path is not None and str(path) not in self.lost:
            with self.writing(path), path.open(mode, encoding="utf-8") as file:
                file.writelines(map(records_module.record_line, records()))

    @contextlib.contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """A file of ``--gemm-output`` is written in the block; where that fails the run goes on, and ends red."""
        try:
            yield
        except OSError as error:
            self.lose({str(path): error.strerror or str(error)})

    def lose(self, lost: Mapping[str, str]) -> None:
        """Note why files are not complete, by their paths; "" for one that is."""
        for name, why in lost.items():
            if why:
                self.lost.setdefault(name, why)

    def incomplete(self) -> list[str]:
        """A line for each file that is not complete."""
        return [f"{name} is not complete: {why}; the run is red for it" for name, why in self.lost.items()]

    def absorb(self, records: Iterable[Mapping[str, Any]], use: Mapping[str, Any], process: str, test: str) -> None:
        """Take in what one test judged; the run record grows at once, so that a crash loses nothing."""
        self.processes.add(process)
        self.use.merge(use)
        fresh = list(records)
        self.outcomes += map(records_module.from_record, fresh)
        self.tests += [test] * len(fresh)
        if fresh:
            self._record(lambda: fresh)

    def stale_entries(self) -> tuple[str, ...]:
        """Ledger entries that applied to something that ran and never failed; unknown after a narrowed run."""
        return () if self.narrowed or self.shard else self.use.stale(self.terms.entries)

    def unknown_choice(self) -> str:
        """The name in ``--gemm-candidates`` that no candidate of any problem has; "" where there is none such."""
        wanted = self.terms.candidates if not self.shard else ""
        named = CandidateSelection(wanted).by_name
        return wanted if named and self.outcomes and not any(outcome.candidate for outcome in self.outcomes) else ""

    def unjudged(self) -> dict[str, str]:
        """A sentence for each named backend of which tests were run and no case was judged, by its name.

        With ``auto`` that is an error where it holds for all of them.
        """
        if "unjudged" in self.terms.allow or self.terms.fuzz or self.shard:
            return {}
        judged = {outcome.backend for outcome in self.outcomes if outcome.was_judged}
        without = sorted(self.asked - judged)
        if not self.terms.named and judged:
            return {}
        return {
            name: f"{name} judged no case: {terminal.why_unjudged([o for o in self.outcomes if o.backend == name])}; "
            "--gemm-allow=unjudged accepts that"
            for name in without
        }

    def summary(self) -> list[str]:
        """The lines of the terminal summary."""
        lines = [*self.notes, *_unknown_torch()]
        if self.reruns:
            lines.append(f"{self.reruns} attempt(s) at a test were run again; the last one counts")
        lines += terminal.summary(
            self.outcomes,
            missing=self.missing,
            stale_entries=self.stale_entries(),
            processes=len(self.processes),
            wall_seconds=self.wall_seconds,
        )
        if wanted := self.unknown_choice():
            lines.append(
                f"--gemm-candidates={wanted}: no candidate of any problem is called so; the refusals list names"
            )
        return [*lines, *self.unjudged().values()]

    def markdown(self) -> str:
        """The summary for reviewers; "" where every case was timed and is right."""
        reds = [cause.text for cause in self.reds()]
        if not reds and not any(o.tier or o.status is not Status.PASSED for o in self.outcomes):
            return ""
        what = "GEMM fuzzing" if self.terms.fuzz else review.TITLE
        made = review.Run(self.outcomes, reds, [self.run], self.wall_seconds)
        return review.markdown(made, f"{what} of {', '.join(self.terms.backends)}")

    def reds(self) -> list[Cause]:
        """What turns the run red without being a test's failure."""
        missing = {} if "missing" in self.terms.allow else self.missing
        lost_device = [o for o in self.outcomes if o.status is Status.NOT_RUN and o.code == "device-lost"]
        found = [Cause(Red.BACKEND, name, f"{name} did not run: {reason}") for name, reason in missing.items()]
        if lost_device:
            text = f"a device was lost, and {len(lost_device)} case(s) were not run"
            found.append(Cause(Red.BACKEND, "device-lost", text))
        found += [Cause(Red.BACKEND, name, sentence) for name, sentence in self.unjudged().items()]
        if wanted := self.unknown_choice():
            text = f"--gemm-candidates={wanted}: no candidate of any problem is called so"
            found.append(Cause(Red.BACKEND, "candidates", text))
        if self.undecided:
            text = "more of the timed cases stayed undecided than --gemm-undecided allows"
            found.append(Cause(Red.UNDECIDED, "share", text))
        found += [Cause(Red.LEDGER, entry, terminal.stale_text(entry)) for entry in self.stale_entries()]
        return found + [Cause(Red.FILE, name, f"{name} is not complete: {why}") for name, why in self.lost.items()]

    def status(self, pytest_says: int) -> int:
        """The exit status of the run, from the one that pytest has decided."""
        if pytest_says not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            return pytest_says
        if pytest_says == pytest.ExitCode.NO_TESTS_COLLECTED and self.shard and self.division.tests:
            pytest_says = pytest.ExitCode.OK  # the other shards have them
        kinds = {*self.failed, *(cause.red for cause in self.reds())}
        return min(kinds, default=pytest_says)


def provenance(config: GemmConfig, command: Sequence[str]) -> Provenance:
    """What runs, and where."""
    gpus = any(config.device_of(backend) == "cuda" for backend in config.backends)
    made = Provenance.of(command, gpus=gpus and has_cuda_device(), threads=config.threads)
    versions = dict(made.versions)
    for backend in config.backends:
        origin = config.registry.origin(backend.name)
        versions |= {origin.distribution: origin.version} if origin else {}
        versions |= software.installed(getattr(backend, "distributions", ()))
    return dataclasses.replace(made, versions=versions)


def _unknown_torch() -> tuple[str, ...]:
    """What a run says of a torch that is newer than this version; a known one is not even imported."""
    if not software.unknown_torch():
        return ()
    from pytest_gemm.backends.inductor import torch_compat

    return torch_compat.lacks()


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


def explain_for_worker(
    outcomes: Sequence[Outcome], known: Environment | None, ledger: Ledger, devices: Mapping[str, str], threads: int
) -> tuple[list[Outcome], LedgerUse]:
    """:func:`explain` for outcomes whose process of this machine is gone; imports no torch.

    Args:
        outcomes: of any problems.
        known: what the process wrote down, ``None`` for nothing.
        ledger: of the run.
        devices: where each backend computes.
        threads: CPU threads of the run's processes.
    """
    explained, use = [], LedgerUse()
    for outcome in outcomes:
        device = devices.get(outcome.backend, "cpu")
        env = known or Environment(metadata.version("torch"), device=device, threads=threads)
        if env.device != "cuda":  # the same machine
            env = dataclasses.replace(env, isa=processor.cpu().flags)
        env = env.at(outcome.case.isa, outcome.case.threads, outcome.case.run_threads)
        found, noted = explain([outcome], Problem.parse(outcome.problem), ledger, env)
        explained += found
        use.merge(noted.to_dict())
    return explained, use


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


def explain(
    outcomes: Sequence[Outcome], problem: Problem, ledger: Ledger, env: Environment
) -> tuple[list[Outcome], LedgerUse]:
    """Turn failures that the ledger knows into known failures, and count how its entries fared."""
    use = LedgerUse()
    explained = []
    for outcome in outcomes:
        entry = use.note(ledger, outcome, problem, env)
        if entry is None:
            others = [one.id for one in ledger.covering(outcome, problem, env) if outcome.status in one.status]
            text = f"  the known failure {others[0]} has this case, and states another failure" if others else ""
            details = "\n".join(filter(None, (outcome.details, text)))
            explained.append(dataclasses.replace(outcome, details=details))
        else:
            known = dataclasses.replace(outcome, status=Status.KNOWN_FAILURE, failed_as=outcome.status)
            explained.append(dataclasses.replace(known, known_failure=entry.id))
    return explained, use
