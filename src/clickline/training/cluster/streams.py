"""What makes a repeated push harmless and a late one refused: each stream of batches is numbered and has one owner.

A stream is a row of batches that are learned one after the other: in sync mode all batches of the run, in async
mode those of one leased unit. The driver opens it for an owner with a token; a higher token fences the owner before.
Every keeper of state (a shard, the network's holder) counts for itself how many batches of the stream it has counted
and applied. So a batch that was half done when its worker died is done again by the next owner, and each keeper
takes only what it does not have yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from clickline.errors import Fenced


@dataclass
class Stream:
    """How far a stream of batches is, in one keeper of state."""

    token: int
    found: int  # batches whose ids were counted
    applied: int  # batches whose gradients were applied


class Streams:
    """The streams that are open, each with its owner."""

    def __init__(self) -> None:
        self._streams: dict[int, Stream] = {}

    def open(self, name: int, token: int, start: int = 0) -> Stream:
        """Give a stream to the owner of `token`, from now on alone. One that is new begins behind `start` batches."""
        stream = self._streams.setdefault(name, Stream(token, start, start))
        if token < stream.token:
            raise Fenced(f"stream {name} belongs to token {stream.token}; {token} came too late.")
        stream.token = token
        return stream

    def close(self, name: int) -> None:
        """All of its batches are learned: nothing more is taken for it."""
        self._streams.pop(name, None)

    def of(self, name: int, token: int) -> Stream:
        """The stream, if `token` owns it."""
        stream = self._streams.get(name)
        if stream is None or stream.token != token:
            owner = "is closed" if stream is None else f"belongs to token {stream.token}"
            raise Fenced(f"stream {name} {owner}; what token {token} sent was not taken.")
        return stream

    @property
    def in_flight(self) -> int:
        """Batches that were counted and not applied yet."""
        return sum(stream.found - stream.applied for stream in self._streams.values())
