"""The commands of clickline deploy against a cluster: output, changes, exit codes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ads_objects import ADS, container, deployment, event, ours, pod
from api_server import ApiServer, Fault, Log

from clickline.deploy.apply import apply
from clickline.deploy.kube_client import Kube
from clickline.progress import Progress

CONFIG = """
name: ads
data: {train: data/train.tsv}
model: {name: lr}
deploy: {namespace: shop}
"""

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(bare: ApiServer, tmp_path: Path) -> Command:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.tsv").write_text("")
    (tmp_path / "clickline.yaml").write_text(CONFIG)

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [Path(sys.executable).parent / "clickline", "deploy", *arguments],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "100", **more},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
        )

    return run


def deployed(kube: Kube) -> None:
    apply(kube, ADS, ours(), prune=False, progress=Progress())


# ── apply ──────────────────────────────────────────────────────────────────────────────────────


def test_apply_creates_the_rendered_objects_and_is_idempotent(bare: ApiServer, command: Command) -> None:
    done = command("apply")
    assert done.returncode == 0, done.stderr
    assert "created    Deployment ads-predictor" in done.stdout
    assert bare.names("Deployment") == ["ads-predictor"] and bare.names("Namespace") == ["shop"]
    again = json.loads(command("apply", "--json").stdout)
    assert again["created"] == again["changed"] == again["replaced"] == []
    assert set(again["unchanged"]) == {line.split(maxsplit=1)[1] for line in done.stdout.splitlines()[:-1]}


def test_partial_apply_exits_1_and_reports_each_object(bare: ApiServer, command: Command) -> None:
    bare.faults.append(Fault("patch", "deployments", 500, "etcd is full", dry_run=False))
    done = command("apply")
    assert done.returncode == 1
    assert "created    ConfigMap ads-config" in done.stdout
    assert "failed     Deployment ads-predictor: etcd is full (500)" in done.stderr
    assert "not tried  Job ads-pipeline" in done.stderr
    assert "applied only in part" in done.stderr


def test_missing_operator_fails_before_any_change(bare: ApiServer, command: Command) -> None:
    done = command("apply", "--set", "deploy.serving.kind=knative")
    assert done.returncode == 1
    assert "Install Knative Serving (knative.dev), or set deploy.serving.kind: deployment." in done.stderr
    assert bare.writes == []


@pytest.mark.slow
def test_note_is_shown_once_per_content(command: Command) -> None:
    about = "deploy.storage.models is ReadWriteOnce"
    first = command("apply")
    assert about in first.stderr and "deploy data push" in first.stderr
    second = command("apply", "--json")
    assert (second.stderr, json.loads(second.stdout)["notes"]) == ("", [])
    third = command("apply", "--set", "deploy.serving.max_replicas=9")
    assert about not in third.stderr
    lookup = command("apply", "--set", "deploy.serving.lookup={replicas: 2}")
    assert "deploy.serving.lookup: 4 pods" in lookup.stderr and about not in lookup.stderr


@pytest.mark.slow
def test_dropped_set_values_are_reported_before_any_change(
    bare: ApiServer, command: Command, tmp_path: Path
) -> None:
    more = ("--set", "deploy.serving.max_replicas=null", "--set", "deploy.serving.replicas=3")
    assert command("apply", *more).returncode == 0
    assert command("apply", *more).stderr == ""
    words = "deploy.serving.replicas 3 → 2: the last apply used --set deploy.serving.replicas=3"
    assert words in command("diff").stderr
    bare.faults.append(Fault("patch", "deployments", 500, "etcd is full", dry_run=False))
    result = command("apply")
    assert result.returncode == 1
    assert words in result.stderr and result.stderr.index(words) < result.stderr.index("etcd is full")
    assert "--set counts for one apply" in result.stderr
    bare.faults.clear()
    command("apply", *more)
    (tmp_path / "clickline.yaml").write_text(
        CONFIG.replace("shop}", "shop, serving: {replicas: 3, max_replicas: null}}")
    )
    kept = command("apply")
    assert "the last apply used" not in kept.stderr


@pytest.mark.slow
def test_dry_run_lists_each_object_and_changes_nothing(bare: ApiServer, command: Command) -> None:
    fresh = command("apply", "--dry-run")
    assert (fresh.returncode, bare.writes) == (0, [])
    assert "created    Deployment ads-predictor (dry run)" in fresh.stdout
    assert "namespace shop does not exist yet" in fresh.stderr
    command("apply")
    before = list(bare.writes)
    done = command("apply", "--dry-run", "--set", "serve.drain_timeout=25")
    assert (done.returncode, bare.writes) == (0, before)
    assert "changed    Deployment ads-predictor (dry run)" in done.stdout
    assert "unchanged  Job ads-pipeline (dry run)" in done.stdout
    assert "2 objects would be created or changed; this was a dry run" in done.stdout
    document = json.loads(command("apply", "--dry-run", "--json").stdout)
    assert document["dry_run"] is True and document["changed"] == []
    assert command("apply", "--dry-run", "--wait").returncode == 2


@pytest.mark.slow
def test_diff_shows_changed_lines_and_exits_1(bare: ApiServer, command: Command) -> None:
    command("apply")
    same = command("diff")
    assert (same.returncode, same.stdout) == (0, "")
    assert "ads in namespace shop: nothing would change" in same.stderr
    before = list(bare.writes)
    differs = command("diff", "--set", "serve.drain_timeout=25", "--set", "deploy.serving.service=NodePort")
    assert (differs.returncode, bare.writes) == (1, before)
    lines = differs.stdout.splitlines()
    assert "changed Service ads-predictor" in lines
    assert {"--- live/Service/ads-predictor", "+++ new/Service/ads-predictor"} <= set(lines)
    assert {"-  type: ClusterIP", "+  type: NodePort"} <= set(lines)
    assert {"-      drain_timeout: 10", "+      drain_timeout: 25"} <= set(
        lines
    )  # the config's text, line by line
    assert not any("uid" in line or "resourceVersion" in line for line in lines)
    document = json.loads(command("diff", "--json", "--set", "serve.drain_timeout=25").stdout)
    assert [one["object"] for one in document["changes"]] == [
        "ConfigMap ads-config",
        "Deployment ads-predictor",
    ]


def test_failed_diff_exits_2(bare: ApiServer, command: Command) -> None:
    bare.faults.append(Fault("get", "namespaces", 500, "out of order"))
    failed = command("diff")
    assert failed.returncode == 2
    assert "out of order" in failed.stderr
    result = json.loads(command("diff", "--json").stdout or "{}")
    assert "changes" not in result


def test_diff_of_a_replaced_job_shows_only_real_changes(bare: ApiServer, command: Command) -> None:
    command("apply")
    bare.one("Job", "ads-pipeline")["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}  # type: ignore[index]
    changes = json.loads(command("diff", "--json", "--set", "deploy.workflow.retries=2").stdout)["changes"]
    job = next(one for one in changes if one["object"] == "Job ads-pipeline")
    changed = [line for line in job["diff"].splitlines()[2:] if line[0] in "+-"]
    assert (job["action"], changed) == ("replaced", ["-  backoffLimit: 6", "+  backoffLimit: 2"])


@pytest.mark.slow
def test_n_selects_the_namespace_in_every_command(bare: ApiServer, command: Command, tmp_path: Path) -> None:
    assert command("apply", "-n", "trial").returncode == 0
    assert bare.names("Namespace") == ["trial"]
    assert command("apply", "-n", "trial").stderr == ""  # -n is not a --set value to be repeated
    assert "ads in namespace trial: " in command("status", "--namespace", "trial").stdout
    assert "in namespace trial" in command("logs", "-n", "trial").stderr
    assert "nothing would change" in command("diff", "-n", "trial").stderr
    command("render", "-n", "trial", "-o", str(tmp_path / "k8s"))
    assert "namespace: trial" in (tmp_path / "k8s" / "base" / "config.yaml").read_text()
    assert command("delete", "-n", "trial", "--with-data", "--yes").returncode == 0
    assert bare.names("Namespace") == []


def test_n_with_a_number_points_to_lines(command: Command) -> None:
    result = command("logs", "-n", "50")
    assert result.returncode == 2
    assert "-n is 50: it names the namespace, as with kubectl. Write --lines 50." in result.stderr


# ── status, logs ───────────────────────────────────────────────────────────────────────────────


def test_status_shows_roles_endpoints_errors_and_exits_1_on_failure(
    bare: ApiServer, kube: Kube, command: Command
) -> None:
    deployed(kube)
    bare.put({**deployment(), "status": {"readyReplicas": 1}})
    crashed = container("predictor", restarts=4, last={"exitCode": 2}, waiting={"reason": "CrashLoopBackOff"})
    bare.put(pod("ads-predictor-1", "predictor", "Running", crashed))
    bare.put(pod("ads-predictor-2", "predictor", "Running", container("predictor", running={}), ready=True))
    bare.pages["ads-predictor-2", "/metrics"] = (200, "clickline_version 3.0\n")
    bare.put(event("ads-predictor-1", "BackOff", "restarting failed container"))
    result = command("status")
    assert result.returncode == 1
    row = next(line for line in result.stdout.splitlines() if line.startswith("predictor"))
    assert row.split()[:5] == ["predictor", "1/2", "4", "failed", "3"]
    assert row.endswith("CrashLoopBackOff in predictor, last exit code 2: bad config")
    assert "predictor  NodePort  http any node's address, port 30100" in result.stdout
    assert "ads-models  Pending" in result.stdout
    assert "Pod ads-predictor-1 BackOff: restarting failed container" in result.stdout
    assert json.loads(command("status", "--json").stdout)["state"] == "failed"


def test_status_without_a_deployment_suggests_apply(command: Command) -> None:
    result = command("status")
    assert (result.returncode, result.stdout) == (
        0,
        "ads is not deployed in namespace shop: `clickline deploy apply` deploys it\n",
    )


def test_log_lines_name_pod_and_container(bare: ApiServer, command: Command) -> None:
    first = container("ready", terminated={"exitCode": 0})
    main = container("predictor", running={})
    bare.put(pod("ads-predictor-1", "predictor", "Running", main, initContainerStatuses=[first]))
    bare.logs["ads-predictor-1", "ready"] = Log(["2026-11-16T10:00:01Z checked"])
    bare.logs["ads-predictor-1", "predictor"] = Log(["2026-11-16T10:00:02Z up"])
    result = command("logs", "predictor")
    assert result.stdout == "ads-predictor-1/ready checked\nads-predictor-1 up\n"
    assert "ads has no pods of role lookup in namespace shop" in command("logs", "lookup").stderr


def test_unknown_role_is_reported_with_the_existing_ones(command: Command) -> None:
    result = command("logs", "predictr")
    assert result.returncode == 2
    assert "ROLE is 'predictr'. Allowed: pipeline, trainer" in result.stderr


# ── delete ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_delete_without_a_terminal_needs_yes(bare: ApiServer, kube: Kube, command: Command) -> None:
    deployed(kube)
    result = command("delete")
    assert result.returncode == 2
    assert "--yes is missing: 5 objects would be deleted from namespace shop of context test" in result.stderr
    assert bare.names("Deployment") == ["ads-predictor"]
    done = command("delete", "--yes")
    assert done.returncode == 0, done.stderr
    assert "deleted    Deployment ads-predictor" in done.stdout
    assert "kept       PersistentVolumeClaim ads-models" in done.stdout
    assert bare.names("Deployment") == []
    assert "ads has no objects to delete" in command("delete").stdout


@pytest.mark.parametrize(("answer", "left"), [(b"n\n", ["ads-predictor"]), (b"y\n", [])])
def test_delete_asks_for_confirmation_in_a_terminal(
    bare: ApiServer, kube: Kube, command: Command, tmp_path: Path, answer: bytes, left: list[str]
) -> None:
    deployed(kube)
    ours_end, theirs = pty.openpty()
    try:
        os.write(ours_end, answer)
        done = subprocess.run(
            [Path(sys.executable).parent / "clickline", "deploy", "delete"],
            cwd=tmp_path,
            stdin=theirs,
            capture_output=True,
            text=True,
            timeout=100,
        )
    finally:
        os.close(ours_end)
        os.close(theirs)
    assert "  Deployment ads-predictor\n" in done.stderr and "Delete these?" in done.stderr
    assert (bare.names("Deployment"), done.returncode) == (left, 1 if left else 0)


# ── the wrong thing ────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_unusable_cluster_is_reported_without_a_traceback(
    bare: ApiServer, command: Command, tmp_path: Path
) -> None:
    none = command("status", KUBECONFIG=str(tmp_path / "none"))
    assert (none.returncode, "no kubeconfig was found" in none.stderr) == (1, True)
    wrong = command("status", "--context", "prod")
    assert (wrong.returncode, "has no context 'prod'. Allowed: test." in wrong.stderr) == (1, True)
    file = bare.kubeconfig(tmp_path / "dead", server="https://127.0.0.1:1")
    dead = command("status", "--json", KUBECONFIG=str(file))
    assert dead.returncode == 1
    assert (
        "https://127.0.0.1:1 (context test) cannot be reached" in json.loads(dead.stdout)["error"]["message"]
    )
    assert len(dead.stderr.splitlines()) == 1  # and nothing from the library


def test_missing_package_names_the_extra(command: Command, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked" / "kubernetes"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise ModuleNotFoundError('no', name='kubernetes')\n")
    result = command("status", PYTHONPATH=str(blocked.parent))
    assert result.returncode == 1
    assert result.stderr == (
        "connecting to a cluster needs the package kubernetes: pip install 'clickline[k8s]'\n"
    )


# ── in a pod ───────────────────────────────────────────────────────────────────────────────────


def test_check_pod_creates_directories_and_ray_token(command: Command, tmp_path: Path) -> None:
    home, cache = tmp_path / "home", tmp_path / "scratch"
    more = ["--set", f"home={home}", "--set", f"cache.dir={cache}"]
    only = command("check-pod", "--read-only", *more)
    assert (only.returncode, cache.is_dir(), home.exists()) == (0, True, False), only.stderr
    done = command("check-pod", *more, RAY_AUTH_TOKEN_PATH=str(home / "ray-token"))
    assert (done.returncode, home.is_dir()) == (0, True), done.stderr
    assert (home / "ray-token").read_text().strip()
    assert f"{home}: writable" in done.stderr


def test_check_pod_rejects_an_unwritable_data_volume(command: Command, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    more = ["--read-only", "--data", str(logs), "--set", f"cache.dir={tmp_path / 'scratch'}"]
    done = command("check-pod", *more)
    assert (done.returncode, f"{logs}: writable" in done.stderr) == (0, True), done.stderr
    logs.rmdir()
    logs.write_text("no folder")
    refused = command("check-pod", *more)
    assert refused.returncode == 1
    assert (
        f"{logs}: File exists" in refused.stderr
        and "Check that the volume is mounted there" in refused.stderr
    )
