"""Warm start: continuing training from an earlier model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from clickline.artifacts.checkpoint import Checkpoint, open_checkpoint_folder, run_result
from clickline.errors import ArtifactError
from clickline.features import FeatureSpec
from clickline.features.feature_spec import DenseField, SlotField
from clickline.progress import Progress

_Field = SlotField | DenseField


def open_warm_start(path: Path, features: FeatureSpec, progress: Progress) -> Checkpoint:
    """The checkpoint at `place`, or the newest of the run there; its features must match the dataset."""
    checkpoint = open_checkpoint_folder(path) or run_result(path)
    if checkpoint is None:
        raise ArtifactError(
            f"train.warm_start is {path}, which is neither a checkpoint nor a run with one. "
            "Set it to a folder such as .clickline/runs/RUN or .clickline/runs/RUN/step-…."
        )
    before = checkpoint.features
    pairs: tuple[tuple[str, Sequence[_Field], Sequence[_Field]], ...] = (
        ("slots", before.slots, features.slots),
        ("dense fields", before.dense, features.dense),
    )
    for kind, old, new in pairs:
        definitions_before, definitions_now = _definitions(old), _definitions(new)
        if list(definitions_before.items()) != list(definitions_now.items()):
            raise ArtifactError(
                f"{checkpoint.folder} was trained with {kind} that differ from the dataset: "
                f"{_difference(definitions_before, definitions_now)}. Prepare the new data with the same fields."
            )
        for past, present in zip(old, new, strict=True):
            if past.statistics != present.statistics:
                progress.log(
                    f"{present.name}: its statistics come from the new data, so the same value gives a slightly "
                    "different input than before; the model has to adapt"
                )
    return checkpoint


def _definitions(fields: Sequence[_Field]) -> dict[str, str]:
    """The definition of each field, without the statistics of its data."""
    return {field.name: repr(replace(field, statistics=None)) for field in fields}


def _difference(old: dict[str, str], new: dict[str, str]) -> str:
    removed = [name for name in old if name not in new]
    added = [name for name in new if name not in old]
    changed = [name for name in old if name in new and old[name] != new[name]]
    parts = [
        f"{label} {', '.join(names)}"
        for label, names in (("removed:", removed), ("added:", added), ("encoded differently:", changed))
        if names
    ]
    return "; ".join(parts) or "their order differs"
