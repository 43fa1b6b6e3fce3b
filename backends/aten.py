"""``aten``: PyTorch's own kernels, called eagerly.  The comparator of every other backend, and a subject too."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pytest_gemm.api.eager import EagerPrepared
from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import Availability, Recipe, no_device
from pytest_gemm.api.request import DEFAULT, BuildRequest, Capability
from pytest_gemm.backends.inductor.backend import InductorBackend
from pytest_gemm.backends.rules import check, decomposed
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.numerics import tensor_core
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.problem.problem import Problem

if TYPE_CHECKING:
    from pytest_gemm.backends.inductor.artifact import InductorPrepared
    from pytest_gemm.operands.tensors import Operands


class AtenBackend:
    """ATen on the CPU (oneDNN, MKL, native loops) or on CUDA (cuBLAS): eager, or in a mode of ``torch.compile``."""

    name = "aten"
    devices = ("cpu", "cuda")
    capabilities = frozenset({Capability.MODE, Capability.THREADS})

    @functools.cached_property
    def compiled(self) -> CompiledAten:
        """The same products in a program that ``torch.compile`` makes."""
        return CompiledAten()

    def availability(self, device: str) -> Availability:
        """For ``cuda`` a device that PyTorch sees."""
        return Availability(no_device(self.name, self.devices, device))

    def supports(self, problem: Problem, request: BuildRequest = DEFAULT) -> Unsupported | None:
        """Everything but what ATen's own checks reject."""
        if request.mode.is_compiled:
            return self.compiled.supports(problem, request)
        return check(("aten", "grouped"), problem, request)

    def prepare(
        self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT
    ) -> AtenPrepared | InductorPrepared:
        """Nothing to compile, but in the modes of ``torch.compile``.

        Raises:
            Unsupported: what the checks of ``_int_mm``, ``_scaled_mm`` and ``_grouped_mm`` on the device reject.
        """
        import torch

        if reason := self.unsupported(problem, operands.device):
            raise reason
        # With ATEN_CPU_CAPABILITY set ATen does not know the processor before something has asked, and whether oneDNN
        # computes fp8 would depend on what ran before.
        torch.cpu._is_amx_tile_supported()
        if request.mode.is_compiled:
            return self.compiled.prepare(problem, operands, request)
        return AtenPrepared(problem, operands.device)

    def unsupported(self, problem: Problem, device: str) -> Unsupported | None:
        """What the eager program does not support on a device."""
        own = ("aten-on-cuda", "scaled", "aten-by-cublas") if device == "cuda" else ("aten-on-cpu",)
        return check(("aten", "grouped", *own), problem, DEFAULT)

    def recipe(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> Recipe:
        """The program is called, or compiled."""
        import torch

        if request.mode.is_compiled:
            return self.compiled.recipe(problem, operands, request)
        return Recipe(threads=torch.get_num_threads())


class CompiledAten(InductorBackend):
    """ATen's products in a program of Inductor's, as ``torch.compile`` without autotuning has them.

    Whatever is around the product may be fused into a kernel, and so it is held to *either*.  What Inductor writes
    without a product (an outer product, a vector's) is Inductor's and judged all the same.
    """

    name = "aten"
    inductor_name = "ATEN"
    devices: tuple[str, ...] = ("cpu", "cuda")
    rules: tuple[str, ...] = ("aten-compiled", "aten", "grouped")

    def installation(self) -> Availability:
        """As eager ATen."""
        return Availability()

    def options(self, problem: Problem, request: BuildRequest = DEFAULT) -> dict[str, Any]:
        """PyTorch's defaults: no autotuning, no frozen weight."""
        return {"compile_threads": 1}

    def prepare(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> InductorPrepared:
        """Compile the problem; its contract is eager ATen's around what Inductor fuses."""
        from pytest_gemm.backends.inductor.artifact import CalledPrepared

        artifact = self.artifact(problem, operands, request)
        epilogue = self.contract(problem, artifact).epilogue
        found = dataclasses.replace(compiled_contract(problem, operands.device), epilogue=epilogue)
        return CalledPrepared(problem, artifact, found)


def compiled_contract(problem: Problem, device: str, *, written_out: bool = False) -> Contract:
    """The arithmetic of ATen's products in a program of Inductor's, or where Inductor was seen to write them itself.

    A product under autocast that Inductor writes itself skips the conversions of A and B, as it does with any
    conversion to a half type and back: the factors of each product are off by u of the half type, and both together
    by 2u + u^2.
    """
    eager = AtenPrepared(problem, device).contract
    if not (problem.autocast and (written_out or decomposed(problem, device))):
        return eager
    return eager.unconverted(problem.dtypes.out)


def _cutlass_groups(problem: Problem) -> bool:
    """Whether one CUTLASS kernel of PyTorch's own multiplies all groups; otherwise cuBLAS is called for each."""
    import torch

    fits = "grouped_" in problem.op.name and problem.dtypes.out.name == "bf16"
    return fits and torch.cuda.get_device_capability()[0] in (9, 10)


def _native_kernel(problem: Problem) -> str:
    """Pattern of the kernel in Triton that PyTorch computes an eager product by, "" where it leaves it to a library.

    That is a bmm with K = 1 and without ``out=``, where this PyTorch has replaced the operator.
    """
    outer = problem.op.name == "bmm" and problem.shape.k == 1 and not problem.shape.is_empty
    if not outer or problem.has("out.given") or problem.widens:
        return ""
    from pytest_gemm.backends.inductor import torch_compat

    return r"^_bmm_outer_product_kernel\b" if "bmm" in torch_compat.native_operators() else ""


class AtenPrepared(EagerPrepared):
    """The eager program of a problem, under the settings that its flags ask for.

    PyTorch allows cuBLAS by default to reduce in f16 and bf16; without the flag ``reduced`` it is forbidden.
    """

    records = True

    def __init__(self, problem: Problem, device: str = "cpu") -> None:
        sums: dict[str, Contract] = {"f64": Contract("f64", "eager"), "i32": Contract("i32", "eager")}
        super().__init__(problem, sums.get(problem.dtypes.out.name, Contract("f32", "eager")))
        self._kernel = ""
        if device == "cuda":
            library = not _cutlass_groups(problem)
            self.contract = dataclasses.replace(tensor_core.contract(problem, library=library), epilogue="eager")
            self._kernel = _native_kernel(problem)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """With the products' results at guard pages, where the run places tensors there."""
        from pytest_gemm.operands import guard_pages

        with guard_pages.products(), super().watched():
            yield

    def proof(self) -> Proof:
        """The ATen operators that ran, and the kernel of the device that they should have.  Nothing was selected."""
        return Proof(executed=self.executed, provable=False, device_kernel=self._kernel)
