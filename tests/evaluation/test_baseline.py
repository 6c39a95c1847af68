"""The warning about a model that is worse than the base rate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from naive_measures import clicks_of

from clickline.evaluation.baseline import worse_than_base_rate
from clickline.evaluation.binary_metrics import MetricCounts
from clickline.features import DenseField, FeatureSpec
from clickline.records import EncodedRows, LabelledRows

COUNTS = MetricCounts()
COUNTS.add(*clicks_of(np.random.default_rng(1), 2000))
GOOD = COUNTS.metrics()
BAD = replace(GOOD, logloss=9.7, normalised_entropy=17.0)
FEATURES = FeatureSpec(
    (
        DenseField("small", "small", "log1p"),
        DenseField("huge", "huge", "none"),
        DenseField("larger", "larger", "none"),
    ),
    (),
)


def rows(*columns: list[float]) -> LabelledRows:
    count = len(columns[0])
    ones = np.ones(count, dtype=np.uint32)
    floats = ones.astype(np.float32)
    encoded = EncodedRows(count, np.array(columns, dtype=np.float32), ())
    return LabelledRows(floats, floats, ones, ones, np.zeros(count, np.int32), encoded)


def test_no_warning_for_a_model_better_than_the_base_rate():
    assert GOOD.normalised_entropy < 1
    assert worse_than_base_rate(GOOD, FEATURES, None) is None
    assert worse_than_base_rate(MetricCounts().metrics(), FEATURES, None) is None


def test_unscaled_fields_are_listed_by_size():
    some = rows([1, 2, 3], [-500, 0, 300], [4e5, 1e19, 2e5])
    warning = worse_than_base_rate(BAD, FEATURES, some)
    assert "log loss is 9.7, worse than the 0.5706 of always predicting the base rate" in warning
    assert (
        "the likely cause: larger (transform: none; median 4e+05, up to 1e+19), "
        "huge (transform: none; median 4e+02, up to 5e+02). Set transform: robust or log1p for them"
    ) in warning
    assert "small" not in warning


@pytest.mark.parametrize("some", [None, rows([1, 2], [3, 4], [5, 6])], ids=["no rows", "scaled"])
def test_without_unscaled_fields_the_learning_rate_is_named(some):
    warning = worse_than_base_rate(BAD, FEATURES, some)
    assert "lower train.learning_rate, train.embedding.learning_rate or train.epochs" in warning
