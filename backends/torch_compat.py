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
import os
import re
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

__all__ = [
    "Packing",
    "Session",
    "cache_dir_set",
    "forget_module",
    "kernels_of",
    "lacks",
    "mark_dynamic",
    "never_recompile",
    "nth",
    "option",
    "out_of_resources",
    "recompiled",
    "same_bits",
    "session",
    "torch_release",
    "vector_isa",
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
        dropped: names of candidates that were tried alone and could not be compiled or launched, with the reason.
        chosen: names of those that became a node of the program.
        foreign: those of ``chosen`` that are ATen, MKL or oneDNN calls.
        refused: ops for which the selection had no candidate at all.
        modules: generated Python modules, in order of loading.
        packings: replayable weight packings.
    """

    choices: list[str] = dataclasses.field(default_factory=list)
    dropped: dict[str, str] = dataclasses.field(default_factory=dict)
    chosen: list[str] = dataclasses.field(default_factory=list)
    foreign: list[str] = dataclasses.field(default_factory=list)
    refused: list[str] = dataclasses.field(default_factory=list)
    modules: list[ModuleType] = dataclasses.field(default_factory=list)
    packings: list[Packing] = dataclasses.field(default_factory=list)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two dense tensors agree in dtype, shape and every bit (a NaN equals itself)."""
    if a.is_mkldnn or b.is_mkldnn or a.dtype != b.dtype or a.shape != b.shape:
        return False
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.detach().contiguous().view(kind), b.detach().contiguous().view(kind))


def _caller_name(choice: Any) -> str:
    """A choice by what it is: ``CppMicroGemmFP32Vec(8x48x1)``, ``triton_mm(64x32x128,s4,w8)``, a CUTLASS configuration.

    Inductor numbers Triton's callers in the order in which a process makes them, so the number says nothing.
    """
    choice = getattr(choice, "_wrapped", choice)
    template: Any = getattr(choice, "template", None)
    blocking = getattr(template, "register_blocking", None)
    if blocking is not None:
        return f"{template.name}({blocking.block_m}x{blocking.block_n}x{blocking.block_k})"
    name = str(getattr(choice, "name", choice))
    if (operation := (getattr(choice, "info_kwargs", None) or {}).get("op")) is not None:
        return f"{operation.configuration_name()},swizzle={choice.info_kwargs.get('swizzle')}"
    if (metadata := getattr(getattr(choice, "kernel", None), "metadata", None)) is not None:
        return str(getattr(metadata, "kernel_name", None) or getattr(metadata, "operator_name", name))
    log = getattr(choice, "log_info", None)
    if isinstance(log, dict) and "tile_shape" in log:
        tile = re.sub(r"[^\d,-]", "", str(log["tile_shape"])).replace(",", "x")  # Inductor's order: M, K, N
        return f"{re.sub(r'_[0-9]+$', '', name)}({tile},s{log.get('num_stages')},w{log.get('num_warps')})"
    return re.sub(r"_[0-9]+$", "", name) if name.startswith("decompose_k") else name


def _is_extern(choice: Any) -> bool:
    from torch._inductor.select_algorithm import ExternKernelCaller

    return isinstance(getattr(choice, "_wrapped", choice), ExternKernelCaller)


def nth(candidate: int, count: int) -> int:
    """Index of a candidate among ``count``: consecutive numbers lie far apart, for neighbours differ least."""
    return candidate * 7919 % count


@contextlib.contextmanager
def _watch_selection(seen: Session, candidate: int | None = None) -> Iterator[None]:
    """Note the candidates of every selection, and the one whose node enters the program.

    Args:
        seen: where to note them.
        candidate: leave only this one of them, counted round; ``None``: Inductor chooses by benchmarking.
    """
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    original = AlgorithmSelectorCache.__call__

    def watched(self: Any, name: str, choices: list[Any], *args: Any, **kwargs: Any) -> Any:
        if not choices:
            seen.refused.append(name)
        seen.choices.extend(map(_caller_name, choices))
        if candidate is not None and choices:
            # In place: an epilogue's lowering may hold the same list.
            choices[:] = [choices[nth(candidate, len(choices))]]
        for choice in choices:
            choice.output_node = _noting(choice, choice.output_node, seen)
        return original(self, name, choices, *args, **kwargs)

    with patch.object(AlgorithmSelectorCache, "__call__", watched), _watch_deferred(seen):
        yield


