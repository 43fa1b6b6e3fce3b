"""What each inner run asks again, and gets the same answer to: what is installed, and the ledger of the suite."""

import functools
from collections.abc import Callable, Collection
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from pytest_gemm.backends.builtin import BUILTIN
from pytest_gemm.ledger import reader
from pytest_gemm.ledger.entry import Entry

_LEDGER: Final = Path(__file__).parents[1] / "conformance" / "known_failures.toml"
_read: Final = reader.read


@functools.cache
def _entries() -> tuple[Entry, ...]:
    return _read(_LEDGER, [backend().name for backend in BUILTIN])


def _read_once(path: Path, backends: Collection[str] | None) -> tuple[Entry, ...]:
    return _read(path, backends) if path != _LEDGER or backends is None else _entries()


@functools.cache
def _of_installed(path: Path, ask: Callable[[metadata.PathDistribution], Any]) -> Any:
    return ask(metadata.PathDistribution(path))


def _once(name: str) -> property:
    ask = getattr(metadata.Distribution, name).fget
    return property(lambda self: _of_installed(self._path, ask))


reader.read = _read_once
for _name in ("entry_points", "files", "metadata"):
    setattr(metadata.PathDistribution, _name, _once(_name))
if __name__ == "<run_path>":  # in the server of warm processes, whose copies have all this, too
    from pytest_gemm.failures import artifacts, repro
    from pytest_gemm.report import model

    _entries()
    for _one in metadata.distributions():
        if any(entry.group == "pytest11" for entry in _one.entry_points):
            _known = _one.files, _one.metadata
    repro._TEMPLATES._environment.get_template("repro.py.jinja")
    for _name in ("summary.txt.jinja", "review.md.jinja"):
        model.TEMPLATES._environment.get_template(_name)
    # A picture takes a tenth of a second; tests/failures looks at some.
    artifacts.draw = lambda path, *_: path.touch()
