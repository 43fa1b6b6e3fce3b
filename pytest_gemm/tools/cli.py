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
from pytest_gemm.core.extras import lacking
from pytest_gemm.machine import software
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

    def fill(self, command: Mapping[str, Any], dest: str = "task") -> None:
        """Add the arguments and the tasks of a command of :data:`COMMANDS`; ``dest`` keeps which task was given."""
        for argument in command.get("arguments", []):
            options = dict(argument)
            if "type" in options:
                options["type"] = pkgutil.resolve_name(options["type"])
            self.add_argument(options.pop("name"), **options)
        if tasks := command.get("tasks"):
            parsers = self.add_subparsers(required=True, metavar="COMMAND", dest=dest, title="commands")
            for name, task in tasks.items():
                description = f"{task['help'][0].upper()}{task['help'][1:]}."
                parsers.add_parser(name, description=description, help=task["help"]).fill(task)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = Parser(prog="pytest-gemm")
    parser.add_argument("--version", action="version", version=f"pytest-gemm {__version__}")
    parser.fill({"tasks": COMMANDS}, dest="command")
    given = parser.parse_args(arguments)
    if old := software.old_torch():
        parser.error(old)
    try:
        return int(importlib.import_module(COMMANDS[given.command]["module"]).run(given))
    except ModuleNotFoundError as error:
        if error.name != "scipy":
            raise
        parser.error(f"{given.command} needs the extra speed: {lacking(error.name)}")
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}" if error.filename else str(error))


if __name__ == "__main__":
    raise SystemExit(main())
