"""A snapshot writer pauses for training, and stops pausing when it must."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from clickline.embedding import SlotShape, Tables, begin_snapshot, save_snapshot
from clickline.embedding.throttle import Throttle
from clickline.records import SlotIds

NEVER = 1e-7  # a share so small that one pause would outlast every test


def work(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def filled(ids: int) -> Tables:
    tables = Tables([SlotShape("a", 9)])
    touch(tables, ids)
    return tables


def touch(tables: Tables, ids: int) -> None:
    numbers = np.arange(ids, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
    inputs, wide = np.empty((ids, tables.width), np.float32), np.empty(ids, np.float32)
    lookup = tables.gather([SlotIds(numbers)], inputs, wide, train=True)
    tables.apply(lookup, np.ones_like(inputs), wide)


def test_pauses_keep_to_the_share() -> None:
    throttle = Throttle(0.25, lambda: False)
    throttle.pause()
    work(0.02)
    began = time.monotonic()
    throttle.pause()
    assert time.monotonic() - began > 0.055


@pytest.mark.parametrize("throttle", [Throttle(1.0, lambda: False), Throttle(NEVER, lambda: True)], ids=["full", "urgent"])  # fmt: skip
def test_no_pause_with_a_full_core_or_when_urgent(throttle: Throttle) -> None:
    pausing = threading.Thread(target=lambda: (throttle.pause(), work(0.002), throttle.pause()), daemon=True)
    pausing.start()
    pausing.join(30)
    assert not pausing.is_alive()


def test_a_share_of_zero_is_rejected() -> None:
    tables = filled(10)
    with pytest.raises(ValueError, match=r"share of 0 of a core: it must be above 0"):
        begin_snapshot(tables, share=0)
    begin_snapshot(tables).close()  # no snapshot is left open


def test_unthrottle_ends_a_pause(tmp_path: Path) -> None:
    tables = filled(60_000)
    save_snapshot(tables, tmp_path / "want")
    snapshot = begin_snapshot(tables, share=NEVER)
    writer = threading.Thread(target=snapshot.write, args=(tmp_path / "got",), daemon=True)
    writer.start()
    writer.join(0.2)
    assert writer.is_alive()  # it pauses, and would for hours
    snapshot.unthrottle()
    writer.join(60)
    assert not writer.is_alive()
    assert (tmp_path / "got").read_bytes() == (tmp_path / "want").read_bytes()


def test_a_writer_does_not_pause_while_too_many_rows_are_copied(tmp_path: Path) -> None:
    tables = filled(60_000)
    save_snapshot(tables, tmp_path / "want")
    snapshot = begin_snapshot(tables, share=NEVER)
    touch(tables, 60_000)  # every row is copied now
    copied = tables.parts[0].copy_on_write_bytes
    assert copied > 60_000 * 120
    writer = threading.Thread(target=snapshot.write, args=(tmp_path / "got",), daemon=True)
    writer.start()
    deadline = time.monotonic() + 60
    while tables.parts[0].copy_on_write_bytes > copied / 2 and time.monotonic() < deadline:
        writer.join(0.01)
    assert tables.parts[0].copy_on_write_bytes <= copied / 2
    snapshot.unthrottle()
    writer.join(60)
    assert (tmp_path / "got").read_bytes() == (tmp_path / "want").read_bytes()
    assert tables.parts[0].copy_on_write_bytes == 0
