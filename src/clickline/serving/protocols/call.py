"""Types that all protocols share: the model a request is for, its rows, and the outputs that it can request.

A prediction endpoint is three functions: `target(body)` returns the model, `decode(body, model, limits)` makes a
`Call`, and `encode(call, answer)` makes the response bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from clickline.errors import RequestRefused
from clickline.features import FeatureSpec
from clickline.records import RequestRows


class ServedModel(Protocol):
    """The part of a scorer that endpoints use."""

    @property
    def number(self) -> int: ...
    @property
    def features(self) -> FeatureSpec: ...
    @property
    def columns(self) -> tuple[str, ...]: ...


class Scores(Protocol):
    """The part of an answer that endpoints use."""

    @property
    def version(self) -> int: ...
    @property
    def logit_B(self) -> NDArray[np.float32]: ...
    @property
    def probability_B(self) -> NDArray[np.float32]: ...


@dataclass(frozen=True)
class Limits:
    """Request limits from the config."""

    max_rows: int = 10_000
    ignore_unknown: bool = False  # ignore fields that the model does not have


@dataclass(frozen=True)
class Target:
    """The model that a request names; without a version, the current one."""

    model: str
    version: int | None = None


@dataclass(frozen=True)
class Call:
    """A decoded request."""

    rows: RequestRows
    context: RequestRows | None = None  # of a ranking request: one row that all candidates share
    details: Any = None  # what the endpoint needs to encode the answer


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


def version_number(text: str) -> int | None:
    """Parse a version from a path or a text field; empty text means no version."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise RequestRefused("invalid", f'The version is "{text[:40]}"; it must be a whole number.')
    return int(text)
