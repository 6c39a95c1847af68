"""clickline deploy: runs the system on Kubernetes, from the same config."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from clickline.cli.console import emit, note, requires_extra, say, show_progress, table, wrong_argument
from clickline.cli.exit_codes import ExitCode, Undecided, exit_code
from clickline.cli.options import CommandGroup, ConfigOptions, JsonOptions, ProgressOptions
from clickline.errors import ClicklineError, StorageError
from clickline.progress import Progress, human_size, pluralize

if TYPE_CHECKING:
    from clickline.config import Config
    from clickline.deploy.apply import ApplyResult, DeleteResult
    from clickline.deploy.data_volume import TransferResult
    from clickline.deploy.kube_client import Kube
    from clickline.deploy.render import Rendered
    from clickline.deploy.wait import WaitResult

deploy = CommandGroup(help="Run the whole system on Kubernetes, from the same config.", no_args_is_help=False)
data = CommandGroup(help="Copy files to and from the data volume.", no_args_is_help=False)
deploy.add_typer(data, name="data")

_WATCH_SECONDS = 2.0


_ROLES = ("pipeline", "trainer", "ray-head", "ray-worker", "predictor", "lookup", "tracking", "data")


@dataclass(frozen=True)
class _NamespaceOptions(ConfigOptions):
    """The config, and the namespace."""

    namespace: Annotated[
        str | None,
        typer.Option(
            "-n",
            "--namespace",
            metavar="NAMESPACE",
            help="Another namespace of the cluster.",
            show_default="deploy.namespace",
        ),
    ] = None

    def changes(self) -> list[str]:
        chosen = [] if self.namespace is None else [f"deploy.namespace={self.namespace}"]
        return [*super().changes(), *chosen]


@dataclass(frozen=True)
class _ClusterOptions(_NamespaceOptions):
    """The config, the namespace and the cluster."""

    context: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A context of your kubeconfig.", show_default="the current one"),
    ] = None

    def cluster(self) -> Kube:
        with requires_extra("k8s", "connecting to a cluster"):
            from clickline.deploy.kube_client import connect

            return connect(self.context)


@dataclass(frozen=True)
class _RenderOptions(JsonOptions, _NamespaceOptions):
    """Those of a command without a cluster."""


@dataclass(frozen=True)
class _JsonOptions(JsonOptions, _ClusterOptions):
    """Those of a command that prints a result."""


@dataclass(frozen=True)
class _ProgressOptions(ProgressOptions, _ClusterOptions):
    """Those of a command that also shows progress."""


@deploy.command()
def render(
    options: _RenderOptions,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="The folder to write to.")],
) -> None:
    """Write the manifests as plain files for `kubectl apply -k`. This needs no cluster."""
    from clickline.deploy.render import render, write_files

    rendered = render(options.config_file, options.changes())
    write_files(rendered.files, output)
    _notes(rendered.notes)
    if options.as_json:
        emit({"folder": str(output), "files": list(rendered.files)})
    else:
        typer.echo(f"wrote {pluralize(len(rendered.files), 'file')} to {output}")


@deploy.command()
def diff(options: _ProgressOptions) -> None:
    """Show what `deploy apply` would change on the cluster, without changing anything.

    Like `kubectl diff`, it compares each live object with the result of a server-side dry run. Exit 0 if nothing would
    change, 1 if something would, 2 if that could not be determined.
    """
    from clickline.deploy.apply import plan_changes
    from clickline.deploy.object_diff import object_diffs

    with _failing_above_one(), options.cluster() as kube:
        config = options.config()
        rendered = _rendered(kube, options)
        with options.progress() as progress:
            changes = plan_changes(kube, config, rendered.objects, progress)
    found = object_diffs(changes.steps)
    if options.as_json:
        notes = [*rendered.notes, *changes.notes]
        emit({**_target(config), "changes": [asdict(one) for one in found], "notes": notes})
    else:
        for one in found:
            typer.echo(f"{one.action} {one.object}")
            for line in one.diff.splitlines():
                typer.secho(line, fg={"+": "green", "-": "red", "@": "cyan"}.get(line[:1]))
        _notes(changes.notes)
        many = f"{pluralize(len(found), 'object')} would change; `clickline deploy apply` makes the changes"
        note(f"{_place(config)}: {many if found else 'nothing would change'}")
    if found:
        raise typer.Exit(ExitCode.FAILED)


@deploy.command()
def apply(
    options: _ProgressOptions,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune",
            help="Delete objects of an earlier apply that are no longer part of the deployment; never data.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done, by a dry run on the server.")
    ] = False,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Wait for missing Secrets, then until the pipeline has finished and the rollout is complete.",
        ),
    ] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long --wait waits.", min=1)] = 3600,
) -> None:
    """Create or change the deployment on the cluster of your kubeconfig.

    Everything is checked first, also by a dry run on the server; if something is wrong, nothing is changed. Exit 1 if
    only a part could be applied. With --wait: 0 if the pipeline has finished and every predictor is up to date, 3 if
    the model failed the gate, 2 or 4 if the pipeline ended with that code, 1 if it failed otherwise, the rollout is
    stuck or the time is up.
    """
    from clickline.deploy.apply import apply as run
    from clickline.deploy.apply import plan_changes
    from clickline.deploy.wait import await_deployed

    if dry_run and (wait or prune):
        raise wrong_argument("--dry-run", "cannot be used with --wait or --prune.", "Use it alone.")
    begun = time.monotonic()
    outcome = None
    with options.cluster() as kube:
        config = options.config()
        rendered = _rendered(kube, options)
        with options.progress() as progress:
            if dry_run:
                done = plan_changes(kube, config, rendered.objects, progress).as_result()
            else:
                seconds = timeout if wait else 0.0
                done = run(
                    kube, config, rendered.objects, prune=prune, progress=progress, wait_seconds=seconds
                )
        if not options.as_json:
            _show_applied(done, config, dry_run=dry_run)
        if wait and not done.failed:
            with options.progress() as progress:
                outcome = await_deployed(
                    kube,
                    config,
                    seconds=timeout - (time.monotonic() - begun),
                    progress=Progress() if options.as_json or options.quiet else progress,
                )
    if options.as_json:
        document = {
            **_target(config),
            "dry_run": dry_run,
            **asdict(done),
            "notes": [*rendered.notes, *done.notes],
        }
        if outcome is not None:
            document["waited"] = {"state": outcome.state, "words": outcome.message}
        emit(document)
    elif outcome is not None:
        _show_outcome(outcome, _place(config), timeout)
    if done.failed:
        raise typer.Exit(ExitCode.FAILED)
    if outcome is not None and outcome.state != "done":
        raise typer.Exit(outcome.code)


@deploy.command()
def status(
    options: _JsonOptions,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh it until Ctrl-C.")] = False,
) -> None:
    """Show the status of every role: pods, restarts, state and reason, versions; endpoints and recent errors.

    Exit 1 if a role failed.
    """
    from clickline.deploy.deploy_status import fetch_status, summarize

    config = options.config()
    with options.cluster() as kube:
        while True:
            found = summarize(fetch_status(kube, config))
            if options.as_json:
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
    options: _ClusterOptions,
    role: Annotated[
        str | None,
        typer.Argument(metavar="ROLE", help=f"Only this one: {', '.join(_ROLES)}.", show_default="all"),
    ] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Keep printing new lines, also of pods that start later.")
    ] = False,
    lines: Annotated[int, typer.Option(metavar="N", min=0, help="How many of the last lines to show.")] = 100,
    previous: Annotated[
        bool, typer.Option("--previous", help="The logs from before the containers' last restart.")
    ] = False,
) -> None:
    """Show the logs of the pods, in order of time."""
    from clickline.deploy.pod_logs import PodLogLine, last_lines, list_pods
    from clickline.deploy.pod_logs import follow as follow_logs

    if role is not None and role not in _ROLES:
        raise wrong_argument("ROLE", f"is {role!r}.", f"Allowed: {', '.join(_ROLES)}.")
    if follow and previous:
        raise wrong_argument("--previous", "cannot be used with --follow.", "Use one of the two.")
    if options.namespace is not None and options.namespace.isdigit():
        problem = f"is {options.namespace}: it names the namespace, as with kubectl."
        raise wrong_argument("-n", problem, f"Write --lines {options.namespace}.")
    config = options.config()
    namespace = config.deploy.namespace

    def show(line: PodLogLine) -> None:
        inner = "" if line.container == role or line.container in _ROLES else f"/{line.container}"
        say(f"{line.pod}{inner} {line.text}")

    with options.cluster() as kube:
        pods = list_pods(kube, config, role)
        if not pods:
            of_role = f" of role {role}" if role else ""
            note(
                f"{config.name} has no pods{of_role} in namespace {namespace}: `clickline deploy status` shows more"
                + (". Waiting for some." if follow else "")
            )
        shown = last_lines(kube, pods, namespace=namespace, lines=lines, previous=previous)
        for line in shown:
            show(line)
        if follow:
            for line in follow_logs(kube, config, role, shown):
                show(line)


@deploy.command()
def delete(
    options: _ProgressOptions,
    with_data: Annotated[
        bool,
        typer.Option(
            "--with-data",
            help="Also delete claims and volumes with their data, and the namespace if nothing else is in it.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete everything that `deploy apply` created, and nothing else. Data volumes stay, unless --with-data."""
    from clickline.deploy.apply import delete_objects, find_objects, objects_to_delete
    from clickline.deploy.objects import describe

    config = options.config()
    with options.cluster() as kube:
        found = find_objects(kube, config)
        doomed = objects_to_delete(found, with_data=with_data)
        if doomed and not yes:
            where = f"namespace {config.deploy.namespace} of {kube.where} ({kube.host})"
            if options.as_json or not sys.stdin.isatty():
                problem = f"is missing: {pluralize(len(doomed), 'object')} would be deleted from {where}."
                raise wrong_argument("--yes", problem, "Add it, or run this in a terminal.")
            note(f"{config.name} in {where}:")
            _notes(f"  {describe(item)}" for item in doomed)
            question = "Delete these, with all data on the volumes?" if with_data else "Delete these?"
            if not typer.confirm(question, err=True):
                note("nothing was deleted")
                raise typer.Exit(ExitCode.FAILED)
        with options.progress() as progress:
            done = delete_objects(kube, config, found, with_data=with_data, progress=progress)
    if options.as_json:
        emit({**_target(config), **asdict(done)})
    else:
        _show_deleted(done, config)


