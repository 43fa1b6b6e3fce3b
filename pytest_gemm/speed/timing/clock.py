"""The clock of the timers, bound before any code under test is imported, and what that code has replaced since."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import ModuleType
from typing import Any, Final

now: Final = time.perf_counter
now_ns: Final = time.perf_counter_ns

_CLOCKS: Final = ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time", "process_time_ns")
# Owner, name and value of each function, and what it executes.
_Sealed = tuple[Any, str, Any, Any]
_sealed: Final[list[_Sealed]] = [(time, name, getattr(time, name), None) for name in _CLOCKS]


def seal_names(owner: Any, names: Iterable[str]) -> None:
    """Note these functions of a module or class; the owner may be noted before."""
    known = {(id(one), name) for one, name, *_ in _sealed}
    for name in names:
        if name in vars(owner) and (id(owner), name) not in known:
            value = vars(owner)[name]
            _sealed.append((owner, name, value, getattr(value, "__code__", None)))


def seal(module: ModuleType) -> None:
    """Note the functions and methods of a module, so that :func:`restored` finds another one in their place."""
    own = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]
    for owner in (module, *own):
        for name, value in vars(owner).items():
            if callable(value):
                _sealed.append((owner, name, value, getattr(value, "__code__", None)))


def restored() -> list[str]:
    """Names of the clocks and of what was sealed that were other functions; they are the first ones again."""
    found = []
    for owner, name, value, code in _sealed:
        if vars(owner).get(name) is not value or getattr(value, "__code__", None) is not code:
            found.append(f"{owner.__name__}.{name}")
            setattr(owner, name, value)
            if code is not None:
                value.__code__ = code
    return found
