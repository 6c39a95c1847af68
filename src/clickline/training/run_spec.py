"""What a training run trains on what. The same dataset and config give the same run, which is found by its identity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clickline.artifacts.checkpoint import Checkpoint
from clickline.artifacts.dataset import Dataset
from clickline.artifacts.manifest import fingerprint
from clickline.config import Config
from clickline.config.loader import resolved
from clickline.config.sections import TrainSection
from clickline.errors import ConfigError, DataError, Mistake
from clickline.machine import cores
from clickline.models.from_config import expected_train_rows, holdout_share, plan_of
from clickline.models.model_plan import ModelPlan
from clickline.progress import Progress
from clickline.storage.log_files import overlap_warning
from clickline.storage.storage import Storage
from clickline.training.batches import batch_settings
from clickline.training.warm_start import open_warm_start


@dataclass(frozen=True)
class RunSpec:
    """Everything that the result of a run depends on."""

    folder: Path
    dataset: Dataset
    plan: ModelPlan
    batches: Mapping[str, Any]  # settings of `Batches`
    threads: int
    start: Checkpoint | None  # an earlier model to start from
    identity: Mapping[str, Any]

    @property
    def report(self) -> Path:
        return self.folder / "report.json"

    @property
    def overlap(self) -> str | None:
        """A warning about files that are in both train and eval."""
        inputs = self.dataset.identity["inputs"]
        train, evaluated = ([file["uri"] for file in inputs.get(split, ())] for split in ("train", "eval"))
        return overlap_warning(train, evaluated)


def check_supported(config: Config) -> None:
    """Refuse settings that this release does not support, or that would train in vain, before doing anything."""
    mistakes = []
    if not Storage.is_local(config.home):
        mistakes.append(
            ("home", f"is {config.home}; training needs a home on local disk.", "Set it to a local folder.")
        )
    if (problem := config.without_eval()) is not None:
        mistakes.append(("data.eval", problem, "Set it, or remove what needs it."))
    if mistakes:
        raise ConfigError([Mistake("clickline.yaml", 0, *mistake) for mistake in mistakes])


def open_run(config: Config, progress: Progress) -> RunSpec:
    """The run that trains the current dataset with this config, new or not. Refuses data that cannot be trained on."""
    check_supported(config)
    dataset = Dataset.current(Storage(), config.home)
    _check_rows(config, dataset)
    train, threads, split = config.train, cores(), dataset.splits["train"]
    expected = expected_train_rows(train, split.rows, split.report["clicks"])
    batches = batch_settings(train, expected, holdout_share(train))
    plan = plan_of(config, dataset.features, expected)
    start = None
    if train.warm_start is not None:
        start = open_warm_start(Path(train.warm_start), dataset.features, progress)
    identity = {
        "dataset": dataset.id,
        "plan": plan.to_json(),
        "batch_size": batches["batch_size"],
        "train": train.model_dump(mode="json", include={"order", "eviction", "calibration"}),
        # On one machine the number of threads decides the last bits; on a cluster the number of workers may change.
        **({"cluster": _cluster_identity(train)} if train.mode == "cluster" else {"threads": threads}),
        "warm_start": None if start is None else start.manifest.tables_sha256,
    }
    folder = Path(config.home, "runs", fingerprint(identity))
    spec = RunSpec(folder, dataset, plan, batches, threads, start, identity)
    if spec.overlap is not None:
        progress.log(f"warning: {spec.overlap}")
    Storage().put(str(folder / "resolved.yaml"), resolved(config).encode())
    return spec


def _check_rows(config: Config, dataset: Dataset) -> None:
    train, evaluated = dataset.splits["train"], dataset.splits.get("eval")
    if not train.rows:
        raise DataError(f"dataset {dataset.id} has no training rows. Check data.train.")
    if config.data.eval is not None and (evaluated is None or not evaluated.rows):
        raise DataError(
            f"dataset {dataset.id} has no eval rows, although data.eval is set. Run `clickline prepare` and check "
            "the rows that it skipped."
        )
    if not train.report["clicks"]:
        raise DataError(
            f"none of the {train.rows:,} training rows of dataset {dataset.id} was clicked: there is nothing to "
            "train on. Check the label field in data.fields."
        )


def _cluster_identity(train: TrainSection) -> dict[str, Any]:
    """The settings that a cluster run's result depends on: not the number of workers and embedding servers."""
    asynchronous = {"max_staleness", "scale_lr_by_staleness"} if not train.sync else set()
    return train.model_dump(mode="json", include={"sync", *asynchronous})
