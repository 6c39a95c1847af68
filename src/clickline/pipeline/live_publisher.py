"""A model that goes on learning, published as it is now."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.dataset import Dataset
from clickline.artifacts.from_config import registry_of
from clickline.artifacts.version import Version
from clickline.config import Config
from clickline.config.loader import resolved
from clickline.errors import ArtifactError, RegistryMoved, StorageError
from clickline.progress import Progress
from clickline.publishing.release import Release
from clickline.publishing.run import PublishResult, make_current, publish_release
from clickline.records import LabelledRows
from clickline.training.hourly_trainer import HourlyTrainer

_SAMPLE_ROWS = 4096
_COST_ROWS = 100_000


class LivePublisher:
    """Publishes what a trainer's model has learned since the version before."""

    def __init__(self, config: Config, scratch: Path, progress: Progress) -> None:
        self._config = config
        self._config_text = resolved(config)
        self._file = scratch / "publishing.bin"
        self._progress = progress
        self._mark: int | None = None  # of the tables when the last version of this process was made

    def publish(
        self,
        trainer: HourlyTrainer,
        origin: Mapping[str, Any],
        report: Mapping[str, Any],
        hour: Dataset,
        judged: tuple[LabelledRows, NDArray[np.float32]] | None,
        reason: str,
    ) -> PublishResult | None:
        """A delta to the version before, where there is one of this process; None if somebody else moved the
        pointer meanwhile: then the version waits for them. `judged`: rows with the scores that the gate saw."""
        began = time.monotonic()
        for since in dict.fromkeys((self._mark, None)):
            mark = trainer.snapshot(self._file, since)
            release = Release(
                trainer.model,
                self._file,
                origin,
                self._config_text,
                report,
                next(_rows(hour, _SAMPLE_ROWS)),
                judged,
            )
            quantised = (self._config.publish.precision, self._config.publish.dense) != ("fp32", "fp32")
            cost_rows = _rows(hour, _COST_ROWS) if quantised else iter(())
            result = None
            try:
                result = publish_release(
                    self._config, release, cost_rows, self._progress, reason=reason, began=began
                )
            except RegistryMoved as error:
                self._progress.say(str(error))
            except ArtifactError as error:
                if since is None:
                    raise
                self._progress.say(f"a delta could not be published, so the whole table is: {error}")
                continue
            finally:
                self._file.unlink(missing_ok=True)
            self._mark = mark
            trainer.model.tables.forget_before(mark)
            break
        self._collect()
        return result

    def finish(self, version: Version, reason: str) -> None:
        """Make a version current that a process had stored when it was killed, unless it was current already."""
        try:
            make_current(registry_of(self._config), version, reason, self._progress)
        except RegistryMoved as error:
            self._progress.say(str(error))

    def anew(self) -> None:
        """The model was opened again: what changed since the last version is not known any more."""
        self._mark = None

    def _collect(self) -> None:
        """Old versions go; that they stay for once is no reason to stop."""
        try:
            registry_of(self._config, any_version=True).gc(self._config.publish.keep)
        except (ArtifactError, StorageError, OSError) as error:
            self._progress.say(f"old versions were not removed: {error}")


def _rows(hour: Dataset, most: int) -> Iterator[LabelledRows]:
    left = most
    for shard, group, _ in hour.row_groups("train"):
        rows = hour.read(Path(hour.folder, hour.splits["train"].shards[shard].file), [group])
        yield rows.part(0, min(left, rows.rows))
        left -= rows.rows
        if left <= 0:
            return
