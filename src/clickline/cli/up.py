"""clickline up: the whole pipeline, then the endpoint; with --follow it keeps training."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from clickline.cli.console import emit, fact_lines, facts, note, result, stage_rows
from clickline.cli.options import DEFAULT_CONFIG, ProgressOptions
from clickline.errors import ClicklineError, ConfigError, Mistake

if TYPE_CHECKING:
    from clickline.config import Config
    from clickline.pipeline.up import RunHandle
    from clickline.pipeline.up_folder import RunInfo, UpFolder
    from clickline.progress import Progress

_POLL_SECONDS = 0.05
_START_SECONDS = 60.0  # for a run in the background to take its lock


def up(
    options: ProgressOptions,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", help="Keep training on new hours as they arrive, and serve the new versions."
        ),
    ] = False,
    backfill: Annotated[
        str | None,
        typer.Option(
            metavar="FROM..TO",
            help="With --follow: train first on the skipped hours of this range; ends are YYYYMMDD or YYYYMMDD/HH.",
            show_default=False,
        ),
    ] = None,
    no_serve: Annotated[bool, typer.Option("--no-serve", help="Publish, but start no endpoint.")] = False,
    no_studio: Annotated[bool, typer.Option("--no-studio", help="Do not start the studio.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Run in the background: see status, logs and down.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="With --detach: return when the endpoint answers.")
    ] = False,
) -> None:
    """Run the whole pipeline: prepare, train, evaluate, check the gate, publish, serve.

    Stages whose inputs have not changed are skipped; after an interruption the same command resumes. Exit 3 if the
    gate rejects the model.
    """
    config = options.config()
    _check(backfill, follow=follow, detach=detach, wait=wait)
    serve = not no_serve
    if detach:
        arguments = ["up", "-q", "-c", str(options.config_file)]
        arguments += [f"--set={one}" for one in options.changes()]
        arguments += ["--follow"] * follow + ["--no-serve"] * no_serve + ["--no-studio"] * no_studio
        arguments += [] if backfill is None else ["--backfill", backfill]
        _detach(options, config, arguments, serve=serve, wait=wait)
    else:
        studio = config.studio.enabled and not no_studio
        _run(options, config, backfill, follow=follow, serve=serve, studio=studio)


def _check(backfill: str | None, *, follow: bool, detach: bool, wait: bool) -> None:
    wrong = []
    if backfill is not None:
        from clickline.pipeline.backfill import parse_backfill

        parse_backfill(backfill)
        if not follow:
            wrong.append(Mistake("", 0, "--backfill", "is given without --follow.", "Give both, or none."))
    if wait and not detach:
        wrong.append(Mistake("", 0, "--wait", "is given without --detach.", "Give both, or none."))
    if wrong:
        raise ConfigError(wrong)


# ── in the foreground ──────────────────────────────────────────────────────────────────────────


def _run(
    options: ProgressOptions, config: Config, backfill: str | None, *, follow: bool, serve: bool, studio: bool
) -> None:
    from clickline.deploy.rollout_wait import write_published_version
    from clickline.pipeline.run_record import expected_stages
    from clickline.pipeline.up import start

    _take_signals()
    with options.progress(expected_stages(follow=follow, serve=serve)) as progress:
        running = start(
            config,
            follow=follow,
            backfill=backfill,
            serve=serve,
            studio=studio,
            progress=progress,
            program=False,
        )
        if follow:  # the live display stays
            _until_stopped(running, progress, as_json=options.as_json)
            return
    if not serve:
        write_published_version(config)
    _until_stopped(running, progress, as_json=options.as_json)


def _take_signals() -> None:
    """Every signal raises KeyboardInterrupt here: unlike other commands, children may need time to drain."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and `&` in a script ignore it on purpose
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _until_stopped(running: RunHandle, progress: Progress, *, as_json: bool) -> None:
    try:
        _show(running, progress, as_json=as_json)
        running.wait()
    except KeyboardInterrupt:
        progress.log("stopping: waiting for running requests to finish; press Ctrl-C again to stop at once")
        running.stop()


