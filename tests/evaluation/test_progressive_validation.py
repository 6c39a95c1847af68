"""Progressive validation: exact, small, and unchanged by a restart."""

from __future__ import annotations

import json

import numpy as np
import pytest
from naive_measures import auc_by_sorting, clicks_of

from clickline.evaluation.binary_metrics import HourlyCounts
from clickline.evaluation.progressive_validation import OPEN_HOURS, ProgressiveValidation

FIRST = 480_000


def stream(hours: int, rows: int = 60, seed: int = 0):
    """Batches in the order of time; each holds the end of one hour and the beginning of the next."""
    rng = np.random.default_rng(seed)
    batch = clicks_of(rng, hours * rows)
    hour = (FIRST + np.arange(hours * rows) // rows).astype(np.int32)
    for start in range(0, hours * rows, 37):
        yield hour[start : start + 37], *(column[start : start + 37] for column in batch)


def test_all_hours_have_metrics_though_only_the_newest_are_open():
    progressive, everything = ProgressiveValidation(), HourlyCounts()
    for batch in stream(OPEN_HOURS + 20):
        progressive.add(*batch)
        everything.add(*batch)
    assert progressive.hours() == everything.hours()
    assert len(progressive.hours()) == OPEN_HOURS + 20
    assert progressive.late == 0
    assert len({name.split("/")[0] for name in progressive.to_arrays()} - {"closed"}) == OPEN_HOURS
    shown = json.loads(json.dumps(progressive.to_json()))
    assert [hour["hour"] for hour in shown["hours"]] == list(range(FIRST, FIRST + OPEN_HOURS + 20))


@pytest.mark.parametrize("stop", [0, 1, 50, 100])
def test_restored_progressive_validation_continues_bit_identically(stop, tmp_path):
    batches = list(stream(OPEN_HOURS + 20))
    undisturbed, first = ProgressiveValidation(), ProgressiveValidation()
    for batch in batches:
        undisturbed.add(*batch)
    for batch in batches[:stop]:
        first.add(*batch)
    np.savez(tmp_path / "state.npz", allow_pickle=False, **first.to_arrays())
    with np.load(tmp_path / "state.npz", allow_pickle=False) as arrays:
        second = ProgressiveValidation.from_arrays(dict(arrays))
    for batch in batches[stop:]:
        second.add(*batch)
    assert second.to_json() == undisturbed.to_json()
    for name, array in undisturbed.to_arrays().items():
        assert np.array_equal(second.to_arrays()[name], array), name


def test_rows_of_a_closed_hour_are_counted_as_late():
    progressive = ProgressiveValidation()
    for batch in stream(OPEN_HOURS + 2):
        progressive.add(*batch)
    before = progressive.hours()
    label, weight, probability = clicks_of(np.random.default_rng(1), 3)
    progressive.add(np.array([FIRST, FIRST + 1, FIRST + 1], dtype=np.int32), label, weight, probability)
    assert progressive.hours() == before
    assert progressive.late == 3
    assert ProgressiveValidation.from_arrays(progressive.to_arrays()).late == 3


def test_counts_of_workers_are_merged():
    alone, together = ProgressiveValidation(), ProgressiveValidation()
    batches = list(stream(4))
    workers = [HourlyCounts(), HourlyCounts()]
    for number, batch in enumerate(batches):
        alone.add(*batch)
        workers[number % 2].add(*batch)
    for worker in workers:
        together.merge(worker)
    for one, other in zip(together.hours(), alone.hours(), strict=True):
        assert one.metrics.auc == other.metrics.auc
        assert one.metrics.logloss == pytest.approx(other.metrics.logloss, rel=1e-12)


def test_merge_into_closed_hours_counts_as_late():
    progressive, worker = ProgressiveValidation(), HourlyCounts()
    for batch in stream(OPEN_HOURS + 1):
        progressive.add(*batch)
    label, weight, probability = clicks_of(np.random.default_rng(1), 4)
    worker.add(np.array([FIRST, FIRST, FIRST, FIRST + 5], dtype=np.int32), label, weight, probability)
    progressive.merge(worker)
    assert progressive.late == 3
    assert next(hour for hour in progressive.hours() if hour.hour == FIRST + 5).metrics.rows == 61


def test_rows_without_time_are_one_hour_that_never_closes():
    progressive = ProgressiveValidation()
    label, weight, probability = clicks_of(np.random.default_rng(2), 500)
    unknown = np.full(500, -1, dtype=np.int32)
    progressive.add(unknown, label, weight, probability)
    assert progressive.hours() == ()
    for batch in stream(OPEN_HOURS + 3):
        progressive.add(*batch)
    progressive.add(unknown, label, weight, probability)
    assert progressive.late == 0
    first = progressive.hours()[0]
    assert (first.hour, first.metrics.rows) == (-1, 1000)
    assert first.metrics.auc == pytest.approx(auc_by_sorting(label, weight, probability), abs=1e-12)
