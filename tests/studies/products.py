"""What makes a matrix product in Inductor, beside the problems that reach it.

    python tests/studies/products.py [--run out/run.jsonl] > docs/results/inductor-products.md

The table is ``inductor_products.toml``.  :func:`installed` reads the source of the installed torch, and imports nothing
of it; ``tests/conformance/test_products_of_inductor.py`` fails where it has what the table does not.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import msgspec
from packaging.specifiers import SpecifierSet
from packaging.version import Version

sys.path.insert(0, str(Path(__file__).parents[1]))

from studies import lines
from template_mutants.patches import folder

from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.problem.axes import LEVELS
from pytest_gemm.record import reader


class Product(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Some of what makes products in Inductor; ``inductor_products.toml`` describes the fields."""

    names: tuple[str, ...]
    torch: str | dict[str, str] = ""
    backend: str = ""
    lines: tuple[str, ...] = ()
    options: str = ""
    candidate: str = ""
    why: str = ""

    def releases(self, name: str) -> str:
        """The releases that have one of the names, "" for all."""
        return self.torch if isinstance(self.torch, str) else self.torch.get(name, "")


PRODUCTS = lines.read("inductor_products.toml", Product)
source = folder  # the sources of the installed Inductor


def release() -> Version:
    """The installed torch, without what its build adds."""
    return Version(Version(metadata.version("torch")).base_version)


def installed(folder: Path) -> dict[str, str]:
    """What a folder of Inductor's has: names of the table by the file that each stands in."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*.py")):
        text, place = path.read_text(encoding="utf-8"), path.relative_to(folder).as_posix()
        if "Template" in text or "ExternKernelChoice" in text or place.startswith("kernel/"):
            found |= dict.fromkeys(_names(ast.parse(text), lowers=place.startswith("kernel/")), place)
    return found


def _names(tree: ast.AST, *, lowers: bool) -> Iterator[str]:
    """Classes of templates, templates and library calls of a module, and the operators that it lowers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Template"):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Call):
            maker = ast.unparse(node.value.func).rpartition(".")[2]
            if (maker.endswith("Template") and maker != "SubstituteTemplate") or maker == "ExternKernelChoice":
                yield ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        elif isinstance(node, ast.FunctionDef) and lowers:
            calls = (d for d in node.decorator_list if isinstance(d, ast.Call) and d.args)
            yield from (ast.unparse(d.args[0]) for d in calls if ast.unparse(d.func).endswith("register_lowering"))


def unknown(products: Iterable[Product], names: Collection[str], version: Version) -> list[str]:
    """Where the table and what a release has differ, a sentence each."""
    known = {name: one.releases(name) for one in products for name in one.names}
    found = [f"{name} is not in the table" for name in names if name not in known]
    for name, releases in known.items():
        if SpecifierSet(releases).contains(version) != (name in names):
            found.append(f"{name}: torch {version} {'has' if name in names else 'lacks'} it, and not so in the table")
    return found


def complaints() -> list[str]:
    """What is wrong with the lines of the table, a sentence each."""
    found = [f"{one.names[0]}: no line and no reason" for one in PRODUCTS if not (one.lines or one.why)]
    return found + [text for one in PRODUCTS for text in lines.complaints(one.names[0], one.lines, *LEVELS)]


def unproved(products: Iterable[Product], outcomes: Sequence[Outcome], version: Version) -> list[str]:
    """What no case of a run was computed by, a sentence each, for the backends of the run.

    The candidate has to be named by the proof of a case of one of the lines, whose result is right.
    """
    proved: dict[tuple[str, str], set[str]] = {}
    for one in outcomes:
        names = proved.setdefault((one.backend, one.problem), set())
        names |= {*one.chosen} if one.status is Status.PASSED else set()
    backends, found = {backend for backend, _ in proved}, []
    for product in products:
        if not product.candidate or product.backend not in backends:
            continue
        seen = {name for line in product.lines for name in proved.get((product.backend, line), ())}
        here = SpecifierSet(product.releases(product.names[0])).contains(version)
        if here and not fnmatch.filter(seen, product.candidate):
            found.append(f"{product.names[0]}: no line was computed by {product.candidate}")
    return found


def page() -> str:
    """The table as Markdown."""
    return lines.page("products.md.jinja", products=PRODUCTS)


def main() -> int:
    """Print the page; returns 1 where the table differs from the suite, from the installed torch, or from runs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", type=Path, action="append", default=[], help="list what this record has not proved")
    runs = [reader.read(path) for path in parser.parse_args().run]
    wrong = [*complaints(), *unknown(PRODUCTS, installed(source()), release())]
    if runs:
        torch = Version(Version(runs[0].head.versions.get("torch", str(release()))).base_version)
        wrong += unproved(PRODUCTS, [outcome for one in runs for outcome in one.outcomes], torch)
    return lines.printed(page(), wrong)


if __name__ == "__main__":
    raise SystemExit(main())
