"""The operands of a problem: what values they hold, where they lie, and what surrounds them.

``make(problem, filling, seed)`` gives every tensor that the problem's program takes.  Three promises:

* **Reproducible.**  Values come from the raw bits of numpy's Philox generator, keyed by blake2b of the
  problem line (without ``dyn-m``), the filling, the seed and the operand's name, and are mapped to numbers
  here.  The same call gives the same bytes on every machine.  The key of whatever does not have M rows (B,
  its scales, a bias of N) leaves M out: with ``dyn-m`` one compiled constant serves every M.
* **Fenced.**  Every tensor is a window into a larger storage.  Each byte of that storage that a kernel has no
  business to read is poison: NaN, because finite poison times a masked zero hides a one-sided mask, or an
  extreme integer.  :meth:`Operands.changed` proves that nothing was written.
* **Telling.**  An exact filling (:attr:`Operands.quantum` > 0) puts every product on a grid on which a sum in
  the accumulator's precision is exact in any order, so that a correct kernel has one possible sum.
  A random filling keeps magnitudes where neither the accumulator nor the output overflows.  Where an
  activation saturates, values are scaled by a power of two to where it does not.

Cost: three to five times the operand's size in transient memory, and about 10 ns per element.  Of a matrix of more than
2^22 elements only so many are drawn, and its further lines are these, rotated along K by an even number of places,
each line by another: time and memory are those of copying it, on the device itself (see :func:`_lines`).

Sources: the fillings and their limits are tiers 2 and 3 of the project's oracle (docs); for exact
sums of integers in a float accumulator see Higham (2002), section 2.1 (integers up to 2^p are exact).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pytest_gemm import moves
from pytest_gemm.backend import Unsupported
from pytest_gemm.problem import DTYPES, TF32, DType, Problem, Step, StepKind, did_you_mean
from pytest_gemm.program import PROGRAMS, WEIGHT_OPS, torch_dtype

__all__ = [
    "FILLINGS",
    "Filling",
    "Guarded",
    "Operands",
    "decode_k",
    "decode_source",
    "fillings_for",
    "is_large",
    "k_cover_digits",
    "make",
    "poison_output",
    "tile_map_period",
]

Array = npt.NDArray[Any]
Fill = Literal["nan", "max"]

# Bytes of poison before and after the data; a multiple of 64, so the data stays aligned, and wide enough for
# the widest vector that a kernel loads past an end (a warp's 32 x 16 bytes).
_BAND_BYTES: Final = 512
# Elements between two rows of a padded matrix: 8 keeps 16-byte alignment of a row for 2-byte types, and of fp8, which
# nobody multiplies unaligned, it takes 16.
_PAD: Final = 8
_PAD_FP8: Final = 16

# Elements of a matrix that are drawn; a larger one is made of them.
_DRAWN: Final = 1 << 22
# Bytes from which a storage on a device is hashed where it lies, by :func:`_checksum`.
_LARGE_BYTES: Final = 1 << 24

# Ops on 8-bit integers on both sides whose scales carry every power of two.
_INT8_OPS: Final = frozenset({"qlinear", "da8w8"})
# Zero point of a dynamically quantised A: far from 0, as asymmetric data have it; "half": in 7 bits.
_DYNAMIC_ZERO: Final = {"u8": 121, "i8": -9, "half": 57}
_SATURATING: Final = frozenset(
    # A join multiplies two products: what encodes something in its digits does not survive it, and it overflows early.
    {"gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "exp", "hardswish", "hardsigmoid", "clamp", "gated"},
)
# Of these the result has a magnitude of about one, whatever went in.
_UNIT_RANGE: Final = frozenset({"sigmoid", "tanh", "exp", "hardsigmoid"})


# -- memory -----------------------------------------------------------------------------------------


def _poison(count: int, dtype: torch.dtype, fill: Fill = "nan", device: str = "cpu") -> Tensor:
    """``count`` poisoned elements.

    Floats: NaN, or the largest finite value for ``max``.  Integers have no NaN: the two extremes in turn,
    starting with the other one for ``max``.  Unsigned ones alternate between the two largest, as 0 harms nobody.
    """
    flat = torch.empty(count, dtype=dtype, device=device)
    if dtype.is_floating_point:
        return flat.fill_(math.nan if fill == "nan" else torch.finfo(dtype).max)
    info = torch.iinfo(dtype)
    low, high = (info.min if info.min < 0 else info.max - 1), info.max
    if fill == "max":
        low, high = high, low
    flat[0::2] = low
    flat[1::2] = high
    return flat


@dataclasses.dataclass(frozen=True, eq=False)
class Guarded:
    """A tensor inside a larger storage whose other bytes are poison.

    Attributes:
        name: which operand it is: ``a b offs bias r0 scale scale_a zero_a scale_b zero_b affine out``.
        storage: the whole memory as a flat tensor, guard bands included.
        view: the strided window of the data, not expanded over a batch.
        fill: which poison surrounds it, see :func:`poison_output`.
        drawn_finite: of a large operand, whether the few lines are finite that it was made of; else ``None``.
    """

    name: str
    storage: Tensor
    view: Tensor
    fill: Fill = "nan"
    drawn_finite: bool | None = None

    def digest(self) -> str:
        """Hash of every byte of the storage, viewed or not."""
        size = self.storage.numel() * self.storage.element_size()
        if size >= _LARGE_BYTES and self.storage.device.type != "cpu":
            return _checksum(self.storage)  # rather than through the host's bus
        return hashlib.blake2b(_bytes(self.storage).data, digest_size=16).hexdigest()

    def clone(self) -> Guarded:
        """The same bytes in fresh memory: values, strides, offset and poison."""
        storage = self.storage.clone()
        return dataclasses.replace(self, storage=storage, view=_moved(self.view, storage))

    def guards_intact(self) -> bool:
        """Whether every byte outside the view still is the poison that was put there."""
        expected = _poison(self.storage.numel(), self.storage.dtype, self.fill)
        window = expected.as_strided(self.view.size(), self.view.stride(), self.view.storage_offset())
        window.copy_(self.view)
        return bool(np.array_equal(_bytes(expected), _bytes(self.storage)))


def _bytes(flat: Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a flat tensor, on the CPU; bits, so that NaN equals NaN."""
    found: npt.NDArray[np.uint8] = flat.view(torch.uint8).cpu().numpy()
    return found


def _moved(view: Tensor, storage: Tensor) -> Tensor:
    """The view of another storage that ``view`` is of its own."""
    return storage.as_strided(view.size(), view.stride(), view.storage_offset())


# Words of 32 bits that share a sum, and the odd number that the multipliers are powers of (of the golden ratio's bits).
_ROW_WORDS: Final = 1 << 16
_CHUNK_WORDS: Final = 1 << 22


@functools.lru_cache(maxsize=2)
def _multipliers(device: str) -> Tensor:
    """Random multipliers of 64 bits, for words of 32: a multilinear hash."""
    words = _Stream("checksum").words((_ROW_WORDS,), 64)
    return torch.from_numpy(words.view("<i8").astype(np.int64)).to(device)


def _checksum(flat: Tensor) -> str:
    """Hash of a large storage, computed where it lies in about the time of reading it.

    The storage is cut into rows of 2^16 words w of 32 bits; of each row ``sum w_i r_i mod 2^64`` with random r is kept,
    a multilinear hash: two different rows agree with a probability of at most 2^-32, over the r.  The sums are hashed
    by blake2b.
    """
    raw = flat.view(torch.uint8)
    whole = raw.numel() // 4 * 4
    words, rest = raw[:whole].view(torch.int32), raw[whole:]
    found = hashlib.blake2b(_bytes(rest).tobytes(), digest_size=16)
    r = _multipliers(str(flat.device))
    for first in range(0, words.numel(), _CHUNK_WORDS):
        chunk = words[first : first + _CHUNK_WORDS]
        full = chunk.numel() // _ROW_WORDS * _ROW_WORDS
        sums = [(chunk[:full].view(-1, _ROW_WORDS) * r).sum(1)]
        if full < chunk.numel():
            tail = chunk[full:]
            sums.append((tail * r[: tail.numel()]).sum().reshape(1))
        found.update(_bytes(torch.cat(sums)).tobytes())
    return found.hexdigest()


