"""Names of candidates: unique, stable, and made of characters that a shell and a pattern take as they are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence


def plain(text: str) -> str:
    """``text`` with every run of other characters than letters, digits and ``. _ = , + : @ % / -`` as one dash.

    What is left needs no quotes in a shell, and none of it means anything in a shell pattern.
    """
    return re.sub(r"[^A-Za-z0-9._=,+:@%/-]+", "-", text).strip("-")


def unique(candidates: Iterable[tuple[str, Mapping[str, object]]]) -> tuple[str, ...]:
    """One name for each candidate, no two alike, in the order given.

    A name that several candidates have is followed by as few of their facts as tell them apart, in the order in which
    the facts are given: ``triton_mm-64x64x32,s2,w4,GROUP_M=4``.  Candidates that no fact tells apart are counted:
    the second one is ``...@2``.

    Args:
        candidates: base name and further facts of each.
    """
    given = [(plain(base), facts) for base, facts in candidates]
    groups: dict[str, list[Mapping[str, object]]] = {}
    for base, facts in given:
        groups.setdefault(base, []).append(facts)
    telling = {base: _telling(group) for base, group in groups.items()}
    count: Counter[str] = Counter()
    names = []
    for base, facts in given:
        parts = [plain(f"{key}={facts[key]}") for key in telling[base] if key in facts]
        name = ",".join([base, *parts])
        count[name] += 1
        names.append(name if count[name] == 1 else f"{name}@{count[name]}")
    return tuple(names)


def _telling(group: Sequence[Mapping[str, object]]) -> list[str]:
    """Keys of which each splits the group further than those before it."""
    chosen: list[str] = []
    parts = 1
    for key in dict.fromkeys(key for facts in group for key in facts):
        split = len({tuple(str(facts.get(name)) for name in (*chosen, key)) for facts in group})
        if split > parts:
            chosen.append(key)
            parts = split
    return chosen


_TRITON = re.compile(r"(?P<template>triton_\w+)-(?P<tile>\d+x\d+x\d+),s(?P<stages>\d+),w(?P<warps>\d+)(?P<more>[^@]*)")
_CUTLASS = re.compile(r"(?P<name>cutlass\w+),swizzle=(?P<swizzle>\d+)")
_NVGEMM = re.compile(r"(?:cutedsl|inductor_vendored)\.\w+")


def forcing(name: str) -> dict[str, str]:
    """Options of Inductor that leave no other candidate than the one of this name, for a program of one product.

    Empty where options leave nothing out: a micro-kernel of the C++ templates is chosen by what is registered.
    """
    names, descriptions = "test_configs.autotune_choice_name_regex", "test_configs.autotune_choice_desc_regex"
    if found := _TRITON.fullmatch(name):
        facts = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), found["tile"].split("x"), strict=True))
        facts |= {"num_stages": found["stages"], "num_warps": found["warps"]}
        facts |= dict(part.split("=") for part in found["more"].split(",") if "=" in part)
        # A description lists them as NAME=value or NAME='value'; the order is Inductor's.
        wanted = "".join(rf"(?=.*\b{key}='?{re.escape(value)}\b)" for key, value in facts.items())
        return {names: rf"^{found['template']}_\d+$", descriptions: wanted}
    if found := _CUTLASS.fullmatch(name):
        return {descriptions: rf"^{found['name']} swizzle={found['swizzle']}$"}
    if _NVGEMM.fullmatch(name):
        # The description goes on with "swap_ab" or "bias" where the operator's use is another one.
        return {descriptions: rf"^nv_universal\w* {re.escape(name)}$"}
    if name.startswith("decompose_k"):
        return {names: rf"^{re.escape(name)}(_\d+)?$"}
    return {}
