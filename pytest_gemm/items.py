"""What the hooks ask of a collected test."""

from __future__ import annotations

import pytest

from pytest_gemm import selection


def names(item: pytest.Item) -> list[str]:
    """The fixtures of a test, as a list that may be changed."""
    assert isinstance(item, pytest.Function)
    return item.fixturenames


def is_placeholder(item: pytest.Item) -> bool:
    """Whether pytest made it up for a marked test that no problem was selected for."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return False
    params = item.callspec.params
    if "gemm_fuzz" in params and not isinstance(params["gemm_fuzz"], str):
        return True
    return "gemm_case" in params and not isinstance(params["gemm_case"], selection.Pick)


def timed(item: pytest.Item) -> tuple[str, str, str] | None:
    """Backend, problem line and function of a test whose case is timed, ``None`` of any other."""
    if not isinstance(item, pytest.Function) or "gemm_speed" not in item.fixturenames:
        return None
    pick = parameter(item)
    return (pick.backend, pick.problem.line, item.originalname) if pick is not None else None


def parameter(item: pytest.Item) -> selection.Pick | None:
    """The backend and the problem that a test is for."""
    callspec = getattr(item, "callspec", None)
    pick = callspec.params.get("gemm_case") if callspec is not None else None
    return pick if isinstance(pick, selection.Pick) else None


def target(item: pytest.Function) -> str:
    """How to name this test on pytest's command line."""
    path, here, name = item.path, item.config.invocation_params.dir, item.originalname
    if path.is_relative_to(here):
        return f"{path.relative_to(here).as_posix()}::{name}"
    if item.module.__name__.startswith("pytest_gemm."):
        return f"--pyargs {item.module.__name__}::{name}"
    return f"{path}::{name}"
