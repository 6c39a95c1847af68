"""A real Chromium, and the double of the studio's API with a home for every state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fake_api import fake_studio
from fake_homes import SCENARIOS, FakeHome
from playwright.sync_api import Browser, sync_playwright
from watching_page import CHROMIUM, FLAGS, Watched

Serve = Callable[..., tuple[str, int, Callable[[], None]]]


@pytest.fixture(scope="module")  # Playwright holds this thread's event loop: no longer than its own tests
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not Path(CHROMIUM).exists():
        pytest.skip("no Chromium: `make browser` installs it")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=list(FLAGS),
            headless=True,
            downloads_path=tmp_path_factory.mktemp("browser"),
        )
        yield found
        found.close()


@pytest.fixture(scope="session")
def base() -> Iterator[str]:
    """Every scenario as a home of one studio. No test changes these."""
    with fake_studio([make() for make in SCENARIOS.values()]) as (url, _):
        yield url


@pytest.fixture
def ads() -> FakeHome:
    """A home of one's own, which a test may change."""
    return SCENARIOS["serving"]()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts studios of one's own; they outlive the pages that look at them."""
    with ExitStack() as all_of_them:

        def begin(homes: list[FakeHome], **options: Any) -> tuple[str, int, Callable[[], None]]:
            mine = all_of_them.enter_context(ExitStack())
            url, port = mine.enter_context(fake_studio(homes, **options))
            return url, port, mine.close

        yield begin


@pytest.fixture
def studio(browser: Browser, serve: Serve) -> Iterator[Callable[..., Watched]]:
    """Opens pages; a test that leaves a complaint behind fails."""
    opened: list[Watched] = []

    def at(base: str, **options: Any) -> Watched:
        context = browser.new_context(
            **({"viewport": {"width": 1280, "height": 900}, "locale": "en-US"} | options)
        )
        opened.append(Watched(context.new_page(), base))
        return opened[-1]

    yield at
    for watched in opened:
        watched.page.context.close()
    assert [complaint for watched in opened for complaint in watched.complaints] == []


@pytest.fixture
def one_home(ads: FakeHome, serve: Serve) -> str:
    """A studio with that home alone."""
    return serve([ads])[0]
