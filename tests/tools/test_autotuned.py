"""Autotuned kernels: each configuration is judged, none by its speed, and a first call as a user's."""

from __future__ import annotations

import contextlib
import inspect
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import pytest_gemm
from pytest_gemm.problem.problem import Problem
from pytest_gemm.tools import autotuned, cli, first_calls
from pytest_gemm.tools.autotuned import FIRST, TUNED, Tuned
from pytest_gemm.worker.inline import Inline


class OutOfResources(Exception):
    """What Triton raises where a configuration needs more shared memory than there is."""


class _JITFunction:
    """Adds its block to what it is given, and notes it where it was launched."""

    def __init__(self, too_large: Sequence[int] = ()) -> None:
        self.launched: list[int] = []
        self.too_large = too_large

    def run(self, target: Any, *, block: int, warmup: bool = False, **_: Any) -> None:
        if block in self.too_large:
            raise OutOfResources(block)
        if not warmup:
            self.launched.append(block)
            target.append(block)


class _Config:
    pre_hook = None

    def __init__(self, block: int) -> None:
        self.block = block

    def all_kwargs(self) -> dict[str, Any]:
        return {"block": self.block}

    def __str__(self) -> str:
        return f"block: {self.block}"


class _Autotuner:
    """As ``triton.runtime.autotuner.Autotuner``, of which it has what is used here."""

    arg_names = ("target",)

    def __init__(
        self, fn: Any, blocks: Sequence[int] = (16, 32, 64, 128), prune: Callable[..., Any] = lambda configs: configs
    ) -> None:
        self.fn, self.configs, self.prune = fn, [_Config(block) for block in blocks], prune
        self.cache: dict[Any, Any] = {}
        self.files: list[Any] = []
        self.benches, self.cache_results = 0, True

    def do_bench(self, launch: Callable[[], Any], quantiles: Sequence[float]) -> list[float]:
        self.benches += 1
        launch()
        return [-float(self.fn.launched[-1])] * len(quantiles)  # larger blocks are faster

    def prune_configs(self, _: Any) -> Any:
        return self.prune(self.configs)

    def _bench(self, *arguments: Any, config: Any, **named: Any) -> list[float]:
        try:
            return self.do_bench(
                lambda: self.fn.run(*arguments, **named, **config.all_kwargs()), quantiles=(0.5, 0.2, 0.8)
            )
        except OutOfResources:
            return [float("inf")] * 3

    def run(self, *arguments: Any, key: Any, **named: Any) -> None:
        if key not in self.cache:
            timings = {config: self._bench(*arguments, config=config, **named) for config in self.prune_configs(named)}
            self.cache[key] = min(timings, key=lambda config: timings[config])
            self.files += [timings] * self.cache_results
        self.best_config = self.cache[key]
        self.fn.run(*arguments, **named, **self.best_config.all_kwargs())


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for Triton, whose classes are changed in place."""
    monkeypatch.setattr(autotuned, "_state", autotuned._State())
    kernel = type("JITFunction", (_JITFunction,), {**vars(_JITFunction)})
    tuner = type("Autotuner", (_Autotuner,), {**vars(_Autotuner), "__module__": "triton.runtime.autotuner"})
    modules = {"autotuner": {"Autotuner": tuner}, "jit": {"JITFunction": kernel}}
    for name, contents in modules.items():
        monkeypatch.setitem(sys.modules, f"triton.runtime.{name}", types.SimpleNamespace(**contents))
    return types.SimpleNamespace(tuner=lambda too_large=(), **named: tuner(kernel(too_large), **named))


def _computed(tuner: Any, line: str | None = None, *, key: str = "any") -> list[int]:
    """What a call of the kernel writes, after the beginning of a problem."""
    if line is not None:
        autotuned.begin(Problem.parse(line))
    target: list[int] = []
    autotuned.call(lambda: tuner.run(target, key=key))
    return target


def _turns() -> Any:
    """The further turns of a worker that is this process."""
    return autotuned.turns(Inline(autotuned.CALLS))


def _lines(count: int) -> list[str]:
    return [f"mm:f32:nn:{16 + size}x16x16" for size in range(count)]


def test_each_problem_gets_one_configuration_and_none_is_timed(triton: Any) -> None:
    tuner = triton.tuner()
    first = [_computed(tuner, line) for line in _lines(40)]
    again = [_computed(tuner, line) for line in _lines(40)]
    assert first == again  # so that the rerun of a failure shows it
    assert all(len(blocks) == 1 for blocks in first)  # one launch: a result is that of one configuration
    assert {blocks[0] for blocks in first} == {16, 32, 64, 128}
    assert tuner.benches == 0
    assert str(autotuned.tuned(None)) == "4 configurations, 4 judged"


def test_the_flags_of_a_problem_leave_its_configuration(triton: Any) -> None:
    tuner = triton.tuner()
    for line in _lines(10):
        assert _computed(tuner, line) == _computed(tuner, f"{line}:math.tf32") == _computed(tuner, f"{line}:a.padded")


def test_what_the_kernel_prunes_is_never_launched(triton: Any) -> None:
    tuner = triton.tuner(prune=lambda configs: configs[1:3])
    assert {_computed(tuner, line)[0] for line in _lines(40)} == {32, 64}
    assert autotuned.tuned(None).configs == 2


def test_a_configuration_that_does_not_fit_gives_way_and_is_named(triton: Any) -> None:
    tuner = triton.tuner(too_large=(128,))
    assert {_computed(tuner, line)[0] for line in _lines(40)} == {16, 32, 64}
    tuned = autotuned.tuned(None)
    assert tuned.unfit == ("block: 128",)
    assert str(tuned) == "4 configurations, 3 judged, 1 do not fit this GPU"


def test_where_none_fits_triton_s_own_error_is_raised(triton: Any) -> None:
    with pytest.raises(OutOfResources):
        _computed(triton.tuner(too_large=(16, 32, 64, 128)))


def test_further_turns_judge_the_rest_and_then_a_first_call(triton: Any) -> None:
    tuner = triton.tuner()
    _computed(tuner, _lines(1)[0])
    judged = [(what, *_computed(tuner)) for what in _turns()]
    assert [what for what, *_ in judged] == ["another configuration"] * 3 + ["the first call, which tunes"]
    assert {block for what, block, *_ in judged[:3]} | {tuner.fn.launched[0]} == {16, 32, 64, 128}
    # Tuning launches every configuration, so a kernel that adds to its result is wrong at a first call alone.
    assert judged[-1][1:] == (16, 32, 64, 128, 16)
    assert tuner.files == []  # Triton keeps times for later runs
    assert _computed(tuner, _lines(1)[0]) == tuner.fn.launched[:1]  # the problem has its own turn again


def test_further_turns_that_are_cut_short_leave_each_problem_its_own(triton: Any) -> None:
    tuner = triton.tuner()
    own = _computed(tuner, _lines(1)[0])
    for _ in _turns():
        assert _computed(tuner) != own
        break
    assert _computed(tuner) == own


def test_a_first_call_is_one_however_often_it_is_judged(triton: Any) -> None:
    tuner = triton.tuner()
    autotuned.tuned(None, FIRST)
    assert [len(_computed(tuner)) for _ in range(3)] == [5] * 3


def test_a_kernel_of_one_configuration_gets_no_further_turn(triton: Any) -> None:
    assert _computed(triton.tuner(blocks=(16,)), _lines(1)[0]) == [16]
    assert list(_turns()) == []


def test_what_is_timed_is_tuned_once_by_triton_s_benchmarks(triton: Any) -> None:
    tuner = triton.tuner()
    autotuned.tuned(None, TUNED)
    assert [_computed(tuner, key=key)[-1] for key in ("one", "one", "other")] == [128] * 3
    assert tuner.benches == 8


def test_calls_of_others_are_tuned_as_ever(triton: Any) -> None:
    """A notebook's own calls, after a judgement in its process."""
    tuner = triton.tuner()
    blocks = {_computed(tuner, line)[0] for line in _lines(9)}
    tuner.run([], key="any")
    assert blocks > {128}
    assert (tuner.fn.launched[-1], tuner.benches, list(tuner.cache)) == (128, 4, ["any"])


