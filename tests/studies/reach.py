"""Which code of Inductor's GEMM stack each problem reaches: ``python tests/studies/reach.py BACKEND [...] > PART``.

The program of each problem is generated as ``quick`` has it generated, and nothing is compiled; with ``--whole`` it is
compiled and run, which ``inductor`` needs: what autotuning does is benchmark.  A part is a list of JSON, for each
problem what it reaches of each file, as a digest, and what stands behind a digest where it is the first to have it.

A problem *reaches* a branch when one line of :data:`~studies.meter.FILES`, or of a Jinja template, follows another; and
a feature when its program calls a function of that name.  What Inductor remembers between compiles is forgotten before
each problem, so that a branch counts for each problem that needs it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import logging
import re
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from studies.meter import FILES, Meter

# A branch, or a function that a generated program calls: the backend, with its instruction set, the file, the place.
Element = tuple[str, str, Any]
# Calls of a generated program; names that are numbered, and what Inductor names after a problem, are one name.
_CALL: Final = re.compile(r"([A-Za-z_][\w:.]*)\s*(?:<[\w:, ]*>)?\(")
_NUMBER: Final = re.compile(r"\d+")
# Problems with which a process begins, because the first ones do what is done once.
_FIRST: Final = 4


_HALF: Final = {"f16", "bf16"}


def class_of(line: str) -> str:
    """The class of data types of a problem: half types are one, as are those of 8 bits with a point."""
    names = line.split(":")[1].split("-")
    return "-".join("half" if name in _HALF else "f8" if name.startswith("f8") else name for name in names)


class Reach(NamedTuple):
    """What problems reach.

    Attributes:
        lines: the problems.
        masks: the problems that reach an element, the bit of the place of each.
        seconds: that a backend took for a problem, of what was measured.
        sizes: characters of the program that was generated.
    """

    lines: list[str]
    masks: dict[Element, int]
    seconds: dict[tuple[str, str], float]
    sizes: dict[tuple[str, str], int]

    @classmethod
    def read(cls, paths: Iterable[Path]) -> Reach:
        """Parts of this script; a line that is not whole is left out."""
        reach = cls([], defaultdict(int), {}, {})
        places: dict[str, int] = {}
        for path in paths:
            values: dict[str, list[Any]] = {}
            sets: dict[tuple[str, str, str], int] = defaultdict(int)
            for text in path.read_text(encoding="utf-8").splitlines():
                if not text.endswith("}}"):
                    continue
                part = json.loads(text)
                values |= part["new"]
                if part["reached"]:
                    backend = "-".join(filter(None, (part["backend"], part["isa"])))
                    bit = 1 << places.setdefault(part["line"], len(places))
                    reach.seconds[backend, part["line"]] = part["seconds"]
                    reach.sizes[backend, part["line"]] = part["size"]
                    for file, digest in part["reached"].items():
                        sets[backend, file, digest] |= bit
            for (backend, file, digest), mask in sets.items():
                for place in values[digest]:
                    reach.masks[backend, file, tuple(place) if isinstance(place, list) else place] |= mask
        reach.lines.extend(places)
        return reach

    def of(self, mask: int) -> Iterator[str]:
        """The problems of a mask."""
        while mask:
            low = mask & -mask
            yield self.lines[low.bit_length() - 1]
            mask ^= low


def _forget() -> None:
    """Have Inductor forget what functions of the measured files have answered; what registers patterns stays done."""
    from template_mutants.patches import folder

    places = {str(path) for name in FILES for path in folder().glob(name)}
    for module in [*sys.modules.values()]:
        if getattr(module, "__file__", None) in places:
            for name, value in [*vars(module).items()]:
                if isinstance(value, functools._lru_cache_wrapper) and "init" not in name:
                    value.cache_clear()


def _features(texts: Iterable[str]) -> list[str]:
    """Names of the functions that generated programs call."""
    names = {_NUMBER.sub("#", name) for text in texts for name in _CALL.findall(text)}
    return sorted(name for name in names if "#" not in name.rpartition("::")[2][:12] and "fused" not in name)


def _whole(name: str, lines: Sequence[str], around: Any) -> Iterator[dict[str, Any]]:
    """Compile and run each problem, as ``survey`` generates it."""
    from pytest_gemm.api.request import DEFAULT
    from pytest_gemm.backends.builtin import BUILTIN
    from pytest_gemm.operands import tensors
    from pytest_gemm.operands.distributions import distributions_for
    from pytest_gemm.problem.problem import Problem

    kind = next(kind for kind in BUILTIN if kind().name == name)
    for line in lines:
        backend, problem, texts = kind(), Problem.parse(line), []  # a new one remembers nothing
        if backend.supports(problem, DEFAULT) is None:
            with around(), contextlib.suppress(Exception):
                operands = tensors.make(problem, distributions_for(problem)[0], 0)
                prepared: Any = backend.prepare(problem, operands, DEFAULT)
                prepared.run(operands)
                texts.append(prepared.artifact.source)
        yield {"line": line, "texts": texts}


def measured(name: str, lines: Sequence[str], isa: str, *, whole: bool) -> Iterator[dict[str, Any]]:
    """What each problem reaches, as :class:`Reach` reads it."""
    with tempfile.TemporaryDirectory() as scratch:
        meter = Meter(Path(scratch))
        meter.watch_templates()
        from template_mutants import survey  # imports torch, and with it templates

        from pytest_gemm.api.request import BuildRequest

        if name not in {"cpp", "inductor"}:
            survey._pretend()
        reached: set[tuple[str, int, int]] = set()
        began = 0.0

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            nonlocal began
            _forget()
            reached.clear()
            began = time.perf_counter()
            with meter.arcs() as arcs:
                yield
            reached.update(arcs)

        first = [*lines[:_FIRST], *lines]
        request = BuildRequest(isa=isa)
        answers = _whole(name, first, around) if whole else survey.survey(name, first, request, around)
        known: set[str] = set()
        for place, answer in enumerate(answers):
            if place < len(lines[:_FIRST]):
                continue
            parts: dict[str, list[Any]] = defaultdict(list)
            for file, begin, end in sorted(reached) if answer["texts"] else ():
                parts[file].append([begin, end])
            if answer["texts"]:
                parts["generated"] = _features(answer["texts"])
            digests = {}
            new = {}
            for file, values in parts.items():
                digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()[:12]
                digests[file] = digest
                if digest not in known:
                    known.add(digest)
                    new[digest] = values
            seconds = round(time.perf_counter() - began, 3) if answer["texts"] else 0.0
            size = sum(map(len, answer["texts"]))
            reached.clear()
            common = {"backend": name, "isa": isa, "line": answer["line"], "seconds": seconds, "size": size}
            yield {**common, "reached": digests, "new": new}


def main() -> int:
    """Print a part."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("backend")
    parser.add_argument("--lines", type=Path, help="a file of problem lines (default: all of full)")
    parser.add_argument("--piece", default="1/1", metavar="I/N", help="the I-th of N parts of the problems")
    parser.add_argument("--isa", default="", help="instruction set to generate for")
    parser.add_argument("--whole", action="store_true", help="compile and run each problem")
    asked = parser.parse_args()
    from pytest_gemm.conformance import matrix

    lines = asked.lines.read_text("utf-8").split() if asked.lines else [p.line for p in matrix.products("full")]
    piece, pieces = map(int, asked.piece.split("/"))
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for answer in measured(asked.backend, lines[piece - 1 :: pieces], asked.isa, whole=asked.whole):
            out.write(json.dumps(answer) + "\n")
            out.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
