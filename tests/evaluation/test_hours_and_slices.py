"""Metrics by hour and by the most frequent values of a slot; rolling metrics."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_measures import auc_by_sorting, clicks_of, columns, logloss_by_rows

from clickline.errors import ClicklineError
from clickline.evaluation import binary_metrics
from clickline.evaluation.binary_metrics import HOUR_LIMIT, HourlyCounts, MetricCounts, hour_to_utc
from clickline.evaluation.evaluator import Evaluator
from clickline.evaluation.rolling_metrics import RollingMetrics
from clickline.evaluation.slices import SLICE_LIMIT, SliceCounts
from clickline.records import SlotIds


def measured(limit, batch, rows):
    counts = MetricCounts(limit)
    counts.add(*(column[rows] for column in batch))
    return counts.metrics()


@pytest.mark.parametrize("size", [1000, 7, 1])
def test_hour_metrics_equal_those_of_its_rows_alone(size):
    rng = np.random.default_rng(20)
    batch = clicks_of(rng, 1000)
    hour = rng.choice(np.array([-1, 480_000, 480_001, 480_003], dtype=np.int32), 1000)
    left, right = HourlyCounts(), HourlyCounts()
    for number, start in enumerate(range(0, 1000, size)):
        part = slice(start, start + size)
        (left if number % 2 else right).add(hour[part], *(column[part] for column in batch))
    left.merge(right)
    found = left.hours()
    assert [one.hour for one in found] == [-1, 480_000, 480_001, 480_003]
    for one in found:
        alone = measured(HOUR_LIMIT, batch, hour == one.hour)
        assert one.metrics.rows == alone.rows
        for name in ("auc", "logloss", "calibration"):
            assert getattr(one.metrics, name) == pytest.approx(getattr(alone, name), rel=1e-9)
    assert [one.to_json()["utc"] for one in found[:2]] == [None, "2024-10-04T00"]


def test_rows_without_time_give_no_hours():
    hourly = HourlyCounts()
    hourly.add(np.full(2, -1, dtype=np.int32), *columns([1, 0], [1, 1], [0.4, 0.3]))
    assert hourly.hours() == ()
    assert HourlyCounts().hours() == ()


def test_restored_hourly_counts_continue_bit_identically():
    rng = np.random.default_rng(21)
    hour = np.repeat(np.array([7, 8, -1], dtype=np.int32), 400)
    straight = HourlyCounts()
    straight.add(hour, *clicks_of(rng, 1200))
    restored = HourlyCounts.from_arrays(straight.to_arrays())
    more = clicks_of(rng, 1200)
    for hourly in (straight, restored):
        hourly.add(hour, *more)
    assert restored.hours() == straight.hours()


def test_hour_with_many_scores_has_auc_within_1e_4():
    batch = clicks_of(np.random.default_rng(22), 300_000)
    hourly = HourlyCounts()
    hourly.add(np.zeros(300_000, dtype=np.int32), *batch)
    (one,) = hourly.hours()
    assert 0 < abs(one.metrics.auc - auc_by_sorting(*batch)) <= one.metrics.auc_error < 1e-4


# ── slices ─────────────────────────────────────────────────────────────────────────────────────


def slices_of(top, ids, batch, size=100, slot=SlotIds):
    counts = SliceCounts(top)
    for start in range(0, len(ids), size):
        part = slice(start, start + size)
        counts.add(slot(ids[part]), *(column[part] for column in batch))
    return counts


def test_top_slices_equal_metrics_of_their_rows_alone():
    rng = np.random.default_rng(23)
    batch = clicks_of(rng, 20_000)
    batch[1][:] = rng.integers(1, 4, 20_000)
    ids = rng.choice(np.array([3, 1 << 63, 5, 7], dtype=np.uint64), 20_000, p=[0.1, 0.5, 0.35, 0.05])
    found = slices_of(3, ids, batch).slices()
    assert [one.id for one in found] == [1 << 63, 5, 3]
    for one in found:
        assert one.missed == 0
        assert one.metrics == measured(SLICE_LIMIT, batch, ids == np.uint64(one.id))
    json.dumps([one.to_json() for one in found], allow_nan=False)


def test_frequent_values_are_found_among_many_with_a_bound_on_missed_rows():
    rng = np.random.default_rng(24)
    rows = 300_000
    batch = clicks_of(rng, rows)
    rare = rng.integers(1000, 1 << 62, rows, dtype=np.uint64)
    heavy = rng.integers(0, 5, rows).astype(np.uint64)
    ids = np.where(rng.random(rows) < 0.3, heavy, rare)
    ids[:150_000][ids[:150_000] == 4] = 0  # 4 comes late: it was not followed from the first row on
    counts = slices_of(5, ids, batch, size=10_000)
    found = {one.id: one for one in counts.slices()}
    assert set(found) == {0, 1, 2, 3, 4}
    for id, one in found.items():
        true = float((ids == id).sum())
        assert one.metrics.impressions <= true <= one.metrics.impressions + one.missed
    assert found[0].missed == 0 and found[4].missed > 0
    assert len(counts._counts) <= 5 * 8


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=60), min_size=2, max_size=4))
def test_merged_slices_bound_their_missed_rows(parts):
    total = SliceCounts(top=1)
    for part in parts:
        piece = SliceCounts(top=1)
        rows = len(part)
        piece.add(SlotIds(np.array(part, dtype=np.uint64)), *columns([0] * rows, [1] * rows, [0.5] * rows))
        total.merge(piece)
    every = [id for part in parts for id in part]
    total.slices()
    for id, counts in total._counts.items():
        assert counts.impressions <= every.count(id) <= counts.impressions + total._missed[id]
    for id in set(every):
        if every.count(id) > len(every) / 8:
            assert id in total._counts


def test_multi_valued_row_counts_once_per_value():
    slot = SlotIds(np.array([1, 2, 1, 2, 2], dtype=np.uint64), np.array([0, 3, 3, 5]))
    counts = SliceCounts()
    counts.add(slot, *columns([1, 0, 0], [1, 10, 3], [0.9, 0.5, 0.1]))
    found = {one.id: one.metrics for one in counts.slices()}
    assert {id: (one.rows, one.impressions, one.clicks) for id, one in found.items()} == {
        1: (1, 1, 1),
        2: (2, 4, 1),
    }


def test_caller_may_reuse_its_arrays():
    counts = SliceCounts()
    ids, (label, weight, score) = np.array([1, 2], dtype=np.uint64), columns([1, 0], [1, 1], [0.5, 0.5])
    counts.add(SlotIds(ids), label, weight, score)
    ids[:], weight[:] = 9, 7
    assert [(one.id, one.metrics.impressions) for one in counts.slices()] == [(1, 1), (2, 1)]


# ── the whole evaluation, and the live window ──────────────────────────────────────────────────


def test_merged_evaluations_equal_one_over_all_rows():
    rng = np.random.default_rng(25)
    batch = clicks_of(rng, 4000)
    hour = np.repeat(np.array([10, 11], dtype=np.int32), 2000)
    ids = rng.integers(0, 3, 4000).astype(np.uint64)

    def evaluated(*parts):
        total = Evaluator(("C1",), top=2)
        for part in parts:
            piece = Evaluator(("C1",), top=2)
            piece.add(
                *(column[part] for column in batch),
                hour[part],
                {"C1": SlotIds(ids[part]), "C2": SlotIds(ids[part])},
            )
            total.merge(piece)
        return total.evaluation()

    whole, halves = evaluated(slice(0, 4000)), evaluated(slice(0, 1500), slice(1500, 4000))
    assert halves.total.auc == pytest.approx(whole.total.auc, rel=1e-12)
    assert [one.hour for one in halves.hours] == [10, 11]
    assert [one.id for one in halves.slices["C1"]] == [one.id for one in whole.slices["C1"]]
    document = json.loads(json.dumps(halves.to_json(), allow_nan=False))
    assert document["auc"] == halves.total.auc
    assert [one["hour"] for one in document["hours"]] == [10, 11]
    assert len(document["slices"]["C1"]) == 2 and document["slices"]["C1"][0]["missed"] == 0


@pytest.mark.parametrize("size", [1, 30, 100, 250])
def test_rolling_metrics_cover_only_the_last_rows(size):
    batch = clicks_of(np.random.default_rng(26), 1000)
    window = RollingMetrics(rows=100)
    for start in range(0, 1000, size):
        window.add(*(column[start : start + size] for column in batch))
    last = tuple(column[-100:] for column in batch)
    auc, logloss = window.measure()
    assert auc == pytest.approx(auc_by_sorting(*last), abs=1e-12)
    assert logloss == pytest.approx(logloss_by_rows(*(column.tolist() for column in last)), rel=1e-9)


def test_rolling_metrics_without_rows_or_with_one_class_are_none():
    window = RollingMetrics()
    assert window.measure() == (None, None)
    window.add(*columns([0], [1], [0.5]))
    auc, logloss = window.measure()
    assert auc is None and logloss == pytest.approx(np.log(2))
    window.add(*columns([0], [1], [np.nan]))
    with pytest.raises(ClicklineError, match="got the probability nan"):
        window.measure()


def test_hours_of_wrong_times_are_merged(monkeypatch):
    """Past the bound, hours with the fewest rows become rows of unknown time; no row is lost."""
    monkeypatch.setattr(binary_metrics, "MAX_HOURS", 40)
    counted, other = HourlyCounts(), HourlyCounts()
    rng = np.random.default_rng(0)
    for step in range(200):
        for one, shift in ((counted, 0), (other, 10_000)):
            hours = np.concatenate((np.full(30, 500 + step % 10), [1000 + shift + step])).astype(np.int32)
            label, score = rng.integers(0, 2, 31).astype(np.float32), rng.random(31, dtype=np.float32)
            one.add(hours, label, np.ones(31, np.float32), score)
            assert len(one.hours()) <= 41
    counted.merge(other)
    found = {hour.hour: hour.metrics.rows for hour in counted.hours()}
    assert len(found) <= 41
    assert {hour: found[hour] for hour in range(500, 510)} == dict.fromkeys(range(500, 510), 2 * 20 * 30)
    assert sum(found.values()) == 2 * 200 * 31


@pytest.mark.parametrize("hour", [2**31 - 1, 10**9, 70_389_528])
def test_hour_past_year_9999_has_no_text(hour):
    counted = HourlyCounts()
    counted.add(np.full(2, hour, np.int32), *(np.ones(2, np.float32),) * 2, np.full(2, 0.5, np.float32))
    (found,) = counted.hours()
    assert found.to_json()["utc"] is None
    assert hour_to_utc(490_896) == "2026-01-01T00"
