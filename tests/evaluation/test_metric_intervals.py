"""Confidence intervals have their nominal coverage and equal a bootstrap over rows."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from naive_measures import auc_by_sorting, columns, sigmoid

from clickline.evaluation.binary_metrics import MetricCounts


def measure(*batch):
    counts = MetricCounts()
    counts.add(*batch)
    return counts.metrics()


def test_intervals_of_auc_and_log_loss_have_95_percent_coverage():
    """Scores of clicks are normal around 1, of the others around 0: the AUC is known, the loss integrable."""
    rng = np.random.default_rng(11)
    true_auc = 0.5 * (1 + math.erf(1 / 2))  # P(N(1, 1) > N(0, 1)) = Phi(1 / sqrt 2)
    grid = np.linspace(-12, 13, 200_001)
    density = np.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi)
    shifted = np.exp(-((grid - 1) ** 2) / 2) / math.sqrt(2 * math.pi)
    logit = grid - 1.5
    step = grid[1] - grid[0]
    true_loss = (
        step * (0.3 * shifted * np.logaddexp(0, -logit) + 0.7 * density * np.logaddexp(0, logit)).sum()
    )
    tries, auc_held, loss_held = 600, 0, 0
    for _ in range(tries):
        label = rng.random(800) < 0.3
        score = sigmoid(rng.normal(label, 1) - 1.5)
        found = measure(*columns(label, np.ones(800), score))
        auc_held += found.auc_interval[0] <= true_auc <= found.auc_interval[1]
        loss_held += found.logloss_interval[0] <= true_loss <= found.logloss_interval[1]
    # 600 tries at 95 %: 570 expected, standard deviation 5.3.
    assert 550 <= auc_held <= 588
    assert 550 <= loss_held <= 588


def test_auc_interval_equals_a_bootstrap_over_weighted_rows():
    rng = np.random.default_rng(12)
    rows = 3000
    weight = rng.integers(1, 30, rows)
    truth = rng.normal(-1, 1.5, rows)
    label = rng.binomial(weight, sigmoid(truth + rng.normal(0, 1, rows))) / weight
    batch = columns(label, weight, sigmoid(truth))
    found = measure(*batch)
    aucs, losses = [], []
    for _ in range(1000):
        drawn = batch[1] * rng.poisson(1, rows).astype(np.float32)
        aucs.append(auc_by_sorting(batch[0], drawn, batch[2]))
        losses.append(
            -(drawn * (batch[0] * np.log(batch[2]) + (1 - batch[0]) * np.log(1 - batch[2]))).sum()
            / drawn.sum()
        )
    for interval, replicates in ((found.auc_interval, aucs), (found.logloss_interval, losses)):
        assert interval[1] - interval[0] == pytest.approx(2 * 1.96 * np.std(replicates), rel=0.1)
        assert interval[0] == pytest.approx(
            np.quantile(replicates, 0.025), abs=0.25 * (interval[1] - interval[0])
        )


def test_interval_depends_on_rows_not_on_the_scale_of_weights():
    rng = np.random.default_rng(13)
    label = rng.random(2000) < 0.3
    score = sigmoid(rng.normal(label, 1))
    one = measure(*columns(label, np.ones(2000), score))
    heavy = measure(*columns(label, np.full(2000, 1000), score))
    assert heavy.auc_interval == pytest.approx(one.auc_interval, rel=1e-9)
    assert heavy.logloss_interval == pytest.approx(one.logloss_interval, rel=1e-9)
    twice = measure(*columns(np.tile(label, 2), np.ones(4000), np.tile(score, 2)))
    width = [found.auc_interval[1] - found.auc_interval[0] for found in (one, twice)]
    assert width[0] / width[1] == pytest.approx(math.sqrt(2), rel=0.01)


def test_joined_scores_keep_the_interval():
    rng = np.random.default_rng(14)
    label = rng.random(50_000) < 0.3
    batch = columns(label, np.ones(50_000), sigmoid(rng.normal(label, 1)))
    coarse = MetricCounts(1024)
    coarse.add(*batch)
    assert coarse.metrics().auc_interval == pytest.approx(measure(*batch).auc_interval, abs=1e-4)


@pytest.mark.parametrize("auc", [0.5, 0.75, 0.95])
@pytest.mark.parametrize("clicks", [1, 2, 3, 5, 10, 30])
def test_interval_covers_the_true_auc_with_few_clicks(clicks, auc):
    rng = np.random.default_rng([clicks, int(100 * auc)])
    apart = math.sqrt(2) * NormalDist().inv_cdf(auc)
    tries, held = 400, 0
    label = np.arange(300) < clicks
    for _ in range(tries):
        score = sigmoid(rng.normal(np.where(label, apart, 0), 1) - 3)
        low, high = measure(*columns(label, np.ones(300), score)).auc_interval
        held += low <= auc <= high
    # 400 tries at 95 %: 380 expected, standard deviation 4.4; an interval that is too wide is no fault here.
    assert held >= 367


def test_interval_is_symmetric_in_clicks_and_non_clicks():
    rng = np.random.default_rng(15)
    label, score = np.arange(500) < 4, rng.random(500)
    one = measure(*columns(label, np.ones(500), score))
    other = measure(*columns(~label, np.ones(500), 1 - score))
    assert other.auc == pytest.approx(one.auc)
    assert other.auc_interval == pytest.approx(one.auc_interval)


def test_many_clicks_in_one_row_do_not_narrow_the_interval():
    """A row is the unit that is drawn: 200 clicks of one row are one observation."""
    label, weight = np.zeros(400), np.ones(400)
    label[0], weight[0] = 1, 200
    score = np.linspace(0.9, 0.1, 400)
    heavy, plain = (measure(*columns(label, some, score)) for some in (weight, np.ones(400)))
    assert heavy.auc == plain.auc == 1
    assert heavy.auc_interval == pytest.approx(plain.auc_interval)
    assert plain.auc_interval[0] < 0.5


def test_interval_is_continuous_from_few_to_many_rows():
    rng = np.random.default_rng(16)
    widths = []
    for clicks in (99, 100):
        found = []
        for _ in range(50):
            label = np.arange(2000) < clicks
            low, high = measure(*columns(label, np.ones(2000), sigmoid(rng.normal(label, 1)))).auc_interval
            found.append(high - low)
        widths.append(np.mean(found))
    assert widths[0] == pytest.approx(widths[1], rel=0.05)


def test_interval_stays_within_0_and_1_for_perfect_order():
    found = measure(*columns([1, 1, 0, 0, 1, 0], [1] * 6, [0.9, 0.8, 0.1, 0.85, 0.95, 0.2]))
    assert 0 < found.auc_interval[0] < found.auc < found.auc_interval[1] < 1
    low, high = measure(*columns([1, 0], [1, 1], [0.9, 0.1])).auc_interval
    assert 0 < low < 0.5 and high == 1
    low, high = measure(*columns([1] * 500 + [0] * 500, [1] * 1000, [0.9] * 500 + [0.1] * 500)).auc_interval
    assert 0.99 < low < high == 1
