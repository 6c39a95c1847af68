"""Codec of ElasticCTR's HTTP protocol: slots with 64-bit feasigns; a missing value is an omitted slot.

A text is sent as the XXH64 of its canonical form, from which its slot's ids are computed. Integers are sent unchanged;
other numbers cannot be sent.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from clickline.client.attempts import PreparedRequest, RawResponse
from clickline.client.columnar import Column, NumericColumn, RequestTable, as_spans
from clickline.client.http_codec import TfServingHttpCodec, answering_version
from clickline.client.results import Prediction
from clickline.errors import RequestRefused
from clickline.features.encoder_kernels import canonicalize_spans, xxh64
from clickline.numba_cache import njit


class ElasticCtrCodec(TfServingHttpCodec):
    """Predictions in ElasticCTR's protocol, everything else in TensorFlow Serving's."""

    def predict(self, table: RequestTable, version: int | None) -> PreparedRequest[Prediction]:
        if version is not None:
            raise RequestRefused(
                "invalid", f"ElasticCTR's protocol cannot request version {version}: leave it out."
            )
        instances: list[dict[str, list[Any]]] = [{"slots": []} for _ in range(table.rows)]
        for name, column in table.columns.items():
            feasigns_N, present_N = _to_feasigns(name, column)
            for row, given in enumerate(_by_row(feasigns_N, present_N, column.width)):
                if given:
                    instances[row]["slots"].append({"slot_name": name, "feasigns": given})
        body = orjson.dumps({"instances": instances})
        headers = {"content-type": "application/json"}
        return PreparedRequest("/ElasticCTRPredictionService/inference", body, _decode_prediction, headers)


def _to_feasigns(name: str, column: Column) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """The 64-bit values of a column, and which of them are not missing."""
    if not isinstance(column, NumericColumn):
        texts = as_spans(column)
        starts_N, ends_N = np.empty(texts.size, dtype=np.int64), np.empty(texts.size, dtype=np.int64)
        canonicalize_spans(texts.data, texts.starts_N, texts.ends_N, starts_N, ends_N)
        hashes_N = np.empty(texts.size, dtype=np.uint64)
        _hash_texts(texts.data, starts_N, ends_N, hashes_N)
        return hashes_N, ends_N > starts_N
    values_N = column.values_N
    if values_N.dtype.kind != "f":
        missing_N = np.zeros(values_N.size, dtype=np.bool_) if column.missing_N is None else column.missing_N
        return values_N, ~missing_N
    present_N = ~np.isnan(values_N)
    given_N = values_N[present_N].astype(np.float64)
    invalid_N = (np.trunc(given_N) != given_N) | (np.abs(given_N) >= 2.0**63)
    if invalid_N.any():
        raise RequestRefused(
            "invalid",
            f"{name} is {given_N[invalid_N][0]:g}; ElasticCTR's protocol only supports 64-bit integers. Use another "
            "protocol.",
        )
    return np.where(present_N, values_N, 0).astype(np.int64), present_N


def _by_row(values_N: NDArray[Any], present_N: NDArray[np.bool_], width: int) -> list[list[int]]:
    if width == 1:
        pairs = zip(values_N.tolist(), present_N.tolist(), strict=True)
        return [[value] if present else [] for value, present in pairs]
    rows = zip(values_N.reshape(-1, width), present_N.reshape(-1, width), strict=True)
    return [values[present].tolist() for values, present in rows]


@njit(cache=True, nogil=True)
def _hash_texts(
    data: NDArray[np.uint8],
    starts_N: NDArray[np.int64],
    ends_N: NDArray[np.int64],
    hashes_N: NDArray[np.uint64],
) -> None:
    for n in range(starts_N.size):
        hashes_N[n] = xxh64(data, starts_N[n], ends_N[n])


def _decode_prediction(response: RawResponse) -> Prediction:
    document = orjson.loads(response.body)
    if document["err_code"]:
        raise RequestRefused("internal", document["err_msg"])
    probability_B = np.array([one["prob1"] for one in document["predictions"]], dtype=np.float32)
    return Prediction(answering_version(response), probability_B, None)
