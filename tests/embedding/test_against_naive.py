"""Every optimizer and pooling trains like a naive implementation, and threads change no bit."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_tables import NaiveTables

from clickline.embedding import (
    AdaGrad,
    Adam,
    Admission,
    Ftrl,
    RowOptimizer,
    RowWiseAdaGrad,
    Sgd,
    SlotShape,
    Tables,
)
from clickline.records import SlotIds

RULES = {
    "sgd": Sgd(0.1),
    "adagrad": AdaGrad(0.1),
    "rowwise_adagrad": RowWiseAdaGrad(0.1),
    "adam": Adam(0.02),
    "ftrl": Ftrl(0.3, l1=0.02, l2=0.1),
}


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[tuple[list[SlotIds], int]]]:
    """A few batches of three slots: one id per row, then several (or none), then several again."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    vocabulary = draw(st.sampled_from([3, 20, 500]))
    batches = []
    for _ in range(draw(st.integers(1, 4))):
        rows = draw(st.integers(1, 30))
        slots = [SlotIds(rng.integers(0, vocabulary, rows).astype(np.uint64))]
        for salt in (1, 2):
            counts = rng.integers(0, 4, rows)
            offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
            ids = rng.integers(0, vocabulary, offsets[-1]).astype(np.uint64)
            slots.append(SlotIds(ids + np.uint64(salt << 40), offsets))
        batches.append((slots, rows))
    return draw(st.integers(0, 2**32)), batches


def train(
    tables: Tables, batches: list[tuple[list[SlotIds], int]], seed: int, dense: int = 2
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Train on gradients drawn from the seed; returns the network's inputs before each update."""
    rng = np.random.default_rng(seed)
    pooled = []
    for slots, rows in batches:
        inputs = np.full((rows, tables.width + dense), 7, np.float32)
        wide = np.empty(rows, np.float32)
        impressions = rng.integers(1, 4, rows).astype(np.uint32)
        clicks = rng.integers(0, 2, rows).astype(np.uint32)
        hours = rng.integers(-1, 100, rows).astype(np.int32)
        lookup = tables.gather(
            slots, inputs, wide, impressions_B=impressions, clicks_B=clicks, hours_B=hours, train=True
        )
        assert (inputs[:, tables.width :] == 7).all()
        pooled.append((inputs[:, : tables.width].copy(), wide.copy()))
        grad = rng.normal(size=inputs.shape).astype(np.float32)
        tables.apply(lookup, grad, rng.normal(size=rows).astype(np.float32), 0.5)
    return pooled


def train_naively(
    naive: NaiveTables, batches: list[tuple[list[SlotIds], int]], seed: int, dense: int = 2
) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    pooled = []
    for slots, rows in batches:
        impressions, clicks = rng.integers(1, 4, rows), rng.integers(0, 2, rows)
        naive.count(slots, impressions, clicks, rng.integers(-1, 100, rows))
        pooled.append(naive.pool(slots, rows))
        grad = rng.normal(size=(rows, pooled[-1][0].shape[1] + dense)).astype(np.float32)
        naive.apply(slots, grad, rng.normal(size=rows).astype(np.float32), 0.5)
    return pooled


@pytest.mark.parametrize(("rule", "pooling"), list(product(RULES, ["sum", "mean", "max"])))
@settings(max_examples=15, deadline=None)
@given(history=histories(), admit=st.sampled_from([1, 5]), mixed_dims=st.booleans())
def test_every_optimizer_and_pooling(
    rule: str,
    pooling: str,
    history: tuple[int, list[tuple[list[SlotIds], int]]],
    admit: int,
    mixed_dims: bool,
) -> None:
    seed, batches = history
    slots = [SlotShape("a", 9), SlotShape("b", 3 if mixed_dims else 9, pooling), SlotShape("c", 9, pooling)]  # type: ignore[arg-type]
    wide = RULES[rule] if rule != "adam" else None
    common = {"seed": 5, "init_scale": 0.3, "l2": 0.01, "admission": Admission(admit)}
    tables = Tables(slots, embedding_optimizer=RULES[rule], wide_optimizer=wide, threads=2, **common)  # type: ignore[arg-type]
    naive = NaiveTables(slots, RULES[rule], wide, **common)  # type: ignore[arg-type]
    for (inputs, wides), (want, want_wide) in zip(
        train(tables, batches, seed), train_naively(naive, batches, seed), strict=True
    ):
        np.testing.assert_allclose(inputs, want, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(wides, want_wide, rtol=2e-5, atol=2e-6)
    assert tables.size == len(naive.rows)
    assert sum(slot.ids for slot in tables.report()) == sum(
        row.vector is not None for row in naive.rows.values()
    )


def random_batches(batches: int, rows: int, vocabulary: int, seed: int) -> list[tuple[list[SlotIds], int]]:
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(batches):
        offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 5, rows))]).astype(np.int64)
        ids = (rng.integers(0, vocabulary, n).astype(np.uint64) for n in (rows, rows, int(offsets[-1])))
        one, two, many = ids
        drawn.append(
            ([SlotIds(one), SlotIds(two + np.uint64(1 << 33)), SlotIds(many << np.uint64(20), offsets)], rows)
        )
    return drawn


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
@pytest.mark.parametrize("admission", [Admission(), Admission(3)], ids=["all", "third impression"])
def test_threads_change_no_bit(rule: RowOptimizer, admission: Admission) -> None:
    batches = random_batches(6, 400, 3000, seed=1)
    results = []
    for threads in (1, 2, 3):
        tables = Tables(
            [SlotShape("a", 9), SlotShape("b", 4), SlotShape("c", 9, "mean")],
            embedding_optimizer=rule,
            seed=3,
            threads=threads,
            admission=admission,
        )
        pooled = train(tables, batches, seed=8)
        results.append(b"".join(part.tobytes() for pair in pooled for part in pair))
    assert results[0] == results[1] == results[2]


