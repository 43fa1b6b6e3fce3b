"""Layers of models as problems: their sizes, and what the level that they make holds."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from pytest_gemm.conformance import matrix, models
from pytest_gemm.problem.problem import Problem

DEVICES = ("cpu", "cuda")


def sizes_of(model: str, kind: str, devices: int) -> set[tuple[int, int, int]]:
    """Experts, N and K of each device's part."""
    asked = (model, kind, devices)
    return {(p.e, p.n, p.k) for p in models.parts() if (p.model, p.kind, p.devices) == asked}


# By hand from the published configurations.
PUBLISHED = [
    ("llama-3-8b", "kv", 1, {(1, 1024, 4096)}),
    ("llama-3-8b", "kv", 8, {(1, 128, 4096)}),
    ("llama-3-8b", "down", 8, {(1, 4096, 1792)}),
    ("llama-3-70b", "gate", 1, {(1, 28672, 8192)}),
    ("llama-3-70b", "gate", 8, {(1, 3584, 8192)}),
    ("llama-3-70b", "o", 8, {(1, 8192, 1024)}),
    ("qwen-3-32b", "o", 1, {(1, 5120, 8192)}),
    ("deepseek-v3", "latent", 1, {(1, 1536, 7168), (1, 576, 7168)}),
    ("deepseek-v3", "latent", 8, set()),  # each device computes all of it
    ("deepseek-v3", "q", 8, {(1, 3072, 1536)}),
    ("deepseek-v3", "o", 8, {(1, 7168, 2048)}),
    ("deepseek-v3", "heads", 8, {(16, 512, 128), (16, 128, 512)}),
    ("mixtral-8x7b", "experts_down", 1, {(8, 4096, 14336), (2, 4096, 14336)}),
    ("mixtral-8x7b", "experts_up", 8, {(8, 1792, 4096), (2, 1792, 4096)}),
    ("gpt-oss-120b", "experts_up", 8, {(e, 720, 2880) for e in (128, 32, 8, 2)}),
    ("bert-large", "up", 1, {(1, 4096, 1024)}),
    ("gemma-3-27b", "head", 8, {(1, 32776, 5376)}),
]


@pytest.mark.parametrize(("model", "kind", "devices", "sizes"), PUBLISHED)
def test_a_device_has_its_part_of_the_published_layer(
    model: str, kind: str, devices: int, sizes: set[tuple[int, int, int]]
) -> None:
    assert sizes_of(model, kind, devices) == sizes


@pytest.mark.parametrize("model", models.read().model, ids=lambda model: model.name)
def test_the_layers_are_those_of_the_configuration_that_the_model_names(model: models.Model) -> None:
    named = {word: int(size) for word, size in re.findall(r"(hidden|MLP|vocabulary) (\d+)", model.help)}
    sizes: dict[str, set[tuple[int, int]]] = {}
    for kind, layers in model.layers.items():
        pairs = [layer.partition(":")[0].split("x")[-2:] for layer in layers.split()]
        sizes[kind] = {(int(n), int(k)) for n, k in pairs}
    if (hidden := named.get("hidden")) is not None:
        into = {"gate", "up", "router", "head", "experts_up"} & sizes.keys()
        assert {k for kind in into for _, k in sizes[kind]} == {hidden}
        assert {n for kind in {"o", "down", "experts_down"} & sizes.keys() for n, _ in sizes[kind]} == {hidden}
    if (wide := named.get("MLP")) is not None:
        assert wide in {n for kind in {"gate", "up"} & sizes.keys() for n, _ in sizes[kind]}
        assert wide in {k for _, k in sizes["down"]}
    if "vocabulary" in named:
        assert {n for n, _ in sizes["head"]} == {named["vocabulary"]}


def test_a_part_has_the_layers_own_steps_and_what_is_added_is_added_to_the_sum_of_all_parts() -> None:
    steps = {(p.devices, p.steps) for p in models.parts() if (p.model, p.kind) == ("gpt-oss-20b", "o")}
    assert steps == {(1, "bias+add"), (2, ""), (4, ""), (8, "")}
    asked = [p for p in models.parts() if p.kind == "gate" and p.m == 1 and p.devices == 8 and "gemma-3-12b" in p.model]
    lines = {p.form: str(p.problem()) for p in asked}
    assert lines["bf16"] == "linear:bf16:nt:1x1920x3840:gelu_tanh+mul"
    assert lines["gated"] == "linears:bf16:nt:2x1x1920x3840:gated-gelu_tanh"
    assert lines["int8-static"] == "qlinear:u8-i8-bf16:nt:1x1920x3840:quant.static:a.7bit"  # it has no such steps
    assert lines["int4-128"] == "woq_int4:bf16-i4-bf16:nt:1x1920x3840:gelu_tanh+mul:quant.group"


