"""The plan stage: memory, time and shard counts to expect, before they are spent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from clickline.config import Config
from clickline.config.sections import EvictionSection
from clickline.machine import cores, memory_limit
from clickline.models.from_config import batch_size_of, learned_rows, plan_of
from clickline.models.model import Model
from clickline.pipeline.planning.cost_probe import Measured, measure
from clickline.pipeline.planning.fit import fit_plan, fits, usable_of
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
from clickline.pipeline.planning.sampling import SAMPLE_BYTES, Looked, look
from clickline.pipeline.planning.sizes import Shape, bytes_of_row, disk_plan, memory_plan, serving_plan
from clickline.progress import Progress, usual
from clickline.training.batches import WINDOW_ROWS

_MOST_FILLED = 2_000_000  # ids in a probe's tables: beyond, a step hardly gets slower
_MUCH = 0.98  # of a peak: a change that leaves more of it is not worth telling
_FILLED_SHARE = 8  # one part in so many of the memory, at the most, for a probe's tables


def plan(
    config: Config,
    progress: Progress | None = None,
    *,
    memory: int | None = None,
    probe: bool = True,
    sample_bytes: int = SAMPLE_BYTES,
) -> Plan:
    """What training and serving this config takes. `memory` is that of one machine, by default of this one; without
    `probe` nothing is learned, so no time is told and less of the memory is measured."""
    progress = progress or usual()
    machine = memory or memory_limit()
    with TemporaryDirectory(prefix="clickline-plan-") as scratch:
        looked = look(config, Path(scratch), progress, sample_bytes)
        counter = IdCounter(looked)
        slots = counter.count(config.train)
        rows = _rows(config, looked)
        measured = None
        if probe:
            progress.begin("probe")
            fill = _fill(_shape(config, looked, rows), slots)
            measured = measure(config, looked.dataset, rows.learned, fill)
            progress.note(f"{1 / measured.learn_seconds:,.0f} rows/s learned")
            progress.end()
        sized = _Sizes(config, looked, rows, slots, measured)
        fit = fit_plan(machine, sized.memory, sized.serving, cores(), _remedies(sized, counter, machine))
    return Plan(
        basis=looked.basis,
        rows=rows,
        ids=_ids(slots),
        memory=sized.memory,
        disk=sized.disk,
        serving=sized.serving,
        time=None if measured is None else _time(config, looked, rows, sized.disk, measured),
        fit=fit,
        assumptions=_assumptions(config, looked, rows, slots, measured),
    )


class _Sizes:
    """Every size that follows from a config and counts of ids; again for each remedy."""

    def __init__(
        self,
        config: Config,
        looked: Looked,
        rows: RowsPlan,
        slots: Sequence[SlotIdCounts],
        measured: Measured | None,
    ) -> None:
        self.config, self.looked, self.rows, self.slots, self.measured = config, looked, rows, slots, measured
        shape = _shape(config, looked, rows)
        row_bytes = bytes_of_row(looked.features, looked.values_per_row)
        self.memory: MemoryPlan = memory_plan(
            shape,
            slots,
            rows.batch_size,
            row_bytes,
            rows.train,
            _cuts(config, rows, measured),
            measured,
        )
        self.disk: DiskPlan = disk_plan(config, shape, slots, row_bytes)
        self.serving: ServingPlan = serving_plan(config, self.disk, cores())

    def under(self, config: Config, slots: Sequence[SlotIdCounts]) -> _Sizes:
        """The same with another config."""
        return _Sizes(config, self.looked, self.rows, slots, self.measured)


def _shape(config: Config, looked: Looked, rows: RowsPlan) -> Shape:
    file = None if config.model.file is None else Path(config.model.file)
    return Shape.of(
        Model.build(looked.features, plan_of(config, looked.features, rows.learned), cores(), file)
    )


def _rows(config: Config, looked: Looked) -> RowsPlan:
    learned = max(1, learned_rows(config.train, looked.train_rows, looked.clicks))
    batch_size = batch_size_of(config.train, learned)
    return RowsPlan(
        looked.train_rows,
        looked.eval_rows,
        learned,
        batch_size,
        math.ceil(learned / batch_size),
        looked.exact or looked.prepare_seconds is None,
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


def _fill(shape: Shape, slots: Sequence[SlotIdCounts]) -> list[int]:
    """Ids that a probe puts into each table before it is timed."""
    wanted = shape.by_table([slot.admitted for slot in slots])
    row = max(layout.places.stride for layout in shape.layouts) if shape.layouts else 1
    most = min(_MOST_FILLED, memory_limit() // _FILLED_SHARE // (row + 16))
    share = min(1.0, most / max(1, sum(wanted)))
    return [int(ids * share) for ids in wanted]


def _cuts(config: Config, rows: RowsPlan, measured: Measured | None) -> bool:
    """Whether a checkpoint is written while rows are learned, not only at the end of an epoch."""
    train = config.train
    if train.checkpoint_steps is not None and train.checkpoint_steps < rows.steps:
        return True
    return measured is None or _learn_seconds(rows, measured) > train.checkpoint_every


def _learn_seconds(rows: RowsPlan, measured: Measured) -> float:
    """One epoch: the first window of rows is waited for, the others are read beside the learning of those before."""
    beside = max(0, rows.train - WINDOW_ROWS)
    reading = (rows.train - beside) * measured.read_seconds + beside * measured.overlap_seconds
    return rows.learned * measured.learn_seconds + reading


def _time(config: Config, looked: Looked, rows: RowsPlan, disk: DiskPlan, measured: Measured) -> TimePlan:
    learn = _learn_seconds(rows, measured)
    scored = rows.eval + (rows.train - rows.learned if config.train.calibration is not None else 0)
    evaluate = scored * measured.score_seconds + rows.eval * measured.read_seconds
    checkpoint = disk.checkpoint * measured.write_seconds
    epoch = learn + evaluate + checkpoint
    return TimePlan(
        looked.prepare_seconds,
        measured.start_seconds,
        rows.learned / learn,
        learn,
        evaluate,
        checkpoint,
        epoch,
        measured.start_seconds + config.train.epochs * epoch,
    )


# ── what could be changed ──────────────────────────────────────────────────────────────────────


def _remedies(sized: _Sizes, counter: IdCounter, machine: int) -> tuple[Remedy, ...]:
    """Where something does not fit: changes, one at a time, and what each brings."""
    usable = usable_of(machine)
    if fits(sized.memory, sized.serving, usable):
        return ()
    found = []
    for change, config in _changes(sized.config):
        other = sized.under(config, counter.count(config.train))
        helps = (sized.memory.peak > usable and other.memory.peak < _MUCH * sized.memory.peak) or (
            sized.serving.peak > usable and other.serving.peak < _MUCH * sized.serving.peak
        )
        if helps:
            enough = fits(other.memory, other.serving, usable)
            found.append(Remedy(change, other.memory.peak, other.disk.version, other.serving.peak, enough))
    return tuple(found)


def _changes(config: Config) -> list[tuple[str, Config]]:
    """Each change as `--set` writes it, and the config with it."""
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
    shows = train.admission.shows + 1 if train.admission.shows == 1 else 2 * train.admission.shows
    admission = train.admission.model_copy(update={"shows": shows})
    add(f"train.admission.shows={shows}", train=train.model_copy(update={"admission": admission}))
    if train.eviction is None:
        eviction = EvictionSection(threshold=0.2)
        add("train.eviction.threshold=0.2", train=train.model_copy(update={"eviction": eviction}))
    for precision in ("fp16", "int8"):
        if ("fp32", "fp16", "int8").index(precision) > ("fp32", "fp16", "int8").index(publish.precision):
            add(f"publish.precision={precision}", publish=publish.model_copy(update={"precision": precision}))
    return changes


# ── in words ───────────────────────────────────────────────────────────────────────────────────


def _assumptions(
    config: Config,
    looked: Looked,
    rows: RowsPlan,
    slots: Sequence[SlotIdCounts],
    measured: Measured | None,
) -> tuple[str, ...]:
    train = config.train
    told = list(looked.notes)
    if not rows.exact:
        told.append("rows and ids are told from the sample, as if the rest of the logs were like it")
    if measured is None:
        told.append(
            "nothing was measured: no times, and memory beside the tables is what a usual process takes"
        )
    else:
        admitted = sum(slot.admitted for slot in slots)
        if measured.filled_ids < admitted:
            told.append(
                f"the probe's tables held {measured.filled_ids:,} of {admitted:,} ids; larger ones are a little slower"
            )
        told.append("times are of this machine as busy as it is now")
        if train.early_stop is not None:
            told.append("train.early_stop may end training sooner")
    if train.eviction is not None and train.eviction.hours_unseen is not None:
        told.append(
            "train.eviction.hours_unseen is not counted: the sample does not tell when ids are seen last"
        )
    if train.warm_start is not None:
        told.append("the ids of train.warm_start are not counted")
    if config.gate.retries:
        told.append("a gate that refuses trains on: up to gate.retries more epochs")
    told.append("servers hold two versions while one replaces the other; their processes are of usual size")
    return tuple(told)
