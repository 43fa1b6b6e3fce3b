"""Which problems the suite is made of, by level.  Everything of ``quick`` is in ``full``, and so on.

Axes are crossed only where they interact.  What interacts in a GEMM template:

* a dimension with the tile: so sizes stand one below, at and one above multiples of 16, 32, 64;
* M with the choice of the kernel (GEMV, small-M paths) and with dynamic shapes;
* K with the accumulation: short, long, odd;
* the layout of an operand with packing and with its leading dimension;
* an epilogue with the dtype it is computed in and with the N tail where it is vectorised;
* a bias shape with alpha and beta;
* a step with the place where the result is stored: through a transpose, a permutation, another shape;
* rows that begin at multiples of 16 bytes with everything: the backends that load with TMA take no others.

Nothing is left out because some backend cannot do it.  What is meant for one kind of backend stands in ``quick`` in the
form that costs the others least: with ``var-b`` the C++ templates, for whose compiles a run on a CPU waits, refuse a
product at once, and on CUDA, where a weight is an argument anyway, it makes no difference.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from pytest_gemm.problem.axes import Cases, unique
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import StepKind

FLOATS = ("f32", "bf16", "f16")

# M x N x K; each is there for a reason.
_SHAPES_QUICK = (
    "1x1x1",  # the smallest
    "1x64x64",  # a GEMV
    "2x17x16384",  # long K, an odd N
    "3x33x31",  # primes around a tile
    "16x16x16",
    "17x65x127",  # one above, one above, one below
    "31x63x33",
    "32x64x128",
    "64x48x1000",  # K that is no power of two
    "128x96x192",
    "8x256x2664",  # small M, fat N
    "1000x40x24",  # many rows, little work
    "5x384x7",
    "5x385x7",  # the same with an N tail
    "127x1x65",  # a single column
    "33x97x1",  # an outer product
)
_SHAPES_FULL = (
    "1x2x3",
    "1x1000x1000",
    "2x2x2",
    "3x5x7",
    "4x4x4",
    "7x11x13",
    "8x8x8",
    "15x15x15",
    "15x47x63",
    "16x47x64",
    "17x17x17",
    "24x48x96",
    "31x31x31",
    "33x33x33",
    "48x32x65",
    "49x64x64",
    "63x63x63",
    "63x64x65",
    "65x65x65",
    "64x64x64",
    "100x100x100",
    "127x127x127",
    "128x128x128",
    "129x129x129",
    "191x193x97",
    "256x256x256",
    "257x255x129",
    "384x385x386",
    "1x4096x1024",
    "2x1024x4096",
    "16x512x8192",
    "17x31x16384",
    "1000x17x100",
    "1000x1000x1",
    "1000x1000x17",
    "512x16x512",
    "13x1021x509",
    "1000x1024x1000",
)

_UNARY = (
    "relu",
    "gelu",
    "gelu_tanh",
    "silu",
    "sigmoid",
    "tanh",
    "exp",
    "hardswish",
    "hardsigmoid",
    "leaky_relu-0.1",
    "clamp--1_2",
    "scale-0.125",
)
_BINARY = ("add", "sub", "mul", "div")
_CHAINS = (
    "bias+relu+add",
    "bias+add+relu",
    "bias+gelu+mul",
    "bias+silu+mul+add",
    "bias+scale+tanh",
    "bias+sigmoid+mul+relu",
    "bias+clamp+sub",
    "bias+cast-f32",
    "bias+relu+cast-f32",
    "bias+cast-f16",
    "bias+cast-bf16+relu",
)


@functools.cache
def products(level: str) -> tuple[Problem, ...]:
    """Every problem of a level that a plain product can be."""
    parts: list[Callable[[str], tuple[Problem, ...]]] = [
        _shapes,
        _layouts,
        _linear,
        _epilogues,
        stored,
        _addends,
        batched,
        _views,
        dynamic,
        _integers,
        _empty,
        aligned,
        fused,
        modes,
        scaled,
        quantised,
        grouped,
        tails,
        several,
        permuted,
        unfrozen,
        extents,
    ]
    return unique(problem for part in parts for problem in part(level))


def _at_least(level: str, least: str) -> bool:
    order = ("quick", "full", "exhaustive")
    return order.index(level) >= order.index(least)


def _sizes(level: str) -> tuple[str, ...]:
    return _SHAPES_QUICK + (_SHAPES_FULL if _at_least(level, "full") else ())


def _shapes(level: str) -> tuple[Problem, ...]:
    """Sizes against dtypes."""
    cases = (
        Cases()
        .combine(shape=_sizes(level), dtype=(*FLOATS, "f64"))
        .filter(
            lambda p: (
                p["dtype"] != "f64" or _at_least(level, "full") or p["shape"] in ("17x65x127", "1x64x64", "64x48x1000")
            )
        )
    )
    found = cases.problems("mm:{dtype}:nn:{shape}")
    if _at_least(level, "exhaustive"):
        sizes = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65)
        cube = (
            Cases()
            .combine(dtype=FLOATS, m=sizes, n=sizes, k=(1, 7, 16, 33, 64, 127))
            .problems("mm:{dtype}:nn:{m}x{n}x{k}")
        )
        found += cube
    return found


def _layouts(level: str) -> tuple[Problem, ...]:
    """Transposed operands."""
    shapes = ("17x65x127", "32x64x128") + (
        ("1x64x64", "64x48x1000", "127x1x65", "33x97x1") if _at_least(level, "full") else ()
    )
    if _at_least(level, "exhaustive"):
        shapes = _sizes(level)
    return (
        Cases().combine(shape=shapes, layout=("nt", "tn", "tt"), dtype=FLOATS).problems("mm:{dtype}:{layout}:{shape}")
    )


def _linear(level: str) -> tuple[Problem, ...]:
    """``torch.nn.Linear``: with and without bias, 2-D and 3-D input."""
    shapes = ("1x64x64", "8x256x2664", "17x65x127") if level == "quick" else _sizes(level)
    flat = Cases().combine(shape=shapes, dtype=FLOATS, epilogue=("", "bias"))
    deep = Cases().combine(
        shape=("2x17x65x127", "3x1x64x64", "4x16x48x100"), dtype=FLOATS, epilogue=("", "bias", "bias+relu")
    )
    if level == "quick":
        deep = deep.filter(lambda p: p["shape"] == "2x17x65x127" and p["epilogue"] != "bias")
    found = (flat + deep).problems("linear:{dtype}:nt:{shape}:{epilogue}")
    if level == "quick":
        return found
    across = Cases().combine(shape=("17x65x127", "1x64x64"), dtype=FLOATS, epilogue=("", "bias"))
    return found + across.problems("linear:{dtype}:tt:{shape}:{epilogue}")


def _epilogues(level: str) -> tuple[Problem, ...]:
    """Every step alone and in chains, where N has a tail and where it has none."""
    steps = [f"bias+{step}" for step in (*_UNARY, *_BINARY)]
    cases = Cases().combine(epilogue=[*steps, *_CHAINS], dtype=FLOATS, shape=["19x49x65"])
    if level == "quick":  # each in one dtype: the dtype decides how a step is vectorised, not which steps there are
        order = [*steps, *_CHAINS]
        cases = cases.filter(
            lambda p: FLOATS[order.index(p["epilogue"]) % 3] == p["dtype"] or p["epilogue"] == "bias+relu"
        )
    if _at_least(level, "full"):
        alone = [*_UNARY, *_BINARY, "relu+add", "mul+relu", "add+cast-f32"]
        cases += Cases().combine(
            epilogue=[*steps, *_CHAINS, *alone], dtype=FLOATS, shape=["32x384x64", "32x385x64", "1x64x65"]
        )
    if _at_least(level, "exhaustive"):
        pairs = [f"bias+{first}+{second}" for first in (*_UNARY, *_BINARY) for second in (*_UNARY, *_BINARY)]
        shapes = ["19x49x65", "32x384x64", "32x385x64", "1x64x65", "3x7x5", "128x96x192"]
        cases += Cases().combine(epilogue=pairs, dtype=FLOATS, shape=shapes)
    # A cast to the dtype that the value has already is no step.
    correct = cases.filter(
        lambda p: not p["epilogue"].endswith(f"cast-{p['dtype']}") and f"cast-{p['dtype']}+" not in p["epilogue"]
    )
    return correct.problems("linear:{dtype}:nt:{shape}:{epilogue}")


# Results that are stored in other places than the product's; residuals that are a row, a column, or looked up; values
# that two steps read; products in a row.
_STORED_QUICK = (
    "linear:f32:nt:19x49x65:bias+relu+t+add",
    "linear:bf16:nt:19x49x65:bias+mul+t+sub",
    "linear:f16:nt:2x17x33x64:bias+gelu+perm-1_0_2+add",
    "linear:f32:nt:24x64x65:bias+view-4x6x4x16+perm-0_2_1_3+mul",
    "linear:bf16:nt:19x49x65:mul-n+add-m1+t",
    "linear:f16:nt:19x49x65:bias+relu+sigmoid:fork",
    "linear:bf16:nt:17x64x64:bias+relu:again",
    "linear:f32:nt:33x49x65:bias+add-at",
    "bmm:f32:nn:3x32x16x24:t+add",
    "linear:f32:nt:17x49x65:bias+relu+t+sub:dyn-m",
)
_STORED_FULL = (
    "linear:{dtype}:nt:19x49x65:bias+relu+t",
    "linear:{dtype}:nt:19x49x65:bias+gelu+t:tap",
    "linear:{dtype}:nt:19x49x65:relu+t+tanh+add",
    "linear:{dtype}:nt:65x64x64:add+t+silu:res-a",
    "linear:{dtype}:nt:33x49x65:bias+mul+t:pad-lda",
    "linear:{dtype}:nt:33x49x65:bias+relu+t+cast-f32+mul",
    # Every order of three dimensions, with a tail in each.
    "linear:{dtype}:nt:3x17x33x65:bias+t+add",
    "linear:{dtype}:nt:3x17x33x65:bias+relu+perm-1_0_2+add",
    "linear:{dtype}:nt:3x17x33x65:bias+mul+perm-1_2_0+relu",
    "linear:{dtype}:nt:3x17x33x65:bias+perm-2_0_1+sub",
    "linear:{dtype}:nt:3x17x33x65:bias+gelu+perm-2_1_0+mul",
    "linear:{dtype}:nt:3x17x33x65:bias+relu+t+add:dyn-m",
    "bmm:{dtype}:nn:3x32x16x24:relu+t+add",
    "bmm:{dtype}:nn:3x33x17x24:perm-1_0_2+mul",
    "bmm:{dtype}:nn:8x57x8x8:scale-0.35+view-2x4x57x8+add",
    "bmm:{dtype}:nn:12x10x61x62:view-4x3x10x61+perm-0_2_1_3+add",
    "bmm:{dtype}:nn:3x33x17x24:relu+sigmoid:fork",
    "addmm:{dtype}:nn:33x65x65:bias-mn+alpha-0.5+t+mul",
    # The heads of attention, an image in front of a convolution, windows of an image.
    "linear:{dtype}:nt:48x96x65:bias+view-3x16x4x24+perm-0_2_1_3+scale-0.125",
    "linear:{dtype}:nt:324x32x16:bias+mul-n+view-1x18x18x32+perm-0_3_1_2+add",
    "linear:{dtype}:nt:324x32x16:bias+mul-n+view-1x18x18x32+perm-0_3_1_2+add:tap",
    "linear:{dtype}:nt:64x32x48:bias+add+view-2x2x4x2x2x32+perm-0_1_3_2_4_5+relu",
    "linear:{dtype}:nt:64x48x65:sub-n+mul-n+mul-n+add-n+view-8x8x48+hardswish",
    # Copied in their new order, which the templates do not store.
    "linear:{dtype}:nt:64x32x48:bias+add+view-2x2x4x2x2x32+perm-0_1_3_2_4_5+dense",
    "linear:{dtype}:nt:19x49x65:bias+relu+t+dense",
    "bmm:{dtype}:nn:3x32x16x24:perm-1_0_2+dense+add",
    # One row, one column for all.
    "linear:{dtype}:nt:19x49x65:bias+mul-n+gelu",
    "linear:{dtype}:nt:19x49x65:mul-m1+add-n+relu",
    "linear:{dtype}:nt:2x17x33x64:bias+add-m1+mul-n",
    "linear:{dtype}:nt:17x49x65:bias+mul-m1+relu:dyn-m",
    # Rows that are looked up in a table.
    "linear:{dtype}:nt:33x49x65:bias+add-at",
    "linear:{dtype}:nt:33x49x65:add-at+relu",
    "linear:{dtype}:nt:2x17x33x64:bias+gelu+mul-at+perm-1_0_2",
    "linear:{dtype}:nt:17x49x65:bias+add-at+add:dyn-m",
    "bmm:{dtype}:nn:3x32x16x24:add-at",
    # The result meets B again: two templates in a row, or one twice.
    "linear:{dtype}:nt:17x64x64:bias:again",
    "linear:{dtype}:nt:17x64x64:bias+relu:again",
    "linear:{dtype}:nt:65x129x129:bias:again",
    "linear:{dtype}:nt:33x64x64::again",
    "linear:{dtype}:nt:17x64x64:bias+relu:dyn-m+again",
    "linear:{dtype}:nt:2x17x65x65:bias+gelu+add:again",
    "mm:{dtype}:nn:33x48x48:silu:pad-lda+again",
    "bmm:{dtype}:nn:3x17x64x64::again",
    # A product that is returned, and a step of it.
    "bmm:{dtype}:nn:16x4x4x8:scale-0.35:tap",
    # Two steps read one value.
    "linear:{dtype}:nt:19x49x65:bias+gelu+scale-0.125:fork",
    "linear:{dtype}:nt:19x49x65:bias+relu+add:fork",
    "linear:{dtype}:nt:19x49x65:bias+silu+t:fork",
    "linear:{dtype}:nt:65x64x64:bias+add+tanh:res-a+fork",
    "linear:{dtype}:nt:17x49x65:bias+relu+mul:dyn-m+fork",
)


def stored(level: str) -> tuple[Problem, ...]:
    """The epilogues of Inductor's C++ templates that do more than compute: moves, broadcasts, second readers."""
    quick = tuple(map(Problem.parse, _STORED_QUICK))
    if not _at_least(level, "full"):
        return quick
    forms = Cases().combine(form=_STORED_FULL, dtype=FLOATS)
    # A cast to the dtype that the value has already is no step.
    forms = forms.filter(lambda p: p["dtype"] != "f32" or "cast-f32" not in p["form"])
    found = tuple(Problem.parse(p["form"].format(dtype=p["dtype"])) for p in forms)
    found += tuple(
        map(
            Problem.parse,
            (
                "linear:f32-f32-bf16:nt:324x32x16:bias+mul-n+view-1x18x18x32+perm-0_3_1_2+add",
                "linear:f32-f32-bf16:nt:33x49x65:bias+add-at+add",
                "linear:f32-f32-f16:nt:33x49x65:bias+relu+t+add",
            ),
        )
    )
    # Through a transpose into a sum, the N with and without a tail.
    found += (
        Cases()
        .combine(dtype=FLOATS, n=(128, 129), bias=("", "bias+"), step=("", "relu+", "add+", "sub+", "mul+"))
        .problems("linear:{dtype}:nt:64x{n}x100:{bias}{step}t+add")
    )
    # Every step of arithmetic behind an activation.
    found += (
        Cases()
        .combine(dtype=FLOATS, n=(384, 385), bias=("", "bias+"), step=_BINARY)
        .problems("linear:{dtype}:nt:32x{n}x64:{bias}relu+{step}")
    )
    if _at_least(level, "exhaustive"):
        steps = ("relu", "gelu", "silu", "sigmoid", "tanh", "hardswish", "hardsigmoid", "leaky_relu", "clamp", *_BINARY)
        found += (
            Cases()
            .combine(dtype=FLOATS, n=(384, 385), bias=("", "bias+"), step=steps)
            .problems("linear:{dtype}:nt:384x{n}x196:{bias}{step}")
        )
    return unique(quick + found)