@data.command()
def push(
    options: _ProgressOptions,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A local file or folder.")],
) -> None:
    """Copy click logs into the data volume.

    A path in the local folder that corresponds to the volume (data, or deploy.storage.data.mount) is copied to the same
    place in the volume; the contents of any other folder go to the volume's root. A file gets its name once it has
    arrived completely and its checksum matches; a file of the same name is replaced. Missing objects, such as the
    claim, are created; the pod that mounts the volume for the transfer is deleted at the end.
    """
    from clickline.deploy.data_volume import push as run

    _transfer(run, path, options)


@data.command()
def pull(
    options: _ProgressOptions,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The local file or folder to write to.")],
) -> None:
    """Copy files from the data volume.

    A path in the local folder that corresponds to the volume (data, or deploy.storage.data.mount) names the same file
    or folder of the volume; any other folder receives everything in the volume. Files of the same name are replaced,
    each once it has arrived completely.
    """
    from clickline.deploy.data_volume import pull as run

    _transfer(run, path, options)


def _transfer(
    run: Callable[[Kube, Rendered, Path, Progress], TransferResult], path: Path, options: _ProgressOptions
) -> None:
    from clickline.deploy.render import render

    rendered = render(options.config_file, options.changes())
    with options.cluster() as kube, options.progress() as progress:
        done = run(kube, rendered, path, progress)
    if options.as_json:
        emit(asdict(done))
        return
    many = f"{pluralize(done.files, 'file')}, {human_size(done.bytes)}"
    typer.echo(f"{many}: {done.source} → {done.target}, checksums match")


