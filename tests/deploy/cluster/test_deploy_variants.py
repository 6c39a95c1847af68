"""Every variant is applied, shown and deleted completely: no rendered kind is forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest
from ads_objects import ADS
from api_server import ApiServer

from clickline.deploy.apply import KINDS, apply, delete_objects, find_objects
from clickline.deploy.deploy_status import fetch_status, summarize
from clickline.deploy.kube_client import Kube
from clickline.deploy.render import render
from clickline.progress import Progress

CHOICES = {
    "plain": [],
    "ray": ["train.mode=cluster"],
    "volcano": ["train.mode=cluster", "deploy.training.kind=volcano"],
    "kuberay": ["train.mode=cluster", "deploy.training.kind=kuberay"],
    "argo": ["deploy.workflow.kind=argo"],
    "follow": [
        "deploy.workflow.follow=true",
        "data.train=data/{date}/{hour}/*.tsv",
        "data.dates={from: 20260101, to: 20260102}",
    ],
    "schedule": ["deploy.workflow.schedule=0 3 * * *"],
    "argo schedule": ["deploy.workflow.kind=argo", "deploy.workflow.schedule=0 3 * * *"],
    "knative": ["deploy.serving.kind=knative"],
    "lookup": ["deploy.serving.lookup={replicas: 2}", "publish.shards=2"],
    "tracking": ["deploy.tracking.enabled=true"],
    "nfs": ["deploy.storage.models={kind: nfs, server: nfs.test, path: /models}"],
}


@pytest.mark.parametrize("choice", CHOICES)
def test_every_variant_is_applied_shown_and_deleted(
    cluster: ApiServer, kube: Kube, tmp_path: Path, choice: str
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.tsv").write_text("")
    file = tmp_path / "clickline.yaml"
    file.write_text("name: ads\ndata: {train: data/train.tsv}\ndeploy: {namespace: shop}\n")
    made = render(file, CHOICES[choice])
    assert {(one["apiVersion"], one["kind"]) for one in made.objects} <= set(KINDS)
    before = set(cluster.objects)

    def go() -> list[str]:
        done = apply(kube, ADS, made.objects, prune=False, progress=Progress())
        assert not done.failed and not done.left_over
        return [*done.created, *done.changed, *done.replaced]

    assert len(go()) == len(made.objects)
    assert go() == []
    result = summarize(fetch_status(kube, ADS))
    assert result["state"] in ("waiting", "running") and result["roles"]
    assert all(role["role"] != "other" for role in result["roles"])
    there = find_objects(kube, ADS)
    assert len(there.objects) == len(made.objects)
    delete_objects(kube, ADS, there, with_data=True, progress=Progress())
    assert set(cluster.objects) == before
