"""Warns of a model that is worse than predicting the base rate, and names the fields that are the likely cause."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from clickline.evaluation.binary_metrics import Metrics
from clickline.features import FeatureSpec
from clickline.records import LabelledRows

UNSCALED_ABOVE = 100.0
"""A network input above this is not scaled: scaled ones are around 1."""

_MAX_NAMED = 5  # fields


def worse_than_base_rate(metrics: Metrics, features: FeatureSpec, rows: LabelledRows | None) -> str | None:
    """A warning if always predicting the base rate has a smaller log loss than the model; else None.

    `rows` is a sample of the evaluated rows; their values show which fields are not scaled."""
    entropy, logloss = metrics.normalised_entropy, metrics.logloss
    if entropy is None or logloss is None or entropy <= 1:
        return None
    unscaled = [] if rows is None else sorted(_unscaled(features, rows), reverse=True)
    if unscaled:
        named = ", ".join(text for _, text in unscaled[:_MAX_NAMED])
        more = f" and {len(unscaled) - _MAX_NAMED} more" if len(unscaled) > _MAX_NAMED else ""
        remedy = (
            f"Unscaled network inputs are the likely cause: {named}{more}. Set "
            "transform: robust or log1p for them; then prepare and train again."
        )
    else:
        remedy = (
            "The learning rate or the number of epochs is likely too high: lower train.learning_rate, "
            "train.embedding.learning_rate or train.epochs. Or these rows differ in kind from data.train."
        )
    return (
        f"log loss is {logloss:.4g}, worse than the {logloss / entropy:.4g} of always predicting the base rate "
        f"{metrics.base_rate:.4g}: the model is worse than none. {remedy}"
    )


def _unscaled(features: FeatureSpec, rows: LabelledRows) -> Iterator[tuple[float, str]]:
    """The largest value of each unscaled field, with a description of the field."""
    for field, values_B in zip(features.dense, rows.encoded.dense_DB, strict=True):
        present_B = np.abs(values_B[values_B != 0])  # 0 also stands for missing
        if present_B.size and present_B.max() > UNSCALED_ABOVE:
            largest = float(present_B.max())
            middle = float(np.median(present_B))
            yield (
                largest,
                f"{field.name} (transform: {field.transform}; median {middle:.2g}, up to {largest:.2g})",
            )
