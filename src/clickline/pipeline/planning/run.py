"""The plan stage: predicts memory, time and shard counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from clickline.config import Config
from clickline.config.sections import EvictionSection
from clickline.machine import cores, memory_limit
from clickline.models.from_config import batch_size_of, expected_train_rows, plan_of
from clickline.models.model import Model
from clickline.pipeline.planning.cost_probe import ProbeResult, run_probe
from clickline.pipeline.planning.fit import fit_plan, fits, usable_memory
from clickline.pipeline.planning.id_counts import IdCounter, SlotIdCounts
from clickline.pipeline.planning.plan_result import (
    DiskPlan,
    IdsPlan,
    MemoryPlan,
    Plan,
    Remedy,
    RowsPlan,
    ServingPlan,
    TimePlan,
)
from clickline.pipeline.planning.sampling import SAMPLE_BYTES, DataSample, sample_data
from clickline.pipeline.planning.sizes import ModelShape, disk_plan, memory_plan, row_memory, serving_plan
from clickline.progress import Progress, default_progress
from clickline.training.batches import WINDOW_ROWS

_MAX_FILLED_IDS = 2_000_000  # in a probe's tables: with more, a step hardly gets slower
_HELPFUL_SHARE = 0.98  # a change that saves less than 2 % of a peak is not reported
_MEMORY_FRACTION = 8  # a probe's tables get at most one eighth of the memory


def plan(
    config: Config,
    progress: Progress | None = None,
    *,
    memory: int | None = None,
    probe: bool = True,
    sample_bytes: int = SAMPLE_BYTES,
) -> Plan:
    """Predict what training and serving this config takes. `memory` is that of one machine, by default this one.
    Without `probe` nothing is trained, so there are no times and less of the memory is measured."""
    progress = progress or default_progress()
    machine = memory or memory_limit()
    with TemporaryDirectory(prefix="clickline-plan-") as scratch:
        sample = sample_data(config, Path(scratch), progress, sample_bytes)
        counter = IdCounter(sample)
        slots = counter.count(config.train)
        rows = _rows(config, sample)
        probed = None
        if probe:
            progress.begin("probe")
            fill = _fill(_shape(config, sample, rows), slots)
            probed = run_probe(config, sample.dataset, rows.learned, fill)
            progress.note(f"{1 / probed.train_seconds:,.0f} rows/s trained")
            progress.end()
        sized = _SizedPlan(config, sample, rows, slots, probed)
        fit = fit_plan(machine, sized.memory, sized.serving, cores(), _remedies(sized, counter, machine))
    return Plan(
        basis=sample.basis,
        rows=rows,
        ids=_ids(slots),
        memory=sized.memory,
        disk=sized.disk,
        serving=sized.serving,
        time=None if probed is None else _time(config, sample, rows, sized.disk, probed),
        fit=fit,
        assumptions=_assumptions(config, sample, rows, slots, probed),
    )


class _SizedPlan:
    """All sizes that follow from a config and id counts; computed again for each remedy."""

    def __init__(
        self,
        config: Config,
        sample: DataSample,
        rows: RowsPlan,
        slots: Sequence[SlotIdCounts],
        probed: ProbeResult | None,
    ) -> None:
        self.config, self.sample, self.rows, self.slots, self.probed = config, sample, rows, slots, probed
        shape = _shape(config, sample, rows)
        row_bytes = row_memory(sample.features, sample.values_per_row)
        self.memory: MemoryPlan = memory_plan(
            shape,
            slots,
            rows.batch_size,
            row_bytes,
            rows.train,
            _checkpoints_in_epoch(config, rows, probed),
            probed,
        )
        self.disk: DiskPlan = disk_plan(config, shape, slots, row_bytes)
        self.serving: ServingPlan = serving_plan(config, self.disk, cores())

    def with_config(self, config: Config, slots: Sequence[SlotIdCounts]) -> _SizedPlan:
        """The sizes with another config."""
        return _SizedPlan(config, self.sample, self.rows, slots, self.probed)


def _shape(config: Config, sample: DataSample, rows: RowsPlan) -> ModelShape:
    file = None if config.model.file is None else Path(config.model.file)
    return ModelShape.of(
        Model.build(sample.features, plan_of(config, sample.features, rows.learned), cores(), file)
    )


def _rows(config: Config, sample: DataSample) -> RowsPlan:
    train_rows = max(1, expected_train_rows(config.train, sample.train_rows, sample.clicks))
    batch_size = batch_size_of(config.train, train_rows)
    return RowsPlan(
        sample.train_rows,
        sample.eval_rows,
        train_rows,
        batch_size,
        math.ceil(train_rows / batch_size),
        sample.exact or sample.prepare_seconds is None,
    )


def _ids(slots: tuple[SlotIdCounts, ...]) -> IdsPlan:
    return IdsPlan(
        slots,
        sum(slot.distinct for slot in slots),
        sum(slot.low for slot in slots),
        sum(slot.high for slot in slots),
        sum(slot.admitted for slot in slots),
        sum(slot.candidates for slot in slots),
        sum(slot.kept for slot in slots),
    )


def _fill(shape: ModelShape, slots: Sequence[SlotIdCounts]) -> list[int]:
    """Number of ids that the probe fills each table with before timing."""
    wanted = shape.by_table([slot.admitted for slot in slots])
    row = max(layout.view.stride for layout in shape.layouts) if shape.layouts else 1
    limit = min(_MAX_FILLED_IDS, memory_limit() // _MEMORY_FRACTION // (row + 16))
    share = min(1.0, limit / max(1, sum(wanted)))
    return [int(ids * share) for ids in wanted]


def _checkpoints_in_epoch(config: Config, rows: RowsPlan, probed: ProbeResult | None) -> bool:
    """Whether checkpoints are written during an epoch, not only at its end."""
    train = config.train
    if train.checkpoint_steps is not None and train.checkpoint_steps < rows.steps:
        return True
    return probed is None or _epoch_seconds(rows, probed) > train.checkpoint_every


def _epoch_seconds(rows: RowsPlan, probed: ProbeResult) -> float:
    """Seconds of one epoch: training waits for the first window of rows; the others are prefetched in parallel."""
    prefetched = max(0, rows.train - WINDOW_ROWS)
    reading = (rows.train - prefetched) * probed.read_seconds + prefetched * probed.overlap_seconds
    return rows.learned * probed.train_seconds + reading


def _time(
    config: Config, sample: DataSample, rows: RowsPlan, disk: DiskPlan, probed: ProbeResult
) -> TimePlan:
    learn = _epoch_seconds(rows, probed)
    scored = rows.eval + (rows.train - rows.learned if config.train.calibration is not None else 0)
    evaluate = scored * probed.score_seconds + rows.eval * probed.read_seconds
    checkpoint = disk.checkpoint * probed.write_seconds
    epoch = learn + evaluate + checkpoint
    return TimePlan(
        sample.prepare_seconds,
        probed.start_seconds,
        rows.learned / learn,
        learn,
        evaluate,
        checkpoint,
        epoch,
        probed.start_seconds + config.train.epochs * epoch,
    )


# ── remedies ───────────────────────────────────────────────────────────────────────────────────


def _remedies(sized: _SizedPlan, counter: IdCounter, machine: int) -> tuple[Remedy, ...]:
    """Config changes that help if something does not fit, each with its effect."""
    usable = usable_memory(machine)
    if fits(sized.memory, sized.serving, usable):
        return ()
    remedies = []
    for change, config in _changes(sized.config):
        other = sized.with_config(config, counter.count(config.train))
        helpful = (sized.memory.peak > usable and other.memory.peak < _HELPFUL_SHARE * sized.memory.peak) or (
            sized.serving.peak > usable and other.serving.peak < _HELPFUL_SHARE * sized.serving.peak
        )
        if helpful:
            fits_now = fits(other.memory, other.serving, usable)
            remedies.append(
                Remedy(change, other.memory.peak, other.disk.version, other.serving.peak, fits_now)
            )
    return tuple(remedies)


def _changes(config: Config) -> list[tuple[str, Config]]:
    """Each change in the syntax of `--set`, and the changed config."""
    model, train, publish = config.model, config.train, config.publish
    changes: list[tuple[str, Config]] = []

    def add(change: str, **sections: object) -> None:
        changes.append((change, config.model_copy(update=sections)))

    if model.embedding_dim > 1:
        dim = model.embedding_dim // 2
        add(f"model.embedding_dim={dim}", model=model.model_copy(update={"embedding_dim": dim}))
    if train.embedding.optimizer in ("adagrad", "adam", "ftrl"):
        other = train.embedding.model_copy(update={"optimizer": "rowwise_adagrad"})
        add("train.embedding.optimizer=rowwise_adagrad", train=train.model_copy(update={"embedding": other}))
    impressions = 2 * train.admission.min_impressions
    admission = train.admission.model_copy(update={"min_impressions": impressions})
    add(
        f"train.admission.min_impressions={impressions}",
        train=train.model_copy(update={"admission": admission}),
    )
    if train.eviction is None:
        eviction = EvictionSection(threshold=0.2)
        add("train.eviction.threshold=0.2", train=train.model_copy(update={"eviction": eviction}))
    precisions = ("fp32", "fp16", "int8")
    for precision in precisions[precisions.index(publish.table_precision) + 1 :]:
        smaller = publish.model_copy(update={"table_precision": precision})
        add(f"publish.table_precision={precision}", publish=smaller)
    return changes


# ── as text ────────────────────────────────────────────────────────────────────────────────────


def _assumptions(
    config: Config,
    sample: DataSample,
    rows: RowsPlan,
    slots: Sequence[SlotIdCounts],
    probed: ProbeResult | None,
) -> tuple[str, ...]:
    train = config.train
    notes = list(sample.notes)
    if not rows.exact:
        notes.append(
            "rows and ids are extrapolated from the sample, assuming that the rest of the logs is similar"
        )
    if probed is None:
        notes.append(
            "nothing was measured: no times, and memory without the tables is that of a typical process"
        )
    else:
        admitted = sum(slot.admitted for slot in slots)
        if probed.filled_ids < admitted:
            notes.append(
                f"the probe's tables had {probed.filled_ids:,} of {admitted:,} ids; larger tables are slightly slower"
            )
        notes.append("times are for this machine under its current load")
        if train.early_stopping is not None:
            notes.append("train.early_stopping may end training sooner")
    if train.eviction is not None and train.eviction.max_idle_hours is not None:
        notes.append(
            "train.eviction.max_idle_hours is ignored: the sample does not show when ids were last seen"
        )
    if train.warm_start is not None:
        notes.append("the ids of train.warm_start are not counted")
    if config.gate.extra_epochs:
        notes.append("if the gate refuses the model, up to gate.extra_epochs more epochs are trained")
    notes.append("servers hold two versions during a switch; their processes have the typical size")
    return tuple(notes)