def test_compiling_ahead_launches_nothing(triton: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = triton.tuner()
    monkeypatch.setattr(autotuned._state, "compiles_only", True)
    assert _computed(tuner, _lines(1)[0]) == []
    assert tuner.fn.launched == []


def test_compiling_ahead_asks_for_each_problem_and_leaves_errors_to_the_judged_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    closed: list[Any] = []

    class Process:
        def call(self, _: Any, *question: Any) -> int:
            asked.append(question)
            raise RuntimeError("a kernel that is wrong")

        def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    problems = [Problem.parse(line) for line in _lines(5)]
    start: Any = Process
    backend: Any = "backend"
    with autotuned.compiling_ahead(start, backend, problems), contextlib.ExitStack() as stack:
        for thread in threading.enumerate():
            if thread.name == "compiling ahead":
                stack.callback(thread.join)
    assert sorted(asked) == [("compile_ahead", "backend", line) for line in _lines(5)]
    assert len(closed) == 2


_ADDS = """
import sys, types, torch

class Target:
    def __init__(self, a, b, c):
        self.a, self.b, self.c = a.double(), b.double(), c

    def append(self, _):
        self.c += self.a @ self.b

for name, contents in {"autotuner": {"Autotuner": _Autotuner}, "jit": {"JITFunction": _JITFunction}}.items():
    sys.modules[f"triton.runtime.{name}"] = types.SimpleNamespace(**contents)
_Autotuner.__module__ = "triton.runtime.autotuner"
tuner = _Autotuner(_JITFunction())

def adds(a, b):
    c = torch.zeros(a.shape[0], b.shape[1], dtype=torch.double)
    tuner.run(Target(a, b, c), key=(a.shape, b.shape))
    return c.to(a.dtype)
"""


@pytest.mark.slow
def test_a_kernel_that_is_wrong_at_its_first_call_alone_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It adds to zeros, and nothing sets them again after the benchmarks."""
    stand_in = "from __future__ import annotations\n" + "\n".join(
        map(inspect.getsource, (OutOfResources, _JITFunction, _Config, _Autotuner))
    )
    (tmp_path / "mine.py").write_text(stand_in + _ADDS)
    assert cli.main(["judge", f"{tmp_path}/mine.py:adds", "--dtypes=f32", "--sizes=8x16x24"]) == 1
    screen = capsys.readouterr().out
    assert screen.startswith("incorrect: the first call, which tunes")
    assert "the bad elements are 5 times what is expected" in screen
    assert "autotuned: 4 configurations, 4 judged" in screen


def test_without_triton_a_call_is_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "triton.runtime.autotuner", raising=False)
    assert autotuned.call(lambda a, *, b: (a, b), 1, b=2) == (1, 2)
    assert autotuned.tuned(None, FIRST) == Tuned()
    assert autotuned.interpreter_faults(None, ["bf16"]) == {}
    autotuned.tuned(None)


@pytest.mark.parametrize(("dtypes", "judged"), [("f32,bf16", {"f32"}), ("bf16", set())])
def test_types_in_which_the_interpreter_is_wrong_are_not_judged(
    dtypes: str, judged: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = {"f32": "", "bf16": "its products are wrong"}
    monkeypatch.setitem(first_calls.CALLS, "interpreter_faults", lambda _, names: {one: faults[one] for one in names})
    judgement = pytest_gemm.check(lambda a, b: (a.double() @ b.double()).to(a.dtype), dtypes=dtypes, sizes="8x16x24")
    assert judgement.refused["Triton's interpreter: its products are wrong"] == ["bf16"]
    assert {Problem.parse(one.problem).dtypes.a.name for one in judgement.outcomes} == judged
    assert judgement.speed == []


def test_faults_of_the_interpreter_are_found_by_computing() -> None:
    """Each release has others; the exact types have none."""
    pytest.importorskip("triton", reason="needs Triton, which the extra cuda installs")
    code = "import triton\n@triton.jit\ndef kernel(): pass\nfrom pytest_gemm.tools import autotuned\n"
    code += "print(autotuned.interpreter_faults(None, ('f32', 'f16', 'bf16')))"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert answer.stdout.startswith("{'f32': '', 'f16': '', 'bf16': "), answer.stderr