def _addends(level: str) -> tuple[Problem, ...]:
    """addmm: bias shapes against alpha and beta."""
    factors: tuple[str, ...] = ("", "+alpha-0.5+beta-2", "+beta-0", "+alpha--1")
    shapes: tuple[str, ...] = (
        ("17x65x127",) if level == "quick" else ("17x65x127", "32x64x128", "1x64x64", "5x385x7", "33x97x1")
    )
    if _at_least(level, "exhaustive"):
        factors += ("+alpha-0", "+alpha-0.3", "+beta-0.7", "+alpha-0+beta-0", "+alpha-0.3+beta-0", "+alpha-3+beta--1.5")
        shapes = _sizes(level)
    cases = Cases().combine(shape=shapes, dtype=FLOATS, bias=("bias", "bias-1n", "bias-m1", "bias-mn"), factors=factors)
    if level == "quick":  # every pair, not every combination: the bias's shape and its dtype rarely meet
        cases = cases.filter(
            lambda p: (
                p["bias"] == "bias" if p["dtype"] == "f32" else p["factors"] == factors[1] or p["bias"] == "bias-mn"
            )
        )
    # The sign of a sum: on Hopper ptxas left the product out (triton-ptxas-drops-wgmma in the ledger).
    minus = Cases().combine(dtype=("bf16", "f16")).problems("addmm:{dtype}:nt:64x16x64:bias+alpha--1+beta-0.5")
    return cases.problems("addmm:{dtype}:nn:{shape}:{bias}{factors}") + minus


