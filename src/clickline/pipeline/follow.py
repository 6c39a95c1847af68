"""Learning as hours arrive, read top to bottom.

    wait for an hour ──▶ prepare ──▶ score, learn, evict, judge ──▶ gate ──▶ publish ──▶ learn the held-out rows
                                                                  next hour ◀── checkpoint, record ◀──┘

What is published is the very model that was judged. An hour counts as learned when its checkpoint is whole. Killed
before that, the model goes on from the hour before and learns this one again, to the same result. Trouble with a store
or a disk is waited out; an hour that cannot be used is passed over or ends the run, as the config says.
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
from clickline.artifacts.version import Version
from clickline.config import Config
from clickline.config.loader import resolved
from clickline.data.prepare.hour_dataset import PreparedHour, forget_hours, prepare_hour
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
from clickline.evaluation.gate import Thresholds, Verdict, judge, surely_worse
from clickline.evaluation.importance import Score
from clickline.evaluation.live_version import check_fields, with_current
from clickline.machine import cores
from clickline.pipeline.flow import build
from clickline.pipeline.hour_records import PASSED_OVER, HourRecords
from clickline.pipeline.live_publisher import LivePublisher
from clickline.progress import Progress, usual
from clickline.scoring.open_scorer import open_scorer
from clickline.scoring.scorer import Scorer
from clickline.storage.log_files import DateRange, hour_is_complete, hour_label, hour_step
from clickline.storage.storage import Storage
from clickline.training.dense_optimizer import Diverged
from clickline.training.hourly_trainer import HourlyTrainer, LearnedHour
from clickline.training.tracker_from_config import tracker_of

_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0

T = TypeVar("T")


def follow(config: Config, progress: Progress | None = None, *, backfill: DateRange | None = None) -> None:
    """Learn hour after hour, for ever. `backfill`: first all hours of this range that were not learned yet, in
    order, with one version at their end."""
    _check(config)
    following = _Following(config, progress or usual())
    try:
        following.open()
        if backfill is not None:
            following.learn_range(backfill.hours())
        following.learn_on()
    finally:
        following.close()


def _check(config: Config) -> None:
    wrong = []
    if not Storage.is_local(config.home):
        wrong.append(("home", f"is {config.home}; following needs a home on local disk.", "Change it."))
    if config.data.dates is None:
        wrong.append(
            (
                "data.dates",
                "is missing: it says which hour to begin with.",
                "Give dates: {from: YYYYMMDD/HH}, and data.train as a {date}/{hour} pattern.",
            )
        )
    if wrong:
        raise ConfigError([Mistake("clickline.yaml", 0, *mistake) for mistake in wrong])


class _Following:
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
            progress.say(
                "train.mode is cluster: the history is learned there, hours that arrive on this machine"
            )
        self._trainer: HourlyTrainer | None = None
        self._facts: dict[str, Any] = {"state": "starting"}
        self._reached = False  # whether the source has ever answered

    # ── the model ──────────────────────────────────────────────────────────────────────────────

    def open(self) -> None:
        """The model where it left off; else one that begins with the history the config names; else none yet."""
        config, threads = self._config, cores()
        self._publisher.anew()
        self._trainer = None  # its memory goes before the next one takes as much
        self._trainer = HourlyTrainer.resumed(config, self._run, threads, self._progress)
        assert config.data.dates is not None
        if self._trainer is not None:
            self._reached = True
            last, record = self._trainer.learned.last, self._trainer.record
            if last is not None:
                self._progress.say(
                    f"{len(self._trainer.learned):,} hours were learned, the last {self._label(last)}"
                )
            if record and self._records.state(record["number"]) != "learned":  # killed between the two
                self._records.write(record["number"], record)
        elif config.data.dates.last is not None:
            built = build(config, self._progress)
            hours = DateRange(config.data.dates.first, config.data.dates.last).hours()
            features = built.prepared.dataset.features
            self._trainer = HourlyTrainer.begun(
                config, features, built.trained.checkpoint, hours, self._run, threads, self._progress
            )
        self._tell(state="waiting")

    def close(self) -> None:
        self._tracker.close("KILLED")  # it has no other end

    def _begun(self, prepared: PreparedHour) -> HourlyTrainer:
        """The trainer; the first hour tells what the fields are where nothing else does."""
        if self._trainer is None:
            self._trainer = HourlyTrainer.begun(
                self._config,
                prepared.dataset.features,
                None,
                (),
                self._run,
                cores(),
                self._progress,
            )
        return self._trainer

    def _is_learned(self, hour: int) -> bool:
        return self._trainer is not None and hour in self._trainer.learned

    # ── which hours ────────────────────────────────────────────────────────────────────────────

    def learn_on(self) -> None:
        for hour in self._coming():
            prepared = self._arrived(hour)
            if prepared is not None:
                self._learn(hour, prepared, publish=True)

    def learn_range(self, hours: range) -> None:
        """All hours of a range that were not learned; those that are not there are named and left out."""
        asked = range(hours.start // self._step * self._step, hours.stop, self._step)
        there = []
        for hour in asked:
            if self._is_learned(hour):
                continue
            if self._until_done("the source", partial(self._is_complete, hour)):
                there.append(hour)
            else:
                self._progress.say(f"backfill: {self._label(hour)} is not there or not complete; left out")
        self._progress.say(f"backfill: {len(there):,} of {len(asked):,} hours are to be learned")
        for hour in there:
            prepared = self._arrived(hour)
            if prepared is not None:
                self._learn(hour, prepared, publish=hour == there[-1])

    def _coming(self) -> Iterator[int]:
        """The hours to learn, in order, from the first that was neither learned nor passed over."""
        dates = self._config.data.dates
        assert dates is not None
        hour = DateRange(dates.first, dates.first).hours().start
        while True:
            if not self._is_learned(hour) and self._records.state(hour) not in PASSED_OVER:
                yield hour
            hour += self._step

    def _label(self, hour: int) -> str:
        return hour_label(hour, self._step)

    # ── waiting ────────────────────────────────────────────────────────────────────────────────

    def _arrived(self, hour: int) -> PreparedHour | None:
        """The hour, prepared; None when it is passed over."""
        config, label = self._config, self._label(hour)
        since, late = time.time(), False
        waited, looked = 0.0, time.monotonic()  # a clock that jumps must not make an hour late at once
        while True:
            if self._until_done("the source", partial(self._is_complete, hour)):
                features = None if self._trainer is None else self._trainer.model.features
                try:
                    return self._until_done(
                        f"hour {label}", partial(prepare_hour, config, hour, features, self._progress)
                    )
                except HourNotReady:
                    pass  # its donefile went again
                except DataError as error:
                    if self._trainer is None:  # more likely the config is wrong than the very first hour
                        raise
                    self._pass_over(hour, "corrupt", config.follow.corrupt, error)
                    return None
            before, looked = looked, time.monotonic()
            if time.time() >= (hour + self._step) * 3600:
                waited += looked - before
            if waited >= config.follow.late and not late:
                late = True
                self._progress.say(
                    f"{label} is late: its {config.data.donefile or 'folder'} is not there {waited:,.0f} s after "
                    f"it could be. follow.missing says what is done: {config.follow.missing}."
                )
                if config.follow.missing != "wait":
                    missing = HourNotReady(
                        f"{label} did not arrive within follow.late, {config.follow.late} s. When it is there: "
                        f"`clickline up --follow --backfill {label}..{label}`."
                    )
                    self._pass_over(hour, "skipped", config.follow.missing, missing)
                    return None
            self._tell(state="waiting", hour=label, waiting_since=_utc(since), late=late)
            time.sleep(config.follow.poll)

    def _is_complete(self, hour: int) -> bool:
        complete = hour_is_complete(self._storage, self._config.data.train, self._config.data.donefile, hour)
        self._reached = True
        return complete

    def _pass_over(
        self,
        hour: int,
        state: str,
        policy: str,
        error: ClicklineError,
        published: Mapping[str, Any] | None = None,
    ) -> None:
        """Go on without an hour, or not: never in silence."""
        self._progress.say(f"{self._label(hour)} was not learned: {error}")
        if policy == "stop":
            raise error
        record = {"hour": self._label(hour), "number": hour, "state": state, "reason": str(error)}
        record |= published or {}
        self._until_done("the records", lambda: self._records.write(hour, record))
        self._tell(last=record)

    # ── learning ───────────────────────────────────────────────────────────────────────────────

    def _learn(self, hour: int, prepared: PreparedHour, *, publish: bool) -> None:
        label, began = self._label(hour), time.monotonic()
        self._tell(state="learning", hour=label, waiting_since=None, late=False)
        if (
            self._trainer is None and not prepared.dataset.splits["train"].rows
        ):  # nothing to begin a model with
            record: dict[str, Any] = {"hour": label, "number": hour, "state": "empty"}
            self._until_done("the records", lambda: self._records.write(hour, record))
            return
        while True:
            trainer = self._begun(prepared)
            published: dict[str, Any] = {"gate": None, "version": None}
            try:
                with self._live(prepared) as (live, why):
                    learned = trainer.learn(hour, prepared.dataset, live)
                if publish and learned.rows:
                    published |= self._publish(hour, prepared, trainer, learned, why)
                trainer.finish(hour, prepared.dataset)
                break
            except (Diverged, DataError) as error:
                self.open()  # as it was before this hour
                if published["version"] is not None:
                    error = DataError(
                        f"{error} Version {published['version']} was published before the held-out rows were to be "
                        "learned, and stays live."
                    )
                self._pass_over(hour, "corrupt", self._config.follow.corrupt, error, published)
                return
            except (StorageError, OSError) as error:
                self._trouble(f"hour {label}", error)
                time.sleep(_FIRST_PAUSE)
                self.open()
                features = prepared.dataset.features
                prepared = self._until_done(
                    f"hour {label}", partial(prepare_hour, self._config, hour, features, self._progress)
                )
        self._warn_if_worse_than_none(label, prepared.dataset, trainer, learned)
        record = {
            "hour": label,
            "number": hour,
            "state": "learned",
            "rows": learned.rows,
            "bad": sum(prepared.dataset.splits["train"].report["bad"].values()),
            "progressive": learned.progressive.total.to_json(),
            "held_out": None if learned.held_out is None else learned.held_out.to_json(),
            **published,
            "ids": trainer.model.tables.size,
            "evicted": trainer.evicted,
            "memory": trainer.model.tables.memory_bytes,
        }
        record |= {"seconds": time.monotonic() - began, "at": _utc(time.time())}
        self._until_done("the checkpoint", lambda: trainer.checkpoint(record))
        self._until_done("the records", lambda: self._records.write(hour, record))
        self._until_done("the hours", lambda: forget_hours(self._config, {hour}))
        self._tracker.metrics(hour, _figures(record))
        self._progress.say(_told(record))
        self._tell(last=record)

    def _warn_if_worse_than_none(
        self, label: str, dataset: Dataset, trainer: HourlyTrainer, learned: LearnedHour
    ) -> None:
        measured = learned.held_out
        if (
            measured is None and len(trainer.learned) > 1
        ):  # a model's first hour was scored before it knew anything
            measured = learned.progressive.total
        if measured is None or worse_than_base_rate(measured, dataset.features, None) is None:
            return
        some = None
        try:  # the hour is published: rows that cannot be read any more only make the warning shorter
            for shard, group, _ in dataset.row_groups("train"):
                some = dataset.read(Path(dataset.folder, dataset.splits["train"].shards[shard].file), [group])
                break
        except (ArtifactError, StorageError, OSError) as error:
            self._progress.say(f"{label}: no rows could be looked at: {error}")
        self._progress.say(f"{label}: {worse_than_base_rate(measured, dataset.features, some)}")

    def _publish(
        self,
        hour: int,
        prepared: PreparedHour,
        trainer: HourlyTrainer,
        learned: LearnedHour,
        why: str,
    ) -> dict[str, Any]:
        """Through the gate to a version; what the record says of it."""
        label, identity = self._label(hour), trainer.identity()
        verdict = self._judge(learned, why)
        if not verdict.passed:
            self._progress.say(
                f"{label}: the gate refused: {' '.join(verdict.reasons)} The version before stays."
            )
            self._progress.stage("gate", "refused", {"hour": label, "reasons": list(verdict.reasons)})
            return {"gate": verdict.to_json()}
        made = self._until_done("the registry", lambda: self._made_before(identity))
        if made is not None:  # killed between publishing and the checkpoint: the same model is out already
            self._until_done("the registry", lambda: self._publisher.finish(made, f"hour {label}"))
            return {"gate": verdict.to_json(), "version": made.number}
        report = {
            "hour": label,
            "evaluation": (learned.held_out or learned.progressive.total).to_json(),
            "progressive": learned.progressive.to_json(),
            "gate": verdict.to_json(),
        }
        origin = {
            "checkpoint": f"{self._run.name}/{label}",
            "step": trainer.steps,
            "hour": label,
            "identity": identity,
            # Folders that are named in local time may be ahead of the clock.
            "data_until": min((trainer.newest_hour + 1) * 3600.0, time.time()),
        }
        try:
            result = self._until_done(
                "the registry",
                lambda: self._publisher.publish(
                    trainer, origin, report, prepared.dataset, learned.sample, f"hour {label}"
                ),
            )
        except ArtifactError as error:  # its files do not score as the model does: no reason to stop learning
            self._progress.say(f"{label} was not published: {error} The version before stays.")
            self._progress.stage("publish", "failed", {"hour": label, "reason": str(error)})
            return {"gate": verdict.to_json(), "reason": str(error)}
        version = None if result is None else result.version.number
        self._progress.stage("gate", "done", {"hour": label, "passed": True})
        if result is not None:
            facts = {"hour": label, "version": version, "table": result.version.body["table"]}
            self._progress.stage("publish", "done", {**facts, "seconds": result.seconds})
        return {"gate": verdict.to_json(), "version": version}

    def _judge(self, learned: LearnedHour, why: str) -> Verdict:
        thresholds = Thresholds(**self._config.gate.model_dump(exclude={"retries"}))
        if learned.held_out is None:
            why = why or "follow.holdout is 0, so there are no rows that neither has learned"
        why = why or "the current version has not scored all of the held-out rows"
        if learned.held_out is not None and not learned.held_out.rows:
            return Verdict(
                False,
                (
                    f"no row is held out yet to judge the model by: the hour has {learned.rows:,} rows, and "
                    f"follow.holdout keeps {self._config.follow.holdout:g} of them. The next hours decide; where hours "
                    "are so small, raise follow.holdout.",
                ),
            )
        verdict = judge(learned.held_out or learned.progressive.total, thresholds, learned.live, why)
        if learned.held_out is None or learned.this_hour is None:
            return verdict
        if learned.this_hour.rows == learned.held_out.rows:  # judged by nothing else already
            return verdict
        return verdict.refused(surely_worse(learned.this_hour, thresholds, learned.live_this_hour))

    @contextmanager
    def _live(self, prepared: PreparedHour) -> Iterator[tuple[Score | None, str]]:
        """How the live version scores rows; None where nobody asks, or it cannot, and then why."""
        scorer, why = None, ""
        if self._config.gate.vs_current is not None:
            scorer, why = self._until_done("the registry", partial(self._live_scorer, prepared))
            if why:
                self._progress.say(f"gate.vs_current is not checked: {why}.")
        try:
            yield None if scorer is None else scorer.probabilities, why
        finally:
            if scorer is not None:
                scorer.close()

    def _live_scorer(self, prepared: PreparedHour) -> tuple[Scorer | None, str]:
        registry = registry_of(self._config)

        def opened(move: Move) -> Scorer | None:
            version = registry.version(move.version)
            if version.body["model"].get("hour") == self._label(prepared.hour):
                # Killed between publishing and the checkpoint: this version has seen the hour, the one before has not.
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

        scorer, why = with_current(registry, opened, asked=True)
        if scorer is None and not why:
            why = "the current version has learned this hour, and there is none before it"
        return scorer, why

    def _made_before(self, identity: str) -> Version | None:
        """The version of this very model, packed as the config says, if a run that was killed has published it."""
        publish, registry = self._config.publish, registry_of(self._config)
        packed = publish.precision, publish.dense, publish.shards
        for version in reversed(registry.versions()[-3:]):
            body = version.body
            if (
                body["model"].get("identity") != identity
                or (body["precision"], body["dense"], body["shards"]) != packed
            ):
                continue
            try:
                registry.check(version)
            except ArtifactError as error:
                self._progress.say(f"the same model is published again: {error}")
            else:
                return version
        return None

    # ── trouble ────────────────────────────────────────────────────────────────────────────────

    def _until_done(self, what: str, action: Callable[[], T]) -> T:
        """Trouble with a disk or a store passes: try again, ever more rarely. Only a source that has never answered
        is an error at once: most likely its name is wrong."""
        pause = _FIRST_PAUSE
        while True:
            try:
                result = action()
            except (StorageError, OSError) as error:
                if not self._reached:
                    raise
                self._trouble(what, error)
            else:
                if self._facts.get("trouble") is not None:
                    self._progress.say(f"{what}: works again")
                    self._tell(trouble=None)
                return result
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _trouble(self, what: str, error: Exception) -> None:
        words = str(error)
        if isinstance(error, OSError):
            words = f"{error.filename or 'the machine'}: {error.strerror or error}"
        before = self._facts.get("trouble")
        if before is None or before["words"] != words:
            self._progress.say(f"{what}: {words} It is tried again until it works.")
            self._tell(trouble={"what": what, "words": words, "since": _utc(time.time())})

    # ── what is told ───────────────────────────────────────────────────────────────────────────

    def _tell(self, **facts: Any) -> None:
        before = dict(self._facts)
        self._facts |= facts
        if self._trainer is not None:
            self._facts["hours_learned"] = len(self._trainer.learned)
        if self._facts != before:
            self._progress.stage("follow", "running", self._facts)


def _figures(record: dict[str, Any]) -> dict[str, float]:
    """What is tracked of an hour."""
    figures: dict[str, float | None] = {
        f"progressive_{name}": record["progressive"][name] for name in ("auc", "logloss", "calibration")
    }
    figures |= {name: record[name] for name in ("rows", "bad", "ids", "evicted", "memory", "seconds")}
    if record["gate"] is not None:
        figures |= {"gate_passed": float(record["gate"]["passed"])}
    return {name: float(value) for name, value in figures.items() if value is not None}


def _told(record: dict[str, Any]) -> str:
    measured = record["progressive"]
    auc = "-" if measured["auc"] is None else f"{measured['auc']:.4f}"
    loss = "-" if measured["logloss"] is None else f"{measured['logloss']:.4f}"
    version = "no version" if record["version"] is None else f"version {record['version']}"
    return (
        f"{record['hour']}: {record['rows']:,} rows, AUC {auc} and log loss {loss} before they were learned, "
        f"{record['ids']:,} ids, {version}, {record['seconds']:.1f} s"
    )


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
