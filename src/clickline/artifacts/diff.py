"""Summaries of versions, and the differences between two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from clickline.artifacts.registry import Move
from clickline.artifacts.version import Version
from clickline.errors import ArtifactError
from clickline.validation import document_of

_METRICS = ("auc", "logloss", "normalised_entropy", "accuracy", "calibration", "ece", "brier", "base_rate")
_SCALARS = (
    "table",
    "parent",
    "rows",
    "tombstones",
    "table_precision",
    "dense_precision",
    "shards",
    "parts",
    "width",
)
_NESTED = ("logit_shift", "calibration", "model", "cost")

Pairs = dict[str, tuple[object, object]]
"""Differing values by their dotted path: (old, new)."""


def state_of(number: int, current: Move | None) -> list[str]:
    """Whether a version is current, and whether it is pinned."""
    if current is None or current.version != number:
        return []
    return ["current", "pinned"] if current.pinned else ["current"]


def summary(version: Version) -> dict[str, Any]:
    """The main figures of a version."""
    return {
        "version": version.number,
        "table": version.manifest.table,
        "parent": version.parent,
        "created": version.created,
        "rows": version.manifest.rows,
        "tombstones": version.manifest.tombstones,
        "bytes": version.size,
        "auc": metrics_of(version).get("auc"),
    }


def metrics_of(version: Version) -> dict[str, float]:
    """The metrics of the evaluation report that the version was published with."""
    report = version.manifest.report or {}
    metrics = _mapping(report.get("evaluation")) or report
    return {name: metrics[name] for name in _METRICS if isinstance(metrics.get(name), int | float)}


def _mapping(value: Any) -> Mapping[str, Any]:
    """A section of a manifest; empty if it is malformed, so that the other sections can still be compared."""
    return value if isinstance(value, dict) else {}


def differences(old: Version, new: Version) -> dict[str, Pairs]:
    """The differences between two versions: contents, metrics, features, config."""
    return {
        "contents": _changed(_contents(old), _contents(new)),
        "measures": _changed(metrics_of(old), metrics_of(new)),
        "features": _changed_features(old, new),
        "config": differing_settings(old.manifest.config, new.manifest.config),
    }


def _contents(version: Version) -> dict[str, object]:
    document = document_of(version.manifest)
    plain = {name: document[name] for name in _SCALARS}
    nested = {name: document[name] for name in _NESTED}
    return {**plain, "bytes": version.size, **dict(_flatten(nested))}


def _fields(version: Version) -> dict[str, object]:
    features = version.manifest.features
    lists = (("dense", features.get("dense")), ("slot", features.get("slots")))
    return {
        f"{kind} {field.get('name')}": field
        for kind, fields in lists
        for field in (fields if isinstance(fields, list) else ())
        if isinstance(field, dict)
    }


def _changed_features(old: Version, new: Version) -> Pairs:
    """Fields that only one of the versions has, and differences in the shared ones."""
    before, after = _fields(old), _fields(new)
    both = before.keys() & after.keys()
    unshared = {
        name: ("present" if name in before else None, "present" if name in after else None)
        for name in dict.fromkeys((*before, *after))
        if name not in both
    }
    shared = [dict(_flatten({name: tree[name] for name in tree if name in both})) for tree in (before, after)]
    return {**unshared, **_changed(*shared)}


def differing_settings(old: str, new: str) -> Pairs:
    """The differences between two configs, given as YAML."""
    try:
        before, after = (dict(_flatten(yaml.safe_load(text) or {})) for text in (old, new))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ArtifactError(f"the config of a version is not YAML: {error}. Publish it again.") from error
    return _changed(before, after)


def _flatten(tree: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """The leaves of a document by their dotted paths."""
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from _flatten(value, f"{path}.{name}" if path else str(name))
    else:
        yield path, tree


def _changed(old: Mapping[str, object], new: Mapping[str, object]) -> Pairs:
    keys = dict.fromkeys((*old, *new))
    pairs = {key: (old.get(key), new.get(key)) for key in keys}
    return {key: (a, b) for key, (a, b) in pairs.items() if a != b}
