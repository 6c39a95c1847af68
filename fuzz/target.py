"""The fuzz target type, and what all targets share: a scratch folder, choices from bytes, mutated documents."""

from __future__ import annotations

import atexit
import copy
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Target:
    """A fuzz target. `run` raises only for a finding: errors of `clickline.errors` are expected."""

    run: Callable[[bytes], None]
    seeds: Callable[[], Sequence[bytes]]


@cache
def scratch() -> Path:
    """The folder of this process, in memory if the system supports it."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="clickline-fuzz-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class Choices:
    """Choices made from the input, so that a changed byte changes a choice."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self, below: int) -> int:
        """A number from 0 to `below` - 1; 0 when the bytes are used up."""
        value = int.from_bytes(self._data[self._at : self._at + 2], "little")
        self._at += 2
        return value % below if below else 0

    def one_of(self, values: Sequence[Any]) -> Any:
        return values[self.number(len(values))]

    def rest(self) -> bytes:
        return self._data[self._at :]


HOSTILE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    1.5,
    2**31,
    2**32,
    2**63,
    2**64,
    10**30,
    float("inf"),
    float("-inf"),
    float("nan"),
    "",
    "x",
    "0",
    "../../../etc/passwd",
    "/etc/passwd",
    "..",
    "a\0b",
    "\ud800",
    "é" * 300,
    "file:///etc/passwd",
    "{date}",
    [],
    [0],
    [None],
    ["x", "x"],
    [-1, 2**64],
    {},
    {"x": 1},
    {"": None},
    [[[[[[[[]]]]]]]],
)
"""Values that Clickline never writes."""


def mutated(document: Any, choices: Choices, max_changes: int = 3) -> Any:
    """Mutate a JSON document: a few values are replaced, deleted, duplicated or moved."""
    document = copy.deepcopy(document)
    for _ in range(choices.number(max_changes + 1)):
        parent, key = _place(document, choices)
        if parent is None:
            return copy.deepcopy(choices.one_of(HOSTILE))
        match choices.number(6):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, dict):
                parent[choices.one_of(["x", "", "..", "file", "kind"])] = copy.deepcopy(
                    choices.one_of(HOSTILE)
                )
            case 1:
                parent.append(copy.deepcopy(parent[key]))
            case 2:
                other, place = _place(document, choices)
                if other is not None:
                    parent[key] = copy.deepcopy(other[place])
            case _:
                parent[key] = copy.deepcopy(choices.one_of(HOSTILE))
    return document


def _place(document: Any, choices: Choices) -> tuple[Any, Any]:
    """Choose a container in the document and one of its keys; None: the document itself."""
    parent, key, here = None, None, document
    while isinstance(here, dict | list) and here and (parent is None or choices.number(4)):
        parent = here
        key = choices.one_of(list(here)) if isinstance(here, dict) else choices.number(len(here))
        here = parent[key]
    return parent, key
