"""Short text summaries of stages, for the terminal, logs and tables."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from clickline.progress import human_size


def stage_summary(name: str, stage: Mapping[str, Any]) -> str:
    """One line about a stage in its current state."""
    facts, state = stage["facts"], stage["state"]
    if state == "waiting":
        return ""
    if "reason" in facts:
        return str(facts["reason"]).partition("\n")[0]
    if state == "refused":
        return " ".join(facts.get("reasons", ()))
    try:
        summary = _SUMMARIES[name](facts) if facts and name in _SUMMARIES else ""
    except (KeyError, TypeError, ValueError):  # facts written by another release
        summary = ", ".join(f"{key} {value}" for key, value in facts.items())
    if state == "skipped":
        return f"up to date: {summary}" if summary else "up to date"
    if summary and "rows_per_second" in stage:
        summary += f", {stage['rows_per_second']:,.0f} rows/s"
    return summary


def stage_seconds(stage: Mapping[str, Any]) -> float | None:
    """How long a stage took or has been running; None if it was skipped or has not started."""
    if "since" not in stage or stage["state"] == "skipped":
        return None
    ended = _seconds(stage["ended"]) if "ended" in stage else time.time()
    return max(0.0, ended - _seconds(stage["since"]))


def cluster_rows(cluster: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row per process of a cluster run: role, node, state, position, rows or ids, speed, memory."""
    rows: list[tuple[str, ...]] = []
    for one in cluster.get("workers", ()):
        speed = f"{one['rows_per_second']:,.0f} rows/s" if one["rows_per_second"] else ""
        rows_text = f"{one['rows']:,} rows" if one["rows"] else ""
        memory = _memory(one["memory"], None)
        rows.append((one["name"], one["node"], one["state"], one["at"], rows_text, speed, memory))
    network = cluster.get("network")
    for one in (*cluster.get("shards", ()), *([network] if network else [])):
        ids = "" if one["ids"] is None else f"{one['ids']:,} ids"
        rows.append((one["name"], one["node"], "", "", ids, "", _memory(one["memory"], one["limit"])))
    return rows


def cluster_facts(cluster: Mapping[str, Any]) -> dict[str, str]:
    """Figures of training on a cluster, by name."""
    facts: dict[str, str] = {}
    metrics = cluster.get("metrics") or {}
    if metrics.get("rows"):
        facts["progress"] = _cluster_progress(metrics, alive=cluster["alive"])
    quality = (("AUC", metrics.get("auc")), ("loss", metrics.get("loss")))
    found = ", ".join(f"{title} {value:.4f}" for title, value in quality if value is not None)
    if found:
        facts["metrics"] = found
    leases = cluster.get("leases")
    if leases:
        facts["work units"] = f"{leases['done']:,} done, {leases['open']:,} leased, {leases['todo']:,} to do"
    checkpoint = cluster.get("last_checkpoint")
    if checkpoint:
        took = f"took {duration(checkpoint['seconds'])}"
        if checkpoint["stalled"] >= 0.05:
            took += f", stalled training for {duration(checkpoint['stalled'])}"
        facts["checkpoint"] = f"step {checkpoint['step']:,}, {age(checkpoint['at'])}, {took}"
    events = cluster.get("events")
    if events:
        facts["decision"] = f"{events[-1]['decision']}, {age(events[-1]['at'])}: {events[-1]['reason']}"
    if cluster.get("requested") is not None:
        facts["requested"] = f"{cluster['requested']} workers, by `clickline scale`"
    if cluster.get("message"):
        facts["message"] = str(cluster["message"])
    return facts


def _cluster_progress(metrics: Mapping[str, Any], *, alive: bool) -> str:
    rows, total, speed = metrics["rows"], metrics["total_rows"], metrics["rows_per_second"]
    summary = f"{rows:,} of {total:,} rows ({rows / total:.0%})" if total else f"{rows:,} rows"
    summary += f", step {metrics['step']:,}"
    if speed and alive:
        summary += f", {speed:,.0f} rows/s"
        if total and total > rows:
            summary += f", about {duration((total - rows) / speed)} left"
    return summary


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
    """Time since a timestamp, as text."""
    return f"{duration(max(0.0, time.time() - _seconds(at)))} ago"


def timestamp(at: str) -> str:
    """A timestamp as text, with the time since."""
    return f"{datetime.fromisoformat(at).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC ({age(at)})"


def _seconds(at: str) -> float:
    return datetime.fromisoformat(at).timestamp()


def _prepare(facts: Mapping[str, Any]) -> str:
    rows = f"{facts['train_rows']:,} training rows, {facts['eval_rows']:,} evaluation rows"
    return rows + (f", {facts['bad_rows']:,} bad" if facts["bad_rows"] else "")


def _train(facts: Mapping[str, Any]) -> str:
    return f"{facts['steps']:,} steps"


def _evaluate(facts: Mapping[str, Any]) -> str:
    metrics = (("AUC", "auc"), ("log loss", "logloss"), ("calibration", "calibration"))
    found = [f"{title} {facts[key]:.4f}" for title, key in metrics if facts.get(key) is not None]
    return ", ".join(found) or "not evaluated: data.eval is not set"


def _gate(facts: Mapping[str, Any]) -> str:
    return "passed" + (f" for {facts['hour']}" if "hour" in facts else "")


def _publish(facts: Mapping[str, Any]) -> str:
    rows = f", {facts['rows']:,} rows" if "rows" in facts else ""
    pending = "" if facts.get("current", True) else ", not current"
    hour = f" of {facts['hour']}" if "hour" in facts else ""
    return f"version {facts['version']}, {facts['table']}{hour}{rows}{pending}"


def _follow(facts: Mapping[str, Any]) -> str:
    parts = []
    trouble = facts.get("trouble")
    if trouble:
        parts.append(f"{trouble['what']}: {trouble['words']}")
    elif facts.get("state") == "waiting" and facts.get("hour"):
        parts.append(f"waiting for {facts['hour']}{' (late)' if facts.get('late') else ''}")
    elif facts.get("hour"):
        state = "training" if facts["state"] == "learning" else facts["state"]
        parts.append(f"{state} {facts['hour']}")
    else:
        parts.append(str(facts.get("state", "")))
    if facts.get("hours_learned"):
        parts.append(f"{facts['hours_learned']:,} hours trained")
    last = facts.get("last")
    if last:
        parts.append(_last_hour(last))
    return "; ".join(parts)


def _last_hour(last: Mapping[str, Any]) -> str:
    if "rows" not in last:
        return f"last {last['hour']} ({last.get('state', '')})"
    metrics = last.get("progressive") or last
    auc = "" if metrics.get("auc") is None else f", AUC {metrics['auc']:.4f}"
    version = "" if last.get("version") is None else f", version {last['version']}"
    return f"last {last['hour']}: {last['rows']:,} rows{auc}{version}"


def _serve(facts: Mapping[str, Any]) -> str:
    if "grpc" not in facts:
        return str(facts["state"])
    version = "no version yet" if facts["version"] is None else f"version {facts['version']}"
    return f"{version}, gRPC {facts['grpc']}, {facts['http']}"


_SUMMARIES = {
    "prepare": _prepare,
    "train": _train,
    "evaluate": _evaluate,
    "gate": _gate,
    "publish": _publish,
    "follow": _follow,
    "serve": _serve,
}
