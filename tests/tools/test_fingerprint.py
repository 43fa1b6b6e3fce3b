"""Backends of a known arithmetic, each of which the fingerprint must name; and what it makes of their contracts."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from warm_processes import Programs

from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import Availability
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.machine.key import hardware_key
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.numerics.rounding import round_to
from pytest_gemm.operands.dtypes import torch_dtype
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.outcome import Unsupported
from pytest_gemm.problem.dtypes import DTYPES, TF32, DType
from pytest_gemm.problem.problem import Problem
from pytest_gemm.tools import backend_command, fingerprint, probes, sum_order
from pytest_gemm.tools.probes import Column, Print

Array = npt.NDArray[Any]
Product = Callable[[Array, Array], Array]
Store = Callable[[Array, DType], Array]

# Small: a model of an arithmetic is slow, and the sums on a diagonal are all that counts.
F32, F16, BF16 = (f"mm:{name}:nt:16x16x256" for name in ("f32", "f16", "bf16"))
F8 = "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:16x16x256:quant.tensorwise"
LONG, SPLIT = "mm:bf16:nt:16x16x512", "mm:f16:nt:16x16x2304"
I8, I8_LONG = "int_mm:i8-i8-i32:nt:32x16x2048", "int_mm:i8-i8-i32:nt:32x16x131088"


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """The arrays are small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- models ------------------------------------------------------------------------------------------------


def nearest(x: Array, out: DType) -> Array:
    rounded: Array = round_to(torch.from_numpy(np.ascontiguousarray(x, dtype=np.float64)), out).numpy()
    return rounded


def cut(x: Array, bits: int) -> Array:
    """To so many significand bits, towards zero."""
    fraction, exponent = np.frexp(x)
    found: Array = np.where(np.isfinite(x), np.ldexp(np.trunc(fraction * 2.0**bits), exponent - bits), x)
    return found


def via(*names: str) -> Store:
    def store(x: Array, out: DType) -> Array:
        for name in names:
            x = nearest(x, DTYPES[name])
        return nearest(x, out)

    return store


def truncated(x: Array, out: DType) -> Array:
    return cut(x, out.precision)


def flushed(x: Array, out: DType) -> Array:
    found: Array = np.where(np.abs(x) < 2.0**out.emin, 0.0, nearest(x, out))
    return found


def in_order(a: Array, b: Array, dtype: type[np.floating[Any]] = np.float32) -> Array:
    """One product after the other in f32, and a rounding after each to ``dtype``; also of stacks of matrices."""
    left, right = a.astype(np.float32), b.astype(np.float32)
    total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype)
    for k in range(a.shape[-1]):
        total = (total + left[..., k, None] * right[..., None, k, :]).astype(dtype)
    return total.astype(np.float64)


def in_f16(a: Array, b: Array) -> Array:
    return in_order(a, b, np.float16)


def always_cut(a: Array, b: Array) -> Array:
    total = np.zeros((len(a), b.shape[1]))
    for k in range(a.shape[1]):
        total = cut(total + a[:, k, None] * b[None, k], 24)
    return total


def one_exponent(a: Array, b: Array) -> Array:
    """All of A held at 24 bits below its largest element."""
    unit = 2.0 ** (math.frexp(float(np.abs(a[np.isfinite(a)]).max()) or 1.0)[1] - 24)
    return in_order(np.where(np.isfinite(a), np.trunc(a / unit) * unit, a), b)


def skipping_zeros(a: Array, b: Array) -> Array:
    total = np.zeros((len(a), b.shape[1]), np.float32)
    for k in range(a.shape[1]):
        skipped = (a[:, k, None] == 0) | (b[None, k] == 0)
        total = (total + np.where(skipped, 0.0, a[:, k, None] * b[None, k])).astype(np.float32)
    return total


