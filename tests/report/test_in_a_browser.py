"""The pages in Chromium, on a phone and on a desk, light and dark: all of it is seen and can be read."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import recorded_runs
import speed_runs

from pytest_gemm.record.reader import read
from pytest_gemm.report import diff, html
from pytest_gemm.speed.report import page as speed_page

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
PICTURES = REPOSITORY / "build" / "pages"
"""Where the screenshots are left, to be looked at."""
_CHROMIUMS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")

# What lies outside the window, and which text has less contrast than WCAG 2 AA demands.  A box that scrolls has to lie
# inside, what is in it need not.
_FAULTS = """() => {
  document.querySelectorAll("details").forEach(one => { one.open = true; });
  const faults = [], name = one => one.outerHTML.slice(0, 120), width = document.documentElement.clientWidth;
  const widest = document.documentElement.scrollWidth;
  if (widest > width) faults.push(`the page is ${widest} wide`);
  const numbers = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(c => c / 255)
    .map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const behind = one => {
    for (; one; one = one.parentElement) {
      const colour = numbers(getComputedStyle(one).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const judge = (one, text, colour, style) => {
    const [a, b] = [light(numbers(colour)), light(behind(one))];
    const contrast = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    const size = parseFloat(style.fontSize), large = size >= 24 || size >= 18.66 && style.fontWeight >= 700;
    if (contrast < (large ? 3 : 4.5)) faults.push(`contrast ${contrast.toFixed(2)} of "${text}": ${name(one)}`);
  };
  for (const one of document.body.querySelectorAll("*")) {
    const box = one.getBoundingClientRect(), style = getComputedStyle(one);
    if (!box.width || style.visibility !== "visible" || one.closest("title, script")) continue;
    const isOutside = box.right > width + 1 || box.left < -1;
    if (isOutside && !one.parentElement.closest(".scroll")) faults.push(`outside: ${name(one)}`);
    const text = [...one.childNodes].filter(node => node.nodeType === 3).map(node => node.data.trim()).join("");
    if (text) judge(one, text, one.closest("svg") ? style.fill : style.color, style);
    if (one.placeholder) judge(one, one.placeholder, getComputedStyle(one, "::placeholder").color, style);
  }
  return faults;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    with playwright.sync_playwright() as driver:
        own = driver.chromium.executable_path
        path = own if Path(own).exists() else next(filter(None, map(shutil.which, _CHROMIUMS)), None)
        if path is None:
            pytest.skip(f"no browser: none of {', '.join(_CHROMIUMS)} is installed, and none of playwright's")
        # A container has no user namespaces, and all that is shown is made here.
        chromium = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One page of each kind."""
    folder = tmp_path_factory.mktemp("pages")
    both = []
    for later in (False, True):
        version = {"torch": "2.15.0" if later else "2.14.0"}
        run = dataclasses.replace(recorded_runs.RUN, versions=version)
        both.append(recorded_runs.write(folder / version["torch"], recorded_runs.outcomes(later=later), run))
    texts = {
        "one run": html.page([read(both[1])], "One run"),
        "two runs": html.page(list(map(read, both)), "Two runs"),
        "comparison": diff.compared(*map(read, both)).html(),
        "speed": speed_page.page(speed_runs.example(), "Speed"),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts}


@pytest.fixture
def opened(browser: Any, pages: dict[str, Path]) -> Iterator[Any]:
    """Opens a page by its name; what it says to the console or loads is a fault."""
    contexts: list[Any] = []
    said: list[str] = []
    loaded: list[str] = []

    def show(name: str, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        shown = context.new_page()
        shown.on("console", lambda message: said.append(message.text))
        shown.on("pageerror", lambda error: said.append(str(error)))
        shown.on("request", lambda request: loaded.append(request.url))
        shown.goto(pages[name].as_uri())
        return shown

    yield show
    for context in contexts:
        context.close()
    assert said == []
    assert {url for url in loaded if not url.startswith("data:")} <= {path.as_uri() for path in pages.values()}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["one run", "two runs", "comparison", "speed"])
def test_all_of_a_page_is_seen_and_can_be_read(opened: Any, name: str, width: int, scheme: str) -> None:
    shown = opened(name, viewport={"width": width, "height": 900}, color_scheme=scheme)
    shown.screenshot(path=PICTURES / f"{name}-{width}-{scheme}.png", full_page=True)
    assert shown.evaluate(_FAULTS) == []
    background = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]


def test_the_filter_keeps_what_has_all_words(opened: Any) -> None:
    shown = opened("one run")
    rows = shown.locator("#products tbody tr")
    everything = rows.count()
    shown.fill("#filter", "cpp linear f32-f32")
    assert shown.locator("#products tbody tr:visible").all_inner_texts() == ["linear\tf32-f32-bf16\tcpp\t4\t\t\t0.47"]
    assert shown.locator(".failure:visible").count() == 0
    shown.fill("#filter", "")
    assert shown.locator("#products tbody tr:visible").count() == everything


def test_a_click_on_a_head_sorts_and_one_on_copy_says_so(opened: Any) -> None:
    shown = opened("two runs", permissions=["clipboard-read", "clipboard-write"])
    shown.get_by_role("button", name="backend").click()
    backends = shown.locator("#products tbody td:nth-child(3)").all_inner_texts()
    assert backends == sorted(backends)
    shown.locator("#new button.copied").click()
    shown.get_by_role("button", name="copied").wait_for()
    assert shown.evaluate("navigator.clipboard.readText()") == shown.locator("#new pre.copy").inner_text()


@pytest.mark.parametrize("name", ["one run", "speed"])
def test_a_page_is_read_without_its_script(opened: Any, name: str) -> None:
    shown = opened(name, java_script_enabled=False)
    assert shown.locator("table.cases tbody tr:visible").count() >= 39
    assert bool(shown.locator("figure:visible").count()) is (name == "speed")
    assert not shown.locator(".tools").is_visible()
