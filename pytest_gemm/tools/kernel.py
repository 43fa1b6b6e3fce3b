"""The kernel that ``pytest-gemm judge`` is given: how it is found and called, and the backend that is made of it.

All that needs the user's code happens in the worker: a :class:`Kernel` loads its function when it is first called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import numpy as np
import torch
from torch.utils import dlpack

from pytest_gemm.api.callable import CallableBackend, CallablePrepared
from pytest_gemm.api.request import DEFAULT, BuildRequest
from pytest_gemm.core.outcome import Phase, Unsupported
from pytest_gemm.core.text import described, did_you_mean
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands import views
from pytest_gemm.problem.problem import Problem
from pytest_gemm.speed import bench
from pytest_gemm.tools import autotuned, c_function
from pytest_gemm.worker import faults
from pytest_gemm.worker.inline import wait_for

if TYPE_CHECKING:
    from pytest_gemm.operands.tensors import Operands

begin = functools.cache(functools.partial(bench.begin, None))
"""Prepare the process of a kernel for a device, once."""

# What kernels for GPUs import and PyTorch alone does not.
_OF_GPUS: Final = {"triton", "cupy"}
REFUSALS: Final = (ValueError, TypeError, NotImplementedError, AssertionError)
"""What a function raises for what it does not take."""
# What an integer result holds before a call.
_GARBAGE: Final = 0x5A5A5A
# Bytes of a workspace.
_WORKSPACE: Final = 64 << 20


@dataclasses.dataclass(frozen=True)
class Form:
    """What a kernel takes.

    Attributes:
        roles: its arguments in order, of ``a``, ``b``, ``bias``, ``out``, ``workspace``, ``m``, ``n``, ``k``, ``alpha``
            and ``beta``.
        keywords: names of the last of them, which are passed by name.
        weight: B is (N, K), as ``torch.nn.Linear`` keeps it.
        arrays: arguments and result are arrays of NumPy.
        columns: A is (K, M).
        c: what ``out`` holds before: ``nan``, ``zeros``, ``ones``, or the ``addend`` that the product is added to.
    """

    roles: tuple[str, ...] = ("a", "b")
    keywords: tuple[str, ...] = ()
    weight: bool = False
    arrays: bool = False
    columns: bool = False
    c: str = "nan"

    @property
    def op(self) -> str:
        """The op of two matrices that it computes."""
        return "addmm" if self.c == "addend" else "linear" if self.weight else "addmm" if "bias" in self.roles else "mm"

    @property
    def epilogue(self) -> str:
        """The steps of a problem line that it computes beside the product."""
        return "bias-mn" if self.c == "addend" else "bias" * ("bias" in self.roles)

    @property
    def layouts(self) -> tuple[str, ...]:
        """Layouts of its op, first the one in which its matrices are compact."""
        own = "nt"[self.columns] + "nt"[self.weight]
        others = [layout for layout in ("nn", "nt", "tn", "tt") if self.op != "linear" or layout[1] == "t"]
        return tuple(dict.fromkeys([own, *others]))

    def __str__(self) -> str:
        shapes = {"a": " of (K, M)" * self.columns, "b": " of (N, K)" * self.weight}
        shapes["out"] = " += a b" * (self.c == "addend")
        return f"({', '.join(role + shapes.get(role, '') for role in self.roles)})" + self.arrays * " of NumPy arrays"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A function by its name, called as a product of A and B.

    Attributes:
        name: ``FILE.py:FUNCTION``, ``MODULE:FUNCTION`` or ``LIBRARY.so:SYMBOL``.
        form: what it takes.
        signature: in C, of a symbol; "" for the usual one.
        function: the function itself, which is then not looked for.
    """

    name: str
    form: Form = Form()
    signature: str = ""
    function: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        """Its name in a proof of what was called is the function's."""
        object.__setattr__(self, "__qualname__", self.short)

    @property
    def short(self) -> str:
        """The function's own name."""
        return self.name.rpartition(":")[2]

    @property
    def is_for_gpus(self) -> bool:
        """Whether its file names CUDA or Triton, or has imported Triton: it may return anything for tensors of the CPU.

        In a process that has loaded the kernel; elsewhere its file alone is looked at.
        """
        return self._names("cuda|triton") or not _OF_GPUS.isdisjoint(sys.modules)

    @property
    def may_compile(self) -> bool:
        """Whether a first call may take long: its file names a compiler or imports another one, or is not looked at."""
        is_seen = Path(self.name.rpartition(":")[0]).suffix in {".py", ".so"}
        others = r"^\s*(from|import)\s+(?!(torch|numpy|math|typing|__future__)\b)"
        return not is_seen or self._names(f"cuda|triton|compile|jit|process|{others}")

    def _names(self, pattern: str) -> bool:
        path = Path(self.name.rpartition(":")[0])
        return path.suffix == ".py" and re.search(pattern, path.read_text(errors="replace"), re.I | re.M) is not None

    @functools.cached_property  # looked at once, not in each timed call
    def loaded(self) -> Callable[..., Any]:
        """The function, which the kernel's own process alone asks for: another one may not be sent it.

        Raises:
            AttributeError: where there is none of this name.
            Exception: whatever the import of its file raises.
        """
        if self.is_foreign:
            return c_function.of_library(*self.name.rsplit(":", 1), self.signature, self.form)
        return _function_of(self.function or _loaded(self.name))

    @property
    def assumed(self) -> str:
        """The prototype of a symbol, or the part of it, that its user has not given."""
        return c_function.read(self.signature).assumed if self.is_foreign else ""

    @property
    def is_told_of_b(self) -> bool:
        """Whether it is a function of C whose prototype has a parameter that transposes B."""
        return self.is_foreign and any(one.role == "tb" for one in c_function.read(self.signature).parameters)

    @property
    def calls_cuda(self) -> bool:
        """Whether a library starts work on a GPU: its pointers may be of either memory."""
        where = self.name.rpartition(":")[0]
        return self.is_foreign and re.search(rb"\.nv_fatbin|libcu(dart|blas)", Path(where).read_bytes()) is not None

    @property
    def is_foreign(self) -> bool:
        """Whether it is a function of C."""
        return self.function is None and re.search(r"\.(so(\.\d+)*|dylib):", self.name) is not None

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> Any:
        """The product of (..., M, K) and (..., K, N), and what the function adds to it; in ``out``, if it is given."""
        form, function = self.form, self.loaded
        values: dict[str, Any] = {"alpha": 1.0, "beta": float(form.c == "addend"), "bias": bias}
        values |= {"m": a.shape[-2], "n": b.shape[-1], "k": a.shape[-1]}
        values |= {"a": a.mT if form.columns else a, "b": b.mT if form.weight else b}
        if "out" in form.roles:
            out = values["out"] = self.before(a, b) if out is None else out
            if form.c == "addend":
                assert bias is not None
                out.copy_(bias)
        if "workspace" in form.roles:
            values["workspace"] = _workspace(a.device)
        arguments = [values[role] for role in form.roles]
        if form.arrays:
            arguments = [x.numpy() if isinstance(x, torch.Tensor) else x for x in arguments]
        count = len(arguments) - len(form.keywords)
        named = dict(zip(form.keywords, arguments[count:], strict=True))
        returned = autotuned.call(function, *arguments[:count], **named)
        if out is None:
            return _as_tensor(returned)
        if returned is not None and returned is not arguments[form.roles.index("out")]:
            raise TypeError("it returned something, so that none of its arguments is a result to be written to")
        return out

    def before(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """A result (..., M, N) to be written to, with what it holds before."""
        dtype = getattr(self.loaded, "out_dtype", a.dtype if a.is_floating_point() else torch.int32)
        garbage = math.nan if dtype.is_floating_point else _GARBAGE
        value = {"zeros": 0.0, "ones": 1.0}.get(self.form.c, garbage)
        return torch.full((*a.shape[:-1], b.shape[-1]), value, dtype=dtype, device=a.device)


@functools.cache
def _loaded(name: str) -> Callable[..., Any]:
    where, _, function = name.rpartition(":")
    path = Path(where).absolute()
    sys.path.insert(0, str(path.parent) if path.suffix == ".py" else "")
    # A library of the same name, which may lie beside a file, would be imported in its place.
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.suffix == ".py" else None
    value: Any = importlib.util.module_from_spec(spec) if spec else importlib.import_module(where)
    if spec and spec.loader:
        sys.modules[path.stem] = value
        spec.loader.exec_module(value)
    for part in function.split("."):
        if not hasattr(value, part):
            raise AttributeError(f"{where} has no function {function!r}{did_you_mean(part, dir(value))}")
        value = getattr(value, part)
    if not callable(value):
        raise TypeError(f"{function} is {type(value).__name__}, no function")
    return value  # type: ignore[no-any-return]  # whether it is one shows when it is called


@functools.cache
def _object(factory: Callable[[], Any]) -> Any:
    try:
        return factory()
    except TypeError as error:
        remedy = "give a function without arguments that makes it"
        raise TypeError(f"{getattr(factory, '__name__', factory)} takes arguments: {remedy} ({error})") from error


def _function_of(thing: Any) -> Callable[..., Any]:
    """A function as it is; of a class an object, and of a function without parameters what it returns, made once."""
    is_factory = isinstance(thing, type)
    if is_factory and issubclass(thing, torch.autograd.Function):
        return thing.apply  # type: ignore[no-any-return]  # PyTorch does not say of which type it is
    with contextlib.suppress(ValueError, TypeError):  # of a builtin
        is_factory |= not inspect.signature(thing).parameters
    value = _object(thing) if is_factory else thing
    function = value if callable(value) else getattr(value, "forward", None)
    if function is None:
        name = getattr(thing, "__name__", thing)
        raise TypeError(f"{name}() returned {type(value).__name__}, and a kernel is a function of A and B")
    return function  # type: ignore[no-any-return]  # whether it is one shows when it is called


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    """Memory of zeros that a kernel may write to, the same in each call."""
    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)


