"""The studio as a child of `up`: its address is logged, it is restarted when it dies, and it never affects the run."""

from __future__ import annotations

import json
import os
import signal
import socket
from typing import Any

import httpx
import pytest
from up_home import Home, eventually, free_ports

pytestmark = pytest.mark.slow


@pytest.fixture
def shown(home: Home) -> Home:
    """With the studio on a free port."""
    (port,) = free_ports(1)
    home.configure(studio={"port": port})
    return home


def page(home: Home) -> str | None:
    found = home.state.get("studio")
    return None if found is None else str(found["url"])


def homes(home: Home) -> Any:
    return httpx.get(f"{page(home)}/api/homes", timeout=10).json()


def test_up_prints_the_studio_address_and_stops_it(shown: Home) -> None:
    up = shown.start("up")
    shown.until_up(up)
    url = eventually(lambda: page(shown))
    assert homes(shown) == [
        {
            "id": "ads",
            "name": "ads",
            "home": str(shown.folder / ".clickline"),
            "config": None,
            "state": "running",
        }
    ]
    assert f"studio: {url}" in eventually(
        lambda: shown.output(up)[1] if "studio: " in shown.output(up)[1] else ""
    )
    token = shown.folder / ".clickline" / "studio-token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert shown.state["studio"] == {"url": url, "token_file": str(token)}
    status = shown.run("status")[1]
    assert url in status
    assert "studio " in status.partition("processes")[2]
    assert shown.run("logs", "studio")[0] == 0
    assert shown.run("down")[0] == 0
    assert shown.none_left()
    assert up.wait(10) == 0
    assert shown.state["studio"] is None


def test_studio_that_dies_is_restarted(shown: Home) -> None:
    up = shown.start("up")
    shown.until_up(up)
    eventually(lambda: page(shown))
    first, served = shown.pid("studio"), shown.pid("serve")
    os.kill(first, signal.SIGKILL)
    # While it comes again, the state names none.
    others = lambda: {one["pid"] for one in shown.state["processes"] if one["role"] == "studio"} - {first}  # noqa: E731
    eventually(lambda: page(shown) and others())
    assert homes(shown)[0]["state"] == "running"
    assert shown.pid("serve") == served
    assert "the studio ended by signal 9" in shown.output(up)[1]
    os.kill(up.pid, signal.SIGKILL)  # nobody tells it: it ends with its parent all the same
    up.wait(10)
    assert shown.none_left()


def test_studio_port_in_use_is_logged_once_and_the_run_continues(shown: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        shown.configure(studio={"port": taken.getsockname()[1]})
        up = shown.start("up", "--json")
        shown.until_up(up)
        said = eventually(lambda: shown.output(up)[1] if "without the studio" in shown.output(up)[1] else "")
    assert said.count("without the studio") == 1
    assert "cannot be listened on: Address already in use" in said
    assert json.loads(shown.output(up)[0])["studio"] is None
    assert page(shown) is None
    up.send_signal(signal.SIGTERM)
    assert up.wait(20) == 0


def test_no_studio_option_starts_none(shown: Home) -> None:
    up = shown.start("up", "--no-studio")
    shown.until_up(up)
    assert [one["role"] for one in shown.state["processes"]] == ["up", "serve"]
    up.send_signal(signal.SIGTERM)
    assert up.wait(20) == 0
    assert "studio" not in "".join(shown.output(up)).replace(str(shown.folder), "")


def test_missing_studio_package_is_named_and_the_run_continues(shown: Home) -> None:
    hiding = shown.folder / "hiding"
    (hiding / "starlette").mkdir(parents=True)
    (hiding / "starlette" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'starlette'\", name='starlette')\n"
    )
    shown.environment["PYTHONPATH"] += f":{hiding}"
    up = shown.start("up")
    shown.until_up(up)
    said = eventually(lambda: shown.output(up)[1] if "without the studio" in shown.output(up)[1] else "")
    assert "pip install 'clickline[studio]'" in said
    up.send_signal(signal.SIGTERM)
    assert up.wait(20) == 0
