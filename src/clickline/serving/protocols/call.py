"""What every door works with: whom a request is for, its rows, and the outputs an answer can be asked for.

A door for predictions is three functions: `target(body)` says which model is meant, `decode(body, model, limits)`
makes a `Call`, and `encode(call, answer)` makes the bytes that go back.
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


class Model(Protocol):
    """What a door needs of a scorer."""

    @property
    def number(self) -> int: ...
    @property
    def features(self) -> FeatureSpec: ...
    @property
    def columns(self) -> tuple[str, ...]: ...


class Scores(Protocol):
    """What a door needs of an answer."""

    @property
    def version(self) -> int: ...
    @property
    def logit_B(self) -> NDArray[np.float32]: ...
    @property
    def probability_B(self) -> NDArray[np.float32]: ...


@dataclass(frozen=True)
class Limits:
    """What the config says of requests."""

    max_rows: int = 10_000
    ignore_unknown: bool = False  # fields that the model does not have


@dataclass(frozen=True)
class Target:
    """The model a request is for; without a version, the current one."""

    model: str
    version: int | None = None


@dataclass(frozen=True)
class Call:
    """A decoded request."""

    rows: RequestRows
    context: RequestRows | None = None  # of a ranking request: one row that all the rows share
    details: Any = None  # what the door that made this needs to word its answer


# ── outputs ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Output:
    """A tensor that an answer can hold: [rows, width]."""

    width: int
    whole: bool  # 64-bit integers; else 32-bit floats
    values: Callable[[Scores], NDArray[Any]]  # its values, row after row


def _both(answer: Scores) -> NDArray[np.float32]:
    probabilities_B2 = np.empty((answer.probability_B.size, 2), dtype=np.float32)
    probabilities_B2[:, 0] = 1.0 - answer.probability_B
    probabilities_B2[:, 1] = answer.probability_B
    return probabilities_B2


OUTPUTS = {
    "probabilities": Output(2, False, _both),  # no click, click
    "logistic": Output(1, False, lambda answer: answer.probability_B),
    "logits": Output(1, False, lambda answer: answer.logit_B),
    "class_ids": Output(1, True, lambda answer: (answer.probability_B > 0.5).astype(np.int64)),
}


def chosen_outputs(asked: Iterable[str]) -> tuple[str, ...]:
    """The outputs that a request names, each once; all of them when it names none."""
    names = tuple(dict.fromkeys(asked))
    for name in names:
        if name not in OUTPUTS:
            raise RequestRefused("invalid", f'There is no output "{name}". There are: {", ".join(OUTPUTS)}.')
    return names or tuple(OUTPUTS)


def best(probability_B: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Places of the `count` highest, best first; of equal ones the first stands first."""
    return np.argsort(-probability_B, kind="stable")[:count]


# ── inputs ─────────────────────────────────────────────────────────────────────────────────────


def number_columns(features: FeatureSpec) -> frozenset[str]:
    """Columns that are numbers and nothing else: what a float or a bucket is made from.

    Clients send them as 32-bit floats. A column that names a category as well is sent as text: it gives the right id,
    and read as a number the right float."""
    categories = {slot.column for slot in features.slots if slot.source in ("text", "feasign")}
    return frozenset(field.column for field in features.fields) - categories


def several_columns(features: FeatureSpec) -> frozenset[str]:
    """Columns that may hold several values a row."""
    return frozenset(slot.column for slot in features.slots if slot.multi)


def version_number(text: str) -> int | None:
    """A version as a path or a text field gives it; no text is no version."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise RequestRefused("invalid", f'The version is "{text[:40]}"; a whole number is allowed.')
    return int(text)
