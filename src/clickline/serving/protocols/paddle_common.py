"""What Paddle Serving's services share: requests of feasigns and numbers, over brpc, gRPC and HTTP.

brpc offers each service on all three, with the same messages: a `FeedRequest` decodes and encodes them. Over HTTP the
body may also be the JSON of these messages.
"""

from __future__ import annotations

import zlib
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from google.protobuf.json_format import ParseDict, ParseError

from clickline.errors import RequestRefused
from clickline.scoring.scorer import Scores
from clickline.serving.open_versions import ScorerLike
from clickline.serving.protocols.http_common import Headers, HttpRequest, json_response, version_header
from clickline.serving.protocols.request import Call, Request, Response
from clickline.wire.feed_reader import FeedReader

_GZIP_BYTES = 512  # smaller answers are not compressed, as in brpc
_PROTOBUF = (b"content-type", b"application/proto")
_readers: WeakKeyDictionary[Any, FeedReader] = WeakKeyDictionary()


def reader_of(model: ScorerLike) -> FeedReader:
    """The cached reader of a model's requests."""
    reader = _readers.get(model)
    if reader is None:
        reader = _readers[model] = FeedReader(model.features)
    return reader


class FeedRequest(Request):
    """A request of feasigns and numbers, in protobuf."""

    layout: ClassVar[int]

    def decode(self, model: ScorerLike) -> Call:
        rows, self.layout_found = reader_of(model).rows(
            self.body, self.layout, self.limits.max_rows, self.limits.ignore_unknown
        )
        return Call(rows)

    @classmethod
    def from_json(cls, body: bytes) -> bytes:
        """The protobuf message of a JSON body."""
        raise NotImplementedError

    def to_json(self, answer: Scores) -> bytes:
        """The JSON of the answer."""
        raise NotImplementedError

    @staticmethod
    def error_body(message: str) -> bytes | None:
        """The message that reports an invalid request, if the service has one; else the protocol reports it."""
        return None


class FeedHttpRequest(HttpRequest):
    """The same over HTTP."""

    service: ClassVar[type[FeedRequest]]

    def read(self, model: ScorerLike) -> Call:
        self.binary = is_protobuf(self.headers)
        body = self.body if self.binary else self.service.from_json(self.body)
        self.inner = self.service(body, self.limits)
        return self.inner.decode(model)

    def encode(self, answer: Scores) -> Response:
        if self.binary:
            return http_answer(self.inner.encode(answer).body, answer, self.headers)
        response = json_response(self.inner.to_json(answer), headers=[version_header(answer)])
        return _compressed(response, self.headers)


def http_answer(body: bytes, answer: Scores, headers: Headers) -> Response:
    """An answer in protobuf."""
    return _compressed(Response(body, 200, (_PROTOBUF, version_header(answer))), headers)


def is_protobuf(headers: Headers) -> bool:
    """Whether a body is protobuf: `application/proto`, `application/x-protobuf` or bytes without a type."""
    kind = headers.get(b"content-type", b"").lower()
    return b"proto" in kind or b"octet-stream" in kind


def parsed_json(document: Any, message: Any) -> bytes:
    """The bytes of a message whose JSON is `document`."""
    try:
        body: bytes = ParseDict(document, message, ignore_unknown_fields=True).SerializePartialToString()
    except (ParseError, RecursionError, UnicodeEncodeError) as error:
        raise RequestRefused("invalid", f"the body does not match its message: {str(error)[:300]}.") from None
    return body


def _compressed(response: Response, headers: Headers) -> Response:
    accepted = headers.get(b"accept-encoding", b"").lower()
    if b"gzip" in accepted and b"gzip;q=0" not in accepted and len(response.body) > _GZIP_BYTES:
        stream = zlib.compressobj(1, wbits=31)
        response.body = stream.compress(response.body) + stream.flush()
        response.headers = (*response.headers, (b"content-encoding", b"gzip"))
    return response
