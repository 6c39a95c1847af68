"""The publish stage: a checkpoint whose gate passed becomes a version, and the registry's pointer moves to it.

    checkpoint ──snapshot_blocks──▶ rows ──(difference to the parent)──▶ table-*.bin
               ──export_onnx──▶ dense.onnx            sample rows, scored again from these files ──▶ sample.npz
    manifest, written last ──▶ a move of the pointer

Until the manifest is there, no server sees anything; until the pointer moves, none uses it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.checkpoint import Checkpoint
from clickline.artifacts.dataset import Dataset, dataset_folder
from clickline.artifacts.from_config import registry_of, signer_of
from clickline.artifacts.registry import Move, Registry
from clickline.artifacts.runs import find_checkpoint
from clickline.artifacts.version import Draft, Version
from clickline.config import Config
from clickline.config.loader import resolved
from clickline.embedding.serving import (
    FrozenTables,
    RowBlock,
    ShardFile,
    difference,
    merged,
    snapshot_blocks,
    write_shards,
)
from clickline.errors import ArtifactError, GateRefused, RegistryMoved
from clickline.evaluation.evaluator import measure
from clickline.machine import cores
from clickline.models.model import open_checkpoint
from clickline.progress import Progress, usual
from clickline.publishing.release import Release
from clickline.records import LabelledRows
from clickline.scoring.scorer import DENSE, Scorer
from clickline.scoring.stored_sample import write_sample
from clickline.storage.storage import Storage

TOLERANCE = {"fp32": 1e-6, "fp16": 2e-3, "int8": 5e-2}
"""Largest difference of a score from the checkpoint's, by the lower of the two precisions."""

_ROUNDINGS = 4  # of the checkpoint's own, that packed files may differ by
_ROUNDED_ROWS = 64
_COST_ROWS = 100_000
_JUDGED = ("asked", "checkpoint", "evaluation", "gate", "epochs", "slots", "progressive")
_LARGE_DELTA = 0.5  # of the base's rows: a delta larger than that is made a base


@dataclass(frozen=True)
class PublishResult:
    """A version that servers can use."""

    version: Version
    move: Move | None  # that made it current; None: it waits, for another is pinned or was gone back to
    difference: float  # largest, of the sample's scores from the checkpoint's
    cost: Mapping[str, Any]
    reused: bool  # it was there already
    seconds: float


def publish(
    config: Config,
    progress: Progress | None = None,
    *,
    model: str | None = None,
    base: bool = False,
    reason: str = "published",
) -> PublishResult:
    """Publish a checkpoint that passed its gate, by default the newest run's. `model` is what `find_checkpoint`
    takes; `base` asks for a version that depends on no other.

    When the current version, or the newest one, was made of this checkpoint in the same way and is whole, it is
    returned as it is. If the newest was never current (a publisher was killed, or lost a race), the pointer moves to
    it now. If it was, and somebody went back to another since, the pointer stays there: that was a decision, and
    the same model published again is no reason to undo it. How to make it current is said.
    """
    began = time.monotonic()
    progress = progress or usual()
    registry = registry_of(config, signer_of(config))
    checkpoint = find_checkpoint(model, config.home)
    report = _passed(checkpoint)
    found = _published(config, registry, checkpoint, base)
    if found is not None:
        move = make_current(registry, found, reason, progress)
        body = found.body
        return PublishResult(
            found, move, body["sample"]["difference"], body["cost"], True, time.monotonic() - began
        )
    file = config.model.file
    opened = open_checkpoint(checkpoint, cores(), None if file is None else Path(file))
    dataset = Dataset.open(Storage(), dataset_folder(config.home, checkpoint.body["dataset"]))
    origin = _origin(checkpoint)
    rows = next(_rows(dataset, max(config.publish.sample, 4096)))
    release = Release(opened, checkpoint.tables, origin, resolved(config), report, rows)
    quantised = (config.publish.precision, config.publish.dense) != ("fp32", "fp32")
    cost_rows = _rows(dataset, _COST_ROWS) if quantised else iter(())
    return publish_release(config, release, cost_rows, progress, base=base, reason=reason, began=began)


