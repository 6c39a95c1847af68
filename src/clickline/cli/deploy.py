"""clickline deploy: the system on Kubernetes, from the same config."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clickline.cli.console import emit, needing, note, say, table, watching
from clickline.cli.exits import ExitCode
from clickline.cli.options import ConfigFile, Json, Overrides, Quiet

if TYPE_CHECKING:
    from clickline.config import Config
    from clickline.stages.deploy.apply import Applied, Removed
    from clickline.stages.deploy.kube import Kube

__all__ = ["deploy"]

deploy = typer.Typer(help="Run the whole system on Kubernetes, from the same config.", no_args_is_help=False)

Context = Annotated[
    str | None,
    typer.Option(
        "--context",
        metavar="NAME",
        help="Another cluster of your kubeconfig.",
        show_default="the current one",
    ),
]

_WATCH_SECONDS = 2.0
_ROLES = ("pipeline", "learner", "ray-head", "ray-worker", "predictor", "lookup", "tracking", "data")


@deploy.command()
def render(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Where the files go.")],
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Write the manifests, as plain files for `kubectl apply -k`. No cluster is asked."""
    from clickline.stages.deploy.render import rendered, write

    made = rendered(config_file, overrides or ())
    write(made.files, output)
    for line in made.notes:
        note(line)
    if as_json:
        emit({"folder": str(output), "files": list(made.files)})
        return
    typer.echo(f"wrote {len(made.files)} files to {output}")


@deploy.command()
def apply(
    prune: Annotated[
        bool,
        typer.Option(
            "--prune", help="Remove what an earlier apply made and this one has no more; never data."
        ),
    ] = False,
    context: Context = None,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Create or change the deployment on the cluster of your kubeconfig.

    Everything is checked first, on the server too; nothing is changed when something is wrong. Exit 1 if only a part
    of it could be applied.
    """
    from clickline.stages.deploy.apply import apply as run
    from clickline.stages.deploy.render import rendered

    made = rendered(config_file, overrides or ())
    for line in made.notes:
        note(line)
    with _connected(context) as kube, watching(as_json=as_json, quiet=quiet) as progress:
        done = run(
            kube, made.objects, name=made.name, namespace=made.namespace, prune=prune, progress=progress
        )
    if as_json:
        emit({"name": made.name, "namespace": made.namespace, **asdict(done)})
    else:
        _show_applied(done, made.name, made.namespace)
    if done.failed:
        raise typer.Exit(ExitCode.FAILED)


@deploy.command()
def status(
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again until Ctrl-C.")] = False,
    context: Context = None,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Show every role: ready and desired pods, restarts, state and why, versions, endpoints, last errors.

    Exit 1 if a role failed.
    """
    from clickline.stages.deploy.status import fetch, summarise

    config = _config(config_file, overrides)
    with _connected(context) as kube:

        def look() -> dict[str, Any]:
            return summarise(
                fetch(
                    kube,
                    name=config.name,
                    namespace=config.deploy.namespace,
                    metrics_port=config.serve.metrics_port,
                    tls=config.serve.tls is not None,
                )
            )

        while True:
            found = look()
            if as_json:
                emit(found)
            else:
                if watch and sys.stdout.isatty():
                    typer.echo("\x1b[2J\x1b[H", nl=False)
                _show_status(found)
            if not watch:
                break
            time.sleep(_WATCH_SECONDS)
    if found["state"] == "failed":
        raise typer.Exit(ExitCode.FAILED)


@deploy.command()
def logs(
    role: Annotated[
        str | None,
        typer.Argument(metavar="ROLE", help=f"Only this one: {', '.join(_ROLES)}.", show_default="all"),
    ] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on with what is added, also by pods that come later.")
    ] = False,
    lines: Annotated[
        int, typer.Option("-n", "--lines", metavar="N", min=0, help="How many of the last lines.")
    ] = 100,
    previous: Annotated[
        bool, typer.Option("--previous", help="What containers said before their last restart.")
    ] = False,
    context: Context = None,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
) -> None:
    """Show what the pods say, in the order of time."""
    from clickline.errors import ConfigError, Mistake
    from clickline.stages.deploy.logs import Line, last, pods
    from clickline.stages.deploy.logs import follow as go_on

    if role is not None and role not in _ROLES:
        raise ConfigError([Mistake("", 0, "ROLE", f"is {role!r}.", f"Allowed: {', '.join(_ROLES)}.")])
    if follow and previous:
        raise ConfigError(
            [Mistake("", 0, "--previous", "is given beside --follow.", "Allowed: one of the two.")]
        )
    config = _config(config_file, overrides)
    name, namespace = config.name, config.deploy.namespace

    def show(line: Line) -> None:
        inner = "" if line.container == role or line.container in _ROLES else f"/{line.container}"
        say(f"{line.pod}{inner} {line.text}")

    with _connected(context) as kube:
        there = pods(kube, name=name, namespace=namespace, role=role)
        if not there:
            of_role = f" of role {role}" if role else ""
            note(
                f"{name} has no pods{of_role} in namespace {namespace}: `clickline deploy status` tells more"
                + (". Waiting for some." if follow else "")
            )
        told = last(kube, there, namespace=namespace, lines=lines, previous=previous)
        for line in told:
            show(line)
        if follow:
            for line in go_on(kube, name=name, namespace=namespace, role=role, after=told):
                show(line)


