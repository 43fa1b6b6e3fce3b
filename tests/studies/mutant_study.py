"""Detection by pytest-gemm and by usual comparisons: every mutant, every control, and random correct products.

    python tests/studies/mutant_study.py [--out PAGE] [--correct COUNT] [--seed N]

A mutant is judged as the suite judges a backend, distribution by distribution in the order of
``--gemm-level=exhaustive``, until one of them catches it.  The peers get what they get in practice: one call on random
data, compared with eager ATen.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import faulthandler
import fnmatch
import functools
import multiprocessing
import os
import pickle
import platform
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import hypothesis
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from mutants import CONTROLS, KS, MUTANTS, Control, Entry, Planted, int4, product, right
from studies import lines
from torch._dynamo.utils import same

from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.core.case_id import CaseId, Device
from pytest_gemm.core.outcome import Outcome, Reason, Status
from pytest_gemm.fuzzing import strategies
from pytest_gemm.fuzzing.strategies import Trial
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.machine import processor
from pytest_gemm.numerics.precision import settings
from pytest_gemm.operands import tensors as operands
from pytest_gemm.operands.distributions import DISTRIBUTIONS as KNOWN
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.plugin.selection import DISTRIBUTIONS
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs.program import args, build
from pytest_gemm.run import known

# The ledger that is shipped with the conformance suite.
LEDGER: Final = Path(__file__).parents[2] / "conformance" / "known_failures.toml"

# -- our verdict ---------------------------------------------------------------------------------------

# Codes of reasons by what stands beside the bound.
_BESIDE: Final = {
    "inputs": ("inputs-written", "inputs-rebound", "result-is-input", "written-beside", "wrong-place"),
    "process state": ("left-state-behind",),
    "dead process": ("process-died",),
    "refusal": ("late-refusal",),
    "second run": ("not-deterministic", "result-rewritten", "written-after-return"),
    "second weight": ("stale-weight", "stale-operand"),
    "NaN and Inf": ("nan", "missing-nan", "infinite"),
}
_BY_CODE: Final = {code: tier for tier, codes in _BESIDE.items() for code in codes}


@dataclasses.dataclass(frozen=True)
class Catch:
    """Who caught a mutant.

    Attributes:
        tier: ``exact``, ``hard`` or ``statistical``, or what stands beside the bound: ``NaN and Inf``, ``second run``,
            ``second weight``, ``inputs``, ``process state``, ``type and shape``, ``proof``,
            ``exception``, ``dead process``.
        distribution: which data it was.
        outcome: the verdict itself.
    """

    tier: str
    distribution: str
    outcome: Outcome

    @classmethod
    def of(cls, outcome: Outcome) -> Catch | None:
        """``None`` for an outcome that accuses nobody."""
        code = outcome.reason.code if outcome.reason else ""
        if outcome.status is Status.CRASHED:
            tier = _BY_CODE.get(code, "exception")
        elif outcome.status is Status.FALLBACK:
            tier = "proof"
        elif outcome.status is not Status.INCORRECT:
            return None
        else:
            tier = _BY_CODE.get(code) or ("type and shape" if code.startswith("wrong-") else outcome.tier)
        return cls(tier, outcome.distribution, outcome)


@functools.cache
def ledger() -> Ledger:
    """The known failures of the released PyTorch: what eager must not be asked for."""
    return Ledger.load(LEDGER)


def judge() -> Judge:
    """One that runs eager ATen only where that does not kill the process."""
    return Judge(known.eager_refusal(ledger()), statements=ledger().statements)


def outcomes(who: Judge, backend: Planted, line: str, seed: int = 0, calls: int = 1) -> Iterator[Outcome]:
    """All outcomes of a backend on a problem, distribution by distribution."""
    problem = Problem.parse(line)
    case = Case(backend, problem, distributions_for(problem), seed, Device.CPU, calls=calls)
    return (one.outcome for one in who.judge(case))


def caught(who: Judge, backend: Planted, line: str, seed: int = 0, calls: int = 1) -> Catch | None:
    """The first catch; the distributions behind it are not judged any more."""
    return next(filter(None, map(Catch.of, outcomes(who, backend, line, seed, calls))), None)


# -- processes of their own ------------------------------------------------------------------------------

# Seconds that one job may take: far more than any does.
_LIMIT: Final = 900.0


_FORK: Final = multiprocessing.get_context("fork")
# A pipe's end that a second fork inherits would hide the death of the first.
_STARTING: Final = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended that returned nothing: by an exception that nothing caught, by a signal, or by itself."""

    how: str
    has_raised: bool = False


