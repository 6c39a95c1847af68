"""Drift: the index matches its definition, the largest shifts, and samples that do not depend on batches."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clickline.evaluation.drift import TOP_VALUES, RowSample, drift
from clickline.features import DenseField, FeatureSpec, FieldStatistics, SlotField
from clickline.records import EncodedRows, LabelledRows, SlotIds

SLOT = SlotField("s", "s", 1)
FEATURES = FeatureSpec((), (SLOT,))


def rows_of(ids=(), dense=(), features=FEATURES, offsets=None) -> LabelledRows:
    count = len(dense) if len(dense) else (len(ids) if offsets is None else len(offsets) - 1)
    column = np.zeros(count, dtype=np.float32)
    slots = ()
    if features.slots:
        places = None if offsets is None else np.array(offsets, dtype=np.int64)
        slots = (SlotIds(np.array(ids, dtype=np.uint64), places),)
    dense_DB = np.array([dense] if features.dense else [], dtype=np.float32).reshape(
        len(features.dense), count
    )
    whole = np.arange(count, dtype=np.uint32)
    return LabelledRows(
        column, column, whole, whole, whole.astype(np.int32), EncodedRows(count, dense_DB, slots)
    )


def psi(train: Counter, eval: Counter) -> float:
    bins = train.keys() | eval.keys()
    of_train, of_eval = (sum(counts.values()) + 0.5 * len(bins) for counts in (train, eval))
    total = 0.0
    for one in bins:
        a, b = (train[one] + 0.5) / of_train, (eval[one] + 0.5) / of_eval
        total += (b - a) * math.log(b / a)
    return total


ids = st.lists(st.integers(0, 80).map(lambda n: SLOT.missing_id if n == 0 else n), min_size=1, max_size=300)


@given(ids, ids)
def test_slot_bins_are_top_values_others_and_missing(train, eval):
    (found,) = drift(FEATURES, rows_of(train), rows_of(eval), {})
    counts = Counter(one for one in train if one != SLOT.missing_id)
    heaviest = sorted(counts, key=lambda one: (-counts[one], one))[:TOP_VALUES]
    known = {*heaviest, SLOT.missing_id}

    def binned(values: list[int]) -> Counter:
        return Counter(one if one in known else "rest" for one in values)

    assert found.psi == pytest.approx(psi(binned(train), binned(eval)), abs=1e-12)
    assert found.psi >= 0
    told = {"(all others)": "rest", "(missing)": SLOT.missing_id}
    for one in found.top:
        key = told[one.value] if one.value in told else int(one.value, 16)
        assert one.train == pytest.approx(binned(train)[key] / len(train))
        assert one.eval == pytest.approx(binned(eval)[key] / len(eval))


def test_largest_shift_comes_first_with_its_name():
    train, eval = [1] * 500 + [2] * 400 + [3] * 100, [1] * 500 + [2] * 100 + [3] * 400
    (found,) = drift(FEATURES, rows_of(train), rows_of(eval), {"s": {2: "two"}})
    assert [one.value for one in found.top] == ["two", f"{3:016x}", f"{1:016x}"]
    assert (found.top[0].train, found.top[0].eval) == (0.4, 0.1)
    assert json.loads(json.dumps(found.to_json()))["top"][0] == {"value": "two", "train": 0.4, "eval": 0.1}


def test_same_rows_have_no_drift_and_new_values_do():
    same = list(range(1, 40)) * 30
    (found,) = drift(FEATURES, rows_of(same), rows_of(same), {})
    assert found.psi == 0
    (other,) = drift(FEATURES, rows_of(same), rows_of([one + 100 for one in same]), {})
    assert other.psi > 5
    assert other.top[0].value == "(all others)"
    assert (other.top[0].train, other.top[0].eval) == (0.0, 1.0)


def test_all_values_of_multi_valued_slots_count():
    train = rows_of([1, 1, 2], offsets=[0, 2, 3])
    (found,) = drift(FEATURES, train, rows_of([1, 2, 2, 2], offsets=[0, 1, 4]), {})
    assert found.psi == pytest.approx(psi(Counter({1: 2, 2: 1}), Counter({1: 1, 2: 3})))


def numbers(transform="none", statistics=None) -> FeatureSpec:
    return FeatureSpec((DenseField("x", "x", transform, statistics),), ())


def test_dense_field_bins_are_train_deciles_and_zero():
    features, rng = numbers(), np.random.default_rng(1)
    train = rng.normal(size=2000).astype(np.float32)
    train[:300] = 0
    eval = rng.normal(0.5, 1, size=1000).astype(np.float32)
    (found,) = drift(
        features, rows_of(dense=train, features=features), rows_of(dense=eval, features=features), {}
    )
    some = np.sort(train[train != 0])
    edges = [some[n * some.size // 10] for n in range(1, 10)]

    def binned(values) -> Counter:
        return Counter("zero" if v == 0 else sum(v >= edge for edge in edges) for v in values)

    assert found.psi == pytest.approx(psi(binned(train), binned(eval)))
    assert found.psi > 0.2
    assert (found.name, found.kind) == ("x", "dense")
    assert "0 or missing" in {one.value for one in found.top}
    assert found.to_json()["top"][0].keys() == {"range", "train", "eval"}


def test_nearly_constant_dense_field_has_fewer_bins():
    features = numbers()
    train, eval = [7.0] * 99 + [8.0], [7.0] * 50 + [9.0] * 50
    (found,) = drift(
        features, rows_of(dense=train, features=features), rows_of(dense=eval, features=features), {}
    )
    assert {one.value for one in found.top} == {"7 and more"}
    assert found.psi == 0
    (empty,) = drift(
        features,
        rows_of(dense=[0.0] * 9, features=features),
        rows_of(dense=[0.0, 1.0], features=features),
        {},
    )
    assert [one.value for one in empty.top] == ["any other", "0 or missing"]


@pytest.mark.parametrize(
    ("transform", "statistics", "encode", "zero"),
    [
        ("log1p", None, np.log1p, "0 or missing"),
        ("minmax", FieldStatistics(9, 10.0, 110.0, 50.0, 5.0), lambda x: (x - 10) / 100, "10 or missing"),
        ("zscore", FieldStatistics(9, 10.0, 110.0, 50.0, 5.0), lambda x: (x - 50) / 5, "50 or missing"),
        (
            "robust",
            FieldStatistics(9, 10.0, 110.0, 50.0, 5.0, median=45.0, spread=8.0),
            lambda x: np.sign(x - 45) * np.log1p(np.abs(x - 45) / 8),
            "45 or missing",
        ),
    ],
)
def test_dense_ranges_are_in_raw_units(transform, statistics, encode, zero):
    features = numbers(transform, statistics)
    raw = np.repeat([20.0, 40.0, 80.0], 40)
    train = encode(raw).astype(np.float32)
    eval = np.where(raw == 40.0, np.float32(0), train)
    (found,) = drift(
        features, rows_of(dense=train, features=features), rows_of(dense=eval, features=features), {}
    )
    assert {one.value for one in found.top} == {"20 to 40", "40 to 80", "80 and more", zero}


def test_drift_without_rows_is_empty():
    assert drift(FEATURES, rows_of([1]), rows_of([]), {}) == ()
    assert drift(FEATURES, rows_of([]), rows_of([1]), {}) == ()


@given(
    count=st.integers(0, 400),
    most=st.integers(1, 50),
    cuts=st.lists(st.integers(0, 400), max_size=5),
)
def test_row_sample_is_even_bounded_and_independent_of_batches(count, most, cuts):
    rows = rows_of(range(count))
    sample = RowSample(most)
    for start, stop in pairwise([0, *sorted(min(cut, count) for cut in cuts), count]):
        sample.add(rows.slice(start, stop))
    found = sample.rows()
    if not count:
        assert found is None
        return
    kept = found.impression_B.tolist()
    stride = 1
    while -(-count // stride) > most:
        stride *= 2
    assert kept == list(range(0, count, stride))
    assert found.encoded.slots[0].ids_N.tolist() == kept
