"""A mutation study: which problems each mutant reaches, and which of them finds it.

First a survey generates the program of every problem once with the marks of all mutants and without their changes.
Then the suite runs for each mutant over the problems that reach it, in a process and with caches of its own, until the
first failure.  A mutant that the first problems do not find is generated for all of them, and the suite runs those
whose program it changes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from pytest_gemm.problem.problem import Problem
from template_mutants import patches
from template_mutants.table import Mutant

HOOK: Final = Path(__file__).parent / "hook"
SURVEY: Final = Path(__file__).parent / "survey.py"
# Problems that are tried before the mutant's own programs are generated.
FIRST: Final = 12
_FAILURES: Final = frozenset({"incorrect", "crashed", "timed-out", "fallback", "mistrusted"})
# Compiled with every mutant's caches already: what Inductor compiles to know the processor is in them.
_WARM: Final = dict.fromkeys(("cpp", "inductor"), "mm:f32:nn:16x16x16")
# Seconds for one process.
_LIMIT: Final = 3600.0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of a mutant.

    Attributes:
        mutant: its name.
        digest: of its text.
        level: of the problems.
        verdict: ``killed``, ``survived`` or ``not reached``.
        problem: that killed it.
        status: how its case ended.
        tried: problems that were run.
        reaching: problems that reach it.
        same: problems whose program it does not change, which are not run, and those that cannot run here.
        marked: whether the mark was seen in the mutated run.
        seconds: that it took.
    """

    mutant: str
    digest: str
    level: str
    verdict: str
    problem: str = ""
    status: str = ""
    tried: int = 0
    reaching: int = 0
    same: int = 0
    marked: bool = False
    seconds: float = 0.0


