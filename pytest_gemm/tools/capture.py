"""What a model executes, as a graph: a node for each operator and tensor, with the places of the tensor in memory.

The model runs with its own values, so routing by data goes where it goes.  Operators that consist of others are seen as
those: a linear is a transposed view and ``addmm``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

# Operators that keep a constant one, beside views and those with the tag of a pointwise one.
_MOVES: Final = frozenset({"_to_copy", "_unsafe_view", "cat"})


class Places(NamedTuple):
    """Shape, strides and offset of a tensor, in elements, and its dtype."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype


def places(node: Any) -> Places:
    """Where the tensor of a node lies, an argument of another one for instance."""
    found = node.meta["places"]
    assert isinstance(found, Places)
    return found


def name_of(node: Node) -> str:
    """The name of an operator without namespace and overload: ``addmm``."""
    return str(node.target).partition(".")[2].partition(".")[0]


def is_view(node: Node) -> bool:
    """Whether an operator only gives its input another shape or other strides."""
    return getattr(node.target, "is_view", False) or name_of(node) == "_unsafe_view"


def root(node: Node) -> Node:
    """What a tensor is a view of; itself where it is none."""
    return root(node.all_input_nodes[0]) if is_view(node) else node


def is_constant(node: Node) -> bool:
    """Whether a tensor is a weight that nothing writes, or is made of weights in a way that a compiler folds."""
    if node.op == "get_attr":
        return "written" not in node.meta
    moves = is_view(node) or name_of(node) in _MOVES or torch.Tag.pointwise in getattr(node.target, "tags", ())
    return moves and bool(node.all_input_nodes) and all(map(is_constant, node.all_input_nodes))


class Capture(TorchDispatchMode):
    """Notes operators in :attr:`graph`: arguments of the model are placeholders, its other tensors attributes."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.graph = Graph()
        self._nodes: Any = WeakIdKeyDictionary()

    def run(self, function: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Call a function without gradients.

        What it has compiled runs eagerly.  While there is a mode for functions, no module calls an operator that is a
        whole layer of a transformer.
        """
        self._noted((args, kwargs), "placeholder")
        with BaseTorchFunctionMode(), torch.compiler.set_stance("force_eager"), torch.no_grad(), self:
            made = function(*args, **kwargs)
        self.graph.create_node("output", "output", (self._noted(tree_leaves(made)),))

    def _noted(self, values: Any, op: str = "get_attr") -> Any:
        """The values with a node for each tensor, one of ``op`` for a new one."""
        return tree_map_only(torch.Tensor, partial(self._node, op), values)

    def _node(self, op: str, x: torch.Tensor) -> Node:
        return self._nodes[x] if x in self._nodes else self._keep(x, self.graph.create_node(op, "tensor"))

    def _keep(self, x: torch.Tensor, node: Node) -> Node:
        is_strided = x.layout is torch.strided
        strides, offset = (x.stride(), int(x.storage_offset())) if is_strided else ((0,) * x.dim(), 0)
        node.meta["places"] = Places(tuple(x.shape), strides, offset, x.dtype)
        self._nodes[x] = node
        return node

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note an operator on plain tensors.  One on a subclass, a quantised weight for instance, calls others."""
        if not {*types} <= {torch.Tensor, torch.nn.Parameter}:
            return NotImplemented
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload):
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        node = self.graph.create_node("call_function", func, *self._noted((args, kwargs)))
        made = func(*args, **kwargs)
        for place, x in enumerate(tree_leaves(made)):
            if isinstance(x, torch.Tensor):
                if x in self._nodes:  # an operator in place
                    root(self._nodes[x]).meta["written"] = True
                self._keep(x, node if x is made else self.graph.create_node("call_method", "part", (node, place)))
        return made
