"""The rules of ``backends/rules.toml``: that each can be read, and that some backend reads it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pytest_gemm.api import settings
from pytest_gemm.api.request import DEFAULT
from pytest_gemm.backends import rules
from pytest_gemm.backends.cutlass.backend import CutlassBackend
from pytest_gemm.backends.inductor import torch_compat
from pytest_gemm.problem.problem import Problem

RULES = [(name, rule) for name, group in rules.groups().items() for rule in group]
BACKENDS = Path(rules.__file__).parent


@pytest.mark.parametrize(("group", "rule"), RULES)
def test_a_rule_has_texts_and_known_conditions(group: str, rule: dict[str, Any]) -> None:
    """A misspelt condition is found here and not by the first problem that comes to it."""
    assert {"code", "text"} <= rule.keys(), group
    conditions = rule.keys() - rules._REASON
    assert conditions
    assert {name.removeprefix("not_") for name in conditions} <= rules._CONDITIONS.keys()
    assert rule.get("when") in {None, *rules._WHEN}


def test_every_group_is_read_by_a_backend() -> None:
    """The name of each group stands in a backend."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in BACKENDS.rglob("*.py"))
    assert set(rules.groups()) <= set(re.findall(r'"([\w-]+)"', code))


@pytest.mark.parametrize(("blocks", "m", "taken"), [
    ("", 20, True), ("", 17, False), ("", 1, False), ("-1_1", 1, True), ("-1_1", 2, False), ("-128_1", 17, True),
])  # fmt: skip
def test_cublas_takes_scales_of_rows_by_four(blocks: str, m: int, taken: bool) -> None:
    """As seen on an H100 with torch 2.11."""
    problem = Problem.parse(f"scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:{m}x256x512:quant.blocks{blocks}")
    refused = rules.check(("aten-by-cublas",), problem, DEFAULT)
    assert (refused is None or "multiple of 4" not in str(refused)) is taken


@pytest.mark.parametrize(("flags", "taken"), [(":b.alias_t", True), (":a.offset", False), (":b.offset", False)])
def test_cublas_takes_int8_at_multiples_of_four_bytes(flags: str, taken: bool) -> None:
    refused = rules.check(("aten-on-cuda",), Problem.parse(f"int_mm:i8-i8-i32:nt:64x64x64{flags}"), DEFAULT)
    assert (refused is None) is taken


def test_the_texts_name_what_was_found() -> None:
    """The flag stands in the remedy; rules are read in order, and none holds for a plain product."""
    refused = rules.check(("tma", "compact"), Problem.parse("mm:bf16:nt:16x16x16:a.offset:b.padded"), DEFAULT)
    assert refused is not None
    assert (refused.reason.code, refused.reason.remedy) == ("alignment", "drop a.offset")
    refused = rules.check(("tma",), Problem.parse("mm:bf16:nt:16x20x16"), DEFAULT)
    assert refused is not None
    assert refused.reason.text == "rows of the result are 20 elements long: TMA needs a multiple of 8 (16 bytes)"
    assert rules.check(("tma", "compact"), Problem.parse("mm:bf16:nt:16x16x16"), DEFAULT) is None


@pytest.mark.parametrize(("line", "code"), [
    ("mm:f32:nt:7x9x24:sums-k", "no-product"), ("mm:f32:nt:7x9x24:sums-k:program.multi_output", ""),
    ("mm:f32:nt:7x9x24:sums-m", ""), ("linear:f16:nt:5x1x129x33:a.sliced", "a-strided"),
    ("linear:f32:nt:1x17x1x33:a.padded", "a-strided"), ("linear:bf16:nt:1x17x33x1:a.strided", "a-strided"),
    ("linear:f16:nt:1x17x129x33:a.padded", ""), ("linear:f16:nt:1x1x33x1:a.padded", ""),
])  # fmt: skip
def test_what_never_comes_to_a_c_plus_plus_template(line: str, code: str) -> None:
    refused = rules.check(("inductor", "cpp-product"), Problem.parse(line), DEFAULT)
    assert (refused.reason.code if refused else "") == code


@pytest.mark.parametrize(("release", "line", "is_decomposed"), [
    ((2, 11), "mm:f32:nn:1x2x1", True), ((2, 11), "linear:f32:nt:2x1x1x1", True), ((2, 11), "mm:f32:nn:1x40x1", False),
    ((2, 13), "mm:f32:nn:1x2x1", False), ((2, 13), "mm:f32:nn:3x2x1", True),
])  # fmt: skip
def test_an_outer_product_of_one_row_was_decomposed_before_2_13(
    release: tuple[int, int], line: str, is_decomposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_compat, "torch_release", lambda: release)
    assert bool(rules.decomposed(Problem.parse(line), "cpu")) is is_decomposed


@pytest.mark.parametrize("line", ["linear:f16:nt:33x48x30", "int_mm:i8-i8-i32:nt:17x16x65608"])
def test_rows_that_tma_cannot_load_are_for_kernels_that_copy_otherwise(line: str) -> None:
    backend, problem = CutlassBackend(), Problem.parse(line)
    refusal = backend.supports(problem)
    assert refusal is not None
    assert refusal.reason.code == "alignment"
    for allowed in ("cpasync", "."):
        settings.configure(backend, {"allow": allowed})
        assert backend.supports(problem) is None
    settings.configure(backend, {"allow": "stream_k.*epi_tma"})
    assert backend.supports(problem) is not None
