"""The text of a failure, and the name of its folder."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pytest_gemm.core.case_id import threads_text
from pytest_gemm.core.outcome import Outcome


@dataclasses.dataclass(frozen=True)
class Rerun:
    """What a rerun line needs beside the outcome.

    Attributes:
        target: what to hand to pytest, for instance ``conformance/test_products.py::test_product``.
        options: further options that the run was given and that matter, already spelled out; ``python -m`` in front
            where pytest has to be started so.
    """

    target: str
    options: tuple[str, ...] = ()

    def line(self, outcome: Outcome) -> str:
        """The command that runs just this case again, with the candidate that it was."""
        case = outcome.case
        candidate = case.candidate
        if "--gemm-candidates=winner" in self.options and len(outcome.chosen) == 1:
            candidate = outcome.chosen[0]  # another one may win the next time
        has_machine = any(option.startswith("--gemm-set=run.machine=") for option in self.options)  # with its own
        threads = threads_text(case.threads, case.run_threads) if case.threads and not has_machine else ""
        own = {"--gemm-candidates=": candidate, "--gemm-threads=": threads}
        replaced = tuple(option for option, value in own.items() if value)
        start = self.options[:2] if self.options[:1] == ("python",) else ()
        words = [
            *start,
            "pytest",
            *self.target.split(),
            f"--gemm-backends={case.backend}",
            f"--gemm-problem={case.problem}",
            f"--gemm-seed={outcome.seed}",
            *(w for o in self.options[len(start) :] if not o.startswith(replaced) for w in self._spelled(o)),
        ]
        own |= {
            "--gemm-modes=": case.mode.value,
            "--gemm-isa=": "" if has_machine else case.isa,
            "--gemm-guard=": "pages" if case.guard else "",
        }
        words += [f"{option}{value}" for option, value in own.items() if value]
        return " ".join(map(shlex.quote, words))

    def _spelled(self, option: str) -> list[str]:
        """An option in the command; the folder of a conftest, without its tests, where pytest would not load that."""
        conftest = Path(option)
        if conftest.name != "conftest.py":
            return [option]
        folder, (*pyargs, path) = conftest.parent, self.target.partition("::")[0].split()
        loads = folder.absolute() == Path.cwd() if pyargs else Path(path).absolute().is_relative_to(folder.absolute())
        return [] if loads else [str(folder), f"--ignore-glob={folder}/*"]


_LONGEST: Final = 200


def folder_name(outcome: Outcome) -> str:
    """Name of the folder that has the files of a failed case; a long one ends in a digest: systems take 255 bytes."""
    case = outcome.case
    parts = (case.who, case.problem, case.candidate, outcome.distribution, str(outcome.seed), case.guard)
    name = re.sub(r"[^\w.+-]+", "_", "-".join(filter(None, parts)))
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return name if len(name.encode()) <= _LONGEST else f"{name[: _LONGEST // 2]}-{digest}"


FILES: Final = ("report.txt", "repro.py", "repro.pt", "error_map.png", "tensors.pt", "generated_code.py")
"""What the folder of a failed case may have in it."""


def remove(output: Path) -> None:
    """Remove what an earlier run has left of its failures in a folder of ``--gemm-output``.

    A folder that no run has left its record in, and one with another file than ours in it, stay as they are.

    Raises:
        OSError: for what cannot be removed.
    """
    folder, record = output / "failures", output / "run.jsonl"
    if not (folder.is_dir() and _has(record, '{"run":')):
        return
    for place in folder.iterdir():
        files = [] if place.is_symlink() or not place.is_dir() else list(place.iterdir())
        if {one.name for one in files} <= {*FILES} and _has(place / "report.txt", "\n  rerun: "):
            for file in files:
                file.unlink()
            place.rmdir()


def _has(path: Path, words: str) -> bool:
    """Whether there are these words in the beginning of a file."""
    if not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return words in file.read(1 << 16)


def named(what: str, names: Iterable[str]) -> str:
    """``candidate a``, ``candidates a, b and c``, or "" without a name."""
    *others, last = dict.fromkeys(filter(None, names)) or ("",)
    return f"{what}s {', '.join(others)} and {last}" if others else last and f"{what} {last}"
