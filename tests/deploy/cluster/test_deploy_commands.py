"""clickline deploy as a user types it, against a cluster: what it prints, what it changes, how it ends."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ads_objects import container, deployment, event, ours, pod
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
    apply(kube, ours(), name="ads", namespace="shop", prune=False, progress=Progress())


# ── apply ──────────────────────────────────────────────────────────────────────────────────────


def test_apply_brings_what_render_writes_and_the_next_one_changes_nothing(
    bare: ApiServer, command: Command
) -> None:
    done = command("apply")
    assert done.returncode == 0, done.stderr
    assert "created    Deployment ads-predictor" in done.stdout
    assert bare.names("Deployment") == ["ads-predictor"] and bare.names("Namespace") == ["shop"]
    again = json.loads(command("apply", "--json").stdout)
    assert again["created"] == again["changed"] == again["replaced"] == []
    assert set(again["unchanged"]) == {line.split(maxsplit=1)[1] for line in done.stdout.splitlines()[:-1]}


def test_a_partly_failed_apply_exits_1_and_tells_each_part(bare: ApiServer, command: Command) -> None:
    bare.faults.append(Fault("patch", "deployments", 500, "etcd is full", dry_run=False))
    done = command("apply")
    assert done.returncode == 1
    assert "created    ConfigMap ads-config" in done.stdout
    assert "failed     Deployment ads-predictor: etcd is full (500)" in done.stderr
    assert "not tried  Job ads-pipeline" in done.stderr
    assert "applied in part" in done.stderr


def test_a_missing_operator_ends_an_apply_before_it_begins(bare: ApiServer, command: Command) -> None:
    done = command("apply", "--set", "deploy.serving.kind=knative")
    assert done.returncode == 1
    assert "Install Knative Serving (knative.dev), or set deploy.serving.kind: deployment." in done.stderr
    assert bare.writes == []


@pytest.mark.slow
def test_a_note_is_told_once_and_again_when_what_it_is_about_changes(command: Command) -> None:
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
def test_a_set_of_the_last_apply_that_is_not_given_again_is_told_before_anything_changes(
    bare: ApiServer, command: Command, tmp_path: Path
) -> None:
    more = ("--set", "deploy.serving.max_replicas=null", "--set", "deploy.serving.replicas=3")
    assert command("apply", *more).returncode == 0
    assert command("apply", *more).stderr == ""
    words = "deploy.serving.replicas 3 → 2: the last apply used --set deploy.serving.replicas=3"
    assert words in command("diff").stderr
    bare.faults.append(Fault("patch", "deployments", 500, "etcd is full", dry_run=False))
    told = command("apply")
    assert told.returncode == 1
    assert words in told.stderr and told.stderr.index(words) < told.stderr.index("etcd is full")
    assert "--set counts for one apply" in told.stderr
    bare.faults.clear()
    command("apply", *more)
    (tmp_path / "clickline.yaml").write_text(
        CONFIG.replace("shop}", "shop, serving: {replicas: 3, max_replicas: null}}")
    )
    kept = command("apply")
    assert "the last apply used" not in kept.stderr


@pytest.mark.slow
def test_a_dry_run_says_what_becomes_of_each_object_and_changes_nothing(
    bare: ApiServer, command: Command
) -> None:
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
def test_diff_shows_what_would_change_line_by_line_and_exits_1(bare: ApiServer, command: Command) -> None:
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
    )  # the config's text, a line each
    assert not any("uid" in line or "resourceVersion" in line for line in lines)
    document = json.loads(command("diff", "--json", "--set", "serve.drain_timeout=25").stdout)
    assert [one["object"] for one in document["changes"]] == [
        "ConfigMap ads-config",
        "Deployment ads-predictor",
    ]


def test_diff_that_fails_does_not_exit_as_if_it_had_found_differences(
    bare: ApiServer, command: Command
) -> None:
    bare.faults.append(Fault("get", "namespaces", 500, "out of order"))
    failed = command("diff")
    assert failed.returncode == 2
    assert "out of order" in failed.stderr
    told = json.loads(command("diff", "--json").stdout or "{}")
    assert "changes" not in told


def test_diff_of_a_job_that_would_be_made_anew_shows_only_what_is_new(
    bare: ApiServer, command: Command
) -> None:
    command("apply")
    bare.one("Job", "ads-pipeline")["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}  # type: ignore[index]
    changes = json.loads(command("diff", "--json", "--set", "deploy.workflow.retries=2").stdout)["changes"]
    job = next(one for one in changes if one["object"] == "Job ads-pipeline")
    changed = [line for line in job["diff"].splitlines()[2:] if line[0] in "+-"]
    assert (job["action"], changed) == ("replaced", ["-  backoffLimit: 6", "+  backoffLimit: 2"])


@pytest.mark.slow
def test_another_namespace_is_named_by_n_on_every_command(
    bare: ApiServer, command: Command, tmp_path: Path
) -> None:
    assert command("apply", "-n", "trial").returncode == 0
    assert bare.names("Namespace") == ["trial"]
    assert command("apply", "-n", "trial").stderr == ""  # the namespace is no --set to be given again
    assert "ads in namespace trial: " in command("status", "--namespace", "trial").stdout
    assert "in namespace trial" in command("logs", "-n", "trial").stderr
    assert "nothing would change" in command("diff", "-n", "trial").stderr
    command("render", "-n", "trial", "-o", str(tmp_path / "k8s"))
    assert "namespace: trial" in (tmp_path / "k8s" / "base" / "config.yaml").read_text()
    assert command("delete", "-n", "trial", "--with-data", "--yes").returncode == 0
    assert bare.names("Namespace") == []


def test_n_with_a_number_of_lines_is_told(command: Command) -> None:
    told = command("logs", "-n", "50")
    assert told.returncode == 2
    assert "-n is 50: it names the namespace, as with kubectl. Write --lines 50." in told.stderr


# ── status, logs ───────────────────────────────────────────────────────────────────────────────


def test_status_shows_roles_endpoints_and_errors_and_exits_1_if_one_failed(
    bare: ApiServer, kube: Kube, command: Command
) -> None:
    deployed(kube)
    bare.put({**deployment(), "status": {"readyReplicas": 1}})
    crashed = container("predictor", restarts=4, last={"exitCode": 2}, waiting={"reason": "CrashLoopBackOff"})
    bare.put(pod("ads-predictor-1", "predictor", "Running", crashed))
    bare.put(pod("ads-predictor-2", "predictor", "Running", container("predictor", running={}), ready=True))
    bare.pages["ads-predictor-2", "/metrics"] = (200, "clickline_version 3.0\n")
    bare.put(event("ads-predictor-1", "BackOff", "restarting failed container"))
    told = command("status")
    assert told.returncode == 1
    row = next(line for line in told.stdout.splitlines() if line.startswith("predictor"))
    assert row.split()[:5] == ["predictor", "1/2", "4", "failed", "3"]
    assert row.endswith("CrashLoopBackOff in predictor, last exit code 2: bad config")
    assert "predictor  NodePort  http any node's address, port 30100" in told.stdout
    assert "ads-models  Pending" in told.stdout
    assert "Pod ads-predictor-1 BackOff: restarting failed container" in told.stdout
    assert json.loads(command("status", "--json").stdout)["state"] == "failed"


def test_status_of_nothing_says_how_to_begin(command: Command) -> None:
    told = command("status")
    assert (told.returncode, told.stdout) == (
        0,
        "nothing of ads runs in namespace shop: `clickline deploy apply` brings it there\n",
    )


def test_logs_name_the_pod_and_a_container_beside_the_role(bare: ApiServer, command: Command) -> None:
    first = container("ready", terminated={"exitCode": 0})
    main = container("predictor", running={})
    bare.put(pod("ads-predictor-1", "predictor", "Running", main, initContainerStatuses=[first]))
    bare.logs["ads-predictor-1", "ready"] = Log(["2026-11-16T10:00:01Z checked"])
    bare.logs["ads-predictor-1", "predictor"] = Log(["2026-11-16T10:00:02Z up"])
    told = command("logs", "predictor")
    assert told.stdout == "ads-predictor-1/ready checked\nads-predictor-1 up\n"
    assert "ads has no pods of role lookup in namespace shop" in command("logs", "lookup").stderr


def test_a_role_that_does_not_exist_is_told_with_those_that_do(command: Command) -> None:
    told = command("logs", "predictr")
    assert told.returncode == 2
    assert "ROLE is 'predictr'. Allowed: pipeline, trainer" in told.stderr


# ── delete ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_delete_without_a_terminal_needs_yes(bare: ApiServer, kube: Kube, command: Command) -> None:
    deployed(kube)
    told = command("delete")
    assert told.returncode == 2
    assert "--yes is missing: 5 objects would be removed from namespace shop of context test" in told.stderr
    assert bare.names("Deployment") == ["ads-predictor"]
    done = command("delete", "--yes")
    assert done.returncode == 0, done.stderr
    assert "removed    Deployment ads-predictor" in done.stdout
    assert "kept       PersistentVolumeClaim ads-models" in done.stdout
    assert bare.names("Deployment") == []
    assert "nothing of ads was there to remove" in command("delete").stdout


@pytest.mark.parametrize(("answer", "left"), [(b"n\n", ["ads-predictor"]), (b"y\n", [])])
def test_delete_asks_at_a_terminal(
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
    assert "  Deployment ads-predictor\n" in done.stderr and "Remove these?" in done.stderr
    assert (bare.names("Deployment"), done.returncode) == (left, 1 if left else 0)


# ── the wrong thing ────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_clusters_that_cannot_be_used_end_a_command_in_words(
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
    assert len(dead.stderr.splitlines()) == 1  # and nothing of the library's own


def test_without_the_package_its_extra_is_named(command: Command, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked" / "kubernetes"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise ModuleNotFoundError('no', name='kubernetes')\n")
    told = command("status", PYTHONPATH=str(blocked.parent))
    assert told.returncode == 1
    assert told.stderr == (
        "talking to a cluster needs the package kubernetes: pip install 'clickline[k8s]'\n"
    )


# ── in a pod ───────────────────────────────────────────────────────────────────────────────────


def test_check_pod_makes_the_directories_and_rays_token(command: Command, tmp_path: Path) -> None:
    home, cache = tmp_path / "home", tmp_path / "scratch"
    more = ["--set", f"home={home}", "--set", f"cache.dir={cache}"]
    only = command("check-pod", "--read-only", *more)
    assert (only.returncode, cache.is_dir(), home.exists()) == (0, True, False), only.stderr
    done = command("check-pod", *more, RAY_AUTH_TOKEN_PATH=str(home / "ray-token"))
    assert (done.returncode, home.is_dir()) == (0, True), done.stderr
    assert (home / "ray-token").read_text().strip()
    assert f"{home}: writable" in done.stderr


def test_check_pod_refuses_a_data_volume_that_takes_no_files(command: Command, tmp_path: Path) -> None:
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
