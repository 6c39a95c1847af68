"""The data panel: the prepared dataset, the hours that follow mode has processed, and quarantined rows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from clickline.storage.redaction import redacted
from clickline.studio.file_reads import Stamp, current_dataset, read_document, stamp_of

_MAX_HOURS = 1000
_SAMPLES = 50
_SAMPLES_PER_FILE = 10
_MAX_TEXT = 400  # characters of a quarantined row
_HOUR_KEYS = ("hour", "state", "rows", "bad", "version", "seconds", "at", "reason")


class DatasetView:
    """The data of one home. The record of an hour is read again only when it has changed."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._hours = home / "follow" / "hours"
        self._known: dict[str, tuple[Stamp, dict[str, Any]]] = {}
        self._dataset: tuple[object, dict[str, Any] | None] = (None, None)

    def all(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The document of the data panel. `state` is the state document of `up`."""
        hours = self._records()
        trained = sum(hour["state"] == "learned" for hour in hours)
        skipped = len(hours) - trained
        bad = sum(hour["bad"] or 0 for hour in hours)
        pending = _pending_hour(state)
        if pending is not None and all(hour["hour"] != pending["hour"] for hour in hours[-1:]):
            hours.append(pending)
        dataset = self.dataset()
        bad += 0 if dataset is None else sum(split["bad_rows"] for split in dataset["splits"].values())
        waiting = sum(hour["state"] in ("waiting", "missing") for hour in hours[-1:])
        return {
            "dataset": dataset,
            "hours": hours[-_MAX_HOURS:],
            "summary": {
                "received": len(hours) - waiting,
                "learned": trained,
                "waiting": waiting,
                "passed_over": skipped,
                "quarantined": bad,
            },
            "quarantine": list(islice(self._quarantine(dataset), _SAMPLES)),
        }

    def dataset(self) -> dict[str, Any] | None:
        """The newest complete dataset."""
        folder = current_dataset(self._home)
        if folder is None:
            return None
        manifest = folder / "manifest.json"
        stamp = (folder, stamp_of(manifest))
        if self._dataset[0] != stamp:
            try:
                self._dataset = (stamp, _dataset(read_document(manifest)))
            except (KeyError, TypeError, AttributeError):
                return None  # damaged by a power cut
        return self._dataset[1]

    def stamp(self) -> object:
        """A value that changes when new data arrives."""
        return [stamp_of(path) for path in (self._hours, self._home / "datasets" / "current")]

    def _records(self) -> list[dict[str, Any]]:
        """Oldest first."""
        found: dict[str, tuple[Stamp, dict[str, Any]]] = {}
        try:
            with os.scandir(self._hours) as entries:
                there = {entry.name: entry for entry in entries if entry.name.endswith(".json")}
        except OSError:
            there = {}
        for name in sorted(there):
            try:
                about = there[name].stat()
                stamp = (about.st_mtime_ns, about.st_size)
                known = self._known.get(name)
                if known is None or known[0] != stamp:
                    known = (stamp, _hour(json.loads(Path(there[name].path).read_bytes())))
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue  # being written, or somebody else's
            found[name] = known
        self._known = found
        return [record for _, record in found.values()]

    def _quarantine(self, dataset: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
        """Quarantined rows: of the newest hours first, then of the dataset."""
        folders = sorted((self._home / "hours").glob("*/quarantine"), reverse=True)
        if dataset is not None:
            folders.append(self._home / "datasets" / dataset["id"] / "quarantine")
        for folder in folders:
            for file in sorted(folder.glob("*.jsonl")):
                try:
                    with file.open("rb") as lines:
                        yield from map(_bad_row, islice(lines, _SAMPLES_PER_FILE))
                except (OSError, ValueError, KeyError, TypeError):
                    continue


def _dataset(manifest: Mapping[str, Any]) -> dict[str, Any]:
    splits = {}
    for name, split in manifest["splits"].items():
        report = split["report"]
        splits[name] = {
            **{
                key: report.get(key)
                for key in ("rows", "impressions", "clicks", "click_rate", "hours", "bad")
            },
            "bad_rows": sum(report.get("bad", {}).values()),
            "bytes": sum(shard["size"] for shard in split["shards"]),
            "files": len(split["shards"]),
        }
    train = splits["train"]
    return {
        "id": str(manifest["id"]),
        "rows": sum(split["rows"] for split in splits.values()),
        "clicks": sum(split["clicks"] for split in splits.values()),
        "click_rate": train["click_rate"],
        "splits": splits,
        "slots": manifest["splits"]["train"]["report"]["slots"],
    }


def _hour(record: Mapping[str, Any]) -> dict[str, Any]:
    measured = record.get("progressive") or {}
    return {
        **{key: record.get(key) for key in _HOUR_KEYS},
        "hour": str(record["hour"]),
        "state": str(record["state"]),
        "auc": measured.get("auc"),
        "logloss": measured.get("logloss"),
        "gate": None if record.get("gate") is None else bool(record["gate"]["passed"]),
    }


def _pending_hour(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The hour that a running `up --follow` waits for or trains on."""
    following = state.get("stages", {}).get("follow", {})
    facts = following.get("facts", {})
    if state.get("state") != "running" or following.get("state") != "running" or not facts.get("hour"):
        return None
    now = "missing" if facts.get("late") and facts["state"] == "waiting" else facts["state"]
    empty = dict.fromkeys((*_HOUR_KEYS, "auc", "logloss", "gate"))
    return {**empty, "hour": facts["hour"], "state": now, "at": facts.get("waiting_since")}


def _bad_row(line: bytes) -> dict[str, Any]:
    row = json.loads(line)
    return {
        "file": redacted(str(row["file"])),
        "line": row["line"],
        "reason": row["reason"],
        "detail": row["detail"],
        "text": str(row.get("text", ""))[:_MAX_TEXT],
    }
