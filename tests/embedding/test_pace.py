"""A writer that gives way to training, and stops doing so when it must."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from clickline.embedding import SlotShape, Tables, freeze, save
from clickline.embedding.throttle import Pace
from clickline.records import SlotIds

NEVER = 1e-7  # a share so small that one rest would outlast every test


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
    found = tables.gather([SlotIds(numbers)], inputs, wide, train=True)
    tables.apply(found, np.ones_like(inputs), wide)


def test_rests_are_as_long_as_the_share_asks() -> None:
    pace = Pace(0.25, lambda: False)
    pace.rest()
    work(0.02)
    began = time.monotonic()
    pace.rest()
    assert time.monotonic() - began > 0.055


@pytest.mark.parametrize("pace", [Pace(1.0, lambda: False), Pace(NEVER, lambda: True)], ids=["whole", "urgent"])  # fmt: skip
def test_no_rest_for_a_whole_core_or_when_it_is_urgent(pace: Pace) -> None:
    resting = threading.Thread(target=lambda: (pace.rest(), work(0.002), pace.rest()), daemon=True)
    resting.start()
    resting.join(30)
    assert not resting.is_alive()


def test_a_share_that_is_none_is_refused() -> None:
    tables = filled(10)
    with pytest.raises(ValueError, match=r"share of 0 of a core: above 0"):
        freeze(tables, share=0)
    freeze(tables).close()  # nothing is left open


def test_a_resting_writer_hurries_when_somebody_waits(tmp_path: Path) -> None:
    tables = filled(60_000)
    save(tables, tmp_path / "want")
    snapshot = freeze(tables, share=NEVER)
    writer = threading.Thread(target=snapshot.write, args=(tmp_path / "got",), daemon=True)
    writer.start()
    writer.join(0.2)
    assert writer.is_alive()  # it rests, and would for hours
    snapshot.hurry()
    writer.join(60)
    assert not writer.is_alive()
    assert (tmp_path / "got").read_bytes() == (tmp_path / "want").read_bytes()


def test_a_writer_does_not_rest_while_training_keeps_too_many_rows(tmp_path: Path) -> None:
    tables = filled(60_000)
    save(tables, tmp_path / "want")
    snapshot = freeze(tables, share=NEVER)
    touch(tables, 60_000)  # every row has a shadow now
    kept = tables.parts[0].shadow_bytes
    assert kept > 60_000 * 120
    writer = threading.Thread(target=snapshot.write, args=(tmp_path / "got",), daemon=True)
    writer.start()
    deadline = time.monotonic() + 60
    while tables.parts[0].shadow_bytes > kept / 2 and time.monotonic() < deadline:
        writer.join(0.01)
    assert tables.parts[0].shadow_bytes <= kept / 2
    snapshot.hurry()
    writer.join(60)
    assert (tmp_path / "got").read_bytes() == (tmp_path / "want").read_bytes()
    assert tables.parts[0].shadow_bytes == 0
