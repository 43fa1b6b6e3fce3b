"""What stands in several documents and is made of one source.

Tables are made of the code, between ``<!-- generated: NAME -->`` and ``<!-- end -->``.  The repository's account is
that of ``Source`` in pyproject.toml.  ``python tests/reference_pages.py`` rewrites both; a test fails when something
differs from its source.
"""

from __future__ import annotations

import argparse
import ast
import enum
import inspect
import re
import subprocess
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Final

from pytest_gemm.api.settings import settings_of
from pytest_gemm.backends.builtin import BUILTIN
from pytest_gemm.config import options
from pytest_gemm.config.config import ENGINE
from pytest_gemm.config.effect import WANTS
from pytest_gemm.core.outcome import Status, Verdict
from pytest_gemm.fuzzing.strategies import _plain
from pytest_gemm.ledger.entry import Entry
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.machine.machines import machines
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.operands.tensors import make
from pytest_gemm.problem.dtypes import DTYPES, DTypes
from pytest_gemm.problem.layout import Shape
from pytest_gemm.problem.ops import OPS
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.rules import FLAGS, takes
from pytest_gemm.problem.steps import STEPS, StepKind
from pytest_gemm.programs import program
from pytest_gemm.tools.cli import COMMANDS, Parser
from pytest_gemm.verdict import Red

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / "docs" / "reference"
ARCHITECTURE: Final = ROOT / "docs" / "explanation" / "architecture.md"
DEFECTS: Final = ROOT / "docs" / "defects" / "README.md"
NEWEST: Final = "2.15.0"  # the newest release of torch that the ledger was run with
COMMAND: Final = "python tests/reference_pages.py"
# An address of the repository, in which the account stands.
_ACCOUNT: Final = re.compile(r"(?<=github\.com/)[\w-]+(?=/pytest-gemm\b)|(?<=uses: )[\w-]+(?=/pytest-gemm@)")
_BLOCK: Final = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of Markdown, without the columns that are empty in all rows."""
    lines = [[cell.replace("|", "\\|") for cell in row] for row in (head, *rows)]
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
    made = [f"| {' | '.join(row)} |" for row in zip(*columns, strict=True)]
    return "\n".join([made[0], "|---" * len(columns) + "|", *made[1:]]) + "\n"


def code(words: Iterable[object]) -> str:
    """Words as code, apart by spaces."""
    return " ".join(f"`{word}`" for word in words)


def text(sentence: str) -> str:
    """A sentence of the code in Markdown."""
    return " ".join(re.sub(r"``(.*?)``", r"`\1`", sentence).replace("*", r"\*").split())


def _options(group: str) -> str:
    rows = [_row_of_option(option) for option in options.OPTIONS if option.group == group]
    return table(("option, ini key", "default", "meaning", "limits"), rows)


def _row_of_option(option: options.Option) -> tuple[str, ...]:
    meaning, _, default = option.help.removesuffix("]").partition(" [")
    spelled = f"{option.flag}[={option.metavar}]" if option.switch else f"{option.flag}={option.metavar}"
    return f"`{spelled}`<br>`{option.ini}`", default or option.default, text(meaning), "; ".join(_limits(option))


def _limits(option: options.Option) -> Iterator[str]:
    name = option.name
    if option.repeat != "last":
        yield {"error": "given once, as a list", "append": "may be repeated"}[option.repeat]
    others = [*options.CONFLICTS.get(name, ()), *(one for one, other in options.CONFLICTS.items() if name in other)]
    for words, found in (("not with", others), ("no effect with", option.ignored_by)):
        if found:
            yield f"{words} {code(f'--gemm-{other}' for other in found)}"
    if not option.timed:
        yield "no effect on timed cases"
    if wanted := _wanted(name):
        yield wanted


def _wanted(name: str) -> str:
    # Of guard one value alone wants it.
    return f"for a backend that {WANTS[name][0]}" if name in WANTS and name != "guard" else ""


def _settings() -> str:
    owners = {**ENGINE, **{one.name: settings_of(one) for one in (backend() for backend in BUILTIN)}}
    found = {f"{owner}.{key}": one for owner, settings in owners.items() for key, one in settings.items()}
    rows = [(f"`{k}={one.metavar}`", one.default, text(one.help), _wanted(k)) for k, one in found.items()]
    return table(("setting", "default", "meaning", "limits"), rows)


def _commands() -> str:
    parts = []
    for name, command in COMMANDS.items():
        parser = Parser(prog=name)
        parser.fill(command)
        parts += [f"## {name}\n", f"{_sentence(command['help'])}\n", *_arguments(parser)]
    return "\n".join(parts)


def _sentence(words: str) -> str:
    return f"{text(words[0].upper() + words[1:])}."


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    actions = [one for one in parser._actions if not isinstance(one, argparse._HelpAction)]
    tasks = [one for one in actions if isinstance(one, argparse._SubParsersAction)]
    if rows := [(f"`{_spelled(one)}`", _meaning(one)) for one in actions if one not in tasks]:
        yield table(("argument", "meaning"), rows)
    for action in tasks:
        about = {one.dest: one.help or "" for one in action._choices_actions}
        for name, task in action.choices.items():
            yield f"### {parser.prog} {name}\n\n{_sentence(about[name])}\n"
            yield from _arguments(task)


def _spelled(action: argparse.Action) -> str:
    value = str(action.metavar or "|".join(map(str, action.choices or ())) or action.dest.upper())
    if action.option_strings:
        return action.option_strings[-1] + ("" if action.nargs == 0 else f"={value}")
    return f"{value}..." if action.nargs in {"+", "*"} else value


def _meaning(action: argparse.Action) -> str:
    is_optional = action.nargs in {"*", "?"} and not action.option_strings
    marks = {"required": action.required and action.option_strings, "may be left out": is_optional}
    return "; ".join([text(action.help or ""), *(mark for mark, holds in marks.items() if holds)])


def _ops() -> str:
    own = [name for name, spec in STEPS.items() if spec.needs or spec.kind is StepKind.QUANT]
    rows = []
    for op in OPS.values():
        words = code(name for name in own if takes(op, name))
        rows.append((f"`{op.name}`", text(op.help), code(op.layouts), op.batch, words, code(op.dtypes)))
    return table(("op", "computes", "layouts", "batch", "own words", "dtypes"), rows)


def _steps(*, is_quant: bool) -> str:
    rows = []
    for name, spec in STEPS.items():
        if (spec.kind is StepKind.QUANT) == is_quant:
            numbers = "_".join(f"{number:g}" for number in spec.numbers)
            values = code(f"{name}-{one}" for one in spec.choices if one != spec.default)
            takers = [op.name for op in OPS.values() if takes(op, name)]
            ops = "" if len(takers) == len(OPS) else code(takers)
            rows.append((f"`{name}`", text(spec.help), values, f"`{name}-{numbers}`" if numbers else "", ops))
    return table(("word", "meaning", "values", "without a value", "ops"), rows)


def _flags() -> str:
    rows = []
    for name, flag in FLAGS.items():
        needs = [" = ".join(flag.equal.upper())] if flag.equal else []
        needs += [f"layout {' or '.join(flag.layouts)}"] if flag.layouts else []
        needs += [f"A in {' or '.join(flag.input)}"] if flag.input else []
        needs += [f"`{other}`" for other in (*flag.needs, flag.step) if other]
        ops = "all" if flag.every else code(op.name for op in OPS.values() if name in op.flags)
        rows.append((f"`{name}`", text(flag.help), "; ".join(needs), code(flag.excludes), ops))
    return table(("word", "meaning", "needs", "not with", "ops"), rows)


def _members(kind: type[enum.Enum], head: str) -> str:
    """The members of an enumeration, each with the docstring below its value."""
    lines = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(lines, ast.ClassDef)
    constants = [line.value for line in lines.body if isinstance(line, ast.Expr)]
    about = [text(str(one.value)) for one in constants[1:] if isinstance(one, ast.Constant)]
    red = ["yes" if getattr(one, "is_failure", False) else "" for one in kind]
    rows = [(f"`{one.value}`", sentence, fails) for one, sentence, fails in zip(kind, about, red, strict=True)]
    return table((head, "meaning", "fails the run"), rows)


def _packages() -> str:
    """The packages by floor: each stands above all that it imports."""
    homes = [*(ROOT / "pytest_gemm").iterdir(), *(ROOT / name for name in ("backends", "conformance", "perf"))]
    found = {one.stem: one for one in homes if one.name == "verdict.py" or (one / "__init__.py").exists()}
    imported = {name: _imported(home) & found.keys() - {name} for name, home in found.items()}

    @cache
    def floor(name: str) -> int:
        return 1 + max(map(floor, imported[name]), default=0)

    names = sorted(found, key=lambda name: (-floor(name), name))
    rows = [(str(floor(n)), f"`{n}`", _about(found[n]), code(o for o in names if o in imported[n])) for n in names]
    return table(("floor", "package", "what it is", "imports"), rows)


def _imported(home: Path) -> set[str]:
    """The packages that the modules of one import, within functions too."""
    found = set()
    for path in home.rglob("*.py") if home.is_dir() else [home]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pytest_gemm"):
                found |= {f"{node.module}.{one.name}".split(".")[1] for one in node.names}
    return found


def _about(home: Path) -> str:
    """The first line of a package's docstring."""
    path = home / "__init__.py" if home.is_dir() else home
    return text((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0])


