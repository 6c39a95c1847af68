"""Reads a donefile that lists what is complete: the `donefile/base.txt` of cube, the `donefile.txt` of PaddleRec.

    {"id": "1767236400", "key": "1767236400", "input": "hdfs://namenode:9000/logs/20260101/03"}
    20260101    1767236400    /logs/20260101/03    3    0        (columns separated by tabs; one of them is the path)
    /logs/20260101/03

A store that writes the list may rewrite it as a whole, so a file that is absent lists nothing.
"""

from __future__ import annotations

import json
import re

from clickline.errors import StorageError
from clickline.storage.redaction import redacted
from clickline.storage.storage import Storage

_HOST = re.compile(r"[a-z][a-z0-9+.-]*://[^/]*", re.IGNORECASE)


def is_donefile_list(donefile: str) -> bool:
    """Whether a donefile is one file with a list: it is given by its path. A plain name is looked up in each folder."""
    return "/" in donefile


def paths_in_donefile(storage: Storage, donefile: str) -> set[str]:
    """All paths that the file lists, without hosts."""
    if storage.describe(donefile) is None:
        return set()
    lines = storage.read(donefile).decode("utf-8-sig", "backslashreplace").split("\n")
    paths = set()
    for number, line in enumerate(lines, start=1):
        path = _path_in(line.strip())
        if path:
            paths.add(path_without_host(path))
        elif line.strip() and number < len(lines):  # the last line may still be written
            raise StorageError(
                f"line {number} of {redacted(donefile)} names no path. Allowed: a JSON object with `input`, or columns "
                "separated by tabs, one of them a path with a slash. Correct it, or set data.donefile to the name of a "
                "file in each hour's folder."
            )
    return paths


def path_without_host(path: str) -> str:
    """The path of a URI or a local path, without a slash at its end: a store may have several addresses."""
    return re.sub("/+", "/", _HOST.sub("", path, count=1)).removeprefix("./").rstrip("/")


def is_listed(path: str, listed: set[str]) -> bool:
    """Whether a file or folder is listed: by an absolute path to it or into it, or by a relative path, its end."""
    return any(
        f"{one}/".startswith(f"{path}/") if one.startswith("/") else path.endswith(f"/{one}")
        for one in listed
    )


def _path_in(line: str) -> str | None:
    if line.startswith("{"):
        try:
            entry = json.loads(line)
        except ValueError:
            return None
        path = entry.get("input")
        return path if isinstance(path, str) else None
    return next((column for column in line.split("\t") if "/" in column), None)