def test_every_form_is_a_problem_for_every_kind_that_it_names() -> None:
    """A template that no layer fits would be left out in silence."""
    file = models.read()
    kinds = {kind for model in file.model for kind in model.layers}
    assert kinds == {kind for forms in file.forms for kind in forms.kinds} >= set(file.divided)
    wanted = {(form, kind) for forms in file.forms for form in forms.lines for kind in forms.kinds}
    for part in models.parts():
        if (part.form, part.kind) in wanted and part.problem() is not None:
            wanted.discard((part.form, part.kind))
    assert not wanted


def sizes(problem: Problem) -> tuple[int, int]:
    return problem.shape.n, problem.shape.k


@pytest.mark.parametrize("device", DEVICES)
def test_the_level_covers_what_fits_a_device(device: str) -> None:
    chosen = models.chosen(device)
    met = {pair for p in chosen for pair in ((p.model, p.kind), (p.form, p.kind), (p.form, p.tokens))}
    met |= {("devices", str(part.devices)) for part in chosen}
    file = models.read()
    wanted = {(form, kind) for forms in file.forms for form in forms.lines for kind in forms.kinds}
    wanted |= {("devices", str(n)) for n in (1, 2, 4, 8)}
    wanted |= set(itertools.product((form for forms in file.forms for form in forms.lines), file.tokens))
    wanted |= {(model.name, kind) for model in file.model for kind in model.layers}
    missing = wanted - met
    if device == "cpu":  # the heads of 64 million elements and more, on each of 8 devices, and Llama 70B's MLP
        missing -= {(model.name, "head") for model in file.model}
        missing -= {("llama-3-70b", "gate"), ("llama-3-70b", "down")}
    assert not missing


def test_every_op_of_a_model_is_met_with_n_and_k_of_a_layer() -> None:
    for device in DEVICES:
        chosen = models.selection(device)
        ops = {part.template.partition(":")[0] for part in models.parts()}
        large = {p.op.name for p in chosen if min(sizes(p)) >= models.LARGE}
        assert ops - large <= {"bmm"}, device  # heads have 128 and 512
    assert len(ops) >= 16


def test_the_level_is_apart() -> None:
    cpu, cuda, both = (set(matrix.products("models", device)) for device in ("cpu", "cuda", ""))
    assert both == cpu | cuda
    assert 100 <= len(cpu) <= 200
    assert not any(problem in both for problem in matrix.products("huge"))


def test_every_change_meets_a_layer_of_each_kind_and_the_shapes_of_the_field() -> None:
    quick = matrix.products("quick")
    large = [p for p in quick if min(sizes(p)) >= models.LARGE]
    assert {p.op.name for p in large} >= {
        "linear", "linears", "grouped_mm", "scaled_mm", "qlinear", "da8w8", "woq_int8", "woq_int4",
    }  # fmt: skip
    assert {step.name for p in large for step in p.quant} >= {"rowwise", "blocks", "mx", "group", "static"}
    columns = [p for p in quick if (bias := p.step("bias")) and bias.text == "m1" and p.shape.m == p.shape.n]
    assert {str(p.dtypes) for p in columns} >= {"f32", "bf16"}
    skinny = [p for p in quick if p.shape.m <= 8 and p.shape.n <= 64 and p.shape.k in {5120, 12800, 14336}]
    assert {p.dtypes.a.name for p in skinny} == {"bf16", "f16", "f8e4m3fn"}


def test_a_draw_follows_from_its_seed() -> None:
    def drawn(seed: int) -> list[str]:
        source = random.Random(seed)
        return [models.draw(source, "cpu").line for _ in range(50)]

    first = drawn(1)
    assert first == drawn(1)
    assert first != drawn(2)
    assert [Problem.parse(line).line for line in first] == first
    assert len(set(first)) > 45
    assert len({line.partition(":")[0] for line in first}) >= 8
