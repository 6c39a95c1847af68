"""The publish stage: turns a checkpoint that passed its gate into a version, and makes it current.

    checkpoint ──snapshot_blocks──▶ rows ──(delta to the parent)──▶ table-*.bin
               ──export_onnx──▶ dense.onnx            sample rows, scored again from these files ──▶ sample.npz
    manifest, written last ──▶ a move of the pointer

Servers see nothing until the manifest exists, and use the version only once the pointer moves.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.checkpoint import Checkpoint, find_checkpoint
from clickline.artifacts.dataset import Dataset, dataset_folder
from clickline.artifacts.from_config import registry_of, signer_of
from clickline.artifacts.registry import Move, Registry
from clickline.artifacts.version import (
    Draft,
    PrecisionCost,
    Version,
    VersionManifest,
    VersionModel,
    VersionSample,
)
from clickline.config import Config
from clickline.config.loader import resolved
from clickline.embedding.serving import (
    RowBlock,
    ServingTable,
    ShardFile,
    delta_blocks,
    merged_blocks,
    snapshot_blocks,
    write_shards,
)
from clickline.errors import ArtifactError, GateRefused, RegistryMoved
from clickline.evaluation.evaluator import evaluate_rows
from clickline.machine import cores
from clickline.models.model import open_checkpoint
from clickline.progress import Progress, default_progress
from clickline.publishing.release import Release
from clickline.records import LabelledRows
from clickline.scoring.scorer import DENSE, Scorer
from clickline.scoring.stored_sample import write_sample
from clickline.storage.storage import Storage

TOLERANCE = {"fp32": 1e-6, "fp16": 2e-3, "int8": 5e-2}
"""The largest allowed difference of a score from the checkpoint's, by the lower of the two precisions."""

_ROUNDINGS = 4  # allowed difference, in multiples of the checkpoint's own rounding
_ROUNDED_ROWS = 64
_COST_ROWS = 100_000
_REPORT_KEYS = ("requested", "checkpoint", "evaluation", "gate", "epochs", "slots", "progressive")
_LARGE_DELTA = 0.5  # share of the base's rows: a larger delta becomes a base


@dataclass(frozen=True)
class PublishResult:
    """A version that servers can use."""

    version: Version
    move: Move | None  # that made it current; None: another version is pinned or was rolled back to
    reused: bool  # it was already published
    seconds: float


def publish(
    config: Config,
    progress: Progress | None = None,
    *,
    model: str | None = None,
    base: bool = False,
    reason: str = "published",
) -> PublishResult:
    """Publish a checkpoint that passed its gate, by default the newest run's. `model` is passed to `find_checkpoint`;
    `base` requests a version that depends on no other.

    If the current or the newest version was made from this checkpoint in the same way and is intact, it is returned
    unchanged. If the newest was never current (a publisher was killed, or lost a race), the pointer moves to it now.
    If it was current and someone rolled back since, the pointer stays: publishing the same model again does not undo
    a rollback. The log says how to make it current.
    """
    started = time.monotonic()
    progress = progress or default_progress()
    registry = registry_of(config, signer_of(config))
    checkpoint = find_checkpoint(model, config.home)
    report = _gate_report(checkpoint)
    published = _find_published(config, registry, checkpoint, base)
    if published is not None:
        move = make_current(registry, published, reason, progress)
        return PublishResult(published, move, True, time.monotonic() - started)
    file = config.model.file
    opened = open_checkpoint(checkpoint, cores(), None if file is None else Path(file))
    origin = _origin(checkpoint)
    dataset = Dataset.open(Storage(), dataset_folder(config.home, origin.dataset or ""))
    rows = next(_rows(dataset, max(config.publish.sample_rows, 4096)))
    release = Release(opened, checkpoint.tables, origin, resolved(config), report, rows)
    lower_precision = (config.publish.table_precision, config.publish.dense_precision) != ("fp32", "fp32")
    cost_rows = _rows(dataset, _COST_ROWS) if lower_precision else iter(())
    return publish_release(config, release, cost_rows, progress, base=base, reason=reason, started=started)