def tensor_core(f: int, chunk: int, keep: int = 24, promote: int = 0) -> Product:
    """Chunks of products and the sum so far, aligned to f fractional bits of the largest and cut (Fasi et al.)."""

    def run(a: Array, b: Array) -> Array:
        total = np.zeros((a.shape[0], b.shape[1]))
        for k in range(0, a.shape[1], chunk):
            part = a[:, None, k : k + chunk] * b[:, :].T[None, :, k : k + chunk]
            terms = np.concatenate([total[:, :, None], part], axis=2)
            exponent = np.frexp(np.abs(terms).max(axis=2, keepdims=True))[1] - 1
            aligned = np.trunc(np.ldexp(terms, f - exponent))
            total = np.where(
                np.isfinite(terms).all(axis=2),
                cut(np.ldexp(aligned.sum(axis=2), exponent[:, :, 0] - f), keep),
                terms.sum(axis=2),
            )
        return total

    def product(a: Array, b: Array) -> Array:
        every = promote or a.shape[1]
        total = np.zeros((a.shape[0], b.shape[1]))
        for k in range(0, a.shape[1], every):
            total = nearest(total + run(a[:, k : k + every], b[k : k + every]), DTYPES["f32"])
        return total

    return product


def split(slices: int, partials: str) -> Product:
    """Slices of K summed by themselves; their sums stored in ``partials``, and added in f32."""

    def product(a: Array, b: Array) -> Array:
        left = np.stack(np.split(a, slices, axis=1))
        right = np.stack(np.split(b, slices, axis=0))
        parts = nearest(in_order(left, right), DTYPES[partials])
        total = np.zeros(parts.shape[1:])
        for part in parts:
            total = nearest(total + part, DTYPES["f32"])
        return total

    return product


def with_inputs(change: Callable[[Array], Array], product: Product) -> Product:
    return lambda a, b: product(change(a), change(b))


def tf32(x: Array) -> Array:
    return nearest(x, TF32)


def bf16x3(a: Array, b: Array) -> Array:
    bf16 = DTYPES["bf16"]
    (a1, b1), rest = (nearest(a, bf16), nearest(b, bf16)), (a, b)
    a2, b2 = nearest(rest[0] - a1, bf16), nearest(rest[1] - b1, bf16)
    a3, b3 = nearest(a - a1 - a2, bf16), nearest(b - b1 - b2, bf16)
    return in_order(np.hstack([a1, a1, a2, a1, a3]), np.vstack([b1, b2, b1, b3, b1]))


def strassen(a: Array, b: Array) -> Array:
    """One level of Strassen's algorithm (halves of M, N and K)."""
    m, k, n = a.shape[0] // 2, a.shape[1] // 2, b.shape[1] // 2

    def rounded(x: Array) -> Array:
        return nearest(x, DTYPES["f32"])

    a11, a12, a21, a22 = a[:m, :k], a[:m, k:], a[m:, :k], a[m:, k:]
    b11, b12, b21, b22 = b[:k, :n], b[:k, n:], b[k:, :n], b[k:, n:]
    p1 = in_order(rounded(a11 + a22), rounded(b11 + b22))
    p2, p3 = in_order(rounded(a21 + a22), b11), in_order(a11, rounded(b12 - b22))
    p4, p5 = in_order(a22, rounded(b21 - b11)), in_order(rounded(a11 + a12), b22)
    p6, p7 = in_order(rounded(a21 - a11), rounded(b11 + b12)), in_order(rounded(a12 - a22), rounded(b21 + b22))
    return np.block([[rounded(p1 + p4 - p5 + p7), rounded(p3 + p5)], [rounded(p2 + p4), rounded(p1 - p2 + p3 + p6)]])


def fixed_point(a: Array, b: Array) -> Array:
    """Rows and columns split at 40 bits below their largest element."""

    def held(x: Array, axis: int) -> Array:
        largest = np.abs(x).max(axis=axis, keepdims=True)
        unit = np.exp2(np.ceil(np.log2(np.where(largest > 0, largest, 1.0))) - 40)
        found: Array = np.where(np.isfinite(x), np.trunc(x / unit) * unit, x)
        return found

    return nearest(held(a, 1) @ held(b, 0), DTYPES["f32"])


