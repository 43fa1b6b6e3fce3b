"""Snapshots of selections: what a file holds, how two differ, and which command lines are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.machine import processor
from pytest_gemm.problem.problem import Problem
from pytest_gemm.tools import cli, snapshot
from pytest_gemm.tools.snapshot import Kind, Selection, Snapshot, SnapshotError

FACTS = {
    "torch": "2.13.0+cpu",
    "backend": "cpp",
    "isa": "amx",
    "threads": "16",
    "l1d_cache_size": "32768",
    "l2_cache_size": "1048576",
}
VEC, AMX = (
    Selection("CppMicroGemmFP32Vec-8x48x1", "1x1x64/1x1x64"),
    Selection("CppMicroGemmAMX-32x32x32", "1x1x2/1x1x2"),
)
NOTHING = [Selection(name) for name in ("none", "refused", "error:LoweringException", "library:_mkl_linear")]


def made(picks: dict[str, Selection], **facts: str) -> Snapshot:
    return Snapshot(FACTS | facts, picks)


@pytest.mark.parametrize("name", ["CppMicroBrgemm-32x32x32", "CppMicroGemmAMX-32x16x32,grouped"])
def test_every_template_makes_a_kernel(name: str) -> None:
    assert Selection(name).is_kernel
    assert not any(nothing.is_kernel for nothing in NOTHING)


def test_a_file_is_read_as_it_was_written_and_has_its_place(tmp_path: Path) -> None:
    written = made({"mm:f32:nn:2x2x2": VEC, "bmm:f32:nn:2x2x2x2": Selection("refused")})
    path = tmp_path / written.place
    path.parent.mkdir()
    path.write_text(written.text())
    assert snapshot.read(path) == written
    assert written.place == Path("torch-2.13/cpp-amx.tsv")
    assert path.read_text().splitlines()[-2:] == [
        "bmm:f32:nn:2x2x2x2\trefused\t-",
        "mm:f32:nn:2x2x2\tCppMicroGemmFP32Vec-8x48x1\t1x1x64/1x1x64",
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "cannot be read"),
        ("mm:f32:nn:2x2x2\tCppMicroGemmRef\n", ":1: is no line of a snapshot"),
        ("mm\ta\t-\nmm\tb\t-\n", ":2: mm stands there twice"),
        ("# torch 2.13.0\n# backend cpp\n# isa amx\n", "has no threads and no l1d_cache_size"),
    ],
)
def test_what_is_no_snapshot_is_named_with_its_line(tmp_path: Path, text: str | None, told: str) -> None:
    path = tmp_path / "cpp-amx.tsv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SnapshotError, match=told):
        snapshot.read(path)


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        (VEC, VEC, None),
        (VEC, AMX, Kind.CHANGED),
        (VEC, Selection(VEC.kernel, "2x1x64/2x1x64"), Kind.BLOCKING),
        *((AMX, nothing, Kind.LOST) for nothing in NOTHING),
        *((nothing, AMX, Kind.GAINED) for nothing in NOTHING),
        (NOTHING[0], NOTHING[1], Kind.CHANGED),
        (None, VEC, Kind.NEW),
        (VEC, None, Kind.GONE),
    ],
)
def test_what_changed_between_two(old: Selection | None, new: Selection | None, kind: Kind | None) -> None:
    sides = [made({"mm": pick} if pick else {}) for pick in (old, new)]
    assert [(change.kind, change.old, change.new) for change in snapshot.compare(*sides)] == (
        [(kind, old, new)] if kind else []
    )


def test_the_gravest_change_comes_first() -> None:
    old = made({"a": VEC, "b": VEC, "c": VEC, "d": NOTHING[0]})
    new = made({"a": VEC, "b": AMX, "c": NOTHING[1], "d": VEC, "e": VEC})
    assert [(c.kind, c.problem) for c in snapshot.compare(old, new)] == [
        (Kind.LOST, "c"),
        (Kind.CHANGED, "b"),
        (Kind.GAINED, "d"),
        (Kind.NEW, "e"),
    ]


@pytest.mark.parametrize("fact", ["threads", "l1d_cache_size", "l2_cache_size"])
def test_selections_that_depend_on_other_numbers_are_not_compared(fact: str) -> None:
    with pytest.raises(ValueError, match=f"{fact} is .* in one and 7 in the other"):
        snapshot.compare(made({}), made({}, **{fact: "7"}))


@pytest.fixture
def releases(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders of files: one changed, one alike, one of a name that the other has not."""
    folders = tmp_path / "torch-2.12", tmp_path / "torch-2.13"
    for folder, release, pick in zip(folders, ("2.12.1", "2.13.0"), (AMX, VEC), strict=True):
        folder.mkdir()
        for isa, picked in (("amx", pick), ("avx2", VEC)):
            text = made({"mm:f32:nn:2x2x2": picked}, torch=release, isa=isa).text()
            (folder / f"cpp-{isa}.tsv").write_text(text)
    (folders[1] / "cpp-avx512.tsv").write_text(made({"mm": VEC}, isa="avx512").text())
    return folders


