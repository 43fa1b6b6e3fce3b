"""The operands of a problem: where their values lie, and what surrounds them.

``make(problem, distribution, seed)`` gives every tensor that the problem's program takes.  It guarantees:

* **Reproducible.**  The same call gives the same bytes on every machine (``random_streams``).  The key of an
  operand is the problem (without dynamic sizes), the distribution, the seed and the operand's name; for whatever does
  not have M rows (B, its scales, a bias of N) it leaves M out: with ``m.dynamic`` one compiled constant serves every M.
* **Guarded.**  Every tensor is a window into a larger, poisoned storage (``memory``), and
  :meth:`Operands.changed` proves that nothing was written.
* **Informative.**  The values are those of a distribution (``distributions``): exact ones, of which a correct kernel
  has one possible sum (:attr:`Operands.quantum` > 0), or random ones.

Cost: three to five times the operand's size in transient memory, and about 10 ns per element up to 2^22 elements; what
is larger costs a copy.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from pytest_gemm.core.case_id import Device
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.core.text import did_you_mean
from pytest_gemm.operands import prologues, views
from pytest_gemm.operands.addends import TABLE_ROWS, bias_of, residuals_of
from pytest_gemm.operands.distributions import DISTRIBUTIONS, distributions_for
from pytest_gemm.operands.dtypes import torch_dtype
from pytest_gemm.operands.groups import divided, idle_rows, spoil
from pytest_gemm.operands.magnitudes import Drawn, Grid, Headroom, Side, headroom_of
from pytest_gemm.operands.memory import Guarded, digest, guarded, poison_of
from pytest_gemm.operands.quantised import quantise
from pytest_gemm.operands.random_streams import Array, Lines, Stream, all_lines, is_finite
from pytest_gemm.problem.dtypes import DTYPES, E8M0, DType
from pytest_gemm.problem.ops.grouped_mm import scale_of
from pytest_gemm.problem.ops.microscaled import swizzled, tiled
from pytest_gemm.problem.ops.woq import weight_of
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.rules import FLAGS

# The fields of :class:`Operands` that are a tensor or ``None``, in the order of a program's arguments.
_TENSORS: Final = (
    "a", "b", "scale_a", "zero_a", "scale_b", "zero_b", "whole_a", "whole_b", "quantisation", "offs", "labels",
    "counts", "bias", "out",
)  # fmt: skip


@dataclasses.dataclass(eq=False)
class Operands(Grid):
    """All tensors that a problem takes, as views into poisoned storage.

    Attributes:
        problem, distribution, seed, device: the arguments of :func:`make`.
        a: ([B,] M, K), strided by layout and flags; (B * M, K) for ``grouped_mm``, (M, B * K) for ``grouped_mm_k``,
            (M, K) for ``linears``.
        b: ([B,] K, N); (K, N) for ``linear`` and quantised weights, (K, B * N) for ``grouped_mm_n``, (B * K, N) for
            ``grouped_mm_k``; ``a.mT`` for ``self``, ``a`` for ``square``.  ``woq_int4``: codes of 0 to 15 in bytes.
        bias: of :attr:`Problem.bias_shape` in the product's dtype (f32 under autocast), contiguous, or ``None``.
        residuals: one of the result's shape for each binary step, in the dtype of the value at that step and in the
            product's places (``views``); a row or column is expanded; with ``r0.alias`` the first is ``a``.
        lookups: of a residual that is looked up, by its number: the table, and int64 indices of the result's rows.
        scale_b: (N,) scales of B's columns in the product's dtype for ``woq_int8``, in f32 for ``qlinear``, in f32 or
            bf16 for ``da8w8``; for ``scaled_mm`` in f32, (1, N), (K / block, N / block) or a scalar; or ``None``.
        scale_a: the scales of A: in f32, (M, 1), (M / block, K / 128) or a scalar for ``scaled_mm``, see
            :func:`scale_of` for a grouped product, of whose blocks each A and each B has such a matrix; ([B,] M, 1) or
            a scalar in the dtype of ``scale_b`` for ``da8w8``; a scalar for ``qlinear`` with ``dynamic``; or ``None``.
            Those of small blocks lie in swizzled order (``microscaled``); f4 is packed along K: A has K / 2 columns.
        whole_a, whole_b: scales of whole tensors beside those of blocks, f32, scalars; or ``None``.
        zero_a: A's zero point as a tensor, int32, a scalar, for ``qlinear`` with ``dynamic``; or ``None``.
            For ``woq`` those of groups, (N, groups), in :attr:`Problem.scale_dtype`.
        zero_b: B's zero points, int32, (N,), all of them 0, for ``qlinear``; for ``woq`` with ``zeros`` codes,
            (N, groups); or ``None``.
        quantisation: scale and zero of each group of K and each column for ``woq_int4``, (K / group, N, 2) in A's
            dtype: an element of B is ``(code - 8) * scale + zero``; or ``None``.
        zero: what is subtracted of each element of A before it is multiplied: its zero point.
        offs: where the groups of a grouped product end, int32, (B,), see :mod:`groups`; or ``None``.
        labels: with ``groups.labels`` the group of each row, int32, (B * M,), and -1 of a row of none; or ``None``.
        counts: with ``groups.masked`` how many rows of each A count, int32, (B,); or ``None``.
        out: where the program writes its result, in ``result_shape``, as :meth:`reset_out` leaves it; or ``None``.
        zero_mean: the products are independent with zero mean: a statistical bound may be used.
        finite: no NaN and no infinity in any of the tensors.
        buffers: the storages of all tensors, for digests and poison checks.
    """

    problem: Problem
    distribution: str
    seed: int
    device: Device
    a: Tensor
    b: Tensor
    zero_mean: bool
    finite: bool
    buffers: tuple[Guarded, ...] = dataclasses.field(repr=False)
    bias: Tensor | None = None
    residuals: tuple[Tensor, ...] = ()
    lookups: Mapping[int, tuple[Tensor, Tensor]] = dataclasses.field(default_factory=dict)
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None
    whole_a: Tensor | None = None
    whole_b: Tensor | None = None
    zero_a: Tensor | None = None
    zero_b: Tensor | None = None
    quantisation: Tensor | None = None
    offs: Tensor | None = None
    labels: Tensor | None = None
    counts: Tensor | None = None
    out: Tensor | None = None
    zero: int = 0

    @property
    def tensors(self) -> dict[str, Tensor]:
        """A, B, bias, scales, zero points, groups and a given result, by field; without residuals."""
        given = {name: getattr(self, name) for name in _TENSORS}
        return {name: x for name, x in given.items() if x is not None}

    def map(self, f: Callable[[str, Tensor], Tensor], **changes: Any) -> Operands:
        """The operands with ``f(name, tensor)`` in place of each tensor, and with ``changes`` of further fields."""
        single: dict[str, Any] = {name: f(name, x) for name, x in self.tensors.items()}
        residuals = tuple(f(f"r{index}", residual) for index, residual in enumerate(self.residuals))
        lookups = {i: (f(f"r{i}", table), f(f"i{i}", rows)) for i, (table, rows) in self.lookups.items()}
        return dataclasses.replace(self, residuals=residuals, lookups=lookups, **single, **changes)

    def moved(self, move: Callable[[Guarded], Guarded]) -> Operands:
        """The same values and strides in the storages that ``move`` makes of :attr:`buffers`."""
        buffers = tuple(map(move, self.buffers))
        places = {
            old.storage.untyped_storage().data_ptr(): (old, new)
            for old, new in zip(self.buffers, buffers, strict=True)
            if old.storage.numel()
        }

        def relocated(_: str, x: Tensor) -> Tensor:
            place = x.untyped_storage().data_ptr()
            if place not in places:
                return x  # without elements, or what was looked up in a table: no other tensor shares its storage
            old, new = places[place]
            offset = x.storage_offset() - old.view.storage_offset() + new.view.storage_offset()
            return new.storage.as_strided(x.size(), x.stride(), offset)

        return self.map(relocated, buffers=buffers)

    def clone(self) -> Operands:
        """The same operands in fresh memory: values, strides, alignment and poison; about the time of a copy."""
        return self.moved(Guarded.clone)

    @property
    def scale(self) -> Tensor | None:
        """What multiplies an element of the product: B's scales, or A's times B's; float64, CPU, broadcastable.

        (N,) for scales of B's columns; (M, N) or () with those of A, of the result's shape for a grouped product.
        Scales of blocks belong to A's and B's elements.
        """
        if self.whole_a is not None and self.whole_b is not None:
            return _wide(self.whole_a) * _wide(self.whole_b)
        problem = self.problem
        if self.scale_b is None or problem.scale_blocks or problem.micro_block or problem.op.coded:
            return None
        found = _wide(self.scale_b)
        if static := self.problem.step("static"):
            return found * float(np.float32(static.numbers[0]))  # the op keeps it in f32
        if self.problem.op.rounds_once and self.problem.shape.batch is not None:
            assert self.scale_a is not None
            product: Tensor = scale_of(self.problem, _wide(self.scale_a), found, self.groups)
            return product
        found = found * self.problem.result_factor(self.device)
        return found if self.scale_a is None else _wide(self.scale_a) * found

    @property
    def weight(self) -> Tensor:
        """B as the product multiplies it, where it is stored as codes: float64, CPU, (K, N), exact."""
        if self.problem.op.coded:
            given = {name: _wide(x) for name, x in self.tensors.items() if name in {"scale_b", "zero_b"}}
            weight: Tensor = weight_of(torch, self.problem, {"b": _wide(self.b).mT, **given}, torch.float64).mT
            return weight
        assert self.quantisation is not None
        scales, zeros = _wide(self.quantisation)[:, None].unbind(-1)
        groups = (_wide(self.b) - 8.0).unflatten(0, (-1, self.problem.group_size))
        found: Tensor = groups.mul_(scales).add_(zeros).flatten(0, 1)
        return found

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """[first, last) of each group of a grouped product; () for any other."""
        if self.offs is None:
            return ()
        return tuple(itertools.pairwise([0, *self.offs.tolist()]))

    @property
    def idle(self) -> Tensor | None:
        """Which rows of A no group owns, bool, ([B,] M), on the CPU; they hold NaN.  ``None`` for none."""
        return idle_rows(self.problem, self.a, self.offs, self.counts)

    def digest(self) -> str:
        """Hashes of every byte of every storage, viewed or not, as ``a=... b=...``.  About 2 ms for 1 MB."""
        return " ".join(f"{g.name}={digest(g.storage)}" for g in self.buffers)

    def changed(self, before: str) -> tuple[str, ...]:
        """Names of the operands whose storage is not what it was when ``before = digest()``; () for none.

        A given result may have changed.
        """
        old = dict(part.split("=") for part in before.split())
        return tuple(g.name for g in self.buffers if g.name != "out" and old.get(g.name) != digest(g.storage))

    def reset_out(self) -> None:
        """What a given result holds before a run: the operand that it is too, or poison: what is not written shows."""
        if self.out is not None and self.problem.in_place:
            self.out.copy_(getattr(self, self.problem.in_place))
        elif self.out is not None:
            self.out.fill_(poison_of(self.out.dtype))

    def beside_out_intact(self) -> bool:
        """Whether all that lies around the elements of a given result is as it was."""
        return all(g.guards_intact() for g in self.buffers if g.name == "out")

    def guards_intact(self) -> bool:
        """Whether all poison around the operands is in place."""
        return all(g.guards_intact() for g in self.buffers)


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(device="cpu", dtype=torch.float64)


# Streams of what does not have M rows.  Names of streams decide the values.
_CONSTANT: Final = frozenset(
    {"b", "b-heavy", "b-specials", "b-zeros", "scale", "scale-both", "bias", "affine", "affine-zero", "pruned"}
)


def _keys(problem: Problem, distribution: str, seed: int) -> Callable[[str], Stream]:
    """Streams by operand name.

    A dynamic size changes no value.  What does not have M rows leaves M out of its key, and a dynamic batch, so that a
    constant is the same for all of them.
    """
    epilogue = "+".join(map(str, problem.steps))
    flags = "+".join(FLAGS[flag].stream for flag in problem.flags if not flag.endswith(".dynamic"))
    rest = f":{epilogue}:{flags}" if flags else f":{epilogue}" if epilogue else ""
    front, shape = f"{problem.op.name}:{problem.dtypes}:{problem.layout}", problem.shape
    batch = "" if shape.batch is None else f"{shape.batch}x"
    any_batch = "Bx" if problem.has("batch.dynamic") else batch
    line = f"{front}:{batch}{shape.m}x{shape.n}x{shape.k}{rest}"
    any_m = f"{front}:{any_batch}Mx{shape.n}x{shape.k}{rest}"
    return lambda name: Stream(any_m if name in _CONSTANT else line, distribution, str(seed), name)


def make(problem: Problem, distribution: str, seed: int, device: str = Device.CPU) -> Operands:
    """The operands of ``problem``.

    Args:
        problem: what is to be computed.
        distribution: a key of :data:`DISTRIBUTIONS`.
        seed: any integer; another seed gives other values (``k-cover`` and ``tile-map`` have one product only).
        device: a :class:`Device`, where the tensors lie; values are drawn on the CPU.

    Raises:
        Unsupported: when operands of the op cannot be built yet, or the distribution does not apply to the problem.
        ValueError: for an unknown distribution.
    """
    if distribution not in DISTRIBUTIONS:
        hint = did_you_mean(distribution, DISTRIBUTIONS)
        raise ValueError(f"unknown distribution {distribution!r}{hint}; known: {', '.join(DISTRIBUTIONS)}")
    headroom = headroom_of(problem, _keys(problem, distribution, seed))
    chosen = DISTRIBUTIONS[distribution]
    if not chosen.applies(problem):
        remedy = f"one of {' '.join(distributions_for(problem))}"
        raise Unsupported("distribution", f"{distribution} does not apply to {problem}", remedy)
    # Roundings to a narrow dtype, overflows to Inf included, are meant; torch does them silently.
    drawn = chosen.build(headroom)
    _face_relu(headroom, drawn)
    quantise(headroom, drawn, distribution)
    memory = _Memory(problem, Device(device))
    tensors = memory.keep_all(headroom, drawn, distribution)
    prologues.regrid(problem, drawn)
    drawn.base_quantum = drawn.base_quantum or drawn.quantum
    drawn.quantum *= problem.result_factor(device)
    signed = chosen.zero_mean and not problem.b_is_a and not drawn.quantum and prologues.are_zero_mean(problem)
    finite = all(g.finite for g in memory.buffers if g.name != "out")
    facts: dict[str, Any] = {"zero_mean": signed, "finite": finite, "buffers": tuple(memory.buffers)}
    facts |= {field.name: getattr(drawn, field.name) for field in dataclasses.fields(Grid)}
    return Operands(problem, distribution, seed, memory.device, **facts, **tensors)


class _Memory:
    """Puts the values of a problem's operands into memory.

    Attributes:
        device: where they lie.
        buffers: the storages, in the order in which they were made.
    """

    def __init__(self, problem: Problem, device: Device) -> None:
        self._problem, self.device = problem, device
        self.buffers: list[Guarded] = []

    def keep(self, name: str, values: Array | Lines, dtype: DType, **state: Any) -> Tensor:
        """The tensor of these values; see :func:`guarded` for its state."""
        self.buffers.append(guarded(name, values, dtype, self.device, **state))
        return self.buffers[-1].view

    def keep_all(self, headroom: Headroom, drawn: Drawn, distribution: str) -> dict[str, Any]:
        """All tensors and A's zero point, by their names in :class:`Operands`."""
        problem = self._problem
        a = self._side(headroom.a, drawn.a)
        b_as_a = a if problem.has("b.alias") else a.mT
        found: dict[str, Any] = {"a": a, "b": b_as_a if drawn.b is None else self._side(headroom.b, drawn.b)}
        division = divided(problem, headroom.draw)
        found |= {name: self.keep(name, values, DTYPES["i32"]) for name, values in division.items()}
        spoil(a, idle_rows(problem, a, found.get("offs"), found.get("counts")))
        found |= self._scales(headroom, drawn)
        bias = bias_of(headroom, drawn, distribution == "specials")
        if bias is not None:
            for index in range(len(bias) if problem.op.several else 0):
                if not problem.is_one_of("bias", index):
                    bias[index] = -0.0  # the neutral element: a product without a bias keeps the sign of its zeros
            if problem.step("bias_codes"):
                static = problem.step("static")
                assert drawn.scale_b is not None
                bias = np.rint(bias / (drawn.scale_b * (static.numbers[0] if static else drawn.scale_a)))
            found["bias"] = self.keep(
                "bias",
                np.asarray(bias),
                problem.bias_dtype,
                apart=problem.op.several,
                offset=problem.has("bias.offset"),
            )
        if problem.has_out:
            found["out"] = self._out(found)
        residuals: list[Tensor] = []
        lookups: dict[int, tuple[Tensor, Tensor]] = {}
        for index, (values, dtype) in enumerate(residuals_of(headroom, drawn)):
            if index == 0 and problem.has("r0.alias"):
                residuals.append(a)
            elif problem.residuals[index][0].extent == "at":
                stream = headroom.draw(f"i{index}")
                rows = stream.look_up(problem.result_shape[:-1], np.arange(TABLE_ROWS, dtype=np.int32))
                table = self.keep(f"r{index}", values, dtype)
                lookups[index] = table, self.keep(f"i{index}", rows, DTYPES["i32"])
                residuals.append(table[lookups[index][1].long()])
            else:
                residuals.append(self._residual(index, values, dtype))
        return {**found, "residuals": tuple(residuals), "lookups": lookups, "zero": headroom.zero}

    def _side(self, side: Side, lines: Array) -> Tensor:
        """A or B over its storage: transposed, expanded, without a batch of one."""
        problem, is_a = self._problem, side.name == "a"
        transposed = problem.layout.a_transposed if is_a else problem.layout.b_transposed
        batch = problem.shape.batch
        one = problem.op.several or problem.op.ragged in {"m", "k"} if is_a else problem.op.weight
        is_matrix = batch is None or one or (problem.op.ragged in {"n", "k"} and not is_a)
        dtype = problem.dtypes.a if is_a else problem.dtypes.b
        stored = all_lines(lines, side.shape, transposed == is_a)
        state: dict[str, Any] = {word: problem.has(f"{side.name}.{word}") for word in ("padded", "aligned", "offset")}
        state |= {"middle": problem.has(f"{side.name}.batch_middle"), "apart": problem.op.several and not is_a}
        view = self.keep(side.name, stored, dtype, cut=problem.view_of(side.name), matrix=is_matrix, **state)
        if problem.has(f"{side.name}.expanded"):
            view = (view[..., :1] if transposed == is_a else view[:, :1]).expand(view.shape)
        view = view.mT if transposed else view
        if is_matrix or batch is None:
            return view[0]
        return view.expand(batch, -1, -1) if problem.has(f"{side.name}.broadcast") else view

    def _out(self, found: Mapping[str, Tensor]) -> Tensor:
        """Memory for the result, between poison; where it is an operand too, a copy of that one."""
        problem = self._problem
        if problem.has("out.alias"):
            own, a = next(one for one in self.buffers if one.name == "a"), found["a"]
            self.buffers.append(dataclasses.replace(own.clone(), name="out"))
            return self.buffers[-1].storage.as_strided(a.size(), a.stride(), a.storage_offset())
        *batch, rows, columns = problem.result_shape
        is_t = problem.has("out.transposed")
        element = torch_dtype(problem.result_dtype)
        values = np.full((*batch, columns, rows) if is_t else (*batch, rows, columns), poison_of(element))
        if element.is_floating_point:
            values = values.astype(np.float32)
        state = {word: problem.has(f"out.{word}") for word in ("padded", "offset")}
        view = self.keep("out", values, problem.result_dtype, **state)
        view = view.mT if is_t else view
        return view.copy_(found["bias"]) if problem.has("out.addend") else view

    def _scales(self, headroom: Headroom, drawn: Drawn) -> dict[str, Tensor]:
        """The scales and zero points that the op takes."""
        problem, i32 = self._problem, DTYPES["i32"]
        if drawn.quantisation is not None:
            return {"quantisation": self.keep("quantisation", drawn.quantisation, problem.dtypes.a)}
        if drawn.scale_b is None:
            return {}
        if problem.op.coded:
            found = {"scale_b": self.keep("scale_b", drawn.scale_b, problem.scale_dtype)}
            return (
                found
                if drawn.zero_b is None
                else found | {"zero_b": self.keep("zero_b", drawn.zero_b, problem.dtypes.b)}
            )
        dtype = problem.scale_dtype
        if problem.micro_block:
            return self._of_small_blocks(drawn)
        if blocks := problem.scale_blocks:
            return {
                "scale_a": self._of_blocks("scale_a", drawn.scale_a, blocks[0] == 1),
                "scale_b": self._of_blocks("scale_b", drawn.scale_b, blocks[1] > 1),
            }
        found = {} if drawn.scale_a is None else {"scale_a": self.keep("scale_a", drawn.scale_a, dtype)}
        name = "scale_b" if headroom.problem.op.int8 or headroom.quantised else "scale"
        found["scale_b"] = self.keep(name, drawn.scale_b, dtype)
        if problem.op.zero_points:
            found["zero_b"] = self.keep("zero_b", np.zeros(headroom.b.shape[1], dtype=np.int32), i32)
            if "scale_a" in found:
                found["zero_a"] = self.keep("zero_a", np.asarray(headroom.zero, dtype=np.int32), i32)
        return found

    def _of_small_blocks(self, drawn: Drawn) -> dict[str, Tensor]:
        """Scales of small blocks in swizzled order, with zeros beyond the last line and block, and of whole tensors."""
        found = {}
        dtype = E8M0 if self._problem.step("mx") else DTYPES["f8e4m3fn"]
        for name, values in (("scale_a", drawn.scale_a), ("scale_b", drawn.scale_b)):
            assert values is not None
            if self._problem.has("program.unswizzled"):
                found[name] = self.keep(name, values, dtype)
                continue
            *each, lines, blocks = values.shape
            whole = np.zeros((*each, *tiled(lines, blocks)), dtype=np.float32)
            whole[..., :lines, :blocks] = values
            found[name] = self.keep(name, np.stack([*map(swizzled, whole)]) if each else swizzled(whole), dtype)
        for name, value in zip(("whole_a", "whole_b"), drawn.wholes or (), strict=False):
            found[name] = self.keep(name, np.asarray(value, dtype=np.float32), DTYPES["f32"])
        return found

    def _of_blocks(self, name: str, values: Array | None, is_transposed: bool) -> Tensor:
        """Scales of blocks, f32: those of single rows stored by rows of A or of B.T, those of squares by K."""
        assert values is not None
        scales = self.keep(name, values.swapaxes(-1, -2) if is_transposed else values, DTYPES["f32"])
        return scales.mT if is_transposed else scales

    def _residual(self, index: int, values: Array, dtype: DType) -> Tensor:
        """In the product's places.  In memory it lies as the program's result does, except for one after a view."""
        shape, (step, made) = self._problem.result_shape, self._problem.residuals[index]
        if step.extent:
            return self.keep(f"r{index}", values, dtype).expand(shape)
        lines = all_lines(values, shape)
        if isinstance(lines, Lines) or any(move.name == "view" for move in made):
            return self.keep(f"r{index}", lines, dtype)  # no view could undo the view; the program takes one with gaps
        stored = views.forth(torch.from_numpy(lines), made).contiguous()
        return views.back(self.keep(f"r{index}", stored.numpy(), dtype), shape, made)


