"""What a kernel takes: found out by first calls, which are made in the worker.

:func:`parameters` and :func:`first_call` run there; :class:`FirstCalls` asks them of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from pytest_gemm.operands.dtypes import torch_dtype
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.speed import bench
from pytest_gemm.tools.judgement import Judgement
from pytest_gemm.tools.kernel import Form, Kernel, begin
from pytest_gemm.worker.inline import Inline
from pytest_gemm.worker.messages import Died, Thrown
from pytest_gemm.worker.process import Process

# Sizes of first calls, with three different dimensions: small ones, and what a kernel of large tiles takes.
_FIRST: Final = ((32, 64, 128), (128, 256, 512))
# Types that are tried: f64, which a kernel that converts to f32 inside takes by accident, where no other one works.
_FLOATS: Final = ("f32", "f16", "bf16")
TRIED: Final = (*_FLOATS, "f64", "i8")
# Names of parameters that a function writes its result to, and of those that it adds.
_OUT: Final = {"out", "output", "c", "y", "result", "res", "dst", "d"}
_BIAS: Final = {"bias", "input", "c"}
# Ends of the worker that end the judging.
DEATHS: Final = 3
# Relative error of a result in a half type.
_NEARLY: Final = 0.01


@dataclasses.dataclass(frozen=True)
class Said:
    """What a user says of a kernel; what is "" or empty is found out.

    Attributes:
        op, dtypes, device: as in a problem line.
        multiple_of: what M, N and K have to be multiples of.
        square: M, N and K have to be equal.
        sizes: the only M, N and K that it takes; empty for any.
    """

    op: str = ""
    dtypes: Sequence[str] = ()
    device: str = ""
    multiple_of: tuple[int, int, int] = (1, 1, 1)
    square: bool = False
    sizes: Sequence[tuple[int, int, int]] = ()


@dataclasses.dataclass(frozen=True)
class Call:
    """A first call.

    Attributes:
        form, device, size, dtype: what was given.
        rank: how well it went: 0, 1 and 2 as of :func:`first_call`, 3 died, 4 refused.
        said: the dtypes of a problem line of one that is right, else what was wrong.
        died: how the process has ended in it.
    """

    form: Form
    device: str
    size: tuple[int, ...]
    dtype: str
    rank: int
    said: str
    died: Died | None = None


def _forms(names: Sequence[str], op: str) -> list[Form]:
    """The forms that parameters may have and that compute an op, the likeliest first.

    Raises:
        ValueError: where there are too many parameters.
    """
    last, first, out = ("a", "b", "bias"), ("bias", "a", "b"), ("a", "b", "out")
    roles: list[tuple[str, ...]] = [("a", "b")]
    if len(names) == 3:
        roles = [first] if names[0] in _BIAS else [out, last] if names[2] in _OUT else [last, out]
    elif not names:
        roles = [last, first, *roles]
    elif len(names) != 2:
        raise ValueError(f"a kernel takes a and b, and perhaps bias or out; this one takes {', '.join(names)}")
    weights = (True, False) if len(names) > 1 and names[1] in {"w", "weight"} else (False, True)
    forms = [Form(*one) for one in itertools.product(roles, weights, (False, True))]
    return [form for form in forms if op in {"", "bmm", "int_mm", form.op}]


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
            ValueError: when none has returned anything.
        """
        try:
            names = self.worker.call(list[str], "parameters", self.kernel)
        except (Died, Thrown) as error:
            raise ValueError(f"{self.kernel.name}: {error}") from None
        made: list[Call] = []
        sizes = [size for size in _FIRST if self.said.op != "bmm"] + [(2, *size) for size in _FIRST]
        dtypes = self.said.dtypes or (("i8",) if self.said.op == "int_mm" else TRIED)
        both = ("cuda", "cpu") if self.kernel.is_for_gpus else ("cpu", "cuda")
        devices = (self.said.device,) if self.said.device else both
        for device, size, dtype, form in itertools.product(devices, sizes, dtypes, _forms(names, self.said.op)):
            made.append(self._call(form, device, size, dtype))
            died = made[-1].died
            if made[-1].rank <= 1 or (died is not None and (died.limit or self.worker.deaths >= DEATHS)):
                break
        if made and (best := min(made, key=lambda one: one.rank)).rank <= 3:
            return best
        said = "; ".join(dict.fromkeys(f"{one.said} ({one.form} of {one.dtype})" for one in made[:3]))
        text = f"{self.kernel.name} ({', '.join(names) or 'unknown parameters'}): no first call worked: {said}"
        triton = "; a Triton kernel needs a GPU, or TRITON_INTERPRET=1" if "driver" in said else ""
        ops = "mm|addmm|linear|bmm|int_mm"
        raise ValueError(f"{text}. Say what it takes: --op={ops}, --dtypes, --device=cpu|cuda{triton}")

    def takes(self, first: Call) -> Judgement:
        """What it takes in the form of a first call, and what it has refused."""
        form, own, is_batch = first.form, first.dtype, len(first.size) == 4
        others: dict[str, Call] = {}
        if first.died is None:
            more = self.said.dtypes or (() if own == "i8" else _FLOATS)
            others = {dtype: self._call(form, first.device, first.size, dtype) for dtype in more if dtype != own}
            if not is_batch and "bias" not in form.roles and self.said.op in {"", "bmm"}:
                others["bmm"] = self._call(form, first.device, (2, *first.size), own)
        right = {name: one.said for name, one in others.items() if one.rank == 0}
        batched = right.pop("bmm", "") != "" or is_batch
        op = "bmm" if is_batch else "int_mm" if own == "i8" else form.op
        types = first.said if first.rank == 0 else "i8-i8-i32" if own == "i8" else own
        arguments = f"{self.kernel.short}{form}"
        found = Judgement(self.kernel.name, op, [types, *right.values()], first.device, batched, arguments)
        for name, one in others.items():
            if one.rank > 0:
                found.refused.setdefault(one.said, []).append(name)
        return found

    def _call(self, form: Form, device: str, size: tuple[int, ...], dtype: str) -> Call:
        kernel, given = dataclasses.replace(self.kernel, form=form), (form, device, size, dtype)
        try:
            return Call(*given, *self.worker.call(tuple[int, str], "first_call", kernel, dtype, size, device))
        except Died as error:
            return Call(*given, 3, error.reason.text, error)
        except Thrown as error:
            return Call(*given, 4, str(error))


