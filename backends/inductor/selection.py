"""Watching and steering the selection of a candidate."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch

from pytest_gemm.backends.cpp import micro_kernels
from pytest_gemm.backends.inductor import naming
from pytest_gemm.backends.inductor.compilation import Session
from pytest_gemm.backends.inductor.cpu_isa import ISA_NAMES
from pytest_gemm.outcome import Reason

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


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two dense tensors agree in dtype, shape and every bit (a NaN equals itself)."""
    if a.is_mkldnn or b.is_mkldnn or a.dtype != b.dtype or a.shape != b.shape:
        return False
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.detach().contiguous().view(kind), b.detach().contiguous().view(kind))


# -- candidates ----------------------------------------------------------------------------------------


def choice_names(choices: Iterable[Any]) -> tuple[str, ...]:
    """The candidates of one selection by what they are, no two alike: what ``--gemm-candidates`` takes.

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
    # Inductor numbers callers in the order in which a process makes them, so the number has no meaning.
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
    """Note the micro-kernel that each C++ template of several linears requests before it is made."""
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


class Listed(Exception):
    """The candidates are known, or there was no selection: ends a compile inside Inductor that was to list them."""


def _blockings(choice: Any) -> str:
    """How a C++ template would split the product over threads and caches, in register blocks; "" where unknown.

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
    """Watches the selections of one compile, and narrows them where a candidate is requested.

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
            raise Listed
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
def watch_selection(seen: Session, candidate: int | str | None = None, listing: bool = False) -> Iterator[None]:
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
    benchmark_in_worker = autotune_process.benchmark_in_sub_process
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

    def benchmarking_in_worker(choices: Any) -> Any:
        return timed(benchmark_in_worker(choices), "its benchmark, in a process of its own, failed or took too long")

    def autotuning(*args: Any, **kwargs: Any) -> Any:
        return timed(autotune(*args, **kwargs), "its benchmark gave no time")

    with (
        patch.object(AlgorithmSelectorCache, "__call__", selecting),
        patch.object(AlgorithmSelectorCache, "benchmark_choice", classmethod(benchmarking_one)),
        patch.object(AlgorithmSelectorCache, "do_autotuning", autotuning),
        patch.object(autotune_process, "benchmark_in_sub_process", benchmarking_in_worker),
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
        raise Listed

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
    """Where a candidate is requested by name, make no other one's Triton code; for a list of them, make none.

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
            found.append(micro_kernels.Registered(name, types, ISA_NAMES.get(isa, isa.removeprefix("Vec").lower())))
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
    """Where a micro-kernel is requested by name, have no other one registered.

    Without any, Inductor takes the reference one.

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
    """Note every micro-kernel that the templates could be given instead of the one that the heuristic selects."""
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
        watch.seen.unsupported |= {name: why for name, why in refused.items() if name not in watch.others}
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
        text = f"Inductor's {getattr(check, '__name__', 'extra check')} rejects the problem"
    return Reason(micro_kernels.UNSUPPORTED, text)


# Functions of torch/_inductor/utils.py that remember an answer which depends on options, and two sessions of one
# process may differ in these.
HASTY = ("use_decompose_k_choice", "get_k_splits")


# The tag of the last session that shares what Inductor keeps in memory; "" when that was one that shares nothing.
sharing = [""]


@contextlib.contextmanager
def watch_packing(seen: Session) -> Iterator[None]:
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
