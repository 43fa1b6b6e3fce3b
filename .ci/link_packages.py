"""Link the packages into build/types under the names that they have once installed.

``backends/`` is ``pytest_gemm.backends``: pip knows that, type checkers and import-linter go by folders.
"""

import os
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINKS = ROOT / "build" / "types"


def packages() -> dict[str, str]:
    """Dotted package names and their folders, from pyproject.toml's package-dir table."""
    # By hand: tomllib is not in Python 3.10, and the table is one "key = value" a line.
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = text.split("[tool.setuptools.package-dir]\n", 1)[1].split("\n[", 1)[0]
    return dict(re.findall(r'^"?([\w.]+)"? = "([\w/]+)"', table, flags=re.MULTILINE))


def main() -> None:
    """Build the links anew; real folders, because not every tool follows a linked one."""
    shutil.rmtree(LINKS, ignore_errors=True)
    for name, folder in packages().items():
        target = LINKS.joinpath(*name.split("."))
        for source in sorted((ROOT / folder).rglob("*.py")) + sorted((ROOT / folder).rglob("py.typed")):
            link = target / source.relative_to(ROOT / folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(source, link.parent))


if __name__ == "__main__":
    main()
