"""What is written out when a backend is registered has a case at every level, and what is wrong there fails."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gemm.api.registry import Registry
from pytest_gemm.config.config import GemmConfig
from pytest_gemm.conformance import matrix
from pytest_gemm.plugin import selection
from pytest_gemm.record.lines import Head, Totals
from pytest_gemm.record.reader import Run
from pytest_gemm.report import merge


def product(a: Any, b: Any, *_: Any) -> Any:
    return a @ b


def lines(level: str, **how: Any) -> list[str]:
    registry = Registry()
    registry.add_callable("mine", product, **how)
    request = selection.Request(problems=matrix.products, any_problem=True)
    return [one.case.problem for one in selection.select(request, GemmConfig(registry, (*registry,), level=level))]


CLAMPED: dict[str, Any] = {"dtypes": ("f16",), "linear": product, "activations": ("clamp-0_3",)}


@pytest.mark.parametrize(
    ("level", "how", "start"),
    [
        ("smoke", {"dtypes": ("f16",)}, "mm:f16:nn:17x65x127"),
        ("smoke", {"dtypes": ("f64",), "batched": False}, "mm:f64:nn:17x65x127"),
        ("smoke", {"dtypes": ("f8e5m2",), "bind": product}, "f8e5m2-"),
        ("smoke", {"bind": product}, "linear:f16:nt:17x65x127:bias+gelu"),
        ("smoke", {"bind": product}, "grouped_mm_k:"),
        *((level, CLAMPED, "linear:f16:nt:17x65x127:bias+clamp-0_3") for level in ("smoke", "quick")),
    ],
)
def test_a_level_has_a_problem_of_each_part(level: str, how: dict[str, Any], start: str) -> None:
    assert any(start in line for line in lines(level, **how))
    assert level != "smoke" or not any(start in line for line in lines(level, dtypes=("i32",)))


def test_what_is_registered_by_default_adds_nothing_to_quick() -> None:
    assert lines("quick") == [problem.line for problem in matrix.products("quick", "cpu")]


def test_a_backend_that_auto_leaves_out_gets_its_share_unless_backends_are_named() -> None:
    registry = Registry()
    for name in ("usual", "apart"):
        registry.add_callable(name, product)
    request = selection.Request(
        problems=["mm:f32:nn:8x8x8"], shares={"apart": lambda level: [f"mm:f32:nn:{len(level)}x8x8"]}
    )

    def cases(*backends: str, named: bool = False) -> set[str]:
        config = GemmConfig(registry, tuple(map(registry.named, backends)), level="quick", named=named)
        return {f"{one.case.backend} {one.case.problem}" for one in selection.select(request, config)}

    usual, share, whole = "usual mm:f32:nn:8x8x8", "apart mm:f32:nn:5x8x8", "apart mm:f32:nn:8x8x8"
    assert cases("usual") == {usual, share}
    assert cases("usual", named=True) == {usual}
    assert cases("usual", "apart", named=True) == {usual, whole}


def test_a_bias_that_is_dropped_is_found_by_smoke(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("""
        def right(a, b, bias=None, activation=None):
            c = a @ b if bias is None else a @ b + bias
            return c.relu() if activation else c

        def drops(a, b, bias=None, activation=None):
            return right(a, b, None, activation)

        def pytest_gemm_register_backends(registry):
            for function in (right, drops):
                how = {"linear": function, "activations": ("relu",), "epilogue": "either"}
                registry.add_callable(function.__name__, function, dtypes=("f32",), batched=False, **how)
    """)
    suite = ("--pyargs", "pytest_gemm.conformance.test_products", "--gemm-level=smoke", "--gemm-ops=linear")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--gemm-backends=right,drops", *suite)
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["incorrect: bias missing: linear:f32:nt:17x65x127:bias on drops: *"])


def test_a_part_that_one_shard_has_called_is_called() -> None:
    shards = [
        Run(Head(shard=number, shards=3), totals=Totals(asked={"mine"} - unasked, uncalled={"mine": left}))
        for number, (unasked, left) in enumerate([({"mine"}, []), (set(), ["bind=", "f16"]), (set(), ["f16", "x"])], 1)
    ]
    assert merge.concatenated(shards).totals.uncalled == {"mine": ["f16"]}
