"""Learning on from an earlier model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from clickline.artifacts.checkpoint import Checkpoint, open_checkpoint_folder, result_of
from clickline.errors import ArtifactError
from clickline.features import FeatureSpec
from clickline.features.feature_spec import DenseField, SlotField
from clickline.progress import Progress

_Field = SlotField | DenseField


def earlier(place: Path, features: FeatureSpec, progress: Progress) -> Checkpoint:
    """The checkpoint at `place`, or the newest of the run there; its features must be those of the dataset."""
    found = open_checkpoint_folder(place) or result_of(place)
    if found is None:
        raise ArtifactError(
            f"train.warm_start is {place}, which is neither a checkpoint nor a run with one. "
            "Name a folder such as .clickline/runs/RUN or .clickline/runs/RUN/step-…."
        )
    before = FeatureSpec.from_json(found.body["features"])
    pairs: tuple[tuple[str, Sequence[_Field], Sequence[_Field]], ...] = (
        ("slots", before.slots, features.slots),
        ("dense fields", before.dense, features.dense),
    )
    for kind, old, new in pairs:
        meaning_before, meaning_now = _meanings(old), _meanings(new)
        if list(meaning_before.items()) != list(meaning_now.items()):
            raise ArtifactError(
                f"{found.folder} was trained with other {kind} than the dataset has: "
                f"{_difference(meaning_before, meaning_now)}. Prepare the new data with the same fields."
            )
        for past, present in zip(old, new, strict=True):
            if past.statistics != present.statistics:
                progress.say(
                    f"{present.name}: its statistics are those of the new data, so the same number is not quite "
                    "the same input as before; the model has to get used to it"
                )
    return found


def _meanings(fields: Sequence[_Field]) -> dict[str, str]:
    """What each field is, without the statistics of its data."""
    return {field.name: repr(replace(field, statistics=None)) for field in fields}


def _difference(old: dict[str, str], new: dict[str, str]) -> str:
    gone = [name for name in old if name not in new]
    come = [name for name in new if name not in old]
    changed = [name for name in old if name in new and old[name] != new[name]]
    parts = [
        f"{words} {', '.join(names)}"
        for words, names in (("it had", gone), ("new is", come), ("otherwise encoded is", changed))
        if names
    ]
    return "; ".join(parts) or "they stand in another order"
