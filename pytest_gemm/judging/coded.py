"""What may be wrong with a weight of codes, and with an A that the kernel quantises: hypotheses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pytest_gemm.numerics.reference import widened
from pytest_gemm.problem.ops.woq import CODES, NF4, weight_of

if TYPE_CHECKING:
    from pytest_gemm.judging.recompute import Hypotheses, Sample


def of_codes(s: Sample) -> Hypotheses:
    """Codes, scales and zero points of other groups, and an A that was quantised in another way."""
    problem, operands = s.wrong.problem, s.wrong.operands
    if not problem.op.coded or not problem.terms:
        return
    column = s.at[-1]
    names = {"scale_b": "scales", "zero_b": "zero points"}
    n = problem.shape.n
    whole = {name: widened(operands.tensors[name]).expand(n, -1) for name in names if name in operands.tensors}
    lines = {"b": widened(operands.b).mT[column], **{name: x[column] for name, x in whole.items()}}

    def result(**changed: Tensor) -> Tensor:
        return s.result(b=weight_of(torch, problem, lines | changed, torch.float64))

    def moved(places: int) -> Tensor:
        made: Tensor = weight_of(torch, problem, lines | {"b": lines["b"].roll(places, 1)}, torch.float64)
        return s.result(b=made.roll(-places, 1))

    if problem.a_rule:
        yield from _of_a(s)
    if "zero_b" in whole:
        zero = lines["zero_b"]
        yield "zero point ignored", "the zero points were not subtracted", result(zero_b=torch.zeros_like(zero))
        middle = torch.full_like(zero, CODES[problem.dtypes.b.name][1])
        yield "zero point ignored", f"the zero points were all {int(middle[0, 0])}", result(zero_b=middle)
        for step in (1.0, -1.0):
            yield "zero point off by one", "the zero points of B are off by one", result(zero_b=zero + step)
    parts = [[name] for name in whole] + [list(whole)] * (len(whole) > 1)
    for some in parts if problem.terms % problem.group_size else ():
        text = " and ".join(names[name] for name in some)
        before = {name: torch.cat([lines[name][:, :-1], lines[name][:, -2:-1]], 1) for name in some}
        yield "short group", f"the last group, which is shorter, has the {text} of the one before", result(**before)
    for some, (places, where) in itertools.product(parts, ((-1, "after"), (1, "before"))):
        text = f"the {' and '.join(names[name] for name in some)} were those of the"
        group = {name: lines[name].roll(places, 1) for name in some}
        yield "neighbouring group", f"{text} group {where}", result(**group)
        other = {name: whole[name].roll(places, 0)[column] for name in some}
        yield "shifted scales", f"{text} column {where}", result(**other)
    for places, when in ((1, "early"), (-1, "late")):
        yield "group boundary", f"groups of K begin one element {when}", moved(places)
    for some in parts:
        text = " and ".join(names[name] for name in some)
        first = {name: lines[name][:, :1].expand_as(lines[name]) for name in some}
        yield "scale of one group", f"all of K has the {text} of the first group", result(**first)
    if problem.dtypes.b.name == "i4" and problem.terms % 2 == 0:
        pairs = lines["b"].unflatten(1, (-1, 2)).flip(2).flatten(1)
        yield "codes exchanged", "the two codes of a byte are exchanged", result(b=pairs)
    if problem.step("nf4"):
        ones = torch.full_like(lines["b"], len(NF4) - 1)
        yield from _of_table(s, lines["b"], weight_of(torch, problem, lines | {"b": ones}, torch.float64))


def _of_table(s: Sample, codes: Tensor, scales: Tensor) -> Hypotheses:
    """Two entries of the table that stand for each other: the sum is one of entries times what they multiply."""
    factors = [(s.a * scales * (codes == code)).sum(1) for code in range(len(NF4))]
    for i, j in itertools.combinations(range(len(NF4)), 2):
        sums = s.sums + (NF4[j] - NF4[i]) * (factors[i] - factors[j])
        yield "table entries exchanged", f"the entries {i} and {j} of the table are exchanged", s.result(sums)


def _of_a(s: Sample) -> Hypotheses:
    """A as it is, in codes that are cut off, or by one step for its whole row."""
    problem = s.wrong.problem
    a, is_blocked = widened(s.wrong.operands.a)[s.at[-2]], problem.a_rule == "q8_0"

    def by(size: int, rounded: Callable[[Tensor], Tensor], *, is_quotient: bool = True) -> Tensor:
        blocks = a.unflatten(-1, (-1, size)).float()
        most = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        step = most / 127.0
        codes = rounded(blocks / step if is_quotient else blocks * (127.0 / most)).double()
        return s.result(a=(codes * (step.half() if is_blocked else step).double()).flatten(-2))

    yield "inputs not quantised", "A was multiplied as it is, not in 8 bits", s.result(a=a)
    size = 32 if is_blocked else problem.terms
    for is_quotient in (True, False):  # the largest element, 127 steps, may come out just below
        cut = by(size, torch.trunc, is_quotient=is_quotient)
        yield "codes cut off", "the codes of A were rounded towards zero", cut
    if is_blocked:
        yield "scale of one group", "A was quantised by one step for each row", by(problem.terms, torch.round)
