"""The reference: the product in float64, exact where that is possible."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import Tensor

from pytest_gemm.numerics.dynamic import RULES
from pytest_gemm.numerics.rounding import round_to
from pytest_gemm.operands import prologues
from pytest_gemm.operands.dtypes import torch_dtype
from pytest_gemm.problem.ops.grouped_mm import joined, pair
from pytest_gemm.problem.ops.quantised import of_blocks
from pytest_gemm.problem.problem import Problem

if TYPE_CHECKING:
    from pytest_gemm.operands.tensors import Operands


# Bound before any backend's code is there, which could replace the name in the module.
_matmul: Final = torch._C._VariableFunctions.matmul


@dataclasses.dataclass(frozen=True)
class Reference:
    """The product of a problem's operands in wider arithmetic, before alpha, bias, scales and epilogue.

    Attributes:
        c: A @ B, float64, of the problem's result shape; integers exactly.  NaN and Inf as IEEE arithmetic gives
            them in any order of summation.  Of a grouped product: those of all groups.  Of
            ``linears``: (G, M, N), one product after the other.
        own_theta: factor of G that bounds the error of ``c`` itself.
        slack: a further absolute bound of it, float64, of c's shape; ``None`` for none.
    """

    c: Tensor
    own_theta: float
    slack: Tensor | None
    _a: Tensor
    _b: Tensor
    _multiply: Callable[[Tensor, Tensor], Tensor]

    @functools.cached_property
    def big(self) -> Tensor:
        """G = |A| @ |B|, the hard gauge, float64, of c's shape."""
        return self._multiply(widened(self._a).abs_(), widened(self._b).abs_())

    @functools.cached_property
    def big_of_finite(self) -> Tensor:
        """The hard gauge without what is infinite in A and B."""
        a, b = (torch.where(x.isfinite(), x, 0.0).abs_() for x in map(widened, (self._a, self._b)))
        return self._multiply(a, b)

    @functools.cached_property
    def sides(self) -> Tensor:
        """The sum of |a_ik| + |b_kj| over k, which an error of 1 in each element makes; float64, of c's shape."""
        a, b = (widened(x).abs_() for x in (self._a, self._b))
        return self._multiply(a, torch.ones_like(b)) + self._multiply(torch.ones_like(a), b)

    @functools.cached_property
    def opposed(self) -> Tensor:
        """Where each product has a negative sign, that of a zero included; bool, of c's shape."""
        a, b = (x.signbit().to(torch.float64) for x in (widened(self._a), widened(self._b)))
        return (self._multiply(a, b) + self._multiply(1.0 - a, 1.0 - b)) == 0.0

    @functools.cached_property
    def small(self) -> Tensor:
        """g = sqrt((A*A) @ (B*B)), the statistical gauge, float64, of c's shape; computed on first use."""
        return self._multiply(widened(self._a).square_(), widened(self._b).square_()).sqrt_()

    def fits(self, bits: int) -> bool:
        """Whether no element of A and B needs more than ``bits`` significand bits."""

        def narrow(x: Tensor) -> bool:
            significand = torch.frexp(widened(x))[0] * 2.0**bits
            return torch.equal(significand, significand.round())

        return narrow(self._a) and narrow(self._b)

    @functools.cached_property
    def largest(self) -> float:
        """The largest finite G: what every partial sum in any order stays below.  0 for an empty output."""
        return largest_of(self.big)


def largest_of(x: Tensor) -> float:
    """The largest finite magnitude, 0 where there is none."""
    if not x.numel():
        return 0.0
    largest = float(x.abs().amax())
    if math.isfinite(largest):
        return largest
    finite = x[x.isfinite()]
    return float(finite.abs().amax()) if finite.numel() else 0.0


def widened(x: Tensor) -> Tensor:
    """A float64 copy on the CPU that may be written to; references are computed there."""
    return x.detach().to(device="cpu", dtype=torch.float64, copy=True)


def _by_group(a: Tensor, b: Tensor, groups: tuple[tuple[int, int], ...], idle: Tensor | None) -> Tensor:
    """a @ b, or with groups the product of each: of what is divided neither a nor b has a matrix for each group.

    Rows that no group owns are zero, whatever B holds.
    """
    if not groups:
        c = _matmul(a, b)
        return c if idle is None else torch.where(idle[..., None], 0.0, c)
    ragged = "k" if a.dim() == b.dim() else "m" if a.dim() == 2 else "n"
    pieces = [_matmul(*pair(ragged, a, b, index, *ends)) for index, ends in enumerate(groups)]
    if ragged == "m":
        pieces.append(a.new_zeros(a.shape[0] - groups[-1][1], b.shape[-1]))
    return cast("Tensor", joined(torch, ragged, pieces))


