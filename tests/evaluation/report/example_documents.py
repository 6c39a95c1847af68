"""Example report documents from simulated scores."""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickline.evaluation.binary_metrics import MetricCounts

Floats = NDArray[np.float32]

_FIRST_HOUR = 494_000  # in May 2026
_SITES = ["news", "sport", "weather", "shop", "games", "travel"]


def document(**settings: Any) -> dict[str, Any]:
    """Everything that a document may hold; `settings` as `_document` takes them."""
    return copy.deepcopy(_document(**settings))


@cache
def _document(
    *,
    seed: int = 1,
    skill: float = 1.0,
    hours: int = 24,
    slots: int = 14,
    current: bool = True,
    epochs: int = 2,
) -> dict[str, Any]:
    """A larger skill ranks better."""
    rng = np.random.default_rng(11)  # the rows are the same whatever the model
    rows = 20_000
    truth = rng.normal(-1.9, 1.1, rows)
    label = (rng.random(rows) < _sigmoid(truth)).astype(np.float32)
    hour = np.sort(rng.integers(0, hours, rows))
    site = rng.choice(len(_SITES), rows, p=[0.3, 0.25, 0.2, 0.12, 0.08, 0.05])
    own = np.random.default_rng(seed)
    measured, curves, slices = _measured(own, truth, label, hour, site, skill)
    live, live_curves, live_slices = _measured(np.random.default_rng(2), truth, label, hour, site, 0.75)
    names = [f"C{n}" for n in range(1, slots + 1)]
    dense = ["age", "price", "position"]
    config = f"name: ads\ndata:\n  format: criteo\n  train: data/train.tsv\nmodel:\n  name: wide_deep\n  embedding_dim: {8 + seed}\ntrain:\n  epochs: {epochs}\n"
    return {
        "format": 2,
        "requested": {"epochs": epochs, "early_stopping": None, "gate": {"auc": 0.6}},
        "run": {
            "name": f"74a026456e{seed:02d}",
            "home": "/srv/ads/.clickline",
            "project": "ads",
            "created": "2026-11-16T09:30:12+00:00",
        },
        "checkpoint": "step-000004600",
        "lineage": {
            "dataset": {
                "id": "4b97f1cd351b",
                "folder": "/srv/ads/.clickline/datasets/4b97f1cd351b",
                "train_rows": 942_080,
                "eval_rows": rows,
                "inputs": [f"s3://logs/ads/2026051{n}/part-0000{n}.tsv.gz" for n in range(6)],
                "files": 48,
            },
            "checkpoint": {
                "folder": f"/srv/ads/.clickline/runs/74a026456e{seed:02d}/step-000004600",
                "step": 4600,
                "epoch": epochs,
                "trained_rows": 1_884_160,
            },
            "version": None,
        },
        "evaluation": {**measured, "slices": slices, "own": {}},
        "curves": curves,
        "learning": _learning(own, epochs),
        "epochs": [
            {
                "epoch": n + 1,
                "step": 4600 * (n + 1) // epochs,
                "auc": measured["auc"] - 0.004 * (epochs - 1 - n),
                "logloss": measured["logloss"] + 0.003 * (epochs - 1 - n),
                "calibration": 1.01,
            }
            for n in range(epochs)
        ],
        "progressive": None,
        "importance": _importance(own, [*names, *dense], dense, measured["auc"]),
        "importance_rows": 12_000,
        "slot_table": [_slot(own, name, dense=False) for name in names] + [_slot(own, name, dense=True) for name in dense],
        "slots": [{"name": name, "ids": 1000, "candidates": 0, "evicted": 0} for name in names],
        "drift": {"rows_train": 100_000, "rows_eval": rows, "fields": _drift(own, names, dense)},
        "current": {"version": 3, "evaluation": _total(live), "curves": live_curves, "slices": live_slices}
        if current
        else None,
        "gate": {"passed": True, "reasons": [], "warnings": []},
        "notes": [] if current else ["there is no current version to compare with."],
        "config": config,
    }  # fmt: skip


def refused() -> dict[str, Any]:
    """The gate said no."""
    found = document(skill=0.55)
    found["gate"] = {
        "passed": False,
        "reasons": [
            f"AUC is {found['evaluation']['auc']:.6g}, below gate.auc 0.8.",
            "AUC is 0.71, the current version's 0.74: a change of -0.03; gate.vs_current allows a loss of 0.005.",
        ],
        "warnings": ["accuracy is the only threshold of the gate: set gate.auc or gate.logloss as well."],
    }
    return found


