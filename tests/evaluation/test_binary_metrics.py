"""Metric counts against the definitions: fractional labels, ties, extremes, any batches, any merging."""

from __future__ import annotations

import json
import math
import resource
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_measures import (
    auc_by_pairs,
    auc_by_sorting,
    clicks_of,
    columns,
    expanded,
    logloss_by_rows,
)

from clickline.errors import ClicklineError, DataError
from clickline.evaluation.binary_metrics import MetricCounts
from clickline.models.calibration import CLIP

SCORES = st.one_of(
    st.sampled_from([0.0, 1.0, 0.5, 0.25, 1e-30]),
    st.floats(0, 1, width=32),
)
SHOWS = st.integers(0, 6).flatmap(lambda shows: st.tuples(st.integers(0, shows), st.just(shows)))
ROWS = st.lists(st.tuples(SHOWS, SCORES), min_size=1, max_size=40)


def batch_of(rows):
    labels = [clicks / shows if shows else 0.0 for (clicks, shows), _ in rows]
    return columns(labels, [shows for (_, shows), _ in rows], [score for _, score in rows])


def close(found, expected, **tolerance):
    return found is expected or found == pytest.approx(expected, **tolerance)


def measure(*batch, limit=1 << 16):
    counts = MetricCounts(limit)
    counts.add(*batch)
    return counts.metrics()


@given(ROWS)
def test_metrics_match_their_definitions(rows):
    label, weight, score = batch_of(rows)
    found = measure(label, weight, score)
    assert found.rows == len(rows)
    assert found.impressions == weight.sum()
    assert found.clicks == pytest.approx(sum(clicks for (clicks, _), _ in rows), rel=1e-6)
    if found.impressions == 0:
        assert found.auc is None and found.logloss is None
        return
    labels, weights, scores = label.tolist(), weight.tolist(), score.tolist()
    assert found.auc == pytest.approx(auc_by_pairs(labels, weights, scores), abs=1e-12)
    assert found.logloss == pytest.approx(logloss_by_rows(labels, weights, scores), rel=1e-9)
    shows = list(expanded(labels, weights, scores))
    assert found.accuracy == pytest.approx(sum((p >= 0.5) == y for y, p in shows) / len(shows), rel=1e-6)
    assert found.brier == pytest.approx(sum((p - y) ** 2 for y, p in shows) / len(shows), rel=1e-6)
    mean = sum(p for _, p in shows) / len(shows)
    assert found.mean_prediction == pytest.approx(mean, rel=1e-9)
    assert found.spread == pytest.approx(
        math.sqrt(sum((p - mean) ** 2 for _, p in shows) / len(shows)), abs=1e-7
    )
    shown = [p for p, w in zip(scores, weights, strict=True) if w]
    assert (found.lowest_prediction, found.highest_prediction) == (min(shown), max(shown))
    if found.clicks:
        assert found.calibration == pytest.approx(mean * len(shows) / sum(y for y, _ in shows), rel=1e-6)
    json.dumps(found.to_json(), allow_nan=False)


@given(ROWS)
def test_fractional_row_counts_like_its_single_impressions(rows):
    rows = [row for row in rows if row[0][1]] or [((1, 2), 0.5)]
    whole, single = measure(*batch_of(rows)), list(expanded(*batch_of(rows)))
    apart = measure(*columns([y for y, _ in single], [1] * len(single), [p for _, p in single]))
    for name in ("auc", "logloss", "accuracy", "brier", "ece", "calibration", "normalised_entropy"):
        assert close(getattr(whole, name), getattr(apart, name), rel=1e-5, abs=1e-6), name


@given(st.lists(st.integers(0, 500), max_size=5), st.integers(0, 100))
def test_metrics_do_not_depend_on_batch_boundaries_to_the_bit(cuts, seed):
    batch = clicks_of(np.random.default_rng(seed), 500)
    parts = MetricCounts(64)
    for rows in np.split(np.arange(500), sorted(cuts)):
        parts.add(*(column[rows] for column in batch))
        parts.metrics()  # looking must not change what comes
    assert parts.metrics() == measure(*batch, limit=64)


