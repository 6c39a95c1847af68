"""Batch streams make repeated pushes harmless and late ones refused: batches are numbered, and a stream has one owner.

A stream is a sequence of batches that are trained one after the other: in sync mode all batches of the run, in async
mode those of one leased unit. The driver opens it for an owner with a token; a higher token fences the previous owner.
Every stateful actor (embedding server, dense parameter server) records how many batches of the stream it has counted
and applied. So a batch that was half done when its worker died is repeated by the next owner, and each actor takes only
what it does not have yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from clickline.errors import Fenced


@dataclass
class BatchStream:
    """Progress of one stream in one stateful actor."""

    token: int
    counted: int  # batches whose ids were counted
    applied: int  # batches whose gradients were applied


class BatchStreams:
    """The open streams, each with its owner."""

    def __init__(self) -> None:
        self._streams: dict[int, BatchStream] = {}

    def open(self, name: int, token: int, start: int = 0) -> BatchStream:
        """Give a stream exclusively to the owner of `token`. A new stream begins after `start` batches."""
        stream = self._streams.setdefault(name, BatchStream(token, start, start))
        if token < stream.token:
            raise Fenced(f"stream {name} belongs to token {stream.token}; token {token} is outdated.")
        stream.token = token
        return stream

    def close(self, name: int) -> None:
        """Close a finished stream: its messages are refused from now on."""
        self._streams.pop(name, None)

    def owned_by(self, name: int, token: int) -> BatchStream:
        """The stream, if `token` owns it."""
        stream = self._streams.get(name)
        if stream is None or stream.token != token:
            owner = "is closed" if stream is None else f"belongs to token {stream.token}"
            raise Fenced(f"stream {name} {owner}; the message of token {token} was refused.")
        return stream

    @property
    def in_flight(self) -> int:
        """Batches that are counted but not applied yet."""
        return sum(stream.counted - stream.applied for stream in self._streams.values())
