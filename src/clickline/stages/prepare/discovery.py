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
from clickline.features.encoder import numbers
from clickline.progress import Progress
from clickline.readers import Reader, open_reader
from clickline.readers.paddlerec import layout_in
from clickline.readers.slots import slots_in
from clickline.records import Block, SourceFile
from clickline.stages.prepare.shards import Inputs
from clickline.stages.prepare.statistics import Numbers
from clickline.storage.cache import Cache

__all__ = ["Discovered", "discover", "measure"]

Result = TypeVar("Result")


@dataclass(frozen=True)
class Discovered:
    """What a slots or paddlerec source holds."""

    slots: tuple[int, ...]
    dense: int


def discover(
    layout: str, files: Sequence[SourceFile], cache: Cache, threads: int, progress: Progress, *, slots: bool
) -> Discovered:
    """Every slot of the training data where `slots` is set, and how many dense values its rows have."""
    reader: Reader = open_reader(layout, ())  # only cuts the lines; what is in them is what we look for
    inputs = Inputs(files, reader, cache)
    if not slots and layout == "slots":
        return Discovered((), 0)

    def look(block: Block) -> tuple[int, set[int]]:
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

    def look(block: Block) -> tuple[int, dict[str, Numbers]]:
        raw = inputs.reader.parse(block)
        found = {}
        for column in columns:
            values_B, _ = numbers(raw.columns[column], column, raw.rows)
            found[column] = Numbers.of(values_B)
        return raw.rows, found

    progress.begin("measure train", total_bytes=inputs.text_bytes(progress))
    blocks = (block for _, block, _ in inputs.blocks(progress) if block.payload is not None)
    for block, (rows, found) in _in_order(look, blocks, threads):
        for column in columns:
            totals[column].merge(found[column])
        progress.advance(rows=rows, size=block.size)
    progress.end()
    return features.with_statistics(
        {
            field.name: totals[field.column].statistics(field.buckets if isinstance(field, SlotField) else 0)
            for field in features.fields
            if field.needs_statistics
        }
    )


def _in_order(
    work: Callable[[Block], Result], blocks: Iterator[Block], threads: int
) -> Iterator[tuple[Block, Result]]:
    """`work` on every block, on all cores, results in the order of the blocks: sums come out the same."""
    pool = ThreadPoolExecutor(threads)
    waiting: deque[tuple[Block, Future[Result]]] = deque()
    try:
        for block in blocks:
            waiting.append((block, pool.submit(work, block)))
            if len(waiting) > 2 * threads:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