def test_an_id_that_occurs_often_gets_one_update() -> None:
    tables = Tables(
        [SlotShape("a", 2)], embedding_optimizer=AdaGrad(1.0, initial_accumulator=0.0), init_scale=0.0
    )
    ids = [SlotIds(np.full(3, 9, np.uint64))]
    inputs, wide = np.zeros((3, 2), np.float32), np.zeros(3, np.float32)
    lookup = tables.gather(ids, inputs, wide, train=True)
    tables.apply(lookup, np.array([[1, 0], [2, 0], [3, 0]], np.float32), np.zeros(3, np.float32))
    tables.gather(ids, inputs, wide, train=False)
    np.testing.assert_allclose(inputs, [[-1, 0]] * 3, atol=1e-6)  # one step of lr · 6 / √36


def test_finding_ahead_and_pooling_later_gives_the_same_result() -> None:
    batches = random_batches(8, 200, 800, seed=2)
    slots = [SlotShape("a", 9), SlotShape("b", 4), SlotShape("c", 9, "max")]
    plain = Tables(slots, seed=3, admission=Admission(2))
    want = train(plain, batches, seed=8)
    tables = Tables(slots, seed=3, admission=Admission(2))
    rng = np.random.default_rng(8)
    ahead = None
    draws = []
    for _, rows in batches:
        impressions, clicks = (
            rng.integers(1, 4, rows).astype(np.uint32),
            rng.integers(0, 2, rows).astype(np.uint32),
        )
        hours = rng.integers(-1, 100, rows).astype(np.int32)
        grad = rng.normal(size=(rows, tables.width + 2)).astype(np.float32)
        draws.append(((impressions, clicks, hours), grad, rng.normal(size=rows).astype(np.float32)))

    def find(n: int):  # type: ignore[no-untyped-def]
        (impressions, clicks, hours), *_ = draws[n]
        return tables.find(*batches[n], impressions_B=impressions, clicks_B=clicks, hours_B=hours, train=True)

    ahead = find(0)
    for n, (_, rows) in enumerate(batches):
        lookup = ahead
        inputs, wide = np.empty((rows, tables.width + 2), np.float32), np.empty(rows, np.float32)
        tables.pool(lookup, inputs, wide)
        if n + 1 < len(batches):
            ahead = find(n + 1)
        assert inputs[:, : tables.width].tobytes() == want[n][0].tobytes()
        assert wide.tobytes() == want[n][1].tobytes()
        tables.apply(lookup, draws[n][1], draws[n][2], 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i, w: (i[:, :-3], w), "at least 6 columns"),
        (lambda i, w: (i.astype(np.float64), w), "contiguous float32"),
        (lambda i, w: (i[:, ::2], w), "at least 6 columns"),
        (lambda i, w: (i, w[:-1]), "rows"),
    ],
)
def test_wrong_buffers_are_rejected(change, message) -> None:  # type: ignore[no-untyped-def]
    tables = Tables([SlotShape("a", 6)])
    inputs, wide = change(np.zeros((4, 6), np.float32), np.zeros(4, np.float32))
    with pytest.raises(ValueError, match=message):
        tables.gather([SlotIds(np.zeros(4, np.uint64))], inputs, wide, train=True)


@pytest.mark.parametrize(
    "ids",
    [
        SlotIds(np.zeros(3, np.uint64)),
        SlotIds(np.zeros(3, np.uint64), np.array([0, 1, 2, 3, 4])),
        SlotIds(np.zeros(3, np.uint64), np.array([0, 2, 1, 3, 3])),
        SlotIds(np.zeros(3, np.uint64), np.array([0, 3])),
    ],
)
def test_ids_that_do_not_match_the_rows_are_rejected(ids: SlotIds) -> None:
    tables = Tables([SlotShape("a", 6)])
    with pytest.raises(ValueError, match="slot 0"):
        tables.find([ids], 4, train=True)
    assert tables.size == 0
