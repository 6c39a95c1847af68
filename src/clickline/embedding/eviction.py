"""Eviction: counters decay, and ids that are not worth their memory are dropped.

An id's score is `click_weight · clicks + nonclick_weight · (impressions - clicks)`, on counters that `decay`
shrinks from hour to hour or from day to day.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clickline.embedding.index import CANDIDATE, address_of, row_in
from clickline.embedding.row_layout import CLICKS, GENERATION, HOUR, IMPRESSIONS
from clickline.embedding.table_view import TableView, remove_entry
from clickline.kernel_intrinsics import Int, f64_at, i32_at, i64_at, prefetch, u32_at, u64_at
from clickline.numba_cache import njit

_AHEAD = 16


@dataclass(frozen=True)
class Eviction:
    """Which ids are evicted: those with a score below `threshold`, and those idle for over `max_idle_hours`."""

    threshold: float = 0.0
    max_idle_hours: int | None = None
    click_weight: float = 1.0
    nonclick_weight: float = 0.1


@njit(cache=True, nogil=True)
def decay_shards(first: Int, last: Int, table: TableView, rate: float) -> None:
    """Multiply the counters of all ids of the shards first … last - 1 by `rate`."""
    rows = table.rows
    for h in range(first, last):
        entries = u64_at(i64_at(table.id_index.addresses_H)[h])
        end = i64_at(table.id_index.ends_H)[h]
        for at in range(end):
            if at + _AHEAD < end and entries[at + _AHEAD] != np.uint64(0):
                prefetch(address_of(rows, row_in(entries[at + _AHEAD])))
            if entries[at] != np.uint64(0):
                address = address_of(rows, row_in(entries[at]))
                f64_at(address + IMPRESSIONS)[0] *= rate
                f64_at(address + CLICKS)[0] *= rate


@njit(cache=True, nogil=True)
def evict_shard(
    table: TableView,
    shard: Int,
    threshold: float,
    click_weight: float,
    nonclick_weight: float,
    generation: Int,
    now_hour: Int,
    oldest_hour: Int,
    remove: bool,
    ids: NDArray[np.uint64],
) -> tuple[int, int]:
    """Count the admitted ids and candidates to evict; with `remove` also evict them and list them in `ids`."""
    rows, end = table.rows, i64_at(table.id_index.ends_H)[shard]
    entries = u64_at(i64_at(table.id_index.addresses_H)[shard])
    admitted = candidates = at = 0
    while at < end:
        if at + _AHEAD < end and entries[at + _AHEAD] != np.uint64(0):
            prefetch(address_of(rows, row_in(entries[at + _AHEAD])))
        if entries[at] == np.uint64(0):
            at += 1
            continue
        row = row_in(entries[at])
        address = address_of(rows, row)
        n_impressions, n_clicks = f64_at(address + IMPRESSIONS)[0], f64_at(address + CLICKS)[0]
        hour = np.int64(i32_at(address + HOUR)[0])
        if now_hour >= 0 and hour > now_hour:  # rows may be dated up to 24 hours after their file
            hour = np.int64(now_hour)
            i32_at(address + HOUR)[0] = hour
            u32_at(address + GENERATION)[0] = generation
        score = click_weight * n_clicks + nonclick_weight * (n_impressions - n_clicks)
        if score >= threshold and (hour < 0 or hour >= oldest_hour):  # hour -1: unknown
            at += 1
            continue
        if remove:
            ids[admitted + candidates] = u64_at(address)[0]
            remove_entry(table, shard, at)  # the next entry may now be here
        else:
            at += 1
        if row >= CANDIDATE:
            candidates += 1
        else:
            admitted += 1
    return admitted, candidates
