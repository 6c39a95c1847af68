"""clickline status: the state of the run of `up`, and of training on a cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from clickline.cli.console import emit, say, stage_rows, work_summary
from clickline.cli.exit_codes import ExitCode
from clickline.cli.options import JsonOptions
from clickline.pipeline.status_text import age, cluster_facts, cluster_rows, timestamp
from clickline.progress import printable

_WATCH_SECONDS = 1.0


def status(
    options: JsonOptions,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second until Ctrl-C.")] = False,
) -> None:
    """Show the state of `clickline up`: stages, progress, metrics, versions, endpoint, processes.

    Training on a cluster is shown process by process, also if it was started by `clickline train`. Exit 1 if the run
    failed or crashed.
    """
    from clickline.pipeline.run_status import status as run

    config = options.config()
    if watch:
        _watch(lambda: run(config), as_json=options.as_json)
    found = run(config)
    if options.as_json:
        emit(found)
    else:
        say("\n".join(_lines(found)))
    if found["state"] in ("failed", "lost") or (found["cluster"] or {}).get("state") == "lost":
        raise typer.Exit(ExitCode.FAILED)


def _watch(look: Any, *, as_json: bool) -> None:
    """Refresh until Ctrl-C."""
    if as_json:
        while True:
            emit(look())
            time.sleep(_WATCH_SECONDS)
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(), auto_refresh=False, vertical_overflow="visible") as live:
        while True:
            live.update(Text(printable("\n".join(_lines(look())))), refresh=True)
            time.sleep(_WATCH_SECONDS)


def _lines(found: Mapping[str, Any]) -> list[str]:
    lines = [_headline(found)]
    rows = stage_rows(found)
    if rows:
        width = max(len(summary) for _, _, summary, _ in rows)
        lines.append("")
        for name, state, summary, seconds in rows:
            lines.append(f"  {name:<9}{state:<9}{summary:<{width}}  {seconds:>9}".rstrip())
            if name == found["stage"] and found.get("work") and found["state"] == "running":
                lines.append(f"  {'':<9}{'':<9}{work_summary(found['work'])}")
    if found["cluster"]:
        lines += ["", *_cluster(found["cluster"])]
    lines.append("")
    lines += [f"  {name:<11}{text}" for name, text in _named(found).items()]
    return lines


def _cluster(cluster: Mapping[str, Any]) -> list[str]:
    """Training on a cluster: one line per process, then the figures of the run."""
    lines = [f"  {_cluster_headline(cluster)}", ""]
    rows = cluster_rows(cluster) if cluster["alive"] else []
    if rows:
        widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
        used = [n for n, width in enumerate(widths) if width]
        lines += ["  " + "  ".join(_cell(row, n, widths[n]) for n in used).rstrip() for row in rows]
        lines.append("")
    lines += [f"  {name:<11}{text}" for name, text in cluster_facts(cluster).items()]
    return lines if lines[-1] else lines[:-1]


def _cell(row: tuple[str, ...], n: int, width: int) -> str:
    return f"{row[n]:>{width}}" if n in _COUNTS else f"{row[n]:<{width}}"


_COUNTS = (4, 5)  # columns of `cluster_rows` that are read as numbers: rows or ids, speed


def _cluster_headline(cluster: Mapping[str, Any]) -> str:
    run, state = cluster["run"], cluster["state"]
    if state == "lost":
        updated = f", last update {timestamp(cluster['updated_at'])}" if "updated_at" in cluster else ""
        return (
            f"cluster: training of run {run} crashed{updated}. "
            "Run the same command to resume from its last checkpoint."
        )
    mode = f", {cluster['mode']}" if "mode" in cluster else ""
    restarts = cluster.get("generation")
    restarted = (
        f", restarted from a checkpoint {restarts} time{'s' if restarts > 1 else ''}" if restarts else ""
    )
    driver = f"driver pid {cluster['pid']} on {cluster['host']}" if "pid" in cluster else "no status yet"
    return f"cluster: {state}, run {run}{mode}, {driver}{restarted}"


def _headline(found: Mapping[str, Any]) -> str:
    state, home = found["state"], found["home"]
    stage = f" in stage {found['stage']}" if found.get("stage") else ""
    command = "`clickline up --follow`" if found.get("follow") else "`clickline up`"
    if state == "never" and found["cluster"]:
        runs = "runs" if found["cluster"]["alive"] else "ran"
        return f"`clickline train` {runs} for {home}, without `clickline up`"
    if state == "never":
        return f"nothing has run in {home} yet: start with `clickline up`"
    if state == "starting":
        return f"starting, pid {found['pid']}"
    if state == "running":
        mode = "following" if found["follow"] else "running"
        return f"{found['name']}: {mode} since {timestamp(found['since'])}, pid {found['pid']}"
    if state == "lost":
        running = len(found["processes"])
        exiting = f" {running} of its processes are still exiting." if running else ""
        return (
            f"{found['name']}: crashed{stage} (or the machine rebooted), last update "
            f"{timestamp(found['updated'])}.{exiting} {command} resumes it."
        )
    if state == "failed":
        error = found.get("error") or {}
        return (
            f"{found['name']}: failed{stage} at {timestamp(found['ended'])}: "
            f"{error.get('message', 'no reason given')}"
        )
    if state == "stopped":
        effect = "restarts the endpoint" if found["stage"] == "serve" else "resumes it"
        return f"{found['name']}: stopped{stage} at {timestamp(found['ended'])}. {command} {effect}."
    return f"{found['name']}: done at {timestamp(found['ended'])}"


def _named(found: Mapping[str, Any]) -> dict[str, str]:
    named: dict[str, str] = {}
    if found["metrics"]:
        titles = {"auc": "AUC", "logloss": "log loss", "calibration": "calibration"}
        named["metrics"] = ", ".join(f"{titles[key]} {value:.4f}" for key, value in found["metrics"].items())
    following = found.get("stages", {}).get("follow", {}).get("facts", {})
    if following.get("waiting_since") and found["state"] == "running":
        late = ", late" if following.get("late") else ""
        since = following["waiting_since"]
        named["waiting"] = f"for {following['hour']} since {timestamp(since)}{late}"
    named["versions"] = _versions(found["versions"])
    endpoint = found.get("stages", {}).get("serve", {}).get("facts", {})
    if found["state"] == "running" and "grpc" in endpoint:
        named["gRPC"] = endpoint["grpc"]
        named["HTTP"] = endpoint["http"]
        named["prometheus"] = endpoint["metrics"]
        named["health"] = found["health"] or "-"
    if found.get("studio"):
        named["studio"] = found["studio"]["url"]
    if found["processes"]:
        pids: dict[str, list[str]] = {}
        for one in found["processes"]:
            pids.setdefault(one["role"], []).append(str(one["pid"]))
        named["processes"] = ", ".join(f"{role} {' '.join(of_role)}" for role, of_role in pids.items())
    if found["state"] != "never" or found["cluster"]:
        named["logs"] = (
            found["logs"] if found["state"] != "never" else f"{found['cluster']['folder']}/cluster/logs"
        )
    return named


def _versions(versions: Mapping[str, Any]) -> str:
    if "error" in versions:
        return str(versions["error"])
    if not versions["count"]:
        return "none yet"
    newest = ", ".join(
        f"{one['version']} ({one['table']}, {age(one['created'])})" for one in reversed(versions["newest"])
    )
    pinned = " (pinned)" if versions["pinned"] else ""
    return f"current {versions['current'] or '-'}{pinned}; newest {newest}; {versions['count']} in total"
