"""What slots and paddlerec logs hold, which only the logs themselves can tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clickline.data.input_blocks import Inputs, in_order
from clickline.data.readers import open_reader
from clickline.data.readers.paddlerec_lines import layout_in
from clickline.data.readers.slot_lines import slots_in
from clickline.progress import Progress
from clickline.records import Block, SourceFile
from clickline.storage.file_cache import Cache
from clickline.storage.storage import Storage


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
    """Every slot of the files where `slots` is set, and how many dense values their rows have."""
    if not slots and layout == "slots":
        return Discovered((), 0)
    reader = open_reader(layout, ())  # only cuts the lines; what is in them is what we look for
    inputs = Inputs(files, reader, cache, storage)

    def look(number: int, block: Block) -> tuple[int, set[int]]:
        if layout == "slots":
            return 0, set(slots_in(block.payload))
        dense, found = layout_in(block.payload)
        return dense, set(found)

    most = 0
    seen: set[int] = set()
    progress.begin("look for slots", total_bytes=inputs.text_bytes(progress) if slots else None)
    blocks = (block for _, block, _ in inputs.blocks(progress) if block.payload is not None)
    for block, (dense, found) in in_order(look, blocks, threads):
        most = most or dense
        seen |= found
        progress.advance(size=block.size)
        if not slots and most:
            break
    progress.end()
    return Discovered(tuple(sorted(seen)), most)