@pytest.mark.slow
@given(st.lists(ROWS, min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_merging_in_any_order_gives_the_same_metrics(batches, random):
    def fed(rows):
        counts = MetricCounts(64)
        counts.add(*batch_of(rows))
        return counts

    def merged(parts):
        total = MetricCounts(64)
        for part in parts:
            total.merge(part)
        return total.metrics()

    parts = [fed(rows) for rows in batches]
    before = [part.metrics() for part in parts]
    one = merged(parts)
    assert merged(parts) == one  # the same order: the same bits, and the parts are as they were
    assert [part.metrics() for part in parts] == before
    random.shuffle(parts)
    left, right = MetricCounts(64), MetricCounts(64)
    for part in parts:
        random.choice([left, right]).merge(part)
    left.merge(right)
    other = left.metrics()
    for name in ("impressions", "clicks", "logloss", "brier", "accuracy", "calibration", "mean_prediction"):
        assert close(getattr(other, name), getattr(one, name), rel=1e-12), name
    if one.auc is not None:
        assert abs(other.auc - one.auc) <= one.auc_error + other.auc_error + 1e-12


def test_restored_counts_continue_bit_identically():
    rng = np.random.default_rng(5)
    first, second = clicks_of(rng, 3000), clicks_of(rng, 3000)
    straight = MetricCounts(256)
    straight.add(*first)
    restored = MetricCounts.from_arrays(straight.to_arrays(), 256)
    for counts in (straight, restored):
        counts.add(*second)
    assert restored.metrics() == straight.metrics()
    assert straight.metrics().auc_error > 0


def test_float64_scores_are_ranked_as_float32_with_exact_losses():
    label, weight, _ = columns([0, 1], [1, 1], [0, 0])
    found = measure(label, weight, np.array([0.3, 0.3 + 1e-12]))
    assert found.auc == 0.5
    assert found.logloss == pytest.approx(-(math.log(0.7) + math.log(0.3)) / 2, rel=1e-11)


def test_log_loss_of_certain_mistakes_is_finite():
    found = measure(*columns([1, 0], [1, 1], [0, 1]))
    assert found.logloss == pytest.approx(-math.log(CLIP), rel=1e-6)
    assert found.auc == 0.0 and found.accuracy == 0.0 and found.brier == 1.0


@pytest.mark.parametrize(("label", "kind"), [(0, "lack"), (1, "have")])
def test_single_class_has_no_auc_and_a_note(label, kind):
    found = measure(*columns([label] * 3, [1, 2, 1], [0.1, 0.2, 0.3]))
    assert (found.auc, found.auc_interval, found.normalised_entropy) == (None, None, None)
    assert found.notes == (
        f"AUC and normalised entropy cannot be measured: all 4 impressions {kind} a click. "
        "Evaluate on rows with and without clicks.",
    )
    assert found.logloss is not None
    assert (found.calibration is None) == (label == 0)


def test_no_rows_give_a_note():
    assert "there are no rows" in MetricCounts().metrics().notes[0]
    assert "all 2 rows have weight 0" in measure(*columns([1, 0], [0, 0], [0.5, 0.5])).notes[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.1, 1.1])
def test_invalid_probability_is_refused_and_its_batch_not_counted(bad):
    counts = MetricCounts()
    counts.add(*columns([1, 0], [1, 1], [0.5, 0.4]))
    before = counts.metrics()
    with pytest.raises(ClicklineError, match="row 4 of the evaluated rows got the probability") as caught:
        counts.add(*columns([1, 0, 0], [1, 1, 1], [0.5, bad, 0.1]))
    assert "must be between 0 and 1" in str(caught.value)
    assert "earlier checkpoint" in str(caught.value)
    assert not isinstance(caught.value, DataError)
    assert counts.metrics() == before


@pytest.mark.parametrize(
    ("label", "weight", "message"),
    [
        (
            math.nan,
            1,
            "row 1 of the evaluated rows has label nan; a label is a share of clicks between 0 and 1",
        ),
        (2, 1, "has label 2"),
        (0, -1, "has weight -1; a weight is finite and not negative"),
        (0, math.inf, "has weight inf"),
        (0, math.nan, "has weight nan"),
    ],
)
def test_invalid_labels_and_weights_are_refused(label, weight, message):
    with pytest.raises(DataError, match=message):
        MetricCounts().add(*columns([label], [weight], [0.5]))


def test_columns_of_different_length_raise_value_error():
    with pytest.raises(ValueError, match=r"differ in length: \[1, 2\]"):
        MetricCounts().add(*columns([1, 0], [1, 1], [0.5]))


def test_ece_detects_errors_that_cancel_in_the_ratio():
    # Half the shows are predicted 0.1 and click at 0.3, half the other way round: in sum all is right.
    found = measure(*columns([0.3, 0.1], [1000, 1000], [0.1, 0.3]))
    assert found.calibration == pytest.approx(1, rel=1e-6)
    assert found.ece == pytest.approx(0.2, rel=1e-6)


def test_true_probabilities_are_calibrated_and_beat_the_base_rate():
    found = measure(*clicks_of(np.random.default_rng(1), 100_000))
    assert found.calibration == pytest.approx(1, abs=0.03)
    assert found.ece < 0.01
    assert 0.8 < found.normalised_entropy < 0.9
    flat = measure(*columns([0.25], [100], [0.25]))
    assert flat.normalised_entropy == pytest.approx(1)


# ── more distinct scores than fit ──────────────────────────────────────────────────────────────

ORDERS = {
    "mixed": lambda score: np.arange(len(score)),
    "rising": np.argsort,
    "falling": lambda score: np.argsort(-score),
    "a crowd after the rest": lambda score: np.argsort(np.abs(score - 0.3) < 0.02, kind="stable"),
    "a crowd before the rest": lambda score: np.argsort(np.abs(score - 0.3) > 0.02, kind="stable"),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("limit", [64, 1024])
def test_auc_error_bound_holds_in_any_row_order(order, limit):
    label, weight, score = clicks_of(np.random.default_rng(2), 60_000)
    weight = np.random.default_rng(3).integers(0, 5, len(score)).astype(np.float32)
    rows = ORDERS[order](score)
    counts = MetricCounts(limit)
    counts.add(label[rows], weight[rows], score[rows])
    found = counts.metrics()
    assert 0 < abs(found.auc - auc_by_sorting(label, weight, score)) <= found.auc_error
    assert found.auc_error < 10 / limit
    assert len(counts.to_arrays()["codes"]) <= limit


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 5), SCORES), min_size=100, max_size=600),
    st.lists(st.integers(0, 600), max_size=3),
)
def test_auc_error_bound_holds_for_any_scores_batches_and_merges(rows, cuts):
    batch = columns(*zip(*rows, strict=True))
    total = MetricCounts(16)
    for number, part in enumerate(np.split(np.arange(len(rows)), sorted(cuts))):
        piece = MetricCounts(16)
        (total if number % 2 else piece).add(*(column[part] for column in batch))
        total.merge(piece)
    found = total.metrics()
    if found.auc is not None:
        assert abs(found.auc - auc_by_sorting(*batch)) <= found.auc_error + 1e-9


