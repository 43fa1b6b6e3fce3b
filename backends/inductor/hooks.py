"""Functions of PyTorch's internals, replaced for the time of a block."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest.mock import patch


def _found_at(where: str) -> tuple[Any, str]:
    """The owner of an attribute, and its name."""
    importlib.import_module("torch._inductor.compile_fx")  # first: what is below it imports each other in a circle
    module, _, path = where.partition(":")
    *owners, name = path.split(".")
    owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
    inspect.getattr_static(owner, name)
    return owner, name


def is_there(where: str) -> bool:
    """Whether this release of PyTorch has what is named like ``torch._inductor.codecache:PyCodeCache.write``."""
    try:
        _found_at(where)
    except (ImportError, AttributeError):
        return False
    return True


@contextlib.contextmanager
def patched(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Patch attributes for the block: owner, name and value of each."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(patch.object(owner, name, value))
        yield


@contextlib.contextmanager
def hooked(hooks: Mapping[str, Callable[..., Any]], *, optional: bool = False) -> Iterator[None]:
    """Call a hook in place of each function.

    Args:
        hooks: by the place of the function, see :func:`is_there`.  A hook gets the original function and the arguments
            of the call, with ``self`` and without ``cls``.
        optional: leave out what this release of PyTorch does not have.
    """
    changes = []
    for where, hook in hooks.items():
        if not optional or is_there(where):
            owner, name = _found_at(where)
            changes.append((owner, name, _hook(hook, inspect.getattr_static(owner, name))))
    with patched(changes):
        yield


def _hook(hook: Callable[..., Any], original: Any) -> Any:
    function = getattr(original, "__func__", original)

    def called(*args: Any, **kwargs: Any) -> Any:
        return hook(function, *args, **kwargs)

    def called_on_class(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(functools.partial(function, cls), *args, **kwargs)

    if isinstance(original, classmethod):
        return classmethod(called_on_class)
    return staticmethod(called) if isinstance(original, staticmethod) else called
