"""The manifest, which makes a folder an artifact: written last, checked first."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clickline.errors import ArtifactError, StorageError
from clickline.storage.storage import Storage
from clickline.validation import document_of

MANIFEST = "manifest.json"
SIGNATURE = "manifest.sig"  # next to the manifest of a signed version


def write_manifest(storage: Storage, folder: str, kind: str, format_number: int, manifest: Any) -> None:
    """Mark `folder` as complete. Nothing may be written to it afterwards."""
    storage.put(Storage.join(folder, MANIFEST), manifest_bytes(kind, format_number, manifest))


def manifest_bytes(kind: str, format_number: int, manifest: Any) -> bytes:
    """The stored form of a manifest, which is a dataclass.

    One line per key and no indentation: with 10,000 slots an indented manifest would be mostly blanks."""
    parts = {"kind": kind, "format": format_number, **document_of(manifest)}
    lines = [as_json(name) + b":" + as_json(part, separators=(",", ":")) for name, part in parts.items()]
    return b"{\n" + b",\n".join(lines) + b"\n}\n"


def read_manifest(
    storage: Storage,
    folder: str,
    kind: str,
    format_number: int,
    check: Callable[[bytes], None] = lambda content: None,
) -> dict[str, Any]:
    """The manifest of an artifact; ArtifactError if it is missing, damaged or of another kind. `check` gets its bytes
    before they are parsed."""
    uri = Storage.join(folder, MANIFEST)
    try:
        content = storage.read(uri)
    except StorageError as error:
        raise ArtifactError(f"{folder} has no {MANIFEST}, so it was never finished: {error}") from error
    check(content)
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(
            f"{uri} is not a manifest: {error}. Remove {folder} and create it again."
        ) from error
    found = (document.get("kind"), document.get("format")) if isinstance(document, dict) else (None, None)
    if found != (kind, format_number):
        raise ArtifactError(
            f"{uri} has kind {found[0]!r}, format {found[1]!r}; this release reads kind {kind!r}, "
            f"format {format_number}. Create it again with this release."
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
    """JSON text in UTF-8. A byte of a file name that is not UTF-8 becomes an escape, which JSON allows."""
    text = json.dumps(document, indent=indent, separators=separators, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace")