def batched(level: str) -> tuple[Problem, ...]:
    """bmm and baddbmm: batches, layouts, a broadcast operand, a self product."""
    shapes = (
        ("1x17x33x65", "3x32x16x24", "4x128x96x192")
        if level == "quick"
        else ("1x17x33x65", "3x32x16x24", "4x128x96x192", "50x7x5x9", "2x1x64x64", "16x64x64x64", "7x33x1x17")
    )
    layouts = Cases().combine(
        shape=shapes, dtype=FLOATS, layout=("nn", "nt", "tn", "tt"), op=["bmm"], epilogue=[""], flags=[""]
    )
    if level == "quick":
        layouts = layouts.filter(lambda p: p["shape"] == "3x32x16x24" or p["layout"] == "nn")
    special = (
        Cases()
        .combine(shape=["3x32x16x24"], dtype=FLOATS, layout=["nn"], op=["bmm"])
        .expand(
            "pair",
            lambda _: [("", "bcast-b"), ("", "bcast-a"), ("", "const-b"), ("relu", ""), ("add", ""), ("gelu+mul", "")],
        )
    )
    split = Cases({**p, "epilogue": p["pair"][0], "flags": p["pair"][1]} for p in special)
    own = Cases().combine(
        shape=["3x24x24x17"], dtype=FLOATS, layout=["nt", "tn"], op=["bmm"], epilogue=[""], flags=["self"]
    )
    added = Cases().combine(
        shape=shapes[:2],
        dtype=FLOATS,
        layout=["nn"],
        op=["baddbmm"],
        epilogue=["bias-mn", "bias", "bias-mn+alpha-0.5+beta-2", "bias-mn+beta-0"],
        flags=[""],
    )
    # K so long that rows of A do not fit a cache of 2 MiB: loops over blocks of N that no shorter product goes through.
    long = Cases().combine(
        shape=["2x64x96x32768"], dtype=FLOATS[:2], layout=["nn"], op=["bmm"], epilogue=[""], flags=[""]
    )
    return (layouts + split + own + added + long).problems("{op}:{dtype}:{layout}:{shape}:{epilogue}:{flags}")


def _views(level: str) -> tuple[Problem, ...]:
    """Operands that are views: wide rows, odd bases, a matrix with itself."""
    flags = ("pad-lda", "pad-ldb", "off-a", "off-b", "pad-lda+off-a", "pad-lda+pad-ldb+off-a+off-b", "var-b")
    shapes = (
        ("17x65x127", "32x64x128")
        if level == "quick"
        else ("17x65x127", "32x64x128", "1x64x64", "5x385x7", "33x97x1", "127x1x65")
    )
    views = Cases().combine(
        shape=shapes, dtype=FLOATS, layout=("nn", "nt") if level == "quick" else ("nn", "nt", "tn", "tt"), flags=flags
    )
    if level == "quick":
        views = views.filter(lambda p: p["layout"] == "nn" if p["shape"] == "17x65x127" else p["flags"] == "pad-ldb")
    own = Cases().combine(shape=("24x24x65", "33x33x17"), dtype=FLOATS, layout=("nt", "tn"), flags=("self",))
    return (views + own).problems("mm:{dtype}:{layout}:{shape}::{flags}")


_DYNAMIC_M_QUICK = (1, 2, 3, 7, 16, 17, 32, 33, 48, 63, 128, 1000)
_DYNAMIC_M_FULL = (4, 5, 8, 15, 31, 47, 49, 64, 65, 100, 127, 129)


def dynamic(level: str) -> tuple[Problem, ...]:
    """Several M through one artifact."""
    sizes = _DYNAMIC_M_QUICK + (_DYNAMIC_M_FULL if _at_least(level, "full") else ())
    forms = (
        "linear:{dtype}:nt:{m}x65x97:bias+relu:dyn-m",
        "linear:{dtype}:nt:{m}x64x128:bias+gelu+mul:dyn-m",
        "mm:{dtype}:nn:{m}x33x48::dyn-m",
        "addmm:{dtype}:nn:{m}x48x31:bias:dyn-m",
    )
    cases = Cases().combine(dtype=FLOATS, m=sizes)
    return unique(problem for form in forms for problem in cases.problems(form))


def _integers(level: str) -> tuple[Problem, ...]:
    """int_mm, mixed_mm and int8 weights."""
    shapes = (
        ("17x64x128", "32x64x128", "33x96x1024")
        if level == "quick"
        else ("17x64x128", "32x64x128", "33x96x1024", "18x24x40", "128x128x128", "64x1000x1000", "512x1024x2048")
    )
    int_mm = (
        Cases().combine(shape=shapes, layout=("nn", "nt", "tn", "tt")).problems("int_mm:i8-i8-i32:{layout}:{shape}")
    )
    int_mm += (
        Cases()
        .combine(shape=shapes, epilogue=("cast-f32", "cast-f32+scale-0.125", "cast-f32+relu"))
        .problems("int_mm:i8-i8-i32:nt:{shape}:{epilogue}")
    )
    mixed = (
        Cases()
        .combine(
            shape=(*shapes[:3], "1x64x64"),
            dtypes=("f16-i8-f16", "bf16-i8-bf16", "f32-i8-f32", "i8-f16-f16"),
            layout=("nn", "nt"),
        )
        .problems("mixed_mm:{dtypes}:{layout}:{shape}")
    )
    mixed += (
        Cases()
        .combine(shape=shapes[:1], dtypes=("f16-i8-f16", "bf16-i8-bf16"), epilogue=("bias", "bias+relu"))
        .problems("mixed_mm:{dtypes}:nt:{shape}:{epilogue}")
    )
    ms = (1, 4, 16, 17, 32) if level == "quick" else (1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 64)
    nks = (
        ("64x128", "65x144", "64x1024")
        if level == "quick"
        else ("64x128", "65x144", "64x1024", "1024x128", "1024x144", "64x144", "65x128", "64x1000", "1x128")
    )
    woq = Cases().combine(
        m=ms, nk=nks, dtypes=("bf16-i8-bf16",) if level == "quick" else ("bf16-i8-bf16", "f16-i8-f16", "f32-i8-f32")
    )
    return int_mm + mixed + woq.problems("woq_int8:{dtypes}:nt:{m}x{nk}")


HALVES = ("f16", "bf16")
_LAYOUTS = ("nn", "nt", "tn", "tt")

# M x N x K around the tiles of CUTLASS (64, 128, 256), in multiples of 8 but for an M of 250.  Each has one layout and
# one dtype at quick, so that every size meets every layout somewhere; an M of 250 can have no transposed A.
_ALIGNED = (
    ("1x64x64", "nn"),
    ("8x8x8", "nt"),
    ("16x264x72", "nn"),
    ("56x128x136", "tn"),
    ("64x64x64", "nn"),
    ("64x72x4096", "nt"),
    ("72x56x64", "tt"),
    ("120x136x16", "nn"),
    ("128x128x128", "nt"),
    ("128x256x1000", "nn"),
    ("136x120x72", "tn"),
    ("250x64x136", "nt"),
    ("250x264x64", "nn"),
    ("256x128x64", "tt"),
    ("256x8x1000", "nn"),
    ("264x264x264", "tn"),
    ("264x16x4096", "nt"),
    ("1x256x4096", "nt"),
    ("8x264x1000", "tt"),
    ("16x16x4096", "nt"),
)


