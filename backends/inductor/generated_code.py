"""What the text of generated code shows: its kernels, and the products that it calls."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

# -- generated modules -----------------------------------------------------------------------------------

_KERNEL = re.compile(
    r"^(?P<name>\w+) = async_compile\.(?P<kind>\w+)\((?P<body>.*?)^(?:'''|\"\"\")", re.MULTILINE | re.DOTALL
)

# What only the text of a matrix product template contains, by kind of kernel.
_TEMPLATE_MARKS: Mapping[str, re.Pattern[str]] = {
    "cpp_pybinding": re.compile(r"_micro_gemm\b|micro_gemm_kernel|brgemm"),
    "triton": re.compile(r"\btl\.dot\b|@triton_heuristics\.template"),
    "cuda": re.compile(r"cutlass::gemm"),
    "cutlass": re.compile(r"cutlass::gemm"),
    "nv_universal_gemm": re.compile(r""),
    "cutedsl": re.compile(r"cute"),
}


def kernels_of(source: str) -> dict[str, bool]:
    """The kernels that a generated module defines: name -> whether it is a matrix product template."""
    found = {}
    for match in _KERNEL.finditer(source):
        mark = _TEMPLATE_MARKS.get(match["kind"])
        found[match["name"]] = bool(mark and mark.search(match["body"]))
    return found


def triton_templates(source: str) -> tuple[str, ...]:
    """The texts of a program's matrix product templates in Triton."""
    kernels = [match["body"] for match in _KERNEL.finditer(source) if match["kind"] == "triton"]
    bodies = (body.partition("'''")[2] for body in kernels if _TEMPLATE_MARKS["triton"].search(body))
    return tuple(bodies)


@dataclasses.dataclass(frozen=True)
class CppProgram:
    """What the text of a program shows whose kernels are called by C++.

    Attributes:
        kernels: that it defines: name -> whether it is a matrix product template.
        calls: kernels in the order in which it calls them.
        foreign: products of ATen, MKL and oneDNN that it calls.
    """

    kernels: Mapping[str, bool]
    calls: tuple[str, ...]
    foreign: tuple[str, ...]


# A function of C++ at the left margin, or a kernel of Triton or CUTLASS among the program's own.
_CPP_KERNEL = re.compile(
    r"^(?:extern \"C\" )?void (?P<cpp>cpp_\w+)\(|\b(?P<gpu>(?:triton|cutlass)_\w+?)(?=\b)", re.MULTILINE
)
_CPP_CALL = re.compile(r"^\s+(?:call_|launchKernel\(\s*kernels\.)?((?:cpp|triton|cutlass)_\w+)[(,]", re.MULTILINE)
_CPP_FOREIGN = re.compile(r"\baoti_torch_\w*?_((?:\w*mm\w*|mkl_\w*linear|\w*linear_pointwise\w*|\w*matmul\w*))\(")
TRITON_TEMPLATE = "triton_tem_"
"""How names of Triton's template kernels begin."""

_GPU_TEMPLATES = (TRITON_TEMPLATE, "cutlass_")


def cpp_program(source: str) -> CppProgram:
    """Read a program of AOTInductor's, or one behind Inductor's C++ wrapper."""
    kernels: dict[str, bool] = {}
    for match in _CPP_KERNEL.finditer(source):
        name = match["cpp"] or match["gpu"]
        if match["cpp"]:
            kernels[name] = bool(re.search(rf"\b{name}\w*micro_gemm|\b{name}\w*brgemm", source))
        elif re.search(rf"\b(?:call_|kernels\.)?{name}\(|kernels\.{name}\b", source):
            kernels[name] = name.startswith(_GPU_TEMPLATES)
    calls = tuple(name for name in _CPP_CALL.findall(source) if name in kernels)
    return CppProgram(kernels, calls, tuple(dict.fromkeys(_CPP_FOREIGN.findall(source))))
