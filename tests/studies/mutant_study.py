"""Detection by pytest-gemm and by usual comparisons: every mutant, every control, and random correct products.

    python tests/studies/mutant_study.py [--out PAGE] [--correct COUNT] [--seed N]

A mutant is judged as the suite judges a backend, distribution by distribution in the order of
``--gemm-level=exhaustive``, until one of them catches it.  The peers get what they get in practice: one call on random
data, compared with eager ATen.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import faulthandler
import fnmatch
import functools
import multiprocessing
import os
import pickle
import platform
import random
import resource
import selectors
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Final

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from mutants import CONTROLS, KS, MUTANTS, Control, Planted, int4, product, right
from torch._dynamo.utils import same

from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.core.case_id import CaseId, Device
from pytest_gemm.core.outcome import Outcome, Reason, Status
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.machine import processor
from pytest_gemm.numerics.precision import settings
from pytest_gemm.operands import tensors as operands
from pytest_gemm.operands.distributions import DISTRIBUTIONS as KNOWN
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.plugin.selection import DISTRIBUTIONS
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.ops import OPS
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import STEPS
from pytest_gemm.programs.program import args, build
from pytest_gemm.run import known

# The ledger that is shipped with the conformance suite.
LEDGER: Final = Path(__file__).parents[2] / "conformance" / "known_failures.toml"

# -- our verdict ---------------------------------------------------------------------------------------

_BY_CODE: Final = {
    "inputs-written": "inputs",
    "inputs-rebound": "inputs",
    "result-is-input": "inputs",
    "written-beside": "inputs",
    "wrong-place": "inputs",
    "left-state-behind": "process state",
    "process-died": "dead process",
    "late-refusal": "refusal",
    "not-deterministic": "second run",
    "result-rewritten": "second run",
    "written-after-return": "second run",
    "stale-weight": "second weight",
    "nan": "NaN and Inf",
    "missing-nan": "NaN and Inf",
    "infinite": "NaN and Inf",
}


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


def outcomes(who: Judge, backend: Planted, line: str, seed: int = 0) -> Iterator[Outcome]:
    """All outcomes of a backend on a problem, distribution by distribution."""
    problem = Problem.parse(line)
    return (one.outcome for one in who.judge(Case(backend, problem, distributions_for(problem), seed, Device.CPU)))


def caught(who: Judge, backend: Planted, line: str, seed: int = 0) -> Catch | None:
    """The first catch; the distributions behind it are not judged any more."""
    return next(filter(None, map(Catch.of, outcomes(who, backend, line, seed))), None)


# -- processes of their own ------------------------------------------------------------------------------

# Seconds that one job may take: far more than any does.
_LIMIT: Final = 900.0


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended that returned nothing: by an exception that nothing caught, by a signal, or by itself."""

    how: str
    has_raised: bool = False


def _answer(job: Callable[[], Any]) -> bytes:
    """What a job returns, pickled; what ends it otherwise is an answer too."""
    try:
        return pickle.dumps(job())
    except BaseException as error:  # nothing of a mutant's may leave its process
        return pickle.dumps(Ended(f"{type(error).__name__} escaped", has_raised=True))


def _start(job: Callable[[], Any]) -> tuple[int, int]:
    """Fork a process that computes an answer: its id, and the end of a pipe that the answer comes from."""
    end, inlet = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads: none of them computes
        child = os.fork()
    if child:
        os.close(inlet)
        return child, end
    try:
        faulthandler.disable()  # who started it says how it ended
        answer = _answer(job)
        while answer:
            answer = answer[os.write(inlet, answer) :]
    finally:
        os._exit(0)


def _end_of(child: int) -> Ended:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Ended(signal.Signals(-code).name if code < 0 else f"exit status {code}")


def apart(jobs: Sequence[Callable[[], Any]], workers: int = 1) -> list[Any]:
    """The answers of jobs, each computed in a forked process: what it does to the process ends with it.

    :class:`Ended` stands for an answer that did not come.  Memory is shared until it is written, so that a reference
    that was computed before costs the job nothing.
    """
    answers: list[Any] = [None] * len(jobs)
    waiting = list(enumerate(jobs))[::-1]
    running: dict[int, tuple[int, int, list[bytes], float]] = {}
    with selectors.DefaultSelector() as pipes:
        while waiting or running:
            while waiting and len(running) < workers:
                place, job = waiting.pop()
                child, end = _start(job)
                pipes.register(end, selectors.EVENT_READ)
                running[end] = place, child, [], time.monotonic() + _LIMIT
            for key, _ in pipes.select(timeout=1.0):
                end = key.fd
                place, child, parts, _ = running[end]
                if part := os.read(end, 1 << 16):
                    parts.append(part)
                    continue
                pipes.unregister(end)
                os.close(end)
                del running[end]
                ended = _end_of(child)
                answers[place] = pickle.loads(b"".join(parts)) if parts else ended
            for _place, child, _parts, deadline in running.values():
                if time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
    return answers


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


