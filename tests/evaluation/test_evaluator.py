"""Scoring and evaluating in one pass: independent of how rows are split; importance; custom metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_measures import auc_by_sorting, sigmoid

from clickline.evaluation import evaluator as module
from clickline.evaluation.evaluator import evaluate_rows, in_blocks
from clickline.evaluation.importance import ImportanceCounts
from clickline.features import DenseField, FeatureSpec, SlotField
from clickline.records import EncodedRows, LabelledRows, SlotIds

FEATURES = FeatureSpec(
    (DenseField("x", "x", "none"), DenseField("noise", "noise", "none")),
    (SlotField("s", "s", 1), SlotField("many", "many", 2, multi=True)),
)


def made(rows: int, seed: int = 0) -> LabelledRows:
    """The click follows x and s; `noise` is nothing and `many` is noise in lists of 0 to 2."""
    rng = np.random.default_rng(seed)
    dense_DB = rng.normal(size=(2, rows)).astype(np.float32)
    s = rng.integers(0, 5, rows).astype(np.uint64)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 3, rows))]).astype(np.int64)
    many = rng.integers(0, 9, offsets[-1]).astype(np.uint64)
    label = (rng.random(rows) < sigmoid(dense_DB[0] + s - 3)).astype(np.float32)
    hour = (480_000 + np.arange(rows) // 1000).astype(np.int32)
    ones = np.ones(rows, dtype=np.uint32)
    encoded = EncodedRows(rows, dense_DB, (SlotIds(s), SlotIds(many, offsets)))
    return LabelledRows(label, ones.astype(np.float32), ones, label.astype(np.uint32), hour, encoded)


def score(rows: LabelledRows) -> np.ndarray:
    return sigmoid(rows.encoded.dense_DB[0] + rows.encoded.slots[0].ids_N - 3.0).astype(np.float32)


def score_by_batch(rows: LabelledRows) -> np.ndarray:
    """As a network's: the last bit of a row's score depends on which rows it stands with."""
    return np.nextafter(score(rows), np.float32(rows.rows % 2), dtype=np.float32)


def pieces(rows: LabelledRows, cuts: list[int]) -> Iterator[LabelledRows]:
    places = [0, *sorted(min(cut, rows.rows) for cut in cuts), rows.rows]
    return (rows.slice(start, stop) for start, stop in pairwise(places))


@given(cuts=st.lists(st.integers(0, 100), max_size=6), size=st.integers(1, 120))
def test_blocks_keep_rows_and_their_order(cuts, size):
    rows = made(100)
    blocks = list(in_blocks(pieces(rows, cuts), size))
    assert [block.rows for block in blocks] == [size] * (100 // size) + [100 % size] * (100 % size > 0)
    for name in ("label_B", "weight_B", "impression_B", "click_B", "event_hour_B"):
        assert np.array_equal(np.concatenate([getattr(block, name) for block in blocks]), getattr(rows, name))
    for s in (0, 1):
        together = np.concatenate([block.encoded.slots[s].ids_N for block in blocks])
        assert np.array_equal(together, rows.encoded.slots[s].ids_N)
    assert np.array_equal(
        np.concatenate([block.encoded.dense_DB for block in blocks], axis=1), rows.encoded.dense_DB
    )


def test_metrics_do_not_depend_on_how_rows_are_split(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_ROWS", 501)
    rows = made(3000)
    whole = evaluate_rows(score_by_batch, [rows], slots={"s": 0, "many": 1})
    parted = evaluate_rows(score_by_batch, pieces(rows, [1, 17, 500, 501, 2400]), slots={"s": 0, "many": 1})
    assert parted == whole
    assert [hour.metrics.rows for hour in whole.hours] == [1000, 1000, 1000]
    assert whole.total.auc == auc_by_sorting(
        rows.label_B, rows.weight_B, np.concatenate([score_by_batch(b) for b in in_blocks([rows], 501)])
    )
    assert sum(one.metrics.rows for one in whole.slices["s"]) == 3000


def test_evaluation_without_rows_is_empty():
    found = evaluate_rows(score, [])
    assert found.total.auc is None
    assert "there are no rows" in found.total.notes[0]


def test_custom_metrics_get_all_rows_once():
    rows = made(3000)
    calls = []

    def gap(label_N, probability_N, weight_N):
        calls.append(len(label_N))
        return float(abs(np.average(probability_N - label_N, weights=weight_N)))

    found = evaluate_rows(score, pieces(rows, [1000]), custom_metrics={"gap": gap})
    assert calls == [3000]
    assert found.custom == {"gap": pytest.approx(abs(float(np.mean(score(rows) - rows.label_B))), rel=1e-5)}
    assert found.to_json()["own"] == found.custom


def importance_of(rows, block, seed=0):
    counts = ImportanceCounts(FEATURES, seed)
    for part in in_blocks([rows], block):
        counts.add(score, part)
    return counts.result(evaluate_rows(score, [rows]).total)


def test_importance_is_the_auc_lost_when_a_field_is_shuffled():
    rows = made(4000)
    found = importance_of(rows, 1024)
    assert [one.name for one in found[:2]] == ["s", "x"]
    assert {one.name: one.lost for one in found[2:]} == {"many": 0, "noise": 0}  # the score does not use them
    worth = {one.name: one for one in found}
    base = auc_by_sorting(rows.label_B, rows.weight_B, score(rows))
    # With s cut loose from the row, what is left is what x alone can do, made worse by the noise of s.
    alone = auc_by_sorting(rows.label_B, rows.weight_B, sigmoid(rows.encoded.dense_DB[0]))
    assert worth["s"].auc < alone < base
    assert worth["s"].lost == base - worth["s"].auc
    assert worth["s"].lost > 0.1 and worth["x"].lost > 0.05
    assert worth["x"].kind == "dense" and worth["s"].kind == "slot"
    assert worth["x"].error == 0  # as many scores as rows: exact
    assert json.loads(json.dumps(found[0].to_json()))["name"] == "s"


def test_importance_depends_only_on_the_seed():
    rows = made(2000)
    assert importance_of(rows, 512) == importance_of(rows, 512)
    assert importance_of(rows, 512) != importance_of(rows, 512, seed=1)


def test_shuffling_does_not_change_the_input_rows():
    rows = made(500)
    before = (rows.encoded.dense_DB.copy(), [slot.ids_N.copy() for slot in rows.encoded.slots])
    ImportanceCounts(FEATURES).add(score, rows)
    assert np.array_equal(before[0], rows.encoded.dense_DB)
    for ids, slot in zip(before[1], rows.encoded.slots, strict=True):
        assert np.array_equal(ids, slot.ids_N)


def test_importance_of_a_single_class_is_empty():
    rows = made(50)
    rows.label_B[:] = 0
    assert importance_of(rows, 16) == ()
