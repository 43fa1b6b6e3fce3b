"""The one adapter to what is private in PyTorch: all that this package touches of Inductor and Dynamo.

Meant for torch 2.11 to 2.15.  Every name that those releases do not promise is
looked up here and nowhere else; what a release lacks is listed by :func:`lacks`, and left out.  All hooks are context
managers: outside of :func:`session` nothing of torch is changed.

The internals are untyped, so ``Any`` stands wherever a value is one of theirs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch
from weakref import finalize

import torch
from packaging.version import Version

from pytest_gemm.backends.inductor import as_machine, stored
from pytest_gemm.backends.inductor.bindings import watch_packing
from pytest_gemm.backends.inductor.compilation import CompileSpec, Session, Wanted
from pytest_gemm.backends.inductor.cpu_isa import (
    generating_for,
    levels_of,
    libraries_of,
    loads,
    watch_libraries,
    without_warnings,
)
from pytest_gemm.backends.inductor.hooks import hooked, is_there, patched
from pytest_gemm.backends.inductor.selection import Listed, watch_selection
from pytest_gemm.core.outcome import Reason
from pytest_gemm.core.text import causes, line_with
from pytest_gemm.machine import software
from pytest_gemm.storage.datafile import document


def native_operators() -> frozenset[str]:
    """Names of ATen's operators that this PyTorch computes by eager kernels in Triton, under conditions; since 2.13."""
    try:
        from torch._native.registry import get_dsl_operations
    except ImportError:
        return frozenset()
    return frozenset(name.rpartition("::")[2] for name in get_dsl_operations("triton"))


def torch_release() -> tuple[int, int]:
    """``(2, 13)`` of ``2.13.0+cpu``."""
    major, minor = Version(torch.__version__).release[:2]
    return major, minor


def lacks() -> tuple[str, ...]:
    """What is not known of this torch, and what it does not offer of what the package uses, one sentence each."""
    found = [text] if (text := software.unknown_torch()) else []
    used = document(Path(__file__).with_name("pytorch.toml"))
    for loss, where in used["needs"].items():
        if not is_there(where):
            found.append(f"torch {torch.__version__} has no {where.replace(':', '.')}: {loss}")
    for loss, name in used["options"].items():
        if not has_option(name):
            found.append(f"torch {torch.__version__} has no Inductor option {name}: {loss}")
    return tuple(found)


# Functions of torch/_inductor/utils.py that remember an answer which depends on options, and two sessions of one
# process may differ in these.
_HASTY = ("use_decompose_k_choice", "get_k_splits")
# A kernel that needs more of a device than there is, in the text of Inductor's exceptions.
_UNFIT = r"No valid triton configs\. OutOf(?:Resources|MemoryError)\b|out of resource: .*Required: \d+,? Hardware limit"
# The tag of the last session that shares what Inductor keeps in memory; "" when that was one that shares nothing.
_sharing = [""]


@contextlib.contextmanager
def _forgetting(user_caches: str) -> Iterator[None]:
    """Let no answer that Inductor gave under other options reach this session, nor this session's any other.

    Nor an answer to another program: the CUTLASS template keeps the configurations that fit, and the code of the
    candidates, by the operands alone, and a later program requests them with another output, accuracy, alpha or beta.
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

    def load(call: Any, *args: Any, **kwargs: Any) -> ModuleType:
        libraries, levels = len(seen.libraries), len(seen.levels)
        module: ModuleType = call(*args, **kwargs)
        if hasattr(module, "call"):
            seen.modules.append(module)
            if made := seen.levels[levels:]:
                libraries_of[module], levels_of[module] = tuple(seen.libraries[libraries:]), tuple(made)
            else:  # a module that is there already loads nothing again
                seen.libraries += libraries_of.get(module, ())
                seen.levels += levels_of.get(module, ())
        return module

    with hooked({"torch._inductor.codecache:PyCodeCache.load_by_key_path": load}, optional=True):
        yield


# -- pure functions of torch, computed once ----------------------------------------------------------
#
# Each is a function of a string alone, and the sum of them is half of the time that a compile takes whose
# kernel is on disk.  The memo lasts as long as the process; torch sees it during a session only.

_remembering = functools.cache(functools.cache)  # one memo for each function


# A template is not changed by its rendering, and torch itself caches its environment.  The parser of expressions calls
# itself on the items of a list through the module, hence through here.  The latency of guards is for the log alone, and
# to measure it the CPU's caches are flushed: 22 ms.  Dynamo keeps the state of CUDA's generator, and where nothing has
# used CUDA that makes its context: seconds for each process of a run on the CPU.
_FASTER: Mapping[str, Callable[..., Any]] = {
    "torch._inductor.codegen.common:KernelTemplate._template_from_string": lambda call, text: _remembering(call)(text),
    "torch._inductor.codegen.cpp_template_kernel:parse_expr_with_index_symbols": lambda call, expr: (
        _remembering(call)(expr) if isinstance(expr, str) else call(expr)
    ),
    "torch._dynamo.guards:profile_guard_manager": lambda *_: 0.0,
    "torch.cuda:get_rng_state": lambda call, *args: call(*args) if torch.cuda.is_initialized() else None,
    "torch._inductor.cpu_vec_isa:VecISA.check_build": loads,
    "torch._inductor.cpp_builder:run_compile_cmd": without_warnings,
    "torch._inductor.codecache:_worker_compile_cpp": stored.compiled,
    "torch._inductor.codecache:write": stored.written,
    "torch._inductor.cpp_builder:CppBuilder.get_target_file_path": stored.probed,
}


# -- the compile itself --------------------------------------------------------------------------------


def users_cache_dir() -> str:
    """``TORCHINDUCTOR_CACHE_DIR`` as the user set it, "" otherwise.

    Inductor itself sets the variable to its default when it first reads the folder, so a default counts as unset.
    """
    import torch._inductor.runtime.cache_dir_utils as utils

    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    return "" if given == os.path.abspath(utils.default_cache_dir()) else given


@contextlib.contextmanager
def cache_dir_set(directory: str) -> Iterator[None]:
    """Let Inductor's caches live in ``directory`` for the block."""
    with patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": directory}):
        yield


