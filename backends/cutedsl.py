"""``cutedsl``: CuTe DSL kernels through CUTLASS's Operator API, ``cutlass.operators``, driven directly.

The operators multiply; bias, factors and epilogue around the product are eager PyTorch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import statistics
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_gemm.api.eager import EagerPrepared
from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import Availability, Candidates, no_device
from pytest_gemm.api.request import DEFAULT, BuildRequest, Capability, Selection
from pytest_gemm.backends.inductor import naming
from pytest_gemm.backends.inductor.backend import installed
from pytest_gemm.backends.rules import check
from pytest_gemm.core.outcome import Pruned, Reason, Unsupported
from pytest_gemm.core.text import first_line
from pytest_gemm.numerics import tensor_core
from pytest_gemm.problem.problem import Problem

if TYPE_CHECKING:
    import torch

    from pytest_gemm.operands.tensors import Operands


# How the CuTe DSL names what it compiles, on the device.
DEVICE_KERNEL = r"^kernel_cutlass_"

# So many operators, from all over the list, are timed to find the fastest.  Each costs a compile, 0.6 to 2.5 s of one
# core from the smallest tile to the largest, and the library keeps none of them on disk; a list takes 3 ms.
_MOST_TIMED = 32
_TRIALS = 9
# Clock cycles, half a millisecond: longer than Python takes to launch a call.
_HEAD_START = 1_000_000

_REMEDY = "pip install 'nvidia-cutlass-dsl[cu13]==4.6.3' nvidia-cutlass-operators==0.1.0"


class CuteDslBackend:
    """The operators of ``cutlass.operators``, which are its candidates, by their names in alphabetical order.

    Which of them runs a product follows from the problem's line and from nothing else: a rerun meets the same one, and
    a matrix of problems meets many.  The library has no autotuning; to select the winner, up to 32 are timed.
    """

    name: str = "cutedsl"
    devices: tuple[str, ...] = ("cuda",)
    capabilities = frozenset({Capability.SELECTION})

    def availability(self, device: str) -> Availability:
        """A CUDA device of compute capability 8.0 or more, and the two packages."""
        if reason := no_device(self.name, self.devices, device):
            return Availability(reason)
        versions = installed("nvidia-cutlass-dsl", "nvidia-cutlass-operators")
        missing = {"nvidia-cutlass-dsl", "nvidia-cutlass-operators"} - {name for name, _ in versions}
        if missing or importlib.util.find_spec("cutlass") is None:
            names = " and ".join(sorted(missing)) or "the module cutlass"
            return Availability.lacking("no-cutlass-operators", f"{names} cannot be found", _REMEDY)
        import torch

        major, minor = torch.cuda.get_device_capability()
        if major < 8:
            return Availability.lacking(
                "compute-capability", f"CuTe DSL's operators need compute capability 8.0, not {major}.{minor}"
            )
        return Availability(versions=versions)

    def supports(self, problem: Problem, request: BuildRequest = DEFAULT) -> Unsupported | None:
        """f16 and bf16 into their own dtype, int8 into int32 with both operands K-major; 16-byte aligned rows."""
        return check(("any-m", "cutedsl", "tma", "compact"), problem, request)

    def prepare(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> CuteDslPrepared:
        """Compile the requested operator, or the selected one, for the products of the program.

        Raises:
            Unsupported: when the library has no operator for the operands, or none of the requested name.
            Pruned: when all of them fail.
        """
        if request.candidate or request.selection != Selection.WINNER:
            prepared = CuteDslPrepared(problem, request.candidate)
            prepared.run(operands)
            return prepared
        return self._fastest(problem, operands, request)

    def _fastest(self, problem: Problem, operands: Operands, request: BuildRequest) -> CuteDslPrepared:
        """Compile and time the operators; what fails is left out, as autotuning does, and named."""
        timings: dict[str, float] = {}
        pruned: dict[str, Reason] = {}
        fastest: CuteDslPrepared | None = None
        names = self.candidates(problem, operands).names
        for name in names[:: -(-len(names) // _MOST_TIMED)]:
            try:
                prepared = self.prepare(problem, operands, request.replace(candidate=name))
                with prepared.timed(operands) as call:
                    timings[name] = _device_seconds(call)
            except Exception as error:  # of the library or the compiler behind it
                first = first_line(error)
                pruned[name] = Reason("compile-error", f"{type(error).__name__}: {first}"[:200])
                continue
            if timings[name] == min(timings.values()):
                fastest = prepared
        if fastest is None:
            name, reason = next(iter(pruned.items()))
            raise Pruned("all-pruned", f"all {len(pruned)} operators failed, {name} because {reason.text}")
        fastest.timings, fastest.pruned = timings, pruned
        return fastest

    def candidates(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> Candidates:
        """Names of the operators that the library has for the program's product; none is compiled.

        Raises:
            Unsupported: when it has none.
        """
        return Candidates(CuteDslPrepared(problem).candidates(operands))


class _Listed(Exception):
    """The operators for a product are known, and it is not to be computed."""


class CuteDslPrepared(EagerPrepared):
    """A problem with its operator, compiled once for each geometry of a product.

    Attributes:
        timings: seconds a call of the operators that were timed to select this one, by name.
        pruned: those that failed on the way, with the reason.
    """

    records = True

    def __init__(self, problem: Problem, operator: str = "") -> None:
        contract = dataclasses.replace(tensor_core.contract(problem), epilogue="eager")
        super().__init__(problem, contract, self._matmul)
        self._wanted = operator
        self._compiled: dict[tuple[Any, ...], tuple[str, Any, Any]] = {}
        self._launched: list[str] = []
        self._is_timed = False
        self.timings: Mapping[str, float] = {}
        self.pruned: dict[str, Reason] = {}

    def run(self, operands: Operands) -> torch.Tensor:
        """Compute the program with the operator in place of PyTorch's product."""
        self._launched.clear()
        return super().run(operands)

    @contextlib.contextmanager
    def timed(self, operands: Operands) -> Iterator[Callable[[], torch.Tensor]]:
        """A block with the program around the operator; memory is not poisoned, and nothing is recorded."""
        self._is_timed = True
        try:
            with super().timed(operands) as call:
                yield call
        finally:
            self._is_timed = False

    def candidates(self, operands: Operands) -> tuple[str, ...]:
        """Names of the operators that the program's product could be given to.

        Raises:
            Unsupported: when there is none.
        """
        from pytest_gemm.programs import program

        found: list[str] = []

        def listing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            found.extend(self._operators(self._arguments(a, b)[0]))
            raise _Listed

        with contextlib.suppress(_Listed):
            program.build(self.problem, listing)(**self.arguments(operands))
        if not found:
            raise Unsupported("no-operator", f"cutlass.operators has no operator for {self.problem}")
        return tuple(found)

    def proof(self) -> Proof:
        """The operators that were selected, compiled and launched during the last run."""
        generated = tuple(name for name, _, _ in self._compiled.values())
        launched = tuple(self._launched)
        return Proof(launched, generated, launched, foreign=self.executed, device_kernel=DEVICE_KERNEL)

    def _matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        import torch

        from pytest_gemm.backends.inductor.poisoning import poison

        arguments, out = self._arguments(a, b)
        key = (a.shape, a.stride(), b.shape, b.stride(), a.dtype)
        if key not in self._compiled:
            name, operator = self._select(arguments)
            self._compiled[key] = (name, operator, operator.compile(arguments, _target()))
        name, operator, compiled = self._compiled[key]
        if not self._is_timed:
            poison(out)
        operator.run(arguments, compiled, stream=torch.cuda.current_stream())
        if not self._is_timed:
            self._launched.append(name)
        return out

    @staticmethod
    def _arguments(a: torch.Tensor, b: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """A product as the library's arguments, and the tensor that it will be written to."""
        import torch

        integers = a.dtype == torch.int8
        # The product of fp8 is wanted in f32: what its scales make of it is rounded once, by the program.
        wide = torch.float32 if a.dtype.itemsize == 1 else a.dtype
        out = a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=torch.int32 if integers else wide)
        ops: Any = importlib.import_module("cutlass.operators")
        return ops.GemmArguments(a, b, out, torch.int32 if integers else torch.float32), out

    @staticmethod
    def _operators(arguments: Any) -> dict[str, Any]:
        """All operators for a product by their names, in alphabetical order."""
        ops: Any = importlib.import_module("cutlass.operators")
        found = sorted(
            ops.get_operators(arguments, target_sm=_target()), key=lambda operator: str(operator.metadata.operator_name)
        )
        names = naming.unique((str(operator.metadata.operator_name), {}) for operator in found)
        return dict(zip(names, found, strict=True))

    def _select(self, arguments: Any) -> tuple[str, Any]:
        found = self._operators(arguments)
        names = [name for name in found if self._wanted in {"", name}]
        if not names:
            what = f"does not offer {self._wanted}" if self._wanted else "has no operator"
            raise Unsupported("no-operator", f"cutlass.operators {what} for {self.problem}")
        name = names[zlib.crc32(self.problem.line.encode()) % len(names)]
        return name, found[name]


def _device_seconds(call: Callable[[], object]) -> float:
    """Seconds of a call between two events, the median of some; good to select by, not to quote."""
    import torch

    found = []
    call()
    for _ in range(_TRIALS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_HEAD_START)  # so that the launch is not timed
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(float(begin.elapsed_time(end)) * 1e-3)
    return statistics.median(found)


def _target() -> str:
    """The current device as the library names it: ``90a``; the a stands for the instructions of just this chip."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}{'a' if major >= 9 else ''}"
