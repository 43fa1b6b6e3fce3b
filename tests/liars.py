"""Backends with planted bugs, and honest ones beside them: what the harness must catch, and must not.

Every one is registered through the public hook, as a stranger's would be.  A liar says at which K and in
which dtypes its bug changes the result at all; elsewhere it is an equivalent mutant.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

import torch

from pytest_gemm.backend import Availability, Contract, Proof, Registry, Unsupported
from pytest_gemm.operands import Operands
from pytest_gemm.problem import Problem
from pytest_gemm.program import args, build

Matmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product in float32, or wider, before any store."""
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    return torch.matmul(a.to(wide), b.to(wide))


def store(c: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return c.to(like.dtype)


# -- honest ----------------------------------------------------------------------------------------


def reversed_order(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return store(exact(a.flip(-1), b.flip(-2)), a)


def split_k_four(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    pieces = zip(a.tensor_split(4, -1), b.tensor_split(4, -2), strict=True)
    total = torch.zeros(a.shape[-2], b.shape[-1])
    for x, y in pieces:
        total = total + exact(x, y)
    return store(total, a)


def pairwise(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.shape[-1] <= 64:
        return store(exact(a, b), a)

    def total(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] <= 64:
            return exact(x, y)
        half = x.shape[-1] // 2
        return total(x[..., :half], y[..., :half, :]) + total(x[..., half:], y[..., half:, :])

    return store(total(a, b), a)


def blocked(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(a.shape[-2], b.shape[-1])
    for k in range(0, a.shape[-1], 48):
        total = total + exact(a[..., k : k + 48], b[..., k : k + 48, :])
    return store(total, a)


HONEST: dict[str, Matmul] = {
    "reversed-order": reversed_order,
    "split-k-four": split_k_four,
    "pairwise": pairwise,
    "blocked": blocked,
}

# -- liars -----------------------------------------------------------------------------------------


def k_tail_dropped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    k = a.shape[-1] // 16 * 16
    return store(exact(a[..., :k], b[..., :k, :]), a)


def k_off_by_one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return store(exact(a[..., :-1], b[..., :-1, :]), a)


def k_doubled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    middle = a.shape[-1] // 2
    extra = exact(a[..., middle : middle + 1], b[..., middle : middle + 1, :])
    return store(exact(a, b) + extra, a)


def split_k_slice_dropped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    pieces = list(zip(a.tensor_split(4, -1), b.tensor_split(4, -2), strict=True))
    total = torch.zeros(a.shape[-2], b.shape[-1])
    for x, y in pieces[:2] + pieces[3:]:
        total = total + exact(x, y)
    return store(total, a)


def split_k_partials_in_half(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(a.shape[-2], b.shape[-1])
    for x, y in zip(a.tensor_split(4, -1), b.tensor_split(4, -2), strict=True):
        total = total + exact(x, y).to(torch.float16).to(torch.float32)
    return store(total, a)


def f16_accumulation(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(a.shape[-2], b.shape[-1], dtype=torch.float16)
    for k in range(0, a.shape[-1], 8):
        total = total + exact(a[..., k : k + 8], b[..., k : k + 8, :]).to(torch.float16)
    return store(total, a)


def tf32_inputs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    def cut(x: torch.Tensor) -> torch.Tensor:
        return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)

    return torch.matmul(cut(a), cut(b))


def bf16_inputs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.matmul(a.bfloat16().float(), b.bfloat16().float())


def tile_swap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = exact(a, b)
    swapped = c.clone()
    swapped[..., :16, :16], swapped[..., :16, 16:32] = c[..., :16, 16:32], c[..., :16, :16]
    return store(swapped, a)


def one_element_zeroed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = exact(a, b)
    flat = c.view(-1)
    flat[int(flat.abs().argmax())] = 0.0  # the largest: an element that is zero anyway would prove nothing
    return store(c, a)


def one_percent(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = exact(a, b)
    flat = c.view(-1)
    flat[int(flat.abs().argmax())] *= 1.01
    return store(c, a)


def truncating_store(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = exact(a, b).contiguous()
    if a.dtype == torch.bfloat16:
        return (c.view(torch.int32) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)
    return (c.view(torch.int32) & ~0x1FFF).view(torch.float32).to(torch.float16)


def bf16_detour(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return store(exact(a, b).to(torch.bfloat16), a)


def double_rounding(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return exact(a, b).to(torch.float16).to(torch.bfloat16)


def inputs_written(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = store(exact(a, b), a)
    a.mul_(0.5)
    return c


class CachedResult:
    """Answers every problem of one shape with the first result."""

    def __init__(self) -> None:
        self.results: dict[tuple[object, ...], torch.Tensor] = {}

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.results.setdefault((a.shape, b.shape, a.dtype), store(exact(a, b), a)).clone()


def non_deterministic(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    order = torch.randperm(a.shape[-1])
    parts = [exact(a[..., p], b[..., p, :]) for p in order.tensor_split(4)]
    total = torch.zeros(a.shape[-2], b.shape[-1])
    for part in parts:
        total = total + part
    return store(total, a)


def written_late(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = store(exact(a, b), a)
    result = c.clone()
    result[..., -1, :] = 0

    def finish() -> None:
        time.sleep(0.3)  # longer than judging takes, also on a busy machine
        result.copy_(c)

    threading.Thread(target=finish).start()
    return result


def tail_unwritten(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    result = torch.full((a.shape[-2], b.shape[-1]), torch.nan).to(a.dtype)
    columns = b.shape[-1] // 16 * 16
    result[..., :columns] = store(exact(a, b[..., :columns]), a)
    return result


def padded_stride_ignored(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    wrong = a.as_strided(a.shape, (a.shape[-1], 1))
    return store(exact(wrong, b), a)


def nan_swallowed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return store(torch.nan_to_num(exact(a, b), nan=0.0), a)


def wrong_dtype(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return exact(a, b).double()


def wrong_shape(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return store(exact(a, b), a)[:-1]


def raises(*_operands: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("planted: out of registers")


Spoil = Callable[[dict[str, torch.Tensor], Problem], None]


class _SpoiltLiar:
    """A whole backend around a right product of spoilt operands, for one op."""

    devices = ("cpu",)

    def __init__(self, name: str, op: str, spoil: Spoil, product: Matmul = exact) -> None:
        self.name = name
        self._op = op
        self._spoil = spoil
        self._product = product

    def availability(self, device: str) -> Availability:
        return Availability()

    def supports(self, problem: Problem) -> Unsupported | None:
        return None if problem.op.name == self._op else Unsupported("op", f"made for {self._op}")

    def prepare(self, problem: Problem, operands: Operands) -> _BiasPrepared:
        def run(operands: Operands) -> torch.Tensor:
            tensors = args(problem, operands)
            self._spoil(tensors, problem)
            found: torch.Tensor = build(problem, self._product)(**tensors)
            return found

        prepared = _BiasPrepared(problem, self._spoil)
        prepared.run = run  # type: ignore[method-assign]  # its own program
        return prepared


def reciprocal_scale(tensors: dict[str, torch.Tensor], _problem: Problem) -> None:
    tensors["scale_b"] = 1 / tensors["scale_b"]


def scale_of_a_forgotten(tensors: dict[str, torch.Tensor], _problem: Problem) -> None:
    tensors["scale_a"] = torch.ones_like(tensors["scale_a"])


def scales_exchanged(tensors: dict[str, torch.Tensor], _problem: Problem) -> None:
    tensors["scale_a"], tensors["scale_b"] = tensors["scale_b"].t(), tensors["scale_a"].t()


def scale_transposed(tensors: dict[str, torch.Tensor], _problem: Problem) -> None:
    tensors["scale_a"] = tensors["scale_a"].t()


def scale_shifted(tensors: dict[str, torch.Tensor], _problem: Problem) -> None:
    tensors["scale_b"] = tensors["scale_b"].roll(1, -1)


def untouched(tensors: dict[str, torch.Tensor], _problem: Problem) -> None:
    """The bug is in the product."""


def group_edge_off_by_one(tensors: dict[str, torch.Tensor], _problem: Problem) -> None:
    tensors["offs"] = torch.cat([(tensors["offs"][:-1] - 1).clamp(min=0), tensors["offs"][-1:]])


def group_stride_zero(tensors: dict[str, torch.Tensor], _problem: Problem) -> None:
    tensors["b"] = tensors["b"][:1].expand_as(tensors["b"])


class _BiasLiar:
    """A whole backend, for bugs that a plain product cannot have."""

    devices = ("cpu",)

    def __init__(self, name: str, spoil: Spoil) -> None:
        self.name = name
        self._spoil = spoil

    def availability(self, device: str) -> Availability:
        return Availability()

    def supports(self, problem: Problem) -> Unsupported | None:
        return None if problem.bias_shape else Unsupported("bias", "made for a bias")

    def prepare(self, problem: Problem, operands: Operands) -> _BiasPrepared:
        return _BiasPrepared(problem, self._spoil)


@dataclasses.dataclass
class _BiasPrepared:
    problem: Problem
    spoil: Callable[[dict[str, torch.Tensor], Problem], None]
    contract: Contract = dataclasses.field(default_factory=lambda: Contract(epilogue="eager"))

    def run(self, operands: Operands) -> torch.Tensor:
        tensors = args(self.problem, operands)
        self.spoil(tensors, self.problem)
        result: torch.Tensor = build(self.problem)(**tensors)
        return result

    def proof(self) -> Proof:
        return Proof(executed=("planted",), provable=False)


def bias_missing_on_last_tile(tensors: dict[str, torch.Tensor], problem: Problem) -> None:
    tensors["bias"] = tensors["bias"].clone()
    tensors["bias"][..., problem.shape.n // 16 * 16 :] = 0


def bias_shifted(tensors: dict[str, torch.Tensor], _problem: Problem) -> None:
    tensors["bias"] = tensors["bias"].roll(1, -1)


def fell_back(tensors: dict[str, torch.Tensor], problem: Problem) -> None:
    """Nothing wrong with the numbers: see SilentFallback."""


class SilentFallback(_BiasLiar):
    """Claims kernels of its own and lets ATen compute."""

    def prepare(self, problem: Problem, operands: Operands) -> _BiasPrepared:
        prepared = _BiasPrepared(problem, fell_back)
        prepared.proof = lambda: Proof(chosen=("mine",), generated=("mine",), executed=(), foreign=("aten.addmm",))  # type: ignore[method-assign]  # a liar
        return prepared


@dataclasses.dataclass(frozen=True)
class Liar:
    """A planted bug.

    Attributes:
        matmul: the buggy product, or ``None`` for a whole backend.
        dtypes: where the bug changes the result.
        least_k: smallest K at which it shows.
        code: expected reason code, "" for any.
        flags: the problem's flags, when the bug needs some.
    """

    matmul: Matmul
    dtypes: tuple[str, ...] = ("f32", "bf16", "f16")
    code: str = ""
    flags: str = ""


LIARS: dict[str, Liar] = {
    "k-tail-dropped": Liar(k_tail_dropped),
    "k-off-by-one": Liar(k_off_by_one),
    "k-doubled": Liar(k_doubled),
    "split-k-slice-dropped": Liar(split_k_slice_dropped),
    # In bf16 the detour through f16 partials loses nothing that the store keeps, at these magnitudes.
    "split-k-partials-in-half": Liar(split_k_partials_in_half, ("f32", "f16")),
    "f16-accumulation": Liar(f16_accumulation, ("f32", "f16")),
    "tf32-inputs": Liar(tf32_inputs, ("f32",)),
    "bf16-inputs": Liar(bf16_inputs, ("f32",)),
    "tile-swap": Liar(tile_swap),
    "one-element-zeroed": Liar(one_element_zeroed),
    "one-percent": Liar(one_percent),
    "truncating-store": Liar(truncating_store, ("bf16", "f16")),
    "bf16-detour": Liar(bf16_detour, ("f32", "f16")),
    "double-rounding": Liar(double_rounding, ("bf16",)),
    "inputs-written": Liar(inputs_written, code="inputs-written"),
    "cached-result": Liar(CachedResult()),
    "non-deterministic": Liar(non_deterministic, ("f32",)),
    "written-late": Liar(written_late),
    "tail-unwritten": Liar(tail_unwritten),
    "padded-stride-ignored": Liar(padded_stride_ignored, flags="pad-lda"),
    "nan-swallowed": Liar(nan_swallowed),
    "wrong-dtype": Liar(wrong_dtype),
    "wrong-shape": Liar(wrong_shape),
    "raises": Liar(raises, code="run-RuntimeError"),
}

BIAS_LIARS: dict[str, Callable[[dict[str, torch.Tensor], Problem], None]] = {
    "bias-missing-on-last-tile": bias_missing_on_last_tile,
    "bias-shifted": bias_shifted,
}

# Where a bug shows only if the scales are vectors, and which go along with M = N.
SCALE_LIARS: dict[str, _SpoiltLiar] = {
    liar.name: liar
    for liar in (
        _SpoiltLiar("reciprocal-scale", "scaled_mm", reciprocal_scale),
        _SpoiltLiar("scale-of-a-forgotten", "scaled_mm", scale_of_a_forgotten),
        _SpoiltLiar("rounded-before-scale", "scaled_mm", untouched, lambda a, b: exact(a, b).to(torch.bfloat16)),
        _SpoiltLiar("scales-exchanged", "scaled_mm", scales_exchanged),
        _SpoiltLiar("scale-transposed", "scaled_mm", scale_transposed),
        _SpoiltLiar("scale-shifted", "scaled_mm", scale_shifted),
    )
}
NEEDS_VECTORS = ("scales-exchanged", "scale-transposed", "scale-shifted")

GROUP_LIARS: dict[str, _SpoiltLiar] = {
    liar.name: liar
    for liar in (
        _SpoiltLiar("group-edge-off-by-one", "grouped_mm", group_edge_off_by_one, lambda a, b: store(exact(a, b), a)),
        _SpoiltLiar("group-stride-zero", "grouped_mm", group_stride_zero, lambda a, b: store(exact(a, b), a)),
    )
}


def register(registry: Registry) -> None:
    """Everything above, through the public registry."""
    for name, matmul in HONEST.items():
        registry.add_callable(name, matmul, dtypes=("f32", "bf16", "f16"), batched=False)
    for name, liar in LIARS.items():
        registry.add_callable(name, liar.matmul, dtypes=liar.dtypes, batched=False)
    for name, spoil in BIAS_LIARS.items():
        registry.add(_BiasLiar(name, spoil))
    for liar_of_an_op in (*SCALE_LIARS.values(), *GROUP_LIARS.values()):
        registry.add(liar_of_an_op)
    registry.add(_SpoiltLiar("honest-scales", "scaled_mm", untouched))
    registry.add(SilentFallback("silent-fallback", fell_back))
