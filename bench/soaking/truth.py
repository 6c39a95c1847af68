"""The expected results, computed from files in the simplest way.

It uses nothing of Clickline except its file formats: ids by xxhash, rows found by sorting, the network by the reference
evaluator of ONNX, counters by SQL over the logs.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

_MASK = 2**64 - 1
_TRAILER = struct.Struct("<QI4x8s")


def _fmix64(x: int) -> int:
    x = ((x ^ (x >> 33)) * 0xFF51AFD7ED558CCD) & _MASK
    x = ((x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53) & _MASK
    return x ^ (x >> 33)


def id_of(slot: int, text: str) -> int:
    """The id of a value in a slot, as specified in docs/architecture.md."""
    return _fmix64(xxhash.xxh64_intdigest(text.encode()) ^ _fmix64((slot + 0x9E3779B97F4A7C15) & _MASK))


# ── versions ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Rows:
    """Sorted ids with their wide weight and vector; tombstones have NaN."""

    ids_N: np.ndarray
    wide_N: np.ndarray
    vector_ND: np.ndarray


def _table(folder: Path) -> _Rows:
    """All rows of a version's own files (fp32, one part)."""
    found = []
    for path in sorted(folder.glob("table-*.bin")):
        content = path.read_bytes()
        length, _, _ = _TRAILER.unpack(content[-_TRAILER.size :])
        footer = json.loads(content[-_TRAILER.size - length : -_TRAILER.size])
        (part,), (section,) = footer["parts"], footer["sections"]
        assert footer["precision"] == "fp32", footer
        assert part["wide"], footer
        size = 8 + 4 + 4 * part["dim"]
        kind = np.dtype(
            {
                "names": ["id", "wide", "vector"],
                "formats": ["<u8", "<f4", ("<f4", (part["dim"],))],
                "offsets": [0, 8, 12],
                "itemsize": -(-size // 8) * 8,
            }
        )
        count = section["rows"] + section["tombstones"]
        found.append(np.frombuffer(content, kind, count, section["rows_at"]))
    rows_N = np.concatenate(found)
    rows_N = rows_N[np.argsort(rows_N["id"])]
    return _Rows(rows_N["id"], rows_N["wide"], rows_N["vector"])


def _apply_delta(below: _Rows, above: _Rows) -> _Rows:
    """Apply a delta to a table."""
    stays_N = ~np.isin(below.ids_N, above.ids_N)
    ids_N = np.concatenate([below.ids_N[stays_N], above.ids_N])
    wide_N = np.concatenate([below.wide_N[stays_N], above.wide_N])
    vector_ND = np.concatenate([below.vector_ND[stays_N], above.vector_ND])
    order_N = np.argsort(ids_N)
    return _Rows(ids_N[order_N], wide_N[order_N], vector_ND[order_N])


class Published:
    """The versions in a folder, by number."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: dict[int, _Rows] = {}  # the last few: a chain is opened from its base

    def numbers(self) -> list[int]:
        return sorted(int(path.parent.name) for path in self._folder.glob("*/manifest.json"))

    def manifest(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self._folder / f"{number:09d}" / "manifest.json").read_text())
        return found

    def ids(self, number: int) -> np.ndarray:
        """All ids of a version's table."""
        rows = self._rows(number)
        return rows.ids_N[~np.isnan(rows.wide_N)]

    def scores(self, number: int, requested: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """The scores that a version must give to rows."""
        import onnx
        from onnx.reference import ReferenceEvaluator

        manifest, rows = self.manifest(number), self._rows(number)
        assert manifest["calibration"] is None, "the soak does not support calibration"
        wide_B = np.zeros(len(requested))
        columns = []
        for slot in manifest["slots"]:
            default = np.array(slot["vector"], np.float32)
            number_of_slot = int(slot["name"].removeprefix("C"))
            vectors = []
            for b, row in enumerate(requested):
                wide, vector = _find(rows, id_of(number_of_slot, row[slot["name"]]))
                vectors.append(default if vector is None else vector)
                wide_B[b] += slot["wide"] if vector is None else wide
            columns.append(np.stack(vectors))
        for field in manifest["features"]["dense"]:
            columns.append(np.array([[_log1p(row[field["name"]])] for row in requested], np.float32))
        network = ReferenceEvaluator(onnx.load(self._folder / f"{number:09d}" / "dense.onnx"))
        inputs = {"inputs": np.concatenate(columns, axis=1), "wide": wide_B.astype(np.float32)}
        (logit_B,) = network.run(["logit"], inputs)
        return 1.0 / (1.0 + np.exp(-(logit_B.astype(np.float64).reshape(-1) + manifest["logit_shift"])))

    def _rows(self, number: int) -> _Rows:
        if number not in self._opened:
            own = _table(self._folder / f"{number:09d}")
            parent = self.manifest(number)["parent"]
            self._opened[number] = own if parent is None else _apply_delta(self._rows(parent), own)
            for old in sorted(self._opened)[:-3]:
                del self._opened[old]
        return self._opened[number]


def _find(rows: _Rows, id: int) -> tuple[float, np.ndarray | None]:
    at = int(np.searchsorted(rows.ids_N, np.uint64(id)))
    if at == rows.ids_N.size or rows.ids_N[at] != np.uint64(id) or np.isnan(rows.wide_N[at]):
        return 0.0, None
    return float(rows.wide_N[at]), rows.vector_ND[at]


def _log1p(value: float) -> float:
    return 0.0 if math.isnan(value) else math.copysign(math.log1p(abs(value)), value)


# ── counters ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Counters:
    """Impressions and clicks of every id, sorted by id, and the hour it was last seen in."""

    ids_N: np.ndarray
    impressions_N: np.ndarray
    clicks_N: np.ndarray
    hour_N: np.ndarray

    def differences(self, other: Counters) -> int:
        """The number of ids that are only in one of them, or have different counts."""
        mine = set(
            zip(
                self.ids_N.tolist(),
                self.impressions_N.tolist(),
                self.clicks_N.tolist(),
                self.hour_N.tolist(),
                strict=True,
            )
        )
        theirs = set(
            zip(
                other.ids_N.tolist(),
                other.impressions_N.tolist(),
                other.clicks_N.tolist(),
                other.hour_N.tolist(),
                strict=True,
            )
        )
        return len({entry[0] for entry in mine ^ theirs})


def counters_of_logs(files: Sequence[Path], slots: int, max_idle_hours: int) -> Counters:
    """Count over the logs. An id that was not seen for more than `max_idle_hours` hours is evicted at the end of an hour,
    which resets its counts."""
    import duckdb

    last = 0
    found: list[tuple[int, int, int, int]] = []
    with duckdb.connect() as database:
        database.execute("SET threads TO 1")
        database.execute(
            "CREATE TABLE log AS SELECT * FROM read_csv(?, all_varchar = true, header = true)",
            [[str(file) for file in files]],
        )
        newest = database.execute("SELECT max(CAST(timestamp AS BIGINT) // 3600) FROM log").fetchone()
        assert newest is not None
        last = int(newest[0])
        for slot in range(1, slots + 1):
            counts = database.execute(
                f"SELECT coalesce(C{slot}, '') AS value, CAST(timestamp AS BIGINT) // 3600 AS hour, count(*), "
                "sum(CAST(click AS BIGINT)) FROM log GROUP BY ALL ORDER BY value, hour"
            ).fetchall()
            before: str | None = None
            impressions = clicks = at = 0
            for value, hour, count, clicked in [*counts, (None, 0, 0, 0)]:
                if value != before and before is not None and last - at <= max_idle_hours:
                    found.append((id_of(slot, before), impressions, clicks, at))
                if value != before or hour - 1 - at > max_idle_hours:
                    impressions = clicks = 0
                before, at = value, hour
                impressions, clicks = impressions + count, clicks + int(clicked)
    return _sorted(*(list(column) for column in zip(*found, strict=True)))


def counters_of_checkpoint(folder: Path) -> Counters:
    """Read the counters of a checkpoint."""
    from clickline.embedding.snapshot import SnapshotReader

    reader = SnapshotReader(folder / "tables.bin")
    records = [piece for table in range(len(reader.tables)) for piece in reader.rows(table)]
    return _sorted(
        *(
            np.concatenate([piece[name] for piece in records])
            for name in ("id", "impression", "click", "hour")
        )
    )


def _sorted(ids: Any, impressions: Any, clicks: Any, hours: Any) -> Counters:
    ids_N = np.array(ids, np.uint64)
    order_N = np.argsort(ids_N)
    return Counters(
        ids_N[order_N],
        np.array(impressions, np.float64)[order_N],
        np.array(clicks, np.float64)[order_N],
        np.array(hours, np.int64)[order_N],
    )
