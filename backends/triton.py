"""``triton``: Inductor's Triton GEMM templates on a CUDA device."""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib.util
import inspect
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_gemm.api.protocols import Availability, Candidates
from pytest_gemm.api.request import DEFAULT, BuildRequest, Capability, Selection
from pytest_gemm.api.settings import Setting, one_of
from pytest_gemm.backends.inductor.backend import InductorBackend, Space, installed
from pytest_gemm.numerics import tensor_core
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.problem.problem import Problem

if TYPE_CHECKING:
    from pytest_gemm.backends.inductor.artifact import Artifact
    from pytest_gemm.operands.tensors import Operands


# The widest BLOCK_K among Inductor's configurations for fp8.
_BLOCK_K = 256

_SPACES = ("default", "exhaustive")
_SPLITS = "triton.num_decompose_k_splits"
# How much longer than M and N K must be for decompose-K, Inductor's own default.
_DECOMPOSED_FROM = 32
# How many ways to slice K are offered, Inductor's own default.
_DECOMPOSITIONS = 10
# Inductor's switch for the template of an A that all products of a batch share, since 2.15, and from which batch on.
_SHARED_A = "bmm_shared_a"
_SHARED_BY = 64
# Multiprocessors that the GPU is taken to have, 0: its own.  With few of them persistent kernels loop over tiles at
# small sizes too; and multiplications of a product up to which so few are fast enough.
_FEW = (0, 1, 3)
_FEW_UP_TO = 1 << 28
_NUMBERED = re.compile(r"(.*),NUM_SMS=([1-9][0-9]{0,3})")


