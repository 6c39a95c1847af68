"""Messages from a child process to its parent: lines of JSON over a socket pair.

There is one message for each call of `Progress`, and one for the result:

    {"begin": title, "total_bytes": …, "total_rows": …}   {"advance": [rows, size], "note": …}   {"end": true}
    {"stage": name, "state": …, "facts": {…}}             {"say": message}
    {"up": {…}}   {"done": true}   {"error": {kind, message, mistakes}}   {"crash": {…}}

A crash is any error that is not a ClicklineError.
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

_MIN_INTERVAL = 0.1  # seconds between two progress messages: a training step may take a millisecond


class ProgressSender(Progress):
    """Sends the child's progress to its parent. Thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        self._rows = self._size = 0
        self._note: str | None = None
        self._sent_at = 0.0

    def send(self, **message: Any) -> None:
        """Send a message. Raises OSError if the parent is gone; the child is about to exit then."""
        with self._lock:
            self._flush()
            self._send(message)

    def begin(self, title: str, *, total_bytes: int | None = None, total_rows: int | None = None) -> None:
        self.send(begin=title, total_bytes=total_bytes, total_rows=total_rows)
        self._sent_at = 0.0  # report the first rows without delay

    def advance(self, *, rows: int = 0, size: int = 0) -> None:
        with self._lock:
            self._rows += rows
            self._size += size
            if time.monotonic() - self._sent_at >= _MIN_INTERVAL:
                self._flush()

    def note(self, figures: str) -> None:
        with self._lock:
            self._note = figures

    def end(self) -> None:
        self.send(end=True)

    def stage(self, name: str, state: StageState, facts: Mapping[str, Any] | None = None) -> None:
        self.send(stage=name, state=state, facts=dict(facts or {}))

    def log(self, message: str) -> None:
        self.send(say=message)

    def _flush(self) -> None:
        if self._rows or self._size or self._note is not None:
            self._send({"advance": [self._rows, self._size], "note": self._note})
            self._rows = self._size = 0
            self._note = None
            self._sent_at = time.monotonic()

    def _send(self, message: Mapping[str, Any]) -> None:
        self._socket.sendall(json.dumps(message, default=_json_default).encode() + b"\n")


def replay(message: Mapping[str, Any], progress: Progress) -> None:
    """Make the call of `Progress` that a message stands for."""
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
        case {"say": text}:
            progress.log(text)


def error_to_json(error: ClicklineError) -> dict[str, Any]:
    """Convert an error to a JSON document."""
    document: dict[str, Any] = {"kind": type(error).__name__, "message": str(error)}
    if isinstance(error, ConfigError):
        document["mistakes"] = [vars(mistake) for mistake in error.mistakes]
    return document


def error_from_json(document: Mapping[str, Any]) -> ClicklineError:
    """The error that a document describes."""
    if "mistakes" in document:
        return ConfigError([Mistake(**mistake) for mistake in document["mistakes"]])
    kind = getattr(errors, str(document["kind"]), ClicklineError)
    try:
        error: ClicklineError = kind(document["message"])
    except TypeError:  # its constructor takes more than a message
        error = ClicklineError(document["message"])
    return error


def _json_default(value: Any) -> Any:
    """Convert NumPy scalars to numbers, paths and other values to text."""
    return value.item() if hasattr(value, "item") else str(value)
