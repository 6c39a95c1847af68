"""The commands of a new user, for each format with a preset: from nothing to a scored request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from up_home import Home

from servers.waiting import free_serve_ports

pytestmark = pytest.mark.slow


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Home]:
    """An empty folder."""
    folder = tmp_path / "ads"
    folder.mkdir()
    home = Home(folder, {})
    yield home
    assert home.end() == [], "processes were left behind"


@pytest.mark.parametrize(
    ("preset", "ending"),
    [
        ("criteo", "tsv"),
        # The tutorial and the pages for those who come from elsewhere have these two in `make test`.
        pytest.param("slots", "txt", marks=pytest.mark.soak),
        pytest.param("csv", "csv", marks=pytest.mark.soak),
    ],
)
def test_up_from_an_empty_folder_to_a_scored_request(empty: Home, preset: str, ending: str) -> None:
    def typed(*arguments: str) -> str:
        code, out, err = empty.run(*arguments)
        assert code == 0, err
        return out

    typed("init", ".", "--preset", preset)
    typed(
        "sample",
        "--format",
        preset,
        "--rows",
        "8000",
        "--out",
        "data",
        "--slots",
        "26",
        "--cardinality",
        "50",
    )
    empty.configure(
        serve={**free_serve_ports(), "processes": 1, "drain_timeout": 2},
        tracking={"enabled": False},
        cache={"dir": "cache"},
        gate={"auc": 0.55},
    )
    typed("up", "--detach", "--wait")
    state = json.loads(typed("status", "--json"))
    assert state["state"] == "running"
    assert {name: one["state"] for name, one in state["stages"].items()} == {
        **dict.fromkeys(("prepare", "train", "evaluate", "gate", "publish"), "done"),
        "serve": "running",
    }
    reached = state["stages"]["evaluate"]["facts"]["auc"]
    for protocol in ("grpc", "http"):
        answered = json.loads(typed("predict", "-i", f"data/eval.{ending}", "--protocol", protocol, "--json"))
        assert answered["metrics"]["rows"] == 1600
        assert answered["metrics"]["auc"] == pytest.approx(reached, abs=1e-6)
        assert answered["best_auc"] > reached
    assert "stopped " in typed("down")
    again = typed("up", "--no-serve", "--json")
    assert all(one in json.loads(again)["skipped"] for one in ("prepare", "train", "evaluate", "publish"))
