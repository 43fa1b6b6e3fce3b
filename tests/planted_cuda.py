r"""Backends with real faults of a GPU: an illegal address, an endless kernel, more memory than there is.

They are registered as a stranger's would be, and go wrong by the problem's M; see :data:`PLAN`.  ``test_faults.py``
runs them where there is a CUDA device.  By hand, from the root of the repository::

    problems=mm:f32:nn:16x64x64,mm:f32:nn:32x64x64,mm:f32:nn:48x64x64,mm:f32:nn:80x64x64
    backends=planted-cuda,correct-cuda
    PYTHONPATH=tests pytest -p planted_cuda conformance/test_products.py -n 4 --gemm-timeout=20 \
        --gemm-backends=$backends --gemm-problem=$problems
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import Availability
from pytest_gemm.api.registry import Registry
from pytest_gemm.core.outcome import Reason, Unsupported
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.problem import Problem

try:
    import triton
    import triton.language as tl
except ImportError:  # a build of torch for the CPU comes without it; nothing here runs then
    triton = None

if triton is not None:
    # Without annotations: Triton would look them up among the names that a kernel may use.
    @triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
    def store_far_away(out, far, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803  # see above
        """Writes where no memory is mapped."""
        tl.store(out + far + tl.arange(0, SIZE), tl.zeros((SIZE,), tl.float32))

    @triton.jit
    def wait_for(flag):  # type: ignore[no-untyped-def]  # see above
        """Waits for a flag that nobody ever sets."""
        while tl.atomic_cas(flag, 0, 0) == 0:
            pass


def illegal_address() -> None:
    out = torch.zeros(64, device="cuda")
    store_far_away[(1,)](out, 1 << 44, SIZE=64)


def endless() -> None:
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    wait_for[(1,)](flag)


def greedy() -> None:
    torch.empty(1 << 40, dtype=torch.uint8, device="cuda")


# By M: in which phase, and how.
PLAN: dict[int, tuple[str, Callable[[], None]]] = {
    16: ("run", illegal_address),
    32: ("run", endless),
    48: ("run", greedy),
    64: ("compile", greedy),
}


@dataclasses.dataclass
class Prepared:
    """A product that goes wrong in its second run."""

    name: str
    fault: Callable[[], None] | None
    contract: Contract = dataclasses.field(default_factory=lambda: Contract(epilogue="eager"))
    runs: int = 0

    def run(self, operands: Operands) -> torch.Tensor:
        self.runs += 1
        if self.fault is not None and self.runs == 2:
            self.fault()
        return operands.a @ operands.b

    def proof(self) -> Proof:
        # Not provable: the product is PyTorch's own, and the device's profiler would say so.
        return Proof((self.name,), (self.name,), (self.name,) if self.runs else (), provable=False)


class Planted:
    """Goes wrong as :data:`PLAN` says."""

    name = "planted-cuda"
    devices = ("cuda",)

    def availability(self, device: str) -> Availability:
        if triton is None or not torch.cuda.is_available():
            return Availability(Reason("no-cuda-device", "there is no CUDA device, or no triton"))
        return Availability()

    def supports(self, problem: Problem, request: object = None) -> Unsupported | None:
        plain = problem.op.name == "mm" and str(problem.dtypes) == "f32" and not problem.epilogue and not problem.flags
        return None if plain else Unsupported("op", "made for plain products in f32")

    def prepare(self, problem: Problem, operands: Operands, request: object = None) -> Prepared:
        phase, fault = PLAN.get(problem.shape.m, ("", None))
        if phase == "compile" and fault is not None:
            fault()
        return Prepared(f"planted_{fault.__name__ if fault else 'nothing'}", fault)


class Control(Planted):
    """Never goes wrong."""

    name = "correct-cuda"

    def prepare(self, problem: Problem, operands: Operands, request: object = None) -> Prepared:
        return Prepared("correct", None)


def pytest_gemm_register_backends(registry: Registry) -> None:
    """Both, through the public registry."""
    registry.add(Planted())
    registry.add(Control())