def no_subnormals(x: Array) -> Array:
    found: Array = np.where(np.abs(x) < 2.0**-126, 0.0, x)
    return found


def restless() -> Product:
    calls = itertools.count()
    return lambda a, b: in_order(a[:, ::-1], b[::-1]) if next(calls) % 2 else in_order(a, b)


def int16_pairs(a: Array, b: Array) -> Array:
    pairs = np.einsum("mkp,kpn->mkpn", a.reshape(len(a), -1, 2), b.reshape(-1, 2, b.shape[1])).sum(axis=2)
    found: Array = np.clip(pairs, -32768, 32767).sum(axis=1)
    return found


class Model:
    """A product of float64 arrays as a backend; the operands are exact, ``store`` makes the result."""

    devices = ("cpu",)
    name = "model"

    def __init__(self, product: Product, contract: Contract, store: Store = nearest) -> None:
        self.product, self.contract, self.store = product, contract, store

    def availability(self, device: str) -> Availability:
        return Availability()

    def supports(self, problem: Problem, request: object = None) -> Unsupported | None:
        return (
            Unsupported("bf16", "no bf16 here") if problem.dtypes.a.name == "bf16" and self.name == "choosy" else None
        )

    def prepare(self, problem: Problem, operands: Operands, request: object = None) -> Any:
        return _Prepared(self, problem)


@dataclasses.dataclass
class _Prepared:
    model: Model
    problem: Problem

    @property
    def contract(self) -> Contract:
        return self.model.contract

    def run(self, operands: Operands) -> torch.Tensor:
        a, b = (x.to(torch.float64).numpy() for x in (operands.a, operands.b))
        out = self.problem.dtypes.out
        with np.errstate(all="ignore"):
            result = self.model.product(a, b)
            result = self.model.store(result, out) if out.is_float else result
        c = torch.from_numpy(np.ascontiguousarray(result))
        for step in self.problem.passes:
            c = torch.where(c > 0, c, 0.0) if step.name == "relu" else torch.clamp(c, *step.numbers)
        return c.to(torch_dtype(out))

    def proof(self) -> Proof:
        return Proof(executed=("model",), provable=False)


def printed(
    line: str, product: Product, contract: Contract | None = None, store: Store = nearest, **column: Any
) -> Print:
    """The fingerprint of a model; its bits are what the result holds and no more."""
    return fingerprint.examine(Model(product, contract or Contract("f32"), store), Column("x", line, **column), "cpu")


def text(found: Print) -> str:
    return " / ".join([*found.remarks, *found.findings])


# -- what is named -----------------------------------------------------------------------------------------

HOPPER = Contract("f32", alignment_bits=25, chunk=16)
FAST = Contract("f32", alignment_bits=13, chunk=32)
PROMOTED = dataclasses.replace(FAST, promote_every=128)