def prepare(who: Judge, line: str) -> None:
    """Have the operands and references of a problem computed here, for all who are judged in forked processes."""
    problem = Problem.parse(line)
    for _ in who.outcomes(Case(Planted("right", _right(line)), problem, distributions_for(problem), 0, Device.CPU)):
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
            flat = torch.randint(-128, 128, (count,), generator=generator).to(view.dtype)
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


Asked = list[tuple[str, str, int, Planted]]


def _by_problem(names: Iterable[tuple[str, Planted, Iterable[tuple[str, int, str]]]]) -> dict[str, Asked]:
    """All that is asked about one problem at a time: the judge keeps its operands and its reference."""
    found: dict[str, Asked] = defaultdict(list)
    for name, backend, problems in names:
        for dtype, k, line in problems:
            found[line].append((name, dtype, k, backend))
    return found


Peers = Callable[[Planted, str], dict[str, bool | None]]


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


def _rows(asked: Mapping[str, Asked], peers: Peers, workers: int) -> list[Row]:
    """The rows of all problems, a process for each."""
    answers = apart([functools.partial(_rows_of, line, some, peers) for line, some in asked.items()], workers)
    for line, answer in zip(asked, answers, strict=True):
        if isinstance(answer, Ended):
            raise RuntimeError(f"{line}: {answer.how}")
    return [row for answer in answers for row in answer]


def mutant_rows(workers: int = 1, pattern: str = "*") -> list[Row]:
    """Every mutant of such a name wherever its bug shows."""
    named = {name: mutant for name, mutant in MUTANTS.items() if fnmatch.fnmatchcase(name, pattern)}
    entries = ((name, Planted(name, mutant), mutant.problems()) for name, mutant in named.items())
    return _rows(_by_problem(entries), peers_reject, workers)


def control_rows(workers: int = 1, pattern: str = "*") -> list[Row]:
    """Every correct control of such a name, with all distributions: a catch is a false alarm."""
    named = {name: correct for name, correct in CONTROLS.items() if fnmatch.fnmatchcase(name, pattern)}
    entries = ((name, Planted(name, correct), correct.problems()) for name, correct in named.items())
    return _rows(_by_problem(entries), peers_alarm, workers)


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


def _prose(text: str) -> str:
    """A paragraph on one line."""
    return " ".join(text.split())


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in body)])


