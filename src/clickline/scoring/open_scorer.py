"""Opens a version of a registry for scoring on this machine."""

from __future__ import annotations

from pathlib import Path

from clickline.artifacts.registry import Registry
from clickline.artifacts.version import Version, verify
from clickline.scoring.scorer import Scorer


def open_scorer(registry: Registry, version: Version, cache: Path, threads: int) -> Scorer:
    """Fetch a version, verify its files, and open it; `cache` has the copies of remote files."""
    folders = []
    for one in registry.chain(version):
        folders.append(registry.fetch(one, cache / "versions"))
        verify(one, folders[-1])
    return Scorer.open(version.manifest, folders, threads=threads)
