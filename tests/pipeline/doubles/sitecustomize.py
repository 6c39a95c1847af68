"""Test doubles of what a child runs, for faults at an exact moment. A child that has this file on its path runs them instead of
the stages.

In the folder that CLICKLINE_DOUBLES names, `hold-NAME` makes NAME wait while the file exists, `at-NAME` is written when it
is reached, `fault-NAME` has the class and message of an error to raise there, and `version` has the version to serve.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import types
from pathlib import Path

_FOLDER = Path(os.environ.get("CLICKLINE_DOUBLES", ""))


def _reach(name: str) -> None:
    (_FOLDER / f"at-{name}").write_text(str(os.getpid()))
    fault = _FOLDER / f"fault-{name}"
    if fault.exists():
        from clickline import errors

        kind, _, message = fault.read_text().partition(" ")
        if kind == "OSError":
            raise OSError(28, "No space left on device", "/full")
        raise getattr(errors, kind, ZeroDivisionError)(message)
    while (_FOLDER / f"hold-{name}").exists():
        time.sleep(0.01)


def _run_flow(config, progress):
    for name in ("prepare", "train", "publish"):
        progress.stage(name, "running")
        progress.begin(f"{name} all", total_rows=100)
        progress.note("half")
        progress.advance(rows=50)
        sys.stdout.write(f"printed in {name}\n")
        _reach(name)
        progress.end()
        if name == "train":
            progress.stage("train", "done", {"checkpoint": "runs/1/step-1", "steps": 1, "seconds": 0.1})
            progress.stage(
                "evaluate", "done", {"auc": 0.7, "logloss": 0.5, "calibration": 1.0, "report": "r"}
            )
            progress.stage("gate", "done", {"passed": True, "warnings": []})
        elif name == "publish":
            progress.stage("publish", "done", {"version": 7, "table": "base", "rows": 9, "current": True})
        else:
            facts = {"dataset": "d", "train_rows": 80, "eval_rows": 20, "bad_rows": 0, "seconds": 0.1}
            progress.stage("prepare", "skipped", facts)


def _follow(config, progress, *, backfill=None):
    if backfill is not None:
        progress.log(f"backfill of {len(backfill.hours())} hours")
    for hour in range(1000):
        progress.stage("follow", "running", {"state": "learning", "hour": f"20260101/{hour % 24:02d}"})
        _reach("follow")
        progress.log(f"hour {hour}")
        time.sleep(0.05)


def _serve(config, up):
    _reach("serve")
    ending = []
    signal.signal(signal.SIGTERM, lambda *_: ending.append(True))
    version = None
    while not ending:
        file = _FOLDER / "version"
        wanted = int((file.exists() and file.read_text()) or 7)
        if wanted != version:
            version = wanted
            up(types.SimpleNamespace(version=version, processes=1, example={"I1": 1}))
        time.sleep(0.01)
    _reach("drain")


if "CLICKLINE_DOUBLES" in os.environ:
    for name, calls in {
        "clickline.pipeline.flow": {"run_flow": _run_flow},
        "clickline.pipeline.follow": {"follow": _follow},
        "clickline.serving.run": {"serve": _serve},
    }.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(calls)
