"""What came in: the prepared dataset, hour after hour, and rows that were left out."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from clickline.storage.redaction import redacted
from clickline.studio.file_reads import Stamp, stamp_of

_MOST_HOURS = 1000
_SAMPLES = 50
_SAMPLES_A_FILE = 10
_LONGEST = 400  # characters of a quarantined row
_KEPT = ("hour", "state", "rows", "bad", "version", "seconds", "at", "reason")


class Data:
    """The data of one home. An hour's record is read again when it has changed."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._hours = home / "follow" / "hours"
        self._known: dict[str, tuple[Stamp, dict[str, Any]]] = {}
        self._dataset: tuple[object, dict[str, Any] | None] = (None, None)

    def all(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """`state`: what `up` says of itself."""
        hours = self._records()
        learned = sum(hour["state"] == "learned" for hour in hours)
        passed = len(hours) - learned
        bad = sum(hour["bad"] or 0 for hour in hours)
        coming = _coming(state)
        if coming is not None and all(hour["hour"] != coming["hour"] for hour in hours[-1:]):
            hours.append(coming)
        dataset = self.dataset()
        bad += 0 if dataset is None else sum(split["bad_rows"] for split in dataset["splits"].values())
        waiting = sum(hour["state"] in ("waiting", "missing") for hour in hours[-1:])
        return {
            "dataset": dataset,
            "hours": hours[-_MOST_HOURS:],
            "summary": {
                "received": len(hours) - waiting,
                "learned": learned,
                "waiting": waiting,
                "passed_over": passed,
                "quarantined": bad,
            },
            "quarantine": list(islice(self._quarantine(dataset), _SAMPLES)),
        }

    def dataset(self) -> dict[str, Any] | None:
        """The newest finished one."""
        pointer = self._home / "datasets" / "current"
        try:
            name = Path(pointer.read_text().strip()).name
            manifest = self._home / "datasets" / name / "manifest.json"
            stamp = (name, manifest.stat().st_mtime_ns)
            if self._dataset[0] == stamp:
                return self._dataset[1]
            found = _dataset(json.loads(manifest.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # none yet, or what a power cut left of it
        self._dataset = (stamp, found)
        return found

    def stamp(self) -> object:
        """Changes when something arrives."""
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
        """Rows that were left out: of the newest hours first, then of the dataset."""
        folders = sorted((self._home / "hours").glob("*/quarantine"), reverse=True)
        if dataset is not None:
            folders.append(self._home / "datasets" / dataset["id"] / "quarantine")
        for folder in folders:
            for file in sorted(folder.glob("*.jsonl")):
                try:
                    with file.open("rb") as lines:
                        yield from map(_bad_row, islice(lines, _SAMPLES_A_FILE))
                except (OSError, ValueError, KeyError, TypeError):
                    continue


def _dataset(manifest: Mapping[str, Any]) -> dict[str, Any]:
    splits = {}
    for name, split in manifest["splits"].items():
        report = split["report"]
        splits[name] = {
            **{key: report.get(key) for key in ("rows", "shows", "clicks", "click_rate", "hours", "bad")},
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
        **{key: record.get(key) for key in _KEPT},
        "hour": str(record["hour"]),
        "state": str(record["state"]),
        "auc": measured.get("auc"),
        "logloss": measured.get("logloss"),
        "gate": None if record.get("gate") is None else bool(record["gate"]["passed"]),
    }


def _coming(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The hour that is waited for or learned, while somebody does."""
    following = state.get("stages", {}).get("follow", {})
    facts = following.get("facts", {})
    if state.get("state") != "running" or following.get("state") != "running" or not facts.get("hour"):
        return None
    now = "missing" if facts.get("late") and facts["state"] == "waiting" else facts["state"]
    empty = dict.fromkeys((*_KEPT, "auc", "logloss", "gate"))
    return {**empty, "hour": facts["hour"], "state": now, "at": facts.get("waiting_since")}


def _bad_row(line: bytes) -> dict[str, Any]:
    row = json.loads(line)
    return {
        "file": redacted(str(row["file"])),
        "line": row["line"],
        "reason": row["reason"],
        "detail": row["detail"],
        "text": str(row.get("text", ""))[:_LONGEST],
    }