def aligned(level: str) -> tuple[Problem, ...]:
    """Operands that TMA can load: mm, addmm, bmm, int_mm and mixed_mm around the tiles of its kernels."""
    full = _at_least(level, "full")
    sizes = dict(_ALIGNED)
    products = Cases().combine(shape=sizes, dtype=HALVES, layout=_LAYOUTS)
    if full:
        products = products.filter(lambda p: not p["shape"].startswith(("1x", "250x")) or p["layout"][0] == "n")
    else:
        products = products.filter(
            lambda p: p["dtype"] == HALVES[list(sizes).index(p["shape"]) % 2] and p["layout"] == sizes[p["shape"]]
        )
    found = products.problems("mm:{dtype}:{layout}:{shape}::var-b")
    biases, factors = ("bias", "bias-1n", "bias-m1", "bias-mn"), ("", "+alpha-0.5+beta-2")
    added = Cases().combine(
        shape=("128x96x192", "250x136x72") if full else ("128x96x192",),
        dtype=HALVES,
        layout=_LAYOUTS[:2],
        bias=biases,
        factors=factors,
    )
    if not full:  # every pair of a bias's shape and factors, in the dtypes and layouts in turn
        added = added.filter(
            lambda p: (
                p["dtype"] == HALVES[(biases.index(p["bias"]) + factors.index(p["factors"])) % 2]
                and p["layout"] == _LAYOUTS[factors.index(p["factors"])]
            )
        )
    found += added.problems("addmm:{dtype}:{layout}:{shape}:{bias}{factors}:var-b")
    batches = Cases().combine(
        shape=("3x64x72x136", "5x128x64x64", "1x250x8x1000") if full else ("3x64x72x136",),
        dtype=HALVES,
        layout=_LAYOUTS,
    )
    if not full:  # what batched() has not at quick, the dtypes in turn
        batches = batches.filter(lambda p: p["layout"] != "nn" and p["dtype"] == HALVES[p["layout"] == "tn"])
    batches = batches.filter(lambda p: "250" not in p["shape"] or p["layout"][0] == "n")
    found += batches.problems("bmm:{dtype}:{layout}:{shape}")
    # int8 rows are 16 elements apart; K-major is what its tensor cores take.
    integers = ("512x1024x2048", "16x64x64", "64x136x128", "250x8x4096", "264x264x144")
    found += (
        Cases()
        .combine(shape=integers + (("128x128x16", "72x256x1008", "1x64x256") if full else ()))
        .problems("int_mm:i8-i8-i32:nt:{shape}")
    )
    mixed = Cases().combine(
        shape=("64x128x64", "250x72x136") if full else ("64x128x64",),
        dtypes=("f16-i8-f16", "bf16-i8-bf16", "i8-f16-f16", "i8-bf16-bf16"),
        layout=_LAYOUTS[:2],
    )
    if not full:
        mixed = mixed.filter(lambda p: p["layout"] == ("nt" if p["dtypes"].startswith("i8") else "nn"))
    return found + mixed.problems("mixed_mm:{dtypes}:{layout}:{shape}::var-b")


# Steps that the visitor trees of CUTLASS's epilogues know, and a few more.
_VISITED = ("relu", "gelu", "tanh", "exp", "sigmoid", "silu", "add", "sub", "mul", "div")
_VISITED_CHAINS = ("sub+mul", "silu+add", "relu+add", "add+relu", "sigmoid+mul", "mul+add+relu")
# N = K, so that A has the result's shape.
_READ_TWICE = ("add", "mul", "add+relu", "add+silu", "sub+mul")
_TAPPED = ("relu", "gelu", "add", "silu+mul", "relu+add")
_TYPES_CHANGE = ("cast-f32+add", "cast-f32+mul", "relu+cast-f32+sub")


