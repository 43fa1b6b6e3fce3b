"""experts: a mixture of experts, judged from its tokens to the weighted sum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import computed, interval, is_right, judged, make, refuses_line
from torch import Tensor
from torch.nn.functional import silu

from pytest_gemm.api.registry import Registry
from pytest_gemm.core.outcome import Status
from pytest_gemm.judging.judge import Judge
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.run.known import eager_refusal

LINES = ("experts:bf16:nt:8x37x256x128:top-2", "experts:f32:nt:16x5x96x68:top-4:routing.crowded")
Kept = Callable[[Tensor], Tensor]


pytestmark = pytest.mark.usefixtures("one_thread")


def as_it_is(x: Tensor) -> Tensor:
    return x


def by_hand(
    o: Operands, *, kept: Kept = as_it_is, part: Kept = as_it_is, of: Callable[[int, int, int], int] | None = None
) -> Tensor:
    """Token by token and expert by expert, in float64; ``kept`` makes of a gated value what is stored of it.

    ``of`` gives another expert for expert e of choice j of token t.
    """
    t = {name: x.double() for name, x in o.tensors.items()}
    ids, rows = t["ids"].long().tolist(), []
    for token, x in enumerate(t["a"]):
        row = torch.zeros(o.problem.shape.k, dtype=torch.float64)
        for j, expert in enumerate(ids[token]):
            e = of(token, j, expert) if of else expert
            gate, up = (x @ t["b"][e]).chunk(2)
            row += part(t["down"][e] @ kept(silu(gate) * up)) * t["weights"][token, j]
        rows.append(row)
    return torch.stack(rows)


def rounded(o: Operands) -> Kept:
    return lambda x: x.to(o.a.dtype).double()


def stored(x: Tensor, o: Operands) -> Tensor:
    return x.to(o.a.dtype)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("distribution", ["int-2", "rand", "rand-wide"])
def test_what_is_expected_is_the_sum_by_hand_and_a_kernel_may_round_in_between(line: str, distribution: str) -> None:
    o = make(line, distribution)
    exact = by_hand(o)
    torch.testing.assert_close(interval(o).value, exact, rtol=1e-12, atol=1e-12)
    for fused in (exact, by_hand(o, kept=rounded(o)), by_hand(o, kept=rounded(o), part=rounded(o))):
        assert is_right(o, stored(fused, o), Contract())
    assert is_right(o, computed(o))


def other(x: Tensor, places: int = 1) -> Tensor:
    return x.roll(places, 0)


def fp8(x: Tensor) -> Tensor:
    """Rounded as by a scale for the whole vector."""
    scale = x.abs().amax() / 448.0
    return (x / scale).to(torch.float8_e4m3fn).double() * scale


MUTANTS: dict[str, Callable[[Operands], Tensor]] = {
    "a token is counted twice": lambda o: computed(o, weights=_doubled(o)),
    "the weights of another expert": lambda o: computed(o, b=other(o.b.mT)),
    "the second weights of another expert": lambda o: computed(o, down=other(_of(o, "down"))),
    "an expert is left out for one tile of tokens": lambda o: computed(o, weights=_left_out(o)),
    "the gate's halves are swapped": lambda o: computed(o, b=o.b.mT.roll(o.problem.shape.n // 2, 1)),
    "the gated value is rounded to fp8": lambda o: stored(by_hand(o, kept=fp8), o),
    "the weights of the choices are not applied": lambda o: computed(
        o, weights=torch.full_like(_of(o, "weights"), 0.5)
    ),
    "the weights of two choices are swapped": lambda o: computed(o, weights=_of(o, "weights").flip(1)),
    "the first token of a tile decides for the second": lambda o: stored(by_hand(o, of=_of_the_first(o)), o),
    "the last token is not written": lambda o: torch.cat([computed(o)[:-1], torch.zeros_like(o.a[:1])]),
}


def _of(o: Operands, name: str) -> Tensor:
    return o.tensors[name]


def _doubled(o: Operands) -> Tensor:
    weights = _of(o, "weights").clone()
    weights[3, 1] *= 2.0
    return weights


def _left_out(o: Operands) -> Tensor:
    weights, ids = _of(o, "weights").clone(), _of(o, "ids")
    weights[:4][ids[:4] == ids[0, 0]] = 0.0
    return weights


def _of_the_first(o: Operands) -> Callable[[int, int, int], int]:
    ids = _of(o, "ids").tolist()
    return lambda token, j, expert: ids[0][j] if token == 1 else expert


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_caught(name: str, line: str) -> None:
    found = [d for d in ("int-2", "rand") if not is_right(o := make(line, d), MUTANTS[name](o))]
    assert found


def test_nan_of_a_token_stays_its_own() -> None:
    o = make(LINES[0], "specials")
    right = computed(o)
    rows = right.isnan().all(1)
    assert 0 < int(rows.sum()) < len(rows)
    assert is_right(o, right)
    clean = int((~rows).nonzero()[0])
    spread = right.clone()
    spread[clean, 0] = torch.nan
    assert not is_right(o, spread)
    assert not is_right(o, right.nan_to_num(0.0))


def test_an_infinity_leaves_the_row_of_its_token_open() -> None:
    o = make(LINES[1])
    o.a[0] = torch.zeros(68).index_fill(0, torch.tensor([0]), torch.inf)
    assert is_right(o, computed(o).index_fill(0, torch.tensor([0]), 3.0))


def test_roundings_that_know_the_second_weights_are_no_roundings() -> None:
    o = make("experts:bf16:nt:1x2x8192x64:top-1")
    signs = o.tensors["down"][0, 0].double().sign()
    for known, right in ((signs, False), (signs.roll(1), True)):
        result = by_hand(o, kept=lambda x, known=known: x + 2.0**-8 * x.abs() * known)  # type: ignore[misc]
        assert is_right(o, stored(result, o), Contract()) is right


def test_a_token_has_different_experts_and_a_crowded_one_is_among_those_of_each() -> None:
    ids = _of(make("experts:bf16:nt:8x64x16x8:top-3:routing.crowded"), "ids")
    assert all(len(set(row)) == 3 for row in ids.tolist())
    everywhere = [e for e in range(8) if (ids == e).any(1).all()]
    assert len(everywhere) == 1
    assert {(ids == everywhere[0]).int().argmax(1).unique().numel()} == {3}
    free = _of(make("experts:bf16:nt:64x3x16x8:top-3"), "ids")
    assert free.unique().numel() <= 9


@pytest.mark.parametrize(("line", "words"), [
    ("experts:bf16:nt:8x5x16x8", "write top-1"),
    ("experts:bf16:nt:2x5x16x8:top-3", "2 experts are fewer than top-3 chooses"),
    ("experts:bf16:nt:2x5x15x8:top-1", "N=15 has no two halves"),
    ("experts:bf16:nt:2x5x16x8:top-1+relu", "experts takes no step relu"),
])  # fmt: skip
def test_what_is_no_mixture_of_experts(line: str, words: str) -> None:
    refuses_line(line, words)


def _fused(tensors: dict[str, Tensor], swapped: bool) -> Tensor:
    """What a kernel of a user's does: w13 and w2 as they are stored, and every token for itself."""
    a, w13, w2 = tensors["a"].float(), tensors["b"].float(), tensors["down"].float()
    made = torch.zeros_like(a)
    for j, chosen in enumerate(tensors["ids"].long().unbind(1)):
        halves = torch.einsum("tk,tnk->tn", a, w13[chosen]).chunk(2, -1)
        gate, up = reversed(halves) if swapped else halves
        gated = (silu(gate) * up).to(tensors["a"].dtype).float()
        made += torch.einsum("tn,tkn->tk", gated, w2[chosen]) * tensors["weights"][:, j, None]
    return made.to(tensors["a"].dtype)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_fused_kernel_of_a_users_is_judged_whole(swapped: bool) -> None:
    registry = Registry()
    registry.add_callable(
        "mine", torch.matmul, bind=lambda _, tensors: lambda: _fused(tensors, swapped), epilogue="fused"
    )
    judge = Judge(eager_refusal(Ledger()))
    outcomes = judged(registry["mine"], LINES[0], "int-2", "rand", "specials", judge=judge)
    assert {o.status for o in outcomes} == ({Status.INCORRECT} if swapped else {Status.PASSED})
