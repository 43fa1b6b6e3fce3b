"""The text of a failure, and the name of its folder."""

from __future__ import annotations

import dataclasses
import re
import shlex
import textwrap
from collections.abc import Iterable
from pathlib import Path

from pytest_gemm.core.case_id import threads_text
from pytest_gemm.core.outcome import Outcome


@dataclasses.dataclass(frozen=True)
class Rerun:
    """What a rerun line needs beside the outcome.

    Attributes:
        target: what to hand to pytest, for instance ``conformance/test_products.py::test_product``.
        options: further options that the run was given and that matter, already spelled out; ``python -m`` in front
            where pytest has to be started so.
    """

    target: str
    options: tuple[str, ...] = ()

    def line(self, outcome: Outcome) -> str:
        """The command that runs just this case again, with the candidate that it was."""
        case = outcome.case
        candidate = case.candidate
        if "--gemm-candidates=winner" in self.options and len(outcome.chosen) == 1:
            candidate = outcome.chosen[0]  # another one may win the next time
        has_machine = any(option.startswith("--gemm-set=run.machine=") for option in self.options)  # with its own
        threads = threads_text(case.threads, case.run_threads) if case.threads and not has_machine else ""
        own = {"--gemm-candidates=": candidate, "--gemm-threads=": threads}
        replaced = tuple(option for option, value in own.items() if value)
        start = self.options[:2] if self.options[:1] == ("python",) else ()
        words = [
            *start,
            "pytest",
            *self.target.split(),
            f"--gemm-backends={case.backend}",
            f"--gemm-problem={case.problem}",
            f"--gemm-seed={outcome.seed}",
            *(w for o in self.options[len(start) :] if not o.startswith(replaced) for w in self._spelled(o)),
        ]
        own |= {
            "--gemm-modes=": case.mode.value,
            "--gemm-isa=": "" if has_machine else case.isa,
            "--gemm-guard=": "pages" if case.guard else "",
        }
        words += [f"{option}{value}" for option, value in own.items() if value]
        return " ".join(map(shlex.quote, words))

    def _spelled(self, option: str) -> list[str]:
        """An option in the command; the folder of a conftest, without its tests, where pytest would not load that."""
        conftest = Path(option)
        if conftest.name != "conftest.py":
            return [option]
        folder, (*pyargs, path) = conftest.parent, self.target.partition("::")[0].split()
        loads = folder.absolute() == Path.cwd() if pyargs else Path(path).absolute().is_relative_to(folder.absolute())
        return [] if loads else [str(folder), f"--ignore-glob={folder}/*"]


def folder_name(outcome: Outcome) -> str:
    """Name of the folder that has the files of a failed case."""
    case = outcome.case
    parts = (case.who, case.problem, case.candidate, outcome.distribution, str(outcome.seed), case.guard)
    return re.sub(r"[^\w.+-]+", "_", "-".join(filter(None, parts)))


def failure(outcome: Outcome, rerun: Rerun) -> str:
    """What went wrong, where, how far past the bound, with which kernel, and how to run it again."""
    reason = outcome.reason.text if outcome.reason else str(outcome.status)
    lines = [f"{outcome.problem} on {outcome.who}: {outcome.status}: {reason}"]
    details = outcome.details.removeprefix(reason).lstrip("\n")  # a mismatch begins with its own summary
    if details:
        lines.append(textwrap.indent(textwrap.dedent(details).rstrip("\n"), "  "))
    kernels = ", ".join(outcome.kernels) or "unknown"
    guard = outcome.case.guard
    facts = [
        named("candidate", [outcome.candidate]),
        f"kernel {kernels}; distribution {outcome.distribution or '-'}, seed {outcome.seed}",
        outcome.sampled,
        guard and f"operands and results {guard} at guard pages",
        outcome.eager and f"beside eager: {outcome.eager}",
        outcome.known_failure and f"known failure: {outcome.known_failure}",
        outcome.reason and outcome.reason.remedy and f"remedy: {outcome.reason.remedy}",
    ]
    lines += [f"  {fact}" for fact in facts if fact]
    lines.append(f"  rerun: {rerun.line(outcome)}")
    return "\n".join(lines)


def named(what: str, names: Iterable[str]) -> str:
    """``candidate a``, ``candidates a, b and c``, or "" without a name."""
    *others, last = dict.fromkeys(filter(None, names)) or ("",)
    return f"{what}s {', '.join(others)} and {last}" if others else last and f"{what} {last}"