def _by_program(problem: Problem, a: Tensor, b: Tensor) -> Tensor:
    """What an op from outside makes of A and B."""
    return cast("Tensor", problem.op.around(torch, problem, {"a": a, "b": b.mT if problem.op.weight else b}, _matmul))


def _multiplying(problem: Problem, operands: Operands) -> Callable[[Tensor, Tensor], Tensor]:
    """What the op makes of two matrices of A's and B's shapes in float64."""
    if problem.op.outside:
        return functools.partial(_by_program, problem)
    return functools.partial(_by_group, groups=operands.groups, idle=operands.idle)


def as_multiplied(problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """A and B as the product multiplies them: after the prologues.

    Under autocast on the CPU, rounded once to the half type; A without its zero point, or as the op quantises it, and
    B's codes with their scales and zeros, both exact in float64.  Otherwise they are the
    operands themselves.
    """
    if operands.quantisation is not None or problem.op.coded:
        a = RULES[problem.a_rule](widened(operands.a)).middle if problem.a_rule else operands.a
        return a, operands.weight
    if operands.zero:
        return widened(operands.a) - operands.zero, operands.b
    a, b = operands.a, operands.b
    if problem.scale_blocks or problem.micro_block:
        assert operands.scale_a is not None
        assert operands.scale_b is not None
        given = {"a": a, "b": b, "scale_a": operands.scale_a, "scale_b": operands.scale_b}
        a, b = of_blocks(torch, problem, {name: x.detach().cpu() for name, x in given.items()}, torch.float64)
        return a, b
    if problem.autocast:
        half = problem.input_dtype
        dtype = torch_dtype(half)
        # Rounded already: the conversion to the half type changes nothing.
        a, b = round_to(widened(a), half).to(dtype), round_to(widened(b), half).to(dtype)
    return prologues.after(problem, "a", a), prologues.after(problem, "b", b)


def as_added(problem: Problem, operands: Operands) -> Tensor | None:
    """The bias operand in float64, under autocast rounded to the half type, of codes what they mean; or ``None``."""
    if operands.bias is None:
        return None
    wide = widened(operands.bias)
    if problem.step("bias_codes"):
        assert operands.scale is not None
        return wide.mul_(operands.scale)
    return round_to(wide, problem.input_dtype) if problem.autocast else wide


def reference(problem: Problem, operands: Operands) -> Reference:
    """The product in arithmetic wide enough that its own error cannot decide a verdict.

    Products of two f32 (24 bits) or narrower numbers are exact in float64, so plain float64 leaves
    ``(K - 1) 2^-53 G``; integer operands give integers below 2^53, hence no error.  For f64 problems see
    :func:`_beyond_float64`.
    """
    given = as_multiplied(problem, operands)
    a, b = map(widened, given)
    multiply, slack = _multiplying(problem, operands), None
    if problem.dtypes.out.name == "f64":
        c, slack = _beyond_float64(a, b, multiply)
        return Reference(c, 0.0, slack, *given, multiply)
    if problem.a_rule:
        slack = _matmul(RULES[problem.a_rule](widened(operands.a)).spread, b.abs())
    elif operands.quantisation is not None:
        slack = _dequantised(a, b, operands)
    rounded = problem.dtypes.a.is_float or problem.dtypes.b.is_float
    # Codes times f32 have up to 33 bits, so that their products with f32 are rounded as well.
    own_theta = max(0, problem.terms - (not problem.op.coded)) * 2.0**-53 if rounded else 0.0
    found = Reference(multiply(a, b), own_theta, slack, *given, multiply)
    if problem.op.outside and bool((found.c.abs() > found.big * (1 + 2.0**-20)).any()):
        raise ValueError(f"op {problem.op.name}: around() subtracts products, or changes values; see adding-an-op.md")
    return found


def _dequantised(a: Tensor, w: Tensor, operands: Operands) -> Tensor:
    """What the products lose where ``w = (code - 8) scale + zero`` is computed in f32: ``u |A| @ (|w - zero| + |w|)``.

    The difference is exact and the product costs one rounding, which only f32 scales need, the sum another; with an FMA
    it is one of both.
    """
    assert operands.quantisation is not None
    zeros = widened(operands.quantisation)[:, None, :, 1]
    scaled = (w.unflatten(0, (-1, operands.problem.group_size)) - zeros).flatten(0, 1)
    return _matmul(a.abs(), scaled.abs_().add_(w.abs())) * 2.0**-24


def _beyond_float64(a: Tensor, b: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """A @ B for float64 operands with an error far below that of any float64 kernel, and a bound of that error.

    Each operand is cut once, as in the scheme of Ozaki, Ogita, Oishi and Rump (Numer. Algorithms 59, 2012):
    A = A1 + R with A1 the multiples of ``s_i 2^-w`` nearest to row i, B = B1 + S likewise by columns, and
    ``2 w + log2 K <= 52``.  Every sum of A1 @ B1 is then exact in float64.  The rest, A1 @ S + R @ B, is some
    2^-w smaller, and so is the rounding error ``K 2^-53`` of its plain float64 product.  At K = 8192 that is
    about 2^-18 of the kernel's bound ``K 2^-53 G``; the last additions cost 2 roundings.  Operands with an
    enormous range within a row make the returned bound larger, never wrong.
    """
    k = a.shape[-1]
    if k == 0 or 0 in a.shape or 0 in b.shape:
        c = multiply(a, b)
        return c, torch.zeros_like(c)
    width = (52 - math.ceil(math.log2(k))) // 2
    a1, a_scale = _cut(a, -1, width)
    b1, b_scale = _cut(b, -2, width)
    rest_a, rest_b = a - a1, b - b1
    c = multiply(a1, b1) + (multiply(a1, rest_b) + multiply(rest_a, b))
    # |R| <= s_i 2^-w / 2 and |S| likewise; sums of K terms, each with K roundings, twice.
    unit = 2.0 ** (-width - 1) * k * 2.0**-53
    slack = multiply(a_scale, b.abs().sum(-2, keepdim=True))
    slack = unit * (slack + multiply(a.abs().sum(-1, keepdim=True), b_scale))
    slack = slack + 2.0**-52 * c.abs() + k * 2.0**-1073
    # Inf and NaN cannot be cut: their rows and columns are NaN.  Plain float64 gives such elements the value that IEEE
    # arithmetic gives in any order.
    finite = c.isfinite()
    if not bool(finite.all()):
        c, slack = torch.where(finite, c, multiply(a, b)), torch.where(finite, slack, 0.0)
    return c, slack


def _cut(x: Tensor, dim: int, width: int) -> tuple[Tensor, Tensor]:
    """x to the nearest multiple of ``s 2^-width``, and s: the power of two above the largest along ``dim``."""
    largest = torch.where(x.isfinite(), x, 0.0).abs().amax(dim, keepdim=True)
    scale = torch.exp2(torch.frexp(largest)[1].to(torch.float64))
    # Adding 1.5 * 2^52 quanta makes the addition round to a multiple of the quantum.
    shift = scale * (1.5 * 2.0 ** (52 - width))
    return (x + shift) - shift, scale


def underflowed(problem: Problem, operands: Operands) -> Tensor:
    """Where a product of two numbers other than zero may be one in float64: the reference does not know its sign."""
    a, b = as_multiplied(problem, operands)
    return _multiplying(problem, operands)((a != 0.0).double(), (b != 0.0).double()) > 0.0


def addend_of(problem: Problem, operands: Operands, *, stored: bool = False) -> Tensor | None:
    """beta * bias where the op itself adds it, float64 and broadcastable; beta = 0 ignores it, NaN included.

    ``stored``: the bias as it is stored, without the rounding of autocast.
    """
    own = problem.op.addend or problem.op.own_bias
    if not own or operands.bias is None or problem.beta == 0.0:
        return None
    found = widened(operands.bias) if stored else as_added(problem, operands)
    assert found is not None
    return found.mul_(problem.beta)


def with_addend(problem: Problem, c: Tensor, scale: Tensor | None, addend: Tensor | None) -> Tensor:
    """alpha * c * scale + addend in float64."""
    value = c if problem.alpha == 1.0 else c * problem.alpha
    value = value if scale is None else value * scale
    return value if addend is None else value + addend


def grid(x: float) -> float:
    """The largest power of two of which x is a multiple; 1 for 0."""
    if x == 0.0:
        return 1.0
    numerator, denominator = abs(x).as_integer_ratio()
    return (numerator & -numerator) / denominator
