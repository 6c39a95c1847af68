"""Manifests: the file that makes a folder an artifact. Written last, checked first."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clickline.errors import ArtifactError, StorageError
from clickline.storage.storage import Storage

MANIFEST = "manifest.json"
SIGNATURE = "manifest.sig"  # beside it, where a version is signed


def write_manifest(
    storage: Storage, folder: str, kind: str, format_number: int, body: Mapping[str, Any]
) -> None:
    """Declare `folder` whole. Nothing may be written to it afterwards."""
    storage.put(Storage.join(folder, MANIFEST), manifest_bytes(kind, format_number, body))


def manifest_bytes(kind: str, format_number: int, body: Mapping[str, Any]) -> bytes:
    """As it is stored; a body that was read gives the same bytes again.

    A line for each part and no blanks: of 10,000 slots most of an indented manifest is blanks."""
    parts = {"kind": kind, "format": format_number, **body}
    lines = [as_json(name) + b":" + as_json(part, separators=(",", ":")) for name, part in parts.items()]
    return b"{\n" + b",\n".join(lines) + b"\n}\n"


def read_manifest(
    storage: Storage,
    folder: str,
    kind: str,
    format_number: int,
    check: Callable[[bytes], None] = lambda content: None,
) -> dict[str, Any]:
    """The manifest of a whole artifact; ArtifactError when it is torn, absent or of another kind. `check` sees its
    bytes before anything is made of them."""
    place = Storage.join(folder, MANIFEST)
    try:
        content = storage.read(place)
    except StorageError as error:
        raise ArtifactError(f"{folder} holds no {MANIFEST}, so it was never finished: {error}") from error
    check(content)
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(
            f"{place} is not a manifest: {error}. Remove {folder} and make it again."
        ) from error
    found = (document.get("kind"), document.get("format")) if isinstance(document, dict) else (None, None)
    if found != (kind, format_number):
        raise ArtifactError(
            f"{place} says kind {found[0]!r}, format {found[1]!r}; this release reads kind {kind!r}, "
            f"format {format_number}. Make it again with this release."
        )
    return dict(document)


def digest(path: Path) -> str:
    """SHA-256 of a local file, streamed."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(document: Any) -> str:
    """A short stable name for a JSON value: 12 hex digits of its SHA-256."""
    return hashlib.sha256(as_json(document)).hexdigest()[:12]


def as_json(document: Any, indent: int | None = None, *, separators: tuple[str, str] | None = None) -> bytes:
    """A JSON text in UTF-8. A byte of a file's name that is not UTF-8 becomes an escape, which JSON allows."""
    text = json.dumps(document, indent=indent, separators=separators, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace")
