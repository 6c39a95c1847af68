"""Warm-up requests of a new version: kernels are compiled or read from their cache, and endpoints and scorers set up
what they need at first use."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress

import orjson

from clickline.errors import RequestRefused
from clickline.scoring.scorer import Scores
from clickline.serving.open_versions import ScorerLike
from clickline.serving.protocols import (
    kserve_grpc,
    kserve_http,
    ranking_grpc,
    ranking_http,
    tfserving_grpc,
    tfserving_http,
)
from clickline.serving.protocols.http_common import HttpRequest
from clickline.serving.protocols.paddle_common import reader_of
from clickline.serving.protocols.paddle_general_model import GeneralModel
from clickline.serving.protocols.request import Call, Limits, Request, multi_value_columns, number_columns
from clickline.wire.feed_reader import VECTOR
from clickline.wire.messages import (
    GeneralModelRequest,
    ModelInferRequest,
    PredictRequest,
    RankRequest,
    TensorProto,
)

_ROWS = 2
_FLOAT, _STRING = 1, 7  # numbers of DataType


def warm_up(scorer: ScorerLike) -> None:
    """Answer one request of every kind and discard the answers."""
    for request in (*_grpc_requests(scorer), *_rest_requests(scorer), _paddle_request(scorer)):
        with suppress(RequestRefused):  # a field may refuse the value; most of the path has run by then
            request.read_target()
            call = request.decode(scorer)
            request.encode(_score(scorer, call))
    scorer.misses_S[:] = 0
    scorer.lookups_S[:] = 0


def example_row(scorer: ScorerLike) -> dict[str, float | str]:
    """An example row with a few fields; the others may be missing."""
    numbers = number_columns(scorer.features)
    names = [name for name in scorer.columns if name in numbers][:2]
    names += [name for name in scorer.columns if name not in numbers][:2]
    return {name: 1 if name in numbers else "1" for name in names}


def _score(scorer: ScorerLike, call: Call) -> Scores:
    if call.context is None:
        return scorer.predict(call.rows)
    return scorer.rank(call.context, call.rows)


def _split_columns(scorer: ScorerLike) -> tuple[Sequence[str], Sequence[str]]:
    """Split the columns into those of a ranking's context and of its candidates."""
    return scorer.columns[::2], scorer.columns[1::2]


def _grpc_requests(scorer: ScorerLike) -> Iterator[Request]:
    numbers = number_columns(scorer.features)
    predict = PredictRequest()
    for column in scorer.columns:
        _fill(predict.inputs[column], column in numbers, _ROWS)
    yield tfserving_grpc.Predict(predict.SerializeToString(), Limits())
    shared, own = _split_columns(scorer)
    rank = RankRequest()
    for column in shared:
        _fill(rank.context[column], column in numbers, 1)
    for column in own:
        _fill(rank.candidates[column], column in numbers, _ROWS)
    if own:
        yield ranking_grpc.Rank(rank.SerializeToString(), Limits())
    typed, raw = ModelInferRequest(), ModelInferRequest()
    for column in scorer.columns:
        number = column in numbers
        for request in (typed, raw):
            request.inputs.add(name=column, datatype="FP32" if number else "BYTES", shape=[_ROWS])
        if number:
            typed.inputs[-1].contents.fp32_contents.extend([1.0] * _ROWS)
            raw.raw_input_contents.append(struct.pack("<2f", 1.0, 1.0))
        else:
            typed.inputs[-1].contents.bytes_contents.extend([b"1"] * _ROWS)
            raw.raw_input_contents.append(struct.pack("<I1sI1s", 1, b"1", 1, b"1"))
    yield kserve_grpc.Infer(typed.SerializeToString(), Limits())
    yield kserve_grpc.Infer(raw.SerializeToString(), Limits())


def _fill(tensor: TensorProto, number: bool, rows: int) -> None:
    tensor.dtype = _FLOAT if number else _STRING
    tensor.tensor_shape.dim.add().size = rows
    if number:
        tensor.float_val.extend([1.0] * rows)
    else:
        tensor.string_val.extend([b"1"] * rows)


def _rest_requests(scorer: ScorerLike) -> Iterator[Request]:
    numbers = number_columns(scorer.features)

    def value(column: str) -> float | str:
        return 1.5 if column in numbers else "1"

    row = {column: value(column) for column in scorer.columns}
    yield _posted(tfserving_http.Predict, {"instances": [row] * _ROWS})
    yield _posted(
        tfserving_http.Predict, {"inputs": {column: [value] * _ROWS for column, value in row.items()}}
    )
    shared, own = _split_columns(scorer)
    if own:
        context = {column: row[column] for column in shared}
        candidates = [{column: row[column] for column in own}] * _ROWS
        yield _posted(ranking_http.Rank, {"context": context, "candidates": candidates})
    inputs = [
        {
            "name": column,
            "datatype": "FP32" if column in numbers else "BYTES",
            "shape": [_ROWS],
            "data": [row[column]] * _ROWS,
        }
        for column in scorer.columns
    ]
    yield _posted(kserve_http.Infer, {"inputs": inputs})


def _paddle_request(scorer: ScorerLike) -> Request:
    reader, several = reader_of(scorer), multi_value_columns(scorer.features)
    request = GeneralModelRequest()
    for column in reader.categories:
        each = 2 if column in several else 1
        request.tensor.add(name=column, shape=[_ROWS, each], int64_data=[1] * _ROWS * each)
    if reader.numbers:
        width = len(reader.numbers)
        request.tensor.add(name=VECTOR, elem_type=1, shape=[_ROWS, width], float_data=[1.0] * _ROWS * width)
    return GeneralModel(request.SerializeToString(), Limits())


def _posted(endpoint: type[HttpRequest], document: object) -> Request:
    return endpoint(orjson.dumps(document), {}, Limits())
