"""axe-core finds nothing serious, in both themes; the keyboard reaches everything."""

from __future__ import annotations

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

PLACES = [
    ("training", "overview"),
    ("follow", "overview"),
    ("refused", "overview"),
    ("empty", "overview"),
    ("serving", "runs"),
    ("serving", "runs/74a026456e9d"),
    ("serving", "versions"),
    ("serving", "serving"),
    ("follow", "data"),
    ("cluster", "cluster"),
    ("serving", "try"),
    ("failed", "log/prepare"),
]
AXE = Axe()


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_serious_accessibility_violations(studio: Any, base: str, theme: str) -> None:
    at = studio(base, color_scheme=theme, reduced_motion="reduce")
    found = {}
    for home, panel in PLACES:
        at.open(home, panel)
        if panel == "try":
            at.page.locator(".probability").wait_for()
        options: dict[str, Any] = {"resultTypes": ["violations"]}
        if theme == "dark":
            options["runOnly"] = ["color-contrast"]  # the rest does not depend on it
        violations = AXE.run(at.page, options=options).response["violations"]
        bad = [
            f"{one['id']}: {node['html'][:120]} {node['failureSummary'][:200]}"
            for one in violations
            if one["impact"] in ("serious", "critical")
            for node in one["nodes"][:3]
        ]
        if bad:
            found[home, panel] = bad
    assert found == {}


@pytest.mark.slow
def test_dialog_is_accessible_and_esc_restores_focus(studio: Any, base: str) -> None:
    at = studio(base, reduced_motion="reduce")
    at.open("serving", "versions")
    button = at.page.get_by_role("button", name="Roll back to 6").first
    button.focus()
    at.page.keyboard.press("Enter")
    expect(at.page.get_by_role("dialog", name="Roll back to version 6?")).to_be_visible()
    expect(at.page.get_by_label("Reason")).to_be_focused()
    assert [
        one["id"]
        for one in AXE.run(at.page).response["violations"]
        if one["impact"] in ("serious", "critical")
    ] == []
    at.page.keyboard.press("Escape")
    expect(at.page.get_by_role("dialog")).to_have_count(0)
    expect(button).to_be_focused()


def test_first_tab_skips_to_the_content(studio: Any, base: str) -> None:
    at = studio(base)
    at.open("serving")
    at.page.keyboard.press("Tab")
    expect(at.page.locator("#skip")).to_be_focused()
    at.page.keyboard.press("Enter")
    expect(at.page.locator("main")).to_be_focused()
    assert at.page.url.endswith("#/serving/overview")


def test_arrow_keys_move_through_the_panels(studio: Any, base: str) -> None:
    at = studio(base)
    at.open("serving")
    links = at.page.get_by_role("navigation").get_by_role("link")
    links.first.focus()
    at.page.keyboard.press("ArrowRight")
    expect(links.nth(1)).to_be_focused()
    at.page.keyboard.press("End")
    expect(links.last).to_be_focused()
    at.page.keyboard.press("Enter")
    expect(at.page.locator("main h1")).to_have_text("Playground")
    expect(links.last).to_have_attribute("aria-current", "page")


def test_arrow_keys_move_through_the_hours(studio: Any, base: str) -> None:
    at = studio(base)
    at.open("follow", "data")
    hours = at.page.get_by_role("slider", name="Hours")
    hours.focus()
    expect(hours).to_have_attribute("aria-valuenow", "500")
    at.page.keyboard.press("Home")
    expect(hours).to_have_attribute("aria-valuenow", "1")
    at.page.keyboard.press("ArrowDown")
    expect(hours).to_have_attribute("aria-valuenow", "25")
    expect(hours).to_have_attribute("aria-valuetext", at.page.locator(".strip-description").inner_text())


def test_slash_focuses_the_search(studio: Any, base: str) -> None:
    at = studio(base)
    at.open("serving", "try")
    at.page.keyboard.press("/")
    search = at.page.get_by_role("searchbox")
    expect(search).to_be_focused()
    at.page.keyboard.type("c2")
    expect(at.page.locator(".field")).to_have_count(8)  # C2, C20 … C26


def test_every_chart_can_be_read_as_a_table(studio: Any, base: str) -> None:
    at = studio(base)
    at.open("serving", "runs")
    at.page.get_by_role("button", name="Table: AUC").click()
    expect(at.page.locator(".chart-table tbody tr")).to_have_count(120)
    at.page.get_by_role("radio", name="Loss").click()
    expect(at.page.locator(".chart-title")).to_have_text("Loss")
