"""What is private in PyTorch around its CUTLASS backend: where kernels are compiled, and how they are generated.

Two adapters, both context managers, without which nothing of torch is changed:

* :func:`stored` lets Inductor take the objects of its CUTLASS kernels from a ``storage.kernel_store.Store``;
* :func:`collecting` has Inductor generate the kernels of a program and stops it before it compiles any.  It needs no
  GPU: the program's inputs are fake, and so is the device.

Written against torch 2.11 and 2.13.  The internals are untyped, so ``Any`` stands wherever a value is one of theirs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from pytest_gemm.backends.inductor import stored as stored_files
from pytest_gemm.backends.inductor.hooks import hooked, patched
from pytest_gemm.core.text import causes
from pytest_gemm.storage import digests
from pytest_gemm.storage.kernel_store import CompileError, Job, Store, Toolchain, entry_of, renamed

# -- the compiler as Inductor calls it -------------------------------------------------------------------


def toolchain(setup: Toolchain) -> Toolchain:
    """The compiler with the flags that Inductor's configuration of this moment gives it."""
    from torch._inductor.codegen.cuda import compile_utils

    host = (f"-Xcompiler={option}" for option in compile_utils._nvcc_host_compiler_options())
    return dataclasses.replace(
        setup,
        architecture=str(compile_utils._nvcc_arch_as_compile_option()),
        flags=(*compile_utils._nvcc_compiler_options(), *host),
        includes=tuple(compile_utils._cutlass_include_paths()),
    )


def share_cuda_package() -> None:
    """Let NVIDIA's Python bindings and the package that Inductor puts in their place be one package ``cuda``.

    To import CUTLASS's generators Inductor puts a ``cuda`` of its own on the path.  The bindings' ``cuda`` is a
    namespace, which any real package of that name hides: the CuTe DSL could not be imported in that process any more
    (``No module named 'cuda.bindings'``).  The other way round the generators miss ``cuda.__version__``.  Both import
    it late, so here it is imported already.
    """
    try:
        package: Any = importlib.import_module("cuda")
    except ModuleNotFoundError:
        return
    if not hasattr(package, "__version__"):
        package.__version__ = torch.version.cuda
    if not hasattr(package, "bindings"):
        theirs = [str(Path(place, "cuda")) for place in sys.path if Path(place, "cuda", "bindings").is_dir()]
        package.__path__ = [*package.__path__, *(place for place in theirs if place not in package.__path__)]


@contextlib.contextmanager
def stored(store: Store, setup: Toolchain) -> Iterator[None]:
    """Let Inductor take the objects of its CUTLASS kernels from ``store``, which compiles what is missing.

    Inductor compiles a kernel into an object and links that into a library of its own; only the first step is
    answered here.  It wants its own name for the entry function, so the object is renamed on the way.

    Args:
        store: where the objects are.
        setup: how a missing one is compiled.
    """
    from torch._inductor import exc
    from torch._inductor.codecache import CUDACodeCache, get_lock_dir

    def compile_kernel(call: Any, source_code: str, ext: str, extra_args: list[str] | None = None) -> Any:
        key, text_path = CUDACodeCache.write(source_code, ext)
        if ext != "o" or extra_args:
            lock = Path(get_lock_dir()) / f"{key}.lock"
            try:
                with stored_files.whole([Path(text_path).with_suffix(f".{ext}")], lock):
                    return call(source_code, ext, extra_args)
            except exc.CUDACompileError:
                # The objects are ours, so a library was not linked: the machine lacks one.  Inductor would remember
                # that as the kernel's own failure, for ever.
                CUDACodeCache.cache.pop(key + ext, None)
                Path(text_path).with_suffix(f".{ext}.error").unlink(missing_ok=True)
                raise
        place = Path(text_path).with_suffix(".o")
        job = Job.of(source_code, toolchain(setup))
        try:
            made = store.obtain(job)
        except CompileError as error:
            raise exc.CUDACompileError(job.toolchain.command(text_path, str(place)), str(error).encode()) from error
        if not digests.is_whole(place):
            renamed(made, entry_of(source_code), place)
        return str(place), key, text_path

    faster = {"torch._inductor.codegen.cutlass.utils:_gen_ops_cached": _operations}
    share_cuda_package()
    try:
        with (
            hooked({"torch._inductor.codecache:CUDACodeCache.compile": compile_kernel}),
            hooked(faster, optional=True),
        ):
            yield
    finally:
        share_cuda_package()


