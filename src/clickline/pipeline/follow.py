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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from clickline.artifacts.dataset import Dataset
from clickline.artifacts.from_config import registry_of, storage_of
from clickline.artifacts.registry import Move
from clickline.artifacts.version import Version, VersionModel
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
from clickline.evaluation.gate import Thresholds, Verdict, check_gate, clearly_worse
from clickline.evaluation.importance import ScoreFn
from clickline.evaluation.live_version import check_fields, with_live_version
from clickline.machine import cores
from clickline.pipeline.flow import run_flow
from clickline.pipeline.hour_records import SKIPPED_STATES, HourRecords
from clickline.pipeline.live_publisher import LivePublisher
from clickline.progress import Progress, default_progress
from clickline.scoring.open_scorer import open_scorer
from clickline.scoring.scorer import Scorer
from clickline.storage.log_files import DateRange, hour_is_complete, hour_label, hour_step
from clickline.storage.storage import Storage
from clickline.training.dense_optimizer import Diverged
from clickline.training.hourly_trainer import HourlyTrainer, HourResult
from clickline.training.tracker_from_config import tracker_of

_MIN_DELAY = 1.0
_MAX_DELAY = 60.0

T = TypeVar("T")


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
        self._facts: dict[str, Any] = {"state": "starting"}
        self._source_answered = False  # whether the source has ever answered

    # ── the model ──────────────────────────────────────────────────────────────────────────────

    def open(self) -> None:
        """Resume the model; else train one on the history that the config names; else wait for the first hour."""
        config, threads = self._config, cores()
        self._publisher.reset()
        self._trainer = None  # free its memory before the next one is loaded
        self._trainer = HourlyTrainer.resume(config, self._run, threads, self._progress)
        assert config.data.dates is not None
        if self._trainer is not None:
            self._source_answered = True
            last, record = self._trainer.trained_hours.last, self._trainer.record
            if last is not None:
                self._progress.log(
                    f"{len(self._trainer.trained_hours):,} hours were trained, the last {self._label(last)}"
                )
            if record and self._records.state(record["number"]) != "learned":  # killed between the two
                self._records.write(record["number"], record)
        elif config.data.dates.last is not None:
            flow = run_flow(config, self._progress)
            hours = DateRange(config.data.dates.first, config.data.dates.last).hours()
            features = flow.prepared.dataset.features
            self._trainer = HourlyTrainer.create(
                config, features, flow.trained.checkpoint, hours, self._run, threads, self._progress
            )
        self._report(state="waiting")

    def close(self) -> None:
        self._tracker.close("KILLED")  # following never finishes

    def _trainer_for(self, prepared: PreparedHour) -> HourlyTrainer:
        """The trainer; without a model, one with the fields of this first hour."""
        if self._trainer is None:
            self._trainer = HourlyTrainer.create(
                self._config,
                prepared.dataset.features,
                None,
                (),
                self._run,
                cores(),
                self._progress,
            )
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
            if self._retry("the source", partial(self._is_complete, hour)):
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
            if self._retry("the source", partial(self._is_complete, hour)):
                features = None if self._trainer is None else self._trainer.model.features
                try:
                    return self._retry(
                        f"hour {label}", partial(prepare_hour, config, hour, features, self._progress)
                    )
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
            self._report(state="waiting", hour=label, waiting_since=_utc(since), late=late)
            time.sleep(config.follow.poll_interval)

    def _is_complete(self, hour: int) -> bool:
        complete = hour_is_complete(self._storage, self._config.data.train, self._config.data.donefile, hour)
        self._source_answered = True
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
        self._retry("the records", lambda: self._records.write(hour, record))
        self._report(last=record)

    # ── training ───────────────────────────────────────────────────────────────────────────────

    def _train_hour(self, hour: int, prepared: PreparedHour, *, publish: bool) -> None:
        label, began = self._label(hour), time.monotonic()
        self._report(state="learning", hour=label, waiting_since=None, late=False)
        if (
            self._trainer is None and not prepared.dataset.splits["train"].rows
        ):  # nothing to create a model from
            record: dict[str, Any] = {"hour": label, "number": hour, "state": "empty"}
            self._retry("the records", lambda: self._records.write(hour, record))
            return
        while True:
            trainer = self._trainer_for(prepared)
            published: dict[str, Any] = {"gate": None, "version": None}
            try:
                with self._live_score_fn(prepared) as (live, why):
                    trained = trainer.train_hour(hour, prepared.dataset, live)
                if publish and trained.rows:
                    published |= self._publish(hour, prepared, trainer, trained, why)
                trainer.finish_hour(hour, prepared.dataset)
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
                self._report_failure(f"hour {label}", error)
                time.sleep(_MIN_DELAY)
                self.open()
                features = prepared.dataset.features
                prepared = self._retry(
                    f"hour {label}", partial(prepare_hour, self._config, hour, features, self._progress)
                )
        self._warn_if_worse_than_base_rate(label, prepared.dataset, trainer, trained)
        record = {
            "hour": label,
            "number": hour,
            "state": "learned",
            "rows": trained.rows,
            "bad": sum(prepared.dataset.splits["train"].report["bad"].values()),
            "progressive": trained.progressive.total.to_json(),
            "held_out": None if trained.held_out is None else trained.held_out.to_json(),
            **published,
            "ids": trainer.model.tables.size,
            "evicted": trainer.evicted,
            "memory": trainer.model.tables.memory_bytes,
        }
        record |= {"seconds": time.monotonic() - began, "at": _utc(time.time())}
        self._retry("the checkpoint", lambda: trainer.checkpoint(record))
        self._retry("the records", lambda: self._records.write(hour, record))
        self._retry("the hours", lambda: prune_hours(self._config, {hour}))
        self._tracker.metrics(hour, _tracked_metrics(record))
        self._progress.log(_summary(record))
        self._report(last=record)

    def _warn_if_worse_than_base_rate(
        self, label: str, dataset: Dataset, trainer: HourlyTrainer, trained: HourResult
    ) -> None:
        metrics = trained.held_out
        if (
            metrics is None and len(trainer.trained_hours) > 1
        ):  # the first hour was scored by an untrained model
            metrics = trained.progressive.total
        if metrics is None or worse_than_base_rate(metrics, dataset.features, None) is None:
            return
        some = None
        try:  # unreadable rows only make the warning shorter
            for shard, group, _ in dataset.row_groups("train"):
                some = dataset.read(Path(dataset.folder, dataset.splits["train"].shards[shard].file), [group])
                break
        except (ArtifactError, StorageError, OSError) as error:
            self._progress.log(f"{label}: no rows could be read: {error}")
        self._progress.log(f"{label}: {worse_than_base_rate(metrics, dataset.features, some)}")

    def _publish(
        self,
        hour: int,
        prepared: PreparedHour,
        trainer: HourlyTrainer,
        trained: HourResult,
        why: str,
    ) -> dict[str, Any]:
        """Check the gate and publish a version; returns the entries of the hour's record."""
        label, identity = self._label(hour), trainer.identity()
        verdict = self._check_gate(trained, why)
        if not verdict.passed:
            self._progress.log(
                f"{label}: the gate refused: {' '.join(verdict.reasons)} The live version stays."
            )
            self._progress.stage("gate", "refused", {"hour": label, "reasons": list(verdict.reasons)})
            return {"gate": verdict.to_json()}
        existing = self._retry("the registry", lambda: self._published_before(identity))
        if existing is not None:  # killed between publishing and the checkpoint
            self._retry("the registry", lambda: self._publisher.make_current(existing, f"hour {label}"))
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
            result = self._retry(
                "the registry",
                lambda: self._publisher.publish(
                    trainer, origin, report, prepared.dataset, trained.sample, f"hour {label}"
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

    def _check_gate(self, trained: HourResult, why: str) -> Verdict:
        thresholds = Thresholds(**self._config.gate.model_dump(exclude={"extra_epochs"}))
        if trained.held_out is None:
            why = why or "follow.holdout is 0, so there are no rows that neither model was trained on"
        why = why or "the current version has not scored all of the held-out rows"
        if trained.held_out is not None and not trained.held_out.rows:
            return Verdict(
                False,
                (
                    f"no rows are held out yet to evaluate the model on: the hour has {trained.rows:,} rows, and "
                    f"follow.holdout keeps {self._config.follow.holdout:g} of them. The next hours decide; raise "
                    "follow.holdout if hours are this small.",
                ),
            )
        verdict = check_gate(trained.held_out or trained.progressive.total, thresholds, trained.live, why)
        if trained.held_out is None or trained.this_hour is None:
            return verdict
        if trained.this_hour.rows == trained.held_out.rows:  # already evaluated on this hour only
            return verdict
        return verdict.refused(clearly_worse(trained.this_hour, thresholds, trained.live_this_hour))

    @contextmanager
    def _live_score_fn(self, prepared: PreparedHour) -> Iterator[tuple[ScoreFn | None, str]]:
        """The scoring function of the live version; None if it is not needed or not available, with the reason."""
        scorer, why = None, ""
        if self._config.gate.vs_current is not None:
            scorer, why = self._retry("the registry", partial(self._live_scorer, prepared))
            if why:
                self._progress.log(f"gate.vs_current is not checked: {why}.")
        try:
            yield None if scorer is None else scorer.probabilities, why
        finally:
            if scorer is not None:
                scorer.close()

    def _live_scorer(self, prepared: PreparedHour) -> tuple[Scorer | None, str]:
        registry = registry_of(self._config)

        def opened(move: Move) -> Scorer | None:
            version = registry.version(move.version)
            if version.manifest.model.hour == self._label(prepared.hour):
                # Killed between publishing and the checkpoint: this version was trained on the hour, the previous one
                # was not.
                if move.previous is None:
                    return None
                version = registry.version(move.previous)
            scorer = open_scorer(registry, version, Path(self._config.cache.dir), cores())
            try:
                check_fields(version.number, scorer.features, prepared.dataset.features)
            except ArtifactError:
                scorer.close()
                raise
            return scorer

        scorer, why = with_live_version(registry, opened, requested=True)
        if scorer is None and not why:
            why = "the current version was trained on this hour, and there is no earlier one"
        return scorer, why

    def _published_before(self, identity: str) -> Version | None:
        """The version of this model with this config, if a killed run has already published it."""
        publish, registry = self._config.publish, registry_of(self._config)
        packed = publish.table_precision, publish.dense_precision, publish.shards
        for version in reversed(registry.versions()[-3:]):
            found = version.manifest
            if (
                found.model.identity != identity
                or (found.table_precision, found.dense_precision, found.shards) != packed
            ):
                continue
            try:
                registry.check(version)
            except ArtifactError as error:
                self._progress.log(f"publishing the same model again: {error}")
            else:
                return version
        return None

    # ── errors ─────────────────────────────────────────────────────────────────────────────────

    def _retry(self, what: str, action: Callable[[], T]) -> T:
        """Retry errors of a disk or a store with growing delays. A source that has never answered is an error at once:
        most likely its name is wrong."""
        delay = _MIN_DELAY
        while True:
            try:
                result = action()
            except (StorageError, OSError) as error:
                if not self._source_answered:
                    raise
                self._report_failure(what, error)
            else:
                if self._facts.get("trouble") is not None:
                    self._progress.log(f"{what}: works again")
                    self._report(trouble=None)
                return result
            time.sleep(delay)
            delay = min(2 * delay, _MAX_DELAY)

    def _report_failure(self, what: str, error: Exception) -> None:
        message = str(error)
        if isinstance(error, OSError):
            message = f"{error.filename or 'the machine'}: {error.strerror or error}"
        before = self._facts.get("trouble")
        if before is None or before["words"] != message:
            self._progress.log(f"{what}: {message} Retrying until it works.")
            self._report(trouble={"what": what, "words": message, "since": _utc(time.time())})

    # ── reporting ──────────────────────────────────────────────────────────────────────────────

    def _report(self, **facts: Any) -> None:
        before = dict(self._facts)
        self._facts |= facts
        if self._trainer is not None:
            self._facts["hours_learned"] = len(self._trainer.trained_hours)
        if self._facts != before:
            self._progress.stage("follow", "running", self._facts)


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


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
