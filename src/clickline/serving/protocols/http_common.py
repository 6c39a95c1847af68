"""What the HTTP protocols share: endpoints, responses, errors, and JSON bodies.

    route(method, path) ──▶ HttpEndpoint ──decode(body, headers, model, limits)──▶ Call ──scored──▶ encode(call, answer)
                        ──▶ HttpInfoEndpoint ──answer(state)──▶ HttpResponse     metadata, status, health
                        ──▶ HttpResponse                                         no such endpoint: an error

Endpoints are pure: they read bytes and write bytes. The server handles sockets, deadlines, tokens and the queue.
"""

from __future__ import annotations

import json
import re
import reprlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from clickline.errors import Refusal, RequestRefused
from clickline.serving.protocols.call import Call, Limits, Scores, ServedModel, Target
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


@dataclass(frozen=True)
class HttpLimits(Limits):
    """Limits of HTTP requests from the config."""

    max_body: int = 16 * 1024**2  # bytes, also after decompression


@dataclass(frozen=True)
class ServerState:
    """What an info endpoint can report: the model's names and the current version."""

    models: tuple[str, ...]  # names and aliases
    current: ServedModel | None  # None: no version has been loaded yet


@dataclass(frozen=True)
class HttpResponse:
    """An HTTP response."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


@dataclass(frozen=True)
class HttpRequest:
    """A request after routing, with its body decompressed."""

    target: Target
    headers: Headers
    body: bytes


Refuse = Callable[[Refusal, str], HttpResponse]


@dataclass(frozen=True)
class HttpEndpoint:
    """An endpoint that scores rows."""

    protocol: str  # for metrics and logs
    target: Target
    read: Callable[[HttpRequest, ServedModel, Limits], Call]
    write: Callable[[Any, Scores], HttpResponse]  # takes the details that `read` put into the call
    refuse: Refuse

    def decode(self, body: bytes, headers: Headers, model: ServedModel, limits: HttpLimits) -> Call:
        """Decode a body. Whatever is wrong with it raises RequestRefused."""
        return self.read(
            HttpRequest(self.target, headers, _decompressed(body, headers, limits)), model, limits
        )

    def encode(self, call: Call, answer: Scores) -> HttpResponse:
        return self.write(call.details, answer)


@dataclass(frozen=True)
class HttpInfoEndpoint:
    """An endpoint about the server or the model: metadata, status, health."""

    protocol: str
    target: Target
    describe: Callable[[Target, ServerState], HttpResponse]
    refuse: Refuse

    def answer(self, state: ServerState) -> HttpResponse:
        try:
            return self.describe(self.target, state)
        except RequestRefused as refused:
            return self.refuse(refused.kind, str(refused))


def check_target(target: Target, state: ServerState) -> ServedModel:
    """Return the version that a request is about; RequestRefused if it is not served."""
    if target.model not in state.models:
        served = ", ".join(state.models)
        raise RequestRefused("not_found", f"there is no model {preview(target.model)}; available: {served}.")
    model = state.current
    if model is None:
        raise RequestRefused("not_found", f"{target.model} has no version yet; publish one.")
    if target.version is not None and target.version != model.number:
        raise RequestRefused(
            "not_found", f"version {target.version} of {target.model} is not loaded; {model.number} is."
        )
    return model


# ── answers ────────────────────────────────────────────────────────────────────────────────────

_JSON = (b"content-type", b"application/json")
_EXTRA: Mapping[Refusal, tuple[tuple[bytes, bytes], ...]] = {
    "unauthenticated": ((b"www-authenticate", b"Bearer"),),
    "overloaded": ((b"retry-after", b"1"),),
    "unavailable": ((b"retry-after", b"1"),),
}


def json_response(
    document: Any, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = ()
) -> HttpResponse:
    """Make a JSON response. A document that is already bytes is sent unchanged."""
    if not isinstance(document, bytes):
        document = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return HttpResponse(status, (_JSON, *headers), document)


def error_response(
    kind: Refusal, message: str, rest: Mapping[str, Any] | None = None, key: str = "error"
) -> HttpResponse:
    """Make an error response; by default in the form of TensorFlow Serving and the Open Inference Protocol."""
    sendable = message.encode("utf-8", "backslashreplace").decode()
    return json_response({**(rest or {}), key: sendable}, STATUS[kind], _EXTRA.get(kind, ()))


def method_not_allowed(
    method: str,
    path: str,
    allowed: Sequence[str],
    rest: Mapping[str, Any] | None = None,
    key: str = "error",
) -> HttpResponse:
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


def _decompressed(body: bytes, headers: Headers, limits: HttpLimits) -> bytes:
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


def _integer(text: str) -> int | float:
    """Parse a whole number like orjson: beyond 64 bits it is a float."""
    if len(text) <= 20 and -(2**63) <= (value := int(text)) < 2**64:
        return value
    return float(text)
