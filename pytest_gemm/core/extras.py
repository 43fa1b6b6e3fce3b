"""Modules that only some runs need: those of the extras in pyproject.toml."""

from __future__ import annotations

from importlib import util


def lacking(module: str) -> str:
    """That a module is not installed, with the remedy; "" where it is."""
    return "" if util.find_spec(module) else f"{module} is not installed: pip install {module}"