@pytest.mark.parametrize(
    ("line", "product", "contract", "traits"),
    [
        (F32, in_order, Contract("f32"), {"order": "in order", "accumulator": "24 RN", "drift": None}),
        (F16, in_f16, Contract("f16"), {"accumulator": "11 RN", "products": "rounded"}),
        (F16, tensor_core(25, 16), HOPPER, {"chunk L": "16", "alignment f": "25 RZ", "accumulator": "24 RZ"}),
        (
            F16,
            tensor_core(24, 8),
            Contract("f32", alignment_bits=24, chunk=8),
            {"chunk L": "8", "alignment f": "24 RZ"},
        ),
        (
            BF16,
            tensor_core(23, 4),
            Contract("f32", alignment_bits=23, chunk=4),
            {"chunk L": "4", "alignment f": "23 RZ"},
        ),
        (F8, tensor_core(13, 32, 14), FAST, {"chunk L": "32", "alignment f": "13 RZ", "accumulator": "14 RZ"}),
        (
            F8,
            tensor_core(13, 32, 14, promote=128),
            PROMOTED,
            {"chunk L": "32", "alignment f": "13 RZ", "accumulator": "14 RZ", "blocks": "128"},
        ),
        # Of a long sum the chunks do not show: a cut every 16 products must not be taken for one at each.
        (SPLIT, tensor_core(25, 16), HOPPER, {"accumulator": "24 RZ", "order": "in order"}),
    ],
    ids=["ieee-f32", "f16", "hopper", "ampere", "volta", "fp8-fast", "fp8-promoted", "hopper-long"],
)
def test_a_correct_arithmetic_is_named_and_keeps_its_contract(
    line: str, product: Product, contract: Contract, traits: dict[str, str | None]
) -> None:
    found = printed(line, product, contract, long=line == SPLIT)
    assert {name: found.traits[name] for name, value in traits.items() if value} == {
        name: value for name, value in traits.items() if value
    }
    assert found.findings == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "product", "contract", "store", "words"),
    [
        (F16, tensor_core(24, 8), HOPPER, nearest, "chunks of 8 aligned to 24 bits"),
        (F8, tensor_core(13, 32, 14), PROMOTED, nearest, "promoted every 128"),
        (F16, in_f16, Contract("f32"), nearest, "added up in float16"),
        (BF16, in_f16, Contract("f32"), nearest, "a sum of positive products was off by"),
        (F32, always_cut, Contract("f32"), nearest, "sums are cut (RZ)"),
        (
            F32,
            with_inputs(tf32, in_order),
            Contract("f32"),
            nearest,
            "f32 inputs are rounded to nearest to TF32 (11 bits)",
        ),
        (F32, with_inputs(lambda x: cut(x, 11), in_order), Contract("f32"), nearest, "f32 inputs are cut to TF32"),
        (
            F32,
            with_inputs(lambda x: cut(x, 8), in_order),
            Contract("f32"),
            nearest,
            "f32 inputs are cut to bf16 (8 bits)",
        ),
        (F32, bf16x3, Contract("f32"), nearest, "low halves of two f32 is left out"),
        (F16, in_order, Contract("f32"), truncated, "to f16, is RZ"),
        (F16, in_order, Contract("f32"), via("bf16"), "to f16, is via bf16"),
        (BF16, in_order, Contract("f32"), via("f16"), "to bf16, is via f16"),
        (
            SPLIT,
            split(16, "f16"),
            Contract("f32", slices=16),
            nearest,
            "blocks of 144, partial sums of 11 RN, declared",
        ),
        (F32, strassen, Contract("f32"), nearest, "as in Strassen's algorithm"),
        (F32, one_exponent, Contract("f32"), nearest, "a result depends on other rows or columns"),
        (
            F32,
            lambda a, b: one_exponent(b.T, a.T).T,
            Contract("f32"),
            nearest,
            "a result depends on other rows or columns",
        ),
        (F32, fixed_point, Contract("f32"), nearest, "operands are split in fixed point"),
        (F32, restless(), Contract("f32"), nearest, "the same product again has other bits"),
        (I8, int16_pairs, Contract("i32"), nearest, "saturate at 32767"),
        (I8, lambda a, b: nearest(a @ b, DTYPES["f32"]), Contract("i32"), nearest, "pass through float32"),
    ],
    ids=lambda value: value.split()[-1] if isinstance(value, str) and " " in value else "",
)
def test_a_broken_contract_is_a_finding_with_its_cause(
    line: str, product: Product, contract: Contract, store: Store, words: str
) -> None:
    found = printed(line, product, contract, store, long=line == SPLIT)
    assert found.findings, found
    assert words in text(found)