@contextlib.contextmanager
def _watch_deferred(seen: Session) -> Iterator[None]:
    """Note the Triton candidate that a selection ended with which was put off until epilogues could be benchmarked.

    A buffer may be finalised more than once, with the last one holding.
    """
    from torch._inductor.ir import MultiTemplateBuffer

    original: Any = MultiTemplateBuffer.finalize_as_triton_caller
    places: dict[int, tuple[Any, int]] = {}  # by buffer, which is kept so that its id stays its own

    def watched(self: Any, caller: Any) -> Any:
        if id(self) in places:
            seen.chosen[places[id(self)][1]] = _caller_name(caller)
        else:
            places[id(self)] = (self, len(seen.chosen))
            seen.chosen.append(_caller_name(caller))
        return original(self, caller)

    with patch.object(MultiTemplateBuffer, "finalize_as_triton_caller", watched):
        yield


def _noting(choice: Any, output_node: Callable[[], Any], seen: Session) -> Callable[[], Any]:
    @functools.wraps(output_node)
    def noting() -> Any:
        node = output_node()
        seen.chosen.append(_caller_name(choice))
        if _is_extern(choice):
            seen.foreign.append(_caller_name(choice))
        return node

    return noting


@contextlib.contextmanager
def _watch_modules(seen: Session) -> Iterator[None]:
    """Note the Python modules that Inductor generates, or loads from its caches."""
    from torch._inductor.codecache import PyCodeCache

    original = PyCodeCache.load_by_key_path

    def watched(*args: Any, **kwargs: Any) -> ModuleType:
        module: ModuleType = original(*args, **kwargs)
        if hasattr(module, "call"):
            seen.modules.append(module)
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

    with patch.object(CppGemmTemplate, "prep_weight", classmethod(watched)):
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
    options: Mapping[str, Any], *, directory: str, user_caches: str = "", candidate: int | None = None
) -> Iterator[Session]:
    """Compile inside the block with these Inductor options and record what becomes of it.

    Args:
        options: names and values of ``torch._inductor.config``; one that this release lacks is an error
            there.
        directory: where kernels are kept, see :func:`cache_dir_set`.
        user_caches: a tag that separates these compiles' entries in AOTAutograd's and the FX graph cache from all
            others; "" turns both off, so that every compile is a compile.
        candidate: compile only this one of the candidates instead of benchmarking all, see ``_watch_selection``.
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
        stack.enter_context(functorch_config.patch({"enable_autograd_cache": bool(user_caches)}))
        # Not its patch(): the module is made a configuration at import, which type checkers do not see.
        stack.enter_context(patch.object(compiler_config, "cache_key_tag", user_caches))
        stack.enter_context(_memoised())
        stack.enter_context(_watch_selection(seen, candidate))
        stack.enter_context(_watch_modules(seen))
        stack.enter_context(_watch_packing(seen))
        stack.enter_context(torch.no_grad())
        yield seen


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


# Exceptions that say that a candidate needs more of the device than there is; Inductor drops such a one when it
# benchmarks several.  By name: torch and triton move them between modules.
_OUT_OF_RESOURCES = frozenset({"NoTritonConfigsError", "OutOfResources", "PTXASError"})


def out_of_resources(error: BaseException) -> str:
    """Name of the exception by which a candidate says that it does not fit the device, "" for any other error.

    Inductor wraps what a compile raises, so the causes are looked at too.
    """
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if type(one).__name__ in _OUT_OF_RESOURCES:
            return type(one).__name__
        todo += [one.__cause__, one.__context__, getattr(one, "inner_exception", None)]
    return ""


def vector_isa() -> str:
    """The instruction set that C++ kernels are generated for, ``avx512`` for instance."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    return str(pick_vec_isa())


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


def forget_module(module: ModuleType) -> None:
    """Drop a generated module from Inductor's list, which would keep its constants alive."""
    from torch._inductor.codecache import PyCodeCache

    modules = PyCodeCache.modules
    modules[:] = [m for m in modules if m is not module]
