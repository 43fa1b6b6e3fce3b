"""A function as a backend: the shortest way to put a kernel under the whole suite.

It computes the product, and eager PyTorch the rest of a problem; or it takes the whole problem (``bind``).

It is registered in a conftest.py, which every process of a run loads.  So torch is imported when a problem
is prepared and not before: xdist's controller, the doctor, whose children are to be forked without it, and a usage
error need none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from pytest_gemm.api.eager import EagerPrepared
from pytest_gemm.api.own_calls import OwnCalls, name_of
from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import DEVICES, TYPES, Availability, Candidates, Part, Recipe, no_device
from pytest_gemm.api.request import DEFAULT, BuildRequest, Capability
from pytest_gemm.core.outcome import Outcome, Unsupported
from pytest_gemm.core.text import described, did_you_mean
from pytest_gemm.machine import software
from pytest_gemm.numerics import tensor_core
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import STEPS, StepKind

if TYPE_CHECKING:
    import torch

    from pytest_gemm.operands.tensors import Operands


# Types of partial sums that a function can have.
_SUMS: Final = ("f64", "f32", "f16", "bf16")
# Where a kernel that takes the whole problem rounds.
_EPILOGUES: Final = ("fused", "eager", "either")
# Arguments that are lists of names, with an example.
_NAMES: Final = '("numpy",)'
_LISTS: Final = {
    "dtypes": '("f32", "bf16")',
    "distributions": _NAMES,
    "imports": _NAMES,
    "activations": '("relu",)',
    "devices": '("cuda",)',
}
# Words of flags that change how operands lie in memory, and not what is computed of them.
_LAYOUTS: Final = frozenset({"padded", "offset", "argument", "constant", "dynamic"})


@dataclasses.dataclass(eq=False)
class CallableBackend:
    """A function as a backend; ``Registry.add_callable`` documents the attributes.

    A derived class may state any of them, and has ``bind`` and ``candidates`` as methods:
    ``bind(problem, tensors)`` as of ``add_callable``, ``candidates(problem, operands, request)`` as of a backend.

    Raises:
        ValueError: when an argument is not of its kind.
    """

    refuses_when_called: ClassVar[bool] = True
    """Whether ``ValueError`` of the function says that it does not take a problem."""
    constant_b: ClassVar[bool] = False
    """Whether B may be part of what was compiled."""

    name: str
    matmul: Callable[..., torch.Tensor]
    dtypes: Iterable[str] = TYPES
    batched: bool = True
    accumulate: Literal["f64", "f32", "f16", "bf16"] | None = None
    deterministic: bool = True
    distributions: Iterable[str] = ()
    flushes: bool = False
    pack: Callable[[torch.Tensor], Any] | None = None
    imports: Iterable[str] = ()
    linear: Callable[..., torch.Tensor] | None = None
    activations: Iterable[str] = ()
    bind: Callable[..., Callable[[], Any] | None] | None = None
    candidates: Any = None
    epilogue: Literal["fused", "eager", "either"] = "fused"
    devices: tuple[str, ...] = DEVICES
    library: bool = False
    multiple_of: int | tuple[int, int, int] = 1
    square: bool = False
    concurrent: bool = False

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What the registration claims beyond the product."""
        return frozenset({Capability.THREADS} if self.concurrent else ())

    def __post_init__(self) -> None:
        """Check the arguments, which a user writes."""
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is field.default:
                delattr(self, field.name)  # it is the class's: of a derived one perhaps its own, or a method
        defaults = {field.name: field.default for field in dataclasses.fields(CallableBackend)}
        self._written = {name for name, default in defaults.items() if getattr(self, name) is not default}
        if "candidates" in vars(self):
            self._names = self.candidates
            is_list = isinstance(self._names, Iterable) and not isinstance(self._names, str)
            self._expect("candidates", is_list or callable(self._names), "names, or a function of the problem")
            self.candidates = self._listed
        named, further = ({"candidate": ""}, ", and candidate=") if self.candidates is not None else ({}, "")
        self._expect("pack", self.pack is None or callable(self.pack), "a function of B")
        self._expect("matmul", _takes(self.matmul, 2, **named), f"a function of A and B{further}")
        is_right = self.linear is None or _takes(self.linear, 4, **named)
        self._expect("linear", is_right, f"a function of A, B, bias, activation{further}")
        is_right = self.bind is None or _takes(self.bind, 2, **named)
        self._expect("bind", is_right, f"a function of the problem and its tensors{further}")
        is_right = self.linear is None or self.bind is None
        self._expect("linear", is_right, "None: bind= computes a bias and an activation too")
        self._expect("accumulate", self.accumulate in {*_SUMS, None}, f"one of {', '.join(_SUMS)}")
        self._expect("epilogue", self.epilogue in _EPILOGUES, f"one of {', '.join(_EPILOGUES)}")
        steps: Any = self.multiple_of
        self._steps = steps if isinstance(steps, (tuple, list)) else (steps,) * 3
        is_right = len(self._steps) == 3 and all(isinstance(step, int) and step > 0 for step in self._steps)
        self._expect("multiple_of", is_right, "a number above 0, or three of M, N and K: (128, 128, 16)")
        for flag in ("batched", "deterministic", "flushes", "library", "square", "concurrent"):
            self._expect(flag, isinstance(getattr(self, flag), bool), "True or False")
        for names, example in _LISTS.items():
            several: Any = getattr(self, names)
            is_list = isinstance(several, Iterable) and not isinstance(several, str)
            self._expect(names, is_list, f"names, as {example}")
            setattr(self, names, tuple(several))
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

    def _listed(self, problem: Problem, __: Operands, _: BuildRequest) -> Candidates:
        """The names of the registration."""
        names = tuple(self._names(problem) if callable(self._names) else self._names)
        if not names:
            raise Unsupported("no-candidate", f"{self.name} has no candidate for it")
        return Candidates(names)

    def contract(self, problem: Problem, *, own: bool = False) -> Contract:
        """The arithmetic of a problem.

        Sums are of the registered type; without one of f64 for f64 and of f32 for others, and those of NVIDIA's tensor
        cores where the backend computes on CUDA alone.

        Args:
            problem: what is computed.
            own: whether the kernel takes the whole problem; otherwise PyTorch rounds after each step.
        """
        if self.devices == ("cuda",) and self.accumulate in {"f32", None}:
            found = tensor_core.contract(problem, library=self.library)
        else:
            found = Contract(self.accumulate or ("f64" if problem.dtypes.out.name == "f64" else "f32"))
        epilogue = self.epilogue if own else "eager"
        if own and epilogue == "eager" and (problem.op.int8 or problem.op.rounds_once or problem.a_rule):
            epilogue = "either"  # "eager" is PyTorch's own program there, whose scales are steps and its bias none
        return dataclasses.replace(found, epilogue=epilogue, deterministic=self.deterministic, flushes=self.flushes)

    def contracts(self, problem: Problem, request: BuildRequest = DEFAULT) -> tuple[Contract, ...]:
        """What a run may state: :meth:`contract`, also of the whole problem where the function may take that."""
        from pytest_gemm.numerics.precision import as_allowed

        takes = (False, True) if self.bind or self.linear else (False,)
        stated = [as_allowed(self.contract(problem, own=own), problem) for own in takes]
        if request.mode.is_compiled:
            stated = [dataclasses.replace(contract, epilogue="either") for contract in stated]
        return tuple(stated)

    def promised_parts(self) -> tuple[Part, ...]:
        """The arguments of the registration that name types, devices or functions."""
        types, parts = sorted(self.dtypes), []
        for dtype in types:
            lines = [f"mm:{dtype}:nn:{self._fitted(17, 65, 127)}"]
            lines += [f"bmm:{dtype}:nn:3x{self._fitted(32, 16, 24)}"] * self.batched
            name = f"{dtype} in dtypes=" if "dtypes" in self._written else ""
            parts.append(Part(name, functools.partial(self._reads, dtype), tuple(lines)))

        def linears(step: str) -> list[str]:
            return [f"linear:{dtype}:nt:{self._fitted(17, 65, 127)}:bias+{step}".rstrip("+") for dtype in types]

        for step in ("", *self.activations) if self.linear is not None else ():
            name = f"{step} in activations=" if step else "linear="
            parts.append(Part(name, functools.partial(self._activates, step), tuple(linears(step))))
        if self.bind is not None:
            lines = [line for step in ("", "relu", "gelu", "silu") for line in linears(step)]
            parts.append(Part("bind=", _is_whole, tuple(lines), picky=True))
        devices = self.devices if "devices" in self._written else ()
        return (*parts, *(Part(f"{one} in devices=", lambda *_: True, device=one) for one in devices))

    def _fitted(self, *size: int) -> str:
        """M, N and K that the function takes, none smaller than these."""
        size = (max(size),) * 3 if self.square else size
        steps = (math.lcm(*self._steps),) * 3 if self.square else self._steps
        return "x".join(str(-(-length // step) * step) for length, step in zip(size, steps, strict=True))

    def limited(self, m: int, n: int, k: int) -> Unsupported | None:
        """Why the function does not take a product of these sizes."""
        if self.square and not m == n == k:
            return Unsupported("size", f"{self.name} takes square matrices", "leave out square=True")
        if any(length % step for length, step in zip((m, n, k), self._steps, strict=True)):
            steps = " x ".join(map(str, self._steps))
            return Unsupported("size", f"{self.name} takes multiples of {steps} (M x N x K)", "change multiple_of=")
        return None

    def _reads(self, dtype: str, problem: Problem, outcome: Outcome | None) -> bool:
        """Whether a function gets operands of a type."""
        is_own = self.bind is not None if outcome is None else outcome.whole
        own = {problem.dtypes.a.name, problem.dtypes.b.name} if is_own else set()
        return dtype in self._types_for(problem) | own

    def _activates(self, name: str, problem: Problem, outcome: Outcome | None) -> bool:
        """Whether ``linear`` gets an activation; with the name "" whether it is called at all."""
        activation = self._activation(problem)
        return activation is not None and name in {"", activation} and _is_whole(problem, outcome)

    def _activation(self, problem: Problem) -> str | None:
        """What ``linear`` applies, or ``None`` where a problem is more than a bias (N,) and an activation."""
        steps = [str(step) for step in problem.epilogue]
        rest = steps[steps[:1] == ["bias"] :]
        is_flat = not problem.op.weight or problem.shape.batch is None
        others = {flag.partition(".")[2] for flag in problem.flags} - _LAYOUTS
        is_own = problem.op.name in {"mm", "bmm", "addmm", "linear"} and bool(steps) and is_flat and not others
        if not is_own or str(problem.dtypes) != problem.dtypes.a.name or len(rest) > 1 or {*rest} - {*self.activations}:
            return None
        return "".join(rest)

    def of_linear(self, problem: Problem, tensors: Mapping[str, Any], **named: str) -> Any:
        """The call of ``linear``, or ``None`` where a problem is more than a bias (N,) and an activation."""
        assert self.linear is not None
        if (activation := self._activation(problem)) is None:
            return None
        b = tensors["b"].mT if problem.op.weight else tensors["b"]
        b = b if self.pack is None else self.pack(b)
        return functools.partial(self.linear, tensors["a"], b, tensors.get("bias"), activation or None, **named)

    def availability(self, device: str) -> Availability:
        """Where the device is one of its own, and the distributions that the function needs are installed."""
        if reason := no_device(self.name, self.devices, device):
            return Availability(reason)
        needs = ("torch", *self.distributions)
        versions = software.installed(needs)
        if lacking := [name for name in needs if name not in versions]:
            text, remedy = f"{lacking[0]} is not installed", f"pip install {' '.join(lacking)}"
            return Availability.lacking("no-distribution", text, remedy)
        return Availability(versions=tuple(versions.items()))

    def supports(self, problem: Problem, request: BuildRequest = DEFAULT) -> Unsupported | None:
        """The dtypes and batches of the registration; what has scales or codes is asked of ``bind``, in ``prepare``."""
        is_asked = (problem.op.rounds_once or problem.group_size) and self.bind is not None
        return None if is_asked else self._refused(problem)

    def _refused(self, problem: Problem) -> Unsupported | None:
        """Why the problem cannot be composed around the product."""
        if problem.op.rounds_once:
            return Unsupported("op", "fp8 needs scales, and matmul(a, b) gets none")
        if problem.group_size and not problem.op.coded:
            return Unsupported("op", "a plain product does not decode 4-bit weights")
        if lacking := " ".join(sorted(self._types_for(problem).difference(self.dtypes))):
            text = f"{self.name} was registered without {lacking}"
            return Unsupported("dtype", text, f"add it to dtypes= of {self.name}")
        # A grouped product reaches the function as one matrix after the other, and so do linears.
        if problem.op.batched and not self.batched:
            return Unsupported("batch", f"{self.name} takes no 3-D tensors", f"register {self.name} with batched=True")
        return self.limited(problem.shape.m, problem.shape.n, problem.shape.k)

    @staticmethod
    def _types_for(problem: Problem) -> set[str]:
        """Types in which the product gets its operands."""
        # Mixed, weight-only and autocast products reach the function after their cast in the graph.
        cast_first = problem.autocast or problem.op.converts or problem.widens
        given = {problem.dtypes.out.name} if cast_first else {problem.dtypes.a.name, problem.dtypes.b.name}
        return {"f32"} if problem.op.coded else given

    def prepare(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> CallablePrepared:
        """Import the modules and bind the problem; on CUDA call it too, so that a library compiles and tunes itself.

        Raises:
            Unsupported: when there is no candidate, or ``bind`` does not take what no product computes.
        """
        from pytest_gemm.numerics import precision

        for name in self.imports:
            importlib.import_module(name)
        prepared = CallablePrepared(self, problem, self._candidate(problem, operands, request))
        with precision.settings(problem):
            call = prepared.bind(operands)
            reason = None if prepared.is_own else self._refused(problem)
            if reason is not None and (problem.op.rounds_once or problem.group_size):
                raise reason
            if self.devices == ("cuda",):
                call()
        return prepared

    def _candidate(self, problem: Problem, operands: Operands, request: BuildRequest) -> str:
        """The requested candidate, else the first one; "" where there are none."""
        if self.candidates is None:
            return ""
        return request.candidate or str(self.candidates(problem, operands, request).names[0])

    def recipe(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> Recipe:
        """The program around the function, which a script takes out of the file that it stands in.

        Raises:
            Unsupported: when it is no function of a module's own, or takes a packed B.
        """
        import torch

        from pytest_gemm.programs import program

        if self.pack is not None:
            raise Unsupported("no-script", f"a script gives A and B, and the function of {self.name} takes a packed B")
        candidate = self._candidate(problem, operands, request)
        named = f", candidate={candidate!r}" if candidate else ""
        known: dict[str, Any] = {"threads": torch.get_num_threads()}
        tensors = program.args(problem, operands)
        if self.linear is not None and (whole := self.of_linear(problem, tensors)) is not None:
            b = "b.mT" if problem.op.weight else "b"
            call = f"lambda a, b, bias=None: mine(a, {b}, bias, {whole.args[3]!r}{named})"
            return Recipe(matmul=self._place(self.linear), call=call, **known)
        place = _, product = self._place(self.matmul)
        if self.bind is None and not candidate:
            return Recipe(matmul=place, **known)
        if problem.op.outside:
            raise Unsupported("no-script", f"a script does not register the op {problem.op.name}")
        call = f"build(problem, partial(mine{named}))(**given)"
        if self.bind is not None:
            place = self._place(self.bind)
            rest = f"partial(build(problem, partial(mine.__globals__[{product!r}]{named})), **given)"
            call = f"(mine(problem, given{named}) or {rest})()"
        imports = "functools import partial", f"{Problem.__module__} import Problem", f"{program.__name__} import build"
        setup = (*(f"from {one}" for one in imports), f"problem = Problem.parse({problem.line!r})")
        return Recipe(matmul=place, call=f"lambda **given: {call}", setup=setup, needs=("pytest-gemm",), **known)

    def _place(self, function: Callable[..., Any]) -> tuple[str, str]:
        """The file of a function and its name there."""
        plain = inspect.unwrap(function)  # what a decorator such as numba.njit was given
        names = [name for name, value in getattr(plain, "__globals__", {}).items() if value is function]
        if not names:
            raise Unsupported("no-script", f"a script loads a function of a file by its name, and {self.name} is none")
        return plain.__code__.co_filename, names[0]


def _is_whole(_: Problem, outcome: Outcome | None) -> bool:
    """Whether ``bind`` or ``linear`` computed a problem; a class with a proof of its own does not say."""
    return outcome is None or outcome.whole is not False


def _takes(function: Any, count: int, **named: str) -> bool:
    """Whether it can be called with that many arguments and these, as far as Python knows its signature."""
    try:
        inspect.signature(function).bind(*[None] * count, **named)
    except TypeError:  # of what is no function, too
        return False
    except ValueError:  # a builtin function has none
        return True
    return True


class CallablePrepared(EagerPrepared):
    """The function inside the problem's eager program, or its call where it takes the whole problem.

    Attributes:
        is_own: whether the backend's ``bind`` has taken the problem.
    """

    is_own = False

    def __init__(self, backend: CallableBackend, problem: Problem, candidate: str = "") -> None:
        self._backend, self._candidate = backend, candidate
        self._named = {"candidate": candidate} if candidate else {}
        self._thread = threading.local()
        self._calls, self._name, self._is_timed = OwnCalls(), name_of(backend.matmul), False
        self._matmul = functools.partial(backend.matmul, **self._named) if candidate else backend.matmul
        product = self._of_packed if backend.pack else self._matmul
        if backend.square or backend.multiple_of != 1:
            product = functools.partial(self._within_limits, product)
        super().__init__(problem, backend.contract(problem), product)
        self._counting = self._calls.program(problem, product, self._name)

    def _within_limits(self, product: Callable[..., Any], a: torch.Tensor, b: torch.Tensor) -> Any:
        """A product, which may have other sizes than its problem: one of several groups, for instance."""
        if (reason := self._backend.limited(a.shape[-2], b.shape[-1], a.shape[-1])) is not None:
            raise reason
        return product(a, b)

    def _of_packed(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        return self._matmul(a, self._thread.pack(b))

    def bind(self, operands: Operands) -> Callable[[], torch.Tensor]:
        """The kernel's own call, or the program around its product, whose first call packs the B of each product.

        Raises:
            TypeError: when ``bind`` of the backend returns something else than a call or ``None``.
        """
        bind = self._backend.bind or (self._backend.of_linear if self._backend.linear else None)
        if bind is not None:
            call = bind(self.problem, self.arguments(operands), **self._named)
            if call is not None and not callable(call):
                wrong = f"bind of {self._backend.name} returned {type(call).__name__}"
                raise TypeError(f"{wrong}; return a call without arguments, or None for what it does not take")
            self.is_own = call is not None
            self.contract = self._allowed(self._backend.contract(self.problem, own=self.is_own), self.problem)
            if call is not None:
                return self.own(call, _name_of_call(call))
        pack = self._backend.pack
        call = super().bind(operands)
        if pack is None:
            return call
        packs: list[Any] = []

        def first(b: torch.Tensor) -> Any:
            packs.append(pack(b))
            return packs[-1]

        def packed_once() -> torch.Tensor:
            given = iter(packs)  # each call has the same products in the same order
            self._thread.pack = (lambda _: next(given)) if packs else first
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
        except (Unsupported, ValueError) as error:
            if not self._backend.refuses_when_called:
                raise
            words = error.reason.text if isinstance(error, Unsupported) else described(error)
            raise Unsupported("not-taken", words) from None
        finally:
            self._program = plain

    def proof(self) -> Proof:
        """What the last run called; nothing more can be proved of a function of Python."""
        whole = self.is_own if self._backend.bind or self._backend.linear else None
        chosen = (self._candidate,) if self._candidate else ()
        proof = Proof(chosen, generated=(self._name,), provable=False, whole=whole)
        if not (called := self._calls.names):
            nothing = self.problem.shape.is_empty or self.problem.shape.k == 0  # to multiply
            return dataclasses.replace(proof, uncalled="" if nothing else self._name)
        executed = (*called, *dict.fromkeys(self.executed))
        return dataclasses.replace(proof, executed=executed, composed=self._calls.composed)


def _name_of_call(call: Callable[[], Any]) -> str:
    """The name of a function; of a lambda that of the function in which it stands."""
    return name_of(call).removesuffix(".<lambda>").removesuffix(".<locals>").rpartition(".<locals>.")[2]


def plain(problem: Problem) -> bool:
    """Whether the program is the op and its steps alone, on matrices: no flags, no conversions, no rows in batches."""
    rows = problem.op.weight and problem.shape.batch is not None
    return not (problem.flags or problem.autocast or problem.widens or rows)