@deploy.command("data-receive", hidden=True)
def data_receive(folder: Annotated[Path, typer.Argument(metavar="FOLDER")]) -> None:
    """The pod's part of `deploy data push`."""
    from clickline.deploy.file_transfer import receive

    total = receive(sys.stdin.buffer, lambda _: folder, clears=True)
    typer.echo(f"{total.files} {total.bytes}")


@deploy.command("data-send", hidden=True)
def data_send(path: Annotated[Path, typer.Argument(metavar="PATH")]) -> None:
    """The pod's part of `deploy data pull`."""
    from clickline.deploy.file_transfer import list_files, send, transfer_total

    if not path.exists():
        raise StorageError(
            f"{path} does not exist in the volume. `clickline deploy data push` puts files there."
        )
    files = list_files(path)
    send(files, transfer_total(path, files), sys.stdout.buffer, lambda size: None)
    sys.stdout.buffer.flush()


@deploy.command("check-pod", hidden=True)
def check_pod(
    options: ConfigOptions,
    read_only: Annotated[bool, typer.Option("--read-only", help="The pod only reads home.")] = False,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder that the pod writes click logs to.")
    ] = None,
    awaited: Annotated[
        str | None,
        typer.Option(
            "--await",
            metavar="HOST:PORT",
            help="A server that must accept connections before the pod starts.",
        ),
    ] = None,
) -> None:
    """The init container of every pod: check its directories, copy the kernels, create Ray's token."""
    from clickline.deploy.init_container import await_server
    from clickline.deploy.init_container import check_pod as run

    config = options.config()
    directories = [Path(config.cache.dir)] if config.cache.dir else []
    directories += [] if data is None else [data]
    if not read_only:
        directories.append(Path(config.home))
    _notes(
        run(
            directories,
            kernels=_path("CLICKLINE_KERNELS"),
            cache=_path("NUMBA_CACHE_DIR"),
            cpu=os.environ.get("NUMBA_CPU_NAME"),
            token=None if read_only else _path("RAY_AUTH_TOKEN_PATH"),
        )
    )
    if awaited is not None:
        await_server(awaited, note)


