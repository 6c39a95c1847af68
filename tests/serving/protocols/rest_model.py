"""A test double of a served model for HTTP endpoints: its fields are real, and decoded requests can be inspected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from clickline.features import DenseField, FeatureSpec, SlotField
from clickline.features.request_encoder import RequestEncoder
from clickline.records import (
    FEATURE_ID,
    INTEGER,
    PRECISION,
    TEXT,
    EncodedRows,
    IntegerColumn,
    NumberColumn,
    RawColumn,
    RequestRows,
    TextColumn,
)
from clickline.serving.open_versions import OpenVersions
from clickline.serving.protocols.http_common import HttpRequest, Route
from clickline.serving.protocols.http_routes import route
from clickline.serving.protocols.request import Call, Limits, Response

FEATURES = FeatureSpec(
    dense=(DenseField("I1", "I1", "log1p"), DenseField("I2", "I2", "none")),
    slots=(
        SlotField("C1", "C1", 1),
        SlotField("C2", "C2", 2),
        SlotField("tags", "tags", 30, multi=True),
        SlotField("4", "4", 4, "feasign", multi=True),
        SlotField("5", "5", 5, "feasign"),
        SlotField("I2_bucket", "I2", 77, "log2"),
    ),
)
ENCODER = RequestEncoder(FEATURES)
LIMITS = Limits(max_rows=50, max_body=1 << 20)


class Model:
    """The part of a scorer that endpoints use."""

    features = FEATURES
    columns = FEATURES.columns

    def __init__(self, number: int = 12) -> None:
        self.number = number


@dataclass(frozen=True)
class Answer:
    version: int
    logit_B: Any
    probability_B: Any


MODEL = Model()
ANSWER = Answer(12, np.array([-2.25, 0.3], dtype=np.float32), np.array([0.1, 0.7], dtype=np.float32))


def endpoint(path: str) -> Route:
    found = route("POST", path)
    assert isinstance(found, Route) and found.endpoint is not None, found
    return found


def request(
    path: str, body: bytes, headers: dict[bytes, bytes] | None = None, limits: Limits = LIMITS
) -> HttpRequest:
    return endpoint(path).request(body, headers or {}, limits)


def call(path: str, body: bytes, headers: dict[bytes, bytes] | None = None, limits: Limits = LIMITS) -> Call:
    return request(path, body, headers, limits).decode(MODEL)


def answered(
    path: str, body: bytes, headers: dict[bytes, bytes] | None = None, answer: Answer = ANSWER
) -> Response:
    made = request(path, body, headers)
    made.decode(MODEL)
    return made.encode(answer)


def versions_of(*models: Any, names: tuple[str, ...] = ("ads",)) -> OpenVersions:
    """Versions that were current one after the other and are still leased; the last one is current."""
    versions = OpenVersions(names, lambda scorer: None)
    for model in models:
        versions.add(model)
        versions.switch(model.number)
        versions.lease(names[0], None)
    return versions


def header(reply: Response, name: bytes) -> bytes | None:
    return dict(reply.headers).get(name)


def raw_columns(rows: RequestRows) -> dict[str, RawColumn]:
    """The columns of a request as a log reader would return them."""
    columns: dict[str, RawColumn] = dict(rows.multi)
    for c, name in enumerate(MODEL.columns):
        kind = rows.kind_C[c]
        if kind == TEXT:
            columns[name] = TextColumn(rows.data, rows.starts_CB[c], rows.ends_CB[c])
        elif kind in PRECISION:
            columns[name] = NumberColumn(rows.numbers_CB[c], precision=PRECISION[int(kind)])
        elif kind == INTEGER:
            none_B = np.zeros(rows.rows, dtype=np.bool_)
            columns[name] = IntegerColumn(rows.integers_CB[c].view(np.uint64), none_B, True)
    return columns


def values(rows: RequestRows) -> dict[str, list[Any]]:
    """Decoded rows as Python values: text as bytes, missing as None."""
    found: dict[str, list[Any]] = {}
    for name, column in raw_columns(rows).items():
        if isinstance(column, TextColumn):
            assert column.data.flags.writeable is False and column.data.size
            spans = zip(column.starts_N.tolist(), column.ends_N.tolist(), strict=True)
            flat: list[Any] = [column.data[start:end].tobytes() or None for start, end in spans]
        elif isinstance(column, NumberColumn):
            flat = [None if value != value else value for value in column.values_N.tolist()]
        else:
            bits_N = column.values_N.view(np.int64) if column.signed else column.values_N
            flat = [
                None if gone else value
                for value, gone in zip(bits_N.tolist(), column.missing_N.tolist(), strict=True)
            ]
        offsets_B1 = column.offsets_B1
        if offsets_B1 is not None:
            assert offsets_B1.size == rows.rows + 1
            flat = [flat[offsets_B1[row] : offsets_B1[row + 1]] for row in range(rows.rows)]
        assert len(flat) == rows.rows
        found[name] = flat
    for c, name in enumerate(MODEL.columns):
        if rows.kind_C[c] == FEATURE_ID and name not in rows.multi:
            found[name] = [bits or None for bits in rows.integers_CB[c].view(np.uint64).tolist()]
    return found


def encoded(rows: RequestRows) -> EncodedRows:
    """Encode a decoded request that has no faults."""
    result, faults = ENCODER.encode(rows)
    assert not faults, [fault for found in faults for fault in found]
    return result


def same(one: EncodedRows, other: EncodedRows) -> bool:
    return (
        one.rows == other.rows
        and one.dense_DB.tobytes() == other.dense_DB.tobytes()
        and all(
            a.ids_N.tolist() == b.ids_N.tolist()
            and (a.offsets_B1 is None or a.offsets_B1.tolist() == b.offsets_B1.tolist())
            for a, b in zip(one.slots, other.slots, strict=True)
        )
    )