def publish_release(
    config: Config,
    release: Release,
    cost_rows: Iterator[LabelledRows],
    progress: Progress,
    *,
    base: bool = False,
    reason: str,
    began: float,
) -> PublishResult:
    """Pack a model, prove the files, make the version current. `cost_rows` are to measure what a lower precision
    costs."""
    signer = signer_of(config)
    registry = registry_of(config, signer)
    before = registry.current()
    body = {**release.body(), "precision": config.publish.precision, "dense": config.publish.dense}
    body["shards"] = config.publish.shards
    parent = None if base and release.since is None else _parent(config, registry, release, body, progress)
    with registry.draft(None if parent is None else parent.number) as draft:
        progress.begin(f"publish version {draft.number}", total_rows=release.model.tables.size)
        try:
            earlier = None
            if parent is not None and parent.body["network"] == body["network"]:
                earlier = (_local(config, registry, parent) / DENSE).read_bytes()
            (draft.folder / DENSE).write_bytes(release.onnx(config.publish.dense, earlier))
            chain, shards = _write_tables(config, registry, release, parent, base, draft, progress)
        finally:
            progress.end()
        body |= {
            "number": draft.number,
            "created": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "table": "delta" if chain else "base",
            "parent": chain[-1].number if chain else None,
            "rows": sum(shard.rows for shard in shards),
            "tombstones": sum(shard.tombstones for shard in shards),
        }
        body |= _prove(config, registry, release, body, chain, draft, cost_rows)
        known = {shard.name: shard.sha256 for shard in shards}
        version = draft.commit(body, known, signer)
    move = _move(registry, version, before, reason, progress)
    sample = body["sample"]
    return PublishResult(version, move, sample["difference"], body["cost"], False, time.monotonic() - began)


def _move(
    registry: Registry, version: Version, before: Move | None, reason: str, progress: Progress
) -> Move | None:
    """Make a version current, unless another is pinned."""
    if before is not None and before.pinned:
        progress.say(
            f"version {version.number} waits: version {before.version} is pinned "
            f"({before.reason}). `clickline versions unpin`, then `clickline versions rollback --to "
            f"{version.number}`, makes it current."
        )
        return None
    try:
        return registry.move(version.number, reason, after=before)
    except RegistryMoved as error:
        raise RegistryMoved(
            f"version {version.number} is stored, but it was not made current: {error} "
            f"`clickline versions rollback --to {version.number}` makes it current."
        ) from error


# ── what was published before ──────────────────────────────────────────────────────────────────


def _origin(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint": f"{checkpoint.folder.parent.name}/{checkpoint.folder.name}",
        "step": checkpoint.step,
        "tables_sha256": checkpoint.body["tables_sha256"],
        "dense_sha256": checkpoint.body["dense_sha256"],
        "dataset": checkpoint.body["dataset"],
    }


def _published(config: Config, registry: Registry, checkpoint: Checkpoint, base: bool) -> Version | None:
    """The current version, or the newest, if it is what would be made of the checkpoint now."""
    pointer, numbers = registry.current(), registry.numbers()
    wanted = [] if pointer is None else [pointer.version]
    for number in dict.fromkeys([*wanted, *numbers[-1:]]):
        try:
            version = registry.version(number)
            if not _made_of(version.body, checkpoint, config) or (base and version.parent is not None):
                continue
            registry.check(version)
            for one in registry.chain(version):
                registry.verify(one, _local(config, registry, one))
        except ArtifactError:  # damaged: it is made anew, and whoever could build on it says why it does not
            continue
        return version
    return None


def _made_of(body: Mapping[str, Any], checkpoint: Checkpoint, config: Config) -> bool:
    """Whether a version is of this checkpoint, packed as the config says."""
    publish = config.publish
    return (
        {name: value for name, value in body["model"].items() if name != "snapshot"} == _origin(checkpoint)
        and body["calibration"] == checkpoint.body.get("calibration")
        and (body["precision"], body["dense"], body["shards"])
        == (publish.precision, publish.dense, publish.shards)
        and body["sample"].get("asked") == publish.sample
    )


def make_current(registry: Registry, version: Version, reason: str, progress: Progress) -> Move | None:
    """Say that a version is up to date, and move the pointer to it if it was never there."""
    progress.say(f"version {version.number} is up to date: same model, packed the same way")
    pointer = registry.current()
    if pointer is not None and pointer.version == version.number:
        return pointer
    if pointer is None or pointer.pinned or pointer.highest < version.number:
        return _move(registry, version, pointer, reason, progress)
    progress.say(
        f"version {version.number} is not current: version {pointer.version} is, since {pointer.at} "
        f"({pointer.reason}). `clickline versions rollback --to {version.number}` makes it current."
    )
    return None


