"""ElasticCTR's HTTP protocol: slots with feasigns, 64 bits each; a missing value is a slot left out.

A text is sent as the XXH64 of its canonical form, which is what its slot's ids are made from. Whole numbers are sent
as they are; there is no way to send others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
from numba import njit
from numpy.typing import NDArray

from clickline.client.columnar import Column, Numbers, Table, spans
from clickline.client.http_codec import TfServingHttp, answering_version
from clickline.client.request import Ask, Reply
from clickline.client.results import Prediction
from clickline.errors import RequestRefused
from clickline.features.encoder_kernels import canonical_spans, xxh64


class ElasticCtr(TfServingHttp):
    """Predictions as ElasticCTR's clients ask for them; everything else as TensorFlow Serving's."""

    def predict(self, table: Table, version: int | None) -> Ask[Prediction]:
        if version is not None:
            raise RequestRefused(
                "invalid", f"ElasticCTR's protocol cannot ask for version {version}: leave it out."
            )
        instances: list[dict[str, list[Any]]] = [{"slots": []} for _ in range(table.rows)]
        for name, column in table.columns.items():
            feasigns_N, there_N = _feasigns(name, column)
            for row, given in enumerate(_by_row(feasigns_N, there_N, column.width)):
                if given:
                    instances[row]["slots"].append({"slot_name": name, "feasigns": given})
        body = orjson.dumps({"instances": instances})
        headers = {"content-type": "application/json"}
        return Ask("/ElasticCTRPredictionService/inference", body, _predicted, headers)


def _feasigns(name: str, column: Column) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """64-bit values, and which of them are there."""
    if not isinstance(column, Numbers):
        texts = spans(column)
        starts_N, ends_N = np.empty(texts.size, dtype=np.int64), np.empty(texts.size, dtype=np.int64)
        canonical_spans(texts.data, texts.starts_N, texts.ends_N, starts_N, ends_N)
        hashes_N = np.empty(texts.size, dtype=np.uint64)
        _hash(texts.data, starts_N, ends_N, hashes_N)
        return hashes_N, ends_N > starts_N
    values_N = column.values_N
    if values_N.dtype.kind != "f":
        missing_N = np.zeros(values_N.size, dtype=np.bool_) if column.missing_N is None else column.missing_N
        return values_N, ~missing_N
    there_N = ~np.isnan(values_N)
    known_N = values_N[there_N].astype(np.float64)
    odd_N = (np.trunc(known_N) != known_N) | (np.abs(known_N) >= 2.0**63)
    if odd_N.any():
        raise RequestRefused(
            "invalid",
            f"{name} is {known_N[odd_N][0]:g}; ElasticCTR's protocol carries whole numbers of 64 bits. Use another "
            "protocol.",
        )
    return np.where(there_N, values_N, 0).astype(np.int64), there_N


def _by_row(values_N: NDArray[Any], there_N: NDArray[np.bool_], width: int) -> list[list[int]]:
    if width == 1:
        pairs = zip(values_N.tolist(), there_N.tolist(), strict=True)
        return [[value] if there else [] for value, there in pairs]
    rows = zip(values_N.reshape(-1, width), there_N.reshape(-1, width), strict=True)
    return [values[there].tolist() for values, there in rows]


@njit(cache=True, nogil=True)
def _hash(
    data: NDArray[np.uint8],
    starts_N: NDArray[np.int64],
    ends_N: NDArray[np.int64],
    hashes_N: NDArray[np.uint64],
) -> None:
    for n in range(starts_N.size):
        hashes_N[n] = xxh64(data, starts_N[n], ends_N[n])


def _predicted(reply: Reply) -> Prediction:
    document = orjson.loads(reply.body)
    if document["err_code"]:
        raise RequestRefused("internal", document["err_msg"])
    probability_B = np.array([one["prob1"] for one in document["predictions"]], dtype=np.float32)
    return Prediction(answering_version(reply), probability_B, None)