@deploy.command("hold-ray", hidden=True)
def hold_ray(
    sizes: Annotated[list[str], typer.Argument(metavar="NAME=N...", help="StatefulSets and their sizes.")],
    namespace: Annotated[str, typer.Option(metavar="NAME", help="Their namespace.")],
    mark: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file to create once they have been scaled up.")
    ] = None,
    only: Annotated[Literal["ask", "release"] | None, typer.Option(help="Do only this, and exit.")] = None,
) -> None:
    """The sidecar of a pipeline on Ray: scale Ray up, and down again when it is terminated."""
    from clickline.cli.signals import take_stop
    from clickline.deploy.kube_client import connect
    from clickline.deploy.ray_lifecycle import keep_scaled, scale_down, scale_up

    stopped = take_stop()  # other commands only exit on SIGTERM; this one scales down then
    wanted = {name: int(size) for name, _, size in (one.partition("=") for one in sizes)}
    if only != "release":
        with _ClusterOptions().cluster() as kube:
            scale_up(kube, namespace, wanted, stopped, note)
        if mark is not None:
            mark.touch()
    if only is None:
        keep_scaled(connect, namespace, wanted, stopped, note)
    if only != "ask":
        scale_down(connect, namespace, list(wanted), note)


@deploy.command("await-rollout", hidden=True)
def await_rollout(options: ConfigOptions) -> None:
    """The last step of a workflow: wait until every predictor serves the registry's current version."""
    from clickline.deploy.rollout_wait import await_rollout as run

    with show_progress(as_json=False, quiet=False) as progress:
        count = run(options.config(), progress)
    serve = "serves" if count == 1 else "serve"
    note(
        f"{pluralize(count, 'predictor')} {serve} the current version" if count else "there are no predictors"
    )


def _path(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value) if value else None


def _target(config: Config) -> dict[str, str]:
    return {"name": config.name, "namespace": config.deploy.namespace}


def _place(config: Config) -> str:
    return f"{config.name} in namespace {config.deploy.namespace}"


def _rendered(kube: Kube, options: _ProgressOptions) -> Rendered:
    """What is to be applied, with the notes that no earlier apply has shown. Shows these, and which --set values of the
    last apply are no longer given."""
    from clickline.deploy.apply_record import dropped_overrides, read_record, with_record
    from clickline.deploy.render import render

    given = options.overrides or ()
    rendered = render(options.config_file, options.changes())
    record = read_record(kube, rendered.objects)
    notes = record.new_notes(rendered.notes)
    dropped = dropped_overrides(options.config_file, record.overrides, given)
    _notes([*notes, *dropped])
    if dropped:
        note("--set counts for one apply: repeat it, or write it into the config to keep it.")
    return replace(rendered, objects=with_record(rendered.objects, given, rendered.notes), notes=notes)


