"""Which matrix products the ATen dispatcher executed: the third and independent kind of evidence.

A generated kernel never goes through the dispatcher, so a product seen here was computed by another library:
by ATen, oneDNN or MKL.  For eager code it is simply the list of what ran.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from pytest_gemm.storage.datafile import document

# Base names of operators that multiply matrices.
PRODUCTS = frozenset(document(Path(__file__).with_name("products.toml"))["products"])

# How the wrapper that Inductor writes calls another library's kernel, e.g. "extern_kernels.mm(" or
# "torch.ops.mkldnn._linear_pointwise.default(".
_EXTERNAL = re.compile(r"\b(?:extern_kernels|torch\.ops\.\w+|aten|_quantized)\.(\w+)(?:\.\w+)?\(")


# How torch._native names the operator behind an override of ATen's: that one's name, the language, a number.
_NATIVE = re.compile(rf"(?:{'|'.join(PRODUCTS)})(?:_\w+)?_[a-z]+_\d+")


def is_product(name: str) -> bool:
    """Whether ``aten.addmm.out``, ``mkl._mkl_linear``, ``_native.bmm_triton_0`` or ``mm`` names a matrix product."""
    parts = name.replace("::", ".").split(".")
    base = parts[1] if len(parts) > 1 else parts[0]
    return base in PRODUCTS or (parts[0] == "_native" and _NATIVE.fullmatch(base) is not None)


def products_in_source(source: str) -> tuple[str, ...]:
    """Matrix products of other libraries that a generated wrapper calls, by its text."""
    called = (m[0].rstrip("(") for m in _EXTERNAL.finditer(source))
    return tuple(name for name in called if is_product(name.removeprefix("torch.ops.")))


class _Recorder(TorchDispatchMode):
    """Notes every operator that is asked for and lets it through."""

    def __init__(self, seen: list[str], asked: Callable[[str], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.seen, self.asked = seen, asked

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs as compiled under this mode, instead of falling back to eager."""
        return True

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],  # an OpOverload, whose type torch does not export
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = str(func)
        if self.asked(name):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def record_products(asked: Callable[[str], bool] = is_product) -> Iterator[list[str]]:
    """Record the matrix products that the dispatcher executes inside the block, in order, or other operators by name.

    Example::

        with record_products() as seen:
            torch.nn.functional.linear(x, w)
        assert seen == ["aten.mm.default"]

    Yields:
        the list that fills up: qualified operator names such as ``aten.mm.default``.
    """
    seen: list[str] = []
    with _Recorder(seen, asked):
        yield seen
