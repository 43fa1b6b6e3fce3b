"""``aten``: PyTorch's own kernels, called eagerly.  The comparator of every other backend, and a subject too."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pytest_gemm.api.eager import EagerPrepared
from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import Availability, Recipe
from pytest_gemm.api.request import DEFAULT, BuildRequest, Capability
from pytest_gemm.backends import tensor_core
from pytest_gemm.backends.inductor.backend import InductorBackend, has_no_kernel
from pytest_gemm.case_id import Device, Mode
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.outcome import Reason, Unsupported
from pytest_gemm.problem.problem import Problem

if TYPE_CHECKING:
    from pytest_gemm.backends.inductor.artifact import InductorPrepared
    from pytest_gemm.operands.tensors import Operands


_EAGER = frozenset({Mode.OWN, Mode.EAGER})


class AtenBackend:
    """ATen on the CPU (oneDNN, MKL, native loops) or on CUDA (cuBLAS): eager, or in a mode of ``torch.compile``."""

    name = "aten"
    devices = ("cpu", "cuda")
    capabilities = frozenset({Capability.MODE})

    @functools.cached_property
    def compiled(self) -> CompiledAten:
        """The same products in a program that ``torch.compile`` makes."""
        return CompiledAten()

    def availability(self, device: str) -> Availability:
        """PyTorch itself, and for ``cuda`` a device that it sees."""
        if importlib.util.find_spec("torch") is None:
            return Availability(Reason("no-torch", "PyTorch is not installed", "pip install torch"))
        if device == "cuda":
            import torch

            if not torch.cuda.is_available():
                remedy = "run on a machine with one, or --gemm-device=cpu"
                return Availability(Reason("no-cuda-device", "PyTorch sees no CUDA device", remedy))
        return Availability()

    def supports(self, problem: Problem, request: BuildRequest = DEFAULT) -> Unsupported | None:
        """Everything but what ATen's own checks reject."""
        if request.mode not in _EAGER:
            return self.compiled.supports(problem, request)
        return _unsupported(problem)

    def prepare(
        self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT
    ) -> AtenPrepared | InductorPrepared:
        """Nothing to compile, but in the modes of ``torch.compile``.

        Raises:
            Unsupported: what the checks of ``_int_mm``, ``_scaled_mm`` and ``_grouped_mm`` on the device reject.
        """
        if reason := _unsupported(problem, operands.device):
            raise reason
        if request.mode not in _EAGER:
            return self.compiled.prepare(problem, operands, request)
        return AtenPrepared(problem, operands.device)

    def refusal(self, problem: Problem, device: str) -> Unsupported | None:
        """What the eager program does not support on a device."""
        return _unsupported(problem, device)

    def recipe(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> Recipe:
        """The program is called, or compiled."""
        import torch

        if request.mode not in _EAGER:
            return self.compiled.recipe(problem, operands, request)
        return Recipe(threads=torch.get_num_threads())


class CompiledAten(InductorBackend):
    """ATen's products in a program of Inductor's, as ``torch.compile`` without autotuning has them.

    Whatever is around the product may be fused into a kernel, and so it is held to *either*.  What Inductor writes
    without a product (an outer product, a vector's) is Inductor's and judged all the same.
    """

    name = "aten"
    inductor_name = "ATEN"
    devices = ("cpu", "cuda")

    def installation(self) -> Availability:
        """As eager ATen."""
        return Availability()

    def unsupported(self, problem: Problem, request: BuildRequest) -> Unsupported | None:
        """What eager ATen does not support, and sizes that no artifact for any M contains."""
        if problem.op.name == "qlinear" and request.device == Device.CPU:
            text = "its packed weight is a parameter of a frozen program, and PyTorch traces no qlinear_prepack"
            return Unsupported("not-frozen", text, "cpp freezes; or --gemm-modes=eager")
        return _unsupported(problem)

    def options(self, problem: Problem, request: BuildRequest = DEFAULT) -> dict[str, Any]:
        """PyTorch's defaults: no autotuning, no frozen weight."""
        return {"compile_threads": 1}

    def prepare(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> InductorPrepared:
        """Compile the problem; its contract is eager ATen's around what Inductor fuses.

        A product under autocast that Inductor writes itself skips the conversions of A and B, as it does with any
        conversion to a half type and back: the factors of each product are off by u of the half type, and both together
        by 2u + u^2.
        """
        from pytest_gemm.backends.inductor.artifact import CalledPrepared

        artifact = self.artifact(problem, operands, request)
        found = self.contract(problem, artifact)
        eager = AtenPrepared(problem, operands.device).contract
        found = dataclasses.replace(eager, epilogue=found.epilogue)
        if problem.autocast and has_no_kernel(problem, operands.device) is not None:
            half, u = problem.dtypes.out, problem.dtypes.out.unit_roundoff
            found = dataclasses.replace(found, input_error=u * (2.0 + u), input_bits=half.precision)
        return CalledPrepared(problem, artifact, found)


def _unsupported(problem: Problem, device: str = "") -> Unsupported | None:
    """What ATen's checks reject everywhere, and on a device where one is given."""
    op = problem.op.name
    if problem.grouped and problem.dtypes.out.name == "f64":
        return Unsupported("dtype", "_grouped_mm takes f32, bf16 and f16, not f64")
    if op == "woq_int4" and (problem.shape.n % 16 or problem.group_size not in {32, 64, 128, 256}):
        return Unsupported("int4-shape", "_weight_int4pack_mm_for_cpu needs N % 16 = 0 and groups of 32 to 256")
    if op == "woq_int4" and problem.has("a.padded") and problem.shape.m > 1:
        return Unsupported("a-strided", "_weight_int4pack_mm_for_cpu needs a contiguous A", "drop a.padded")
    if op == "woq_int8" and problem.has("b.padded") and problem.shape.n > 1:
        return Unsupported("b-strided", "_weight_int8pack_mm needs a contiguous weight", "drop b.padded")
    if reason := tensor_core.odd_groups(problem):
        return reason
    return {"cuda": _unsupported_on_cuda, "cpu": _unsupported_on_cpu}[device](problem) if device else None


def _unsupported_on_cpu(problem: Problem) -> Unsupported | None:
    """What the CPU's kernels do not have."""
    from pytest_gemm.backends.inductor.torch_compat import torch_release

    if problem.step("rowwise") is not None and torch_release() < (2, 13):
        return Unsupported("scales", "before torch 2.13 a CPU takes tensorwise scales only", "use tensorwise")
    return None


def _unsupported_on_cuda(problem: Problem) -> Unsupported | None:
    """What PyTorch and cuBLASLt do not let pass: an exception if it were tried, or a fault of the device."""
    op, shape = problem.op.name, problem.shape
    if op in {"qlinear", "woq_int4"}:
        return Unsupported("device", f"{op} is an op of the CPU", "--gemm-device=cpu")
    if op == "da8w8":
        shape = dataclasses.replace(shape, m=shape.m * (1 if shape.batch is None else shape.batch))
    if op in {"int_mm", "da8w8"}:
        if shape.m <= 16 or shape.n % 8 or shape.k % 8:
            return Unsupported("int-mm-shape", "on CUDA _int_mm needs M > 16 and multiples of 8 for N and K")
        if problem.layout.a_transposed and shape.m % 4:
            return Unsupported(
                "int-mm-leading-dimension", "cuBLASLt multiplies int8 at leading dimensions that are multiples of 4"
            )
    if op == "scaled_mm":
        return _unsupported_scaled(problem)
    if problem.grouped and (problem.has("a.offset") or problem.has("b.offset")):
        return Unsupported("alignment", "on CUDA _grouped_mm needs base addresses that are multiples of 16 bytes")
    return None


def _unsupported_scaled(problem: Problem) -> Unsupported | None:
    """From ``_scaled_mm_out_cuda`` (``aten/src/ATen/native/cuda/ScaledBlas.cpp``) and what cuBLASLt requires of fp8."""
    import torch

    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        return Unsupported("compute-capability", "_scaled_mm needs compute capability 8.9 for fp8")
    if reason := tensor_core.odd_scaled(problem):
        return reason
    if problem.dtypes.a.name == problem.dtypes.b.name == "f8e5m2":
        return Unsupported("dtype", "cuBLASLt multiplies no f8e5m2 by f8e5m2")
    if problem.dtypes.out.name == "f32" and problem.step("bias") is not None:
        return Unsupported("bias", "on CUDA _scaled_mm adds no bias to f32", "drop bias")
    if problem.dtypes.out.name == "f32" and problem.step("rowwise") is not None and capability[0] != 9:
        return Unsupported("scales", "only compute capability 9.0 writes rowwise scaled f32", "use tensorwise")
    if problem.has("a.offset") or problem.has("b.offset"):
        return Unsupported("alignment", "cuBLASLt multiplies fp8 at addresses that are multiples of 16 bytes")
    return None


def _cutlass_groups(problem: Problem) -> bool:
    """Whether one CUTLASS kernel of PyTorch's own multiplies all groups; otherwise cuBLAS is called for each."""
    import torch

    fits = problem.grouped and problem.dtypes.out.name == "bf16"
    return fits and torch.cuda.get_device_capability()[0] in (9, 10)


class AtenPrepared(EagerPrepared):
    """The eager program of a problem, under the settings that its flags ask for.

    PyTorch allows cuBLAS by default to reduce in f16 and bf16; without the flag ``reduced`` it is forbidden.
    """

    records = True

    def __init__(self, problem: Problem, device: str = "cpu") -> None:
        sums: dict[str, Contract] = {"f64": Contract("f64", "eager"), "i32": Contract("i32", "eager")}
        super().__init__(problem, sums.get(problem.dtypes.out.name, Contract("f32", "eager")))
        if device == "cuda":
            library = not _cutlass_groups(problem)
            self.contract = dataclasses.replace(tensor_core.contract(problem, library=library), epilogue="eager")

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """With the products' results at guard pages, where the run places tensors there."""
        from pytest_gemm.operands import guard_pages

        with guard_pages.products(), super().watched():
            yield

    def proof(self) -> Proof:
        """The ATen operators that ran.  Nothing was selected or generated."""
        return Proof(executed=self.executed, provable=False)