def _as_tensor(returned: Any) -> Any:
    """What was returned as a tensor: an array in its memory, the only array of several things; else as it is."""
    arrays = [x for x in returned if hasattr(x, "__dlpack__")] if isinstance(returned, (tuple, list)) else [returned]
    value = arrays[0] if len(arrays) == 1 else returned
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    is_foreign = hasattr(value, "__dlpack__") and not isinstance(value, torch.Tensor)
    return dlpack.from_dlpack(value) if is_foreign else value


def check_name(name: str) -> None:
    """Look at what names a kernel.

    Raises:
        ValueError: for a source of another language, a file that is not there, and no name of a function.
    """
    where, _, function = name.rpartition(":")
    path = Path(where.rstrip(":"))
    if where != str(path) and path.suffix == ".py":
        raise ValueError(f"{name}: did you mean {path}:{function}?")
    if not where or not function:
        raise ValueError(f"{name!r} names no function: give FILE.py:FUNCTION, MODULE:FUNCTION or LIB.so:SYMBOL")
    if compiler := c_function.COMPILERS.get(path.suffix):
        library = path.with_suffix(".so").name
        raise ValueError(f"{path} is a source: judge {library}:{function} after {compiler} {path} -o {library}")
    if path.suffix in {".py", ".so"} and not path.is_file():
        raise ValueError(f"{where}: there is no such file")


