"""Which of the collected tests a shard has, ``--gemm-shard=K/N``.

All shards collect the same tests and divide them alike, whatever their order.  What shares operands and a reference
stays together, as it stays on one worker of pytest-xdist.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Final

import pytest

from pytest_gemm.config.config import CONFIG
from pytest_gemm.plugin import selection, xdist
from pytest_gemm.record.lines import Division, plain, typed
from pytest_gemm.record.writer import Writer
from pytest_gemm.run import timeline

_SENT: Final = "gemm_division"


def divide(ids: Iterable[str], total: int) -> dict[str, int]:
    """The number of each test's shard, from 1 on.

    Each shard gets as many groups of each op with the same backends.

    Args:
        ids: of all tests.
        total: number of shards.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for nodeid in sorted(ids):
        groups[xdist.scope(nodeid)].append(nodeid)
    # Groups of one kind cost alike, and are dealt out in the order of a hash: every third of the alphabet may be large.
    ordered = sorted(groups.items(), key=lambda item: (_kind(item[1]), _hash(item[0])))
    return {nodeid: i % total + 1 for i, (_, tests) in enumerate(ordered) for nodeid in tests}


def _kind(tests: Sequence[str]) -> tuple[str, ...]:
    """What groups of tests have in common that cost about the same: op and backends, or the file."""
    cases = [case for case in map(selection.case_id, tests) if case is not None]
    ops = {case.problem.partition(":")[0] for case in cases}
    return (*sorted(ops), *sorted({case.who for case in cases})) or (tests[0].partition("::")[0],)


def _digest(numbers: Mapping[str, int]) -> str:
    """Of the tests and their shards, without the folders that they lie in."""
    return _hash("\n".join(sorted(f"{number} {timeline.name_of(nodeid)}" for nodeid, number in numbers.items())))[:16]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# -- the hooks -------------------------------------------------------------------------------------------------------


def register(config: pytest.Config, writer: Writer) -> None:
    """Have pytest run the tests of one shard where ``--gemm-shard`` asks for that."""
    settings = config.stash[CONFIG]
    if settings.shard is not None:
        config.pluginmanager.register(_Shard(writer, *settings.shard), "gemm-shard")


class _Shard:
    """The hooks of a run of one shard."""

    def __init__(self, writer: Writer, number: int, total: int) -> None:
        self._writer, self._number, self._total = writer, number, total

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
        """Leave out the tests of the other shards, after all other selection."""
        yield
        if any(map(selection.timed, items)):
            items.clear()  # pytest ends the collection before it shows the error, and they would be timed there
            raise pytest.UsageError(
                f"--gemm-shard={self._number}/{self._total}: timed tests are not divided, for a baseline is of one "
                "machine; leave out the option, or the timed tests"
            )
        numbers = divide([item.nodeid for item in items], self._total)
        places = {item.nodeid: i for i, item in enumerate(items) if numbers[item.nodeid] == self._number}
        self._know(places, Division(_digest(numbers), len(items)))
        gone = [item for item in items if item.nodeid not in places]
        if gone:
            items[:] = [item for item in items if item.nodeid in places]
            config.hook.pytest_deselected(items=gone)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send what is known of the whole from a worker of pytest-xdist."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_SENT] = plain((self._writer.places, self._writer.run.totals.division))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Receive it in the controller, which has collected nothing."""
        if sent := getattr(node, "workeroutput", {}).get(_SENT):
            self._know(*typed(sent, tuple[dict[str, int], Division]))

    def _know(self, places: Mapping[str, int], division: Division) -> None:
        self._writer.places, self._writer.run.totals.division = places, division
