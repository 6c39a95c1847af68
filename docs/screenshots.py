"""Captures docs/images/*.png from a real run: `make screenshots`.

Synthetic logs are trained, published and served by `clickline up`; a second model is published beside it, requests with
a changing load are sent to the server, and the pages of the studio and the reports are captured while that happens.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import yaml
from playwright.async_api import Page, async_playwright

from clickline.client import AsyncClient

IMAGES = Path(__file__).with_name("images")
SCRIPT = Path(sys.executable).with_name("clickline")
CHROMIUM = "/usr/bin/chromium"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
ROWS = 100_000
LOAD = (40, 60, 90, 120, 80, 50, 100, 150, 110, 70)  # requests per second
LOAD_SECONDS = 9.0  # of each


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "ads")
        home.mkdir()
        configure(home)
        clickline(home, "sample", "--rows", str(ROWS), "--cardinality", "20000", "--out", "data", "-q")
        clickline(home, "up", "--detach")
        try:
            asyncio.run(capture(home))
        finally:
            clickline(home, "down")


def configure(home: Path) -> None:
    with socket.socket() as a, socket.socket() as b, socket.socket() as c, socket.socket() as d:
        sockets = (a, b, c, d)
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        grpc, http, metrics, studio = (one.getsockname()[1] for one in sockets)
    config = {
        "name": "ads",
        "data": {"format": "criteo", "train": "data/train.tsv", "eval": "data/eval.tsv"},
        "model": {"name": "deepfm", "embedding_dim": 8, "hidden": [64, 32]},
        "train": {"batch_size": 512},
        "gate": {"auc": 0.6},
        "cache": {"dir": "cache"},
        "tracking": {"enabled": False},
        "serve": {"grpc_port": grpc, "http_port": http, "metrics_port": metrics, "processes": 1},
        "studio": {"port": studio},
    }
    (home / "clickline.yaml").write_text(yaml.safe_dump(config))


def clickline(home: Path, *arguments: str) -> str:
    done = subprocess.run([SCRIPT, *arguments], cwd=home, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


async def capture(home: Path) -> None:
    while not (studio := json.loads(clickline(home, "status", "--json"))["studio"]):
        await asyncio.sleep(1)
    url = studio["url"]
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = await browser.new_page(viewport={"width": 1280, "height": 900}, locale="en-US")
        page.set_default_timeout(300_000)

        await page.goto(f"{url}/#/ads/overview")
        while not halfway(await status(url)):
            await asyncio.sleep(0.5)
        await page.screenshot(path=IMAGES / "studio-overview.png")

        await page.get_by_role("heading", name="ads is serving version 1").wait_for()
        other = ("--set", "model.embedding_dim=16", "--set", "train.epochs=2")
        await asyncio.to_thread(clickline, home, "train", "-q", *other)
        await asyncio.to_thread(clickline, home, "publish", "-q", *other)
        move = ("--reason", "try the rollback")
        await asyncio.to_thread(clickline, home, "versions", "rollback", *move)
        move = ("2", "--reason", "back to the larger model")
        await asyncio.to_thread(clickline, home, "versions", "promote", *move)

        await page.goto(f"{url}/#/ads/serving")
        await send_requests(home, url)
        await page.screenshot(path=IMAGES / "studio-serving.png")
        for panel in ("versions", "try"):
            await open_panel(page, url, panel)
            await page.screenshot(path=IMAGES / f"studio-{panel}.png")

        runs = httpx.get(f"{url}/api/homes/ads/runs").json()
        new, old = (run["run"] for run in runs)
        clickline(home, "report", old, new, "-o", "comparison.html")
        reports = {
            "report-page": (home / ".clickline" / "runs" / new / "report.html", "light"),
            "report-compare": (home / "comparison.html", "dark"),
        }
        for name, (path, scheme) in reports.items():
            report = await browser.new_page(color_scheme=scheme, viewport={"width": 1200, "height": 1500})
            await report.goto(path.as_uri())
            await report.locator("html[data-drawn]").wait_for()
            await report.screenshot(path=IMAGES / f"{name}.png")
        await browser.close()


def halfway(document: dict[str, Any]) -> bool:
    """Whether half of the training is done."""
    share = (document["work"] or {}).get("share") or 0
    return document["stage"] not in (None, "prepare", "train") or (
        document["stage"] == "train" and share >= 0.5
    )


async def status(url: str) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=60) as client:
        document: dict[str, Any] = (await client.get(f"{url}/api/homes/ads/status")).json()
    if document["error"]:
        raise RuntimeError(document["error"])
    return document


async def open_panel(page: Page, url: str, panel: str) -> None:
    await page.goto(f"{url}/#/ads/{panel}")
    await page.locator(f"main .panel.{panel} h1").wait_for()
    await page.locator("main .loading").first.wait_for(state="detached")
    await page.wait_for_timeout(3000)  # what is fetched afterwards


async def send_requests(home: Path, url: str) -> None:
    """Send the example rows of the playground, of 5 to 20 rows a request, at the rates of LOAD."""
    serve = yaml.safe_load((home / "clickline.yaml").read_text())["serve"]
    rows = httpx.get(f"{url}/api/homes/ads/form", timeout=60).json()["examples"]
    sizes = itertools.cycle((5, 10, 20))
    tasks = set()
    async with AsyncClient(f"127.0.0.1:{serve['grpc_port']}", model="ads") as client:
        for rate in LOAD:
            for _ in range(int(rate * LOAD_SECONDS)):
                tasks.add(asyncio.create_task(client.predict(rows[: next(sizes)])))
                await asyncio.sleep(1 / rate)
        await asyncio.gather(*tasks)


if __name__ == "__main__":
    main()