# -- the backend -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class KernelBackend(CallableBackend):
    """A :class:`Kernel` as a backend of just those problems that have its form, on one device.

    What adds a bias may round before it or not, and a function may call cuBLAS.
    """

    refuses_when_called: ClassVar[bool] = False  # ``prepare`` has called it
    epilogue: Literal["fused", "eager", "either"] = "either"
    library: bool = True

    def bind(  # type: ignore[misc]  # in place of a field
        self, problem: Problem, tensors: Mapping[str, Any]
    ) -> Callable[[], Any] | None:
        """A kernel that takes a bias computes every problem, and one that is given its result what is no more."""
        kernel: Any = self.matmul
        is_plain, out = not problem.epilogue and not problem.flags and "out" in kernel.form.roles, tensors.get("out")
        if not kernel.form.epilogue and not is_plain and (out is None or "out" not in kernel.form.roles):
            return None
        # What the program of the problem makes of its arguments, as views.
        a = views.cut(problem, "a", tensors["a"])
        b = a if problem.has("b.alias") else a.mT if problem.b_is_a else views.cut(problem, "b", tensors["b"])
        b = b.mT if problem.op.weight and not problem.b_is_a else b
        # A timed call writes to the memory of the call before, as a user's does.
        return functools.partial(kernel, a, b, tensors.get("bias"), kernel.before(a, b) if is_plain else out)

    def contract(self, problem: Problem, *, own: bool = False) -> Contract:
        """The arithmetic of a problem; sums in a half type are those of products of this type."""
        contract = super().contract(problem, own=own)
        is_narrow = self.accumulate in {"f16", "bf16"} and self.accumulate != problem.dtypes.a.name
        return dataclasses.replace(contract, accumulate="f32") if is_narrow else contract

    def supports(self, problem: Problem, request: BuildRequest = DEFAULT) -> None:
        """What it refuses shows when it is called."""

    def prepare(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> CallablePrepared:
        """Call it once.

        Raises:
            Unsupported: where it raises what a function raises for arguments that it does not take.
            Exception: whatever else it raises.
        """
        autotuned.begin(problem)
        begin(operands.device.value)  # in a process after one that a kernel has ended
        try:
            prepared = super().prepare(problem, operands, request)
            prepared.bind(operands)()
            wait_for(operands.device)  # for the error of a launch
            prepared.records = True  # a function may call ATen's product
        except Exception as error:
            no_memory = faults.out_of_memory(error, Phase.PREPARE, operands.device)
            of_torch = type(error) is RuntimeError and no_memory is None and "CUDA" not in str(error)
            if isinstance(error, REFUSALS) or of_torch:
                raise Unsupported("refused", described(error)) from None
            raise
        return prepared
