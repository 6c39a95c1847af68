"""Training as hours arrive, in the order of the steps.

    wait for an hour ──▶ prepare ──▶ score, train, evict, evaluate ──▶ gate ──▶ publish ──▶ train the held-out rows
                                                                     next hour ◀── checkpoint, record ◀──┘

The published model is exactly the one that was evaluated. An hour counts as trained when its checkpoint is complete.
If the process is killed before that, it resumes from the previous hour and trains this one again, with the same
result. Errors of a store or a disk are retried; an hour that cannot be used is skipped or ends the run, as the config
says.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from clickline.artifacts.dataset import Dataset
from clickline.artifacts.from_config import storage_of
from clickline.artifacts.version import VersionModel
from clickline.config import Config
from clickline.config.loader import resolved
from clickline.data.prepare.hour_dataset import PreparedHour, prepare_hour, prune_hours
from clickline.errors import (
    ArtifactError,
    ClicklineError,
    ConfigError,
    DataError,
    HourNotReady,
    Mistake,
    StorageError,
)
from clickline.evaluation.baseline import worse_than_base_rate
from clickline.evaluation.importance import ScoreFn
from clickline.features import FeatureSpec
from clickline.machine import cores
from clickline.pipeline.flow import run_flow
from clickline.pipeline.follow_status import MIN_DELAY, FollowStatus, utc
from clickline.pipeline.hour_gate import check_hour, open_live_scorer
from clickline.pipeline.hour_records import SKIPPED_STATES, HourRecords
from clickline.pipeline.live_publisher import LivePublisher
from clickline.progress import Progress, default_progress
from clickline.storage.log_files import DateRange, hour_is_complete, hour_label, hour_step
from clickline.storage.storage import Storage
from clickline.training.dense_optimizer import Diverged
from clickline.training.hourly_trainer import HourlyTrainer, HourResult
from clickline.training.tracking import tracker_of


def follow(config: Config, progress: Progress | None = None, *, backfill: DateRange | None = None) -> None:
    """Train hour after hour, without end. `backfill`: first all hours of this range that are not trained yet, in order,
    with one version at the end."""
    _check(config)
    loop = _FollowLoop(config, progress or default_progress())
    try:
        loop.open()
        if backfill is not None:
            loop.backfill(backfill.hours())
        loop.run()
    finally:
        loop.close()


def _check(config: Config) -> None:
    mistakes = []
    if not Storage.is_local(config.home):
        mistakes.append(("home", f"is {config.home}; --follow needs a home on local disk.", "Change it."))
    if config.data.dates is None:
        mistakes.append(
            (
                "data.dates",
                "is missing: it sets the first hour.",
                "Give dates: {from: YYYYMMDD/HH}, and data.train as a {date}/{hour} pattern.",
            )
        )
    if mistakes:
        raise ConfigError([Mistake("clickline.yaml", 0, *mistake) for mistake in mistakes])


class _FollowLoop:
    """Trains, evaluates and publishes one hour after another."""

    def __init__(self, config: Config, progress: Progress) -> None:
        self._config = config
        self._progress = progress
        self._storage = storage_of(config)
        self._step = hour_step(config.data.train)
        self._records = HourRecords(config.home, self._step)
        self._run = Path(config.home, "runs", "follow")
        self._publisher = LivePublisher(config, self._run, progress)
        Storage().put(str(self._run / "resolved.yaml"), resolved(config).encode())
        self._tracker = tracker_of(config, self._run, progress)
        self._tracker.params(
            config.model_dump(mode="json", include={"name", "data", "model", "train", "follow"})
        )
        if config.train.mode == "cluster":
            progress.log(
                "train.mode is cluster: the history is trained on the cluster, new hours on this machine"
            )
        self._trainer: HourlyTrainer | None = None
        self._status = FollowStatus(progress)

    # ── the model ──────────────────────────────────────────────────────────────────────────────

    def open(self) -> None:
        """Resume the model; else train one on the history that the config names; else wait for the first hour."""
        config, threads = self._config, cores()
        self._publisher.reset()
        self._use(None)  # free its memory before the next one is loaded
        self._use(HourlyTrainer.resume(config, self._run, threads, self._progress))
        assert config.data.dates is not None
        if self._trainer is not None:
            self._status.source_answered = True
            last, record = self._trainer.trained_hours.last, self._trainer.record
            if last is not None:
                self._progress.log(
                    f"{len(self._trainer.trained_hours):,} hours were trained, the last {self._label(last)}"
                )
            if record and self._records.state(record["number"]) != "learned":  # killed between the two
                self._records.write(record["number"], record)
        elif config.data.dates.last is not None:
            start = run_flow(config, self._progress).checkpoint
            hours = DateRange(config.data.dates.first, config.data.dates.last).hours()
            self._use(
                HourlyTrainer.create(config, start.features, start, hours, self._run, threads, self._progress)
            )
        self._status.report(state="waiting")

    def close(self) -> None:
        self._tracker.close("KILLED")  # following never finishes

    def _use(self, trainer: HourlyTrainer | None) -> None:
        self._trainer = trainer
        self._status.trained_hours = None if trainer is None else trainer.trained_hours

    def _trainer_for(self, dataset: Dataset) -> HourlyTrainer:
        """The trainer; without a model, a new one with the fields of this first hour."""
        if self._trainer is None:
            self._use(
                HourlyTrainer.create(
                    self._config, dataset.features, None, (), self._run, cores(), self._progress
                )
            )
        assert self._trainer is not None
        return self._trainer

    def _is_trained(self, hour: int) -> bool:
        return self._trainer is not None and hour in self._trainer.trained_hours

    # ── which hours ────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        for hour in self._upcoming_hours():
            prepared = self._wait_for(hour)
            if prepared is not None:
                self._train_hour(hour, prepared, publish=True)

    def backfill(self, hours: range) -> None:
        """Train all hours of a range that are not trained yet; missing ones are logged and left out."""
        wanted = range(hours.start // self._step * self._step, hours.stop, self._step)
        available = []
        for hour in wanted:
            if self._is_trained(hour):
                continue
            if self._status.retry("the source", partial(self._is_complete, hour)):
                available.append(hour)
            else:
                self._progress.log(f"backfill: {self._label(hour)} is missing or incomplete; left out")
        self._progress.log(f"backfill: {len(available):,} of {len(wanted):,} hours to train")
        for hour in available:
            prepared = self._wait_for(hour)
            if prepared is not None:
                self._train_hour(hour, prepared, publish=hour == available[-1])

    def _upcoming_hours(self) -> Iterator[int]:
        """The hours to train, in order, from the first that was neither trained nor skipped."""
        dates = self._config.data.dates
        assert dates is not None
        hour = DateRange(dates.first, dates.first).hours().start
        while True:
            if not self._is_trained(hour) and self._records.state(hour) not in SKIPPED_STATES:
                yield hour
            hour += self._step

    def _label(self, hour: int) -> str:
        return hour_label(hour, self._step)

    # ── waiting ────────────────────────────────────────────────────────────────────────────────

    def _wait_for(self, hour: int) -> PreparedHour | None:
        """Wait for an hour and prepare it; None if it is skipped."""
        config, label = self._config, self._label(hour)
        since, late = time.time(), False
        waited, checked = 0.0, time.monotonic()  # a jump of the clock must not make an hour late
        while True:
            if self._status.retry("the source", partial(self._is_complete, hour)):
                features = None if self._trainer is None else self._trainer.model.features
                try:
                    return self._prepare(hour, features)
                except HourNotReady:
                    pass  # its donefile has disappeared
                except DataError as error:
                    if self._trainer is None:  # most likely the config is wrong
                        raise
                    self._skip_hour(hour, "corrupt", config.follow.on_corrupt_hour, error)
                    return None
            before, checked = checked, time.monotonic()
            if time.time() >= (hour + self._step) * 3600:
                waited += checked - before
            if waited >= config.follow.missing_after and not late:
                late = True
                self._progress.log(
                    f"{label} is late: its {config.data.donefile or 'folder'} is missing {waited:,.0f} s after "
                    f"the end of the hour. follow.on_missing_hour is {config.follow.on_missing_hour}."
                )
                if config.follow.on_missing_hour != "wait":
                    missing = HourNotReady(
                        f"{label} did not arrive within follow.missing_after, {config.follow.missing_after} s. When it "
                        f"has arrived, run `clickline up --follow --backfill {label}..{label}`."
                    )
                    self._skip_hour(hour, "skipped", config.follow.on_missing_hour, missing)
                    return None
            self._status.report(state="waiting", hour=label, waiting_since=utc(since), late=late)
            time.sleep(config.follow.poll_interval)

    def _prepare(self, hour: int, features: FeatureSpec | None) -> PreparedHour:
        return self._status.retry(
            f"hour {self._label(hour)}", partial(prepare_hour, self._config, hour, features, self._progress)
        )

    def _is_complete(self, hour: int) -> bool:
        complete = hour_is_complete(self._storage, self._config.data.train, self._config.data.donefile, hour)
        self._status.source_answered = True
        return complete

    def _skip_hour(
        self,
        hour: int,
        state: str,
        policy: str,
        error: ClicklineError,
        published: Mapping[str, Any] | None = None,
    ) -> None:
        """Log an hour that cannot be used, then continue without it or raise the error."""
        self._progress.log(f"{self._label(hour)} was not trained: {error}")
        if policy == "stop":
            raise error
        record = {"hour": self._label(hour), "number": hour, "state": state, "reason": str(error)}
        record |= published or {}
        self._write_record(record)
        self._status.report(last=record)

    def _write_record(self, record: Mapping[str, Any]) -> None:
        self._status.retry("the records", lambda: self._records.write(record["number"], record))

    # ── training ───────────────────────────────────────────────────────────────────────────────

    def _train_hour(self, hour: int, prepared: PreparedHour, *, publish: bool) -> None:
        """Score, train, evaluate, gate, publish, train the held-out rows, checkpoint. A harmful hour is skipped, and
        after an error of a store or a disk the hour is trained again from the last checkpoint."""
        label, began = self._label(hour), time.monotonic()
        self._status.report(state="learning", hour=label, waiting_since=None, late=False)
        # No rows to create a model from.
        if self._trainer is None and not prepared.dataset.splits["train"].rows:
            self._write_record({"hour": label, "number": hour, "state": "empty"})
            return
        while True:
            dataset = prepared.dataset
            trainer = self._trainer_for(dataset)
            published: dict[str, Any] = {"gate": None, "version": None}
            try:
                with self._live_score_fn(label, dataset) as (live, why):
                    trained = trainer.train_hour(hour, dataset, live)
                if publish and trained.rows:
                    published |= self._publish(label, dataset, trainer, trained, why)
                trainer.finish_hour(hour, dataset)
                break
            except (Diverged, DataError) as error:
                self.open()  # as it was before this hour
                if published["version"] is not None:
                    error = DataError(
                        f"{error} Version {published['version']} was published before the held-out rows were "
                        "trained, and stays live."
                    )
                self._skip_hour(hour, "corrupt", self._config.follow.on_corrupt_hour, error, published)
                return
            except (StorageError, OSError) as error:
                self._status.report_failure(f"hour {label}", error)
                time.sleep(MIN_DELAY)
                self.open()
                prepared = self._prepare(hour, dataset.features)
        self._warn_if_worse_than_base_rate(label, dataset, trainer, trained)
        record = {
            "hour": label,
            "number": hour,
            "state": "learned",
            "rows": trained.rows,
            "bad": sum(dataset.splits["train"].report["bad"].values()),
            "progressive": trained.progressive.total.to_json(),
            "held_out": None if trained.held_out is None else trained.held_out.to_json(),
            **published,
            "ids": trainer.model.tables.size,
            "evicted": trainer.evicted,
            "memory": trainer.model.tables.memory_bytes,
            "seconds": time.monotonic() - began,
            "at": utc(time.time()),
        }
        self._status.retry("the checkpoint", lambda: trainer.checkpoint(record))
        self._write_record(record)
        self._status.retry("the hours", lambda: prune_hours(self._config, {hour}))
        self._tracker.metrics(hour, _tracked_metrics(record))
        self._progress.log(_summary(record))
        self._status.report(last=record)

    def _warn_if_worse_than_base_rate(
        self, label: str, dataset: Dataset, trainer: HourlyTrainer, trained: HourResult
    ) -> None:
        metrics = trained.held_out
        if metrics is None and len(trainer.trained_hours) > 1:  # an untrained model scored the first hour
            metrics = trained.progressive.total
        if metrics is None or worse_than_base_rate(metrics, dataset.features, None) is None:
            return
        some = None
        try:  # unreadable rows only make the warning shorter
            some = next(dataset.read_split("train"), None)
        except (ArtifactError, StorageError, OSError) as error:
            self._progress.log(f"{label}: no rows could be read: {error}")
        self._progress.log(f"{label}: {worse_than_base_rate(metrics, dataset.features, some)}")

    def _publish(
        self, label: str, dataset: Dataset, trainer: HourlyTrainer, trained: HourResult, why: str
    ) -> dict[str, Any]:
        """Check the gate and publish a version; returns the entries of the hour's record."""
        identity = trainer.identity()
        verdict = check_hour(self._config, trained, why)
        if not verdict.passed:
            self._progress.log(
                f"{label}: the gate refused: {' '.join(verdict.reasons)} The live version stays."
            )
            self._progress.stage("gate", "refused", {"hour": label, "reasons": list(verdict.reasons)})
            return {"gate": verdict.to_json()}
        existing = self._status.retry("the registry", lambda: self._publisher.find(identity))
        if existing is not None:  # killed between publishing and the checkpoint
            self._status.retry(
                "the registry", lambda: self._publisher.make_current(existing, f"hour {label}")
            )
            return {"gate": verdict.to_json(), "version": existing.number}
        report = {
            "hour": label,
            "evaluation": (trained.held_out or trained.progressive.total).to_json(),
            "progressive": trained.progressive.to_json(),
            "gate": verdict.to_json(),
        }
        origin = VersionModel(
            f"{self._run.name}/{label}",
            trainer.steps,
            hour=label,
            identity=identity,
            # Folders that are named in local time may be ahead of the clock.
            data_until=min((trainer.newest_hour + 1) * 3600.0, time.time()),
        )
        try:
            result = self._status.retry(
                "the registry",
                lambda: self._publisher.publish(
                    trainer, origin, report, dataset, trained.sample, f"hour {label}"
                ),
            )
        except ArtifactError as error:  # its files do not score like the model: no reason to stop training
            self._progress.log(f"{label} was not published: {error} The live version stays.")
            self._progress.stage("publish", "failed", {"hour": label, "reason": str(error)})
            return {"gate": verdict.to_json(), "reason": str(error)}
        version = None if result is None else result.version.number
        self._progress.stage("gate", "done", {"hour": label, "passed": True})
        if result is not None:
            facts = {"hour": label, "version": version, "table": result.version.manifest.table}
            self._progress.stage("publish", "done", {**facts, "seconds": result.seconds})
        return {"gate": verdict.to_json(), "version": version}

    @contextmanager
    def _live_score_fn(self, label: str, dataset: Dataset) -> Iterator[tuple[ScoreFn | None, str]]:
        """The scoring function of the live version; None if it is not needed or not available, with the reason."""
        scorer, why = None, ""
        if self._config.gate.vs_current is not None:
            scorer, why = self._status.retry(
                "the registry", partial(open_live_scorer, self._config, label, dataset.features)
            )
            if why:
                self._progress.log(f"gate.vs_current is not checked: {why}.")
        try:
            yield None if scorer is None else scorer.probabilities, why
        finally:
            if scorer is not None:
                scorer.close()


def _tracked_metrics(record: dict[str, Any]) -> dict[str, float]:
    """The metrics of an hour that are sent to the tracker."""
    figures: dict[str, float | None] = {
        f"progressive_{name}": record["progressive"][name] for name in ("auc", "logloss", "calibration")
    }
    figures |= {name: record[name] for name in ("rows", "bad", "ids", "evicted", "memory", "seconds")}
    if record["gate"] is not None:
        figures |= {"gate_passed": float(record["gate"]["passed"])}
    return {name: float(value) for name, value in figures.items() if value is not None}


def _summary(record: dict[str, Any]) -> str:
    metrics = record["progressive"]
    auc = "-" if metrics["auc"] is None else f"{metrics['auc']:.4f}"
    loss = "-" if metrics["logloss"] is None else f"{metrics['logloss']:.4f}"
    version = "no version" if record["version"] is None else f"version {record['version']}"
    return (
        f"{record['hour']}: {record['rows']:,} rows, progressive AUC {auc}, log loss {loss}, "
        f"{record['ids']:,} ids, {version}, {record['seconds']:.1f} s"
    )
