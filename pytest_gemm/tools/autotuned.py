"""Triton's kernels while they are judged: every configuration gets its turn, and other processes compile ahead.

Tuning compiles and times each configuration for each new key, seconds for a problem.  Instead a problem has a turn: it
names one of the configurations that the kernel's own pruning leaves, the same one whenever the problem is judged.
Calls outside of :func:`call` are as ever, so that the tuning of a notebook is not touched.

:func:`turns` and :func:`compiling_ahead` are the judge's; the rest happens in the worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from pytest_gemm.operands import tensors
from pytest_gemm.problem.problem import Problem

if TYPE_CHECKING:
    from pytest_gemm.tools.kernel import KernelBackend
    from pytest_gemm.worker.inline import Inline
    from pytest_gemm.worker.process import Process

FIRST: Final = -1
"""A turn in which every call tunes as a user's first call does: it launches each configuration, then the chosen one."""
TUNED: Final = -2
"""A turn in which the first call tunes by Triton's own benchmarks: for what is timed."""
TUNING: Final = "the first call, which tunes"
"""The name of a turn in :func:`turns`."""
# From this turn on those configurations come first that have computed nothing yet.
_OTHERS: Final = 1 << 32
# What Triton's benchmarks, too, take for a configuration that the GPU or the arguments do not allow.
_UNFIT: Final = {"OutOfResources", "CompileTimeAssertionFailure", "PTXASError"}
# Processes that compile ahead at most, and the cores for each.
_AHEAD: Final = 6
_CORES: Final = 2


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What has become of the configurations of a kernel.

    Attributes:
        configs: how many of them its own pruning has left for some problem; 0 where nothing is autotuned.
        judged: how many have computed a result.
        unfit: those that cannot run on this GPU, as Triton writes them.
        compiled: how many kernels Triton has compiled, or read from its cache on disk.
        last: the configurations of the last call.
    """

    configs: int = 0
    judged: int = 0
    unfit: tuple[str, ...] = ()
    compiled: int = 0
    last: tuple[str, ...] = ()

    def __str__(self) -> str:
        unfit = f", {len(self.unfit)} do not fit this GPU" * bool(self.unfit)
        return f"{self.configs} configurations, {self.judged} judged{unfit}"


# -- in the judge ------------------------------------------------------------------------------------------------


def turns(worker: Process | Inline) -> Iterator[str]:
    """Further turns of a problem: of the configurations that have computed nothing yet, then of a first call.

    Yields:
        What the caller is to judge the problem with, in words, while it is the worker's turn.
    """
    turn, tuned = _OTHERS, worker.call(Tuned, "tuned")
    if tuned.configs < 2:
        return
    try:
        while turn - _OTHERS < tuned.configs and tuned.judged + len(tuned.unfit) < tuned.configs:
            worker.call(Tuned, "tuned", turn)
            yield "another configuration"
            turn, tuned = turn + 1, worker.call(Tuned, "tuned")
        worker.call(Tuned, "tuned", FIRST)
        yield TUNING
    finally:  # where there is no time for all of them, too
        worker.call(Tuned, "tuned")


@contextlib.contextmanager
def compiling_ahead(
    start: Callable[[], Process], backend: KernelBackend, problems: Iterable[Problem]
) -> Iterator[None]:
    """A block beside which further processes compile what its problems will launch, into Triton's cache on disk."""
    rest, lock, ended = iter(problems), threading.Lock(), threading.Event()

    def work(process: Process) -> None:
        while not ended.is_set():
            with lock:
                problem = next(rest, None)
            if problem is None:
                return
            with contextlib.suppress(Exception):  # the judged process compiles it, and shows what is wrong
                process.call(int, "compile_ahead", backend, problem.line)

    processes = [start() for _ in range(min(_AHEAD, len(os.sched_getaffinity(0)) // _CORES))]
    for process in processes:
        threading.Thread(target=work, args=(process,), name="compiling ahead", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        for process in processes:
            process.close()


# -- asked of the worker -----------------------------------------------------------------------------------------


class _State:
    """What has happened in this process.

    Attributes:
        turn: of the call that runs; ``None`` outside of :func:`call`.
        all_calls: the turn of all calls; ``None``: each problem has its own.
        of_problem: the turn of the problem that is judged.
        compiles_only: nothing is launched.
        caches: configurations by key, for each kernel and turn.
        left, judged: configurations by kernel; ``unfit`` by turn, too, for one may fit other data types.
        last: the configuration of a kernel in the last call.
    """

    def __init__(self) -> None:
        self.turn: int | None = None
        self.all_calls: int | None = None
        self.of_problem, self.compiles_only, self.compiled = 0, False, 0
        self.caches: dict[Any, dict[Any, Any]] = defaultdict(dict)
        self.left, self.judged, self.unfit = (defaultdict[Any, set[str]](set) for _ in range(3))
        self.last: dict[Any, str] = {}


_state = _State()


def begin(problem: Problem) -> None:
    """Begin a problem: calls from now on have its turn, which its flags do not change."""
    _state.of_problem = zlib.crc32(f"{problem.dtypes}{problem.layout}{problem.shape}".encode())


def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The result of a kernel, whose autotuned configurations are those of the turn."""
    if (autotuner := sys.modules.get("triton.runtime.autotuner")) is None:
        return function(*arguments, **named)
    _watch(autotuner.Autotuner, {"run": _run, "prune_configs": _prune_configs, "_bench": _bench})
    _watch(sys.modules["triton.runtime.jit"].JITFunction, {"run": _launch, "_do_compile": _compile})
    _state.turn = _state.of_problem if _state.all_calls is None else _state.all_calls
    _state.last.clear()
    try:
        return function(*arguments, **named)
    finally:
        _state.turn = None


def tuned(_: object, turn: int | None = None) -> Tuned:
    """What has become of the configurations.

    Args:
        turn: of all calls from now on; ``None``: each problem has its own.
    """
    _state.all_calls = turn
    left, judged = (sum(map(len, configs.values())) for configs in (_state.left, _state.judged))
    unfit = {config for (tuner, _), configs in _state.unfit.items() for config in configs - _state.judged[tuner]}
    return Tuned(left, judged, tuple(sorted(unfit)), _state.compiled, tuple(_state.last.values()))


def compile_ahead(_: object, backend: KernelBackend, line: str) -> int:
    """Compile what a problem launches, and launch nothing; its results are ignored."""
    problem = Problem.parse(line)
    _state.compiles_only = True
    backend.prepare(problem, tensors.make(problem, "rand", 0, backend.devices[0]))
    return _state.compiled


def interpreter_faults(_: object, dtypes: Sequence[str]) -> dict[str, str]:
    """What Triton's interpreter does wrong by itself in data types, "" for nothing; empty where it does not run."""
    if "triton.runtime.interpreter" not in sys.modules:
        return {}
    from pytest_gemm.tools import interpreted

    return {dtype: interpreted.fault(dtype) for dtype in dtypes}


# -- in place of Triton's own ------------------------------------------------------------------------------------


def _watch(owner: Any, others: dict[str, Callable[..., Any]]) -> None:
    """Put functions in place of those of a class and of all that are derived from it; they get the plain one."""
    for name, other in others.items():
        plain = vars(owner).get(name)
        if plain is not None and not isinstance(plain, functools.partialmethod):
            setattr(owner, name, functools.partialmethod(other, plain))
    for derived in owner.__subclasses__():
        _watch(derived, others)


def _launch(kernel: Any, plain: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Launch a kernel, or only compile it."""
    only = {"warmup": True} if _state.turn is not None and _state.compiles_only else {}
    return plain(kernel, *arguments, **{**named, **only})


def _compile(kernel: Any, plain: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    _state.compiled += 1
    return plain(kernel, *arguments, **named)


def _run(tuner: Any, plain: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Launch the configuration of the turn; where it does not fit, the next one."""
    turn = _state.turn
    if turn is None or len(tuner.configs) < 2:
        return plain(tuner, *arguments, **named)
    own = {"cache": tuner.cache, "cache_results": getattr(tuner, "cache_results", False)}  # the second writes to files
    cache = {} if turn == FIRST else _state.caches[tuner, turn]
    vars(tuner).update(cache=cache, cache_results=False)
    try:
        if not cache and not 0 <= turn < _OTHERS:
            with contextlib.suppress(Exception):  # it compiles what it needs itself
                _compile_all(tuner, arguments, named)
        result = plain(tuner, *arguments, **named)
    except Exception as error:
        unfit = _state.unfit[tuner, turn]
        if type(error).__name__ not in _UNFIT or str(tuner.best_config) in unfit:
            raise
        unfit.add(str(tuner.best_config))
        cache.clear()
        return _run(tuner, plain, *arguments, **named)
    else:
        _state.last[tuner] = str(tuner.best_config)
        _state.judged[tuner].add(_state.last[tuner])
        return result
    finally:
        vars(tuner).update(own)


def _prune_configs(tuner: Any, plain: Callable[..., Any], *named: Any) -> list[Any]:
    """The configuration of the turn alone."""
    configs, turn = list(plain(tuner, *named)), _state.turn
    if turn is None:
        return configs
    _state.left[tuner] |= {*map(str, configs)}
    fitting = [config for config in configs if str(config) not in _state.unfit[tuner, turn]] or configs
    if turn >= _OTHERS:
        fitting = [config for config in fitting if str(config) not in _state.judged[tuner]] or fitting
    return fitting if turn < 0 else [fitting[turn % len(fitting)]]


def _bench(tuner: Any, plain: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The time of a configuration, 0 where none is timed; a first call launches it, as a user's benchmarks do."""
    is_tritons = type(tuner).__module__.startswith("triton.")  # others write times to files
    if _state.turn in {None, TUNED} or not is_tritons:
        return plain(tuner, *arguments, **named)
    equal = [0.0] * 3  # of as many quantiles as Triton asks for
    if _state.turn != FIRST:
        return equal
    with mock.patch.dict(vars(tuner), do_bench=lambda launch, *_, **__: launch() or equal):
        return plain(tuner, *arguments, **named)


def _compile_all(tuner: Any, arguments: Sequence[Any], named: dict[str, Any]) -> None:
    """Compile the configurations of a launch on all cores, and launch none."""
    mode = sys.modules["triton.runtime._async_compile"].AsyncCompileMode
    tuner.nargs, turn = dict(zip(tuner.arg_names, arguments, strict=False)), _state.turn
    _state.turn = FIRST  # in which there are all
    configs = tuner.prune_configs(named)
    _state.turn = turn
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool, mode(pool, ignore_errors=True):
        for config in configs:
            own = {**named, **config.all_kwargs(), "warmup": True}
            with contextlib.suppress(Exception):  # it may not fit
                if config.pre_hook is not None:  # it may write to descriptors what the kernel is compiled for
                    config.pre_hook({**tuner.nargs, **own})
                tuner.fn.run(*arguments, **own)


_ASKED: Final = (tuned, compile_ahead, interpreter_faults)
CALLS: Final[Mapping[str, Callable[..., Any]]] = {function.__name__: function for function in _ASKED}
"""What the worker of a kernel is asked."""
