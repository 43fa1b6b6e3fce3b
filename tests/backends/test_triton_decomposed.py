"""Which problems meet decompose-K where one candidate of each problem is compiled."""

from __future__ import annotations

import zlib

from pytest_gemm.backends.triton import TritonBackend
from pytest_gemm.conformance import matrix
from pytest_gemm.problem.problem import Problem


def splits(line: str, by_line: int) -> object:
    return dict(TritonBackend().space_of_one(Problem.parse(line), by_line).options).get(
        "triton.num_decompose_k_splits", 0
    )


def test_every_second_long_product_is_decomposed() -> None:
    assert [splits("mm:bf16:nt:16x16x4096", number) for number in range(4)] == [0, 10, 0, 10]


def test_what_inductor_does_not_decompose_is_left_to_templates() -> None:
    for line in ("mm:bf16:nt:16x256x4096", "addmm:bf16:nn:16x16x4096:bias", "bmm:bf16:nn:2x16x16x4096"):
        assert not splits(line, 1)


def test_the_quick_level_has_some_of_both() -> None:
    backend = TritonBackend()
    seen = [
        splits(p.line, zlib.crc32(p.line.encode())) for p in matrix.products("quick") if backend.supports(p) is None
    ]
    long = [p for p in matrix.products("quick") if splits(p.line, 1) and backend.supports(p) is None]
    assert 3 <= sum(map(bool, seen)) < len(long)
