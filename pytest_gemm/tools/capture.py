"""What a model executes: its operators in order, and who reads each tensor.

The model runs once, with its own values, so that routing by data takes the way that it takes.  Operators that are made
of others are seen as those: a linear is a transposed view and ``addmm``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

# What PyTorch can count given shapes alone.
_COUNTED: Final = re.compile(r"aten\.(?!_flash|_efficient).*")
_FLOPS: Final[Mapping[str, Any]] = {str(op): f for op, f in flop_registry.items() if _COUNTED.match(str(op))}
# Operators without the tag of a pointwise one that keep a constant one.
_MOVES: Final = frozenset({"_to_copy", "_unsafe_view", "cat"})


@dataclasses.dataclass(eq=False)
class Value:
    """A tensor as an operator has met it.

    Attributes:
        shape, strides, offset: in elements.
        dtype: its element type.
        maker: the operator that made it; ``None`` where it was there before.
        given: whether it is an argument of the model.
        written: whether an operator has changed it, or a view of it.
        readers: the operators that read it, ``None`` for the caller of the model.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    maker: Call | None = None
    given: bool = False
    written: bool = False
    readers: list[Call | None] = dataclasses.field(default_factory=list)

    @property
    def root(self) -> Value:
        """What it is a view of, itself where it is none."""
        return self.maker.inputs[0].root if self.maker is not None and self.maker.is_view else self

    @property
    def is_constant(self) -> bool:
        """Whether it is a weight, or pointwise of weights alone."""
        if self.maker is None:
            return not (self.given or self.written)
        return self.maker.keeps_constants and all(one.is_constant for one in self.maker.inputs)


@dataclasses.dataclass(eq=False)
class Call:
    """An operator that was executed.

    Attributes:
        index: its place among all.
        func: the operator, or one of higher order.
        args, kwargs: with a :class:`Value` in the place of each tensor.
        made: its results.
    """

    index: int
    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    made: list[Value] = dataclasses.field(default_factory=list)

    @property
    def inputs(self) -> list[Value]:
        """The tensors that it takes."""
        return [one for one in tree_leaves((self.args, self.kwargs)) if isinstance(one, Value)]

    @property
    def named(self) -> dict[str, Any]:
        """The arguments of an ATen operator by their names in its schema."""
        return dict(zip((one.name for one in self.func._schema.arguments), self.args, strict=False)) | dict(self.kwargs)

    @property
    def name(self) -> str:
        """Without namespace and overload: ``addmm``."""
        return str(self.func).split(".", 1)[-1].partition(".")[0]

    @property
    def flops(self) -> int | None:
        """Operations of its products, ``None`` where PyTorch does not count them."""
        count = _FLOPS.get(str(self.func).rpartition(".")[0].removesuffix("_for_cpu"))
        shapes = tree_map_only(Value, lambda x: x.shape, (self.args, self.kwargs, self.made))
        return None if count is None else int(count(*shapes[0], **shapes[1], out_val=shapes[2]))

    @property
    def is_view(self) -> bool:
        """Whether its result shares the memory of its first tensor, or is the same in another shape."""
        return getattr(self.func, "is_view", False) or self.name == "_unsafe_view"

    @property
    def keeps_constants(self) -> bool:
        """Whether a compiler makes a constant of its result where all inputs are constants."""
        moves = self.is_view or self.name in _MOVES
        return bool(self.inputs) and (moves or torch.Tag.pointwise in getattr(self.func, "tags", ()))


class Capture(TorchDispatchMode):
    """Keeps a :class:`Call` for each operator; ``calls`` has them in order."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.calls: list[Call] = []
        self._values: Any = WeakIdKeyDictionary()

    def run(self, function: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Call ``function`` as it would be in eager mode, without gradients."""
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._value(tensor).given = True
        with _in_single_operators(), torch.no_grad(), self:
            made = function(*args, **kwargs)
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._value(tensor).readers.append(None)

    def _value(self, x: torch.Tensor, maker: Call | None = None) -> Value:
        if maker is not None or x not in self._values:
            known = x.layout is torch.strided
            places = (x.stride(), int(x.storage_offset())) if known else ((), 0)
            self._values[x] = Value(tuple(x.shape), *places, x.dtype, maker)
        found: Value = self._values[x]
        return found

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Note an operator on plain tensors; one on a subclass, of a quantised weight for instance, is made of others."""
        if any(kind not in {torch.Tensor, torch.nn.Parameter} for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload):
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        call = Call(len(self.calls), func, *tree_map_only(torch.Tensor, self._value, (args, dict(kwargs))))
        self.calls.append(call)
        for value in call.inputs:
            value.readers.append(call)
        made = func(*args, **kwargs)
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                if tensor in self._values:  # an operator in place, or out=
                    self._values[tensor].root.written = True
                call.made.append(self._value(tensor, call))
        return made


@contextlib.contextmanager
def _in_single_operators() -> Iterator[None]:
    """Nothing is compiled, and no module calls an operator that is a whole layer of a transformer."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
