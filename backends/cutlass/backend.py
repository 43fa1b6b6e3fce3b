"""``cutlass``: Inductor's CUTLASS C++ templates on a CUDA device, compiled by nvcc."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
import shutil
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytest_gemm.api.protocols import Availability, Recipe, no_device
from pytest_gemm.api.request import DEFAULT, BuildRequest, Selection
from pytest_gemm.api.settings import Setting, folder, matching, natural
from pytest_gemm.backends.inductor.backend import InductorBackend, cache_dir, installed
from pytest_gemm.core.case_id import Device
from pytest_gemm.core.outcome import Pruned, Unsupported
from pytest_gemm.machine import software
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.problem.problem import Problem
from pytest_gemm.storage import cache, kernel_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_gemm.backends.inductor.artifact import Artifact
    from pytest_gemm.operands.tensors import Operands

# Of the kernels that Inductor offers for sm_90; those of one byte an element have 128.
_SHORTEST_K_TILE = 64


def nvcc() -> str | None:
    """Path of the CUDA compiler, ``None`` without one: ``CUDACXX``, that of ``CUDA_HOME``, or the one on the path."""
    if (mine := os.environ.get("CUDACXX")) and (found := shutil.which(mine)):
        return found
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if root and (Path(root) / "bin" / "nvcc").is_file():
            return str(Path(root) / "bin" / "nvcc")
    return shutil.which("nvcc")


def curand_headers(compiler: str) -> str | None:
    """Folder of ``curand_kernel.h``, which CUTLASS includes and a toolkit may come without.

    Args:
        compiler: path of nvcc.

    Returns:
        "" where the toolkit has it, the folder in the wheel nvidia-curand otherwise, ``None`` without either.
    """
    root = Path(compiler).resolve().parents[1]
    places = [root / "include", *root.glob("targets/*/include"), *map(Path, os.environ.get("CPATH", "").split(":"))]
    if any((place / "curand_kernel.h").is_file() for place in places):
        return ""
    for name in ("nvidia-curand", "nvidia-curand-cu13", "nvidia-curand-cu12"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            for file in metadata.files(name) or ():
                if file.name == "curand_kernel.h":
                    return str(Path(str(file.locate())).parent)
    return None


def _wheel_source() -> Path | None:
    """``cutlass_library/source`` of the wheel nvidia-cutlass, which carries headers and generators."""
    spec = importlib.util.find_spec("cutlass_library")
    if spec is None or not spec.submodule_search_locations:
        return None
    source = Path(next(iter(spec.submodule_search_locations))) / "source"
    return source if (source / "include").is_dir() else None


@functools.cache
def _setup() -> kernel_store.Toolchain:
    """The compiler and the headers that :func:`cutlass_tree` leads to.  Only valid where ``compiles_ahead()`` is ok."""
    compiler = nvcc()
    assert compiler is not None
    mine, wheel = os.environ.get("TORCHINDUCTOR_CUTLASS_DIR", ""), dict(installed("nvidia-cutlass"))
    headers = kernel_store.headers_version(Path(mine), "" if mine else wheel.get("nvidia-cutlass", "?"))
    if not (version := software.nvcc(compiler)):
        raise kernel_store.CompilerError(f"{compiler} --version does not name a version: give another one as CUDACXX")
    return kernel_store.Toolchain(compiler, version, headers, curand_headers(compiler) or "")


def kernel_cache_dir() -> Path:
    """Where compiled kernels are kept by content: beside Inductor's caches, and for every version of torch."""
    return cache.use() / "cutlass-kernels"


