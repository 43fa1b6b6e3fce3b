"""Layers of models as problems: their sizes, and what the level that they make holds."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from pytest_gemm.conformance import matrix, models
from pytest_gemm.problem.problem import Problem

FILE = models.read()
SERVED = {(form, kind) for kinds, forms in FILE.forms.items() for form in forms for kind in kinds.split()}

# Experts or heads, N and K of each device's part, by hand from the published configurations.
PUBLISHED = [
    ("llama-3-8b", "kv", 1, {(1, 1024, 4096)}),
    ("llama-3-8b", "kv", 8, {(1, 128, 4096)}),
    ("llama-3-8b", "down", 8, {(1, 4096, 1792)}),
    ("llama-3-70b", "gate", 8, {(1, 3584, 8192)}),
    ("qwen-3-32b", "o", 1, {(1, 5120, 8192)}),
    ("deepseek-v3", "latent", 1, {(1, 1536, 7168), (1, 576, 7168)}),
    ("deepseek-v3", "latent", 8, set()),  # each device computes all of it
    ("deepseek-v3", "o", 8, {(1, 7168, 2048)}),
    ("deepseek-v3", "heads", 8, {(16, 512, 128), (16, 128, 512)}),
    ("mixtral-8x7b", "experts_down", 1, {(8, 4096, 14336), (2, 4096, 14336)}),
    ("gpt-oss", "experts_up", 8, {(e, 720, 2880) for e in (128, 32, 8, 2)}),
    ("bert-large", "up", 1, {(1, 4096, 1024)}),
]


@pytest.mark.parametrize(("model", "kind", "devices", "sizes"), PUBLISHED)
def test_a_device_has_its_part_of_the_published_layer(
    model: str, kind: str, devices: int, sizes: set[tuple[int, int, int]]
) -> None:
    asked = (model, kind, devices)
    assert {(p.e, p.n, p.k) for p in models.parts() if (p.model, p.kind, p.devices) == asked} == sizes


@pytest.mark.parametrize("name", FILE.model)
def test_the_layers_are_those_of_the_configuration_that_the_model_names(name: str) -> None:
    named = {word: int(size) for word, size in re.findall(r"(hidden|MLP|vocabulary) (\d+)", FILE.model[name].help)}
    pairs = {
        (kind, *map(int, layer.partition(":")[0].split("x")[-2:]))
        for kind, layers in FILE.model[name].layers.items()
        for layer in layers.split()
    }
    hidden = [k for kind, _, k in pairs if kind in {"gate", "up", "router", "head", "experts_up"}]
    hidden += [n for kind, n, _ in pairs if kind in {"o", "down", "experts_down"}]
    assert set(hidden) == {named["hidden"]}
    assert "MLP" not in named or {("down", named["hidden"], named["MLP"])} <= pairs
    assert "MLP" not in named or {("gate", *(sizes := (named["MLP"], named["hidden"]))), ("up", *sizes)} & pairs
    assert "vocabulary" not in named or ("head", named["vocabulary"], named["hidden"]) in pairs


def test_a_part_has_the_layers_own_steps_and_what_is_added_is_added_to_the_sum_of_all_parts() -> None:
    steps = {(p.devices, p.steps) for p in models.parts() if (p.model, p.kind) == ("gpt-oss", "o")}
    assert steps == {(1, "bias+add"), (2, ""), (4, ""), (8, "")}
    asked = ("gemma-3-12b", "gate", 8, 1)
    lines = {p.form: str(p.problem()) for p in models.parts() if (p.model, p.kind, p.devices, p.m) == asked}
    assert lines["bf16"] == "linear:bf16:nt:1x1920x3840:gelu_tanh+mul"
    assert lines["gated"] == "linears:bf16:nt:2x1x1920x3840:gated-gelu_tanh"
    assert lines["int8-static"] == "qlinear:u8-i8-bf16:nt:1x1920x3840:quant.static:a.7bit"  # it has no such steps


def test_every_kind_of_layer_is_served_in_every_form_that_names_it() -> None:
    """A template that no layer fits would be left out in silence."""
    assert {kind for model in FILE.model.values() for kind in model.layers} == {kind for _, kind in SERVED}
    assert set(FILE.divided) <= {kind for _, kind in SERVED}
    wanted = set(SERVED)
    for part in models.parts():
        if (part.form, part.kind) in wanted and part.problem() is not None:
            wanted.discard((part.form, part.kind))
    assert not wanted


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_level_covers_what_fits_a_device(device: str) -> None:
    chosen = models.chosen(device)
    met = {pair for p in chosen for pair in ((p.model, p.kind), (p.form, p.kind), (p.form, p.tokens), p.devices)}
    wanted = {1, 2, 4, 8, *SERVED, *itertools.product((form for form, _ in SERVED), FILE.tokens)}
    wanted |= {(name, kind) for name, model in FILE.model.items() for kind in model.layers}
    if device == "cpu":  # heads of 16 million elements and more on each of 8 devices, and Llama 70B's MLP
        wanted -= {("llama-3-70b", "gate"), ("llama-3-70b", "down"), *((name, "head") for name in FILE.model)}
    assert wanted <= met
    ops = {problem.op.name for problem in chosen.values()}
    # Each head has 128 and 512.
    assert ops - {p.op.name for p in chosen.values() if min(p.shape.n, p.shape.k) >= models.LARGE} == {"bmm"}
    assert len(ops) == 18


def test_the_level_is_apart() -> None:
    cpu, cuda, both = (set(matrix.products("models", device)) for device in ("cpu", "cuda", ""))
    assert both == cpu | cuda
    assert 100 <= len(cpu) <= 200
    assert not both & set(matrix.products("huge"))


def test_every_change_meets_a_layer_of_each_kind_and_the_shapes_of_the_field() -> None:
    quick = matrix.products("quick")
    large = [p for p in quick if min(p.shape.n, p.shape.k) >= models.LARGE]
    ops = {"linear", "linears", "grouped_mm", "scaled_mm", "qlinear", "da8w8", "woq_int8", "woq_int4"}
    assert {p.op.name for p in large} >= ops
    assert {step.name for p in large for step in p.quant} >= {"rowwise", "blocks", "group", "static"}
    columns = [p for p in quick if (bias := p.step("bias")) and bias.text == "m1" and p.shape.m == p.shape.n]
    assert {str(p.dtypes) for p in columns} >= {"f32", "bf16"}
    skinny = [p for p in quick if p.shape.m <= 8 and p.shape.n <= 64 and p.shape.k >= models.LARGE]
    assert {p.dtypes.a.name for p in skinny} >= {"bf16", "f16", "f8e4m3fn", "i8", "u8"}


def test_a_draw_follows_from_its_seed() -> None:
    sources = map(random.Random, (1, 1, 2))
    first, again, other = ([models.draw(source, "cpu").line for _ in range(50)] for source in sources)
    assert first == again != other
    assert [Problem.parse(line).line for line in first] == first
    assert len(set(first)) > 45
    assert len({line.partition(":")[0] for line in first}) >= 8