def _answer(job: Callable[[], Any], inlet: Connection) -> None:
    """Send what a job returns, or the exception that ends it; nothing of a mutant's may leave its process."""
    _STARTING.release()  # the fork has a copy, which is held: a job may have jobs of its own
    faulthandler.disable()  # who started it says how it ended
    try:
        answer = pickle.dumps(job())
    except BaseException as error:
        answer = pickle.dumps(Ended(f"{type(error).__name__} escaped", has_raised=True))
    inlet.send_bytes(answer)
    os._exit(0)


def _apart(job: Callable[[], Any]) -> Any:
    outlet, inlet = _FORK.Pipe(duplex=False)
    with outlet:
        with _STARTING, warnings.catch_warnings(), inlet:
            warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads: none of them computes
            child = _FORK.Process(target=_answer, args=(job, inlet))
            child.start()
        if not outlet.poll(_LIMIT):
            child.kill()
        with contextlib.suppress(EOFError):
            return pickle.loads(outlet.recv_bytes())
    child.join()
    code = child.exitcode or 0
    return Ended(signal.Signals(-code).name if code < 0 else f"exit status {code}")


def apart(jobs: Iterable[Callable[[], Any]], workers: int = 1) -> list[Any]:
    """The answers of jobs, each computed in a forked process: what it does to the process ends with it.

    :class:`Ended` stands for an answer that did not come.  Memory is shared until it is written, so that a reference
    that was computed before costs the job nothing.
    """
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(_apart, jobs))


def caught_apart(who: Judge | None, backend: Planted, line: str, seed: int = 0) -> Catch | Ended | None:
    """:func:`caught` in a process of its own; a process that dies is a catch, an exception that escapes is none.

    Args:
        who: knows what it has been told by :func:`prepare`; ``None`` for one that has to find it out after the run.
        backend: what is judged.
        line: on this problem.
        seed: of all values.
    """
    (answer,) = apart([lambda: caught(who or judge(), backend, line, seed)])
    if isinstance(answer, Ended) and not answer.has_raised:
        reason = Reason("process-died", f"the process died: {answer.how}")
        return Catch.of(Outcome(CaseId(backend.name, line), "", seed, Status.CRASHED, reason))
    return answer  # type: ignore[no-any-return]


def prepare(who: Judge, line: str, count: int | None = None) -> None:
    """Have operands and references of ``count`` distributions computed here, for all that is judged in forks."""
    problem = Problem.parse(line)
    distributions = distributions_for(problem)[:count]
    for _ in who.outcomes(Case(Planted("right", _right(line)), problem, distributions, 0, Device.CPU)):
        pass


# -- the peers -------------------------------------------------------------------------------------------

# What a peer is shown: the result, eager's on the same operands, and the same in float64 or ``None``.
Peer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], bool]

MAX_NORM: Final = 1e-2


def _assert_close(tolerance: float | None = None) -> Peer:
    def close(actual: torch.Tensor, eager: torch.Tensor, _wide: torch.Tensor | None) -> bool:
        torch.testing.assert_close(actual, eager, rtol=tolerance, atol=tolerance)
        return True

    return close


def _dynamo(actual: torch.Tensor, eager: torch.Tensor, wide: torch.Tensor | None) -> bool:
    # The tolerances of PyTorch's benchmark runner: 1e-3 for float16, 1e-4 for all others.
    tol = 1e-3 if eager.dtype == torch.float16 else 1e-4
    return bool(same(eager, actual, wide, tol=tol, equal_nan=True, log_error=lambda *_, **__: None))