def _show(running: RunHandle, progress: Progress, *, as_json: bool) -> None:
    if as_json:
        emit(_document(running))
        return
    endpoint = running.endpoint
    named: dict[str, object] = {"model": running.name}
    if running.version is not None:
        named["version"] = running.version
    if running.metrics.get("auc") is not None:
        named["AUC"] = f"{running.metrics['auc']:.4f}"
    if endpoint is not None:
        named |= {"gRPC": endpoint.grpc, "HTTP": endpoint.http, "metrics": endpoint.metrics}
    if running.studio is not None:
        named["studio"] = running.studio
    named["logs"] = running.logs
    lines = fact_lines(named)
    if endpoint is not None:
        lines += ["", "try it:", f"  {endpoint.curl}"]
    result("\n".join(lines), progress)


def _document(running: RunHandle) -> dict[str, Any]:
    document = {name: value for name, value in vars(running).items() if not name.startswith("_")}
    return document | {"endpoint": None if running.endpoint is None else running.endpoint.to_json()}


# ── in the background ──────────────────────────────────────────────────────────────────────────


def _detach(
    options: ProgressOptions, config: Config, arguments: list[str], *, serve: bool, wait: bool
) -> None:
    from clickline.pipeline.up_folder import UpFolder

    folder = UpFolder(config)
    folder.check_free()
    folder.logs.mkdir(parents=True, exist_ok=True)
    with folder.detached_log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", "from clickline.cli.main import main; main()", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # it outlives this terminal
        )
    info = _wait_until_started(process, folder)
    if wait:
        info = _wait_until_ready(config, process, folder, serve=serve, quiet=options.quiet or options.as_json)
    endpoint = info.document.get("stages", {}).get("serve", {}).get("facts", {})
    option = "" if options.config_file == DEFAULT_CONFIG else f" -c {options.config_file}"
    page = (info.document.get("studio") or {}).get("url")
    if options.as_json:
        run = {"pid": process.pid, "state": info.state, "logs": str(folder.logs), "studio": page}
        emit({**run, "endpoint": endpoint or None})
        return
    named: dict[str, object] = {"pid": process.pid, "log files": folder.logs}
    if "curl" in endpoint:
        named |= {"gRPC": endpoint["grpc"], "HTTP": endpoint["http"], "metrics": endpoint["metrics"]}
    if page is not None:
        named["studio"] = page
    named |= {
        "status": f"clickline status{option}",
        "logs": f"clickline logs -f{option}",
        "stop": f"clickline down{option}",
    }
    facts(named)
    if "curl" in endpoint:
        typer.echo(f"\ntry it:\n  {endpoint['curl']}")


def _wait_until_started(process: subprocess.Popen[bytes], folder: UpFolder) -> RunInfo:
    """Wait until the background run has taken its lock."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        ended = process.poll() is not None
        info = folder.read()
        if info.document.get("pid") == process.pid:
            return info
        if ended:
            output = folder.detached_log.read_text(errors="replace").strip()
            raise ClicklineError(output or f"the run exited at once with code {process.returncode}.")
        if time.monotonic() > deadline:
            process.kill()
            raise ClicklineError(
                f"the run did not start within {_START_SECONDS:.0f} s. See {folder.detached_log}."
            )
        time.sleep(_POLL_SECONDS)


def _wait_until_ready(
    config: Config, process: subprocess.Popen[bytes], folder: UpFolder, *, serve: bool, quiet: bool
) -> RunInfo:
    """Wait until the endpoint is ready, or without one until the run has published or follows new hours. Stage changes
    are logged meanwhile."""
    from clickline.pipeline.endpoint import readiness
    from clickline.pipeline.ipc import error_from_json

    logged: dict[str, str] = {}
    while True:
        ended = process.poll() is not None
        info = folder.read()
        stages = info.document.get("stages", {})
        for name, state, summary, seconds in stage_rows(info.document):
            if not quiet and state not in ("waiting", logged.get(name)):
                logged[name] = state
                if state == "running":
                    note(f"{name}: started")
                else:
                    note(f"{name}: {', '.join(part for part in (state, summary, seconds) if part)}")
        if ended:
            if info.document.get("error"):
                raise error_from_json(info.document["error"])
            if info.state == "done":
                return info
            raise ClicklineError(f"the run ended before it was ready ({info.state}). See `clickline status`.")
        if serve:
            if "grpc" in stages.get("serve", {}).get("facts", {}) and readiness(config) == "ready":
                return info
        elif stages.get("follow", {}).get("state") == "running":
            return info
        time.sleep(_POLL_SECONDS)
