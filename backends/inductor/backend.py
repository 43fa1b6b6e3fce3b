"""Inductor with one backend forced: what the backends ``cpp``, ``triton``, ``cutlass`` and ``nvgemm`` share.

ATen is never among the candidates, so where the backend has none the problem is unsupported instead of computed by
another library; and where Inductor falls back all the same, the proof shows it.  No torch is imported before
something is to be compiled.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import fnmatch
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pytest_gemm.api.protocols import Availability, Candidates, Recipe
from pytest_gemm.api.request import DEFAULT, BuildRequest, Capability, Selection
from pytest_gemm.backends import tensor_core
from pytest_gemm.backends.inductor import naming
from pytest_gemm.backends.inductor.compilation import CompileLog, CompileSpec
from pytest_gemm.backends.rules import check
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.outcome import Reason, Unsupported
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import StepKind
from pytest_gemm.storage import cache

if TYPE_CHECKING:
    import torch

    from pytest_gemm.backends.inductor.artifact import Artifact, InductorPrepared
    from pytest_gemm.operands.tensors import Operands

_T = TypeVar("_T")

# The M at which a m.dynamic artifact is compiled, whatever M comes first: a single rerun then compiles
# the very same kernel.  No dimension of a test is likely to equal it by chance.
DYN_M_HINT = 61

# Inductor's options of a mode; aoti and dynamic are set where the program is handed over.
_MODE_OPTIONS: Mapping[str, dict[str, Any]] = {
    "cudagraphs": {"triton.cudagraphs": True},
    "cpp-wrapper": {"cpp_wrapper": True},
}

_RECIPES: Mapping[str, Literal["dynamic", "aoti"]] = {"dynamic": "dynamic", "aoti": "aoti"}

# What the backends on CUDA set beside their own.  No freezing: constants are not packed on a GPU, and a user's
# parameters are arguments there.  No padding of odd sizes: it depends on a benchmark, and it would keep every tail away
# from the kernels under test.  No decompose-K: its product is one of cuBLAS, and where it applies Inductor offers no
# template beside it.
_CUDA_OPTIONS: Mapping[str, Any] = {"freezing": False, "shape_padding": False, "triton.num_decompose_k_splits": 0}

_KEPT_ARTIFACTS = 16
# Artifacts of single candidates that are kept: those for any M, which many problems share.
_KEPT_CANDIDATES = 64
# Lists of candidates that are kept, by the problem's geometry.
_KEPT_LISTS = 256


@dataclasses.dataclass(frozen=True)
class Space:
    """A set of candidates that Inductor offers under certain options.

    Attributes:
        suffix: what distinguishes their names from the same ones in another space, "" for the space that comes first.
        only: pattern of the names that count; the others belong to another space.
        options: beside the backend's own, as a tuple of pairs.
    """

    suffix: str = ""
    only: str = "*"
    options: tuple[tuple[str, Any], ...] = ()


def cache_dir(isa: str = "") -> Path:
    """Where compiled kernels are kept.

    ``TORCHINDUCTOR_CACHE_DIR`` where the user has set it, otherwise ``inductor-<torch version>`` in
    ``storage.cache.home``.

    Args:
        isa: instruction set that they are generated for, each of which has a folder of its own in there; "" for the
            machine's own.  Two of them may generate the same text, and Inductor's keys of a program are of its text.
    """
    from pytest_gemm.backends.inductor import torch_compat

    if mine := torch_compat.users_cache_dir():
        return Path(mine) / isa
    import torch

    return cache.use() / f"inductor-{torch.__version__}" / isa


class _Recent(OrderedDict[tuple[Any, ...], _T]):
    """The values that were used last, so many of them."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def obtain(self, key: tuple[Any, ...], make: Callable[[], _T]) -> _T:
        """The value that is kept under a key, or that is made now."""
        if key not in self:
            self[key] = make()
        self.move_to_end(key)
        found = self[key]
        while len(self) > self._most:
            self.popitem(last=False)
        return found


