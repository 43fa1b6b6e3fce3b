"""Settings that backends declare: what is unknown or wrong is named, with what would be right."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pytest_gemm.api.settings import Setting, SettingError, configure, folder, settings_of
from pytest_gemm.backends.cutlass.backend import CutlassBackend
from pytest_gemm.backends.triton import TritonBackend


@pytest.mark.parametrize(
    ("backend", "given", "message"),
    [
        (TritonBackend, {"spce": "default"}, "triton has no setting 'spce' (did you mean 'space'?); known: space"),
        (TritonBackend, {"space": "small"}, "triton.space='small': give one of default, exhaustive"),
        (CutlassBackend, {"allow": "("}, "cutlass.allow='(': not a regular expression: "),
        (CutlassBackend, {"arch": "sm_90a"}, "cutlass.arch='sm_90a': give it as nvcc does without sm_"),
        (CutlassBackend, {"jobs": "0"}, "cutlass.jobs='0': give a whole number, 1 or more"),
    ],
)
def test_a_wrong_setting_is_named(backend: Any, given: dict[str, str], message: str) -> None:
    with pytest.raises(SettingError) as raised:
        configure(backend(), given)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("parse", "says"),
    [({"1": 1}.__getitem__, "KeyError: '2'"), (lambda text: text + 1, "TypeError: "), (int.from_bytes, "TypeError: ")],
)
def test_whatever_a_backends_own_parser_raises_is_an_error_of_the_setting(parse: Any, says: str) -> None:
    class Mine:
        name = "mine"
        settings: ClassVar = {"tile": Setting("1", "N", "rows", parse)}

    with pytest.raises(SettingError, match=re.escape(f"mine.tile='2': {says}")):
        configure(Mine(), {"tile": "2"})


def test_a_backend_gets_all_values_with_its_defaults() -> None:
    backend = CutlassBackend()
    configure(backend, {"jobs": "3", "arch": "90a"})
    assert (backend.compilers, backend.architecture) == (3, "90a")
    assert backend.allowlist == CutlassBackend.allowlist
    assert set(settings_of(backend)) == {"allow", "arch", "cache", "jobs"}


def test_a_backend_without_settings_has_none() -> None:
    configure(object(), {})
    assert not settings_of(object())


def test_several_processes_may_find_out_at_once_that_a_folder_can_be_written(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        assert {*threads.map(folder, [str(tmp_path / "out")] * 400)} == {tmp_path / "out"}
    assert list((tmp_path / "out").iterdir()) == []