def cutlass_tree() -> Path | None:
    """A directory that Inductor takes for a checkout of CUTLASS; ``None`` where nothing can be made into one.

    ``TORCHINDUCTOR_CUTLASS_DIR`` where it is set; otherwise links into the installed wheel, made below
    ``backends.inductor.cache_dir``.
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


# How the names end of kernels that need no TMA.  Rows of f16 begin at multiples of 4 or 8 bytes, those of int8 as well.
_CP_ASYNC: Final = "align4_cpasync_warpspecialized_cooperative_epi_nosmem"


def _expression(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return text


_architecture = matching(r"[1-9][0-9]{1,2}[af]?", "give it as nvcc does without sm_, 90a for instance")


class CutlassBackend(InductorBackend):
    """The CUTLASS templates alone, held to TMA warp-specialised kernels.

    Attributes:
        allowlist: pattern that a configuration's name must match.  Without one Inductor comes to the kernels that
            copy with ``cp.async`` first.
        architecture: to compile for ahead of the tests, ``90a``; "" for the device's.
        kernel_cache: where compiled kernels are kept; ``None`` takes :func:`kernel_cache_dir`.
        compilers: that run at a time ahead of the tests; 0: one for each core.
    """

    name: str = "cutlass"
    inductor_name: str = "CUTLASS"
    devices: tuple[str, ...] = ("cuda",)
    selection: Selection = Selection.ONE
    device_kernel: str = r"\bcutlass(?:::device_kernel|::Kernel|3x_)"
    variety: int = 20  # the quick level then meets some fifty configurations in about 180 kernels
    settings: Mapping[str, Setting] = {
        "allow": Setting(
            "", "REGEX", "which configurations are candidates; default: those that load with TMA", _expression
        ),
        "arch": Setting("", "ARCH", "to compile for, for instance 90a; default: the device's", _architecture),
        "cache": Setting("", "DIR", "folder of compiled kernels, by content; valid on another machine, too", folder),
        "jobs": Setting("", "N", "compilers at a time; default: one for each core", natural),
    }
    rules = ("inductor-on-cuda", "cutlass", "tma", "scaled")
    allowlist: str = r"align(8|16)_.*warpspecialized.*epi_tma"
    architecture: str = ""
    kernel_cache: Path | None = None
    compilers: int = 0

    def configure(self, values: Mapping[str, Any]) -> None:
        """Take the settings."""
        self.allowlist = values["allow"] or type(self).allowlist
        self.architecture, self.kernel_cache, self.compilers = values["arch"], values["cache"], values["jobs"]

    @functools.cached_property
    def store(self) -> kernel_store.Store:
        """The compiled kernels of this process and of all before it."""
        return kernel_store.Store(self.kernel_cache or kernel_cache_dir())

    def rules_for(self, problem: Problem) -> tuple[str, ...]:
        """Without TMA's own where kernels that copy with ``cp.async`` may be candidates: Inductor knows which fit."""
        return tuple(group for group in self.rules if group != "tma" or not re.search(self.allowlist, _CP_ASYNC))

    def availability(self, device: str) -> Availability:
        """A CUDA device, nvcc, and CUTLASS's sources."""
        reason, ahead = no_device(self.name, self.devices, device), self.installation()
        if reason and reason.code == "no-cuda-device" and ahead.ok:
            here = "--gemm-compile-only --gemm-set=cutlass.arch=90a compiles its kernels here, for a Hopper"
            reason = dataclasses.replace(reason, remedy=f"{reason.remedy}; {here}")
        return Availability(reason) if reason else ahead

    def compiles_ahead(self) -> Availability:
        """Whether kernels can be compiled here, which needs no device."""
        return self.installation()

    def installation(self) -> Availability:
        """What compiling needs: nvcc, and CUTLASS's sources."""
        compiler = nvcc()
        if compiler is None:
            return Availability.lacking(
                "no-nvcc", "there is no nvcc", "install the CUDA toolkit, or set CUDA_HOME to one"
            )
        if curand_headers(compiler) is None:
            return Availability.lacking(
                "no-curand",
                f"the CUDA toolkit of {compiler} has no curand_kernel.h, which CUTLASS includes",
                "install the toolkit's development package of cuRAND, or pip install nvidia-curand",
            )
        if not os.environ.get("TORCHINDUCTOR_CUTLASS_DIR") and _wheel_source() is None:
            return Availability.lacking(
                "no-cutlass",
                "the wheel nvidia-cutlass is not installed",
                "pip install nvidia-cutlass==4.2.0.0, or set TORCHINDUCTOR_CUTLASS_DIR to a checkout",
            )
        return Availability(versions=(("nvcc", compiler), *installed("nvidia-cutlass")))

    def options(self, problem: Problem, request: BuildRequest = DEFAULT) -> dict[str, Any]:
        """With epilogue fusion on, and the tree that Inductor takes for a checkout."""
        from pytest_gemm.backends.inductor import torch_compat

        own: dict[str, Any] = {
            "cutlass_dir": str(cutlass_tree()),
            "cutlass_epilogue_fusion_enabled": True,
            "cutlass_op_allowlist_regex": self.allowlist,
            "cutlass_max_profiling_swizzle_options": [1],  # another order of the tiles runs the same kernel
        }
        # The compiler that availability() has found: by itself Inductor does without /usr/local/cuda.
        options = {**super().options(problem, request), "cuda.cuda_cxx": nvcc()}
        # An epilogue is fused into the chosen kernel only where Inductor does not defer the choice to benchmark both.
        options[torch_compat.option("benchmark_template_fusion", "benchmark_epilogue_fusion")] = False
        options.update((torch_compat.option(f"cutlass.{name}", f"cuda.{name}"), value) for name, value in own.items())
        if self.selects(request) == Selection.WINNER:
            # One kernel takes nvcc half a minute or more on a core.
            options["compile_threads"] = max(1, (os.cpu_count() or 2) // 2)
        return options

    def recipe(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> Recipe:
        """As for every backend of Inductor, without folders of this machine."""
        found = super().recipe(problem, operands, request)
        options = {name: value for name, value in found.options.items() if not name.endswith(".cutlass_dir")}
        needs = ("nvcc, CUTLASS's sources in TORCHINDUCTOR_CUTLASS_DIR",)
        return dataclasses.replace(found, options=options, needs=needs)

    def contract(self, problem: Problem, artifact: Artifact | None) -> Contract:
        """With the slices of stream-K, where the kernel is one of these.

        Stream-K gives the tiles of K that belong to one tile of the result to several groups of threads, and adds
        their sums in f32, in a fixed order (``ReductionMode::Deterministic``; the output's type never comes in
        between).  How many there are depends on the number of multiprocessors and on the grid; there are no more
        than tiles of K, of which the shortest has 64 elements.  So S = ceil(K / 64), and the bound grows by
        (S - 1) 2^-24 of the gauge: for each 64 products by one addition, an eighth of what truncation adds to them.
        """
        found = super().contract(problem, artifact)
        if artifact is None or any("stream_k" in name for name in artifact.chosen):
            found = dataclasses.replace(found, slices=max(found.slices, -(-problem.shape.k // _SHORTEST_K_TILE)))
        return found

    # -- compiling ---------------------------------------------------------------------------------------

    def artifact(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> Artifact:
        """As for every backend of Inductor, with kernels out of the :attr:`store`."""
        from pytest_gemm.backends.cutlass import compat

        with compat.stored(self.store, _setup()):
            return super().artifact(problem, operands, request)

    def jobs(
        self,
        problem: Problem,
        request: BuildRequest,
        architecture: str,
        select: Callable[[tuple[str, ...]], tuple[str, ...]] | None = None,
    ) -> list[kernel_store.Job]:
        """The kernels that the problem needs when it is prepared; compiles nothing.

        It needs no GPU.  For a process of its own, see ``backends.cutlass.compat.collecting``.

        Args:
            problem: one that :meth:`supports`.
            request: how it will be prepared.
            architecture: as nvcc has it, ``90a``.
            select: which of the candidates will be prepared, by name; ``None``: what :meth:`prepare` selects.

        Raises:
            Unsupported: when Inductor has no candidate.
        """
        from pytest_gemm.backends.cutlass import compat

        operands = _without_memory(problem)
        with compat.collecting(architecture, self.store, _setup()) as seen:
            names = ("",) if select is None else select(self.candidates(problem, operands, request).names)
            for name in names:
                before = len(seen)
                try:
                    with contextlib.suppress(Pruned), compat.to_the_end():
                        self.prepare(problem, operands, request.replace(candidate=name))
                except Unsupported:
                    raise
                except Exception:  # of the compiler under test
                    # A real compile fails there too, with the candidate compiled by then: it is wanted all the same.
                    if len(seen) == before:
                        raise
        return list(dict.fromkeys(seen))


def _without_memory(problem: Problem) -> Operands:
    """Operands of a problem in their true geometry, as fake tensors on a CUDA device."""
    from pytest_gemm.backends.cutlass import compat
    from pytest_gemm.operands import tensors as factory
    from pytest_gemm.operands.distributions import distributions_for

    made = factory.make(problem, distributions_for(problem)[0], 0)
    fields = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    return dataclasses.replace(made, **compat.faked({**fields, "device": Device.CUDA, "buffers": ()}))
