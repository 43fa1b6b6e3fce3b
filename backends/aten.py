"""``aten``: PyTorch's own kernels, called eagerly.  The comparator of every other backend, and a subject too."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Iterator
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
        """Nothing to compile.

        Raises:
            Unsupported: what the checks of ``_int_mm`` on CUDA refuse.
        """
        if operands.device == "cuda" and problem.op.name == "int_mm":
            shape = problem.shape
            if shape.m <= 16 or shape.n % 8 or shape.k % 8:
                raise Unsupported("int-mm-shape", "on CUDA _int_mm needs M > 16 and multiples of 8 for N and K")
            if problem.layout.a_transposed and shape.m % 4:
                raise Unsupported(
                    "int-mm-leading-dimension", "cuBLASLt multiplies int8 at leading dimensions that are multiples of 4"
                )
        return AtenPrepared(problem, operands.device)


@contextlib.contextmanager
def _full_precision(device: str) -> Iterator[None]:
    """No reduction in f16 or bf16 inside the block, for ``cuda``; nothing to switch for ``cpu``."""
    if device != "cuda":
        yield
        return
    import torch

    switches = torch.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before = {name: getattr(switches, name) for name in names}
    try:
        for name in names:
            setattr(switches, name, False)
        yield
    finally:
        for name, value in before.items():
            setattr(switches, name, value)


class AtenPrepared:
    """The eager program of a problem.

    On CUDA cuBLAS is asked not to reduce in f16 or bf16, which PyTorch allows it by default: the sums of f16 are then
    added in f32.
    """

    def __init__(self, problem: Problem, device: str = "cpu") -> None:
        from pytest_gemm import program
        from pytest_gemm.backends import tensor_core

        accumulate: dict[str, Contract] = {
            "f64": Contract("f64", "eager"),
            "i32": Contract("i32", "eager"),
        }
        self.contract = accumulate.get(problem.dtypes.out.name, Contract("f32", "eager"))
        if device == "cuda":
            self.contract = dataclasses.replace(tensor_core.contract(problem, library=True), epilogue="eager")
        self._device = device
        self._problem = problem
        self._args = program.args
        self._program = program.build(problem)
        self._executed: tuple[str, ...] = ()

    def run(self, operands: Operands) -> torch.Tensor:
        """Call the program eagerly and note which products the dispatcher saw."""
        from pytest_gemm.executed import record_products

        tensors = self._args(self._problem, operands)
        with _full_precision(self._device), record_products() as seen:
            result = self._program(**tensors)
        self._executed = tuple(seen)
        return result

    def proof(self) -> Proof:
        """The ATen operators that ran.  Nobody chose or generated anything."""
        return Proof(executed=self._executed, provable=False)
