"""Parameters of Intel's kustomize packages are converted to a clickline.yaml, or refused with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest
from draft_loading import load_draft

from clickline.deploy.render import render
from clickline.errors import ConfigError
from clickline.importers.run import valid_yaml
from clickline.importers.tfserving_intel import tfserving_intel
from deploy.schemas.schemas import pod_specs, problems, restricted_problems

TABLE = """\
|     NAME        |                 VALUE    |        DESCRIPTION          |
|-----------------|--------------------------|-----------------------------|
| DATASET_DIR     | /datasets                | input dataset directory     |
| FS_ID           | 0                        | owner id of mounted volumes |
| GROUP_ID        | 1002                     | process group id            |
| GROUP_NAME      | root                     | process group name          |
| NFS_PATH        | /nfs                     | nfs path                    |
| NFS_SERVER      | 0.0.0.0                  | nfs server                  |
| PVC_NAME        | workdisk                 | model-builder | pvc name    |
| PVC_PATH        | /pvc                     | model-builder | pvc path    |
| REPLICAS        | 3                        | replica number              |
| RETRY_LIMIT     | 10                       | replica number              |
| TARGET_ACCURACY | 0.74                     | target accuracy             |
| TF_SERVING_PORT | 8501                     | tf serving port             |
| USER_ID    | 1001                          | process owner id            |
| USER_NAME  | root                          | process owner name          |
"""
COMMANDS = """\
# mine
kustomize cfg set . DATASET_DIR /nfs/criteo -R
kustomize cfg set . NFS_SERVER 10.1.2.3 -R
kustomize cfg set . NFS_PATH /nfs -R
kustomize cfg set . TF_SERVING_PORT 9000 -R
kustomize cfg set . USER_ID 1001 -R
kustomize edit set namespace ctr
"""


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("params")


def test_table_of_setters(params: Path, tmp_path: Path) -> None:
    params.write_text(TABLE)
    result = load_draft(tfserving_intel(params), tmp_path)
    config = result.config
    assert (config.data.format, config.data.train) == ("criteo", ("/datasets/train.csv",))
    assert config.data.eval == ("/datasets/eval.csv",)
    assert (config.model.embedding_dim, config.model.hidden) == (32, (1024, 512, 256))
    assert (config.gate.accuracy, config.gate.extra_epochs, config.train.batch_size) == (0.74, 10, 512)
    serving, storage = config.deploy.serving, config.deploy.storage
    assert (serving.replicas, serving.max_replicas, serving.service) == (3, None, "NodePort")
    assert (config.deploy.workflow.kind, config.deploy.workflow.retries) == ("argo", 10)
    assert (storage.data.kind, storage.data.claim, storage.data.mount) == (
        "existing",
        "workdisk",
        "/datasets",
    )
    assert (storage.models.kind, storage.models.claim) == ("existing", "workdisk")
    assert (config.deploy.identity.user, config.deploy.identity.group) == (1001, 1002)
    assert config.deploy.identity.fs_group == 10001 and "params:4 FS_ID: is root" in result.comments
    assert "a model that never predicts a click reaches 0.744" in result.comments
    for number, line in enumerate(TABLE.splitlines()[2:], 3):
        assert f"params:{number} {line.split()[1]}" in result.comments


def test_set_commands_nfs_and_namespace(params: Path, tmp_path: Path) -> None:
    params.write_text(COMMANDS + "PVC_NAME='workdisk'\nMY_TOKEN: hunter2\n")
    result = load_draft(tfserving_intel(params), tmp_path)
    storage = result.config.deploy.storage
    assert (storage.data.kind, storage.data.server, storage.data.path) == ("nfs", "10.1.2.3", "/nfs")
    assert (storage.data.mount, result.config.data.train) == ("/nfs", ("/nfs/criteo/train.csv",))
    assert result.config.serve.grpc_port == 9000
    assert (result.config.deploy.namespace, result.config.deploy.create_namespace) == ("ctr", False)
    assert "params:8 PVC_NAME: is not used" in result.comments
    assert "params:9 MY_TOKEN: is a parameter that the importer does not know." in result.comments
    assert "hunter2" not in result.text


@pytest.mark.slow
@pytest.mark.parametrize("text", [TABLE, COMMANDS])
def test_imported_config_can_be_deployed(params: Path, tmp_path: Path, text: str) -> None:
    params.write_text(text)
    load_draft(tfserving_intel(params), tmp_path)
    result = render(tmp_path / "clickline.yaml").objects
    assert [problem for one in result for problem in problems(one)] == []
    assert [p for one in result for spec in pod_specs(one) for p in restricted_problems(spec)] == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("kubectl apply -f hunter2.yaml", "params:17 begins with 'kubectl' and is not a parameter."),
        ("kustomize cfg set . DATASET_DIR", "params:17 begins with 'kustomize' and is not a parameter."),
        ("dataset = hunter2", "params:17 begins with 'dataset' and is not a parameter."),
        ('DATASET_DIR="/x', "params:17 DATASET_DIR has an unclosed quote."),
        ("DATASET_DIR=", "params:17 DATASET_DIR is missing or empty."),
        ("REPLICAS=many", "params:17 REPLICAS would become deploy.serving.replicas, which is many. Allowed:"),
        ("TARGET_ACCURACY=74", "params:17 TARGET_ACCURACY would become gate.accuracy, which is 74. Allowed:"),
        ("USER_ID=root", "params:17 USER_ID would become deploy.identity.user, which is root. Allowed:"),
        ("PVC_NAME=My_Disk", "params:17 PVC_NAME would become deploy.storage.data.claim, which is My_Disk."),
        (
            "TF_SERVING_PORT=8502",
            "params:17 TF_SERVING_PORT conflicts with a default: serve.metrics_port is 8502, and so is grpc_port.",
        ),
        ("\x1b[31mRED=1", "params:17 begins with '\\x1b' and is not a parameter."),
    ],
)
def test_malformed_line_is_refused(params: Path, tmp_path: Path, line: str, message: str) -> None:
    params.write_text(f"{TABLE}{line}\n")
    with pytest.raises(ConfigError) as caught:
        valid_yaml(tfserving_intel(params), tmp_path)
    assert message in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_empty_file_is_refused(params: Path) -> None:
    params.write_text("# nothing\n")
    with pytest.raises(ConfigError, match=r"params contains no parameters. Write NAME=value"):
        tfserving_intel(params)


def test_parameters_of_argo_submit(params: Path, tmp_path: Path) -> None:
    params.write_text(
        "DATASET_DIR=/datasets\n"
        "argo submit -n ctr wf.yaml --watch -p REPLICAS=2 --parameter TARGET_ACCURACY=0.75 --parameter=RETRY_LIMIT=4\n"
    )
    result = load_draft(tfserving_intel(params, ["REPLICAS=5", "USER_ID=1001"]), tmp_path)
    config = result.config
    assert (config.deploy.namespace, config.deploy.serving.replicas, config.deploy.identity.user) == (
        "ctr",
        5,
        1001,
    )
    assert (config.gate.accuracy, config.gate.extra_epochs) == (0.75, 4)
    assert "params:2 REPLICAS: is overridden by -p REPLICAS." in result.comments
    assert "from -p REPLICAS" in result.comments
    with pytest.raises(ConfigError, match=r"-p begins with 'replicas' and is not a parameter"):
        tfserving_intel(params, ["replicas 5"])


def test_preprocessed_records(params: Path, tmp_path: Path) -> None:
    params.write_text("DATASET_DIR=/datasets/train_processed_data.tfrecords\n")
    data = load_draft(tfserving_intel(params), tmp_path).config.data
    assert data.format == "intel_tfrecord"
    assert data.train == ("/datasets/train_processed_data.tfrecords",)
    assert data.eval == ("/datasets/eval_processed_data.tfrecords",)