def bare() -> dict[str, Any]:
    """Trained without eval rows: nothing could be measured."""
    found = document(current=False)
    found |= {"evaluation": None, "curves": None, "importance": None, "importance_rows": None, "drift": None}
    found["epochs"] = [{"epoch": 1, "step": 4600, "auc": None, "logloss": None, "calibration": None}]
    found["gate"]["warnings"] = ["nothing was measured: data.eval is not given."]
    found["notes"] = ["data.eval gives no rows to measure on."]
    return found


def one_class() -> dict[str, Any]:
    """Eval rows without a click: no AUC, no ROC."""
    found = document(current=False, hours=3)
    counts = MetricCounts()
    counts.add(np.zeros(500, np.float32), np.ones(500, np.float32), np.full(500, 0.1, np.float32))
    total = counts.metrics().to_json()
    hours = [{"hour": _FIRST_HOUR + n, "utc": _utc(n), **total} for n in range(3)]
    found["evaluation"] = {**total, "hours": hours, "slices": {}, "own": {}}
    found["curves"] = {
        "roc": None,
        "precision_recall": None,
        "gain": None,
        "calibration": {
            "predicted": [0.1],
            "observed": [0.0],
            "low": [0.0],
            "high": [0.008],
            "impressions": [500.0],
        },
        "scores": {"edges": [0.0, 0.05, 0.1, 0.15], "clicks": [0, 0, 0], "others": [0, 0, 500]},
    }
    found["importance"] = []
    found["gate"] = {"passed": False, "reasons": ["AUC could not be measured."], "warnings": []}
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def long() -> dict[str, Any]:
    """500 hours, a gap among them, and 200 slots."""
    found = document(hours=500, slots=200, epochs=10)
    found["evaluation"]["hours"] = [
        h for n, h in enumerate(found["evaluation"]["hours"]) if not 200 <= n < 224
    ]
    found["progressive"] = {"hours": copy.deepcopy(found["evaluation"]["hours"][:300]), "late": 0}
    return found


HOSTILE = "</script><img src=x onerror=\"document.title='broken'\"><b>%{x}</b>"


def hostile() -> dict[str, Any]:
    """Every text that a user chooses is a try to leave its place."""
    found = document()
    found["run"] |= {"name": HOSTILE, "home": HOSTILE, "project": HOSTILE}
    found["config"] = f"name: {json.dumps(HOSTILE)}"
    found["lineage"]["dataset"]["inputs"] = [HOSTILE, "caf\udce9.tsv"]  # a name that is not UTF-8
    found["importance"][0]["name"] = HOSTILE
    found["drift"]["fields"][0] |= {"name": HOSTILE, "top": [{"value": HOSTILE, "train": 0.1, "eval": 0.2}]}
    found["slot_table"][0]["slot"] = HOSTILE
    for one in (found["evaluation"], found["current"]):
        one["slices"] = {HOSTILE: one["slices"]["site"]}
        one["slices"][HOSTILE][0]["value"] = HOSTILE
    found["evaluation"]["own"] = {HOSTILE: 1.5}
    found["gate"]["warnings"] = [HOSTILE]
    found["notes"] = [HOSTILE]
    return found


def old() -> dict[str, Any]:
    """As releases before the page wrote it."""
    found = document()
    known = ("requested", "checkpoint", "evaluation", "gate", "epochs", "slots", "progressive")
    found["evaluation"]["slices"] = {}
    return {key: found[key] for key in known}


# ── parts ──────────────────────────────────────────────────────────────────────────────────────