def fused(level: str) -> tuple[Problem, ...]:
    """Epilogues on aligned products without a bias, the form that CUTLASS fuses as a visitor tree.

    With values that go on in two ways: an operand that is read again as a residual, and a result beside the last one.
    """
    full = _at_least(level, "full")

    def cross(
        epilogues: tuple[str, ...],
        flags: str,
        sizes: tuple[str, str] = ("128x96x192", "64x128x64"),
        both: bool = False,
    ) -> tuple[Problem, ...]:
        """Epilogues against dtypes and sizes; at quick the sizes in turn, and the dtypes too unless ``both``."""
        cases = Cases().combine(epilogue=epilogues, dtype=HALVES, shape=sizes)
        if not full:
            at = epilogues.index
            if both:
                cases = cases.filter(lambda p: p["shape"] == sizes[(at(p["epilogue"]) + HALVES.index(p["dtype"])) % 2])
            else:
                cases = cases.filter(
                    lambda p: (
                        p["dtype"] == HALVES[at(p["epilogue"]) % 2] and p["shape"] == sizes[at(p["epilogue"]) // 2 % 2]
                    )
                )
        return cases.problems("mm:{dtype}:nn:{shape}:{epilogue}:" + flags)

    found = cross(_VISITED, "var-b", both=True) + cross(_VISITED_CHAINS, "var-b") + cross(_TYPES_CHANGE, "var-b")
    found += cross(_READ_TWICE, "var-b+res-a", ("128x192x192", "64x128x128"))
    found += cross(_TAPPED, "var-b+tap")
    # A weight that is a constant, a batch, a bias.
    found += tuple(
        map(
            Problem.parse,
            (
                "mm:bf16:nn:64x128x128:add+silu:res-a+tap",
                "linear:f16:nt:64x128x64:bias+gelu:tap",
                "linear:f16:nt:64x128x64:bias+cast-f32+add:var-b",
                "bmm:f16:nn:3x64x128x64:relu:tap",
                "int_mm:i8-i8-i32:nt:64x128x64:cast-f32+add",
            ),
        )
    )
    if full:
        deep = Cases().combine(
            form=(
                "linear:{dtype}:nt:33x65x127:bias+relu:tap",
                "linear:{dtype}:nt:2x17x65x128:bias+gelu+mul:tap",
                "linear:{dtype}:nt:16x65x65:add+relu:res-a",
                "addmm:{dtype}:nn:33x65x65:bias-mn+alpha-0.5+mul:res-a+tap",
                "addmm:{dtype}:nn:33x65x65:bias+add:res-a+dyn-m",
                "bmm:{dtype}:nt:3x33x64x64:add:res-a",
                "bmm:{dtype}:nn:3x33x64x72:silu+mul:tap",
                "mm:{dtype}:nn:17x65x65:sub:res-a+pad-lda",
                "mm:{dtype}:nt:24x24x24:add:self+res-a",
                "mm:{dtype}:nn:17x33x65:relu+tanh:dyn-m+tap",
            ),
            dtype=FLOATS,
        )
        found += unique(Problem.parse(p["form"].format(dtype=p["dtype"])) for p in deep)
        found += (
            Cases()
            .combine(dtype=FLOATS, cast=("f32", "f16", "bf16"), step=("add", "mul", "relu"))
            .filter(lambda p: p["cast"] != p["dtype"])
            .problems("linear:{dtype}:nt:33x65x127:bias+cast-{cast}+{step}")
        )
    return unique(found)


def modes(level: str) -> tuple[Problem, ...]:
    """What a user can switch: TF32, reductions in a half type, and autocast's conversions in front of a product."""
    quick = (
        "mm:f32:nn:17x65x127::tf32",
        "mm:f32:nn:128x96x192::var-b+tf32",
        "mm:f32:nt:64x48x4096::var-b+tf32",
        "linear:f32:nt:33x64x1000:bias+relu:var-b+tf32",
        "addmm:f32:nn:64x128x64:bias-m1+alpha-0.5+beta-2:var-b+tf32",
        "bmm:f32:tn:3x32x16x24::tf32",
        # Few, long sums, which a library slices.
        "mm:f16:nn:8x256x2664::var-b+reduced",
        "mm:f16:nt:16x16x16384::var-b+reduced",
        "mm:bf16:nn:32x64x4096::var-b+reduced",
        "mm:bf16:nt:17x65x127:relu:var-b+reduced",
        "addmm:f16:nn:32x64x4096:bias+alpha-0.5+beta-2:var-b+reduced",
        "linear:bf16:nt:1x64x4096:bias:var-b+reduced",
        "bmm:bf16:tn:3x32x16x1000::reduced",
        "mm:f32-f32-bf16:nn:128x96x192::var-b",
        "mm:f32-f32-f16:nn:17x65x127",
        "mm:f32-f32-f16:tt:64x72x136:silu+mul:var-b",
        "linear:f32-f32-bf16:nt:33x64x128:bias+relu",
        "linear:f32-f32-f16:nt:1x64x4096:bias:var-b",
        "addmm:f32-f32-bf16:nn:64x128x64:bias-mn+alpha-0.5+beta-2:var-b",
        "bmm:f32-f32-f16:nt:3x32x16x24",
    )
    if not _at_least(level, "full"):
        return tuple(map(Problem.parse, quick))
    shapes = ("1x64x64", "8x256x2664", "16x16x16384", "17x65x127", "128x128x128", "250x264x1000", "33x97x1")
    forms = (
        "mm:{d}:nn:{s}::{f}",
        "mm:{d}:tt:{s}::{f}",
        "linear:{d}:nt:{s}:bias+gelu:{f}",
        "bmm:{d}:nt:3x{s}::{f}",
        "addmm:{d}:nn:{s}:bias-1n+alpha--1:{f}",
    )
    switched = Cases().combine(form=forms, s=shapes, dtype=(("f32", "tf32"), ("f16", "reduced"), ("bf16", "reduced")))
    cast = Cases().combine(form=forms, s=shapes, dtype=(("f32-f32-bf16", ""), ("f32-f32-f16", "")))
    views = tuple(
        Problem.parse(f"mm:{dtypes}:{layout}:17x65x127::{flags}")
        for dtypes in ("f32-f32-bf16", "f32-f32-f16")
        for layout, flags in (("nn", "pad-lda+off-a"), ("nn", "off-b"), ("tn", "dyn-m"), ("nt", "pad-ldb+dyn-m"))
    )
    crossed = unique(
        Problem.parse(p["form"].format(d=p["dtype"][0], s=p["s"], f=p["dtype"][1]).rstrip(":")) for p in switched + cast
    )
    return unique(tuple(map(Problem.parse, quick)) + crossed + views)


def tails(level: str) -> tuple[Problem, ...]:
    """M around an AMX tile of 16 rows, K that no group of 2 or 4 divides, N around a register block."""
    lines = ("linear:bf16:nt:16x48x66", "linear:f16:nt:33x48x30", "linear:bf16:nt:49x65x3", "linear:f32:nt:47x17x31")
    quick = tuple(map(Problem.parse, lines))
    if not _at_least(level, "full"):
        return quick
    any_m = Cases().combine(dtype=FLOATS, m=range(2, 50)).problems("linear:{dtype}:nt:{m}x64x64:bias:dyn-m")
    one_m = Cases().combine(
        dtype=FLOATS,
        m=(1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 47, 48, 49),
        nk=("64x64", "65x66"),
    )
    one_k = Cases().combine(dtype=FLOATS, k=(1, 2, 3, 4, 5, 6, 7, 14, 30, 31, 33, 34, 62, 63, 65, 66, 127), m=(16, 33))
    one_n = Cases().combine(dtype=FLOATS, n=(1, 2, 3, 15, 17, 31, 33, 47, 49, 63, 96, 385), k=(32, 34))
    deep = Cases().combine(dtype=FLOATS, shape=("2x16x32x52", "3x1x65x66", "1x17x48x31", "5x3x384x7"))
    found = any_m + one_m.problems("linear:{dtype}:nt:{m}x{nk}") + one_k.problems("linear:{dtype}:nt:{m}x48x{k}:bias")
    found += one_n.problems("linear:{dtype}:nt:17x{n}x{k}:bias+relu")
    return unique(quick + found + deep.problems("linear:{dtype}:nt:{shape}:bias+gelu"))


_SEVERAL = (
    "linears:f32:nt:2x17x65x97:bias+gated-silu:dyn-m",
    "linears:f32:nt:3x16x32x52:bias+relu:dyn-m+bias-first+steps-last",
    "linears:bf16:nt:2x17x65x97:bias+gated-silu",
    "linears:bf16:nt:3x16x32x52:bias+relu:bias-last+steps-first",
    "linears:f16:nt:2x33x64x128:gated-gelu+mul",
    "linears:f32-f32-bf16:nt:2x16x32x52:bias:in-3d+bias-first",
    "linears:bf16:nt:2x16x64x64:add:in-3d+steps-last",
)


def several(level: str) -> tuple[Problem, ...]:
    """Linears of one input: an MLP's two halves, Q, K and V; what only one of them has."""
    found = tuple(map(Problem.parse, _SEVERAL))
    if not _at_least(level, "full"):
        return found
    # f32 is put together where M is a symbol, half types where it is not; in a package of AOTInductor's both are.
    dtypes = (("f32", "dyn-m"), ("f32", ""), ("bf16", ""), ("bf16", "dyn-m"), ("f16", ""), ("f32-f32-bf16", ""))
    shapes = ("17x65x97", "16x32x52", "48x33x64", "5x385x128", "2x1x7", "128x96x192", "33x48x66")
    forms = (
        "2x{s}:", "3x{s}:bias", "2x{s}:gated-silu", "2x{s}:bias+gated-silu", "2x{s}:bias+gated-gelu+mul", "3x{s}:relu",
        "2x{s}:bias+add",
    )  # fmt: skip
    crossed = Cases().combine(form=forms, s=shapes, d=dtypes)
    crossed = crossed.filter(lambda p: p["d"][0] in {"f32", "bf16"} or p["s"] in shapes[:2])
    lines = [f"linears:{p['d'][0]}:nt:{p['form'].format(s=p['s'])}:{p['d'][1]}" for p in crossed]
    halves = ("bias-first", "bias-last", "steps-first", "steps-last", "bias-first+steps-first", "bias-last+steps-first")
    lines += [f"linears:{d}:nt:{g}x16x32x52:bias+relu:{f}+{h}" for d, f in dtypes for g in (2, 3) for h in halves]
    lines += [f"linears:{d}:nt:2x18x64x52:bias+gated-silu:{f}" for d in ("f32", "bf16", "f16") for f in ("in-3d",)]
    lines += [f"linears:{d}:nt:2x18x64x52:bias+relu:in-3d+{h}" for d in ("f32", "bf16", "f16") for h in halves]
    # The input and the weights as views; results that are made 2-D again.
    views = ("pad-lda", "off-a", "pad-lda+off-a", "pad-ldb", "off-b")
    lines += [f"linears:{d}:nt:2x17x65x97:bias+gated-silu:{f}+{v}" for d, f in dtypes[:3] for v in views]
    lines += [f"linears:{d}:tt:2x18x48x32::{f}" for d, f in dtypes]
    lines += [f"linears:{d}:nt:2x16x32x52:relu:in-3d+flat+steps-last" for d in ("f32", "bf16", "f16")]
    return unique(found + tuple(Problem.parse(line.replace(":+", ":").rstrip(":")) for line in lines))


# Layout of B, and who has its batch in the middle: the products of attention in four models, and one more.
_PERMUTED = (("nt", ""), ("nt", "mid-b"), ("nn", "mid-b"), ("nn", "mid-a"), ("nt", "mid-a+mid-b"))


def permuted(level: str) -> tuple[Problem, ...]:
    """bmm of operands that attention permutes, of A with itself; weights that are arguments, packed and not."""
    orders = Cases().combine(dtype=FLOATS, n=(64, 61), order=_PERMUTED)
    squares = Cases().combine(dtype=FLOATS, shape=("5x3x3x3", "5x64x64x64"))
    plain = Cases().combine(dtype=FLOATS, shape=("1x17x384x64", "1x17x385x64"))
    if not _at_least(level, "full"):  # the dtypes in turn
        orders = orders.filter(
            lambda p: p["order"][1] and FLOATS[_PERMUTED.index(p["order"]) % 3] == p["dtype"] and p["n"] == 61
        )
        squares = squares.filter(lambda p: p["dtype"] == FLOATS[p["shape"] == "5x3x3x3"])
        plain = plain.filter(lambda p: p["dtype"] == FLOATS[p["shape"].endswith("384x64")])
    found = unique(
        Problem.parse(f"bmm:{p['dtype']}:{p['order'][0]}:12x10x{p['n']}x62::{p['order'][1]}".rstrip(":"))
        for p in orders
    )
    found += squares.problems("bmm:{dtype}:nn:{shape}::square") + plain.problems("bmm:{dtype}:nn:{shape}")
    if not _at_least(level, "full"):
        return found
    batches = Cases().combine(dtype=FLOATS, batch=(1, 2, 3, 4, 5, 7, 8, 16, 17, 50), mnk=("16x48x32", "17x49x33"))
    found += batches.problems("bmm:{dtype}:nn:{batch}x{mnk}") + batches.problems("bmm:{dtype}:nt:{batch}x{mnk}")
    tiles = Cases().combine(dtype=FLOATS, m=(16, 32), n=(3, 16, 32, 48, 128, 1024, 1025))
    found += tiles.problems("bmm:{dtype}:nn:2x{m}x{n}x32")
    weights = (
        Cases()
        .combine(
            dtype=FLOATS,
            shape=("1x192x64x196", "1x192x65x196", "6x33x48x34"),
            flags=(
                "const-b",
                "const-b+mid-b",
                "off-b",
                "bcast-b",
                "bcast-a",
                "bcast-a+bcast-b",
                "mid-b+off-b",
                "dyn-m",
            ),
        )
        .filter(lambda p: "bcast" not in p["flags"] or not p["shape"].startswith("1x"))
    )
    found += weights.problems("bmm:{dtype}:nn:{shape}::{flags}")
    own = Cases().combine(dtype=FLOATS, layout=("nt", "tn"), shape=("5x64x64x96", "5x3x3x17"))
    found += own.problems("bmm:{dtype}:{layout}:{shape}::self")
    steps = Cases().combine(
        dtype=FLOATS, shape=("5x33x64x96", "5x33x65x96"), step=("relu", "add", "sub", "mul", "div", "scale+add")
    )
    found += steps.problems("bmm:{dtype}:nn:{shape}:{step}") + steps.problems("bmm:{dtype}:nt:{shape}:{step}:mid-b")
    large = Cases().combine(dtype=FLOATS, shape=("50x192x84x196", "50x192x385x196"))
    return unique(found + large.problems("bmm:{dtype}:nn:{shape}"))


def unfrozen(level: str) -> tuple[Problem, ...]:
    """Weights that are parameters and not frozen, which a package of AOTInductor's has inside all the same."""
    lines = ["linear:f32:nt:16x64x128:bias+relu:unfrozen", "mm:bf16:nn:17x65x127::unfrozen"]
    if _at_least(level, "full"):
        forms = (
            "linear:{d}:nt:17x65x127:bias+relu:unfrozen", "mm:{d}:nt:33x48x66::unfrozen",
            "addmm:{d}:nn:16x64x64:bias+gelu:unfrozen", "bmm:{d}:nn:3x16x48x34::const-b+unfrozen",
        )  # fmt: skip
        lines += [form.format(d=d) for form in forms for d in FLOATS]
    return unique(map(Problem.parse, lines))


# 65601 is above 2^16 and a multiple of no tile; 17 x 16 and a K = 65608 are what CUDA's int8 product takes.
_EXTENTS_QUICK = (
    "mm:f32:nn:65601x5x3",
    "linear:bf16:nt:65601x4x8:bias",
    "addmm:f16:nn:65601x3x5:bias-mn:var-b",
    "mm:f32:nn:3x65601x5::var-b",
    # Long sums, with few columns and with more.
    "mm:f32:nn:5x3x65601",
    "addmm:f16:nn:5x2x65601:bias+alpha-0.5+beta-2",
    "linear:f16:nt:33x1x4099",
    "linear:bf16:nt:3x17x65601:bias",
    "int_mm:i8-i8-i32:nt:17x16x65608",  # beyond 2^27
    # Batches: beyond 128, beyond the 65535 of a CUDA grid's z, and two dimensions of them.
    "bmm:bf16:nt:131x9x8x16",
    "baddbmm:f32:nn:65601x2x3x5:bias-mn",
    "linear:f32:nt:6x17x65x96:bias+relu+add:in-4d",
    "linear:f16:nt:66x3x17x33:bias:in-4d",
)
_EXTENTS_FULL = (
    "mm:{dtype}:nn:65601x5x3",
    "mm:{dtype}:tn:1025x65x33",
    "mm:{dtype}:nt:3x65601x5",
    "mm:{dtype}:tt:5x3x65601",
    "linear:{dtype}:nt:65601x4x8:bias+relu",
    "linear:{dtype}:nt:4097x33x65:bias:dyn-m",
    "linear:{dtype}:nt:3x17x65601:bias",
    "addmm:{dtype}:nn:65601x3x5:bias-m1",
    "addmm:{dtype}:nn:5x2x65601:bias-mn",
    "bmm:{dtype}:nn:131x9x8x16",
    "bmm:{dtype}:nt:65601x2x3x5",
    "baddbmm:{dtype}:nn:257x5x7x9:bias-mn",
    "linear:{dtype}:nt:6x17x65x97:bias:in-4d",
    "linear:{dtype}:nt:4x16x48x64:gelu+mul:pad-lda+in-4d",
    "linear:{dtype}:nt:4x16x48x64:bias+relu+perm-2_0_1_3+add:in-4d",
    "linear:{dtype}:nt:66x3x17x33:add:in-4d",
)


def extents(level: str) -> tuple[Problem, ...]:
    """One long dimension: an index of 16 bits, a row index of few, a sum of integers that leaves float32 or 30 bits."""
    quick = tuple(map(Problem.parse, _EXTENTS_QUICK))
    if not _at_least(level, "full"):
        return quick
    found = unique(Problem.parse(form.format(dtype=dtype)) for form in _EXTENTS_FULL for dtype in FLOATS)
    found += (
        Cases()
        .combine(dtype=FLOATS, m=(1, 33), n=(1, 2, 3), k=(1025, 4099), layout=("nn", "nt"))
        .problems("mm:{dtype}:{layout}:{m}x{n}x{k}")
    )
    # Sums of positive int8 beyond 2^30, and beyond 2^31, where they wrap around; rows beyond 2^21.
    alone = ("int_mm:i8-i8-i32:nt:17x16x270344", "int_mm:i8-i8-i32:nt:17x16x540680", "mm:f32:nn:2200001x4x3")
    return unique(quick + found + tuple(map(Problem.parse, alone)))


_FP8 = ("f8e4m3fn-f8e4m3fn", "f8e4m3fn-f8e5m2", "f8e5m2-f8e4m3fn")

# Scales, bias, accumulation, dtypes and sizes, each pair somewhere.  M may be anything; N and K are multiples of 16,
# which CUDA asks for, but for one that it refuses.
_SCALED = (
    "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:1x64x64:tensorwise",
    "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:17x48x512:rowwise",
    "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:64x64x64:rowwise+bias",  # M = N: exchanged scales still fit
    "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:129x96x512:tensorwise+bias:fast-acc",
    "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:64x128x8192:rowwise:fast-acc",
    "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:16x64x8192:tensorwise",
    "scaled_mm:f8e4m3fn-f8e4m3fn-f16:nt:17x64x512:rowwise+bias:fast-acc",
    "scaled_mm:f8e4m3fn-f8e4m3fn-f32:nt:64x64x512:tensorwise:fast-acc",
    "scaled_mm:f8e4m3fn-f8e4m3fn-f32:nt:33x32x1008:rowwise",
    "scaled_mm:f8e4m3fn-f8e5m2-bf16:nt:33x64x512:rowwise+bias:fast-acc",
    "scaled_mm:f8e5m2-f8e4m3fn-f16:nt:64x80x128:tensorwise+bias",
    "scaled_mm:f8e5m2-f8e4m3fn-f32:nt:129x64x64:rowwise",
    "scaled_mm:f8e5m2-f8e5m2-bf16:nt:64x64x64:tensorwise:fast-acc",
    "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:64x128x64:rowwise+bias+relu",
    "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:128x256x512:tensorwise+gelu:fast-acc",
    "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:33x64x128:rowwise:pad-lda+pad-ldb",
    "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:17x40x72:tensorwise",
    "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:16x32x0:tensorwise",
    "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:0x32x64:rowwise",
)


def scaled(level: str) -> tuple[Problem, ...]:
    """fp8 with scales of its own: what multiplies the sum, what is added to it, and in how many bits it is summed."""
    found = tuple(map(Problem.parse, _SCALED))
    if not _at_least(level, "full"):
        return found
    scales, biases, flags = ("tensorwise", "rowwise"), ("", "+bias"), ("", ":fast-acc")
    shapes = ("33x64x128", "128x128x512")
    crossed = Cases().combine(
        dtypes=(*_FP8, "f8e5m2-f8e5m2"), out=("bf16", "f16", "f32"), scale=scales, bias=biases, flag=flags
    )
    found += Cases({**p, "shape": shapes[i % 2]} for i, p in enumerate(crossed)).problems(
        "scaled_mm:{dtypes}-{out}:nt:{shape}:{scale}{bias}{flag}"
    )
    sizes = (
        "1x16x16", "1x16x32", "1x4096x512", "2x64x4096", "16x16x16384", "31x48x96", "63x128x256", "65x144x272",
        "127x64x128", "129x272x64", "250x96x1008", "257x256x384", "1000x64x48", "17x48x80", "17x33x65",
    )  # fmt: skip
    found += (
        Cases()
        .combine(shape=sizes, scale=scales, flag=flags)
        .problems("scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:{shape}:{scale}{flag}")
    )
    epilogues = ("relu", "gelu", "silu", "sigmoid+mul", "add", "bias+gelu+mul", "bias+add+relu", "cast-f32", "scale-2")
    found += (
        Cases()
        .combine(epilogue=epilogues, scale=scales)
        .problems("scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:33x96x256:{scale}+{epilogue}")
    )
    views = ("pad-lda", "pad-ldb", "off-a", "off-b", "const-b", "dyn-m", "pad-lda+fast-acc", "dyn-m+fast-acc")
    found += (
        Cases()
        .combine(flags=views, scale=scales)
        .problems("scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:33x64x128:{scale}+bias:{flags}")
    )
    found += (
        Cases()
        .combine(scale=scales, flags=("self", "self+fast-acc"))
        .problems("scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:48x48x128:{scale}:{flags}")
    )
    found += (
        Cases()
        .combine(m=(2, 17, 64, 129), scale=scales)
        .problems("scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:{m}x64x128:{scale}+relu:dyn-m")
    )
    empty = Cases().combine(shape=("0x16x16", "16x0x16", "16x16x0"), scale=scales, bias=biases)
    return unique(found + empty.problems("scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:{shape}:{scale}{bias}"))


# One of a kind, where M, N and K have tails for the micro-kernels of AMX (16 x 16 x 64) and VNNI (groups of 4 along K).
# u8 by i8 in full range saturates on processors that add pairs in 16 bits; what ATen and Inductor are asked for there
# in earnest has the flag reduce-range.
_QUANTISED = (
    "qlinear:u8-i8-f32:nt:17x65x127:static+bias:reduce-range",
    "qlinear:u8-i8-f32:nt:32x64x128:static-0.02_128",
    "qlinear:u8-i8-bf16:nt:33x96x1024:dynamic+bias+relu:reduce-range",
    "qlinear:u8-i8-bf16:nt:17x64x130:static-0.02_128+bias+add+relu",
    "qlinear:u8-i8-f32:nt:1x64x128:static+bias+sum:reduce-range",
    "qlinear:u8-i8-u8:nt:17x65x128:static+bias+relu+requant-0.37_3:reduce-range",
    "qlinear:u8-i8-i8:nt:31x64x144:static+bias+add+requant-0.5_-5",
    "qlinear:u8-i8-u8:nt:17x65x128:static+bias+sum-0.25_5+relu+requant-0.37_3:reduce-range",
    "qlinear:i8-i8-f32:nt:17x64x128:static-0.01_0+gelu",
    "da8w8:i8-i8-bf16:nt:17x65x128:rowwise",
    "da8w8:i8-i8-f32:nt:32x64x127:columnwise",
    "da8w8:i8-i8-f16:nt:2x17x64x128:rowwise+bias",
    "woq_int8:bf16-i8-bf16:nt:17x195x128::concat",
    "woq_int4:bf16-i4-bf16:nt:17x64x128:group-32",
    "woq_int4:bf16-i4-bf16:nt:1x128x256:group",
    "woq_int4:f32-i4-f32:nt:4x48x192:group-64",
)
# Around the rows of an AMX tile.
_TILE_ROWS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 49)


