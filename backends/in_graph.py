"""A user's function inside of a program that ``torch.compile`` makes: a custom operator, or the launch of a kernel.

Dynamo traces the function, Inductor writes everything around it, and the proof is read in the compiled program: the
operator or the kernel of the given name is called in it, no other library's product is, and the kernels that Inductor
has written around it are named.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.api.protocols import Recipe
from pytest_gemm.api.request import DEFAULT, BuildRequest, Capability
from pytest_gemm.backends.aten import CompiledAten
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.problem.ops.op import around_dense
from pytest_gemm.problem.problem import Problem

if TYPE_CHECKING:
    from pytest_gemm.backends.inductor.artifact import InductorPrepared
    from pytest_gemm.operands.tensors import Operands


@dataclasses.dataclass(eq=False)
class GraphBackend(CallableBackend):
    """A plain function that is judged inside of compiled programs too; further attributes than ``add_callable``'s.

    Attributes:
        graph: what the function calls in a compiled program: an operator, ``namespace::name``, or a kernel of Triton or
            Helion by its name.
    """

    graph: str = ""
    capabilities = frozenset({Capability.MODE})

    def __post_init__(self) -> None:
        """Check the arguments, which a user writes."""
        super().__post_init__()
        self._expect("graph", bool(self.graph), "a name, as 'mylib::matmul'")

    @functools.cached_property
    def compiled(self) -> _Compiled:
        """The same in programs of ``torch.compile``."""
        return _Compiled(self)

    def supports(self, problem: Problem, request: BuildRequest = DEFAULT) -> Unsupported | None:
        """In a compiled program what Inductor compiles around one product of A and B."""
        refused = super().supports(problem, request)
        return refused or (self.compiled.supports(problem, request) if request.mode.is_compiled else None)

    def prepare(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> Any:
        """Import the modules, and compile the program in the modes of ``torch.compile``."""
        prepared = super().prepare(problem, operands, request)
        if not request.mode.is_compiled:
            return prepared
        prepared.run(operands)  # a kernel that compiles or tunes itself does so in its first call, outside of Dynamo
        return self.compiled.prepare(problem, operands, request)

    def recipe(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> Recipe:
        """The function out of its file, in a compiled program where it failed in one."""
        found = super().recipe(problem, operands, request)
        if not request.mode.is_compiled:
            return found
        return dataclasses.replace(self.compiled.recipe(problem, operands, request), matmul=found.matmul)


class _Compiled(CompiledAten):
    """The function in a program of Inductor's, as one with ATen's products is compiled."""

    rules = ()

    def __init__(self, backend: GraphBackend) -> None:
        super().__init__()
        self.name, self.devices, self._backend = backend.name, backend.devices, backend

    def supports(self, problem: Problem, request: BuildRequest = DEFAULT) -> Unsupported | None:
        """Programs around one product of A and B."""
        if problem.op.around is not around_dense:
            text = f"in a compiled program {self.name} is a plain product, and {problem.op.name} is none"
            return Unsupported("op", text)
        return super().supports(problem, request)

    def _spec(self, *given: Any) -> Any:
        return dataclasses.replace(super()._spec(*given), matmul=self._backend.matmul)

    def prepare(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> InductorPrepared:
        """Compile the program; what Inductor fuses around the function is rounded where it likes."""
        from pytest_gemm.backends.inductor.artifact import AroundPrepared

        artifact = self.artifact(problem, operands, request)
        contract = dataclasses.replace(self._backend.contract(problem), epilogue="either")
        return AroundPrepared(problem, artifact, contract, self._backend.graph)
