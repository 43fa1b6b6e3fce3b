"""Which problems the suite is made of, by level.  Everything of ``quick`` is in ``full``, and so on.

Axes are crossed only where they interact.  What interacts in a GEMM template:

* a dimension with the tile: so sizes stand one below, at and one above multiples of 16, 32, 64;
* M with the choice of the kernel (GEMV, small-M paths) and with dynamic shapes;
* K with the accumulation: short, long, odd;
* the layout of an operand with packing and with its leading dimension;
* an epilogue with the dtype it is computed in and with the N tail where it is vectorised;
* a bias shape with alpha and beta.

Nothing is left out because some backend cannot do it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from pytest_gemm.cases import Cases, unique
from pytest_gemm.problem import Problem

__all__ = ["batched", "dynamic", "products", "recompiled", "recompiled_elsewhere"]

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
    "bias+scale-0.5+tanh",
    "bias+sigmoid+mul+relu",
    "bias+clamp--1_1+sub",
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
        _addends,
        batched,
        _views,
        dynamic,
        _integers,
        _empty,
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
    return (flat + deep).problems("linear:{dtype}:nt:{shape}:{epilogue}")


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
    honest = cases.filter(
        lambda p: not p["epilogue"].endswith(f"cast-{p['dtype']}") and f"cast-{p['dtype']}+" not in p["epilogue"]
    )
    return honest.problems("linear:{dtype}:nt:{shape}:{epilogue}")


def _addends(level: str) -> tuple[Problem, ...]:
    """addmm: bias shapes against alpha and beta."""
    factors: tuple[str, ...] = ("", "+alpha-0.5+beta-2", "+beta-0", "+alpha--1")
    shapes: tuple[str, ...] = (
        ("17x65x127",) if level == "quick" else ("17x65x127", "32x64x128", "1x64x64", "5x385x7", "33x97x1")
    )
    if _at_least(level, "exhaustive"):
        factors += ("+alpha-0", "+alpha-0.3", "+beta-0.7", "+alpha-0+beta-0", "+alpha-3+beta--1.5")
        shapes = _sizes(level)
    cases = Cases().combine(shape=shapes, dtype=FLOATS, bias=("bias", "bias-1n", "bias-m1", "bias-mn"), factors=factors)
    if level == "quick":  # every pair, not every combination: the bias's shape and its dtype rarely meet
        cases = cases.filter(
            lambda p: (
                p["bias"] == "bias" if p["dtype"] == "f32" else p["factors"] == factors[1] or p["bias"] == "bias-mn"
            )
        )
    return cases.problems("addmm:{dtype}:nn:{shape}:{bias}{factors}")


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
    return (layouts + split + own + added).problems("{op}:{dtype}:{layout}:{shape}:{epilogue}:{flags}")


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
        else ("64x128", "65x144", "64x1024", "1024x128", "1024x144", "64x144", "65x128", "64x1000")
    )
    woq = Cases().combine(
        m=ms, nk=nks, dtypes=("bf16-i8-bf16",) if level == "quick" else ("bf16-i8-bf16", "f16-i8-f16", "f32-i8-f32")
    )
    return int_mm + mixed + woq.problems("woq_int8:{dtypes}:nt:{m}x{nk}")


def _empty(_level: str) -> tuple[Problem, ...]:
    """No rows, no columns, nothing to sum."""
    shapes = ("0x16x16", "16x0x16", "16x16x0")
    plain = Cases().combine(shape=shapes, dtype=FLOATS).problems("mm:{dtype}:nn:{shape}")
    added = (
        Cases().combine(shape=shapes, dtype=("f32", "bf16")).problems("addmm:{dtype}:nn:{shape}:bias+alpha-0.5+beta-2")
    )
    batch = Cases().combine(shape=("0x4x4x4", "2x0x4x4", "2x4x4x0")).problems("bmm:f32:nn:{shape}")
    return plain + added + batch


def recompiled(level: str) -> tuple[Problem, ...]:
    """Compiled a second time with other weights through warm caches: whatever has a constant that could be kept."""
    forms = (
        "mm:{dtype}:nn:32x48x65",
        "linear:{dtype}:nt:17x65x127:bias+relu",
        "bmm:{dtype}:nn:3x32x16x24::const-b",
        "addmm:{dtype}:nn:17x64x96:bias",
    )
    cases = Cases().combine(dtype=FLOATS)
    found = unique(problem for form in forms for problem in cases.problems(form))
    return found if _at_least(level, "full") else tuple(p for p in found if str(p) in _RECOMPILED_QUICK)


_RECOMPILED_QUICK = (
    "mm:f16:nn:32x48x65",
    "mm:f32:nn:32x48x65",
    "linear:bf16:nt:17x65x127:bias+relu",
    "bmm:f32:nn:3x32x16x24::const-b",
)


def recompiled_elsewhere(level: str) -> tuple[Problem, ...]:
    """The same with the first compile in a process of its own, which costs seconds: one problem at quick."""
    found = recompiled(level)
    return found if _at_least(level, "full") else tuple(p for p in found if str(p) == "mm:f16:nn:32x48x65")
