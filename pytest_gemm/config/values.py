"""The text of an option: where it was given, and the parsers of texts.

A parser takes a text and raises a ``ValueError`` that says what would be right; :func:`parsed` names the option.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pytest

from pytest_gemm.config.options import BY_NAME, OPTIONS, Option
from pytest_gemm.core.case_id import SELECTIONS
from pytest_gemm.core.text import did_you_mean, shown
from pytest_gemm.machine.isa import ISAS
from pytest_gemm.machine.machines import Machine, machines
from pytest_gemm.problem import shapes
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem
from pytest_gemm.storage.errors import FileError

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
Parser = Callable[[str], Any]

# The most threads or processes that may be asked for; more is taken for a typing error.
MANY: Final = 1024
# Of a whole number; Python reads no more than a few thousand.
_DIGITS: Final = 30
# Seconds: thirty years.  More is a number that clocks and locks do not take.
LONGEST: Final = 1e9


class Given(str):
    """The text of an option's value, which knows where it was given.

    Attributes:
        source: the option as it was spelled, ``--gemm-seed`` or ``gemm_seed (ini)``.
    """

    source: str

    def __new__(cls, text: str, source: str) -> Self:
        """A text with its source."""
        given = super().__new__(cls, text)
        given.source = source
        return given


def wrong(text: Given, message: object) -> pytest.UsageError:
    """The error for a value."""
    return pytest.UsageError(f"{text.source}={shown(text)}: {message}")


def parsed(text: Given, parse: Callable[[str], T]) -> T:
    """What a parser makes of a text.

    Raises:
        pytest.UsageError: naming the option.
    """
    try:
        return parse(str(text))  # a plain one: it is sent to other processes
    except (ProblemError, FileError) as error:  # it names the value
        raise pytest.UsageError(f"{text.source}: {error}") from None
    except ValueError as error:
        raise wrong(text, error) from None


# -- names of options --------------------------------------------------------------------------------------


def check_names(parser: pytest.Parser, args: Sequence[str]) -> None:
    """Answer an undeclared option that looks like one of these, before argparse does.

    Raises:
        pytest.UsageError: naming it and the option that was probably meant.
    """
    for word in parser.parse_known_and_unknown_args(list(args))[1]:
        flag = word.partition("=")[0]
        if flag in _ABSENT:
            raise pytest.UsageError(f"{shown(word)}: {_ABSENT[flag]}")
        if flag.startswith("--gemm"):
            raise _unknown(word, flag, "option", [option.flag for option in OPTIONS])


def check_ini_names(config: pytest.Config) -> None:
    """Refuse an unknown key of the ini file; pytest itself only warns."""
    unknown: Iterable[str] = getattr(config, "_get_unknown_ini_keys", set)()  # of pytest 8 and 9
    for key in sorted(unknown):
        if key.startswith(("gemm_", "gemm-")):
            raise _unknown(f"{key} (ini)", key, "key", [option.ini for option in OPTIONS])


# What other test suites have an option for, and why there is none here.
_NO_TOLERANCES: Final = (
    "there are no tolerances: the bound of each element follows from the arithmetic that the backend declares; a "
    "kernel with partial sums in f16 is registered with accumulate='f16'"
)
_IN_THE_LINE: Final = (
    "it is part of the problem line, --gemm-problem=mm:f16:nn:64x48x32 (op:dtypes:layout:MxNxK) for instance"
)
_ABSENT: Final = {
    **{
        f"--gemm-{name}": _NO_TOLERANCES
        for name in ("tolerance", "tolerances", "tol", "rtol", "atol", "eps", "epsilon")
    },
    **{
        f"--gemm-{name}": _IN_THE_LINE for name in ("dtype", "dtypes", "shape", "size", "layout", "layouts", "epilogue")
    },
}


def _unknown(word: str, name: str, kind: str, known: Sequence[str]) -> pytest.UsageError:
    hint = did_you_mean(name, known)
    return pytest.UsageError(f"{shown(word)}: there is no {kind} {shown(name)}{hint}; pytest --help lists them")


# -- one value ---------------------------------------------------------------------------------------------


def typed_values(config: pytest.Config, option: Option) -> list[str]:
    """The values that the command line gives an option, "" where the next word is one; not those of ``addopts``."""
    words = list(map(str, config.invocation_params.args))
    return [
        word.partition("=")[2] if word != option.flag else ("" if option.switch else after)
        for word, after in itertools.pairwise([*words, ""])
        if word.partition("=")[0] == option.flag
    ]


def value(config: pytest.Config, name: str) -> Given:
    """The text of an option, checked as far as that goes without knowing what it means.

    An empty value in the ini file stands for the default, so that ``-o gemm_ops=`` undoes one.

    Raises:
        pytest.UsageError: for an empty or unprintable text, and for one that the option does not take.
    """
    option = BY_NAME[name]
    typed = config.getoption(option.ini)
    raw = config.getini(option.ini) if typed is None else typed
    source = option.flag if typed is not None else f"{option.ini} (ini)"
    if not isinstance(raw, str):
        raise pytest.UsageError(f"{source}={shown(str(raw))}: give text; separate items by commas")
    # The lines of a value in an ini file are one.
    text = Given(raw.strip() if typed is not None else " ".join(raw.split("\n")).strip() or option.default, source)
    if typed is not None and not text:
        default = f", which is {option.default} then" if option.default else ""
        raise pytest.UsageError(f"{source}= is empty: give {option.metavar}, or leave the option out{default}")
    check_printable(text)
    if option.switch and typed not in {None, "yes"} and option.flag in config.invocation_params.args:
        raise pytest.UsageError(f"{source} {shown(text)}: write {source}={option.metavar}, or put the option last")
    if option.choices and text not in option.choices:
        hint = did_you_mean(text.lower(), option.choices)
        raise wrong(text, f"not a value{hint}; choose one of {', '.join(option.choices)}")
    if option.repeat == "error" and len(values := dict.fromkeys(typed_values(config, option))) > 1:
        both = " and ".join(map(shown, values))
        raise pytest.UsageError(f"{source} is given twice, {both}: give it once, with commas between the values")
    return text


def check_printable(text: Given) -> None:
    """Refuse a value with a character that cannot be printed."""
    if not text.isprintable():
        raise wrong(text, "contains a character that cannot be printed")


# -- parsers: from a text to a value -------------------------------------------------------------------------


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parts_of(text: str) -> tuple[str, ...]:
    """The parts of a list; () for an empty one.

    Raises:
        ValueError: for a part that is empty, as an unset variable of a shell makes it, or stands twice.
    """
    parts = tuple(part.strip() for part in text.split(",")) if text else ()
    for part in parts:
        if not part:
            raise ValueError("one of the values between the commas is empty")
        if parts.count(part) > 1:
            raise ValueError(f"{shown(part)} is given twice")
    return parts


def names(what: str, known: Iterable[str], more: Callable[[], str] = str) -> Callable[[str], tuple[str, ...]]:
    """A parser of a list, each part of it one of those known; ``more`` ends the message on an unknown one."""

    def parse(text: str) -> tuple[str, ...]:
        for name in (parts := parts_of(text)):
            if name not in known:
                hint = did_you_mean(name.lower(), known)
                said = "; ".join(filter(None, [f"known: {', '.join(known)}", more()]))
                raise ValueError(f"unknown {what} {shown(name)!r}{hint}; {said}")
        return parts

    return parse


def whole(least: int, most: int = 10**18) -> Callable[[str], int]:
    """A parser of a whole number; 0 of an empty text."""

    def parse(text: str) -> int:
        if not text:
            return 0
        if not re.fullmatch(r"[0-9]+", text) or (len(text) <= _DIGITS and int(text) < least):
            raise ValueError(f"give a whole number, {least} or more")
        if len(text) > _DIGITS or int(text) > most:
            raise ValueError(f"give {most} at most")
        return int(text)

    return parse


def _number(text: str, most: float) -> float | None:
    """A number without a sign or an exponent, ``None`` of any other text."""
    return float(text) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) and float(text) <= most else None


def share(text: str) -> float:
    """A percentage, as a share."""
    if (percent := _number(text, 100.0)) is None:
        raise ValueError("give a percentage from 0 to 100")
    return percent / 100


def limits(text: str) -> tuple[float, float]:
    """The limits of a run and of a compile, in seconds."""
    run, *rest = [_number(part.strip(), LONGEST) for part in text.split(",")]
    (compile_limit,) = rest if len(rest) == 1 else ((None,) if rest else (1800.0,))
    if run is None or compile_limit is None:
        raise ValueError(f"give seconds as RUN or RUN,COMPILE, 0 for no limit, {LONGEST:.0f} at most")
    return run, compile_limit


def seconds(text: str) -> float:
    """A limit of a wait."""
    if (found := _number(text, LONGEST)) is None:
        raise ValueError(f"give seconds, 0 for no limit, {LONGEST:.0f} at most")
    return found


def shard(text: str) -> tuple[int, int] | None:
    """Number of a shard, and number of all shards; ``None`` of an empty text."""
    if not text:
        return None
    found = re.fullmatch(r"0*([1-9][0-9]{0,3})/0*([1-9][0-9]{0,3})", text)
    if not found or int(found[1]) > int(found[2]) or int(found[2]) > MANY:
        raise ValueError(f"give K/N, 2/3 for shard 2 of 3 for instance; K is from 1 to N, and N is {MANY} at most")
    return int(found[1]), int(found[2])


def fuzz(text: str) -> float:
    """The time to fuzz, in seconds; 0 of an empty text: not at all."""
    if not text:
        return 0.0
    if not (found := _number(text, LONGEST)):
        raise ValueError("give the time in seconds, 60 for instance")
    if find_spec("hypothesis") is None:
        raise ValueError("it needs Hypothesis, which is not installed: pip install hypothesis")
    return found


def threads(text: str) -> tuple[tuple[int, int], ...]:
    """Numbers of CPU threads, each once: to compile with, and to run with where that is another one, else 0."""
    most, found = max(MANY, 4 * cores()), []  # more than any machine uses, fewer than it refuses to start
    for part in parts_of(text):
        if not re.fullmatch(r"(?:all|0*[1-9][0-9]*)(?:/(?:all|0*[1-9][0-9]*))?", part):
            right = (
                "give a whole number, 1 or more, or all, or several of them, 1,2,all for instance; 4/2: compile for 4"
            )
            raise ValueError(f"{shown(part)!r} is no number of threads; {right}, run with 2")
        first, *rest = (cores() if one == "all" else whole(1, most)(one) for one in part.split("/"))
        found.append((first, next((run for run in rest if run != first), 0)))
    return tuple(dict.fromkeys(found))


def problems(text: str) -> tuple[Problem, ...]:
    """Problem lines, and all that shapes files hold."""
    found: list[Problem] = []
    for part in parts_of(text):
        is_file = part.endswith(".toml")
        found += [p for one in shapes.read(Path(part)) for p in one.problems] if is_file else [Problem.parse(part)]
    return tuple(dict.fromkeys(found))


def isas(text: str, here: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The instruction sets to generate for, "" being the CPU's own, and those of ``all`` that it lacks.

    Args:
        text: the option's value.
        here: what the CPU executes.
    """
    given = names("level", ("native", *ISAS, "all"))(text)
    for name in given:
        if name in ISAS and name not in here:
            raise ValueError(f"this CPU does not execute {name}; it can: {', '.join(('native', *here, 'all'))}")
    wanted = [one for name in given for one in (here if name == "all" else ("" if name == "native" else name,))]
    lacking = tuple(name for name in ISAS if name not in here) if "all" in given else ()
    return tuple(dict.fromkeys(wanted)), lacking


def machine(text: str) -> Machine | None:
    """A machine of the table; ``None`` of an empty text."""
    if text and text not in machines():
        hint = did_you_mean(text.lower(), tuple(machines()))
        raise ValueError(f"unknown machine{hint}; known: {', '.join(map(str, machines().values()))}")
    return machines()[text] if text else None


def candidates(text: str) -> str:
    """Which autotune candidates: a word, a number, or a pattern."""
    number = re.fullmatch(r"[0-9]{1,18}", text) and int(text) > 0
    is_numeric = re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", text) or text.isnumeric()
    hint = "" if is_numeric or text in SELECTIONS else did_you_mean(text.lower(), SELECTIONS)
    if text and not number and (is_numeric or hint):
        raise ValueError(f"give {', '.join(SELECTIONS)}, a number from 1 on, or a candidate's name{hint}")
    return str(text)


def is_yes(text: str) -> bool:
    """Whether a switch is on."""
    return text == "yes"
