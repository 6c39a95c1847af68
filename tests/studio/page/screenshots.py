"""Pictures of the studio.

python tests/studio/page/screenshots.py                  those of the docs, docs/images/studio-*.png
python tests/studio/page/screenshots.py docs URL HOME    the same, of a home of a studio that runs
python tests/studio/page/screenshots.py look FOLDER [PART]   every panel and state, in both themes, both languages and
                                                         two widths; with PART, those with it in their name
"""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parent))

from fake_api import fake_studio
from fake_homes import SCENARIOS

CHROMIUM = "/usr/bin/chromium"
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # root in a container has no other way
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
IMAGES = Path(__file__).parents[3] / "docs" / "images"
FOR_DOCS = {
    "overview": "training",
    "runs": "serving",
    "versions": "follow",
    "serving": "serving",
    "data": "follow",
    "try": "serving",
}
EVERYWHERE = ("overview", "versions", "serving", "data")
ELSEWHERE = (
    ("serving", "runs"),
    ("serving", "runs/74a026456e9d"),
    ("serving", "try"),
    ("training", "runs"),
    ("cluster", "cluster"),
    ("failed", "log/prepare"),
    ("refused", "try"),
    ("empty", "runs"),
    ("empty", "try"),
)


def shoot(page: Page, base: str, home: str, panel: str, file: Path, *, whole: bool) -> None:
    page.goto(f"{base}#/{home}/{panel}")
    page.locator(f"main .panel.{panel.partition('/')[0]} h1").first.wait_for(state="attached")
    page.locator("main .loading").first.wait_for(state="detached")
    if panel == "overview":
        page.locator(".connection.live").wait_for()
    page.wait_for_timeout(600)  # what is fetched after the first look
    page.screenshot(path=file, full_page=whole)


def for_docs(browser: Browser, base: str, home: str | None) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light", locale="en-US")
    for panel, scenario in FOR_DOCS.items():
        shoot(page, base, home or scenario, panel, IMAGES / f"studio-{panel}.png", whole=False)


def to_look_at(browser: Browser, base: str, folder: Path, part: str) -> None:
    wanted = [(home, panel) for home in SCENARIOS for panel in EVERYWHERE]
    for theme in ("light", "dark"):
        for locale in ("en-US", "zh-CN"):
            for width in (1280, 380):
                context = browser.new_context(
                    viewport={"width": width, "height": 900}, color_scheme=theme, locale=locale
                )
                page = context.new_page()
                for home, panel in (*wanted, *ELSEWHERE):
                    name = f"{home}-{panel.replace('/', '-')}-{theme}-{locale[:2]}-{width}"
                    if part in name:
                        shoot(page, base, home, panel, folder / f"{name}.png", whole=True)
                context.close()


def main(verb: str = "docs", *rest: str) -> None:
    with fake_studio([make() for make in SCENARIOS.values()]) as (base, _), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        if verb == "look":
            to_look_at(browser, base, Path(rest[0]), rest[1] if len(rest) > 1 else "")
        elif rest:
            for_docs(browser, f"{rest[0].rstrip('/')}/", rest[1])
        else:
            for_docs(browser, base, None)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
