"""Which tests a shard has: all shards divide alike, and none judges the run as a whole."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from pytest_gemm import verdict
from pytest_gemm.plugin import selection
from pytest_gemm.plugin.division import divide
from pytest_gemm.record import reader

IDS = [
    f"test_it.py::test_{test}[{backend}-{op}:f32:nn:{m}x8x8]"
    for test in ("product", "property")
    for op, sizes in (("mm", range(12)), ("bmm", ("2x1", "2x2")))
    for backend in ("aten", "cpp")
    for m in sizes
]
IDS.append("test_it.py::test_plain")


def case(nodeid: str) -> Any:
    return selection.case_id(nodeid)


def test_every_test_is_in_one_shard_whatever_the_order() -> None:
    found = divide(IDS, 3)
    assert found.keys() == set(IDS)
    assert set(found.values()) == {1, 2, 3}
    for seed in range(5):
        assert divide(random.Random(seed).sample(IDS, len(IDS)), 3) == found


def test_a_problem_stays_together_and_ops_are_divided_evenly() -> None:
    found = divide(IDS, 3)
    shards: dict[str, set[int]] = {}
    for nodeid, number in found.items():
        if (one := case(nodeid)) is not None:
            shards.setdefault(one.problem, set()).add(number)
    assert all(len(numbers) == 1 for numbers in shards.values())
    mm = Counter(number for problem, (number,) in shards.items() if problem.startswith("mm:"))
    assert max(mm.values()) - min(mm.values()) <= 1


CONFTEST = """
    def mine(a, b):
        return (a.float() @ b.float()).to(a.dtype)

    def pytest_gemm_register_backends(registry):
        registry.add_callable("mine", mine)
"""
TEST = """
    import pytest

    @pytest.mark.gemm(problems=["mm:f32:nn:4x8x8", "mm:f32:nn:5x8x8", "mm:bf16:nn:6x8x8", "bmm:f32:nn:2x4x8x8"])
    def test_product(gemm_case, gemm_check):
        gemm_check(gemm_case)

    def test_plain():
        pass
"""
LEDGER = """
[[known-failure]]
id = "fixed"
backend = "mine"
reason = "it was wrong"
where = { op = "mm" }
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TEST)
    return pytester


def run(project: pytest.Pytester, *args: str) -> pytest.RunResult:
    return project.runpytest_inprocess("-p", "no:cacheprovider", "--gemm-backends=mine", "--gemm-threads=1", *args)


def shard(project: pytest.Pytester, *args: str) -> dict[str, Any]:
    """What the record of a shard says of it."""
    result = run(project, "--gemm-output=out", "--gemm-distributions=rand", *args)
    assert result.ret == 0
    found = reader.read(project.path / "out")
    return {
        "red": verdict.causes(found),
        "collected": result.parseoutcomes().get("passed", 0),
        "places": found.totals.places,
        **vars(found.totals.division),
    }


def test_shards_are_green_by_themselves(project: pytest.Pytester) -> None:
    """The stale entry is of the whole run, and so is a backend that one shard does not judge."""
    (project.path / "known.toml").write_text(LEDGER)
    ledger = "--gemm-known-failures=known.toml"
    found = [shard(project, f"--gemm-shard={number}/3", ledger) for number in (1, 2, 3)]
    assert [one["red"] for one in found] == [[], [], []]
    assert sum(one["collected"] for one in found) == 5
    assert {one["tests"] for one in found} == {5}
    assert len({one["digest"] for one in found}) == 1
    places = [place for one in found for place in one["places"]]
    assert sorted(places) == [place for place in range(5) if place in places]
    assert len(places) == len(set(places)) == 4


def test_a_shard_without_a_test_is_green(project: pytest.Pytester) -> None:
    found = [shard(project, f"--gemm-shard={number}/9", "-k", "not bf16") for number in (1, 9)]
    assert [one["collected"] for one in found] == [1, 0]
    assert {one["tests"] for one in found} == {4}


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_workers_divide_alike(project: pytest.Pytester) -> None:
    alone = shard(project, "--gemm-shard=1/2")
    workers = shard(project, "--gemm-shard=1/2", "-n2")
    assert alone["digest"] == workers["digest"]
    assert sorted(alone["places"]) == sorted(workers["places"])
    assert alone["tests"] == workers["tests"] == 5


@pytest.mark.parametrize("value", ["3", "0/3", "4/3", "1/2000"])
def test_a_wrong_shard_is_a_usage_error(project: pytest.Pytester, value: str) -> None:
    result = run(project, f"--gemm-shard={value}")
    assert result.ret == 4
    result.stderr.fnmatch_lines([f"*--gemm-shard={value}: give K/N, 2/3 for shard 2 of 3*"])


def test_timed_tests_are_not_divided(project: pytest.Pytester) -> None:
    project.makepyfile(test_it=TEST.replace("gemm_case, gemm_check", "gemm_case, gemm_speed"))
    result = run(project, "--gemm-shard=1/2")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*--gemm-shard=1/2: timed tests are not divided*"])
