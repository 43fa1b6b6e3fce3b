"""The probes of one column: planted operands, and what their results tell about the arithmetic."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from pytest_gemm.numerics.contract import Contract
from pytest_gemm.tools.probes import PROBES, Array, Bench, Print, Term, all_alike, halves, power
from pytest_gemm.tools.sum_order import UNREAD, Order, Width, order_of, width_of

_HALF_TYPES: Final = {11: "f16", 8: "bf16"}  # by significand bits


class Examination:
    """All probes of one column; fills a :class:`Print`."""

    def __init__(self, bench: Bench, found: Print) -> None:
        self.bench = bench
        self.found = found
        self.contract: Contract = bench.prepared.contract
        self.scale = bench.wide
        self.input_error = 0.0
        self.order = Order("unread")
        self.inside = self.between = UNREAD
        self.partials: Width | None = None
        self.block_sum: Width | None = None
        self.repeatable = True

    def run(self, *, is_long: bool) -> None:
        """Every probe that applies to the column."""
        for probe in _PROBES[self.bench.given.is_float, is_long]:
            probe(self)

    def note(self, probe: str, value: str, **facts: object) -> None:
        """Note the value of a probe, and the sentences about it where it is remarkable.

        Args:
            probe: one of ``probes.PROBES``.
            value: for the table.
            facts: what the sentences name besides dtypes and sizes.
        """
        self.found.traits[probe] = value
        self.tell(probe, value, **facts)

    def tell(self, probe: str, value: str, **facts: object) -> None:
        """Note the sentences about a value."""
        bench, told = self.bench, PROBES[probe].get(value, {})
        facts |= {"given": bench.given.name, "out": bench.out.name, "m": bench.m}
        self.found.remarks += [told["remark"].format_map(facts)] if "remark" in told else []
        self.found.findings += [told["finding"].format_map(facts)] if "finding" in told else []

    def remark(self, text: str) -> None:
        """Note what is remarkable."""
        self.found.remarks.append(text)

    def finding(self, text: str) -> None:
        """Note what contradicts the contract."""
        self.found.findings.append(text)

    # -- inputs ------------------------------------------------------------------------------------------------

    def inputs(self) -> None:
        """One product x * 1 with x = 1 + 2^-t: how many bits of x arrive, from A and from B, and how it is rounded."""
        given = self.bench.given
        planted = [1.0 + 2.0**-t for t in range(1, given.precision)]
        kept, modes = [], []
        for swap in (False, True):
            bits = 1 + sum(itertools.takewhile(bool, self._arrived(planted, swap) == planted))
            kept.append(bits)
            if bits < given.precision:
                last = 2.0 ** -(bits - 1)
                up, down = self._arrived([1.0 + 0.75 * last, -1.0 - 0.75 * last], swap)
                modes.append({(1.0 + last, -1.0 - last): "RN", (1.0, -1.0): "RZ"}.get((float(up), float(down)), "?"))
        bits, mode = min(kept), next(iter(modes), "")
        self.note("inputs", f"{bits} {mode}".strip())
        if bits < given.precision:
            # A product of two inputs that keep b bits: 2 * 2^-b to nearest, 2 * 2^-(b-1) cut.
            self.input_error = 2.0 ** (1 - bits) if mode == "RN" else 2.0 ** (2 - bits)
            name = {11: "TF32 (11 bits)", 8: "bf16 (8 bits)"}.get(bits, f"{bits} bits")
            how = {"RN": "rounded to nearest", "RZ": "cut"}.get(mode, "changed")
            self.remark(f"{given.name} inputs are {how} to {name}")
            if kept[0] != kept[1]:
                self.remark(f"{kept[0]} bits of A arrive, and {kept[1]} of B")

    def _arrived(self, values: Sequence[float], swap: bool) -> Array:
        return self.bench.sums([[(0, 1.0, value) if swap else (0, value, 1.0)] for value in values])

    def products(self) -> None:
        """(1 + 2^-i)^2 - (1 + 2^(1-i)) is 2^-2i: the product of the low parts, which emulations leave out."""
        given = self.bench.given.name
        i = min(self.bench.read.precision - 1, 11)
        if self.input_error > 2.0 ** (1 - i):
            return  # the low part did not arrive
        # Both low parts are among the bits that arrive, and their product among those of the sum.
        lift = 2.0**6 if given == "f16" else 1.0
        x = (1.0 + 2.0**-i) * lift
        left = float(self.bench.sums([[(0, x, x), (1, -(1.0 + 2.0 ** (1 - i)) * lift, lift)]])[0]) / lift**2
        if left == 2.0 ** (-2 * i):
            self.note("products", "exact")
        elif left == 0.0 and given in {"f32", "f64"}:
            self.input_error = max(self.input_error, 2.0 ** (-2 * i))
            self.note("products", "low lost")
        else:
            self.note("products", "rounded")

    # -- sums --------------------------------------------------------------------------------------------------

    def sums(self) -> None:
        """Widths, roundings and the order of the sum."""
        bench, top = self.bench, self.scale.top
        if not np.all(np.isfinite(bench.sums([[power(0, 1.0, top), power(2, -1.0, top)]]))):
            self.scale = bench.narrow
            self.remark("sums beyond 65504 overflow: they are held in float16")
        first = width_of(bench, (0, 1, 2), self.scale)
        if first.bits < 0 and self.scale is bench.wide:
            # So few bits that what they keep of a big sum is more than the result can hold.
            narrow = width_of(bench, (0, 1, 2), bench.narrow)
            if narrow.bits > 0:
                self.scale, first = bench.narrow, narrow
        order = order_of(bench, self.scale, first)
        if order.name == "unread" and self.scale is bench.wide:
            # A partial sum that is stored in float16 on the way.
            order = order_of(bench, bench.narrow, first)
            if order.name != "unread":
                self.scale = bench.narrow
                self.remark("partial sums beyond 65504 overflow: they are stored in float16 on the way")
        self.order = order
        self.note("order", order.name)
        self.inside = first if order.places == (0, 1, 2) else width_of(bench, order.places, self.scale)
        self.between = self.inside
        if order.chunk > 2:
            self.note("chunk L", str(order.chunk))
            self.note("alignment f", f"{self.inside.bits} {self.inside.mode}".strip())
            if order.apart:
                self.between = width_of(bench, order.apart, self.scale)
        self.note("accumulator", str(self.between))
        if order.block:
            self._blocks(order.block)
        if order.name != "unread":
            self._describe_sums(order)

    def _blocks(self, block: int) -> None:
        """How the sum of a block is stored, and how it is added to the others."""
        self.note("blocks", str(block))
        half = block // 2
        if block + half < self.bench.k:
            self.partials = width_of(self.bench, (0, 1, block + half), self.scale)
            self.note("partials", str(self.partials))
        if 2 * block + half < self.bench.k:
            self.block_sum = width_of(self.bench, (0, block + half, 2 * block + half), self.scale)
            self.note("block sum", str(self.block_sum))

    @property
    def stored(self) -> Width | None:
        """The width in which partial sums are stored, where it is less than that of the sum; ``None`` elsewhere."""
        found = self.partials
        return found if found is not None and 0 < found.bits < min(self.inside.bits, 20) else None

    def _describe_sums(self, order: Order) -> None:
        if order.chunk > 2:
            self.remark(
                f"{order.chunk} products at a time are aligned to {self.inside.bits} fractional bits"
                f"{' and cut' if self.inside.mode == 'RZ' else ''}; the sum keeps {self.between}"
            )
        elif self.between.mode == "RZ":
            self.remark("sums are cut (RZ), not rounded to nearest")
        if 0 < self.between.bits < 20 and order.chunk <= 2:
            name = {10: "float16", 7: "bfloat16"}.get(self.between.bits, f"{self.between.bits + 1} bits")
            self.remark(f"products are added up in {name}")
        if order.block:
            self.remark(f"each {order.block} products are summed by themselves before their sum is added to the rest")
        if self.stored is not None:
            bits = self.stored.bits + 1
            self.remark(f"partial sums of {order.block} products are stored in {_HALF_TYPES.get(bits, f'{bits} bits')}")

    # -- the store ---------------------------------------------------------------------------------------------

    def store(self) -> None:
        """Sums that the accumulator holds exactly, and the result's dtype does not: ties, and just beside them."""
        out = self.bench.out
        p = out.precision
        if self.between.bits < p + 4 or out.name in {"f32", "f64"}:
            return  # the sum has no more bits than the result
        cases: list[list[Term]] = []
        values = []
        for bits, sign in itertools.product([(p,), (p - 1, p), (p, p + 4), (p + 1,), (p - 2,), (9,)], (1.0, -1.0)):
            cases.append([power(n, sign, -t) for n, t in enumerate((0, *bits))])
            values.append(sign * (1.0 + sum(2.0**-t for t in bits)))
        found = self.bench.sums(cases)
        name = next((name for name, store in stores(p).items() if np.array_equal([*map(store, values)], found)), "?")
        self.note("store", name)
        if name == "RNE":
            return
        how = f"is not rounded to nearest even when it is stored in {out.name}, but {name}"
        if name.startswith("via "):
            how = f"passes through {name[4:]} before it is stored in {out.name}"
        self.remark(f"the result {how}")
        self.finding(f"the last rounding, to {out.name}, is {name}; every contract has it to nearest even, and once")

    # -- growth of the error -------------------------------------------------------------------------------------

    def growth(self) -> None:
        """Positive data minus their exact sum: what is left is the error itself, with all of its bits.

        Relative to u * sum |a b| with u = 2^-24 (2^-53 for f64).  Demmel et al. grade by the slope over K: 1 at most.
        """
        k = self.bench.k
        unit = 2.0 ** -(53 if self.bench.given.name == "f64" else 24)
        lengths = [n for n in (32, 128, 512, 2048) if n < k - 16] + [k - 16]
        errors = [self._errors(n) / unit for n in lengths]
        if not np.all(np.isfinite(errors)):
            return
        drift = float(np.mean(errors[-1]))
        self.note("drift", f"{drift:+.2g}" if drift else "0")
        largest = np.max(np.abs(errors), axis=1)
        seen = largest > 0
        if np.sum(seen) >= 2:
            slope = np.polyfit(np.log(np.array(lengths)[seen]), np.log(largest[seen]), 1)[0]
            self.note("error slope", f"{slope:.2f}")
        worst = float(np.max(largest)) * unit
        allowed = self.contract.theta(k, out=self.bench.out)
        if worst > allowed:
            error = f"{worst:.3g}"
            self.finding(f"a sum of positive products was off by {error} of it, and the contract allows {allowed:.3g}")
        spread = float(np.std(errors[-1])) / math.sqrt(len(errors[-1]))
        if abs(drift) > 6.0 * spread and abs(drift) > 2.0:
            way = "short" if drift < 0 else "beyond"
            self.remark(f"sums of {lengths[-1]} positive products fall {way} by {abs(drift):.3g} units on average")

    def _errors(self, length: int) -> Array:
        """The errors of as many sums as the result's diagonal holds, relative to sum |a b|."""
        bench = self.bench
        count, p = min(bench.m, bench.n), min(bench.read.precision, 24)
        random = np.random.Generator(np.random.Philox(key=length))
        x, y = (random.integers(2 ** (p - 1), 2**p, size=(count, length)) for _ in range(2))
        totals = (x * y).sum(axis=1)  # below 2^63, as K is below 2^15
        # Such that the sum is about 2^13: no half type overflows, and the error stays above its subnormals.
        shift = 13 - math.ceil(math.log2(length)) - 2 * p
        a, b = np.zeros((2, count, bench.k))
        a[:, :length] = x * 2.0 ** (shift - shift // 2)
        b[:, :length] = y * 2.0 ** (shift // 2)
        left = []
        for row in range(count):
            rest = int(totals[row])
            for place in range(length, length + min(16, -(-44 // p))):
                # What is left of the sum, p bits at a time: digits * 2^cut as a product of two numbers in range.
                cut = max(abs(rest).bit_length() - p, 0)
                if rest == 0 or rest.bit_length() + shift < 2 * bench.given.emin:
                    break
                digits = rest >> cut
                one, other = halves(cut + shift + p - 1)
                a[row, place], b[row, place] = -digits * 2.0 ** (1 - p) * one, other
                rest -= digits << cut
            left.append(rest * 2.0**shift)
        found: Array = (bench.dots(a, b) - np.array(left)) / (totals * 2.0**shift)
        return found

    # -- the ends of the range -----------------------------------------------------------------------------------

    def subnormals(self) -> None:
        """In: a subnormal operand.  Out: a subnormal result.  Inside: subnormal products of which the sum is normal."""
        given, out = self.bench.given, self.bench.out
        tiny, lift = 2.0 ** (given.emin - 2), 2.0 ** min(given.emax - 1, 10)
        cases: list[tuple[str, Term, float]] = [
            ("in", (0, tiny, lift), tiny * lift),
            ("in", (0, lift, tiny), tiny * lift),
        ]
        if 2 * given.emin <= out.emin - 2:
            cases.append(("out", (0, *halves(out.emin - 2)), 2.0 ** (out.emin - 2)))
        inner = -1022 if given.name == "f64" else -126
        if out.emin == inner and 2 * given.emin <= inner - 4:
            cases.append(("inside", (slice(16), *halves(inner - 4)), 2.0**inner))
        found = self.bench.sums([[term] for _, term, _ in cases])
        lost = dict.fromkeys(n for (n, _, wanted), value in zip(cases, found, strict=True) if value != wanted)
        self.note("subnormals", f"no {'+'.join(lost)}" if lost else "kept")
        for name in lost:
            self.tell("subnormals", name)

    def specials(self) -> None:
        """Inf, NaN, and the product of zero with them; the sum of negative zeros."""
        nan, inf = math.nan, math.inf
        cases = {"NaN": [(nan, 1.0)], "0*NaN": [(0.0, nan)], "NaN*0": [(nan, 0.0)]}
        if self.bench.given.has_inf:
            cases |= {"0*Inf": [(0.0, inf)], "Inf*0": [(inf, 0.0)], "Inf-Inf": [(inf, 1.0), (-inf, 1.0)]}
            cases |= {"Inf": [(inf, 1.0)]}
        planted = [[(place, *pair) for place, pair in enumerate(pairs)] for pairs in cases.values()]
        *found, zero = self.bench.sums([*planted, [(slice(None), -0.0, 1.0)]])
        right = [value == inf if name == "Inf" else math.isnan(value) for name, value in zip(cases, found, strict=True)]
        wrong = [f"{name} gives {value:g}" for name, value, ok in zip(cases, found, right, strict=True) if not ok]
        self.note("specials", f"{len(wrong)} wrong" if wrong else "IEEE")
        if wrong:
            self.remark(f"not as in IEEE 754: {', '.join(wrong)}")
        self.note("sum of -0", "-0" if math.copysign(1.0, zero) < 0 else "+0")

    def overflow(self) -> None:
        """Twice the largest power of two of the result's dtype."""
        out = self.bench.out
        if 2 * self.bench.given.emax < out.emax + 1:
            return
        found = float(self.bench.sums([[power(0, 1.0, out.emax), power(1, 1.0, out.emax)]])[0])
        value = {math.inf: "Inf", out.max_finite: "saturates"}.get(found, f"{found:g}")
        self.note("overflow", value)
        if found != math.inf:
            self.remark(f"a result beyond {out.name} becomes {value if value != 'saturates' else 'its largest number'}")

    # -- algorithms other than the usual one -----------------------------------------------------------------

    def isolation(self) -> None:
        """Half of A's rows, or of B's columns, times a large power of two: the others' results must not move a bit.

        Strassen's and Winograd's algorithms add blocks of different rows (Demmel et al.).
        """
        if not self.repeatable:
            return
        plain, mixed = self.bench.product(*self._random), False
        for side, size in enumerate(plain.shape):
            for half in (slice(size // 2), slice(size // 2, size)):
                a, b = (x.copy() for x in self._random)
                (a, b.T)[side][half] *= 2.0 ** min(self.bench.given.emax - 1, 30)
                large = self.bench.product(a, b)
                mixed |= not all_alike(np.delete(large, half, side), np.delete(plain, half, side))
        self.note("isolation", "mixed" if mixed else "kept")

    def fixed_point(self) -> None:
        """A small product beside a large operand that meets zero: fixed-point splits (Ozaki) lose its bits."""
        given, p = self.bench.given, self.bench.read.precision
        if self.input_error:
            return
        big = 2.0 ** min(given.emax, 200)
        small = (2.0 - 2.0 ** (1 - p)) * 2.0 ** max(given.emin, -200)
        cases = [[(0, big, 0.0), (1, small, 1.0)], [(0, 0.0, big), (1, 1.0, small)]]
        lost = bool(np.any(self.bench.sums(cases) != small))
        self.note("fixed point", "yes" if lost else "no")

    # -- again and elsewhere -------------------------------------------------------------------------------------

    @functools.cached_property
    def _random(self) -> tuple[Array, Array]:
        """Operands with every bit of the type that is read, either sign, or any int8."""
        shapes = (self.bench.m, self.bench.k), (self.bench.k, self.bench.n)
        randoms = [np.random.Generator(np.random.Philox(key=key)) for key in (2, 3)]
        if not self.bench.given.is_float:
            a, b = (random.integers(-128, 128, size) * 1.0 for random, size in zip(randoms, shapes, strict=True))
            return a, b
        p = min(self.bench.read.precision, 30)
        a, b = (r.integers(1 - 2**p, 2**p, size) * 2.0**-p for r, size in zip(randoms, shapes, strict=True))
        return a, b

    def repeats(self) -> None:
        """The same product ten times, and one row at every place."""
        a, b = self._random
        first = self.bench.product(a, b)
        self.repeatable = all(all_alike(self.bench.product(a, b), first) for _ in range(9))
        self.note("deterministic", "yes" if self.repeatable else "no")
        if not self.repeatable and self.contract.deterministic:
            self.finding("the contract says deterministic, and the same product again has other bits")
        if not self.repeatable:
            return
        square = self.bench.product(np.tile(a[:1], (self.bench.m, 1)), np.tile(b[:, :1], self.bench.n))
        alike = bool(np.all(square == square[0, 0])) and not self.bench.uneven
        self.note("any row alike", "yes" if alike else "no")

    def batch_invariance(self, single: Bench) -> None:
        """Row i of the product against the product of row i alone."""
        if not self.repeatable:
            return
        a, b = self._random
        whole = self.bench.product(a, b)
        same = all(all_alike(single.product(a[i : i + 1], b)[0], whole[i]) for i in (0, 1, self.bench.m - 1))
        self.note("batch invariant", "yes" if same else "no")

    def epilogue(self, clamped: Bench) -> None:
        """NaN through clamp to [1, 6] and relu: 1 or 6 where clamp swallows it, 0 where relu does."""
        value = float(clamped.sums([[(0, math.nan, 1.0)]])[0])
        name = "passes" if math.isnan(value) else {0.0: "relu eats"}.get(value, "clamp eats")
        self.note("NaN in epilogue", name, found=value)

    # -- integers ----------------------------------------------------------------------------------------------

    def integer_sums(self) -> None:
        """Sums that are odd and beyond 2^24, and the largest pairs: exact, or not."""
        k, everywhere = self.bench.k, slice(None)
        cases: list[tuple[list[Term], float]] = [
            ([(slice(k - 2), 127.0, 127.0), (k - 2, 1.0, 1.0)], 16129.0 * (k - 2) + 1.0),  # odd, more than 24 bits
            ([(everywhere, -128.0, -128.0)], 16384.0 * k),  # two of these products do not fit int16
            ([(everywhere, 127.0, -128.0)], -16256.0 * k),
            ([(everywhere, -128.0, 127.0)], -16256.0 * k),
        ]
        wanted = [value for _, value in cases]
        found = list(self.bench.sums([terms for terms, _ in cases]))
        if found[0] != wanted[0] and found[1:] == wanted[1:]:
            text = "sums of int8 products beyond 2^24 are rounded: they pass through float32"
        elif abs(found[1]) < wanted[1]:
            text = "pairs of int8 products saturate at 32767: they are added in int16"
        else:
            text = f"sums of int8 products are wrong: {found[1]:g} instead of {wanted[1]:g}"
        self.note("accumulator", "exact" if found == wanted else "inexact")
        if found != wanted:
            self.remark(text)
            self.finding(f"int8 into int32 is exact by contract, and {text}")

    def integer_overflow(self) -> None:
        """131072 products of -128 with -128 are 2^31, one more than int32 holds."""
        found = float(self.bench.sums([[(slice(131072), -128.0, -128.0)]])[0])
        value = {-(2.0**31): "wraps", 2.0**31 - 1: "saturates"}.get(found, f"{found:g}")
        self.note("overflow", value)
        if value != "wraps":
            self.remark(f"an int32 sum of 2^31 becomes {found:.0f} instead of wrapping around")

    # -- the contract ------------------------------------------------------------------------------------------

    def seen_theta(self, k: int) -> float:
        """Factor of sum |a b| that bounds the error of a sum of ``k`` products of the seen arithmetic.

        The same forms as ``backend.Contract.theta``.
        """
        order, cut = self.order, 2.0**-self.inside.bits
        run = min(order.block or k, k)
        if order.chunk > 2:
            theta = math.ceil(run / order.chunk) * (order.chunk * cut + max(cut, self.between.error()))
        else:
            theta = (math.ceil(run / order.grain) - 1) * self.between.error()
        if order.block and self.block_sum is not None:  # of two blocks it does not show, which proves nothing
            theta += (math.ceil(k / order.block) - 1) * self.block_sum.error()
        return theta + (self.stored.error() if self.stored is not None else 0.0)

    def hold_to_contract(self) -> None:
        """A bound from the seen arithmetic that is larger than the declared one is a finding."""
        claimed, findings = self.contract, self.found.findings
        if self.input_error > claimed.input_error:
            lost = f"{self.input_error:.2g} of each product, and the contract allows {claimed.input_error:.2g}"
            findings.append(f"inputs lose bits: {lost}")
        if self.between.bits < 0 or self.inside.bits < 0:
            return  # not read; what was not seen proves nothing
        k = self.bench.k
        allowed = claimed.theta(k, out=self.bench.out) - claimed.input_error
        seen = self.seen_theta(k)
        if seen > allowed * (1.0 + 2.0**-10):
            findings.append(
                f"sums of {k} products may err by {seen:.3g} of sum |a b|, and the contract allows {allowed:.3g}: "
                f"seen {self._seen_words()}, declared {_declared_words(claimed)}"
            )

    def _seen_words(self) -> str:
        order = self.order
        parts = [f"chunks of {order.chunk} aligned to {self.inside.bits} bits"] if order.chunk > 2 else []
        parts.append(f"sums of {self.between}")
        parts += [f"blocks of {order.block}"] if order.block else []
        parts += [f"partial sums of {self.partials}"] if self.partials is not None else []
        return ", ".join(parts)


def _declared_words(contract: Contract) -> str:
    parts = [f"sums in {contract.accumulate}"]
    if contract.alignment_bits:
        parts = [f"chunks of {contract.chunk} aligned to {contract.alignment_bits} bits"]
    if contract.promote_every:
        parts.append(f"promoted every {contract.promote_every}")
    if contract.slices > 1:
        where = "the output's type" if contract.partials == "out" else "f32"
        parts.append(f"up to {contract.slices} slices with partial sums in {where}")
    return ", ".join(parts)


_SUMS: Final = (Examination.sums, Examination.growth, Examination.repeats)
# The probes of a column, in their order, by whether its products are floating-point ones and whether it is a long one.
_PROBES: Final[Mapping[tuple[bool, bool], tuple[Callable[[Examination], None], ...]]] = {
    (True, True): (*_SUMS, Examination.hold_to_contract),
    (True, False): (
        *(Examination.inputs, Examination.products, *_SUMS, Examination.store, Examination.subnormals),
        *(Examination.specials, Examination.overflow, Examination.isolation, Examination.fixed_point),
        Examination.hold_to_contract,
    ),
    (False, True): (Examination.integer_overflow,),
    (False, False): (Examination.integer_sums, Examination.repeats),
}

# -- models of a store ---------------------------------------------------------------------------------------


def _rounded(x: float, p: int, mode: str) -> float:
    """``x`` to p significand bits; RNE, RNA (ties away), RZ, RU or RD.  No ends of a range."""
    quantum = 2.0 ** (math.frexp(x)[1] - p)
    whole = math.trunc(x / quantum)
    rest = abs(x / quantum - whole)
    away = {
        "RNE": rest > 0.5 or (rest == 0.5 and whole % 2 == 1),
        "RNA": rest >= 0.5,
        "RZ": False,
        "RU": rest > 0 and x > 0,
        "RD": rest > 0 and x < 0,
    }[mode]
    return (whole + (math.copysign(1, x) if away else 0)) * quantum


def stores(p: int) -> dict[str, Callable[[float], float]]:
    """How a sum may come to a result of p bits: rounded, or rounded to another half type before."""

    def through(x: float, bits: int) -> float:
        return _rounded(_rounded(x, bits, "RNE"), p, "RNE")

    modes: dict[str, Callable[[float], float]]
    modes = {mode: functools.partial(_rounded, p=p, mode=mode) for mode in ("RNE", "RZ", "RNA", "RU", "RD")}
    return modes | {f"via {n}": functools.partial(through, bits=b) for b, n in _HALF_TYPES.items() if b != p}
