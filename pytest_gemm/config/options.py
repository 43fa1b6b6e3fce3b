"""The options of pytest: names, defaults and help, from ``options.toml``.  Every pytest run imports this module.

How the values are read stands in ``values.py``, what they are parsed to in ``config.py``.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gemm.storage.datafile import document

if TYPE_CHECKING:
    import pytest


class Option(NamedTuple):
    """A command line option with its ini key; ``options.toml`` says what the fields mean.

    Attributes:
        name: without dashes and prefix, ``backends`` for ``--gemm-backends``.
        group: ``cases``, ``correctness`` or ``speed``.
    """

    name: str
    group: str
    metavar: str
    help: str
    default: str = ""
    choices: tuple[str, ...] = ()
    switch: bool = False
    repeat: str = "last"
    timed: bool = True
    ignored_by: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The command line spelling."""
        return f"--gemm-{self.name}"

    @property
    def ini(self) -> str:
        """The ini spelling."""
        return f"gemm_{self.name.replace('-', '_')}"


def suite(name: str) -> Path:
    """The folder of a suite that comes with the package; found without importing it."""
    spec = find_spec(f"pytest_gemm.{name}")
    assert spec is not None, "the suites are part of the package"
    assert spec.origin is not None
    return Path(spec.origin).parent


def suites() -> tuple[Path, ...]:
    """The folders of the suites that come with the package."""
    return suite("conformance"), suite("perf")


_TABLE: Final = document(Path(__file__).with_name("options.toml"))
OPTIONS: Final = tuple(
    Option(name, group, **facts) for group in _TABLE["groups"] for name, facts in _TABLE[group].items()
)
BY_NAME: Final = {option.name: option for option in OPTIONS}
CONFLICTS: Final[dict[str, dict[str, str]]] = _TABLE["conflicts"]


def add_options(parser: pytest.Parser) -> None:
    """Declare the options."""
    groups = {group: parser.getgroup(title, title) for group, title in _TABLE["groups"].items()}
    for option in OPTIONS:
        switch = {"nargs": "?", "const": "yes"} if option.switch else {}
        action = {"action": "append"} if option.repeat == "append" else {}
        names = {"dest": option.ini, "metavar": option.metavar, "help": option.help}
        groups[option.group].addoption(option.flag, default=None, **names, **switch, **action)


def add_ini_keys(parser: pytest.Parser) -> None:
    """Declare the ini keys; not where ``--help`` is shown, which would list every option twice."""
    for option in OPTIONS:
        if option.repeat == "append":
            parser.addini(option.ini, f"lines of {option.flag}", "linelist", [])
        else:
            parser.addini(option.ini, f"default of {option.flag}", default=option.default)


def is_any_given(config: pytest.Config) -> bool:
    """Whether the command line or the ini file gives one of these options."""
    return any(
        config.getoption(option.ini) is not None or (config.getini(option.ini) or "") != option.default
        for option in OPTIONS
    )
