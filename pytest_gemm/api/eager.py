"""A problem's eager program around a product: what most backends that do not compile need."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pytest_gemm.numerics.contract import Contract
from pytest_gemm.problem.problem import Problem

if TYPE_CHECKING:
    import torch

    from pytest_gemm.operands.tensors import Operands


class EagerPrepared:
    """A problem's program in eager PyTorch, around a product of A and B; a backend adds ``proof()``.

    Args:
        problem: what is computed.
        contract: arithmetic of the product; what the problem's flags allow is added.
        product: computes (..., M, N) of (..., M, K) and (..., K, N); ``None``: PyTorch's own.

    Attributes:
        records: whether :attr:`executed` is filled.
        executed: matrix products that PyTorch's dispatcher executed during the last run, in order.
    """

    records = False

    def __init__(
        self,
        problem: Problem,
        contract: Contract,
        product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        from pytest_gemm.numerics import precision
        from pytest_gemm.programs import program

        self._allowed = precision.as_allowed
        self.contract = precision.as_allowed(contract, problem)
        self.problem = problem
        self.executed: tuple[str, ...] = ()
        self._settings, self._args = precision.settings, program.args
        self._packed = program.packed if product is None else lambda _, tensors: tensors
        self._program: Callable[..., Any] = program.build(problem, product, is_packed=product is None)

    def arguments(self, operands: Operands) -> dict[str, torch.Tensor]:
        """The program's tensors by name, in the operands' own strides; PyTorch's own product has its weight packed."""
        return self._packed(self.problem, self._args(self.problem, operands))

    def bind(self, operands: Operands) -> Callable[[], torch.Tensor]:
        """The program of these operands, as a call without arguments: what a run makes anew and a timed call once.

        A subclass whose library computes more than the product returns the library's own call here, and makes before
        what a user makes once: a packed weight, a session.
        """
        given = self.arguments(operands)
        return lambda: self._program(**given)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Whatever has to be in effect during a run and not while it is timed."""
        if not self.records:
            yield
            return
        from pytest_gemm.api.executed import record_products

        with record_products() as seen:
            yield
        self.executed = tuple(seen)

    def run(self, operands: Operands) -> torch.Tensor:
        """Compute the program under the problem's precision settings."""
        with self._settings(self.problem), self.watched():
            return self.bind(operands)()

    @contextlib.contextmanager
    def timed(self, operands: Operands) -> Iterator[Callable[[], torch.Tensor]]:
        """The program alone: nothing is recorded while it is timed."""
        import torch

        call = self.bind(operands)
        with self._settings(self.problem), torch.no_grad():
            yield call
