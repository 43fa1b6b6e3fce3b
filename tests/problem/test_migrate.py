"""Lines of earlier versions: told how they are spelt now, and rewritten in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.migrate import modern_line, modern_text
from pytest_gemm.problem.problem import Problem
from pytest_gemm.tools import cli

# Joined here, so that the command that rewrites a tree leaves the old spellings of this file alone.
_OLD = {
    "mm:f32:nn:8x8x8": "mm:f32:nn:8x8x8",
    "mm:f32:nn:8x8x8::pad|-lda": "mm:f32:nn:8x8x8:a.padded",
    "mm:f32:nn:8x8x8:relu:dyn|-m+pad-lda+off-a": "mm:f32:nn:8x8x8:relu:a.padded+offset:m.dynamic",
    "mm:f32:nn:8x8x8::tf|32": "mm:f32:nn:8x8x8:math.tf32",
    "woq_int4:bf16-i4-bf16:nt:8x8x64:gr|oup-32+relu": "woq_int4:bf16-i4-bf16:nt:8x8x64:relu:quant.group-32",
    "qlinear:u8-i8-u8:nt:8x8x8:stat|ic+bias+requant": "qlinear:u8-i8-u8:nt:8x8x8:bias:quant.static+requant",
}
_PATTERNS = {
    "bmm:*off|-b+const-b*": "bmm:*b.*offset+constant*",
    "*:t?:*pad|-lda*": "*:t?:*a.padded*",
    "bmm:*:relu:t|ap": "bmm:*:relu:program.multi_output",
    "da8w8:*-f16:*:column|wise+bias*": "da8w8:*-f16:*:bias*quant.columnwise*",
    "mm:bf16:*": "mm:bf16:*",
}


@pytest.mark.parametrize("old", [*_OLD, *_PATTERNS])
def test_a_line_and_a_pattern_have_one_new_spelling(old: str) -> None:
    new = {**_OLD, **_PATTERNS}[old]
    assert modern_line(old.replace("|", "")) == new
    assert modern_line(new) == new


def test_an_old_line_is_answered_with_the_new_one() -> None:
    with pytest.raises(ProblemError) as caught:
        Problem.parse("mm:f32:nn:8x8x8::" + "pad-lda")
    assert "write mm:f32:nn:8x8x8:a.padded, or run pytest-gemm migrate FILE" in str(caught.value)


def test_the_command_rewrites_files_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = "mm:f32:nn:8x8x8::" + "tf32", "mm:f32:nn:8x8x8:math.tf32"
    files = {
        "cpp.jsonl": f'{{"problem": "{old}", "median_us": 1.0}}\n',
        "avx2.tsv": f"{old}\tname\n",
        "known_failures.toml": f'problem = "{old}"\nfilling = "rand"\nstatus = "fell-back"\nflags = "off-{"a"}"\n',
        "test_mine.py": f'LINE = "{old}"\nFLAG = problem.has("se{"lf"}")\n',
        "README.md": f"Run `{old}`.\n",
        "notes.rst": old,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert cli.main(["migrate", "--check", str(tmp_path)]) == 1
    assert cli.main(["migrate", str(tmp_path)]) == 0
    assert "5 files changed" in capsys.readouterr().out
    assert new in (tmp_path / "cpp.jsonl").read_text(encoding="utf-8")
    assert (tmp_path / "known_failures.toml").read_text(encoding="utf-8") == (
        f'problem = "{new}"\ndistribution = "rand"\nstatus = "fallback"\nflags = "a.offset"\n'
    )
    assert 'problem.has("b.alias_t")' in (tmp_path / "test_mine.py").read_text(encoding="utf-8")
    assert (tmp_path / "notes.rst").read_text(encoding="utf-8") == old
    assert cli.main(["migrate", str(tmp_path)]) == 0
    assert "0 files changed" in capsys.readouterr().out


def test_a_text_without_lines_stays_as_it_is() -> None:
    text = "self.tap(fork, again)  # a mm: of two\n"
    assert modern_text(text, ".py") == text
