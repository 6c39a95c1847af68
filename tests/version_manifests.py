"""Manifests of versions that have no real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clickline.artifacts.version import VersionManifest
from clickline.validation import validate

IMPORT = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
from version_manifests import version_manifest
"""
"""The beginning of a script for another process that needs `version_manifest`."""


def version_manifest(parent: int | None = None, **changes: Any) -> VersionManifest:
    """A valid manifest with these changes, given as JSON."""
    document = {
        "number": 0,
        "created": "",
        "parent": parent,
        "table": "base" if parent is None else "delta",
        "rows": 3,
        "tombstones": 0,
        "table_precision": "fp32",
        "dense_precision": "fp32",
        "shards": 1,
        "parts": [],
        "slots": [],
        "features": {"dense": [], "slots": []},
        "network": {"name": "lr", "file_sha256": None, "hidden": [], "batch_norm": False},
        "width": 0,
        "logit_shift": 0.0,
        "calibration": None,
        "model": {"checkpoint": "run/step-000000001", "step": 1},
        "config": "",
        "report": None,
        "sample": {"requested_rows": 256},
        "cost": {},
        "files": {},
    }
    return validate(VersionManifest, document | changes, "the test's manifest")
