"""``onednn``: oneDNN's matrix product on the CPU, called directly; the example of docs/how-to/adding-a-backend.md.

It is not among the backends that ``auto`` runs: a conftest.py registers it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_gemm.api.eager import EagerPrepared
from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import Availability
from pytest_gemm.api.request import DEFAULT, BuildRequest
from pytest_gemm.api.settings import Setting, one_of
from pytest_gemm.core.outcome import Reason, Unsupported
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.problem.problem import Problem

if TYPE_CHECKING:
    import torch

    from pytest_gemm.operands.tensors import Operands

_PRODUCT = "mkldnn._linear_pointwise.default"


class OneDnnBackend:
    """oneDNN's linear in place of the product; everything around it is eager PyTorch."""

    name = "onednn"
    devices = ("cpu",)
    settings: Mapping[str, Setting] = {
        "weight": Setting("plain", "plain|packed", "whether B is packed by oneDNN first", one_of("plain", "packed")),
    }
    packs = False

    def configure(self, values: Mapping[str, Any]) -> None:
        """Take the settings."""
        self.packs = values["weight"] == "packed"

    def availability(self, device: str) -> Availability:
        """A build of PyTorch with oneDNN."""
        import torch

        if not torch.backends.mkldnn.is_available():
            return Availability(Reason("no-onednn", "this PyTorch is built without oneDNN", "install one with it"))
        return Availability(versions=(("torch", torch.__version__),))

    def supports(self, problem: Problem, request: BuildRequest = DEFAULT) -> Unsupported | None:
        """2-D products in f32, and in bf16 where oneDNN computes them on this CPU."""
        import torch

        dtype = problem.dtypes.out.name
        if problem.op.name not in {"mm", "addmm", "linear"}:
            return Unsupported("op", "onednn supports mm, addmm and linear")
        if dtype not in {"f32", "bf16"} or problem.autocast:
            return Unsupported("dtype", "onednn supports f32 and bf16")
        if dtype == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return Unsupported("isa", "oneDNN computes bf16 with AVX-512 only", "a processor with AVX-512")
        if problem.shape.is_empty or problem.shape.k == 0:
            return Unsupported("empty", "oneDNN's linear takes no empty operands")
        return None

    def prepare(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> OneDnnPrepared:
        """Nothing to compile: the program is built around the product."""
        return OneDnnPrepared(problem, self.packs)


class OneDnnPrepared(EagerPrepared):
    """A problem's eager program around oneDNN's linear."""

    records = True

    def __init__(self, problem: Problem, packs: bool) -> None:
        super().__init__(problem, Contract("f32", "eager"), self._product)
        self._packs = packs

    def _product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        import torch

        weight = b.mT  # N x K, as torch.nn.Linear stores it
        if self._packs:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(a, weight, None, "none", [], "")
        return result

    def proof(self) -> Proof:
        """oneDNN's product ran, and no other one."""
        own = tuple(name for name in self.executed if name == _PRODUCT)
        return Proof(own, own, own, foreign=tuple(name for name in self.executed if name != _PRODUCT))
