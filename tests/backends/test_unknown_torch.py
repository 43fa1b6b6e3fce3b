"""A torch that is newer than this version: it runs, what is unknown is said once, and the generated code decides."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

import pytest
import torch

from pytest_gemm.api.request import BuildRequest
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.backends.inductor import hooks, torch_compat
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.machine import software
from pytest_gemm.operands import tensors as operands
from pytest_gemm.plugin import hooks as plugin_hooks
from pytest_gemm.problem.problem import Problem

PROBLEM = Problem.parse("linear:f32:nt:20x33x40:bias+relu")
SELECTION = "torch._inductor.select_algorithm:AlgorithmSelectorCache.__call__"


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that gives the installed torch another version."""
    real = importlib.metadata.version

    def become(text: str) -> None:
        monkeypatch.setattr(torch, "__version__", text)
        monkeypatch.setattr(importlib.metadata, "version", lambda name: text if name == "torch" else real(name))

    return become


def without(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    """Let this torch lack what is named."""
    found_at = hooks._found_at

    def find(where: str) -> object:
        if where in missing:
            raise AttributeError(where)
        return found_at(where)

    monkeypatch.setattr(hooks, "_found_at", find)


@pytest.mark.parametrize(
    ("text", "release", "is_known"),
    [
        ("2.15.0+cu132", (2, 15), True),
        ("2.15.2", (2, 15), True),
        ("2.11.0", (2, 11), True),
        ("2.15.0.dev20261001+cpu", (2, 15), True),
        ("2.16.0.dev20261101", (2, 16), False),
        ("2.16.0a0+gitabcdef", (2, 16), False),
        ("3.0.0", (3, 0), False),
    ],
)
def test_a_newer_release_is_named(
    version: Callable[[str], None], text: str, release: tuple[int, int], is_known: bool
) -> None:
    version(text)
    assert torch_compat.torch_release() == release
    said = software.unknown_torch()
    assert (said == "") == is_known
    assert said == "" or said.startswith(f"torch {text} is newer than 2.15")
    assert torch_compat.lacks() == ((said,) if said else ())


def test_what_a_release_has_no_more_is_said_once_each(
    version: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    version("2.16.0")
    without(monkeypatch, SELECTION)
    monkeypatch.setattr(torch_compat, "has_option", lambda name: name != "shape_padding")
    newer, hook, option = torch_compat.lacks()
    assert "newer than 2.15" in newer
    assert hook.endswith("AlgorithmSelectorCache.__call__: what autotuning chose cannot be proved")
    assert option.endswith("no Inductor option shape_padding: odd sizes may be padded")


@pytest.mark.compiler
def test_without_any_watched_function_but_the_module_the_code_is_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """The template kernel is found in the generated module and seen to run, though no selection was seen."""
    watched = hooks.is_there
    names = [
        f"torch._inductor.select_algorithm:AlgorithmSelectorCache.{n}" for n in ("benchmark_choice", "do_autotuning")
    ]
    without(monkeypatch, SELECTION, "torch._inductor.cpp_builder:CppBuilder.get_command_line", *names)
    assert not watched(SELECTION)
    prepared = CppBackend().prepare(PROBLEM, o := operands.make(PROBLEM, "rand", 1))
    prepared.run(o)
    proof = prepared.proof()
    assert proof.objection() is None
    assert "selection that" in proof.chosen[0]
    assert proof.generated == proof.executed
    with pytest.raises(Unsupported) as caught:
        CppBackend().prepare(PROBLEM, o, BuildRequest(candidate="CppMicroGemmFP32Vec-8x48x1"))
    assert caught.value.reason.code == "selection-unseen"


def test_an_option_that_a_release_has_no_more_is_left_out() -> None:
    """It would end the compile.  Inductor knows the first as torch.compiler.config.force_disable_caches too."""
    assert torch_compat.known({"force_disable_caches": False, "gone": 1}) == {"force_disable_caches": False}


def test_a_run_says_it_at_its_end(version: Callable[[str], None]) -> None:
    assert plugin_hooks._unknown_torch() == ()
    version("2.16.0")
    (said,) = plugin_hooks._unknown_torch()
    assert "torch 2.16.0 is newer" in said