class InductorBackend(abc.ABC):
    """One backend of Inductor's autotuning, alone.

    Subclasses declare their name, where they can run and what they support.

    Args:
        threads: number of threads that generated CPU code uses (it is part of the code); ``None`` takes
            ``torch.get_num_threads()`` at the time of the compile.  It is set for the time of a run too.
        rebind: give new constants to a compiled program instead of compiling again, see ``artifact.py``.
        keep: how many artifacts of each kind of request to keep alive.
        selection: ``winner``: Inductor compiles and benchmarks every candidate and takes the fastest, as for a user;
            ``one``: a single candidate is compiled and nothing is benchmarked.  Which one follows from the problem's
            line alone, so that a rerun meets the same kernel and a matrix of problems meets many different ones.  A
            candidate that does not fit the device gives way to the next, see ``Artifact.pruned``.  "" takes the
            backend's own default.

    Attributes:
        name: what ``--gemm-backends`` takes.
        inductor_name: what ``max_autotune_gemm_backends`` takes.
        devices: where it computes.
        rules: what it does not support: groups of ``backends/rules.toml``.
        device_kernel: pattern of its kernels' names on the device; "" where they are those of the generated code.
        listing: candidates are listed for instruction sets that the CPU may not execute, and nothing can be compiled.
        variety: over how many of its candidates ``one`` spreads the problems.
    """

    name: str = ""
    inductor_name: str = ""
    devices: tuple[str, ...] = ("cuda",)
    rules: tuple[str, ...] = ()
    capabilities = frozenset({Capability.SELECTION, Capability.MODE, Capability.USER_CACHES})
    selection: Selection = Selection.WINNER
    device_kernel: str = ""
    variety: int = 1 << 31
    listing: bool = False

    def __init__(
        self, *, threads: int | None = None, rebind: bool = True, keep: int = _KEPT_ARTIFACTS, selection: str = ""
    ) -> None:
        self.threads = threads
        self.selection = Selection(selection) or type(self).selection
        self.rebind = rebind
        self._keep = keep
        self._begin()

    def _begin(self) -> None:
        """Set everything that is no setting: nothing has been compiled or listed."""
        self._log = CompileLog()
        # Artifacts of single candidates share a place, those of every other kind of request have one each.
        self._artifacts: defaultdict[BuildRequest, _Recent[Artifact]] = defaultdict(lambda: _Recent(self._keep))
        self._candidates: _Recent[Artifact] = _Recent(min(self._keep, 1) * _KEPT_CANDIDATES)
        self._lists: _Recent[Candidates] = _Recent(_KEPT_LISTS)

    def __getstate__(self) -> dict[str, Any]:
        """The settings: what was compiled belongs to this process."""
        return {
            name: vars(self)[name] for name in vars(self) if name not in {"log", "_artifacts", "_candidates", "_lists"}
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    # -- for subclasses ------------------------------------------------------------------------------

    def availability(self, device: str) -> Availability:
        """Whether it can run here: a device of its kind, and what :meth:`installation` looks for."""
        if device not in self.devices:
            return not_on(self.name, self.devices, device)
        if device == "cuda" and (reason := no_cuda()):
            return Availability(reason)
        return self.installation()

    @abc.abstractmethod
    def installation(self) -> Availability:
        """Whether the packages and tools that it needs are here."""

    def rules_for(self, problem: Problem) -> tuple[str, ...]:
        """The groups of rules that exclude problems of this op."""
        return self.rules

    def options(self, problem: Problem, request: BuildRequest = DEFAULT) -> dict[str, Any]:
        """Inductor's configuration for this problem, complete."""
        options: dict[str, Any] = {
            "max_autotune": True,
            "max_autotune_gemm_backends": self.inductor_name,
            "freezing": problem.frozen,
            # In this process: pytest-xdist has the cores, and a pool of compile workers costs seconds to start.
            "compile_threads": 1,
        }
        if self.threads is not None:
            options["cpp.threads"] = self.threads
        if self.devices == ("cuda",):
            options |= _CUDA_OPTIONS
        return options

    def wanted(self, problem: Problem) -> str:
        """Pattern of the one candidate that has to have computed the problem, see ``Proof``; "" for any."""
        return ""

    def spaces(self, problem: Problem) -> tuple[Space, ...]:
        """Where all candidates of a problem come from; ``prepare`` selects from the first."""
        return (Space(),)

    def contract(self, problem: Problem, artifact: Artifact | None) -> Contract:
        """The arithmetic of the compiled problem.

        Where the template kernel is the last one, it has held the sum in f32 through the whole epilogue and has
        rounded once.  With another kernel after it, or before anything is compiled, the result may have been
        rounded in between.  So may a value that is tapped: the last step can go on from what was stored; and the
        products of ``concat``, which the program scales itself: a pass may put that product into the kernel.
        """
        casts = any(step.kind is StepKind.CAST for step in problem.epilogue)  # the graph determines where to round
        fused = artifact is not None and artifact.fused and not casts and not problem.has("program.multi_output")
        plain = not problem.passes and problem.step("bias") is None
        scales = problem.has("program.concat")
        return dataclasses.replace(self.sum(problem), epilogue="fused" if (fused or plain) and not scales else "either")

    def sum(self, problem: Problem) -> Contract:
        """The arithmetic of the sum of products alone."""
        from pytest_gemm.numerics.precision import as_allowed

        return tensor_core.contract(problem) if self.devices == ("cuda",) else as_allowed(Contract("f32"), problem)

    # -- the protocol ----------------------------------------------------------------------------------

    def supports(self, problem: Problem, request: BuildRequest = DEFAULT) -> Unsupported | None:
        """What no rule excludes, in a mode that compiled programs have."""
        return check(("inductor", "any-m", *self.rules_for(problem)), problem, request)

    def prepare(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> InductorPrepared:
        """Compile the problem, or take the artifact that has been compiled for it.

        Raises:
            Unsupported: when Inductor has no candidate of this backend, or none of the requested name.
            Pruned: when the candidate, or every one that was tried, does not compile for this device or fit it.
        """
        from pytest_gemm.backends.inductor.artifact import InductorPrepared

        artifact = self.artifact(problem, operands, request)
        return InductorPrepared(problem, artifact, self.contract(problem, artifact))

    def candidates(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> Candidates:
        """All candidates that Inductor has for the problem, in its order.

        Raises:
            Unsupported: when it has none.
        """
        names: list[str] = []
        unsupported: dict[str, Reason] = {}
        for space in self.spaces(problem):
            listed = self._list(problem, operands, request, space)
            names += listed.names
            unsupported |= listed.unsupported
        if not names:
            raise Unsupported("no-candidate", f"Inductor has no {self.inductor_name} candidate for {problem}")
        return Candidates(tuple(names), unsupported=unsupported)

    def recipe(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> Recipe:
        """How PyTorch alone compiles the problem with this candidate."""
        from pytest_gemm.backends.inductor import cpu_isa
        from pytest_gemm.backends.inductor.bindings import constant_names, m_dimensions

        name = request.candidate
        spec = self._spec(problem, request, self._space_of(problem, operands, request) if name else Space())
        dynamic = problem.has("m.dynamic")
        return Recipe(
            how=_RECIPES.get(request.mode, "compile"),
            options={**spec.options, **naming.forcing(name)},
            constants=tuple(sorted(constant_names(problem))) if spec.options.get("freezing") else (),
            dynamic=m_dimensions(problem) if dynamic else {},
            hint=DYN_M_HINT if dynamic else 0,
            caches=bool(request.user_caches),
            threads=spec.threads,
            setup=cpu_isa.isa_setup(request.isa),
        )

    # -- building --------------------------------------------------------------------------------------

    def selects(self, request: BuildRequest) -> Selection:
        """How the one candidate is selected."""
        return request.selection or self.selection

    def artifact(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> Artifact:
        """The compiled program of a problem; the same one for the same problem, geometry and request."""
        from pytest_gemm.backends.inductor.artifact import Artifact

        first, tensors = self._first(problem, operands)
        name = request.candidate

        def compiled() -> Artifact:
            if name:
                space = self._space_of(problem, operands, request)
                candidate: int | str | None = name.removesuffix(space.suffix)
            else:
                space = Space()
                by_line = zlib.crc32(first.line.encode()) % self.variety
                candidate = by_line if self.selects(request) == Selection.ONE else None
            spec = dataclasses.replace(self._spec(problem, request, space), candidate=candidate)
            return Artifact(first, tensors, spec)

        if request.user_caches or (name and not problem.has("m.dynamic")):
            return compiled()  # its caller holds it, and no other problem has a use for it
        request = request.replace(selection=self.selects(request))
        kept = self._candidates if name else self._artifacts[request]
        return kept.obtain((request, *self._key(first, tensors)), compiled)

    def _first(self, problem: Problem, operands: Operands) -> tuple[Problem, dict[str, torch.Tensor]]:
        """The problem whose program is compiled, and tensors of its geometry: for ``m.dynamic`` another M."""
        from pytest_gemm.programs import program

        tensors = program.args(problem, operands)
        if not problem.has("m.dynamic"):
            return problem, tensors
        return problem.with_m(DYN_M_HINT), self._at_hint(problem, tensors)

    def _key(self, first: Problem, tensors: dict[str, torch.Tensor]) -> tuple[Any, ...]:
        return (first.line, self._threads(), tuple((n, t.shape, t.stride()) for n, t in tensors.items()))

    def _spec(self, problem: Problem, request: BuildRequest, space: Space) -> CompileSpec:
        """How to compile the problem with the candidates of ``space``, benchmarking them."""
        return CompileSpec(
            self.inductor_name,
            self.options(problem, request) | dict(space.options) | _MODE_OPTIONS.get(request.mode, {}),
            str(cache_dir(request.isa)),
            threads=self._threads(),
            request=request,
            rebind=self.rebind and not request.user_caches,
            device_kernel=self.device_kernel,
            wanted=self.wanted(problem),
            beyond=self.listing,
            log=self._log,
        )

    def _list(self, problem: Problem, operands: Operands, request: BuildRequest, space: Space) -> Candidates:
        """The candidates of one space, none where it has none."""
        from pytest_gemm.backends.inductor import artifact

        first, tensors = self._first(problem, operands)
        request = request.replace(candidate="")
        key = (space, request, *self._key(first, tensors))
        spec = self._spec(problem, request, space)
        found = self._lists.obtain(key, lambda: artifact.list_candidates(first, tensors, spec))
        names = (f"{name}{space.suffix}" for name in found.names if fnmatch.fnmatchcase(name, space.only))
        return dataclasses.replace(found, names=tuple(names))

    def _space_of(self, problem: Problem, operands: Operands, request: BuildRequest) -> Space:
        """Where the requested candidate comes from.

        Raises:
            Unsupported: when there is none of this name.
        """
        spaces, name = self.spaces(problem), request.candidate
        if len(spaces) == 1:
            return spaces[0]  # whether it has this candidate shows when it is compiled
        for space in spaces:
            if name in self._list(problem, operands, request, space).names:
                return space
        raise Unsupported("unknown-candidate", f"Inductor has no {self.inductor_name} candidate {name} for {problem}")

    @property
    def log(self) -> CompileLog:
        """What has been compiled."""
        return self._log

    def _threads(self) -> int:
        import torch

        return self.threads or torch.get_num_threads()

    @staticmethod
    def _at_hint(problem: Problem, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors with M at :data:`DYN_M_HINT`: contents do not matter, only the geometry does."""
        from pytest_gemm.backends.inductor.bindings import m_dimensions

        dims = m_dimensions(problem)
        m = problem.shape.m
        found = {}
        for name, tensor in tensors.items():
            if name not in dims:
                found[name] = tensor
                continue
            shape = list(tensor.shape)
            shape[dims[name]] = DYN_M_HINT
            stride = _strides_at(tensor, dims[name], m)
            extent = tensor.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
            storage = tensor.new_zeros(extent)  # of its kind: a tensor without memory stays one
            found[name] = storage.as_strided(shape, stride, tensor.storage_offset())
        return found


def _strides_at(tensor: torch.Tensor, dim: int, m: int) -> list[int]:
    """Strides of ``tensor`` when its dimension ``dim`` has :data:`DYN_M_HINT` elements instead of ``m``.

    A stride that spans the dimension grows with it: by whole multiples of ``m`` steps of the dimension, or of the next
    smaller stride that spans it, plus what padding there was.
    """
    step = tensor.stride(dim)
    found = list(tensor.stride())
    old, new = m * step, DYN_M_HINT * step
    for place in sorted(range(tensor.dim()), key=tensor.stride):
        stride = tensor.stride(place)
        # Another dimension steps over all of this one: (K, M).T has strides (1, M), a batch has M * row, or K * M.
        if stride >= m * step > 0 and stride != step and tensor.shape[place] > 1:
            found[place] = stride // old * new + stride % old
            old, new = stride, found[place]
    return found


def not_on(name: str, devices: tuple[str, ...], device: str) -> Availability:
    """A backend that does not compute on a device."""
    own = " and ".join(devices)
    article = "the " if own == "cpu" else ""
    return Availability.lacking(
        "device", f"{name} computes on {article}{own}, not on {device}", f"--gemm-device={devices[0]}"
    )


def no_cuda() -> Reason | None:
    """Why there is no CUDA device here, from the cheapest facts on: device files first, torch last."""
    import shutil

    if not any(Path("/dev").glob("nvidia[0-9]*")) and shutil.which("nvidia-smi") is None:
        return Reason("no-cuda-device", "there is no CUDA device", "run on a machine with an NVIDIA GPU and its driver")
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        if built is None:
            return Reason(
                "no-cuda-torch",
                f"torch {torch.__version__} is built without CUDA",
                "install a build of PyTorch for CUDA",
            )
        return Reason("no-cuda-device", "PyTorch sees no CUDA device", "check nvidia-smi and CUDA_VISIBLE_DEVICES")
    return None


def installed(*distributions: str) -> tuple[tuple[str, str], ...]:
    """Versions of installed distributions, for a report; what is not installed is left out."""
    from importlib import metadata

    found = []
    for name in distributions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append((name, metadata.version(name)))
    return tuple(found)
