"""The kernel that ``pytest-gemm judge`` is given: how it is found and called, and the backend that is made of it.

All that needs the user's code happens in the worker: :func:`parameters` and :func:`first_call` are asked of it there,
and a :class:`Kernel` loads its function when it is first called.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from pytest_gemm.api.callable import CallableBackend, CallablePrepared
from pytest_gemm.api.request import DEFAULT, BuildRequest
from pytest_gemm.core.outcome import Phase, Unsupported
from pytest_gemm.core.text import described
from pytest_gemm.operands.dtypes import torch_dtype
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.problem import Problem
from pytest_gemm.speed import bench
from pytest_gemm.worker import faults

if TYPE_CHECKING:
    from pytest_gemm.operands.tensors import Operands

SIGNATURE: Final = "void f(int m, int n, int k, const float* a, const float* b, float* c)"
"""Of a function of a shared library, unless ``--signature`` gives another one."""

# Types of C that a pointer may point to.
_ELEMENTS: Final = {
    **{"float": "f32", "double": "f64", "_Float16": "f16", "uint16_t": "bf16", "int8_t": "i8", "int32_t": "i32"},
    "int": "i32",
}
_PARAMETER: Final = re.compile(r"(?:const\s+)?(\w+)\s*(\*?)\s*(?:const\s+|__restrict__\s+|restrict\s+)?(\w+)")
_MATRICES: Final = ("a", "b", "c", "bias")
_NUMBERS: Final = ("m", "n", "k", "lda", "ldb", "ldc", "alpha", "beta")
# Relative error of a result in a half type.
_NEARLY: Final = 0.01
# What a function raises for what it does not take.
_REFUSALS: Final = (ValueError, TypeError, NotImplementedError, AssertionError)


@dataclasses.dataclass(frozen=True)
class Form:
    """What a kernel takes.

    Attributes:
        roles: its positional arguments in order, of ``a``, ``b``, ``bias`` and ``out``.
        weight: B is (N, K), as ``torch.nn.Linear`` keeps it.
        arrays: arguments and result are arrays of NumPy.
    """

    roles: tuple[str, ...] = ("a", "b")
    weight: bool = False
    arrays: bool = False

    @property
    def op(self) -> str:
        """The op of two matrices that it computes."""
        return "linear" if self.weight else "addmm" if "bias" in self.roles else "mm"

    def __str__(self) -> str:
        b = "b of (N, K)" if self.weight else "b"
        return f"({', '.join(b if role == 'b' else role for role in self.roles)})" + self.arrays * " of NumPy arrays"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A function by its name, called as a product of A and B.

    Attributes:
        name: ``FILE.py:FUNCTION``, ``MODULE:FUNCTION`` or ``LIBRARY.so:SYMBOL``.
        form: what it takes.
        signature: in C, of a symbol.
        function: the function itself, which is then not looked for.
    """

    name: str
    form: Form = Form()
    signature: str = SIGNATURE
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
        """Whether its file names CUDA or Triton: such a kernel may return anything for tensors of the CPU."""
        return self._names("cuda|triton")

    @property
    def may_compile(self) -> bool:
        """Whether a first call may take long: its file names a compiler, or is not looked at."""
        is_seen = Path(self.name.rpartition(":")[0]).suffix in {".py", ".so"}
        return not is_seen or self._names("cuda|triton|compile|jit|process")

    def _names(self, pattern: str) -> bool:
        path = Path(self.name.rpartition(":")[0])
        return path.suffix == ".py" and re.search(pattern, path.read_text(errors="replace"), re.I) is not None

    def load(self) -> Callable[..., Any]:
        """The function.

        Raises:
            AttributeError: where there is none of this name.
            Exception: whatever the import of its file raises.
        """
        return self.function or _loaded(self.name, self.signature)

    def __call__(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, _: str | None = None) -> Any:
        """The product of (..., M, K) and (..., K, N), and what the function adds to it."""
        given = {"a": a, "b": b.mT if self.form.weight else b, "bias": bias}
        if "out" in self.form.roles:
            dtype = a.dtype if a.is_floating_point() else torch.int32
            given["out"] = torch.empty(*a.shape[:-1], b.shape[-1], dtype=dtype, device=a.device)
        arguments: list[Any] = [given[role] for role in self.form.roles]
        if self.form.arrays:
            arguments = [one.numpy() for one in arguments]
        found = self.load()(*arguments)
        if "out" in given:
            if found is not None and found is not arguments[-1]:
                raise TypeError("it returned something, so that its last argument is no result to be written to")
            return given["out"]
        return torch.from_numpy(found) if self.form.arrays else found


@functools.cache
def _loaded(name: str, signature: str) -> Callable[..., Any]:
    where, _, function = name.rpartition(":")
    if re.search(r"\.so(\.\d+)*$|\.dylib$", where):
        return _of_library(where, function, signature)
    folder, module = "", where
    if where.endswith(".py"):
        folder, module = str(Path(where).absolute().parent), Path(where).stem
        sys.modules.pop(module, None)  # another one of this name
    sys.path.insert(0, folder)
    found: Any = functools.reduce(getattr, function.split("."), importlib.import_module(module))
    if not callable(found):
        raise TypeError(f"{function} is {type(found).__name__}, no function")
    return found  # type: ignore[no-any-return]  # whether it is one shows when it is called


