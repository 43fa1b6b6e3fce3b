"""The kernel that ``pytest-gemm judge`` is given: how it is found and called, and the backend that is made of it.

All that needs the user's code happens in the worker: a :class:`Kernel` loads its function when it is first called.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from pytest_gemm.api.callable import CallableBackend, CallablePrepared
from pytest_gemm.api.request import DEFAULT, BuildRequest
from pytest_gemm.core.outcome import Phase, Unsupported
from pytest_gemm.core.text import described
from pytest_gemm.problem.problem import Problem
from pytest_gemm.speed import bench
from pytest_gemm.tools import c_function
from pytest_gemm.tools.c_function import SIGNATURE
from pytest_gemm.worker import faults

if TYPE_CHECKING:
    from pytest_gemm.operands.tensors import Operands

begin = functools.cache(functools.partial(bench.begin, None))
"""Prepare the process of a kernel for a device, once."""

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
        return c_function.of_library(where, function, signature)
    folder, module = "", where
    if where.endswith(".py"):
        folder, module = str(Path(where).absolute().parent), Path(where).stem
        sys.modules.pop(module, None)  # another one of this name
    sys.path.insert(0, folder)
    found: Any = functools.reduce(getattr, function.split("."), importlib.import_module(module))
    if not callable(found):
        raise TypeError(f"{function} is {type(found).__name__}, no function")
    return found  # type: ignore[no-any-return]  # whether it is one shows when it is called


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
        begin(operands.device.value)  # in a process after one that a kernel has ended
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
