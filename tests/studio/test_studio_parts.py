"""Pieces that need no server: who looks, quantiles of histograms, tokens, what an answer may hold."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from studio_world import configure

from clickline.config import load_config
from clickline.errors import ClicklineError
from clickline.features import DenseField, FeatureSpec, SlotField
from clickline.features.raw_columns import raw_column
from clickline.pipeline.hour_records import HourRecords
from clickline.records import RawRows
from clickline.storage.redaction import Redactor
from clickline.studio import events, example_rows
from clickline.studio.dataset_view import DatasetView
from clickline.studio.events import EventBroadcaster
from clickline.studio.home_view import HomeView, SlowAnswer
from clickline.studio.homes import Home, home_of, open_homes
from clickline.studio.json_response import encode_json
from clickline.studio.runs_view import RunsView
from clickline.studio.serving_view import ServingView
from clickline.studio.studio_auth import Access, StudioToken, studio_token
from servers.serving import QuietHandler, served


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return home_of(load_config(configure(tmp_path / "ads")), None, set())


def test_polling_runs_only_while_someone_listens(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_SAMPLING_SECONDS", 0.2)
    monkeypatch.setattr(events, "_SECONDS", 0.1)

    async def story() -> None:
        watch = EventBroadcaster(HomeView(home), lambda document: json.dumps(document, default=str).encode())
        assert not watch.is_polling
        first, second = watch.stream(), watch.stream()
        assert await anext(first) == await anext(second) == b": hello\n\n"
        for stream in (first, second):
            assert (await anext(stream)).startswith(b"event: status\ndata: {")
        assert watch.is_polling
        await first.aclose()
        await asyncio.sleep(0.3)
        assert watch.is_polling
        await second.aclose()
        async with asyncio.timeout(10):
            while watch.is_polling:
                await asyncio.sleep(0.01)
        await watch.serving()
        assert watch.is_polling
        async with asyncio.timeout(10):
            while watch.is_polling:
                await asyncio.sleep(0.01)
        third = watch.stream()
        await anext(third)
        watch.close()
        assert [event async for event in third] == []

    asyncio.run(story())


def test_concurrent_identical_reads_share_one_result(home: Home) -> None:
    calls = []
    done = threading.Event()

    def slow() -> int:
        calls.append(1)
        assert done.wait(10)
        return 7

    async def story() -> None:
        view = HomeView(home)
        asked = [asyncio.create_task(view.run_once("it", slow)) for _ in range(5)]
        with pytest.raises(SlowAnswer, match=r"no answer within 0.05 s: it"):
            await view.run_once("it", slow, 0.05)
        done.set()
        assert await asyncio.gather(*asked) == [7] * 5
        assert len(calls) == 1
        assert await view.run_once("it", slow) == 7
        assert len(calls) == 2

    asyncio.run(story())


def write_run(home: Path, name: str, *, curve_age: float | None = None, **report: object) -> None:
    folder = home / "runs" / name
    folder.mkdir(parents=True)
    (folder / "resolved.yaml").write_text("name: ads")
    if report:
        (folder / "report.json").write_text(json.dumps(report))
    if curve_age is not None:
        curve = {"stride": 1, "step": [10, 20], "loss": [0.6, 0.5], "auc": [0.6, None]}
        (folder / "curve.json").write_text(json.dumps(curve))
        at = time.time() - curve_age
        os.utime(folder / "curve.json", (at, at))


def test_run_states(tmp_path: Path) -> None:
    passed = {"passed": True, "reasons": [], "warnings": []}
    measured = {"auc": 0.7, "logloss": 0.5, "calibration": 1.0}
    report = {"checkpoint": "step-000000030", "epochs": [{}], "evaluation": measured, "gate": passed}
    write_run(tmp_path, "finished", **report, curve_age=100.0)
    write_run(tmp_path, "refused", **report | {"gate": {**passed, "passed": False}})
    write_run(tmp_path, "training", curve_age=1.0)
    write_run(tmp_path, "stopped", curve_age=100.0)
    write_run(tmp_path, "unmeasured", **report | {"evaluation": None})
    write_run(tmp_path, "follow")
    records = HourRecords(str(tmp_path), 1)
    records.write(
        490_896, {"hour": "20260101/00", "state": "learned", "progressive": measured, "gate": passed}
    )
    runs = RunsView(tmp_path)
    found = {run["run"]: run for run in runs.list({"state": "never"})}
    assert {name: run["state"] for name, run in found.items()} == {
        "finished": "finished",
        "refused": "refused",
        "training": "training",
        "stopped": "stopped",
        "unmeasured": "finished",
        "follow": "stopped",
    }
    assert (found["finished"]["auc"], found["finished"]["step"]) == (0.7, 30)
    assert (found["training"]["logloss"], found["training"]["step"]) == (0.5, 20)
    assert found["follow"]["auc"] == 0.7
    assert found["unmeasured"]["auc"] is None
    assert runs.curve("training") == {"step": [10, 20], "loss": [0.6, 0.5], "auc": [0.6, None]}
    following = {run["run"]: run["state"] for run in runs.list({"state": "running", "follow": True})}
    assert following["follow"] == "training"
    write_run(tmp_path, "begun")  # what `up` trains now, before its first point
    busy = {"state": "running", "stages": {"train": {"state": "running", "facts": {}}}}
    states = {run["run"]: run["state"] for run in runs.list(busy)}
    assert (states["begun"], states["stopped"]) == ("training", "stopped")
    before = runs.stamp()
    write_run(tmp_path, "more")
    assert runs.stamp() != before


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({"state": "waiting", "late": False}, "waiting"),
        ({"state": "waiting", "late": True}, "missing"),
        ({"state": "learning", "late": False}, "learning"),
    ],
)
def test_awaited_hour_is_listed_last(tmp_path: Path, facts: dict[str, object], state: str) -> None:
    HourRecords(str(tmp_path), 1).write(
        490_896, {"hour": "20260101/00", "state": "skipped", "reason": "late"}
    )
    (tmp_path / "follow/hours/torn.json").write_text("{")
    told = {"hour": "20260101/01", "waiting_since": "2026-01-01T02:00:00+00:00", **facts}
    up = {"state": "running", "stages": {"follow": {"state": "running", "facts": told}}}
    found = DatasetView(tmp_path).all(up)
    assert [(hour["hour"], hour["state"]) for hour in found["hours"]] == [
        ("20260101/00", "skipped"),
        ("20260101/01", state),
    ]
    assert found["summary"]["waiting"] == (state != "learning")
    assert found["summary"]["passed_over"] == 1
    assert len(DatasetView(tmp_path).all({**up, "state": "lost"})["hours"]) == 1


PAGE = """# TYPE clickline_requests counter
clickline_requests_total{{protocol="grpc",code="OK"}} {fine}
clickline_requests_total{{protocol="http",code="400"}} {bad}
# TYPE clickline_rows counter
clickline_rows_total{{protocol="grpc"}} {rows}
# TYPE clickline_lookups counter
clickline_lookups_total{{slot="C1"}} 10
# TYPE clickline_lookup_misses counter
clickline_lookup_misses_total{{slot="C1"}} 4
# TYPE clickline_request_seconds histogram
clickline_request_seconds_bucket{{protocol="grpc",version="3",le="0.001"}} {fast}
clickline_request_seconds_bucket{{protocol="grpc",version="3",le="0.002"}} {fine}
clickline_request_seconds_bucket{{protocol="grpc",version="3",le="+Inf"}} {fine}
# TYPE clickline_version gauge
clickline_version 3
"""


def test_metric_point_is_the_difference_of_two_scrapes(tmp_path: Path) -> None:
    figures = {"fine": 0, "bad": 0, "rows": 0, "fast": 0}

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.answer(200, PAGE.format(**figures).encode())

    async def story(port: int) -> None:
        serving = ServingView(load_config(configure(tmp_path / "ads", serve={"metrics_port": port})))
        assert await serving.sample() is None
        figures.update(fine=100, bad=5, rows=700, fast=50)
        point = await serving.sample()
        assert point is not None
        assert point["errors_per_second"] / point["qps"] == pytest.approx(5 / 105)
        assert point["rows_per_second"] / point["qps"] == pytest.approx(700 / 105)
        assert (point["p50_ms"], point["p99_ms"]) == (pytest.approx(1.0), pytest.approx(1.98))
        figures.update(fine=10, bad=0, rows=20, fast=10)  # started anew
        point = await serving.sample()
        assert point is not None
        assert point["rows_per_second"] / point["qps"] == pytest.approx(2)
        assert point["p99_ms"] == pytest.approx(0.99)
        point = await serving.sample()
        assert point is not None
        assert (point["qps"], point["p50_ms"]) == (0, None)
        told = serving.document()
        assert told["totals"] == {"requests": 10, "errors": 0, "rows": 20}
        assert told["slots"] == [{"slot": "C1", "lookups": 10, "misses": 4, "miss_rate": 0.4}]
        assert (told["version"], len(told["history"])) == (3, 3)
        await serving.close()

    with served(Handler) as port:
        asyncio.run(story(port))


def test_another_program_on_the_port_is_not_a_server(tmp_path: Path) -> None:
    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.answer(401, b"who are you?")

    async def story(port: int) -> None:
        serving = ServingView(load_config(configure(tmp_path / "ads", serve={"metrics_port": port})))
        assert await serving.sample() is None
        assert serving.document()["reason"] == "it answered 401: who are you?"
        await serving.close()

    with served(Handler) as port:
        asyncio.run(story(port))


def test_token_is_created_once_and_readable_only_by_its_owner(tmp_path: Path) -> None:
    home = tmp_path / "new" / "home"
    token = studio_token(None, home)
    assert token.file == home / "studio-token"
    assert token.file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in home.iterdir()] == ["studio-token"]
    assert studio_token(None, home).value == token.value
    assert len(token.value) >= 32
    (tmp_path / "mine").write_text("my token \nmore\n")
    assert studio_token(str(tmp_path / "mine"), home).value == "my token"


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe", "schlüssel".encode()])
def test_empty_token_file_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(ClicklineError, match=r"studio\.token_file .*token"):
        studio_token(str(tmp_path / "token"), tmp_path)
    with pytest.raises(ClicklineError, match="cannot be read"):
        studio_token(str(tmp_path / "absent"), tmp_path)


def test_actions_require_the_token(tmp_path: Path) -> None:
    access = Access(None, "127.0.0.1")
    assert access.may_read(None)
    assert not access.may_act("Bearer ")
    assert not access.may_act("Bearer None")
    assert not Access(None, "127.0.0.1", protected=True).may_read(None)
    token = Access(StudioToken("t", tmp_path), "127.0.0.1")
    assert token.may_act("bearer t")
    assert not token.may_act("t")
    assert not token.may_act("Basic t")


def test_responses_are_json_that_browsers_parse() -> None:
    document = {
        "nan": float("nan"),
        "text": "\udcff é",
        "path": Path("a"),
        "numpy": np.float32(0.5),
        1: [None],
    }
    answer = encode_json(document, Redactor([]))
    assert json.loads(answer, parse_constant=pytest.fail) == {
        "nan": None,
        "text": "\udcff é",
        "path": "a",
        "numpy": 0.5,
        "1": [None],
    }
    assert encode_json({"a": ["key is hush-hush"]}, Redactor(["hush-hush"])) == b'{"a":["key is ***"]}'


def test_homes_with_the_same_name_get_different_ids(tmp_path: Path) -> None:
    files = [configure(tmp_path / folder / "ads") for folder in ("a", "b", "c")]
    assert [home.id for home in open_homes(files, [])] == ["ads", "ads-2", "ads-3"]


def test_example_omits_missing_values() -> None:
    features = FeatureSpec(
        (DenseField("n", "n", "none"),), (SlotField("c", "c", 1),), missing=("-9.50", "-1.0", " NULL")
    )
    columns = {
        "n": raw_column(["-9.5", "-9.500", "-1", "2.5", "x"], "n"),
        "c": raw_column(["NULL ", "-1", "a ", "-9.5", "-9.50"], "c"),
    }
    found = list(example_rows._rows(RawRows(5, columns, np.arange(5)), features))
    assert found == [{}, {}, {"c": "a"}, {"n": 2.5, "c": "-9.5"}, {}]
    typed = {"n": raw_column([-9.5, 2.5], "n"), "c": raw_column([-1, 7], "c")}
    assert list(example_rows._rows(RawRows(2, typed, np.arange(2)), features)) == [{}, {"n": 2.5, "c": 7}]
