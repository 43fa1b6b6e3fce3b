"""A function that launches kernels on a CUDA device, as a backend: what the examples of GPU libraries derive from.

It differs from a plain function in three things.  It refuses a machine without a CUDA device, its sums are those of
NVIDIA's tensor cores, and it may compute a whole program, steps and scales included, in place of the product alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_gemm.api.callable import CallableBackend, CallablePrepared
from pytest_gemm.api.own_calls import name_of
from pytest_gemm.api.protocols import Availability
from pytest_gemm.api.request import DEFAULT, BuildRequest
from pytest_gemm.backends import tensor_core
from pytest_gemm.backends.inductor.backend import no_device
from pytest_gemm.backends.rules import check
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.problem.problem import Problem

if TYPE_CHECKING:
    import torch

    from pytest_gemm.operands.tensors import Operands


@dataclasses.dataclass(eq=False)
class CudaCallableBackend(CallableBackend):
    """A plain function on CUDA; further attributes than those of ``Registry.add_callable``.

    Attributes:
        library: whether the function leaves the choice of a kernel to cuBLAS, which may slice K or add one by one.
        rules: groups of ``backends/rules.toml`` that exclude problems; ``tma``: rows begin at multiples of 16 bytes.
        arithmetic: fields of the contract in which the library's documentation differs from the tensor core.
    """

    library: bool = False
    rules: Iterable[str] = ()
    arithmetic: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    def availability(self, device: str) -> Availability:
        """A CUDA device that PyTorch sees, and the distributions."""
        reason = no_device(self.name, self.devices, device)
        return Availability(reason) if reason else super().availability(device)

    def contract(self, problem: Problem) -> Contract:
        """The tensor core's sums; a program of the library's own is rounded once, any other after each step."""
        found = tensor_core.contract(problem, library=self.library)
        epilogue = "eager" if self.program(problem) is None and self.fused(problem) is None else "fused"
        known = {"epilogue": epilogue, "deterministic": self.deterministic, "flushes": self.flushes}
        return dataclasses.replace(found, **{**known, **self.arithmetic})

    def supports(self, problem: Problem, request: BuildRequest = DEFAULT) -> Unsupported | None:
        """As a plain function or with scales as a program of the library's own, without what the rules exclude."""
        scaled = (problem.op.rounds_once or problem.group_size) and self.program(problem) is not None
        refused = None if scaled else super().supports(problem, request)
        return refused or check(tuple(self.rules), problem, request)

    def program(self, problem: Problem) -> Callable[..., Callable[[], Any]] | None:
        """What binds the library's own call to the program's tensors, given by name; ``None``: the product alone.

        What a user makes once, a packed weight for instance, is made before the call is returned.
        """
        return None

    def prepare(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> CudaCallablePrepared:
        """Import the library and call it once, so that whatever compiles or tunes itself does so before a run."""
        super().prepare(problem, operands, request)
        prepared = CudaCallablePrepared(self, problem)
        prepared.run(operands)
        return prepared


def plain(problem: Problem) -> bool:
    """Whether the program is the op and its steps alone, on matrices: no flags, no conversions, no rows in batches."""
    rows = problem.op.weight and problem.shape.batch is not None
    return not (problem.flags or problem.autocast or problem.widens or rows)


class CudaCallablePrepared(CallablePrepared):
    """The function inside the problem's eager program, or the library's own program."""

    def __init__(self, backend: CudaCallableBackend, problem: Problem) -> None:
        super().__init__(backend, problem)
        self._own = backend.program(problem)

    def bind(self, operands: Operands) -> Callable[[], torch.Tensor]:
        """The library's own call where it has one."""
        if self._own is None:
            return super().bind(operands)
        return self.own(self._own(**self.arguments(operands)), name_of(self._own))
