"""The pods of a rendered deployment really run: a small pipeline on Ray to its end, and predictions from its endpoint.

Every container's command is run exactly as it stands in the manifests, with a read-only root file system, the user id
of the manifest and no capabilities.
"""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from pod_runner import Pods, missing

import clickline
from clickline.stages.deploy.render import rendered

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # two cores may be busy with much else
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

CONFIG = """
name: ads
data: {format: criteo, train: data/train.tsv, eval: data/eval.tsv}
model: {embedding_dim: 4, hidden: [8]}
train: {mode: cluster, workers: {min: 1, max: 1}, shards: 2, batch_size: 256}
gate: {auc: 0.55, retries: 0}
tracking: {enabled: false}
deploy:
  identity: {user: 4711, group: 4712, fs_group: 4713}
  serving: {replicas: 1, lookup: {replicas: 1}}
"""


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    (tmp_path / "clickline.yaml").write_text(CONFIG)
    made = rendered(tmp_path / "clickline.yaml")
    import yaml

    extra = [one for one in yaml.safe_load_all(made.files["tools/data-pod.yaml"]) if one["kind"] == "Pod"]
    folder = tmp_path / "node"
    folder.mkdir()
    running = Pods(folder, [*made.objects, *extra], kernels(tmp_path / "kernels"))
    try:
        yield running
    finally:
        running.close()


def kernels(folder: Path) -> Path:
    """What the image has in /opt: kernels that are compiled already, as far as other tests did that here."""
    from numba.core.caching import UserProvidedCacheLocator as Locator

    folder.mkdir()
    for own in Path(clickline.__file__).parent.rglob("__pycache__"):
        found = [*own.glob("*.nbi"), *own.glob("*.nbc")]
        if found:
            source = str(own.parent / f"{found[0].name.partition('.')[0]}.py")
            place = folder / Locator.get_suitable_cache_subpath(source)
            place.mkdir(exist_ok=True)
            for file in found:
                shutil.copy2(file, place)
    return folder


def test_a_pipeline_on_ray_and_its_endpoint(pods: Pods) -> None:
    data = pods.start("Pod", "ads-data")
    pods.run(
        data,
        "Pod",
        "ads-data",
        ["clickline", "sample", "--format", "criteo", "--rows", "6000", "--out", "data"],
    )
    pods.kill(data)

    # In the order that a cluster happens to start them: none may need another to be there first.
    predictor = pods.start("Deployment", "ads-predictor")
    head = pods.start("StatefulSet", "ads-ray-head")
    pods.until_ready(head, "StatefulSet", "ads-ray-head")
    worker = pods.start("StatefulSet", "ads-ray-worker")
    lookups = [pods.start("StatefulSet", "ads-lookup", index) for index in range(2)]
    pipeline = pods.start("Job", "ads-pipeline")
    assert pods.ended(pipeline, 400) == 0, pods.log(pipeline)
    told = pods.log(pipeline)
    assert "publish" in told and "Traceback" not in told
    assert pods.alive(head) and pods.alive(worker)

    for index, lookup in enumerate(lookups):
        pods.until_ready(lookup, "StatefulSet", "ads-lookup")
        assert f'"lookup, shard {index}"' in pods.log(lookup)
    pods.until_ready(predictor, "Deployment", "ads-predictor")
    answer = ask(pods.address(predictor), {"instances": [{"C1": "a", "I1": "3"}, {}]})
    assert len(answer["predictions"]) == 2 and all(0 < one < 1 for one in answer["predictions"])
    assert pods.stop(predictor) == 0


def ask(address: str, body: object) -> dict[str, list[float]]:
    call = urllib.request.Request(
        f"http://{address}:8501/v1/models/ads:predict", data=json.dumps(body).encode(), method="POST"
    )
    with urllib.request.urlopen(call, timeout=10) as reply:
        found: dict[str, list[float]] = json.load(reply)
    return found


def test_a_volume_of_somebody_else_is_named(pods: Pods) -> None:
    claim = pods.folder / "claim-ads-models"
    claim.mkdir(mode=0o755)
    with pytest.raises(AssertionError, match=r"/clickline/\.clickline") as caught:
        pods.start("Job", "ads-pipeline")
    assert "fs_group" in str(caught.value) and "Traceback" not in str(caught.value)
