"""Watching and steering the selection of a candidate."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any

from pytest_gemm.backends.cpp import micro_kernels
from pytest_gemm.backends.inductor import naming
from pytest_gemm.backends.inductor.compilation import Session, Wanted
from pytest_gemm.backends.inductor.hooks import hooked, patched
from pytest_gemm.core.outcome import Reason

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
        name = f"{name}-{m}x{n}x{k},s{log.get('num_stages')},w{log.get('num_warps')}"
    # The template's own constants are in capitals: "ACC_TYPE='tl.float32', ALLOW_TF32=False, BLOCK_K=16, ..."
    return name, dict(re.findall(r"\b([A-Z]\w*)='?([^,')]*)'?", str(getattr(choice, "description", ""))))


# Attribute that a C++ template of several linears is given: the class of its micro-kernel, which it does not tell.
_MICRO_KERNEL = "pytest_gemm_micro_kernel"


class _Unrendered:
    """What is known of a Triton candidate before its code is made: enough for :func:`choice_names`.

    Args:
        template: name of the template, ``mm`` for instance.
        kwargs: what its ``generate`` was given.
        make: makes the candidate, or ``None`` where Inductor finds it impossible.

    Attributes:
        annotations: Inductor's, on every candidate that it has asked for.
    """

    annotations: dict[str, Any]

    def __init__(self, template: str, kwargs: Mapping[str, Any], make: Callable[[], Any]) -> None:
        self._make = make
        self.name = f"triton_{template}_0"
        self.log_info = {
            "tile_shape": tuple(kwargs.get(f"BLOCK_{d}", -1) for d in "MKN"),
            "num_stages": kwargs.get("num_stages"),
            "num_warps": kwargs.get("num_warps"),
        }
        self.description = ", ".join(f"{key}={kwargs[key]!r}" for key in sorted(kwargs) if key[:1].isupper())

    def rendered(self) -> Any:
        """The candidate, or ``None`` where it is impossible."""
        try:
            made = self._make()
        except NotImplementedError:  # so Inductor takes it, too
            return None
        if made is not None and hasattr(self, "annotations"):
            made.annotations = self.annotations
        return made


def _rendered(choice: Any) -> Any:
    return choice.rendered() if isinstance(choice, _Unrendered) else choice


def nth(candidate: int, count: int) -> int:
    """Index of a candidate among ``count``: consecutive numbers lie far apart, for neighbours differ least."""
    return candidate * 7919 % count


class Listed(Exception):
    """The candidates are known, or there was no selection: ends a compile inside Inductor that was to list them."""


# The template of several linears.
_GROUPED_TEMPLATE = "torch._inductor.codegen.cpp_grouped_gemm_template"
_IN_WORKER = "its benchmark, in a process of its own, failed or took too long"


class _Selection:
    """Watches the selections of one compile, and narrows them where a candidate is requested.

    A selection inside another one (the product within decompose-K) is none of ours and passes.
    """

    def __init__(self, seen: Session, candidate: Wanted, listing: bool) -> None:
        self.seen = seen
        self.candidate = candidate
        self.listing = listing
        self.selector: Any = None
        self.depth = 0
        # Candidates that Inductor has and does not offer.
        self.others: list[str] = []
        # By id of the candidate, which is kept so that the id stays its own.
        self.named: dict[int, tuple[Any, str]] = {}
        # Deferred candidates: place in seen.chosen by id of the buffer, which is kept for the same reason.
        self.deferred: dict[int, tuple[Any, int]] = {}
        # Class of the micro-kernel that a template has requested last.
        self.created = "unknown"

    @property
    def hooks(self) -> dict[str, Callable[..., Any]]:
        """What is hooked, by its place."""
        found: dict[str, Callable[..., Any]] = {
            "torch._inductor.select_algorithm:AlgorithmSelectorCache.__call__": self.select,
            "torch._inductor.select_algorithm:AlgorithmSelectorCache.benchmark_choice": self.benchmark,
            "torch._inductor.select_algorithm:AlgorithmSelectorCache.do_autotuning": partial(
                self.time, "its benchmark gave no time"
            ),
            "torch._inductor.autotune_process:benchmark_in_sub_process": partial(self.time, _IN_WORKER),
            "torch._inductor.ir:MultiTemplateBuffer.finalize_as_triton_caller": self.finalize,
            # A selection with NVGEMM is deferred since 2.14.
            "torch._inductor.ir:MultiTemplateBuffer.finalize_as_nvgemm_caller": self.finalize,
            f"{_GROUPED_TEMPLATE}:create_micro_gemm": partial(self.create, micro_kernels.GROUPED),
            f"{_GROUPED_TEMPLATE}:CppGroupedGemmTemplate.__init__": self.begin_grouped,
        }
        if self.listing:  # without a selection a compile ends before its code is made, which must not be run
            found["torch._inductor.graph:GraphLowering.compile_to_module"] = self.end
            found["torch._inductor.codecache:AotCodeCompiler.compile"] = self.end
            found["torch._inductor.codegen.cpp_gemm_template:create_micro_gemm"] = partial(self.create, "")
        if self.listing or self.candidate is not None:
            found["torch._inductor.select_algorithm:TritonTemplate.generate"] = self.generate
        return found

    # -- the hooks ---------------------------------------------------------------------------------------

    def select(self, call: Any, selector: Any, name: str, choices: list[Any], *args: Any, **kwargs: Any) -> Any:
        """Note the candidates of a selection, and leave those that are wanted."""
        if self.depth:
            choices[:] = filter(None, map(_rendered, choices))
        else:
            self._enter(selector, name, choices)
        with self._within():
            return call(selector, name, choices, *args, **kwargs)

    def benchmark(self, call: Any, choice: Any, *args: Any, **kwargs: Any) -> Any:
        """Note a candidate whose benchmark fails."""
        with self._noting_failure(choice):
            return call(choice, *args, **kwargs)

    def time(self, otherwise: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Note how long the candidates took, and why there is ``otherwise`` no time."""
        with self._within():  # a deferred selection compiles the slices' products here, with no other around them
            timings = call(*args, **kwargs)
        for choice, milliseconds in (timings or {}).items():
            if math.isfinite(milliseconds):
                self.seen.timings[self._name(choice)] = milliseconds * 1e-3
            else:
                self._fail(choice, Reason("benchmark-failed", otherwise))
        return timings

    def finalize(self, call: Any, buffer: Any, caller: Any) -> Any:
        """Note the candidate of a selection that was deferred until epilogues could be benchmarked.

        A buffer may be finalised more than once, with the last one holding.
        """
        if id(buffer) in self.deferred:
            self.seen.chosen[self.deferred[id(buffer)][1]] = self._name(caller)
        else:
            self.deferred[id(buffer)] = (buffer, len(self.seen.chosen))
            self.seen.chosen.append(self._name(caller))
        return call(buffer, caller)

    def end(self, *_: Any, **__: Any) -> Any:
        """End a compile that has no selection."""
        raise Listed

    def generate(self, call: Any, template: Any, *args: Any, **kwargs: Any) -> Any:
        """Make no Triton code before it is known which candidate is wanted; for a list of them, make none.

        It takes milliseconds each, at every compile, and the exhaustive search space has thousands of them.
        """
        return _Unrendered(template.name, kwargs, partial(call, template, *args, **kwargs))

    def create(self, suffix: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the micro-kernel that a C++ template requests; for a list, every one that it could be given."""
        if self.listing:
            self._list_micro_kernels(call, suffix, inspect.signature(call).bind(*args, **kwargs))
        kernel = call(*args, **kwargs)
        self.created = type(kernel).__name__
        return kernel

    def begin_grouped(self, call: Any, template: Any, *args: Any, **kwargs: Any) -> None:
        """Give the template the class of its micro-kernel."""
        call(template, *args, **kwargs)
        setattr(template, _MICRO_KERNEL, self.created)

    # -- what they do ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _within(self) -> Iterator[None]:
        """A block whose selections are inside another one."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def _enter(self, selector: Any, name: str, choices: list[Any]) -> None:
        """A selection begins: note its candidates and leave those that are wanted, in place."""
        seen = self.seen
        self.selector = selector
        if not choices:
            seen.empty.append(name)
        names = choice_names(choices)
        seen.choices.extend(names)
        if self.listing:
            seen.choices.extend(name for name in self.others if name not in names)
            raise Listed
        if self.candidate is not None and choices:
            index = self._index(names)
            # The next one takes the place of one that Inductor finds impossible.
            turned = ((names[i], _rendered(choices[i])) for i in (*range(index, len(names)), *range(index)))
            found = next(((called, choice) for called, choice in turned if choice is not None), None)
            if found is None:
                seen.empty.append(name)
            # In place: an epilogue's lowering may hold the same list.
            names, choices[:] = ((found[0],), [found[1]]) if found else ((), [])
            seen.candidate = "".join(names)
        for choice, called in zip(choices, names, strict=True):
            self.named[id(choice)] = choice, called
            choice.output_node = self._noting_node(choice, choice.output_node)
            if hasattr(choice, "precompile"):
                choice.precompile = self._noting_failure(choice)(choice.precompile)

    def _index(self, names: Sequence[str]) -> int:
        if isinstance(self.candidate, int):
            return nth(self.candidate, len(names))
        wanted = (self.candidate,) if isinstance(self.candidate, str) else self.candidate or ()
        # A program with several selections has the name in one of them; the others take their first.
        return next((names.index(name) for name in wanted if name in names), 0)

    def _name(self, choice: Any) -> str:
        """What a candidate is called, also one that was made after the selection."""
        return self.named[id(choice)][1] if id(choice) in self.named else choice_names([choice])[0]

    def _fail(self, choice: Any, why: Exception | Reason) -> None:
        """Note that a candidate failed; the first failure holds."""
        self.seen.failed.setdefault(self._name(choice), why)

    def leave(self) -> None:
        """The compile is over: what failed without an exception, and nothing of Inductor's kept alive."""
        for choice, _ in self.named.values():
            if getattr(choice, "failed", False):
                self._fail(choice, Reason("compile-timeout", "its compile did not end within Inductor's hour"))
        self.named.clear()
        # It would keep every candidate, and with it the whole graph, as long as the process lives.
        getattr(self.selector, "precompile_cache", {}).clear()

    def _noting_node(self, choice: Any, output_node: Callable[[], Any]) -> Callable[[], Any]:
        from torch._inductor.codegen.subgraph import SubgraphChoiceCaller
        from torch._inductor.select_algorithm import ExternKernelCaller

        @wraps(output_node)
        def noting() -> Any:
            with self._within():
                node = output_node()
            name = self._name(choice)
            self.seen.chosen.append(name)
            if isinstance(getattr(choice, "_wrapped", choice), ExternKernelCaller):
                self.seen.foreign.append(name)
            if isinstance(choice, SubgraphChoiceCaller):
                self.seen.subgraphs.append(name)
            return node

        return noting

    @contextlib.contextmanager
    def _noting_failure(self, choice: Any) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._fail(choice, error)
            raise

    def _list_micro_kernels(self, create: Any, suffix: str, given: inspect.BoundArguments) -> None:
        """Note every micro-kernel that a template could be given instead of the one that the heuristic selects."""
        from torch._inductor.codegen import cpp_micro_gemm

        def kernel_of(kept: Mapping[Any, list[Any]]) -> Any:
            with patched([(cpp_micro_gemm, "micro_gemm_configs", kept)]):
                return create(*given.args, **given.kwargs)

        given.apply_defaults()
        asked, isa = given.arguments, cpp_micro_gemm.pick_vec_isa()
        types = asked["input_dtype"], asked["input2_dtype"], asked["output_dtype"] or asked["input_dtype"]
        for kind, config, kernel in _registry():
            if types != (config.input_dtype, config.input2_dtype, config.output_dtype):
                continue
            if isinstance(isa, config.vec_isa_cls) and type(kernel_of({kind: [config]})) is kind:
                self.others.append(kernel + suffix)
        if (reference := kernel_of({})) is not None:
            name = micro_kernels.kernel_name(type(reference).__name__, reference.register_blocking)
            self.others.append(name + suffix)


@contextlib.contextmanager
def watch_selection(seen: Session, candidate: Wanted = None, listing: bool = False) -> Iterator[None]:
    """Note the candidates of every selection, which of them fail, and the one whose node enters the program.

    Args:
        seen: where to note them.
        candidate: leave only this one of them.
        listing: end the compile as soon as the candidates are known.
    """
    watch = _Selection(seen, candidate, listing)
    forced = [] if listing else _forcing_micro_kernel(candidate)
    with hooked(watch.hooks, optional=True), patched(forced):
        try:
            yield
        finally:
            watch.leave()


# -- micro-kernels of the C++ templates ------------------------------------------------------------------
#
# Inductor's templates ask create_micro_gemm() for one micro-kernel, and its heuristic takes one of those registered in
# micro_gemm_configs.  With only one of them registered it takes that one, or the reference one where it does not fit,
# which is then not the requested candidate.

# The name of a class of micro-kernels, with which a candidate of the C++ templates begins.
_IS_MICRO = re.compile(rf"{micro_kernels.NAME}(?:{micro_kernels.GROUPED})?")


def _registry() -> list[tuple[Any, Any, str]]:
    """Class, configuration and name of every micro-kernel and register blocking, in Inductor's order."""
    importlib.import_module("torch._inductor.compile_fx")  # first: what is below it imports each other in a circle
    from torch._inductor.codegen import cpp_micro_gemm

    return [
        (kind, config, micro_kernels.kernel_name(kind.__name__, config.register_blocking))
        for kind, configs in cpp_micro_gemm.micro_gemm_configs.items()
        for config in configs
    ]


def _forcing_micro_kernel(candidate: Wanted) -> list[tuple[Any, str, Any]]:
    """Where a micro-kernel is requested by name, have no other one registered."""
    if not isinstance(candidate, str) or not _IS_MICRO.fullmatch(candidate):
        return []
    from torch._inductor.codegen import cpp_micro_gemm

    kept: dict[Any, list[Any]] = {kind: [] for kind in cpp_micro_gemm.micro_gemm_configs}
    for kind, config, name in _registry():
        if name == micro_kernels.kernel_of(candidate):
            kept[kind].append(config)
    return [(cpp_micro_gemm, "micro_gemm_configs", kept)]
