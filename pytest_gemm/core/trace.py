"""Where the time of a process goes: spans, kept in memory until they travel with a report.

``--gemm-profile`` asks for it; without it every function here returns at once.  ``run/timeline.py`` has the hooks, and
puts the spans of all processes together.  All imports of the package lie above this module.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

# The clocks of all processes of a machine agree: one reads the date once, and counts from there on.
_EPOCH: Final = time.time() - time.perf_counter()
_OFF: Final = contextlib.nullcontext()

_spans: list[dict[str, Any]] | None = None
_threads: dict[int, int] = {}


def begin() -> None:
    """Keep spans from now on; the thread that calls is the process's lane."""
    global _spans  # one process has one
    _spans, _threads[threading.get_ident()] = [], 0


def stop() -> None:
    """Keep no more spans."""
    global _spans  # noqa: PLW0603
    _spans = None
    _threads.clear()


def is_on() -> bool:
    """Whether spans are kept."""
    return _spans is not None


def now() -> float:
    """Seconds since 1970, which never jump."""
    return _EPOCH + time.perf_counter()


def add(name: str, start: float, kind: str | None = None, args: Mapping[str, object] | None = None) -> None:
    """Keep a span.

    Args:
        name: what the trace shows.
        start: by :func:`now`.
        kind: what the summary counts it as; ``None`` for the name, "" for what the span counts as that it lies in.
        args: texts and numbers that belong to it.
    """
    if _spans is None:
        return
    thread = _threads.setdefault(threading.get_ident(), len(_threads))
    span = {"name": name, "kind": name if kind is None else kind, "start": start, "seconds": now() - start}
    _spans.append({**span, "thread": thread, "args": dict(args or {})})


def extend(spans: Iterable[Mapping[str, Any]]) -> None:
    """Keep spans of a process for which this one has waited."""
    if _spans is not None:
        _spans.extend({**one, "thread": _threads.setdefault(threading.get_ident(), len(_threads))} for one in spans)


def span(name: str, **args: object) -> contextlib.AbstractContextManager[None]:
    """The block is a span."""
    return _OFF if _spans is None else _span(name, args)


@contextlib.contextmanager
def _span(name: str, args: Mapping[str, object]) -> Iterator[None]:
    start = now()
    try:
        yield
    finally:
        add(name, start, args=args)


def taken() -> list[dict[str, Any]]:
    """The spans that were kept so far, which are handed out once: plain data."""
    found = [*(_spans or ())]
    if _spans is not None:
        _spans.clear()
    return found
