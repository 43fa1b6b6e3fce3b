"""The C++ templates' micro-kernels and blockings: their names, and what the generated code shows of them.

A *micro-kernel* computes one register block of M x N elements, K in steps of its own; around it the template walks
over cache blocks, and gives each thread its blocks of M, N and, with K slices, of K.  All blockings but the register
blocking are counted in register blocks.  Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from pytest_gemm.api.proof import Generation
from pytest_gemm.machine.isa import ISAS
from pytest_gemm.storage.datafile import document

Blocks = tuple[int, int, int]

# What follows the micro-kernel in the name of a candidate of the template that computes several products of one A.
GROUPED = ",grouped"

# Pattern of a micro-kernel's name, see :func:`kernel_name`.
NAME = r"CppMicro\w+-\d+x\d+x\d+"


def _three(numbers: Iterable[int | str]) -> Blocks:
    m, n, k = map(int, numbers)
    return m, n, k


def kernel_name(kind: str, block: Sequence[int]) -> str:
    """``CppMicroGemmFP32Vec-4x24x1``: class of the micro-kernel, and its register blocking M x N x K."""
    return f"{kind}-{'x'.join(map(str, block))}"


def kernel_of(candidate: str) -> str:
    """The micro-kernel, or the pattern of its name, without the rest of a candidate's name."""
    return candidate.partition(",")[0]


# -- the template's own axes ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Axes:
    """What is requested of the template beside its micro-kernel; ``None``: Inductor's heuristic decides.

    Attributes:
        slices: the most slices that K may be cut into for the threads, ``cpp.gemm_max_k_slices``; 0: no limit.
        cache: cache blocking of M, N and K in register blocks, ``cpp.gemm_cache_blocking``.
        threads: into how many parts M, N and K are cut for the threads, ``cpp.gemm_thread_factors``, and their product
            ``cpp.threads``; or that number alone, of which Inductor makes the parts.
    """

    slices: int | None = None
    cache: Blocks | None = None
    threads: tuple[int, ...] | None = None

    def __str__(self) -> str:
        """The suffix of a candidate's name: ``,kslices=4,cache=2.2.8,threads=2.1.2``, "" for none."""
        slices = "" if self.slices is None else f",kslices={self.slices}"
        return slices + "".join(f",{n}={_dots(v)}" for n, v in (("cache", self.cache), ("threads", self.threads)) if v)

    @property
    def options(self) -> dict[str, object]:
        """Names and values of ``torch._inductor.config``."""
        found: dict[str, object] = {} if self.slices is None else {"cpp.gemm_max_k_slices": self.slices}
        if self.cache:
            found["cpp.gemm_cache_blocking"] = ",".join(map(str, self.cache))
        if self.threads:
            found["cpp.threads"] = math.prod(self.threads)
        if self.factors:
            found["cpp.gemm_thread_factors"] = ",".join(map(str, self.factors))
        return found

    @property
    def factors(self) -> Blocks | None:
        """The parts of M, N and K, where each is requested."""
        return _three(self.threads) if self.threads and len(self.threads) > 1 else None

    @property
    def slices_k(self) -> bool:
        """Whether K may be cut for the threads."""
        return self.slices not in {None, 1} or bool(self.factors and self.factors[2] > 1)

    def reaches(self, kernel: str, m: int, n: int, k: int) -> bool:
        """Whether code of these sizes is other code with them."""
        blocks = _ceil_blocks((m, n, k), register_block(kernel))
        return bool(self.threads) or any(map(operator.lt, self.cache or blocks, blocks))


def _dots(blocks: Sequence[int]) -> str:
    return ".".join(map(str, blocks))


_SUFFIX = re.compile(
    rf"(?P<base>[^,]*?(?:{GROUPED})?)(?:,kslices=(?P<slices>\d+))?"
    r"(?:,cache=(?P<cache>[1-9]\d*\.[1-9]\d*\.[1-9]\d*))?"
    r"(?:,threads=(?P<threads>[1-9]\d*(?:\.[1-9]\d*\.[1-9]\d*)?))?"
)


def split(choice: str) -> tuple[str, Axes] | None:
    """Micro-kernel (or a pattern of its name) and axes of a candidate's name; ``None`` for any other suffix.

    :data:`GROUPED` stays with the micro-kernel's name.
    """
    found = _SUFFIX.fullmatch(choice)
    if found is None:
        return None
    slices = None if found["slices"] is None else int(found["slices"])
    cache, threads = found["cache"], found["threads"]
    parts = tuple(map(int, threads.split("."))) if threads else None
    return found["base"], Axes(slices, _three(cache.split(".")) if cache else None, parts)


