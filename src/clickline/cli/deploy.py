"""clickline deploy: the system on Kubernetes, from the same config."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from clickline.cli.console import emit, note, requires_extra, say, show_progress, table
from clickline.cli.exit_codes import ExitCode, Undecided, exit_code
from clickline.cli.options import ConfigFile, Json, Overrides, Quiet
from clickline.errors import ClicklineError, ConfigError, Mistake, StorageError
from clickline.progress import Progress, human_size, pluralize

if TYPE_CHECKING:
    from clickline.config import Config
    from clickline.deploy.apply import ApplyResult, ChangeSet, DeleteResult
    from clickline.deploy.data_volume import TransferResult
    from clickline.deploy.kube_client import Kube
    from clickline.deploy.objects import Object
    from clickline.deploy.render import Rendered
    from clickline.deploy.wait import WaitResult

deploy = typer.Typer(help="Run the whole system on Kubernetes, from the same config.", no_args_is_help=False)
data = typer.Typer(help="Move files to and from the data volume.", no_args_is_help=False)
deploy.add_typer(data, name="data")

Context = Annotated[
    str | None,
    typer.Option(
        "--context",
        metavar="NAME",
        help="Another cluster of your kubeconfig.",
        show_default="the current one",
    ),
]

Namespace = Annotated[
    str | None,
    typer.Option(
        "-n",
        "--namespace",
        metavar="NAMESPACE",
        help="Another namespace of the cluster.",
        show_default="deploy.namespace",
    ),
]

_WATCH_SECONDS = 2.0
_ROLES = ("pipeline", "trainer", "ray-head", "ray-worker", "predictor", "lookup", "tracking", "data")


@deploy.command()
def render(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Where the files go.")],
    namespace: Namespace = None,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Write the manifests, as plain files for `kubectl apply -k`. No cluster is asked."""
    from clickline.deploy.render import render, write_files

    made = render(config_file, _with(overrides, namespace))
    write_files(made.files, output)
    for line in made.notes:
        note(line)
    if as_json:
        emit({"folder": str(output), "files": list(made.files)})
        return
    typer.echo(f"wrote {pluralize(len(made.files), 'file')} to {output}")


