"""Config files of other systems: read as text, never executed; errors name the file, line and key."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path
from typing import NamedTuple

from clickline.errors import ConfigError, Mistake

MAX_BYTES = 2**20

_URI = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


class Origin(NamedTuple):
    """Where a key is in its source."""

    file: str
    line: int
    key: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where} {self.key}".rstrip()


def source_error(origin: Origin, problem: str, remedy: str) -> ConfigError:
    """The error for an invalid source."""
    return ConfigError([Mistake(origin.file, origin.line, origin.key, problem, remedy)])


def read_source(path: Path) -> str:
    """The text of a source file."""
    place = Origin(str(path), 0, "")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise source_error(place, f"cannot be read: {reason}.", "Name a readable file.") from None
    if len(content) > MAX_BYTES:
        raise source_error(place, f"is larger than {MAX_BYTES} bytes.", "Name a config file, not data.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise source_error(
            place._replace(line=line), "is not UTF-8 text.", "Save the file as UTF-8."
        ) from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise source_error(
            place._replace(line=line), "contains a zero byte. Allowed: text.", "Name the config file."
        )
    return text


def relative(path: str, written_in: Path, target: Path) -> str:
    """A path relative to the source's folder, rewritten relative to the folder `target` of the result."""
    if _URI.match(path) or path.startswith(("/", "~")):
        return path
    return os.path.relpath(written_in / path, target)


def all_files(folder: str) -> str:
    """The glob of all files in a folder; special characters in its name are escaped."""
    return f"{glob.escape(folder.rstrip('/'))}/*"


def slug(name: str) -> str:
    """The closest valid model name."""
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-") or "ads"
