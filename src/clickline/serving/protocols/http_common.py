"""What the HTTP doors share: where a path leads, replies and refusals, and JSON bodies.

    route(method, path) ──▶ Door ──decode(body, headers, model, limits)──▶ Call ──scored──▶ encode(call, answer)
                        ──▶ Page ──answer(known)──▶ Reply         metadata, status, health
                        ──▶ Reply                                 nothing there: a refusal, ready to be sent

Doors are pure: they read bytes and write bytes. Sockets, deadlines, tokens and queues are the server's.
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
from clickline.serving.protocols.call import Call, Limits, Model, Scores, Target
from clickline.wire.name_matching import nearest_name

Headers = Mapping[bytes, bytes]
"""Header values by lower-case name, as `dict(scope["headers"])` of an ASGI server gives them."""

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
    """What the config says of HTTP requests."""

    max_body: int = 16 * 1024**2  # bytes, also after inflating


@dataclass(frozen=True)
class Known:
    """What the server knows when it is asked about itself."""

    models: tuple[str, ...]  # the names that are answered, aliases too
    current: Model | None  # None: no version has been loaded yet


@dataclass(frozen=True)
class Reply:
    """An HTTP answer."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


@dataclass(frozen=True)
class Request:
    """A request after routing, its body inflated."""

    target: Target
    headers: Headers
    body: bytes


Refuse = Callable[[Refusal, str], Reply]


@dataclass(frozen=True)
class Door:
    """An endpoint that scores rows."""

    protocol: str  # for metrics and logs
    target: Target
    read: Callable[[Request, Model, Limits], Call]
    write: Callable[[Any, Scores], Reply]  # of what `read` put into the call's details
    refuse: Refuse

    def decode(self, body: bytes, headers: Headers, model: Model, limits: HttpLimits) -> Call:
        """The call that a body holds. Whatever is wrong with it is a RequestRefused."""
        return self.read(Request(self.target, headers, _inflated(body, headers, limits)), model, limits)

    def encode(self, call: Call, answer: Scores) -> Reply:
        return self.write(call.details, answer)


@dataclass(frozen=True)
class Page:
    """An endpoint that tells what the server knows."""

    protocol: str
    target: Target
    tell: Callable[[Target, Known], Reply]
    refuse: Refuse

    def answer(self, known: Known) -> Reply:
        try:
            return self.tell(self.target, known)
        except RequestRefused as refused:
            return self.refuse(refused.kind, str(refused))


def check_target(target: Target, known: Known) -> Model:
    """The version that a page is asked about; RequestRefused if it is not served."""
    if target.model not in known.models:
        served = ", ".join(known.models)
        raise RequestRefused("not_found", f"there is no model {shown(target.model)}; served: {served}.")
    model = known.current
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


def json_reply(document: Any, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = ()) -> Reply:
    """A JSON answer. A document that is bytes already is sent as it is."""
    if not isinstance(document, bytes):
        document = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return Reply(status, (_JSON, *headers), document)


def refusal(kind: Refusal, message: str, rest: Mapping[str, Any] | None = None, key: str = "error") -> Reply:
    """A refused request; as it stands, the way TensorFlow Serving and the Open Inference Protocol say it."""
    sendable = message.encode("utf-8", "backslashreplace").decode()
    return json_reply({**(rest or {}), key: sendable}, STATUS[kind], _EXTRA.get(kind, ()))


def wrong_method(
    method: str,
    path: str,
    allowed: Sequence[str],
    rest: Mapping[str, Any] | None = None,
    key: str = "error",
) -> Reply:
    """The answer where a path is asked by a method that it does not have; `rest` and `key` as of `refusal`."""
    words = f"{shown(method)} {shown(path)}: {' or '.join(allowed)} is allowed."
    return json_reply({**(rest or {}), key: words}, 405, [(b"allow", ", ".join(allowed).encode())])


def number_texts(values_B: NDArray[Any]) -> list[bytes]:
    """Each number as JSON: the shortest text that reads back as the same bits."""
    return orjson.dumps(np.ascontiguousarray(values_B), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",")


def version_header(answer: Scores) -> tuple[bytes, bytes]:
    """Tells which version answered, also where the protocol's own answer does not."""
    return b"clickline-version", b"%d" % answer.version


def shown(value: Any) -> str:
    """Something a client sent, short enough for a message; most of a long value is not even looked at."""
    text = repr(value[:60]) if isinstance(value, str) else _SHORT.repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxdict = 30
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 90


def similar_name(name: str, allowed: Iterable[str]) -> str:
    """A hint at the end of a message: the known name nearest to a mistyped one."""
    near = nearest_name(name, tuple(allowed), 0.5)
    return "" if near is None else f" Did you mean {near!r}?"


# ── bodies ─────────────────────────────────────────────────────────────────────────────────────


def _inflated(body: bytes, headers: Headers, limits: HttpLimits) -> bytes:
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding in (b"", b"identity"):
        return body
    if encoding not in (b"gzip", b"x-gzip", b"deflate"):
        found = shown(encoding.decode("latin-1"))
        raise RequestRefused("invalid", f"Content-Encoding is {found}; gzip, deflate or none is allowed.")
    stream = zlib.decompressobj(47)  # gzip or zlib, whichever its header says
    try:
        plain = stream.decompress(body, limits.max_body + 1)
    except zlib.error as error:
        raise RequestRefused("invalid", f"the body cannot be inflated: {error}.") from None
    if len(plain) > limits.max_body:
        raise RequestRefused(
            "invalid",
            f"the body is larger than {limits.max_body} bytes when inflated. Send fewer rows at once.",
        )
    if not stream.eof or stream.unused_data:
        raise RequestRefused("invalid", "the compressed body does not end where its content ends.")
    return plain


_PYTHON_READS_IT = re.compile(rb"NaN|Infinity|[eE]\+?[0-9]{3}")


def parse_json(body: bytes) -> Any:
    """A JSON document. NaN and Infinity are read too, as TensorFlow Serving does."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        problem = str(error)
    if _PYTHON_READS_IT.search(body):
        try:
            document = json.loads(body.decode(), parse_int=_integer)
            orjson.dumps(document)  # refuses half of a surrogate pair, which is no text
            return document
        except (ValueError, TypeError, RecursionError) as error:
            problem = str(error)
    raise RequestRefused("invalid", f"the body is not JSON: {problem[:200]}.")


def _integer(text: str) -> int | float:
    """A whole number the way orjson reads it: past 64 bits it is a float."""
    if len(text) <= 20 and -(2**63) <= (value := int(text)) < 2**64:
        return value
    return float(text)
