"""A plain function as a backend: the shortest way to put a kernel under the whole suite.

It is registered in a conftest.py, which every process of a run loads.  So torch is imported when a problem
is prepared and not before: xdist's controller, the doctor, whose children are to be forked without it, and a usage
error need none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from pytest_gemm.api.eager import EagerPrepared
from pytest_gemm.api.own_calls import OwnCalls, name_of
from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import Availability, Recipe
from pytest_gemm.api.request import DEFAULT, BuildRequest
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.core.text import did_you_mean
from pytest_gemm.machine import software
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import STEPS, StepKind

if TYPE_CHECKING:
    import torch

    from pytest_gemm.operands.tensors import Operands


# Types of partial sums that a function can have.
_SUMS: Final = ("f64", "f32", "f16")
# Arguments that are lists of names, with an example.
_NAMES: Final = '("numpy",)'
_LISTS: Final = {"dtypes": '("f32", "bf16")', "distributions": _NAMES, "imports": _NAMES, "activations": '("relu",)'}
# Words of flags that change how operands lie in memory, and not what is computed of them.
_LAYOUTS: Final = frozenset({"padded", "offset", "argument", "constant", "dynamic"})


@dataclasses.dataclass(eq=False)
class CallableBackend:
    """A plain function as a backend; ``Registry.add_callable`` documents the attributes.

    Raises:
        ValueError: when an argument is not of its kind.
    """

    name: str
    matmul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    dtypes: Iterable[str] = ("f32", "f16", "bf16")
    batched: bool = True
    accumulate: Literal["f64", "f32", "f16"] | None = None
    deterministic: bool = True
    distributions: Iterable[str] = ()
    flushes: bool = False
    pack: Callable[[torch.Tensor], Any] | None = None
    imports: Iterable[str] = ()
    linear: Callable[..., torch.Tensor] | None = None
    activations: Iterable[str] = ()
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def __post_init__(self) -> None:
        """Check the arguments, which a user writes."""
        self._expect("pack", self.pack is None or callable(self.pack), "a function of B")
        self._expect("matmul", _takes(self.matmul, 2), "a function of A and B")
        self._expect("linear", self.linear is None or _takes(self.linear, 4), "a function of A, B, bias, activation")
        self._expect("accumulate", self.accumulate in {*_SUMS, None}, f"one of {', '.join(_SUMS)}")
        for flag in ("batched", "deterministic", "flushes"):
            self._expect(flag, isinstance(getattr(self, flag), bool), "True or False")
        for names, example in _LISTS.items():
            given: object = getattr(self, names)
            is_list = isinstance(given, Iterable) and not isinstance(given, str)
            self._expect(names, is_list, f"names, as {example}")
            setattr(self, names, tuple(getattr(self, names)))
        self._expect("dtypes", bool(self.dtypes), f"names, as {_LISTS['dtypes']}")
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                hint = did_you_mean(str(dtype), DTYPES)
                raise ValueError(f"backend {self.name!r}: unknown dtype {dtype!r}{hint}; known: {', '.join(DTYPES)}")
        self.dtypes = frozenset(self.dtypes)
        known = [name for name, spec in STEPS.items() if spec.kind is StepKind.UNARY]
        for name in self.activations:
            if name.partition("-")[0] not in known:
                hint, all_of_them = did_you_mean(name, known), ", ".join(known)
                raise ValueError(f"backend {self.name!r}: unknown activation {name!r}{hint}; known: {all_of_them}")
        self._expect("activations", not self.activations or self.linear is not None, "linear= too, which computes them")

    def _expect(self, field: str, is_right: bool, what: str) -> None:
        """Raise the error of an argument that is not right."""
        if not is_right:
            raise ValueError(f"backend {self.name!r}: {field} is {getattr(self, field)!r}; give {what}")

    def contract(self, problem: Problem) -> Contract:
        """The arithmetic of a problem: sums in the registered type; without one in f64 for f64, in f32 for others."""
        accumulate = self.accumulate or ("f64" if problem.dtypes.out.name == "f64" else "f32")
        epilogue: Literal["eager", "fused"] = "eager" if self.fused(problem) is None else "fused"
        return Contract(accumulate, epilogue, deterministic=self.deterministic, flushes=self.flushes)

    def fused(self, problem: Problem) -> str | None:
        """The activation that ``linear`` computes, "" for none; ``None`` where the problem is more than it computes."""
        steps = [str(step) for step in problem.epilogue]
        rest = steps[steps[:1] == ["bias"] :]
        is_own = self.linear is not None and problem.op.name in {"mm", "bmm", "addmm", "linear"} and bool(steps)
        is_flat = not problem.op.weight or problem.shape.batch is None
        others = {flag.partition(".")[2] for flag in problem.flags} - _LAYOUTS
        if not (is_own and is_flat and str(problem.dtypes) == problem.dtypes.a.name) or others:
            return None
        return "".join(rest) if not rest or (len(rest) == 1 and rest[0] in self.activations) else None

    def availability(self, device: str) -> Availability:
        """Where the distributions that the function needs are installed."""
        needs = ("torch", *self.distributions)
        versions = software.installed(needs)
        if lacking := [name for name in needs if name not in versions]:
            text, remedy = f"{lacking[0]} is not installed", f"pip install {' '.join(lacking)}"
            return Availability.lacking("no-distribution", text, remedy)
        return Availability(versions=tuple(versions.items()))

    def supports(self, problem: Problem, request: BuildRequest = DEFAULT) -> Unsupported | None:
        """The dtypes and batches of the registration."""
        if problem.op.rounds_once:
            return Unsupported("op", "a plain product takes no scales, and fp8 means nothing without them")
        if problem.group_size and not problem.op.coded:
            return Unsupported("op", "a plain product does not decode 4-bit weights")
        # Mixed, weight-only and autocast products reach the function after their cast in the graph.
        cast_first = problem.autocast or problem.op.converts or problem.widens
        given = (
            {"f32"}
            if problem.op.coded
            else {problem.dtypes.out.name}
            if cast_first
            else {problem.dtypes.a.name, problem.dtypes.b.name}
        )
        if lacking := " ".join(sorted(given.difference(self.dtypes))):
            text = f"{self.name} was registered without {lacking}"
            return Unsupported("dtype", text, f"add it to dtypes= of {self.name}")
        # A grouped product reaches the function as one matrix after the other, and so do linears.
        if problem.op.batched and not self.batched:
            return Unsupported("batch", f"{self.name} takes no 3-D tensors", f"register {self.name} with batched=True")
        return None

    def prepare(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> CallablePrepared:
        """Import the modules; there is nothing to compile."""
        for name in self.imports:
            importlib.import_module(name)
        return CallablePrepared(self, problem)

    def recipe(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> Recipe:
        """The program around the function, which a script takes out of the file that it stands in.

        Raises:
            Unsupported: when it is no function of a module's own, or takes a packed B.
        """
        import torch

        if self.pack is not None:
            raise Unsupported("no-script", f"a script gives A and B, and the function of {self.name} takes a packed B")
        activation = self.fused(problem)
        given: Any = self.matmul if activation is None else self.linear
        plain = inspect.unwrap(given)  # what a decorator such as numba.njit was given
        names = [name for name, value in getattr(plain, "__globals__", {}).items() if value is given]
        if not names:
            raise Unsupported("no-script", f"a script loads a function of a file by its name, and {self.name} is none")
        whole = f"lambda a, b, bias=None: mine(a, {'b.mT' if problem.op.weight else 'b'}, bias, {activation or None!r})"
        call = "" if activation is None else whole
        return Recipe(threads=torch.get_num_threads(), matmul=(plain.__code__.co_filename, names[0]), call=call)


def _takes(function: object, count: int) -> bool:
    """Whether it can be called with that many arguments, as far as Python knows its signature."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # a builtin function has none
        return True
    return True


