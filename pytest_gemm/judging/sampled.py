"""Large results judged by sample: some lines in full by the oracle, all elements by checks as cheap as reading them.

The reference of a product costs as much as the product, in float64.  Here it is computed for some rows (with all of
their columns) and some columns (with all of their rows): ends, edges of tiles, random ones.  Which further rows are
to be computed is found by two checks that look at every element:

* integers (exact distributions whose sums the output's type holds): Freivalds' check modulo 2^61 - 1;
* floats: ``C x`` against ``A (B x)`` with random signs x, whose difference has a derived bound.

These only raise suspicion.  Every verdict is the oracle's on complete lines, so that a check cannot reject a right
result.  Where the epilogue is not linear, or the operands have scales, only the lines stand;
:attr:`ResultVerdict.note` names which it was.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from pytest_gemm.core.outcome import Reason
from pytest_gemm.judging import lines as lines_module
from pytest_gemm.judging import locate, verdict
from pytest_gemm.judging.lines import Lines, LinesVerdict, generator, of_any_batch
from pytest_gemm.numerics import freivalds
from pytest_gemm.numerics import interval as interval_module
from pytest_gemm.numerics import product as product_module
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands.integers import is_large
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import StepKind

# Elements of a result up to which quick judges each.
_QUICK: Final = 1 << 21
# Rows that a check suspects and that are then judged in full.
_SUSPECTS: Final = 64
# Vectors of signs.  A single wrong element shows in each of them; several may cancel in one.
_VECTORS: Final = 4
# Elements whose magnitudes are compared at once.
_AT_ONCE: Final = 1 << 27
# Chance that rounding alone raises suspicion somewhere; it costs some lines, and no verdict.
_DOUBT: Final = 1e-9


def applies(problem: Problem, mode: str) -> bool:
    """Whether a result is judged by sample.

    Args:
        problem: what was computed.
        mode: ``full``, ``sampled``, or ``auto`` for large problems only; ``quick`` for results of more than
            2^21 elements, too.
    """
    op, is_batched = problem.op, problem.shape.batch is not None
    # Each row is one of a group, unless columns or K are divided, and flags of linears are about one of them.
    apart = (op.grouped and op.ragged != "m") or problem.has("groups.unowned") or problem.has("groups.masked")
    several = apart or (op.several and problem.flags) or (op.rounds_once and is_batched)
    scaled = problem.micro_block or problem.step("result")
    changed = scaled or problem.has("program.chained") or problem.prologues("ab") or problem.reduction is not None
    if several or changed or 0 in problem.result_shape or problem.shape.k == 0:
        return False  # nothing is large about nothing
    if mode == "quick" and math.prod(problem.result_shape) > _QUICK:
        return True
    return mode == "sampled" or (mode != "full" and is_large(problem))


@dataclasses.dataclass(frozen=True)
class ResultVerdict:
    """A result and what judged it.

    Attributes:
        comparison: the verdict; indices are those of the whole result.
        tier: of the oracle on the lines.
        doubt: why the lines could not tell right from wrong; ``None`` if they could.
        note: what was looked at, in words.
        operands, actual, interval: of the first bad lines, or of the first lines: a case of its own.
    """

    comparison: verdict.Comparison
    tier: str
    doubt: Reason | None
    note: str
    operands: Operands
    actual: object
    interval: interval_module.Interval


# -- all elements ----------------------------------------------------------------------------------------


def _matrices(x: Tensor, b: Tensor) -> Tensor:
    """A tensor of A's, B's or the result's shape, or one that is broadcast to it, as matrices that meet one B each."""
    return x if x.dim() == b.dim() == 3 else x.reshape(1, -1, x.shape[-1])


# What is added to the product: a tensor as the program adds it, with its sign.
_Term = tuple[Tensor, int]


def _terms(output: Problem, operands: Operands) -> list[_Term] | str:
    """What makes the result a sum of the product and operands; why it is none, in words."""
    if output.op.scales or operands.scale_b is not None:
        return "the sums are scaled"
    if output.op.several:
        return "there are several products"
    if output.autocast:
        return "the operands are rounded first"
    if output.alpha != 1.0 or output.beta not in (0.0, 1.0):
        return "alpha and beta scale the sums"
    if not operands.finite:
        return "there are infinities or NaN among the operands"
    found: list[_Term] = []
    residuals = iter(operands.residuals)
    own = output.op.addend or output.op.own_bias
    if own and operands.bias is not None and output.beta == 1.0:
        found.append((operands.bias, 1))
    for step in output.passes:
        if step.kind is StepKind.BIAS and operands.bias is not None:
            found.append((operands.bias, 1))
        elif step.name in {"add", "sub"}:
            found.append((next(residuals), 1 if step.name == "add" else -1))
        else:
            return f"{step} is not linear"
    return found


