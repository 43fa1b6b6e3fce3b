"""Outcome of runs with a faulty backend: every fault of ``faulty.py``, without workers and with two.

    python tests/studies/fault_study.py [--out PAGE] [--only TEXT] [--jobs N]

Each fault is a backend with a fault in one problem, beside a correct backend and a problem in which it is correct
itself.  Three things are checked: the report names the faulty case with its status, the others pass, and the exit
status is right.  Faults that leave the process alive share a run; those that end or change it have their own.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from faulty import AT_EXIT, CONTROLS, GUILTY, LEFT, RAISED, RESULTS, Fault, faults
from studies import lines

CONFTEST: Final = "import sys\nsys.path.insert(0, {folder!r})\nfrom faulty import pytest_gemm_register_backends\n"
TEST: Final = """
import pytest

@pytest.mark.gemm(problems=["mm:f32:nn:{guilty}x16x32", "mm:f32:nn:{correct}x16x32"], distributions=["rand"])
def test_product(gemm_case, gemm_check):
    gemm_check(gemm_case)
"""
OPTIONS: Final = ("-p", "no:cacheprovider", "--gemm-candidates=all", "--gemm-timeout=2,20")
_SAID: Final = 100


@dataclasses.dataclass(frozen=True)
class Run:
    """What came of a run.

    Attributes:
        status: exit status.
        text: stdout and stderr.
        outcomes: those of the run record.
    """

    status: int
    text: str
    outcomes: tuple[dict[str, object], ...]


@dataclasses.dataclass(frozen=True)
class Row:
    """What came of a fault.

    Attributes:
        fault: it.
        status: how its case ended, "" where that is nowhere.
        exit: status of its run.
        said: what the user reads of it.
        wrong: what is not as it should be, "" for nothing.
        workers: of the run.
    """

    fault: Fault
    status: str
    exit: int
    said: str
    wrong: str
    workers: int


def run(folder: Path, group: Sequence[Fault], workers: int) -> Run:
    """Run pytest over a group of faults."""
    folder.mkdir(parents=True)
    (folder / "tmp").mkdir()
    (folder / "conftest.py").write_text(CONFTEST.format(folder=str(Path(__file__).parents[1])))
    (folder / "test_it.py").write_text(TEST.format(guilty=GUILTY, correct=CONTROLS))
    names = [fault.name for fault in group]
    environment = {**os.environ, "FAULTS": ",".join(names), "TMPDIR": str(folder / "tmp")}
    for name in ("CI", "BUILD_NUMBER"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "pytest", *OPTIONS, f"--gemm-backends={','.join([*names, 'correct'])}"]
    command += ["--gemm-output=.", *([f"-n{workers}"] if workers else [])]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            timeout=900,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        status, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        status, output = 999, (late.stdout or b"") + (late.stderr or b"")
    record = folder / "run.jsonl"
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    return Run(status, output.decode(errors="replace"), tuple(line for line in lines if "backend" in line))


def rows(group: Sequence[Fault], made: Run, workers: int) -> list[Row]:
    """What came of each fault of a group."""
    lines = made.text.splitlines()
    found = []
    ended = any(fault.ends and not workers for fault in group)
    for fault in group:
        mine = [o for o in made.outcomes if o["backend"] == fault.name]
        guilty = [o for o in mine if f":{GUILTY}x" in str(o["problem"])]
        statuses = [str(o["status"]) for o in guilty]
        status = next((s for s in statuses if s != "passed"), statuses[0] if statuses else "")
        said = next((line for line in lines if f" on {fault.name}: " in line), "")
        wrong = []
        if fault.where == "availability":
            said = next((line for line in lines if line.startswith(f"{fault.name} did not run: ")), "")
            status = "missing" if said else ""
        elif "interrupted" in fault.expected and made.status == 143:
            status = "interrupted"  # no case is to blame
            said = next((line for line in lines if "Terminated: SIGTERM" in line), "")
        elif fault.kind in AT_EXIT:
            said = next((line for line in lines if line.startswith("The tests were over when")), "")
        else:
            beside = [o for o in mine if f":{CONTROLS}x" in str(o["problem"])]
            if not ended and [o["status"] for o in beside] != ["passed"]:
                wrong.append("another case did not pass")
        if status not in fault.expected:
            wrong.append(f"ended as {status or 'nothing'}")
        if status != "passed" and not said:
            wrong.append("is not named")
        if "INTERNALERROR" in made.text:
            wrong.append("an internal error")
        if any(ord(c) < 32 and c not in "\t" for c in said):
            wrong.append("a control character on the terminal")
        found.append(Row(fault, status, made.status, said.strip(), "; ".join(wrong), workers))
    correct = [o for o in made.outcomes if o["backend"] == "correct"]
    if any(o["status"] != "passed" for o in correct) or (not ended and len({o["problem"] for o in correct}) != 2):
        found = [dataclasses.replace(row, wrong=f"{row.wrong}; correct ones did not pass".strip("; ")) for row in found]
    right = {143} if any(row.status == "interrupted" for row in found) else {1}
    if all(row.status == "passed" for row in found) and made.status >= 0:  # the status is what pytest has decided, or 1
        right = {0, 1}
    if made.status not in right:
        found = [dataclasses.replace(row, wrong=f"{row.wrong}; exit status".strip("; ")) for row in found]
    return found


def groups(chosen: Iterable[Fault], workers: int) -> list[list[Fault]]:
    """Which faults share a run."""
    alone = [f for f in chosen if f.where == "run" and f.kind in LEFT]
    ending = [f for f in chosen if f.ends]
    together = [f for f in chosen if f not in alone and f not in ending]
    if not workers:
        return [[f] for f in (*alone, *ending)] + [together]
    singly = [f for f in ending if f.kind in AT_EXIT]
    singly += [f for f in alone if f.kind in {"excepthook leaves", "the temporary folder removed"}]  # strikes others
    shared = [[f for f in kinds if f not in singly] for kinds in (ending, alone)]
    return [*([f] for f in singly), *shared, together]


def page(found: Sequence[Row], seconds: float) -> str:
    """The study as Markdown."""

    def of(kind: str, *places: str) -> list[Row]:
        return [row for row in found if row.fault.kind == kind and row.fault.where in places]

    places = dict.fromkeys(row.fault.where for row in found if row.fault.kind in RAISED)
    ending = dict.fromkeys((row.fault.kind, row.fault.where) for row in found if row.fault.ends)
    tables: dict[str, Iterable[str]] = {"Results": RESULTS, "State that a kernel leaves": LEFT}
    return lines.page(
        "faults.md.jinja",
        date=datetime.date.today(),
        torch=version("torch"),
        seconds=seconds,
        found=found,
        places=list(places),
        raised={kind: [_cell(of(kind, place)) for place in places] for kind in RAISED},
        tables={title: _named(of(kind, "result", "run") for kind in kinds) for title, kinds in tables.items()},
        ending=[(of(kind, where), _said(of(kind, where))) for kind, where in ending],
    )


def _named(rows: Iterable[list[Row]]) -> list[tuple[str, str, str]]:
    return [(mine[0].fault.kind, _cell(mine), _said(mine)) for mine in rows if mine]


def _cell(mine: Sequence[Row]) -> str:
    statuses = ", ".join(dict.fromkeys(row.status or "nothing" for row in mine))
    return f"{statuses} (wrong)" if any(row.wrong for row in mine) else statuses


def _said(mine: Sequence[Row]) -> str:
    said = next((r.said for r in mine if r.said), "").partition(f" on {mine[0].fault.name}: ")
    text = (said[2] or said[0]).replace("|", "\\|").replace(mine[0].fault.name, "mine").replace("`", "'")
    return f"`{text[:_SAID]}{'...' if len(text) > _SAID else ''}`" if text else ""


def main() -> int:
    """Run the study; returns 1 where a fault is not dealt with as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="where to write the page; default: only the faults that went wrong")
    parser.add_argument("--only", default="", help="only faults with this text in their name")
    parser.add_argument("--jobs", type=int, default=2, help="runs of a single process at a time")
    given = parser.parse_args()
    chosen = [fault for fault in faults() if given.only in fault.name]
    assert len({fault.name for fault in chosen}) == len(chosen)
    # With workers: each kind of exception in one place, in turn, and everything else.
    kinds, places = list(RAISED), list(dict.fromkeys(f.where for f in chosen if f.kind in RAISED))
    turn = {kind: places[i % len(places)] for i, kind in enumerate(kinds)} if places else {}
    some = [f for f in chosen if f.kind not in RAISED or f.where in {turn[f.kind], "run"}]
    started = time.monotonic()
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        plan = [(group, workers) for workers, of in ((0, chosen), (2, some)) for group in groups(of, workers) if group]

        def one(index: int) -> list[Row]:
            group, workers = plan[index]
            return rows(group, run(Path(name) / str(index), group, workers), workers)

        with ThreadPoolExecutor(given.jobs) as pool:
            for made in pool.map(one, range(len(plan))):
                found += made
                for row in made:
                    if row.wrong:
                        sys.stderr.write(f"{row.fault.kind} in {row.fault.where}, -n {row.workers}: {row.wrong}\n")
    wrong = sum(bool(row.wrong) for row in found)
    sys.stderr.write(f"{len(found)} faults, {wrong} wrong, in {time.monotonic() - started:.0f} s\n")
    if given.out:
        given.out.write_text(page(found, time.monotonic() - started), encoding="utf-8")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