@deploy.command()
def diff(
    context: Context = None,
    namespace: Namespace = None,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what `deploy apply` would change on the cluster, and change nothing.

    Each object as it is live against what the server makes of the new one (a dry run), as `kubectl diff` does. Exit 0
    if nothing would change, 1 if something would, 2 if it could not be found out.
    """
    from clickline.deploy.apply import plan_changes
    from clickline.deploy.object_diff import object_diffs

    with _failing_above_one(), _connected(context) as kube:
        asked = _Asked.of(kube, config_file, overrides, namespace)
        asked.tell()
        with show_progress(as_json=as_json, quiet=quiet) as progress:
            proposal = plan_changes(kube, asked.objects, **asked.where, progress=progress)
    found = object_diffs(proposal.steps)
    if as_json:
        changes = [asdict(one) for one in found]
        emit({**asked.where, "changes": changes, "notes": [*asked.notes, *proposal.notes]})
    for one in found if not as_json else ():
        typer.echo(f"{one.action} {one.object}")
        for line in one.diff.splitlines():
            colour = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1])
            typer.secho(line, fg=colour)
    if not as_json:
        _tell(proposal.notes)
        many = pluralize(len(found), "object")
        note(
            f"{asked.place}: {f'{many} would change' if found else 'nothing would change'}"
            + ("; `clickline deploy apply` does it" if found else "")
        )
    if found:
        raise typer.Exit(ExitCode.FAILED)


@deploy.command()
def apply(
    prune: Annotated[
        bool,
        typer.Option(
            "--prune", help="Remove what an earlier apply made and this one has no more; never data."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Try it on the server, tell what would be done, and do nothing.")
    ] = False,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", help="Wait for missing Secrets, then for the pipeline's end and a complete roll-out."
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="How long --wait waits.", min=1)
    ] = 3600,
    context: Context = None,
    namespace: Namespace = None,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Create or change the deployment on the cluster of your kubeconfig.

    Everything is checked first, on the server too; nothing is changed when something is wrong. Exit 1 if only a part
    of it could be applied. With --wait: 0 when the pipeline is done and every predictor is up to date, 3 if the gate
    refused the model, 2 or 4 if the pipeline ended with that code, 1 if it failed otherwise, the roll-out is stuck or
    the time is up.
    """
    from clickline.deploy.apply import apply as run
    from clickline.deploy.apply import plan_changes

    if dry_run and (wait or prune):
        raise ConfigError(
            [Mistake("", 0, "--dry-run", "is given beside --wait or --prune.", "Allowed: alone.")]
        )
    begun = time.monotonic()
    outcome = None
    with _connected(context) as kube:
        asked = _Asked.of(kube, config_file, overrides, namespace)
        asked.tell()
        with show_progress(as_json=as_json, quiet=quiet) as progress:
            if dry_run:
                done = _would_be(plan_changes(kube, asked.objects, **asked.where, progress=progress))
            else:
                wait_seconds = timeout if wait else 0.0
                done = run(
                    kube,
                    asked.objects,
                    **asked.where,
                    prune=prune,
                    progress=progress,
                    wait_seconds=wait_seconds,
                )
        if not as_json:
            _show_applied(done, asked.name, asked.namespace, dry_run=dry_run)
        if wait and not done.failed:
            left = timeout - (time.monotonic() - begun)
            with show_progress(as_json=as_json, quiet=quiet) as progress:
                outcome = _await(kube, asked, left, Progress() if as_json or quiet else progress)
    if as_json:
        document = {**asked.where, "dry_run": dry_run, **asdict(done)}
        document["notes"] = [*asked.notes, *done.notes]
        waited = {"waited": {"state": outcome.state, "words": outcome.message}} if outcome else {}
        emit({**document, **waited})
    elif outcome is not None:
        _show_outcome(outcome, asked, timeout)
    if done.failed:
        raise typer.Exit(ExitCode.FAILED)
    if outcome is not None and outcome.state != "done":
        raise typer.Exit(outcome.code)


@deploy.command()
def status(
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again until Ctrl-C.")] = False,
    context: Context = None,
    namespace: Namespace = None,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Show every role: ready and desired pods, restarts, state and why, versions, endpoints, last errors.

    Exit 1 if a role failed.
    """
    from clickline.deploy.deploy_status import fetch_status, summarize

    config = _config(config_file, _with(overrides, namespace))
    with _connected(context) as kube:

        def look() -> dict[str, Any]:
            return summarize(
                fetch_status(
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
        int, typer.Option("--lines", metavar="N", min=0, help="How many of the last lines.")
    ] = 100,
    previous: Annotated[
        bool, typer.Option("--previous", help="What containers said before their last restart.")
    ] = False,
    context: Context = None,
    namespace: Namespace = None,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
) -> None:
    """Show what the pods say, in the order of time."""
    from clickline.deploy.pod_logs import LogLine, last_lines, list_pods
    from clickline.deploy.pod_logs import follow as go_on

    if role is not None and role not in _ROLES:
        raise ConfigError([Mistake("", 0, "ROLE", f"is {role!r}.", f"Allowed: {', '.join(_ROLES)}.")])
    if follow and previous:
        raise ConfigError(
            [Mistake("", 0, "--previous", "is given beside --follow.", "Allowed: one of the two.")]
        )
    if namespace is not None and namespace.isdigit():
        raise ConfigError(
            [
                Mistake(
                    "",
                    0,
                    "-n",
                    f"is {namespace}: it names the namespace, as with kubectl.",
                    f"Write --lines {namespace}.",
                )
            ]
        )
    config = _config(config_file, _with(overrides, namespace))
    name, namespace = config.name, config.deploy.namespace

    def show(line: LogLine) -> None:
        inner = "" if line.container == role or line.container in _ROLES else f"/{line.container}"
        say(f"{line.pod}{inner} {line.text}")

    with _connected(context) as kube:
        there = list_pods(kube, name=name, namespace=namespace, role=role)
        if not there:
            of_role = f" of role {role}" if role else ""
            note(
                f"{name} has no pods{of_role} in namespace {namespace}: `clickline deploy status` tells more"
                + (". Waiting for some." if follow else "")
            )
        told = last_lines(kube, there, namespace=namespace, lines=lines, previous=previous)
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
    namespace: Namespace = None,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Remove all that `deploy apply` made, and nothing else. Data volumes stay, unless --with-data."""
    from clickline.deploy.apply import delete_objects, find_objects, objects_to_delete
    from clickline.deploy.kube_client import describe

    config = _config(config_file, _with(overrides, namespace))
    name, namespace = config.name, config.deploy.namespace
    with _connected(context) as kube:
        there = find_objects(kube, name=name, namespace=namespace)
        leaving = objects_to_delete(there, with_data=with_data)
        if leaving and not yes:
            where = f"namespace {namespace} of {kube.where} ({kube.host})"
            if as_json or not sys.stdin.isatty():
                problem = f"is missing: {pluralize(len(leaving), 'object')} would be removed from {where}."
                raise ConfigError([Mistake("", 0, "--yes", problem, "Give it, or run this at a terminal.")])
            note(f"{name} in {where}:")
            for item in leaving:
                note(f"  {describe(item)}")
            question = "Remove these, with all data on the volumes?" if with_data else "Remove these?"
            if not typer.confirm(question, err=True):
                note("nothing was removed")
                raise typer.Exit(ExitCode.FAILED)
        with show_progress(as_json=as_json, quiet=quiet) as progress:
            done = delete_objects(
                kube, there, name=name, namespace=namespace, with_data=with_data, progress=progress
            )
    if as_json:
        emit({"name": name, "namespace": namespace, **asdict(done)})
    else:
        _show_removed(done, name, namespace)


@data.command()
def push(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A file or a folder of this machine.")],
    context: Context = None,
    namespace: Namespace = None,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Copy click logs into the data volume.

    What lies in the folder that the volume stands for (data, or deploy.storage.data.mount) goes to the same place in
    the volume; of another folder all that is in it goes to the volume's root. A file gets its name when all of it has
    arrived and its checksum is right; one of the same name is replaced. Whatever the volume needs is made; the pod that
    mounts it meanwhile is removed at the end.
    """
    from clickline.deploy.data_volume import push as run

    _move(run, path, context, _with(overrides, namespace), config_file, as_json=as_json, quiet=quiet)


@data.command()
def pull(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Where the files go on this machine.")],
    context: Context = None,
    namespace: Namespace = None,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Copy files from the data volume.

    A path in the folder that the volume stands for (data, or deploy.storage.data.mount) means the same file or folder
    of the volume; into another folder comes all that the volume holds. Files of the same name are replaced, each when
    all of it has arrived.
    """
    from clickline.deploy.data_volume import pull as run

    _move(run, path, context, _with(overrides, namespace), config_file, as_json=as_json, quiet=quiet)


def _move(
    run: Callable[[Kube, Rendered, Path, Progress], TransferResult],
    path: Path,
    context: str | None,
    overrides: list[str],
    config_file: Path,
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    from clickline.deploy.render import render

    made = render(config_file, overrides)
    with _connected(context) as kube, show_progress(as_json=as_json, quiet=quiet) as progress:
        moved = run(kube, made, path, progress)
    if as_json:
        emit(asdict(moved))
        return
    many = f"{moved.files:,} file{'' if moved.files == 1 else 's'}"
    typer.echo(f"{many}, {human_size(moved.bytes)}: {moved.source} → {moved.target}, checksums match")


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
    read_only: Annotated[bool, typer.Option("--read-only", help="The pod only reads from home.")] = False,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="Where the pod writes click logs.")
    ] = None,
    awaited: Annotated[
        str | None,
        typer.Option("--await", metavar="HOST:PORT", help="What must answer before the pod begins."),
    ] = None,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
) -> None:
    """What each pod does first: its directories take files, kernels and Ray's token are there."""
    from clickline.deploy.init_container import await_server
    from clickline.deploy.init_container import check_pod as run

    config = _config(config_file, overrides)
    directories = [Path(config.cache.dir)] if config.cache.dir else []
    directories += [] if data is None else [data]
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


@deploy.command("hold-ray", hidden=True)
def hold_ray(
    sizes: Annotated[list[str], typer.Argument(metavar="NAME=N...", help="StatefulSets and their pods.")],
    namespace: Annotated[str, typer.Option("--namespace", metavar="NAME", help="Where they are.")],
    mark: Annotated[
        Path | None, typer.Option("--mark", metavar="FILE", help="Made once they have been asked for.")
    ] = None,
    only: Annotated[
        Literal["ask", "release"] | None, typer.Option("--only", help="Do this alone, and end.")
    ] = None,
) -> None:
    """What runs beside a pipeline on Ray: asks for Ray's pods, and lets them go when it is ended itself."""
    from clickline.cli.signals import take_stop
    from clickline.deploy.kube_client import connect
    from clickline.deploy.ray_lifecycle import keep_scaled, scale_down, scale_up

    stopped = take_stop()  # other commands have a moment to end; this one begins to work then
    wanted = {name: int(size) for name, _, size in (one.partition("=") for one in sizes)}
    if only != "release":
        with _connected(None) as kube:
            scale_up(kube, namespace, wanted, stopped, note)
        if mark is not None:
            mark.touch()
    if only is None:
        keep_scaled(connect, namespace, wanted, stopped, note)
    if only != "ask":
        scale_down(connect, namespace, list(wanted), note)


@deploy.command("await-rollout", hidden=True)
def await_rollout(config_file: ConfigFile = Path("clickline.yaml"), overrides: Overrides = None) -> None:
    """The last step of a workflow: wait until every predictor answers with the registry's current version."""
    from clickline.deploy.rollout_wait import await_rollout as run

    with show_progress(as_json=False, quiet=False) as progress:
        count = run(_config(config_file, overrides), progress)
    serve = "serves" if count == 1 else "serve"
    note(
        f"{pluralize(count, 'predictor')} {serve} the current version" if count else "there are no predictors"
    )


def _path(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value) if value else None


def _config(config_file: Path, overrides: list[str] | None) -> Config:
    from clickline.config import load_config

    return load_config(config_file, overrides or ())


def _with(overrides: list[str] | None, namespace: str | None) -> list[str]:
    """What --set and -n say together."""
    return [*(overrides or ()), *([f"deploy.namespace={namespace}"] if namespace is not None else [])]


@dataclass(frozen=True)
class _Asked:
    """What is to be applied, and what is worth saying before that is done."""

    config: Config
    objects: list[Object]
    notes: list[str]
    """Those that no apply before has told."""
    going_back: list[str]
    """Values that the last apply had from --set, and this one has not."""

    @classmethod
    def of(cls, kube: Kube, config_file: Path, overrides: list[str] | None, namespace: str | None) -> _Asked:
        from clickline.deploy.apply_record import dropped_overrides, read_record, with_record
        from clickline.deploy.render import render

        wanted = _with(overrides, namespace)
        made = render(config_file, wanted)
        memory = read_record(kube, made.objects)
        return cls(
            _config(config_file, wanted),
            with_record(made.objects, overrides or (), made.notes),
            memory.new_notes(made.notes),
            dropped_overrides(config_file, memory.overrides, overrides or ()),
        )

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def namespace(self) -> str:
        return self.config.deploy.namespace

    @property
    def where(self) -> dict[str, str]:
        return {"name": self.name, "namespace": self.namespace}

    @property
    def place(self) -> str:
        return f"{self.name} in namespace {self.namespace}"

    def tell(self) -> None:
        for line in (*self.notes, *self.going_back):
            note(line)
        if self.going_back:
            note("--set counts for one apply: give it again, or write it into the config to keep it.")


def _would_be(proposal: ChangeSet) -> ApplyResult:
    from clickline.deploy.apply import ApplyResult
    from clickline.deploy.kube_client import describe

    done = ApplyResult(left_over=[describe(item) for item in proposal.left_over], notes=proposal.notes)
    for step in proposal.steps:
        getattr(done, step.action).append(describe(step.item))
    return done


def _await(kube: Kube, asked: _Asked, seconds: float, progress: Progress) -> WaitResult:
    from clickline.deploy.wait import await_deployed

    serve = asked.config.serve
    return await_deployed(
        kube,
        name=asked.name,
        namespace=asked.namespace,
        metrics_port=serve.metrics_port,
        tls=serve.tls is not None,
        seconds=seconds,
        progress=progress,
    )


@contextmanager
def _failing_above_one() -> Iterator[None]:
    """For a command whose exit code 1 is an answer: what would end with it ends with 2."""
    try:
        yield
    except ClicklineError as error:
        if exit_code(error) != ExitCode.FAILED:
            raise
        raise Undecided(str(error)) from error


@contextmanager
def _connected(context: str | None) -> Iterator[Kube]:
    from clickline.deploy.kube_client import connect

    with requires_extra("k8s", "talking to a cluster"):
        kube = connect(context)
    try:
        yield kube
    finally:
        kube.close()


# ── what is shown ──────────────────────────────────────────────────────────────────────────────


def _tell(lines: Iterable[str]) -> None:
    for line in lines:
        note(line)


def _show_applied(done: ApplyResult, name: str, namespace: str, *, dry_run: bool = False) -> None:
    tried = " (dry run)" if dry_run else ""
    for action in ("removed", "created", "changed", "replaced", "unchanged", "pruned"):
        for item in getattr(done, action):
            typer.echo(f"{action:<10} {item}{tried}")
    for item, why in done.failed.items():
        note(f"failed     {item}: {why}")
    for item in done.untried:
        note(f"not tried  {item}")
    _tell(done.notes)
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
    count = sum(map(len, (done.created, done.changed, done.replaced, done.removed)))
    many = pluralize(count, "object")
    if dry_run:
        told = f"{many} would be created or changed" if count else "nothing would change"
        typer.echo(
            f"{name} in namespace {namespace}: {told}; this was a dry run, `clickline deploy diff` shows each line"
        )
        return
    told = f"{many} created or changed" if count else "nothing to change"
    typer.echo(f"{name} in namespace {namespace}: {told}; `clickline deploy status` shows how it does")


def _show_outcome(outcome: WaitResult, asked: _Asked, timeout: float) -> None:
    if outcome.state == "done":
        typer.echo(f"{asked.place}: {outcome.message}")
    elif outcome.state == "waiting":
        note(
            f"{asked.place}: not complete after {timeout:,.0f} s: {outcome.message}. It goes on by itself: "
            "`clickline deploy status` shows how it does; --timeout waits longer."
        )
    else:
        note(
            f"{asked.place}: {outcome.message}. `clickline deploy logs` tells more; "
            "after mending it `clickline deploy apply` begins again."
        )


def _show_removed(done: DeleteResult, name: str, namespace: str) -> None:
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
    return [
        "  ".join(part for part in (one["claim"], one["state"], one["size"], one["why"]) if part)
        for one in found["claims"]
    ]
