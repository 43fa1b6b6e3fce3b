"""The one adapter to what is private in PyTorch: all that this package touches of Inductor and Dynamo.

Written against torch 2.13 and meant for 2.11 to 2.14.  Every name that those releases do not promise is
looked up here and nowhere else; what a release lacks is said in :func:`lacks`.  All hooks are context
managers: outside of :func:`session` nothing of torch is changed.

The internals are untyped, so ``Any`` stands wherever a value is one of theirs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary, finalize

import torch

from pytest_gemm.backends import micro_kernels, naming
from pytest_gemm.machine import isa as isa_module
from pytest_gemm.machine import processor
from pytest_gemm.machine.isa import ISAS
from pytest_gemm.outcome import Reason

__all__ = [
    "LISTED_CACHES",
    "CppProgram",
    "Packing",
    "Session",
    "ahead_of_time",
    "allocators_of",
    "cache_dir_set",
    "choice_names",
    "cpp_program",
    "forget_module",
    "forget_programs",
    "generating_for",
    "isa_setup",
    "graphs_skipped",
    "kernels_of",
    "lacks",
    "lacks_isa",
    "level_of",
    "listed",
    "mark_dynamic",
    "never_recompile",
    "nth",
    "option",
    "recompiled",
    "registered_micro_kernels",
    "same_bits",
    "session",
    "torch_release",
    "until_exit",
    "vector_isa",
    "why_dropped",
]


def torch_release() -> tuple[int, int]:
    """``(2, 13)`` of ``2.13.0+cpu``."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(re.match(r"\d+", minor)[0])  # type: ignore[index]  # a version has digits


def lacks() -> tuple[str, ...]:
    """What this torch does not offer of what the package uses, one sentence each; empty on 2.13."""
    found = []
    if torch_release() < (2, 11):
        found.append(f"torch {torch.__version__} is older than 2.11, the oldest release that is looked after")
    for name, where in _WANTED.items():
        module, _, attribute = where.partition(":")
        try:
            owner: Any = importlib.import_module(module)
            functools.reduce(getattr, attribute.split("."), owner)
        except (ImportError, AttributeError):
            found.append(f"torch {torch.__version__} has no {where.replace(':', '.')}: {name}")
    return tuple(found)


# What is lost without it -> where it lives in 2.13.
_WANTED: Mapping[str, str] = {
    "what autotuning chose cannot be proved": "torch._inductor.select_algorithm:AlgorithmSelectorCache.__call__",
    "what was generated cannot be proved": "torch._inductor.codecache:PyCodeCache.load_by_key_path",
    "a packed weight cannot be replaced, every filling compiles": (
        "torch._inductor.codegen.cpp_gemm_template:CppGemmTemplate.prep_weight"
    ),
    "templates are parsed again for every kernel": (
        "torch._inductor.codegen.common:KernelTemplate._template_from_string"
    ),
    "index expressions are parsed again for every kernel": (
        "torch._inductor.codegen.cpp_template_kernel:parse_expr_with_index_symbols"
    ),
    "the latency of guards is measured at every compile": "torch._dynamo.guards:profile_guard_manager",
}


# -- what a compile leaves behind ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Packing:
    """One call of a C++ template's own weight packing, ready to be replayed.

    Attributes:
        source: the K x N (or batched) tensor that was packed.
        packed: what the template made of it, the tensor that became a constant of the program.
        replay: the same code with the same arguments on another tensor of that shape and dtype.
    """

    source: torch.Tensor
    packed: torch.Tensor
    replay: Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass
