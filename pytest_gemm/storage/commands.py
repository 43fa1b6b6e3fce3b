"""What the commands ``python -m pytest_gemm.NAME`` have in common."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

USAGE_ERROR = 4
"""The exit status of a wrong command line and of a file that cannot be read, as pytest's."""


class Parser(argparse.ArgumentParser):
    """A command line that ends with :data:`USAGE_ERROR` where it is wrong."""

    def error(self, message: str) -> NoReturn:
        """One message, and the end."""
        self.print_usage(sys.stderr)
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message}\n")


def show(text: str) -> None:
    """Print a text; what the terminal cannot show, and half a surrogate pair, is shown as an escape."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
