"""Where a generated Triton template rounds its sum before a later step, read in the template's own text.

From torch 2.13 on a template rounds the sum to the output's type before the first step that was fused into it, so that
the result is that of separate kernels; before, it rounded once at its end.  A contract states which, see
:attr:`Contract.rounds_at`.  The text decides, not the version: it is what Triton compiles.

    tmp0 = tl.load(in_ptr0 + ...).to(tl.float32)    an operand
    tmp1 = acc + tmp0                               a sum that contains one operand
    tmp2 = tmp1.to(tl.bfloat16)                     narrowed
    tmp3 = tmp2.to(tl.float32)                      and computed with: a rounding, behind one operand
    tmp4 = triton_helpers.maximum(0, tmp3)          a step
"""

from __future__ import annotations

import ast
import dataclasses
import re
from typing import Final, NamedTuple

from pytest_gemm.backends.inductor import generated_code
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.problem.problem import Problem

_NARROW: Final = {"float16": "f16", "bfloat16": "bf16"}


class UnreadableError(Exception):
    """A template whose sum cannot be followed from the products to a store."""


class Rounding(NamedTuple):
    """One rounding of a template's sum whose result is computed with.

    Attributes:
        dtype: to which, ``f16`` or ``bf16``.
        operands: how many tensors had been added to the sum or multiplied with it.
        is_sum: nothing but sums and products came before it.
    """

    dtype: str
    operands: int
    is_sum: bool


def placed(contract: Contract, problem: Problem, source: str) -> Contract:
    """A fused contract, with the place where the templates of a program round.

    Args:
        contract: one that rounds once, at its end.
        problem: what the program computes.
        source: text of the program.

    Returns:
        the contract itself where no template rounds before; ``epilogue="either"``, which has the rounded and the
        unrounded value at every step, where a text cannot be read or its rounding has no place among the steps.
    """
    texts, either = generated_code.triton_templates(source), dataclasses.replace(contract, epilogue="either")
    if not texts and generated_code.TRITON_TEMPLATE in source:
        return either  # a program in C++, which has its kernels as machine code
    try:
        found = {one for text in texts for one in roundings(text)}
    except UnreadableError:
        return either
    if not found:
        return contract
    own = problem.adds_bias + 2 * bool(problem.op.scales)  # the scales of A and of B
    first = problem.passes[0].name
    # A first step that adds a tensor may have become the addend of an addmm.
    places = {own: 0, **({own + 1: 1} if first in {"bias", "add"} else {})}
    rounding = found.pop()
    if found or not rounding.is_sum or rounding.dtype != problem.dtypes.out.name or rounding.operands not in places:
        return either
    return dataclasses.replace(contract, rounds_at=places[rounding.operands])


def roundings(text: str) -> tuple[Rounding, ...]:
    """The roundings of a template's sum, in their order.

    Args:
        text: of the kernel, as Inductor hands it to Triton.

    Raises:
        UnreadableError: when it is not Python, or stores nothing that the reader knows to be the sum.
    """
    reader = _Reader()
    try:
        reader.visit(ast.parse(text))
    except SyntaxError as error:
        raise UnreadableError(str(error)) from error
    if not reader.has_stored:
        raise UnreadableError("no store of the sum")
    return tuple(reader.found)


@dataclasses.dataclass(frozen=True)
class _Value:
    """A value of the kernel.

    Attributes:
        product: the sum of products is part of it.
        operands: how many other tensors are.
        is_sum: it consists of sums and products alone.
        narrow: the type to which it was converted, "" for f32.
    """

    product: bool = False
    operands: int = 0
    is_sum: bool = True
    narrow: str = ""


class _Reader(ast.NodeVisitor):
    """Follows the sum through the assignments of a kernel, branches and loops in the order of the text."""

    def __init__(self) -> None:
        self.found: list[Rounding] = []
        self.has_stored = False
        self._values: dict[str, _Value] = {}
        self._products = r"tl\.dot(_scaled)?"

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Note a helper function that multiplies: its calls are products."""
        if any(_calls(part, self._products) for part in ast.walk(node)):
            self._products += f"|{node.name}"
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        """Note a store of the sum; a conversion for it is none that anything computes with."""
        match node.value:
            case ast.Call(func=ast.Attribute(attr="store"), args=[_, value, *_]):
                self.has_stored |= self._value(value).product

    def visit_Assign(self, node: ast.Assign) -> None:
        """Note what the name holds from here on; a new value forgets the old one."""
        match node.targets:
            case [ast.Name(id=name)]:
                self._values[name] = self._value(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """The same for ``acc += ...``."""
        if isinstance(node.target, ast.Name):
            before = ast.Name(node.target.id, ast.Load())
            self._values[node.target.id] = self._value(ast.BinOp(before, node.op, node.value))

    def _value(self, node: ast.expr) -> _Value:
        if any(_calls(part, self._products) for part in ast.walk(node)):
            return _Value(product=True)
        match node:
            case ast.Name(id=name):
                return self._values.get(name, _Value())
            case ast.Call(func=ast.Attribute(value=inner, attr="to"), args=[kind, *_]):
                value = self._value(inner)
                narrow = _NARROW.get(ast.unparse(kind).removeprefix("tl."), "")
                return dataclasses.replace(value if narrow else self._used(value), narrow=narrow)
            case ast.Call(args=[inner, *_]) if _calls(node, r"tl\.broadcast_to"):
                return self._value(inner)
            case ast.Call() if _calls(node, r"tl\.load|tl\.load_tensor_descriptor|\w+\.load"):
                return _Value(operands=1)
            case ast.BinOp(left=left, op=op, right=right):
                return self._combined(op, self._used(self._value(left)), self._used(self._value(right)))
        parts = [self._used(self._value(part)) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        product, operands = any(part.product for part in parts), sum(part.operands for part in parts)
        return _Value(product, operands, is_sum=not product and not operands)  # a constant is a part of a sum

    def _used(self, value: _Value) -> _Value:
        """The value as something computes with it: here a conversion has become a rounding of the sum."""
        if value.narrow and value.product:
            self.found.append(Rounding(value.narrow, value.operands, value.is_sum))
        return dataclasses.replace(value, narrow="")

    @staticmethod
    def _combined(op: ast.operator, left: _Value, right: _Value) -> _Value:
        """A sum or a product; the square of the sum, and a quotient, belong to a step."""
        plain = isinstance(op, ast.Add | ast.Sub) or (isinstance(op, ast.Mult) and not (left.product and right.product))
        is_sum = plain and left.is_sum and right.is_sum
        return _Value(left.product or right.product, left.operands + right.operands, is_sum)


def _calls(node: ast.AST, pattern: str) -> bool:
    """Whether this is a call of such a function."""
    return isinstance(node, ast.Call) and re.fullmatch(pattern, ast.unparse(node.func)) is not None