def ask_levels(directory: str) -> None:
    """Ask at once for the instruction sets of this CPU: Inductor compiles for one after the other.

    Args:
        directory: where the answers are remembered, that of a :func:`session`.
    """
    from torch._inductor import cpu_vec_isa

    names = ("cpu_vec_isa:VecISA.check_build", "cpp_builder:CppBuilder.get_target_file_path")
    hooks = {where: _FASTER[where] for where in (f"torch._inductor.{name}" for name in names)}
    here = {*getattr(cpu_vec_isa, "x86_isa_checker", list)()}  # none where a release does not tell
    with cache_dir_set(directory), hooked(hooks), ThreadPoolExecutor() as pool:
        list(pool.map(bool, (one for one in cpu_vec_isa.supported_vec_isa_list if {*str(one).split()} <= here)))


@contextlib.contextmanager
def session(spec: CompileSpec, candidate: Wanted = None, listing: bool = False) -> Iterator[Session]:
    """Compile inside the block as requested, and record what becomes of it.

    A tag of the user's caches separates these compiles' entries in AOTAutograd's and the FX graph cache from all
    others; without one both are off, so that every compile is a compile.

    Args:
        spec: options, caches, and the instruction set of the CPU to generate for, see :func:`generating_for`.
        candidate: compile only this one of the candidates instead of benchmarking all, see :func:`watch_selection`.
        listing: end the compile by an exception as soon as ``Session.choices`` is filled.
    """
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config
    import torch._inductor.compile_fx  # first: the modules below import each other in a circle
    import torch._inductor.config as inductor_config
    import torch._inductor.select_algorithm
    import torch.compiler.config as compiler_config
    from torch._dynamo.utils import counters

    tag = "" if listing else spec.cache_tag
    caches: dict[str, Any] = {"fx_graph_cache": bool(tag), "fx_graph_remote_cache": False}
    if hasattr(inductor_config, "autotune_local_cache"):
        caches["autotune_local_cache"] = bool(tag)  # Inductor would remember that a candidate failed, not why
    # Not its patch(): the module is made a configuration at import, which type checkers do not see.
    changes: list[tuple[Any, str, Any]] = [(compiler_config, "cache_key_tag", tag)]
    if not os.environ.get("TORCH_TRACE"):
        # The structured trace writes a record for every step to all handlers; pytest handles every logger.
        changes.append((logging.getLogger("torch.__trace"), "handlers", []))
    if hasattr(dynamo_config, "run_gc_after_compile"):
        changes.append((dynamo_config, "run_gc_after_compile", False))
    seen = Session()
    before = Counter(counters["inductor"])
    with contextlib.ExitStack() as stack:
        for change in (
            cache_dir_set(spec.directory),
            inductor_config.patch({**spec.options, **caches}),
            functorch_config.patch({"enable_autograd_cache": bool(tag)}),
            patched(changes),
            hooked(_FASTER, optional=True),
            _forgetting(tag),
            watch_selection(seen, candidate, listing),
            _watch_modules(seen),
            watch_packing(seen),
            generating_for(spec.request.isa),
            as_machine.believing(spec.request.machine, spec.multiprocessors),
            as_machine.compiling_only(spec.request),
            watch_libraries(seen),
            torch.no_grad(),
        ):
            stack.enter_context(change)
        try:
            yield seen
        finally:
            rose = Counter(counters["inductor"]) - before
            seen.fusions = rose["cpp_epilogue_fusion_counter"]
            seen.counted = tuple(name for name in rose if name.startswith("cpp_micro"))


