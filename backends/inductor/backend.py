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
import itertools
import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pytest_gemm.api.protocols import Availability, Candidates, Recipe, no_device
from pytest_gemm.api.request import DEFAULT, BuildRequest, Capability, Selection
from pytest_gemm.backends.inductor import naming
from pytest_gemm.backends.inductor.compilation import CompileLog, CompileSpec, Wanted
from pytest_gemm.backends.rules import check
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.machine import software
from pytest_gemm.machine.code_key import code_key
from pytest_gemm.numerics import tensor_core
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.problem.problem import HINTS, Problem
from pytest_gemm.storage import cache

if TYPE_CHECKING:
    import torch

    from pytest_gemm.backends.inductor.artifact import Artifact, InductorPrepared
    from pytest_gemm.operands.tensors import Operands

_T = TypeVar("_T")

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
        multiprocessors: how many the GPU is taken to have; 0: its own number.  Persistent kernels are named by it.
    """

    suffix: str = ""
    only: str = "*"
    options: tuple[tuple[str, Any], ...] = ()
    multiprocessors: int = 0


def cache_dir(isa: str = "") -> Path:
    """Where compiled kernels are kept.

    Below ``TORCHINDUCTOR_CACHE_DIR`` where the user has set it, otherwise below ``inductor-<torch version>`` in
    ``storage.cache.home``: a folder for what Inductor's keys do not have, see ``machine.code_key``, so that a kernel of
    another CPU, compiler or torch is compiled again.

    Args:
        isa: instruction set that they are generated for, each of which has a folder of its own in there; "" for the
            machine's own.  Two of them may generate the same text, and Inductor's keys of a program are of its text.
    """
    from pytest_gemm.backends.inductor import torch_compat

    if mine := torch_compat.users_cache_dir():
        return Path(mine) / code_key() / isa
    import torch

    return cache.use() / f"inductor-{torch.__version__}" / code_key() / isa


class _Recent:
    """The values that were used last, so many of each kind; a pickled one is empty.

    Attributes:
        waiting: programs that were generated ahead, see :meth:`CppBackend.compile_together`.
    """

    def __init__(self) -> None:
        self._kinds: defaultdict[Hashable, dict[Hashable, Any]] = defaultdict(dict)
        self.waiting: dict[Hashable, Artifact] = {}

    def __reduce__(self) -> tuple[type[_Recent], tuple[()]]:
        return _Recent, ()

    def obtain(self, kind: Hashable, most: int, key: Hashable, make: Callable[[], _T]) -> _T:
        """The value that is kept under a key, or that is made now."""
        values = self._kinds[kind]
        found: _T = values.pop(key) if key in values else make()
        values[key] = found
        while len(values) > most:
            del values[next(iter(values))]
        return found


class InductorBackend(abc.ABC):
    """One backend of Inductor's autotuning, alone.

    Subclasses declare their name, where they can run and what they support.

    Args:
        threads: number of threads that generated CPU code uses (it is part of the code); ``None`` takes
            ``torch.get_num_threads()`` at the time of the compile.  It is set for the time of a run too.

    Attributes:
        log: what has been compiled.
        name: what ``--gemm-backends`` takes.
        inductor_name: what ``max_autotune_gemm_backends`` takes.
        devices: where it computes.
        rules: what it does not support: groups of ``backends/rules.toml``.
        selection: how a candidate is selected where the request leaves it open.  ``winner``: Inductor compiles and
            benchmarks every candidate and takes the fastest, as for a user; ``one``: a single candidate is compiled and
            nothing is benchmarked.  Which one follows from the problem's line alone, so that a rerun meets the same
            kernel and a matrix of problems meets many different ones.  A candidate that does not fit the device gives
            way to the next, see ``Prepared.pruned``.
        device_kernel: pattern of its kernels' names on the device; "" where they are those of the generated code.
        variety: over how many of its candidates ``one`` spreads the problems.
        keep: how many artifacts of each kind of request to keep alive.
    """

    name: str = ""
    inductor_name: str = ""
    devices: tuple[str, ...] = ("cuda",)
    rules: tuple[str, ...] = ()
    capabilities = frozenset({Capability.SELECTION, Capability.MODE, Capability.USER_CACHES})
    selection: Selection = Selection.WINNER
    device_kernel: str = ""
    variety: int = 1 << 31
    constant_b = True
    keep: int = 16

    def __init__(self, *, threads: int | None = None) -> None:
        self.threads = threads
        self.log = CompileLog()
        self._recent = _Recent()

    # -- for subclasses ------------------------------------------------------------------------------

    def availability(self, device: str) -> Availability:
        """Whether it can run here: a device of its kind, and what :meth:`installation` looks for."""
        reason = no_device(self.name, self.devices, device)
        return Availability(reason) if reason else self.installation()

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

    def space_of_one(self, problem: Problem, by_line: int, request: BuildRequest = DEFAULT) -> Space:
        """Where the one candidate of a problem comes from that a number made of its line selects."""
        return Space()

    def by_line(self, problem: Problem) -> int:
        """The number that is made of the line of a problem's program."""
        return zlib.crc32(problem.at_hints.line.encode()) % self.variety

    def contract(self, problem: Problem, artifact: Artifact | None) -> Contract:
        """The arithmetic of the compiled problem.

        Where the template kernel is the last one, it has held the sum in f32 through the whole epilogue and has
        rounded once; where its text says so, before the first step too.  With another kernel after it, or before
        anything is compiled, the result may have been rounded in between.  So may an intermediate result: the last
        step can go on from what was stored; and the products of ``concat``, which the program scales itself: a pass
        may put that product into the kernel.
        """
        casts = len({*problem.value_dtypes}) > 1  # the graph determines where to round
        fused = artifact is not None and artifact.fused and not casts and not problem.has("program.multi_output")
        plain = not problem.passes and problem.step("bias") is None
        scales = problem.has("program.concat") or problem.has("program.pt2e")
        if not (fused or plain) or scales:
            return dataclasses.replace(self.sum(problem), epilogue="either")
        found = dataclasses.replace(self.sum(problem), epilogue="fused")
        if artifact is None or not problem.passes:
            return found
        from pytest_gemm.backends.inductor import triton_code

        return triton_code.placed(found, problem, artifact.source)

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
        names = [name for space in self.spaces(problem) for name in self._list(problem, operands, request, space)]
        if not names:
            raise Unsupported("no-candidate", f"Inductor has no {self.inductor_name} candidate for {problem}")
        return Candidates(tuple(names))

    def recipe(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> Recipe:
        """How PyTorch alone compiles the problem with this candidate."""
        from pytest_gemm.backends.inductor import as_machine, cpu_isa
        from pytest_gemm.backends.inductor.bindings import constant_names, dynamic_dimensions, marking

        spec = self._spec(problem, request, self._selected(problem, operands, request)[0])
        return Recipe(
            how=_RECIPES.get(request.mode, "compile"),
            options={**spec.options, **naming.forcing(request.candidate)},
            constants=tuple(sorted(constant_names(problem))) if spec.options.get("freezing") else (),
            dynamic=dynamic_dimensions(problem),
            marked=marking(problem),
            hints={size: HINTS[size] for size in problem.dynamic},
            caches=bool(request.user_caches),
            threads=spec.threads,
            setup=(*cpu_isa.isa_setup(request.isa), *as_machine.setup(request.machine, spec.multiprocessors)),
        )

    # -- building --------------------------------------------------------------------------------------

    def selects(self, request: BuildRequest) -> Selection:
        """How the one candidate is selected."""
        return request.selection or self.selection

    def artifact(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> Artifact:
        """The compiled program of a problem; the same one for the same problem, geometry and request."""
        key, generated = self._program(problem, operands, request)

        def compiled() -> Artifact:
            with contextlib.suppress(Exception):  # compiled alone it fails as it does for a user
                if (waiting := self._recent.waiting.pop(key, None)) is not None:
                    waiting.finish()
                    return waiting
            made = generated()
            made.finish()
            return made

        name = request.candidate
        if request.user_caches or (name and not problem.dynamic):
            return compiled()  # its caller holds it, and no other problem has a use for it
        # Artifacts of single candidates share a place, those of every other kind of request have one each.
        kind, most = ("candidates", _KEPT_CANDIDATES) if name else (key[0], self.keep)
        return self._recent.obtain(kind, most, key, compiled)

    def _program(
        self, problem: Problem, operands: Operands, request: BuildRequest
    ) -> tuple[tuple[Any, ...], Callable[[], Artifact]]:
        """What the program of a problem is known by, and how it is generated."""
        from pytest_gemm.backends.inductor.artifact import Artifact

        first, tensors = self._first(problem, operands)

        def generated() -> Artifact:
            space, candidate = self._selected(problem, operands, request)
            spec = dataclasses.replace(self._spec(problem, request, space), candidate=candidate)
            return Artifact(first, tensors, spec)

        return (request.replace(selection=self.selects(request)), *self._key(first, tensors)), generated

    def _selected(self, problem: Problem, operands: Operands, request: BuildRequest) -> tuple[Space, Wanted]:
        """Where the requested candidate comes from, or the one that the line selects, and what leaves it alone.

        Raises:
            Unsupported: when there is none of the requested name.
        """
        if request.candidate:
            space = self._space_of(problem, operands, request)
            return space, request.candidate.removesuffix(space.suffix)
        if self.selects(request) != Selection.ONE:
            return Space(), None
        by_line = self.by_line(problem)
        return self.space_of_one(problem.at_hints, by_line, request), by_line

    def _first(self, problem: Problem, operands: Operands) -> tuple[Problem, dict[str, torch.Tensor]]:
        """The problem whose program is compiled, and tensors of its geometry: dynamic sizes have other values."""
        from pytest_gemm.backends.inductor.bindings import dynamic_dimensions
        from pytest_gemm.programs import program

        tensors = program.args(problem, operands)
        for name, places in dynamic_dimensions(problem).items():
            if name in tensors:
                sizes = {place: getattr(problem.shape, size) for place, size in places.items()}
                more = {place: HINTS[places[place]] - size for place, size in sizes.items()}
                tensors[name] = _grown(tensors[name], more)
        return problem.at_hints, tensors

    def _key(self, first: Problem, tensors: dict[str, torch.Tensor]) -> tuple[Any, ...]:
        return (first.line, self._threads(), tuple((n, t.shape, t.stride()) for n, t in tensors.items()))

    def _spec(self, problem: Problem, request: BuildRequest, space: Space) -> CompileSpec:
        """How to compile the problem with the candidates of ``space``, benchmarking them."""
        from pytest_gemm.backends.inductor import torch_compat

        options = self.options(problem, request) | dict(space.options) | _MODE_OPTIONS.get(request.mode, {})
        return CompileSpec(
            self.inductor_name,
            torch_compat.known(options),
            str(cache_dir(request.isa)),
            threads=options.get("cpp.threads", self._threads()),
            request=request,
            suffix=space.suffix,
            multiprocessors=space.multiprocessors,
            device_kernel=self.device_kernel,
            wanted=self.wanted(problem),
            log=self.log,
        )

    def _list(self, problem: Problem, operands: Operands, request: BuildRequest, space: Space) -> tuple[str, ...]:
        """The candidates of one space, none where it has none."""
        from pytest_gemm.backends.inductor import compiled

        first, tensors = self._first(problem, operands)
        request = request.replace(candidate="")
        key = (space, request, *self._key(first, tensors))
        spec = self._spec(problem, request, space)
        found = self._recent.obtain("lists", _KEPT_LISTS, key, lambda: compiled.list_candidates(first, tensors, spec))
        return tuple(f"{name}{space.suffix}" for name in found if fnmatch.fnmatchcase(name, space.only))

    def _space_of(self, problem: Problem, operands: Operands, request: BuildRequest) -> Space:
        """Where the requested candidate comes from.

        Raises:
            Unsupported: when there is none of this name.
        """
        spaces, name = self.spaces(problem), request.candidate
        if len(spaces) == 1:
            return spaces[0]  # whether it has this candidate shows when it is compiled
        for space in spaces:
            if name in self._list(problem, operands, request, space):
                return space
        raise Unsupported("unknown-candidate", f"Inductor has no {self.inductor_name} candidate {name} for {problem}")

    def _threads(self) -> int:
        import torch

        return self.threads or torch.get_num_threads()


def _grown(tensor: torch.Tensor, more: Mapping[int, int]) -> torch.Tensor:
    """A tensor with so many more elements in some dimensions: contents do not matter.

    A dimension that steps over another one keeps the gap that it had behind it: (K, M).T has strides (1, M), rows that
    are padded have K and the padding.
    """
    shape = tuple(size + more.get(dim, 0) for dim, size in enumerate(tensor.shape))
    strides = list(tensor.stride())
    nested = sorted((dim for dim in range(tensor.dim()) if strides[dim]), key=lambda d: (strides[d], tensor.shape[d]))
    for inner, outer in itertools.pairwise(nested):
        gap = tensor.stride(outer) - tensor.stride(inner) * tensor.shape[inner]
        if gap >= 0:
            strides[outer] = strides[inner] * shape[inner] + gap
    extent = tensor.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    # Of its kind: a tensor without memory stays one.
    return tensor.new_zeros(extent).as_strided(shape, strides, tensor.storage_offset())


def installed(*distributions: str) -> tuple[tuple[str, str], ...]:
    """Versions of installed distributions, for a report; what is not installed is left out."""
    return tuple(software.installed(distributions).items())
