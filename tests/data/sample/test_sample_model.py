"""The click model: rates, power laws, signal, interactions, drift, new ids."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
from numba import njit
from numpy.typing import NDArray

from clickline.data.sample.click_model import (
    MISSING_COUNT,
    MISSING_ID,
    ClickModel,
    build_model,
    generate_rows,
)
from clickline.data.sample.generate import SampleOptions, generate
from clickline.progress import Progress

ROWS = 250_000
HOURS = 30
LARGE, DRIFTING, SMALL = 1, 3, 0  # places of slots: the largest, the largest that drifts, the smallest


class Drawn(NamedTuple):
    model: ClickModel
    ids_BS: NDArray[np.int64]
    dense_BD: NDArray[np.int64]
    hours_B: NDArray[np.int64]
    probability_B: NDArray[np.float64]
    clicks_B: NDArray[np.int8]


def draw(rows: int, *, seed: int = 0, hours: int = HOURS) -> Drawn:
    model = build_model(seed, slots=26, dense=13, cardinality=100_000, hours=hours)
    ids_BS = np.empty((rows, 26), np.int64)
    dense_BD = np.empty((rows, 13), np.int64)
    times_B = np.empty(rows, np.int64)
    probability_B = np.empty(rows, np.float64)
    clicks_B = np.empty(rows, np.int8)
    generate_rows(model, rows, 0, ids_BS, dense_BD, times_B, probability_B, clicks_B)
    return Drawn(model, ids_BS, dense_BD, (times_B - times_B[0]) // 3600, probability_B, clicks_B)


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    return draw(ROWS)


def exact_auc(scores_B: NDArray[np.float64], clicks_B: NDArray[np.int8]) -> float:
    """AUC by comparing ranks; ties count one half."""
    _, place_B, counts_U = np.unique(scores_B, return_inverse=True, return_counts=True)
    ranks_U = np.cumsum(counts_U) - (counts_U - 1) / 2
    clicked = int(clicks_B.sum())
    won = ranks_U[place_B][clicks_B == 1].sum() - clicked * (clicked + 1) / 2
    return float(won / (clicked * (len(clicks_B) - clicked)))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_click_rate_and_best_auc_match_the_documentation(tmp_path: Path, seed: int) -> None:
    report = generate(SampleOptions(format="criteo", rows=100_000, out=tmp_path, seed=seed), Progress())
    assert report.click_rate == pytest.approx(0.25, abs=0.01)
    assert report.best_auc is not None
    assert 0.80 < report.best_auc < 0.85
    truth = pq.read_table(tmp_path / "eval.truth.parquet")
    exact = exact_auc(truth["p"].to_numpy(), truth["label"].to_numpy())
    assert report.best_auc == pytest.approx(exact, abs=1e-4)


def test_hours_report_the_best_auc_of_the_last_hour(tmp_path: Path) -> None:
    report = generate(SampleOptions(format="csv", rows=20_000, out=tmp_path, hours=4), Progress())
    truth = pq.read_table(tmp_path / "truth" / "20260101-03.parquet")
    exact = exact_auc(truth["p"].to_numpy(), truth["label"].to_numpy())
    assert report.best_auc == pytest.approx(exact, abs=1e-4)


def test_click_rate_matches_the_true_probability_in_every_decile(drawn: Drawn) -> None:
    order_B = np.argsort(drawn.probability_B)
    for rows in [order_B, *np.array_split(order_B, 10)]:
        p = drawn.probability_B[rows]
        error = drawn.clicks_B[rows].sum() - p.sum()
        assert abs(error) < 4 * np.sqrt((p * (1 - p)).sum())


def test_ids_follow_the_power_law_of_their_slot(drawn: Drawn) -> None:
    for slot in range(26):
        size, power = drawn.model.slot_sizes_S[slot], drawn.model.slot_powers_S[slot]
        ids_N = drawn.ids_BS[:, slot]
        old_N = ids_N[(ids_N != MISSING_ID) & (ids_N < size)]
        for rank in (1, 3, 10, 100, 1000):
            if rank < size:
                # the integral of x ** -(power + 1) from 1 to rank + 1, out of that up to the size
                expected = (1 - (rank + 1.0) ** -power) / (1 - float(size) ** -power)
                found = (old_N < rank).mean()
                assert abs(found - expected) < 4.5 * np.sqrt(expected * (1 - expected) / old_N.size)
        assert old_N.max() < size


def test_slots_differ_in_size_skew_and_missing_rate(drawn: Drawn) -> None:
    sizes_S = np.sort(drawn.model.slot_sizes_S)
    assert (sizes_S[0], sizes_S[-1]) == (10, 100_000)
    steps = np.diff(np.log(sizes_S))
    assert steps.max() - steps.min() < 0.1  # log-spaced, but for rounding
    missing_S = (drawn.ids_BS == MISSING_ID).mean(axis=0)
    assert missing_S == pytest.approx(drawn.model.slot_missing_S / 65536, abs=0.005)
    assert missing_S.min() == 0
    assert missing_S.max() > 0.2


def test_dense_values_are_heavy_tailed_counts(drawn: Drawn) -> None:
    missing_D = (drawn.dense_BD == MISSING_COUNT).mean(axis=0)
    assert missing_D.min() == 0
    assert missing_D.max() > 0.1
    for field in range(13):
        values = drawn.dense_BD[drawn.dense_BD[:, field] != MISSING_COUNT, field]
        assert values.min() == (-3 if field == 1 else values.clip(0).min())
        assert values.max() > 15 * max(np.median(values), 1)


def test_every_hour_has_new_ids(drawn: Drawn) -> None:
    size, born = drawn.model.slot_sizes_S[LARGE], drawn.model.fresh_sizes_S[LARGE]
    ids_N, hours_N = drawn.ids_BS[:, LARGE], drawn.hours_B
    present = ids_N != MISSING_ID
    oldest = ids_N[present & (ids_N >= size)].min()
    assert oldest - size < 2 * born  # the first hour already knows ids of the hours before it
    for hour in range(1, HOURS):
        newborn = (ids_N >= size + (hour + 7) * born) & (hours_N == hour)
        share = newborn.sum() / (present & (hours_N == hour)).sum()
        assert share == pytest.approx(0.1, abs=0.02)
        assert not np.isin(ids_N[hours_N < hour], ids_N[newborn]).any()
        lasting = np.isin(ids_N[hours_N == hour + 1], ids_N[newborn])
        assert hour == HOURS - 1 or lasting.mean() > 0.02  # learning them pays off an hour later


def test_click_rate_swings_with_the_hour_of_day(drawn: Drawn) -> None:
    by_hour = [drawn.probability_B[drawn.hours_B == hour].mean() for hour in range(24)]
    assert np.mean(by_hour[19:23]) > np.mean(by_hour[7:11]) + 0.05


def effects(drawn: Drawn, slot: int, hours: range) -> NDArray[np.float64]:
    """Mean true logit of each of the slot's 40 most frequent ids within some hours."""
    rows = (drawn.hours_B >= hours.start) & (drawn.hours_B < hours.stop)
    logits_N = np.log(drawn.probability_B[rows] / (1 - drawn.probability_B[rows]))
    ids_N = drawn.ids_BS[rows, slot]
    return np.array([logits_N[ids_N == identity].mean() for identity in range(40)])


