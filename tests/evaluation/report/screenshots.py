"""Regenerates docs/images/report-*.png: `python tests/evaluation/report/screenshots.py`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from example_documents import document, refused
from playwright.sync_api import sync_playwright
from test_report_in_browser import CHROMIUM, FLAGS

from clickline.evaluation.report.comparison_page import comparison_page
from clickline.evaluation.report.page import page

IMAGES = Path(__file__).parents[3] / "docs" / "images"


def main() -> None:
    other = refused()
    other["run"]["name"] = "9c1b5d0e7f32"
    shots = {
        "report-page": (page(document()), "light", 1590),
        "report-compare": (
            comparison_page(("74a026456e01", document()), ("9c1b5d0e7f32", other)),
            "dark",
            1440,
        ),
    }
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        for name, (text, scheme, height) in shots.items():
            path = Path(folder, f"{name}.html")
            path.write_text(text)
            shown = browser.new_page(color_scheme=scheme, viewport={"width": 1200, "height": height})
            shown.goto(path.as_uri())
            shown.screenshot(path=IMAGES / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
