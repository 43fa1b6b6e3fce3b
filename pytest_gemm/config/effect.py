"""Options that a run would ignore.  Typed on the command line, each of them is an error.

Whether an option has an effect depends on the selected backends, which are known before the tests are collected, and on
the collected tests, which are known before the first one runs.  An option in the ini file is a default for many runs,
and no run has to heed all.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final
from unittest.mock import Mock

import pytest

from pytest_gemm.api.protocols import Backend, CandidateBackend, Together
from pytest_gemm.api.request import Capability, honours
from pytest_gemm.config.config import GemmConfig
from pytest_gemm.config.options import BY_NAME, OPTIONS
from pytest_gemm.config.values import cores
from pytest_gemm.core.case_id import SELECTIONS
from pytest_gemm.core.text import shown


def _on_cpu(config: GemmConfig, backend: Backend) -> bool:
    return config.device_of(backend) == "cpu"


def _has_candidates(_config: GemmConfig, backend: Backend) -> bool:
    return isinstance(backend, CandidateBackend) or honours(backend, Capability.SELECTION)


def _has_chosen(config: GemmConfig, backend: Backend) -> bool:
    """A backend without candidates is itself all that it has; it has none of a name, and no second one."""
    return config.wanted_candidates in SELECTIONS or _has_candidates(config, backend)


SUITE: Final = "pytest --pyargs pytest_gemm.conformance"
"""The command of the suite that takes any problem."""
# What a backend has to be for an option to have an effect on it: in words, and as a predicate.
WANTS: Final[Mapping[str, tuple[str, Callable[[GemmConfig, Backend], bool]]]] = {
    "isa": ("generates code for the CPU", lambda config, b: honours(b, Capability.ISA) and _on_cpu(config, b)),
    "candidates": ("has autotune candidates", _has_chosen),
    "guard": ("computes on the CPU", _on_cpu),
    "run.machine": ("compiles as on that machine", lambda config, b: config.machine_of(b) is not None),
    "run.together": ("compiles kernels in batches", lambda _, b: isinstance(b, Together)),
    "run.stream": ("computes on a CUDA device", lambda config, b: not _on_cpu(config, b)),
    "speed.windows": ("computes on the CPU", _on_cpu),
    "comparator": ("differs from the comparator", lambda config, b: b.name != config.speed.comparator),
}


def applies(name: str, config: GemmConfig, backend: Backend) -> bool:
    """Whether an option or a setting can have an effect on the cases of a backend."""
    if name in WANTS:
        return WANTS[name][1](config, backend)
    owner, dot, _ = name.partition(".")
    return not dot or owner in {backend.name, "run", "speed"}


def _has_no_effect(config: GemmConfig, name: str, why: str, remedy: str = "") -> pytest.UsageError:
    """The error for an option or a setting."""
    flag, text = ("--gemm-set=", config.settings[name]) if "." in name else ("--gemm-", config.options[name])
    remedy = f"{remedy}, or leave it out" if remedy else "leave it out"
    return pytest.UsageError(f"{flag}{name}={shown(text)} has no effect: {why}; {remedy}")


def check_backends(config: GemmConfig) -> None:
    """Refuse what was typed and has no effect on any selected backend, or in a run of this kind.

    Raises:
        pytest.UsageError: naming the option and why it has no effect.
    """
    kind = "compile-only" if config.compile_only else "fuzz" if config.fuzz else ""
    if kind and config.machine:
        raise _has_no_effect(config, "run.machine", f"--gemm-{kind} ignores it")
    for name in sorted(option.name for option in OPTIONS if option.name in config.typed and kind in option.ignored_by):
        raise _has_no_effect(config, name, f"--gemm-{kind} ignores it")
    if kind == "fuzz" and config.thread_axis:
        raise _has_no_effect(config, "threads", "--gemm-fuzz accepts one --gemm-threads value", "give one")
    for name in sorted(config.typed):
        if any(applies(name, config, backend) for backend in config.backends):
            continue
        wanted = WANTS[name][0] if name in WANTS else "reads it"
        here = ", ".join(backend.name for backend in config.backends)
        others = ", ".join(backend.name for backend in config.registry if applies(name, config, backend))
        remedy = f"add one of {others} to --gemm-backends" if others else ""
        raise _has_no_effect(config, name, f"no selected backend ({here}) {wanted}", remedy)


def untaken(config: GemmConfig, selected: Collection[str], taking: Mapping[str, str]) -> list[str]:
    """A sentence for each problem that was typed and is in no selected test, with a test that takes it.

    Args:
        config: of the run.
        selected: lines of the problems of all selected tests.
        taking: a test that takes a problem and may have been deselected, by the problem's line.
    """
    is_part = config.fuzz or config.shard or "problem" not in config.typed
    lines = [] if is_part else [problem.line for problem in config.problems if problem.line not in selected]
    suite = f"the suite does: {SUITE}"
    tests = {line: f"{taking[line]} does, and was deselected" if line in taking else suite for line in lines}
    return [f"--gemm-problem={line}: no selected test takes it; {test}" for line, test in tests.items()]


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
    if not tests:
        return
    if timed and config.machine:
        what = f"{timed} of the {tests} collected test(s) are timed, which shows nothing of that machine"
        raise pytest.UsageError(f"--gemm-set=run.machine={config.machine.name}: {what}; name tests that judge")
    typed = [option for option in OPTIONS if option.name in config.typed]
    speed = [option.name for option in typed if option.group == "speed"]
    speed += sorted(name for name in config.typed if name.startswith("speed."))
    if speed and not timed:
        why = f"none of the {tests} collected test(s) is timed"
        remedy = "name timed tests (pytest perf, or pytest --pyargs pytest_gemm.perf)"
        raise _has_no_effect(config, speed[0], why, remedy)
    several = bool(config.thread_axis)
    idle = [option.name for option in typed if not option.timed or (option.name == "threads" and several)]
    if idle and timed and timed == cases:
        why = "all collected cases are timed, each in its backend's own way and with one number of threads"
        raise _has_no_effect(config, idle[0], why)


def rerun_options(config: GemmConfig, backend: str = "", *, timed: bool = True) -> tuple[str, ...]:
    """Options of a rerun: what this run was given and what another one would otherwise choose differently.

    Args:
        config: this run.
        backend: the one that is run again, without the options that have no effect on it; "": any.
        timed: whether it is timed again, which needs the options of speed.
    """
    again = config.registry[backend] if backend else None
    names = ["level", "known-failures", "device", "candidates", "reference"]
    names += ["comparator", "against" if config.speed.against else "baselines"] if timed else []
    given = {name: config.options[name] for name in names if config.options[name] != BY_NAME[name].default}
    as_cpu = bool(config.machine and config.machine.threads)
    has_own = as_cpu and (again is None or config.machine_of(again) is not None)
    given |= {"threads": str(config.threads)} if config.threads != cores() and not has_own else {}
    found = {name: f"--gemm-{name}={text}" for name, text in given.items()}
    owners = {one.name for one in config.backends} | ({"speed"} if timed else set())
    found |= {
        name: f"--gemm-set={name}={text}"
        for name, text in config.settings.items()
        if (name.partition(".")[0] in owners or name in {"run.stream", "run.machine"})
        and not name.endswith((".cache", ".jobs", ".wait"))
    }
    return (
        *config.loading,
        *(text for name, text in found.items() if again is None or applies(name, config, again)),
    )


# -- how pytest was started ----------------------------------------------------------------------------------------

# Options of pytest that decide which plugins, conftests and ini files are loaded; whether they take a value.
_LOADING: Final[Mapping[str, bool]] = {
    **dict.fromkeys(("-p", "-c", "--config-file", "--rootdir", "--confcutdir", "-o", "--override-ini"), True),
    "--import-mode": True,
    "--noconftest": False,
}
_HOOKS: Final = ("pytest_gemm_register_backends", "pytest_gemm_register_ops")


def loading(config: pytest.Config) -> tuple[str, ...]:
    """The words of the command line without which another run may not have the same backends.

    These are pytest's own options of that kind, and those of conftests and of plugins that were named or that register
    backends; and the conftests that register them, for a test in another folder.  ``python -m`` is in front where the
    current folder is on the path for it.
    """
    wanted, kept = {**_LOADING, **_declared(config)}, []
    words = iter(map(str, config.invocation_params.args))
    for word in words:
        name, equals, _ = word.partition("=")
        if name in wanted:
            kept += [word, *([next(words, "")] if wanted[name] and not equals else [])]
        elif word.startswith(("-p", "-c", "-o")):
            kept.append(word)
    start = getattr(config, "workerinput", {}).get("mainargv", sys.argv)[0]
    here = config.invocation_params.dir
    named = any(before == "-p" and not name.startswith("no:") for before, name in itertools.pairwise(kept))
    as_module = Path(start).parts[-2:] == ("pytest", "__main__.py") and (named or not (here / "conftest.py").exists())
    registering = [one for hook in _HOOKS for one in getattr(config.hook, hook).get_hookimpls()]
    files = [Path(getattr(one.plugin, "__file__", None) or "") for one in registering]
    conftests = sorted({os.path.relpath(file, here) for file in files if file.name == "conftest.py"})
    return (*(("python", "-m") if as_module else ()), *kept, *conftests)


def _declared(config: pytest.Config) -> dict[str, bool]:
    """The options of conftests, and of plugins that were named or register backends."""
    parser, manager = Mock(), config.pluginmanager  # it notes all calls, those to its groups too
    installed = [plugin for plugin, _ in manager.list_plugin_distinfo()]
    for declaring in config.hook.pytest_addoption.get_hookimpls():
        plugin = declaring.plugin
        module = getattr(plugin, "__name__", "_pytest.")
        theirs = module.startswith(("_pytest.", "pytest_gemm.")) or plugin in installed
        if not theirs or any(hasattr(plugin, hook) for hook in _HOOKS):
            given = {"parser": parser, "pluginmanager": manager}
            with contextlib.suppress(Exception):  # it may use more of a parser
                declaring.function(*(given[name] for name in declaring.argnames))
    declared = [(names, more.get("action")) for call, names, more in parser.mock_calls if call.endswith("addoption")]
    return {name: action in {None, "store", "append"} for names, action in declared for name in names}
