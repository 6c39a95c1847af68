"""What an apply records in the ConfigMap for the next one: its --set values, and the notes that it has shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from clickline.config import load_config
from clickline.deploy.kube_client import Kube
from clickline.deploy.objects import Object
from clickline.deploy.render import setting_text
from clickline.errors import ConfigError

_SET = "clickline/set"
_NOTES = "clickline/notes"


@dataclass(frozen=True)
class ApplyRecord:
    """The record of the last apply; empty before the first."""

    overrides: tuple[str, ...] = ()
    shown_notes: frozenset[str] = frozenset()

    def new_notes(self, notes: Sequence[str]) -> list[str]:
        """The notes that have not been shown yet."""
        return [line for line in notes if _fingerprint(line) not in self.shown_notes]


def with_record(objects: Sequence[Object], overrides: Sequence[str], notes: Sequence[str]) -> list[Object]:
    """The objects, with the record in the ConfigMap's annotations."""
    annotations = {_SET: json.dumps(list(overrides))} if overrides else {}
    if notes:
        annotations[_NOTES] = ",".join(sorted(map(_fingerprint, notes)))
    return [_annotated(one, annotations) if one["kind"] == "ConfigMap" else one for one in objects]


def _annotated(item: Object, annotations: dict[str, str]) -> Object:
    return {**item, "metadata": {**item["metadata"], "annotations": annotations}} if annotations else item


def read_record(kube: Kube, objects: Sequence[Object]) -> ApplyRecord:
    """The record of the last apply."""
    config = next(one for one in objects if one["kind"] == "ConfigMap")
    live = kube.live(config)
    left = ((live or {}).get("metadata") or {}).get("annotations") or {}
    shown = frozenset(filter(None, left.get(_NOTES, "").split(",")))
    try:
        overrides = json.loads(left.get(_SET, "[]"))
    except ValueError:  # edited by hand
        overrides = []
    return ApplyRecord(tuple(map(str, overrides)) if isinstance(overrides, list) else (), shown)


def _fingerprint(note: str) -> str:
    return sha256(note.encode()).hexdigest()[:8]


def dropped_overrides(config_file: Path, before: Sequence[str], now: Sequence[str]) -> list[str]:
    """Values that change back because the last apply had a --set that this one does not have; a line each."""
    if not before:
        return []
    try:
        old = load_config(config_file, before).model_dump(mode="json", by_alias=True)
    except ConfigError:
        given = " ".join(f"--set {one}" for one in before)
        return [f"the last apply used {given}, which {config_file} no longer accepts"]
    new = load_config(config_file, now).model_dump(mode="json", by_alias=True)
    lines = []
    for one in before:
        key = one.partition("=")[0].strip()
        was, becomes = _value(old, key), _value(new, key)
        if was != becomes:
            lines.append(
                f"{key} {setting_text(was)} → {setting_text(becomes)}: the last apply used --set {one}"
            )
    return lines


def _value(document: Any, key: str) -> Any:
    for step in key.split("."):
        document = document.get(step) if isinstance(document, dict) else None
    return document