def _machines() -> str:
    names = ("help", "threads", "l1d", "l2", "l3", "isa", "multiprocessors", "shared_memory")
    rows = [(f"`{one.name}`", *(str(getattr(one, name) or "") for name in names)) for one in machines().values()]
    head = ("NAME", "machine", "threads", "L1d", "L2", "L3", "level", "multiprocessors", "shared memory")
    return table(head, rows)


# Problems with tensors that no op has by itself.
_FURTHER: Final = (
    *(f"addmm:bf16:nn:16x32x256:bias{shape}" for shape in ("", "-0", "-1n", "-m1", "-mn", "-xn")),
    *(f"linear:bf16:nt:4x16x32x256:bias{flag}" for flag in ("", ":a.4d")),
    *(f"mm:bf16:nn:16x32x256:{words}" for words in ("add+mul-n+sub-m1", "add-at", "out.given", "a.sliced")),
    *("linears:bf16:nt:3x16x32x256:bias", "mm:bf16:nn:16x16x16:b.alias", "mm:bf16:nn:16x256x256:add:r0.alias"),
    *("baddbmm:bf16:nn:3x16x32x256:bias-mn", "woq_int8:bf16-i8-bf16:nt:16x48x256:program.concat"),
)


def _tensors(*, of_ops: bool) -> str:
    """Names, shapes and dtypes of the tensors of an op's plain problem, or of further problems."""
    problems = [Problem.parse(line) for line in _FURTHER]
    if of_ops:
        kinds = ((op, next(one for one in op.dtypes if "f64" not in one)) for op in OPS.values())
        shapes = {False: Shape(16, 32, 256), True: Shape(16, 32, 256, 3)}
        problems = [
            _plain(op, DTypes.parse(kind.split("-")), op.layouts[0], shapes[op.batch == "always"]) for op, kind in kinds
        ]
    rows = []
    for problem in problems:
        given = program.args(problem, make(problem, distributions_for(problem)[0], 0))
        named = (f"`{name}` {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for name, x in given.items())
        rows.append((f"`{problem.line}`", "<br>".join(named)))
    return table(("problem", "tensors"), rows)


def _defects() -> str:
    """The entries of the ledger by the worst that they do, and how many the newest release has."""
    effects: dict[str, list[Entry]] = {name: [] for name in _EFFECTS}
    for entry in Ledger.load(ROOT / "conformance" / "known_failures.toml").entries:
        effects[_effect(entry)].append(entry)
    newest = [str(sum(one.applies({"torch": (NEWEST,)}) for one in found)) for found in effects.values()]
    rows = zip(effects, _EFFECTS.values(), (str(len(found)) for found in effects.values()), newest, strict=True)
    return table(("what it does", "how you see it", "entries", f"in torch {NEWEST}"), rows)


def _effect(entry: Entry) -> str:
    if entry.crashes:
        return "the process dies"
    if Status.INCORRECT in entry.status:
        is_nan = any("nan" in name for name in entry.computes.patterns)
        return "NaN, or a number in its place" if is_nan else "silently wrong numbers"
    return "it falls back" if Status.FALLBACK in entry.status else "an error"


_EFFECTS: Final = {
    "silently wrong numbers": "not at all: no error, and wrong numbers",
    "NaN, or a number in its place": "a NaN that is not due, or none where one is",
    "the process dies": "a segmentation fault, a division by zero, an illegal access",
    "an error": "the compile or the call raises",
    "it falls back": "not at all: right, by another kernel than the one that was asked for",
}

BLOCKS: Final[Mapping[str, Callable[[], str]]] = {
    **{group: partial(_options, group) for group in ("cases", "correctness", "speed")},
    "packages": _packages,
    "settings": _settings,
    "machines": _machines,
    "commands": _commands,
    "ops": _ops,
    "steps": partial(_steps, is_quant=False),
    "quant": partial(_steps, is_quant=True),
    "flags": _flags,
    "tensors": partial(_tensors, of_ops=True),
    "further-tensors": partial(_tensors, of_ops=False),
    "dtypes": lambda: table(("name", "torch."), ((f"`{name}`", one.torch_name) for name, one in DTYPES.items())),
    "statuses": partial(_members, Status, "status"),
    "verdicts": partial(_members, Verdict, "verdict"),
    "exit-statuses": partial(_members, Red, "exit status"),
    "defects": _defects,
}


def rewritten(page: str) -> str:
    """A page with its tables as the code gives them."""
    return _BLOCK.sub(lambda match: f"{match[1]}\n{BLOCKS[match[2]]()}\n{match[3]}", page)


def pages() -> dict[Path, str]:
    """The pages that have generated tables, as they are."""
    texts = {path: path.read_text(encoding="utf-8") for path in (ARCHITECTURE, DEFECTS, *sorted(FOLDER.glob("*.md")))}
    return {path: page for path, page in texts.items() if _BLOCK.search(page)}


@cache
def account() -> str:
    """The account that has the repository."""
    found = re.search(r'^Source = "https://github\.com/([\w-]+)/', (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
    assert found, "pyproject.toml has no Source"
    return found[1]


def addressed(text: str) -> str:
    """A text in which each address of the repository has the account."""
    return _ACCOUNT.sub(account(), text)


def with_addresses() -> dict[Path, str]:
    """The files of the repository that have its address, as they are."""
    names = subprocess.run(
        ["git", "ls-files", "*.md", "*.yml", "*.toml"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    texts = {ROOT / name: (ROOT / name).read_text(encoding="utf-8") for name in names}
    return {path: text for path, text in texts.items() if _ACCOUNT.search(text)}


if __name__ == "__main__":
    for path, text_of_it in with_addresses().items():
        path.write_text(addressed(text_of_it), encoding="utf-8")
    for path, page in pages().items():
        path.write_text(rewritten(page), encoding="utf-8")
