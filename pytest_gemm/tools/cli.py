"""The console script ``pytest-gemm``: everything that is no test run.

``commands.toml`` has every command with its module and its arguments.  A module is imported when its command is used::

    def run(given: argparse.Namespace) -> int: ...  # the exit status

Wrong input is a ``ValueError`` or an ``OSError`` of ``run``: one sentence, and exit status 4, as pytest's.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from pytest_gemm import __version__
from pytest_gemm.core.text import did_you_mean, show
from pytest_gemm.storage.datafile import document

USAGE_ERROR: Final = 4
"""The exit status of a wrong command line and of a file that cannot be read, as pytest's."""

COMMANDS: Final[Mapping[str, Any]] = document(Path(__file__).with_name("commands.toml"))


class Parser(argparse.ArgumentParser):
    """An argument parser that ends with :data:`USAGE_ERROR` where the command line is wrong."""

    def error(self, message: str) -> NoReturn:
        """Print one message and exit."""
        self.print_usage(sys.stderr)
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message}\n")

    def fill(self, command: Mapping[str, Any]) -> None:
        """Add the arguments and the tasks of a command of :data:`COMMANDS`."""
        for argument in command.get("arguments", []):
            options = {key: _named(value) if key in {"type", "choices"} else value for key, value in argument.items()}
            self.add_argument(options.pop("name"), **options)
        if tasks := command.get("tasks"):
            parsers = self.add_subparsers(required=True, metavar="COMMAND", dest="task")
            for name, task in tasks.items():
                parsers.add_parser(name, help=task["help"]).fill(task)


def _named(value: Any) -> Any:
    """What a text names as ``module:name``; anything else as it is."""
    return pkgutil.resolve_name(value) if isinstance(value, str) else value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in {"-h", "--help"}:
        show(_overview())
        return 0 if words else USAGE_ERROR
    if words[0] == "--version":
        show(f"pytest-gemm {__version__}\n")
        return 0
    name = words[0]
    if name not in COMMANDS:
        known = f"commands: {', '.join(COMMANDS)}"
        Parser(prog="pytest-gemm").error(f"no such command: {name}{did_you_mean(name, COMMANDS)}; {known}")
    command = COMMANDS[name]
    module = importlib.import_module(command["module"])
    parser = Parser(prog=f"pytest-gemm {name}", description=f"{command['help'][0].upper()}{command['help'][1:]}.")
    parser.fill(command)
    given = parser.parse_args(words[1:])
    try:
        return int(module.run(given))
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{command['help']}" for name, command in COMMANDS.items()]
    usage = "usage: pytest-gemm COMMAND [ARGUMENTS]    (pytest-gemm COMMAND --help for its arguments)"
    return "\n".join([usage, "", "commands:", *lines]) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