@pytest.mark.parametrize(
    ("limit", "few", "many", "most"), [(1024, 4096, 60_000, 2), (256, 60_000, 200_000, 10)]
)
def test_heavy_scores_inside_a_joined_node_stay_separate(limit, few, many, most):
    # Some rows all over the scores, then many between two of them.
    rng = np.random.default_rng(8)
    wide, crowd = np.exp(rng.uniform(np.log(1e-6), 0, few)), 0.3 + 1e-3 * rng.random(many)
    label = np.concatenate([rng.random(few) < 0.5, rng.random(many) < (crowd - 0.3) * 1e3])
    batch = columns(label, np.ones(few + many), np.concatenate([wide, crowd]))
    found = measure(*batch, limit=limit)
    assert abs(found.auc - auc_by_sorting(*batch)) <= found.auc_error < most / limit


@pytest.mark.parametrize("seed", range(20))
def test_auc_error_bound_covers_nested_nodes(seed):
    # First clicks all over a range, then non-clicks crowded in the middle of it: hardly a tie, but much unknown.
    rng = np.random.default_rng(seed)
    score = np.concatenate([rng.uniform(0.5, 1, 128), 0.7 + 0.001 * rng.random(320)])
    label = np.concatenate([[0], np.ones(127), np.zeros(320)])
    batch = columns(label, np.ones(448), score)
    found = measure(*batch, limit=16)
    assert abs(found.auc - auc_by_sorting(*batch)) <= found.auc_error


def test_minus_zero_score_equals_zero():
    assert measure(*columns([1, 0], [1, 1], [-0.0, 0.0])).auc == 0.5
    assert measure(*columns([1, 0], [1, 1], [-0.0, 0.1])).auc == 0.0


def test_heavy_score_is_never_joined():
    # A tenth of the rows got one and the same prediction, the others all differ: ties are no error.
    label, weight, score = clicks_of(np.random.default_rng(4), 300_000)
    score[::10] = 0.2
    found = measure(label, weight, score, limit=1 << 13)
    assert abs(found.auc - auc_by_sorting(label, weight, score)) <= found.auc_error < 1e-4


def test_default_auc_is_exact_for_few_scores_and_within_1e_4_for_many():
    label, weight, score = clicks_of(np.random.default_rng(6), 400_000)
    few = measure(label[:60_000], weight[:60_000], score[:60_000])
    assert few.auc_error == 0
    assert few.auc == pytest.approx(
        auc_by_sorting(label[:60_000], weight[:60_000], score[:60_000]), abs=1e-12
    )
    many = measure(label, weight, score)
    assert abs(many.auc - auc_by_sorting(label, weight, score)) <= many.auc_error < 2e-5


@pytest.mark.slow
def test_counts_memory_does_not_grow_with_rows():
    rng = np.random.default_rng(7)
    counts = MetricCounts()

    def feed(millions):
        for _ in range(millions * 16):
            counts.add(*clicks_of(rng, 1 << 16))

    feed(2)
    counts.metrics()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    feed(20)
    counts.metrics()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 20 * 1024, f"peak memory grew by {grown / 1024:.1f} MiB over 20 million rows"
    assert sum(array.nbytes for array in counts.to_arrays().values()) < 6e6
    assert counts.metrics().auc_error < 2e-5


def test_metrics_are_immutable_values():
    found = measure(*columns([1, 0], [1, 1], [0.5, 0.4]))
    assert replace(found, auc=0.5).auc == 0.5
    with pytest.raises(AttributeError):
        found.auc = 0.9
