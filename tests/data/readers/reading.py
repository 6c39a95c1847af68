"""Reads a whole file as plain Python values that a test can compare."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from clickline.data.readers.reader import Reader
from clickline.records import BadRow, IntegerColumn, NumberColumn, RawColumn, RawRows, TextColumn

Rows = dict[int, dict[str, list[Any]]]  # by line: the values of each column, None for a missing one


def values(column: RawColumn) -> list[Any]:
    """All values of a column in order."""
    if isinstance(column, TextColumn):
        spans = zip(column.starts_N.tolist(), column.ends_N.tolist(), strict=True)
        return [column.data[start:end].tobytes() or None for start, end in spans]
    if isinstance(column, NumberColumn):
        return [None if math.isnan(number) else number for number in column.values_N.tolist()]
    assert isinstance(column, IntegerColumn)
    numbers = column.values_N.view("int64") if column.signed else column.values_N
    pairs = zip(numbers.tolist(), column.missing_N.tolist(), strict=True)
    return [None if missing else number for number, missing in pairs]


def by_row(rows: RawRows) -> list[dict[str, list[Any]]]:
    """The values of each row; a missing value and an empty list are both []."""
    table: list[dict[str, list[Any]]] = [{} for _ in range(rows.rows)]
    for name, column in rows.columns.items():
        flat = values(column)
        if column.offsets_B1 is None:
            assert len(flat) == rows.rows
            lists = [[value] for value in flat]
        else:
            edges = column.offsets_B1.tolist()
            assert edges[0] == 0
            assert edges[-1] == len(flat)
            lists = [flat[a:b] for a, b in pairwise(edges)]
        for row, found in zip(table, lists, strict=True):
            row[name] = [] if found == [None] else found
    return table


def read_all(reader: Reader, path: Path) -> tuple[Rows, list[BadRow]]:
    """Rows by line number, and everything that was bad."""
    found: Rows = {}
    bad: list[BadRow] = []
    for block in reader.blocks(path.name, path):
        assert block.file == path.name
        rows = reader.parse(block)
        bad += [*block.bad, *rows.bad]
        lines = rows.lines_B.tolist()
        assert lines == sorted(lines)
        assert len(lines) == rows.rows
        assert rows.columns  # also when there are no rows
        for line, row in zip(lines, by_row(rows), strict=True):
            assert line not in found
            found[line] = row
    return found, bad


def numbered(rows: list[Mapping[str, Any]]) -> Rows:
    """Rows as `read_all` gives them when nothing is wrong."""
    return {line: {name: list(values) for name, values in row.items()} for line, row in enumerate(rows, 1)}
