"""The console script ``pytest-gemm``."""

from __future__ import annotations

import importlib

import pytest

from pytest_gemm.tools import cli

for _command in cli.COMMANDS.values():  # pytester forgets what is imported later, and numpy is imported once only
    importlib.import_module(_command["module"])


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, command in cli.COMMANDS.items():
        assert any(line.split(maxsplit=1) == [name, command["help"]] for line in lines), name


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_and_refuses_an_unknown_argument(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: pytest-gemm {name} " in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--no-such-argument"])
    assert ended.value.code == cli.USAGE_ERROR


def test_an_unknown_command_gets_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["basline"])
    assert ended.value.code == cli.USAGE_ERROR
    assert "no such command: basline (did you mean 'baseline'?)" in capsys.readouterr().err
