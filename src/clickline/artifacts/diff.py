"""What is told of versions: a line for each, and what differs between two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from clickline.artifacts.registry import Move
from clickline.artifacts.version import Version

_MEASURES = ("auc", "logloss", "normalised_entropy", "accuracy", "calibration", "ece", "brier", "base_rate")
_PLAIN = ("table", "parent", "rows", "tombstones", "precision", "dense", "shards", "parts", "width")
_ALSO_COMPARED = ("logit_shift", "calibration", "model", "cost")

Pairs = dict[str, tuple[object, object]]
"""What differs, by its dotted path: before and after."""


def state_of(number: int, current: Move | None) -> list[str]:
    """Whether the pointer is at a version, and held there."""
    if current is None or current.version != number:
        return []
    return ["current", "pinned"] if current.pinned else ["current"]


def summary(version: Version) -> dict[str, Any]:
    """A version in a few figures."""
    return {
        "version": version.number,
        "table": version.body.get("table"),
        "parent": version.parent,
        "created": version.created,
        "rows": version.body.get("rows"),
        "tombstones": version.body.get("tombstones"),
        "bytes": version.size,
        "auc": measures(version).get("auc"),
    }


def measures(version: Version) -> dict[str, float]:
    """The figures of the report that the version was judged by."""
    report = _object(version.body.get("report"))
    found = _object(report.get("evaluation")) or report
    return {name: found[name] for name in _MEASURES if isinstance(found.get(name), int | float)}


def _object(found: Any) -> Mapping[str, Any]:
    """A part of a manifest; empty where it is not what it should be: who compares versions must see the others."""
    return found if isinstance(found, dict) else {}


def differences(old: Version, new: Version) -> dict[str, Pairs]:
    """What differs between two versions: contents, measures, features, config."""
    return {
        "contents": _differing(_contents(old), _contents(new)),
        "measures": _differing(measures(old), measures(new)),
        "features": _differing_features(old, new),
        "config": differing_settings(*(str(one.body.get("config") or "") for one in (old, new))),
    }


def _contents(version: Version) -> dict[str, object]:
    plain = {name: version.body.get(name) for name in _PLAIN}
    more = {name: version.body.get(name) for name in _ALSO_COMPARED}
    return {**plain, "bytes": version.size, **dict(_flat(more))}


def _fields(version: Version) -> dict[str, object]:
    features = _object(version.body.get("features"))
    lists = (("dense", features.get("dense")), ("slot", features.get("slots")))
    return {
        f"{kind} {field.get('name')}": field
        for kind, fields in lists
        for field in (fields if isinstance(fields, list) else ())
        if isinstance(field, dict)
    }


def _differing_features(old: Version, new: Version) -> Pairs:
    """Fields that one of them lacks, and what differs in those that both have."""
    before, after = _fields(old), _fields(new)
    both = before.keys() & after.keys()
    lone = {
        name: ("there" if name in before else None, "there" if name in after else None)
        for name in dict.fromkeys((*before, *after))
        if name not in both
    }
    shared = [dict(_flat({name: tree[name] for name in tree if name in both})) for tree in (before, after)]
    return {**lone, **_differing(*shared)}


def differing_settings(old: str, new: str) -> Pairs:
    """What differs between two configs, given as YAML."""
    before, after = (dict(_flat(yaml.safe_load(text) or {})) for text in (old, new))
    return _differing(before, after)


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """The leaves of a document by their dotted paths."""
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from _flat(value, f"{path}.{name}" if path else str(name))
    else:
        yield path, tree


def _differing(old: Mapping[str, object], new: Mapping[str, object]) -> Pairs:
    keys = dict.fromkeys((*old, *new))
    pairs = {key: (old.get(key), new.get(key)) for key in keys}
    return {key: (a, b) for key, (a, b) in pairs.items() if a != b}
