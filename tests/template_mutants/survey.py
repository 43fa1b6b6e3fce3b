"""Which mutants each problem reaches, and what its generated program is; compiles and runs nothing.

    python survey.py BACKEND < LINES > ANSWERS

A process of its own: the patches of its environment are in its torch.  Where there is no GPU, programs for one are
generated for a Hopper that is not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch

from pytest_gemm.api.request import DEFAULT, BuildRequest
from pytest_gemm.backends.builtin import BUILTIN
from pytest_gemm.backends.cutlass import compat
from pytest_gemm.backends.cutlass.backend import _without_memory
from pytest_gemm.backends.inductor.hooks import hooked
from pytest_gemm.operands import tensors
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.problem.problem import Problem
from template_mutants import patches

_HOPPER = "90"
_MARK = re.compile(rf"{patches.MARK}([\w-]+)")
_COMMENT = re.compile(rf"/\*{patches.MARK}[\w-]+\*/| *# {patches.MARK}[\w-]+")


class GeneratedError(Exception):
    """The program has been generated: that is all that is wanted."""


class _Driver:
    """What Triton asks its driver while nothing is compiled."""

    utils = types.SimpleNamespace(
        get_device_properties=lambda *_: {
            "max_shared_mem": 232448,
            "multiprocessor_count": 132,
            "warpSize": 32,
            "max_num_regs": 65536,
        }
    )

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", int(_HOPPER), 32)

    def get_current_device(self) -> int:
        return 0

    def get_device_capability(self, *_: object) -> tuple[int, int]:
        return 9, 0


def _pretend() -> None:
    """Say that Triton can use TMA; before Inductor's modules take these functions over."""
    from torch.utils import _triton

    for name in ("has_triton_tma_device", "has_triton_stable_tma_api"):
        setattr(_triton, name, lambda: True)


@contextlib.contextmanager
def _device(backend: str) -> Iterator[None]:
    """A Hopper for the backends that need one."""
    if backend in {"cpp", "inductor"} or torch.cuda.is_available():
        yield
        return
    import torch._inductor.config as inductor
    from torch._inductor.kernel import mm_grouped
    from triton.runtime.driver import driver

    driver.set_active(_Driver())
    grouped = patch.object(mm_grouped, "can_use_triton_kernel", lambda *_, **__: True)
    with grouped, compat._device_set(f"{_HOPPER}a"), inductor.patch({"cuda.arch": _HOPPER, "cuda.version": "13.0"}):
        yield


def _digest(text: str, constants: Mapping[str, Any]) -> str:
    """Of a generated program without marks, and of the shapes of its constants, whose contents are random."""
    found = hashlib.sha256(_COMMENT.sub("", text).encode())
    for name, value in sorted(constants.items()):
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else value
        found.update(f"{name}{shape}".encode())
    return found.hexdigest()[:16]


def survey(
    name: str, lines: list[str], request: BuildRequest = DEFAULT, around: Callable[[], Any] = contextlib.nullcontext
) -> Iterator[dict[str, Any]]:
    """Generate the program of each problem.

    Args:
        name: of the backend.
        lines: the problems.
        request: how each is built.
        around: makes a context that each program is generated in.

    Yields:
        What came of each: ``line``, ``reached``, ``digest``, ``texts`` (of its programs); nothing reached where it is
        unsupported.
    """
    backend = next(made for made in (kind() for kind in BUILTIN) if made.name == name)
    texts: list[tuple[str, Mapping[str, Any]]] = []

    def loaded(call: Callable[..., Any], key: str, path: str, *args: Any, **kwargs: Any) -> Any:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        if "def call" not in text:
            return call(key, path, *args, **kwargs)
        texts.append((text, kwargs.get("attrs") or (args[1] if len(args) > 1 else None) or {}))
        raise GeneratedError

    def autotuned(_call: Any, _self: Any, _name: str, _inputs: Any, _layout: Any, *args: Any, **kwargs: Any) -> Any:
        return {(kwargs["choices"] if "choices" in kwargs else args[2])[0]: 0.0}

    hooks: dict[str, Callable[..., Any]] = {
        "torch._inductor.select_algorithm:AlgorithmSelectorCache.do_autotuning": autotuned,
        "torch._inductor.codecache:PyCodeCache.load_by_key_path": loaded,
    }
    for line in lines:
        problem = Problem.parse(line)
        texts.clear()
        patches.passed.clear()
        if backend.supports(problem, request) is None:
            with _device(name), hooked(hooks), around(), contextlib.suppress(Exception):
                given = (
                    tensors.make(problem, distributions_for(problem)[0], 0)
                    if name in {"cpp", "inductor"}
                    else _without_memory(problem)
                )
                backend.prepare(problem, given, request)
        reached = set(patches.passed).union(*(_MARK.findall(text) for text, _ in texts))
        digest = "-".join(_digest(*one) for one in texts)
        yield {"line": line, "reached": sorted(reached), "digest": digest, "texts": [text for text, _ in texts]}


def main() -> int:
    """Answer for the problems on the standard input."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if sys.argv[1] not in {"cpp", "inductor"} and not torch.cuda.is_available():
        _pretend()
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for answer in survey(sys.argv[1], sys.stdin.read().split()):
            del answer["texts"]
            out.write(json.dumps(answer) + "\n")
            out.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