def _of_library(path: str, symbol: str, signature: str) -> Callable[..., Any]:
    """A function of tensors around one of C, on row-major matrices; what is strided is copied before."""
    parameters = c_parameters(signature)
    foreign = getattr(ctypes.CDLL(str(Path(path).absolute())), symbol)
    foreign.argtypes = [ctypes.c_void_p if name in _MATRICES else kind for name, kind in parameters.items()]
    foreign.restype = None if signature.lstrip().startswith("void") else ctypes.c_int
    dtypes = {name: torch_dtype(DTYPES[parameters[name]]) for name in _MATRICES if name in parameters}

    def call(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if (a.dim(), a.dtype, b.dtype) != (2, dtypes["a"], dtypes["b"]):
            raise TypeError(f"{symbol} takes matrices of {dtypes['a']} and {dtypes['b']}")
        (m, k), n = a.shape, b.shape[1]
        tensors = {"a": a.contiguous(), "b": b.contiguous(), "c": a.new_empty(m, n, dtype=dtypes["c"])}
        if bias is not None:
            tensors["bias"] = bias.contiguous()
        values = {"m": m, "n": n, "k": k, "lda": k, "ldb": n, "ldc": n, "alpha": 1, "beta": 0}
        values |= {name: one.data_ptr() for name, one in tensors.items()}
        if code := foreign(*(values[name] for name in parameters)):
            raise ValueError(f"{symbol} returned {code}")
        return tensors["c"]

    return call if "bias" in dtypes else lambda a, b: call(a, b)  # noqa: PLW0108  # whose parameters are asked for


def c_parameters(signature: str) -> dict[str, Any]:
    """The parameters of a C function by name: the dtype of a matrix, the ctypes type of a number.

    Raises:
        ValueError: for what cannot be handed over.
    """
    outline = re.fullmatch(r"\s*(?:void|int)\s+\w+\s*\((.*)\)\s*;?\s*", signature, re.DOTALL)
    found: dict[str, Any] = {}
    for text in map(str.strip, outline[1].split(",") if outline else []):
        parts = _PARAMETER.fullmatch(text)
        kind, star, name = parts.groups() if parts else ("", "", "")
        name = {"out": "c", "y": "c"}.get(name.lower(), name.lower())
        number = getattr(ctypes, f"c_{re.sub('(?<=[0-9])_t$', '', kind)}", None)  # ctypes names them as C does
        found[name] = _ELEMENTS.get(kind) if star else number
        if found[name] is None or name not in (_MATRICES if star else _NUMBERS):
            known = f"pointers {' '.join(_MATRICES)} to {', '.join(_ELEMENTS)}, and numbers {' '.join(_NUMBERS)}"
            raise ValueError(f"--signature={signature}: cannot hand over {text!r}; known are {known}")
    if not {"a", "b", "c"} <= found.keys():
        raise ValueError(f"--signature={signature}: give a function of C with pointers a, b and c, as {SIGNATURE!r}")
    return found


# -- asked of the worker -----------------------------------------------------------------------------------------

_begin = functools.cache(functools.partial(bench.begin, None))


def parameters(_: object, kernel: Kernel) -> list[str]:
    """Names of the positional parameters without a default, and of a bias with one; empty where they are unknown.

    Raises:
        TypeError: for a function that cannot be called by itself.
    """
    _begin.cache_clear()  # in the process of a user another kernel may have been judged
    _begin("cuda" if kernel.is_for_gpus and torch.cuda.is_available() else "cpu")
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
    _begin(device)
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


# -- the backend -------------------------------------------------------------------------------------------------


class KernelBackend(CallableBackend):
    """A :class:`Kernel` as a backend of just those problems that have its form, on one device.

    What adds a bias may round before it or not, and a function may call cuBLAS.
    """

    matmul: Kernel
    epilogue = "either"
    library = True

    def bind(self, problem: Problem, tensors: Mapping[str, Any]) -> Callable[[], Any] | None:
        """A kernel that takes a bias computes every problem."""
        if "bias" not in self.matmul.form.roles:
            return None
        b = tensors["b"].mT if problem.op.weight else tensors["b"]
        return functools.partial(self.matmul, tensors["a"], b, tensors.get("bias"))

    def supports(self, problem: Problem, request: BuildRequest = DEFAULT) -> None:
        """What it refuses shows when it is called."""

    def prepare(self, problem: Problem, operands: Operands, request: BuildRequest = DEFAULT) -> CallablePrepared:
        """Call it once.

        Raises:
            Unsupported: where it raises what a function raises for arguments that it does not take.
            Exception: whatever else it raises.
        """
        _begin(operands.device.value)  # in a process after one that a kernel has ended
        try:
            prepared = super().prepare(problem, operands, request)
            prepared.bind(operands)()
        except Exception as error:
            no_memory = faults.out_of_memory(error, Phase.PREPARE, operands.device)
            of_torch = type(error) is RuntimeError and no_memory is None and "CUDA" not in str(error)
            if isinstance(error, _REFUSALS) or of_torch:
                raise Unsupported("refused", described(error)) from None
            raise
        return prepared