def _grouped(rows: Iterable[Row], order: Iterable[str]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {name: [] for name in order}
    for row in rows:
        found[row.name].append(row)
    return {name: mine for name, mine in found.items() if mine}


_CAUGHT: Final[Mapping[bool | None, str]] = {True: "caught", False: "missed", None: "alarm"}
_ALARMED: Final[Mapping[bool | None, str]] = {True: "**alarm**", False: "passed"}


def page(mutants: Sequence[Row], controls: Sequence[Row], seconds: float, flood: str) -> str:
    """The study as a page of Markdown."""
    quick, known = DISTRIBUTIONS["quick"], list(KNOWN)
    by_mutant, by_control = _grouped(mutants, MUTANTS), _grouped(controls, CONTROLS)
    asked = sum(1 for row in mutants if row.peers)
    late = [row for row in mutants if row.catch and row.catch.distribution in known[quick:]]
    tiers = Counter(row.catch.tier for row in mutants if row.catch)

    def total(name: str, rows: Sequence[Row]) -> int:
        return sum(bool(row.peers.get(name)) for row in rows)

    summary = [
        [
            "pytest-gemm",
            f"{sum(r.catch is not None for r in mutants)} of {len(mutants)}",
            f"{sum(all(r.catch for r in mine) for mine in by_mutant.values())} of {len(by_mutant)}",
            f"{sum(r.catch is not None for r in controls)} of {len(controls)}",
        ]
    ]
    for name in PEERS:
        full = sum(all(r.peers[name] for r in mine if r.peers) for mine in by_mutant.values())
        alarms = sum(1 for row in controls if row.peers)
        summary.append(
            [
                f"`{name}`" if name in {"assert_close", "same"} else name,
                f"{total(name, mutants)} of {asked}",
                f"{full} of {len(by_mutant)}",
                f"{total(name, controls)} of {alarms}",
            ]
        )
    dtypes = {name: dict.fromkeys(r.dtype for r in mine) for name, mine in by_mutant.items()}
    body = [
        [f"`{name}`", MUTANTS[name].what, " ".join(dtypes[name]), _ours(mine)]
        + [_peer(mine, peer, _CAUGHT) for peer in PEERS]
        for name, mine in by_mutant.items()
    ]
    correct = [
        [f"`{name}`", CONTROLS[name].what, _ours(mine).replace("**missed**", "passed")]
        + [_peer(mine, peer, _ALARMED) for peer in PEERS]
        for name, mine in by_control.items()
    ]
    excused = [
        [f"`{name}`", f"`{pattern}`", why] for name, mutant in MUTANTS.items() for pattern, why in mutant.equivalent
    ]
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, {processor.cpu().model}"
    heads = ["assert_close", "1e-2", "same", "cosine", "max norm"]
    parts = [
        "# Mutants and controls: detection by pytest-gemm and by usual comparisons",
        _prose(
            f"""{datetime.date.today().isoformat()}; {versions}; {seconds:.0f} seconds for the tables.  Generated by
            `python tests/studies/mutant_study.py --out docs/results/mutants.md --correct COUNT`, not by hand."""
        ),
        _prose(
            f"""{len(MUTANTS)} mutants (`tests/mutants.py`) and {len(CONTROLS)} controls, at K =
            {", ".join(map(str, KS))}, in every dtype that applies; those that depend on a size, or whose bug is not
            arithmetic, at their own size.
            A case is one of them in one dtype at one K.  Each is judged in its own process; one that dies is caught as
            `dead process`."""
        ),
        _table(["", "cases caught", "mutants caught in every case", "false alarms on controls"], summary),
        _prose(
            f"""The usual comparisons get one call on random data (normal; int8 uniform), compared with eager ATen on
            the same operands, as common in tests.  `assert_close`: `torch.testing.assert_close` with its defaults.
            1e-2:
            the same with rtol = atol = 1e-2.  `same`: `torch._dynamo.utils.same` with a float64 reference where the op
            runs in float64 (mm, addmm, bmm, linear), tol 1e-3 in f16 and 1e-4 elsewhere, as in PyTorch's benchmark
            runner.  cosine: similarity of at least 0.99.  max norm: `max |x - y| <= {MAX_NORM:g} max |y|`.  *alarm*: it
            rejects the right product on these data too, so it detects nothing.  Dtypes that a cell does not name are
            missed (of a control: passed).  Where eager would kill the process there is no comparison, and the case
            counts for pytest-gemm only."""
        ),
        _prose(
            f"""pytest-gemm: the tier that caught it first, and the distribution.  {_counted(tiers)}.
            {len(mutants) - len(late)} cases are caught by the {quick} distributions of `--gemm-level=quick`, the others
            by a later one:
            {", ".join(f"`{name}`" for name in dict.fromkeys(r.name for r in late)) or "none"}."""
        ),
        "## Mutants",
        _table(["mutant", "bug", "dtypes", "pytest-gemm", *heads], body),
        "## Controls",
        "Judged with every distribution that applies, under the contract that they declare.",
        _table(["control", "description", "pytest-gemm", *heads], correct),
        "## Equivalent mutants",
        _prose(
            """On these problems the bug cannot change the result.  A problem line that matches the pattern is left out
            of the tables above."""
        ),
        _table(["mutant", "problems", "reason"], excused),
        _prose(
            """Not included: tensor cores that truncate at f = 24 where float32 sums are declared, which stay within
            the bound of float32 sums in any order."""
        ),
    ]
    return "\n\n".join([*parts, *([flood] if flood else [])]) + "\n"


# -- correct products ------------------------------------------------------------------------------------

# Dtypes of each op, of which all take part equally often.
_DTYPES: Final[Mapping[str, Sequence[str]]] = {
    "mm": ("f64", "f32", "bf16", "f16", "f32-f32-bf16", "f32-f32-f16"),
    "addmm": ("f64", "f32", "bf16", "f16", "f32-f32-bf16"),
    "bmm": ("f64", "f32", "bf16", "f16"),
    "baddbmm": ("f64", "f32", "bf16", "f16"),
    "linear": ("f64", "f32", "bf16", "f16", "f32-f32-bf16", "f32-f32-f16"),
    "int_mm": ("i8-i8-i32",),
    "mixed_mm": ("f32-i8-f32", "bf16-i8-bf16", "f16-i8-f16", "i8-f32-f32", "bf16-u8-bf16", "f64-i8-f64"),
    "woq_int8": ("f32-i8-f32", "bf16-i8-bf16", "f16-i8-f16"),
    "scaled_mm": tuple(
        f"{a}-{b}-{out}"
        for a in ("f8e4m3fn", "f8e5m2")
        for b in ("f8e4m3fn", "f8e5m2")
        for out in ("bf16", "f16", "f32")
    ),
    "grouped_mm": ("f32", "bf16", "f16"),
}
_FLAGS: Final = (
    "a.padded",
    "b.padded",
    "a.offset",
    "b.offset",
    "a.broadcast",
    "b.broadcast",
    "b.alias_t",
    "r0.alias",
    "program.multi_output",
)
_NUMBERS: Final = {
    "clamp": ("", "-0.5_0.75", "0_6"),
    "leaky_relu": ("", "0.2"),
    "scale": ("", "0.3", "-2"),
    "cast": ("f32", "bf16", "f16", "f64"),
}
_STEPS: Final = tuple(name for name in STEPS if name not in {"bias", "alpha", "beta", "tensorwise", "rowwise", "group"})


def drawn_problem(draw: random.Random) -> Problem:
    """A random problem that the grammar allows: op, dtypes, layout, small sizes, an epilogue, flags."""
    while True:
        op = draw.choice(list(_DTYPES))
        size = [draw.choice((draw.randint(0, 3), draw.randint(1, 40), draw.randint(1, 40))) for _ in range(2)]
        k = draw.choice((draw.randint(0, 9), draw.randint(1, 100), draw.randint(1, 100), draw.randint(100, 1500)))
        kind = OPS[op]
        batch = kind.batch == "always" or (kind.batch == "optional" and draw.random() < 0.3)
        sizes = [*([draw.randint(1, 5)] if batch else []), *size, k]
        steps = [draw.choice(kind.scales)] if kind.scales else []
        if kind.addend or (op in {"linear", "scaled_mm"} and draw.random() < 0.5):
            steps.append(draw.choice(("bias", "bias-1n", "bias-m1", "bias-mn")) if kind.addend else "bias")
        if kind.addend:
            steps += [f"{name}-{draw.choice(('0.5', '2', '-1', '0.3', '0'))}" for name in ("alpha", "beta")
                      if draw.random() < 0.3]  # fmt: skip
        if op == "int_mm" and draw.random() < 0.5:
            steps.append(f"cast-{draw.choice(('f32', 'bf16', 'f16'))}")
        if op != "int_mm" or len(steps) > 0:
            for _ in range(draw.choice((0, 0, 1, 1, 2, 3))):
                name = draw.choice(_STEPS)
                number = draw.choice(_NUMBERS.get(name, ("",)))
                steps.append(f"{name}-{number}" if number else name)
        flags = draw.sample(_FLAGS, draw.choice((0, 0, 0, 1, 1, 2)))
        if "b.alias_t" in flags:
            sizes[-2] = sizes[-3]
        layout = draw.choice(kind.layouts).value
        fields = [op, draw.choice(_DTYPES[op]), layout, "x".join(map(str, sizes)), "+".join(steps), "+".join(flags)]
        try:
            return Problem.parse(":".join(fields).rstrip(":"))
        except ProblemError:
            continue


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

    def add(self, other: Flood) -> None:
        """Both together."""
        self.ends.update(other.ends)
        self.dtypes.update(other.dtypes)
        self.ops.update(other.ops)
        self.alarms += other.alarms
        self.doubts += other.doubts


def flooded(seed: int, count: int, journal: Path | None = None) -> Flood:
    """At least ``count`` random products of eager ATen, judged; the same seed gives the same ones.

    Args:
        seed: of the draws.
        count: how many.
        journal: a folder for a file that says what is being judged, should it kill the process.
    """
    torch.set_num_threads(1)
    draw, who, found, environment = random.Random(seed), judge(), Flood(), known.environment("cpu")
    backend = AtenBackend()
    while found.ends.total() < count:
        problem = drawn_problem(draw)
        names = distributions_for(problem)
        if not names or AtenBackend().unsupported(problem, "cpu"):
            continue
        if ledger().applicable("aten", problem, "test_product", environment) is not None:
            continue  # it can kill the process
        case = Case(backend, problem, tuple(draw.sample(names, min(len(names), 4))), draw.randrange(10**6), Device.CPU)
        if journal is not None:
            (journal / str(seed)).write_text(
                f"{problem} distributions {' '.join(case.distributions)} seed {case.seed}\n"
            )
        for outcome in who.outcomes(case):
            status = outcome.status
            if status is Status.UNSUPPORTED:
                continue
            accused = Catch.of(outcome) is not None
            if accused and ledger().match(outcome, problem, environment) is not None:
                status = Status.KNOWN_FAILURE
            found.ends[status.value] += 1
            text = f"{problem} {outcome.distribution} seed {case.seed}: {outcome.reason}"
            if accused and status is not Status.KNOWN_FAILURE:
                found.alarms.append(text)
            elif status is Status.MISTRUSTED:
                found.doubts.append(text)
            else:
                found.dtypes[str(problem.dtypes)] += 1
                found.ops[problem.op.name] += 1
    if journal is not None:
        (journal / str(seed)).unlink()
    return found


def flood(count: int, seed: int, workers: int) -> tuple[Flood, float, float]:
    """:func:`flooded` in several processes; with the seconds that it took, and those that cores computed."""
    started, total, share = time.perf_counter(), Flood(), 1000
    pending = list(range(seed * 10**6, seed * 10**6 + -(-count // share)))
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder)
        while pending:
            with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
                futures = {pool.submit(flooded, one, share, journal): one for one in pending}
                try:
                    for future in as_completed(futures):
                        total.add(future.result())
                        pending.remove(futures[future])
                except BrokenProcessPool:
                    for path in journal.iterdir():  # what was under way; the rest is asked again
                        total.alarms.append(f"killed the process, or its neighbour did: {path.read_text()}")
                        pending.remove(int(path.name))
                        path.unlink()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return total, time.perf_counter() - started, used.ru_utime + used.ru_stime


def flood_text(found: Flood, seconds: float, cpu: float, workers: int) -> str:
    """The random products as a section of the page; ``cpu`` is the time that the workers computed, in seconds."""
    total = found.ends.total()
    known = found.ends[Status.KNOWN_FAILURE.value]
    parts = [
        "## Random correct products",
        _prose(
            f"""{total} random products of eager ATen on the CPU, {len(found.alarms)} false alarms, {seconds:.0f}
            seconds in {workers} processes of one thread, {cpu:.0f} seconds of CPU time in total:
            {1e3 * cpu / max(total, 1):.1f} ms per product.  Op, dtypes, layout, sizes (M and N to 40, K to 1500),
            epilogue, flags, distribution and seed are random; a product is one distribution of one problem, or a second
            run that ends a case."""
        ),
        _prose(
            f"""{known} are known failures; {len(found.doubts)} are cases whose data cannot tell a right result from a
            wrong one (mistrusted), most of them with epilogues that saturate every input (sigmoid, exp, then clamp).
            They
            are not failures of eager.  Problems that kill the process according to the ledger do not run: bf16
            `woq_int8` with K no multiple of 32, or with an unaligned A or weight, which this study found."""
        ),
        f"By op: {_counted(found.ops)}.",
        f"By dtypes: {_counted(found.dtypes)}.",
    ]
    return "\n\n".join(parts)


# -- the command -----------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 1 if a mutant got away or a correct backend was accused."""
    parser = argparse.ArgumentParser(description="Mutants, controls, and random correct products.")
    parser.add_argument("--out", type=Path, help="write the page here (default: standard output)")
    parser.add_argument(
        "--correct", type=int, default=0, metavar="COUNT", help="judge so many random products of eager ATen"
    )
    parser.add_argument("--only-correct", action="store_true", help="leave the tables out")
    parser.add_argument("--mutants", default="*", metavar="PATTERN", help="only mutants and controls of such names")
    parser.add_argument("--seed", type=int, default=0, help="of the random products (0)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (the cores)")
    given = parser.parse_args(argv)
    wrong = 0
    text = ""
    if given.correct:
        found, seconds, cpu = flood(given.correct, given.seed, given.workers)
        text = flood_text(found, seconds, cpu, given.workers)
        for what in (*found.alarms, *found.doubts[:50]):
            sys.stderr.write(f"{what}\n")
        wrong += len(found.alarms)
    if not given.only_correct:
        torch.set_num_threads(1)
        started = time.perf_counter()
        mutants, controls = (rows(given.workers, given.mutants) for rows in (mutant_rows, control_rows))
        wrong += sum(row.catch is None for row in mutants) + sum(row.catch is not None for row in controls)
        text = page(mutants, controls, time.perf_counter() - started, text)
        for row in mutants:
            if row.catch is None:
                sys.stderr.write(f"got away: {row.name} {row.dtype} K = {row.k}\n")
        for row in controls:
            if row.catch is not None:
                sys.stderr.write(f"accused: {row.name} {row.dtype} K = {row.k}: {row.catch.outcome.details}\n")
    if given.out:
        given.out.write_text(text)
    else:
        sys.stdout.write(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
