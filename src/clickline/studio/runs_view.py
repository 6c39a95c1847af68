"""The runs panel: every training run in <home>/runs, finished or not, with its report and learning curve."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clickline.studio.file_reads import Stamp, read_document, stamp_of

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_FRESH_SECONDS = 15.0  # a running training writes its curve once a second
_FOLLOW = "follow"


class RunsView:
    """The runs of one home. Files are read again only when they have changed."""

    def __init__(self, home: Path) -> None:
        self._folder = home / "runs"
        self._hours = home / "follow" / "hours"
        self._known: dict[Path, tuple[Stamp, dict[str, Any]]] = {}

    def list(self, state: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One entry per run, most recently active first. `state` is the state document of `up`."""
        entries = [self._line(run, state) for run in self._runs()]
        busy = _busy(state)
        open_runs = [line for line in entries if line["state"] == "stopped" and line["run"] != _FOLLOW]
        if busy and open_runs:
            newest = max(open_runs, key=lambda line: line["_begun"])
            if newest["_begun"] >= max(line["_begun"] for line in entries):
                newest["state"] = "training"
        entries.sort(key=lambda line: (line["_written"], line["run"]), reverse=True)
        return [{key: value for key, value in line.items() if key[0] != "_"} for line in entries]

    def report(self, name: str) -> dict[str, Any] | None:
        """The report of a run with its learning curve; None if there is no such run."""
        run = self._run(name)
        if run is None:
            return None
        document = {
            key: value for key, value in read_document(run / "report.json").items() if key != "config"
        }
        return {"run": {"name": name}, **document, "learning": _curve(run) or document.get("learning")}

    def curve(self, name: str) -> dict[str, Any] | None:
        """The learning curve of a run; empty while there is none."""
        run = self._run(name)
        return None if run is None else _curve(run)

    def page(self, name: str) -> Path | None:
        """The HTML report of a run."""
        run = self._run(name)
        page = None if run is None else run / "report.html"
        return page if page is not None and page.is_file() else None

    def stamp(self) -> object:
        """A value that changes when the list of runs does."""
        return [
            (run.name, *(stamp_of(run / name) for name in ("report.json", "curve.json", "report.html")))
            for run in self._runs()
        ]

    def _runs(self) -> Iterator[Path]:
        try:
            folders = sorted(self._folder.iterdir())
        except OSError:
            return
        yield from (run for run in folders if _NAME.fullmatch(run.name) and run.is_dir())

    def _run(self, name: str) -> Path | None:
        """The folder of a run; names that are not run names cannot escape the home."""
        run = self._folder / name
        return run if _NAME.fullmatch(name) and run.is_dir() else None

    def _line(self, run: Path, state: Mapping[str, Any]) -> dict[str, Any]:
        stamps = {name: stamp_of(run / name) for name in ("report.json", "curve.json", "resolved.yaml")}
        reported, curve, begun = (stamp[0] for stamp in stamps.values())
        figures = self._figures(run / "report.json", stamps["report.json"], _of_report)
        learning = self._figures(run / "curve.json", stamps["curve.json"], _of_curve)
        # abs(): if the clock was set back, a file may be from the future.
        fresh = curve > reported and abs(time.time() - curve / 1e9) < _FRESH_SECONDS
        if run.name == _FOLLOW:
            follows = state.get("state") == "running" and bool(state.get("follow"))
            now = "training" if follows else "stopped"
            figures = self._last_hour() or figures
        elif fresh:
            now = "training"
        elif figures:
            now = "refused" if (figures["gate"] or {}).get("passed") is False else "finished"
            if begun > reported and _busy(state):  # training was resumed, or the gate is checked again
                now = "stopped"
        else:
            now = "stopped"
        shown = figures if figures and now in ("finished", "refused") else {**figures, **learning}
        at = shown.get("created") or (
            _utc(begun or reported or curve) if begun or reported or curve else None
        )
        return {
            "run": run.name,
            "created": at,
            "state": now,
            "auc": shown.get("auc"),
            "logloss": shown.get("logloss"),
            "calibration": shown.get("calibration"),
            "step": shown.get("step"),
            "epochs": shown.get("epochs"),
            "gate": shown.get("gate"),
            "has_report": (run / "report.html").is_file(),
            "_begun": begun,
            "_written": max(reported, curve, begun),
        }

    def _figures(self, path: Path, stamp: Stamp, of: Any) -> dict[str, Any]:
        if stamp == (0, 0):
            return {}
        known = self._known.get(path)
        if known is None or known[0] != stamp:
            known = self._known[path] = (stamp, of(read_document(path)))
        return known[1]

    def _last_hour(self) -> dict[str, Any]:
        """The metrics of the newest hour of a follow run."""
        newest = max(self._hours.glob("*.json"), default=None)
        record = {} if newest is None else read_document(newest)
        measured = record.get("progressive") or {}
        return {name: measured.get(name) for name in ("auc", "logloss", "calibration")} | {
            "gate": record.get("gate")
        }


def _curve(run: Path) -> dict[str, Any]:
    """The learning curve: quantity to list of values."""
    return {
        key: values for key, values in read_document(run / "curve.json").items() if isinstance(values, list)
    }


def _of_report(report: Mapping[str, Any]) -> dict[str, Any]:
    if not report:
        return {}
    measured = report.get("evaluation") or {}
    step = re.search(r"\d+", str(report.get("checkpoint", "")))
    run = report.get("run")
    return {
        **{name: measured.get(name) for name in ("auc", "logloss", "calibration")},
        "created": run.get("created") if isinstance(run, dict) else None,
        "step": int(step[0]) if step else None,
        "epochs": len(report.get("epochs") or ()),
        "gate": report.get("gate"),
    }


def _of_curve(curve: Mapping[str, Any]) -> dict[str, Any]:
    """The last point of a curve, with the names of the report's metrics."""
    names = {"step": "step", "auc": "auc", "loss": "logloss"}
    return {names[key]: values[-1] for key, values in curve.items() if names.get(key) and values}


def _busy(state: Mapping[str, Any]) -> bool:
    train = state.get("stages", {}).get("train", {})
    return state.get("state") == "running" and train.get("state") == "running"


def _utc(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).isoformat(timespec="seconds")
