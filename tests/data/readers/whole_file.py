"""Reads a file as plain Python values, to compare them with those of a simple parser."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from clickline.data.readers.reader import Reader
from clickline.records import BadRow, IntegerColumn, RawColumn, TextColumn


def read(reader: Reader, path: Path) -> tuple[list[tuple[int, dict[str, Any]]], list[BadRow]]:
    """(line, values by column) of every good row, and every bad row, in the order of the file."""
    rows: list[tuple[int, dict[str, Any]]] = []
    bad: list[BadRow] = []
    for block in reader.blocks("log", path):
        raw = reader.parse(block)
        values = {name: plain(column) for name, column in raw.columns.items()}
        assert all(len(column) == raw.rows == len(raw.lines_B) for column in values.values())
        rows += [(int(raw.lines_B[i]), {name: values[name][i] for name in values}) for i in range(raw.rows)]
        bad += sorted([*block.bad, *raw.bad], key=lambda row: row.line)
    return rows, bad


def plain(column: RawColumn) -> list[Any]:
    """Text as bytes, integers as int or None; a list per row if the column has several values per row."""
    values: list[Any]
    if isinstance(column, TextColumn):
        text = column.data.tobytes()
        values = [text[s:e] for s, e in zip(column.starts_N.tolist(), column.ends_N.tolist(), strict=True)]
    elif isinstance(column, IntegerColumn):
        pairs = zip(column.values_N.tolist(), column.missing_N.tolist(), strict=True)
        values = [None if missing else value for value, missing in pairs]
    else:
        values = column.values_N.tolist()
    if column.offsets_B1 is None:
        return values
    offsets = column.offsets_B1.tolist()
    assert offsets[0] == 0
    assert offsets[-1] == len(values)
    return [values[a:b] for a, b in pairwise(offsets)]