def _cosine(actual: torch.Tensor, eager: torch.Tensor, _wide: torch.Tensor | None) -> bool:
    x, y = actual.flatten().double(), eager.flatten().double()
    return bool(torch.nn.functional.cosine_similarity(x, y, dim=0) >= 0.99)


def _max_norm(actual: torch.Tensor, eager: torch.Tensor, _wide: torch.Tensor | None) -> bool:
    x, y = actual.double(), eager.double()
    return bool((x - y).abs().max() <= MAX_NORM * y.abs().max())


PEERS: Final[Mapping[str, Peer]] = {
    "assert_close": _assert_close(),
    "rtol = atol = 1e-2": _assert_close(1e-2),
    "same": _dynamo,
    "cosine": _cosine,
    "max norm": _max_norm,
}

# Ops whose program runs in float64 too: there ``same`` gets its reference.
_IN_F64: Final = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear"})


def everyday(problem: Problem, seed: int) -> operands.Operands:
    """Operands as a test would draw them: normal, int8 uniform, with ordinary numbers between a view's rows."""
    made = operands.make(problem, "rand", seed)
    generator = torch.Generator().manual_seed(seed)

    def drawn(view: torch.Tensor) -> torch.Tensor:
        count = view.untyped_storage().nbytes() // view.element_size()
        if view.dtype.is_floating_point:
            flat = torch.randn(count, generator=generator, dtype=torch.float64).to(torch.float32).to(view.dtype)
        else:
            flat = torch.randint(-128, 128, (count,), generator=generator)
            flat = (flat % 16 if view is made.b and problem.dtypes.b.name == "i4" else flat).to(view.dtype)
        return flat.as_strided(view.size(), view.stride(), view.storage_offset())

    def scale(view: torch.Tensor | None) -> torch.Tensor | None:
        return None if view is None else torch.rand(view.shape, generator=generator).to(view.dtype) + 0.5

    return dataclasses.replace(
        made,
        a=drawn(made.a),
        b=drawn(made.b),
        bias=None if made.bias is None else drawn(made.bias),
        residuals=tuple(map(drawn, made.residuals)),
        scale_a=scale(made.scale_a),
        scale_b=scale(made.scale_b),
    )


def _eager(problem: Problem, given: operands.Operands) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Eager's result and the same in float64 where the op has it; ``None`` where eager cannot or must not be asked."""
    if known.eager_refusal(ledger())(problem, "cpu"):
        return None
    tensors = args(problem, given)
    with settings(problem):
        found = build(problem)(**tensors)
        wide = None
        if problem.op.name in _IN_F64 and not problem.autocast:
            wide = build(problem)(**{n: t.double() for n, t in tensors.items()})
    return found, wide


def _rejected(backend: Planted, problem: Problem, seed: int) -> dict[str, bool]:
    given = everyday(problem, seed)
    other = _eager(problem, given)
    if other is None:
        return {}
    try:
        actual = backend.prepare(problem, given).run(given)
    except (pytest.skip.Exception, pytest.xfail.Exception):
        return dict.fromkeys(PEERS, False)  # a test that skips is green
    except BaseException:
        return dict.fromkeys(PEERS, True)  # an exception is seen by everybody

    def content(peer: Peer) -> bool:
        try:
            return peer(actual, *other)
        except Exception:  # that is how assert_close says no, and what a wrong type or shape ends in
            return False

    return {name: not content(peer) for name, peer in PEERS.items()}


def _right(line: str) -> Control:
    plant = int4() if line.startswith("woq_int4") else product(right)
    return Control("sums by torch.matmul, one rounding", plant, {"": line})


@functools.lru_cache(maxsize=1)
def _rejected_though_right(line: str, seed: int) -> dict[str, bool]:
    return _rejected(Planted("right", _right(line)), Problem.parse(line), seed)


def _rejected_apart(backend: Planted, line: str, seed: int) -> dict[str, bool]:
    """In a process of its own, whose death is seen by everybody."""
    (answer,) = apart([lambda: _rejected(backend, Problem.parse(line), seed)])
    return dict.fromkeys(PEERS, True) if isinstance(answer, Ended) else answer


