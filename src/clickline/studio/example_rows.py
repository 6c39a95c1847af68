"""Example rows for the playground: frequent values, and real rows of the logs if they are on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.artifacts.from_config import storage_of
from clickline.config import Config
from clickline.data.input_blocks import reader_from_config
from clickline.data.schema import Schema, build_schema, target_fields
from clickline.errors import ClicklineError
from clickline.features import FeatureSpec
from clickline.features.raw_columns import drop_missing
from clickline.features.raw_columns import to_float32 as read_numbers
from clickline.records import IntegerColumn, NumberColumn, RawColumn, RawRows, category_text
from clickline.serving.protocols.request import multi_value_columns, number_columns
from clickline.storage.storage import Storage
from clickline.studio.file_reads import current_dataset, read_document

_EXACT = 2**53  # integers that a browser represents exactly
_TOP = 10
_MAX_BYTES = 256 * 2**20  # of a file whose beginning is read

Row = dict[str, Any]


def form_fields(features: FeatureSpec, home: Path, examples: list[Row]) -> list[dict[str, Any]]:
    """The form field of each raw column. `examples` are rows of the logs, from which example values are taken."""
    numbers, several = number_columns(features), multi_value_columns(features)
    top = _frequent(home)
    fields: dict[str, dict[str, Any]] = {}
    for field in features.fields:
        known = fields.get(field.column)
        if known is not None:
            known["fields"].append(field.name)
            continue
        frequent = top.get(field.name, [])
        statistics = field.statistics
        fields[field.column] = {
            "name": field.name,
            "kind": "dense" if field.column in numbers else "slot",
            "column": field.column,
            "multi": field.column in several,
            "top": frequent,
            "example": next(iter(frequent), None if statistics is None else round(statistics.mean, 3)),
            "fields": [field.name],
        }
    for column, form in fields.items():
        if form["kind"] == "dense":
            form["top"] = [_number(value) for value in form["top"]]
            form["example"] = 1 if form["example"] is None else _number(form["example"])
        form["example"] = next((row[column] for row in examples if column in row), form["example"])
    return [fields[column] for column in features.columns]


def rows_of_logs(config: Config, features: FeatureSpec, count: int) -> list[Row]:
    """The first rows of a log file, as a client would send them; [] if none can be read quickly."""
    try:
        path = _file(config)
        if path is None:
            return []
        data = config.data
        slots = [int(column) for column in features.columns if column.isascii() and column.isdigit()]
        schema = build_schema(data, slots, sum(column.startswith("dense_") for column in features.columns))
        reader = reader_from_config(data, Schema(features, target_fields(data), schema.dense))
        block = next(reader.blocks(path.name, path), None)
        if block is None or block.payload is None:
            return []
        return list(islice(_rows(reader.parse(block), features), count))
    except (ClicklineError, OSError, ValueError, KeyError, StopIteration):
        return []  # they are only examples


def _file(config: Config) -> Path | None:
    """The newest log file by name, if it is on this machine."""
    storage = storage_of(config)
    for pattern in (*(config.data.eval or ()), *config.data.train):
        if not Storage.is_local(pattern):
            continue
        for place in storage.list(pattern.replace("{date}", "*").replace("{hour}", "*"))[::-1]:
            path = Path(place.uri)
            if place.size <= _MAX_BYTES and path.name != config.data.donefile and place.size:
                return path
    return None


def _rows(raw: RawRows, features: FeatureSpec) -> Iterator[Row]:
    numbers = number_columns(features)
    columns = {name: raw.columns[name] for name in features.columns if name in raw.columns}
    present: dict[str, NDArray[np.bool_]] = {}
    for name, column in columns.items():
        if name in numbers:
            present[name] = ~np.isnan(read_numbers(column, name, raw.rows, features.missing)[0])
        else:
            columns[name] = drop_missing(column, features.missing)
    for b in range(raw.rows):
        row: Row = {}
        for name, column in columns.items():
            values = list(_values(column, b))
            if name in numbers:
                values = [_number(value) for value in values if present[name][b]]
            if values:
                row[name] = values[0] if column.offsets_B1 is None else values
        yield row


def _values(column: RawColumn, b: int) -> Iterator[Any]:
    offsets = column.offsets_B1
    for n in [b] if offsets is None else range(int(offsets[b]), int(offsets[b + 1])):
        if isinstance(column, NumberColumn):
            if not np.isnan(column.values_N[n]):
                yield float(category_text(float(column.values_N[n]), column.precision))
        elif isinstance(column, IntegerColumn):
            if not column.missing_N[n]:
                whole = int(column.values_N[n].astype(np.int64) if column.signed else column.values_N[n])
                yield whole if abs(whole) < _EXACT else str(whole)
        else:
            text = bytes(column.data[column.starts_N[n] : column.ends_N[n]]).decode("utf-8", "replace")
            if text := text.strip(" \t\r\n"):
                yield text


def _number(value: Any) -> float | int | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return int(number) if number.is_integer() and abs(number) < _EXACT else number


def _frequent(home: Path) -> Mapping[str, list[str]]:
    """The most frequent values of each slot, as the newest dataset or hour counted them."""
    dataset = current_dataset(home)
    folders = sorted((home / "hours").glob("*"), reverse=True)[:3] if dataset is None else [dataset]
    for folder in folders:
        try:
            slots = read_document(folder / "manifest.json")["splits"]["train"]["report"]["slots"]
            return {slot["name"]: [str(one["value"]) for one in slot["top"][:_TOP]] for slot in slots}
        except (KeyError, TypeError):
            continue  # being written, or damaged
    return {}
