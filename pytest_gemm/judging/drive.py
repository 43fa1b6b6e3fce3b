"""Calls of the judge into a backend: what it is asked, what it compiles and what it runs.

Each call is guarded by :mod:`calls`, and the type of each answer is checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import CandidateBackend, Prepared, unsupported
from pytest_gemm.judging import verdict
from pytest_gemm.judging.calls import asking, check_place, handing, quiet, taken
from pytest_gemm.judging.case import Case
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.numerics.precision import cpu_threads
from pytest_gemm.operands import memory, tensors, views
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.outcome import Misconduct, Reason, Unsupported
from pytest_gemm.problem.problem import Problem
from pytest_gemm.text import one_line

_Kind = TypeVar("_Kind")
# Names of candidates that a sentence lists.
_NAMES = 40
# Bytes of a result that its digest reads: 64 MiB take a twentieth of a second.
_DIGESTED: Final = 1 << 26


# -- which variant, which candidates -----------------------------------------------------------------


def check_support(case: Case) -> None:
    """Ask the backend whether it supports the problem as requested.

    Raises:
        Unsupported: when it does not.
        Exception: whatever the backend raises.
    """
    with quiet(), asking():
        found = unsupported(case.backend, case.problem, case.request())
        if found is not None and not isinstance(found, Unsupported):
            raise TypeError(f"supports() returned {found!r}; return None, or Unsupported with the reason")
    if found is not None:
        raise found


def candidates(case: Case, given: Operands) -> tuple[tuple[str, ...], Mapping[str, Reason]]:
    """Names of the candidates to judge, and those that are unsupported; a single "" for a backend without candidates.

    Raises:
        Unsupported: when none has the name that was asked for.
    """
    wanted, backend = case.candidates, case.backend
    if not isinstance(backend, CandidateBackend):
        if not wanted.by_name:
            return ("",), {}
        raise Unsupported("unknown-candidate", f"{backend.name} has no candidates, so none is called {wanted.text}")
    with handing(given, compiling=True) as own:
        listed = backend.candidates(case.problem, own, case.request(wanted.text if wanted.by_name else ""))
        names = tuple(map(str, listed.names))
        if odd := [name for name in names if name != one_line(name)]:  # outcomes have printable names
            raise ValueError(f"candidates() lists a name that cannot be printed: {odd[0]!r}")
    found = wanted.of(names) or listed.named
    if not found:
        more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
        text = f"no candidate is called {wanted.text}; there are {', '.join(names[:_NAMES])}{more}"
        raise Unsupported("unknown-candidate", text)
    return found, listed.unsupported if wanted.text == "all" else {}


# -- compile and run ---------------------------------------------------------------------------------


def prepare(case: Case, candidate: str, given: Operands) -> Prepared:
    """Compile the problem, with one candidate where it is named."""
    with handing(given, compiling=True) as own:
        return case.backend.prepare(case.problem, own, case.request(candidate))


@dataclasses.dataclass(frozen=True)
class Returned:
    """What a run has returned.

    Attributes:
        own: the kernel's tensors, as ordinary ones over its memory.
        copies: of them, made as soon as the call had returned; of large results the kernel's own, see ``calls.taken``.
        results: the copies in the product's places, of which there are two with ``tap``.
    """

    own: tuple[torch.Tensor, ...]
    copies: tuple[torch.Tensor, ...]
    results: tuple[torch.Tensor, ...]

    def rewritten(self) -> int:
        """How many elements have changed since the call returned."""
        return sum(differing(*pair) for pair in zip(self.own, self.copies, strict=True) if pair[0] is not pair[1])


def run(
    prepared: Prepared,
    given: Operands,
    device: str,
    timed: Callable[[Operands], Any] | None = None,
    threads: int = 0,
) -> Returned:
    """The results of a run; the device has finished.

    Args:
        prepared: computes them.
        given: the operands.
        device: where.
        timed: is called instead of ``prepared.run``.
        threads: of the CPU; 0: as many as there are.

    Raises:
        Misconduct: for results or side effects that no contract allows.
        Exception: whatever the backend raises.
    """
    given.empty_out()
    with cpu_threads(threads), handing(given) as handed:
        made = as_tuple((prepared.run if timed is None else timed)(handed))
        wait_for(device)
        own, copies = taken(made)
        wait_for(device)  # for the copies, which may be on a stream of the block's
    check_place(own, given)
    try:
        return Returned(own, copies, views.in_product(given.problem, copies))
    except views.WrongShape as wrong:
        raise Misconduct("wrong-shape", str(wrong)) from None


def run_once(case: Case, threads: int) -> None:
    """Compile and run a case without judging it; nothing for an unsupported case.

    Args:
        case: what to run.
        threads: of the CPU, where the case has no number of its own.
    """
    with contextlib.suppress(Unsupported):
        check_support(case)
        torch.set_num_threads(case.threads or threads)
        given = tensors.make(case.problem, case.distributions[0], case.seed, case.device)
        run(prepare(case, "", given), given, case.device, threads=case.run_threads)


def as_tuple(made: Any) -> tuple[torch.Tensor, ...]:
    """What a program returned, as a tuple."""
    return made if isinstance(made, tuple) else (made,)


def wait_for(device: str) -> None:
    """Until the device has computed all that it was given: errors of a kernel show no earlier."""
    if device == "cuda":
        torch.cuda.synchronize()


# -- its facts -----------------------------------------------------------------------------------------


def proof_of(prepared: Prepared) -> Proof:
    """What the last run executed."""
    with asking():
        return _of_type(prepared.proof(), Proof, "proof() returned")


def contract_of(prepared: Prepared) -> Contract:
    """The arithmetic that the compiled problem promises."""
    with asking():
        return _of_type(prepared.contract, Contract, "the attribute contract is")


def _of_type(found: object, kind: type[_Kind], what: str) -> _Kind:
    if not isinstance(found, kind):
        raise TypeError(f"{what} {type(found).__name__}, not a {kind.__name__}")
    return found


def kernels_of(prepared: Prepared) -> tuple[str, ...]:
    """Names of the kernels that a run will use, as far as they are known before it has run."""
    try:
        proof = proof_of(prepared)
    except Exception:  # it need not have an answer yet
        return ()
    return proof.kernels if proof.executed else tuple(dict.fromkeys((*proof.generated, *proof.chosen)))


def pruned_of(prepared: Prepared) -> Mapping[str, Reason]:
    """Candidates that the backend pruned by itself, where it reports them."""
    with asking():
        return dict(getattr(prepared, "pruned", {}))


def holds_b(prepared: Prepared) -> bool:
    """Whether B is part of what was compiled, so that what is written to its memory later does not count."""
    with asking():
        return bool(getattr(prepared, "constant_b", False))


def source_of(prepared: Prepared) -> str:
    """The generated program, where the backend has one."""
    source = getattr(prepared, "source", "")
    return source if isinstance(source, str) else ""


# -- results -----------------------------------------------------------------------------------------


def miscounted(problem: Problem, results: Sequence[torch.Tensor]) -> Reason | None:
    """What is wrong with the number of results; ``None`` for nothing."""
    expected = problem.several or len(problem.outputs)
    if len(results) == expected:
        return None
    return Reason("wrong-outputs", f"{len(results)} results came back, and the program has {expected}")


def complaint(problem: Problem, results: Sequence[torch.Tensor], given: Operands) -> Reason | None:
    """What is wrong with the number of results, or with the type or shape of the last one; ``None`` for nothing."""
    found = miscounted(problem, results)
    if found is not None or problem.several:
        return found
    wrong = verdict.complaint_of(results[-1], problem.outputs[-1], given)
    return None if wrong is None else Reason(*wrong)


def differing(new: torch.Tensor, old: torch.Tensor) -> int:
    """How many elements of a tensor have other bits than those of another tensor of its shape and dtype."""
    return int((words(new) != words(old)).count_nonzero())


def words(x: torch.Tensor) -> torch.Tensor:
    """A view of the bits of each element, of complex ones of each part, as integers: NaN is NaN, and 0 is not -0."""
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def fingerprint_of(results: Sequence[torch.Tensor]) -> str:
    """A hash of every byte of large results in the order of their indices; on a GPU in about the time of reading."""
    return " ".join(memory.digest(x.contiguous().flatten()) for x in results)


def _raw(x: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor on the CPU, in the order of its indices."""
    # A copy, since a result of one element may have any stride, with which it cannot be viewed as bytes.
    found: npt.NDArray[np.uint8] = x.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).numpy()
    return found


def digest_of(results: Sequence[torch.Tensor]) -> str:
    """A short digest of the values of results: strides do not count, and every NaN is the same one.

    Of a result of more than :data:`_DIGESTED` bytes every second, third ... line of its longest dimension is read.
    """
    found = hashlib.sha256()  # processors have instructions for it: three times as fast as blake2b
    for result in results:
        x, step = result.detach(), -(-result.numel() * result.element_size() // _DIGESTED)
        if step > 1:
            x = x.movedim(max(range(x.dim()), key=x.size), 0)[::step]
        x = x.cpu()
        if x.is_floating_point():
            x = x.float() if x.element_size() == 1 else x  # torch cannot fill fp8 by a mask
            nans = x.isnan()
            x = x.masked_fill(nans, math.nan) if bool(nans.any()) else x
        found.update(_raw(x).data)
    return found.hexdigest()[:16]
