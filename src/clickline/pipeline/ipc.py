"""What a child tells its parent, lines of JSON over a pair of sockets: one a call of `Progress`, or how it ended.

    {"begin": title, "total_bytes": …, "total_rows": …}   {"advance": [rows, size], "note": …}   {"end": true}
    {"stage": name, "state": …, "facts": {…}}             {"say": message}
    {"up": {…}}   {"done": true}   {"error": {kind, message, mistakes}}   {"crash": {…}}

A crash is any error that is not of ours.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from clickline import errors
from clickline.errors import ClicklineError, ConfigError, Mistake
from clickline.progress import Progress, StageState

_SECONDS = 0.1  # between two lines about the same work: a step of training may take a millisecond


class Teller(Progress):
    """The child's end. Threads may call it at once."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lock = threading.Lock()
        self._rows = self._size = 0
        self._note: str | None = None
        self._told = 0.0

    def send(self, **message: Any) -> None:
        """Raises OSError when the parent is gone; the child is about to end then."""
        with self._lock:
            self._flush()
            self._send(message)

    def begin(self, title: str, *, total_bytes: int | None = None, total_rows: int | None = None) -> None:
        self.send(begin=title, total_bytes=total_bytes, total_rows=total_rows)
        self._told = 0.0  # the first rows are news

    def advance(self, *, rows: int = 0, size: int = 0) -> None:
        with self._lock:
            self._rows += rows
            self._size += size
            if time.monotonic() - self._told >= _SECONDS:
                self._flush()

    def note(self, figures: str) -> None:
        with self._lock:
            self._note = figures

    def end(self) -> None:
        self.send(end=True)

    def stage(self, name: str, state: StageState, facts: Mapping[str, Any] | None = None) -> None:
        self.send(stage=name, state=state, facts=dict(facts or {}))

    def say(self, message: str) -> None:
        self.send(say=message)

    def _flush(self) -> None:
        if self._rows or self._size or self._note is not None:
            self._send({"advance": [self._rows, self._size], "note": self._note})
            self._rows = self._size = 0
            self._note = None
            self._told = time.monotonic()

    def _send(self, message: Mapping[str, Any]) -> None:
        self._end.sendall(json.dumps(message, default=_plain).encode() + b"\n")


def replay(message: Mapping[str, Any], progress: Progress) -> None:
    """Make the call that a line stands for."""
    match message:
        case {"begin": title, "total_bytes": total_bytes, "total_rows": total_rows}:
            progress.begin(title, total_bytes=total_bytes, total_rows=total_rows)
        case {"advance": [rows, size], "note": figures}:
            if figures is not None:
                progress.note(figures)
            progress.advance(rows=rows, size=size)
        case {"end": True}:
            progress.end()
        case {"stage": name, "state": state, "facts": facts}:
            progress.stage(name, state, facts)
        case {"say": words}:
            progress.say(words)


def told_error(error: ClicklineError) -> dict[str, Any]:
    """An error as a document."""
    told: dict[str, Any] = {"kind": type(error).__name__, "message": str(error)}
    if isinstance(error, ConfigError):
        told["mistakes"] = [vars(mistake) for mistake in error.mistakes]
    return told


def error_of(told: Mapping[str, Any]) -> ClicklineError:
    """The error that a document tells of."""
    if "mistakes" in told:
        return ConfigError([Mistake(**mistake) for mistake in told["mistakes"]])
    kind = getattr(errors, str(told["kind"]), ClicklineError)
    try:
        error: ClicklineError = kind(told["message"])
    except TypeError:  # one that is made of more than its message
        error = ClicklineError(told["message"])
    return error


def _plain(value: Any) -> Any:
    """NumPy's numbers are numbers; paths and the like are text."""
    return value.item() if hasattr(value, "item") else str(value)