def publish_release(
    config: Config,
    release: Release,
    cost_rows: Iterator[LabelledRows],
    progress: Progress,
    *,
    base: bool = False,
    reason: str,
    started: float,
) -> PublishResult:
    """Pack a model, verify the files, and make the version current. On `cost_rows` the cost of a lower precision is
    measured."""
    signer = signer_of(config)
    registry = registry_of(config, signer)
    before = registry.current()
    publish = config.publish
    manifest = release.manifest(
        publish.table_precision, publish.dense_precision, publish.shards, publish.sample_rows
    )
    parent = (
        None if base and release.since is None else _parent(config, registry, release, manifest, progress)
    )
    with registry.draft(None if parent is None else parent.number) as draft:
        progress.begin(f"publish version {draft.number}", total_rows=release.model.tables.size)
        try:
            earlier = None
            if parent is not None and parent.manifest.network == manifest.network:
                earlier = (_fetch(config, registry, parent) / DENSE).read_bytes()
            (draft.folder / DENSE).write_bytes(release.onnx(config.publish.dense_precision, earlier))
            chain, shards = _write_tables(config, registry, release, parent, base, draft, progress)
        finally:
            progress.end()
        manifest = replace(
            manifest,
            table="delta" if chain else "base",
            parent=chain[-1].number if chain else None,
            rows=sum(shard.rows for shard in shards),
            tombstones=sum(shard.tombstones for shard in shards),
        )
        manifest = _verify_scores(config, registry, release, manifest, chain, draft, cost_rows)
        known = {shard.name: shard.sha256 for shard in shards}
        version = draft.commit(manifest, known, signer)
    move = _move(registry, version, before, reason, progress)
    return PublishResult(version, move, False, time.monotonic() - started)


def _move(
    registry: Registry, version: Version, before: Move | None, reason: str, progress: Progress
) -> Move | None:
    """Make a version current, unless another is pinned."""
    if before is not None and before.pinned:
        progress.log(
            f"version {version.number} is not current: version {before.version} is pinned "
            f"({before.reason}). `clickline versions unpin`, then `clickline versions promote "
            f"{version.number}`, makes it current."
        )
        return None
    try:
        return registry.move(version.number, reason, after=before)
    except RegistryMoved as error:
        raise RegistryMoved(
            f"version {version.number} is stored but not current: {error} "
            f"`clickline versions promote {version.number}` makes it current."
        ) from error


# ── earlier versions ───────────────────────────────────────────────────────────────────────────


def _origin(checkpoint: Checkpoint) -> VersionModel:
    return VersionModel(
        f"{checkpoint.folder.parent.name}/{checkpoint.folder.name}",
        checkpoint.step,
        dataset=checkpoint.dataset,
        tables_sha256=checkpoint.manifest.tables_sha256,
        dense_sha256=checkpoint.manifest.dense_sha256,
    )


def _find_published(config: Config, registry: Registry, checkpoint: Checkpoint, base: bool) -> Version | None:
    """The current or newest version, if publishing the checkpoint now would give the same."""
    pointer, numbers = registry.current(), registry.numbers()
    wanted = [] if pointer is None else [pointer.version]
    for number in dict.fromkeys([*wanted, *numbers[-1:]]):
        try:
            version = registry.version(number)
            if not _is_made_from(version.manifest, checkpoint, config) or (
                base and version.parent is not None
            ):
                continue
            registry.check(version)
            for one in registry.chain(version):
                registry.verify(one, _fetch(config, registry, one))
        except ArtifactError:  # damaged: publish again; `_parent` logs why it is not built on
            continue
        return version
    return None


def _is_made_from(version: VersionManifest, checkpoint: Checkpoint, config: Config) -> bool:
    """Whether a version was made from this checkpoint with the config's settings."""
    publish = config.publish
    return (
        replace(version.model, snapshot="") == _origin(checkpoint)
        and version.calibration == checkpoint.manifest.calibration
        and (version.table_precision, version.dense_precision, version.shards)
        == (publish.table_precision, publish.dense_precision, publish.shards)
        and version.sample.requested_rows == publish.sample_rows
    )