# -- asked of the worker -----------------------------------------------------------------------------------------


def parameters(_: object, kernel: Kernel) -> list[str]:
    """Names of the positional parameters without a default, and of a bias with one; empty where they are unknown.

    Raises:
        TypeError: for a function that cannot be called by itself.
    """
    begin.cache_clear()  # in the process of a user another kernel may have been judged
    begin("cuda" if kernel.is_for_gpus and torch.cuda.is_available() else "cpu")
    function = kernel.load()
    if type(function).__module__.startswith("triton."):
        raise TypeError("a @triton.jit function is started on a grid: name the Python function that starts it")
    found: list[str] = []
    with contextlib.suppress(ValueError, TypeError):  # functions of C have no signature
        for one in inspect.signature(function).parameters.values():
            is_positional = one.kind in {one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD}
            if is_positional and (one.default is one.empty or one.name == "bias"):
                found.append(one.name.lower())
    return found


def first_call(_: object, kernel: Kernel, dtype: str, shape: Sequence[int], device: str) -> tuple[int, str]:
    """Call a kernel with ones.

    Returns:
        0 and the dtypes of a problem line for a result as a product has it: of the same type, i32 of i8, f32 of a half
        but in a linear.  Else what is wrong, after 1 for a product in a wider type, 2 for anything else.
    """
    begin(device)
    *batch, m, n, k = shape
    given, kind = DTYPES[dtype], torch_dtype(DTYPES[dtype])
    a, b = (torch.ones(*batch, *sizes, dtype=kind, device=device) for sizes in ((m, k), (k, n)))
    b = b.mT.contiguous().mT if kernel.form.weight else b
    with torch.no_grad():
        found = kernel(a, b, torch.ones(n, dtype=kind, device=device))
    if not isinstance(found, torch.Tensor):
        return 2, f"returned {type(found).__name__}"
    said = next((one for one in DTYPES.values() if one.torch_name == str(found.dtype)[6:]), None)
    if said is None or tuple(found.shape) != (*batch, m, n):
        return 2, f"returned {str(found.dtype)[6:]} of shape {tuple(found.shape)}"
    # Of another type it may be a product, or what comes of reading memory of the wrong type.
    sums = k + ("bias" in kernel.form.roles)
    is_product = bool(((found.double() - sums).abs() <= _NEARLY * sums).all())
    wide = {"i8": "i32"}.get(dtype, "f32" if given.bits == 16 and kernel.form.op != "linear" else "")
    if is_product and said.name == wide:
        return 0, f"{dtype}-{dtype}-{wide}"
    if said.name == dtype != "i8":
        return 0, dtype
    is_wider = is_product and said.is_float and said.bits > given.bits
    return (1 if is_wider else 2), f"returned {said.name}{'' if is_product else ' that is no product'}"


CALLS: Final[Mapping[str, Callable[..., Any]]] = {**bench.CALLS, "parameters": parameters, "first_call": first_call}
"""What the worker of a kernel is asked."""
