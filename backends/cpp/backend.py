"""``cpp``: Inductor's C++ GEMM templates (AMX, AVX-512, AVX2 micro-kernels) on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import itertools
import os
import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from pytest_gemm.api.protocols import Availability, Candidates, Recipe
from pytest_gemm.api.request import DEFAULT, BuildRequest, Capability, Selection
from pytest_gemm.backends.cpp import machine_code, micro_kernels
from pytest_gemm.backends.cpp.micro_kernels import Axes
from pytest_gemm.backends.inductor.backend import InductorBackend, Space, cache_dir
from pytest_gemm.core.case_id import Mode
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.machine import isa as isa_module
from pytest_gemm.machine import processor, software
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.problem import Problem

if TYPE_CHECKING:
    from pytest_gemm.backends.inductor.artifact import Artifact, InductorPrepared
    from pytest_gemm.operands.tensors import Operands


# Multiplications of a product up to which the reference micro-kernel is judged: it takes about 1 ns for each.
_REFERENCE_UP_TO = 1 << 28
# Elements of B from which on Inductor's own blocking has several blocks, and small ones would take long.
_OWN_FROM = 1 << 20
# One problem of so many keeps Inductor's own blocking with ``one``.
_OWN = 3
# Generated programs that wait for their ``prepare``.
_WAITING = 64
# Blockings that ``all`` adds to Inductor's own selection.
_VARIANTS = 2


def compiler() -> str:
    """The C++ compiler that Inductor calls: ``$CXX``, or g++."""
    return os.environ.get("CXX") or "g++"


class CppBackend(InductorBackend):
    """The C++ templates alone.

    Arithmetic, by reading the generated code of torch 2.13: every floating micro-kernel accumulates in f32
    (bf16 and f16 inputs are converted, or multiplied by AMX into f32), also across blocks of K, in a local buffer
    of f32 where the output is narrower; bias and epilogue work on that buffer; the result is rounded when it
    is stored.  K is not sliced over threads unless ``cpp.gemm_max_k_slices`` allows it.

    Its candidates are the micro-kernels that Inductor has registered for the problem's types and this instruction set
    and that its checks admit, each with its register blocking; the first is the one that the heuristic selects,
    and the last the reference one.  Beside that one there are variants of the template's own blockings, see
    :func:`micro_kernels.blockings`; others can be requested by name.  ``one`` is the heuristic's micro-kernel, with one
    of these blockings for two problems of three.
    """

    name: str = "cpp"
    inductor_name: str = "CPP"
    devices: tuple[str, ...] = ("cpu",)
    capabilities = InductorBackend.capabilities | {Capability.ISA, Capability.MACHINE}
    selection: Selection = Selection.ONE

    def installation(self) -> Availability:
        """A C++ compiler."""
        command = compiler()
        if version := software.version_of(command):
            return Availability(versions=((command, version),))
        text = f"{command!r} is not there, or does not answer as a C++ compiler"
        return Availability.lacking("no-compiler", text, "apt-get install g++, or set CXX to one")

    def supports(self, problem: Problem, request: BuildRequest = DEFAULT) -> Unsupported | None:
        """As every backend of Inductor, at an instruction set that this machine can compile for and execute."""
        lacking = _lacks_isa(request.isa, request.machine) if request.isa else None
        return lacking or super().supports(problem, request)

    def rules_for(self, problem: Problem) -> tuple[str, ...]:
        """Those of its op: not every lowering hands its product to the C++ templates."""
        if problem.op.int8 or problem.group_size:
            return ("cpp", "qlinear-unfrozen", "cpp-quantised")
        if problem.op.batched:
            return ("cpp", "cpp-float", "inductor-on-cpu", "cpp-bmm", "cpp-rows", "cpp-bmm-strides")
        own = ("cpp-linears",) if problem.op.several else ("cpp-product", "cpp-rows")
        return ("cpp", "cpp-float", "inductor-on-cpu", "cpp-weight", *own)

    def options(self, problem: Problem, request: BuildRequest = DEFAULT) -> dict[str, Any]:
        """With the pass that makes one product of several linears, where the problem is that."""
        options = super().options(problem, request)
        if problem.has("program.concat"):
            return {**options, "cpp.enable_concat_linear": True}
        return {**options, "cpp.enable_grouped_gemm_template": True} if problem.op.several else options

    def wanted(self, problem: Problem) -> str:
        """``linears`` have to be computed by the grouped template, weights of ``concat`` by a single one."""
        if problem.has("program.concat"):
            return rf"{micro_kernels.NAME}(?!\d|{micro_kernels.GROUPED})"
        return f"{micro_kernels.NAME}{micro_kernels.GROUPED}" if problem.op.several else ""

    def candidates(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> Candidates:
        """The micro-kernels that fit, Inductor's selection first, and variants of its blockings.

        The reference one, which is slow, is left out of products of more than 2^28 multiplications.  What
        a requested pattern names beyond the list: ``CppMicroGemm*-8x*,cache=1.1.16``.

        Raises:
            Unsupported: when Inductor has none.
        """
        listed = super().candidates(problem, operands, request)
        named = _named(listed.names, request.candidate) if request.candidate else ()
        first, *others = listed.names
        shape = problem.shape
        large = shape.m * shape.n * shape.k * (shape.batch or 1) > _REFERENCE_UP_TO
        found = (one for one in others if not (large and one.startswith("CppMicroGemmRef-")))
        variants = itertools.islice(self._variants(problem, operands, request, first), _VARIANTS)
        return dataclasses.replace(listed, names=(first, *found, *variants), named=named)

    def by_line(self, problem: Problem) -> int:
        """Of what the text of a kernel depends on: lines that differ in the rest share one, and its compile."""
        first = problem.at_hints  # any M of a dynamic one has the same artifact
        facts = first.dtypes.out.name, first.shape, *first.steps
        return zlib.crc32(":".join(map(str, facts)).encode())

    def _variants(self, problem: Problem, operands: Operands, request: BuildRequest, first: str) -> Iterator[str]:
        """Inductor's selection with the blockings that make a difference to it, beginning with those of ``one``."""
        shape = problem.shape
        rows = shape.m * (shape.batch or 1 if problem.op.batch == "optional" else 1)
        if not first.startswith("CppMicro") or _is_empty(problem):
            return
        for axes in self._blockings(problem, self.by_line(problem), request):
            # The number of threads has a part in the choice of the micro-kernel.
            listed = self._list(problem, operands, request, _space(axes)) if axes.threads else (f"{first}{axes}",)
            # The template for a small M has no blockings of its own.
            if not _is_small_m(problem, listed[0]) and axes.reaches(listed[0], rows, shape.n, shape.k):
                yield listed[0]

    def _blockings(self, problem: Problem, by_line: int, request: BuildRequest = DEFAULT) -> tuple[Axes, ...]:
        """Blockings that a problem's template takes, beginning with the one that the line leads to."""
        is_open = problem.dynamic or request.mode is Mode.DYNAMIC  # M, so that the code computes its blocks
        # Parts for the threads end the process of a batch: its function for one thread takes them too.
        kind = "dynamic" if is_open else "batched" if problem.op.batched else "fixed"
        return tuple(one for one in micro_kernels.blockings(kind, by_line // _OWN) if _is_right(problem, one))

    def space_of_one(self, problem: Problem, by_line: int, request: BuildRequest = DEFAULT) -> Space:
        """Inductor's own blocking for one problem of three, for large ones and as on a machine; else another one."""
        shape = problem.shape
        own = by_line % _OWN == 0 or shape.n * shape.k >= _OWN_FROM
        if own or _is_empty(problem) or request.run_threads or request.machine:
            return Space()
        return _space(self._blockings(problem, by_line, request)[0])

    def _space_of(self, problem: Problem, operands: Operands, request: BuildRequest) -> Space:
        """The options that a candidate's name contains."""
        asked = micro_kernels.split(request.candidate)
        return _space(asked[1]) if asked else super()._space_of(problem, operands, request)

    def prepare(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> InductorPrepared:
        """Compile the problem, with the requested micro-kernel and blockings.

        Raises:
            Unsupported: when Inductor has no such candidate, or when the blockings make no difference to the problem.
        """
        prepared = super().prepare(problem, operands, request)
        if request.candidate and (why := micro_kernels.unmet(prepared.artifact.products, request.candidate)):
            raise Unsupported("blocking-unmet", why)
        return prepared

    def compile_together(self, jobs: Iterable[tuple[Problem, Operands, BuildRequest]]) -> None:
        """Generate the programs of several problems, and compile their kernels together, see ``inductor.together``.

        Each then waits for its :meth:`prepare`; nothing of it has run.  One that cannot be generated is left to that.
        """
        from pytest_gemm.backends.inductor import torch_compat
        from pytest_gemm.backends.inductor.together import Batch

        torch_compat.ask_levels(str(cache_dir()))
        batch, waiting = Batch(), self._recent.waiting
        with batch.collecting():
            for problem, operands, request in jobs:
                with contextlib.suppress(Exception):
                    key, generated = self._program(problem, operands, request)
                    if key not in waiting:
                        waiting[key] = generated()
        batch.compile()
        while len(waiting) > _WAITING:
            del waiting[next(iter(waiting))]

    def contract(self, problem: Problem, artifact: Artifact | None) -> Contract:
        """As for every backend of Inductor, but for the K slices of the code and what quantised templates do.

        Slices are f32 sums that are added in f32.  ``da8w8``: the template multiplies by B's scales and converts to the
        program's type, and A's scales come after it.  ``woq_int4``: the AMX kernel writes the dequantised weight as
        bf16, one rounding of each product's factor.
        """
        found = super().contract(problem, artifact)
        slices = max((one.slices for one in artifact.products), default=1) if artifact is not None else 1
        if slices > found.slices:
            found = dataclasses.replace(found, slices=slices)
        if problem.op.int8 and not problem.op.fused_steps:
            return dataclasses.replace(found, epilogue="either")
        chosen = artifact.chosen if artifact is not None else ()
        if problem.group_size and any("WoQInt4Amx" in name for name in chosen):
            bf16 = DTYPES["bf16"]
            return dataclasses.replace(found, input_error=bf16.unit_roundoff, input_bits=bf16.precision)
        return found

    def recipe(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> Recipe:
        """As for every backend of Inductor; a micro-kernel is forced by what is registered."""
        found = super().recipe(problem, operands, request)
        asked = micro_kernels.split(request.candidate)
        if asked is None or not asked[0].startswith("CppMicro"):
            return found
        forcing = micro_kernels.registering(micro_kernels.kernel_of(asked[0]))
        return dataclasses.replace(found, setup=(*found.setup, *forcing))


def _is_right(problem: Problem, axes: Axes) -> bool:
    """Whether a problem's template is right with a blocking; the ledger has what it is not right with.

    That of several products does not add slices of K, and before torch 2.13 none adds those of a cache block of several
    register blocks of N.  That of a batch takes the first of these for all where B is not packed.
    """
    from pytest_gemm.backends.inductor import torch_compat

    wide = axes.cache is not None and axes.cache[1] > 1
    if axes.slices_k and (problem.op.several or (wide and torch_compat.torch_release() < (2, 13))):
        return False
    return not (wide and problem.op.batched) or problem.has("b.constant")


def _space(axes: Axes) -> Space:
    return Space(suffix=str(axes), options=tuple(axes.options.items()))


def _is_small_m(problem: Problem, candidate: str) -> bool:
    """Whether a candidate is of the template for a small M and an int8 weight."""
    kernel = micro_kernels.kernel_of(candidate)
    return problem.dtypes.b.name == "i8" and kernel.startswith("CppMicroGemmFP32Vec") and not kernel.endswith("x1")


def _is_empty(problem: Problem) -> bool:
    """Whether there is no result, or nothing to sum."""
    return problem.shape.is_empty or not problem.shape.k


def _named(listed: tuple[str, ...], pattern: str) -> tuple[str, ...]:
    """Micro-kernels of this pattern with the blockings that follow it."""
    asked = micro_kernels.split(pattern)
    if asked is None:
        return ()
    base, axes = asked
    # A micro-kernel's own name will do for that of the template of several products, too.
    fits = (one for one in listed if any(fnmatch.fnmatchcase(n, base) for n in (one, micro_kernels.kernel_of(one))))
    return tuple(f"{one}{axes}" for one in fits)


def _lacks_isa(isa: str, machine: str) -> Unsupported | None:
    """Why this machine cannot execute and examine code of a level; with ``machine`` it may compile it alone."""
    here = isa_module.isas(processor.cpu().flags)
    if isa not in here:
        if machine:
            return None
        can = ", ".join(here) or "none that can be requested"
        return Unsupported("isa", f"this CPU does not execute {isa}", f"it executes {can}")
    from pytest_gemm.backends.inductor import cpu_isa, torch_compat

    with torch_compat.cache_dir_set(str(cache_dir(isa))):
        lack = cpu_isa.lacks_isa(isa)
    if lack:
        return Unsupported("isa", lack, "install a newer g++")
    if not machine_code.disassembler():
        text = f"what code for {isa} became cannot be shown: there is no objdump"
        return Unsupported("no-disassembler", text, "apt-get install binutils")
    return None
