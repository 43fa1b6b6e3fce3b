"""What a kernel takes: found out by first calls, which are made in the worker.

:func:`parameters` and :func:`first_call` run there; :class:`FirstCalls` asks them of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from pytest_gemm.operands.dtypes import torch_dtype
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.speed import bench
from pytest_gemm.storage.datafile import document
from pytest_gemm.tools import autotuned
from pytest_gemm.tools.judgement import Judgement
from pytest_gemm.tools.kernel import REFUSALS, Form, Kernel, begin
from pytest_gemm.worker.inline import Inline, wait_for
from pytest_gemm.worker.messages import Died, Thrown
from pytest_gemm.worker.process import Process

# M, N and K of first calls.  Three different ones: small, and as kernels of large tiles take them; then, for what takes
# nothing else, all equal, and one column.
_RECTANGLES: Final = ((32, 64, 128), (128, 256, 512), (512, 256, 768))
_SQUARE: Final = (256, 256, 256)
_COLUMN: Final = (64, 1, 128)
# Sizes by which a kernel of one column is judged.
_COLUMNS: Final = tuple(
    (m, 1, k) for m, k in ((16, 16), (64, 128), (33, 65), (1, 64), (130, 1000), (3, 17), (512, 256))
)
# What is added to a size, to see of which number it has to be a multiple.
_STEPS: Final = (1, 8, 16, 32, 64, 128)
# Types that are tried: f64, which a kernel that converts to f32 inside takes by accident, where no other one works.
_FLOATS: Final = ("f32", "f16", "bf16")
TRIED: Final = (*_FLOATS, "f64", "i8")
# Names of parameters that a function adds and that it writes its result to, of memory that it uses, of numbers.
_NAMES: Final = {"bias": {"bias", "input"}, "out": {"out", "output", "c", "y", "result", "res", "dst", "d", "o"}}
_WORKSPACES: Final = {"workspace", "ws", "work", "scratch", "tmp", "temp", "buffer"}
_NUMBERS: Final = {"m", "n", "k", "alpha", "beta"}
# What tensors may be, by their place; of unknown parameters one of the first four.
_ORDERS: Final = (
    *(("a", "b", "bias"), ("bias", "a", "b"), ("a", "b"), ("a", "b", "out"), ("out", "a", "b")),
    *(("a", "b", "bias", "out"), ("out", "a", "b", "bias")),
)
# Ends of the worker that end the judging.
DEATHS: Final = 3
# Operands lie between -1 and 1 and an addend below this: their sums are exact in every type.
_ADDEND: Final = 3
# Of an element; a wrong one is off by 1 at least.
_NEARLY: Final = 0.25
# Seconds after which no further kind of call is tried.
_SECONDS: Final = 10.0
# How far a call went, see :class:`Call`.
_RIGHT, _WRONG_VALUES, _WIDER, _NO_PRODUCT, _DIED, _CRASHED, _REFUSED, _ARGUMENTS = range(8)
# Exceptions by which a function refuses what it does not take; TypeError has a rank of its own.
_REFUSALS: Final = {kind.__name__ for kind in REFUSALS} - {"TypeError"} | {"RuntimeError"}


@dataclasses.dataclass(frozen=True)
class Said:
    """What a user says of a kernel, as values or as the texts of options; what is "" or empty is found out.

    Attributes:
        op, dtypes, device: as in a problem line.
        multiple_of: what M, N and K have to be multiples of.
        square: M, N and K have to be equal.
        sizes: the only M, N and K that it takes; empty for any.
        a: the shape of A: ``MxK`` or ``KxM``.
        beta: whether its result is added to what is there: ``1``, or ``0``.
        accumulate, epilogue, flushes, deterministic: as of ``add_callable``; by default f32 and ``either``.
    """

    op: str = ""
    dtypes: Sequence[str] = ()
    device: str = ""
    multiple_of: Any = (1, 1, 1)
    square: bool = False
    sizes: Any = ()
    a: str = ""
    beta: Any = ""
    accumulate: str = ""
    epilogue: str = ""
    flushes: bool = False
    deterministic: Any = True

    def __post_init__(self) -> None:
        """Check what a user writes: options of the command are texts, those of a function may be values.

        Raises:
            ValueError: for a dtype that no kernel is tried with, and for what an option does not take.
        """
        values, dtypes = vars(self), self.dtypes.split(",") if isinstance(self.dtypes, str) else self.dtypes
        values["dtypes"] = dtypes = tuple(filter(None, dtypes))
        if unknown := [name for name in dtypes if name not in TRIED]:
            raise ValueError(f"--dtypes={','.join(dtypes)}: unknown {unknown[0]!r}; known: {' '.join(TRIED)}")
        values["deterministic"] = {True: "yes", False: "no"}.get(self.deterministic, self.deterministic)
        for name, choices in _CHOICES.items():
            values[name] = str(values[name])
            if values[name] not in {"", *choices}:
                raise ValueError(f"--{name}={values[name]}: give {' or '.join(choices)}")
        values["deterministic"] = self.deterministic != "no"
        of = _read(self.multiple_of or 1, 1, "multiple-of", "one number above 0, or three for M, N and K: 128,128,16")
        values["multiple_of"] = (math.lcm(*of),) * 3 if self.square or len(of) == 1 else tuple(of)
        lengths = _read(self.sizes, 3, "sizes", "M x N x K, one or several, as 512x512x512,128x256x64")
        values["sizes"] = tuple(zip(lengths[::3], lengths[1::3], lengths[2::3], strict=True))

    @property
    def limits(self) -> str:
        """The sizes in words, "" for any."""
        steps = self.multiple_of if len(set(self.multiple_of)) > 1 else self.multiple_of[:1]
        multiples = "" if steps == (1,) else f" of multiples of {', '.join(map(str, steps))}"
        return " of square matrices" * self.square + multiples + " of fixed sizes" * bool(self.sizes)

    def fitted(self, size: Sequence[int]) -> tuple[int, ...]:
        """M, N and K as the kernel takes them, no smaller: multiples, or all equal."""
        if self.square:
            size = (sorted(size)[1] if min(size) else 0,) * 3
        return tuple(-(-length // step) * step for length, step in zip(size, self.multiple_of, strict=True))

    @property
    def options(self) -> list[str]:
        """The options of the command that change what a single problem is judged by."""
        texts = {name: getattr(self, name) for name in ("a", "beta", "accumulate", "epilogue")}
        flags = ["--flushes"] * self.flushes + ["--deterministic=no"] * (not self.deterministic)
        return [*(f"--{name}={text}" for name, text in texts.items() if text), *flags]

    @property
    def arithmetic(self) -> dict[str, Any]:
        """Arguments of a backend."""
        named = {"accumulate": self.accumulate or None, "epilogue": self.epilogue or "either"}
        return named | {"flushes": self.flushes, "deterministic": self.deterministic}


_ARGUMENTS_OF_JUDGE: Final = document(Path(__file__).with_name("commands.toml"))["judge"]["arguments"]
# What options take that are one word.
_CHOICES: Final = {each["name"][2:]: each["choices"] for each in _ARGUMENTS_OF_JUDGE if "choices" in each}


def _read(value: Any, count: int, option: str, right: str) -> list[int]:
    """The lengths of sizes that are a text, or numbers.

    Raises:
        ValueError: with what would be right.
    """
    sizes = value.split(",") if isinstance(value, str) else value if isinstance(value, Sequence) else [value]
    texts = ["x".join(map(str, size)) if isinstance(size, (tuple, list)) else str(size) for size in sizes if size != ""]
    words = [word.strip() for text in texts for word in text.split("x")]
    lengths = [int(word) for word in words if word.isdecimal() and int(word)]
    is_whole = all(text.count("x") == count - 1 for text in texts) and len(lengths) == len(words)
    if not is_whole or (count == 1 and len(lengths) not in {1, 3}):
        raise ValueError(f"--{option}={','.join(texts)}: give {right}")
    return lengths


@dataclasses.dataclass(frozen=True)
class Call:
    """A first call.

    Attributes:
        form, device, size, dtype: what was given.
        rank: how far it went: ``_RIGHT``; a result of the right shape and type with ``_WRONG_VALUES``; a product in a
            ``_WIDER`` type; something that is ``_NO_PRODUCT``; the process ``_DIED``; it ``_CRASHED`` by an exception
            that is no refusal, ``_REFUSED``, or did not take its ``_ARGUMENTS``.
        said: the dtypes of a problem line up to ``_WRONG_VALUES``, else what was wrong.
        share: of the elements those that are right.
        c: ``adds`` of a kernel that adds to its result, ``zeros`` of one that is right unless there was NaN.
        died: how the process has ended in it.
    """

    form: Form
    device: str
    size: tuple[int, ...]
    dtype: str
    rank: int
    said: str
    share: float = 0.0
    c: str = ""
    died: Died | None = None


def _orders(tensors: Sequence[str]) -> Sequence[tuple[str, ...]]:
    """What the tensors of these names may be, the likeliest first; nothing where there are too many or too few."""
    if {"a", "b"} <= {*tensors} <= {"a", "b", *_NAMES}:
        return [tuple(tensors)]

    def misnamed(roles: Sequence[str]) -> int:
        return sum(name not in _NAMES.get(role, {name}) for name, role in zip(tensors, roles, strict=True))

    return sorted((roles for roles in _ORDERS if len(roles) == len(tensors)), key=misnamed)


def _forms(names: Sequence[str], keywords: Sequence[str], said: Said, kernel: Kernel) -> list[Form]:
    """The forms that parameters may have and that compute an op, the likeliest first.

    Args:
        names: of the parameters, in lower case; empty where they are unknown.
        keywords: of the last of them, as they are passed.
        said: the op, the shape of A, and whether its result is added to.
        kernel: in C it takes no arrays, A as it is said, and B as it is said where it is told whether B is transposed.

    Raises:
        ValueError: where there are others than a product has.
    """
    numbers = {name: "workspace" if name in _WORKSPACES else name for name in names if name in _WORKSPACES | _NUMBERS}
    tensors = [name for name in names if name not in numbers]
    orders = _orders(tensors) if names else _ORDERS[:4]
    is_weight = said.op == "linear" if kernel.is_told_of_b else tensors[1:2] in (["w"], ["weight"])
    weights = (is_weight,) if kernel.is_told_of_b else (is_weight, not is_weight)
    columns = (said.a == "KxM",) if said.a or kernel.is_foreign else (False, True)
    has_arrays = (False,) if kernel.is_foreign else (False, True)
    forms = []
    for arrays, is_columns, order, weight in itertools.product(has_arrays, columns, orders, weights):
        rest = iter(order)
        roles = tuple(numbers[name] if name in numbers else next(rest) for name in names) if names else order
        form = Form(roles, tuple(keywords), weight, arrays, is_columns, "addend" if said.beta == "1" else "nan")
        is_asked = said.op in {"", "bmm", "int_mm", form.op} or (said.op == "linear" and weight)
        if is_asked and (said.beta != "1" or ("out" in roles and "bias" not in roles)):
            forms.append(form)
    if not forms:
        known = "A and B, perhaps bias, out, workspace, m, n, k, alpha and beta"
        asked = "".join(f" for --{name}={value}" for name, value in (("op", said.op), ("beta", said.beta)) if value)
        raise ValueError(f"it takes {', '.join(names)}: give a function of {known}{asked}")
    return forms


@dataclasses.dataclass(frozen=True)
class FirstCalls:
    """Calls that show what a kernel takes.

    Attributes:
        kernel: without its form.
        said: what its user says of it.
        worker: the process of the kernel.
    """

    kernel: Kernel
    said: Said
    worker: Process | Inline

    def best(self) -> Call:
        """The first right call, or else the first of those that went best.

        Raises:
            ValueError: when none has returned anything, or it adds to what its result holds and ``beta`` is not said.
        """
        name, said = self.kernel.name, self.said
        try:
            answer = self.worker.call(tuple[list[str], list[str], list[str]], "parameters", self.kernel)
            names, keywords, devices = answer
            forms = _forms([*map(str.lower, names)], keywords, said, self.kernel)
            if self.kernel.calls_cuda and not said.device:
                raise ValueError("it calls CUDA, so say where its pointers point to: --device=cpu or --device=cuda")
        except (Died, Thrown, ValueError) as error:
            raise ValueError(f"{name}: {error}") from None
        calls = self._tried([said.device or "cpu"] if said.device or self.kernel.is_foreign else devices, forms)
        best = min(calls, key=lambda call: (call.rank, call.share <= 0.5))
        if best.c == "adds":
            raise ValueError(f"{name} {best.form} adds to what out holds: give --beta=1 if it should, --beta=0 if not")
        if self.kernel.assumed and (best.rank >= _NO_PRODUCT or best.share <= 0.5):
            what = best.said if best.rank >= _NO_PRODUCT else "its result is no product"
            called = f"it was called by an assumed prototype, {self.kernel.assumed}"
            raise ValueError(f"{name}: {what}; {called}: give its own, --signature='void f(...)'")
        # In a form that it need not have it may end its process and be right.
        if best.rank < _DIED or (best.rank == _DIED and best.form == forms[0]):
            return dataclasses.replace(best, form=dataclasses.replace(best.form, c=best.c or best.form.c))
        apart: dict[str, str] = {}
        for call in sorted(calls, key=lambda call: (call.rank, forms.index(call.form))):
            apart.setdefault(re.sub(r"\d+", "", call.said), f"{call.said} ({call.form} of {call.dtype})")
        reasons = "; ".join([*apart.values()][:3])
        triton = "; a Triton kernel needs a GPU, or TRITON_INTERPRET=1" if "driver" in str(apart) else ""
        options = "--op=mm|addmm|linear|bmm|int_mm, --dtypes, --device, --multiple-of, --square, --sizes or --a=KxM"
        say = f"Say what it takes: {options}, or give a function of A (M, K) and B (K, N) around it{triton}"
        takes = ", ".join(names) or "unknown parameters"
        raise ValueError(f"{name} ({takes}): no first call worked: {reasons}. {say}")

    def _tried(self, devices: Sequence[str], forms: Sequence[Form]) -> list[Call]:
        """First calls in their order, up to the first right one, as far as they tell more and the time allows."""
        dtypes = self.said.dtypes or (("i8",) if self.said.op == "int_mm" else TRIED)
        calls: list[Call] = []
        ends: dict[str, float] = {}
        for device, size, dtype, form in itertools.product(devices, self._sizes(), dtypes, forms):
            has_arrays = not form.arrays or (device == "cpu" and dtype != "bf16")  # NumPy has no others
            # What is wrong in these types may be right in f64 by accident.  NumPy makes f64 of f32 by default.
            products = [call for call in calls if call.rank < _NO_PRODUCT and call.dtype in _FLOATS]
            has_product = any(call.rank < _WIDER or not call.form.arrays for call in products)
            if not has_arrays or (has_product and dtype not in _FLOATS) or self._is_needless(calls, device, size, form):
                continue
            if time.monotonic() <= ends.get(device, math.inf):
                calls.append(call := self._call(form, device, size, dtype))
                ends.setdefault(device, time.monotonic() + _SECONDS)
                if call.rank == _RIGHT or (call.died and (call.died.limit or self.worker.deaths >= DEATHS)):
                    break
        return calls

    def _sizes(self) -> list[tuple[int, ...]]:
        """Of A and B in the order in which they are tried: rectangles, one column, all of one size; then batches."""
        said = self.said
        flat = sorted(said.sizes or map(said.fitted, _RECTANGLES), key=lambda size: -len(set(size)))
        batches = [(2, *size) for size in flat]
        special = [] if said.limits else [_COLUMN, _SQUARE]
        return batches if said.op == "bmm" else [*flat, *special, *batches]

    @staticmethod
    def _is_needless(calls: Sequence[Call], device: str, size: tuple[int, ...], form: Form) -> bool:
        """Whether a call would say no more: what has returned wrong values of the right shape is judged in that form.

        Where its result is given, or two sizes are alike, the shape says nothing: the values tell how A and B lie.
        """
        wrong = [call for call in calls if call.rank < _NO_PRODUCT]
        if any(call.device != device or (call.size != size and (_is_special(size) or len(size) > 3)) for call in wrong):
            return True
        alike = [call.form for call in wrong if call.form.roles == form.roles and call.form != form]
        shows = "out" not in form.roles and len(set(size[-3:])) == 3
        return any(shows or other.arrays != form.arrays for other in alike)

    def _learnt(self, first: Call) -> Said:
        """What was said of the sizes, or what a first call shows that went well where others were refused."""
        batch, size, said = first.size[:-3], first.size[-3:], self.said
        if said.limits or first.rank >= _NO_PRODUCT or size == _RECTANGLES[0]:
            return said
        end = time.monotonic() + _SECONDS

        def is_refused(size: Sequence[int]) -> bool:
            rank = self._call(first.form, first.device, (*batch, *size), first.dtype).rank
            # A result of the wrong shape is as good as a refusal of what is not square.
            is_refusal = rank >= _REFUSED or (rank == _NO_PRODUCT and _is_special(first.size))
            return is_refusal and time.monotonic() < end

        def step_of(place: int) -> int:
            longer = [[length + step * (i == place) for i, length in enumerate(size)] for step in _STEPS]
            return next((step for step, one in zip(_STEPS, longer, strict=True) if not is_refused(one)), _SQUARE[0])

        if not is_refused(_RECTANGLES[0]):  # an exception of another kind is a crash
            return said
        if _is_special(first.size):
            return dataclasses.replace(said, **({"sizes": _COLUMNS} if size[1] == 1 else {"square": True}))
        return dataclasses.replace(said, multiple_of=[step_of(place) for place in range(3)])

    def takes(self, first: Call) -> tuple[Judgement, Said]:
        """What it takes in the form of a first call and what it has refused; and which sizes, said or found out."""
        form, own, is_batch = first.form, first.dtype, len(first.size) == 4
        others: dict[str, Call] = {}
        if first.died is None and not self.kernel.is_foreign:  # a prototype says the types of its matrices
            more = self.said.dtypes or (() if own == "i8" else _FLOATS)
            others = {dtype: self._call(form, first.device, first.size, dtype) for dtype in more if dtype != own}
            if not is_batch and not form.epilogue and self.said.op in {"", "bmm"}:
                others["bmm"] = self._call(form, first.device, (2, *first.size), own)
        right = {name: call.said for name, call in others.items() if call.rank <= _WRONG_VALUES}
        batched = right.pop("bmm", "") != "" or is_batch
        op = "bmm" if is_batch else "int_mm" if own == "i8" else form.op
        types = first.said if first.rank <= _WRONG_VALUES else "i8-i8-i32" if own == "i8" else own
        said = self._learnt(first)
        assumed = f" (assumed: {self.kernel.assumed})" * bool(self.kernel.assumed)
        arguments = f"{self.kernel.short}{form}{said.limits}{assumed}"
        dtypes = [types, *right.values()]
        options = [*self.said.options, *[f"--signature={self.kernel.signature}"] * bool(self.kernel.signature)]
        judgement = Judgement(self.kernel.name, op, dtypes, first.device, batched, arguments, options)
        judgement.reads_c, judgement.deterministic = form.c == "zeros", self.said.deterministic
        for name, call in others.items():
            if call.rank > _WRONG_VALUES:
                judgement.refused.setdefault(call.said, []).append(name)
        return judgement, said

    def _call(self, form: Form, device: str, size: tuple[int, ...], dtype: str) -> Call:
        kernel, what = dataclasses.replace(self.kernel, form=form), (form, device, size, dtype)
        probes = form.c == "nan" and "out" in form.roles and not self.said.beta
        try:
            answer = self.worker.call(tuple[int, str, float, str], "first_call", kernel, dtype, size, device, probes)
        except Died as error:
            return Call(*what, _DIED, error.reason.text, died=error)
        except Thrown as error:
            rank = _ARGUMENTS if error.kind == "TypeError" else _REFUSED if error.kind in _REFUSALS else _CRASHED
            return Call(*what, rank, str(error))
        rank, said, share, c = answer
        return Call(*what, rank, said, share, c=c)


def _is_special(size: Sequence[int]) -> bool:
    """Whether sizes are all alike, or those of one column: a kernel of any sizes may be right for them by chance."""
    return len(size) == 3 and (len(set(size)) == 1 or size[1] == 1)


# -- asked of the worker -----------------------------------------------------------------------------------------


def parameters(_: object, kernel: Kernel) -> tuple[list[str], list[str], list[str]]:
    """The parameters without a default, and a bias with one.

    Returns:
        Their names, none where they are unknown; those of them, at the end, that are passed by name; and the devices
        that there are, the likelier first.

    Raises:
        TypeError: for a function that cannot be called by itself.
    """
    begin.cache_clear()  # in the process of a user another kernel may have been judged
    has_gpu = torch.cuda.is_available()
    begin("cuda" if kernel.is_for_gpus and has_gpu else "cpu")
    function = kernel.loaded
    if type(function).__module__.startswith("triton."):
        raise TypeError("a @triton.jit function is started on a grid: name the Python function that starts it")
    names: list[str] = []
    keywords: list[str] = []
    is_open = is_skipped = False
    with contextlib.suppress(ValueError, TypeError):  # functions of C have no signature
        shown = function.forward if isinstance(function, torch.nn.Module) else function
        for one in inspect.signature(shown).parameters.values():
            is_open |= one.kind is one.VAR_POSITIONAL
            if one.kind in {one.VAR_POSITIONAL, one.VAR_KEYWORD}:
                continue
            if one.default is one.empty or one.name == "bias":
                keywords += [one.name] * (is_skipped or one.kind is one.KEYWORD_ONLY)
                names.append(one.name)
            else:
                is_skipped = True
    devices = ["cuda", "cpu"] if kernel.is_for_gpus else ["cpu", "cuda"]
    devices = devices if has_gpu else ["cpu"]
    return ([], [], devices) if is_open and len(names) < 2 else (names, keywords, devices)


def first_call(
    _: object, kernel: Kernel, dtype: str, shape: Sequence[int], device: str, probes: bool
) -> tuple[int, str, float, str]:
    """Call a kernel with small integers that differ by their place; A is f32 of (M, K), say.

    Where the values are wrong it ``probes`` what becomes of that which its result held before.

    Returns:
        Rank, words, share and c of a :class:`Call`.  A type is right as a product has it: the same, i32 of i8, f32 of a
        half but in a linear.
    """
    begin(device)
    *batch, m, n, k = shape
    form, kind = kernel.form, DTYPES[dtype]
    a, b = (_integers(dtype, name, 1, (*batch, *size)) for name, size in (("a", (m, k)), ("b", (k, n))))
    addend = _integers(dtype, "c", _ADDEND, (m, n) if form.c == "addend" else (n,))
    is_turned = (form.columns, form.weight, False)

    def returned(c: str) -> Any:
        operands = [
            (x.mT.clone(memory_format=torch.contiguous_format).mT if turned else x.clone()).to(device)
            for x, turned in zip((a, b, addend), is_turned, strict=True)
        ]
        with torch.no_grad():
            result = dataclasses.replace(kernel, form=dataclasses.replace(form, c=c))(*operands)
        wait_for(device)  # for the error of a launch
        return result

    def near(result: torch.Tensor, values: torch.Tensor) -> float:
        return float(((result.double().cpu() - values).abs() < _NEARLY).double().mean())

    result = returned(form.c)
    if not isinstance(result, torch.Tensor):
        return _NO_PRODUCT, f"returned {type(result).__name__}", 0.0, ""
    said = next((one for one in DTYPES.values() if one.torch_name == str(result.dtype)[6:]), None)
    if said is None or tuple(result.shape) != (*batch, m, n):
        return _NO_PRODUCT, f"returned {str(result.dtype)[6:]} of shape {tuple(result.shape)}", 0.0, ""
    expected = a.double() @ b.double() + addend.double() * bool(form.epilogue)
    share, does = near(result, expected), ""
    if probes and share < 1.0 and near(returned("zeros"), expected) == 1.0:
        ones = returned("ones")
        does = "zeros" if near(ones, expected) == 1.0 else "adds" if near(ones, expected + 1.0) == 1.0 else ""
        share = 1.0 if does else share
    # Of another type it may be a product, or what comes of reading memory of the wrong type.
    wide = {"i8": "i32"}.get(dtype, "f32" if kind.bits == 16 and form.op != "linear" else "")
    if said.name == dtype != "i8" or (share == 1.0 and said.name == wide):
        types = dtype if said.name == dtype else f"{dtype}-{dtype}-{wide}"
        return (_RIGHT if share == 1.0 else _WRONG_VALUES), types, share, does
    is_wider = share == 1.0 and said.is_float and said.bits > kind.bits
    what = f"returned {said.name}{'' if share == 1.0 else ' that is no product'}"
    return (_WIDER if is_wider else _NO_PRODUCT), what, share, does


@functools.lru_cache(maxsize=16)
def _integers(dtype: str, name: str, largest: int, size: tuple[int, ...]) -> torch.Tensor:
    """Integers up to ``largest`` and their negatives, without a pattern; others for each name."""
    drawn = torch.Generator().manual_seed(ord(name))
    return torch.randint(-largest, largest + 1, size, generator=drawn, dtype=torch.int8).to(torch_dtype(DTYPES[dtype]))


CALLS: Final[Mapping[str, Callable[..., Any]]] = {
    **bench.CALLS,
    **autotuned.CALLS,
    **{"parameters": parameters, "first_call": first_call},
}
"""What the worker of a kernel is asked."""
