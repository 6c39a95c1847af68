"""The page on a real studio and a real `up`: from an empty home to a version that is rolled back, with no reload."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from playwright.sync_api import expect
from watching_page import PANELS

sys.path.append(str(Path(__file__).parents[2] / "studio"))

from studio_world import clickline, configure, opened, write_logs


def run(*arguments: str, cwd: Path) -> None:
    done = clickline(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_home_from_empty_to_rolled_back(studio: Any, tmp_path: Path) -> None:
    folder = tmp_path / "ads"
    file = configure(folder)
    write_logs(folder)
    (folder / "other.yaml").write_text(
        yaml.safe_dump(yaml.safe_load(file.read_text()) | {"train": {"batch_size": 128, "epochs": 2}})
    )
    with opened("-c", "clickline.yaml", cwd=folder) as real:
        at = studio(f"{real.url}/")
        page = at.page
        at.open("ads")
        expect(page.locator(".nothing")).to_contain_text("Nothing has run")
        for panel in PANELS[1:]:
            at.choose(panel)
            expect(page.locator(".nothing")).to_be_visible()
        at.choose("Overview")
        page.evaluate("window.same = true")

        try:
            run("up", "--detach", "--wait", "--no-studio", cwd=folder)
            expect(page.locator("h1")).to_have_text("ads is serving version 1", timeout=20_000)
            expect(page.locator(".stage .mark.good")).to_have_count(5)
            expect(page.locator(".badge", has_text="ready")).to_be_visible()
            for command in ("train", "publish"):
                run(command, "-q", "-c", "other.yaml", cwd=folder)
            expect(page.locator("h1")).to_have_text("ads is serving version 2", timeout=20_000)

            at.choose("Runs")
            expect(page.locator("tbody tr")).to_have_count(2)
            expect(page.locator(".area path.line")).to_have_count(2)
            page.locator("tbody a").first.click()
            expect(page.locator(".figure").first).to_contain_text(re.compile(r"0\.\d{4}"))
            with page.context.expect_page() as report:
                page.get_by_role("link", name="Open the full report").click()
            expect(report.value.locator("h1").first).to_be_visible()
            report.value.close()

            at.choose("Data")
            expect(page.locator(".samples li").first).to_contain_text("only three")

            at.choose("Playground")
            answer = page.locator(".probability")
            before = answer.inner_text()
            expect(page.locator(".result")).to_contain_text("Version 1: ")
            shown = page.locator(".bars li .bar-name").first.inner_text().split()[0]
            field = page.get_by_label(shown, exact=True)
            field.fill("")
            field.press("Enter")
            expect(answer).not_to_have_text(before)

            at.choose("Serving")
            expect(page.locator(".figure", has_text="Requests").last).not_to_contain_text("–")
            expect(page.locator(".area").first).to_be_visible(timeout=15_000)

            at.choose("Versions")
            page.get_by_role("button", name="Roll back to 1").first.click()
            dialog = page.get_by_role("dialog")
            dialog.get_by_label("Reason").fill("2 was only to see")
            dialog.get_by_label("Token").fill(real.token_file.read_text().strip())
            dialog.get_by_role("button", name="Roll back to 1").click()
            expect(page.locator("tr.live th")).to_have_text("1")
            expect(page.locator(".moves li").first).to_contain_text("2 was only to see")
            at.choose("Overview")
            expect(page.locator("h1")).to_have_text("ads is serving version 1")
            assert page.evaluate("window.same"), "the page was loaded again"
        finally:
            run("down", cwd=folder)
        expect(page.locator("h1")).to_have_text("ads was stopped in stage Serve")
        page.goto("about:blank")  # before the studio ends