def _guarded(
    name: str,
    values: Array | _Lines | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    *,
    pad: int = 0,
    offset: int = 0,
    fill: Fill = "nan",
    apart: bool = False,
    middle: bool = False,
) -> Guarded:
    """Row-major ``shape`` with rows ``pad`` elements apart, ``offset`` elements past an aligned address.

    With ``apart`` each matrix begins 64-byte aligned, as a tensor of its own would; with ``middle`` the first dimension
    lies between the two others in memory.
    """
    strides = [1] * len(shape)
    step = 1
    for dim in (1, 0, 2)[::-1] if middle else reversed(range(len(shape))):
        unit = 64 // torch.empty(0, dtype=dtype).element_size() if apart and dim == 0 else 1
        step = -(-step // unit) * unit
        strides[dim] = step
        # A zero-size dimension keeps a stride of at least 1, as torch.empty has it.
        step *= max(shape[dim], 1) + (pad if dim == len(shape) - 1 else 0)
    band = _BAND_BYTES // torch.empty(0, dtype=dtype).element_size()
    if isinstance(values, _Lines):
        flat = _poison(band + offset + step + band, dtype, fill, device)
        view = flat.as_strided(shape, strides, band + offset)
        return Guarded(name, flat, view, fill, values.write(view))
    flat = _poison(band + offset + step + band, dtype, fill)
    if values is not None:
        flat.as_strided(shape, strides, band + offset).copy_(torch.from_numpy(values))
    flat = flat.to(device)
    return Guarded(name, flat, flat.as_strided(shape, strides, band + offset), fill)


def poison_output(
    shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu", *, offset: int = 0, fill: Fill = "nan"
) -> Guarded:
    """A contiguous output that nobody has written yet, between two guard bands.

    Hand ``result.view`` to an ``out=`` kernel: an element that it leaves out stays poison, and
    ``result.guards_intact()`` is ``False`` afterwards if it wrote past an end.

    Args:
        shape: of the output.
        dtype: its element type.
        device: where it lies.
        offset: elements past a 64-byte aligned address (given an aligned allocator, as torch's are).
        fill: ``nan``, or ``max`` for another content of the memory: a right kernel's result is the same on both.
    """
    return _guarded("out", None, shape, dtype, device, offset=offset, fill=fill)


# -- random bits ------------------------------------------------------------------------------------


class _Stream:
    """Raw random bits of one operand.  No distribution method of numpy: those may change between versions."""

    def __init__(self, *key: str) -> None:
        digest = hashlib.blake2b("\0".join(key).encode(), digest_size=16).digest()
        self._bits = np.random.Philox(key=int.from_bytes(digest, "little"))

    def words(self, shape: tuple[int, ...], bits: int) -> Array:
        """Unsigned integers of 8, 16, 32 or 64 random bits each."""
        count = math.prod(shape)
        raw = np.asarray(self._bits.random_raw(-(-count * bits // 64)), dtype="<u8")
        return raw.view(f"<u{bits // 8}")[:count].reshape(shape)

    def below(self, limit: int) -> int:
        """One integer of [0, limit)."""
        return int(self.words((1,), 64)[0]) % limit

    def look_up(self, shape: tuple[int, ...], values: Array, bits: int = 16) -> Array:
        """Values picked by random words of ``bits`` bits, word w picks ``values[w % len(values)]``."""
        words = self.words(shape, bits)
        if words.size > 1 << bits:  # a full table is made faster than that many remainders are taken
            values, found = np.resize(values, 1 << bits), words
        else:
            found = words % np.asarray(len(values), dtype=np.uint32)
        picked: Array = values[found]
        return picked

    def uniform(self, shape: tuple[int, ...], wide: bool) -> Array:
        """Uniform in [-1, 1], float64 with 53 random bits when ``wide``, else float32."""
        if wide:
            return (self.words(shape, 64).view("<i8") >> 10).astype(np.float64) * 2.0**-53
        return self.words(shape, 32).view("<i4").astype(np.float32) * np.float32(2.0**-31)

    def binade(self, shape: tuple[int, ...], wide: bool) -> Array:
        """Either sign, magnitude in [0.5, 1), every bit of the significand random."""
        if wide:
            bits = self.words(shape, 64)
            return ((bits & np.uint64(0x800FFFFFFFFFFFFF)) | np.uint64(1022 << 52)).view("<f8")
        bits = self.words(shape, 32)
        return ((bits & np.uint32(0x807FFFFF)) | np.uint32(126 << 23)).view("<f4")


# -- what a problem leaves room for -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Frame:
    """The facts of a problem that decide magnitudes.  None of them depends on M.

    Attributes:
        k: number of products in a sum.
        a, b: element types whose numbers the product multiplies: under ``tf32`` and autocast narrower than the stored.
        a_shape, b_shape: ``(matrices, lines, K)``: a line is a row of A or a column of B.
        limit: how many quanta a sum of magnitudes may reach: 2^24, 2^53 or 2^31 for f64 and integers, 2^p of a half
            type in which partial sums may be stored.
        room: largest magnitude of the product that nothing behind it overflows.
        adds: number of steps that add an operand.
        target: wanted magnitude of the product, 0 where the epilogue treats all alike.
        twin: B is A transposed.
        scaled: B has scales for each column.
        whole: every line is drawn, however many there are.
        int8: A and B are 8-bit integers whose product is scaled.
        zero: A's zero point: what the product subtracts of each element that is stored.
        quantised: ``tensorwise`` or ``rowwise`` where A and B are fp8 with scales of their own: the scales carry every
            power of two, and fp8 only small integers or fractions.  "" elsewhere.
    """

    problem: Problem
    k: int
    a: DType
    b: DType
    a_shape: tuple[int, int, int]
    b_shape: tuple[int, int, int]
    limit: int
    room: float
    adds: int
    target: float
    twin: bool
    scaled: bool
    quantised: str = ""
    whole: bool = False
    int8: bool = False
    zero: int = 0

    @property
    def a_drawn(self) -> tuple[int, int, int]:
        """How many lines of A a filling draws whose lines are alike, in the shape of :attr:`a_shape`."""
        return self.a_shape if self.whole else _drawn_stack(self.a_shape)

    @property
    def b_drawn(self) -> tuple[int, int, int]:
        """The same of B."""
        return self.b_shape if self.whole else _drawn_stack(self.b_shape)

    @property
    def wide(self) -> bool:
        """Whether float32 cannot hold the operands."""
        return "f64" in (self.a.name, self.b.name)

    @property
    def all_integer(self) -> bool:
        """Neither side can be scaled by a power of two."""
        return not (self.a.is_float or self.b.is_float)

    def exponent(self, rms: float, bound: float) -> int:
        """Exponent e of the power of two to scale A @ B by.

        Args:
            rms: typical magnitude of an element of A @ B.
            bound: what no element can exceed.
        """
        if self.all_integer:
            return 0
        # Eight standard deviations are never seen (1e-15 per element); a diagonal of A @ A.T is the bound.
        peak = bound if self.twin else min(bound, 8.0 * rms)
        # A difference of logarithms: the quotient may overflow.
        most = math.floor(math.log2(self.room) - math.log2(peak + 2.0 * self.adds * rms))
        e = min(most, round(math.log2(self.target / rms)) if self.target else 0)
        return 2 * (e // 2) if self.twin else e

    def split(self, e: int) -> tuple[int, int]:
        """Exponents for A and for B that make up ``e``; an integer side takes none."""
        if not self.b.is_float:
            return e, 0
        if not self.a.is_float:
            return 0, e
        return e - e // 2, e // 2


def _drawn_stack(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """The shape to draw for one of ``(matrices, lines, K)``: fewer lines of a single matrix where there are too many.

    A handful of lines is drawn whole, however long they are.
    """
    matrices, lines, k = shape
    most = max(16, _DRAWN // max(k, 1))
    return shape if matrices * lines <= most else (1, most, k)


def _drawn_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The same for a matrix or a stack of them."""
    matrices, lines, k = (1, *shape)[-3:]
    return _drawn_stack((matrices, lines, k))[3 - len(shape) :]


@dataclasses.dataclass(frozen=True, eq=False)
class _Lines:
    """A large stack of matrices made of few lines.

    Line i of all is drawn line ``i mod R``, rotated by ``2 ((i // R) step mod K / 2)`` places; the last element of an
    odd K stays where it is.  A rotation by an even number keeps what the fillings promise of a line as such and of even
    against odd k, and no two lines are the same up to R K / 2 of them.

    Attributes:
        drawn: the R lines, (R, K).
        shape: (matrices, lines, K), or without the first.
        transposed: the memory holds (matrices, K, lines).
    """

    drawn: Array
    shape: tuple[int, ...]
    transposed: bool = False

    def write(self, view: Tensor) -> bool:
        """Fill ``view``, of any device: the lines are converted to its dtype once, and copied there.

        Returns:
            Whether all of it is finite.
        """
        lines = torch.from_numpy(self.drawn).to(view.dtype).to(view.device)
        count, k = lines.shape
        even = k - k % 2
        half = max(even // 2, 1)
        step = next(s for s in range(int(0.618 * half) + 1, 2 * half + 2) if math.gcd(s, half) == 1)
        twice = torch.cat([lines[:, :even], lines[:, :even]], 1)
        to = view.mT if self.transposed else view
        to = to if to.dim() == 3 else to[None]
        for index, matrix in enumerate(to):
            first = 0
            while first < len(matrix):
                turn, row = divmod(index * len(matrix) + first, count)
                size = min(count - row, len(matrix) - first)
                place = 2 * (turn * step % half)
                matrix[first : first + size, :even] = twice[row : row + size, place : place + even]
                matrix[first : first + size, even:] = lines[row : row + size, even:]
                first += size
        return _is_finite(lines)


def _all_lines(drawn: Array, shape: tuple[int, ...], transposed: bool = False) -> Array | _Lines:
    """Lines that were drawn as those of ``shape``, in storage order."""
    if drawn.shape == shape:
        return drawn.swapaxes(-1, -2) if transposed else drawn
    return _Lines(drawn.reshape(-1, drawn.shape[-1]), shape, transposed)


def _narrowest(problem: Problem) -> list[DType]:
    """The element types that the value goes through."""
    return [problem.value_dtype] + [s.dtype for s in problem.epilogue if s.kind is StepKind.CAST]


def _saturating(problem: Problem) -> list[Step]:
    return [s for s in problem.epilogue if s.name in _SATURATING]


def _frame(problem: Problem) -> _Frame:
    """The magnitudes of ``problem``.

    Raises:
        Unsupported: when its operands cannot be built.
    """
    op = problem.op.name
    if op not in PROGRAMS:
        raise Unsupported("no-operands", f"operands of {op} are not built yet")
    chain = _narrowest(problem)
    for dtype in chain[1:]:
        if not dtype.is_float and dtype.name != "i32":
            # Out of range this is undefined in C, and every compiler answers differently.
            text = f"cast-{dtype.name} has no defined result out of range"
            raise Unsupported("cast-int", text, "cast to i32 or to a float")
    growth = max(1.0, abs(problem.alpha))
    for step in problem.epilogue:
        if step.name == "scale":
            growth *= max(1.0, abs(step.numbers[0]))
        # Residuals of mul reach 3, those of div go down to 1/2.
        growth *= {"mul": 4.0, "div": 2.0}.get(step.name, 1.0)
    room = DTYPES["f32"].max_finite if op in _INT8_OPS else min(d.max_finite for d in chain)
    if problem.step("exp") is not None:
        room = math.log(room)
    target = 0.0
    for step in _saturating(problem):
        wanted = {"exp": 1.0, "clamp": max((abs(x) for x in step.numbers), default=0.0) or 1.0}.get(step.name, 2.0)
        target = min(target or wanted, wanted)
    if (
        problem.step("exp") is not None
        and op not in _INT8_OPS
        and not (problem.dtypes.a.is_float or problem.dtypes.b.is_float)
    ):
        raise Unsupported("exp-of-integers", "exp of an integer product overflows, and integers cannot be scaled down")
    shape = problem.shape
    batch = 1 if shape.batch is None else shape.batch
    matrices_b = 1 if op in WEIGHT_OPS or problem.has("bcast-b") else batch
    # All groups of a grouped product lie in one matrix.
    matrices_a, rows = (1, batch * shape.m) if problem.grouped else (batch, shape.m)
    matrices_a = 1 if op == "linears" else matrices_a
    a, b = ((problem.input_dtype,) * 2) if problem.autocast else (problem.dtypes.a, problem.dtypes.b)
    zero = 0
    if op == "qlinear":
        if problem.has("reduce-range"):
            a = dataclasses.replace(a, max_finite=127.0)
        static = problem.step("static")
        zero = int(static.numbers[1]) if static else _DYNAMIC_ZERO["half" if problem.has("reduce-range") else a.name]
    if problem.has("tf32"):
        a, b = (TF32 if d.name == "f32" else d for d in (a, b))
    out = problem.dtypes.out
    return _Frame(
        problem,
        shape.k,
        a,
        b,
        (1 if problem.has("bcast-a") else matrices_a, rows, shape.k),
        (matrices_b, shape.n, shape.k),
        2**out.precision if problem.has("reduced") else {"f64": 2**53, "i32": 2**31 - 1}.get(out.name, 2**24),
        room / growth,
        sum(s.kind is StepKind.BIAS or s.name in {"add", "sub"} for s in problem.epilogue),
        target / growth,
        problem.is_twin,
        op in {"woq_int8", "woq_int4", "qlinear", "da8w8"},
        next((s.name for s in problem.epilogue if op == "scaled_mm" and s.name in {"tensorwise", "rowwise"}), ""),
        int8=op in _INT8_OPS,
        zero=zero,
    )


@dataclasses.dataclass
class _Drawn:
    """What a filling decided.

    Attributes:
        a, b: lines of A and B, float32 or float64, exactly representable after rounding to their dtype;
            ``b`` is ``None`` for a twin.
        level: typical magnitude of the product, scales included.
        quantum: grid of products and bias, 0.0 for none.
        spare: what the bias may reach, in quanta (exact fillings).
        scale: scales of B's columns, or of B as a whole.
        positive: bias and residuals keep to positive values.
        scale_a: scales of A's rows, or of A as a whole.
        grain: grid of the products before any scale; 0.0 where it is the quantum.
        units: powers of two that the elements of A and those of B are multiples of; 0.0 where there is none.
        reach: what no sum of magnitudes of products exceeds, in quanta (exact fillings).
    """

    a: Array
    b: Array | None
    level: float
    quantum: float = 0.0
    spare: float = 0.0
    scale: Array | None = None
    positive: bool = False
    scale_a: Array | None = None
    grain: float = 0.0
    units: tuple[float, float] = (0.0, 0.0)
    reach: float = math.inf


_Draw = Callable[[str], _Stream]
_Build = Callable[[_Frame, _Draw], _Drawn]


def _scaled(lines: Array, e: int) -> Array:
    """``lines * 2^e``, exact."""
    return lines if e == 0 else np.asarray(lines * lines.dtype.type(2.0**e))


def _exact_scale(frame: _Frame, draw: _Draw) -> Array | None:
    """Scales 1, 1/2, 1/4, 1/8 for the columns of B: exact, and a neighbour's differs more often than not."""
    if not frame.scaled:
        return None
    return draw("scale").look_up((frame.b_shape[1],), np.array([1, 0.5, 0.25, 0.125], dtype=np.float32), 8)


# What zero points of up to 8 make of a code of 4 bits at most: 1 becomes 9, in a power of two.
_INT4_GROWTH: Final = 16
# The smallest scale of _exact_scale, and its root mean square.
_SCALE_STEP: Final = 0.125
_SCALE_RMS: Final = 0.576

# Fractional bits to which Hopper's tensor cores align the products of fp8 and the sum (see tensor_core.py): what a sum
# of integers may reach without losing any.
_FP8_BITS: Final = 13


def _scale_pair(frame: _Frame, draw: _Draw, rows: Callable[[_Stream, tuple[int, ...]], Array]) -> tuple[Array, Array]:
    """Scales of A and of B in the shapes that ``torch._scaled_mm`` takes: (M, 1) and (1, N), or two scalars.

    Args:
        frame: of a quantised problem.
        draw: its streams.
        rows: draws scales of the given shape.
    """
    if frame.quantised == "tensorwise":
        pair = rows(draw("scale-both"), (2,))  # the same for every M
        return np.asarray(pair[0]), np.asarray(pair[1])
    return rows(draw("scale-a"), (frame.a_shape[1], 1)), rows(draw("scale"), (1, frame.b_shape[1]))


def _powers(stream: _Stream, shape: tuple[int, ...]) -> Array:
    """Scales 1/8, 1/4, 1/2 and, where there are many, 1: a neighbour's differs more often than not."""
    values = [0.125, 0.25, 0.5] if len(shape) == 1 else [0.125, 0.25, 0.5, 1.0]
    return stream.look_up(shape, np.array(values, dtype=np.float32), 8)


def _neutral(frame: _Frame) -> tuple[Array | None, Array | None]:
    """Scales of A and B whose product is 1, for fillings that encode something in the digits of a sum."""
    if frame.quantised == "tensorwise":
        return np.asarray(4.0, dtype=np.float32), np.asarray(0.25, dtype=np.float32)
    ones = np.ones(frame.b_shape[1], dtype=np.float32) if frame.scaled or frame.quantised else None
    if not frame.quantised or ones is None:
        return None, ones
    return np.ones((frame.a_shape[1], 1), dtype=np.float32), ones.reshape(1, -1)


def _budget(frame: _Frame) -> int:
    """Quanta that products may use up: a share is left for the bias, and three bits for the scales."""
    if frame.quantised:
        return 2**_FP8_BITS  # scales and bias come after the sum, and in f32
    limit = frame.limit * 3 // 4 if frame.adds else frame.limit
    if frame.scaled and not frame.int8:  # the sums of integers are exact before they are scaled
        limit = int(limit * _SCALE_STEP)
    if frame.b.name == "i4":
        limit //= _INT4_GROWTH
    if frame.all_integer:
        limit = min(limit, int(frame.room / (2.0 if frame.adds else 1.0)))
    return max(limit, 1)


def _on_grid(
    frame: _Frame, draw: _Draw, a: Array, b: Array | None, rms: float, bound: float, *, only_b: bool = False
) -> _Drawn:
    """Integer lines, scaled by a power of two into the room there is.

    ``rms`` and ``bound`` are those of A @ B in integers; ``only_b`` leaves A as it is where B can be scaled.
    """
    if frame.quantised:
        return _on_quantised_grid(frame, draw, a, b, rms, bound)
    scale = _exact_scale(frame, draw)
    e = frame.exponent(rms * (_SCALE_RMS if frame.scaled else 1.0), bound)
    ea, eb = (0, e) if only_b and frame.b.is_float else frame.split(e)
    quantum = 2.0**e * (_SCALE_STEP if frame.scaled else 1.0)
    spare = frame.limit - bound / (_SCALE_STEP if frame.scaled else 1.0)
    if frame.int8:
        spare = frame.limit / 4  # the bias comes after the scales, and whatever it costs is in the bound
    return _Drawn(
        _scaled(a, ea),
        None if b is None else _scaled(b, eb),
        rms * 2.0**e * (_SCALE_RMS if frame.scaled else 1.0),
        quantum,
        spare,
        scale,
        grain=2.0**e,
        units=(2.0**ea, 2.0**eb),
        reach=frame.limit - spare,
    )


def _on_quantised_grid(frame: _Frame, draw: _Draw, a: Array, b: Array | None, rms: float, bound: float) -> _Drawn:
    """Integers of fp8 as they are; powers of two in the scales, which bring the product into the room there is."""
    scale_a, scale_b = _scale_pair(frame, draw, _powers)
    e = frame.exponent(rms * _SCALE_RMS**2, bound)
    quantum = 2.0**e * _SCALE_STEP**2
    return _Drawn(
        a,
        b,
        rms * 2.0**e * _SCALE_RMS**2,
        quantum,
        frame.limit - bound / _SCALE_STEP**2,
        _scaled(scale_b, e // 2),
        scale_a=_scaled(scale_a, e - e // 2),
        grain=1.0,
    )


def _real(frame: _Frame) -> type[np.floating[Any]]:
    return np.float64 if frame.wide else np.float32


# -- exact fillings -----------------------------------------------------------------------------------


def _int_1(frame: _Frame, draw: _Draw) -> _Drawn:
    """{-1, 0, 1}; a quarter zeros, none at K = 1 where they would silence outputs.  Unsigned: {0, 1}.

    A sum of fp8 holds few bits: where K is longer than that, A is zero but for as many elements as they pay for.  In
    the same way the sums of a large problem are kept within what its output's type holds.
    """
    out = frame.problem.dtypes.out
    kept = frame.k
    if frame.quantised:
        kept = min(kept, _budget(frame))
    elif is_large(frame.problem) and out.is_float and not frame.target:
        # The whole result is to be checked exactly, so that its type has to hold the sums.  No scale depends on it,
        # and B must not: it is the same for every M.
        kept = min(kept, 2**out.precision * (3 if frame.adds else 4) // 4)

    def lines(name: str, shape: tuple[int, ...], dtype: DType) -> Array:
        codes = [0, 0, 1, 1, 1, -1, -1, -1] if frame.k > 1 else [1, -1]
        values = np.array(codes, dtype=_real(frame))
        stream = draw(name)
        if name == "a" and kept < frame.k:
            sparse = np.zeros(shape, dtype=values.dtype)
            _spread(stream, sparse, kept, lambda some: stream.look_up(some, values, 8))
            return sparse
        return stream.look_up(shape, np.abs(values) if dtype.name == "u8" else values, 8)

    b = None if frame.twin else lines("b", frame.b_drawn, frame.b)
    rms = 0.75 * math.sqrt(max(kept, 1))
    return _on_grid(frame, draw, lines("a", frame.a_drawn, frame.a), b, rms, max(kept, 1))


# Widest integer of the int-2 filling.  Wider than TF32 (11 bits) and bfloat16 for f32, than f32 for f64.
_WIDE: Final = {
    "f64": 2**40 - 1, "f32": 2**16 - 1, "tf32": 2**11 - 1, "f16": 2**11 - 1, "bf16": 2**8 - 1, "i8": 127, "u8": 255,
    "i4": 7, "f8e4m3fn": 2**4 - 1, "f8e5m2": 2**3 - 1,
}  # fmt: skip
_NARROW: Final = 7


def _spread(stream: _Stream, lines: Array, count: int, values: Callable[[tuple[int, ...]], Array]) -> None:
    """Overwrite ``count`` elements of each line, one at a random place in each of ``count`` equal stretches.

    Without replacement by construction, so a line's sum of magnitudes has a bound and not an expectation.
    """
    length = lines.shape[-1]
    if count >= length:
        lines[...] = values(lines.shape)
        return
    if count == 0:
        return
    edges = np.arange(count + 1, dtype=np.int64) * length // count
    shape = (*lines.shape[:-1], count)
    offset = stream.words(shape, 32).astype(np.int64) % np.diff(edges)
    np.put_along_axis(lines, edges[:-1] + offset, values(shape), axis=-1)


@functools.lru_cache(maxsize=16)
def _signed_table(low: int, high: int, wide: bool, signed: bool) -> Array:
    """65536 integers of [low, high]; when signed, a run of them for each sign, so that both are independent."""
    table: Array = np.resize(np.arange(low, high + 1, dtype=np.float64 if wide else np.float32), 65536)
    if signed:
        table[32768:] = -table[:32768]
    return table


@functools.lru_cache(maxsize=3)
def _int8_table(low: int, high: int) -> Array:
    """65536 integers of 8 bits, half of them the extremes and the others all equally likely."""
    table = np.resize(np.arange(low, high + 1, dtype=np.float32), 65536)
    table[:32768] = np.resize(np.array([low, high], dtype=np.float32), 32768)
    return table


def _least(dtype: DType) -> int:
    """The smallest integer of a type of 4 or 8 bits."""
    return {"u8": 0, "i4": -8}.get(dtype.name, -128)


def _magnitudes(
    stream: _Stream, dtype: DType, low: int, high: int, real: type[Any]
) -> Callable[[tuple[int, ...]], Array]:
    """Integers of either sign (unless unsigned) with magnitudes in [low, high]."""

    def draw(shape: tuple[int, ...]) -> Array:
        if high < 16384:
            return stream.look_up(shape, _signed_table(low, high, real is np.float64, dtype.name != "u8"))
        bits = stream.words(shape, 64 if high >= 2**31 else 32)
        one = bits.dtype.type(1)
        values = (bits >> one) % bits.dtype.type(high - low + 1) + bits.dtype.type(low)
        found: Array = values.astype(real)
        if dtype.name != "u8":
            np.negative(found, out=found, where=(bits & one) == one)
        return found

    return draw


def _int_2(frame: _Frame, draw: _Draw) -> _Drawn:
    """Wide integers against narrow ones: wide in A at even k, in B at odd k, narrow (1..7) everywhere else.

    A third of the budget each goes to the wide elements of A, to those of B and to the narrow products; where
    it does not pay for all, wide elements are spread thinly over the line.  A wide element always meets a narrow
    one, so the sum of magnitudes has a hard bound at any K.  Integers: full range, half of it the extremes.
    """
    k, real = frame.k, _real(frame)
    budget = _budget(frame)
    if frame.all_integer and (k * 2**14 <= budget or (frame.int8 and k <= _SHORT_INT8 // 2)):
        return _int_2_dense(frame, draw)
    third = max(budget // 3, 1)
    narrow = max(1, min(_NARROW, math.isqrt(third // max(k, 1))))
    narrow_square = (narrow + 1) * (2 * narrow + 1) / 6.0
    # Only a very small room (an int32 product cast to f16 or f8) cannot afford a narrow element everywhere.
    kept = min(k, third // narrow**2)

    def lines(name: str, shape: tuple[int, ...], dtype: DType, first: int, stride: int, wide: int, count: int) -> Array:
        stream = draw(name)
        every = _magnitudes(stream, dtype, 1, narrow, real)
        if kept < k and name == "a":
            found = np.zeros(shape, dtype=real)
            _spread(stream, found, kept, every)
        else:
            found = every(shape)
        _spread(stream, found[..., first::stride], count, _magnitudes(stream, dtype, -(-wide // 2), wide, real))
        return found

    if frame.twin:
        # Row against row: sum |a_i a_j| <= max sum a^2 (Cauchy and Schwarz), so it is squares that are budgeted.
        count = min(2, k)
        wide = max(narrow, min(_WIDE[frame.a.name], math.isqrt(2 * third // max(count, 1))))
        bound = count * wide**2 + k * narrow**2
        a = lines("a", frame.a_drawn, frame.a, 0, 1, wide, count)
        return _on_grid(frame, draw, a, None, max(bound / math.sqrt(max(k, 1)), 1.0), max(bound, 1))

    bound, square = kept * narrow**2, kept * narrow_square**2
    found = []
    for name, shape, dtype, first, places in (
        ("a", frame.a_drawn, frame.a, 0, (k + 1) // 2),
        ("b", frame.b_drawn, frame.b, 1, k // 2),
    ):
        wide = max(1, min(_WIDE[dtype.name], third // narrow))
        count = min(places, third // (wide * narrow))
        bound += count * wide * narrow
        square += count * (wide**2 * 7 / 12) * narrow_square
        found.append(lines(name, shape, dtype, first, 2, wide, count))
    return _on_grid(frame, draw, found[0], found[1], max(math.sqrt(square), 1.0), max(bound, 1))


# Up to this K no sum of int8 products leaves what float32 holds exactly: 2^24 / 128^2.
_SHORT_INT8: Final = 1024


def _int_2_dense(frame: _Frame, draw: _Draw) -> _Drawn:
    """Full-range integers: half of them extremes, where a 16-bit intermediate of a pair saturates.

    Sums of both signs stay small, so where K allows more each fourth line is -128 .. -113 throughout: where two of
    them meet, the sum is beyond 2^24 (from K of about 1160 on) and a float32 on its way would show.
    """
    heavy_table = np.arange(-128, -112, dtype=np.float32)

    def lines(name: str, shape: tuple[int, ...], dtype: DType) -> Array:
        found = draw(name).look_up(shape, _int8_table(_least(dtype), int(dtype.max_finite)))
        if frame.k > _SHORT_INT8:
            heavy = found[..., ::4, :]
            heavy[...] = draw(f"{name}-heavy").look_up(heavy.shape, heavy_table, 8)
        return found

    b = None if frame.twin else lines("b", frame.b_drawn, frame.b)
    k = max(frame.k, 1)
    return _on_grid(frame, draw, lines("a", frame.a_drawn, frame.a), b, 104.0**2 * math.sqrt(k), k * 2**14)


def _one_hot(frame: _Frame, draw: _Draw) -> _Drawn:
    """Rows of A hold a single 1; B has integers of the full significand: C repeats rows of B bit for bit."""
    real = _real(frame)
    matrices, m, k = frame.a_shape
    a = np.zeros((matrices * m, k), dtype=real)
    rows = np.arange(matrices * m)
    # Evenly over K, so that few rows reach the head, the middle and the tail alike.
    a[rows, (draw("a").below(k) + rows * max(1, k // max(m, 1))) % k] = 1.0
    # As many bits as B has, less one where a bias shares the accumulator with a 24-bit element.
    bits = min(frame.b.precision, _budget(frame).bit_length() - 1)
    highest = 2**bits - 1 if frame.b.is_float else int(min(frame.b.max_finite, _budget(frame)))
    stream = draw("b")
    b = _magnitudes(stream, frame.b, 1, highest, real)(frame.b_shape)
    drawn = _on_grid(frame, draw, a.reshape(frame.a_shape), b, 0.58 * highest, highest, only_b=True)
    if frame.target or frame.quantised or not frame.b.is_float:
        return drawn
    # Nothing asks for a magnitude: fixed point in (-1, 1), or less where there is less room.
    e = min(-math.ceil(math.log2(highest)), frame.exponent(0.58 * highest, highest))
    level = 0.58 * highest * 2.0**e
    return dataclasses.replace(drawn, b=_scaled(b, e), quantum=2.0**e, grain=2.0**e, level=level, units=(1.0, 2.0**e))


def _integer_span(problem: Problem) -> float:
    """All integers up to this are exact in every dtype that the value goes through."""
    return 2.0 ** min(d.precision or 31 for d in _narrowest(problem))


def _digit_plan(problem: Problem) -> tuple[int, int]:
    """Digits d of a column in ``k-cover`` and the number of blocks of d k's that a column carries."""
    frame = _frame(problem)
    n, k = max(problem.shape.n, 1), max(problem.shape.k, 1)
    exact = min(_integer_span(problem) * (0.875 if frame.adds else 1.0), frame.room)
    highest = frame.b.max_finite
    for digits in range(8, 1, -1):
        blocks = -(-k // digits)
        overlap = -(-blocks // n)
        total = (4**digits - 1) // 3
        # The largest result of a kernel that doubles a k must still be exact, or the k could not be named.
        fits = min(overlap, 2) * total + 4 ** (digits - 1) <= exact and 4 ** (digits - 1) <= highest
        if fits and overlap * total <= _budget(frame):
            return digits, overlap
    return 1, -(-k // n)


def k_cover_digits(problem: Problem) -> int:
    """How many consecutive k a column of the ``k-cover`` filling carries, each with another power of 4."""
    return _digit_plan(problem)[0]


def _block_sign(turn: int) -> int:
    """Sign of a column's ``turn``-th block: + + - + - + ..., so that sums stay at one or two blocks' worth."""
    return -1 if turn >= 2 and turn % 2 == 0 else 1


def _k_cover(frame: _Frame, _draw: _Draw) -> _Drawn:
    """A is 1; column j of B carries 4^0, 4^1 ... at the k of block j, and of block j + N, j + 2N ... if N is small."""
    digits, overlap = _digit_plan(frame.problem)
    real, k, n = _real(frame), frame.k, max(frame.b_shape[1], 1)
    at = np.arange(k)
    block = at // digits
    sign = np.array([_block_sign(turn) for turn in range(overlap)], dtype=real)[block // n]
    b = np.zeros(frame.b_shape, dtype=real)
    # The weight of k, in every column whose blocks include that of k; columns past the last block start over.
    blocks = -(-k // digits)
    column = np.arange(frame.b_shape[1])[:, None]
    mine = (column % blocks == block) if overlap == 1 else (column == block % n)
    np.multiply(4.0 ** (at % digits), mine, out=b[...], casting="unsafe")
    a = np.ones(frame.a_shape, dtype=real)
    # The sign depends on k alone: it can sit on either side, on one that has signs.
    if frame.a.name == "u8":
        b *= sign
    else:
        a *= sign
    total = (4**digits - 1) // 3
    # A digit must stay a digit.
    scale_a, scale = _neutral(frame)
    spare = min(frame.limit - overlap * total, _integer_span(frame.problem) / 8)
    return _Drawn(
        a, b, float(total), 1.0, spare, scale,
        positive=True, scale_a=scale_a, units=(1.0, 1.0), reach=float(overlap * total),
    )  # fmt: skip


def decode_k(problem: Problem, column_j: int, expected: float, actual: float) -> list[tuple[int, str]]:
    """Name the k that a kernel dropped or doubled, from one wrong element of a ``k-cover`` result.

    The difference is read as a number in base 4 with digits -1, 0, 1, 2: dropped, right, doubled, tripled.

    Args:
        problem: the problem that was filled.
        column_j: the element's column.
        expected: the right value, or any value that differs from it by what the bias adds.
        actual: what the kernel gave, from the same place in the chain of the epilogue (before it, or after
            steps that left the value as it is).

    Returns:
        ``(k, "dropped" | "doubled" | "tripled")`` in the order of k; with the word ``maybe`` before it where a
        column carries several blocks of k (N < K / digits) and each of them explains the difference.  Empty
        where no set of k explains it.
    """
    difference = actual - expected
    if not math.isfinite(difference) or difference != int(difference):
        return []
    digits, overlap = _digit_plan(problem)
    k, n = problem.shape.k, problem.shape.n
    blocks = -(-k // digits)
    rest = int(difference)
    found = []
    for digit in range(digits):
        value = (rest + 1) % 4 - 1
        rest = (rest - value) // 4
        if value == 0:
            continue
        for turn in range(overlap):
            block = column_j % blocks if overlap == 1 else column_j + turn * n
            at = block * digits + digit
            if at >= k:
                continue
            word = {-1: "dropped", 1: "doubled", 2: "tripled"}.get(value * _block_sign(turn))
            if word is not None:
                found.append((at, word if overlap == 1 else f"maybe {word}"))
    return sorted(found) if rest == 0 else []


def _prime_at_most(limit: int) -> int:
    """The largest prime up to ``limit``, 1 below 2."""
    return next((p for p in range(limit, 1, -1) if all(p % q for q in range(2, math.isqrt(p) + 1))), 1)


def tile_map_period(problem: Problem) -> tuple[int, int]:
    """``(I, J)``: the ``tile-map`` filling tells i modulo I and j modulo J.

    ``(M, N)`` where the output can hold M * N distinct integers.  Otherwise primes, so that a shift by a
    tile's edge, a power of two, is never a multiple of the period.
    """
    frame = _frame(problem)
    most = int(min(_integer_span(problem) * (0.875 if frame.adds else 1.0), frame.limit // 2, frame.room))
    # In terms of N alone, as B must not depend on M.  B holds J and j, A holds i.
    j_most = min(int(frame.b.max_finite), math.isqrt(most) + 1, 2**frame.b.precision if frame.b.is_float else most)
    j = problem.shape.n if problem.shape.n <= j_most else _prime_at_most(j_most)
    i_most = min(
        int(frame.a.max_finite) - max(frame.zero, 0),
        most // max(j, 1),
        2**frame.a.precision if frame.a.is_float else most,
    )
    rows = frame.a_shape[1]
    i = rows if rows <= i_most else _prime_at_most(i_most)
    return max(i, 1), max(j, 1)


def _tile_map(frame: _Frame, draw: _Draw) -> _Drawn:
    """C[i, j] = (i mod I) * J + (j mod J) + 1, through the first and the last k; A is zero at the others."""
    i_period, j_period = tile_map_period(frame.problem)
    real = _real(frame)
    a = np.zeros(frame.a_shape, dtype=real)
    a[..., 0] = np.arange(frame.a_shape[1]) % i_period
    a[..., -1] = 1.0
    b = _magnitudes(draw("b"), frame.b, 1, 1, real)(frame.b_shape)
    b[..., 0] = j_period
    b[..., -1] = np.arange(frame.b_shape[1]) % j_period + 1
    scale_a, scale = _neutral(frame)
    # The bias takes what tile_map_period leaves of the output's integers; level and spare know nothing of M.
    spare = min(frame.limit / 2, _integer_span(frame.problem) / 8)
    return _Drawn(
        a, b, 128.0, 1.0, spare, scale,
        positive=True, scale_a=scale_a, units=(1.0, 1.0), reach=float(i_period * j_period),
    )  # fmt: skip


def decode_source(problem: Problem, value: float) -> tuple[int, int] | None:
    """Where an element of a ``tile-map`` product belongs: (i, j), each modulo :func:`tile_map_period`.

    Args:
        problem: the problem that was filled.
        value: an element of A @ B, that is without bias, factors and activation.

    Returns:
        ``None`` for a value that no element of the product has.
    """
    i_period, j_period = tile_map_period(problem)
    if not math.isfinite(value) or value != int(value) or not 1 <= value <= i_period * j_period:
        return None
    return divmod(int(value) - 1, j_period)


# -- random fillings ----------------------------------------------------------------------------------


def _integers(
    stream: _Stream, shape: tuple[int, ...], dtype: DType, most: int, positive: bool, real: type[Any]
) -> Array:
    """Uniform integers of the full range, or of magnitude up to ``most``."""
    if dtype.name == "u8" or positive:
        return stream.look_up(shape, np.arange(0, min(most, int(dtype.max_finite)) + 1, dtype=real))
    low, high = -min(most, -_least(dtype)), min(most, int(dtype.max_finite))
    return stream.look_up(shape, np.arange(low, high + 1, dtype=real))


@dataclasses.dataclass(frozen=True)
class _Side:
    """How a random filling draws a floating side: values in [-1, 1], their mean square and their mean."""

    draw: Callable[[_Stream, tuple[int, ...], bool], Array]
    square: float
    mean: float = 0.0


_UNIFORM: Final = _Side(lambda s, shape, wide: s.uniform(shape, wide), 1 / 3)
_POSITIVE: Final = _Side(lambda s, shape, wide: np.abs(s.uniform(shape, wide)), 1 / 3, 0.5)
_BINADE: Final = _Side(lambda s, shape, wide: s.binade(shape, wide), 7 / 12)


def _random_quantised(
    frame: _Frame,
    draw: _Draw,
    side: _Side,
    lift: Callable[[DType], int] = lambda _: 0,
    reach: Callable[[float, float], int] | None = None,
) -> _Drawn:
    """Random fp8 with random scales of full significands.

    Args:
        frame: of a quantised problem.
        draw: its streams.
        side: how elements are drawn.
        lift: the power of two of an element by its dtype.
        reach: ``reach(rms, bound)`` is the exponent that the scales add to the product; by default what fits.
    """
    k, lifts = max(frame.k, 1), lift(frame.a) + lift(frame.b)
    rms = 0.76**2 * max(math.sqrt(k) * side.square, k * side.mean**2) * 2.0**lifts
    bound = k * 2.0**lifts
    e = (reach or frame.exponent)(rms, bound)

    def lines(name: str, shape: tuple[int, ...], dtype: DType) -> Array:
        return _scaled(side.draw(draw(name), shape, frame.wide), lift(dtype))

    scale_a, scale_b = _scale_pair(frame, draw, lambda stream, shape: np.abs(stream.binade(shape, False)))
    return _Drawn(
        lines("a", frame.a_drawn, frame.a),
        None if frame.twin else lines("b", frame.b_drawn, frame.b),
        rms * 2.0**e,
        scale=_scaled(scale_b, e // 2),
        positive=side.mean > 0,
        scale_a=_scaled(scale_a, e - e // 2),
    )


def _random(
    frame: _Frame, draw: _Draw, side: _Side, exponents: Callable[[float, float], tuple[int, int]] | None = None
) -> _Drawn:
    """Random lines; ``exponents(rms, bound)`` gives the powers of two of A and B, by default what fits."""
    if frame.quantised:
        return _random_quantised(frame, draw, side)
    real, k = _real(frame), max(frame.k, 1)
    positive = side.mean > 0
    most = 255 if frame.int8 else 128
    if frame.all_integer and not frame.int8:
        # An int32 product that is cast to a narrow float: eight standard deviations must fit.
        most = max(1, min(128, int(math.sqrt(3 * frame.room / (8 * math.sqrt(k))) / (2 if frame.adds else 1))))
    squares, tops, means = [], [], []
    for dtype in (frame.a, frame.b):
        top = 1.0 if dtype.is_float else 255.0 if dtype.name == "u8" else float(min(most, -_least(dtype)))
        squares.append(side.square if dtype.is_float else top**2 / 3)
        means.append(side.mean if dtype.is_float else top / 2 if dtype.name == "u8" or positive else 0.0)
        tops.append(top)
    factor = (0.76 if frame.b.name == "i4" else 0.76 * 2.0**-7) if frame.scaled else 1.0
    rms = factor * max(math.sqrt(k * squares[0] * squares[1]), k * means[0] * means[1])
    bound = factor * k * tops[0] * tops[1]
    ea, eb = exponents(rms, bound) if exponents else frame.split(frame.exponent(rms, bound))

    def lines(name: str, shape: tuple[int, ...], dtype: DType, e: int) -> Array:
        if not dtype.is_float:
            return _integers(draw(name), shape, dtype, most, positive, real)
        return _scaled(side.draw(draw(name), shape, frame.wide), e)

    scale = None
    if frame.scaled:
        # Weights of 8 bits have scales of about 2^-7 of the weight's range.
        scale = np.abs(draw("scale").binade((frame.b_shape[1],), False)) * np.float32(2.0**-7)
    drawn = _Drawn(
        lines("a", frame.a_drawn, frame.a, ea),
        None if frame.twin else lines("b", frame.b_drawn, frame.b, eb),
        rms * 2.0 ** (ea + eb),
        scale=scale,
        positive=positive,
    )
    if frame.all_integer:
        drawn.quantum, drawn.spare = 1.0, frame.limit - bound
        drawn.units, drawn.reach = (1.0, 1.0), bound
    return drawn


def _rand(frame: _Frame, draw: _Draw) -> _Drawn:
    return _random(frame, draw, _UNIFORM)


def _rand_positive(frame: _Frame, draw: _Draw) -> _Drawn:
    return _random(frame, draw, _POSITIVE)


def _rand_small(frame: _Frame, draw: _Draw) -> _Drawn:
    """Products as small as they may be while every product and partial sum stays a multiple of 2^-126.

    With p significand bits in [0.5, 1) * 2^s, a product is a multiple of 2^(2s - 2p): s = -38 for f32 and -54 for
    bf16 leave nothing that hardware which flushes subnormals could flush.  An f16 result is about 2^-9; those
    of its elements that cancel are subnormal.  So is A in f16, at 2^-20: every product of f16 is a normal float32, so
    nothing excuses a kernel that flushes its inputs.
    """
    if frame.quantised:
        # Subnormals of fp8, which no kernel may flush; the scales bring the product back to about 1.
        return _random_quantised(
            frame, draw, _BINADE, lambda dtype: dtype.emin, lambda rms, _bound: -round(math.log2(rms))
        )
    names = {d.name for d in (*_narrowest(frame.problem), frame.a, frame.b)}

    def exponents(rms: float, _bound: float) -> tuple[int, int]:
        if "f16" in names:
            e = -9 - round(math.log2(rms))
            if frame.a.name == frame.b.name == "f16" and not frame.twin:
                return -20, min(e + 20, 15)
            ea, eb = frame.split(e)
            return max(ea, -13), max(eb, -13)
        each = -54 if names <= {"bf16", "i8", "u8"} else -38 if "f64" not in names or len(names) > 1 else -200
        return (each if frame.a.is_float else 0), (each if frame.b.is_float else 0)

    return _random(frame, draw, _BINADE, exponents)


def _rand_large(frame: _Frame, draw: _Draw) -> _Drawn:
    """Sums of magnitudes up to 2^124 (2^400 for f64, whose reference squares them); f16: a result near 65504."""
    ceiling = 2.0**400 if frame.wide else 2.0**124

    def reach(rms: float, bound: float) -> int:
        if frame.room < ceiling / 2.0**20:
            peak = bound if frame.twin else min(bound, 8.0 * rms)
            return math.floor(math.log2(frame.room) - math.log2(peak + 2.0 * frame.adds * rms))
        return math.floor(math.log2(min(frame.room, ceiling)) - math.log2(bound + 2.0 * frame.adds * rms))

    if frame.quantised:
        # The largest binade but one of fp8, whose products leave the range of f16; the scales say how large the
        # result is.
        return _random_quantised(frame, draw, _BINADE, lambda dtype: dtype.emax, reach)

    def exponents(rms: float, bound: float) -> tuple[int, int]:
        # Scales of about 2^-7 come after the sum, which must not overflow before them.
        e = reach(rms, bound) - (8 if frame.scaled else 0)
        if frame.twin:
            return e // 2, e // 2
        ea, eb = frame.split(e)
        if "f16" in (frame.a.name, frame.b.name):
            # One operand at the top of f16's range, the other where the result needs it.
            if frame.a.is_float and frame.b.is_float:
                return 15, max(e - 15, -13)
            return (min(ea, 15), 0) if frame.a.is_float else (0, min(eb, 15))
        return ea, eb

    return _random(frame, draw, _BINADE, exponents)


def _rand_wide(frame: _Frame, draw: _Draw) -> _Drawn:
    """Magnitudes uniform in their exponent over 32 binades (8 for fp8, 10 for f16, 64 for f64)."""
    names = (frame.a.name, frame.b.name)
    binades = 64 if frame.wide else 8 if frame.quantised else 10 if "f16" in names else 32

    def lines(stream: _Stream, shape: tuple[int, ...], wide: bool) -> Array:
        values = stream.binade(shape, wide)
        powers = 2.0 ** -np.arange(binades, dtype=np.float64)
        return values * stream.look_up(shape, powers.astype(values.dtype))

    side = _Side(lines, 7 / 12 * (4 / 3) / binades)
    return _random(frame, draw, side)


# -0.0 and the smallest subnormal travel along: they must not disturb anything either.
_SPECIALS: Final = ("nan", "inf", "-inf", "-0", "subnormal")


# Values of k at which B holds a zero for A's special values to meet.
_ZEROS: Final = 3


def _zeros(lines: Array, stream: _Stream, tiny: float) -> list[int]:
    """Put a zero into one line of each matrix at a few k, and say at which.

    Not where a line has a special value or one below ``tiny``: an infinity will come to meet the zero.
    """
    length = lines.shape[-1]
    special = ~np.isfinite(lines) | ((lines != 0) & (np.abs(lines) < tiny))
    free = [k for k in dict.fromkeys(stream.below(length) for _ in range(8)) if not special[..., k].any()][:_ZEROS]
    for k in free:
        for matrix in lines:
            matrix[stream.below(len(matrix)), k] = 0.0
    return free


def _face_specials(lines: Array, other: Array, stream: _Stream) -> None:
    """Put a zero where a NaN or an infinity of ``lines`` meets one line of ``other``."""
    for matrix, _, k in np.argwhere(~np.isfinite(lines)).tolist():
        for facing in other[matrix : matrix + 1] if len(other) == len(lines) else other:
            finite = np.flatnonzero(np.isfinite(facing[:, k]))
            if len(finite):
                facing[finite[stream.below(len(finite))], k] = 0.0


def _specials(frame: _Frame, draw: _Draw) -> _Drawn:
    """The ``rand`` filling with special values, each in one row of A or one column of B.

    A NaN and an infinity meet a zero in some line of the other side: the product is NaN, and a kernel that skips zeros
    loses it.  A's come to where B has zeros, as B must not depend on M.

    An infinity never meets a subnormal in one product: the result would tell whether subnormal inputs count as
    zero (Inf * 0 is NaN), and instructions for bf16 dot products (VDPBF16PS, TDPBF16PS) define that they do.
    """
    drawn = _random(dataclasses.replace(frame, whole=True), draw, _UNIFORM)

    def plant(name: str, lines: Array, dtype: DType, at: list[int]) -> None:
        matrices, count, k = lines.shape
        known = tuple(kind for kind in _SPECIALS if dtype.has_inf or not kind.endswith("inf"))
        special = min(len(known), matrices * count // 4 or (1 if count > 1 and matrices else 0))
        if not dtype.is_float or special == 0:
            return
        stream = draw(f"{name}-specials")
        tiny = 2.0 ** (dtype.emin - dtype.precision + 1)
        values = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "-0": -0.0, "subnormal": tiny}
        flat = lines.reshape(matrices * count, k)
        first = stream.below(len(flat))
        kinds = known[:special] if special > 1 else (_SPECIALS[stream.below(3)] if dtype.has_inf else "nan",)
        for index, kind in enumerate(kinds):
            # Spread over the lines: neighbours in one vector register would hide a leak between them.
            row = (first + index * max(1, len(flat) // special)) % len(flat)
            flat[row, at[stream.below(len(at))] if at else stream.below(k)] = values[kind]

    drawn.a = np.ascontiguousarray(drawn.a)
    zeros: list[int] = []
    if drawn.b is not None:
        drawn.b = np.ascontiguousarray(drawn.b)
        plant("b", drawn.b, frame.b, [])
        zeros = _zeros(drawn.b, draw("b-zeros"), 2.0**frame.b.emin if frame.a.has_inf else 0.0)
    plant("a", drawn.a, frame.a, zeros)
    b = drawn.a if drawn.b is None else drawn.b  # self: A meets itself
    _face_specials(b, drawn.a, draw("a-zeros"))
    for one, other in ((drawn.a, b), (b, drawn.a)):
        infinite = np.isinf(other).any(axis=tuple(range(other.ndim - 1)))  # by k
        tiny = (one != 0) & (np.abs(one) < 2.0 ** min(frame.a.emin, frame.b.emin))
        one[tiny & infinite] = 1.0
    return drawn


# -- bias and residuals -------------------------------------------------------------------------------


def _addend_exponent(level: float, quantum: float, dtype: DType) -> int:
    """Exponent of an addend's unit so that its 6 bits reach half of ``level`` and stay on the grid.

    Half, so that no column of a result is all negative and silenced by a relu.
    """
    e = round(math.log2(level / 128)) if level > 0 else 0
    if quantum:
        e = max(e, round(math.log2(quantum)))
    return max(e, 0) if not dtype.is_float else e


def _bias(frame: _Frame, drawn: _Drawn, draw: _Draw, exact: bool, special: bool) -> Array | None:
    """The bias.  Exact: an arithmetic progression modulo a prime, so that every shift of it shows."""
    problem = frame.problem
    shape = problem.bias_shape
    if shape is None:
        return None
    if special and problem.op.addend and problem.beta == 0.0:
        return np.full(shape, math.nan, dtype=np.float32)  # beta = 0 must not read it
    real, out, beta = _real(frame), problem.value_dtype, abs(problem.beta) or 1.0
    # A bias without M rows belongs to the constants: one for every M.
    stream = draw("bias-m" if problem.step("bias") in (Step("bias", "m1"), Step("bias", "mn")) else "bias")
    # One element for the whole result (N = 1) must not turn all of it negative in front of a relu.
    positive = drawn.positive or math.prod(shape) == 1
    if not exact:
        size = drawn.level / max(beta, 1.0)
        values = stream.binade(shape, frame.wide) * real(2.0 ** round(math.log2(size / 2 if size else 1.0)))
        found: Array = np.abs(values) if positive else values
        return found
    unit = _addend_exponent(drawn.level / max(beta, 1.0), drawn.quantum, out)
    if beta < 1.0:
        unit = max(unit, round(math.log2(drawn.quantum)) + math.ceil(-math.log2(beta)))
    spare = drawn.spare * drawn.quantum / beta
    if frame.target:
        # The grid of a short sum is coarse: fewer different values rather than a saturated activation.
        spare = min(spare, max(2.0 * drawn.level / beta, 3.0 * drawn.quantum))
    lowest = round(math.log2(drawn.quantum))
    half = 1 if positive else 2
    while unit > lowest and 127 // half * 2.0**unit > spare:
        unit -= 1
    prime = next((p for p in (127, 61, 31, 13, 7) if p // half * 2.0**unit <= spare), 3)
    # A stride of a third to a half of the period: neighbours are far apart and differ in sign.
    start, stride = stream.below(prime), prime // 3 + stream.below(prime // 6 + 1)
    index = np.arange(math.prod(shape), dtype=np.int64)
    values = ((start + index * stride) % prime - (0 if positive else prime // 2)).astype(real)
    return _scaled(values.reshape(shape), unit)


# Rows of a table in which a residual is looked up: few enough that most are met several times, and no power of two.
_TABLE_ROWS: Final = 11


def _residuals(frame: _Frame, drawn: _Drawn, draw: _Draw, exact: bool) -> list[tuple[Array, DType]]:
    """A residual for each binary step, or lines of a large one, with its dtype: that of the value it meets.

    In the product's places: of the result's shape, (N,) or (M, 1); of one that is looked up the table.
    """
    problem = frame.problem
    whole, dtype, level = _drawn_shape(problem.result_shape), problem.value_dtype, drawn.level
    columns = problem.result_shape[-1]
    shapes = {"": whole, "n": (columns,), "m1": (problem.result_shape[-2], 1), "at": (_TABLE_ROWS, columns)}
    quantum = drawn.quantum
    found: list[tuple[Array, DType]] = []
    for step in problem.passes:
        if step.kind is StepKind.CAST:
            dtype = step.dtype
        elif step.name == "scale":
            level, quantum = level * abs(step.numbers[0]), quantum * abs(step.numbers[0])
        elif step.name in _UNIT_RANGE:
            level, quantum = 1.0, 0.0
        elif step.name == "gated":
            level, quantum = level**2 / 2.0, 0.0
        elif step.name == "clamp":
            level = min(level, max(map(abs, step.numbers)) or 1.0)
        if step.kind is not StepKind.BINARY:
            continue
        stream, shape = draw(f"r{len(found)}"), shapes[step.extent]
        if (codes := problem.residual_dtype(step, dtype)) != dtype:
            found.append((_codes(step, codes, level, drawn.positive, _real(frame), stream, shape), codes))
            continue
        if step.name in {"add", "sub", "sum"}:
            if exact or not dtype.is_float:
                unit = _addend_exponent(level, quantum, dtype)
                most = min(63, max(3, int(2.0 * level * 2.0**-unit))) if frame.target else 63
                values = _scaled(_magnitudes(stream, dtype, 0, most, _real(frame))(shape), unit)
            else:
                values = stream.binade(shape, frame.wide) * _real(frame)(2.0 ** round(math.log2(level / 2 or 1.0)))
        elif exact or not dtype.is_float:
            small = [1, 2, 3] if step.name == "mul" else [1, 2, 4, 0.5] if dtype.is_float else [1, 2, 4]
            values = stream.look_up(shape, np.array(small + [-x for x in small], dtype=_real(frame)))
        else:
            values = stream.binade(shape, frame.wide) * _real(frame)(2.0)  # [1, 2): no division by nearly zero
        found.append((np.abs(values) if drawn.positive else values, dtype))
    return found


def _codes(
    step: Step, dtype: DType, level: float, positive: bool, real: type[Any], stream: _Stream, shape: tuple[int, ...]
) -> Array:
    """Codes of 8 bits around a step's zero point that stand for values of up to twice ``level``."""
    scale, zero = step.numbers
    most = min(127, max(3, round(2.0 * level / scale)))
    low, high = (0, 255) if dtype.name == "u8" else (-128, 127)
    first = max(low, int(zero) - (0 if positive else most))
    return stream.look_up(shape, np.arange(first, min(high, int(zero) + most) + 1, dtype=real))


# -- the catalogue ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Filling:
    """A way to choose values.

    Attributes:
        name: what a case and the command line call it.
        help: one sentence: what it holds and what it finds.
        exact: whether products lie on a grid (:attr:`Operands.quantum` > 0).
        zero_mean: whether entries are independent with zero mean, where the result is finite.
        applies: whether it can be made for a problem and would tell anything.
    """

    name: str
    help: str
    exact: bool
    zero_mean: bool
    applies: Callable[[Problem], bool]
    _build: _Build = dataclasses.field(repr=False)


def _has_float(p: Problem) -> bool:
    return p.dtypes.a.is_float or p.dtypes.b.is_float


def _always(_: Problem) -> bool:
    return True


def _sums_fit(p: Problem, terms: int) -> bool:
    """Whether partial sums of ``terms`` ones are exact where a half type may have to hold them."""
    return not p.has("reduced") or terms <= _budget(_frame(p))


def _gated_by_a(p: Problem) -> bool:
    """The result is multiplied by A: zeros and tiny numbers leave nothing of it."""
    return p.has("res-a") and next(s.name for s in p.passes if s.kind is StepKind.BINARY) == "mul"


def _requantised(p: Problem) -> bool:
    """The result has 8 bits of its own scale: no integer comes through as it is."""
    return p.step("requant") is not None


def _only_floats(p: Problem) -> bool:
    """No step on the way is an integer or an 8-bit float, whose range extremes would leave."""
    return _has_float(p) and all(d.is_float and d.bits > 8 for d in _narrowest(p))


# In the order of how much one of them tells alone.
FILLINGS: Final[Mapping[str, Filling]] = MappingProxyType(
    {
        f.name: f
        for f in (
            Filling(
                "int-2",
                "wide against narrow integers, exact sums: indexing, reduced precision, split-K partials, bad stores",
                True,
                False,
                _always,
                _int_2,
            ),
            Filling(
                "rand",
                "uniform in [-1, 1] with full significands (integers: full range): the everyday case",
                False,
                True,
                _always,
                _rand,
            ),
            Filling(
                "k-cover",
                "A = 1 and powers of 4 along K in B, exact: names the k that was dropped or doubled",
                True,
                False,
                lambda p: (
                    p.shape.k >= 1
                    and not (p.is_twin or _saturating(p) or _requantised(p))
                    and _sums_fit(p, _digit_plan(p)[1])
                ),
                _k_cover,
            ),
            Filling(
                "specials",
                "rand with NaN, infinities, -0.0 and a subnormal in single rows of A and columns of B",
                False,
                True,  # where the result is finite
                lambda p: _only_floats(p) and p.shape.k >= 1 and p.shape.m * p.shape.n >= 2,
                _specials,
            ),
            Filling(
                "tile-map",
                "C[i, j] encodes i and j, exact: tells where a misplaced element came from",
                True,
                False,
                lambda p: (
                    p.shape.k >= 2 and not (p.is_twin or _saturating(p) or _requantised(p)) and not _gated_by_a(p)
                ),
                _tile_map,
            ),
            Filling(
                "int-1",
                "-1, 0 and 1, exact at any K: indexing, masks, strides",
                True,
                False,
                lambda p: _sums_fit(p, p.shape.k),
                _int_1,
            ),
            Filling(
                "one-hot",
                "one 1 in each row of A and full significands in B: rows of B come out bit for bit",
                True,
                False,
                lambda p: p.shape.k >= 1 and not p.is_twin and not _gated_by_a(p),
                _one_hot,
            ),
            Filling(
                "rand-positive",
                "uniform in [0, 1]: rounding that drifts, relu and signs are out of the way",
                False,
                False,
                # A saturating step would see one value: a sum of positive numbers hardly varies.  Of fp8 in the bits of
                # a tensor core a long one says nothing: the hard bound grows with K, and it drifts, so no other holds.
                lambda p: _has_float(p) and not _saturating(p) and not (p.has("fast-acc") and p.shape.k > 4096),
                _rand_positive,
            ),
            Filling(
                "rand-wide",
                "magnitudes log-uniform over many binades: absolute tolerances and fixed-point tricks fail",
                False,
                True,
                _has_float,
                _rand_wide,
            ),
            Filling(
                "rand-large",
                "magnitudes near the upper end: overflow in a narrower intermediate",
                False,
                True,
                # Partial sums that may be stored in f16 may overflow there.
                lambda p: (
                    _only_floats(p) and not _saturating(p) and not (p.has("reduced") and p.dtypes.out.name == "f16")
                ),
                _rand_large,
            ),
            Filling(
                "rand-small",
                "magnitudes near the lower end: underflow in a narrower intermediate",
                False,
                True,
                lambda p: _only_floats(p) and not _saturating(p) and not _gated_by_a(p),
                _rand_small,
            ),
        )
    }
)


# Products of two numbers from which on a problem is large: M N K of some ten seconds of float64 on a CPU.
LARGE: Final = 2**33


def is_large(problem: Problem) -> bool:
    """Whether computing the whole product once more in float64 on the CPU costs too much: M N K > 2^33."""
    shape = problem.shape
    return shape.m * shape.n * shape.k * (1 if shape.batch is None else shape.batch) > LARGE


def fillings_for(problem: Problem) -> tuple[str, ...]:
    """Names of all fillings that apply, the most telling first; none where operands cannot be built."""
    try:
        _frame(problem)
    except Unsupported:
        return ()
    found = [name for name, filling in FILLINGS.items() if filling.applies(problem)]
    if _must_promote(problem) and "rand-positive" in found:
        found.remove("rand-positive")
        found.insert(found.index("rand") + 1, "rand-positive")
    if is_large(problem) and problem.dtypes.out.precision < DTYPES["f32"].precision and "int-1" in found:
        # The one whose sums a half type holds: each element of such a result can be checked.
        found.remove("int-1")
        found.insert(0, "int-1")
    return tuple(found)


# Products of fp8 from which on a tensor core that is never promoted leaves the bound of one that is: on positive data
# it loses 3 % of a sum of 2048 (a model of Hopper's), where promoted every 128 it may lose 1.6 % and loses 0.05 %.
_LONG_FP8: Final = 2048


def _must_promote(problem: Problem) -> bool:
    """Whether a kernel that adds fp8 in few bits although it must not shows, and it does so on positive data."""
    return problem.op.name == "scaled_mm" and not problem.has("fast-acc") and problem.shape.k >= _LONG_FP8


@dataclasses.dataclass(eq=False)
class Operands:
    """All tensors that a problem takes, as views into poisoned storage.

    Attributes:
        problem, filling, seed, device: what was asked for.
        a: ([B,] M, K), strided as the layout and the flags say; (B * M, K) for ``grouped_mm``, (M, K) for ``linears``.
        b: ([B,] K, N); (K, N) for ``linear`` and quantised weights; ``a.mT`` for ``self``, ``a`` for ``square``.
            ``woq_int4``: codes of 0 to 15, each in a byte.
        bias: of :attr:`Problem.bias_shape` in the product's dtype (f32 under autocast), contiguous, or ``None``.
        residuals: one of the result's shape for each binary step, in the dtype of the value at that step and in the
            product's places (:mod:`pytest_gemm.moves`); a row or column is expanded; with ``res-a`` the first is ``a``.
        lookups: of a residual that is looked up, by its number: the table, and int64 indices of the result's rows.
        scale_b: (N,) scales of B's columns in the product's dtype for ``woq_int8``, in f32 for ``qlinear``, in f32 or
            bf16 for ``da8w8``; for ``scaled_mm`` in f32, (1, N) or a scalar; or ``None``.
        scale_a: the scales of A: in f32, (M, 1) or a scalar for ``scaled_mm``; ([B,] M, 1) or a scalar in the dtype of
            ``scale_b`` for ``da8w8``; a scalar for ``qlinear`` with ``dynamic``; or ``None``.
        zero_a: A's zero point as a tensor, int32, a scalar, for ``qlinear`` with ``dynamic``; or ``None``.
        zero_b: B's zero points, int32, (N,), all of them 0, for ``qlinear``; or ``None``.
        affine: scale and zero of each group of K and each column for ``woq_int4``, (K / group, N, 2) in A's dtype:
            an element of B is ``(code - 8) * scale + zero``; or ``None``.
        zero: what is subtracted of each element of A before it is multiplied: its zero point.
        offs: where the groups of ``grouped_mm`` end, int32, (B,), see :func:`group_ends`; or ``None``.
        quantum: > 0: every product ``a * b`` (times its scale) and every bias element is an integer multiple
            of it, so sums are exact in an accumulator of p bits if ``sum |a||b| + |bias| <= 2^p * quantum``, which
            holds for p = 24 (53 for f64, 31 for integers).  0.0: no grid.
        grain: the same for the products before any scale; it is the quantum where there are no scales.
        units: powers of two that the elements of A and those of B are multiples of; 0.0 where there is no grid.
        reach: what no sum of magnitudes ``sum |a||b|`` (times its scale) exceeds, in quanta; infinite without a grid.
        zero_mean: the products are independent with zero mean: a statistical bound may be used.
        finite: no NaN and no infinity in any of the tensors.
        buffers: the storages of all tensors, for digests and poison checks.
    """

    problem: Problem
    filling: str
    seed: int
    device: str
    a: Tensor
    b: Tensor
    bias: Tensor | None
    residuals: tuple[Tensor, ...]
    scale_b: Tensor | None
    quantum: float
    zero_mean: bool
    finite: bool
    buffers: tuple[Guarded, ...] = dataclasses.field(repr=False)
    scale_a: Tensor | None = None
    offs: Tensor | None = None
    lookups: Mapping[int, tuple[Tensor, Tensor]] = dataclasses.field(default_factory=dict)
    grain: float = 0.0
    units: tuple[float, float] = (0.0, 0.0)
    reach: float = math.inf
    zero_a: Tensor | None = None
    zero_b: Tensor | None = None
    affine: Tensor | None = None
    zero: int = 0

    def clone(self) -> Operands:
        """The same operands in fresh memory: values, strides, alignment and poison; about the time of a copy."""
        moved = {g.storage.untyped_storage().data_ptr(): g.clone() for g in self.buffers}

        def move(x: Tensor) -> Tensor:
            return _moved(x, moved[x.untyped_storage().data_ptr()].storage)

        def move_any(x: Tensor | None) -> Tensor | None:
            return None if x is None else move(x)

        def move_residual(index: int, x: Tensor) -> Tensor:
            return x if index in self.lookups else move(x)  # nobody else holds what has been looked up

        return dataclasses.replace(
            self,
            a=move(self.a),
            b=move(self.b),
            bias=move_any(self.bias),
            residuals=tuple(move_residual(*pair) for pair in enumerate(self.residuals)),
            lookups={i: (move(table), move(rows)) for i, (table, rows) in self.lookups.items()},
            scale_b=move_any(self.scale_b),
            scale_a=move_any(self.scale_a),
            offs=move_any(self.offs),
            zero_a=move_any(self.zero_a),
            zero_b=move_any(self.zero_b),
            affine=move_any(self.affine),
            buffers=tuple(moved.values()),
        )

    @property
    def scale(self) -> Tensor | None:
        """What multiplies an element of the product: B's scales, or A's times B's; float64, CPU, broadcastable."""
        if self.scale_b is None:
            return None
        found = self.scale_b.detach().to(device="cpu", dtype=torch.float64)
        if static := self.problem.step("static"):
            return found * float(np.float32(static.numbers[0]))  # the op keeps it in f32
        return found if self.scale_a is None else self.scale_a.detach().cpu().to(torch.float64) * found

    @property
    def weight(self) -> Tensor:
        """B as the product multiplies it, where it is stored as codes: float64, CPU, (K, N), exact."""
        assert self.affine is not None
        codes = self.b.detach().cpu().to(torch.float64)
        each = self.affine.detach().cpu().to(torch.float64).repeat_interleave(self.problem.group_size, 0)
        return (codes - 8.0) * each[..., 0] + each[..., 1]

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """Rows [first, last) of A for each B of a grouped product; () for any other."""
        if self.offs is None:
            return ()
        ends = self.offs.tolist()
        return tuple(zip([0, *ends[:-1]], ends, strict=True))

    def digest(self) -> str:
        """Hashes of every byte of every storage, viewed or not, as ``a=... b=...``.  About 2 ms for 1 MB."""
        return " ".join(f"{g.name}={g.digest()}" for g in self.buffers)

    def changed(self, before: str) -> tuple[str, ...]:
        """Names of the operands whose storage is not what it was when ``before = digest()``; () for none."""
        old = dict(part.split("=") for part in before.split())
        return tuple(g.name for g in self.buffers if old.get(g.name) != g.digest())

    def guards_intact(self) -> bool:
        """Whether all poison around the operands is in place."""
        return all(g.guards_intact() for g in self.buffers)


def _keys(problem: Problem, filling: str, seed: int) -> _Draw:
    """Streams by operand name.

    ``dyn-m`` changes no value.  What does not have M rows leaves M out of its key, so that a constant is the same
    for every M.
    """
    plain = dataclasses.replace(problem, flags=tuple(f for f in problem.flags if f != "dyn-m"))
    fields = plain.line.split(":")
    sizes = fields[3].split("x")
    sizes[-3] = "M"
    any_m = ":".join([*fields[:3], "x".join(sizes), *fields[4:]])

    def draw(name: str) -> _Stream:
        constant = name in {
            "b",
            "b-heavy",
            "b-specials",
            "b-zeros",
            "scale",
            "scale-both",
            "bias",
            "affine",
            "affine-zero",
        }
        return _Stream(any_m if constant else plain.line, filling, str(seed), name)

    return draw


def make(problem: Problem, filling: str, seed: int, device: str = "cpu") -> Operands:
    """The operands of ``problem``.

    Args:
        problem: what is to be computed.
        filling: a key of :data:`FILLINGS`.
        seed: any integer; another seed gives other values (``k-cover`` and ``tile-map`` have one product only).
        device: where the tensors lie; values are drawn on the CPU.

    Raises:
        Unsupported: when operands of the op cannot be built yet, or the filling does not apply to the problem.
        ValueError: for an unknown filling.
    """
    if filling not in FILLINGS:
        hint = did_you_mean(filling, FILLINGS)
        raise ValueError(f"unknown filling {filling!r}{hint}; known: {', '.join(FILLINGS)}")
    frame = _frame(problem)
    chosen = FILLINGS[filling]
    if not chosen.applies(problem):
        remedy = f"one of {' '.join(fillings_for(problem))}"
        raise Unsupported("filling", f"{filling} does not apply to {problem}", remedy)
    draw = _keys(problem, filling, seed)
    # Roundings to a narrow dtype, overflows to Inf included, are meant; torch does them silently.
    drawn = chosen._build(frame, draw)
    _face_relu(frame, drawn)
    affine = None
    if frame.int8:
        _scale_int8(frame, drawn, draw, filling)
    elif frame.b.name == "i4":
        affine = _affine(frame, drawn, draw, filling)
    exact = drawn.quantum > 0

    transposed = problem.layout.a_transposed
    lines = _all_lines(drawn.a, frame.a_shape, transposed)
    several = problem.op.name == "linears"
    stored_a = _matrix(
        "a", lines, problem.dtypes.a, device, problem.has("pad-lda"), problem.has("off-a"), middle=problem.has("mid-a")
    )
    batch = None if problem.grouped or several else problem.shape.batch
    a = _logical(stored_a, transposed, batch, problem.has("bcast-a"))
    buffers = [stored_a]
    if drawn.b is None:
        b = a if problem.has("square") else a.mT
    else:
        transposed = problem.layout.b_transposed
        lines = _all_lines(drawn.b, frame.b_shape, not transposed)
        stored_b = _matrix(
            "b", lines, problem.dtypes.b, device, problem.has("pad-ldb"), problem.has("off-b"),
            apart=several, middle=problem.has("mid-b"),
        )  # fmt: skip
        batch = None if problem.op.name in WEIGHT_OPS else problem.shape.batch
        b = _logical(stored_b, transposed, batch, problem.has("bcast-b"))
        buffers.append(stored_b)

    def keep(name: str, values: Array | _Lines, dtype: DType, apart: bool = False) -> Tensor:
        buffers.append(_guarded(name, values, values.shape, torch_dtype(dtype), device, apart=apart))
        return buffers[-1].view

    offs = keep("offs", group_ends(problem, draw("offs")), DTYPES["i32"]) if problem.grouped else None
    found = _keep_scales(frame, drawn, affine, keep)
    bias_values = _bias(frame, drawn, draw, exact, filling == "specials")
    if bias_values is not None and several:
        for index in range(len(bias_values)):
            if not problem.is_one_of("bias", index):
                bias_values[index] = -0.0  # the neutral element: a product without a bias keeps the sign of its zeros
    bias = None if bias_values is None else keep("bias", bias_values, problem.bias_dtype, several)
    lookups: dict[int, tuple[Tensor, Tensor]] = {}
    residuals = tuple(
        a if index == 0 and problem.has("res-a") else _kept_residual(problem, index, *drawn_one, draw, keep, lookups)
        for index, drawn_one in enumerate(_residuals(frame, drawn, draw, exact))
    )
    finite = all(g.drawn_finite if g.drawn_finite is not None else _is_finite(g.view) for g in buffers)
    return Operands(
        problem, filling, seed, device, a, b, bias, residuals, found.get("scale_b"),
        drawn.quantum, chosen.zero_mean and not frame.twin and not exact, finite, tuple(buffers),
        found.get("scale_a"), offs, lookups, drawn.grain or drawn.quantum, drawn.units, drawn.reach,
        found.get("zero_a"), found.get("zero_b"), found.get("affine"), frame.zero,
    )  # fmt: skip


def _keep_scales(
    frame: _Frame, drawn: _Drawn, affine: Array | None, keep: Callable[[str, Array, DType], Tensor]
) -> dict[str, Tensor]:
    """The scales and zero points that the op takes, as tensors, by the names that :class:`Operands` has for them."""
    problem, f32 = frame.problem, DTYPES["f32"]
    if affine is not None:
        return {"affine": keep("affine", affine, problem.dtypes.a)}
    if drawn.scale is None:
        return {}
    if not (frame.int8 or frame.quantised):
        return {"scale_b": keep("scale", drawn.scale, problem.dtypes.out)}
    dtype = DTYPES["bf16"] if problem.op.name == "da8w8" and problem.dtypes.out.name == "bf16" else f32
    found = {} if drawn.scale_a is None else {"scale_a": keep("scale_a", drawn.scale_a, dtype)}
    found["scale_b"] = keep("scale_b", drawn.scale, dtype)
    if problem.op.name == "qlinear":
        found["zero_b"] = keep("zero_b", np.zeros(frame.b_shape[1], dtype=np.int32), DTYPES["i32"])
        if "scale_a" in found:
            found["zero_a"] = keep("zero_a", np.asarray(frame.zero, dtype=np.int32), DTYPES["i32"])
    return found


# Fillings whose integers must come through as they are.
_NEUTRAL: Final = frozenset({"k-cover", "tile-map"})
# Fillings whose A is what the product multiplies, so that the zero point is added to what is stored; in the others the
# stored integers take their whole range.
_BEFORE_ZERO: Final = _NEUTRAL | {"int-1", "one-hot"}


def _scale_int8(frame: _Frame, drawn: _Drawn, draw: _Draw, filling: str) -> None:
    """Scales of A and B that bring an integer product to where its steps and its result tell values apart.

    8 or 40 steps of an 8-bit result, elsewhere the middle of an activation, or 4.  Powers of two where the filling is
    exact, full significands elsewhere.  A's zero point is added to what is stored.
    """
    problem, exact = frame.problem, drawn.quantum > 0 and filling not in {"rand", "rand-positive"}
    requant, static = problem.step("requant"), problem.step("static")
    assert drawn.scale is not None
    if frame.zero and filling in _BEFORE_ZERO:
        drawn.a = drawn.a + frame.zero

    def scales(name: str, shape: tuple[int, ...]) -> Array:
        stream = draw(name)
        return _powers(stream, shape) if exact else np.abs(stream.binade(shape, False))

    if problem.step("rowwise") is not None:
        rows = frame.a_shape[:2] if problem.shape.batch is not None else frame.a_shape[1:2]
        drawn.scale_a = scales("scale-a", (*rows, 1))
    elif static is None:
        drawn.scale_a = scales("scale-both", (1,)).reshape(())
    size = static.numbers[0] if static else 0.5
    if filling in _NEUTRAL:
        unit = 2.0 ** -round(math.log2(size))
        if drawn.scale_a is not None:
            drawn.scale_a, unit = np.full_like(drawn.scale_a, 4.0), 0.25
        drawn.scale = np.full_like(drawn.scale, unit)
        return
    if filling == "rand":
        drawn.quantum = drawn.spare = 0.0
    steps = 8.0 if filling == "int-1" else 40.0  # of small integers so few that many values lie half way between two
    target = steps * requant.numbers[0] if requant else frame.target or 4.0
    e = round(math.log2(target / (drawn.level * size)))
    drawn.scale = _scaled(drawn.scale, e)
    drawn.level, drawn.quantum = drawn.level * size * 2.0**e, drawn.quantum * 2.0 ** (e + math.floor(math.log2(size)))
    if exact and drawn.scale_a is not None:
        drawn.quantum *= 0.25  # the smallest of its powers is 1/8


def _affine(frame: _Frame, drawn: _Drawn, draw: _Draw, filling: str) -> Array:
    """Scales and zeros of the groups of a 4-bit weight, (K / group, N, 2), and codes of 0 to 15 in place of B's values.

    Exact fillings whose digits mean something keep a scale of 1.  The others have powers of two and zeros of up to 8
    scales, other ones from group to group and from column to column.
    """
    problem, n = frame.problem, frame.b_shape[1]
    shape = (frame.k // problem.group_size, n)
    exact = drawn.quantum > 0
    assert drawn.b is not None
    drawn.b = drawn.b + 8
    if filling in _NEUTRAL | {"int-1"}:
        scale, zero = np.ones(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
    elif exact:
        scale = draw("affine").look_up(shape, np.array([1, 0.5, 0.25, 0.125], dtype=np.float32), 8)
        zero = scale * draw("affine-zero").look_up(shape, np.arange(-8, 9, dtype=np.float32), 8)
    else:
        scale = np.abs(draw("affine").binade(shape, False))
        zero = scale * draw("affine-zero").uniform(shape, False) * np.float32(4.0)
        zero = np.abs(zero) if drawn.positive else np.zeros_like(zero) if filling == "specials" else zero
    found: Array = np.stack([scale, zero], axis=-1)
    return found


def again(given: Operands, problem: Problem, a: Tensor) -> Operands:
    """The operands of a further product by the same B: what its A holds has been computed, and nothing is promised."""
    facts: dict[str, Any] = {"quantum": 0.0, "grain": 0.0, "units": (0.0, 0.0), "reach": math.inf, "zero_mean": False}
    finite = given.finite and _is_finite(a)
    return dataclasses.replace(
        given, problem=problem, filling="rand", a=a, residuals=(), buffers=(), finite=finite, **facts
    )


def _kept_residual(
    problem: Problem,
    index: int,
    values: Array,
    dtype: DType,
    draw: _Draw,
    keep: Callable[[str, Array | _Lines, DType], Tensor],
    lookups: dict[int, tuple[Tensor, Tensor]],
) -> Tensor:
    """A residual in the product's places.  In memory it lies as the program's result does, but for one after a view."""
    step, made = problem.residuals[index]
    if step.extent == "at":
        rows = draw(f"i{index}").look_up(problem.result_shape[:-1], np.arange(_TABLE_ROWS, dtype=np.int32))
        lookups[index] = keep(f"r{index}", values, dtype), keep(f"i{index}", rows, DTYPES["i32"])
        table, where = lookups[index]
        return table[where.long()]
    if step.extent:
        return keep(f"r{index}", values, dtype).expand(problem.result_shape)
    lines = _all_lines(values, problem.result_shape)
    if isinstance(lines, _Lines) or any(move.name == "view" for move in made):
        return keep(f"r{index}", lines, dtype)  # no view could undo the view; the program takes one with gaps
    stored = moves.forth(torch.from_numpy(lines), made).contiguous()
    return moves.back(keep(f"r{index}", stored.numpy(), dtype), problem.result_shape, made)


def _is_finite(x: Tensor) -> bool:
    """No NaN and no infinity; torch has no isfinite of fp8."""
    if not x.dtype.is_floating_point:
        return True
    return bool(torch.isfinite(x.to(torch.float32) if x.element_size() == 1 else x).all())


def group_ends(problem: Problem, stream: _Stream) -> Array:
    """Where the groups of ``grouped_mm`` end: int32, the last one at the last row.

    Ends at random rows, so that no tile's edge is one; of three groups and more one is empty, at a random place: nobody
    is sent to every expert.
    """
    groups, rows = problem.shape.batch or 0, problem.result_shape[0]
    ends = sorted(stream.below(rows + 1) for _ in range(groups - 1))
    if groups >= 3:
        empty = stream.below(groups)
        if empty == groups - 1:
            ends[-1] = rows
        else:
            ends[empty] = ends[empty - 1] if empty else 0
    return np.array([*ends, rows][:groups], dtype=np.int32)


def _face_relu(frame: _Frame, drawn: _Drawn) -> None:
    """Turn A's sign if a relu would silence most of a result, which then could show no error.

    That is a result of few elements, or one of a single sign.  A's, as B may be a constant that other M share.
    """
    problem = frame.problem
    relu = next((index for index, step in enumerate(problem.epilogue) if step.name == "relu"), None)
    if relu is None or not frame.a.is_float or drawn.b is None:
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


def _matrix(
    name: str,
    lines: Array | _Lines,
    dtype: DType,
    device: str,
    pad: bool,
    off: bool,
    *,
    apart: bool = False,
    middle: bool = False,
) -> Guarded:
    """A stack of matrices in storage order; see :func:`_guarded` for ``apart`` and ``middle``."""
    gap = _PAD_FP8 if dtype.bits == 8 and dtype.is_float else _PAD
    shape = lines.shape
    if isinstance(lines, _Lines) and lines.transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return _guarded(
        name, lines, shape, torch_dtype(dtype), device, pad=gap if pad else 0, offset=1 if off else 0, apart=apart,
        middle=middle,
    )  # fmt: skip


def _logical(stored: Guarded, transposed: bool, batch: int | None, expand: bool) -> Tensor:
    """The tensor of the problem over its storage: transposed, expanded, without a batch of one."""
    view = stored.view.mT if transposed else stored.view
    if batch is None:
        return view[0]
    return view.expand(batch, -1, -1) if expand else view