@pytest.mark.parametrize(
    ("line", "product", "contract", "store", "trait", "words"),
    [
        (LONG, split(4, "f32"), Contract("f32"), nearest, ("blocks", "128"), "each 128 products"),
        (LONG, split(4, "bf16"), Contract("f32", slices=4, partials="out"), nearest, ("partials", "8 RN"), "in bf16"),
        (
            F32,
            with_inputs(tf32, in_order),
            Contract("f32", input_error=2.0**-9, input_bits=11),
            nearest,
            ("inputs", "11 RN"),
            "TF32",
        ),
        (
            F32,
            with_inputs(no_subnormals, in_order),
            Contract("f32"),
            nearest,
            ("subnormals", "no in"),
            "taken for zero",
        ),
        (F32, in_order, Contract("f32"), flushed, ("subnormals", "no out"), "flushed from f32"),
        (F32, skipping_zeros, Contract("f32"), nearest, ("specials", "4 wrong"), "0*Inf gives 0"),
        (F32, restless(), Contract("f32", deterministic=False), nearest, ("deterministic", "no"), "other bits"),
        (
            I8_LONG,
            lambda a, b: np.clip(a @ b, -(2**31), 2**31 - 1),
            Contract("i32"),
            nearest,
            ("overflow", "saturates"),
            "2^31",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_the_contract_allows_or_does_not_speak_of_is_a_remark(
    line: str, product: Product, contract: Contract, store: Store, trait: tuple[str, str], words: str
) -> None:
    found = printed(line, product, contract, store, long=line in {LONG, I8_LONG})
    assert found.traits[trait[0]] == trait[1], found
    assert words in text(found)
    assert found.findings == []


def test_one_row_and_the_epilogue_are_asked_through_problems_of_their_own() -> None:
    class Moody(Model):
        """Another order for one row, and a relu that is a maximum of numbers."""

        def prepare(self, problem: Problem, operands: Operands, request: object = None) -> Any:
            prepared = _Prepared(self, problem)
            if problem.shape.m == 1:
                prepared.model = Model(lambda a, b: in_order(a[:, ::-1], b[::-1]), self.contract)
            return prepared

    found = fingerprint.examine(Moody(in_order, Contract("f32")), Column("x", F32, aux=True), "cpu")
    assert found.traits["batch invariant"] == "no"
    assert found.traits["NaN in epilogue"] == "relu eats"
    assert "NaN does not pass relu in the epilogue: it becomes 0" in text(found)


def test_aten_keeps_its_contract_and_a_refused_column_has_its_reason() -> None:
    for line, bits in ((F32, "24"), (F8, "4")):
        found = fingerprint.examine(AtenBackend(), Column("x", line, aux=line == F32), "cpu")
        assert found.findings == []
        assert found.traits["inputs"] == bits
    choosy = Model(in_order, Contract("f32"))
    choosy.name = "choosy"
    refused = fingerprint.examine(choosy, Column("x", BF16), "cpu")
    assert (refused.refusal, refused.traits) == ("no bf16 here", {})


def test_a_column_that_raises_is_a_finding_and_the_others_are_asked_all_the_same() -> None:
    def raises(*_operands: Array) -> Array:
        raise OSError("no kernel image\nfor this device")

    found = list(fingerprint.take(Model(raises, Contract("f32")), "cpu"))
    assert [one.column for one in found] == [column.name for column in probes.COLUMNS]
    assert all(one.findings == ["it raised OSError: no kernel image"] for one in found)


# -- the order of a sum --------------------------------------------------------------------------------------


def met_in(groups: Any) -> dict[int, int]:
    """Sizes from term 0 of a tree of nested lists in which all members of a list meet at once."""
    sizes: dict[int, int] = {}

    def leaves(node: Any) -> list[int]:
        return [node] if isinstance(node, int) else [leaf for part in node for leaf in leaves(part)]

    def walk(node: Any) -> None:
        if isinstance(node, int):
            return
        own = next((part for part in node if 0 in leaves(part)), None)
        if own is not None:
            walk(own)
            sizes.update((j, len(leaves(node))) for j in leaves(node) if j not in leaves(own))

    walk(groups)
    return sizes


def chain(nodes: Any) -> Any:
    total = nodes[0]
    for node in nodes[1:]:
        total = [total, node]
    return total


PAIRS = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


@pytest.mark.parametrize(
    ("tree", "inside", "name", "chunk", "block"),
    [
        (chain(range(12)), [2, 3], "in order", 1, 0),
        (chain(range(11, -1, -1)), [12, 11], "reversed", 1, 0),
        (chain([chain(range(0, 4)), chain(range(4, 8)), chain(range(8, 12))]), [2, 3], "in order", 1, 4),
        (chain([chain(range(lane, 12, 4)) for lane in range(4)]), [2, 3], "4 lanes", 1, 0),
        ([[[0, 1, 2, 3], 4, 5, 6, 7], 8, 9, 10, 11], [4, 4], "chunks", 4, 0),
        ([PAIRS, [[[8, 9], [10, 11]], [[12, 13], [14, 15]]]], [2, 4], "pairwise", 1, 0),
        ([[[[0, 2, 8, 10], 1, 3, 9, 11], 4, 6, 12, 14], 5, 7, 13, 15], [4, 4], "chunks", 4, 0),
        (chain([[0, 1, 2], [3, 4, 5], [6, 7, 8]]), [2, 3], "other", 1, 0),
        (list(range(8)), [8, 8], "chunks", 8, 0),
    ],
)
def test_the_order_of_a_sum_follows_from_who_meets_whom(
    tree: Any, inside: list[int], name: str, chunk: int, block: int
) -> None:
    sizes = met_in(tree)
    found = sum_order.infer_order(sizes, inside, len(sizes) + 1)
    assert (found.name, found.block) == (name, block)
    assert found.chunk == chunk


# -- files and text ------------------------------------------------------------------------------------------


def test_a_stored_fingerprint_says_what_an_update_changed(tmp_path: Path) -> None:
    one = Print("f16", "mm:f16:nt:64x64x256", traits={"accumulator": "24 RN", "drift": "+1"}, kernels=("k",))
    path = fingerprint.path_of(tmp_path, "some-key", "mine")
    assert fingerprint.load(path) is None
    whole = fingerprint.Fingerprint("mine", "cpu", "some-key", "2026-01-02", {"torch": "2.12"}, [one])
    fingerprint.save(path, whole)
    assert [p.name for p in path.parent.iterdir()] == ["mine.fingerprint.json"]
    assert "seconds" not in json.loads(path.read_text())["columns"][0]
    loaded = fingerprint.load(path)
    assert loaded is not None
    assert loaded.columns == [one]
    now = dataclasses.replace(one, traits={"accumulator": "11 RN", "drift": "+2"})
    assert fingerprint.changes(loaded.columns, [now]) == ["f16: accumulator was 24 RN and is 11 RN"]
    assert fingerprint.changes(loaded.columns, [dataclasses.replace(one, traits={}, refusal="gone")]) == [
        "f16: not supported any more (gone)"
    ]
    path.write_text("{}")
    with pytest.raises(ValueError, match="not a fingerprint"):
        fingerprint.load(path)


def test_the_table_breaks_where_the_screen_ends_and_findings_come_first() -> None:
    prints = [
        Print(f"column {n}", "mm:f32:nt:4x4x4", traits={"order": "in order"}, remarks=["odd"], kernels=("k",))
        for n in range(4)
    ]
    prints[3].findings.append("wrong")
    prints.append(Print("f64", "mm:f64:nt:4x4x4", refusal="no f64"))
    lines = fingerprint.table(prints, width=50)
    assert [line for line in lines if "column" in line] == [
        f"{'':<5}{'column 0':>10}{'column 1':>10}{'column 2':>10}",
        f"{'':<5}{'column 3':>10}",
    ]
    said = fingerprint.sentences(fingerprint.Fingerprint("mine", "cpu", "key", "", {}, prints))
    assert said[0].strip() == "FINDING column 3: wrong (mm:f32:nt:4x4x4, k)"
    assert said[1].strip() == "column 0, column 1, column 2, column 3: odd"
    assert said[2].strip() == "f64: unsupported: no f64"


# -- the screen ----------------------------------------------------------------------------------------------


def test_what_is_waited_for_is_handed_on_as_it_comes_and_so_is_its_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_command, "_TICK", 0.01)
    goes_on, seen = threading.Event(), list[int]()

    def items() -> Iterator[int]:
        yield 1
        goes_on.wait(10)
        yield 2
        raise LookupError("gone")

    def take() -> None:
        for item in backend_command.ticking(items(), goes_on.set):
            seen.append(item)  # those before the exception count

    with pytest.raises(LookupError, match="gone"):
        take()
    assert seen == [1, 2]


@pytest.mark.slow
def test_the_screen_survives_a_backend_that_dies_and_stores_the_others(
    pytester: pytest.Pytester, programs: Programs
) -> None:
    pytester.makeconftest(
        """
        import os
        from pytest_gemm.api.protocols import Availability

        class Dies:
            name, devices = "dies", ("cpu",)
            def availability(self, device): os.abort()
            def supports(self, problem, request=None): return None
            def prepare(self, problem, operands, request=None): raise AssertionError

        def pytest_gemm_register_backends(registry):
            registry.add(Dies())
            registry.add_callable("good", lambda a, b: a @ b, dtypes=("bf16",))
        """
    )
    stored = fingerprint.Fingerprint(
        "good",
        "cpu",
        hardware_key("cpu", 1),
        "2026-01-02",
        {},
        [Print("bf16", "mm:bf16:nt:64x64x256", traits={"inputs": "9"})],
    )
    path = fingerprint.path_of(pytester.path / "stored", stored.hardware, "good")
    fingerprint.save(path, stored)
    options = ("--output=stored", "--backends=dies,good", "--threads=1")
    result = pytester.run(programs.python, "-m", "pytest_gemm.tools.cli", "fingerprint", *options)
    shown = result.stdout.str()
    assert result.ret == 1, shown
    assert "BROKEN after 0 columns: its process died: SIGABRT (Aborted)" in shown
    assert "f64: unsupported: good was registered without f64" in shown
    assert "the arithmetic has changed since 2026-01-02" in shown
    assert "bf16: inputs was 9 and is 8" in shown
    assert [one.name for one in path.parent.iterdir()] == ["good.fingerprint.json"], shown
    found = fingerprint.load(path)
    assert found is not None
    assert next(one for one in found.columns if one.traits).traits["inputs"] == "8"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "not a fingerprint of format 1: Input data was truncated"),
        ("[]", "not a fingerprint of format 1"),
        ('{"format": 1}', "not a fingerprint of format 1: Object missing required field `backend`"),
        (
            '{"format": 1, "backend": 1, "device": "", "hardware": "", "columns": [], "software": {}, "date": ""}',
            "not a fingerprint of format 1: Expected `str`, got `int` - at `$.backend`",
        ),
        (
            '{"format": 1, "backend": "", "device": "", "hardware": "", "columns": [5], "software": {}, "date": ""}',
            "not a fingerprint of format 1: Expected `object`, got `int` - at `$.columns[[]0[]]`",
        ),
        (99999 * "[", "not a fingerprint of format 1: Expected `object`, got `array`"),
    ],
)
def test_a_stored_fingerprint_that_cannot_be_read_ends_the_run_before_it_asks(
    pytester: pytest.Pytester, programs: Programs, content: str, says: str
) -> None:
    path = fingerprint.path_of(pytester.path / "kept", hardware_key("cpu", 1), "aten")
    path.parent.mkdir(parents=True)
    path.write_text(content)
    options = ("--output=kept", "--backends=aten", "--threads=1", "--device=cpu")
    result = pytester.run(programs.python, "-m", "pytest_gemm.tools.cli", "fingerprint", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {path}: {says}*; restore the file, or delete it"])
    assert path.read_text() == content