@functools.cache
def _operations(call: Any, *asked: Any) -> list[Any]:
    """All of CUTLASS's operations, without those that Inductor would leave out anew for each product."""
    from torch._inductor.codegen.cutlass.gemm_template import CUTLASSGemmTemplate
    from torch.utils import _pytree

    found: list[Any] = CUTLASSGemmTemplate.global_filter_ops(_pytree.tree_leaves(call(*asked)))
    return found


# -- generation without a device -------------------------------------------------------------------------


class _Enough(Exception):
    """Everything has been generated; nothing of it is to be compiled or loaded."""


def faked(tree: dict[str, Any]) -> dict[str, Any]:
    """The same containers with tensors without memory on a CUDA device, each in the geometry of its own."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils import _pytree

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        memory = torch.empty(size, dtype=tensor.dtype, device="cuda:0")
        return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    with FakeTensorMode():
        found: dict[str, Any] = _pytree.tree_map_only(torch.Tensor, fake, tree)
    return found


# The properties of a device that are read while a program is generated, those of an H200.  Only the architecture and
# "more than 68 multiprocessors" (below that Inductor does not autotune) decide which kernels are generated: tile sizes
# come from CUTLASS's list, and the kernels themselves query the number of multiprocessors at run time.
def _properties(architecture: str) -> types.SimpleNamespace:
    number = int(architecture.rstrip("af"))
    return types.SimpleNamespace(
        name=f"a device of architecture {architecture}",
        major=number // 10,
        minor=number % 10,
        multi_processor_count=132,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=140 << 30,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=227 << 10,
        shared_memory_per_multiprocessor=228 << 10,
        L2_cache_size=60 << 20,
        gcnArchName="",
    )


@contextlib.contextmanager
def _device_set(architecture: str) -> Iterator[None]:
    """Let Inductor believe in a CUDA device of this architecture."""
    import torch._dynamo.device_interface as interfaces
    import torch._inductor.compile_fx
    import torch.utils._triton as triton_utils
    from torch._inductor import scheduler
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime.hints import DeviceProperties

    known = _properties(architecture)
    cuda: Any = interfaces.get_interface_for_device("cuda")

    # It reads the pretended device; its cache would keep what it read.
    create: Any = DeviceProperties.create
    uncached = functools.partial(create.__func__.__wrapped__, DeviceProperties)

    def properties(_device: Any = None) -> Any:
        return known

    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "get_device_properties", properties),
        (torch.cuda, "get_device_capability", lambda _device=None: (known.major, known.minor)),
        (torch.cuda, "current_device", lambda: 0),
        (cuda, "get_device_properties", staticmethod(properties)),
        (cuda, "current_device", staticmethod(lambda: 0)),
        (cuda, "is_bf16_supported", staticmethod(lambda **_: True)),
        (cuda.Worker, "get_device_properties", staticmethod(properties)),
        (DeviceProperties, "create", staticmethod(uncached)),
        # Pointwise kernels around the product are Triton's; they are generated on the way and thrown away.
        (scheduler, "has_triton", lambda: True),
        (triton_utils, "triton_hash_with_backend", lambda: ""),
    ]
    if not torch.backends.cuda.is_built():
        # Tracing the patterns of the joint graph creates tensors on the device; they do not depend on it.
        initialise: Any = joint_graph.lazy_init
        answers.append((joint_graph, "lazy_init", lambda *_: initialise()))
    with patched(answers):
        yield


@contextlib.contextmanager
def collecting(architecture: str, store: Store, setup: Toolchain) -> Iterator[list[Job]]:
    """Have what is compiled inside the block generated, and neither compiled nor loaded.

    The same path as a real compile: Dynamo, the passes, the selection, the scheduler with its fusions; only what
    would run something on a device or a compiler is left out.  A program is compiled by calling it on inputs from
    :func:`faked`, and the call ends by an exception, see :func:`to_the_end`.  For a process of its own: Inductor keeps
    what it learned of the device.

    Args:
        architecture: of the pretended device, as nvcc has it, ``90a``.
        store: where it is looked up which kernels the compiler rejects; as in a real compile their candidates fail.
        setup: how the kernels would be compiled.

    Yields:
        candidates as they would be benchmarked, then those with a fused epilogue; a kernel may come twice.
    """
    import torch._inductor.config as inductor_config
    from torch._inductor import exc
    from torch._inductor.autotune_process import CUTLASSBenchmarkRequest

    seen: list[Job] = []

    def note(text: str) -> Exception | None:
        # Now, as Inductor's options of this compile are part of the flags.
        job = Job.of(text, toolchain(setup))
        seen.append(job)
        message = store.error_of(job.key)
        return exc.CUDACompileError(job.toolchain.command("kernel.cu", "kernel.o"), message) if message else None

    def autotuned(
        _call: Any, _self: Any, _name: str, _inputs: Any, _layout: Any, *args: Any, **kwargs: Any
    ) -> dict[Any, float]:
        choices = kwargs["choices"] if "choices" in kwargs else args[2]
        requests = ((choice, getattr(choice, "bmreq", None)) for choice in choices)
        rejections = {c: note(r.source_code) for c, r in requests if isinstance(r, CUTLASSBenchmarkRequest)}
        able = [choice for choice in choices if rejections.get(choice) is None]
        if not able:
            raise next(error for error in rejections.values() if error is not None)
        return {able[0]: 0.0}

    def defined(call: Any, scheduling: Any, text: str, *args: Any, **kwargs: Any) -> Any:
        note(text)  # rejected or not: by now another candidate cannot take its place
        return call(scheduling, text, *args, **kwargs)

    def aligned(call: Any, *args: Any) -> Any:
        with patched([(torch.cuda, "is_available", lambda: True)]):  # else any kernel is said to fit any alignment
            return call(*args)

    def loaded(*_args: Any, **_kwargs: Any) -> Any:
        raise _Enough

    # PyTorch's own CUDA decides which kernels CUTLASS's generator offers; the CPU build has none.
    cuda = torch.version.cuda or ".".join(setup.version.split(".")[:2])
    asked = {"cuda.arch": architecture.rstrip("af"), "cuda.version": cuda}
    request = "torch._inductor.autotune_process:CUTLASSBenchmarkRequest"
    hooks: dict[str, Callable[..., Any]] = {
        "torch._inductor.select_algorithm:AlgorithmSelectorCache.do_autotuning": autotuned,
        # It would load the kernel and call it; the size becomes part of the wrapper, not of the kernel.
        f"{request}.update_workspace_size": lambda *_: None,
        # Ahead of autotuning Inductor compiles all candidates, on Python 3.11.9 and later (on 3.11.8 it must not).
        f"{request}.precompile": lambda *_: None,
        "torch._inductor.codegen.cutlass.gemm_template:CUTLASSGemmTemplate.set_alignment": aligned,
        "torch._inductor.codegen.cutlass.scheduling:CUTLASSScheduling.define_kernel": defined,
        "torch._inductor.codecache:PyCodeCache.load_by_key_path": loaded,
    }
    with _device_set(architecture), inductor_config.patch(asked), hooked(hooks):
        yield seen


@contextlib.contextmanager
def to_the_end() -> Iterator[None]:
    """A compile inside :func:`collecting`, which ends by an exception that torch wraps; here that is no error."""
    try:
        yield
    except Exception as error:
        if not any(isinstance(one, _Enough) for one in causes(error)):
            raise