@dataclasses.dataclass
class Study:
    """A study of one backend's mutants.

    Attributes:
        backend: whose templates are changed.
        level: of the suite.
        lines: the problems.
        folder: of the answers, which a later run goes on from, and of the caches.
        jobs: processes at a time.
        most: problems that are run for a mutant, 0 for all.
        failures: with which a run ends.
    """

    backend: str
    level: str
    lines: Sequence[str]
    folder: Path
    jobs: int
    most: int
    failures: int = 1
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.folder = self.folder / f"{self.backend}-{version('torch')}"
        self.folder.mkdir(parents=True, exist_ok=True)

    # -- the survey ------------------------------------------------------------------------------------------------

    def survey(self, mutants: Sequence[Mutant]) -> dict[str, dict[str, Any]]:
        """The answers of ``survey.py`` for every problem, by line, without changes."""
        places = hashlib.sha256("".join(mutant.digest for mutant in mutants).encode()).hexdigest()[:12]
        file = self.folder / f"survey-{places}.jsonl"
        given = self.folder / f"survey-{places}.json"
        patches.write(given, (mutant.patch for mutant in mutants), only_marks=True)
        return self._surveyed(file, given, self.lines, self.jobs)

    def changing(self, mutant: Mutant, lines: Sequence[str], plain: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """The problems whose program a mutant changes."""
        file = self.folder / f"changed-{mutant.name}-{mutant.digest}.jsonl"
        given = self.folder / f"changed-{mutant.name}.json"
        patches.write(given, mutant.patches)
        found = self._surveyed(file, given, lines, 1)
        return [line for line in lines if found.get(line, plain[line])["digest"] != plain[line]["digest"]]

    def _surveyed(self, file: Path, given: Path, lines: Sequence[str], jobs: int) -> dict[str, dict[str, Any]]:
        known = {one["line"]: one for one in _records(file)}
        rest = [line for line in lines if line not in known]
        # Generating needs no device, and is the same without.
        environment = {**self._environment(given, self.folder / "inductor-survey"), "CUDA_VISIBLE_DEVICES": ""}

        def part(index: int) -> None:
            mine = "\n".join(rest[index::jobs])
            with file.open("a", encoding="utf-8") as out:
                command = [sys.executable, str(SURVEY), self.backend]
                subprocess.run(command, input=mine.encode(), stdout=out, env=environment, check=False, cwd=self.folder)

        if rest:
            with ThreadPoolExecutor(jobs) as pool:
                list(pool.map(part, range(min(jobs, len(rest)))))
        return {one["line"]: one for one in _records(file)}

    def _environment(self, given: Path | None, inductor: Path) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(HOOK), os.environ.get("PYTHONPATH", ""))))
        found = {**os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": str(inductor)}
        found |= {"XDG_CACHE_HOME": str(self.folder / "cache"), "TRITON_CACHE_DIR": str(inductor / "triton")}
        if self.backend != "cpp":  # whose kernels depend on the number of threads
            found.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.jobs)))
        return {**found, patches.FILE: str(given)} if given else found

    # -- the mutants -----------------------------------------------------------------------------------------------

    def verdicts(self, mutants: Sequence[Mutant], marked: Sequence[Mutant]) -> Iterator[Verdict]:
        """What comes of each mutant, as it comes; those of an earlier run first.

        Args:
            mutants: that are asked for.
            marked: all of the release, whose marks the survey sets.
        """
        plain = self.survey(marked)
        log = self.folder / "verdicts.jsonl"
        keys = {(mutant.name, mutant.digest, self.level) for mutant in mutants}
        stored = (Verdict(**record) for record in _records(log))
        known = {one.mutant: one for one in stored if (one.mutant, one.digest, one.level) in keys}
        yield from known.values()
        self._warm()

        def judged(mutant: Mutant) -> Verdict | None:
            started = time.monotonic()
            found = self._verdict(mutant, plain)
            if found.verdict == "unknown":
                where = self.folder / "runs" / mutant.name
                sys.stderr.write(f"{mutant.name}: the suite did not come to its end: see {where}\n")
                return None
            found = dataclasses.replace(found, seconds=round(time.monotonic() - started, 1))
            with self._lock, log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(dataclasses.asdict(found)) + "\n")
            return found

        with ThreadPoolExecutor(self.jobs) as pool:
            yield from filter(None, pool.map(judged, [mutant for mutant in mutants if mutant.name not in known]))

    def _verdict(self, mutant: Mutant, plain: Mapping[str, Mapping[str, Any]]) -> Verdict:
        """What comes of one; ``unknown`` where the suite cannot run."""
        reaching = in_turn(line for line in self.lines if mutant.name in plain.get(line, {}).get("reached", ()))
        found = Verdict(mutant.name, mutant.digest, self.level, "not reached", reaching=len(reaching))
        asked = reaching[: self.most or len(reaching)]
        if asked:
            found = self._run(mutant, asked[:FIRST], found)
        if found.verdict == "survived" and (rest := asked[found.tried + found.same :]):
            if not mutant.patch.is_text():  # which may change nothing of a program
                differ = self.changing(mutant, rest, plain)
                found = dataclasses.replace(found, same=found.same + len(rest) - len(differ))
                rest = differ
            if rest:
                found = self._run(mutant, rest, found)
        return found

    def _run(self, mutant: Mutant, lines: Sequence[str], before: Verdict) -> Verdict:
        """The suite over problems, to the first failure."""
        folder = self.folder / "runs" / mutant.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        given = folder / "patches.json"
        patches.write(given, mutant.patches)
        outcomes, ended = self._suite(folder, given, lines)
        failed = next((one for one in outcomes if one["status"] in _FAILURES), None)
        marked = before.marked or self._is_marked(folder, mutant)
        judged = len({one["problem"] for one in outcomes if one["status"] != "unsupported"})
        shutil.rmtree(folder / "inductor", ignore_errors=True)
        if failed is None:
            verdict, others = "survived" if ended else "unknown", before.same + len(lines) - judged
            return dataclasses.replace(before, verdict=verdict, tried=before.tried + judged, same=others, marked=marked)
        where = {"problem": failed["problem"], "status": failed["status"]}
        return dataclasses.replace(before, verdict="killed", tried=before.tried + judged, marked=marked, **where)

    def _suite(
        self, folder: Path, given: Path | None, lines: Sequence[str], *, every: bool = False
    ) -> tuple[list[dict[str, Any]], bool]:
        """The outcomes of a run of pytest, and whether it came to its end; a red one without a failed case did not.

        It ends with the first failure, unless it is to run ``every`` problem.

        The caches begin as those that :meth:`_warm` has filled.
        """
        inductor = folder / "inductor"
        if (warm := self.folder / "inductor-warm").is_dir() and inductor != warm:
            shutil.copytree(warm, inductor, copy_function=os.link)
        command = [sys.executable, "-m", "pytest", "--pyargs", "pytest_gemm.conformance.test_products", "-q"]
        command += [] if every else [f"--maxfail={self.failures}"]
        command += ["-p", "no:cacheprovider", f"--gemm-backends={self.backend}", f"--gemm-level={self.level}"]
        command += [f"--gemm-problem={','.join(lines)}", "--gemm-output=out", "--gemm-allow=unjudged"]
        environment = {**self._environment(given, inductor), patches.LOG: str(folder / "passed")}
        with (folder / "log").open("a") as log:
            try:
                status = subprocess.run(
                    command, cwd=folder, env=environment, stdout=log, stderr=log, check=False, timeout=_LIMIT
                ).returncode
            except subprocess.TimeoutExpired:
                log.write(f"\nno end within {_LIMIT:.0f} s\n")
                status = -1
        outcomes = [one for one in _records(folder / "out" / "run.jsonl") if "problem" in one]
        wrong = any(one["status"] in _FAILURES for one in outcomes)
        return outcomes, bool(outcomes) and status == int(wrong)

    def _warm(self) -> None:
        """Have Inductor compile what it needs to know the processor, once for all mutants."""
        folder = self.folder / "warm"
        if self.backend in _WARM and not folder.is_dir():
            folder.mkdir()
            self._suite(folder, None, [_WARM[self.backend]])
            shutil.rmtree(self.folder / "inductor-warm", ignore_errors=True)
            (folder / "inductor").rename(self.folder / "inductor-warm")

    def _is_marked(self, folder: Path, mutant: Mutant) -> bool:
        passed = folder / "passed"
        if passed.is_file() and mutant.name in passed.read_text(encoding="utf-8").split():
            return True
        mark = f"{patches.MARK}{mutant.name}".encode()
        files = (path for path in (folder / "inductor").rglob("*") if path.suffix in {".py", ".cpp", ".cu"})
        return any(mark in path.read_bytes() for path in files)

    def right(self, lines: Iterable[str]) -> list[str]:
        """Problems of these that fail without any mutant: what they kill is no evidence."""
        if not (killing := list(lines)):
            return []
        folder = self.folder / "runs" / "unchanged"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        outcomes, _ = self._suite(folder, None, killing, every=True)
        return list(dict.fromkeys(one["problem"] for one in outcomes if one["status"] in _FAILURES))


def _records(file: Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON; a last one that is not whole is left out."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def in_turn(lines: Iterable[str]) -> list[str]:
    """Problems in an order that has all kinds early, by turns one of each op, type and set of steps, and all sizes."""
    kinds: dict[tuple[str, ...], list[Problem]] = defaultdict(list)
    for problem in map(Problem.parse, lines):
        names = "+".join(step.name for step in problem.steps)
        kinds[problem.op.name, str(problem.dtypes), names, "+".join(problem.flags)].append(problem)
    ops = Counter[str]()
    turns = []
    for kind, found in kinds.items():
        ops[kind[0]] += 1
        turns.append((ops[kind[0]], found))
    turns.sort(key=lambda turn: turn[0])
    for index, (_, found) in enumerate(turns):
        found.sort(key=lambda one: one.shape.m * one.shape.n * one.shape.k, reverse=index % 3 != 0)
    rows = itertools.zip_longest(*(found for _, found in turns))
    return [problem.line for row in rows for problem in row if problem is not None]