def _measured(
    rng: np.random.Generator, truth: Any, label: Floats, hour: Any, site: Any, skill: float
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    noise = rng.normal(0, 1.1, truth.size)
    score = _sigmoid(-1.9 + skill * (truth + 1.9) * 0.8 + (1 - skill) * noise).astype(np.float32)
    hours = [
        {"hour": _FIRST_HOUR + int(n), "utc": _utc(int(n)), **_metrics(label[hour == n], score[hour == n])}
        for n in np.unique(hour)
    ]
    slices = [
        {"id": f"{n:016x}", "missed": 0.0, **_metrics(label[site == n], score[site == n]), "value": name}
        for n, name in enumerate(_SITES)
    ]
    return {**_metrics(label, score), "hours": hours}, _curves(label, score), {"site": slices}


def _total(measured: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in measured.items() if key != "hours"}


def _metrics(label: Floats, score: Floats) -> dict[str, Any]:
    counts = MetricCounts()
    counts.add(label, np.ones_like(label), score)
    found: dict[str, Any] = json.loads(json.dumps(counts.metrics().to_json()))
    return found


def _curves(label: Floats, score: Floats) -> dict[str, Any]:
    order = np.argsort(-score, kind="stable")
    clicks = np.concatenate([[0], np.cumsum(label[order])])
    shows = np.arange(label.size + 1)
    at = np.unique(np.linspace(0, label.size, 200).astype(int))
    total = clicks[-1]
    some = at[1:]
    bins = np.array_split(np.argsort(score, kind="stable"), 20)
    observed = np.array([label[b].mean() for b in bins])
    wide = 1.96 * np.sqrt(observed * (1 - observed) / [b.size for b in bins])
    edges = np.linspace(0, 1, 51)
    return {
        "roc": {
            "false_positive_rate": ((shows - clicks)[at] / (label.size - total)).tolist(),
            "true_positive_rate": (clicks[at] / total).tolist(),
        },
        "precision_recall": {
            "recall": (clicks[some] / total).tolist(),
            "precision": (clicks[some] / shows[some]).tolist(),
        },
        "calibration": {
            "predicted": [float(score[b].mean()) for b in bins],
            "observed": observed.tolist(),
            "low": np.maximum(observed - wide, 0).tolist(),
            "high": (observed + wide).tolist(),
            "impressions": [float(b.size) for b in bins],
        },
        "scores": {
            "edges": edges.tolist(),
            "clicks": np.histogram(score[label == 1], edges)[0].astype(float).tolist(),
            "others": np.histogram(score[label == 0], edges)[0].astype(float).tolist(),
        },
        "gain": {
            "share_of_impressions": (some / label.size).tolist(),
            "share_of_clicks": (clicks[some] / total).tolist(),
            "lift": (clicks[some] / total / (some / label.size)).tolist(),
        },
    }


def _learning(rng: np.random.Generator, epochs: int) -> dict[str, Any]:
    step = np.arange(20, 4601, 20)
    way = 1 - np.exp(-step / 700)
    return {
        "step": step.tolist(),
        "rows": (step * 410).tolist(),
        "seconds": np.round(step * 0.0031, 3).tolist(),
        "loss": (0.52 - 0.13 * way + rng.normal(0, 0.006, step.size)).tolist(),
        "auc": [None, *(0.55 + 0.2 * way + rng.normal(0, 0.008, step.size)).tolist()[1:]],
        "rows_per_second": np.round(132_000 + rng.normal(0, 6000, step.size), 1).tolist(),
    }


def _importance(
    rng: np.random.Generator, names: list[str], dense: list[str], auc: float
) -> list[dict[str, Any]]:
    lost = np.sort(rng.exponential(0.006, len(names)) - 0.0006)[::-1]
    mixed = rng.permutation(names)
    return [
        {"name": str(name), "kind": "dense" if name in dense else "slot", "auc": auc - float(value), "lost": float(value), "error": 0.0}
        for name, value in zip(mixed, lost, strict=True)
    ]  # fmt: skip


def _slot(rng: np.random.Generator, name: str, *, dense: bool) -> dict[str, Any]:
    distinct = None if dense else int(10 ** rng.uniform(1, 5))
    return {
        "slot": name,
        "kind": "dense" if dense else "slot",
        "distinct_train": distinct,
        "distinct_eval": None if distinct is None else distinct // 3 + 1,
        "missing_train": float(rng.beta(1, 20)),
        "missing_eval": float(rng.beta(1, 20)),
        "ids": None if distinct is None else distinct * 4 // 5,
        "candidates": None if distinct is None else distinct // 5,
        "evicted": None if dense else int(rng.integers(0, 40)),
        "unseen_eval": None if dense else float(rng.beta(1, 12)),
    }


def _drift(rng: np.random.Generator, names: list[str], dense: list[str]) -> list[dict[str, Any]]:
    fields = []
    for name in [*names, *dense]:
        kind = "dense" if name in dense else "slot"
        key = "range" if kind == "dense" else "value"
        values = ["below 0.2", "0.2 to 1.4"] if kind == "dense" else ["05db9164", "68fd1e64", "(missing)"]
        top = [
            {key: value, "train": float(rng.beta(2, 9)), "eval": float(rng.beta(2, 9))} for value in values
        ]
        fields.append({"name": name, "kind": kind, "psi": float(rng.gamma(0.5, 0.12)), "top": top})
    return sorted(fields, key=lambda field: -float(field["psi"]))


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _utc(n: int) -> str:
    return f"{datetime.fromtimestamp((_FIRST_HOUR + n) * 3600, UTC):%Y-%m-%dT%H}"
