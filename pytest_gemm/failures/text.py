"""The text of a failure."""

from __future__ import annotations

import dataclasses
import shlex
import textwrap

from pytest_gemm.outcome import Outcome


@dataclasses.dataclass(frozen=True)
class Rerun:
    """What a rerun line needs beside the outcome.

    Attributes:
        target: what to hand to pytest, for instance ``conformance/test_products.py::test_product``.
        options: further options that the run was given and that matter, already spelled out.
    """

    target: str
    options: tuple[str, ...] = ()

    def line(self, outcome: Outcome) -> str:
        """The command that runs just this case again, with the candidate that it was."""
        options = self.options
        choice = outcome.candidate
        if f"{_CHOICES}winner" in options and len(outcome.chosen) == 1:
            choice = outcome.chosen[0]  # another one may win the next time
        if choice:
            options = (*(o for o in options if not o.startswith(_CHOICES)), f"{_CHOICES}{choice}")
        words = [
            "pytest",
            *self.target.split(),
            f"--gemm-backends={outcome.backend}",
            f"--gemm-problem={outcome.problem}",
        ]
        if outcome.case.threads:
            options = (*(o for o in options if not o.startswith(_THREADS)), f"{_THREADS}{outcome.case.threads}")
        words += [f"--gemm-seed={outcome.seed}", *options]
        words += [f"--gemm-modes={outcome.mode}"] if outcome.mode else []
        words += [f"--gemm-isa={outcome.case.isa}"] if outcome.case.isa else []
        words += ["--gemm-guard=pages"] if outcome.case.guard else []
        return " ".join(map(shlex.quote, words))


_CHOICES = "--gemm-candidates="
_THREADS = "--gemm-threads="


def _indent(text: str, by: str = "  ") -> str:
    return "\n".join(by + line if line else line for line in text.splitlines())


def failure(outcome: Outcome, rerun: Rerun) -> str:
    """What went wrong, where, how far past the bound, with which kernel, and how to run it again."""
    reason = outcome.reason.text if outcome.reason else str(outcome.status)
    lines = [f"{outcome.problem} on {outcome.who}: {outcome.status}: {reason}"]
    details = outcome.details.removeprefix(reason).lstrip("\n")  # a mismatch begins with its own summary
    if details:
        lines.append(_indent(textwrap.dedent(details)))
    if outcome.candidate:
        lines.append(f"  candidate {outcome.candidate}")
    kernels = ", ".join(outcome.kernels) or "unknown"
    lines.append(f"  kernel {kernels}; distribution {outcome.distribution or '-'}, seed {outcome.seed}")
    if outcome.sampled:
        lines.append(f"  {outcome.sampled}")
    if outcome.case.guard:
        lines.append(f"  operands and results {outcome.case.guard} at guard pages")
    if outcome.eager:
        lines.append(f"  beside eager: {outcome.eager}")
    if outcome.known_failure:
        lines.append(f"  known failure: {outcome.known_failure}")
    if outcome.reason and outcome.reason.remedy:
        lines.append(f"  remedy: {outcome.reason.remedy}")
    lines.append(f"  rerun: {rerun.line(outcome)}")
    return "\n".join(lines)