class Sample:
    """What is known of a problem and its operands for all backends: references of lines, and ``A (B x)``.

    Args:
        operands: of the problem.
    """

    def __init__(self, operands: Operands) -> None:
        self._operands = operands
        self._key = f"{operands.problem.line} {operands.distribution} {operands.seed}"

    @functools.cached_property
    def lines(self) -> tuple[Lines, ...]:
        """The lines that are judged whatever the result is."""
        return lines_module.chosen(self._operands, self._key)

    def judge(
        self, output: Problem, actual: object, contract: Contract, others: Mapping[str, Tensor] | None = None
    ) -> ResultVerdict:
        """The verdict on one result.

        Args:
            output: the problem that it answers, one of :attr:`Problem.outputs`.
            actual: what the backend returned.
            contract: the arithmetic that the backend promises.
            others: results of earlier calls, as in :func:`verdict.compare`.
        """
        first = self.lines[0]
        if (comparison := verdict.not_comparable(actual, output, self._operands)) is not None:
            interval = first.interval(output, contract)
            return ResultVerdict(comparison, interval.tier, None, "", self._operands, actual, interval)
        assert isinstance(actual, Tensor)
        verdicts = [lines.judge(output, actual, contract, others or {}) for lines in self.lines]
        tier = verdicts[0].interval.tier
        suspects, how = self._suspects(output, actual, contract, tier)
        if suspects is not None and bool(suspects.any()):
            for lines in lines_module.around(self._operands, suspects, _SUSPECTS):
                verdicts.append(lines.judge(output, actual, contract, others or {}))
                if verdicts[-1].comparison.mismatch is not None:
                    break
        doubt = interval_module.insensitive(first.shape(output), verdicts[0].interval)
        comparison = _together(verdicts, actual, suspects if len(verdicts) > len(self.lines) else None, tier)
        shown = next((v for v in reversed(verdicts) if v.comparison.mismatch is not None), verdicts[0])
        counts = " and ".join(one.text() for one in self.lines)
        note = f"judged by sample: {counts}; {how}"
        return ResultVerdict(comparison, tier, doubt, note, shown.lines.operands, shown.actual, shown.interval)

    # -- every element ---------------------------------------------------------------------------

    def _suspects(self, output: Problem, actual: Tensor, contract: Contract, tier: str) -> tuple[Tensor | None, str]:
        """Rows that cannot be right by a check of all elements, bool, of the result's shape without N; and how."""
        terms = _terms(output, self._operands)
        if isinstance(terms, str):
            return None, f"the other elements unseen: {terms}"
        found = self._by_integers(output, actual, terms) if tier == "exact" else None
        if found is not None:
            return found, "every element by Freivalds' check modulo 2^61 - 1"
        return self._by_signs(output, actual, contract, terms), "every row by a projection"

    @functools.cached_property
    def _integers(self) -> tuple[Tensor, Tensor] | None:
        """x (N,) and ``A (B x)`` (P, M) in units of the quantum, residues."""
        operands = self._operands
        (unit_a, unit_b), n = operands.units, operands.b.shape[-1]
        if not unit_a or not unit_b or operands.quantum > unit_a * unit_b:
            return None
        x = self._random(n).to(operands.a.device)
        bits_a, bits_b = (
            freivalds.bits_of(_largest(t) / unit) for t, unit in ((operands.a, unit_a), (operands.b, unit_b))
        )
        y = freivalds.times(_matrices(operands.b, operands.b), unit_b, bits_b, x)
        z = None if y is None else self._through(lambda a, v: freivalds.times(a, unit_a, bits_a, v), y)
        if z is None:
            return None
        return x, freivalds.shift(z, round(math.log2(unit_a * unit_b / operands.quantum)))

    def _through(self, multiply: Callable[[Tensor, Tensor], Tensor | None], y: Tensor) -> Tensor | None:
        """What ``multiply`` makes of A and y, which are the matrices of a batch; of groups each with its own y."""
        operands = self._operands
        if not operands.groups:
            return multiply(_matrices(operands.a, operands.b), y)
        found = [multiply(operands.a[None, first:last], y[g][None]) for g, (first, last) in enumerate(operands.groups)]
        parts = [part for part in found if part is not None]
        return torch.cat(parts, 1) if len(parts) == len(found) else None

    def _random(self, count: int) -> Tensor:
        """Residues, uniform."""
        return torch.randint(0, freivalds.PRIME, (count,), generator=generator(f"{self._key} x"))

    def _by_integers(self, output: Problem, actual: Tensor, terms: list[_Term]) -> Tensor | None:
        """Rows that Freivalds' check rejects; ``None`` where the output's type may have to round the sums."""
        operands = self._operands
        quantum = operands.quantum
        out = output.result_dtype
        most = operands.magnitude_bound + sum(_largest(x) for x, _ in terms) / (quantum or 1.0)
        if not most <= (2.0**out.precision if out.is_float else 2.0**31 - 1) or self._integers is None:
            return None
        x, right = self._integers
        bits = freivalds.bits_of(most)
        matrices = _matrices(actual, operands.b)
        # Everything on one side: what the backend returned, without what was added, against the product.
        bad = torch.zeros(matrices.shape[:2], dtype=torch.bool, device=actual.device)
        left = freivalds.times(matrices, quantum, bits, x, bad)
        for tensor, sign in terms:
            added = _matrices(tensor, operands.b)
            off = torch.zeros(added.shape[:2], dtype=torch.bool, device=actual.device)
            product = freivalds.times(added, quantum, bits, x if added.shape[-1] == len(x) else _total(x), off)
            if left is None or product is None or bool(off.any()):
                return None
            left = freivalds.add(left, freivalds.PRIME - product if sign > 0 else product)
        return None if left is None else ((left != right) | bad).reshape(actual.shape[:-1]).cpu()

    @functools.cached_property
    def _signs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, ``A (B x)`` (P, M, n), and what bounds the Euclidean norms of the rows of g and of G, each (P, M).

        With b the largest norm of a row of B: ``sum_j g_ij^2 = sum_k a_ik^2 ||b_k||^2 <= ||a_i||^2 b^2``, and by
        Minkowski's inequality the norm of row i of ``G = |A| |B|`` is at most ``sum_k |a_ik| ||b_k|| <= ||a_i||_1 b``.
        """
        operands = self._operands
        n = operands.b.shape[-1]
        x = ((self._random(n * _VECTORS) & 1) * 2 - 1).reshape(n, _VECTORS).to(operands.a.device, torch.float64)
        a, b = (_matrices(one, operands.b) for one in (operands.a, operands.b))
        largest = freivalds.norms(b).amax(-1, keepdim=True)
        if operands.groups:
            sizes = torch.tensor([last - first for first, last in operands.groups], device=largest.device)
            largest = largest.repeat_interleave(sizes, 0).mT
        y = self._through(freivalds.project, freivalds.project(b, x))
        assert y is not None
        return x, y, freivalds.norms(a) * largest, freivalds.norms(a, 1) * largest

    def _by_signs(self, output: Problem, actual: Tensor, contract: Contract, terms: list[_Term]) -> Tensor:
        """Rows whose projection leaves its bound.

        Let e_j be the errors of a row's elements, each at most E_j as the oracle bounds it, and x random signs that
        were unknown to the kernel.  Then ``|sum x_j e_j| > lambda ||E||`` has a probability of at most
        ``2 exp(-lambda^2 / 2)`` (Hoeffding), whatever the e_j are.  ||E|| is at most the sum of the norms of its parts:
        theta g or theta G for the sum, u |c| for each store, and what underflows.
        """
        operands, k = self._operands, output.shape.k
        x, right, small, big = self._signs
        matrices = _matrices(actual, operands.b)
        count = actual.numel() // actual.shape[-1] * _VECTORS
        spread = math.sqrt(2.0 * math.log(2.0 * count / _DOUBT))
        out = output.result_dtype
        # Each term may be added in the accumulator, or to a value that was stored before; and the value is stored.
        store = out.unit_roundoff * (1 + len(terms) + (contract.epilogue != "fused"))
        steps = len(terms) + 2
        theta = contract.theta(k, steps, out=output.dtypes.out) + k * 2.0**-53
        statistics = product_module.statistics_apply(output, operands)
        lost = 2.0 ** (out.emin - out.precision) * steps if out.is_float else 0.0
        lost = (lost + k * contract.lost) * math.sqrt(actual.shape[-1])
        # Of the sums here, in float64: N + K roundings of at most sum_j G_ij <= sqrt(N) ||G_i||.
        own = (k + actual.shape[-1]) * math.sqrt(actual.shape[-1]) * 2.0**-53
        size = freivalds.norms(matrices)
        error = big * theta
        if statistics:
            narrow = math.sqrt(contract.slices) * output.dtypes.out.unit_roundoff if contract.narrow_partials else 0.0
            rest = product_module.spread_of(output) * (contract.input_error + narrow)
            factor = product_module.statistical_theta(output, contract, steps) + rest
            error = torch.minimum(error, small * factor + size * contract.input_error)
        total, left = size, freivalds.project(matrices, x)
        for tensor, sign in terms:
            added = _matrices(tensor, operands.b)
            across = len(x) // added.shape[-1]  # a column stands for all
            left = left - sign * freivalds.project(added, x if across == 1 else x.sum(0, keepdim=True))
            norm = freivalds.norms(added) * math.sqrt(across)
            error = error + norm * theta
            total = total + norm
        # C's own size stands for the exact result's.
        error = (error + total * store) * 1.01 + lost + (big + total) * own
        return (~((left - right).abs() <= (spread * error)[..., None]).all(-1)).reshape(actual.shape[:-1]).cpu()


def _total(x: Tensor) -> Tensor:
    """The sum of residues, (1,)."""
    low, high = (x & ((1 << 31) - 1)).sum(), (x >> 31).sum()
    return freivalds.add(freivalds.residue(low), freivalds.shift(freivalds.residue(high), 31))[None]


def _largest(x: Tensor) -> float:
    """The largest magnitude; torch has no aminmax of fp8."""
    x = x.detach()
    longest = max(range(x.dim()), key=x.size)
    found = 0.0
    for part in x.split(max(1, _AT_ONCE * x.shape[longest] // x.numel()), longest):
        real = part.to(torch.float32) if x.element_size() == 1 and x.dtype.is_floating_point else part
        low, high = torch.aminmax(real)
        found = max(found, abs(float(low)), abs(float(high)))
    return found


# -- one verdict -----------------------------------------------------------------------------------------


def _together(verdicts: list[LinesVerdict], actual: Tensor, suspects: Tensor | None, tier: str) -> verdict.Comparison:
    """The verdicts on the lines together: the worst of them, and where the bad rows and columns are."""
    seen = sum(v.actual.numel() for v in verdicts)
    share = sum(v.comparison.correctly_rounded * v.actual.numel() for v in verdicts) / max(seen, 1)
    ratio = max(v.comparison.ratio for v in verdicts)
    wrong = [v for v in verdicts if v.comparison.mismatch is not None]
    if not wrong:
        return verdict.Comparison(ratio, share)
    rows = torch.zeros(actual.shape[:-1], dtype=torch.bool)
    columns = torch.zeros(actual.shape[-1], dtype=torch.bool)
    for v in wrong:
        v.mark(rows, columns)
    last = wrong[-1]
    count, total = int(last.bad.sum()), last.bad.numel()
    size, name = last.lines.count, last.lines.name
    what = f"{size} {name} that were" if size > 1 else f"1 {name[:-1]} that was"
    scope = f"elements of {what} judged{' in full' if last.lines.complete else ''}"
    if suspects is not None and last is verdicts[-1] and tier == "exact":
        # Freivalds' check has named every bad row.
        rows |= suspects
        if last.lines.complete and int(of_any_batch(suspects).sum()) == size:
            total, scope = actual.numel(), "elements"
    found = [v.comparison.mismatch for v in wrong if v.comparison.mismatch is not None]
    worst = max(found, key=lambda one: one.ratio)
    explained = next((one for one in found if one.cause), worst)
    pattern = locate.pattern_of(rows, columns)
    worst = dataclasses.replace(worst, count=count, total=total, scope=scope, pattern=pattern)
    name = explained.name or locate.place_of(pattern)
    mismatch = dataclasses.replace(worst, cause=explained.cause, name=name)
    return verdict.Comparison(ratio, share, mismatch)
