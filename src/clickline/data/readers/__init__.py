"""Readers: one per layout of click logs. A reader cuts files into blocks and blocks into raw rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clickline.data.readers.custom_reader import Custom
from clickline.data.readers.delimited import Criteo, Csv
from clickline.data.readers.paddlerec_lines import PaddleRec
from clickline.data.readers.parquet import Parquet
from clickline.data.readers.reader import BLOCK_BYTES, Reader
from clickline.data.readers.recordio import RecordIO
from clickline.data.readers.slot_lines import Slots
from clickline.data.readers.tfrecord import TFRecord

__all__ = ["Custom", "Parquet", "Reader", "RecordIO", "open_reader"]


def open_reader(
    layout: str | Path,
    wanted: Sequence[str],
    *,
    delimiter: str = ",",
    header: bool = True,
    columns: Sequence[str] = (),
    slots: Sequence[int] = (),
    dense: int = 0,
    modulo: int | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Reader:
    """The reader of a layout: a format's name, or the path of a user's own reader."""
    columns_wanted = tuple(wanted)
    if isinstance(layout, Path):
        return Custom(layout, columns_wanted, block_bytes=block_bytes)
    if layout == "criteo":
        return Criteo(block_bytes=block_bytes)
    if layout == "csv":
        return Csv(
            delimiter=delimiter,
            header=header,
            columns=columns,
            wanted=columns_wanted,
            block_bytes=block_bytes,
        )
    if layout == "slots":
        return Slots(slots=slots, modulo=modulo, block_bytes=block_bytes)
    if layout == "paddlerec":
        return PaddleRec(dense=dense, slots=slots, modulo=modulo, block_bytes=block_bytes)
    if layout == "parquet":
        return Parquet(columns_wanted, block_bytes=block_bytes)
    if layout == "recordio":
        return RecordIO(columns_wanted, block_bytes=block_bytes)
    if layout == "tfrecord":
        return TFRecord(columns_wanted, block_bytes=block_bytes)
    raise ValueError(f"{layout!r} is not a layout of logs")