def peers_reject(backend: Planted, line: str, seed: int = 0) -> dict[str, bool | None]:
    """Which of the peers reject what the backend returns; empty where there is no eager to compare with.

    ``None`` where a peer rejects the right product as well: then it has found nothing.
    """
    void = _rejected_though_right(line, seed)
    found = _rejected_apart(backend, line, seed)
    return {name: None if no and void[name] else no for name, no in found.items()} if void else {}


def peers_alarm(backend: Planted, line: str, seed: int = 0) -> dict[str, bool | None]:
    """The same of a correct backend: every rejection is a false alarm."""
    return {**_rejected_apart(backend, line, seed)}


# -- the table -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    """One mutant or control in one dtype at one K."""

    name: str
    dtype: str
    k: int
    catch: Catch | None
    peers: dict[str, bool | None]


Peers = Callable[[Planted, str], dict[str, bool | None]]
Asked = list[tuple[str, str, int, Planted]]


def _rows_of(line: str, asked: Asked, peers: Peers) -> list[Row]:
    """All that is asked about one problem; each mutant in a process of its own.

    Those that compute wrongly share a reference, as the backends of a problem do.  A line without ``{k}`` is of those
    that do something else: there the judge knows nothing before they have run.
    """
    who, found = None, []
    if any("{k}" in template for *_, backend in asked for template in backend.entry.lines.values()):
        who = judge()
        prepare(who, line)
    for name, dtype, k, backend in asked:
        own = line in backend.entry.lines.values()
        catch = caught_apart(None if own else who, backend, line)
        if isinstance(catch, Ended):
            sys.stderr.write(f"{name}: {line}: {catch.how}\n")
            catch = None
        found.append(Row(name, dtype, k, catch, peers(backend, line)))
    return found


def rows(entries: Mapping[str, Entry], peers: Peers, workers: int = 1) -> list[Row]:
    """All mutants or controls wherever their bugs show; a process for each problem, whose reference they share."""
    asked: dict[str, Asked] = defaultdict(list)
    for name, entry in entries.items():
        for dtype, k, line in entry.problems():
            asked[line].append((name, dtype, k, Planted(name, entry)))
    answers = apart([functools.partial(_rows_of, line, some, peers) for line, some in asked.items()], workers)
    for line, answer in zip(asked, answers, strict=True):
        if isinstance(answer, Ended):
            raise RuntimeError(f"{line}: {answer.how}")
    return [row for answer in answers for row in answer]


def _where(cells: Sequence[tuple[str, int]], of: Sequence[tuple[str, int]]) -> str:
    """``(dtype, K)`` pairs in few words: whole dtypes by name, others with their K."""
    parts = []
    for dtype in dict.fromkeys(d for d, _ in of):
        mine, all_ = ([k for d, k in some if d == dtype] for some in (cells, of))
        if mine:
            parts.append(dtype if len(mine) == len(all_) else f"{dtype} at {', '.join(map(str, mine))}")
    return "; ".join(parts)


def _ours(rows: Sequence[Row]) -> str:
    groups: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for row in rows:
        groups[f"{row.catch.tier} ({row.catch.distribution})" if row.catch else "**missed**"].append((row.dtype, row.k))
    everywhere = [(row.dtype, row.k) for row in rows]
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"{what}: {_where(cells, everywhere)}" for what, cells in groups.items())


def _peer(rows: Sequence[Row], name: str, words: Mapping[bool | None, str]) -> str:
    """The cell of a peer: ``words`` says what a rejection is called, a pass, and a rejection that means nothing."""
    asked = [(row.dtype, row.k) for row in rows if name in row.peers]
    if not asked:
        return "no eager"
    groups = {word: [(r.dtype, r.k) for r in rows if r.peers.get(name, "") is what] for what, word in words.items()}
    groups = {word: cells for word, cells in groups.items() if cells}
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"{word}: {_where(cells, asked)}" for word, cells in groups.items() if word != words[False])


def _grouped(found: Iterable[Row], order: Iterable[str]) -> dict[str, list[Row]]:
    by_name = {name: [row for row in found if row.name == name] for name in order}
    return {name: mine for name, mine in by_name.items() if mine}


