"""Backends that installed distributions ship: entry points of the group ``pytest_gemm.backends``.

The name of an entry point is that of the backend, its value names a class or another function without arguments that
returns the backend.  What is installed is read from metadata; a distribution is imported when its backend is asked for.
"""

from __future__ import annotations

import dataclasses
from importlib import metadata
from typing import Final

from pytest_gemm.core.text import described

GROUP: Final = "pytest_gemm.backends"


class RegistryError(ValueError):
    """A backend that cannot be registered or made of its entry point, or a name that is not registered."""


@dataclasses.dataclass(frozen=True)
class Shipped:
    """An entry point of an installed distribution.

    Attributes:
        name: of the backend.
        value: ``module:object``.
        distribution, version: of what is installed.
    """

    name: str
    value: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} ({self.value})"

    def wrong(self, what: str) -> RegistryError:
        """The error that says what is wrong with it."""
        entry = f"entry point {self.name} = {self.value} of {GROUP}"
        remedy = f"install another version of {self.distribution}, or uninstall it"
        return RegistryError(f"{self.distribution} {self.version}, {entry}: {what}; {remedy}")

    def load(self) -> object:
        """Import the distribution and make the backend.

        Raises:
            RegistryError: when that raises, and when what is made has another name.
        """
        what = "its import"
        try:
            found = metadata.EntryPoint(self.name, self.value, GROUP).load()
            what = "the call"
            made: object = found() if callable(found) else found
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # of a distribution, which ends no run by what it raises
            raise self.wrong(f"{what} raised {described(error)}") from None
        if (own := getattr(made, "name", None)) != self.name:
            raise self.wrong(f"the object is called {own!r}" if own else f"{type(made).__name__} is no backend")
        return made


def shipped() -> tuple[Shipped, ...]:
    """Every entry point of the group, by name and distribution; imports nothing of them."""
    found = []
    for entry in metadata.entry_points(group=GROUP):
        dist = entry.dist
        assert dist is not None, "metadata makes an entry point of a distribution"
        found.append(Shipped(entry.name, entry.value, dist.metadata["Name"], dist.version))
    return tuple(sorted(found, key=lambda one: (one.name, one.distribution)))
