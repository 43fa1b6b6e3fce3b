"""The packing of a constant weight by the C++ templates, recorded so that it can be done again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pytest_gemm.backends.inductor.compilation import Packing, Session
from pytest_gemm.backends.inductor.hooks import hooked


@contextlib.contextmanager
def watch_packing(seen: Session) -> Iterator[None]:
    """Note every packing of a constant weight by a C++ template, with the means to do it again.

    The template of several linears blocks each of its weights and packs what came out.
    """
    blocked: dict[int, tuple[torch.Tensor, torch.Tensor, tuple[Any, ...], Any]] = {}

    def prepare(call: Any, inputs: Any, layout: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(inputs, layout, *args, **kwargs)
        source, packed = inputs[1], result[0][1]
        # Nodes of the graph pass here too: only constants are tensors.
        if isinstance(source, torch.Tensor) and isinstance(packed, torch.Tensor):
            before, after = inputs[0], list(inputs[2:])

            def replay(weight: torch.Tensor) -> torch.Tensor:
                again = call([before, weight, *after], layout, *args, **kwargs)[0][1]
                assert isinstance(again, torch.Tensor)
                return again

            seen.packings.append(Packing(source, packed, replay))
        return result

    def block(call: Any, weight: Any, *args: Any) -> Any:
        made = call(weight, *args)
        if isinstance(weight, torch.Tensor):
            blocked[id(made)] = made, weight, args, call
        return made

    def pack(call: Any, weight: Any, *args: Any) -> Any:
        made = call(weight, *args)
        if id(weight) in blocked and isinstance(made, torch.Tensor):
            _, source, how, block_again = blocked.pop(id(weight))
            seen.packings.append(Packing(source, made, lambda new: call(block_again(new, *how), *args)))
        return made

    template = "torch._inductor.codegen.cpp_gemm_template:CppGemmTemplate"
    grouped = "torch._inductor.codegen.cpp_grouped_gemm_template:CppGroupedGemmTemplate"
    hooks: dict[str, Callable[..., Any]] = {
        f"{template}.prep_weight": prepare,
        f"{grouped}.block_weight": block,
        f"{grouped}.pack_vnni_weight": pack,
    }
    with hooked(hooks, optional=True):
        yield
