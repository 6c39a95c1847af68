"""The first look at the training data, where the config leaves something open.

`discover` finds the slots of a slots or paddlerec source; `measure` the statistics that minmax,
zscore and quantile buckets need. Neither runs when nothing is open, and neither ever sees eval rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from clickline.features import FeatureSpec, SlotField
from clickline.features.columns import numbers, without
from clickline.progress import Progress
from clickline.readers import Reader, open_reader
from clickline.readers.paddlerec import layout_in
from clickline.readers.slots import slots_in
from clickline.records import Block, SourceFile
from clickline.stages.prepare.shards import Inputs
from clickline.stages.prepare.statistics import Numbers
from clickline.storage.cache import Cache
from clickline.storage.stores import Storage

__all__ = ["Discovered", "discover", "measure"]

Result = TypeVar("Result")


@dataclass(frozen=True)
class Discovered:
    """What a slots or paddlerec source holds."""

    slots: tuple[int, ...]
    dense: int


def discover(
    layout: str,
    files: Sequence[SourceFile],
    cache: Cache,
    storage: Storage,
    threads: int,
    progress: Progress,
    *,
    slots: bool,
) -> Discovered:
    """Every slot of the training data where `slots` is set, and how many dense values its rows have."""
    reader: Reader = open_reader(layout, ())  # only cuts the lines; what is in them is what we look for
    inputs = Inputs(files, reader, cache, storage)
    if not slots and layout == "slots":
        return Discovered((), 0)

    def look(number: int, block: Block) -> tuple[int, set[int]]:
        if layout == "slots":
            return 0, set(slots_in(block.payload))
        dense, found = layout_in(block.payload)
        return dense, set(found)

    most = 0
    seen: set[int] = set()
    progress.begin("look for slots in train", total_bytes=inputs.text_bytes(progress) if slots else None)
    blocks = (block for _, block, _ in inputs.blocks(progress) if block.payload is not None)
    for block, (dense, found) in _in_order(look, blocks, threads):
        most = most or dense
        seen |= found
        progress.advance(size=block.size)
        if not slots and most:
            break
    progress.end()
    return Discovered(tuple(sorted(seen)), most)


def measure(inputs: Inputs, features: FeatureSpec, threads: int, progress: Progress) -> FeatureSpec:
    """The features with the statistics of the training data, where any field needs them."""
    columns = features.columns_needing_statistics
    if not columns:
        return features
    totals = {column: Numbers() for column in columns}

    def look(number: int, block: Block) -> tuple[int, dict[str, Numbers]]:
        raw = inputs.reader.parse(block)
        found = {}
        for column in columns:
            values_B, _ = numbers(without(raw.columns[column], features.missing), column, raw.rows)
            found[column] = Numbers.of(values_B, number)
        return raw.rows, found

    progress.begin("measure train", total_bytes=inputs.text_bytes(progress))
    blocks = (block for _, block, _ in inputs.blocks(progress) if block.payload is not None)
    for block, (rows, found) in _in_order(look, blocks, threads):
        for column in columns:
            totals[column].merge(found[column])
        progress.advance(rows=rows, size=block.size)
    progress.end()
    known = {}
    for field in features.fields:
        if field.needs_statistics:
            buckets = field.buckets if isinstance(field, SlotField) else 0
            known[field.name] = totals[field.column].statistics(buckets)
            made = len(known[field.name].edges) + 1
            if 0 < made < buckets:
                progress.say(
                    f"{field.name}: {made} of {buckets} buckets, its values repeat too often for more"
                )
    return features.with_statistics(known)


def _in_order(
    work: Callable[[int, Block], Result], blocks: Iterator[Block], threads: int
) -> Iterator[tuple[Block, Result]]:
    """`work` on every numbered block, on all cores; results in their order, so that sums come out the same."""
    pool = ThreadPoolExecutor(threads)
    waiting: deque[tuple[Block, Future[Result]]] = deque()
    try:
        for number, block in enumerate(blocks):
            waiting.append((block, pool.submit(work, number, block)))
            if len(waiting) > 2 * threads:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
