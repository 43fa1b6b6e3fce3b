"""``cutedsl``: CuTe DSL kernels through CUTLASS's Operator API, ``cutlass.operators``, driven directly.

The operators multiply; bias, factors and epilogue around the product are eager PyTorch.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import zlib
from typing import TYPE_CHECKING, Any

from pytest_gemm.backend import Availability, Proof, Unsupported
from pytest_gemm.backends import tensor_core
from pytest_gemm.backends.inductor import installed, no_cuda, unclaimed
from pytest_gemm.outcome import Reason
from pytest_gemm.problem import Problem

if TYPE_CHECKING:
    import torch

    from pytest_gemm.operands import Operands

__all__ = ["CuteDslBackend", "CuteDslPrepared"]

_REMEDY = "pip install 'nvidia-cutlass-dsl[cu13]==4.6.3' nvidia-cutlass-operators==0.1.0"


class CuteDslBackend:
    """One operator of ``cutlass.operators`` for each problem.

    Which of the operators that the library has for a product runs follows from the problem's line and from nothing
    else: a rerun meets the same one, and a matrix of problems meets many.

    Args:
        operator: run the operator of this name for every problem instead.
    """

    name: str = "cutedsl"
    devices: tuple[str, ...] = ("cuda",)

    def __init__(self, operator: str = "") -> None:
        self.operator = operator

    def availability(self, device: str) -> Availability:
        """A CUDA device of compute capability 8.0 or more, and the two packages."""
        if device != "cuda":
            return Availability(Reason("device", f"cutedsl computes on cuda, not on {device}", "--gemm-device=cuda"))
        if reason := no_cuda():
            return Availability(reason)
        versions = installed("nvidia-cutlass-dsl", "nvidia-cutlass-operators")
        missing = {"nvidia-cutlass-dsl", "nvidia-cutlass-operators"} - {name for name, _ in versions}
        if missing or importlib.util.find_spec("cutlass") is None:
            names = " and ".join(sorted(missing)) or "the module cutlass"
            return Availability(Reason("no-cutlass-operators", f"{names} cannot be found", _REMEDY))
        import torch

        major, minor = torch.cuda.get_device_capability()
        if major < 8:
            return Availability(
                Reason("compute-capability", f"CuTe DSL's operators need compute capability 8.0, not {major}.{minor}")
            )
        return Availability(versions=versions)

    def supports(self, problem: Problem) -> Unsupported | None:
        """f16 and bf16 into their own dtype, int8 into int32 with both operands K-major; 16-byte aligned rows."""
        if refusal := unclaimed(problem):
            return refusal
        out = problem.dtypes.out.name
        if problem.op.name == "woq_int8":
            return Unsupported("op", "the scale of a weight belongs to the kernel; these operators have none")
        if out not in {"f16", "bf16", "i32"}:
            return Unsupported("dtype", f"the operators take f16, bf16 and int8 (f32 would be TF32), not {out}")
        if problem.shape.is_empty or problem.shape.k == 0:
            return Unsupported("empty", "the operators take no empty operands")
        if problem.has("dyn-m"):
            return Unsupported("dyn-m", "an operator is compiled for each geometry: there is no artifact for any M")
        if problem.op.name == "int_mm" and (not problem.layout.b_transposed or problem.layout.a_transposed):
            return Unsupported("layout", "8-bit operators need A and B K-major", "use layout nt")
        return tensor_core.unaligned(problem) or tensor_core.not_compact(problem)

    def prepare(self, problem: Problem, operands: Operands) -> CuteDslPrepared:
        """Pick an operator by trying the program with a recording product, and compile it.

        Raises:
            Unsupported: when the library has no operator for the operands.
        """
        prepared = CuteDslPrepared(problem, self.operator)
        prepared.run(operands)
        return prepared


class CuteDslPrepared:
    """A problem with its operator, compiled once for each geometry of a product."""

    def __init__(self, problem: Problem, operator: str = "") -> None:
        from pytest_gemm import program

        self.contract = dataclasses.replace(tensor_core.contract(problem), epilogue="eager")
        self._problem = problem
        self._wanted = operator
        self._args = program.args
        self._program = program.build(problem, self._matmul)
        self._compiled: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        self._executed: list[str] = []
        self._chosen: list[str] = []
        self._foreign: tuple[str, ...] = ()

    def run(self, operands: Operands) -> torch.Tensor:
        """Compute the program with the operator in place of PyTorch's product."""
        from pytest_gemm.executed import record_products

        self._executed.clear()
        self._chosen.clear()
        with record_products() as foreign:
            result = self._program(**self._args(self._problem, operands))
        self._foreign = tuple(foreign)
        return result

    def proof(self) -> Proof:
        """The operators that were picked, compiled and launched during the last run."""
        generated = tuple(operator.metadata.operator_name for operator, _ in self._compiled.values())
        return Proof(tuple(self._chosen), generated, tuple(self._executed), self._foreign)

    def _matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        import torch

        ops: Any = importlib.import_module("cutlass.operators")
        integers = a.dtype == torch.int8
        out = a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=torch.int32 if integers else a.dtype)
        arguments = ops.GemmArguments(a, b, out, torch.int32 if integers else torch.float32)
        key = (a.shape, a.stride(), b.shape, b.stride(), a.dtype)
        if key not in self._compiled:
            operator = self._pick(ops, arguments)
            self._compiled[key] = (operator, operator.compile(arguments, _target()))
        operator, compiled = self._compiled[key]
        name = operator.metadata.operator_name
        self._chosen.append(name)
        operator.run(arguments, compiled, stream=torch.cuda.current_stream())
        self._executed.append(name)
        return out

    def _pick(self, ops: Any, arguments: Any) -> Any:
        found = sorted(ops.get_operators(arguments, target_sm=_target()), key=lambda o: str(o.metadata.operator_name))
        if self._wanted:
            found = [o for o in found if o.metadata.operator_name == self._wanted]
        if not found:
            what = f"does not offer {self._wanted}" if self._wanted else "has no operator"
            raise Unsupported("no-operator", f"cutlass.operators {what} for {self._problem}")
        return found[zlib.crc32(self._problem.line.encode()) % len(found)]


def _target() -> str:
    """The current device as the library names it: ``90a``; the a stands for the instructions of just this chip."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}{'a' if major >= 9 else ''}"