class Session:
    """What was seen while something compiled.

    Attributes:
        choices: names of all candidates that the selection was given.
        blockings: for a list of them, see :func:`_blockings`, by name.
        tried: the one of them that was left, where one was asked for.
        failed: candidates that a compile or a benchmark of the selection failed on, with the exception or, where
            Inductor keeps it to itself, the reason.  Inductor leaves them out without a word.
        dropped: candidates that were left out, with the reason; for the artifact.
        timings: seconds that the selection measured, by candidate; empty where nothing was benchmarked.
        chosen: names of those that became a node of the program.
        foreign: those of ``chosen`` that are ATen, MKL or oneDNN calls.
        subgraphs: those of ``chosen`` that are programs of their own, with a product of ATen inside (decompose-K).
        refused: ops for which the selection had no candidate at all.
        refused_kernels: micro-kernels of the program's types and this instruction set that are left out, with why.
        modules: generated Python modules, in order of loading.
        libraries: paths of the compiled C++.
        levels: the instruction set that each of its compile commands asks for, see :func:`level_of`.
        packings: replayable weight packings.
        counted: Inductor's counters of micro-kernels that rose, ``cpp_micro_gemm_amx_counter``.
        fusions: nodes that the scheduler fused into C++ templates.  What a lowering made part of a template is not
            among them (oneDNN's linear with its ``relu``, in a dtype that oneDNN has on this machine).
    """

    choices: list[str] = dataclasses.field(default_factory=list)
    blockings: dict[str, str] = dataclasses.field(default_factory=dict)
    tried: str = ""
    failed: dict[str, Exception | Reason] = dataclasses.field(default_factory=dict)
    dropped: dict[str, Reason] = dataclasses.field(default_factory=dict)
    timings: dict[str, float] = dataclasses.field(default_factory=dict)
    chosen: list[str] = dataclasses.field(default_factory=list)
    foreign: list[str] = dataclasses.field(default_factory=list)
    subgraphs: list[str] = dataclasses.field(default_factory=list)
    refused: list[str] = dataclasses.field(default_factory=list)
    refused_kernels: dict[str, Reason] = dataclasses.field(default_factory=dict)
    modules: list[ModuleType] = dataclasses.field(default_factory=list)
    libraries: list[str] = dataclasses.field(default_factory=list)
    levels: list[str] = dataclasses.field(default_factory=list)
    packings: list[Packing] = dataclasses.field(default_factory=list)
    counted: tuple[str, ...] = ()
    fusions: int = 0


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two dense tensors agree in dtype, shape and every bit (a NaN equals itself)."""
    if a.is_mkldnn or b.is_mkldnn or a.dtype != b.dtype or a.shape != b.shape:
        return False
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.detach().contiguous().view(kind), b.detach().contiguous().view(kind))


# -- candidates ----------------------------------------------------------------------------------------


def choice_names(choices: Iterable[Any]) -> tuple[str, ...]:
    """The candidates of one selection by what they are, no two alike: what ``--gemm-choices`` takes.

    ``CppMicroGemmFP32Vec-8x48x1`` (register blocking), ``triton_mm-64x128x32,s4,w8`` (tile in the order M, N, K,
    stages, warps), ``decompose_k_mm_16_split``, a CUTLASS configuration with ``,swizzle=1``.
    """
    return naming.unique(map(_described, choices))


def _described(choice: Any) -> tuple[str, Mapping[str, object]]:
    """Base name of a candidate and the facts that may tell it from others of that name."""
    choice = getattr(choice, "_wrapped", choice)
    template: Any = getattr(choice, "template", None)
    blocking = getattr(template, "register_blocking", None)
    if blocking is not None:
        kind = getattr(template, _MICRO_KERNEL, "")
        kind, suffix = (kind, micro_kernels.GROUPED) if kind else (template.name, "")
        return f"{kind}-{blocking.block_m}x{blocking.block_n}x{blocking.block_k}{suffix}", {}
    name = str(getattr(choice, "name", choice))
    if (operation := (getattr(choice, "info_kwargs", None) or {}).get("op")) is not None:
        return f"{operation.configuration_name()},swizzle={choice.info_kwargs.get('swizzle')}", {}
    if (metadata := getattr(getattr(choice, "kernel", None), "metadata", None)) is not None:
        return str(getattr(metadata, "kernel_name", None) or getattr(metadata, "operator_name", name)), {}
    # Inductor numbers callers in the order in which a process makes them, so the number says nothing.
    name = re.sub(r"_[0-9]+$", "", name)
    log = getattr(choice, "log_info", None)
    if isinstance(log, dict) and "tile_shape" in log:
        m, k, n = re.findall(r"-?\d+", str(log["tile_shape"]))  # Inductor's order
        base = _triton_name(name, (m, n, k), log.get("num_stages"), log.get("num_warps"))
        # The template's own constants are in capitals: "ACC_TYPE='tl.float32', ALLOW_TF32=False, BLOCK_K=16, ..."
        return base, dict(re.findall(r"\b([A-Z]\w*)='?([^,']*)'?", str(getattr(choice, "description", ""))))
    return name, {}


# Attribute that a C++ template of several linears is given: the class of its micro-kernel, which it does not tell.
_MICRO_KERNEL = "pytest_gemm_micro_kernel"


@contextlib.contextmanager
def _watch_grouped_kernels() -> Iterator[None]:
    """Note the micro-kernel that each C++ template of several linears asks for before it is made."""
    try:
        from torch._inductor.codegen import cpp_grouped_gemm_template as room

        ask: Any = room.create_micro_gemm
        begin: Any = room.CppGroupedGemmTemplate.__init__
    except (ImportError, AttributeError):
        yield
        return
    given: list[str] = []

    def asking(*args: Any, **kwargs: Any) -> Any:
        kernel = ask(*args, **kwargs)
        given[:] = [type(kernel).__name__]
        return kernel

    def beginning(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        setattr(self, _MICRO_KERNEL, given[0] if given else "unknown")

    with (
        patch.object(room, "create_micro_gemm", asking),
        patch.object(room.CppGroupedGemmTemplate, "__init__", beginning),
    ):
        yield


def _triton_name(template: str, tile: Iterable[object], stages: object, warps: object) -> str:
    return f"{template}-{'x'.join(map(str, tile))},s{stages},w{warps}"


class _Unrendered:
    """What is known of a Triton candidate before its code is made: enough for :func:`choice_names`.

    Args:
        template: name of the template, ``mm`` for instance.
        kwargs: what its ``generate`` was given.
    """

    def __init__(self, template: str, kwargs: Mapping[str, Any]) -> None:
        self.name = f"triton_{template}_0"
        self.log_info = {
            "tile_shape": tuple(kwargs.get(f"BLOCK_{d}", -1) for d in "MKN"),
            "num_stages": kwargs.get("num_stages"),
            "num_warps": kwargs.get("num_warps"),
        }
        self.description = ", ".join(f"{key}={kwargs[key]!r}" for key in sorted(kwargs) if key[:1].isupper())


def _is_extern(choice: Any) -> bool:
    from torch._inductor.select_algorithm import ExternKernelCaller

    return isinstance(getattr(choice, "_wrapped", choice), ExternKernelCaller)


def _is_subgraph(choice: Any) -> bool:
    from torch._inductor.codegen.subgraph import SubgraphChoiceCaller

    return isinstance(choice, SubgraphChoiceCaller)


def nth(candidate: int, count: int) -> int:
    """Index of a candidate among ``count``: consecutive numbers lie far apart, for neighbours differ least."""
    return candidate * 7919 % count


class _Listed(Exception):
    """The candidates are known, or there was no selection: ends a compile inside Inductor that was to list them."""


def _blockings(choice: Any) -> str:
    """How a C++ template would split the product over threads and caches, in register blocks; "" where it cannot say.

    ``2x1x4/2x1x4``: M x N x K of a thread, then of what stays in its caches.
    """
    template: Any = getattr(choice, "template", None)
    try:
        threads = template.num_threads
        found = template.thread_blocking(threads), template.cache_blocking(threads)
        return "/".join("x".join(str(int(size)) for size in (b.block_m, b.block_n, b.block_k)) for b in found)
    except Exception:  # for any M they are decided when it runs, and for some sizes they cannot be computed
        return ""


class _Selection:
    """Watches the selections of one compile, and narrows them where a candidate is asked for.

    A selection inside another one (the product within decompose-K) is none of ours and passes.
    """

    def __init__(self, seen: Session, candidate: int | str | None, listing: bool) -> None:
        self.seen = seen
        self.candidate = candidate
        self.listing = listing
        self.selector: Any = None
        self.depth = 0
        # Candidates that Inductor has and does not offer.
        self.others: list[str] = []
        # By id of the candidate, which is kept so that the id stays its own.
        self.named: dict[int, tuple[Any, str]] = {}

    def enter(self, selector: Any, name: str, choices: list[Any]) -> None:
        """A selection is about to begin: note its candidates and leave those that are wanted, in place."""
        seen = self.seen
        self.selector = selector
        if not choices:
            seen.refused.append(name)
        names = choice_names(choices)
        seen.choices.extend(names)
        if self.listing:
            seen.blockings.update((name, _blockings(choice)) for name, choice in zip(names, choices, strict=True))
            seen.choices.extend(name for name in self.others if name not in names)
            raise _Listed
        if self.candidate is not None and choices:
            index = self._index(names)
            seen.tried = names[index]
            # In place: an epilogue's lowering may hold the same list.
            choices[:] = [choices[index]]
            names = (seen.tried,)
        for choice, called in zip(choices, names, strict=True):
            self.named[id(choice)] = choice, called
            choice.output_node = self._noting_node(choice, choice.output_node)
            if hasattr(choice, "precompile"):
                choice.precompile = self._noting_failure(choice, choice.precompile)

    def _index(self, names: Sequence[str]) -> int:
        if isinstance(self.candidate, int):
            return nth(self.candidate, len(names))
        # A program with several selections has the name in one of them; the others take their first.
        return names.index(self.candidate) if self.candidate in names else 0

    def name(self, choice: Any) -> str:
        """What a candidate is called, also one that was made after the selection."""
        return self.named[id(choice)][1] if id(choice) in self.named else choice_names([choice])[0]

    def fail(self, choice: Any, why: Exception | Reason) -> None:
        """Note that a candidate failed; the first failure holds."""
        self.seen.failed.setdefault(self.name(choice), why)

    def leave(self) -> None:
        """The compile is over: what failed without an exception, and nothing of Inductor's kept alive."""
        for choice, _ in self.named.values():
            if getattr(choice, "failed", False):
                self.fail(choice, Reason("compile-timeout", "its compile did not end within Inductor's hour"))
        self.named.clear()
        # It would keep every candidate, and with it the whole graph, as long as the process lives.
        getattr(self.selector, "precompile_cache", {}).clear()

    def _noting_node(self, choice: Any, output_node: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(output_node)
        def noting() -> Any:
            self.depth += 1
            try:
                node = output_node()
            finally:
                self.depth -= 1
            self.seen.chosen.append(self.name(choice))
            if _is_extern(choice):
                self.seen.foreign.append(self.name(choice))
            if _is_subgraph(choice):
                self.seen.subgraphs.append(self.name(choice))
            return node

        return noting

    def _noting_failure(self, choice: Any, compile_it: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(compile_it)
        def noting() -> Any:
            try:
                return compile_it()
            except Exception as error:
                self.fail(choice, error)
                raise

        return noting


@contextlib.contextmanager
def _watch_selection(seen: Session, candidate: int | str | None = None, listing: bool = False) -> Iterator[None]:
    """Note the candidates of every selection, which of them fail, and the one whose node enters the program.

    Args:
        seen: where to note them.
        candidate: leave only this one of them: a number, counted round, or a name; ``None``: Inductor chooses by
            benchmarking.
        listing: end the compile as soon as the candidates are known.
    """
    from torch._inductor import autotune_process
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    watch = _Selection(seen, candidate, listing)
    select = AlgorithmSelectorCache.__call__
    benchmark_one: Any = inspect.getattr_static(AlgorithmSelectorCache, "benchmark_choice").__func__
    benchmark_elsewhere = autotune_process.benchmark_in_sub_process
    autotune = AlgorithmSelectorCache.do_autotuning

    def selecting(self: Any, name: str, choices: list[Any], *args: Any, **kwargs: Any) -> Any:
        if not watch.depth:
            watch.enter(self, name, choices)
        watch.depth += 1
        try:
            return select(self, name, choices, *args, **kwargs)
        finally:
            watch.depth -= 1

    def benchmarking_one(cls: Any, choice: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return benchmark_one(cls, choice, *args, **kwargs)
        except Exception as error:
            watch.fail(choice, error)
            raise

    def timed(timings: Any, text: str) -> Any:
        for choice, milliseconds in (timings or {}).items():
            if math.isfinite(milliseconds):
                seen.timings[watch.name(choice)] = milliseconds * 1e-3
            else:
                watch.fail(choice, Reason("benchmark-failed", text))
        return timings

    def benchmarking_elsewhere(choices: Any) -> Any:
        return timed(benchmark_elsewhere(choices), "its benchmark, in a process of its own, failed or took too long")

    def autotuning(*args: Any, **kwargs: Any) -> Any:
        return timed(autotune(*args, **kwargs), "its benchmark gave no time")

    with (
        patch.object(AlgorithmSelectorCache, "__call__", selecting),
        patch.object(AlgorithmSelectorCache, "benchmark_choice", classmethod(benchmarking_one)),
        patch.object(AlgorithmSelectorCache, "do_autotuning", autotuning),
        patch.object(autotune_process, "benchmark_in_sub_process", benchmarking_elsewhere),
        _watch_deferred(watch),
        _rendering_less(candidate, listing),
        _generating_nothing() if listing else contextlib.nullcontext(),
        _listing_micro_kernels(watch) if listing else _forcing_micro_kernel(candidate),
        _watch_grouped_kernels(),
    ):
        try:
            yield
        finally:
            watch.leave()


@contextlib.contextmanager
def _generating_nothing() -> Iterator[None]:
    """End a compile without a selection before its code is made: it is of no use to a list, and must not be run."""
    from torch._inductor.codecache import AotCodeCompiler
    from torch._inductor.graph import GraphLowering

    def ending(*_: Any, **__: Any) -> Any:
        raise _Listed

    with patch.object(GraphLowering, "compile_to_module", ending), patch.object(AotCodeCompiler, "compile", ending):
        yield


@contextlib.contextmanager
def _watch_deferred(watch: _Selection) -> Iterator[None]:
    """Note the Triton candidate that a selection ended with which was put off until epilogues could be benchmarked.

    A buffer may be finalised more than once, with the last one holding.
    """
    from torch._inductor.ir import MultiTemplateBuffer

    original: Any = MultiTemplateBuffer.finalize_as_triton_caller
    places: dict[int, tuple[Any, int]] = {}  # by buffer, which is kept so that its id stays its own
    chosen = watch.seen.chosen

    def watched(self: Any, caller: Any) -> Any:
        if id(self) in places:
            chosen[places[id(self)][1]] = watch.name(caller)
        else:
            places[id(self)] = (self, len(chosen))
            chosen.append(watch.name(caller))
        return original(self, caller)

    with patch.object(MultiTemplateBuffer, "finalize_as_triton_caller", watched):
        yield


@contextlib.contextmanager
def _rendering_less(candidate: int | str | None, listing: bool) -> Iterator[None]:
    """Where a candidate is asked for by name, make no other one's Triton code; for a list of them, make none.

    It takes milliseconds each, at every compile, and the exhaustive search space has thousands of them.
    """
    if not (listing or isinstance(candidate, str)):
        yield
        return
    from torch._inductor.select_algorithm import TritonTemplate

    generate: Any = TritonTemplate.generate

    def generating(self: Any, *args: Any, **kwargs: Any) -> Any:
        outline = _Unrendered(self.name, kwargs)
        if listing:
            return outline
        (base,) = choice_names([outline])
        if candidate != base and not str(candidate).startswith((f"{base},", f"{base}@")):
            return None  # as for a candidate that Inductor itself finds impossible
        return generate(self, *args, **kwargs)

    with patch.object(TritonTemplate, "generate", generating):
        yield


# -- micro-kernels of the C++ templates ------------------------------------------------------------------
#
# Inductor's templates ask create_micro_gemm() for one micro-kernel, and its heuristic takes one of those registered in
# micro_gemm_configs.  With only one of them registered it takes that one, or none where it does not fit.

_ISA_NAMES: Mapping[str, str] = {"VecAVX512VNNI": "avx512_vnni"}

# The name of a class of micro-kernels, with which a candidate of the C++ templates begins.
_IS_MICRO = re.compile(rf"{micro_kernels.NAME}(?:{micro_kernels.GROUPED})?")


def registered_micro_kernels() -> tuple[micro_kernels.Registered, ...]:
    """Every micro-kernel and register blocking that Inductor has registered, in its order."""
    importlib.import_module("torch._inductor.compile_fx")  # first: what is below it imports each other in a circle
    from torch._inductor.codegen import cpp_micro_gemm

    found = []
    for kind, configs in cpp_micro_gemm.micro_gemm_configs.items():
        for config in configs:
            isa = config.vec_isa_cls.__name__
            name = micro_kernels.kernel_name(kind.__name__, config.register_blocking)
            types = "-".join(_dtype_name(t) for t in (config.input_dtype, config.input2_dtype, config.output_dtype))
            found.append(micro_kernels.Registered(name, types, _ISA_NAMES.get(isa, isa.removeprefix("Vec").lower())))
    return tuple(found)


def _dtype_name(dtype: torch.dtype) -> str:
    """The name that the problem line has for a type: ``bf16``."""
    text = re.sub(r"\(.*", "", str(dtype).removeprefix("torch."))
    return text.replace("bfloat", "bf").replace("float", "f").replace("uint", "u").replace("int", "i")


@contextlib.contextmanager
def _registered(kept: Mapping[Any, list[Any]]) -> Iterator[None]:
    """Let Inductor have these micro-kernels registered, lists of configurations by class, and no others."""
    from torch._inductor.codegen import cpp_micro_gemm

    with patch.object(cpp_micro_gemm, "micro_gemm_configs", kept):
        yield


@contextlib.contextmanager
def _forcing_micro_kernel(candidate: int | str | None) -> Iterator[None]:
    """Where a micro-kernel is asked for by name, have no other one registered.  The reference one is what none leaves.

    Where it does not fit the product Inductor takes the reference one, which is then not the candidate asked for.
    """
    if not isinstance(candidate, str) or not _IS_MICRO.fullmatch(candidate):
        yield
        return
    from torch._inductor.codegen import cpp_micro_gemm

    wanted = micro_kernels.kernel_of(candidate)
    kept = {
        kind: [c for c in configs if micro_kernels.kernel_name(kind.__name__, c.register_blocking) == wanted]
        for kind, configs in cpp_micro_gemm.micro_gemm_configs.items()
    }
    with _registered(kept):
        yield


@contextlib.contextmanager
def _listing_micro_kernels(watch: _Selection) -> Iterator[None]:
    """Note every micro-kernel that the templates could be given instead of the one that the heuristic picks."""
    from torch._inductor.codegen import cpp_gemm_template, cpp_grouped_gemm_template, cpp_micro_gemm

    original = cpp_micro_gemm.create_micro_gemm
    fields = inspect.signature(original)

    def listing(suffix: str, *args: Any, **kwargs: Any) -> Any:
        def made_of(kept: Mapping[Any, list[Any]]) -> Any:
            with _registered(kept):
                return original(*args, **kwargs)

        bound = fields.bind(*args, **kwargs)
        bound.apply_defaults()
        asked, isa = bound.arguments, cpp_micro_gemm.pick_vec_isa()
        types = asked["input_dtype"], asked["input2_dtype"], asked["output_dtype"] or asked["input_dtype"]
        refused: dict[str, Reason] = {}
        for kind, configs in cpp_micro_gemm.micro_gemm_configs.items():
            for config in configs:
                theirs = config.input_dtype, config.input2_dtype, config.output_dtype
                if types != theirs or not isinstance(isa, config.vec_isa_cls):
                    continue
                name = micro_kernels.kernel_name(kind.__name__, config.register_blocking) + suffix
                if type(made_of({kind: [config]})) is kind:
                    watch.others.append(name)
                else:
                    unchecked = dataclasses.replace(config, extra_check=None)
                    checked = type(made_of({kind: [unchecked]})) is kind
                    refused[name] = _why_refused(config.extra_check if checked else None)
        if (reference := made_of({})) is not None:
            name = micro_kernels.kernel_name(type(reference).__name__, reference.register_blocking)
            watch.others.append(name + suffix)
        watch.seen.refused_kernels |= {name: why for name, why in refused.items() if name not in watch.others}
        return original(*args, **kwargs)

    with (
        patch.object(cpp_gemm_template, "create_micro_gemm", functools.partial(listing, "")),
        patch.object(cpp_grouped_gemm_template, "create_micro_gemm", functools.partial(listing, micro_kernels.GROUPED)),
    ):
        yield


def _why_refused(check: Callable[..., bool] | None) -> Reason:
    if check is None:
        text = "create_micro_gemm has a rule against this micro-kernel for such a problem"
    else:
        text = f"Inductor's {getattr(check, '__name__', 'extra check')} refuses the problem"
    return Reason(micro_kernels.REFUSED, text)


# Functions of torch/_inductor/utils.py that remember an answer which depends on options, and two sessions of one
# process may differ in these.
_HASTY = ("use_decompose_k_choice", "get_k_splits")


# The tag of the last session that shares what Inductor keeps in memory; "" when that was one that shares nothing.
_sharing = [""]


@contextlib.contextmanager
def _forgetting(user_caches: str) -> Iterator[None]:
    """Let no answer that Inductor gave under other options reach this session, nor this session's any other.

    Nor an answer to another program: the CUTLASS template keeps the configurations that fit, and the code of the
    candidates, by the operands alone, and a later program asks for them with another output, accuracy, alpha or beta.
    Sessions of one tag of user's caches share these, as they do in a user's process.
    """
    from torch._inductor import utils

    def forget() -> None:
        for name in _HASTY:
            clear: Any = getattr(getattr(utils, name, None), "cache_clear", None)
            if clear is not None:
                clear()

    if not user_caches or user_caches != _sharing[0]:
        templates: Any = sys.modules.get("torch._inductor.codegen.cutlass.gemm_template")
        if templates is not None:
            templates.CUTLASSGemmTemplate.filtered_ops_cache.clear()
            templates.CUTLASSGemmTemplate.code_cache.clear()
    _sharing[0] = user_caches

    forget()
    try:
        yield
    finally:
        forget()


@contextlib.contextmanager
def _watch_modules(seen: Session) -> Iterator[None]:
    """Note the Python modules that Inductor generates, or loads from its caches."""
    from torch._inductor.codecache import PyCodeCache

    original = PyCodeCache.load_by_key_path

    def watched(*args: Any, **kwargs: Any) -> ModuleType:
        libraries, levels = len(seen.libraries), len(seen.levels)
        module: ModuleType = original(*args, **kwargs)
        if hasattr(module, "call"):
            seen.modules.append(module)
            if made := seen.levels[levels:]:
                _libraries_of[module], _levels_of[module] = tuple(seen.libraries[libraries:]), tuple(made)
            else:  # a module that is there already loads nothing again
                seen.libraries += _libraries_of.get(module, ())
                seen.levels += _levels_of.get(module, ())
        return module

    with patch.object(PyCodeCache, "load_by_key_path", watched):
        yield


@contextlib.contextmanager
def _watch_packing(seen: Session) -> Iterator[None]:
    """Note every packing of a constant weight by a C++ template, with the means to do it again."""
    try:
        from torch._inductor.codegen.cpp_gemm_template import CppGemmTemplate

        original: Any = inspect.getattr_static(CppGemmTemplate, "prep_weight").__func__
    except (ImportError, AttributeError):
        yield
        return

    def watched(cls: Any, inputs: Any, layout: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(cls, inputs, layout, *args, **kwargs)
        source, packed = inputs[1], result[0][1]
        # Nodes of the graph pass here too: only constants are tensors.
        if isinstance(source, torch.Tensor) and isinstance(packed, torch.Tensor):
            before, after = inputs[0], list(inputs[2:])

            def replay(weight: torch.Tensor) -> torch.Tensor:
                again = original(cls, [before, weight, *after], layout, *args, **kwargs)[0][1]
                assert isinstance(again, torch.Tensor)
                return again

            seen.packings.append(Packing(source, packed, replay))
        return result

    with patch.object(CppGemmTemplate, "prep_weight", classmethod(watched)), _watch_grouped_packing(seen):
        yield


@contextlib.contextmanager
def _watch_grouped_packing(seen: Session) -> Iterator[None]:
    """The same for the template of several linears, which blocks each of its weights and packs what came out."""
    try:
        from torch._inductor.codegen.cpp_grouped_gemm_template import CppGroupedGemmTemplate

        block: Any = CppGroupedGemmTemplate.block_weight  # bound to the class, found before they are replaced
        pack: Any = CppGroupedGemmTemplate.pack_vnni_weight
    except (ImportError, AttributeError):
        yield
        return
    blocked: dict[int, tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]] = {}

    def blocking(weight: Any, *args: Any) -> Any:
        made = block(weight, *args)
        if isinstance(weight, torch.Tensor):
            blocked[id(made)] = made, weight, args
        return made

    def packing(weight: Any, *args: Any) -> Any:
        made = pack(weight, *args)
        if id(weight) in blocked and isinstance(made, torch.Tensor):
            _, source, how = blocked.pop(id(weight))
            seen.packings.append(Packing(source, made, lambda new: pack(block(new, *how), *args)))
        return made

    with (
        patch.object(CppGroupedGemmTemplate, "block_weight", staticmethod(blocking)),
        patch.object(CppGroupedGemmTemplate, "pack_vnni_weight", staticmethod(packing)),
    ):
        yield


# -- pure functions of torch, computed once ----------------------------------------------------------
#
# Each is a function of a string alone, and the sum of them is half of the time that a compile takes whose
# kernel is on disk.  The memo lasts as long as the process; torch sees it during a session only.

_templates: dict[str, Any] = {}
_expressions: dict[str, Any] = {}


@contextlib.contextmanager
def _memoised() -> Iterator[None]:
    from torch._inductor.codegen.common import KernelTemplate

    with contextlib.ExitStack() as stack:
        original = inspect.getattr_static(KernelTemplate, "_template_from_string", None)
        if isinstance(original, staticmethod):
            parse_template = original.__func__

            def template(source: str) -> Any:
                # Rendering does not change a jinja template; its environment is cached by torch itself.
                found = _templates.get(source)
                if found is None:
                    found = _templates[source] = parse_template(source)
                return found

            stack.enter_context(patch.object(KernelTemplate, "_template_from_string", staticmethod(template)))

        from torch._inductor.codegen import cpp_template_kernel

        parse: Any = getattr(cpp_template_kernel, "parse_expr_with_index_symbols", None)
        if parse is not None:

            def expression(expr: Any) -> Any:
                # The original calls itself on the items of a list through the module, hence through here.
                if not isinstance(expr, str):
                    return parse(expr)
                found = _expressions.get(expr)
                if found is None:
                    found = _expressions[expr] = parse(expr)
                return found

            stack.enter_context(patch.object(cpp_template_kernel, "parse_expr_with_index_symbols", expression))

        from torch._dynamo import guards

        if hasattr(guards, "profile_guard_manager"):
            # A latency for the log, for which it flushes the CPU's caches: 22 ms.
            stack.enter_context(patch.object(guards, "profile_guard_manager", lambda *_args: 0.0))

        if not os.environ.get("TORCH_TRACE"):
            # The structured trace writes a record for every step to whoever listens; pytest listens to every logger.
            stack.enter_context(patch.object(logging.getLogger("torch.__trace"), "handlers", []))
        yield


# -- the compile itself --------------------------------------------------------------------------------


def users_cache_dir() -> str:
    """``TORCHINDUCTOR_CACHE_DIR`` as the user set it, "" otherwise.

    Inductor itself sets the variable to its default when it first asks for the folder, so a default counts as unset.
    """
    import torch._inductor.runtime.cache_dir_utils as utils

    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    return "" if given == os.path.abspath(utils.default_cache_dir()) else given


@contextlib.contextmanager
def cache_dir_set(directory: str) -> Iterator[None]:
    """Let Inductor's caches live in ``directory`` for the block."""
    with patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": directory}):
        yield


@contextlib.contextmanager
def session(
    options: Mapping[str, Any],
    *,
    directory: str,
    user_caches: str = "",
    candidate: int | str | None = None,
    listing: bool = False,
    isa: str = "",
    beyond: bool = False,
) -> Iterator[Session]:
    """Compile inside the block with these Inductor options and record what becomes of it.

    Args:
        options: names and values of ``torch._inductor.config``; one that this release lacks is an error
            there.
        directory: where kernels are kept, see :func:`cache_dir_set`.
        user_caches: a tag that separates these compiles' entries in AOTAutograd's and the FX graph cache from all
            others; "" turns both off, so that every compile is a compile.
        candidate: compile only this one of the candidates instead of benchmarking all, see ``_watch_selection``.
        listing: end the compile by an exception as soon as ``Session.choices`` is filled.
        isa: generate for this instruction set of the CPU, see :func:`generating_for`.
        beyond: with a listing: the CPU need not execute it.
    """
    import torch._functorch.config as functorch_config
    import torch._inductor.compile_fx  # first: the modules below import each other in a circle
    import torch._inductor.config as inductor_config
    import torch._inductor.select_algorithm
    import torch.compiler.config as compiler_config

    seen = Session()
    with contextlib.ExitStack() as stack:
        stack.enter_context(cache_dir_set(directory))
        stack.enter_context(inductor_config.patch(dict(options)))
        stack.enter_context(inductor_config.patch(fx_graph_cache=bool(user_caches), fx_graph_remote_cache=False))
        if hasattr(inductor_config, "autotune_local_cache"):
            # Inductor would remember that a candidate failed, and not why.
            stack.enter_context(inductor_config.patch(autotune_local_cache=bool(user_caches)))
        stack.enter_context(functorch_config.patch({"enable_autograd_cache": bool(user_caches)}))
        # Not its patch(): the module is made a configuration at import, which type checkers do not see.
        stack.enter_context(patch.object(compiler_config, "cache_key_tag", user_caches))
        stack.enter_context(_memoised())
        stack.enter_context(_forgetting(user_caches))
        stack.enter_context(_watch_selection(seen, candidate, listing))
        stack.enter_context(_watch_modules(seen))
        stack.enter_context(_watch_packing(seen))
        stack.enter_context(generating_for(isa, beyond=beyond))
        stack.enter_context(_watch_libraries(seen))
        stack.enter_context(_watch_fusions(seen))
        stack.enter_context(torch.no_grad())
        yield seen


@contextlib.contextmanager
def _watch_fusions(seen: Session) -> Iterator[None]:
    """Note how far Inductor's counter of fused epilogues has come."""
    from torch._dynamo.utils import counters

    def count() -> int:
        return int(counters["inductor"].get("cpp_epilogue_fusion_counter", 0))

    before = count()
    try:
        yield
    finally:
        seen.fusions = count() - before


def option(*names: str) -> str:
    """The first of these names of one Inductor option that this release has; releases rename them.

    Raises:
        AttributeError: when it has none of them.
    """
    import torch._inductor.config as inductor_config

    known = inductor_config.get_config_copy()
    for name in names:
        if name in known:
            return name
    raise AttributeError(f"torch {torch.__version__} has no Inductor option {' or '.join(names)}")


def mark_dynamic(tensor: torch.Tensor, dimension: int) -> None:
    """Ask Dynamo to compile for any size of this dimension."""
    torch._dynamo.mark_dynamic(tensor, dimension)


def never_recompile() -> contextlib.AbstractContextManager[Any]:
    """A block in which a compiled function raises instead of compiling again; see :func:`recompiled`."""
    stance: Any = torch.compiler.set_stance("fail_on_recompile")
    return stance  # type: ignore[no-any-return]


def recompiled(error: RuntimeError) -> bool:
    """Whether ``error`` is what :func:`never_recompile` raises.  torch has no type of its own for it."""
    return "fail_on_recompile" in str(error)


def listed(error: BaseException) -> bool:
    """Whether ``error`` is how a listing session ends a compile; Inductor and Dynamo wrap what is raised in them."""
    return any(isinstance(one, _Listed) for one in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and all that it was raised from or wraps, each once."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        todo += [one.__cause__, one.__context__, getattr(one, "inner_exception", None)]


def why_dropped(error: BaseException) -> Reason | None:
    """Why autotuning leaves a candidate out that raised this, where that is no defect of the candidate.

    Either it cannot be compiled for this device, or it needs more of it than there is.  ``None`` for any other
    exception: Inductor would go on without the candidate after most of them, too, but they are failures.  By name:
    torch and triton move these exceptions between modules.  Inductor wraps what a compile raises, so the causes are
    looked at too.
    """
    for one in _causes(error):
        kind, text = type(one).__name__, str(one)
        if kind == "CUDACompileError":
            return Reason("compile-error", _compiler_message(str(getattr(one, "output", text))))
        # "No valid triton configs. OutOfMemoryError: out of resource: ...": what stopped it is in the text alone.
        # The name by itself is torch's as well, for memory that may be there the next time.
        if kind == "OutOfResources" or re.search(r"No valid triton configs\. OutOf(?:Resources|MemoryError)\b", text):
            return Reason("out-of-resources", _first_line(text, "Required|out of resource"))
        if kind == "PTXASError" or "No valid triton configs. PTXASError" in text:
            return Reason("compile-error", _first_line(text, "ptxas|PTXAS"))
    return None


def _compiler_message(output: str) -> str:
    """What a compiler complains of first: its line with the word error, without the path before it."""
    line = _first_line(output, r"\b(error|fatal)\b")
    return re.sub(r"^\S*/(?=[^/\s]+\(\d+\))", "", line)


def _first_line(text: str, pattern: str) -> str:
    """The first line that has the pattern, or the first with anything in it; at most 200 characters of it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if re.search(pattern, line)), lines[0] if lines else "no message")[:200]


def vector_isa() -> str:
    """The instruction set that C++ kernels are generated for, ``avx512`` for instance."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    return str(pick_vec_isa())


# -- another instruction set of the CPU ------------------------------------------------------------------

# Inductor's class of each level, and the architecture that the compiler is told.  What the architecture does not have
# and the level does (VNNI, AMX) the class's own flags add.
_VECTORS: Mapping[str, tuple[str, str]] = {
    "avx2": ("VecAVX2", "x86-64-v3"),
    "avx512": ("VecAVX512", "x86-64-v4"),
    "avx512_vnni": ("VecAVX512VNNI", "x86-64-v4"),
    "amx": ("VecAMX", "x86-64-v4"),
    "amx_fp16": ("VecAMX", "x86-64-v4"),
}
# What a listing takes the CPU's caches for, in bytes: blockings follow from them, and a list must not from the machine.
LISTED_CACHES: Mapping[str, int] = {"l1d_cache_size": 32 << 10, "l2_cache_size": 1 << 20}

# torch.cpu's questions, by the least level that answers yes; oneDNN's are beside them.
_QUESTIONS: Mapping[str, str] = {
    "_is_avx2_supported": "avx2",
    "_is_avx512_supported": "avx512",
    "_is_vnni_supported": "avx512_vnni",
    "_is_avx512_vnni_supported": "avx512_vnni",
    "_is_avx512_bf16_supported": "amx",
    "_is_amx_tile_supported": "amx",
    "_is_amx_fp16_supported": "amx_fp16",
}
# The least level at which oneDNN computes a half type: an AMX machine has AVX512_FP16, which it does f16 with.
ONEDNN_FROM: Mapping[str, str] = {"bf16": "avx512", "f16": "amx"}
_ONEDNN: Mapping[str, str] = {
    "is_mkldnn_bf16_supported": ONEDNN_FROM["bf16"],
    "is_mkldnn_fp16_supported": ONEDNN_FROM["f16"],
}


def lacks_isa(isa: str) -> str:
    """Why Inductor generates no code for an instruction set here, "" where it does.

    CPU, compiler and release are asked: it compiles a few lines, once for each level, and keeps them on disk.

    Args:
        isa: one of ``machine.isa.ISAS``, that the CPU executes.
    """
    from torch._inductor import cpu_vec_isa

    name, _ = _VECTORS[isa]
    # By name, as Inductor keeps one object of each class, with what it has found out.
    found = next((one for one in cpu_vec_isa.supported_vec_isa_list if type(one).__name__ == name), None)
    if found is None:
        return f"torch {torch.__version__} generates no code for {isa}"
    fp16: Any = getattr(found, "is_amx_fp16_supported", None)
    if not found or (isa == "amx_fp16" and not (fp16 is not None and fp16())):
        return f"the C++ compiler makes no code for {isa} that this process can load and run"
    return ""


@functools.cache
def _vectors(isa: str) -> Any:
    """An object that stands for a level as Inductor's own does; it is asked for nothing of this machine."""
    from torch._inductor import cpu_vec_isa

    base: Any = getattr(cpu_vec_isa, _VECTORS[isa][0])
    amx, fp16 = ISAS.index(isa) >= ISAS.index("amx"), isa == "amx_fp16"
    # Inductor tells an AMX machine's flags apart once it has asked the machine, and caches that by class.
    more = (" -mavx512bf16" if amx else "") + (" -mamx-fp16" if fp16 else "")
    members = {
        "__bool__": lambda _: True,
        "__hash__": base.__hash__,
        "build_arch_flags": lambda _: f"{base._arch_flags}{more}",
        "is_avx512_bf16_supported": lambda _: amx,
        "is_amx_fp16_supported": lambda _: fp16,
    }
    return type(base.__name__, (base,), members)()


def isa_setup(isa: str) -> tuple[str, ...]:
    """What a script of PyTorch alone does to generate code for an instruction set; nothing for "".

    It leaves the compiler's ``-march=native`` as it is, which :func:`generating_for` does not.
    """
    if not isa:
        return ()
    name, rank = _VECTORS[isa][0], ISAS.index(isa)
    answers = {name: rank >= ISAS.index(least) for name, least in _ONEDNN.items()}
    lines = [
        "import torch._inductor.cpu_vec_isa as isa, torch._inductor.compile_fx",
        "import torch._inductor.fx_passes.mkldnn_fusion as onednn",
        f"isa.valid_vec_isa_list = lambda: [isa.{name}()]  # as on a CPU that ends with {isa}",
    ]
    # Only what the CPU lacks is denied: nothing can be given to it.
    return (*lines, *(f"onednn.{asked} = lambda device: False" for asked, answer in answers.items() if not answer))


@contextlib.contextmanager
def generating_for(isa: str, *, beyond: bool = False) -> Iterator[None]:
    """Let Inductor generate and compile C++ for an instruction set as on a machine that has no higher one.

    What decides there is asked here of the level: ``VecISA`` and with it macros, flags and ``-march``; ``torch.cpu``'s
    questions; whether oneDNN has bf16 and f16, on which lowerings depend.  What is computed outside of generated code
    (ATen, oneDNN) stays the machine's.

    Args:
        isa: one of ``machine.isa.ISAS``; "" changes nothing.
        beyond: nothing will be executed: the level may be higher than the machine's, whose own gifts shall not show.
    """
    if not isa:
        yield
        return
    import torch._inductor.compile_fx  # first: the modules below import each other in a circle
    from torch._inductor import cpp_builder, cpu_vec_isa, utils
    from torch._inductor.fx_passes import mkldnn_fusion

    rank = ISAS.index(isa)
    # At the machine's best level the compiler goes on taking the machine for what it is, as it does for a user.
    best = isa_module.isas(processor.cpu().flags)[-1:] == (isa,)
    march = "native" if best and not beyond else _VECTORS[isa][1]
    capable: Any = getattr(torch.cpu, "get_capabilities", None)
    optimizing: Any = cpp_builder._get_optimization_cflags

    def flags(*args: Any, **kwargs: Any) -> Any:
        cflags, ldflags = optimizing(*args, **kwargs)
        return [f"march={march}" if flag.startswith("march=") else flag for flag in cflags], ldflags

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(cpu_vec_isa, "valid_vec_isa_list", lambda: [_vectors(isa)]))
        stack.enter_context(patch.object(cpp_builder, "_get_optimization_cflags", flags))
        for name, least in _QUESTIONS.items():
            original = getattr(torch.cpu, name, None)
            if original is not None:
                answer = rank >= ISAS.index(least) and (beyond or bool(original()))
                stack.enter_context(patch.object(torch.cpu, name, lambda answer=answer: answer))
        for name, least in _ONEDNN.items():
            for module in (utils, mkldnn_fusion):
                asked: Any = getattr(module, name, None)
                if asked is not None:
                    answer = rank >= ISAS.index(least) and (beyond or bool(asked("cpu")))
                    stack.enter_context(patch.object(module, name, _for_cpu(asked, answer)))
        if beyond:
            stack.enter_context(_packing_nothing())
            if capable is not None:
                facts = {**capable(), **LISTED_CACHES}
                stack.enter_context(patch.object(torch.cpu, "get_capabilities", lambda: facts))
            for name, fact in (("_L1d_cache_size", "l1d_cache_size"), ("_L2_cache_size", "l2_cache_size")):
                if hasattr(torch._C._cpu, name):  # where releases before get_capabilities ask
                    size = LISTED_CACHES[fact]
                    stack.enter_context(patch.object(torch._C._cpu, name, lambda size=size: size))
        yield


def _for_cpu(asked: Callable[[str], bool], answer: bool) -> Callable[[str], bool]:
    """``asked`` with another answer about the CPU."""
    return lambda device: answer if device == "cpu" else asked(device)


@contextlib.contextmanager
def _packing_nothing() -> Iterator[None]:
    """Let freezing take oneDNN's packed weight for the weight itself: this machine's oneDNN may refuse to pack it."""
    from torch._inductor.constant_folding import ConstantFolder

    call: Any = ConstantFolder.call_function

    def calling(self: Any, target: Any, args: Any, kwargs: Any) -> Any:
        if "_reorder_linear_weight" in str(target) and args[0].dtype != torch.float32:
            return args[0]
        return call(self, target, args, kwargs)

    with patch.object(ConstantFolder, "call_function", calling):
        yield


# Libraries and levels by what was made of them: a loader of Inductor's, or a generated module.  Inductor keeps both and
# makes neither again.
_libraries_of: WeakKeyDictionary[Any, tuple[str, ...]] = WeakKeyDictionary()
_levels_of: WeakKeyDictionary[Any, tuple[str, ...]] = WeakKeyDictionary()


@contextlib.contextmanager
def _watch_libraries(seen: Session) -> Iterator[None]:
    """Note the libraries of generated C++ and the levels of their compile commands, of those that are there too."""
    from torch._inductor.codecache import CppCodeCache
    from torch._inductor.cpp_builder import CppBuilder

    target: Any = CppBuilder.get_target_file_path
    command: Any = CppBuilder.get_command_line
    load: Any = inspect.getattr_static(CppCodeCache, "load_async").__func__

    def targeting(self: Any) -> Any:
        path = target(self)
        if path.endswith(".so"):
            seen.libraries.append(path)
        return path

    def commanding(self: Any) -> Any:
        made = command(self)
        seen.levels.append(level_of(made))
        return made

    def loading(cls: Any, *args: Any, **kwargs: Any) -> Any:
        before = len(seen.libraries)
        loader = load(cls, *args, **kwargs)  # makes the commands every time: its keys are of them
        if made := seen.libraries[before:]:
            _libraries_of[loader] = tuple(made)
        else:
            seen.libraries += _libraries_of.get(loader, ())
        return loader

    before = _counted()
    with (
        patch.object(CppBuilder, "get_target_file_path", targeting),
        patch.object(CppBuilder, "get_command_line", commanding),
        patch.object(CppCodeCache, "load_async", classmethod(loading)),
    ):
        yield
    seen.counted = tuple(name for name, count in _counted().items() if count > before.get(name, 0))


def _counted() -> dict[str, int]:
    """How often Inductor has made code of the micro-kernels that it counts."""
    from torch._dynamo.utils import counters

    return {name: count for name, count in counters["inductor"].items() if name.startswith("cpp_micro")}


def level_of(command: str) -> str:
    """The level of ``machine.isa.ISAS`` that a compile command of Inductor's asks for, "" for none.

    By the flags that its classes add, of which each level has one of its own.
    """
    marks = {
        "amx_fp16": "-mamx-fp16",
        "amx": "-mamx-tile",
        "avx512_vnni": "-mavx512vnni",
        "avx512": "CPU_CAPABILITY_AVX512",
        "avx2": "CPU_CAPABILITY_AVX2",
    }
    return next((level for level, mark in marks.items() if re.search(rf"{re.escape(mark)}(?![\w-])", command)), "")


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


@dataclasses.dataclass(frozen=True)
class CppProgram:
    """What the text of a program says whose kernels are called by C++.

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
_GPU_TEMPLATES = ("triton_tem_", "cutlass_")


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


def ahead_of_time(
    module: torch.nn.Module, args: Sequence[torch.Tensor], dynamic: Sequence[int | None], options: Mapping[str, Any]
) -> tuple[Callable[..., Any], str]:
    """Export a module, compile it with AOTInductor into a package, load that, and read what was generated.

    Args:
        module: a straight-line program.
        args: its arguments.
        dynamic: for each argument the dimension that is M, ``None`` for none.
        options: of Inductor.

    Returns:
        the loaded program, and the text of its C++.
    """
    import tempfile
    import zipfile
    from pathlib import Path

    m = torch.export.Dim("m", min=2)
    shapes = tuple(None if dimension is None else {dimension: m} for dimension in dynamic)
    exported = torch.export.export(module, tuple(args), dynamic_shapes=shapes if any(shapes) else None)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "program.pt2")
        torch._inductor.aoti_compile_and_package(exported, package_path=path, inductor_configs=dict(options))
        with zipfile.ZipFile(path) as package:
            names = [name for name in package.namelist() if name.endswith((".cpp", ".cu"))]
            text = "\n".join(package.read(name).decode() for name in names)
        return until_exit(torch._inductor.aoti_load_package(path)), text


def until_exit(model: Callable[..., Any]) -> Callable[..., Any]:
    """The same program, let go of when the process ends at the latest.

    A package that is loaded lies in a folder of its own, which its destructor removes.  Python need not destroy what is
    left at exit, and then the folder stays in the temporary directory for good.
    """
    held = [model]

    def program(*args: Any, **kwargs: Any) -> Any:
        return held[0](*args, **kwargs)

    finalize(program, held.clear)
    return program


def graphs_skipped() -> int:
    """How often PyTorch has run without the CUDA graph that it was asked for."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["cudagraph_skips"])


def allocators_of(module: ModuleType) -> tuple[str, ...]:
    """Names of the functions by which a generated module gets memory for results, intermediates and workspaces."""
    return tuple(n for n, value in vars(module).items() if n.startswith("empty_strided") and callable(value))


def forget_programs() -> None:
    """Drop what Dynamo keeps of all that it has compiled; a program that is called again is compiled again."""
    torch._dynamo.reset()


def forget_module(module: ModuleType) -> None:
    """Drop a generated module from Inductor's list, which would keep its constants alive."""
    from torch._inductor.codecache import PyCodeCache

    modules = PyCodeCache.modules
    modules[:] = [m for m in modules if m is not module]
