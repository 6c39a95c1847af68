"""The builtin pages of a brpc server that its clients and operators ask for, as plain text."""

from __future__ import annotations

from importlib.metadata import version

from clickline.serving.open_versions import OpenVersions
from clickline.serving.protocols.request import Response
from clickline.wire.messages import METHODS

_TEXT = (b"content-type", b"text/plain")


def health(_model: str, _version: int | None, versions: OpenVersions) -> Response:
    """Whether a version is loaded: the page of brpc's `health_check_path`."""
    if versions.current is None:
        return Response(b"No version of the model is loaded yet.\n", 503, (_TEXT,))
    return Response(b"OK\n", 200, (_TEXT,))


def status(_model: str, _version: int | None, versions: OpenVersions) -> Response:
    """The model, its version, and the methods of each service."""
    current = versions.current
    lines = [
        f"clickline: {version('clickline')}",
        f"model: {', '.join(versions.names)}",
        f"version: {'none' if current is None else current.scorer.number}",
    ]
    for service, methods in METHODS.items():
        lines += ["", f"[{service}]", *methods]
    return Response("\n".join(lines).encode() + b"\n", 200, (_TEXT,))