def quantised(level: str) -> tuple[Problem, ...]:
    """8-bit products with scales and zero points, and weights of 8 and of 4 bits under a float activation."""
    found = tuple(map(Problem.parse, _QUANTISED))
    if not _at_least(level, "full"):
        return found
    linear = Cases().combine(
        dtypes=("u8-i8", "i8-i8"), out=("f32", "bf16", "u8", "i8"), a=("static-0.02_7", "dynamic"), bias=("", "+bias"),
        steps=("", "+relu", "+gelu", "+add", "+add+relu", "+sum", "+sum+relu"), flags=("", ":reduce-range"),
    ).filter(
        lambda p: (
            (p["flags"] == "" or p["dtypes"] == "u8-i8") and (p["out"] not in {"u8", "i8"} or "sum" not in p["steps"])
        )
    )  # fmt: skip
    shapes = ("17x65x127", "32x64x128", "49x96x1024")
    found += Cases(
        {**p, "shape": shapes[i % 3], "requant": "+requant-0.37_3" if p["out"] in {"u8", "i8"} else ""}
        for i, p in enumerate(linear)
    ).problems("qlinear:{dtypes}-{out}:nt:{shape}:{a}{bias}{steps}{requant}{flags}")
    codes = Cases().combine(
        dtypes=("u8-i8-u8", "u8-i8-i8"), a=("static-0.02_7", "dynamic"), steps=("sum", "sum-0.3_5", "sum-0.5_127+relu")
    )
    found += codes.problems("qlinear:{dtypes}:nt:17x65x127:{a}+bias+{steps}+requant-0.37_3:reduce-range")
    steps = ("gelu_tanh", "silu", "tanh", "hardswish", "leaky_relu-0.1", "clamp--1_2")
    found += (
        Cases()
        .combine(step=steps, out=("f32", "bf16"))
        .problems("qlinear:u8-i8-{out}:nt:17x65x127:static+bias+{step}:reduce-range")
    )
    found += (
        Cases()
        .combine(m=_TILE_ROWS, k=(127, 128, 130))
        .problems("qlinear:u8-i8-f32:nt:{m}x64x{k}:static+bias:reduce-range")
    )
    zeros = Cases().combine(a=("static-0.0078125_0", "static-0.3_255", "static-0.02_128"))
    found += zeros.problems("qlinear:u8-i8-f32:nt:17x96x4096:{a}")
    flags = ("pad-lda", "pad-ldb", "off-a", "off-b", "dyn-m")
    found += Cases().combine(flags=flags).problems("qlinear:u8-i8-f32:nt:33x65x127:static+bias:{flags}+reduce-range")
    concat = Cases().combine(shape=("1x192x128", "32x192x128", "49x99x144"), steps=("", "relu", "add"))
    found += concat.problems("woq_int8:bf16-i8-bf16:nt:{shape}:{steps}:concat")
    sizes = Cases().combine(shape=("1x1x1", "3x9x5", "0x16x16", "16x0x16", "16x16x0"))
    found += sizes.problems("qlinear:u8-i8-f32:nt:{shape}:static:reduce-range")
    found += sizes.problems("da8w8:i8-i8-f32:nt:{shape}:columnwise")
    dynamic_a = Cases().combine(
        shape=("17x65x127", "2x17x64x128"), out=("f32", "bf16", "f16"), a=("rowwise", "columnwise"), bias=("", "+bias")
    )
    found += dynamic_a.problems("da8w8:i8-i8-{out}:nt:{shape}:{a}{bias}")
    found += Cases().combine(m=_TILE_ROWS, k=(128, 130)).problems("da8w8:i8-i8-bf16:nt:{m}x64x{k}:rowwise")
    found += Cases().combine(m=(2, 17, 64)).problems("da8w8:i8-i8-bf16:nt:{m}x65x127:rowwise+bias+relu:dyn-m")
    groups = (
        Cases()
        .combine(m=(1, 4, 5, 17, 32), group=(32, 64, 128), n=(64, 192))
        .problems("woq_int4:bf16-i4-bf16:nt:{m}x{n}x256:group-{group}")
    )
    groups += (
        Cases()
        .combine(dtype=FLOATS, shape=("3x16x1024", "7x64x4096"))
        .problems("woq_int4:{dtype}-i4-{dtype}:nt:{shape}:group-64")
    )
    groups += (
        Cases()
        .combine(step=("relu", "add", "bias+gelu"))
        .problems("woq_int4:bf16-i4-bf16:nt:17x64x256:group-64+{step}")
    )
    weights = (
        Cases()
        .combine(m=range(1, 33), nk=("64x128", "65x144", "1024x128"))
        .problems("woq_int8:bf16-i8-bf16:nt:{m}x{nk}")
    )
    weights += (
        Cases()
        .combine(m=(1, 16, 32), n=(64, 65, 1024), k=(128, 144, 1024))
        .problems("woq_int8:bf16-i8-bf16:nt:{m}x{n}x{k}")
    )
    return unique(found + groups + weights)


