"""Which calls of a library's own functions a run made, and what eager PyTorch computed around them.

The evidence of a backend that is a function of Python: a name alone would prove nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_gemm.problem.problem import Problem

if TYPE_CHECKING:
    import torch


class OwnCalls:
    """Counts the calls of a library's functions.

    Attributes:
        names: of the functions that the last run called, without repetitions.
        composed: whether eager PyTorch computed a part of the problem in the last run.
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.composed = False

    def forget(self) -> None:
        """Before a run: what earlier ones called does not count."""
        self.names, self.composed = (), False

    def counted(self, function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
        """The function; a call counts when it has returned."""
        name = name or name_of(function)

        def call(*args: Any, **more: Any) -> Any:
            result = function(*args, **more)
            self.names = tuple(dict.fromkeys((*self.names, name)))
            return result

        return call

    def program(self, problem: Problem, product: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The problem's eager program around a product, which sees whether the product alone was computed.

        It was, where each product took the operands as they are given, and the program returned what it returned.
        """
        from pytest_gemm.programs import program

        given: set[int] = set()
        results: list[weakref.ref[torch.Tensor]] = []  # weak: an intermediate result is freed as early as without it
        counted = self.counted(product, name)

        def watched(a: torch.Tensor, b: torch.Tensor) -> Any:
            self.composed |= not {_memory(a), _memory(b)} <= given
            result = counted(a, b)
            results.extend(map(weakref.ref, _tensors(result)))
            return result

        whole = program.build(problem, watched)

        def run(**tensors: torch.Tensor) -> Any:
            given.clear()
            results.clear()
            given.update(map(_memory, tensors.values()))
            returned = whole(**tensors)
            products = [one() for one in results]
            self.composed |= not all(any(x is one for one in products) for x in _tensors(returned))
            return returned

        return run


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, of a partial call, or of the class of another callable."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__name__)


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _tensors(result: Any) -> list[torch.Tensor]:
    import torch

    return [x for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, torch.Tensor)]
