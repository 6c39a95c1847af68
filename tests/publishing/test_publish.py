"""Publishing: a version scores like its checkpoint, or nothing is published."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from clickline.artifacts.checkpoint import find_checkpoint
from clickline.artifacts.dataset import Dataset, concat_rows
from clickline.artifacts.from_config import registry_of
from clickline.artifacts.version import PrecisionCost, VersionModel
from clickline.config import Config, load_config
from clickline.embedding import Eviction, begin_snapshot, save_snapshot
from clickline.embedding.serving import ServingTable
from clickline.errors import ArtifactError, GateRefused, RegistryMoved
from clickline.evaluation.run import evaluate
from clickline.models.model import Model, open_checkpoint
from clickline.progress import Progress
from clickline.publishing import run as publishing
from clickline.publishing.release import Release
from clickline.publishing.run import publish, publish_release
from clickline.records import LabelledRows
from clickline.scoring import scorer as scoring
from clickline.scoring.open_scorer import open_scorer
from clickline.storage.storage import Storage
from clickline.training.train_step import TrainStep


def rows_of(config: Config, split: str = "eval") -> LabelledRows:
    dataset = Dataset.current(Storage(), config.home)
    shards = dataset.splits[split].shards
    return concat_rows(
        [dataset.read(Path(dataset.folder, shards[s].file), [g]) for s, g, _ in dataset.row_groups(split)]
    )


def packed_differently(config: Config) -> Config:
    """A config that packs differently, because the same model packed the same way is published only once."""
    return config.model_copy(update={"publish": config.publish.model_copy(update={"sample_rows": 100})})


def scores_of(config: Config, number: int, rows: LabelledRows) -> np.ndarray:
    registry = registry_of(config)
    scorer = open_scorer(registry, registry.version(number), Path(config.cache.dir), 1)
    try:
        return scorer.probabilities(rows)
    finally:
        scorer.close()


class Trained:
    """A model that continues training in this process, as continuous training does."""

    def __init__(self, config: Config) -> None:
        self.config = config
        checkpoint = find_checkpoint(None, config.home)
        self.model = open_checkpoint(checkpoint, 2)
        self.rows = rows_of(config)
        self.train = rows_of(config, "train")
        self.origin = VersionModel("live", 0, tables_sha256="", dataset="d")
        self.train_step = TrainStep(self.model)

    def train_on(self, start: int, stop: int) -> None:
        part = self.train.slice(start, stop)
        self.train_step.run(self.train_step.prepare(part))

    def publish(self, snapshot: Path, **options: object):
        release = Release(self.model, snapshot, self.origin, "", None, self.rows)
        return publish_release(
            self.config, release, iter(()), Progress(), reason="test", started=time.monotonic(), **options
        )


# ── a checkpoint ───────────────────────────────────────────────────────────────────────────────


def test_a_version_scores_like_its_checkpoint(config, checkpoint):
    result = publish(config, reason="first")
    version = result.version
    assert (version.number, version.manifest.table, version.parent) == (1, "base", None)
    assert result.move is not None and result.move.reason == "first"
    assert version.manifest.sample.difference < 1e-6
    assert version.manifest.cost == PrecisionCost(0, 0.0, 0.0)
    assert version.manifest.report["gate"]["passed"]
    assert {"manifest.json", "dense.onnx", "sample.npz", "table-00000-of-00002.bin"} <= {
        path.name for path in Path(version.folder).iterdir()
    }
    by_version, by_checkpoint = evaluate(config, model="current"), evaluate(config)
    assert by_version.evaluation.total.auc == pytest.approx(by_checkpoint.evaluation.total.auc, abs=1e-6)
    rows = rows_of(config)
    model = open_checkpoint(find_checkpoint(None, config.home), 2)
    np.testing.assert_allclose(scores_of(config, 1, rows), model.score(rows), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "most"), [(["publish.table_precision=fp16"], 2e-3), (["publish.table_precision=int8"], 0.02),
                          (["publish.dense_precision=int8"], 0.05)]
)  # fmt: skip
def test_the_cost_of_a_lower_precision_is_measured(project, options, most):
    config = load_config(project / "clickline.yaml", options)
    result = publish(config)
    manifest = result.version.manifest
    assert 0 < manifest.sample.difference <= most
    assert manifest.cost.rows == 1600
    assert 0 < abs(manifest.cost.logloss) < 0.01 and abs(manifest.cost.auc) < 0.01
    assert evaluate(config, model="1").evaluation.total.rows == 1600


def test_a_checkpoint_that_did_not_pass_the_gate_is_not_published(project, config, checkpoint):
    report = checkpoint.parent / "report.json"
    document = json.loads(report.read_text())
    refused = {**document, "gate": {"passed": False, "reasons": ["AUC is low."], "warnings": []}}
    report.write_text(json.dumps(refused))
    with pytest.raises(GateRefused, match=r"the gate rejected .* AUC is low\."):
        publish(config)
    report.write_text(json.dumps({**document, "checkpoint": "step-000000001"}))
    with pytest.raises(GateRefused, match="was not evaluated"):
        publish(config, model=str(checkpoint))
    report.unlink()
    with pytest.raises(GateRefused, match="was not evaluated yet"):
        publish(config)
    assert registry_of(config).current() is None


def test_float32_rounding_of_the_checkpoint_is_allowed(config, monkeypatch):
    """With large inputs, sums in another order differ by more than 1e-6, in the checkpoint too."""
    served, trained = scoring.Scorer.score, Model.score

    def off(self, encoded):
        answer = served(self, encoded)
        return scoring.Scores(answer.version, answer.logit_B, answer.probability_B + np.float32(5e-6))

    def rounded(self, rows):
        return trained(self, rows) + np.float32(2e-6 if rows.rows == 1 else 0)

    monkeypatch.setattr(scoring.Scorer, "score", off)
    with pytest.raises(ArtifactError, match="1e-06 is allowed for fp32"):
        publish(config)
    monkeypatch.setattr(Model, "score", rounded)
    assert publish(config).version.manifest.sample.difference == pytest.approx(5e-6, rel=0.1)


def test_files_that_score_differently_are_not_published(config, monkeypatch):
    monkeypatch.setattr(scoring, "_CHUNK_ROWS", 8192)
    original = scoring.Scorer.score

    def off(self, encoded):
        answer = original(self, encoded)
        return scoring.Scores(answer.version, answer.logit_B, answer.probability_B + np.float32(1e-4))

    monkeypatch.setattr(scoring.Scorer, "score", off)
    with pytest.raises(ArtifactError, match=r"score the sample differently .* Nothing was published"):
        publish(config)
    registry = registry_of(config)
    assert registry.current() is None
    assert registry.versions() == []


@pytest.mark.slow
def test_a_pinned_version_stays_until_it_is_unpinned(config):
    publish(config)
    registry = registry_of(config)
    registry.move(1, "holding", after=registry.current(), pinned=True)
    second = publish(packed_differently(config), base=True)
    assert second.move is None
    assert second.version.number == 2
    assert registry.current().version == 1


def test_a_publisher_that_lost_the_race_reports_it(config, monkeypatch):
    publish(config)
    registry = registry_of(config)
    prove = publishing._verify_scores

    def overtaken(*args):
        registry.move(1, "somebody else", after=registry.current())
        return prove(*args)

    monkeypatch.setattr(publishing, "_verify_scores", overtaken)
    with pytest.raises(RegistryMoved, match=r"version 2 is stored but not current"):
        publish(packed_differently(config), base=True)
    assert registry.current().version == 1
    assert [version.number for version in registry.versions()] == [1, 2]


# ── deltas ─────────────────────────────────────────────────────────────────────────────────────


def test_a_full_snapshot_is_published_as_a_delta(config, tmp_path):
    publish(config)
    live = Trained(config)
    live.train_on(0, 40)
    save_snapshot(live.model.tables, tmp_path / "whole.bin")
    second = live.publish(tmp_path / "whole.bin")
    assert (second.version.manifest.table, second.version.parent) == ("delta", 1)
    first = registry_of(config).version(1)
    assert 0 < second.version.manifest.rows < first.manifest.rows / 2
    np.testing.assert_allclose(
        scores_of(config, 2, live.rows), live.model.score(live.rows), rtol=0, atol=1e-6
    )
    again = live.publish(tmp_path / "whole.bin")
    assert (again.version.manifest.rows, again.version.manifest.tombstones) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["table-00000-of-00002.bin", "dense.onnx", "manifest.json"])
def test_nothing_is_built_on_a_damaged_version(config, name):
    """Servers would reject a delta on it, so a base is published."""
    publish(config)
    file = Path(registry_of(config).version(1).folder, name)
    whole = file.read_bytes()
    file.write_bytes(whole[:200] + bytes([whole[200] ^ 4]) + whole[201:-1])
    messages: list[str] = []

    class Heard(Progress):
        def log(self, message: str) -> None:
            messages.append(message)

    result = publish(config, Heard())
    assert (result.version.manifest.table, result.version.parent) == ("base", None)
    assert result.move is not None and result.move.version == result.version.number == 2
    assert (
        len(messages) == 1
        and messages[0].startswith("publishing a base, because version 1 cannot be built on")
        and name in messages[0]
    )
    scores_of(config, 2, rows_of(config))


def test_delta_snapshots_form_a_chain_and_evicted_ids_are_removed(config, tmp_path):
    live = Trained(config)
    whole = begin_snapshot(live.model.tables)
    whole.write(tmp_path / "whole.bin")
    live.publish(tmp_path / "whole.bin")
    generations = [whole.generation]
    for step in range(3):
        live.train_on(100 * step, 100 * step + 30)
        if step == 1:
            live.model.tables.evict(Eviction(threshold=0.15))
        part = begin_snapshot(live.model.tables, since=generations[-1])
        part.write(tmp_path / f"delta-{step}.bin")
        generations.append(part.generation)
        result = live.publish(tmp_path / f"delta-{step}.bin")
        assert result.version.parent == step + 1
        assert (result.version.manifest.tombstones > 0) == (step == 1)
        np.testing.assert_allclose(
            scores_of(config, step + 2, live.rows), live.model.score(live.rows), rtol=0, atol=1e-6
        )


def test_a_long_chain_is_compacted_into_a_base(project, tmp_path):
    config = load_config(project / "clickline.yaml", ["publish.max_deltas=2"])
    live = Trained(config)
    snapshot = begin_snapshot(live.model.tables)
    snapshot.write(tmp_path / "whole.bin")
    live.publish(tmp_path / "whole.bin")
    kinds = []
    for step in range(4):
        live.train_on(50 * step, 50 * step + 10)
        part = begin_snapshot(live.model.tables, since=snapshot.generation)
        part.write(tmp_path / f"delta-{step}.bin")
        snapshot = part
        kinds.append(live.publish(tmp_path / f"delta-{step}.bin").version.manifest.table)
    assert kinds == ["delta", "delta", "base", "delta"]
    np.testing.assert_allclose(
        scores_of(config, 5, live.rows), live.model.score(live.rows), rtol=0, atol=1e-6
    )
    with ServingTable.open([Path(registry_of(config).version(4).folder)]) as tables:
        assert tables.rows == sum(slot.ids for slot in live.model.tables.report()) or tables.rows > 0


def test_a_delta_without_its_parent_is_rejected(config, tmp_path):
    live = Trained(config)
    whole = begin_snapshot(live.model.tables)
    whole.write(tmp_path / "whole.bin")
    live.train_on(0, 10)
    begin_snapshot(live.model.tables, since=whole.generation).write(tmp_path / "delta.bin")
    with pytest.raises(ArtifactError, match="Publish a full checkpoint first"):
        live.publish(tmp_path / "delta.bin")


def test_any_kept_version_can_be_the_current_one(config, tmp_path):
    publish(config)
    live = Trained(config)
    before = live.model.score(live.rows)
    live.train_on(0, 40)
    save_snapshot(live.model.tables, tmp_path / "whole.bin")
    live.publish(tmp_path / "whole.bin")
    registry = registry_of(config)
    registry.move(1, "back", after=registry.current())
    np.testing.assert_allclose(scores_of(config, 1, live.rows), before, rtol=0, atol=1e-6)
    third = live.publish(tmp_path / "whole.bin")
    assert third.version.parent == 1


# ── the gate against the current version ───────────────────────────────────────────────────────


def test_the_gate_compares_with_the_current_version(project):
    strict = load_config(project / "clickline.yaml", ["gate.vs_current=0.01"])
    assert evaluate(strict).verdict.passed  # no version is current yet
    publish(strict)
    verdict = evaluate(strict).verdict
    assert not verdict.passed
    assert any("gate.vs_current requires a gain of 0.01" in reason for reason in verdict.reasons)
    same = load_config(project / "clickline.yaml", ["gate.vs_current=0"])
    raw = evaluate(same, data=[str(project / "data" / "eval.tsv")])
    assert not raw.verdict.reasons or "change of" in raw.verdict.reasons[0]


def test_damaged_files_are_not_opened(config):
    publish(config)
    registry = registry_of(config)
    folder = Path(registry.version(1).folder)
    for name in ("dense.onnx", "table-00001-of-00002.bin", "sample.npz"):
        whole = (folder / name).read_bytes()
        for damaged in (whole[:-7], whole[:100] + bytes([whole[100] ^ 4]) + whole[101:], b""):
            (folder / name).write_bytes(damaged)
            with pytest.raises(ArtifactError, match=name):
                open_scorer(registry, registry.version(1), Path(config.cache.dir), 1)
        (folder / name).write_bytes(whole)
    open_scorer(registry, registry.version(1), Path(config.cache.dir), 1).check_sample()
    shutil.rmtree(folder)
    with pytest.raises(ArtifactError):
        registry.version(1)