_CAUGHT: Final[Mapping[bool | None, str]] = {True: "caught", False: "missed", None: "alarm"}
_ALARMED: Final[Mapping[bool | None, str]] = {True: "**alarm**", False: "passed"}


def page(mutants: Sequence[Row], controls: Sequence[Row], seconds: float, flood: object) -> str:
    """The study as a page of Markdown; ``flood`` is what :func:`flood` returns, or nothing."""
    quick, known = DISTRIBUTIONS["quick"], list(KNOWN)
    by_mutant, by_control = _grouped(mutants, MUTANTS), _grouped(controls, CONTROLS)
    asked, alarms = ([row for row in found if row.peers] for found in (mutants, controls))
    summary = [
        (
            "pytest-gemm",
            f"{sum(r.catch is not None for r in mutants)} of {len(mutants)}",
            f"{sum(all(r.catch for r in mine) for mine in by_mutant.values())} of {len(by_mutant)}",
            f"{sum(r.catch is not None for r in controls)} of {len(controls)}",
        )
    ]
    for name in PEERS:
        full = sum(all(r.peers[name] for r in mine if r.peers) for mine in by_mutant.values())
        caught, wrong = (sum(bool(row.peers[name]) for row in found) for found in (asked, alarms))
        head = f"`{name}`" if name in {"assert_close", "same"} else name
        summary.append((head, f"{caught} of {len(asked)}", f"{full} of {len(by_mutant)}", f"{wrong} of {len(alarms)}"))
    body = [
        [f"`{name}`", MUTANTS[name].what, " ".join(dict.fromkeys(r.dtype for r in mine)), _ours(mine)]
        + [_peer(mine, peer, _CAUGHT) for peer in PEERS]
        for name, mine in by_mutant.items()
    ]
    correct = [
        [f"`{name}`", CONTROLS[name].what, _ours(mine).replace("**missed**", "passed")]
        + [_peer(mine, peer, _ALARMED) for peer in PEERS]
        for name, mine in by_control.items()
    ]
    return lines.page(
        "mutants.md.jinja",
        date=datetime.date.today(),
        versions=f"torch {torch.__version__}, Python {platform.python_version()}, {processor.cpu().model}",
        seconds=seconds,
        summary=summary,
        body=body,
        correct=correct,
        excused=[(name, pattern, why) for name, mutant in MUTANTS.items() for pattern, why in mutant.equivalent],
        late=[row.name for row in mutants if row.catch and row.catch.distribution in known[quick:]],
        tiers=Counter(row.catch.tier for row in mutants if row.catch),
        quick=quick,
        cases=len(mutants),
        mutants=len(MUTANTS),
        controls=len(CONTROLS),
        ks=KS,
        max_norm=MAX_NORM,
        flood=flood,
    )


# -- correct products ------------------------------------------------------------------------------------


# qlinear is left out: with nothing to sum it divides by zero in other problems than those of the ledger too.
_OPS: Final = ("mm", "addmm", "bmm", "baddbmm", "linear", "int_mm", "mixed_mm", "woq_int8", "scaled_mm", "grouped_mm")


@dataclasses.dataclass
class Flood:
    """Correct products and how they were judged.

    Attributes:
        ends: number of products by status.
        dtypes, ops: the same by dtypes and by op, of those that passed.
        alarms: failures of eager that the ledger does not explain.
        doubts: cases whose data could not tell right from wrong.
    """

    ends: Counter[str] = dataclasses.field(default_factory=Counter)
    dtypes: Counter[str] = dataclasses.field(default_factory=Counter)
    ops: Counter[str] = dataclasses.field(default_factory=Counter)
    alarms: list[str] = dataclasses.field(default_factory=list)
    doubts: list[str] = dataclasses.field(default_factory=list)

    def add(self, outcome: Outcome, problem: Problem, is_known: bool) -> None:
        """Count a product."""
        accused = Catch.of(outcome) is not None
        status = Status.KNOWN_FAILURE if accused and is_known else outcome.status
        if status is Status.UNSUPPORTED:
            return
        self.ends[status.value] += 1
        text = f"{problem} {outcome.distribution} seed {outcome.seed}: {outcome.reason}"
        if accused and status is not Status.KNOWN_FAILURE:
            self.alarms.append(text)
        elif status is Status.MISTRUSTED:
            self.doubts.append(text)
        else:
            self.dtypes[str(problem.dtypes)] += 1
            self.ops[problem.op.name] += 1

    def merge(self, other: Flood) -> None:
        """Both together."""
        for counts in ("ends", "dtypes", "ops"):
            getattr(self, counts).update(getattr(other, counts))
        self.alarms += other.alarms
        self.doubts += other.doubts


