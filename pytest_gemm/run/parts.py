"""What authors wrote out when registering backends, and whether a run called it: a green run has called all of it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from pytest_gemm.api.protocols import Backend, Part, Promising, unsupported
from pytest_gemm.api.request import DEFAULT
from pytest_gemm.config.config import GemmConfig, has_cuda_device
from pytest_gemm.core.case_id import Device
from pytest_gemm.core.outcome import WITHHELD, Outcome
from pytest_gemm.problem.axes import APART, LEVELS
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem


def parts_of(config: GemmConfig, backend: Backend) -> list[Part]:
    """What a run has to call of a backend: of its devices those that are here, unless one was asked for."""
    every = _promised(backend, config.level)
    here = {"", Device.CPU, *([Device.CUDA] if has_cuda_device() else [])} if config.device == "auto" else {""}
    return [part for part in every if part.device in here]


def _promised(backend: Backend, level: str) -> Sequence[Part]:
    return backend.promised_parts() if isinstance(backend, Promising) and level not in APART else ()


def uncalled(config: GemmConfig, outcomes: Iterable[Outcome]) -> dict[str, list[str]]:
    """Names of the parts that no case called, by backend; what the ledger withholds counts as called."""
    left = {backend.name: parts_of(config, backend) for backend in config.backends}
    for outcome in outcomes:
        if (parts := left.get(outcome.backend)) and (outcome.was_judged or outcome.code == WITHHELD):
            problem, device = Problem.parse(outcome.problem), config.devices[outcome.backend]
            left[outcome.backend] = [
                part for part in parts if not part.called(problem, outcome) or part.device not in {"", device}
            ]
    names = {backend: [part.name for part in parts if part.name] for backend, parts in left.items()}
    return {backend: lacking for backend, lacking in names.items() if lacking}


def calling(
    backend: Backend, level: str, own: Sequence[Problem], of_level: Callable[[str], Sequence[Problem]]
) -> Iterator[Problem]:
    """The problems that a level needs beside its own so that each part of a backend is called.

    Args:
        backend: that they are for.
        level: as ``--gemm-level``.
        own: problems of the level.
        of_level: those of another level; of ``quick``, what finds most first.
    """
    for part in _promised(backend, level):
        asked = _read(part.lines)
        yield from asked if level == LEVELS[0] else ()
        levels = LEVELS[1:2] if part.picky else LEVELS[1:3]  # full is read where quick has none
        # In f32 nothing else can be wrong: a library that composes the problem around a function rounds right there.
        others = (sorted(of_level(one), key=lambda problem: str(problem.dtypes) != "f32") for one in levels)
        further = itertools.chain(own, asked, itertools.chain.from_iterable(others))
        met: set[str] = set()
        for problem in () if part.device else further:
            words = {problem.op.name, *(step.name for step in problem.epilogue)}
            if not words <= met and part.called(problem, None) and _takes(backend, problem):
                met |= words
                yield problem
                if not part.picky:
                    break


def _read(lines: Iterable[str]) -> list[Problem]:
    """The problems of those lines whose op takes the type."""
    found = []
    for line in lines:
        with contextlib.suppress(ProblemError):
            found.append(Problem.parse(line))
    return found


def _takes(backend: Backend, problem: Problem) -> bool:
    """Whether a backend supports a problem; what its ``supports`` raises is shown by a test of it."""
    with contextlib.suppress(Exception):
        return unsupported(backend, problem, DEFAULT) is None
    return False
