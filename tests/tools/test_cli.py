"""The console script ``pytest-gemm``."""

from __future__ import annotations

import importlib

import pytest

from pytest_gemm.tools import cli

for _command in cli.COMMANDS.values():  # pytester forgets what is imported later, and numpy is imported once only
    importlib.import_module(_command["module"])


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.split()} >= set(cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_and_refuses_an_unknown_argument(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: pytest-gemm {name} " in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--no-such-argument"])
    assert ended.value.code == cli.USAGE_ERROR