# Groups x mean rows x N x K.  Rows of A and of B are multiples of 16 bytes, but for one that is refused.
_GROUPED = (
    "grouped_mm:bf16:nt:4x64x96x128",
    "grouped_mm:bf16:nn:4x64x96x128",
    "grouped_mm:bf16:nt:1x64x64x64",
    "grouped_mm:bf16:nt:2x17x40x512",
    "grouped_mm:bf16:nt:8x16x256x1024",
    "grouped_mm:bf16:nn:3x1x64x64",
    "grouped_mm:bf16:nt:4x128x264x72",
    "grouped_mm:bf16:nt:5x33x100x136",  # a result whose rows are padded
    "grouped_mm:bf16:nt:4x64x96x128:relu",
    "grouped_mm:bf16:nt:4x33x64x128:bias+gelu",
    "grouped_mm:bf16:nt:4x64x96x128::pad-lda+pad-ldb",
    "grouped_mm:bf16:nt:3x40x64x64::bcast-b",
    "grouped_mm:f16:nt:4x33x64x128",
    "grouped_mm:f32:nn:3x17x36x64",
    "grouped_mm:bf16:nt:4x64x96x100",
    "grouped_mm:bf16:nt:4x0x32x64",
)


def grouped(level: str) -> tuple[Problem, ...]:
    """A's rows in uneven groups, some of them empty, each with a B of its own."""
    found = tuple(map(Problem.parse, _GROUPED))
    if not _at_least(level, "full"):
        return found
    shapes = (
        "1x1x8x8", "1x257x64x64", "2x1x64x256", "3x5x72x64", "4x31x48x96", "7x100x40x64", "16x8x128x64", "32x1x64x128",
        "64x4x32x64", "4x256x256x256", "2x500x64x1000", "4x16x64x8192", "3x63x101x64", "5x65x1x64", "4x64x128x16384",
    )  # fmt: skip
    found += (
        Cases()
        .combine(shape=shapes, dtype=FLOATS, layout=("nt", "nn"))
        .filter(
            # Rows of a B that is not transposed are N long.
            lambda p: p["layout"] == "nt" or int(p["shape"].split("x")[2]) % 8 == 0
        )
        .problems("grouped_mm:{dtype}:{layout}:{shape}")
    )
    flags = ("pad-lda", "pad-ldb", "off-a", "off-b", "const-b", "bcast-b", "dyn-m")
    found += Cases().combine(flags=flags, dtype=FLOATS).problems("grouped_mm:{dtype}:nt:4x33x64x128::{flags}")
    epilogues = ("relu", "gelu+mul", "add", "bias", "bias+silu", "cast-f32", "scale-0.125+add")
    found += Cases().combine(epilogue=epilogues, dtype=HALVES).problems("grouped_mm:{dtype}:nt:4x33x64x128:{epilogue}")
    dynamic_m = Cases().combine(m=(2, 17, 64)).problems("grouped_mm:bf16:nt:4x{m}x64x128:relu:dyn-m")
    return unique(found + dynamic_m)