def blockings(kind: str, number: int) -> tuple[Axes, ...]:
    """What ``micro_kernels.toml`` has for a kind of product, beginning with the one that ``number`` leads to.

    Args:
        kind: ``fixed``, ``batched`` or ``dynamic``.
        number: of the problem's line.
    """
    found = [asked[1] for name in _TABLE["blockings"][kind] if (asked := split(f",{name}"))]
    first = number % len(found)
    return (*found[first:], *found[:first])


def register_block(kernel: str) -> Blocks:
    """``(4, 24, 1)`` of ``CppMicroGemmFP32Vec-4x24x1``, and of a candidate with it."""
    return _three(kernel_of(kernel).rsplit("-", 1)[1].split("x"))


def _ceil_blocks(sizes: Sequence[int], block: Sequence[int]) -> Blocks:
    return _three(-(-size // step) for size, step in zip(sizes, block, strict=True))


# -- what the generated code shows ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Product:
    """One product function of a generated program.

    Attributes:
        kernel: micro-kernel and register blocking.
        dtypes: of A, B and the sum.
        threads: that share it.
        m, n, k: sizes; M is 0 where it is known at run time only.
        per_thread: blocks of each thread; ``None`` where the code computes them, or has none.
        cache: cache blocking; ``None`` likewise.
        most_slices: where the code computes its blocks: the most slices of K it may make, 0 for any number.
        grouped: how many products of these sizes, of one A, the function computes.
    """

    kernel: str
    dtypes: str
    threads: int
    m: int
    n: int
    k: int
    per_thread: Blocks | None = None
    cache: Blocks | None = None
    most_slices: int = 1
    grouped: int = 1

    @property
    def slices(self) -> int:
        """Into how many slices K is cut; at most so many where the code computes it."""
        if self.threads == 1:
            return 1
        if self.per_thread is None:
            return min(self.most_slices or self.threads, self.threads)
        blocks = _ceil_blocks((self.m, self.n, self.k), register_block(self.kernel))
        return -(-blocks[2] // self.per_thread[2])

    def __str__(self) -> str:
        """As an outcome keeps it: ``CppMicroGemmRef-1x1x1:f32-f32-f32:20x33x40,...``."""
        sizes = f"{self.m or 'M'}x{self.n}x{self.k}"
        found = [f"{self.kernel}:{self.dtypes}:{sizes}", f"kslices={self.slices}", f"threads={self.threads}"]
        found += [f"{n}={_dots(v)}" for n, v in (("blocks", self.per_thread), ("cache", self.cache)) if v]
        found += [f"grouped={self.grouped}"] if self.grouped > 1 else []
        return ",".join(found)


_NUMBER = r"(?:static_cast<int64_t>\()?(\d+)L?\)?"
_BEGIN = re.compile(
    r"constexpr int64_t num_threads = (\d+);\s*"
    rf"constexpr int64_t N = {_NUMBER};\s*constexpr int64_t K = {_NUMBER};\s*"
    r"constexpr int64_t Mr = (\d+);\s*constexpr int64_t Nr = (\d+);\s*constexpr int64_t Kr = (\d+);"
)
_M = re.compile(rf"constexpr int64_t M = {_NUMBER};")
_BLOCKS = re.compile(r"constexpr int64_t ([MNK][tc])_blocks = (\d+);")
# The sums of each of several products, in a buffer of its own.
_SUMS = re.compile(r"\blocal_acc_buf_(\d+)\b")
_AT_RUN_TIME = re.compile(r"mm_get_thread_blocking\(\s*\w+,\s*(\d+),")
_ENTRY = re.compile(r"inline void \w*?micro_gemm\((?P<arguments>[^)]*)\)")
_POINTER = re.compile(r"(?:const )?([\w:]+)\*\s*(?:__restrict(?:__)?\s+)?([ABC])\s*(?:,|$)", re.MULTILINE)
# Classes of micro-kernels in the order in which they are looked for, dtypes by C++ type, and blockings.
_TABLE: Final = document(Path(__file__).with_name("micro_kernels.toml"))
_MARKS: Final = {one["name"]: re.compile(one["mark"]) for one in _TABLE["class"]}
_UNITS: Final = {one["name"]: one["unit"] for one in _TABLE["class"] if "unit" in one}
_DTYPES: Final = _TABLE["dtypes"]


def products(source: str) -> tuple[Product, ...]:
    """The product functions of a generated program, in the order of its text; none where it has none of the template's.

    A micro-kernel that this module does not know is called ``unknown``, with its register blocking.
    """
    found = []
    kind, dtypes = "unknown", "?"
    begins = list(_BEGIN.finditer(source))
    for index, begin in enumerate(begins):
        end = begins[index + 1].start() if index + 1 < len(begins) else len(source)
        before = source[begins[index - 1].end() if index else 0 : begin.start()]
        # The micro-kernel stands before the function; two functions of a batched product share one.
        if entries := list(_ENTRY.finditer(before)):
            kind = next((name for name, mark in _MARKS.items() if mark.search(before)), "unknown")
            types = {name: _DTYPES.get(text, text) for text, name in _POINTER.findall(entries[-1]["arguments"])}
            dtypes = "-".join(types.get(name, "?") for name in "ABC")
        body = source[begin.end() : end]
        threads, n, k, *block = map(int, begin.groups())
        blocks = {name: int(count) for name, count in _BLOCKS.findall(body)}
        m, late = _M.search(body), _AT_RUN_TIME.search(body)
        split = {"per_thread": _level(blocks, "t"), "cache": _level(blocks, "c")}
        slices, grouped = int(late[1]) if late else 1, max(1, len(set(_SUMS.findall(body))))
        name, rows = kernel_name(kind, block), int(m[1]) if m else 0
        found.append(Product(name, dtypes, threads, rows, n, k, **split, most_slices=slices, grouped=grouped))
    return tuple(found)


def _level(blocks: Mapping[str, int], level: str) -> Blocks | None:
    names = [f"{dimension}{level}" for dimension in "MNK"]
    return _three(blocks[name] for name in names) if set(names) <= set(blocks) else None


def contradiction(found: Sequence[Product], choice: str) -> str:
    """Where generated code is another candidate's than ``choice``, in words; "" where it is the one asked for."""
    asked = split(choice)
    if asked is None or not asked[0] or not found:
        return ""
    base, axes = kernel_of(asked[0]), asked[1]
    mine = [one for one in found if one.kernel == base]
    if not mine:
        return f"the generated code has {', '.join(dict.fromkeys(one.kernel for one in found))}, not {base}"
    types = {one.dtypes for one in mine}
    other = next((one for one in found if one.kernel != base and one.dtypes in types), None)
    if other is not None:
        return f"beside {base} the generated code has {other.kernel} for {other.dtypes}"
    if (GROUPED in asked[0]) != any(one.grouped > 1 for one in mine):
        several = "one product" if GROUPED in asked[0] else "several products"
        return f"each function of the generated code computes {several}, not what {choice} does"
    if axes.threads and (count := math.prod(axes.threads)) not in {one.threads for one in mine}:
        return f"the generated code is for {mine[0].threads} threads, not {count}"
    for one in mine:
        if axes.factors and one.per_thread and one.threads == math.prod(axes.factors):
            blocks = _ceil_blocks((one.m, one.n, one.k), register_block(base))
            if one.per_thread != _ceil_blocks(blocks, axes.factors):
                return f"each thread has {_dots(one.per_thread)} of {_dots(blocks)} blocks, not a part of {choice}"
        if axes.cache and one.cache and one.per_thread:
            m, n, k = map(min, axes.cache, one.per_thread)
            if one.cache != (m, n, k):
                return f"its cache blocks are {_dots(one.cache)}, not {_dots((m, n, k))}"
        if axes.slices and axes.factors is None and one.slices > axes.slices:
            return f"K is cut into {one.slices} slices, and {axes.slices} were allowed"
    return ""


def unmet(found: Sequence[Product], choice: str) -> str:
    """Why a candidate's axes make no difference to the problem at hand, in words; "" where they do."""
    asked = split(choice)
    if asked is None or not found:
        return ""
    _, axes = asked
    if axes.cache and not any(one.cache for one in found):
        return "the code has no cache blocking that could be set: M is dynamic, or it is the template for a small M"
    if axes.factors and not any(one.per_thread for one in found):
        return "the code has no thread blocking that could be set: M is dynamic, or it is the template for a small M"
    if axes.slices is not None and axes.slices != 1 and not any(one.slices > 1 for one in found):
        return "its blocks of M and N occupy the threads, so that Inductor leaves K whole"
    return ""


# -- scripts and machine code --------------------------------------------------------------------------------


def registering(kernel: str) -> tuple[str, ...]:
    """Statements of a script that leave one micro-kernel and register blocking registered, or none of them."""
    kind, block = kernel.partition("-")[0], register_block(kernel)
    return (
        "import torch._inductor.compile_fx  # first: what is below it imports each other in a circle",
        "from torch._inductor.codegen import cpp_micro_gemm as micro  # leave one register blocking registered",
        f"kept = {{kind: [c for c in configs if kind.__name__ == {kind!r} and c.register_blocking == {block}]",
        "        for kind, configs in micro.micro_gemm_configs.items()}",
        "micro.micro_gemm_configs = kept",
    )


def needing(generation: Generation, candidates: Iterable[str]) -> Generation:
    """With the units that the machine code of these candidates has to use."""
    vectors = "zmm" if ISAS.index(generation.asked) >= ISAS.index("avx512") else "ymm"
    units = ((name, _UNITS.get(name.partition("-")[0], vectors)) for name in candidates)
    return dataclasses.replace(generation, needed=tuple((name, unit) for name, unit in units if unit))
