"""What a process of another environment imports: that environment's packages before those of the project's folder.

The conftests of the project are loaded in every environment, and they import the kernels.  A package beside a
``conftest.py``, or in the working directory, comes before the installed one; both sides of a comparison would then run
the same code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Final

# Modules that come from the project whatever is installed, and the harness, of which both sides have one version.
_OF_PROJECT: Final = ("conftest", "test", "pytest_gemm", "__main__")


class InstalledFirst(MetaPathFinder):
    """Finds a top-level module in the environment, where it has one, before the project's folder is looked at.

    Args:
        project: folders of the project.
        environment: the environment's own folder, which may lie within the project.
    """

    def __init__(self, project: Iterable[str], environment: str) -> None:
        self._project = [Path(folder).resolve() for folder in project if folder]
        self._environment = Path(environment).resolve()

    def is_of_project(self, place: str) -> bool:
        """Whether a file or folder belongs to the project and not to the environment."""
        path = Path(place).resolve()
        return not path.is_relative_to(self._environment) and any(map(path.is_relative_to, self._project))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module as the environment has it; ``None``: as it is found without this finder."""
        if path is not None or fullname.startswith(_OF_PROJECT):
            return None
        installed = PathFinder.find_spec(fullname, [entry for entry in sys.path if not self.is_of_project(entry)])
        known = (self, BuiltinImporter, FrozenImporter, PathFinder)
        others = [finder for finder in sys.meta_path if finder not in known]
        # An editable installation has a finder of its own.
        for spec in (installed, *(finder.find_spec(fullname, None, target) for finder in others)):
            if spec is not None and spec.origin and not self.is_of_project(spec.origin):
                return spec
        return None

    def shared(self) -> Iterator[str]:
        """The top-level modules that were imported from the project all the same: the environment has none."""
        for name, module in sorted(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if file and "." not in name and not name.startswith(_OF_PROJECT) and self.is_of_project(file):
                yield name


def shared() -> tuple[str, ...]:
    """The modules of the project that this process has imported, where it is one of another environment."""
    return tuple(name for finder in sys.meta_path if isinstance(finder, InstalledFirst) for name in finder.shared())
