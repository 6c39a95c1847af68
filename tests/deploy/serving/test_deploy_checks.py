"""Settings that cannot work on a cluster are reported with a remedy; valid ones are not."""

from __future__ import annotations

import json
import shlex

import pytest
from serving_plans import EVERY_WAY, plan

from clickline.deploy.config_checks import config_mistakes, config_notes

_KNATIVE = "deploy.serving.kind=knative"
_NO_HOME = "deploy.storage.models={kind: none}"
_CLUSTER = "train.mode=cluster"

WRONG = {
    "long name": (["name=" + "a" * 39], "name", "at most 38"),
    "name of a Service": (["name=1ads"], "name", "a letter"),
    "home in a store": (["home=s3://ads/home"], "home", "publish.registry may be the URI"),
    "home over the config": (["home=."], "home", "Choose a folder"),
    "home in scratch": (["home=/scratch/home"], "home", "Choose a folder"),
    "data over the config": (["deploy.storage.data.mount=."], "deploy.storage.data.mount", "Choose a folder"),
    "data in home": (
        ["deploy.storage.data.mount=.clickline/data", "data.train=.clickline/data/x", "data.eval=null"],
        "deploy.storage.data.mount",
        "Move one",
    ),
    "data elsewhere": (["data.train=/logs/x.tsv"], "data.train", "deploy.storage.data.mount"),
    "data beside the YAML": (["data.eval=eval.tsv"], "data.eval", "deploy.storage.data.mount"),
    "data above the YAML": (["data.eval=data/../eval.tsv"], "data.eval", "deploy.storage.data.mount"),
    "no data volume": (["deploy.storage.data={kind: none}", "data.eval=null"], "data.train", "set its URI"),
    "slots elsewhere": (
        ["data.format=slots", "data.slot_conf=slots.txt", "data.eval=null"],
        "data.slot_conf",
        "deploy.storage.data.mount",
    ),
    "warm start elsewhere": (["train.warm_start=/old/run"], "train.warm_start", "move it"),
    "registry outside": (["publish.registry=/versions"], "publish.registry", "set a URI"),
    "token": (["serve.token_file=secrets/token"], "serve.token_file", '"secrets/token": NAME/KEY'),
    "certificate": (
        [
            "serve.tls={certificate: tls.crt, key: tls.key}",
            "deploy.secrets.files={tls.crt: web/tls.crt}",
        ],
        "serve.tls.key",
        "kubectl create secret",
    ),
    "credentials": (
        ["storage.credentials_file=/etc/keys.yaml"],
        "storage.credentials_file",
        '"/etc/keys.yaml": NAME/KEY',
    ),
    "secret above the YAML": (
        ["serve.token_file=../token", "deploy.secrets.files={../token: web/token}"],
        "deploy.secrets.files",
        "Move the file",
    ),
    "model above the YAML": (["model.file=../net.py"], "model.file", "Move it"),
    "model in a volume": (["model.file=data/net.py"], "model.file", "Move it"),
    "reader in home": (
        ["data.reader=.clickline/reader.py", "data.fields={click: label, city: slot}"],
        "data.reader",
        "Move it",
    ),
    "no home, local registry": ([_NO_HOME], "deploy.storage.models.kind", "publish.registry"),
    "no home, cluster": (
        [_NO_HOME, "publish.registry=s3://ads/v", _CLUSTER],
        "deploy.storage.models.kind",
        "train.mode: local",
    ),
    "no home, argo": (
        [_NO_HOME, "publish.registry=s3://ads/v", "deploy.workflow.kind=argo"],
        "deploy.storage.models.kind",
        "workflow.kind: job",
    ),
    "no home, tracking": (
        [_NO_HOME, "publish.registry=s3://ads/v", "deploy.tracking.enabled=true"],
        "deploy.storage.models.kind",
        "tracking.uri",
    ),
    "an operator of nothing": (
        ["deploy.training.kind=volcano"],
        "deploy.training.kind",
        "train.mode: cluster",
    ),
    "gang of plain pods": (
        [_CLUSTER, "deploy.training.gang=true"],
        "deploy.training.gang",
        "change the kind",
    ),
    "queue of plain pods": ([_CLUSTER, "deploy.training.queue=night"], "deploy.training.queue", "volcano"),
    "a schedule of one run": (
        [_CLUSTER, "deploy.training.kind=volcano", "deploy.workflow.schedule=0 3 * * *"],
        "deploy.workflow.schedule",
        "argo",
    ),
    "following no hours": (["deploy.workflow.follow=true"], "deploy.workflow.follow", "data.dates"),
    "a port of root's": (["serve.http_port=80"], "serve.http_port", "Ingress"),
    "MLflow on a port of root's": (
        ["deploy.tracking={enabled: true, port: 80}"],
        "deploy.tracking.port",
        "Choose another",
    ),
    "a port of Knative's": ([_KNATIVE, "serve.metrics_port=9090"], "serve.metrics_port", "Choose another"),
    "TLS behind Knative": (
        [
            _KNATIVE,
            "serve.tls={certificate: tls.crt, key: tls.key}",
            "deploy.secrets.files={tls.crt: web/tls.crt, tls.key: web/tls.key}",
        ],
        "serve.tls",
        "gateway",
    ),
    "a node port of Knative": (
        [_KNATIVE, "deploy.serving.service=NodePort"],
        "deploy.serving.service",
        "Remove",
    ),
    "a revision of others": (
        [_KNATIVE, "deploy.serving.canary={stable: other-1}"],
        "deploy.serving.canary.stable",
        "deploy status",
    ),
    "tracking that is off": (
        ["deploy.tracking.enabled=true", "tracking.enabled=false"],
        "deploy.tracking.enabled",
        "Change one of them",
    ),
    "two trackers": (
        ["deploy.tracking.enabled=true", "tracking.uri=http://mlflow:5000"],
        "deploy.tracking.enabled",
        "Remove one",
    ),
    "too many processes": (["serve.processes=64"], "serve.processes", "memory_limit"),
    "too many shards": (
        [_CLUSTER, "train.embedding_servers=64"],
        "train.embedding_servers",
        "clickline plan",
    ),
    "shards that ask for too much": (
        [_CLUSTER, "cluster.embedding_server.memory=3GiB"],
        "train.embedding_servers",
        "cluster.embedding_server.memory",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_config_mistake_is_reported_with_its_remedy(case: str) -> None:
    overrides, key, remedy = WRONG[case]
    (mistake,) = config_mistakes(plan(*overrides))
    assert mistake.key == key
    assert remedy in f"{mistake.problem} {mistake.remedy}"
    assert str(mistake).startswith(f"clickline.yaml {key} ")


@pytest.mark.parametrize("way", EVERY_WAY)
def test_valid_configs_have_no_mistakes(way: str) -> None:
    assert config_mistakes(plan(*EVERY_WAY[way])) == []


def test_all_mistakes_are_reported_at_once() -> None:
    found = config_mistakes(plan("data.train=/logs/x", "serve.http_port=80", "serve.token_file=token"))
    assert [mistake.key for mistake in found] == ["data.train", "serve.token_file", "serve.http_port"]


def test_suggested_number_of_processes_fits() -> None:
    (mistake,) = config_mistakes(plan("serve.processes=64"))
    most = int(mistake.problem.rsplit(" ", 1)[1].rstrip("."))
    assert config_mistakes(plan(f"serve.processes={most}")) == []
    assert config_mistakes(plan(f"serve.processes={most + 1}"))
    limited = (_CLUSTER, "deploy.resources.ray_worker.memory_limit=2Gi", "train.workers.min=2")
    (mistake,) = config_mistakes(plan(*limited, "train.embedding_servers=64"))
    most = int(mistake.problem.rsplit(" ", 2)[1])
    assert config_mistakes(plan(*limited, f"train.embedding_servers={most}")) == []
    assert config_mistakes(plan(*limited, f"train.embedding_servers={most + 1}"))


def test_user_files_must_fit_into_the_config_map() -> None:
    def wrong(size: int) -> list[str]:
        source = {"/clickline/net.py": "#" * size}
        return [mistake.key for mistake in config_mistakes(plan("model.file=net.py", files=source))]

    assert wrong(1000) == []
    assert wrong(2**20) == ["model.file"]


def test_secret_file_may_be_named_by_relative_or_absolute_path() -> None:
    for path in ("token", "./token", "/clickline/token"):
        assert (
            config_mistakes(plan("serve.token_file=token", f"deploy.secrets.files={{{path}: web/token}}"))
            == []
        )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((_CLUSTER,), "ReadWriteOnce: all pods that mount it run on one node, Ray's workers too"),
        (("deploy.storage.models={kind: host, path: /srv}",), "must belong to 10001:10001"),
        (EVERY_WAY["stores only"], "checkpoints are lost with the pod"),
        (("data.train=s3://ads/*",), "no credentials are set"),
        (EVERY_WAY["node cache"], "run on node worker-1"),
        (("deploy.storage.cache={node: n, path: /c}",), "stays empty"),
        (("deploy.secrets.files={old: web/old}",), "old is mounted, but no key"),
        (("deploy.serving.service=NodePort",), "anyone who can reach the nodes"),
        (EVERY_WAY["knative everything"], "Prometheus needs the token"),
        (EVERY_WAY["tls"], "*.ads-lookup"),
        (("deploy.tracking.enabled=true",), "only the API"),
        ((_KNATIVE,), "kubernetes.podspec-persistent-volume-claim: enabled"),
        ((_KNATIVE,), "registries-skipping-tag-resolving"),
        (EVERY_WAY["knative grpc"], "HTTP cannot be reached"),
        (EVERY_WAY["knative canary"], "the same ConfigMap"),
        (("deploy.resources.predictor.gpu=1",), "leaves them idle"),
        ((), "metrics server; without one it stays at 2 predictors."),
        (("deploy.serving.replicas=1",), "metrics server; without one it stays at 1 predictor."),
        (EVERY_WAY["lookup"], "6 pods, publish.shards 3 x replicas 2"),
        (
            (_CLUSTER, "deploy.training.kind=volcano", "train.workers={min: 2, max: 5}"),
            "before 4 of 7 pods fit",
        ),
    ],
)
def test_notes_on_surprising_settings(overrides: tuple[str, ...], words: str) -> None:
    assert [note for note in config_notes(plan(*overrides)) if words in note]


@pytest.mark.parametrize(
    ("image", "registry"),
    [
        ("clickline:1", "index.docker.io"),
        ("shop/clickline:1", "index.docker.io"),
        ("localhost/clickline:1", "localhost"),
        ("registry:5000/shop/clickline:1", "registry:5000"),
        ("images.example/clickline:1", "images.example"),
    ],
)
def test_knative_notes_contain_the_commands_to_run(image: str, registry: str) -> None:
    result = config_notes(plan(_KNATIVE, f"deploy.image={image}"))
    commands = [shlex.split(note[note.index("kubectl ") :]) for note in result if " patch configmap " in note]
    assert {words[5]: json.loads(words[-1]) for words in commands} == {
        "config-features": {"data": {"kubernetes.podspec-persistent-volume-claim": "enabled"}},
        "config-deployment": {
            "data": {"registries-skipping-tag-resolving": f"kind.local,ko.local,dev.local,{registry}"}
        },
    }


def test_no_registry_note_for_local_images() -> None:
    for image in ("dev.local/clickline:1", "clickline@sha256:" + "0" * 64):
        result = config_notes(plan(_KNATIVE, f"deploy.image={image}"))
        assert not [note for note in result if "registries-skipping" in note]