@contextmanager
def _failing_above_one() -> Iterator[None]:
    """For a command whose exit code 1 is a result: an error that would exit with 1 exits with 2."""
    try:
        yield
    except ClicklineError as error:
        if exit_code(error) != ExitCode.FAILED:
            raise
        raise Undecided(str(error)) from error


# ── output ─────────────────────────────────────────────────────────────────────────────────────


def _notes(lines: Iterable[str]) -> None:
    for line in lines:
        note(line)


def _show_applied(done: ApplyResult, config: Config, *, dry_run: bool = False) -> None:
    suffix = " (dry run)" if dry_run else ""
    for action in ("removed", "created", "changed", "replaced", "unchanged", "pruned"):
        for item in getattr(done, action):
            typer.echo(f"{action:<10} {item}{suffix}")
    for item, why in done.failed.items():
        note(f"failed     {item}: {why}")
    for item in done.untried:
        note(f"not tried  {item}")
    _notes(done.notes)
    if done.left_over:
        note(
            f"left over from an earlier apply and no longer part of {config.name}: {', '.join(done.left_over)}. "
            "`clickline deploy apply --prune` deletes them; claims and volumes only `deploy delete --with-data`."
        )
    if done.failed:
        note("The deployment was applied only in part. Fix what failed and apply again; the rest is done.")
        return
    count = sum(map(len, (done.created, done.changed, done.replaced, done.removed)))
    many = pluralize(count, "object")
    if dry_run:
        summary = f"{many} would be created or changed" if count else "nothing would change"
        hint = "this was a dry run, `clickline deploy diff` shows each line"
    else:
        summary = f"{many} created or changed" if count else "nothing to change"
        hint = "`clickline deploy status` shows its state"
    typer.echo(f"{_place(config)}: {summary}; {hint}")


def _show_outcome(outcome: WaitResult, place: str, timeout: float) -> None:
    if outcome.state == "done":
        typer.echo(f"{place}: {outcome.message}")
    elif outcome.state == "waiting":
        note(
            f"{place}: not complete after {timeout:,.0f} s: {outcome.message}. The cluster continues: "
            "`clickline deploy status` shows its state; --timeout waits longer."
        )
    else:
        note(
            f"{place}: {outcome.message}. `clickline deploy logs` shows more; "
            "once it is fixed, `clickline deploy apply` starts again."
        )


def _show_deleted(done: DeleteResult, config: Config) -> None:
    for item in done.removed:
        typer.echo(f"deleted    {item}")
    for item in done.kept:
        typer.echo(f"kept       {item}")
    _notes(done.notes)
    if not done.removed:
        typer.echo(f"{config.name} has no objects to delete in namespace {config.deploy.namespace}")


def _show_status(found: Mapping[str, Any]) -> None:
    name, namespace = found["name"], found["namespace"]
    if found["state"] == "absent":
        typer.echo(f"{name} is not deployed in namespace {namespace}: `clickline deploy apply` deploys it")
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
                    _reason(role),
                )
                for role in found["roles"]
            ],
        )
    endpoints = [
        f"{one['role'] or '-'}  {one['type']}  {address}"
        for one in found["endpoints"]
        for address in one["addresses"]
    ]
    claims = [
        "  ".join(part for part in (one["claim"], one["state"], one["size"], one["why"]) if part)
        for one in found["claims"]
    ]
    errors = [
        f"{one['at']} {one['object']} {one['reason']}"
        + (f" ({one['count']} times)" if one["count"] > 1 else "")
        + f": {one['message']}"
        for one in found["errors"]
    ]
    for title, rows in (("endpoints", endpoints), ("claims", claims), ("last errors", errors)):
        if rows:
            typer.echo("\n".join((f"\n{title}", *(f"  {row}" for row in rows))))
    _notes(found["notes"])


def _reason(role: Mapping[str, Any]) -> str:
    """Why a role is not running, or why its version is unknown."""
    unknown = sorted({pod["words"] for pod in role["pods"] if pod["words"] and pod["state"] == "running"})
    return " ".join((role["why"] or "; ".join(unknown)).split())
