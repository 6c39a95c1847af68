"""What the HTTP protocols share: routes, responses, errors, and JSON bodies.

route(method, path) ──▶ Route to a subclass of HttpRequest   scores rows
                    ──▶ Route to a function                  metadata, status, health
                    ──▶ Response                             no such endpoint: an error
"""

from __future__ import annotations

import json
import re
import reprlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from clickline.errors import Refusal, RequestRefused
from clickline.scoring.scorer import Scores
from clickline.serving.open_versions import OpenVersions, ScorerLike
from clickline.serving.protocols.request import Call, Limits, Request, Response
from clickline.wire.name_matching import nearest_name

Headers = Mapping[bytes, bytes]
"""Header values by lower-case name, as `dict(scope["headers"])` of an ASGI scope."""

STATUS: Mapping[Refusal, int] = {
    "invalid": 400,
    "unauthenticated": 401,
    "not_found": 404,
    "overloaded": 429,
    "internal": 500,
    "unavailable": 503,
    "late": 504,
}


Refuse = Callable[[Refusal, str], Response]
Describe = Callable[[str, int | None, OpenVersions], Response]
"""An endpoint about the server or the model: metadata, status, health. It gets the model and version of the path."""


class HttpRequest(Request):
    """A prediction request over HTTP."""

    def __init__(
        self, body: bytes, headers: Headers, limits: Limits, model: str = "", version: int | None = None
    ) -> None:
        super().__init__(body, limits, model, version)
        self.headers = headers

    def decode(self, model: ScorerLike) -> Call:
        self.body = _decompressed(self.body, self.headers, self.limits)
        return self.read(model)

    def read(self, model: ScorerLike) -> Call:
        """Decode the decompressed body."""
        raise NotImplementedError


@dataclass(frozen=True)
class Route:
    """The endpoint at a path, which scores rows or describes, and the model that the path names."""

    protocol: str  # for metrics and logs
    endpoint: type[HttpRequest] | None = None
    describe: Describe | None = None
    model: str = ""
    version: int | None = None
    refuse: Refuse = field(default_factory=lambda: error_response)

    def request(self, body: bytes, headers: Headers, limits: Limits) -> HttpRequest:
        """The request to score."""
        assert self.endpoint is not None
        return self.endpoint(body, headers, limits, self.model, self.version)

    def description(self, versions: OpenVersions) -> Response:
        """The response of an endpoint that only describes."""
        assert self.describe is not None
        try:
            return self.describe(self.model, self.version, versions)
        except RequestRefused as refused:
            return self.refuse(refused.kind, str(refused))


# ── answers ────────────────────────────────────────────────────────────────────────────────────

_JSON = (b"content-type", b"application/json")
_EXTRA: Mapping[Refusal, tuple[tuple[bytes, bytes], ...]] = {
    "unauthenticated": ((b"www-authenticate", b"Bearer"),),
    "overloaded": ((b"retry-after", b"1"),),
    "unavailable": ((b"retry-after", b"1"),),
}


def json_response(document: Any, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = ()) -> Response:
    """Make a JSON response. A document that is already bytes is sent unchanged."""
    if not isinstance(document, bytes):
        document = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(document, status, (_JSON, *headers))


def error_response(
    kind: Refusal, message: str, rest: Mapping[str, Any] | None = None, key: str = "error"
) -> Response:
    """Make an error response; by default in the form of TensorFlow Serving and the Open Inference Protocol."""
    sendable = message.encode("utf-8", "backslashreplace").decode()
    return json_response({**(rest or {}), key: sendable}, STATUS[kind], _EXTRA.get(kind, ()))


def method_not_allowed(
    method: str,
    path: str,
    allowed: Sequence[str],
    rest: Mapping[str, Any] | None = None,
    key: str = "error",
) -> Response:
    """Make a 405 response; `rest` and `key` as in `error_response`."""
    message = f"{preview(method)} {preview(path)}: {' or '.join(allowed)} is allowed."
    return json_response({**(rest or {}), key: message}, 405, [(b"allow", ", ".join(allowed).encode())])


def format_numbers(values_B: NDArray[Any]) -> list[bytes]:
    """Format each number as JSON: the shortest text that parses to the same bits."""
    return orjson.dumps(np.ascontiguousarray(values_B), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",")


def version_header(answer: Scores) -> tuple[bytes, bytes]:
    """The header that names the answering version, for protocols whose body does not."""
    return b"clickline-version", b"%d" % answer.version


def preview(value: Any) -> str:
    """Shorten a client's value for a message, without formatting all of a long one."""
    text = repr(value[:60]) if isinstance(value, str) else _SHORT.repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxdict = 30
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 90


def similar_name(name: str, allowed: Iterable[str]) -> str:
    """A hint for the end of a message: the known name nearest to a mistyped one."""
    near = nearest_name(name, tuple(allowed), 0.5)
    return "" if near is None else f" Did you mean {near!r}?"


# ── bodies ─────────────────────────────────────────────────────────────────────────────────────


def _decompressed(body: bytes, headers: Headers, limits: Limits) -> bytes:
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding in (b"", b"identity"):
        return body
    if encoding not in (b"gzip", b"x-gzip", b"deflate"):
        found = preview(encoding.decode("latin-1"))
        raise RequestRefused("invalid", f"Content-Encoding is {found}; it must be gzip, deflate or absent.")
    stream = zlib.decompressobj(47)  # gzip or zlib, detected by its header
    try:
        plain = stream.decompress(body, limits.max_body + 1)
    except zlib.error as error:
        raise RequestRefused("invalid", f"the body cannot be decompressed: {error}.") from None
    if len(plain) > limits.max_body:
        raise RequestRefused(
            "invalid",
            f"the body is larger than {limits.max_body} bytes after decompression. Send fewer rows at once.",
        )
    if not stream.eof or stream.unused_data:
        raise RequestRefused("invalid", "the compressed body is truncated or followed by other data.")
    return plain


_NEEDS_PYTHON_JSON = re.compile(rb"NaN|Infinity|[eE]\+?[0-9]{3}")


def parse_json(body: bytes) -> Any:
    """Parse JSON. NaN and Infinity are accepted, as in TensorFlow Serving."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        problem = str(error)
    if _NEEDS_PYTHON_JSON.search(body):
        try:
            document = json.loads(body.decode(), parse_int=_integer)
            orjson.dumps(document)  # refuses half of a surrogate pair, which is not text
            return document
        except (ValueError, TypeError, RecursionError) as error:
            problem = str(error)
    raise RequestRefused("invalid", f"the body is not JSON: {problem[:200]}.")


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object."""
    document = parse_json(body)
    if type(document) is not dict:
        raise RequestRefused("invalid", f"the body is {kind_name(document)}; it must be an object.")
    return document


def kind_name(value: Any) -> str:
    """The JSON type of a value, for messages."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", NoneType: "null"}
    return names.get(type(value), "a number")


def _integer(text: str) -> int | float:
    """Parse a whole number like orjson: beyond 64 bits it is a float."""
    if len(text) <= 20 and -(2**63) <= (value := int(text)) < 2**64:
        return value
    return float(text)