def _empty(_level: str) -> tuple[Problem, ...]:
    """No rows, no columns, nothing to sum."""
    shapes = ("0x16x16", "16x0x16", "16x16x0")
    plain = Cases().combine(shape=shapes, dtype=FLOATS).problems("mm:{dtype}:nn:{shape}")
    added = (
        Cases().combine(shape=shapes, dtype=("f32", "bf16")).problems("addmm:{dtype}:nn:{shape}:bias+alpha-0.5+beta-2")
    )
    batch = Cases().combine(shape=("0x4x4x4", "2x0x4x4", "2x4x4x0")).problems("bmm:f32:nn:{shape}")
    return (*plain, *added, *batch, Problem.parse("linear:bf16:nt:16x16x0::dyn-m"))


def recompiled(level: str) -> tuple[Problem, ...]:
    """Compiled a second time with other weights through warm caches: whatever has a constant that could be kept."""
    forms = (
        "mm:{dtype}:nn:32x48x65",
        "linear:{dtype}:nt:17x65x127:bias+relu",
        "bmm:{dtype}:nn:3x32x16x24::const-b",
        "addmm:{dtype}:nn:17x64x96:bias",
        "mixed_mm:i8-{dtype}-{dtype}:nn:16x32x32",
        "woq_int8:{dtype}-i8-{dtype}:nt:17x64x128",
        "da8w8:i8-i8-{dtype}:nt:17x64x128:rowwise",
    )
    cases = Cases().combine(dtype=FLOATS)
    found = unique(problem for form in forms for problem in cases.problems(form))
    return found if _at_least(level, "full") else tuple(p for p in found if str(p) in _RECOMPILED_QUICK)


_RECOMPILED_QUICK = (
    "mm:f16:nn:32x48x65",
    "mm:f32:nn:32x48x65",
    "linear:bf16:nt:17x65x127:bias+relu",
    "bmm:f32:nn:3x32x16x24::const-b",
    "woq_int8:bf16-i8-bf16:nt:17x64x128",
)


def recompiled_elsewhere(level: str) -> tuple[Problem, ...]:
    """The same with the first compile in a process of its own, which costs seconds: one problem at quick."""
    found = recompiled(level)
    return found if _at_least(level, "full") else tuple(p for p in found if str(p) == "mm:f16:nn:32x48x65")


def others_with_the_operands_of(problem: Problem) -> tuple[Problem, ...]:
    """Programs that take the very operands of this one and ask for something else.

    Another accuracy or another output of fp8, a product without its factors or without its last step: what a cache
    whose key knows the operands alone would answer for one another.
    """
    kept = tuple(step for step in problem.epilogue if step.name not in {"alpha", "beta"})
    asked = [dataclasses.replace(problem, epilogue=kept)]
    if problem.op.name == "scaled_mm":
        flags = tuple({*problem.flags} ^ {"fast-acc"})
        asked.append(dataclasses.replace(problem, flags=flags))
        out = DTYPES["f16" if problem.dtypes.out.name == "bf16" else "bf16"]
        asked.append(dataclasses.replace(problem, dtypes=dataclasses.replace(problem.dtypes, out=out)))
    elif problem.passes and problem.passes[-1].kind is not StepKind.BINARY:
        asked.append(problem.without(problem.epilogue.index(problem.passes[-1])))
    return tuple(other for other in unique(Problem.parse(one.line) for one in asked) if other != problem)


_ALIKE = (
    "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:16x64x8192:tensorwise",  # an inexact sum of 8192 shows in bf16
    "scaled_mm:f8e4m3fn-f8e4m3fn-f16:nt:64x128x512:rowwise:fast-acc",
    "addmm:f32:nn:17x65x127:bias+alpha-0.5+beta-2",
    "addmm:bf16:nt:32x64x128:bias+alpha-0.5",
    "linear:bf16:nt:17x64x127:bias+relu",
    "mm:f16:nn:32x48x64:gelu",
)


def alike(level: str) -> tuple[Problem, ...]:
    """Compiled after :func:`others_with_the_operands_of` each: whose operands do not say what is asked for."""
    found = tuple(map(Problem.parse, _ALIKE))
    return found if _at_least(level, "full") else found[:3]


_RELATED_QUICK = (
    "mm:f32:nn:17x65x127",
    "mm:f16:nt:17x65x127",
    "linear:bf16:nt:17x65x127:bias",
    "bmm:bf16:nn:3x32x16x24",
    "linear:f32:nt:16x65x97:bias+relu:dyn-m",
)


def related(level: str) -> tuple[Problem, ...]:
    """Problems whose results are held against one another: one a kind of kernel, with tails."""
    quick = tuple(map(Problem.parse, _RELATED_QUICK))
    if not _at_least(level, "full"):
        return quick
    forms = (
        "mm:{dtype}:nn:64x48x1000",
        "mm:{dtype}:tt:33x65x127::var-b",
        "linear:{dtype}:nt:8x256x2664:bias+gelu",
        "linear:{dtype}:nt:100x65x97:bias:dyn-m",
        "addmm:{dtype}:nn:33x65x127:bias-m1+alpha-0.5+beta-2",
        "bmm:{dtype}:nt:4x128x96x192",
        "baddbmm:{dtype}:nn:3x17x33x65:bias-mn",
        "grouped_mm:{dtype}:nt:4x33x64x128",
    )
    cases = Cases().combine(dtype=FLOATS)
    return unique(quick + tuple(problem for form in forms for problem in cases.problems(form)))