# ── what to publish ────────────────────────────────────────────────────────────────────────────


def _passed(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """What the run's report says of its judgement; it must have passed its gate with this very checkpoint."""
    path = checkpoint.folder.parent / "report.json"
    if checkpoint.body["dataset"] is None:
        raise GateRefused(
            f"{checkpoint.folder} belongs to `clickline up --follow`, which judges and publishes each hour by "
            "itself. Name the run to publish with --model."
        )
    if not path.exists():
        raise GateRefused(
            f"{checkpoint.folder} was not judged yet: its run has no report. Run `clickline train` to its end."
        )
    report: dict[str, Any] = json.loads(path.read_text())
    if report["checkpoint"] != checkpoint.folder.name:
        raise GateRefused(
            f"{checkpoint.folder.name} was not judged: the run's gate looked at {report['checkpoint']}. "
            "Publish that one, or train on."
        )
    if not report["gate"]["passed"]:
        raise GateRefused(
            f"the gate refused {checkpoint.folder}: {' '.join(report['gate']['reasons'])} "
            "Nothing was published. Train on, or change the gate and run `clickline train` again."
        )
    # Not all of it: every reader of the registry reads manifests, and curves and tables are for people.
    judged = {name: report[name] for name in _JUDGED if name in report}
    return (
        {**judged, "evaluation": {**report["evaluation"], "slices": {}}} if report["evaluation"] else judged
    )


def _rows(dataset: Dataset, most: int) -> Iterator[LabelledRows]:
    """Rows to check with, of the eval part where there is one."""
    split = "eval" if dataset.splits.get("eval") and dataset.splits["eval"].rows else "train"
    left = most
    for shard, group, _ in dataset.row_groups(split):
        path = Path(dataset.folder, dataset.splits[split].shards[shard].file)
        rows = dataset.read(path, [group])
        yield rows.part(0, min(left, rows.rows))
        left -= rows.rows
        if left <= 0:
            return


# ── tables ─────────────────────────────────────────────────────────────────────────────────────


def _parent(
    config: Config, registry: Registry, release: Release, body: Mapping[str, Any], progress: Progress
) -> Version | None:
    """The version that a delta can be made to."""
    wanted = release.since
    if wanted is not None:
        made = [v for v in registry.versions() if v.body["model"]["snapshot"] == wanted]
        if not made:
            raise ArtifactError(
                f"{release.snapshot} holds what changed since snapshot {wanted[:12]}, and no version was made of "
                "that one. Publish a whole checkpoint first."
            )
        return made[-1]
    current = registry.current()
    if current is None:
        return None
    try:
        parent = registry.version(current.version)
        if not _alike(parent.body, body):
            return None
        for version in registry.chain(parent):
            registry.verify(version, _local(config, registry, version))
    except ArtifactError as error:  # servers would refuse what builds on it
        progress.say(f"version {current.version} cannot be built on, so this one is a base: {error}")
        return None
    return parent


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the tables of two manifests have the same fields, shapes and precision."""
    same = ("features", "parts", "precision", "shards", "width")
    shapes = [[(s["name"], s["dim"], s["part"]) for s in body["slots"]] for body in (one, other)]
    return shapes[0] == shapes[1] and all(one[key] == other[key] for key in same)


def _write_tables(
    config: Config,
    registry: Registry,
    release: Release,
    parent: Version | None,
    base: bool,
    draft: Draft,
    progress: Progress,
) -> tuple[Sequence[Version], Sequence[ShardFile]]:
    """The table's files, and the versions they build on: none for a base."""

    def write(blocks: Iterator[RowBlock]) -> Sequence[ShardFile]:
        publish = config.publish
        return write_shards(draft.folder, release.parts, publish.precision, publish.shards, blocks)

    def counted(blocks: Iterator[RowBlock]) -> Iterator[RowBlock]:
        for block in blocks:
            yield block
            progress.advance(rows=block.ids_N.size)

    if parent is None:
        return (), write(counted(snapshot_blocks(release.snapshot)))
    chain = registry.chain(parent)
    folders = [_local(config, registry, version) for version in chain]
    rows = chain[0].body["rows"]
    if release.since is not None:
        shards = write(counted(snapshot_blocks(release.snapshot)))
        if base or _is_long(config, chain) or _changed(shards) > _LARGE_DELTA * rows:
            tables = FrozenTables.open([*folders, draft.folder])
            compacted = draft.folder / "compacted"
            compacted.mkdir()
            try:
                shards = write_shards(
                    compacted, release.parts, config.publish.precision, config.publish.shards, merged(tables)
                )
            finally:
                tables.close()
            for shard in shards:
                (compacted / shard.name).replace(draft.folder / shard.name)
            compacted.rmdir()
            return (), shards
        return chain, shards
    if not _is_long(config, chain):
        tables = FrozenTables.open(folders)
        try:
            shards = write(difference(tables, counted(snapshot_blocks(release.snapshot))))
        finally:
            tables.close()
        if _changed(shards) <= _LARGE_DELTA * rows:
            return chain, shards
    return (), write(counted(snapshot_blocks(release.snapshot)))


def _changed(shards: Sequence[ShardFile]) -> int:
    return sum(shard.rows + shard.tombstones for shard in shards)


def _is_long(config: Config, chain: Sequence[Version]) -> bool:
    return len(chain) > config.publish.deltas


def _local(config: Config, registry: Registry, version: Version) -> Path:
    return registry.fetch(version, Path(config.cache.dir, "versions"))


# ── proof ──────────────────────────────────────────────────────────────────────────────────────


def _prove(
    config: Config,
    registry: Registry,
    release: Release,
    body: Mapping[str, Any],
    chain: Sequence[Version],
    draft: Draft,
    cost_rows: Iterator[LabelledRows],
) -> dict[str, Any]:
    """Score from the packed files: the sample, which is stored with its scores, and what the precision costs."""
    folders = [*(_local(config, registry, version) for version in chain), draft.folder]
    scorer = Scorer.open(body, folders, threads=cores())
    try:
        sample, wanted_B = release.sample(config.publish.sample)
        found_B = scorer.probabilities(sample)
        gap = float(np.abs(found_B - wanted_B).max(initial=0.0))
        lower = max((body["precision"], body["dense"]), key=("fp32", "fp16", "int8").index)
        allowed = TOLERANCE[lower]
        if lower == "fp32":
            allowed = max(allowed, _ROUNDINGS * _rounding(release, sample, wanted_B))
        if not gap <= allowed:  # also when it is NaN
            raise ArtifactError(
                f"the packed files score the sample differently from the model that was judged: by {gap:.2g}, where "
                f"{allowed:g} is allowed for {lower}. Nothing was published."
                + ("" if lower == "fp32" else " Choose a higher publish.precision or publish.dense.")
            )
        write_sample(draft.folder, sample.encoded, found_B)
        return {
            "sample": {
                "asked": config.publish.sample,
                "rows": sample.rows,
                "tolerance": allowed,
                "difference": gap,
            },
            "cost": _cost(release, scorer, list(cost_rows)),
        }
    finally:
        scorer.close()


def _rounding(release: Release, sample: LabelledRows, score_B: NDArray[np.float32]) -> float:
    """How much the checkpoint's own scores change when rows are scored one by one, which sums in another order: with
    numbers in the hundreds at its input, float32 rounds off more than 1e-6."""
    rows = min(sample.rows, _ROUNDED_ROWS)
    alone = [release.model.score(sample.part(row, row + 1)) for row in range(rows)]
    return float(np.abs(np.concatenate(alone) - score_B[:rows]).max(initial=0.0)) if rows else 0.0


def _cost(release: Release, scorer: Scorer, rows: Sequence[LabelledRows]) -> dict[str, Any]:
    """What the precision takes from AUC and adds to log loss. Nothing, where rows and weights are stored whole."""
    if not rows:
        return {"rows": 0, "auc": 0.0, "logloss": 0.0}
    checkpoint = measure(release.model.score, iter(rows)).total
    version = measure(scorer.probabilities, iter(rows)).total
    cost: dict[str, Any] = {"rows": checkpoint.rows}
    for name in ("auc", "logloss"):
        before, after = getattr(checkpoint, name), getattr(version, name)
        cost[name] = None if before is None or after is None else after - before
    return cost
