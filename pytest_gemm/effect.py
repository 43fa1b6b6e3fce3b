"""Options that a run would ignore.  Typed on the command line, each of them is an error.

Whether an option has an effect is asked of the selected backends before the tests are collected, and of the collected
tests before the first one runs.  An option in the ini file is a default for many runs, and no run has to heed all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import pytest

from pytest_gemm.api.protocols import Backend, CandidateBackend
from pytest_gemm.api.request import Capability, honours
from pytest_gemm.api.settings import configure, settings_of
from pytest_gemm.config import GemmConfig, cores
from pytest_gemm.options import OPTIONS, named_choices

# Options that have no effect on a timed case: it is timed in its backend's own way, see docs/speed.md.
_NOT_TIMED: Final = ("distributions", "modes", "isa", "guard", "coverage", "defects")

# Options that a run of its own kind heeds; all others have no effect there.
_BACKENDS: Final = frozenset({"backends", "missing", "device", "threads", "compile-timeout"})
_HEEDED: Final[Mapping[str, frozenset[str]]] = {
    "doctor": _BACKENDS | {"doctor"},
    "fingerprint": _BACKENDS | {"fingerprint", "level", "baselines"},
}
# Options that have no effect in a run of its own kind.
_IGNORED: Final[Mapping[str, tuple[str, ...]]] = {
    "compile-only": (
        *("timeout", "reference", "known-failures", "artifacts", "defects", "coverage", "guard", "modes", "isa"),
        *("record", "force", "accept", "prune", "against", "samples", "report", "summary"),
    ),
    "fuzz": ("modes", "reference", "guard", "coverage", "defects"),
}


# Options that set what backends declare as settings of their own: the key of each.
_OF_BACKENDS: Final[Mapping[str, str]] = {
    "triton-space": "space",
    "cutlass-allow": "allow",
    "cutlass-swizzles": "swizzles",
    "cutlass-level": "level",
    "kernel-cache": "cache",
}


def read_by(backend: Backend, options: Mapping[str, str]) -> frozenset[str]:
    """Configure a backend, and return the names of the options that concern it."""
    names = {name: key for name, key in _OF_BACKENDS.items() if key in settings_of(backend)}
    configure(backend, {key: options[name] for name, key in names.items()})
    return frozenset(names)


def _on_cpu(config: GemmConfig, backend: Backend) -> bool:
    return config.device_of(backend) == "cpu"


def _generates(config: GemmConfig, backend: Backend) -> bool:
    return honours(backend, Capability.ISA) and _on_cpu(config, backend)


def _has_candidates(_config: GemmConfig, backend: Backend) -> bool:
    return isinstance(backend, CandidateBackend) or honours(backend, Capability.SELECTION)


def _has_chosen(config: GemmConfig, backend: Backend) -> bool:
    """A backend without candidates is itself all that it has; it has none of a name, and no second one."""
    return config.choices in {"one", "winner", "all"} or _has_candidates(config, backend)


# What a backend has to be for an option to have an effect on it: in words, and the question.
_WANTS: Final[Mapping[str, tuple[str, Callable[[GemmConfig, Backend], bool]]]] = {
    "isa": ("generates code for the CPU", _generates),
    "coverage": ("generates code for the CPU", _generates),
    "choices": ("has autotune candidates", _has_chosen),
    "regret": ("has autotune candidates", _has_candidates),
    "guard": ("computes on the CPU", _on_cpu),
    "windows": ("computes on the CPU", _on_cpu),
    "arch": ("compiles ahead of the tests", lambda _, backend: hasattr(backend, "compiles_ahead")),
    "comparator": ("is another one than the comparator", lambda config, b: b.name != config.speed.comparator),
}


def applies(name: str, config: GemmConfig, backend: Backend) -> bool:
    """Whether an option can have an effect on the cases of a backend."""
    if name in _OF_BACKENDS:
        return name in config.read_by.get(backend.name, frozenset())
    return name not in _WANTS or _WANTS[name][1](config, backend)


def _refused(config: GemmConfig, name: str, why: str, remedy: str = "") -> pytest.UsageError:
    from pytest_gemm.options import shown

    remedy = f"{remedy}, or leave it out" if remedy else "leave it out"
    return pytest.UsageError(f"--gemm-{name}={shown(config.options[name])} has no effect: {why}; {remedy}")


def check_backends(config: GemmConfig) -> None:
    """Refuse what was typed and has no effect on any selected backend, or in a run of this kind.

    Raises:
        pytest.UsageError: naming the option and why it has no effect.
    """
    kind = next((one for one in ("doctor", "fingerprint", "compile-only", "fuzz") if config.asked_for(one)), "")
    for name in sorted(config.typed):
        heeded = (
            name in _HEEDED[kind] or name in _OF_BACKENDS if kind in _HEEDED else name not in _IGNORED.get(kind, ())
        )
        if not heeded:
            raise _refused(config, name, f"--gemm-{kind} ignores it")
    if kind == "fuzz" and len(config.thread_axis) > 1:
        raise _refused(config, "threads", "--gemm-fuzz has one number of threads", "give one")
    for name in sorted(config.typed & {*_WANTS, *_OF_BACKENDS}):
        if any(applies(name, config, backend) for backend in config.backends):
            continue
        wanted = f"reads --gemm-{name}" if name in _OF_BACKENDS else _WANTS[name][0]
        here = ", ".join(backend.name for backend in config.backends)
        others = ", ".join(backend.name for backend in config.registry if applies(name, config, backend))
        remedy = f"add one of {others} to --gemm-backends" if others else ""
        raise _refused(config, name, f"no selected backend ({here}) {wanted}", remedy)


def check_cases(config: GemmConfig, *, tests: int, cases: int, timed: int) -> None:
    """Refuse what was typed and has no effect on any collected test.

    Args:
        config: of the run.
        tests: number of collected tests.
        cases: how many of them have a case of a backend.
        timed: how many of those are timed.

    Raises:
        pytest.UsageError: naming the option and why it has no effect.
    """
    from pytest_gemm.options import SPEED

    if not tests:
        return
    speed = [option.name for option in SPEED if option.name in config.typed]
    if speed and not timed:
        why = f"none of the {tests} collected test(s) is timed"
        raise _refused(config, speed[0], why, "name timed tests (pytest perf, or pytest --pyargs pytest_gemm.perf)")
    several = ("threads",) if len(config.thread_axis) > 1 else ()
    idle = [name for name in (*_NOT_TIMED, *several) if name in config.typed]
    if idle and timed and timed == cases:
        why = "all collected cases are timed, each in its backend's own way and with one number of threads"
        raise _refused(config, idle[0], why)


def rerun_options(config: GemmConfig, backend: str = "", *, timed: bool = True) -> tuple[str, ...]:
    """Options of a rerun: what this run was given and what another one would otherwise choose differently.

    Args:
        config: this run.
        backend: the one that is run again, without the options that have no effect on it; "": any.
        timed: whether it is timed again, which needs the options of speed.
    """
    options = []
    if config.level != "quick":
        options.append(f"--gemm-level={config.level}")
    if config.threads != cores():
        options.append(f"--gemm-threads={config.threads}")
    if config.ledger_given:
        options.append(f"--gemm-known-failures={config.ledger_given}")
    if config.device != "auto":
        options.append(f"--gemm-device={config.device}")
    if config.choices != named_choices("", config.level):
        options.append(f"--gemm-choices={config.choices}")
    if config.reference != "auto":
        options.append(f"--gemm-reference={config.reference}")
    if (space := config.options.get("triton-space", "default")) != "default":
        options.append(f"--gemm-triton-space={space}")
    speed = {"comparator", "windows", "against" if config.speed.against else "baselines"} if timed else set()
    plain = [o for o in OPTIONS if o.name.startswith("cutlass-") or o.name in speed]
    given = {option.flag: config.options.get(option.name, option.default) for option in plain}
    options += [f"{o.flag}={given[o.flag]}" for o in plain if given[o.flag] != o.default]
    if backend:
        again = config.registry[backend]
        named = [(option, option.partition("=")[0].removeprefix("--gemm-")) for option in options]
        options = [option for option, name in named if applies(name, config, again)]
    return tuple(options)
