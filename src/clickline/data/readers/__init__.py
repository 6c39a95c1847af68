"""Readers, one per format of click logs. A reader splits files into blocks and parses blocks into raw rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clickline.data.readers.custom_reader import CustomReader
from clickline.data.readers.delimited import CriteoReader, CsvReader
from clickline.data.readers.intel_tfrecord import IntelTFRecordReader
from clickline.data.readers.paddlerec_lines import CLICK_ONLY, NamedTokens, PaddleRecReader
from clickline.data.readers.parquet import ParquetReader
from clickline.data.readers.reader import BLOCK_BYTES, Reader
from clickline.data.readers.recordio import RecordIOReader
from clickline.data.readers.slot_lines import SlotReader
from clickline.data.readers.tfrecord import TFRecordReader

__all__ = ["CustomReader", "ParquetReader", "Reader", "RecordIOReader", "open_reader"]


def open_reader(
    log_format: str | Path,
    wanted: Sequence[str],
    *,
    delimiter: str = ",",
    header: bool = True,
    columns: Sequence[str] = (),
    slots: Sequence[int] = (),
    dense: int = 0,
    modulo: int | None = None,
    named: NamedTokens = CLICK_ONLY,
    block_bytes: int = BLOCK_BYTES,
) -> Reader:
    """The reader of a format, given by its name or by the path of a custom reader."""
    columns_wanted = tuple(wanted)
    if isinstance(log_format, Path):
        return CustomReader(log_format, columns_wanted, block_bytes=block_bytes)
    if log_format == "criteo":
        return CriteoReader(block_bytes=block_bytes)
    if log_format == "csv":
        return CsvReader(
            delimiter=delimiter,
            header=header,
            columns=columns,
            wanted=columns_wanted,
            block_bytes=block_bytes,
        )
    if log_format == "slots":
        return SlotReader(slots=slots, columns=columns, modulo=modulo, block_bytes=block_bytes)
    if log_format == "paddlerec":
        return PaddleRecReader(dense=dense, slots=slots, named=named, modulo=modulo, block_bytes=block_bytes)
    if log_format == "parquet":
        return ParquetReader(columns_wanted, block_bytes=block_bytes)
    if log_format == "recordio":
        return RecordIOReader(columns_wanted, block_bytes=block_bytes)
    if log_format == "tfrecord":
        return TFRecordReader(columns_wanted, block_bytes=block_bytes)
    if log_format == "intel_tfrecord":
        return IntelTFRecordReader(block_bytes=block_bytes)
    raise ValueError(f"{log_format!r} is not a log format")
