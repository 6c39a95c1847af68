"""The one encoder: raw fields in, ids and floats out. Prepare and serve both come through here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.errors import DataError
from clickline.features import kernels
from clickline.features.spec import DenseField, FeatureSpec, SlotField
from clickline.records import (
    EncodedRows,
    IntegerColumn,
    NumberColumn,
    RawColumn,
    RawRows,
    SlotIds,
    TextColumn,
)

__all__ = ["Encoder", "Fault", "as_text", "equals_any", "numbers", "raw_column"]

Offsets = NDArray[np.int64]


@dataclass(frozen=True)
class Fault:
    """A value that cannot be encoded. Its row is encoded as if the value were missing."""

    row: int
    field: str
    reason: str
    detail: str


class Encoder:
    """Encodes raw rows as one `FeatureSpec` says. Holds no state: safe to share between threads."""

    def __init__(self, spec: FeatureSpec) -> None:
        self.spec = spec

    def encode(self, raw: RawRows) -> tuple[EncodedRows, list[Fault]]:
        """Ids and floats of `raw`, and the values that could not be encoded."""
        faults: list[Fault] = []
        floats: dict[str, NDArray[np.float32]] = {}  # a column can feed both a float and a bucket

        def column(field: DenseField | SlotField) -> RawColumn:
            found = raw.columns.get(field.column)
            if found is None:
                return _all_missing(raw.rows)
            return _blank(found, self.spec.missing) if self.spec.missing else found

        def number(field: DenseField | SlotField) -> NDArray[np.float32]:
            if field.column not in floats:
                floats[field.column], bad = numbers(column(field), field.name, raw.rows)
                faults.extend(bad)
            return floats[field.column]

        dense_DB = np.empty((len(self.spec.dense), raw.rows), dtype=np.float32)
        for d, field in enumerate(self.spec.dense):
            _transform(field, number(field), dense_DB[d])
        slots = []
        for slot in self.spec.slots:
            if slot.source == "log2" or slot.source == "quantiles":
                slots.append(_bucket(slot, number(slot)))
            else:
                ids, bad = _categories(slot, column(slot), raw.rows)
                slots.append(ids)
                faults.extend(bad)
        return EncodedRows(raw.rows, dense_DB, tuple(slots)), faults

    def encode_values(self, rows: Sequence[Mapping[str, Any]]) -> tuple[EncodedRows, list[Fault]]:
        """Encode rows given as Python values by column: text, numbers, None, or lists of them."""
        columns = {name: raw_column([row.get(name) for row in rows], name) for name in self.spec.columns}
        return self.encode(RawRows(len(rows), columns, np.arange(1, len(rows) + 1, dtype=np.int64)))


# ── dense ──────────────────────────────────────────────────────────────────────────────────────


def numbers(column: RawColumn, field: str, rows: int) -> tuple[NDArray[np.float32], list[Fault]]:
    """A column as float32, NaN where missing or not a number. Every path rounds text to double first."""
    faults: list[Fault] = []
    if column.offsets_B1 is not None:
        column, several = _only_value(column, column.offsets_B1)
        faults += [
            Fault(row, field, "several values", f"{field} has {n} values, one allowed") for row, n in several
        ]
    if isinstance(column, TextColumn):
        raw_B = np.empty(rows, dtype=np.float32)
        status_B = np.empty(rows, dtype=np.uint8)
        if not kernels.parse_numbers(column.data, column.starts_N, column.ends_N, raw_B, status_B):
            return raw_B, faults
        values_B = raw_B.astype(np.float64)
        for row in np.flatnonzero(status_B >= kernels.NUMBER_BAD):
            text = bytes(column.data[column.starts_N[row] : column.ends_N[row]])
            if status_B[row] == kernels.NUMBER_SLOW:
                values_B[row] = float(text)
            else:
                detail = f"{field} is {_show(text)}, a number expected"
                faults.append(Fault(int(row), field, "not a number", detail))
    elif isinstance(column, IntegerColumn):
        signed = column.values_N.view(np.int64) if column.signed else column.values_N
        values_B = np.where(column.missing_N, np.nan, signed.astype(np.float64))
    else:
        values_B = column.values_N
    with np.errstate(over="ignore"):  # what overflows is found and named below
        raw_B = values_B.astype(np.float32)
    infinite_B = np.isinf(raw_B)
    for row in np.flatnonzero(infinite_B):
        detail = f"{field} is beyond the range of a 32-bit float"
        faults.append(Fault(int(row), field, "not a number", detail))
    raw_B[infinite_B] = np.nan
    return raw_B, faults


def _transform(field: DenseField, raw_B: NDArray[np.float32], out_B: NDArray[np.float32]) -> None:
    known = field.statistics
    if field.transform == "log1p":
        kernels.signed_log1p(raw_B, out_B)
    elif field.transform == "none":
        kernels.scale(raw_B, 0.0, 1.0, -np.inf, np.inf, out_B)
    elif known is None:
        raise DataError(
            f"{field.name}: transform {field.transform} needs statistics of the training data; there are none"
        )
    elif field.transform == "minmax":
        span = known.high - known.low
        kernels.scale(raw_B, known.low, 1.0 / span if span > 0 else 0.0, 0.0, 1.0, out_B)
    else:
        deviation = known.deviation
        kernels.scale(raw_B, known.mean, 1.0 / deviation if deviation > 0 else 0.0, -np.inf, np.inf, out_B)


def _bucket(slot: SlotField, raw_B: NDArray[np.float32]) -> SlotIds:
    ids_B = np.empty(raw_B.size, dtype=np.uint64)
    if slot.source == "log2":
        kernels.bucket_by_log2(raw_B, slot.salt, ids_B)
    elif slot.statistics is None:
        raise DataError(f"{slot.name}: quantile buckets need statistics of the training data; there are none")
    else:
        edges_E = np.array(slot.statistics.edges, dtype=np.float32)
        kernels.bucket_by_edges(raw_B, edges_E, slot.salt, ids_B)
    return SlotIds(ids_B)


# ── slots ──────────────────────────────────────────────────────────────────────────────────────


def _categories(slot: SlotField, column: RawColumn, rows: int) -> tuple[SlotIds, list[Fault]]:
    if slot.separator is not None and isinstance(column, TextColumn):
        column = _split(column, slot.separator)
    faults: list[Fault] = []
    offsets_B1 = column.offsets_B1
    if offsets_B1 is not None and not slot.multi:
        column, several = _only_value(column, offsets_B1)
        faults += [
            Fault(
                row, slot.name, "several values", f"{slot.name} has {n} values, one allowed; set multi: true"
            )
            for row, n in several
        ]
        offsets_B1 = None
    ids_N, bad = _ids(slot, column)
    if bad:
        rows_N = np.arange(rows) if offsets_B1 is None else np.repeat(np.arange(rows), np.diff(offsets_B1))
        faults += [Fault(int(rows_N[n]), slot.name, reason, detail) for n, reason, detail in bad]
    if not slot.multi:
        return SlotIds(ids_N), faults
    if offsets_B1 is None:
        return SlotIds(ids_N, np.arange(rows + 1, dtype=np.int64)), faults
    kept_N = np.empty(ids_N.size + rows, dtype=np.uint64)
    kept_offsets_B1 = np.empty(rows + 1, dtype=np.int64)
    kept = kernels.pool_values(ids_N, offsets_B1, np.uint64(slot.missing_id), kept_N, kept_offsets_B1)
    return SlotIds(kept_N[:kept].copy(), kept_offsets_B1), faults


def _ids(slot: SlotField, column: RawColumn) -> tuple[NDArray[np.uint64], list[tuple[int, str, str]]]:
    """Ids of all values of a column, and the values that have none: place, reason, detail."""
    bad: list[tuple[int, str, str]] = []
    if isinstance(column, NumberColumn):
        column = _number_text(column)
    salt = slot.salt
    if isinstance(column, IntegerColumn):
        ids_N = np.empty(column.values_N.size, dtype=np.uint64)
        if slot.source == "feasign":
            missing_N = column.missing_N | (column.values_N == 0)
            if column.signed:
                for n in np.flatnonzero((column.values_N >> np.uint64(63)).astype(np.bool_) & ~missing_N):
                    bad.append(_no_feasign(slot, int(n), str(column.values_N[n].view(np.int64))))
                    missing_N[n] = True
            kernels.mix_feasigns(column.values_N, missing_N, salt, ids_N)
        else:
            kernels.hash_integers(column.values_N, column.missing_N, column.signed, salt, ids_N)
        return ids_N, bad
    ids_N = np.empty(column.starts_N.size, dtype=np.uint64)
    if slot.source == "text":
        kernels.hash_spans(column.data, column.starts_N, column.ends_N, salt, ids_N)
        return ids_N, bad
    values_N = np.empty(ids_N.size, dtype=np.uint64)
    status_N = np.empty(ids_N.size, dtype=np.uint8)
    if kernels.parse_feasigns(column.data, column.starts_N, column.ends_N, values_N, status_N):
        for n in np.flatnonzero(status_N == kernels.NUMBER_BAD):
            text = bytes(column.data[column.starts_N[n] : column.ends_N[n]])
            bad.append(_no_feasign(slot, int(n), _show(text)))
    kernels.mix_feasigns(values_N, status_N != kernels.NUMBER_OK, salt, ids_N)
    return ids_N, bad


def _no_feasign(slot: SlotField, place: int, shown: str) -> tuple[int, str, str]:
    return place, "not a number", f"{slot.name} is {shown}, a whole number from 0 to 2^64 - 1 expected"


def _number_text(column: NumberColumn) -> TextColumn | IntegerColumn:
    """Floats that name categories, as the text they stand for: 7.0 is "7", as nullable integers arrive."""
    values_N = column.values_N
    missing_N = np.isnan(values_N)
    if bool(np.all(missing_N | ((np.trunc(values_N) == values_N) & (np.abs(values_N) < 2.0**63)))):
        integers_N = np.where(missing_N, 0.0, values_N).astype(np.int64)
        return IntegerColumn(integers_N.view(np.uint64), missing_N, True, column.offsets_B1)
    return as_text(column)


def _split(column: TextColumn, separator: str) -> TextColumn:
    mark = ord(separator)
    pieces = kernels.count_pieces(column.data, column.starts_N, column.ends_N, mark)
    starts_P = np.empty(pieces, dtype=np.int64)
    ends_P = np.empty(pieces, dtype=np.int64)
    offsets_N1 = np.empty(column.starts_N.size + 1, dtype=np.int64)
    kernels.split_spans(column.data, column.starts_N, column.ends_N, mark, starts_P, ends_P, offsets_N1)
    if column.offsets_B1 is not None:
        offsets_N1 = offsets_N1[column.offsets_B1]
    return TextColumn(column.data, starts_P, ends_P, offsets_N1)


# ── columns ────────────────────────────────────────────────────────────────────────────────────


def raw_column(values: Sequence[Any], name: str) -> RawColumn:
    """Python values of one column as a raw column."""
    flat: list[Any] = []
    offsets = [0]
    several = False
    for value in values:
        if isinstance(value, list | tuple):
            several = True
            flat.extend(value)
        else:
            flat.append(value)
        offsets.append(len(flat))
    offsets_B1 = np.array(offsets, dtype=np.int64) if several else None
    kinds = {type(v) for v in flat if v is not None}
    unknown = kinds - {str, bytes, int, float, bool}
    if unknown:
        found = ", ".join(sorted(kind.__name__ for kind in unknown))
        raise DataError(f"{name} holds {found}; text, a number, null or a list of these is allowed")
    # Text is the meeting point: whatever company a value keeps in its batch, it must get the same id.
    if kinds and kinds <= {int, bool}:
        low, high = min(v for v in flat if v is not None), max(v for v in flat if v is not None)
        if (low >= 0 and high < 2**64) or (low >= -(2**63) and high < 2**63):
            bits = np.array([0 if v is None else int(v) % 2**64 for v in flat], dtype=np.uint64)
            missing = np.array([v is None for v in flat], dtype=np.bool_)
            return IntegerColumn(bits, missing, bool(low < 0), offsets_B1)
    if kinds == {float}:
        return NumberColumn(np.array([np.nan if v is None else v for v in flat]), offsets_B1)
    return _text_column([_text(v) for v in flat], offsets_B1)


def _text_column(texts: list[bytes], offsets_B1: Offsets | None) -> TextColumn:
    bounds = np.zeros(len(texts) + 1, dtype=np.int64)
    np.cumsum([len(text) for text in texts], out=bounds[1:])
    data = np.frombuffer(b"".join(texts) + b"\0", dtype=np.uint8)
    return TextColumn(data, bounds[:-1], bounds[1:], offsets_B1)


def _text(value: Any) -> bytes:
    if value is None or value != value:
        return b""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool):
        return b"1" if value else b"0"
    if isinstance(value, float) and value.is_integer():
        return str(int(value)).encode()
    return str(value).encode()


def as_text(column: RawColumn) -> TextColumn:
    """Any column as the text its values stand for."""
    if isinstance(column, TextColumn):
        return column
    if isinstance(column, IntegerColumn):
        signed = column.values_N.view(np.int64) if column.signed else column.values_N
        texts = [
            b"" if gone else str(value).encode() for value, gone in zip(signed, column.missing_N, strict=True)
        ]
    else:
        texts = [_text(float(value)) for value in column.values_N]
    return _text_column(texts, column.offsets_B1)


def _all_missing(rows: int) -> RawColumn:
    nowhere = np.zeros(rows, dtype=np.int64)
    return TextColumn(np.zeros(1, dtype=np.uint8), nowhere, nowhere)


def _blank(column: RawColumn, missing: tuple[str, ...]) -> RawColumn:
    """The column without the values whose text stands for "no value"."""
    if isinstance(column, TextColumn):
        return replace(column, ends_N=np.where(equals_any(column, missing), column.starts_N, column.ends_N))
    if isinstance(column, IntegerColumn):
        gone = [int(t) % 2**64 for t in missing if _is_decimal(t, column.signed)]
        return replace(
            column, missing_N=column.missing_N | np.isin(column.values_N, np.array(gone, dtype=np.uint64))
        )
    texts = {text.encode() for text in missing}
    gone_N = np.array([_text(float(value)) in texts for value in column.values_N], dtype=np.bool_)
    return replace(column, values_N=np.where(gone_N, np.nan, column.values_N))


def equals_any(column: TextColumn, texts: Sequence[str]) -> NDArray[np.bool_]:
    """Which values are exactly one of `texts`."""
    equal_N = np.zeros(column.starts_N.size, dtype=np.bool_)
    for text in texts:
        token = np.frombuffer(text.encode(), dtype=np.uint8)
        kernels.spans_equal(column.data, column.starts_N, column.ends_N, token, equal_N)
    return equal_N


def _is_decimal(text: str, signed: bool) -> bool:
    """Whether some value of an integer column is printed as `text`."""
    digits = text.removeprefix("-") if signed else text
    if not (digits.isascii() and digits.isdigit()) or str(int(text)) != text:
        return False
    return -(2**63) <= int(text) < 2**63 if signed else int(text) < 2**64


def _only_value(column: RawColumn, offsets_B1: Offsets) -> tuple[RawColumn, list[tuple[int, int]]]:
    """One value a row from a column that may hold several: missing where none, and the rows with more."""
    counts_B = np.diff(offsets_B1)
    several = [(int(row), int(counts_B[row])) for row in np.flatnonzero(counts_B > 1)]
    first_B = np.where(counts_B == 1, offsets_B1[:-1], -1)
    there = first_B >= 0
    if isinstance(column, TextColumn):
        starts_B = np.zeros(first_B.size, dtype=np.int64)
        ends_B = np.zeros(first_B.size, dtype=np.int64)
        starts_B[there] = column.starts_N[first_B[there]]
        ends_B[there] = column.ends_N[first_B[there]]
        return TextColumn(column.data, starts_B, ends_B), several
    if isinstance(column, IntegerColumn):
        values_B = np.zeros(first_B.size, dtype=np.uint64)
        missing_B = ~there
        values_B[there] = column.values_N[first_B[there]]
        missing_B[there] = column.missing_N[first_B[there]]
        return IntegerColumn(values_B, missing_B, column.signed), several
    numbers_B = np.full(first_B.size, np.nan)
    numbers_B[there] = column.values_N[first_B[there]]
    return NumberColumn(numbers_B), several


def _show(text: bytes) -> str:
    return repr(text[:60].decode("utf-8", "backslashreplace"))
