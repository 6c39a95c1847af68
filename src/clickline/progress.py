"""What long work tells whoever watches it. The stages call it; `cli/` draws it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

__all__ = ["Progress", "StageState", "human_size"]

StageState = Literal["running", "skipped", "done", "refused", "failed"]


class Progress:
    """A watcher that shows nothing; subclasses draw bars or print lines."""

    def begin(self, title: str, *, total_bytes: int | None = None, total_rows: int | None = None) -> None:
        """A piece of work starts; the totals say how much there is to do, where that is known."""

    def advance(self, *, rows: int = 0, size: int = 0) -> None:
        """`rows` more rows and `size` more bytes of input are done."""

    def note(self, figures: str) -> None:
        """How the piece of work begun last is doing, in a few figures; replaces the note before."""

    def end(self) -> None:
        """The piece of work begun last is done."""

    def stage(self, name: str, state: StageState, facts: Mapping[str, Any] | None = None) -> None:
        """A stage of the flow (prepare, train, evaluate, gate, publish, follow, serve) is in another state; the
        facts are what people want to know of it then: rows, AUC, where its result is."""

    def say(self, message: str) -> None:
        """One line worth reading at any verbosity: a skipped stage, a changed input, an hour waited for."""


def human_size(size: float) -> str:
    """A number of bytes as people read it: 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