class CallablePrepared(EagerPrepared):
    """The function inside the problem's eager program."""

    def __init__(self, backend: CallableBackend, problem: Problem) -> None:
        self._backend = backend
        self._pack = backend.pack
        self._calls, self._name, self._is_timed = OwnCalls(), name_of(backend.matmul), False
        product = self._of_packed if backend.pack else backend.matmul
        super().__init__(problem, backend.contract(problem), product)
        self._counting = self._calls.program(problem, product, self._name)
        self._activation = backend.fused(problem)

    def _of_packed(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert self._pack is not None
        return self._backend.matmul(a, self._pack(b))

    def bind(self, operands: Operands) -> Callable[[], torch.Tensor]:
        """The call of ``linear``, or the program, of which the first call packs the B of each product."""
        linear, activation, pack = self._backend.linear, self._activation, self._backend.pack
        if linear is not None and activation is not None:
            given, whole = self.arguments(operands), self.own(linear)
            b = given["b"].mT if self.problem.op.weight else given["b"]
            b = b if pack is None else pack(b)
            return lambda: whole(given["a"], b, given.get("bias"), activation or None)
        call = super().bind(operands)
        if pack is None:
            return call
        packs: list[Any] = []

        def first(b: torch.Tensor) -> Any:
            packs.append(pack(b))
            return packs[-1]

        def packed_once() -> torch.Tensor:
            given = iter(packs)  # each call has the same products in the same order
            self._pack = (lambda _: next(given)) if packs else first
            return call()

        return packed_once

    @contextlib.contextmanager
    def timed(self, operands: Operands) -> Iterator[Callable[[], torch.Tensor]]:
        """The program alone, when a first call has packed what a user packs once."""
        if type(self).run is not EagerPrepared.run:  # then the program need not be what a run computes
            yield lambda: self.run(operands)
            return
        self._is_timed = True
        try:
            with super().timed(operands) as call:
                call()
                yield call
        finally:
            self._is_timed = False

    def own(self, function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
        """A function that ``bind`` calls in place of the registered one; a run that calls neither is a fallback."""
        return function if self._is_timed else self._calls.counted(function, name)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Count the calls of the library's functions."""
        plain, self._program = self._program, self._counting
        self._calls.forget()
        try:
            with super().watched():
                yield
        finally:
            self._program = plain

    def proof(self) -> Proof:
        """What the last run called; nothing more can be proved of a function of Python."""
        if not (called := self._calls.names):
            nothing = self.problem.shape.is_empty or self.problem.shape.k == 0  # to multiply
            return Proof(generated=(self._name,), uncalled="" if nothing else self._name, provable=False)
        return Proof(generated=(self._name,), executed=called, composed=self._calls.composed, provable=False)
