"""What each inner run asks again, and gets the same answer to: what is installed, and the ledger of the suite."""

import functools
from collections.abc import Collection
from importlib import metadata
from pathlib import Path
from typing import Final

from pytest_gemm.backends.builtin import BUILTIN
from pytest_gemm.ledger import reader
from pytest_gemm.ledger.entry import Entry

_LEDGER: Final = Path(__file__).parents[1] / "conformance" / "known_failures.toml"
_read: Final = reader.read
_entries: Final = functools.cache(lambda: _read(_LEDGER, [backend().name for backend in BUILTIN]))


def _read_once(path: Path, backends: Collection[str] | None) -> tuple[Entry, ...]:
    return _entries() if path == _LEDGER and backends is not None else _read(path, backends)


def _once(name: str) -> property:
    ask = functools.cache(lambda path: getattr(metadata.Distribution, name).fget(metadata.PathDistribution(path)))
    return property(lambda self: ask(self._path))


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
