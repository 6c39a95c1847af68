"""Every panel in every state, clicked through in a real browser; the fixture fails on any complaint of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fake_api import PAGE, TOKEN
from fake_homes import SCENARIOS, FakeHome, point
from playwright.sync_api import expect
from watching_page import PANELS

SEEN = {  # a word that must be there: scenario -> panel -> text
    "empty": {
        "Overview": "Nothing has run in",
        "Runs": "No training runs yet",
        "Versions": "No versions yet",
        "Serving": "No endpoint is running",
        "Data": "No data prepared yet",
        "Playground": "Nothing to try yet",
    },
    "training": {
        "Overview": "ads-trial is training",
        "Runs": "training",
        "Versions": "No versions yet",
    },
    "serving": {
        "Overview": "ads is serving version 7",
        "Runs": "74a026456e9d",
        "Versions": "delta of 6",
        "Serving": "INVALID_ARGUMENT",
        "Data": "found 12, expected 40",
        "Playground": "Version 6: ",
    },
    "failed": {"Overview": "raise data.max_bad_ratio", "Data": "found 12, expected 40"},
    "refused": {
        "Overview": "gate.vs_current allows -0.002",
        "Runs": "rejected",
        "Versions": "delta of 6",
        "Playground": "No server answers here",
    },
    "dead": {"Overview": "no answer: Connection refused", "Serving": "The endpoint does not answer"},
    "follow": {
        "Overview": "Hour 20261115/19 is late",
        "Versions": "Show all 480",
        "Data": "20261026/00 to 20261115/19",
    },
    "cluster": {"Overview": "on 8 workers"},
}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_every_panel_of_every_state(studio: Any, base: str, scenario: str) -> None:
    at = studio(base)
    at.open(scenario)
    for panel in PANELS:
        at.choose(panel)
        if words := SEEN[scenario].get(panel):
            expect(at.page.locator("main")).to_contain_text(words)
        for width in (2560, 380, 1280):
            at.page.set_viewport_size({"width": width, "height": 900})
            needs = at.page.evaluate("document.documentElement.scrollWidth")
            assert needs <= width, f"{panel} needs {needs} px of {width}"
    assert at.page.get_by_role("link", name="Cluster").count() == (scenario == "cluster")


def test_empty_home_names_the_command(studio: Any, base: str) -> None:
    at = studio(base)
    at.open("empty")
    expect(at.page.locator(".command")).to_have_text("clickline up -c /srv/new-shop/clickline.yaml")


def test_progress_moves_without_a_reload(studio: Any, serve: Any) -> None:
    home = SCENARIOS["training"]()
    share = 0.25
    home.share = lambda: share  # type: ignore[method-assign]
    at = studio(serve([home])[0])
    at.open("training")
    bar = at.page.get_by_role("progressbar", name="Train")
    expect(bar).to_have_attribute("aria-valuenow", "25")
    expect(at.page).to_have_title(re.compile("^25 %"))
    at.page.evaluate("window.same = true")
    share = 0.8
    expect(bar).to_have_attribute("aria-valuenow", "80")
    expect(at.page.locator(".working")).to_contain_text(
        "192,000 rows · 24,331 rows/s · 80 % · about 2.0 s left"
    )
    assert at.page.evaluate("window.same")


def test_finished_stage_is_announced_to_screen_readers(studio: Any, serve: Any) -> None:
    home = SCENARIOS["training"]()
    at = studio(serve([home])[0])
    at.open("training")
    home.status = SCENARIOS["serving"]().status
    expect(at.page.locator("#announcement")).to_have_text(re.compile("Serve: running|Publish: done"))


def test_failed_stage_links_its_log(studio: Any, base: str) -> None:
    at = studio(base)
    at.open("failed")
    at.page.get_by_role("alert").get_by_role("link", name="Log: Prepare").click()
    expect(at.page.locator("pre.log")).to_contain_text("line 49 of the log")


def test_up_to_six_runs_are_plotted(studio: Any, base: str) -> None:
    at = studio(base)
    at.open("serving", "runs")
    boxes = at.page.get_by_role("checkbox")
    expect(at.page.locator(".legend li")).to_have_count(3)
    for n in (3, 4, 5):
        boxes.nth(n).check()
    expect(at.page.locator(".legend li")).to_have_count(6)
    expect(boxes.nth(6)).to_be_disabled()
    boxes.nth(0).uncheck()
    expect(boxes.nth(6)).to_be_enabled()
    tones = at.page.locator(".area path.line").evaluate_all(
        "all => all.map(one => one.getAttribute('class'))"
    )
    assert len(set(tones)) == 5


def test_run_details_link_the_report(studio: Any, base: str) -> None:
    at = studio(base)
    at.open("serving", "runs")
    at.page.get_by_role("link", name="1f0c96a35c1b", exact=True).click()
    expect(at.page.locator("h1")).to_have_text("Run 1f0c96a35c1b")
    for title in ("AUC", "Loss", "Rows/s", "Calibration", "ROC"):
        expect(at.page.locator(".chart-title", has_text=re.compile(f"^{title}$"))).to_have_count(1)
    with at.page.context.expect_page() as opened:
        at.page.get_by_role("link", name="Open the full report").click()
    expect(opened.value.locator("h1")).to_have_text("Report")


def test_diff_of_two_versions(studio: Any, base: str) -> None:
    at = studio(base)
    at.open("serving", "versions")
    at.page.get_by_role("button", name="Compare version 3 with the live one").click()
    expect(at.page.get_by_label("First version")).to_have_value("3")
    expect(at.page.locator("#diff")).to_contain_text("+0.0028")


def test_rolling_back_needs_a_reason_and_the_token(studio: Any, one_home: str, ads: FakeHome) -> None:
    at = studio(one_home)
    at.open("serving", "versions")
    dialog = at.page.get_by_role("dialog")
    at.page.get_by_role("button", name="Roll back to 6").first.click()
    confirm = dialog.get_by_role("button", name="Roll back to 6")
    dialog.get_by_label("Token").fill("wrong")
    confirm.click()
    assert ads.versions["current"] == 7  # the browser itself asks for the reason
    dialog.get_by_label("Reason").fill("7 scores too high in app 7")
    confirm.click()
    expect(dialog.get_by_role("alert")).to_contain_text("missing or wrong")
    at.complaints.clear()  # Chromium itself notes the 401
    dialog.get_by_label("Token").fill(TOKEN)
    confirm.click()
    expect(dialog).to_have_count(0)
    expect(at.page.locator("tr.live th")).to_have_text("6")
    expect(at.page.locator(".moves li").first).to_contain_text("7 scores too high in app 7")
    assert ads.versions["current"] == 6
    at.page.get_by_role("button", name="Pin 6").click()  # the token is not asked for again
    expect(dialog.get_by_label("Token")).to_have_count(0)
    dialog.get_by_label("Reason").fill("stay")
    dialog.get_by_role("button", name="Pin 6").click()
    expect(at.page.get_by_role("button", name="Unpin")).to_be_visible()
    at.page.get_by_role("button", name="Unpin").click()
    dialog.get_by_label("Reason").fill("go on")
    dialog.get_by_role("button", name="Unpin 6").click()
    expect(at.page.get_by_role("button", name="Unpin")).to_have_count(0)
    assert [move["reason"] for move in ads.versions["moves"][:3]] == [
        "go on",
        "stay",
        "7 scores too high in app 7",
    ]


def test_serving_is_live(studio: Any, one_home: str, ads: FakeHome) -> None:
    at = studio(one_home)
    now = ads.serving()
    at.page.route(
        "**/api/homes/serving/serving", lambda asked: asked.fulfill(json=now)
    )  # so only events tell more
    at.open("serving", "serving")
    ads.serving = lambda: now | {"history": [*now["history"], point(0) | {"qps": 98_765.0}]}
    expect(at.page.locator(".figures .figure").first).to_contain_text("98.8k")


def test_playground_scores_on_enter(studio: Any, base: str) -> None:
    at = studio(base)
    at.open("serving", "try")
    answer = at.page.locator(".probability")
    before = answer.inner_text()
    asked: list[str] = []
    at.page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/try") else None)
    field = at.page.get_by_label("C1", exact=True)
    field.fill("")
    field.press("Enter")
    expect(answer).not_to_have_text(before)
    assert re.fullmatch(r"\d+\.\d\d %", answer.inner_text())
    expect(at.page.locator(".bars li", has_text="C12")).to_have_count(1)
    expect(at.page.locator(".bars li", has_text=re.compile(r"^C1\b"))).to_have_count(
        0
    )  # what is missing adds nothing
    assert len(asked) == 1


def test_candidates_are_ranked(studio: Any, base: str) -> None:
    at = studio(base)
    at.open("serving", "try")
    at.page.locator(".probability").wait_for()
    at.page.get_by_role("button", name="Add candidate").click()
    at.page.get_by_label("C2", exact=True).fill("00ff00ff")
    at.page.get_by_label("C2", exact=True).press("Enter")
    rows = at.page.locator(".answer tbody tr")
    expect(rows).to_have_count(2)
    expect(at.page.locator(".answer")).to_contain_text("C2 00ff00ff")
    # The text above is typed, so it is there before the answer to it is.
    at.page.wait_for_function(
        """() => {
            const cells = [...document.querySelectorAll(".answer tbody td:nth-child(3)")];
            const shown = cells.map((cell) => parseFloat(cell.innerText));
            return shown.length === 2 && shown[0] > shown[1];
        }"""
    )
    at.page.get_by_role("button", name="Remove candidate 2").click()
    expect(rows).to_have_count(0)


def test_rejected_request_is_shown(studio: Any, one_home: str) -> None:
    at = studio(one_home)
    at.open("serving", "try")
    at.page.locator(".probability").wait_for()
    at.page.get_by_label("I1", exact=True).fill("boom")
    at.page.get_by_label("I1", exact=True).press("Enter")
    expect(at.page.get_by_role("alert")).to_contain_text("I1 is 'boom', not a number")
    at.complaints.clear()  # Chromium itself notes the 400


def test_text_of_a_row_is_not_interpreted(studio: Any, base: str) -> None:
    at = studio(base)
    at.open("serving", "data")
    expect(at.page.locator(".samples")).to_contain_text("<script>alert(1)</script>")
    assert at.page.locator("main script").count() == 0


def test_a_history_of_500_hours(studio: Any, base: str) -> None:
    at = studio(base)
    at.open("follow", "data")
    expect(at.page.locator(".strip .cell[data-place]")).to_have_count(500)
    expect(at.page.locator(".strip .cell.corrupt")).to_have_count(5)
    at.page.get_by_role("radio", name="AUC").click()
    expect(at.page.locator(".strip .cell.level5").first).to_be_visible()
    at.page.locator(".strip .cell.corrupt").first.hover()
    expect(at.page.locator(".strip-description")).to_contain_text("data.max_bad_ratio allows 1 %")


def test_page_reconnects_to_a_restarted_studio(studio: Any, serve: Any) -> None:
    home = SCENARIOS["serving"]()
    base, port, end = serve([home])
    at = studio(base)
    at.open("serving", "versions")
    expect(at.page.locator("#banner")).to_be_empty()
    end()
    expect(at.page.locator("#banner")).to_contain_text("No connection to the studio")
    expect(at.page.get_by_role("button", name="Retry now")).to_be_visible()
    home.versions["moves"][0]["reason"] = "while nobody looked"
    serve([home], port=port)
    expect(at.page.locator("#banner")).to_be_empty(timeout=15_000)
    expect(at.page.locator(".moves")).to_contain_text("while nobody looked")
    at.complaints.clear()  # Chromium itself notes refused connections


def test_reading_can_require_the_token(studio: Any, serve: Any) -> None:
    base, _, _ = serve([SCENARIOS["serving"]()], guarded=True)
    at = studio(base)
    at.page.goto(base)
    dialog = at.page.get_by_role("dialog", name="This studio requires a token")
    dialog.get_by_label("Token").fill(TOKEN)
    dialog.get_by_role("button", name="Continue").click()
    expect(at.page.locator("h1")).to_have_text("ads is serving version 7")
    expect(at.page.locator(".connection")).to_have_text("live")
    at.page.reload()  # kept for the session
    expect(at.page.locator("h1")).to_have_text("ads is serving version 7")
    at.complaints.clear()  # Chromium itself notes the first 401


def test_cancelled_token_dialog_keeps_the_error_on_the_page(studio: Any, serve: Any) -> None:
    base, _, _ = serve([SCENARIOS["serving"]()], guarded=True)
    at = studio(base)
    at.page.goto(base)
    dialog = at.page.get_by_role("dialog", name="This studio requires a token")
    expect(dialog).to_contain_text("studio-token in the home")
    dialog.get_by_role("button", name="Cancel").click()
    expect(at.page.locator("#main")).to_contain_text("nothing is shown without the token")
    at.complaints.clear()  # Chromium itself notes the 401


def test_home_can_be_switched(studio: Any, base: str) -> None:
    at = studio(base)
    at.open("serving", "versions")
    at.page.get_by_label("Home").select_option("feed-hourly")
    expect(at.page.locator(".figure.main .figure-value")).to_have_text("480")


def test_chinese_and_dark_are_remembered(studio: Any, base: str) -> None:
    at = studio(base)
    at.open("serving")
    at.page.get_by_role("button", name="中文").click()
    expect(at.page.locator("h1")).to_have_text("ads 线上版本为 7")
    expect(at.page.locator("html")).to_have_attribute("lang", "zh-CN")
    at.page.get_by_role("button", name="主题").click()
    at.page.get_by_role("button", name="主题").click()
    at.page.reload()
    expect(at.page.locator("html")).to_have_attribute("data-theme", "dark")
    expect(at.page.locator("h1")).to_have_text("ads 线上版本为 7")


def test_a_chinese_browser_gets_chinese(studio: Any, base: str) -> None:
    at = studio(base, locale="zh-CN")
    at.open("empty")
    expect(at.page.locator(".nothing-title")).to_contain_text("还没有运行记录")


def test_collapsed_parts_stay_collapsed(studio: Any, one_home: str, ads: FakeHome) -> None:
    at = studio(one_home)
    at.open("serving", "versions")
    measures = at.page.locator("details", has_text="Metrics")
    at.page.locator("summary", has_text="Metrics").click()
    expect(measures).not_to_have_attribute("open", "")
    ads.versions["moves"][0]["reason"] = "drawn again"
    ads.changed.append("versions")
    expect(at.page.locator(".moves")).to_contain_text("drawn again")
    expect(measures).not_to_have_attribute("open", "")


def test_page_loads_within_a_second(studio: Any, base: str) -> None:
    """What the first panel needs is small; the others come when there is time."""
    at = studio(base)
    sizes: dict[str, int] = {}
    at.page.on(
        "response",
        lambda answer: (
            sizes.update({answer.url.rpartition("/")[2]: len(answer.body())})
            if "/api/" not in answer.url
            else None
        ),
    )
    at.open("serving")
    times = []
    for _ in range(3):  # the best of three: others may be busy on this machine
        at.page.reload()
        times.append(
            at.page.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd")
        )
    later = {f"{name}.js" for name in ("runs", "versions", "serving", "data", "cluster", "tryit", "log")}
    first = sum(size for name, size in sizes.items() if name not in later)
    assert {"app.js", "overview.js", "style.css"} <= sizes.keys()
    assert first < 110_000
    assert (
        sum(path.stat().st_size for path in PAGE.iterdir()) < 200_000
    )  # with both languages, as it lies on the disk
    assert min(times) < 1000, f"DOMContentLoaded after {times} ms"


def test_dead_endpoint_is_noticed_at_once(studio: Any, one_home: str, ads: FakeHome) -> None:
    at = studio(one_home)
    at.open("serving")
    gone = SCENARIOS["dead"]()
    ads.status, ads.serving = gone.status, gone.serving
    expect(at.page.get_by_role("alert")).to_contain_text("no answer: Connection refused")
    expect(at.page.locator(".figure", has_text="Requests/s")).to_contain_text("–")