def make_current(registry: Registry, version: Version, reason: str, progress: Progress) -> Move | None:
    """Log that a version is up to date, and make it current if it never was."""
    progress.log(f"version {version.number} is up to date: same model, packed the same way")
    pointer = registry.current()
    if pointer is not None and pointer.version == version.number:
        return pointer
    if pointer is None or pointer.pinned or pointer.highest < version.number:
        return _move(registry, version, pointer, reason, progress)
    progress.log(
        f"version {version.number} is not current: version {pointer.version} is, since {pointer.at} "
        f"({pointer.reason}). `clickline versions promote {version.number}` makes it current."
    )
    return None


# ── input ──────────────────────────────────────────────────────────────────────────────────────


def _gate_report(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The run's report, shortened for the manifest. Raises GateRefused unless this checkpoint passed the gate."""
    path = checkpoint.folder.parent / "report.json"
    if checkpoint.dataset is None:
        raise GateRefused(
            f"{checkpoint.folder} belongs to `clickline up --follow`, which evaluates and publishes each hour itself. "
            "Choose the run to publish with --model."
        )
    if not path.exists():
        raise GateRefused(
            f"{checkpoint.folder} was not evaluated yet: its run has no report. Let `clickline train` finish first."
        )
    report: dict[str, Any] = json.loads(path.read_text())
    if report["checkpoint"] != checkpoint.folder.name:
        raise GateRefused(
            f"{checkpoint.folder.name} was not evaluated: the run's gate checked {report['checkpoint']}. "
            "Publish that one, or continue training."
        )
    if not report["gate"]["passed"]:
        raise GateRefused(
            f"the gate rejected {checkpoint.folder}: {' '.join(report['gate']['reasons'])} "
            "Nothing was published. Continue training, or change the gate and run `clickline train` again."
        )
    # Not all of it: every reader of the registry reads manifests; curves and tables are only for people.
    summary = {name: report[name] for name in _REPORT_KEYS if name in report}
    return (
        {**summary, "evaluation": {**report["evaluation"], "slices": {}}} if report["evaluation"] else summary
    )


def _rows(dataset: Dataset, max_rows: int) -> Iterator[LabelledRows]:
    """At most `max_rows` rows to check with, of the eval split if there is one."""
    split = "eval" if dataset.splits.get("eval") and dataset.splits["eval"].rows else "train"
    left = max_rows
    for shard, group, _ in dataset.row_groups(split):
        rows = dataset.read_group(split, shard, group)
        yield rows.slice(0, min(left, rows.rows))
        left -= rows.rows
        if left <= 0:
            return


# ── tables ─────────────────────────────────────────────────────────────────────────────────────


def _parent(
    config: Config, registry: Registry, release: Release, manifest: VersionManifest, progress: Progress
) -> Version | None:
    """The version that a delta can build on, if any."""
    wanted = release.since
    if wanted is not None:
        candidates = [v for v in registry.versions() if v.manifest.model.snapshot == wanted]
        if not candidates:
            raise ArtifactError(
                f"{release.snapshot} is a delta to snapshot {wanted[:12]}, which no version was made from. "
                "Publish a full checkpoint first."
            )
        return candidates[-1]
    current = registry.current()
    if current is None:
        return None
    try:
        parent = registry.version(current.version)
        if not _is_compatible(parent.manifest, manifest):
            return None
        for version in registry.chain(parent):
            registry.verify(version, _fetch(config, registry, version))
    except ArtifactError as error:  # servers would reject a version that builds on it
        progress.log(f"publishing a base, because version {current.version} cannot be built on: {error}")
        return None
    return parent


def _is_compatible(one: VersionManifest, other: VersionManifest) -> bool:
    """Whether the tables of two versions have the same fields, shapes, precision and shards."""
    shapes = [
        (
            v.features,
            v.parts,
            v.table_precision,
            v.shards,
            v.width,
            [(s.name, s.dim, s.part) for s in v.slots],
        )
        for v in (one, other)
    ]
    return shapes[0] == shapes[1]


def _write_tables(
    config: Config,
    registry: Registry,
    release: Release,
    parent: Version | None,
    base: bool,
    draft: Draft,
    progress: Progress,
) -> tuple[Sequence[Version], Sequence[ShardFile]]:
    """Write the table's files; returns the versions they build on (none for a base), and the files."""

    publish = config.publish

    def write(blocks: Iterator[RowBlock], folder: Path = draft.folder) -> Sequence[ShardFile]:
        return write_shards(folder, release.parts, publish.table_precision, publish.shards, blocks)

    def snapshot() -> Iterator[RowBlock]:
        for block in snapshot_blocks(release.snapshot):
            yield block
            progress.advance(rows=block.ids_N.size)

    if parent is None:
        return (), write(snapshot())
    chain = registry.chain(parent)
    folders = [_fetch(config, registry, version) for version in chain]
    is_long = len(chain) > publish.max_deltas
    largest = _LARGE_DELTA * chain[0].manifest.rows
    if release.since is not None:
        shards = write(snapshot())
        if not (base or is_long or _changed(shards) > largest):
            return chain, shards
        compacted = draft.folder / "compacted"
        with closing(ServingTable.open([*folders, draft.folder])) as tables:
            compacted.mkdir()
            shards = write(merged_blocks(tables), compacted)
        for shard in shards:
            (compacted / shard.name).replace(draft.folder / shard.name)
        compacted.rmdir()
        return (), shards
    if not is_long:
        with closing(ServingTable.open(folders)) as tables:
            shards = write(delta_blocks(tables, snapshot()))
        if _changed(shards) <= largest:
            return chain, shards
    return (), write(snapshot())


def _changed(shards: Sequence[ShardFile]) -> int:
    return sum(shard.rows + shard.tombstones for shard in shards)


def _fetch(config: Config, registry: Registry, version: Version) -> Path:
    return registry.fetch(version, Path(config.cache.dir, "versions"))


# ── verification ───────────────────────────────────────────────────────────────────────────────


def _verify_scores(
    config: Config,
    registry: Registry,
    release: Release,
    manifest: VersionManifest,
    chain: Sequence[Version],
    draft: Draft,
    cost_rows: Iterator[LabelledRows],
) -> VersionManifest:
    """Score the sample from the packed files, store it with its scores, and measure the cost of the precision; returns
    the manifest with the results."""
    folders = [*(_fetch(config, registry, version) for version in chain), draft.folder]
    scorer = Scorer.open(manifest, folders, threads=cores())
    try:
        sample, expected_B = release.sample(config.publish.sample_rows)
        packed_B = scorer.probabilities(sample)
        gap = float(np.abs(packed_B - expected_B).max(initial=0.0))
        lower = max(manifest.table_precision, manifest.dense_precision, key=("fp32", "fp16", "int8").index)
        allowed = TOLERANCE[lower]
        if lower == "fp32":
            allowed = max(allowed, _ROUNDINGS * _rounding_error(release, sample, expected_B))
        if not gap <= allowed:  # also when it is NaN
            raise ArtifactError(
                f"the packed files score the sample differently from the evaluated model: by {gap:.2g}, "
                f"{allowed:g} is allowed for {lower}. Nothing was published."
                + (
                    ""
                    if lower == "fp32"
                    else " Choose a higher publish.table_precision or publish.dense_precision."
                )
            )
        write_sample(draft.folder, sample.encoded, packed_B)
        return replace(
            manifest,
            sample=VersionSample(config.publish.sample_rows, sample.rows, allowed, gap),
            cost=_cost(release, scorer, list(cost_rows)),
        )
    finally:
        scorer.close()


def _rounding_error(release: Release, sample: LabelledRows, score_B: NDArray[np.float32]) -> float:
    """How much the checkpoint's own scores change when rows are scored one by one, which sums in another order. With
    inputs in the hundreds, float32 rounding exceeds 1e-6."""
    rows = min(sample.rows, _ROUNDED_ROWS)
    alone = [release.model.score(sample.slice(row, row + 1)) for row in range(rows)]
    return float(np.abs(np.concatenate(alone) - score_B[:rows]).max(initial=0.0)) if rows else 0.0


def _cost(release: Release, scorer: Scorer, rows: Sequence[LabelledRows]) -> PrecisionCost:
    if not rows:  # everything is stored as fp32
        return PrecisionCost()
    checkpoint = evaluate_rows(release.model.score, iter(rows)).total
    version = evaluate_rows(scorer.probabilities, iter(rows)).total

    def change(before: float | None, after: float | None) -> float | None:
        return None if before is None or after is None else after - before

    return PrecisionCost(
        checkpoint.rows, change(checkpoint.auc, version.auc), change(checkpoint.logloss, version.logloss)
    )
