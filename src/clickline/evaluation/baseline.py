"""A model that is worse than no model: what to say of it, and which fields are likely the cause."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from clickline.evaluation.binary_metrics import Metrics
from clickline.features import FeatureSpec
from clickline.records import LabelledRows

LARGE = 100.0
"""A number that reaches the network as more than this is not scaled: others are around 1."""

_NAMED = 5  # fields at most


def worse_than_base_rate(measured: Metrics, features: FeatureSpec, rows: LabelledRows | None) -> str | None:
    """A warning if always predicting the base rate has a smaller log loss than the model; else None.

    `rows` are some of those that were measured: their numbers tell which fields are not scaled."""
    entropy, logloss = measured.normalised_entropy, measured.logloss
    if entropy is None or logloss is None or entropy <= 1:
        return None
    unscaled = [] if rows is None else sorted(_unscaled(features, rows), reverse=True)
    if unscaled:
        named = ", ".join(words for _, words in unscaled[:_NAMED])
        more = f" and {len(unscaled) - _NAMED} more" if len(unscaled) > _NAMED else ""
        remedy = (
            f"Numbers that reach the network unscaled are the likely cause: {named}{more}. Set "
            "transform: robust for them, or log1p; then prepare and train again."
        )
    else:
        remedy = (
            "The steps are likely too large, or the rows were learned too often: lower train.learning_rate, "
            "train.embedding.learning_rate or train.epochs; or these rows are of another kind than data.train."
        )
    return (
        f"log loss is {logloss:.4g}, worse than that of always predicting the base rate {measured.base_rate:.4g}, "
        f"which is {logloss / entropy:.4g}: the model's probabilities are worth less than none. {remedy}"
    )


def _unscaled(features: FeatureSpec, rows: LabelledRows) -> Iterator[tuple[float, str]]:
    """How large each large number gets, and the field in words."""
    for field, values_B in zip(features.dense, rows.encoded.dense_DB, strict=True):
        there_B = np.abs(values_B[values_B != 0])  # 0 is missing too
        if there_B.size and there_B.max() > LARGE:
            most = float(there_B.max())
            middle = float(np.median(there_B))
            yield most, f"{field.name} (transform: {field.transform}; median {middle:.2g}, up to {most:.2g})"
