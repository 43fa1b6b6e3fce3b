"""``inductor``: what ``torch.compile(mode="max-autotune")`` makes of a problem, with whatever it selects.

No candidate is forced and no backend of Inductor's is alone: ATen, Triton's, C++ and CUTLASS's templates are
benchmarked against one another, as for a user, and the one that wins is judged by its own arithmetic.  The other
backends judge kernels; this one judges the configuration in which people meet them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from pytest_gemm.api.protocols import Availability, Recipe
from pytest_gemm.api.request import DEFAULT, BuildRequest, Capability
from pytest_gemm.backends import aten
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.backends.cutlass.backend import CutlassBackend
from pytest_gemm.backends.inductor.backend import InductorBackend
from pytest_gemm.backends.triton import TritonBackend
from pytest_gemm.core.case_id import Device, Mode
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.problem.problem import Problem

if TYPE_CHECKING:
    from pytest_gemm.backends.inductor.artifact import Artifact, InductorPrepared
    from pytest_gemm.operands.tensors import Operands

# By how the names of their candidates begin: the backends whose contract holds for these.
_TEMPLATES: Final[Mapping[str, type[InductorBackend]]] = {
    "CppMicro": CppBackend,
    "triton_": TritonBackend,
    "decompose_k": TritonBackend,
    "cutlass": CutlassBackend,
}


class MaxAutotuneBackend(InductorBackend):
    """Every candidate against every other one, as in ``torch.compile(mode="max-autotune")``.

    The options are those that the release gives the mode.  On CUDA the backend's own way has CUDA graphs, where PyTorch
    makes one; ``static`` is the same without.  On the CPU weights are frozen, without which no C++ template is offered.
    """

    name: str = "inductor"
    inductor_name: str = "GEMM"
    devices: tuple[str, ...] = ("cpu", "cuda")
    rules = ("aten", "grouped", "qlinear-unfrozen")
    capabilities = frozenset({Capability.MODE, Capability.USER_CACHES})
    on_request = True

    # The one candidate is what autotuning selects; those of one kind are judged by the backend of that kind.
    candidates: None = None  # type: ignore[assignment]  # says that the optional method is not there

    def installation(self) -> Availability:
        """PyTorch itself."""
        return Availability()

    def options(self, problem: Problem, request: BuildRequest = DEFAULT) -> dict[str, Any]:
        """Those of the mode; nothing is printed."""
        from pytest_gemm.backends.inductor import torch_compat

        on_cuda = request.device == Device.CUDA
        options: dict[str, Any] = {
            **torch_compat.mode_options("max-autotune"),
            "triton.cudagraphs": False,  # a matter of the execution mode
            "freezing": problem.frozen and not on_cuda,
            "autotune_in_subproc": on_cuda,
            "shape_padding": True,
            torch_compat.option("benchmark_template_fusion", "benchmark_epilogue_fusion"): True,
            "autotune_num_choices_displayed": 0,
            "max_autotune_report_choices_stats": False,
        }
        if not on_cuda:  # there are few candidates, and a pool of compile workers costs seconds to start
            options["compile_threads"] = 1
        return options

    def contract(self, problem: Problem, artifact: Artifact | None) -> Contract:
        """That of the template that was selected; of a library's product or several kinds, with steps fused or not."""
        kinds = {_template_of(name) for name in artifact.chosen} if artifact is not None else set()
        if artifact is not None and len(kinds) == 1 and (kind := kinds.pop()) is not None and not artifact.library:
            return kind().contract(problem, artifact)
        device = artifact.spec.request.device if artifact is not None else Device.CPU
        written_out = artifact is not None and not artifact.chosen and not artifact.library
        contract = aten.compiled_contract(problem, device, written_out=written_out)
        return dataclasses.replace(contract, epilogue="either")

    def prepare(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> InductorPrepared:
        """Compile the problem, with CUDA graphs where the mode has them and PyTorch makes one.

        Raises:
            Unsupported: when Inductor has no candidate, and what ATen's own checks reject.
        """
        from pytest_gemm.backends.inductor.selected import SelectedPrepared

        if reason := aten.AtenBackend().unsupported(problem, operands.device):
            raise reason
        try:
            artifact = self.artifact(problem, operands, _as_user(request))
        except Unsupported as why:
            if why.reason.code != "cudagraphs-skipped" or request.mode is not Mode.OWN:
                raise
            artifact = self.artifact(problem, operands, request)  # as PyTorch goes on without one
        return SelectedPrepared(problem, artifact, self.contract(problem, artifact))

    def recipe(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> Recipe:
        """The program compiled as here; what is selected may be another candidate."""
        return super().recipe(problem, operands, _as_user(request))


def _as_user(request: BuildRequest) -> BuildRequest:
    """The request with the mode that ``max-autotune`` has by itself on the device."""
    own = request.mode is Mode.OWN and request.device == Device.CUDA
    return request.replace(mode=Mode.CUDAGRAPHS) if own else request


def _template_of(candidate: str) -> type[InductorBackend] | None:
    return next((kind for start, kind in _TEMPLATES.items() if candidate.startswith(start)), None)
