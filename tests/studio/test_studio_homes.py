"""Homes in every state, shown by one `clickline studio`: nothing there, failed, refused, dead, far away, 500 hours."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from studio_world import SHOWN, Shown, clickline, configure, opened, write_logs

from clickline.artifacts.registry import Move, Registry
from clickline.pipeline.hour_records import HourRecords
from clickline.storage.storage import Storage
from serving.lookup.fleet import certificate_in
from version_manifests import version_manifest

pytestmark = pytest.mark.slow

HOURS = 500
FIRST = 490_896  # 20260101/00
HOSTILE = ("<img src=x onerror=alert(1)>", "a b", "-rf", "naïve", "x'; drop table", "\udcff\udcfe")


def history(home: Path) -> None:
    """500 hours, and a version of every fifth, as following writes them."""
    records = HourRecords(str(home), 1)
    registry = Registry(Storage(), str(home / "registry"))
    moved: Move | None = None
    for n in range(HOURS):
        hour = {"hour": f"202601{1 + n // 24:02d}/{n % 24:02d}", "number": FIRST + n}
        if n % 50 == 49:
            records.write(FIRST + n, {**hour, "state": "corrupt", "reason": "too many bad rows"})
            continue
        measured = {"auc": 0.7 + n / 10_000, "logloss": 0.5, "calibration": 1.0}
        if n % 5 == 0:
            moved = published(registry, moved, measured, f"hour {hour['hour']}")
        record = {
            **hour,
            "state": "learned",
            "rows": 3000,
            "bad": n % 3,
            "progressive": measured,
            "held_out": measured,
            "gate": {"passed": True, "reasons": [], "warnings": []},
            "version": moved.version if moved is not None and n % 5 == 0 else None,
            "ids": 1000 * n,
            "evicted": 0,
            "memory": 2**20,
            "seconds": 0.5,
            "at": "2026-11-16T00:00:00+00:00",
        }
        records.write(FIRST + n, record)


def published(registry: Registry, after: Move | None, measured: dict[str, float], reason: str) -> Move:
    """A base every tenth time, else a delta."""
    parent = None if after is None or after.version % 10 == 0 else after.version
    with registry.draft(parent) as draft:
        (draft.folder / "table-00000-of-00001.bin").write_bytes(b"x" * 64)
        draft.commit(
            version_manifest(
                parent, rows=1000, report={"evaluation": measured}, config="train: {epochs: 1}\n"
            )
        )
    return registry.move(draft.number, reason, after=after)


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    world = tmp_path_factory.mktemp("homes")
    files = [configure(world / name) for name in ("empty", "failed", "refused", "old", "hostile", "gone")]
    far = {"registry": "s3://nowhere/registry"}
    options = {
        "s3": {"endpoint_url": "http://127.0.0.1:9", "config_kwargs": {"retries": {"max_attempts": 0}}}
    }
    credentials = world / "credentials.yaml"
    credentials.write_text('s3: {key: somebody, secret: "far-away-secret"}\n')
    credentials.chmod(0o600)
    files.append(
        configure(
            world / "far", publish=far, storage={"options": options, "credentials_file": str(credentials)}
        )
    )
    write_logs(world / "refused", 3000)
    shutil.copytree(world / "refused" / "data", world / "failed" / "data")
    (world / "failed" / "data" / "eval.tsv").unlink()
    assert clickline("up", "-q", cwd=world / "failed").returncode == 4
    configure(world / "refused", gate={"auc": 0.99})
    assert clickline("up", "-q", cwd=world / "refused").returncode == 3
    history(world / "old" / ".clickline")
    for name in (*HOSTILE, "good"):
        (world / "hostile" / ".clickline" / "runs" / name).mkdir(parents=True)
    (world / "hostile" / ".clickline" / "runs" / "good" / "report.json").write_text('{"evaluation": [torn')
    (world / "gone" / ".clickline" / "runs" / "one").mkdir(parents=True)
    arguments = [argument for file in files for argument in ("-c", str(file))]
    # The same home once more, told by its folder alone.
    arguments += ["--home", str(world / "refused" / ".clickline"), "--home", str(world / "nothing")]
    with opened(*arguments, cwd=world) as shown:
        shown.client.headers.update(shown.bearer)  # homes without their config take it to look
        shutil.rmtree(world / "gone")
        yield shown


def test_all_homes_are_listed_with_distinct_ids(studio: Shown) -> None:
    homes = {home["id"]: home for home in studio.get("/api/homes")}
    assert list(homes) == [
        "empty",
        "failed",
        "refused",
        "old",
        "hostile",
        "gone",
        "far",
        "refused-2",
        "nothing",
    ]
    states = {name: home["state"] for name, home in homes.items()}
    assert states.pop("failed") == states.pop("refused") == states.pop("refused-2") == "failed"
    assert set(states.values()) == {"never"}
    assert homes["refused-2"]["config"] is None
    assert homes["empty"]["config"].endswith("empty/clickline.yaml")


@pytest.mark.parametrize(
    "home", ["empty", "failed", "refused", "old", "hostile", "gone", "far", "refused-2", "nothing"]
)
def test_home_in_any_state_can_be_shown(studio: Shown, home: str) -> None:
    for what in SHOWN:
        studio.of(home, what)
    assert "no such home" in studio.of("other", "status", 404)["error"]


def test_an_empty_home(studio: Shown) -> None:
    status = studio.of("empty", "status")
    assert (status["state"], status["stages"], status["error"]) == ("never", {}, None)
    assert studio.of("empty", "runs") == []
    versions = studio.of("empty", "versions")
    assert (versions["current"], versions["list"], versions["moves"]) == (None, [], [])
    assert studio.of("empty", "data")["dataset"] is None
    assert "no current version" in studio.of("empty", "form")["error"]
    serving = studio.of("empty", "serving")
    assert (serving["alive"], serving["history"]) == (False, [])
    assert "no answer" in serving["reason"]
    assert "cannot be reached" in studio.post("/api/homes/empty/try", {"rows": [{"C1": "a"}]}, 503)["error"]
    assert studio.of("empty", "logs/up") == ""


def test_deleted_home_is_reported(studio: Shown) -> None:
    assert "does not exist yet" in studio.of("gone", "status")["note"]
    assert studio.of("gone", "runs") == []
    assert studio.of("gone", "runs/one", 404)


def test_failed_stage(studio: Shown) -> None:
    status = studio.of("failed", "status")
    assert (status["state"], status["stage"]) == ("failed", "prepare")
    assert status["stages"]["prepare"]["state"] == "failed"
    assert "eval.tsv" in status["error"]["message"]
    assert "eval.tsv" in studio.of("failed", "logs/prepare")


@pytest.mark.parametrize("home", ["refused", "refused-2"])
def test_rejected_by_the_gate(studio: Shown, home: str) -> None:
    status = studio.of(home, "status")
    assert status["stages"]["gate"]["state"] == "refused"
    (run,) = studio.of(home, "runs")
    assert run["state"] == "refused"
    assert "0.99" in run["gate"]["reasons"][0]
    assert studio.of(home, "versions")["list"] == []


def test_unreachable_registry(studio: Shown) -> None:
    versions = studio.of("far", "versions")
    assert versions["list"] == []
    assert "s3://nowhere" in versions["error"]
    assert "far-away-secret" not in json.dumps(versions)
    assert "error" in studio.of("far", "status")["versions"]
    refused = studio.post("/api/homes/far/actions/unpin", {"reason": "r"}, 503, headers=studio.bearer)
    assert "s3://nowhere" in refused["error"]


def test_hostile_names_are_not_runs(studio: Shown) -> None:
    assert [run["run"] for run in studio.of("hostile", "runs")] == ["good"]
    assert studio.of("hostile", "runs/good")["run"] == {"name": "good"}


def test_history_of_500_hours_loads_fast(studio: Shown) -> None:
    data = studio.of("old", "data")
    assert len(data["hours"]) == HOURS
    assert data["summary"] == {
        "received": 500,
        "learned": 490,
        "waiting": 0,
        "passed_over": 10,
        "quarantined": sum(n % 3 for n in range(HOURS) if n % 50 != 49),
    }
    assert data["hours"][-2]["auc"] == pytest.approx(0.7498)
    versions = studio.of("old", "versions")
    assert len(versions["list"]) == len(versions["moves"]) == versions["current"] == 100
    assert {line["table"] for line in versions["list"]} == {"base", "delta"}

    def seconds(what: str) -> float:
        began = time.perf_counter()
        studio.client.get(f"/api/homes/old/{what}")
        return time.perf_counter() - began

    quickest: dict[str, Any] = {what: min(seconds(what) for _ in range(5)) for what in SHOWN}
    assert max(quickest.values()) < 0.2, quickest  # 50 ms are promised where nothing else runs


# ── from other machines ────────────────────────────────────────────────────────────────────────


def test_other_machines_need_the_token_for_reading(tmp_path: Path) -> None:
    certificate, key = certificate_in(tmp_path)
    tls = {"certificate": str(certificate), "key": str(key)}
    file = configure(tmp_path / "ads", studio={"host": "0.0.0.0", "token_file": "token", "tls": tls})
    (tmp_path / "ads" / "token").write_text("look-and-act\n")
    with opened("-c", str(file), cwd=tmp_path, authority=certificate) as shown:
        assert shown.url.startswith("https://127.0.0.1:")
        with pytest.raises(httpx.HTTPError):  # nobody answers who does not use TLS
            httpx.get(shown.url.replace("https:", "http:"), timeout=10)
        assert shown.get("/api/homes", 401) == shown.of("ads", "status", 401)
        assert shown.client.get("/").status_code == 200
        assert shown.get("/api/homes", headers=shown.bearer)[0]["id"] == "ads"
        assert shown.client.get("/api/homes", headers={"host": "studio.example"}).status_code == 401
        ticket = shown.post("/api/ticket", None, headers=shown.bearer)["ticket"]
        assert shown.post("/api/ticket", None, 401)
        assert shown.post("/api/ticket", None, 401, params={"ticket": ticket})  # it buys no other one
        assert shown.post("/api/homes/ads/try", {"rows": [{"C1": "a"}]}, 401, params={"ticket": ticket})
        assert shown.of("ads", "status", params={"ticket": ticket})["state"] == "never"
        until, _, signature = ticket.partition(".")
        for wrong in ("", f"{int(until) + 9}.{signature}", f"{until}.", "x.y", f"{until}.é"):
            assert shown.of("ads", "status", 401, params={"ticket": wrong})
        acted = shown.post("/api/homes/ads/actions/unpin", {"reason": "r"}, 401, params={"ticket": ticket})
        assert "token" in acted["error"]


def test_configured_token_is_required_on_loopback_too(tmp_path: Path) -> None:
    for section in ("serve", "studio"):
        file = configure(tmp_path / section, **{section: {"token_file": "token"}})
        (tmp_path / section / "token").write_text("look-and-act\n")
        with opened("-c", str(file), cwd=tmp_path) as shown:
            for what in SHOWN:
                assert "token" in shown.of(section, what, 401)["error"]
            assert shown.post(f"/api/homes/{section}/try", {"rows": [{"C1": "a"}]}, 401)
            assert shown.of(section, "status", headers=shown.bearer)["state"] == "never"
            assert (
                shown.client.get("/api/homes", headers={**shown.bearer, "host": "evil.example"}).status_code
                == 403
            )


def test_home_whose_config_got_a_token_after_its_last_run_is_protected(tmp_path: Path) -> None:
    home = tmp_path / "ads" / ".clickline"
    kept = home / "runs" / "one" / "resolved.yaml"
    kept.parent.mkdir(parents=True)
    shutil.copy(configure(tmp_path / "ads"), kept)  # no token then
    configure(tmp_path / "ads", serve={"token_file": "token"})
    with opened("--home", str(home), cwd=tmp_path) as shown:
        (one,) = shown.get("/api/homes", headers=shown.bearer)
        for what in SHOWN:
            assert "token" in shown.of(one["id"], what, 401)["error"]
            shown.of(one["id"], what, headers=shown.bearer)


def test_reachable_host_needs_tls_and_a_token(tmp_path: Path) -> None:
    configure(tmp_path / "ads")
    done = clickline("studio", "--host", "0.0.0.0", cwd=tmp_path / "ads")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Set studio.tls and studio.token_file" in done.stderr
    done = clickline("studio", "--home", "somewhere", "--host", "0.0.0.0", cwd=tmp_path / "ads")
    assert done.returncode == 1
    assert "Set them in a config (-c), or keep 127.0.0.1" in done.stderr
    tls = {"certificate": "none.pem", "key": "none.key"}
    configure(tmp_path / "ads", studio={"host": "0.0.0.0", "token_file": "token", "tls": tls})
    done = clickline("studio", cwd=tmp_path / "ads")
    assert done.returncode == 1
    assert "studio.tls.certificate" in done.stderr and "is not a file" in done.stderr


def test_port_in_use_is_reported(tmp_path: Path) -> None:
    configure(tmp_path / "ads")
    with opened(cwd=tmp_path / "ads") as shown:
        port = shown.url.rpartition(":")[2]
        done = clickline("studio", "--port", port, cwd=tmp_path / "ads")
    assert done.returncode == 1
    assert "Address already in use" in done.stderr
    assert len(done.stderr.splitlines()) == 1
