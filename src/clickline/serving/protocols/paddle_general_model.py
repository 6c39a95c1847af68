"""Paddle Serving's general model, in the layouts of all its releases.

A request is told apart by its bytes: v0.7 and later send tensors with names, earlier releases instances of tensors in
the order of the client's config. The answers of v0.2.0 and of v0.2.1 to v0.6 differ, but their requests only in the
`log_id` that later ones send. Without it the answer holds both, one inside what the other skips as unknown fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from clickline.errors import Refusal, RequestRefused
from clickline.scoring.scorer import Scores
from clickline.serving.open_versions import ScorerLike
from clickline.serving.protocols.http_common import STATUS, error_response, parse_object
from clickline.serving.protocols.paddle_common import FeedHttpRequest, FeedRequest, parsed_json
from clickline.serving.protocols.request import OUTPUTS, Call, Response
from clickline.wire.feed_tensors import INSTS, TENSORS
from clickline.wire.messages import GeneralModelRequest, OldGeneralModelRequest
from clickline.wire.protobuf_writer import bytes_field, encode_varint, string_field
from clickline.wire.request_reader import malformed, top_level_fields

FETCHED = ("logistic", *(name for name in OUTPUTS if name != "logistic"))
"""The outputs in the order of the client's config: the click probability first."""

_FETCH_NAMES, _LOG_ID = 2, 4  # fields of a request
_ENGINE = "general_infer_0"  # the name that Paddle Serving gives its first model
_INT64, _FLOAT32 = 0, 1  # values of elem_type


class GeneralModel(FeedRequest):
    """Scores rows."""

    protocol = "paddle_brpc"
    layout = INSTS

    def decode(self, model: ScorerLike) -> Call:
        fetched, self.has_log_id = [], False
        for field, value in top_level_fields(self.body, _FETCH_NAMES, _LOG_ID):
            if field == _LOG_ID:
                self.has_log_id = True
            elif isinstance(value, bytes):
                fetched.append(value)
        self.outputs = self._requested(fetched)
        return super().decode(model)

    def _requested(self, fetched: list[bytes]) -> list[tuple[str, str]]:
        """The outputs that a request names, with these names; all of them if it names none."""
        names = self.limits.output_names
        if not fetched:
            return [(name, names.get(name, name)) for name in FETCHED]
        known = {name: name for name in FETCHED} | {alias: name for name, alias in names.items()}
        try:
            wanted = [name.decode() for name in fetched]
        except UnicodeDecodeError:
            raise malformed(" at fetch_var_names") from None
        for name in wanted:
            if name not in known:
                raise RequestRefused(
                    "invalid", f'There is no fetch variable "{name[:100]}". Available: {", ".join(known)}.'
                )
        return [(known[name], name) for name in wanted]

    def encode(self, answer: Scores) -> Response:
        tensors = [self._tensor(answer, *names) for names in self.outputs]
        engine = string_field(2, _ENGINE)
        listed = b"".join(bytes_field(1, tensor) for tensor in tensors)
        if self.layout_found == TENSORS:
            return Response(bytes_field(1, listed + engine))
        if self.has_log_id:
            return Response(bytes_field(1, bytes_field(1, listed) + engine))
        # To v0.2.0 these are tensors, the first of which also has `data`; later clients read only the first instance.
        both = b"".join(bytes_field(1, tensor) for tensor in (listed + tensors[0], *tensors[1:]))
        return Response(bytes_field(1, both + engine))

    def _tensor(self, answer: Scores, name: str, alias: str) -> bytes:
        output = OUTPUTS[name]
        shape = (answer.probability_B.size, output.width)
        values = output.values(answer)
        # Class ids are 0 or 1, whose varint is the same single byte. A list may be packed in every layout.
        content = values.astype("u1").tobytes() if output.is_integer else values.tobytes()
        kind = _INT64 if output.is_integer else _FLOAT32
        if self.layout_found == TENSORS:
            packed = b"".join(map(encode_varint, shape))
            names = string_field(13, name) + string_field(14, alias)
            return bytes_field(1 + kind, content) + bytes([10 << 3, kind]) + bytes_field(11, packed) + names
        dimensions = b"".join(bytes([6 << 3]) + encode_varint(size) for size in shape)
        return bytes_field(3 + kind, content) + bytes([5 << 3, kind]) + dimensions

    @classmethod
    def from_json(cls, body: bytes) -> bytes:
        document = parse_object(body)
        return parsed_json(
            document, OldGeneralModelRequest() if "insts" in document else GeneralModelRequest()
        )

    def to_json(self, answer: Scores) -> bytes:
        tensors = list(self._json_tensors(answer))
        named = self.layout_found == TENSORS
        output = {"tensor": tensors} if named else {"insts": [{"tensor_array": tensors}]}
        document = {"outputs": [{**output, "engine_name": _ENGINE}], "err_no": 0}
        return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)

    def _json_tensors(self, answer: Scores) -> Iterator[dict[str, Any]]:
        for name, alias in self.outputs:
            output = OUTPUTS[name]
            tensor: dict[str, Any] = {
                "int64_data" if output.is_integer else "float_data": output.values(answer).reshape(-1),
                "elem_type": _INT64 if output.is_integer else _FLOAT32,
                "shape": [answer.probability_B.size, output.width],
            }
            yield tensor | ({"name": name, "alias_name": alias} if self.layout_found == TENSORS else {})


class GeneralModelGrpc(GeneralModel):
    protocol = "paddle_grpc"


class GeneralModelHttp(FeedHttpRequest):
    protocol = "paddle_rest"
    service = GeneralModel


def refuse_general_model(kind: Refusal, message: str) -> Response:
    """An error response over HTTP; `err_no` is the HTTP status."""
    return error_response(kind, message, {"outputs": [], "err_no": STATUS[kind]}, "err_msg")