def test_weights_of_some_ids_drift_and_others_stay() -> None:
    drawn = draw(400_000, hours=26)
    first, last = range(0, 5), range(21, 26)
    stays = np.corrcoef(effects(drawn, LARGE, first), effects(drawn, LARGE, last))[0, 1]
    drifts = np.corrcoef(effects(drawn, DRIFTING, first), effects(drawn, DRIFTING, last))[0, 1]
    assert stays > 0.75  # what is missing to 1 is chance in the other columns
    assert drifts < 0.6


@njit
def learn(
    features_BF: NDArray[np.int64],
    clicks_B: NDArray[np.int8],
    static_from: int,
    weights_W: NDArray[np.float64],
    scores_B: NDArray[np.float64],
) -> None:
    """Logistic regression by AdaGrad, one pass; each row is scored before it is trained on."""
    squares_W = np.ones(weights_W.size)
    for b in range(clicks_B.size):
        logit = 0.0
        for f in features_BF[b]:
            logit += weights_W[f]
        p = 1.0 / (1.0 + np.exp(-logit))
        scores_B[b] = p
        if b < static_from:
            error = p - clicks_B[b]
            for f in features_BF[b]:
                squares_W[f] += error * error
                weights_W[f] -= 0.1 * error / np.sqrt(squares_W[f])


def trained_auc(drawn: Drawn, pairs: list[tuple[int, int]], *, online: bool = False) -> float:
    buckets = 1 << 22
    columns = [np.zeros(ROWS, np.int64)]
    for slot in range(26):
        columns.append((drawn.ids_BS[:, slot] + 2) * 1_000_003 + slot)
    for one, other in pairs:
        columns.append(((drawn.ids_BS[:, one] + 2) * 10_007 + drawn.ids_BS[:, other] + 2) * 7_919 + one + 50)
    for field in range(13):
        values_B = drawn.dense_BD[:, field]
        levels_B = np.floor(2 * np.log1p(np.maximum(values_B + 3, 0))).astype(np.int64)
        levels_B[values_B == MISSING_COUNT] = 99
        columns.append(levels_B * 131 + 100_000_007 * (field + 1))
    features_BF = np.stack(columns, axis=1) * 2_654_435_761 % 4_294_967_291 % buckets
    static_from = ROWS if online else int(0.8 * ROWS)
    scores_B = np.empty(ROWS)
    learn(features_BF, drawn.clicks_B, static_from, np.zeros(buckets), scores_B)
    held_out = slice(int(0.8 * ROWS), None)
    return exact_auc(scores_B[held_out], drawn.clicks_B[held_out])


@pytest.mark.slow
def test_model_can_be_trained_and_interactions_and_recent_rows_improve_it(drawn: Drawn) -> None:
    held_out = slice(int(0.8 * ROWS), None)
    best = exact_auc(drawn.probability_B[held_out], drawn.clicks_B[held_out])
    linear = trained_auc(drawn, [])
    interacting = trained_auc(drawn, [(0, 2), (6, 8), (12, 14), (18, 20)])
    online = trained_auc(drawn, [], online=True)
    assert 0.74 < linear < interacting - 0.008
    assert online > linear + 0.001
    assert interacting < best - 0.02  # the best is not trivial to reach