def flooded(seed: int, count: int, journal: Path | None = None) -> Flood:
    """Random products of eager ATen, judged: those of ``count`` trials; the same seed gives the same ones.

    Args:
        seed: of the draws.
        count: how many trials, each of one problem or several.
        journal: a folder for a file that says what is being judged, should it kill the process.
    """
    torch.set_num_threads(1)
    backend, who, found, environment = AtenBackend(), judge(), Flood(), known.environment("cpu")

    def judged(problem: Problem, trial: Trial) -> None:
        if ledger().applicable("aten", problem, "test_product", environment) is not None:
            return  # it can kill the process
        if journal is not None:
            (journal / str(seed)).write_text(f"{problem}, seed {trial.seed}")
        for outcome in who.outcomes(Case(backend, problem, trial.distributions, trial.seed, Device.CPU)):
            found.add(outcome, problem, ledger().match(outcome, problem, environment) is not None)

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategies.trials(backend, ops=_OPS))
    def draw(trial: Trial) -> None:
        for problem in trial.problems:
            judged(problem, trial)

    draw()
    return found


def flood(count: int, seed: int, workers: int) -> dict[str, Any]:
    """:func:`flooded` in several processes; with the seconds that it took."""
    started, total, share = time.perf_counter(), Flood(), 1000
    seeds = range(seed * 10**6, seed * 10**6 + -(-count // share))
    with tempfile.TemporaryDirectory() as folder:
        parts = apart([functools.partial(flooded, one, share, Path(folder)) for one in seeds], workers)
        for one, part in zip(seeds, parts, strict=True):
            if isinstance(part, Ended):
                total.alarms.append(f"{part.how}: {(Path(folder) / str(one)).read_text()}")
            else:
                total.merge(part)
    return {"found": total, "workers": workers, "seconds": time.perf_counter() - started}


# -- the command -----------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 1 if a mutant got away or a correct backend was accused."""
    parser = argparse.ArgumentParser(description="Mutants, controls, and random correct products.")
    parser.add_argument("--out", type=Path, help="write the page here (default: standard output)")
    parser.add_argument(
        "--correct", type=int, default=0, metavar="COUNT", help="judge so many random trials of eager ATen"
    )
    parser.add_argument("--mutants", default="*", metavar="PATTERN", help="only mutants and controls of such names")
    parser.add_argument("--seed", type=int, default=0, help="of the random products (0)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (the cores)")
    given = parser.parse_args(argv)
    wrong, random = [], None
    if given.correct:
        random = flood(given.correct, given.seed, given.workers)
        wrong += random["found"].alarms
        sys.stderr.write("".join(f"{doubt}\n" for doubt in random["found"].doubts[:50]))
    torch.set_num_threads(1)
    started = time.perf_counter()
    found = []
    for table, peers in ((MUTANTS, peers_reject), (CONTROLS, peers_alarm)):
        named = {name: one for name, one in table.items() if fnmatch.fnmatchcase(name, given.mutants)}
        found.append(rows(named, peers, given.workers))
    mutants, controls = found
    wrong += [f"got away: {row.name} {row.dtype} K = {row.k}" for row in mutants if row.catch is None]
    for row in controls:
        if row.catch is not None:
            wrong.append(f"accused: {row.name} {row.dtype} K = {row.k}: {row.catch.outcome.details}")
    text = page(mutants, controls, time.perf_counter() - started, random)
    if given.out:
        given.out.write_text(text, encoding="utf-8")
        text = ""
    return lines.printed(text, wrong)


if __name__ == "__main__":
    sys.exit(main())
