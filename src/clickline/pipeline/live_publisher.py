"""Publishes a model that continues training, in its current state."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.dataset import Dataset
from clickline.artifacts.from_config import registry_of
from clickline.artifacts.version import Version, VersionModel
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
    """Publishes what has changed in a trainer's model since the previous version."""

    def __init__(self, config: Config, scratch: Path, progress: Progress) -> None:
        self._config = config
        self._config_text = resolved(config)
        self._file = scratch / "publishing.bin"
        self._progress = progress
        self._generation: int | None = None  # of the tables at the last version of this process

    def publish(
        self,
        trainer: HourlyTrainer,
        origin: VersionModel,
        report: Mapping[str, Any],
        hour: Dataset,
        gate_sample: tuple[LabelledRows, NDArray[np.float32]] | None,
        reason: str,
    ) -> PublishResult | None:
        """Publish a delta to the last version of this process, or a full table. Returns None if another process
        changed the current version meanwhile; the new one is stored, but not current. `gate_sample`: rows with the
        scores that the gate evaluated."""
        began, publish = time.monotonic(), self._config.publish
        for since in dict.fromkeys((self._generation, None)):
            generation = trainer.snapshot(self._file, since)
            release = Release(
                trainer.model,
                self._file,
                origin,
                self._config_text,
                report,
                next(_rows(hour, _SAMPLE_ROWS)),
                gate_sample,
            )
            exact = publish.table_precision == publish.dense_precision == "fp32"
            cost_rows = iter(()) if exact else _rows(hour, _COST_ROWS)
            result = None
            try:
                result = publish_release(
                    self._config, release, cost_rows, self._progress, reason=reason, started=began
                )
            except RegistryMoved as error:
                self._progress.log(str(error))
            except ArtifactError as error:
                if since is None:
                    raise
                self._progress.log(
                    f"the delta could not be published, publishing the full table instead: {error}"
                )
                continue
            finally:
                self._file.unlink(missing_ok=True)
            self._generation = generation
            trainer.model.tables.drop_history_before(generation)
            break
        self._remove_old_versions()
        return result

    def find(self, identity: str) -> Version | None:
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

    def make_current(self, version: Version, reason: str) -> None:
        """Make a version current that a killed process has stored, unless it is current already."""
        try:
            make_current(registry_of(self._config), version, reason, self._progress)
        except RegistryMoved as error:
            self._progress.log(str(error))

    def reset(self) -> None:
        """Publish a full table next time: the model was reopened, so the changes since the last version are unknown."""
        self._generation = None

    def _remove_old_versions(self) -> None:
        """Remove old versions; a failure is logged only."""
        try:
            registry_of(self._config, any_version=True).gc(self._config.publish.keep_versions)
        except (ArtifactError, StorageError, OSError) as error:
            self._progress.log(f"old versions were not removed: {error}")


def _rows(hour: Dataset, limit: int) -> Iterator[LabelledRows]:
    remaining = limit
    for rows in hour.read_split("train"):
        yield rows.slice(0, min(remaining, rows.rows))
        remaining -= rows.rows
        if remaining <= 0:
            return
