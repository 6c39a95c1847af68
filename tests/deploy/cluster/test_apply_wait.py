"""deploy apply --wait: every way in which pipeline and rollout can end, and the output meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ads_objects import ADS, RecordedProgress, container, deployment, item, job, pod
from api_server import ApiServer, Fault, Log

from clickline.deploy.kube_client import Kube
from clickline.deploy.wait import WaitResult, await_deployed, rollout_state
from clickline.errors import ClusterError
from clickline.progress import Progress

CONFIG = """
name: ads
data: {train: data/train.tsv}
model: {name: lr}
deploy: {namespace: shop}
"""
COMPLETE = {"conditions": [{"type": "Complete", "status": "True"}]}
FAILED = {"conditions": [{"type": "Failed", "status": "True", "reason": "PodFailurePolicy"}]}
ROLLED = {"observedGeneration": 9, "replicas": 2, "updatedReplicas": 2, "readyReplicas": 2}


def found(*objects: dict[str, Any], version: int | None = None) -> dict[str, Any]:
    served = {} if version is None else {"ads-predictor-1": {"version": version}}
    fields = {"name": "ads", "namespace": "shop", "events": [], "notes": []}
    return {**fields, "objects": list(objects), "served": served}


def with_status(one: dict[str, Any], status: dict[str, Any], generation: int = 1) -> dict[str, Any]:
    one["metadata"]["generation"] = generation
    return {**one, "status": status}


def predictor() -> dict[str, Any]:
    return pod("ads-predictor-1", "predictor", "Running", container("predictor", running={}), ready=True)


def awaited(
    kube: Kube, *, seconds: float = 60.0, stuck: float = 0.0, progress: Progress | None = None
) -> WaitResult:
    return await_deployed(kube, ADS, seconds=seconds, progress=progress or Progress(), stuck_seconds=stuck)


# ── what the cluster says ──────────────────────────────────────────────────────────────────────


def test_finished_pipeline_and_complete_rollout_are_done() -> None:
    seen = found(with_status(job(), COMPLETE), with_status(deployment(), ROLLED), predictor(), version=3)
    assert rollout_state(seen) == WaitResult(
        "done", "the pipeline has finished; 1 predictor serves version 3"
    )


def ended(message: str | None) -> dict[str, Any]:
    last = {"exitCode": 0, **({} if message is None else {"message": message})}
    return pod("ads-pipeline-1", "pipeline", "Succeeded", container("pipeline", terminated=last))


@pytest.mark.parametrize(
    ("message", "versions", "words"),
    [
        ("version 3", (2, 2), "predictor: version 2 served; version 3 is published"),
        ("version 3", (2, 3), "predictor: version 2 and 3 served; version 3 is published"),
        ("version 3", (3, None), ""),
        ("version 3", (None, None), ""),  # they cannot be queried
        (None, (2, 3), "predictor: version 2 and 3 served"),
        (None, (3, 3), ""),
    ],
)
def test_wait_continues_until_predictors_serve_the_published_version(
    message: str | None, versions: tuple[int | None, ...], words: str
) -> None:
    names = [f"ads-predictor-{n}" for n in range(len(versions))]
    pods = [pod(name, "predictor", "Running", ready=True) for name in names]
    seen = found(with_status(job(), COMPLETE), with_status(deployment(), ROLLED), ended(message), *pods)
    seen["served"] = {
        name: {"words": "unknown"} if one is None else {"version": one}
        for name, one in zip(names, versions, strict=True)
    }
    outcome = rollout_state(seen)
    assert outcome == WaitResult("waiting", words) if words else outcome.state == "done"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({**ROLLED, "observedGeneration": 1}, "predictor: not picked up by its controller yet"),
        ({**ROLLED, "updatedReplicas": 1}, "predictor: 1 of 2 updated"),
        ({**ROLLED, "replicas": 3}, "predictor: 1 old pod is terminating"),
        ({**ROLLED, "readyReplicas": 1}, "predictor: 1 of 2 ready"),
    ],
)
def test_wait_continues_until_the_rollout_is_complete(status: dict[str, Any], words: str) -> None:
    seen = found(with_status(job(), COMPLETE), with_status(deployment(), status, generation=2))
    assert rollout_state(seen) == WaitResult("waiting", words)


@pytest.mark.parametrize(
    ("code", "expected", "words"),
    [
        (3, 3, "the pipeline failed: the model failed the gate"),
        (4, 4, "the pipeline failed: bad data"),
        (2, 2, "the pipeline failed: bad config"),
        (137, 1, "the pipeline failed (Job ads-pipeline"),
    ],
)
def test_failed_pipeline_returns_the_exit_code_of_its_pod(code: int, expected: int, words: str) -> None:
    ended = pod("ads-pipeline-1", "pipeline", "Failed", container("pipeline", terminated={"exitCode": code}))
    outcome = rollout_state(found(with_status(job(), FAILED), with_status(deployment(), ROLLED), ended))
    assert (outcome.state, outcome.code) == ("failed", expected)
    assert outcome.message.startswith(words)


def nightly(**status: Any) -> dict[str, Any]:
    made = item("batch/v1", "CronJob", "ads-pipeline", "pipeline", spec={"schedule": "0 3 * * *"})
    return {**made, "status": status}


def test_wait_ignores_predictors_before_the_first_scheduled_run() -> None:
    unready = with_status(deployment(), {**ROLLED, "readyReplicas": 0})
    outcome = rollout_state(found(nightly(), unready))
    assert outcome.state == "done"
    assert "at 0 3 * * *, no run yet; predictors become ready with its first version" in outcome.message
    seen = found(nightly(), with_status(deployment(), {**ROLLED, "readyReplicas": 1}), predictor(), version=3)
    assert rollout_state(seen).message == "predictor: 1 of 2 ready"


def test_wait_ignores_an_earlier_failed_scheduled_run() -> None:
    ended = pod("ads-pipeline-1", "pipeline", "Failed", container("pipeline", terminated={"exitCode": 1}))
    seen = found(nightly(), with_status(deployment(), ROLLED), predictor(), ended, version=3)
    assert rollout_state(seen).state == "done"


# ── waiting ────────────────────────────────────────────────────────────────────────────────────


def test_pod_that_cannot_start_is_a_stuck_rollout(bare: ApiServer, kube: Kube) -> None:
    bare.put(with_status(job(), COMPLETE))
    bare.put(with_status(deployment(), {**ROLLED, "updatedReplicas": 1}))
    waiting = {"reason": "ImagePullBackOff"}
    bare.put(pod("ads-predictor-2", "predictor", "Pending", container("predictor", waiting=waiting)))
    outcome = awaited(kube)
    assert (outcome.state, outcome.code) == ("failed", 1)
    assert "predictor: ImagePullBackOff in predictor: the image cannot be pulled" in outcome.message


def test_wait_times_out(bare: ApiServer, kube: Kube) -> None:
    bare.put(with_status(job(), {"active": 1}))
    assert awaited(kube, seconds=0.0) == WaitResult("waiting", "pipeline running")


def test_pipeline_log_is_forwarded_once(bare: ApiServer, kube: Kube) -> None:
    class Ending(RecordedProgress):
        def log(self, message: str) -> None:
            super().log(message)
            if len(self.lines) == 2:
                bare.say("ads-pipeline-1", "pipeline", "2026-11-16T10:00:03Z train: ended")
            if len(self.lines) == 3:
                bare.put(with_status(job(), COMPLETE))

    bare.put(with_status(job(), {"active": 1}))
    before = pod("ads-pipeline-0", "pipeline", "Failed", container("pipeline", terminated={"exitCode": 1}))
    bare.put(before)
    bare.logs["ads-pipeline-0", "pipeline"] = Log(["2026-11-16T09:00:01Z of before"])
    bare.put(pod("ads-pipeline-1", "pipeline", "Running", container("pipeline", running={}), ready=True))
    bare.logs["ads-pipeline-1", "pipeline"] = Log(
        ["2026-11-16T10:00:01Z prepare: begun", "2026-11-16T10:00:02Z train: begun"]
    )
    progress = Ending()
    assert awaited(kube, progress=progress).state == "done"
    assert progress.lines == [
        f"ads-pipeline-1 {line}" for line in ("prepare: begun", "train: begun", "train: ended")
    ]


def test_wait_survives_a_short_outage_of_the_api(bare: ApiServer, kube: Kube) -> None:
    bare.put(with_status(job(), COMPLETE))
    bare.faults.append(Fault("list", "pods", cut=True, times=1))
    progress = RecordedProgress()
    assert awaited(kube, progress=progress).state == "done"
    assert any("closed the connection" in line and line.endswith("Trying again.") for line in progress.lines)


def test_wait_fails_if_the_api_stays_unreachable(
    bare: ApiServer, kube: Kube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clickline.deploy.wait._POLL_SECONDS", 0.01)
    bare.faults.append(Fault("list", "pods", cut=True))
    with pytest.raises(ClusterError, match="closed the connection"):
        awaited(kube)


# ── as a user sees it ──────────────────────────────────────────────────────────────────────────

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(bare: ApiServer, tmp_path: Path) -> Command:
    (tmp_path / "clickline.yaml").write_text(CONFIG)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [Path(sys.executable).parent / "clickline", "deploy", "apply", *arguments],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "100"},
            capture_output=True,
            text=True,
            timeout=100,
        )

    return run


def test_apply_wait_returns_when_everything_is_done(bare: ApiServer, command: Command) -> None:
    bare.statuses |= {"Job": COMPLETE, "Deployment": ROLLED}
    done = command("--wait")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == (
        "ads in namespace shop: the pipeline has finished; the rollout is complete"
    )
    document = json.loads(command("--wait", "--json").stdout)
    assert document["waited"]["state"] == "done"


def test_apply_wait_exits_3_on_a_failed_gate_and_1_on_timeout(bare: ApiServer, command: Command) -> None:
    bare.statuses |= {"Job": {"active": 1}, "Deployment": ROLLED}
    late = command("--wait", "--timeout", "1")
    assert late.returncode == 1
    assert (
        "ads in namespace shop: not complete after 1 s: pipeline running. The cluster continues"
        in late.stderr
    )
    bare.put(pod("ads-pipeline-1", "pipeline", "Failed", container("pipeline", terminated={"exitCode": 3})))
    bare.statuses["Job"] = FAILED
    bare.one("Job", "ads-pipeline")["status"] = FAILED  # type: ignore[index]
    refused = command("--wait")
    assert refused.returncode == 3
    assert "the pipeline failed: the model failed the gate" in refused.stderr
    assert "once it is fixed, `clickline deploy apply` starts again" in refused.stderr
