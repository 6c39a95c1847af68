"""Homes of the fake studio, one a state that is hard to reach for real, and the documents they answer with."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

RUNS = (
    "74a026456e9d",
    "1f0c96a35c1b",
    "c2b8d1e09f44",
    "90aa17ce3b52",
    "5de1c4470b9a",
    "e4470b9a5de1",
    "b52c290aa17c",
)


def ago(seconds: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


# ── pieces of documents ────────────────────────────────────────────────────────────────────────


def stage(
    state: str, facts: dict[str, Any] | None = None, since: float = 60, took: float | None = None, **more: Any
) -> dict[str, Any]:
    found: dict[str, Any] = {"state": state, "facts": facts or {}}
    if state != "waiting":
        found["since"] = ago(since)
    if took is not None:
        found["ended"] = ago(since - took)
    return found | more


def flow(upto: str = "serve", begun: float = 90) -> dict[str, Any]:
    """The stages of a run that went well, those after `upto` waiting."""
    made = {
        "prepare": stage(
            "done",
            {
                "dataset": "/srv/ads/.clickline/datasets/4b97f1cd351b",
                "train_rows": 240_000,
                "eval_rows": 60_000,
                "bad_rows": 12,
                "seconds": 1.44,
            },
            begun,
            2.9,
            rows_per_second=231_038.5,
        ),
        "train": stage(
            "done",
            {
                "checkpoint": "/srv/ads/.clickline/runs/74a026456e9d/step-000000235",
                "steps": 235,
                "seconds": 10.05,
            },
            begun - 3,
            12.7,
            rows_per_second=36_080.3,
        ),
        "evaluate": stage(
            "done",
            {
                "auc": 0.75888,
                "logloss": 0.48053,
                "calibration": 0.99679,
                "report": "/srv/ads/.clickline/runs/74a026456e9d/report.json",
            },
            begun - 16,
            0,
        ),
        "gate": stage("done", {"passed": True, "warnings": []}, begun - 16, 0),
        "publish": stage(
            "done",
            {
                "version": 7,
                "folder": "/srv/ads/.clickline/registry/versions/000000007",
                "table": "base",
                "rows": 197_102,
                "current": True,
                "seconds": 0.98,
            },
            begun - 16,
            1.6,
            rows_per_second=228_707.4,
        ),
        "serve": stage(
            "running",
            {
                "version": 7,
                "processes": 2,
                "grpc": "127.0.0.1:8500",
                "http": "http://127.0.0.1:8501",
                "metrics": "http://127.0.0.1:8502/metrics",
                "curl": 'curl http://127.0.0.1:8501/v1/models/ads:predict -d \'{"instances": [{"I1": 1, "I2": 1, "C1": "1", "C2": "1"}]}\'',
            },
            begun - 18,
        ),
    }
    names = list(made)
    cut = names.index(upto) + 1
    return {name: made[name] if n < cut else stage("waiting") for n, name in enumerate(names)}


def curve(seed: int, points: int = 120, share: float = 1.0, rows: int = 240_000) -> dict[str, list[float]]:
    """A learning curve of a run that has learned a share of its rows."""
    dice = random.Random(seed)
    best = 0.75 + 0.012 * dice.random()
    steps = max(2, int(points * share))
    found: dict[str, list[float]] = {
        name: [] for name in ("step", "rows", "seconds", "loss", "auc", "rows_per_second")
    }
    for n in range(1, steps + 1):
        done = n / points
        found["step"].append(round(235 * done))
        found["rows"].append(round(rows * done))
        found["seconds"].append(12.7 * done * (1 + 0.1 * seed))
        found["loss"].append(0.48 + 0.2 * math.exp(-6 * done) + 0.006 * dice.random())
        found["auc"].append(best - (best - 0.55) * math.exp(-5 * done) + 0.004 * dice.random())
        found["rows_per_second"].append(36_000 - 1500 * seed + 2500 * dice.random())
    return found


def run_row(name: str, seed: int, state: str = "finished") -> dict[str, Any]:
    training = state == "training"
    return {
        "run": name,
        "created": ago(3600 * 9 * seed + 75),
        "state": state,
        "auc": None if training else 0.7589 - 0.0021 * seed,
        "logloss": None if training else 0.4805 + 0.0017 * seed,
        "calibration": None if training else 0.9968 + 0.004 * seed,
        "step": 118 if training else 235,
        "epochs": 1,
        "gate": None
        if training
        else {"passed": state != "refused", "reasons": REFUSED if state == "refused" else [], "warnings": []},
        "has_report": not training,
    }


REFUSED = [
    "AUC is 0.6812, gate.auc asks for 0.7. Learn more rows or epochs, or lower gate.auc.",
    "AUC is 0.0412 below that of version 6 on the same rows, gate.vs_current allows -0.002.",
]


def report(name: str, seed: int, state: str) -> dict[str, Any]:
    row = run_row(name, seed, state)
    steps = [n / 60 for n in range(61)]
    bins = [0.02 + 0.04 * n for n in range(20)]
    return {
        "format": 2,
        "run": {"name": name, "home": "/srv/ads/.clickline", "project": "ads", "created": row["created"]},
        "lineage": {
            "dataset": {
                "id": "4b97f1cd351b",
                "folder": "/srv/ads/.clickline/datasets/4b97f1cd351b",
                "train_rows": 240_000,
                "eval_rows": 60_000,
                "inputs": ["data/train.tsv", "data/eval.tsv"],
                "files": 2,
            },
            "checkpoint": {"folder": "step-000000235", "step": 235, "trained_rows": 240_000},
            "version": 7,
        },
        "checkpoint": "step-000000235",
        "evaluation": {
            "rows": 60_000,
            "impressions": 60_000.0,
            "clicks": 15_171.0,
            "base_rate": 0.25285,
            "auc": row["auc"],
            "auc_interval": [0.7545, 0.7632],
            "logloss": row["logloss"],
            "calibration": row["calibration"],
        },
        "curves": {
            "roc": {"false_positive_rate": steps, "true_positive_rate": [x**0.42 for x in steps]},
            "calibration": {
                "predicted": bins,
                "observed": [x * 0.97 + 0.004 for x in bins],
                "low": [x * 0.95 for x in bins],
                "high": [x + 0.02 for x in bins],
                "impressions": [3000] * 20,
            },
        },
        "learning": curve(seed),
        "epochs": [
            {
                "epoch": 1,
                "step": 235,
                "auc": row["auc"],
                "logloss": row["logloss"],
                "calibration": row["calibration"],
            }
        ],
        "importance": [
            {"name": f"C{n}", "kind": "slot", "lost": 0.031 / n, "auc": 0.75, "error": 0.0}
            for n in range(1, 27)
        ],
        "importance_rows": 20_000,
        "drift": {
            "rows_train": 100_000,
            "rows_eval": 60_000,
            "fields": [{"name": f"C{n}", "kind": "slot", "psi": 0.31 / n, "top": []} for n in range(1, 27)],
        },
        "gate": row["gate"],
        "notes": []
        if state == "finished"
        else ["There was no live version that could be scored on the same rows."],
    }


def versions(count: int, current: int, pinned: bool = False, hourly: bool = False) -> dict[str, Any]:
    dice = random.Random(5)
    made = []
    for n in range(count, 0, -1):
        base = n % 12 == 1
        state = [
            *(["current"] if n == current else []),
            *(["pinned"] if n == current and pinned else []),
            *(["previous"] if n == current - 1 else []),
        ]
        made.append(
            {
                "version": n,
                "table": "base" if base else "delta",
                "parent": None if base else n - 1,
                "created": ago((count - n) * (3600 if hourly else 21_600) + 70),
                "rows": 197_102 + 130 * n if base else 8_400 + 37 * n,
                "tombstones": 0,
                "bytes": 11_777_096 + 9000 * n if base else 540_000 + 2000 * n,
                "auc": 0.735 + 0.02 * (1 - math.exp(-n / 9)) + 0.004 * dice.random(),
                "logloss": 0.49 - 0.009 * (1 - math.exp(-n / 9)) + 0.002 * dice.random(),
                "state": state,
            }
        )
    moves = [
        {
            "sequence": n,
            "version": n,
            "reason": "hour learned" if hourly else "publish",
            "at": ago((count - n) * 21_600 + 70),
            "pinned": False,
            "by": "ads@host-3",
            "before": [n - 1] if n > 1 else [],
            "highest": n,
        }
        for n in range(current, max(0, current - 30), -1)
    ]
    return {
        "current": current,
        "pinned": pinned,
        "previous": current - 1 if current > 1 else None,
        "list": made,
        "moves": moves,
    }


DIFF = {
    "measures": {
        "auc": [0.7561, 0.7589],
        "logloss": [0.4822, 0.4805],
        "calibration": [1.0041, 0.9968],
        "ece": [0.0113, 0.0096],
    },
    "contents": {
        "table": ["delta", "base"],
        "rows": [8_622, 197_102],
        "bytes": [552_000, 11_777_096],
        "parent": [5, None],
    },
    "features": {},
    "config": {"train.epochs": [1, 2], "model.hidden": [[256, 128], [512, 256, 128, 32]]},
}


def point(seconds: float, busy: float = 1.0) -> dict[str, Any]:
    phase = time.time() - seconds
    wave = 1 + 0.25 * math.sin(phase / 20) + 0.06 * math.sin(phase * 1.7)
    return {
        "at": ago(seconds),
        "qps": 412 * wave * busy,
        "rows_per_second": 8_240 * wave * busy,
        "p50_ms": 1.9 + 0.3 * wave,
        "p99_ms": 6.1 + 2.2 * wave,
        "errors_per_second": 0.0 if int(phase) % 41 else 2.0,
    }


def serving(alive: bool, version: int | None, points: int = 300, reason: str = "") -> dict[str, Any]:
    slots = [
        {
            "slot": f"C{n}",
            "lookups": 1_200_000,
            "misses": int(1_200_000 * 0.62 / n**1.4),
            "miss_rate": 0.62 / n**1.4,
        }
        for n in range(1, 27)
    ]
    return {
        "alive": alive,
        "reason": reason or None,
        "version": version,
        "url": "http://127.0.0.1:8502/metrics",
        "history": [point(points - n) for n in range(points)],
        "totals": {"requests": 1_204_511, "errors": 37, "rows": 24_090_220}
        if points
        else {"requests": 0, "errors": 0, "rows": 0},
        "slots": slots if points else [],
        "by_code": {"OK": 1_204_474, "INVALID_ARGUMENT": 33, "DEADLINE_EXCEEDED": 4} if points else {},
        "by_protocol": {"grpc": 1_011_902, "rest": 180_344, "v2": 12_265} if points else {},
    }


NO_SERVING = serving(False, None, 0, "nothing was published yet")


def hours(count: int) -> list[dict[str, Any]]:
    """An hour each since New Year, with everything that can become of one."""
    dice = random.Random(11)
    found = []
    for n in range(count):
        at = datetime(2026, 10, 26, tzinfo=UTC) + timedelta(hours=n)
        label = f"{at:%Y%m%d/%H}"
        night = 0.5 + 0.5 * math.sin((at.hour - 8) / 24 * 2 * math.pi)
        state = "learned"
        if n >= count - 2:
            state = "waiting" if n == count - 1 else "learning"
        elif n % 97 == 50:
            state = "corrupt"
        elif n % 113 == 60:
            state = "skipped"
        elif n % 131 == 70:
            state = "refused"
        elif n % 211 == 200:
            state = "empty"
        one: dict[str, Any] = {
            "hour": label,
            "state": "learned" if state == "refused" else state,
            "gate": None if state != "refused" else False,
            "rows": None,
            "bad": None,
            "auc": None,
            "version": None,
            "seconds": None,
        }
        if state in ("learned", "refused"):
            one |= {
                "rows": int(3000 + 9000 * night + 500 * dice.random()),
                "bad": int(dice.random() < 0.05) * 3,
                "auc": 0.70 + 0.04 * (1 - math.exp(-n / 60)) + 0.012 * dice.random() - 0.01 * night,
                "version": n + 1,
                "seconds": 0.4 + dice.random(),
            }
        if state in ("corrupt", "skipped"):
            one["reason"] = (
                "12 % of its rows are bad, data.max_bad_ratio allows 1 %."
                if state == "corrupt"
                else "Its donefile is missing for 2 h."
            )
        found.append(one)
    return found


def split(rows: int, bad: dict[str, int], files: int) -> dict[str, Any]:
    return {
        "rows": rows,
        "impressions": rows,
        "clicks": int(rows * 0.2527),
        "click_rate": 0.2527,
        "hours": None,
        "bad": bad,
        "bad_rows": sum(bad.values()),
        "bytes": rows * 130,
        "files": files,
    }


DATASET = {
    "id": "4b97f1cd351b",
    "rows": 300_000,
    "clicks": 75_820,
    "click_rate": 0.2527,
    "splits": {"train": split(240_000, {"label": 8, "columns": 4}, 13), "eval": split(60_000, {}, 4)},
    "slots": [
        {
            "name": f"C{n}",
            "distinct": 40_029 // n,
            "missing_rate": 0.01 * n,
            "values_per_row": 1.0,
            "top": [{"value": f"{n * 7919:08x}", "share": 0.31 / n}],
        }
        for n in range(1, 27)
    ],
}
QUARANTINE = [
    {"file": "data/train.tsv", "line": 1042 + 7 * n, "reason": reason, "detail": detail, "text": text}
    for n, (reason, detail, text) in enumerate(
        [
            (
                "label",
                "found '2', allowed are 0 and 1",
                "2\t5\t110\t\t16\t\t1\t0\t14\t7\t1\t\t306\t\t62770d79\te21f5d58",
            ),
            ("columns", "found 12, expected 40", "0\t1\t1\t5\t0\t1382\t4\t15\t2\t181\t1\t2"),
            (
                "number",
                "I3 is 'n/a'",
                "0\t2\t0\tn/a\t1\t102\t8\t2\t2\t4\t1\t1\t\t4\t68fd1e64<script>alert(1)</script>",
            ),
        ]
        * 4
    )
]
NO_DATA: dict[str, Any] = {
    "dataset": None,
    "hours": [],
    "summary": {"received": 0, "learned": 0, "waiting": 0, "quarantined": 0},
    "quarantine": [],
}


def form(version: int) -> dict[str, Any]:
    fields: list[dict[str, Any]] = [
        {"name": f"I{n}", "kind": "dense", "column": f"I{n}", "multi": False, "top": [], "example": n}
        for n in range(1, 14)
    ]
    fields += [
        {
            "name": f"C{n}",
            "kind": "slot",
            "column": f"C{n}",
            "multi": n == 26,
            "top": [f"{n * 7919 + m * 104_729:08x}" for m in range(8)],
            "example": f"{n * 7919:08x}",
        }
        for n in range(1, 27)
    ]
    examples = [
        {
            field["column"]: (k + field["example"]) if field["kind"] == "dense" else field["top"][k]
            for field in fields
            if (len(field["column"]) + k) % 7 or k == 0
        }
        for k in range(5)
    ]
    return {"fields": fields, "examples": examples, "version": version}


def scored(row: dict[str, Any], shift: float = 0.0) -> float:
    weight = sum(
        math.sin(hash_of(f"{key}={value}")) * (0.9 / (1 + n / 6))
        for n, (key, value) in enumerate(sorted(row.items()))
    )
    return 1 / (1 + math.exp(1.1 - 0.35 * weight - shift))


def hash_of(text: str) -> int:
    return int.from_bytes(text.encode()[-6:], "little") % 9973


def status_of(name: str, state: str, stages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "state": state,
        "name": name,
        "pid": 18_953 if state == "running" else None,
        "since": ago(95),
        "ended": None if state == "running" else ago(20),
        "follow": False,
        "serve": True,
        "drain": 10,
        "stage": None,
        "stages": stages,
        "work": None,
        "processes": [
            {"role": "up", "pid": 18_953},
            {"role": "serve", "pid": 19_705},
            {"role": "serve", "pid": 19_735},
        ]
        if state == "running"
        else [],
        "error": None,
        "updated": ago(1),
        "home": f"/srv/{name}/.clickline",
        "logs": f"/srv/{name}/.clickline/up/logs",
        "cluster": None,
        "metrics": {"auc": 0.75888, "logloss": 0.48053, "calibration": 0.99679},
        "health": None,
        "versions": {
            "current": 7,
            "pinned": False,
            "since": ago(70),
            "count": 7,
            "newest": [{"version": 7, "created": ago(70), "table": "base"}],
        },
        "now": ago(0),
    } | more


NO_VERSIONS: dict[str, Any] = {"current": None, "pinned": False, "since": None, "count": 0, "newest": []}


def working(share: float) -> dict[str, Any]:
    return {
        "title": "train epoch 1",
        "rows": int(240_000 * share),
        "bytes": 0,
        "rows_per_second": 24_331.0,
        "bytes_per_second": 0.0,
        "share": share,
        "seconds_left": (1 - share) * 9.9,
        "note": "loss 0.5012, AUC 0.7311 of the last rows",
    }


def cluster_status() -> dict[str, Any]:
    workers = [
        {
            "name": f"worker-{n}",
            "node": f"10.0.0.{4 + n // 2}",
            "state": "learning" if n != 5 else "starting",
            "at": f"unit {40 + n}, batch {17 * n % 50}",
            "rows": 0 if n == 5 else 1_204_000 + 9_000 * n,
            "rows_per_second": 0.0 if n == 5 else 21_400.0 + 350 * n,
            "memory": 1_450_000_000 + 30_000_000 * n,
        }
        for n in range(8)
    ]
    used = (5.1, 5.6, 7.1, 7.7)
    shards = [
        {
            "name": f"shard-{n}",
            "node": f"10.0.0.{4 + n}",
            "ids": 41_000_000 + 12_345 * n,
            "memory": int(used[n] * 2**30),
            "limit": 8 * 2**30,
        }
        for n in range(4)
    ]
    return {
        "state": "running",
        "mode": "async",
        "generation": 1,
        "workers": workers,
        "shards": shards,
        "network": {"name": "network", "node": "10.0.0.4", "ids": None, "memory": 310_000_000, "limit": None},
        "leases": {"todo": 52, "open": 7, "done": 41},
        "last_checkpoint": {"step": 9_420, "at": ago(74), "seconds": 6.2, "stalled": 0.3},
        "metrics": {
            "step": 9_871,
            "rows": 40_430_000,
            "total_rows": 98_000_000,
            "rows_per_second": 152_000.0,
            "auc": 0.7711,
            "loss": 0.4612,
        },
        "events": [
            {
                "at": ago(900),
                "decision": "restart",
                "reason": "shard-2 crashed: its state is gone, so training rolls back to the last checkpoint",
            },
            {"at": ago(40), "decision": "resize", "reason": "the cluster has capacity: from 7 to 8 workers"},
        ],
        "most": 12,
        "message": "",
        "run": "1f0c96a35c1b",
        "pid": 4711,
        "host": "head",
        "updated_at": ago(0),
        "alive": True,
        "requested": 8,
        "folder": "/srv/ads/.clickline/runs/1f0c96a35c1b",
    }


# ── scenarios ──────────────────────────────────────────────────────────────────────────────────


NAMES = {
    "serving": "ads",
    "training": "ads-trial",
    "empty": "new-shop",
    "failed": "ads-eu",
    "refused": "video",
    "dead": "feed",
    "follow": "feed-hourly",
    "cluster": "ads-large",
}


class FakeHome:
    """What one home answers; tests may change it while the page looks at it."""

    def __init__(self, name: str) -> None:
        self.id = name
        self.name = NAMES.get(name, name)  # as people call it; the id is the scenario
        self.began = time.time()
        self.runs: list[dict[str, Any]] = []
        self.versions: dict[str, Any] = {
            "current": None,
            "pinned": False,
            "previous": None,
            "list": [],
            "moves": [],
        }
        self.serving: Callable[[], dict[str, Any]] = lambda: NO_SERVING
        self.data: dict[str, Any] = NO_DATA
        self.form: dict[str, Any] | None = None
        self.status: Callable[[], dict[str, Any]] = lambda: status_of(
            self.name, "never", {}, metrics={}, versions=NO_VERSIONS, since=None, ended=None
        )
        self.log = [
            "2026-11-16T07:55:21.505Z prepare began",
            "2026-11-16T07:55:22.952Z 240,000 rows to learn, 60,000 to measure",
        ]
        self.changed: list[str] = []  # events to tell once

    def share(self) -> float:
        return min(0.97, 0.42 + (time.time() - self.began) / 60)

    def state(self) -> str:
        return str(self.status()["state"])


def _served(home: FakeHome) -> FakeHome:
    home.runs = [run_row(run, n, "refused" if n == 2 else "finished") for n, run in enumerate(RUNS)]
    home.versions = versions(7, 7)
    home.serving = lambda: serving(True, home.versions["current"])
    home.data = {
        "dataset": DATASET,
        "hours": [],
        "summary": {"received": 0, "learned": 0, "waiting": 0, "quarantined": 12},
        "quarantine": QUARANTINE,
    }
    home.form = form(7)
    home.status = lambda: status_of(
        home.name, "running", flow(), stage="serve", health="ready", versions=_newest(home)
    )
    return home


def _newest(home: FakeHome) -> dict[str, Any]:
    known = home.versions
    return {
        "current": known["current"],
        "pinned": known["pinned"],
        "since": ago(70),
        "count": len(known["list"]),
        "newest": [{key: one[key] for key in ("version", "created", "table")} for one in known["list"][:3]],
    }


def empty() -> FakeHome:
    return FakeHome("empty")


def training() -> FakeHome:
    home = FakeHome("training")
    home.runs = [run_row(RUNS[0], 0, "training"), *(run_row(run, n) for n, run in enumerate(RUNS[1:4], 1))]
    home.data = {
        "dataset": DATASET,
        "hours": [],
        "summary": {"received": 0, "learned": 0, "waiting": 0, "quarantined": 0},
        "quarantine": [],
    }

    def status() -> dict[str, Any]:
        stages = flow("prepare") | {"train": stage("running", {}, 22)}
        return status_of(
            home.name,
            "running",
            stages,
            stage="train",
            work=working(home.share()),
            metrics={},
            versions=NO_VERSIONS,
        )

    home.status = status
    return home


def serving_home() -> FakeHome:
    return _served(FakeHome("serving"))


def failed() -> FakeHome:
    home = FakeHome("failed")
    words = "data/train.tsv: 3.1 % of its rows are bad (7,440 of 240,000), data.max_bad_ratio allows 1 %. Look at the samples in .clickline/datasets/…/quarantine, mend the file, or raise data.max_bad_ratio."
    stages = flow("prepare") | {"prepare": stage("failed", {"reason": words}, 30, 2.2)}
    home.status = lambda: status_of(
        home.name,
        "failed",
        stages,
        stage="prepare",
        error={"kind": "TooManyBadRows", "message": words},
        metrics={},
        versions=NO_VERSIONS,
    )
    home.log = [f"2026-11-16T07:55:{n:02d}.000Z line {n} of the log" for n in range(50)]
    home.data = NO_DATA | {
        "quarantine": QUARANTINE,
        "summary": {"received": 0, "learned": 0, "waiting": 0, "quarantined": 7440},
        "dataset": DATASET,
    }
    return home


def refused() -> FakeHome:
    home = _served(FakeHome("refused"))
    stages = flow("evaluate") | {
        "gate": stage("refused", {"passed": False, "reasons": REFUSED, "warnings": []}, 30, 0)
    }
    home.status = lambda: status_of(
        home.name,
        "failed",
        stages,
        stage="gate",
        error={"kind": "GateRefused", "message": " ".join(REFUSED)},
        versions=_newest(home),
        metrics={"auc": 0.6812, "logloss": 0.5311, "calibration": 1.0631},
    )
    home.runs = [run_row(RUNS[0], 0, "refused"), *(run_row(run, n) for n, run in enumerate(RUNS[1:4], 1))]
    home.serving = lambda: serving(False, None, 0, "the run that served is not running")
    home.form = None
    return home


def dead() -> FakeHome:
    home = _served(FakeHome("dead"))
    reason = "no answer: Connection refused"
    home.status = lambda: status_of(
        home.name, "running", flow(), stage="serve", health=reason, versions=_newest(home)
    )
    home.serving = lambda: serving(False, None, 120, reason)
    home.form = None
    return home


def follow() -> FakeHome:
    home = _served(FakeHome("follow"))
    home.versions = versions(480, 480, hourly=True)
    home.data = {
        "dataset": DATASET,
        "hours": hours(500),
        "summary": {"received": 499, "learned": 484, "waiting": 1, "quarantined": 63},
        "quarantine": QUARANTINE,
    }
    last = {
        "hour": "20261115/17",
        "rows": 11_482,
        "progressive": {"auc": 0.7421, "logloss": 0.4892, "calibration": 1.002},
        "version": 480,
    }

    def status() -> dict[str, Any]:
        stages = flow("publish", 260_000) | {
            "follow": stage(
                "running",
                {
                    "state": "waiting",
                    "hour": "20261115/19",
                    "waiting_since": ago(8_000),
                    "late": True,
                    "hours_learned": 484,
                    "last": last,
                },
                259_000,
            ),
            "serve": flow()["serve"],
        }
        stages["publish"]["facts"] = {
            "version": 480,
            "table": "delta",
            "hour": "20261115/17",
            "current": True,
        }
        return status_of(
            home.name,
            "running",
            stages,
            stage="follow",
            follow=True,
            health="ready",
            since=ago(260_000),
            versions=_newest(home),
            metrics={"auc": 0.7421, "logloss": 0.4892, "calibration": 1.002},
        )

    home.status = status
    return home


def cluster() -> FakeHome:
    home = training()
    home.id, home.name = "cluster", NAMES["cluster"]

    def status() -> dict[str, Any]:
        stages = flow("prepare") | {"train": stage("running", {}, 280)}
        work = working(0.41) | {
            "title": "train epoch 1 on 8 workers",
            "rows": 40_430_000,
            "rows_per_second": 152_000.0,
            "seconds_left": 379.0,
        }
        return status_of(
            home.name,
            "running",
            stages,
            stage="train",
            work=work,
            metrics={},
            versions=NO_VERSIONS,
            cluster=cluster_status(),
        )

    home.status = status
    return home


SCENARIOS: dict[str, Callable[[], FakeHome]] = {
    "serving": serving_home,
    "training": training,
    "empty": empty,
    "failed": failed,
    "refused": refused,
    "dead": dead,
    "follow": follow,
    "cluster": cluster,
}
