"""The probes of one column: planted operands, and what their results tell about the arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from pytest_gemm.numerics.contract import Contract
from pytest_gemm.tools.probes import Array, Bench, Print, Rows, all_alike, halves, kind
from pytest_gemm.tools.stores import same, stores
from pytest_gemm.tools.sum_order import Order, Width, order_of, width_of


class Examination:
    """All probes of one column; fills a :class:`Print`."""

    def __init__(self, bench: Bench, found: Print, is_long: bool) -> None:
        self.bench = bench
        self.found = found
        self.kind = kind(bench.problem)
        self.is_long = is_long
        self.contract: Contract = bench.prepared.contract
        self.scale = self.kind.wide
        self.input_error = 0.0
        self.order: Order | None = None
        self.inside = self.between = Width(-1, "")
        self.partials: Width | None = None
        self.block_sum: Width | None = None
        self.repeatable = True

    # -- small parts ---------------------------------------------------------------------------------

    def note(self, probe: str, value: str) -> None:
        """Note the value of a probe."""
        self.found.traits[probe] = value

    def remark(self, text: str) -> None:
        """Note what is remarkable."""
        self.found.remarks.append(text)

    def finding(self, text: str) -> None:
        """Note what contradicts the contract."""
        self.found.findings.append(text)

    def rows(self) -> Rows:
        """Rows to plant values in."""
        return Rows(self.bench.k)

    # -- the order in which everything is asked --------------------------------------------------------------

    def floats(self) -> None:
        """A column of floating-point products."""
        if not self.is_long:
            self.inputs()
            self.products()
        self.sums()
        self.growth()
        self.repeats()
        if not self.is_long:
            self.store()
            self.subnormals()
            self.specials()
            self.overflow()
            self.isolation()
            self.fixed_point()
        self.hold_to_contract()

    def integers(self) -> None:
        """A column of int8 products."""
        if self.is_long:
            self.integer_overflow()
        else:
            self.integer_sums()
            self.repeats()

    # -- inputs ------------------------------------------------------------------------------------------------

    def inputs(self) -> None:
        """One product x * 1 with x = 1 + 2^-t: how many bits of x arrive, from A and from B, and how it is rounded."""
        precision = self.kind.given.precision
        kept, modes = [], []
        for swap in (False, True):
            found = self._one_hot([1.0 + 2.0**-t for t in range(1, precision)], swap)
            whole = [found[t - 1] == 1.0 + 2.0**-t for t in range(1, precision)]
            bits = 1 + len(list(itertools.takewhile(bool, whole)))
            kept.append(bits)
            if bits < precision:
                last = 2.0 ** -(bits - 1)
                up, down = self._one_hot([1.0 + 0.75 * last, -1.0 - 0.75 * last], swap)
                modes.append({(1.0 + last, -1.0 - last): "RN", (1.0, -1.0): "RZ"}.get((float(up), float(down)), "?"))
        bits = min(kept)
        mode = next(iter(modes), "")
        self.note("inputs", f"{bits} {mode}".strip())
        if bits < precision:
            # A product of two inputs that keep b bits: 2 * 2^-b to nearest, 2 * 2^-(b-1) cut.
            self.input_error = 2.0 ** (1 - bits) if mode == "RN" else 2.0 ** (2 - bits)
            name = {11: "TF32 (11 bits)", 8: "bf16 (8 bits)"}.get(bits, f"{bits} bits")
            how = {"RN": "rounded to nearest", "RZ": "cut"}.get(mode, "changed")
            self.remark(f"{self.kind.given.name} inputs are {how} to {name}")
            if kept[0] != kept[1]:
                self.remark(f"{kept[0]} bits of A arrive, and {kept[1]} of B")

    def _one_hot(self, values: Sequence[float], swap: bool) -> Array:
        rows = self.rows()
        for value in values:
            a, b = np.zeros(self.bench.k), np.zeros(self.bench.k)
            a[0], b[0] = (1.0, value) if swap else (value, 1.0)
            rows.put(a, b)
        return rows.sums(self.bench)

    def products(self) -> None:
        """(1 + 2^-i)^2 - (1 + 2^(1-i)) is 2^-2i: the product of the low parts, which emulations leave out."""
        read = self.kind.read.precision
        i = min(read - 1, 11)
        if self.input_error > 2.0 ** (1 - i):
            return  # the low part did not arrive
        # Both low parts are among the bits that arrive, and their product among those of the sum.
        lift = 2.0**6 if self.kind.given.name == "f16" else 1.0
        a, b = np.zeros(self.bench.k), np.zeros(self.bench.k)
        x = 1.0 + 2.0**-i
        a[0] = b[0] = x * lift
        a[1], b[1] = -(1.0 + 2.0 ** (1 - i)) * lift, lift
        rows = self.rows()
        rows.put(a, b)
        left = float(rows.sums(self.bench)[0]) / lift**2
        if left == 2.0 ** (-2 * i):
            self.note("products", "exact")
        elif left == 0.0 and self.kind.given.name in {"f32", "f64"}:
            self.note("products", "low lost")
            self.input_error = max(self.input_error, 2.0 ** (-2 * i))
            self.remark(
                f"the product of the low halves of two {self.kind.given.name} is left out: products are put together "
                "from those of a narrower type"
            )
        else:
            self.note("products", "rounded")
            self.remark("products are rounded before they are added")

    # -- sums --------------------------------------------------------------------------------------------------

    def sums(self) -> None:
        """Widths, roundings and the order of the sum."""
        bench = self.bench
        rows = self.rows()
        rows.add((0, 1.0, self.scale.top), (2, -1.0, self.scale.top))
        if not np.all(np.isfinite(rows.sums(bench))):
            self.scale = self.kind.narrow
            self.remark("sums beyond 65504 overflow: they are held in float16")
        first = width_of(bench, (0, 1, 2), self.scale)
        if first.bits < 0 and self.scale is not self.kind.narrow:
            # So few bits that what they keep of a big sum is more than the result can hold.
            narrow = width_of(bench, (0, 1, 2), self.kind.narrow)
            if narrow.bits > 0:
                self.scale, first = self.kind.narrow, narrow
        order = order_of(bench, self.scale, first)
        if order is None and self.scale is self.kind.wide:
            # A partial sum that is stored in float16 on the way.
            order = order_of(bench, self.kind.narrow, first)
            if order is not None:
                self.scale = self.kind.narrow
                self.remark("partial sums beyond 65504 overflow: they are stored in float16 on the way")
        self.order = order
        self.note("order", order.name if order is not None else "unread")
        self.inside = self.between = first
        if order is None:
            self.note("accumulator", str(first))
            return
        self.inside = first if order.places == (0, 1, 2) else width_of(bench, order.places, self.scale)
        self.between = self.inside
        if order.chunk > 2:
            self.note("chunk L", str(order.chunk))
            self.note("alignment f", f"{self.inside.bits} {self.inside.mode}".strip())
            if order.apart:
                self.between = width_of(bench, order.apart, self.scale)
        self.note("accumulator", str(self.between))
        if order.block:
            self.blocks(order.block)
        self.say_of_sums(order)

    def blocks(self, block: int) -> None:
        """How the sum of a block is stored, and how it is added to the others."""
        k = self.bench.k
        self.note("blocks", str(block))
        half = block // 2
        if block + half < k:
            self.partials = width_of(self.bench, (0, 1, block + half), self.scale)
            self.note("partials", str(self.partials))
        if 2 * block + half < k:
            self.block_sum = width_of(self.bench, (0, block + half, 2 * block + half), self.scale)
            self.note("block sum", str(self.block_sum))

    def say_of_sums(self, order: Order) -> None:
        """The sentences about it."""
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
        stored = self.partials
        if stored is not None and 0 < stored.bits < min(self.inside.bits, 20):
            name = {10: "f16", 7: "bf16"}.get(stored.bits, f"{stored.bits + 1} bits")
            self.remark(f"partial sums of {order.block} products are stored in {name}")

    # -- the store ---------------------------------------------------------------------------------------------

    def store(self) -> None:
        """Sums that the accumulator holds exactly, and the result's dtype does not: ties, and just beside them."""
        p = self.kind.out.precision
        if self.between.bits < p + 4 or self.kind.out.name in {"f32", "f64"}:
            return  # the sum has no more bits than the result
        cases = [(p,), (p - 1, p), (p, p + 4), (p + 1,), (p - 2,), (9,)]
        values, rows = [], self.rows()
        for bits, sign in itertools.product(cases, (1.0, -1.0)):
            rows.add((0, sign, 0), *((n, sign, -t) for n, t in enumerate(bits, 1)))
            values.append(sign * (1.0 + sum(2.0**-t for t in bits)))
        found = rows.sums(self.bench)
        name = next((name for name, store in stores(p).items() if all(map(same, map(store, values), found))), "?")
        self.note("store", name)
        if name == "RNE":
            return
        out = self.kind.out.name
        if name.startswith("via "):
            self.remark(f"the result passes through {name[4:]} before it is stored in {out}")
        else:
            self.remark(f"the result is not rounded to nearest even when it is stored in {out}, but {name}")
        self.finding(f"the last rounding, to {out}, is {name}; every contract has it to nearest even, and once")

    # -- growth of the error -------------------------------------------------------------------------------------

    def growth(self) -> None:
        """Positive data minus their exact sum: what is left is the error itself, with all of its bits.

        Relative to u * sum |a b| with u = 2^-24 (2^-53 for f64).  Demmel et al. grade by the slope over K: 1 at most.
        """
        k = self.bench.k
        lengths = [n for n in (32, 128, 512, 2048) if n < k - 16] + [k - 16]
        errors = [self._errors(n) for n in lengths]
        if not all(np.all(np.isfinite(e)) for e in errors):
            return
        drift = float(np.mean(errors[-1]))
        self.note("drift", f"{drift:+.2g}" if drift else "0")
        largest = [float(np.max(np.abs(e))) for e in errors]
        seen = [(math.log(n), math.log(e)) for n, e in zip(lengths, largest, strict=True) if e > 0]
        if len(seen) >= 2:
            slope = float(np.polyfit([x for x, _ in seen], [y for _, y in seen], 1)[0])
            self.note("error slope", f"{slope:.2f}")
        worst, unit = max(largest), 2.0 ** -(53 if self.kind.given.name == "f64" else 24)
        allowed = self.contract.theta(k, out=self.kind.out)
        if worst * unit > allowed:
            error = f"{worst * unit:.3g}"
            self.finding(f"a sum of positive products was off by {error} of it, and the contract allows {allowed:.3g}")
        spread = float(np.std(errors[-1])) / math.sqrt(len(errors[-1]))
        if abs(drift) > 6.0 * spread and abs(drift) > 2.0:
            way = "short" if drift < 0 else "beyond"
            self.remark(f"sums of {lengths[-1]} positive products fall {way} by {abs(drift):.3g} units on average")

    def _errors(self, length: int) -> Array:
        """The errors of as many sums as the result's diagonal holds, in units of u * sum |a b|."""
        count, p = min(self.bench.m, self.bench.n), min(self.kind.read.precision, 24)
        random = np.random.Generator(np.random.Philox(key=length))
        low, high = 2 ** (p - 1), 2**p
        x, y = (random.integers(low, high, size=(count, length)) for _ in range(2))
        totals = (x * y).sum(axis=1)  # below 2^63, as K is below 2^15
        # Such that the sum is about 2^13: no half type overflows, and the error stays above its subnormals.
        shift = 13 - math.ceil(math.log2(length)) - 2 * p
        a, b = np.zeros((count, self.bench.k)), np.zeros((count, self.bench.k))
        up = shift - shift // 2
        a[:, :length] = x.astype(np.float64) * 2.0**up
        b[:, :length] = y.astype(np.float64) * 2.0 ** (shift // 2)
        left = []
        for row, total in enumerate(map(int, totals)):
            rest = total
            for n in range(min(16, -(-44 // p))):
                if rest == 0:
                    break
                cut = max(abs(rest).bit_length() - p, 0)
                piece = rest >> cut << cut
                if rest.bit_length() + shift < 2 * self.kind.given.emin:
                    break
                digits, exponent = piece >> cut, cut + shift
                # digits * 2^exponent as a product of two numbers in range
                width = p - 1
                one, other = halves(exponent + width)
                a[row, length + n], b[row, length + n] = -digits * 2.0**-width * one, other
                rest -= piece
            left.append(rest * 2.0**shift)
        unit = 2.0 ** -(53 if self.kind.given.name == "f64" else 24)
        gauge = totals.astype(np.float64) * 2.0**shift
        found: Array = (self.bench.dots(a, b) - np.array(left)) / (unit * gauge)
        return found

    # -- the ends of the range -----------------------------------------------------------------------------------

    def subnormals(self) -> None:
        """In: a subnormal operand.  Out: a subnormal result.  Inside: subnormal products of which the sum is normal."""
        given, out = self.kind.given, self.kind.out
        tiny = 2.0 ** (given.emin - 2)
        lift = 2.0 ** min(given.emax - 1, 10)
        rows = self.rows()

        def one(a0: float, b0: float, count: int = 1) -> None:
            a, b = np.zeros(self.bench.k), np.zeros(self.bench.k)
            a[:count], b[:count] = a0, b0
            rows.put(a, b)

        one(tiny, lift)
        one(lift, tiny)
        target = out.emin - 2
        reaches = 2 * given.emin <= target
        one(*(halves(target) if reaches else (0.0, 0.0)))
        inner = -1022 if given.name == "f64" else -126
        forms = out.emin == inner and 2 * given.emin <= inner - 4
        one(*(halves(inner - 4) if forms else (0.0, 0.0)), 16)
        found = rows.sums(self.bench)
        wanted = {"in": tiny * lift, "out": 2.0**target, "inside": 2.0**inner}
        seen = {"in": min(found[0], found[1]), "out": found[2], "inside": found[3]}
        asked = [name for name in wanted if {"in": True, "out": reaches, "inside": forms}[name]]
        lost = [name for name in asked if seen[name] != wanted[name]]
        self.note("subnormals", "kept" if not lost else f"no {'+'.join(lost)}")
        words = {
            "in": f"subnormal {given.name} inputs are taken for zero",
            "out": f"subnormal results are flushed from {out.name}",
            "inside": "subnormal products or sums are flushed on the way",
        }
        for name in lost:
            self.remark(words[name])

    def specials(self) -> None:
        """Inf, NaN, and the product of zero with them; the sum of negative zeros."""
        rows = self.rows()

        def put(*terms: tuple[float, float]) -> None:
            a, b = np.zeros(self.bench.k), np.zeros(self.bench.k)
            for n, (x, y) in enumerate(terms):
                a[n], b[n] = x, y
            rows.put(a, b)

        names = ["NaN", "0*NaN", "NaN*0"]
        put((math.nan, 1.0))
        put((0.0, math.nan))
        put((math.nan, 0.0))
        if self.kind.given.has_inf:
            names += ["0*Inf", "Inf*0", "Inf-Inf", "Inf"]
            put((0.0, math.inf))
            put((math.inf, 0.0))
            put((math.inf, 1.0), (-math.inf, 1.0))
            put((math.inf, 1.0))
        rows.put(np.full(self.bench.k, -0.0), np.ones(self.bench.k))
        *found, zero = rows.sums(self.bench)
        wrong = [
            f"{name} gives {value:g}"
            for name, value in zip(names, found, strict=True)
            if not (value == math.inf if name == "Inf" else math.isnan(value))
        ]
        self.note("specials", "IEEE" if not wrong else f"{len(wrong)} wrong")
        if wrong:
            self.remark(f"not as in IEEE 754: {', '.join(wrong)}")
        self.note("sum of -0", "-0" if math.copysign(1.0, zero) < 0 else "+0")

    def overflow(self) -> None:
        """Twice the largest power of two of the result's dtype."""
        out, given = self.kind.out, self.kind.given
        if 2 * given.emax < out.emax + 1:
            return
        rows = self.rows()
        rows.add((0, 1.0, out.emax), (1, 1.0, out.emax))
        found = float(rows.sums(self.bench)[0])
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
        m, n, k = self.bench.m, self.bench.n, self.bench.k
        factor = 2.0 ** min(self.kind.given.emax - 1, 30)
        random = np.random.Generator(np.random.Philox(key=1))
        p = self.kind.read.precision
        a, b = (
            random.integers(-(2 ** min(p, 24)) + 1, 2 ** min(p, 24), size=size).astype(np.float64) * 2.0 ** -min(p, 24)
            for size in ((m, k), (k, n))
        )
        plain = self.bench.product(a, b)
        mixed = False
        for rows in (slice(0, m // 2), slice(m // 2, m)):
            other = np.ones(m, bool)
            other[rows] = False
            large = a.copy()
            large[rows] *= factor
            mixed |= not all_alike(self.bench.product(large, b)[other], plain[other])
        for cols in (slice(0, n // 2), slice(n // 2, n)):
            other = np.ones(n, bool)
            other[cols] = False
            large = b.copy()
            large[:, cols] *= factor
            mixed |= not all_alike(self.bench.product(a, large)[:, other], plain[:, other])
        self.note("isolation", "mixed" if mixed else "kept")
        if mixed:
            self.remark("rows or columns influence each other's results, as in Strassen's algorithm")
            self.finding("a result depends on other rows or columns: no bound by elements holds")

    def fixed_point(self) -> None:
        """A small product beside a large operand that meets zero: fixed-point splits (Ozaki) lose its bits."""
        given, p = self.kind.given, self.kind.read.precision
        if self.input_error:
            return
        big = 2.0 ** min(given.emax, 200)
        small = (2.0 - 2.0 ** (1 - p)) * 2.0 ** max(given.emin, -200)
        rows = self.rows()
        for swap in (False, True):
            a, b = np.zeros(self.bench.k), np.zeros(self.bench.k)
            a[0], a[1], b[1] = big, small, 1.0
            rows.put(*((b, a) if swap else (a, b)))
        lost = bool(np.any(rows.sums(self.bench) != small))
        self.note("fixed point", "yes" if lost else "no")
        if lost:
            self.remark("small operands lose bits beside large ones of their row: operands are split in fixed point")
            self.finding("a small product beside a large operand is not exact: no bound by elements holds")

    # -- again and elsewhere -------------------------------------------------------------------------------------

    def repeats(self) -> None:
        """The same product ten times, and one row at every place."""
        m, n, k = self.bench.m, self.bench.n, self.bench.k
        a, b = self._random((m, k), 2), self._random((k, n), 3)
        first = self.bench.product(a, b)
        same = all(all_alike(self.bench.product(a, b), first) for _ in range(9))
        self.note("deterministic", "yes" if same else "no")
        self.repeatable = same
        if not same:
            self.remark("the same product again has other bits")
            if self.contract.deterministic:
                self.finding("the contract says deterministic, and the same product again has other bits")
            return
        row, column = a[:1], b[:, :1]
        square = self.bench.product(np.repeat(row, m, axis=0), np.repeat(column, n, axis=1))
        alike = bool(np.all(square == square[0, 0])) and not self.bench.uneven
        self.note("any row alike", "yes" if alike else "no")
        if not alike:
            self.remark("the same row times the same column has other bits at another place of the result")

    def _random(self, size: tuple[int, int], key: int) -> Array:
        """Values with every bit of the type that is read, either sign, or any int8."""
        random = np.random.Generator(np.random.Philox(key=key))
        if not self.kind.given.is_float:
            return random.integers(-128, 128, size=size).astype(np.float64)
        p = min(self.kind.read.precision, 30)
        found: Array = random.integers(1 - 2**p, 2**p, size=size).astype(np.float64) * 2.0**-p
        return found

    def batch_invariance(self, single: Bench) -> None:
        """Row i of the product against the product of row i alone."""
        if not self.repeatable:
            return
        a, b = self._random((self.bench.m, self.bench.k), 2), self._random((self.bench.k, self.bench.n), 3)
        whole = self.bench.product(a, b)
        same = all(all_alike(single.product(a[i : i + 1], b)[0], whole[i]) for i in (0, 1, self.bench.m - 1))
        self.note("batch invariant", "yes" if same else "no")
        if not same:
            self.remark(f"a row has other bits alone (M = 1) than among {self.bench.m} rows")

    def epilogue(self, clamped: Bench) -> None:
        """NaN through clamp to [1, 6] and relu: 1 or 6 where clamp swallows it, 0 where relu does."""
        rows = Rows(clamped.k)
        rows.add((0, math.nan, 0))
        value = float(rows.sums(clamped)[0])
        name = "passes" if math.isnan(value) else {0.0: "relu eats"}.get(value, "clamp eats")
        self.note("NaN in epilogue", name)
        if name != "passes":
            self.remark(f"NaN does not pass {name.split()[0]} in the epilogue: it becomes {value:g}")

    # -- integers ----------------------------------------------------------------------------------------------

    def integer_sums(self) -> None:
        """Sums that are odd and beyond 2^24, and the largest pairs: exact, or not."""
        k, rows = self.bench.k, self.rows()
        full = np.full(k, 127.0)
        odd = full.copy()
        odd[-2:] = 1.0, 0.0
        ones = np.ones(k)
        ones[:-2] = 127.0
        rows.put(odd, ones)  # 127 * 127 * (k - 2) + 1 for an even k: more than 24 bits, and odd
        rows.put(np.full(k, -128.0), np.full(k, -128.0))  # two of these products do not fit int16
        rows.put(full, np.full(k, -128.0))
        rows.put(np.full(k, -128.0), full)
        found = rows.sums(self.bench)
        wanted = [16129.0 * (k - 2) + 1.0, 16384.0 * k, -16256.0 * k, -16256.0 * k]
        exact = list(found) == wanted
        self.note("accumulator", "exact" if exact else "inexact")
        if exact:
            return
        if found[0] != wanted[0] and list(found[1:]) == wanted[1:]:
            text = "sums of int8 products beyond 2^24 are rounded: they pass through float32"
        elif abs(found[1]) < wanted[1]:
            text = "pairs of int8 products saturate at 32767: they are added in int16"
        else:
            text = f"sums of int8 products are wrong: {found[1]:g} instead of {wanted[1]:g}"
        self.remark(text)
        self.finding(f"int8 into int32 is exact by contract, and {text}")

    def integer_overflow(self) -> None:
        """131072 products of -128 with -128 are 2^31, one more than int32 holds."""
        rows = self.rows()
        a = np.zeros(self.bench.k)
        a[:131072] = -128.0
        rows.put(a, np.full(self.bench.k, -128.0))
        found = float(rows.sums(self.bench)[0])
        value = {-(2.0**31): "wraps", 2.0**31 - 1: "saturates"}.get(found, f"{found:g}")
        self.note("overflow", value)
        if value != "wraps":
            self.remark(f"an int32 sum of 2^31 becomes {found:.0f} instead of wrapping around")

    # -- the contract ------------------------------------------------------------------------------------------

    def seen_theta(self, k: int) -> float:
        """Factor of sum |a b| that bounds the error of a sum of ``k`` products of the seen arithmetic.

        The same forms as ``backend.Contract.theta``.
        """
        order = self.order or Order("other")
        run = min(order.block or k, k)
        if order.chunk > 2:
            theta = math.ceil(run / order.chunk) * (
                order.chunk * 2.0**-self.inside.bits + max(2.0**-self.inside.bits, self.between.error())
            )
        else:
            theta = (math.ceil(run / order.grain) - 1) * self.between.error()
        if order.block:
            if self.block_sum is not None:  # of two blocks it does not show, and what was not seen proves nothing
                theta += (math.ceil(k / order.block) - 1) * self.block_sum.error()
            if self.partials is not None and 0 < self.partials.bits < min(self.inside.bits, 20):
                theta += self.partials.error()
        return theta

    def hold_to_contract(self) -> None:
        """A bound from the seen arithmetic that is larger than the declared one is a finding."""
        claimed = self.contract
        if self.input_error > claimed.input_error:
            self.finding(
                f"inputs lose bits: {self.input_error:.2g} of each product, and the contract allows "
                f"{claimed.input_error:.2g}"
            )
        if self.between.bits < 0 or self.inside.bits < 0:
            return  # not read; what was not seen proves nothing
        k = self.bench.k
        allowed = claimed.theta(k, out=self.kind.out) - claimed.input_error
        seen = self.seen_theta(k)
        if seen <= allowed * (1.0 + 2.0**-10):
            return
        self.finding(
            f"sums of {k} products may err by {seen:.3g} of sum |a b|, and the contract allows {allowed:.3g}: "
            f"seen {self._seen_words()}, declared {_declared_words(claimed)}"
        )

    def _seen_words(self) -> str:
        order = self.order or Order("other")
        parts = []
        if order.chunk > 2:
            parts.append(f"chunks of {order.chunk} aligned to {self.inside.bits} bits")
        parts.append(f"sums of {self.between}")
        if order.block:
            parts.append(f"blocks of {order.block}")
        if self.partials is not None:
            parts.append(f"partial sums of {self.partials}")
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
