"""Finds the slots of slots and paddlerec logs, which are declared nowhere but in the logs themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clickline.config import DataSection
from clickline.data.input_blocks import Inputs, map_in_order
from clickline.data.readers import open_reader
from clickline.data.readers.paddlerec_lines import dense_and_slots_in
from clickline.data.readers.slot_lines import slots_in
from clickline.data.schema import named_tokens
from clickline.machine import cores
from clickline.progress import Progress
from clickline.records import Block, SourceFile
from clickline.storage.file_cache import FileCache
from clickline.storage.storage import Storage


@dataclass(frozen=True)
class DiscoveredSlots:
    """The slots of a slots or paddlerec source, and the number of dense values in a row."""

    slots: tuple[int, ...]
    dense: int


def slots_in_block(data: DataSection, payload: NDArray[np.uint8]) -> DiscoveredSlots:
    """The slots and the number of dense values in one block of slots or paddlerec lines."""
    if data.format == "slots":
        return DiscoveredSlots(slots_in(payload, data.columns or ()), 0)
    dense, slots = dense_and_slots_in(payload, named_tokens(data))
    return DiscoveredSlots(slots, dense)


def discover_slots(
    data: DataSection,
    files: Sequence[SourceFile],
    cache: FileCache,
    storage: Storage,
    progress: Progress,
    *,
    slots: bool,
) -> DiscoveredSlots:
    """Every slot in the files if `slots` is set, and the number of dense values in their rows."""
    if data.format != "paddlerec" and not (slots and data.format == "slots"):
        return DiscoveredSlots((), 0)
    reader = open_reader(str(data.format), ())  # only splits the files into blocks
    inputs = Inputs(files, reader, cache, storage)

    def scan(number: int, block: Block) -> DiscoveredSlots:
        return slots_in_block(data, block.payload)

    dense_count = 0
    all_slots: set[int] = set()
    progress.begin("discover slots", total_bytes=inputs.uncompressed_bytes(progress) if slots else None)
    blocks = (block for _, block, _ in inputs.blocks(progress) if block.payload is not None)
    for block, found in map_in_order(scan, blocks, cores()):
        dense_count = dense_count or found.dense
        all_slots.update(found.slots)
        progress.advance(size=block.size)
        if not slots and dense_count:
            break
    progress.end()
    return DiscoveredSlots(tuple(sorted(all_slots)), dense_count)
