"""``cutlass``: Inductor's CUTLASS C++ templates on a CUDA device, compiled by nvcc."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

from pytest_gemm.backend import Availability, Contract, Unsupported
from pytest_gemm.backends import tensor_core
from pytest_gemm.backends.inductor import (
    InductorBackend,
    cache_dir,
    cuda_options,
    has_no_kernel,
    installed,
    no_cuda,
    unclaimed,
)
from pytest_gemm.outcome import Reason
from pytest_gemm.problem import Problem

__all__ = ["CutlassBackend", "cutlass_tree", "nvcc"]


def nvcc() -> str | None:
    """Path of the CUDA compiler that Inductor would call, ``None`` without one."""
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if root and (Path(root) / "bin" / "nvcc").is_file():
            return str(Path(root) / "bin" / "nvcc")
    return shutil.which("nvcc")


def _wheel_source() -> Path | None:
    """``cutlass_library/source`` of the wheel nvidia-cutlass, which carries headers and generators."""
    spec = importlib.util.find_spec("cutlass_library")
    if spec is None or not spec.submodule_search_locations:
        return None
    source = Path(next(iter(spec.submodule_search_locations))) / "source"
    return source if (source / "include").is_dir() else None


def cutlass_tree() -> Path | None:
    """A directory that Inductor takes for a checkout of CUTLASS; ``None`` where nothing can be made into one.

    ``TORCHINDUCTOR_CUTLASS_DIR`` where it is set; otherwise links into the installed wheel, made below
    :func:`~pytest_gemm.backends.inductor.cache_dir`.
    """
    if mine := os.environ.get("TORCHINDUCTOR_CUTLASS_DIR"):
        return Path(mine) if (Path(mine) / "include").is_dir() else None
    source = _wheel_source()
    if source is None:
        return None
    tree = cache_dir() / "cutlass-tree"
    tree.mkdir(parents=True, exist_ok=True)
    links = {name: source / name for name in ("include", "tools", "examples")}
    # Inductor puts python/ on the path to import cutlass_library, cutlass_cppgen and pycute from it.
    links["python"] = source.parents[1]
    for name, target in links.items():
        link = tree / name
        if link.is_symlink() and link.readlink() != target:
            link.unlink()
        if not link.is_symlink():
            with contextlib.suppress(FileExistsError):  # another worker was faster
                link.symlink_to(target)
    return tree


class CutlassBackend(InductorBackend):
    """The CUTLASS templates alone, held to TMA warp-specialised kernels.

    Attributes:
        allowlist: pattern that a configuration's name must match.  Without one Inductor comes to the kernels that
            copy with ``cp.async`` first.
        swizzles: orders of the tiles to offer.
    """

    name: str = "cutlass"
    inductor_name: str = "CUTLASS"
    devices: tuple[str, ...] = ("cuda",)
    candidates: str = "one"
    variety: int = 3  # nvcc takes half a minute or more for each; problems of a layout share a kernel
    allowlist: str = r"align(8|16)_.*warpspecialized.*epi_tma"
    swizzles: tuple[int, ...] = (1,)

    def availability(self, device: str) -> Availability:
        """A CUDA device, nvcc, and CUTLASS's sources."""
        if device != "cuda":
            return Availability(Reason("device", f"cutlass computes on cuda, not on {device}", "--gemm-device=cuda"))
        if reason := no_cuda():
            return Availability(reason)
        compiler = nvcc()
        if compiler is None:
            return Availability(
                Reason("no-nvcc", "there is no nvcc", "install the CUDA toolkit, or set CUDA_HOME to one")
            )
        if not os.environ.get("TORCHINDUCTOR_CUTLASS_DIR") and _wheel_source() is None:
            return Availability(
                Reason(
                    "no-cutlass",
                    "the wheel nvidia-cutlass is not installed",
                    "pip install nvidia-cutlass==4.2.0.0, or set TORCHINDUCTOR_CUTLASS_DIR to a checkout",
                )
            )
        return Availability(versions=(("nvcc", compiler), *installed("nvidia-cutlass")))

    def supports(self, problem: Problem) -> Unsupported | None:
        """f16 and bf16 products, and int8 to int32 with B column-major, where TMA can load the operands.

        TMA needs every row (or column, for a transposed view) to begin at a multiple of 16 bytes.
        """
        if refusal := unclaimed(problem) or has_no_kernel(problem, "cuda"):
            return refusal
        op, out = problem.op.name, problem.dtypes.out.name
        if op in {"woq_int8", "baddbmm"}:
            return Unsupported("op", f"Inductor's lowering of {op} has no CUTLASS candidate")
        if out not in {"f16", "bf16", "i32"}:
            return Unsupported("dtype", f"Inductor's CUTLASS templates write f16, bf16 and i32, not {out}")
        if problem.shape.is_empty or problem.shape.k == 0:
            return Unsupported("empty", "Inductor asks CUTLASS for products that are not empty only")
        if problem.has("dyn-m") and op == "int_mm":
            return Unsupported("dyn-m", "Inductor asks CUTLASS for int_mm at static shapes only")
        if op == "int_mm" and (not problem.layout.b_transposed or problem.layout.a_transposed):
            return Unsupported(
                "layout", "int8 tensor core kernels need A row-major and B column-major", "use layout nt"
            )
        return tensor_core.unaligned(problem)

    def options(self, problem: Problem) -> dict[str, Any]:
        """With epilogue fusion on, and the tree that Inductor takes for a checkout."""
        from pytest_gemm.backends import torch_compat

        own: dict[str, Any] = {
            "cutlass_dir": str(cutlass_tree()),
            "cutlass_epilogue_fusion_enabled": True,
            "cutlass_op_allowlist_regex": self.allowlist,
            "cutlass_max_profiling_swizzle_options": list(self.swizzles),
        }
        options = {**super().options(problem), **cuda_options()}
        # An epilogue is fused into the chosen kernel only where Inductor does not defer the choice to benchmark both.
        options["benchmark_epilogue_fusion"] = False
        options.update((torch_compat.option(f"cutlass.{name}", f"cuda.{name}"), value) for name, value in own.items())
        if self.candidates == "all":
            # One kernel takes nvcc half a minute or more on a core.
            options["compile_threads"] = max(1, (os.cpu_count() or 2) // 2)
        return options

    def sum(self, problem: Problem) -> Contract:
        """Tensor cores into f32, or int8 into int32."""
        return tensor_core.contract(problem)
