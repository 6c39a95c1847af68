"""Stages in a few words, for a line of the picture, of a log, of a table."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from clickline.progress import human_size


def stage_words(name: str, stage: Mapping[str, Any]) -> str:
    """What people want to know of a stage in its state."""
    facts, state = stage["facts"], stage["state"]
    if state == "waiting":
        return ""
    if "reason" in facts:
        return str(facts["reason"]).partition("\n")[0]
    if state == "refused":
        return " ".join(facts.get("reasons", ()))
    try:
        words = _WORDS[name](facts) if facts and name in _WORDS else ""
    except (KeyError, TypeError, ValueError):  # facts of another release
        words = ", ".join(f"{key} {value}" for key, value in facts.items())
    if state == "skipped":
        return f"up to date: {words}" if words else "up to date"
    if words and "rows_per_second" in stage:
        words += f", {stage['rows_per_second']:,.0f} rows/s"
    return words


def stage_seconds(stage: Mapping[str, Any]) -> float | None:
    """How long a stage took, or has been running; None for one that did nothing."""
    if "since" not in stage or stage["state"] == "skipped":
        return None
    ended = _seconds(stage["ended"]) if "ended" in stage else time.time()
    return max(0.0, ended - _seconds(stage["since"]))


def cluster_rows(cluster: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """For each process of a cluster run: role, node, state, what it is at, what it did or holds, speed, memory."""
    rows: list[tuple[str, ...]] = []
    for one in cluster.get("workers", ()):
        speed = f"{one['rows_per_second']:,.0f} rows/s" if one["rows_per_second"] else ""
        learned = f"{one['rows']:,} rows" if one["rows"] else ""
        rows.append(
            (one["name"], one["node"], one["state"], one["at"], learned, speed, _memory(one["memory"], None))
        )
    network = cluster.get("network")
    for one in (*cluster.get("shards", ()), *([network] if network else [])):
        ids = "" if one["ids"] is None else f"{one['ids']:,} ids"
        rows.append((one["name"], one["node"], "", "", ids, "", _memory(one["memory"], one["limit"])))
    return rows


def cluster_facts(cluster: Mapping[str, Any]) -> dict[str, str]:
    """How training on a cluster is doing, each fact with its name."""
    named: dict[str, str] = {}
    figures = cluster.get("figures") or {}
    if figures.get("rows"):
        named["progress"] = _cluster_progress(figures, alive=cluster["alive"])
    measured = (("AUC", figures.get("auc")), ("loss", figures.get("loss")))
    found = ", ".join(f"{title} {value:.4f}" for title, value in measured if value is not None)
    if found:
        named["so far"] = found
    leases = cluster.get("leases")
    if leases:
        named["units"] = f"{leases['done']:,} done, {leases['open']:,} leased, {leases['todo']:,} to do"
    cut = cluster.get("last_cut")
    if cut:
        stalled = f", stalled training for {duration(cut['stalled'])}" if cut["stalled"] >= 0.05 else ""
        named["last cut"] = (
            f"step {cut['step']:,}, {age(cut['at'])}, took {duration(cut['seconds'])}{stalled}"
        )
    events = cluster.get("events")
    if events:
        named["decision"] = f"{events[-1]['decision']}, {age(events[-1]['at'])}: {events[-1]['reason']}"
    if cluster.get("asked") is not None:
        named["asked"] = f"{cluster['asked']} workers, by `clickline scale`"
    if cluster.get("message"):
        named["message"] = str(cluster["message"])
    return named


def _cluster_progress(figures: Mapping[str, Any], *, alive: bool) -> str:
    rows, total, speed = figures["rows"], figures["total_rows"], figures["rows_per_second"]
    words = f"{rows:,} of {total:,} rows ({rows / total:.0%})" if total else f"{rows:,} rows"
    words += f", step {figures['step']:,}"
    if speed and alive:
        words += f", {speed:,.0f} rows/s"
        if total and total > rows:
            words += f", about {duration((total - rows) / speed)} left"
    return words


def _memory(used: int, limit: int | None) -> str:
    if not used:
        return ""
    return human_size(used) + (f" of {human_size(limit)} ({used / limit:.0%})" if limit else "")


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def age(at: str) -> str:
    """How long ago a time was."""
    return f"{duration(max(0.0, time.time() - _seconds(at)))} ago"


def moment(at: str) -> str:
    """A time, and how long ago it was."""
    return f"{datetime.fromisoformat(at).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC ({age(at)})"


def _seconds(at: str) -> float:
    return datetime.fromisoformat(at).timestamp()


def _prepare(facts: Mapping[str, Any]) -> str:
    rows = f"{facts['train_rows']:,} rows to learn, {facts['eval_rows']:,} to measure"
    return rows + (f", {facts['bad_rows']:,} bad" if facts["bad_rows"] else "")


def _train(facts: Mapping[str, Any]) -> str:
    return f"{facts['steps']:,} steps"


def _evaluate(facts: Mapping[str, Any]) -> str:
    named = (("AUC", "auc"), ("log loss", "logloss"), ("calibration", "calibration"))
    found = [f"{title} {facts[key]:.4f}" for title, key in named if facts.get(key) is not None]
    return ", ".join(found) or "nothing was measured: no data.eval"


def _gate(facts: Mapping[str, Any]) -> str:
    return "passed" + (f" for {facts['hour']}" if "hour" in facts else "")


def _publish(facts: Mapping[str, Any]) -> str:
    rows = f", {facts['rows']:,} rows" if "rows" in facts else ""
    waits = "" if facts.get("current", True) else ", not current"
    hour = f" of {facts['hour']}" if "hour" in facts else ""
    return f"version {facts['version']}, {facts['table']}{hour}{rows}{waits}"


def _follow(facts: Mapping[str, Any]) -> str:
    parts = []
    trouble = facts.get("trouble")
    if trouble:
        parts.append(f"{trouble['what']}: {trouble['words']}")
    elif facts.get("state") == "waiting" and facts.get("hour"):
        parts.append(f"waiting for {facts['hour']}{' (late)' if facts.get('late') else ''}")
    elif facts.get("hour"):
        parts.append(f"{facts['state']} {facts['hour']}")
    else:
        parts.append(str(facts.get("state", "")))
    if facts.get("hours_learned"):
        parts.append(f"{facts['hours_learned']:,} hours learned")
    last = facts.get("last")
    if last:
        parts.append(_last_hour(last))
    return "; ".join(parts)


def _last_hour(last: Mapping[str, Any]) -> str:
    if "rows" not in last:
        return f"last {last['hour']} ({last.get('state', '')})"
    measured = last.get("progressive") or last
    auc = "" if measured.get("auc") is None else f", AUC {measured['auc']:.4f}"
    version = "" if last.get("version") is None else f", version {last['version']}"
    return f"last {last['hour']}: {last['rows']:,} rows{auc}{version}"


def _serve(facts: Mapping[str, Any]) -> str:
    if "grpc" not in facts:
        return str(facts["state"])
    version = "no version yet" if facts["version"] is None else f"version {facts['version']}"
    return f"{version}, gRPC {facts['grpc']}, {facts['http']}"


_WORDS = {
    "prepare": _prepare,
    "train": _train,
    "evaluate": _evaluate,
    "gate": _gate,
    "publish": _publish,
    "follow": _follow,
    "serve": _serve,
}