def test_folders_of_two_releases_are_compared_file_by_file(
    releases: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["snapshot", "diff", *map(str, releases)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "torch 2.12.1 cpp amx -> torch 2.13.0 cpp amx: 1 kernel changed",
        "  kernel changed   mm:f32:nn:2x2x2: CppMicroGemmAMX-32x32x32 -> CppMicroGemmFP32Vec-8x48x1",
        "torch 2.12.1 cpp avx2 -> torch 2.13.0 cpp avx2: no difference",
    ]
    assert cli.main(["snapshot", "diff", "--markdown", *map(str, releases)]) == 1
    row = "| kernel changed | `mm:f32:nn:2x2x2` | CppMicroGemmAMX-32x32x32 | CppMicroGemmFP32Vec-8x48x1 |"
    assert row in [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert cli.main(["snapshot", "diff", *(str(folder / "cpp-avx2.tsv") for folder in releases)]) == 0
    assert cli.main(["snapshot", "show", str(releases[0])]) == 0
    assert "    1  CppMicroGemmAMX-32x32x32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("write", "{0}", "--isa=avx3"), "argument --isa: no such level: avx3 (did you mean 'avx2'?); known: avx2, "),
        (("write", "{0}", "--threads=0"), "argument --threads: 0: give 1 or more, 1024 at most"),
        (("write", "{0}", "--problems=pytest_gemm:nobody"), "name a function of a level as package.module:function"),
        (("show", "{0}/nothing"), "has no snapshots"),
        (("diff", "{0}/torch-2.12", "{0}/torch-2.13/cpp-avx512.tsv"), "cannot be read"),
    ],
)
def test_a_command_that_cannot_be_done_says_what_would_be_right(
    releases: tuple[Path, Path], capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["snapshot", *(word.format(releases[0].parent) for word in words)])
    assert told in capsys.readouterr().err


@pytest.mark.compiler
def test_every_problem_has_a_line_whether_or_not_there_is_a_kernel_for_it() -> None:
    lines = {
        "linear:bf16:nt:64x64x64:bias": "CppMicroGemmAMX-32x16x32",
        "mm:f32:nn:1x8x64": "CppMicroGemmFP32Vec-16x16x1",
        "int_mm:i8-i8-i32:nt:32x64x128": "refused",
        "mm:f32:nn:1x1x16": "none",
    }
    taken = snapshot.take(CppBackend(threads=4, listing=True), map(Problem.parse, lines), "amx", 4)
    assert {line: pick.kernel for line, pick in taken.selections.items()} == lines
    assert taken.selections["linear:bf16:nt:64x64x64:bias"].blocking.count("/") == 1
    assert taken.facts["threads"] == "4"


def test_a_list_does_not_depend_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = [Problem.parse("mm:f32:nn:512x512x512")]
    first = snapshot.take(CppBackend(threads=4, listing=True), problem, "avx512", 4)
    monkeypatch.setattr(processor, "cpu", lambda: processor.Cpu(flags=("avx2", "fma", "f16c")))
    capable = dict(torch.cpu.get_capabilities())
    smaller = {**capable, "l1d_cache_size": 4096, "l2_cache_size": 65536, "avx512_f": not capable.get("avx512_f")}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: smaller)
    assert snapshot.take(CppBackend(threads=4, listing=True), problem, "avx512", 4) == first
