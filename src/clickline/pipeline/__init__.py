"""The whole flow: prepare, train, evaluate, gate, publish, serve, and go on as hours arrive."""

from __future__ import annotations

__all__: list[str] = []
