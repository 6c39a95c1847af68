"""The page in a real browser, opened as a file: everything is drawn and no request is sent."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from example_documents import bare, document, hostile, long, old, one_class, refused

from clickline.evaluation.report.comparison_page import comparison_page
from clickline.evaluation.report.page import page
from clickline.evaluation.report.plots import DARK, figures, overlay_figures

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install -e '.[dev]'"
)
axe = pytest.importorskip(
    "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed"
)

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not CHROMIUM.exists(), reason="there is no /usr/bin/chromium: `make browser` installs it"
    ),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as play:
        opened = play.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield opened
        opened.close()


class Opened:
    """A page with all that it said and asked for."""

    def __init__(self, browser: Any, path: Path, scheme: str, width: int = 1200) -> None:
        self.context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())
        assert self.page.evaluate("document.documentElement.dataset.drawn") == "yes"

    def until(self, expression: str, value: str) -> None:
        """Playwright's own waiting would have the page evaluate a text, which its policy forbids."""
        deadline = time.monotonic() + 20
        while self.page.evaluate(expression) != value:
            assert time.monotonic() < deadline, f"{expression} did not become {value}"
            self.page.wait_for_timeout(20)

    def drawn(self) -> dict[str, Any]:
        """What Plotly holds, by figure."""
        return json.loads(
            self.page.evaluate(
                "JSON.stringify(Object.fromEntries([...document.querySelectorAll('.plot')].map("
                "(place) => [place.dataset.figure, {data: place.data, layout: place.layout}])))"
            )
        )  # type: ignore[no-any-return]


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    contexts = []

    def open_(text: str, scheme: str = "light", width: int = 1200) -> Opened:
        path = tmp_path / f"report-{len(contexts)}.html"
        path.write_bytes(text.encode("utf-8", "backslashreplace"))
        found = Opened(browser, path, scheme, width)
        contexts.append(found.context)
        return found

    yield open_
    for context in contexts:
        context.close()


CASES = {
    "whole": (lambda: page(document()), lambda: figures(document())),
    "refused": (lambda: page(refused()), lambda: figures(refused())),
    "bare": (lambda: page(bare()), lambda: figures(bare())),
    "one class": (lambda: page(one_class()), lambda: figures(one_class())),
    "long": (lambda: page(long()), lambda: figures(long())),
    "hostile": (lambda: page(hostile()), lambda: figures(hostile())),
    "old": (lambda: page(old()), lambda: figures(old())),
    "compared": (
        lambda: comparison_page(("a", document()), ("b", refused())),
        lambda: overlay_figures([("A, a", document()), ("B, b", refused())]),
    ),
}


def values(drawn: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [
            {key: trace.get(key) for key in ("x", "y", "type", "name", "yaxis")} for trace in figure["data"]
        ]
        for name, figure in drawn.items()
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("case", CASES)
def test_every_figure_is_drawn_with_the_documents_values(opened, case, scheme):
    text, expected = CASES[case]
    found = opened(text(), scheme)
    assert found.said == []
    assert len(found.asked) == 1 and found.asked[0].startswith("file://")
    assert values(found.drawn()) == values(expected())
    for place in found.page.query_selector_all(".plot"):
        assert place.query_selector(".main-svg .scatterlayer .trace, .main-svg .barlayer .trace")
    assert "broken" not in found.page.title() or case == "hostile"
    assert found.page.evaluate("document.title") == found.page.locator("title").text_content()
    too_wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert found.page.evaluate(too_wide) == 0


def thinned(found: dict[str, Any]) -> dict[str, Any]:
    """With a few points of each curve: rows of tables that are all alike take the checker long."""

    def few(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: value if key == "scores" else few(value) for key, value in tree.items()}
        return tree[:: max(1, len(tree) // 8)] if isinstance(tree, list) else tree

    return {
        **found,
        **{key: few(found.get(key)) for key in ("curves", "learning", "current")},
        "evaluation": {**found["evaluation"], "hours": found["evaluation"]["hours"][:6]},
    }


@pytest.mark.parametrize(
    ("make", "scheme"),
    [(refused, "light"), (document, "dark"), (one_class, "dark"), (None, "light"), (None, "dark")],
)
def test_page_has_no_serious_accessibility_issue(opened, make, scheme):
    if make is None:
        text = comparison_page(("a", thinned(document())), ("b", thinned(refused())))
    else:
        text = page(thinned(make()))
    found = opened(text, scheme)
    for details in found.page.query_selector_all("details"):
        details.evaluate("(element) => { element.open = true; }")
    grave = [
        (one["id"], one["impact"], one["nodes"][0]["html"][:200])
        for one in axe.Axe().run(found.page).response["violations"]
        if one["impact"] in ("serious", "critical")
    ]
    assert grave == []


def test_colours_follow_the_system_and_print_is_light(opened):
    found = opened(page(document()))
    colour = "document.getElementById('plot-roc').data[0].line.color"
    ground = "getComputedStyle(document.body).backgroundColor"
    light = figures(document())["roc"]["data"][0]["line"]["color"]
    assert found.page.evaluate(colour) == light
    before = found.page.evaluate(ground)
    found.page.emulate_media(color_scheme="dark")
    found.until(colour, DARK[light])
    assert found.page.evaluate(ground) != before
    found.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert found.page.evaluate(colour) == light
    found.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert found.page.evaluate(colour) == DARK[light]
    assert found.said == []


def test_page_prints_and_fits_a_phone(opened):
    found = opened(page(long()))
    assert found.page.pdf(format="A4").startswith(b"%PDF")
    narrow = opened(page(document()), width=360)
    too_wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert narrow.page.evaluate(too_wide) == 0
    for place in narrow.page.query_selector_all(".plot"):
        assert place.bounding_box()["width"] <= 360


def test_page_is_keyboard_accessible(opened):
    found = opened(page(document()))
    found.page.keyboard.press("Tab")
    assert found.page.evaluate("document.activeElement.textContent") == "Skip to the report"
    found.page.keyboard.press("Tab")
    found.page.keyboard.press("Enter")
    assert found.page.url.endswith("#ranking")
    summary = found.page.locator("#calibration summary").first
    summary.focus()
    found.page.keyboard.press("Enter")
    assert found.page.locator("#calibration details").first.get_attribute("open") is not None
    assert found.page.locator("#calibration table").first.is_visible()


def test_injected_scripts_do_not_run(opened):
    """Even a script that got into the file: the policy knows the two that may run."""
    text = page(document()).replace("</body>", "<script>document.title = 'broken'</script></body>")
    found = opened(text)
    assert found.page.title() != "broken"
    assert any("Content Security Policy" in line for line in found.said)
