"""The state of a run: what was judged, what the ledger explains, what goes to disk.

Workers of pytest-xdist judge; their outcomes travel as plain records on pytest's reports and are put
together in the one process that writes the summary and the run record.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gemm import report
from pytest_gemm.ledger import Environment, Ledger, LedgerUse
from pytest_gemm.outcome import Outcome, Reason, Status
from pytest_gemm.problem import Problem

if TYPE_CHECKING:
    from pytest_gemm.config import GemmConfig
    from pytest_gemm.judge import Case, Evidence
    from pytest_gemm.report import Rerun

__all__ = ["RunState", "environment", "explain", "save_artifacts"]


@dataclasses.dataclass
class RunState:
    """Everything the summary is made from, in the process that writes it.

    Attributes:
        config: what was asked for.
        outcomes: in the order in which they came in.
        missing: backends asked for that cannot run here.
        use: how the ledger's entries fared.
        narrowed: only a part of the tests was asked for, so that no entry can be called stale.
    """

    config: GemmConfig
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    missing: dict[str, Reason] = dataclasses.field(default_factory=dict)
    use: LedgerUse = dataclasses.field(default_factory=LedgerUse)
    narrowed: bool = False
    processes: set[str] = dataclasses.field(default_factory=set)
    started: float = dataclasses.field(default_factory=time.perf_counter)

    def open_record(self) -> None:
        """Start an empty run record."""
        if self.config.run_record is not None:
            self.config.run_record.write_text("", encoding="utf-8")

    def absorb(self, records: Iterable[Mapping[str, Any]], use: Mapping[str, Any], process: str) -> None:
        """Take in what one test judged; the run record grows at once, so that a crash loses nothing."""
        self.processes.add(process)
        self.use.merge(use)
        fresh = list(records)
        self.outcomes += map(report.from_record, fresh)
        if self.config.run_record is not None and fresh:
            with self.config.run_record.open("a", encoding="utf-8") as file:
                file.writelines(map(report.record_line, fresh))

    def stale_entries(self) -> tuple[str, ...]:
        """Ledger entries that applied to something that ran and never failed; unknown after a narrowed run."""
        if self.narrowed:
            return ()
        return tuple(entry.id for entry in self.use.stale(self.config.ledger))

    def summary(self) -> list[str]:
        """The lines of the terminal summary."""
        return report.summary(
            self.outcomes,
            missing=self.missing,
            stale_entries=self.stale_entries(),
            processes=len(self.processes),
            wall_seconds=time.perf_counter() - self.started,
        )

    @property
    def is_red(self) -> bool:
        """Whether something that is no test's failure must turn the run red all the same."""
        return (bool(self.missing) and self.config.missing == "fail") or bool(self.stale_entries())


def environment(device: str) -> Environment:
    """What the ledger's predicates may ask about this process; imports torch."""
    import torch

    isa = _cpu_isa()
    if device == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        isa = (f"sm_{major}{minor}",)
    return Environment(torch=torch.__version__, isa=isa, device=device)


def eager_is_safe(ledger: Ledger) -> Callable[[Problem, str], bool]:
    """Whether eager ATen may run a problem on a device: not where the ledger says that it can kill the process."""
    return lambda problem, device: ledger.applicable("aten", problem, "test_product", environment(device)) is None


@functools.cache
def _cpu_isa() -> tuple[str, ...]:
    """Instruction set names as Linux spells them, ``avx512f``; empty where the system does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ()
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return tuple(flags[1].split()) if flags else ()


def explain(
    outcomes: Sequence[Outcome], problem: Problem, ledger: Ledger, env: Environment
) -> tuple[list[Outcome], LedgerUse]:
    """Turn failures that the ledger knows into known failures, and count how its entries fared."""
    use = LedgerUse()
    explained = []
    for outcome in outcomes:
        entry = use.note(ledger, outcome, problem, env)
        if entry is None:
            explained.append(outcome)
        else:
            explained.append(dataclasses.replace(outcome, status=Status.KNOWN_FAILURE, known_failure=entry.id))
    return explained, use


def save_artifacts(folder: Path, failed: Sequence[tuple[Outcome, Evidence]], case: Case, rerun: Rerun) -> None:
    """One folder a failed case: ``report.txt``, ``generated_code.py`` where there is some, ``tensors.pt``.

    ``tensors.pt`` holds the program's inputs by name, the actual result and the accepted interval.
    """
    import torch

    from pytest_gemm import program

    for outcome, evidence in failed:
        name = re.sub(r"[^\w.+-]+", "_", f"{outcome.backend}-{outcome.problem}-{outcome.filling}-{outcome.seed}")
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        (place / "report.txt").write_text(report.failure(outcome, rerun) + "\n", encoding="utf-8")
        if evidence.source:
            (place / "generated_code.py").write_text(evidence.source, encoding="utf-8")
        tensors: dict[str, object] = dict(program.args(case.problem, evidence.operands))
        if isinstance(evidence.actual, torch.Tensor):
            tensors["actual"] = evidence.actual
        tensors |= {"lo": evidence.interval.lo, "hi": evidence.interval.hi}
        torch.save(tensors, place / "tensors.pt")
