"""Settings of a backend, from ``--gemm-set=BACKEND.KEY=VALUE`` or lines of ``gemm_set`` in the ini file.

A backend declares them in its class and gets their values before any other method is called::

    class Mine:
        name = "mine"
        settings = {"tiles": Setting("64", "N", "rows of a tile", natural)}

        def configure(self, values):
            self.tiles = values["tiles"]
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pytest_gemm.core.text import described, did_you_mean


class SettingError(ValueError):
    """A setting that a backend does not have, or a value that it does not take."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting of a backend.

    Attributes:
        default: its text where none is given.
        metavar: what stands for the value in a help text.
        help: one line.
        parse: makes the value of its text, or raises a ``ValueError`` with what would be right.
    """

    default: str
    metavar: str
    help: str
    parse: Callable[[str], Any] = str


def settings_of(backend: object) -> Mapping[str, Setting]:
    """The settings that a backend declares, by key."""
    found: Mapping[str, Setting] = getattr(backend, "settings", {})
    return found


def configure(backend: Any, given: Mapping[str, str]) -> None:
    """Give a backend the values of all its settings, by ``backend.configure(values)``.

    Args:
        backend: one that declares settings; nothing is done for any other.
        given: texts by key; the defaults are taken for the others.

    Raises:
        SettingError: naming the setting, its text and what would be right.
    """
    settings = settings_of(backend)
    for key in given.keys() - settings.keys():
        known = ", ".join(settings) or "none"
        raise SettingError(f"{backend.name} has no setting {key!r}{did_you_mean(key, settings)}; known: {known}")
    values = {}
    for key, setting in settings.items():
        text = given.get(key, setting.default)
        try:
            values[key] = setting.parse(text)
        except Exception as error:  # a parser may be a backend's own
            why = str(error) if isinstance(error, ValueError) else described(error)
            raise SettingError(f"{backend.name}.{key}={text!r}: {why}") from None
    if settings:
        backend.configure(values)


# -- parsers ---------------------------------------------------------------------------------------------


def natural(text: str) -> int:
    """A whole number from 1 on; 0 of an empty text."""
    if text and not (text.isascii() and text.isdigit() and 1 <= int(text[:10]) <= 1 << 16):
        raise ValueError("give a whole number, 1 or more")
    return int(text or 0)


def folder(text: str) -> Path | None:
    """A folder that can be written, which is made where there is none; ``None`` of an empty text."""
    if not text:
        return None
    path = Path(text).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ValueError(f"cannot be written ({error.strerror}); name a folder of yours") from None
    return path


def one_of(*choices: str) -> Callable[[str], str]:
    """A parser that takes these texts."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"give one of {', '.join(choices)}")
        return text

    return parse


def matching(pattern: str, remedy: str) -> Callable[[str], str]:
    """A parser that takes texts of this pattern, and none."""

    def parse(text: str) -> str:
        if text and not re.fullmatch(pattern, text):
            raise ValueError(remedy)
        return text

    return parse
