"""Compiling as on another machine: what Inductor's code depends on beside the instruction set and the threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import torch

from pytest_gemm.api.request import BuildRequest
from pytest_gemm.backends.inductor.hooks import hooked, is_there, patched
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.machine import isa, processor
from pytest_gemm.machine.machines import Machine, machines

_THIS: Final = Machine("", "this one")


@contextlib.contextmanager
def believing(machine: str, multiprocessors: int = 0) -> Iterator[None]:
    """Let Inductor read another machine's sizes.

    Of a CPU these are the caches of a core.  Of a GPU they are the multiprocessors, which persistent kernels are
    written and launched for, and without enough of which Inductor has no templates; and the shared memory of a block,
    by which configurations are left out.

    Args:
        machine: one of ``machine.machines``; "" for this one.
        multiprocessors: of the GPU, instead of the machine's; 0: as the machine has.
    """
    found = machines()[machine] if machine else _THIS
    hooks: dict[str, Callable[..., Any]] = {}
    if found.threads:
        sizes = _cache_sizes(found)
        hooks["torch.cpu:get_capabilities"] = lambda call: {**call(), **sizes}
        # Before there was that function.
        hooks["torch._C._cpu:_L1d_cache_size"] = lambda _: sizes["l1d_cache_size"]
        hooks["torch._C._cpu:_L2_cache_size"] = lambda _: sizes["l2_cache_size"]
    if count := multiprocessors or found.multiprocessors:
        hooks["torch._inductor.utils:get_max_num_sms"] = lambda _: count
    if size := found.shared_memory << 10:
        properties = SimpleNamespace(shared_memory_per_block_optin=size)

        def checker(call: Any, *args: Any) -> Any:
            with patched([(torch.cuda, "get_device_properties", lambda *_: properties)]):
                return call(*args)

        def big(call: Any, *device: Any) -> Any:
            create = "torch._inductor.runtime.hints:DeviceProperties.create"
            with hooked({create: lambda made, *of: made(*of)._replace(multi_processor_count=found.multiprocessors)}):
                return call.__wrapped__(*device)  # its cache is of this machine

        hooks["torch._inductor.utils:is_big_gpu"] = big
        for module in ("utils", "kernel.mm_grouped"):
            hooks[f"torch._inductor.{module}:get_gpu_shared_memory"] = lambda _: size
        heuristic = "torch._inductor.template_heuristics.triton:BaseConfigHeuristic"
        hooks[f"{heuristic}._get_exceeding_shared_memory_checker"] = checker
    with hooked(hooks, optional=True):
        yield


def _cache_sizes(machine: Machine) -> dict[str, int]:
    """The caches of a core, in bytes, as ``torch.cpu.get_capabilities`` names them."""
    return {"l1d_cache_size": machine.l1d << 10, "l2_cache_size": machine.l2 << 10}


def setup(machine: str, multiprocessors: int = 0) -> tuple[str, ...]:
    """What a script of PyTorch alone does for the same; nothing for this machine.

    Of a GPU's shared memory nothing: a script has one configuration.
    """
    found, lines = machines()[machine] if machine else _THIS, []
    sizes = _cache_sizes(found)
    if found.threads and is_there("torch.cpu:get_capabilities"):
        lines.append(f"known = torch.cpu.get_capabilities() | {sizes}  # as on {found}")
        lines.append("torch.cpu.get_capabilities = lambda: known")
    elif found.threads:
        l1d, l2 = sizes.values()
        lines.append(f"torch._C._cpu._L1d_cache_size = lambda: {l1d}  # as on {found}")
        lines.append(f"torch._C._cpu._L2_cache_size = lambda: {l2}")
    if count := multiprocessors or found.multiprocessors:
        lines.append(f"import torch._inductor.utils; torch._inductor.utils.get_max_num_sms = lambda: {count}")
    return tuple(lines)


class _Library(ModuleType):
    """Takes the place of a compiled library that this CPU cannot even load."""

    def __getattr__(self, name: str) -> None:
        """Each of its functions."""
        return


@contextlib.contextmanager
def compiling_only(request: BuildRequest) -> Iterator[None]:
    """Where this CPU does not execute the code, let compiles of it end once all of it is compiled.

    Raises:
        Unsupported: then; Inductor wraps it.
    """
    if not request.machine or not request.isa or request.isa in isa.isas(processor.cpu().flags):
        yield
        return

    def end(*_: object) -> None:
        text = f"compiled for {request.isa} as on {request.machine}; this CPU does not execute it"
        raise Unsupported("compiled-only", text, "run it on such a machine")

    def load(call: Any, *args: Any, **kwargs: Any) -> Any:
        made = call(*args, **kwargs)
        return end() if hasattr(made, "call") else made

    hooks: dict[str, Callable[..., Any]] = {
        "torch._inductor.codecache:CppCodeCache._load_library": lambda _, _path, key: _Library(key),
        "torch._inductor.codecache:PyCodeCache.load_by_key_path": load,
        "torch._inductor:aoti_load_package": end,
    }
    with hooked(hooks):
        yield