class TritonBackend(InductorBackend):
    """The Triton templates alone.  They take any strides; accumulation is in f32, without TF32 unless allowed.

    Candidates come out of up to four spaces, see ``docs/reference/candidates.md``: the templates, decompose-K where K
    is long, the template for an A that a batch shares, and with the exhaustive search space the persistent template
    that stores through TMA.

    Attributes:
        space: ``default`` or ``exhaustive``: all of Inductor's tiles, stages and warps instead of a selection.
    """

    name: str = "triton"
    inductor_name: str = "TRITON"
    devices: tuple[str, ...] = ("cuda",)
    rules = ("inductor-on-cuda", "triton", "scaled", "triton-scaled", "grouped", "triton-grouped")
    # Some twenty candidates of 2 to 20 s each would be compiled and timed for every problem.
    selection: Selection = Selection.ONE
    capabilities = InductorBackend.capabilities | {Capability.MACHINE}
    settings: Mapping[str, Setting] = {
        "space": Setting("default", "default|exhaustive", "tiles, stages and warps to choose from", one_of(*_SPACES))
    }
    space: str = "default"

    def configure(self, values: Mapping[str, Any]) -> None:
        """Take the settings."""
        self.space = values["space"]

    def installation(self) -> Availability:
        """The package ``triton``."""
        if importlib.util.find_spec("triton") is None:
            return Availability.lacking("no-triton", "the package triton is not installed", "pip install triton")
        return Availability(versions=(*installed("triton"), *_assembler()))

    def options(self, problem: Problem, request: BuildRequest = DEFAULT) -> dict[str, Any]:
        """With the persistent TMA template among the candidates, where Inductor's condition for it holds."""
        options = {**super().options(problem, request), "triton.enable_persistent_tma_matmul": True}
        if self.space == "exhaustive":
            options["max_autotune_gemm_search_space"] = "EXHAUSTIVE"
        if self.selects(request) == Selection.WINNER:  # for a user, decompose-K is among the candidates
            options[_SPLITS] = _DECOMPOSITIONS
        return options

    def spaces(self, problem: Problem) -> tuple[Space, ...]:
        """The templates; decompose-K; the template of a shared A; templates that store through TMA."""
        from pytest_gemm.backends.inductor import torch_compat

        found = [Space(options=((_SPLITS, 0),))]
        if _is_long(problem):
            found.append(Space(only="decompose_k*", options=((_SPLITS, _DECOMPOSITIONS),)))
        if _shares_a(problem) and torch_compat.has_option(_SHARED_A):
            found.append(Space(only="triton_bmm_shared_a-*", options=((_SHARED_A, True), (_SPLITS, 0))))
        if self.space == "exhaustive":
            storing = (("triton.enable_template_tma_store", True), (_SPLITS, 0))
            found.append(Space(suffix=",tma-store", only="triton_mm_persistent_tma*", options=storing))
        return tuple(found)

    def space_of_one(self, problem: Problem, by_line: int, request: BuildRequest = DEFAULT) -> Space:
        """Decompose-K for every second problem that it applies to, as no template beside it is offered.

        For two of three small problems the GPU is taken to have few multiprocessors.
        """
        shape = problem.shape
        small = shape.m * shape.n * shape.k * (shape.batch or 1) <= _FEW_UP_TO
        few = _FEW[by_line // 1009 % len(_FEW)] if small and not request.machine else 0
        decomposed = _is_long(problem) and by_line % 2
        options = ((_SPLITS, _DECOMPOSITIONS),) if decomposed else ()
        return Space(suffix=f",NUM_SMS={few}" if few else "", options=options, multiprocessors=few)

    def candidates(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> Candidates:
        """As every backend of Inductor; with ``,NUM_SMS=N`` at the end of a pattern the GPU has N multiprocessors.

        Raises:
            Unsupported: when Inductor has none.
        """
        listed = super().candidates(problem, operands, request)
        if found := _NUMBERED.fullmatch(request.candidate):
            names = fnmatch.filter(listed.names, found[1])
            listed = dataclasses.replace(listed, named=tuple(f"{name},NUM_SMS={found[2]}" for name in names))
        return listed

    def _space_of(self, problem: Problem, operands: Operands, request: BuildRequest) -> Space:
        """With the number of multiprocessors that a candidate's name ends with."""
        if not (found := _NUMBERED.fullmatch(request.candidate)):
            return super()._space_of(problem, operands, request)
        space = super()._space_of(problem, operands, request.replace(candidate=found[1]))
        suffix = f"{space.suffix},NUM_SMS={found[2]}"
        return dataclasses.replace(space, suffix=suffix, multiprocessors=int(found[2]))

    def contract(self, problem: Problem, artifact: Artifact | None) -> Contract:
        """As for every backend of Inductor; decompose-K adds up slices, in f32, that a library has computed."""
        found = super().contract(problem, artifact)
        for name in artifact.chosen if artifact is not None else ():
            if split := re.match(r"decompose_k_mm_(\d+)_split", name):
                count = int(split[1])
                shape = dataclasses.replace(problem.shape, k=problem.shape.k // count)
                one = tensor_core.contract(dataclasses.replace(problem, shape=shape), library=True)
                found = dataclasses.replace(
                    one, slices=count * one.slices, partials="f32", epilogue=found.epilogue, deterministic=True
                )
        return found

    def sum(self, problem: Problem) -> Contract:
        """Tensor cores into f32 for f16 and bf16; f32 by fused multiply-adds as long as TF32 is off.

        Without fast accumulation the templates add each ``tl.dot`` of fp8 to a sum in f32, hence every BLOCK_K
        products, which are at most 256 in Inductor's configurations; with it ``tl.dot`` holds the whole sum
        (``max_num_imprecise_acc_default`` is 2^30 on Hopper).
        """
        return tensor_core.contract(problem, promote_every=_BLOCK_K)


def _assembler() -> tuple[tuple[str, str], ...]:
    """The version of the ptxas that Triton calls for this device, or nothing where Triton does not report it.

    It decides as much as Triton does (docs/results/h200.md, "The sign of a sum"), and ``TRITON_PTXAS_PATH`` changes it.
    """
    import torch

    try:
        from triton.backends.nvidia import compiler

        # It takes the architecture since Triton 3.6, which brings two of them.
        major, minor = torch.cuda.get_device_capability()
        takes_one = bool(inspect.signature(compiler.get_ptxas).parameters)
        tool = compiler.get_ptxas(10 * major + minor) if takes_one else compiler.get_ptxas()
        return (("ptxas", str(tool.version)),)
    except Exception:  # internals of a third party, for a report: no answer is no reason to fail
        return ()


def _is_long(problem: Problem) -> bool:
    """Whether Inductor offers decompose-K: a product without an addend and with a K that is long beside M and N."""
    alone = problem.op.name in {"mm", "mixed_mm", "linear"} and not problem.adds_bias
    longest = max(problem.rows, problem.shape.n)
    return alone and not problem.dynamic and problem.shape.k >= _DECOMPOSED_FROM * longest


def _shares_a(problem: Problem) -> bool:
    """Whether Inductor may offer the template of an A that all products of a batch share."""
    return problem.op.name == "bmm" and problem.has("a.broadcast") and (problem.shape.batch or 0) >= _SHARED_BY
