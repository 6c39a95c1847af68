"""A page of the studio that is looked at by a test; a base URL is all it needs."""

from __future__ import annotations

from playwright.sync_api import Page, expect

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
PANELS = ("Overview", "Runs", "Versions", "Serving", "Data", "Playground")


class Watched:
    """A page of which every complaint is kept: console errors, exceptions, failed and foreign requests."""

    def __init__(self, page: Page, base: str) -> None:
        self.page = page
        self.base = base
        self.complaints: list[str] = []
        page.set_default_timeout(10_000)
        page.on(
            "console",
            lambda said: self.complaints.append(said.text) if said.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on(
            "request",
            lambda asked: (
                None
                if asked.url.startswith((base, "blob:"))
                else self.complaints.append(f"foreign: {asked.url}")
            ),
        )
        page.on(
            "requestfailed",
            lambda asked: (
                None
                if asked.failure == "net::ERR_ABORTED"
                else self.complaints.append(f"{asked.url}: {asked.failure}")
            ),
        )

    def open(self, home: str, panel: str = "overview") -> None:
        """Go there, and wait until it is drawn."""
        self.page.goto(f"{self.base}#/{home}/{panel}")
        self.page.locator(f"main .panel.{panel.partition('/')[0]} h1").first.wait_for(state="attached")
        self.page.locator("main .loading").first.wait_for(state="detached")

    def choose(self, panel: str) -> None:
        """Click its name, and wait until it is drawn."""
        self.page.get_by_role("navigation").get_by_role("link", name=panel, exact=True).click()
        expect(self.page.locator("main h1").first).to_be_attached()
        expect(self.page.locator("main .loading")).to_have_count(0)
