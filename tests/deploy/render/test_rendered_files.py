"""`deploy render`: the same bytes for the same YAML, valid by every schema, and accepted by kustomize."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from golden import CASES, GOLDEN, render_text

from clickline.config import load_config
from clickline.deploy.objects import to_yaml
from clickline.deploy.render import write_files
from clickline.errors import ConfigError
from deploy.schemas.schemas import pod_specs, problems, restricted_problems

OVERLAYS = ["single-node-nfs", "single-node-pvc", "pipeline-nfs", "pipeline-pvc"]


def documents(content: str) -> list[dict[str, Any]]:
    return [one for one in yaml.load_all(content, Loader=yaml.CSafeLoader) if one]


def by_name(objects: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    found = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    assert len(found) == len(objects)
    return found


@pytest.mark.parametrize("case", CASES)
def test_rendered_files_match_the_golden_files(case: str) -> None:
    assert to_yaml(render_text(CASES[case]).objects) == (GOLDEN / f"{case}.yaml").read_text(), (
        "if this is meant: .venv/bin/python tests/deploy/render/golden.py, and look at the difference"
    )
    assert render_text(CASES[case]).files == render_text(CASES[case]).files


@pytest.mark.parametrize("case", CASES)
def test_golden_objects_match_the_schemas_and_pods_are_restricted(case: str) -> None:
    made = render_text(CASES[case])
    everything = [*made.objects]
    for name, content in made.files.items():
        if not name.endswith("kustomization.yaml"):
            everything += documents(content)
    assert [problem for one in everything for problem in problems(one)] == []
    assert [
        problem for one in everything for spec in pod_specs(one) for problem in restricted_problems(spec)
    ] == []


@pytest.mark.parametrize("case", CASES)
def test_kustomize_builds_the_objects_that_apply_applies(case: str, tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    made = render_text(CASES[case])
    write_files(made.files, tmp_path)
    built = {
        place: by_name(documents(kustomize(tmp_path / place)))
        for place in ("", *(f"overlays/{name}" for name in OVERLAYS))
    }
    assert built[""] == by_name(made.objects)
    for place, objects in built.items():
        assert [problem for one in objects.values() for problem in problems(one)] == [], place
        kinds = {kind for kind, _ in objects}
        assert "PersistentVolume" in kinds if place.endswith("nfs") else True
        if "single-node" in place:
            assert kinds.isdisjoint({"RayJob", "Workflow", "CronWorkflow"})
            assert not any("ray" in name for _, name in objects)


def kustomize(folder: Path) -> str:
    done = subprocess.run(
        ["kubectl", "kustomize", folder], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_config_in_the_pods_equals_the_yaml() -> None:
    """It loads, names the same paths, and does not change with settings of Kubernetes alone."""
    made = by_name(render_text(CASES["plain-cluster"]).objects)
    written = made["ConfigMap", "ads-config"]["data"]["clickline.yaml"]
    file = Path("/clickline/clickline.yaml")
    config = load_config_text(written)
    assert config.data.train == ("/clickline/data/train.tsv",) and config.home == "/clickline/.clickline"
    assert config.serve.host == "0.0.0.0" and config.cluster.address == "ads-ray-head-0.ads-ray:6379"
    assert (
        file.parent.as_posix()
        == made["Job", "ads-pipeline"]["spec"]["template"]["spec"]["containers"][0]["workingDir"]
    )
    other = by_name(render_text(CASES["plain-cluster"], "deploy.serving.max_replicas=9").objects)
    assert other["ConfigMap", "ads-config"] == made["ConfigMap", "ads-config"]
    assert other["Deployment", "ads-predictor"] == made["Deployment", "ads-predictor"]


def load_config_text(content: str) -> Any:
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(content)
        file.flush()
        return load_config(file.name)


def test_user_files_are_deployed_with_the_config(tmp_path: Path) -> None:
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "mine.py").write_text("network = 1\n")
    (tmp_path / "clickline.yaml").write_text(CASES["smallest"] + "model: {file: nets/mine.py}\n")
    from clickline.deploy.render import render

    made = by_name(render(tmp_path / "clickline.yaml").objects)
    assert made["ConfigMap", "ads-config"]["data"]["nets.mine.py"] == "network = 1\n"
    mounts = made["Job", "ads-pipeline"]["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert {
        "name": "config",
        "mountPath": "/clickline/nets/mine.py",
        "subPath": "nets.mine.py",
        "readOnly": True,
    } in mounts


def test_files_of_an_earlier_render_are_removed_and_others_kept(tmp_path: Path) -> None:
    write_files(render_text(CASES["plain-cluster"]).files, tmp_path)
    (tmp_path / "mine.yaml").write_text("kept\n")
    assert (tmp_path / "chosen" / "ray-head.yaml").exists()
    write_files(render_text(CASES["smallest"]).files, tmp_path)
    assert not (tmp_path / "chosen" / "ray-head.yaml").exists()
    assert (tmp_path / "mine.yaml").read_text() == "kept\n"


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("deploy.image=clickline", "deploy.image"),
        ("deploy.serving.http_node_port=8080", "deploy.serving.http_node_port"),
        ("deploy.storage.data.kind=nfs", "deploy.storage.data.server"),
        ("deploy.resources.predictor.memory_limit=64Mi", "deploy.resources.predictor.memory_limit"),
        ("data.train=/elsewhere/train.tsv", "data.train"),
        ("serve.token_file=token", "serve.token_file"),
    ],
)
def test_config_mistakes_are_reported_without_a_cluster(setting: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        render_text(CASES["smallest"], setting)
    assert key in [mistake.key for mistake in caught.value.mistakes], caught.value
    assert all(mistake.remedy for mistake in caught.value.mistakes)


def test_data_pod_checks_that_the_data_volume_is_writable() -> None:
    made = documents(render_text(CASES["smallest"]).files["tools/data-pod.yaml"])
    spec = next(one["spec"] for one in made if one["kind"] == "Pod")
    (first,) = spec["initContainers"]
    assert first["command"][-2:] == ["--data", "/clickline/data"]
    assert {"name": "data", "mountPath": "/clickline/data"} in first["volumeMounts"]
    assert spec["restartPolicy"] == "OnFailure"  # the owner of a folder may change
    without = documents(render_text(CASES["follow-secrets"]).files["tools/data-pod.yaml"])
    spec = next(one["spec"] for one in without if one["kind"] == "Pod")
    assert "--data" not in spec["initContainers"][0]["command"]


@pytest.mark.parametrize("case", CASES)
def test_reason_of_a_failed_container_is_kept_in_the_pod_status(case: str) -> None:
    for spec in pod_specs(render_text(CASES[case]).objects):
        for container in [*spec.get("initContainers", ()), *spec["containers"]]:
            assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
