"""One request through the server, whatever its protocol: `Request`, `Call`, `Response`.

    bytes ──▶ Request ──read_target──▶ model, version ──decode──▶ Call ──scored──▶ encode ──▶ Response ──▶ bytes

A prediction endpoint is a subclass of `Request` in the module of its protocol. It is pure: it reads bytes and writes
bytes. The servers handle sockets and tokens, the `Dataplane` the queue and deadlines. Each body is parsed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from clickline.config.sections import ServeSection
from clickline.errors import RequestRefused
from clickline.features import FeatureSpec
from clickline.records import EncodedRows, RequestRows
from clickline.scoring.scorer import Scores
from clickline.serving.open_versions import OpenVersion, ScorerLike


@dataclass(frozen=True)
class Limits:
    """Request limits and names from the config."""

    max_rows: int = 10_000
    ignore_unknown: bool = False  # ignore fields that the model does not have
    max_body: int = 16 * 1024**2  # bytes, also after decompression
    output_names: Mapping[str, str] = field(
        default_factory=dict
    )  # what Paddle Serving's clients call an output

    @staticmethod
    def of(serve: ServeSection) -> Limits:
        ignore_unknown = serve.unknown_fields == "ignore"
        return Limits(serve.max_rows, ignore_unknown, serve.max_body, dict(serve.brpc_names))


@dataclass(frozen=True, slots=True)
class Call:
    """The rows of a request."""

    rows: RequestRows
    context: RequestRows | None = None  # of a ranking request: one row that all candidates share


@dataclass(slots=True)
class Response:
    """The response to a request. gRPC sends only the body; errors of gRPC are not responses."""

    body: bytes
    status: int = 200  # of HTTP
    headers: tuple[tuple[bytes, bytes], ...] = ()
    version: int = 0  # that scored the rows
    rows: int = 0


Done = Callable[[Response | RequestRefused], None]
"""Called on the event loop with the response to a request."""


class Request:
    """A prediction request: its bytes, and its state in the queue of the `Dataplane`."""

    protocol: ClassVar[str]  # for metrics and logs

    def __init__(self, body: bytes, limits: Limits, model: str = "", version: int | None = None) -> None:
        self.body = body
        self.limits = limits
        self.model = model  # the name or alias that it names; empty: the only one
        self.version = version  # the version that it names; None: the current one
        self.arrived = monotonic()
        self.deadline: float | None = None  # a time of `time.monotonic`
        self.done: Done
        self.cancelled = False  # the client no longer waits for the response
        self.finished = False  # `done` was called
        self.lease: OpenVersion | None = None
        self.call: Call | None = None
        self.encoded: EncodedRows | None = None  # if it may be batched with others

    def read_target(self) -> None:
        """Set `model` and `version` if the body names them."""

    def decode(self, model: ScorerLike) -> Call:
        """Decode the rows. Anything wrong with the request raises RequestRefused."""
        raise NotImplementedError

    def encode(self, answer: Scores) -> Response:
        """Encode the scores of the rows that `decode` returned."""
        raise NotImplementedError


# ── outputs ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Output:
    """A tensor of the answer, of shape [rows, width]."""

    width: int
    is_integer: bool  # 64-bit integers; else 32-bit floats
    values: Callable[[Scores], NDArray[Any]]  # values, row by row


def _both_classes(answer: Scores) -> NDArray[np.float32]:
    probabilities_B2 = np.empty((answer.probability_B.size, 2), dtype=np.float32)
    probabilities_B2[:, 0] = 1.0 - answer.probability_B
    probabilities_B2[:, 1] = answer.probability_B
    return probabilities_B2


OUTPUTS = {
    "probabilities": Output(2, False, _both_classes),  # no click, click
    "logistic": Output(1, False, lambda answer: answer.probability_B),
    "logits": Output(1, False, lambda answer: answer.logit_B),
    "class_ids": Output(1, True, lambda answer: (answer.probability_B > 0.5).astype(np.int64)),
}


def requested_outputs(requested: Iterable[str]) -> tuple[str, ...]:
    """Return the outputs that a request names, each once; all of them if it names none."""
    names = tuple(dict.fromkeys(requested))
    for name in names:
        if name not in OUTPUTS:
            raise RequestRefused("invalid", f'There is no output "{name}". Available: {", ".join(OUTPUTS)}.')
    return names or tuple(OUTPUTS)


def top_k(probability_B: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Indices of the `count` highest probabilities, best first; ties keep their order."""
    return np.argsort(-probability_B, kind="stable")[:count]


# ── inputs ─────────────────────────────────────────────────────────────────────────────────────


def number_columns(features: FeatureSpec) -> frozenset[str]:
    """Columns that are only numbers: the sources of floats and buckets.

    Clients send them as 32-bit floats. A column that is also a category is sent as text, which gives the right id and,
    parsed as a number, the right float."""
    categories = {slot.column for slot in features.slots if slot.source in ("text", "feasign")}
    return frozenset(field.column for field in features.fields) - categories


def multi_value_columns(features: FeatureSpec) -> frozenset[str]:
    """Columns that may hold several values per row."""
    return frozenset(slot.column for slot in features.slots if slot.multi)


def input_tensors(model: ScorerLike) -> Iterator[tuple[str, bool, bool]]:
    """The inputs that metadata describes: name, whether it is a number, whether a row may have several values."""
    numbers, several = number_columns(model.features), multi_value_columns(model.features)
    return ((name, name in numbers, name in several) for name in model.columns)


def version_number(text: str) -> int | None:
    """Parse a version from a path or a text field; empty text means no version."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise RequestRefused("invalid", f'The version is "{text[:40]}"; it must be a whole number.')
    return int(text)