@deploy.command()
def delete(
    with_data: Annotated[
        bool,
        typer.Option(
            "--with-data",
            help="Also claims, volumes and what lies on them, and the namespace if it is ours alone.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    context: Context = None,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Remove all that `deploy apply` made, and nothing else. Data volumes stay, unless --with-data."""
    from clickline.errors import ConfigError, Mistake
    from clickline.stages.deploy.apply import found, going, remove
    from clickline.stages.deploy.kube import shown

    config = _config(config_file, overrides)
    name, namespace = config.name, config.deploy.namespace
    with _connected(context) as kube:
        there = found(kube, name=name, namespace=namespace)
        leaving = going(there, with_data=with_data)
        if leaving and not yes:
            where = f"namespace {namespace} of {kube.where} ({kube.host})"
            if as_json or not sys.stdin.isatty():
                problem = f"is missing: {len(leaving)} objects would be removed from {where}."
                raise ConfigError([Mistake("", 0, "--yes", problem, "Give it, or run this at a terminal.")])
            note(f"{name} in {where}:")
            for item in leaving:
                note(f"  {shown(item)}")
            question = "Remove these, with all data on the volumes?" if with_data else "Remove these?"
            if not typer.confirm(question, err=True):
                note("nothing was removed")
                raise typer.Exit(ExitCode.FAILED)
        with watching(as_json=as_json, quiet=quiet) as progress:
            done = remove(kube, there, name=name, namespace=namespace, with_data=with_data, progress=progress)
    if as_json:
        emit({"name": name, "namespace": namespace, **asdict(done)})
    else:
        _show_removed(done, name, namespace)


@deploy.command("check-pod", hidden=True)
def check_pod(
    read_only: Annotated[bool, typer.Option("--read-only", help="The pod only reads from home.")] = False,
    awaited: Annotated[
        str | None,
        typer.Option("--await", metavar="HOST:PORT", help="What must answer before the pod begins."),
    ] = None,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
) -> None:
    """What each pod does first: its directories take files, kernels and Ray's token are there."""
    from clickline.stages.deploy.pod import await_server
    from clickline.stages.deploy.pod import check_pod as run

    config = _config(config_file, overrides)
    directories = [Path(config.cache.dir)] if config.cache.dir else []
    if not read_only:
        directories.append(Path(config.home))
    for line in run(
        directories,
        kernels=_path("CLICKLINE_KERNELS"),
        cache=_path("NUMBA_CACHE_DIR"),
        cpu=os.environ.get("NUMBA_CPU_NAME"),
        token=None if read_only else _path("RAY_AUTH_TOKEN_PATH"),
    ):
        note(line)
    if awaited is not None:
        await_server(awaited, note)


@deploy.command("await-rollout", hidden=True)
def await_rollout(config_file: ConfigFile = Path("clickline.yaml"), overrides: Overrides = None) -> None:
    """The last step of a workflow: wait until every predictor answers with the registry's current version."""
    from clickline.stages.deploy.rollout import await_rollout as run

    with watching(as_json=False, quiet=False) as progress:
        count = run(_config(config_file, overrides), progress)
    note("there are no predictors" if count == 0 else f"predictors that serve the current version: {count}")


def _path(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value) if value else None


def _config(config_file: Path, overrides: list[str] | None) -> Config:
    from clickline.config import load_config

    return load_config(config_file, overrides or ())


@contextmanager
def _connected(context: str | None) -> Iterator[Kube]:
    from clickline.stages.deploy.kube import connect

    with needing("k8s", "talking to a cluster"):
        kube = connect(context)
    try:
        yield kube
    finally:
        kube.close()


# ── what is shown ──────────────────────────────────────────────────────────────────────────────


def _show_applied(done: Applied, name: str, namespace: str) -> None:
    for action in ("created", "changed", "replaced", "unchanged", "pruned"):
        for item in getattr(done, action):
            typer.echo(f"{action:<10} {item}")
    for item, why in done.failed.items():
        note(f"failed     {item}: {why}")
    for item in done.untried:
        note(f"not tried  {item}")
    for line in done.notes:
        note(line)
    if done.left_over:
        note(
            f"of an earlier apply, and no longer part of {name}: {', '.join(done.left_over)}. "
            "`clickline deploy apply --prune` removes them; claims and volumes only `deploy delete --with-data`."
        )
    if done.failed:
        note(
            "The deployment is applied in part. Mend what failed and apply again: what is done is left as it is."
        )
        return
    count = len(done.created) + len(done.changed) + len(done.replaced)
    told = f"{count} objects created or changed" if count else "nothing to change"
    typer.echo(f"{name} in namespace {namespace}: {told}; `clickline deploy status` shows how it does")


def _show_removed(done: Removed, name: str, namespace: str) -> None:
    for item in done.removed:
        typer.echo(f"removed    {item}")
    for item in done.kept:
        typer.echo(f"kept       {item}")
    for line in done.notes:
        note(line)
    if not done.removed:
        typer.echo(f"nothing of {name} was there to remove in namespace {namespace}")


def _show_status(found: Mapping[str, Any]) -> None:
    name, namespace = found["name"], found["namespace"]
    if found["state"] == "absent":
        typer.echo(
            f"nothing of {name} runs in namespace {namespace}: `clickline deploy apply` brings it there"
        )
    else:
        typer.echo(f"{name} in namespace {namespace}: {found['state']}\n")
        table(
            ("ROLE", "READY", "RESTARTS", "STATE", "VERSION", "WHY"),
            [
                (
                    role["role"],
                    f"{role['ready']}/{'-' if role['desired'] is None else role['desired']}",
                    role["restarts"],
                    role["state"],
                    ", ".join(map(str, role["versions"])) or "-",
                    _words(role),
                )
                for role in found["roles"]
            ],
        )
    for title, rows in (("endpoints", _endpoint_rows(found)), ("claims", _claim_rows(found))):
        if rows:
            typer.echo(f"\n{title}")
            for row in rows:
                typer.echo(f"  {row}")
    if found["errors"]:
        typer.echo("\nlast errors")
        for one in found["errors"]:
            times = f" ({one['count']} times)" if one["count"] > 1 else ""
            typer.echo(f"  {one['at']} {one['object']} {one['reason']}{times}: {one['message']}")
    for line in found["notes"]:
        note(line)


def _words(role: Mapping[str, Any]) -> str:
    """Why a role is not as it should be, or why its version is not known."""
    untold = sorted({pod["words"] for pod in role["pods"] if pod["words"] and pod["state"] == "running"})
    return " ".join((role["why"] or "; ".join(untold)).split())


def _endpoint_rows(found: Mapping[str, Any]) -> list[str]:
    return [
        f"{one['role'] or '-'}  {one['type']}  {address}"
        for one in found["endpoints"]
        for address in one["addresses"]
    ]


def _claim_rows(found: Mapping[str, Any]) -> list[str]:
    return [f"{one['claim']}  {one['state']}  {one['size'] or ''}".rstrip() for one in found["claims"]]