@functools.cache
def _options() -> frozenset[str]:
    import torch._inductor.config as inductor_config

    config: Any = inductor_config
    # A copy has no aliases: the old names of options that a release has renamed.
    return frozenset(getattr(config, "_config", None) or config.get_config_copy())


def has_option(name: str) -> bool:
    """Whether this release's Inductor has an option of this name."""
    return name in _options()


def known(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that this release has; an unknown one would be an exception, see :func:`lacks`."""
    return {name: value for name, value in options.items() if has_option(name)}


def mode_options(mode: str) -> dict[str, Any]:
    """Inductor's options of a mode of ``torch.compile``, as this release has them."""
    import torch._inductor

    return dict(torch._inductor.list_mode_options(mode))


def sees_selections() -> bool:
    """Whether this release's selection of a candidate can be watched, and narrowed."""
    return is_there("torch._inductor.select_algorithm:AlgorithmSelectorCache.__call__")


def option(*names: str) -> str:
    """The first of these names of one Inductor option that this release has; releases rename them.

    Raises:
        AttributeError: when it has none of them.
    """
    for name in names:
        if has_option(name):
            return name
    raise AttributeError(f"torch {torch.__version__} has no Inductor option {' or '.join(names)}")


def never_recompile() -> contextlib.AbstractContextManager[Any]:
    """A block in which a compiled function raises instead of compiling again; see :func:`recompiled`."""
    stance: Any = torch.compiler.set_stance("fail_on_recompile")
    return stance  # type: ignore[no-any-return]


def recompiled(error: RuntimeError) -> bool:
    """Whether ``error`` is what :func:`never_recompile` raises.  torch has no type of its own for it."""
    return "fail_on_recompile" in str(error)


def listed(error: BaseException) -> bool:
    """Whether ``error`` is how a listing session ends a compile; Inductor and Dynamo wrap what is raised in them."""
    return any(isinstance(one, Listed) for one in causes(error))


def why_pruned(error: BaseException) -> Reason | None:
    """Why autotuning leaves a candidate out that raised this, where that is no defect of the candidate.

    Either it cannot be compiled for this device, or it needs more of it than there is.  ``None`` for any other
    exception: Inductor would go on without the candidate after most of them, too, but they are failures.  By name:
    torch and triton move these exceptions between modules.  Inductor wraps what a compile raises, so the causes are
    looked at too.
    """
    for one in causes(error):
        kind, text = type(one).__name__, str(one)
        if kind == "CUDACompileError":
            return Reason("compile-error", _compiler_message(str(getattr(one, "output", text))))
        # What stopped it is in the text alone: the name OutOfMemoryError is torch's as well, for memory that may be
        # there the next time.
        if kind == "OutOfResources" or re.search(_UNFIT, text):
            return Reason("out-of-resources", line_with(text, "Required|out of resource"))
        if kind == "PTXASError" or "No valid triton configs. PTXASError" in text:
            return Reason("compile-error", line_with(text, "ptxas|PTXAS"))
    return None


def _compiler_message(output: str) -> str:
    """What a compiler complains of first: its line with the word error, without the path before it."""
    line = line_with(output, r"\b(error|fatal)\b")
    return re.sub(r"^\S*/(?=[^/\s]+\(\d+\))", "", line)


def ahead_of_time(
    module: torch.nn.Module,
    args: Sequence[torch.Tensor],
    dynamic: Sequence[Mapping[int, str]],
    options: Mapping[str, Any],
) -> tuple[Callable[..., Any], str]:
    """Export a module, compile it with AOTInductor into a package, load that, and read what was generated.

    Args:
        module: a straight-line program.
        args: its arguments.
        dynamic: the dynamic sizes among each argument's dimensions, by their names.
        options: of Inductor.

    Returns:
        the loaded program, and the text of its C++.
    """
    import tempfile
    import zipfile

    dims = {name: torch.export.Dim(name, min=2) for places in dynamic for name in places.values()}
    shapes = tuple({place: dims[name] for place, name in places.items()} or None for places in dynamic)
    exported = torch.export.export(module, tuple(args), dynamic_shapes=shapes if dims else None)
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


def forget_module(module: ModuleType) -> None:
    """Drop a generated module from Inductor's list, which would keep its constants alive."""
    codecache = sys.modules.get("torch._inductor.codecache")
    if codecache is not None:  # a test may have unloaded it, and nothing is imported while a process ends
        modules = codecache.PyCodeCache.modules
        modules[:] = [m for m in modules if m is not module]
