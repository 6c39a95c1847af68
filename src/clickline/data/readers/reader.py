"""What every reader is, and the words all of them share for what can be wrong with a row."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from clickline.errors import DataError
from clickline.records import Block, RawRows

BLOCK_BYTES = 2 << 20  # of uncompressed input: what is made of a block stays in the second-level caches
MAX_LINE_BYTES = 16 << 20  # a longer row is bad, so that a file without line ends cannot fill the memory
SHOWN_BAD_ROWS = 1000  # of one block; the rest are only counted, so that an all-bad file cannot either

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

_SHOWN_CHARACTERS = 200


class Reader(Protocol):
    """Turns files of one format into rows; `parse` holds no state, so blocks are parsed in any order."""

    def blocks(self, file: str, path: Path) -> Iterator[Block]:
        """Cut a local file at row ends. `file` is the name shown to users, `path` where its bytes are.

        A block holds all that `parse` needs: the file may be gone by then.
        """
        ...

    def parse(self, block: Block) -> RawRows:
        """The rows of one block. What is in `block.faults` is not repeated in `RawRows.bad`."""
        ...


def shown(row: bytes | bytearray | memoryview) -> str:
    """The beginning of a row as text that is safe to store, whatever its bytes are."""
    return bytes(row[: 4 * _SHOWN_CHARACTERS]).decode("utf-8", "backslashreplace")[:_SHOWN_CHARACTERS]


def missing_column(file: str, name: str, found: Sequence[str], advice: str = "") -> DataError:
    """A wanted column is not in a file, or is there more than once; `advice`: what else to look at."""
    if name in found:
        return DataError(f"{file} has {found.count(name)} columns named {name!r}; rename all but one")
    near = difflib.get_close_matches(name, found, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "name one of them in the config, or add it to the file"
    # What is no text at all, such as a Parquet file, must not reach a terminal as it is.
    there = ", ".join(one if one.isprintable() else repr(one) for one in found) or "(none)"
    told = f"{file} has no column {name!r}; its columns are {there}; {hint}"
    stop = "" if told.endswith("?") or not advice else "."
    return DataError(f"{told}{stop} {advice}".rstrip())
