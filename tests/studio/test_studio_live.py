"""The API beside a real `up`: what is told, what is tried, what streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from studio_world import SECRETS, SHOWN, Shown, clickline, eventually

import clickline as package
from clickline.artifacts.from_config import registry_of
from clickline.config import load_config

pytestmark = pytest.mark.slow


def predicted(folder: Path, rows: list[dict[str, Any]]) -> list[float]:
    config = load_config(folder / "clickline.yaml")
    with package.Client(f"127.0.0.1:{config.serve.grpc_port}", token=SECRETS[1]) as client:
        return [float(score) for score in client.predict(rows).probability]


def test_status_matches_openapi_and_the_command(studio: Shown, ads: Path) -> None:
    assert studio.get("/api/homes") == [
        {"id": "ads", "name": "ads", "home": str(ads / ".clickline"), "config": None, "state": "running"}
    ]
    status = studio.of("ads", "status")
    assert status["stages"]["serve"]["state"] == "running"
    assert status["health"] == "ready"
    assert status["studio"]["url"] == studio.url
    assert (status["error"], status["note"], status["cluster"]) == (None, None, None)
    told = json.loads(clickline("status", "--json", cwd=ads).stdout)
    assert {key: value for key, value in status.items() if key in told and key != "updated"} == {
        key: value for key, value in told.items() if key != "updated"
    }
    assert studio.of("ads", "cluster") is None


def test_runs(studio: Shown, ads: Path) -> None:
    runs = studio.of("ads", "runs")
    assert [(run["state"], run["epochs"]) for run in runs] == [("finished", 2), ("finished", 1)]
    for run in runs:
        report = json.loads((ads / ".clickline/runs" / run["run"] / "report.json").read_text())
        assert run["auc"] == report["evaluation"]["auc"]
        told = studio.of("ads", f"runs/{run['run']}")
        assert told["evaluation"] == report["evaluation"]
        assert "config" not in told
        assert studio.of("ads", f"runs/{run['run']}/curve") == told["learning"]
        assert told["learning"]["step"][-1] == run["step"]
        if run["has_report"]:
            page = studio.client.get(f"/api/homes/ads/runs/{run['run']}/report.html")
            assert page.content == (ads / ".clickline/runs" / run["run"] / "report.html").read_bytes()
            assert "sandbox" in page.headers["content-security-policy"]


def test_versions_and_their_diff(studio: Shown, ads: Path) -> None:
    versions = studio.of("ads", "versions")
    assert (versions["current"], versions["previous"], versions["error"]) == (2, 1, None)
    listed = json.loads(clickline("versions", "list", "--json", cwd=ads).stdout)
    for told, line in zip(versions["list"], reversed(listed), strict=True):
        assert {key: told[key] for key in line} == line
    assert [move["version"] for move in versions["moves"]][-2:] == [2, 1]
    difference = studio.of("ads", "versions/diff", params={"a": 1, "b": 2})
    assert difference == json.loads(clickline("versions", "diff", "1", "2", "--json", cwd=ads).stdout)
    assert difference["config"]["train.epochs"] == [1, 2]
    assert "no version 99" in studio.of("ads", "versions/diff", 409, params={"a": 1, "b": 99})["error"]
    assert "whole number" in studio.of("ads", "versions/diff", 400, params={"a": 1, "b": "x"})["error"]


def test_data_with_quarantined_rows(studio: Shown) -> None:
    data = studio.of("ads", "data")
    assert data["dataset"]["rows"] == 6000
    assert data["dataset"]["splits"]["train"]["bad_rows"] == 3
    assert data["summary"] == {
        "received": 0,
        "learned": 0,
        "waiting": 0,
        "passed_over": 0,
        "quarantined": 3,
    }
    assert len(data["quarantine"]) == 3
    assert data["quarantine"][0]["text"].startswith("1\tonly three")
    assert data["hours"] == []


def test_logs(studio: Shown) -> None:
    lines = studio.of("ads", "logs/train", params={"tail": 2}).splitlines()
    assert len(lines) == 2
    assert "train: done" in lines[-1]
    assert "train: begun" not in lines[0]
    assert "Allowed: up, prepare" in studio.of("ads", "logs/passwd", 404)["error"]


# ── serving ────────────────────────────────────────────────────────────────────────────────────


def test_serving_counts_requests(studio: Shown, ads: Path) -> None:
    before = studio.of("ads", "serving")
    assert (before["alive"], before["reason"], before["version"]) == (True, None, 2)
    row = studio.of("ads", "form")["examples"][0]
    for _ in range(10):
        predicted(ads, [row, row, row])

    def grown() -> Any:
        now = studio.of("ads", "serving")
        return now if now["totals"]["rows"] >= before["totals"]["rows"] + 30 else None

    now = eventually(grown)
    assert now["totals"]["requests"] >= before["totals"]["requests"] + 10
    busy = [point for point in now["history"] if point["rows_per_second"]]
    assert busy, now["history"]
    assert all(0 < point["p50_ms"] <= point["p99_ms"] <= 1000 for point in busy)
    slot = next(one for one in now["slots"] if one["slot"] == "C1")
    assert slot["miss_rate"] == slot["misses"] / slot["lookups"]
    assert sum(now["by_code"].values()) == sum(now["by_protocol"].values()) == now["totals"]["requests"]


# ── events ─────────────────────────────────────────────────────────────────────────────────────


def with_previous(studio: Shown, rows: list[dict[str, Any]]) -> Any:
    """What the live version says and the one before; which may still be opened at the first question."""

    def answered() -> Any:
        tried = studio.post("/api/homes/ads/try", {"rows": rows})
        return tried if tried["note"] is None else None

    return eventually(answered)


def events(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in lines:
        key, _, value = line.partition(": ")
        if key == "event":
            name = value
        elif key == "data":
            yield name, json.loads(value)


def test_events_are_sent_at_once_and_on_change(studio: Shown, ads: Path) -> None:
    runs = ads / ".clickline" / "runs"
    with studio.client.stream("GET", "/api/homes/ads/events", timeout=20) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        coming = events(stream.iter_lines())
        assert next(one for one in coming if one[0] == "status")[1]["state"] == "running"
        assert next(one for one in coming if one[0] == "serving")[1]["qps"] >= 0
        (runs / "another").mkdir()
        try:
            assert next(one for one in coming if one[0] == "runs")[1] == {"changed": True}
        finally:
            (runs / "another").rmdir()


# ── try it ─────────────────────────────────────────────────────────────────────────────────────


def test_form_has_a_field_for_every_column(studio: Shown) -> None:
    form = studio.of("ads", "form")
    assert (form["version"], form["error"]) == (2, None)
    fields = {field["column"]: field for field in form["fields"]}
    assert list(fields) == [f"I{n}" for n in range(1, 14)] + [f"C{n}" for n in range(1, 27)]
    assert fields["I1"]["kind"] == "dense"
    assert fields["C1"]["kind"] == "slot"
    assert len(fields["C1"]["top"]) > 1
    assert len(form["examples"]) == 20


def test_playground_explains_the_score_of_the_server(studio: Shown, ads: Path) -> None:
    rows = studio.of("ads", "form")["examples"][:3]
    tried = studio.post("/api/homes/ads/try", {"rows": rows, "explain": True})
    direct = predicted(ads, rows)
    assert tried["version"] == 2
    assert [row["probability"] for row in tried["rows"]] == pytest.approx(direct, abs=1e-6)
    assert tried["ranking"] == sorted(range(3), key=lambda n: -direct[n])
    assert 0 < tried["latency_ms"] < 10_000
    for row, told in zip(rows, tried["rows"], strict=True):
        changes = [abs(one["change"]) for one in told["contributions"]]
        assert changes == sorted(changes, reverse=True)
        assert {one["column"] for one in told["contributions"]} == set(row)
        columns = [one["column"] for one in told["contributions"]]
        without = predicted(ads, [{**row, column: None} for column in columns])
        assert [one["without"] for one in told["contributions"]] == pytest.approx(without, abs=1e-6)
        for one in told["contributions"]:
            assert one["change"] == pytest.approx(told["probability"] - one["without"], abs=1e-9)
    assert any(one["change"] for row in tried["rows"] for one in row["contributions"])


def test_request_rejected_by_the_server_is_reported(studio: Shown) -> None:
    for rows, words in (
        ([{"I1": "many"}], "I1 is 'many', a number expected"),
        ([{"I1": {"a": 1}}], "I1 is not a text, number"),
        ([], "1 to 50 rows"),
        ([{"C1": "a"}] * 51, "1 to 50 rows"),
        ([{}], "or it is empty"),
        ([{"nowhere": 1}], "no field 'nowhere'"),
    ):
        assert words in studio.post("/api/homes/ads/try", {"rows": rows}, 400)["error"]


# ── acting ─────────────────────────────────────────────────────────────────────────────────────


def test_actions_need_the_token_and_record_their_reason(studio: Shown, ads: Path) -> None:
    def act(action: str, body: Any, status: int = 200, **headers: str) -> Any:
        return studio.post(f"/api/homes/ads/actions/{action}", body, status, headers=headers)

    reason = {"reason": "clicks fell"}
    before = studio.of("ads", "versions")["moves"][0]["sequence"]
    for wrong in ("", "Bearer wrong", SECRETS[1], f"Bearer {SECRETS[1]}"):
        headers = {"authorization": wrong}
        assert str(studio.token_file) in act("rollback", reason, 401, **headers)["error"]
    assert "reason is missing" in act("pin", {"version": 1}, 400, **studio.bearer)["error"]
    assert "reason is missing" in act("pin", {"reason": "  "}, 400, **studio.bearer)["error"]
    assert "not a version number" in act("pin", reason | {"version": "1"}, 400, **studio.bearer)["error"]
    assert "no version 99" in act("pin", reason | {"version": 99}, 409, **studio.bearer)["error"]
    form = studio.client.post(
        "/api/homes/ads/actions/rollback",
        content=json.dumps(reason),
        headers={**studio.bearer, "content-type": "text/plain"},
    )
    assert form.status_code == 400
    assert studio.of("ads", "versions")["moves"][0]["sequence"] == before

    rows = studio.of("ads", "form")["examples"][:5]
    tried = with_previous(studio, rows)
    assert {row["previous"]["version"] for row in tried["rows"]} == {1}
    assert act("rollback", reason, **studio.bearer) == {
        "current": 1,
        "sequence": before + 1,
        "pinned": False,
        "changed": True,
    }
    eventually(lambda: studio.of("ads", "serving")["version"] == 1)
    said = [row["previous"]["probability"] for row in tried["rows"]]
    assert predicted(ads, rows) == pytest.approx(said, abs=1e-6)
    assert [row["probability"] for row in tried["rows"]] != pytest.approx(said, abs=1e-4)
    assert "versions promote 2" in act("rollback", reason | {"version": 2}, 409, **studio.bearer)["error"]
    assert "version is missing" in act("promote", reason, 400, **studio.bearer)["error"]
    assert act("pin", {"reason": "hold", "version": 2}, **studio.bearer)["pinned"]
    assert "is pinned since" in act("rollback", reason, 409, **studio.bearer)["error"]
    assert act("unpin", {"reason": "go on"}, **studio.bearer)["changed"]
    assert not act("unpin", {"reason": "again"}, **studio.bearer)["changed"]
    told = studio.of("ads", "versions")
    assert [(move["version"], move["reason"]) for move in told["moves"][:3]] == [
        (2, "go on"),
        (2, "hold"),
        (1, "clicks fell"),
    ]
    history = registry_of(load_config(ads / "clickline.yaml")).moves()
    assert [move.reason for move in history[-3:]] == ["clicks fell", "hold", "go on"]
    assert "@" in history[-1].by
    eventually(lambda: studio.of("ads", "serving")["version"] == 2)


# ── who may look ───────────────────────────────────────────────────────────────────────────────


def test_only_host_names_of_this_machine_are_accepted(studio: Shown) -> None:
    for host in ("evil.example", "evil.example:8503", "127.0.0.1.evil.example", ""):
        for path in ("/api/homes", "/"):
            answer = studio.client.get(path, headers={"host": host})
            assert answer.status_code == 403
            assert "127.0.0.1" in answer.json()["error"]
    for host in ("localhost:9000", "127.0.0.1", "LOCALHOST", "[::1]:8503"):
        assert studio.client.get("/api/homes", headers={"host": host}).status_code == 200


def test_no_route_answers_without_the_studio_token_if_the_server_has_one(studio: Shown) -> None:
    """The server refuses scores and figures to strangers, so the studio must not hand them out, nor rows of logs."""
    run = studio.of("ads", "runs")[0]["run"]
    filled = {"{home}": "ads", "{run}": run, "{stage}": "prepare"}
    asked = 0
    with httpx.Client(base_url=studio.url, timeout=10) as stranger:
        for path, methods in studio.paths.items():
            for name, value in filled.items():
                path = path.replace(name, value)
            for method in methods:
                body = {"json": {"rows": [{"I1": 1}], "reason": "r"}} if method == "post" else {}
                for headers in ({}, {"authorization": f"Bearer {SECRETS[1]}"}):
                    answer = stranger.request(method, path, headers=headers, **body)
                    assert answer.status_code == 401, (method, path, answer.text)
                    assert list(answer.json()) == ["error"]
                    assert str(studio.token_file) in answer.json()["error"]  # a friendly hint for the owner
                    asked += 1
        assert asked >= 2 * 20
        assert stranger.get("/").status_code == 200  # the page itself: it asks for the token
        assert stranger.get("/api/homes", headers={"host": "evil.example"}).status_code == 403
        ticket = studio.client.post("/api/ticket").json()["ticket"]
        assert stranger.get("/api/homes", params={"ticket": ticket}).status_code == 200
        for path in ("/api/ticket", "/api/homes/ads/try"):
            again = stranger.post(path, params={"ticket": ticket}, json={"rows": [{"I1": 1}]})
            assert again.status_code == 401, (path, again.text)


def test_wrong_method_lists_the_allowed_ones(studio: Shown) -> None:
    described = {path: {method.upper() for method in methods} for path, methods in studio.paths.items()}
    for path, methods in described.items():
        expected = methods | ({"HEAD"} if "GET" in methods else set())
        for method in {"GET", "POST", "DELETE", "PUT"} - methods:
            answer = studio.client.request(method, path.replace("{home}", "ads"))
            assert answer.status_code == 405, (method, path)
            assert set(answer.headers["allow"].split(", ")) == expected
    for path in ("/", "/app.js"):
        answer = studio.client.post(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
    assert studio.client.post("/api/nothing").status_code == 404


def test_security_headers(studio: Shown) -> None:
    page = studio.client.get("/")
    assert page.status_code == 200
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    assert page.headers["x-content-type-options"] == "nosniff"
    answer = studio.client.get("/api/homes")
    assert answer.headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in answer.headers
    assert studio.client.get("/api/homes/ads/data").headers["content-encoding"] == "gzip"


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "%2e%2e",
        "..%2f..%2fclickline.yaml",
        "%2fetc",
        ".hidden",
        "a%00b",
        "x" * 300,
        "<script>",
        "a%0ab",
    ],
)
def test_path_traversal_is_impossible(studio: Shown, name: str) -> None:
    for path in (f"runs/{name}", f"runs/{name}/report.html", f"runs/{name}/curve", f"logs/{name}"):
        answer = studio.client.get(f"/api/homes/ads/{path}")
        assert answer.status_code == 404, (path, answer.text)
        assert "<script>" not in answer.text
    assert studio.client.get(f"/{name}").status_code in (200, 404)
    assert studio.client.get(f"/api/homes/{name}/status").status_code == 404


def test_no_response_contains_a_secret(studio: Shown, ads: Path) -> None:
    log = ads / ".clickline/up/logs/serve.log"
    with log.open("a") as file:  # as a library might
        file.write(f"2026-11-16T00:00:00.000000Z header authorization: Bearer {SECRETS[1]}\n")
    secrets = [*SECRETS, studio.token_file.read_text().strip()]
    run = studio.of("ads", "runs")[0]["run"]
    paths = [*SHOWN, f"runs/{run}", "versions/diff?a=1&b=2"]
    paths += [f"logs/{stage}?tail=5000" for stage in ("up", "prepare", "train", "serve", "studio")]
    for path in paths:
        answer = studio.client.get(f"/api/homes/ads/{path}")
        assert answer.status_code == 200
        assert not [secret for secret in secrets if secret in answer.text], path
    assert "Bearer ***" in studio.client.get("/api/homes/ads/logs/serve?tail=5000").text
