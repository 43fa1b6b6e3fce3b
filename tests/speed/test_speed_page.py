"""The page of a speed run: complete, self-contained, and harmless whatever the names hold."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace
from speed_runs import KINDS, LINE, NK, TIMED, example, problems, run_of

from pytest_gemm.core.outcome import Reason, Verdict
from pytest_gemm.speed.data import Peaks
from pytest_gemm.speed.report import page
from pytest_gemm.speed.report.rows import Run

pytestmark = pytest.mark.slow

VOID = {"meta", "input"}


class Reader(HTMLParser):
    """What a browser sees: text, attributes and whether every element is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def values(self, name: str) -> list[str]:
        return [value for given, value in self.attributes if given == name]


def figures(text: str) -> list[str]:
    return re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)


def section(text: str, name: str) -> str:
    """A section of the page, "" where there is none."""
    found = re.search(rf'<section id="{name}">.*?</section>', text, flags=re.DOTALL)
    return found[0] if found else ""


@pytest.fixture(scope="module")
def run() -> Run:
    return example(problems(KINDS[:2], NK[:3]) + problems(KINDS[3:], NK[:1], (16,)))


@pytest.fixture(scope="module")
def text(run: Run) -> str:
    return page.page(run, "Speed & <more>")


def test_the_page_is_one_well_formed_file_that_asks_nobody(text: str) -> None:
    reader = Reader(text)
    assert reader.open == []
    assert "Speed & <more>: torch 2.13.0, commit ab12cd3" in reader.words
    ids = reader.values("id")
    assert len(ids) == len(set(ids))
    targets = {value[1:] for value in reader.values("href")} | set(re.findall(r"url\(#([^)]+)\)", text))
    assert targets <= set(ids)
    assert all(value.startswith("#") for value in reader.values("href") + reader.values("xlink:href"))
    assert not reader.values("src")
    assert not re.search(r"https?://|@import", text)
    for figure in figures(text):
        ElementTree.fromstring(figure)
        assert 'role="img" aria-label="' in figure


def test_every_case_is_in_the_table_and_every_one_that_moved_in_a_figure(run: Run, text: str) -> None:
    table = section(text, "cases")
    assert table.count("<tr") == 1 + len(run.judgements)
    moved = [j for j in run.judgements if j.verdict in {Verdict.SLOWER, Verdict.FASTER, Verdict.UNDECIDED}]
    drawn = section(text, "verdicts")
    labels = {f"{j.case.backend}-{j.case.problem}" for j in moved}
    assert {f"{who}-{line}" for line, who in re.findall(r">(mm:\S+)\s+(\w+)</text>", drawn)} == labels
    for judgement in run.judgements:
        row = f"<td><code>{judgement.case.problem}</code></td>"
        assert row in table
        assert f">{judgement.case.problem.split(':', 3)[3]}</text>" in section(text, "winners")
    for kind in KINDS[:2]:
        assert f"of triton, cutlass, aten at 12 shapes of {kind}" in text


@pytest.mark.parametrize(
    ("run", "told", "missing"),
    [
        (Run([]), "Nothing was compared", ["winners"]),
        (
            run_of(TIMED, verdict=Verdict.NO_BASELINE),
            "<li>1 case no-baseline: nothing is stored for it on this hardware</li>",
            [],
        ),
        (run_of([replace(TIMED[0], disturbed="load")]), "1 of 1 sample dropped, for instance: load", []),
        (run_of(TIMED, mode="none"), "1</b>case</div></div>", ["verdicts"]),
        (run_of(TIMED, anchor=Reason("anchor-shift", "aten moved")), "<b>Anchor shift.</b> aten moved", []),
        (run_of(TIMED, notes=["odd <clock>"]), "odd &lt;clock&gt;", []),
        (run_of([replace(TIMED[0], subject=(), comparator=())]), "Cases without an estimate", ["winners"]),
    ],
)
def test_what_is_missing_is_said_and_not_drawn(run: Run, told: str, missing: list[str]) -> None:
    text = page.page(run, "Speed")
    assert told in text
    assert Reader(text).open == []
    assert [name for name in ("verdicts", "winners") if not section(text, name)] == missing


@pytest.mark.parametrize(("rate", "unit"), [(200e9, "GFLOP/s"), (20e12, "TFLOP/s")])
def test_axes_have_the_unit_of_the_machine(rate: float, unit: str) -> None:
    sample = replace(TIMED[0], subject=(40e9 / rate,), comparator=())
    text = page.page(run_of([sample], peaks=Peaks({"f16": rate}, 1e10)), "Speed")
    assert f">{unit}, mm:f16:nt</text>" in section(text, "winners")


def test_names_and_reasons_cannot_write_html() -> None:
    nasty = '"><script>alert(1)</script>$x_1$'
    sample = replace(
        TIMED[0], case=dataclasses.replace(TIMED[0].case, backend=nasty), comparator_name=nasty, kernels=(nasty,)
    )
    run = run_of([sample], [replace(sample, case=dataclasses.replace(sample.case, candidate=nasty))])
    told = [
        dataclasses.replace(j, verdict=Verdict.SLOWER, change=0.1, reason=Reason(nasty, nasty), selection=nasty)
        for j in run.judgements
    ]
    run = dataclasses.replace(
        run, judgements=told, hardware=nasty, software={nasty: nasty}, notes=[nasty], anchor=Reason("x", nasty)
    )
    text = page.page(run, nasty)
    assert text.count("<script>") == 1
    assert Reader(text).open == []
    for figure in figures(text):
        ElementTree.fromstring(figure)
    assert nasty in Reader(text).words


def test_the_same_run_gives_the_same_bytes() -> None:
    run = example([LINE])
    assert page.page(run, "Speed") == page.page(run, "Speed")


def test_without_matplotlib_a_page_has_its_tables_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = page.page(example([LINE]), "Speed")
    assert "no figure, matplotlib is not installed: pip install matplotlib" in text
    assert LINE in Reader(text).words


@pytest.mark.study
def test_three_hundred_cases_stay_below_three_megabytes() -> None:
    run = example(problems(KINDS[:3]), ("triton", "cutlass", "cutedsl", "cpp", "mine"), sessions=1)
    assert len(run.judgements) == 300
    assert len(page.page(run, "Speed").encode()) < 3_000_000


def test_neither_torch_nor_a_display_is_needed() -> None:
    code = (
        "import sys; from pytest_gemm.speed.report import page; assert not {'jinja2', 'matplotlib'} & set(sys.modules);"
        "from speed_runs import example; page.page(example(['mm:f16:nt:8x8x8']), 't');"
        "assert not {'torch', 'matplotlib.pyplot', 'tkinter'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="tests")
