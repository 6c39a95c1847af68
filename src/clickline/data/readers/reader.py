"""The interface of all readers, and the reasons they share for rejecting a row."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from clickline.errors import DataError
from clickline.records import BadRow, Block, RawRows

BLOCK_BYTES = 2 << 20  # of uncompressed input: the data of a block stays in the L2 cache
MAX_LINE_BYTES = 16 << 20  # a longer row is bad, so that a file without line ends cannot exhaust memory
MAX_LISTED_BAD_ROWS = (
    1000  # per block; the rest are only counted, so that an all-bad file cannot exhaust memory either
)

WRONG_COLUMN_COUNT = "wrong column count"
BAD_UTF8 = "bad UTF-8"
NOT_A_NUMBER = "not a number"
BAD_LABEL = "bad label"
LINE_TOO_LONG = "line too long"
UNCLOSED_QUOTE = "unclosed quote"
TRUNCATED_GZIP = "truncated gzip"
CORRUPT_GZIP = "corrupt gzip"
TRUNCATED_ZSTD = "truncated zstd"
CORRUPT_ZSTD = "corrupt zstd"

_PREVIEW_CHARACTERS = 200


class Reader(Protocol):
    """Turns files of one format into rows. `parse` is stateless, so blocks can be parsed in any order."""

    def blocks(self, file: str, path: Path) -> Iterator[Block]:
        """Split a local file at row ends. `file` is its name in messages, `path` the local copy.

        A block holds all that `parse` needs: the file may no longer exist by then.
        """
        ...

    def parse(self, block: Block) -> RawRows:
        """The rows of one block. `RawRows.bad` does not repeat `block.bad`."""
        ...


def preview(row: bytes | bytearray | memoryview) -> str:
    """The beginning of a row as text that is safe to store, whatever its bytes are."""
    return bytes(row[: 4 * _PREVIEW_CHARACTERS]).decode("utf-8", "backslashreplace")[:_PREVIEW_CHARACTERS]


def unlisted_rows(file: str, line: int, reason: str, count: int) -> BadRow:
    """The bad rows beyond those that are listed: how many, and the line of the first."""
    detail = f"{count:,} more rows of this kind in this part of the file, not listed"
    return BadRow(file, line, reason, detail, count=count)


def missing_column_error(file: str, name: str, found: Sequence[str], advice: str = "") -> DataError:
    """The error for a wanted column that a file lacks or has more than once; `advice` is added to it."""
    if name in found:
        return DataError(f"{file} has {found.count(name)} columns named {name!r}; rename all but one")
    near = difflib.get_close_matches(name, found, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "name one of them in the config, or add it to the file"
    # Binary data, such as a Parquet file read as CSV, must not reach a terminal unescaped.
    names = ", ".join(one if one.isprintable() else repr(one) for one in found) or "(none)"
    message = f"{file} has no column {name!r}; its columns are {names}; {hint}"
    stop = "" if message.endswith("?") or not advice else "."
    return DataError(f"{message}{stop} {advice}".rstrip())
