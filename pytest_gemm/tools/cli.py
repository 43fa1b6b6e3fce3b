"""The console script ``pytest-gemm``: everything that is no test run.

A command is a module with two functions, imported when the command is used::

    def add_arguments(parser: argparse.ArgumentParser) -> None: ...
    def run(given: argparse.Namespace) -> int: ...  # the exit status

Wrong input is a ``ValueError`` or an ``OSError`` of ``run``: one sentence, and exit status 4, as pytest's.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

from pytest_gemm import __version__
from pytest_gemm.text import did_you_mean, show

USAGE_ERROR: Final = 4
"""The exit status of a wrong command line and of a file that cannot be read, as pytest's."""

# Name -> module, and one line of help.
COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "doctor": ("pytest_gemm.tools.doctor", "show which backends can run here, and try one product of each"),
    "fingerprint": ("pytest_gemm.tools.fingerprint", "show how each backend computes, and what has changed"),
    "results": ("pytest_gemm.run.page", "write run records as a Markdown page"),
    "compare": ("pytest_gemm.tools.compare", "list the cases of two run records whose status differs"),
    "coverage": ("pytest_gemm.tools.coverage", "list which C++ micro-kernels the cases of run records reached"),
    "baseline": ("pytest_gemm.speed.baseline.commands", "show, diff, prune, record and merge speed baselines"),
    "calibrate": ("pytest_gemm.speed.calibrate", "estimate false alarms and power of the speed gate from sessions"),
    "snapshot": ("pytest_gemm.tools.snapshot", "store and diff which C++ micro-kernel Inductor selects"),
    "list": (
        "pytest_gemm.conformance.listing",
        "list what a level of the suite holds, and the pairs it does not cover",
    ),
    "families": ("pytest_gemm.conformance.families", "list PyTorch's own GEMM tests beside this suite's cases"),
    "explain": ("pytest_gemm.tools.explain", "show what a problem line means: words, shapes, program"),
    "migrate": ("pytest_gemm.problem.migrate", "rewrite problem lines of earlier versions in files"),
    "cache": ("pytest_gemm.storage.cache", "show, prune or clear what runs keep for later runs"),
}


class Parser(argparse.ArgumentParser):
    """An argument parser that ends with :data:`USAGE_ERROR` where the command line is wrong."""

    def error(self, message: str) -> NoReturn:
        """Print one message and exit."""
        self.print_usage(sys.stderr)
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message}\n")


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
    module_name, about = COMMANDS[name]
    command = importlib.import_module(module_name)
    parser = Parser(prog=f"pytest-gemm {name}", description=f"{about[0].upper()}{about[1:]}.")
    command.add_arguments(parser)
    given = parser.parse_args(words[1:])
    try:
        return int(command.run(given))
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{about}" for name, (_, about) in COMMANDS.items()]
    usage = "usage: pytest-gemm COMMAND [ARGUMENTS]    (pytest-gemm COMMAND --help for its arguments)"
    return "\n".join([usage, "", "commands:", *lines]) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
