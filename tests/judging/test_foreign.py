"""What a kernel does beside computing: it is not believed about its inputs, its result, or the process it leaves."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch

from pytest_gemm.api.callable import CallablePrepared
from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import Availability
from pytest_gemm.api.registry import Registry
from pytest_gemm.core.case_id import Device
from pytest_gemm.core.outcome import Activity, Misconduct, Outcome, Phase, Reason, Status, Unsupported
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands import tensors
from pytest_gemm.problem.problem import Problem
from pytest_gemm.worker import calls
from pytest_gemm.worker.messages import Thrown

LINE = "mm:f32:nn:17x65x127"
DISTRIBUTIONS = ("int-2", "rand")
Matmul = Callable[[Any, Any], Any]


def outcomes(matmul: Matmul, line: str = LINE, judge: Judge | None = None) -> list[Outcome]:
    """What becomes of a plain function that is registered as a user's would be."""
    return judged(registered(matmul), judge, line)


def right(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def codes(found: list[Outcome]) -> set[tuple[Status, str]]:
    return {(o.status, o.reason.code if o.reason else "") for o in found}


# -- inputs --------------------------------------------------------------------------------------------


def registered(matmul: Matmul, **named: Any) -> Any:
    """The backend of a plain function, as a user registers it."""
    registry = Registry()
    registry.add_callable("mine", matmul, **named)
    return registry["mine"]


def judged(backend: Any, judge: Judge | None = None, line: str = LINE) -> list[Outcome]:
    return list((judge or Judge()).outcomes(Case(backend, Problem.parse(line), DISTRIBUTIONS, 0, Device.CPU)))


def ones_for_both(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.data, b.data = torch.ones_like(a), torch.ones_like(b)
    return torch.full((a.shape[0], b.shape[1]), float(a.shape[-1]))


def after(change: Callable[[Any, Any], object]) -> Matmul:
    """A right product, after which something is done to A or B."""

    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        c = a @ b
        change(a, b)
        return c

    return matmul


REBINDING: dict[str, Matmul] = {
    "ones for both": ones_for_both,
    "swaps": after(lambda _, b: torch.utils.swap_tensors(b, torch.zeros_like(b))),
}


@pytest.mark.parametrize("kernel", REBINDING.values(), ids=REBINDING)
def test_a_kernel_that_rebinds_its_inputs_is_not_judged_against_them(kernel: Matmul) -> None:
    judge = Judge()
    found = outcomes(kernel, judge=judge)
    assert codes(found) == {(Status.INCORRECT, "inputs-rebound")}
    assert len(found) == len(DISTRIBUTIONS)
    assert codes(outcomes(right, judge=judge)) == {(Status.PASSED, "")}  # the next backend gets them as they were


def test_a_write_that_is_undone_is_a_write() -> None:
    def doubles_for_a_while(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.mul_(2.0)
        c = (a @ b) / 2.0
        a.mul_(0.5)
        return c

    assert codes(outcomes(doubles_for_a_while)) == {(Status.INCORRECT, "inputs-written")}


# -- results -------------------------------------------------------------------------------------------


class Intercepting(torch.Tensor):
    """A tensor without elements, whose operators are its own."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        return torch.ones(())


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (lambda a, b: Intercepting(a @ b), "wrong-type"),
        (lambda a, b: torch.nested.nested_tensor([a @ b]), "wrong-layout"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_result_does_not_answer_for_itself(result: Matmul, code: str) -> None:
    line = "mm:f32:nn:17x17x17"
    assert codes(outcomes(result, line)) == {(Status.INCORRECT, code)}


class Tagged(torch.Tensor):
    """A tensor that has a class of its own and nothing else."""


def noted(result: Any) -> Any:
    """A result on which libraries have left notes."""
    torch._dynamo.mark_dynamic(result, 0)
    result.tensor_model_parallel, result.on_ready = True, lambda: None
    return result


@pytest.mark.parametrize(
    "result",
    [
        lambda a, b: (a @ b).as_subclass(Tagged),
        lambda a, b: torch.nn.Parameter(a @ b),
        lambda a, b: torch.nn.Buffer(noted(a @ b)),
    ],
)
def test_an_unusual_result_that_is_right_passes(result: Matmul) -> None:
    assert codes(outcomes(result)) == {(Status.PASSED, "")}


# -- results that change ---------------------------------------------------------------------------------

OVER_A_MIB = "mm:f32:nn:512x520x16"


@pytest.fixture(params=[1 << 28, 1], ids=["kept", "too-large-to-be-kept"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether results are kept, or only a hash of them as of very large ones."""
    monkeypatch.setattr(calls, "KEPT_BYTES", request.param)
    return bool(request.param > 1)


@pytest.mark.parametrize("line", [LINE, OVER_A_MIB])
@pytest.mark.parametrize("deterministic", [True, False])
def test_the_second_result_is_looked_at_whatever_its_size(line: str, deterministic: bool, kept: bool) -> None:
    seen: set[int] = set()

    def spent(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        factor = 0.0 if a.data_ptr() in seen else 1.0
        seen.add(a.data_ptr())
        return factor * (a @ b)

    last = judged(registered(spent, deterministic=deterministic), line=line)[-1]
    assert last.reason is not None
    assert codes([last]) == {(Status.INCORRECT, "not-deterministic" if deterministic else "outside-bound")}
    assert "the second time" in last.reason.text
    shape = Problem.parse(line).result_shape
    assert not kept or f"{shape[0] * shape[1]} of {shape[0] * shape[1]} elements" in last.reason.text


def test_the_second_result_may_be_no_tensor_to_compare() -> None:
    calls = itertools.count()
    found = outcomes(lambda a, b: (a @ b).to_sparse() if next(calls) == len(DISTRIBUTIONS) else a @ b)
    assert "other bits the second time (it is of another type or shape)" in str(found[-1].reason)


def test_the_answer_of_another_distribution_is_named() -> None:
    kept: dict[int, torch.Tensor] = {}
    found = outcomes(lambda a, b: kept.setdefault(0, a @ b).clone())
    assert "the answer for distribution int-2, seed 0: stale data" in found[1].details


def racing(chance: random.Random) -> Matmul:
    """Right but in one of each 50 calls, which is none of the first ten of these."""
    calls = itertools.count()
    when = [0]

    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        call, c = next(calls) % 50, a @ b
        if call == 0:
            when[0] = chance.randrange(10, 50)
        if call == when[0]:
            c[3, 16:32] = c[3, 32:48]
        return c

    return matmul


def test_a_race_shows_in_many_calls_and_not_in_two() -> None:
    case = Case(registered(right), Problem.parse(LINE), DISTRIBUTIONS, 0, Device.CPU, threads=1)
    for seed in range(20):
        few, many = (
            Judge().outcomes(dataclasses.replace(case, backend=registered(racing(random.Random(seed))), calls=calls))
            for calls in (1, 100)
        )
        assert codes(few) == {(Status.PASSED, "")}
        assert codes(many[-1:]) == {(Status.INCORRECT, "not-deterministic")}
        assert "in one of 100 calls under load (16 of 1105 elements)" in str(many[-1].reason)
    assert codes(Judge().outcomes(dataclasses.replace(case, calls=100))) == {(Status.PASSED, "")}


def test_other_work_runs_beside_many_calls_and_ends_with_them() -> None:
    before, beside = threading.active_count(), list[int]()

    def watching(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        beside.append(threading.active_count() - before)
        return a @ b

    case = Case(registered(watching), Problem.parse(LINE), ("rand",), 0, Device.CPU, threads=2, calls=5)
    assert codes(Judge().outcomes(case)) == {(Status.PASSED, "")}
    assert beside[1:6] == [2] * 5  # after the run of the distribution
    assert {beside[0], *beside[6:], threading.active_count() - before} == {0}


def test_a_given_result_is_written_by_every_run() -> None:
    assert codes(outcomes(right, f"{LINE}:out.given")) == {(Status.PASSED, "")}


class Late:
    """A thread that fills the result when the judge begins to compare it; the judge's ``watch``."""

    def __init__(self) -> None:
        self.compared = threading.Event()
        self.writers: list[threading.Thread] = []

    def matmul(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        c, right = torch.zeros(a.shape[0], b.shape[1]), a @ b
        self.compared.clear()
        self.writers = [threading.Thread(target=lambda: (self.compared.wait(60), c.copy_(right)))]
        self.writers[0].start()
        return c

    @contextlib.contextmanager
    def watch(self, activity: Activity) -> Iterator[None]:
        if activity.phase is Phase.REFERENCE:
            self.release()
        yield

    def release(self) -> None:
        self.compared.set()
        for writer in self.writers:
            writer.join()


@pytest.mark.usefixtures("one_thread")
def test_a_result_that_is_written_after_the_return_is_not_believed() -> None:
    late = Late()
    judge = Judge()
    judge._worker.watch = late.watch  # type: ignore[method-assign]  # the one place between the call and the look
    found = outcomes(late.matmul, judge=judge)
    late.release()
    assert codes(found) == {(Status.INCORRECT, "written-after-return")}
    assert "1105 elements of the result changed after the call had returned" in str(found[0].reason)


# -- operands with other values ----------------------------------------------------------------------------


def packing(key: Callable[[torch.Tensor], object]) -> Matmul:
    """A kernel that keeps a pack of B by this key, and B itself."""
    packs: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}

    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ packs.setdefault(key(b), (b.clone(), b))[0]

    return matmul


WEIGHTS = [
    LINE, f"{LINE}:b.argument", "linear:f32:nt:17x65x127:bias+relu", "linear:f32:nt:17x65x127:add:b.padded",
    "bmm:f32:nn:3x17x65x127:b.broadcast", "addmm:f32:nn:17x65x127:bias+alpha-0.5+beta-2+add+mul",
    "linears:f32:nt:3x17x65x127",
]  # fmt: skip


@pytest.mark.parametrize("line", WEIGHTS)
def test_a_pack_that_is_kept_by_address_is_stale(line: str) -> None:
    assert codes(outcomes(packing(lambda b: (b.data_ptr(), b._version, b.shape)), line)) == {(Status.PASSED, "")}
    for _ in range(2):  # the rerun fails as the run does
        found = outcomes(packing(lambda b: (b.data_ptr(), b.shape)), line)
        assert [o.status for o in found] == [Status.PASSED] * len(DISTRIBUTIONS) + [Status.INCORRECT]
        assert found[-1].code == "stale-weight"
        assert "that of the weight before" in str(found[-1].reason)


@pytest.mark.parametrize(("names", "of"), [("a", "A"), ("ab", "A and B")])
def test_what_is_made_of_a_and_kept_by_address_is_stale(names: str, of: str) -> None:
    kept: dict[int, torch.Tensor] = {}

    def quantised(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = (
            kept.setdefault(x.data_ptr(), x.clone()) if name in names else x
            for name, x in zip("ab", (a, b), strict=True)
        )
        return a @ b

    found = outcomes(quantised)
    assert [o.status for o in found] == [Status.PASSED] * len(DISTRIBUTIONS) + [Status.INCORRECT]
    assert (found[-1].code, found[-1].distribution) == ("stale-operand", "int-2")
    assert f"that of the values of {of} before" in str(found[-1].reason)


def test_what_holds_b_sees_no_second_weight_and_b_is_as_it_was() -> None:
    backend, judge, seen = registered(packing(lambda b: (b.data_ptr(), b.shape))), Judge(), list[float]()

    class Holding(CallablePrepared):
        constant_b = True

        def run(self, operands: tensors.Operands) -> Any:
            seen.append(float(operands.b.double().abs().sum()))
            return super().run(operands)

    holding = registered(right)
    holding.prepare = lambda problem, *_: Holding(backend, problem)
    vars(holding).update(constant_b=True)
    case = Case(holding, Problem.parse(LINE), DISTRIBUTIONS, 0, Device.CPU)
    assert codes(judge.outcomes(case)) == {(Status.PASSED, "")}
    assert len(seen) == len(DISTRIBUTIONS) + 2  # once more, and with another A
    assert seen[-1] in seen[:-1]
    truths = [judge._truths.of(case, name) for name in DISTRIBUTIONS]
    outcomes(right, judge=judge)
    assert [judge._truths.of(case, name) for name in DISTRIBUTIONS] == truths  # made once, as nothing has changed


class Freezing:
    """A backend whose compile puts a pack of B into the program, and keeps packs by this key."""

    name = "freezing"

    def __init__(self, key: Callable[[torch.Tensor], object]) -> None:
        self.key = key
        self.packs: dict[object, torch.Tensor] = {}

    def availability(self, device: str) -> Availability:
        return Availability()

    def supports(self, problem: Problem, request: object = None) -> None:
        return None

    def prepare(self, problem: Problem, operands: tensors.Operands, request: object = None) -> Any:
        pack = self.packs.setdefault(self.key(operands.b), operands.b.clone())
        proof = Proof(provable=False, executed=("frozen",))
        return SimpleNamespace(
            contract=Contract(), constant_b=True, run=lambda given: given.a @ pack, proof=lambda: proof
        )


@pytest.mark.parametrize("stale", [True, False])
def test_a_cache_by_address_answers_for_the_second_weight_of_the_cache_tests(stale: bool) -> None:
    def key(b: torch.Tensor) -> object:
        return b.data_ptr() if stale else float(b.double().sum())

    judge, backend = Judge(), Freezing(key)
    first, second = (
        judge.outcomes(Case(backend, Problem.parse(LINE), ("rand",), seed, Device.CPU, user_caches="tag"))[0]
        for seed in (1, 0)
    )
    assert first.status is Status.PASSED
    assert second.status is (Status.INCORRECT if stale else Status.PASSED)


# -- exceptions ----------------------------------------------------------------------------------------


RAISED: dict[str, Callable[[], object]] = {
    "Failed": lambda: pytest.fail("as asked"),
    "Exit": lambda: pytest.exit("enough"),
    "LookupError": lambda: _raise(LookupError("\ud800 \x1b[31m")),
}


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("name", RAISED)
def test_whatever_a_kernel_raises_is_a_crash_of_its_case(name: str) -> None:
    found = outcomes(after(lambda *_: RAISED[name]()))
    assert codes(found) == {(Status.CRASHED, f"run-{name}")}
    assert len(found) == len(DISTRIBUTIONS)
    assert all(o.reason is not None and o.reason.text.isprintable() for o in found)


def test_ctrl_c_in_a_kernel_passes_through() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            outcomes(after(lambda *_: os.kill(os.getpid(), signal.SIGINT)))
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("error", [ValueError("too much"), Unsupported("hard", "too much")], ids=repr)
@pytest.mark.parametrize("largest", [0.0, 2.0])
def test_a_problem_is_taken_or_refused_whatever_its_values(largest: float, error: Exception) -> None:
    def only_small_values(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if not float(a.abs().max()) <= largest:
            raise error
        return a @ b

    found = outcomes(only_small_values)
    refused = [one for one in found if one.status is not Status.PASSED]
    code = {(Status.CRASHED, "late-refusal")} if largest else {(Status.UNSUPPORTED, "not-taken")}
    assert codes(refused) == code
    assert all("too much" in str(one.reason) for one in refused)
    assert (len(found) > len(refused)) is bool(largest)


@pytest.mark.parametrize(("error", "freed"), [(MemoryError(), True), (ValueError(), False)])
def test_what_ran_out_of_memory_frees_the_operands(error: Exception, freed: bool) -> None:
    judge = Judge()
    outcomes(Mock(side_effect=error), judge=judge)
    assert (judge._truths.known("int-2") is None) is freed


def test_a_device_that_eager_has_lost_ends_the_case() -> None:
    lost, judge = Thrown("AcceleratorError", "", "", None, Reason("lost-device", "the device is lost")), Judge()
    with patch.object(judge._worker, "eager", side_effect=lost):
        assert outcomes(right, judge=judge)[0].code == "lost-device"


@pytest.mark.parametrize("where", ["supports", "prepare", "run", "proof", "contract"])
def test_a_backend_may_go_wrong_anywhere(where: str) -> None:
    class Broken:
        name = "broken"
        devices = ("cpu",)

        def availability(self, device: str) -> Any:
            raise AssertionError("a judge does not ask")

        def supports(self, problem: Problem, request: object = None) -> Any:
            return pytest.skip("supports") if where == "supports" else None

        def prepare(self, problem: Problem, operands: tensors.Operands, request: object = None) -> Any:
            return pytest.skip("prepare") if where == "prepare" else self

        @property
        def contract(self) -> Any:
            return 3 if where == "contract" else None

        def run(self, operands: tensors.Operands) -> Any:
            return pytest.skip("run") if where == "run" else operands.a @ operands.b

        def proof(self) -> Any:
            return "trust me" if where == "proof" else Proof(provable=False)

    found = judged(Broken())
    assert {o.status for o in found} == {Status.CRASHED}
    assert where in str(found[0].reason)


def test_supports_that_answers_yes_is_told_what_to_answer() -> None:
    backend = registered(right)
    backend.supports = lambda *_: True
    found = judged(backend)
    assert codes(found) == {(Status.CRASHED, "supports-TypeError")}
    assert "return None, or Unsupported" in str(found[0].reason)


# -- what is left behind -------------------------------------------------------------------------------

LIBM = ctypes.CDLL("libm.so.6")
UPWARD = 0x800 if os.uname().machine == "x86_64" else 0x400000

LEFT: dict[str, Callable[[], object]] = {
    "FE_UPWARD": lambda: LIBM.fesetround(UPWARD),
    "flush-to-zero": lambda: torch.set_flush_denormal(True),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "number of CPU threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "random numbers of PyTorch": lambda: torch.manual_seed(3),
    "random numbers of numpy": lambda: np.random.seed(3),
    "random numbers of Python": lambda: __import__("random").seed(3),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", LEFT)
def test_what_a_kernel_leaves_behind_is_named_and_nobody_else_pays(name: str) -> None:
    judge = Judge()
    found = outcomes(after(lambda *_: LEFT[name]()), judge=judge)
    assert codes(found) == {(Status.INCORRECT, "left-state-behind")}
    assert all(name in str(o.reason) for o in found)
    assert codes(outcomes(right, judge=judge)) == {(Status.PASSED, "")}


@pytest.mark.parametrize("name", ["FE_UPWARD", "default dtype"])
def test_a_compile_leaves_nothing_behind_either(name: str) -> None:
    backend = registered(right)
    prepare = backend.prepare

    def leaving(*given: Any) -> Any:
        LEFT[name]()
        return prepare(*given)

    backend.prepare = leaving
    found = judged(backend)
    assert codes(found) == {(Status.INCORRECT, "left-state-behind")}
    assert name in str(found[0].reason)


def test_a_kernel_that_pytorch_compiles_in_its_first_run_passes() -> None:
    assert codes(outcomes(torch.compile(right, dynamic=False))) == {(Status.PASSED, "")}


def test_switches_of_precision_are_set_back() -> None:
    before = torch.get_float32_matmul_precision()
    with pytest.raises(Misconduct, match="precision of products"), calls.calling():
        torch.set_float32_matmul_precision("medium")
    assert torch.get_float32_matmul_precision() == before


def test_deterministic_algorithms_that_only_warn_are_set_back_to_that() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pytest.raises(Misconduct, match="deterministic algorithms"), calls.calling():
            torch.use_deterministic_algorithms(False)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
