"""Finds the slots of slots and paddlerec logs, which are declared nowhere but in the logs themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clickline.data.input_blocks import Inputs, map_in_order
from clickline.data.readers import open_reader
from clickline.data.readers.paddlerec_lines import dense_and_slots_in
from clickline.data.readers.slot_lines import slots_in
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


def discover_slots(
    format_name: str | None,
    files: Sequence[SourceFile],
    cache: FileCache,
    storage: Storage,
    progress: Progress,
    *,
    slots: bool,
) -> DiscoveredSlots:
    """Every slot in the files if `slots` is set, and the number of dense values in their rows."""
    if format_name != "paddlerec" and not (slots and format_name == "slots"):
        return DiscoveredSlots((), 0)
    reader = open_reader(str(format_name), ())  # only splits the files into blocks
    inputs = Inputs(files, reader, cache, storage)

    def scan(number: int, block: Block) -> tuple[int, set[int]]:
        if format_name == "slots":
            return 0, set(slots_in(block.payload))
        dense, block_slots = dense_and_slots_in(block.payload)
        return dense, set(block_slots)

    dense_count = 0
    all_slots: set[int] = set()
    progress.begin("discover slots", total_bytes=inputs.uncompressed_bytes(progress) if slots else None)
    blocks = (block for _, block, _ in inputs.blocks(progress) if block.payload is not None)
    for block, (dense, block_slots) in map_in_order(scan, blocks, cores()):
        dense_count = dense_count or dense
        all_slots |= block_slots
        progress.advance(size=block.size)
        if not slots and dense_count:
            break
    progress.end()
    return DiscoveredSlots(tuple(sorted(all_slots)), dense_count)
