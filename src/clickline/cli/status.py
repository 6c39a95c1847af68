"""clickline status: what `up` runs, or trains on a cluster, how far it is, how it is doing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from clickline.cli.console import emit, say, stage_rows, work_words
from clickline.cli.exit_codes import ExitCode
from clickline.cli.options import ConfigFile, Json, Overrides
from clickline.pipeline.status_text import age, cluster_facts, cluster_rows, moment
from clickline.progress import printable

_WATCH_SECONDS = 1.0


def status(
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again until Ctrl-C.")] = False,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Show what `clickline up` runs: stages, progress, metrics, versions, endpoint, processes.

    Training on a cluster is shown process by process, also if `clickline train` began it. Exit 1 if the run failed or
    ended without a word.
    """
    from clickline.config import load_config
    from clickline.pipeline.run_status import status as run

    config = load_config(config_file, overrides or ())
    if watch:
        _watch(lambda: run(config), as_json=as_json)
    found = run(config)
    if as_json:
        emit(found)
    else:
        say("\n".join(_lines(found)))
    if found["state"] in ("failed", "lost") or (found["cluster"] or {}).get("state") == "lost":
        raise typer.Exit(ExitCode.FAILED)


def _watch(look: Any, *, as_json: bool) -> None:
    """Until Ctrl-C."""
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
        width = max(len(words) for _, _, words, _ in rows)
        lines.append("")
        for name, state, words, seconds in rows:
            lines.append(f"  {name:<9}{state:<9}{words:<{width}}  {seconds:>9}".rstrip())
            if name == found["stage"] and found.get("work") and found["state"] == "running":
                lines.append(f"  {'':<9}{'':<9}{work_words(found['work'])}")
    if found["cluster"]:
        lines += ["", *_cluster(found["cluster"])]
    lines.append("")
    lines += [f"  {name:<11}{text}" for name, text in _named(found).items()]
    return lines


def _cluster(cluster: Mapping[str, Any]) -> list[str]:
    """What trains on a cluster: a line a process, then how it is doing."""
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
        heard = f", last heard of at {moment(cluster['updated_at'])}" if "updated_at" in cluster else ""
        return (
            f"cluster: training of run {run} ended without a word{heard}. "
            "The same command goes on from its last cut."
        )
    mode = f", {cluster['mode']}" if "mode" in cluster else ""
    back = cluster.get("generation")
    again = f", went back to a cut {back} time{'s' if back > 1 else ''}" if back else ""
    driver = f"driver pid {cluster['pid']} on {cluster['host']}" if "pid" in cluster else "no word of it yet"
    return f"cluster: {state}, run {run}{mode}, {driver}{again}"


def _headline(found: Mapping[str, Any]) -> str:
    state, home = found["state"], found["home"]
    stage = f" in stage {found['stage']}" if found.get("stage") else ""
    command = "`clickline up --follow`" if found.get("follow") else "`clickline up`"
    if state == "never" and found["cluster"]:
        runs = "runs" if found["cluster"]["alive"] else "ran"
        return f"`clickline train` {runs} for {home}, without `clickline up`"
    if state == "never":
        return f"nothing was run in {home} yet: `clickline up` does"
    if state == "starting":
        return f"starting, pid {found['pid']}"
    if state == "running":
        what = "following" if found["follow"] else "running"
        return f"{found['name']}: {what} since {moment(found['since'])}, pid {found['pid']}"
    if state == "lost":
        left = len(found["processes"])
        still = f" {left} of its processes still run: they are about to end." if left else ""
        return (
            f"{found['name']}: ended without a word (crash or reboot){stage}, last heard of at "
            f"{moment(found['updated'])}.{still} {command} goes on where it was."
        )
    if state == "failed":
        error = found.get("error") or {}
        return (
            f"{found['name']}: failed{stage} at {moment(found['ended'])}: "
            f"{error.get('message', 'no reason was told')}"
        )
    if state == "stopped":
        again = "starts the endpoint again" if found["stage"] == "serve" else "goes on where it was"
        return f"{found['name']}: stopped{stage} at {moment(found['ended'])}. {command} {again}."
    return f"{found['name']}: done at {moment(found['ended'])}"


def _named(found: Mapping[str, Any]) -> dict[str, str]:
    named: dict[str, str] = {}
    if found["metrics"]:
        titles = {"auc": "AUC", "logloss": "log loss", "calibration": "calibration"}
        named["metrics"] = ", ".join(f"{titles[key]} {value:.4f}" for key, value in found["metrics"].items())
    following = found.get("stages", {}).get("follow", {}).get("facts", {})
    if following.get("waiting_since") and found["state"] == "running":
        late = ", late" if following.get("late") else ""
        since = following["waiting_since"]
        named["waiting"] = f"for {following['hour']} since {moment(since)}{late}"
    named["versions"] = _versions(found["versions"])
    served = found.get("stages", {}).get("serve", {}).get("facts", {})
    if found["state"] == "running" and "grpc" in served:
        named["gRPC"] = served["grpc"]
        named["HTTP"] = served["http"]
        named["scraped"] = served["metrics"]
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
    return f"current {versions['current'] or '-'}{pinned}; newest {newest}; {versions['count']} in all"
