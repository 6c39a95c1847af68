"""`clickline predict` against a real server, as on the command line."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from live_server import SCRIPT, Live

pytestmark = pytest.mark.slow

PROTOCOLS = ["grpc", "http", "v2-grpc", "v2-http", "elasticctr"]


def run(command: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, command, *arguments],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def measured(live: Live, *arguments: str) -> dict[str, Any]:
    done = run("predict", *arguments, "--json", cwd=live.folder)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.fixture(scope="session")
def evaluated(live: Live) -> dict[str, Any]:
    done = run("evaluate", "--model", "current", "--data", "data/eval.tsv", "--json", cwd=live.folder)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)["evaluation"]
    return document


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_metrics_equal_those_of_evaluate(live: Live, evaluated: dict[str, Any], protocol: str) -> None:
    found = measured(live, "-i", "data/eval.tsv", "-b", "100", "--protocol", protocol)
    for name in ("auc", "logloss", "accuracy", "rows", "clicks"):
        assert found["metrics"][name] == pytest.approx(evaluated[name], abs=1e-6), name
    assert (found["requests"], found["versions"]) == (16, {"1": 16})
    assert found["address"] == live.address(protocol)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_metrics_of_slot_logs_equal_those_of_evaluate(live_slots: Live, protocol: str) -> None:
    done = run("evaluate", "--model", "current", "--data", "data/eval.txt", "--json", cwd=live_slots.folder)
    expected = json.loads(done.stdout)["evaluation"]
    found = measured(live_slots, "-i", "data/eval.txt", "-b", "64", "--protocol", protocol)
    for name in ("auc", "logloss", "accuracy", "rows", "impressions"):
        assert found["metrics"][name] == pytest.approx(expected[name], abs=1e-6), name


def test_metrics_are_the_same_over_many_connections(live: Live, evaluated: dict[str, Any]) -> None:
    found = measured(live, "-i", "data/eval.tsv", "-b", "16", "--concurrency", "7", "-w", "1")
    assert found["metrics"]["auc"] == pytest.approx(evaluated["auc"], abs=1e-6)
    assert found["metrics"]["logloss"] == pytest.approx(evaluated["logloss"], abs=1e-6)
    assert (found["requests"], found["connections"], found["retried"]) == (100, 7, 0)


def test_iterations_and_batch(live: Live) -> None:
    found = measured(live, "-i", "data/eval.tsv", "-b", "1000", "-n", "5", "--accuracy")
    assert (found["requests"], found["metrics"]["rows"]) == (5, 5000)
    each = found["each"]
    assert [one["number"] for one in each] == [1, 2, 3, 4, 5]
    assert {one["rows"] for one in each} == {1000}
    accuracies = [one["accuracy"] for one in each]
    assert sum(accuracies) / 5 == pytest.approx(found["metrics"]["accuracy"], abs=1e-6)
    seconds = sorted(one["seconds"] for one in each)
    latency = found["latency"]
    assert latency["p50"] == pytest.approx(seconds[2]) and latency["highest"] == pytest.approx(seconds[-1])
    assert latency["mean"] == pytest.approx(sum(seconds) / 5)
    assert latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["p999"] <= latency["highest"]
    assert found["requests_per_second"] == pytest.approx(5 / found["seconds"])
    assert found["rows_per_second"] == pytest.approx(5000 / found["seconds"])


def test_printed_output(live: Live) -> None:
    over_http = ("-s", live.http, "--protocol", "http")
    done = run("predict", "-i", "data/eval.tsv", "-n", "3", "--accuracy", *over_http, cwd=live.folder)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == ["1", "2", "3"]
    assert all(" s (accuracy " in line and line.endswith("%)") for line in lines[:3])
    printed = {line.partition("  ")[0]: line.partition("  ")[2].strip() for line in lines[3:]}
    assert printed["server"] == f"{live.http}, http, model ads"
    assert printed["version"] == "1 (3 requests)"
    assert printed["rows"] == "1,536"
    assert printed["requests"] == "3 over 1 connection"
    for name in ("accuracy", "AUC", "log loss"):
        assert 0 < float(printed[name]) < 1
    for name in ("mean", "p50", "p90", "p99", "p99.9"):
        assert f"{name} " in printed["latency"]
    assert "requests/s" in printed["throughput"] and "rows/s" in printed["throughput"]
    plain = run("predict", "-i", "data/eval.tsv", "-v", "-n", "1", cwd=live.folder)
    assert plain.stdout.startswith("1: ") and "accuracy " not in plain.stdout.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--model", "other"), 1, 'There is no model "other".'),
        (("-s", "127.0.0.1:1"), 1, "127.0.0.1:1 cannot be reached: "),
        (("-s", "localhost"), 2, "allowed: HOST:PORT"),
        (("-b", "20000", "-n", "1"), 1, "allowed: up to 10000"),
        (("--set", "data.fields.I1=ignore"), 4, "the server's model uses I1, which the logs of this config"),
        (("--token-file", "absent"), 1, "the token file absent cannot be read"),
        (("--ca", "absent"), 1, "absent cannot be used as a CA file"),
        (("-b", "0"), 2, "'-b'"),
        (("--protocol", "smtp"), 2, "smtp"),
    ],
)
def test_mistakes_have_clear_messages(
    live: Live, arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = run("predict", "-i", "data/eval.tsv", *arguments, cwd=live.folder)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr and "bug in Clickline" not in done.stderr


def test_missing_and_malformed_files_are_refused(live: Live) -> None:
    absent = run("predict", "-i", "data/absent.tsv", cwd=live.folder)
    assert (absent.returncode, "data/absent.tsv matches no file" in absent.stderr) == (4, True)
    other = run("predict", "-i", "clickline.yaml", cwd=live.folder)
    assert (other.returncode, "wrong column count" in other.stderr) == (4, True)


def test_port_of_another_protocol_is_reported(live: Live) -> None:
    done = run("predict", "-i", "data/eval.tsv", "-s", live.http, cwd=live.folder)
    assert (done.returncode, f"{live.http} does not use gRPC" in done.stderr) == (1, True)
    done = run("predict", "-i", "data/eval.tsv", "-s", live.grpc, "--protocol", "v2-http", cwd=live.folder)
    assert (done.returncode, f"{live.grpc} does not use HTTP" in done.stderr) == (1, True)


def test_errors_as_json(live: Live) -> None:
    done = run("predict", "-i", "data/eval.tsv", "--model", "other", "--json", cwd=live.folder)
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["kind"] == "RequestRefused"
