"""``aten``: PyTorch's own kernels, called eagerly.  The comparator of every other backend, and a subject too."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from pytest_gemm.backend import Availability, Contract, Proof, Unsupported
from pytest_gemm.outcome import Reason
from pytest_gemm.problem import Problem

if TYPE_CHECKING:
    import torch

    from pytest_gemm.operands import Operands

__all__ = ["AtenBackend", "AtenPrepared"]


class AtenBackend:
    """Eager ATen on the CPU (oneDNN, MKL and native loops) or on CUDA (cuBLAS)."""

    name = "aten"
    devices = ("cpu", "cuda")

    def availability(self, device: str) -> Availability:
        """PyTorch itself, and for ``cuda`` a device that it sees."""
        if importlib.util.find_spec("torch") is None:
            return Availability(Reason("no-torch", "PyTorch is not installed", "pip install torch"))
        if device == "cuda":
            import torch

            if not torch.cuda.is_available():
                return Availability(
                    Reason(
                        "no-cuda-device",
                        "PyTorch sees no CUDA device",
                        "run on a machine with one, or --gemm-device=cpu",
                    )
                )
        return Availability()

    def supports(self, problem: Problem) -> Unsupported | None:
        """Everything that has a program, but for what ATen's own checks refuse."""
        from pytest_gemm import program

        op = problem.op.name
        if op not in program.PROGRAMS:
            return Unsupported("op", f"{op} has no program yet")
        return None

    def prepare(self, problem: Problem, operands: Operands) -> AtenPrepared:
        """Nothing to compile."""
        return AtenPrepared(problem)


class AtenPrepared:
    """The eager program of a problem."""

    def __init__(self, problem: Problem) -> None:
        from pytest_gemm import program

        accumulate: dict[str, Contract] = {
            "f64": Contract("f64", "eager"),
            "i32": Contract("i32", "eager"),
        }
        self.contract = accumulate.get(problem.dtypes.out.name, Contract("f32", "eager"))
        self._problem = problem
        self._args = program.args
        self._program = program.build(problem)
        self._executed: tuple[str, ...] = ()

    def run(self, operands: Operands) -> torch.Tensor:
        """Call the program eagerly and note which products the dispatcher saw."""
        from pytest_gemm.executed import record_products

        tensors = self._args(self._problem, operands)
        with record_products() as seen:
            result = self._program(**tensors)
        self._executed = tuple(seen)
        return result

    def proof(self) -> Proof:
        """The ATen operators that ran.  Nobody chose or generated anything."""
        return Proof(executed=self._executed, provable=False)
