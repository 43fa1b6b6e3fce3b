"""Candidates that autotuning leaves out, and why."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_gemm.backends.inductor import torch_compat
from pytest_gemm.backends.inductor.compilation import CompileSpec, Session
from pytest_gemm.outcome import Pruned, Reason, Unsupported
from pytest_gemm.problem.problem import Problem
from pytest_gemm.text import first_line


def after_failure(
    problem: Problem, spec: CompileSpec, seen: Session, error: Exception, pruned: dict[str, Reason]
) -> None:
    """A compile has failed: note that its candidate is pruned and return when another one is to be tried.

    Raises:
        Unsupported: when Inductor has no candidate.
        Pruned: when there is none left that could be tried.
        Exception: what the candidate has failed with, when autotuning has no reason to drop it.
    """
    if seen.empty:
        ops = ", ".join(seen.empty)
        text = f"Inductor has no {spec.inductor_name} candidate for {ops} of {problem}"
        raise Unsupported("no-candidate", text) from error
    if spec.candidate is None:
        # Inductor has tried them all, and raises that no choice is valid.
        causes = {name: why for name, why in seen.failed.items() if isinstance(why, Exception)}
        reasons = {name: reason for name, why in causes.items() if (reason := torch_compat.why_pruned(why))}
        if reasons and set(reasons) >= set(seen.choices):
            raise _all_pruned(reasons) from error
        raise next((why for name, why in causes.items() if name not in reasons), error)
    cause = seen.failed.get(seen.tried)
    if not isinstance(cause, Exception):
        cause = error
    reason = torch_compat.why_pruned(cause)
    # Once a candidate is part of the program, autotuning has no part in it any more: a kernel with its epilogue that
    # nvcc rejects is what a user gets.  (Triton's kernels are another matter: they may have been chosen unseen.)
    if reason is None or (reason.code == "compile-error" and seen.chosen and spec.inductor_name == "CUTLASS"):
        raise cause
    if isinstance(spec.candidate, str):
        raise Pruned(reason.code, reason.text) from error
    pruned[seen.tried] = reason
    if len(pruned) >= len(set(seen.choices)):
        raise _all_pruned(pruned) from error


def _all_pruned(pruned: Mapping[str, Reason]) -> Pruned:
    first, reason = next(iter(pruned.items()))
    return Pruned("all-pruned", f"all {len(pruned)} candidates were pruned, {first} because {reason.text}")


def left_out(why: Exception | Reason) -> Reason:
    """What becomes of a candidate that Inductor left out after a failure, whatever that was."""
    if isinstance(why, Reason):
        return why
    first = first_line(why)
    return torch_compat.why_pruned(why) or Reason("benchmark-failed", f"{type(why).__name__}: {first}"[:200])


# Modes in which C++ calls the kernels: calls cannot be counted, and are read in the program's text.
IN_CPP = frozenset({"aoti", "cpp-wrapper"})
