"""``cpp``: Inductor's C++ GEMM templates (AMX, AVX-512, AVX2 micro-kernels) on the CPU."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from pytest_gemm.backend import Availability, Contract, Unsupported
from pytest_gemm.backends.inductor import InductorBackend, has_no_kernel, unclaimed
from pytest_gemm.outcome import Reason
from pytest_gemm.problem import DTYPES, Problem, StepKind

if TYPE_CHECKING:
    from pytest_gemm.backends.artifact import Artifact

__all__ = ["CppBackend", "compiler"]

_TEMPLATE_DTYPES = frozenset({"f32", "bf16", "f16"})
# Constants of up to so many elements are written into a kernel's text (GraphLowering.get_attr).
_INLINED = 8
_NO_CHOICE = {
    "baddbmm": "Inductor's lowering of baddbmm has ATen and Triton candidates only",
    "int_mm": "Inductor's lowering of _int_mm has no C++ candidate; only its quantised patterns have one",
    "scaled_mm": "Inductor's lowering of _scaled_mm has no C++ candidate",
    "grouped_mm": "Inductor's lowering of _grouped_mm has no C++ candidate",
}


def compiler() -> str:
    """The C++ compiler that Inductor calls: ``$CXX``, or the platform's."""
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


@functools.lru_cache
def _compiler_version(command: str) -> str:
    """What the compiler calls itself, "" when it does not answer."""
    try:
        done = subprocess.run(
            [command, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


class CppBackend(InductorBackend):
    """The C++ templates alone.

    Arithmetic, by reading the generated code of torch 2.13: every floating micro-kernel accumulates in f32
    (bf16 and f16 inputs are converted, or multiplied by AMX into f32), also across blocks of K, in a local buffer
    of f32 where the output is narrower; bias and epilogue work on that buffer; the result is rounded when it
    is stored.  K is not sliced over threads unless ``cpp.gemm_max_k_slices`` says so.
    """

    name: str = "cpp"
    inductor_name: str = "CPP"
    devices: tuple[str, ...] = ("cpu",)

    def availability(self, device: str) -> Availability:
        """A C++ compiler."""
        if device != "cpu":
            return Availability(Reason("device", f"cpp computes on the cpu, not on {device}", "--gemm-device=cpu"))
        command = compiler()
        if shutil.which(command) is None:
            return Availability(
                Reason("no-compiler", f"the C++ compiler {command!r} is not there", "apt-get install g++, or set CXX")
            )
        version = _compiler_version(command)
        if not version:
            return Availability(
                Reason("no-compiler", f"{command!r} does not answer as a C++ compiler", "set CXX to one")
            )
        return Availability(versions=((command, version),))

    def supports(self, problem: Problem) -> Unsupported | None:
        """What the lowerings of torch 2.13 hand to the C++ templates.

        From ``use_cpp_gemm_template`` and ``use_cpp_bmm_template`` (``_inductor/utils.py``), the lowerings of mm,
        addmm, bmm and ``_weight_int8pack_mm``, and a probe of some 450 problems.
        """
        op, flags = problem.op.name, problem.flags
        if refusal := unclaimed(problem):
            return refusal
        if op in _NO_CHOICE:
            return Unsupported("no-candidate", _NO_CHOICE[op])
        if op in {"qlinear", "da8w8", "woq_int4"}:
            return _quantised(problem)
        if problem.dtypes.out.name not in _TEMPLATE_DTYPES:
            return Unsupported("dtype", f"the C++ templates take f32, bf16 and f16, not {problem.dtypes.out.name}")
        if refusal := has_no_kernel(problem, "cpu"):
            return refusal
        if op == "bmm":
            return self._supports_bmm(problem)
        if not problem.constant_b:
            return Unsupported(
                "weight-not-constant",
                "the C++ template packs its weight at compile time: B must be a frozen parameter",
                f"drop {'self' if 'self' in flags else 'var-b'}",
            )
        if op == "mixed_mm" and str(problem.dtypes) == "bf16-i8-bf16":
            return Unsupported(
                "dequant-kept",
                "freezing keeps conversions of int8 to bf16 for its weight-only pattern: B is no constant",
                "woq_int8:bf16-i8-bf16 has a candidate",
            )
        addend = op == "addmm" or (op == "linear" and problem.step("bias") is not None)
        if problem.shape.is_empty and addend and problem.input_dtype.name == "f16":
            return Unsupported(
                "empty", "Inductor's lowering of addmm hands an empty product to ATen, whoever is forced"
            )
        strided = problem.has("pad-lda") and not problem.autocast
        if op == "linear" and strided and (problem.shape.batch or 0) > 1 and problem.shape.m > 1:
            return Unsupported(
                "a-strided", "PyTorch makes linear on a strided 3-D input a bmm with an expanded weight", "drop pad-lda"
            )
        return _rows_of_a(problem)

    def contract(self, problem: Problem, artifact: Artifact | None) -> Contract:
        """As for every backend of Inductor, but for what the quantised templates do to values on their way.

        ``da8w8``: the template multiplies by B's scales and converts to the program's type, and A's scales come after
        it.  ``woq_int4``: the AMX kernel writes the dequantised weight as bf16, one rounding of each product's factor.
        """
        found = super().contract(problem, artifact)
        if problem.op.name == "da8w8":
            return dataclasses.replace(found, epilogue="either")
        chosen = artifact.chosen if artifact is not None else ()
        if problem.op.name == "woq_int4" and any("WoQInt4Amx" in name for name in chosen):
            bf16 = DTYPES["bf16"]
            return dataclasses.replace(found, input_error=bf16.unit_roundoff, input_bits=bf16.precision)
        return found

    def _supports_bmm(self, problem: Problem) -> Unsupported | None:
        if problem.autocast:
            return None  # the conversion writes matrices of its own
        if refusal := _rows_of_a(problem):
            return refusal
        if problem.has("pad-lda"):
            return Unsupported("a-strided", "the C++ bmm template needs each matrix of A contiguous", "drop pad-lda")
        if problem.has("bcast-a") and problem.dtypes.a.name != "f32" and problem.shape.batch != 1:
            return Unsupported("a-strided", "the C++ bmm template takes an expanded A in f32 only", "drop bcast-a")
        return None


def _quantised(problem: Problem) -> Unsupported | None:
    """From the lowerings of ``qlinear_pointwise`` and ``_weight_int4pack_mm_for_cpu``, and ``check_woq_int4_extra``.

    Whether the machine has the instructions that a micro-kernel for 4-bit weights needs (AVX-512 or AMX) shows when it
    is compiled; 8-bit integers have a scalar reference kernel where there is no VNNI and no AMX.
    """
    op, shape, dtypes = problem.op.name, problem.shape, problem.dtypes
    if op == "woq_int4":
        if dtypes.a.name != "bf16":
            return Unsupported("dtype", f"the micro-kernels for 4-bit weights multiply bf16, not {dtypes.a.name}")
        if problem.group_size not in {32, 64, 128} or shape.n % 64:
            return Unsupported(
                "int4-shape", "the micro-kernels for 4-bit weights need N % 64 = 0 and groups of 32, 64, 128"
            )
        return None
    if op == "qlinear":
        if dtypes.out.name == "f16":
            return Unsupported("dtype", "PyTorch's shape function of qlinear_pointwise refuses f16")
        if problem.step("dynamic") is not None and any(step.kind is StepKind.BINARY for step in problem.passes):
            return Unsupported("dynamic", "the binary lowering of qlinear_pointwise asks for a constant zero point")
    if shape.n <= _INLINED:
        return Unsupported(
            "few-columns", f"scales of up to {_INLINED} columns are no constants of the program any more"
        )
    return None


def _rows_of_a(problem: Problem) -> Unsupported | None:
    """The refusal of an A whose rows are not contiguous.

    Even with every other candidate switched off, linear in f32 and bf16 then goes to MKL and oneDNN without a
    word, see the lowerings of ``mkl._mkl_linear`` and ``mkldnn._linear_pointwise``.
    """
    if problem.autocast or not problem.dtypes.a.is_float:
        return None  # the conversion writes a new A, row by row
    if problem.layout.a_transposed and problem.shape.m != 1:
        return Unsupported("a-transposed", "the C++ templates need A with contiguous rows", "use layout nn or nt")
    return None