def flushed(given: Operands) -> Operands:
    """The operands with zeros of the same sign for the subnormal numbers of f32 in A and B."""
    tiny = torch.finfo(torch.float32).tiny

    def zeroed(x: Tensor) -> Tensor:
        wide = x.dtype in {torch.float32, torch.bfloat16}
        return torch.where(x.abs() < tiny, x * 0.0, x) if wide else x

    return dataclasses.replace(given, a=zeroed(given.a), b=zeroed(given.b))


def again(given: Operands, problem: Problem, a: Tensor) -> Operands:
    """The operands of a further product by the same B: what its A holds has been computed, so it has no grid."""
    changes: dict[str, Any] = {"zero_mean": False, "finite": given.finite and is_finite(a), **vars(Grid())}
    return dataclasses.replace(given, problem=problem, distribution="rand", a=a, residuals=(), buffers=(), **changes)


def _face_relu(headroom: Headroom, drawn: Drawn) -> None:
    """Turn A's sign if a relu would silence most of a result, which then could show no error.

    That is a result of few elements, or one of a single sign.  A's, as B may be a constant that other M share.
    """
    problem = headroom.problem
    relu = next((index for index, step in enumerate(problem.epilogue) if step.name == "relu"), None)
    if relu is None or not headroom.a.dtype.is_float or drawn.b is None:
        return
    factors = [problem.alpha, *(s.numbers[0] for s in problem.epilogue[:relu] if s.name == "scale")]
    sign = math.prod(math.copysign(1.0, factor) for factor in factors)
    if drawn.positive:
        turned = sign < 0.0
    elif math.prod(problem.result_shape) <= 16:
        with np.errstate(invalid="ignore"):  # an infinity may meet a zero
            total = float((drawn.a.astype(np.float64) @ drawn.b.astype(np.float64).swapaxes(-1, -2)).sum())
        turned = sign * total < 0.0
    else:
        return
    if turned:
        drawn.a = -drawn.a
