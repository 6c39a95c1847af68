"""The studio as a child of `up`: its address is logged, it is restarted when it dies, and it never affects the run."""

from __future__ import annotations

import json
import os
import signal
import socket
from typing import Any

import httpx
import pytest
from up_home import Home, eventually

from servers.waiting import free_ports

pytestmark = pytest.mark.slow


@pytest.fixture
def studio_home(home: Home) -> Home:
    """With the studio on a free port."""
    (port,) = free_ports(1)
    home.configure(studio={"port": port})
    return home


def page(home: Home) -> str | None:
    found = home.state.get("studio")
    return None if found is None else str(found["url"])


def homes(home: Home) -> Any:
    return httpx.get(f"{page(home)}/api/homes", timeout=10).json()


def test_up_prints_the_studio_address_and_stops_it(studio_home: Home) -> None:
    up = studio_home.start("up")
    studio_home.until_up(up)
    url = eventually(lambda: page(studio_home))
    assert homes(studio_home) == [
        {
            "id": "ads",
            "name": "ads",
            "home": str(studio_home.folder / ".clickline"),
            "config": None,
            "state": "running",
        }
    ]
    assert f"studio: {url}" in eventually(
        lambda: studio_home.output(up)[1] if "studio: " in studio_home.output(up)[1] else ""
    )
    token = studio_home.folder / ".clickline" / "studio-token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert studio_home.state["studio"] == {"url": url, "token_file": str(token)}
    status = studio_home.run("status")[1]
    assert url in status
    assert "studio " in status.partition("processes")[2]
    assert studio_home.run("logs", "studio")[0] == 0
    assert studio_home.run("down")[0] == 0
    assert studio_home.none_left()
    assert up.wait(10) == 0
    assert studio_home.state["studio"] is None


def test_studio_that_dies_is_restarted(studio_home: Home) -> None:
    up = studio_home.start("up")
    studio_home.until_up(up)
    eventually(lambda: page(studio_home))
    first, served = studio_home.pid("studio"), studio_home.pid("serve")
    os.kill(first, signal.SIGKILL)

    def others() -> set[int]:  # while it is restarted, the state names none
        return {one["pid"] for one in studio_home.state["processes"] if one["role"] == "studio"} - {first}

    eventually(lambda: page(studio_home) and others())
    assert homes(studio_home)[0]["state"] == "running"
    assert studio_home.pid("serve") == served
    assert "the studio ended by signal 9" in studio_home.output(up)[1]
    os.kill(up.pid, signal.SIGKILL)  # without a signal to the studio, which ends with its parent
    up.wait(10)
    assert studio_home.none_left()


def test_studio_port_in_use_is_logged_once_and_the_run_continues(studio_home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        studio_home.configure(studio={"port": taken.getsockname()[1]})
        up = studio_home.start("up", "--json")
        studio_home.until_up(up)
        said = eventually(
            lambda: studio_home.output(up)[1] if "without the studio" in studio_home.output(up)[1] else ""
        )
    assert said.count("without the studio") == 1
    assert "cannot be listened on: Address already in use" in said
    assert json.loads(studio_home.output(up)[0])["studio"] is None
    assert page(studio_home) is None
    up.send_signal(signal.SIGTERM)
    assert up.wait(20) == 0


def test_no_studio_option_starts_none(studio_home: Home) -> None:
    up = studio_home.start("up", "--no-studio")
    studio_home.until_up(up)
    assert [one["role"] for one in studio_home.state["processes"]] == ["up", "serve"]
    up.send_signal(signal.SIGTERM)
    assert up.wait(20) == 0
    assert "studio" not in "".join(studio_home.output(up)).replace(str(studio_home.folder), "")


def test_missing_studio_package_is_named_and_the_run_continues(studio_home: Home) -> None:
    hiding = studio_home.folder / "hiding"
    (hiding / "starlette").mkdir(parents=True)
    (hiding / "starlette" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'starlette'\", name='starlette')\n"
    )
    studio_home.environment["PYTHONPATH"] += f":{hiding}"
    up = studio_home.start("up")
    studio_home.until_up(up)
    said = eventually(
        lambda: studio_home.output(up)[1] if "without the studio" in studio_home.output(up)[1] else ""
    )
    assert "pip install 'clickline[studio]'" in said
    up.send_signal(signal.SIGTERM)
    assert up.wait(20) == 0
