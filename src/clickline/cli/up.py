"""clickline up: the whole flow, then the endpoint; with --follow it keeps learning."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from clickline.cli.console import emit, fact_lines, facts, note, result, stage_rows, watching_stages
from clickline.cli.options import ConfigFile, Json, Overrides, Quiet
from clickline.errors import ClicklineError, ConfigError, Mistake

if TYPE_CHECKING:
    from clickline.config import Config
    from clickline.pipeline.up import Running
    from clickline.pipeline.up_folder import Seen, UpFolder
    from clickline.progress import Progress

_POLL_SECONDS = 0.05
_START_SECONDS = 60.0  # for a run in the background to take its lock


def up(
    follow: Annotated[
        bool, typer.Option("--follow", help="Keep learning hours as they arrive, and serve what is learned.")
    ] = False,
    backfill: Annotated[
        str | None,
        typer.Option(
            "--backfill",
            metavar="FROM..TO",
            help="With --follow: first all hours of this range that were not learned, each YYYYMMDD or YYYYMMDD/HH.",
            show_default=False,
        ),
    ] = None,
    no_serve: Annotated[bool, typer.Option("--no-serve", help="Publish, but open no endpoint.")] = False,
    no_studio: Annotated[bool, typer.Option("--no-studio", help="Show no web page beside it.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Run in the background: see status, logs and down.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="With --detach: return when the endpoint answers.")
    ] = False,
    config_file: ConfigFile = Path("clickline.yaml"),
    overrides: Overrides = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Prepare, train, evaluate, judge, publish and serve; what has not changed is skipped.

    Ctrl-C at any point, run it again: it goes on where it was. Exit 3 if the gate refuses.
    """
    from clickline.config import load_config

    config = load_config(config_file, overrides or ())
    _check(backfill, follow=follow, detach=detach, wait=wait)
    studio = config.studio.enabled and not no_studio
    if detach:
        again = ["up", "-q", "-c", str(config_file), *(f"--set={one}" for one in overrides or ())]
        again += ["--follow"] * follow + ["--no-serve"] * no_serve + ["--no-studio"] * no_studio
        again += [] if backfill is None else ["--backfill", backfill]
        _detach(config, config_file, again, serve=not no_serve, wait=wait, as_json=as_json, quiet=quiet)
    else:
        _run(config, backfill, follow=follow, serve=not no_serve, studio=studio, as_json=as_json, quiet=quiet)


def _check(backfill: str | None, *, follow: bool, detach: bool, wait: bool) -> None:
    wrong = []
    if backfill is not None:
        from clickline.pipeline.backfill import hours_between

        hours_between(backfill)
        if not follow:
            wrong.append(Mistake("", 0, "--backfill", "is given without --follow.", "Give both, or none."))
    if wait and not detach:
        wrong.append(Mistake("", 0, "--wait", "is given without --detach.", "Give both, or none."))
    if wrong:
        raise ConfigError(wrong)


# ── in the foreground ──────────────────────────────────────────────────────────────────────────


def _run(
    config: Config,
    backfill: str | None,
    *,
    follow: bool,
    serve: bool,
    studio: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    from clickline.deploy.rollout_wait import leave_version
    from clickline.pipeline.runner import expected_stages
    from clickline.pipeline.up import run_up

    _take_signals()
    stages = expected_stages(follow=follow, serve=serve)
    with watching_stages(stages, as_json=as_json, quiet=quiet) as progress:
        running = run_up(
            config,
            follow=follow,
            backfill=backfill,
            serve=serve,
            studio=studio,
            progress=progress,
            program=False,
        )
        if follow:  # the picture goes on
            _until_stopped(running, progress, as_json=as_json)
            return
    if not serve:
        leave_version(config)
    _until_stopped(running, progress, as_json=as_json)


def _take_signals() -> None:
    """Each signal raises KeyboardInterrupt here. Other commands have a moment to end; children may have to drain."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and `&` in a script mean it
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _until_stopped(running: Running, progress: Progress, *, as_json: bool) -> None:
    try:
        _show(running, progress, as_json=as_json)
        running.wait()
    except KeyboardInterrupt:
        progress.say("stopping: running requests get the time to end; once more to end at once")
        running.stop()


def _show(running: Running, progress: Progress, *, as_json: bool) -> None:
    if as_json:
        emit(_document(running))
        return
    where = running.endpoint
    named: dict[str, object] = {"model": running.name}
    if running.version is not None:
        named["version"] = running.version
    if running.metrics.get("auc") is not None:
        named["AUC"] = f"{running.metrics['auc']:.4f}"
    if where is not None:
        named |= {"gRPC": where.grpc, "HTTP": where.http, "metrics": where.metrics}
    if running.studio is not None:
        named["studio"] = running.studio
    named["logs"] = running.logs
    lines = fact_lines(named)
    if where is not None:
        lines += ["", "try it:", f"  {where.curl}"]
    result("\n".join(lines), progress)


def _document(running: Running) -> dict[str, Any]:
    return {
        "name": running.name,
        "dataset": running.dataset,
        "checkpoint": running.checkpoint,
        "metrics": dict(running.metrics),
        "gate": dict(running.gate),
        "version": running.version,
        "skipped": list(running.skipped),
        "endpoint": None if running.endpoint is None else running.endpoint.to_json(),
        "studio": running.studio,
        "logs": str(running.logs),
    }


# ── in the background ──────────────────────────────────────────────────────────────────────────


def _detach(
    config: Config,
    config_file: Path,
    again: list[str],
    *,
    serve: bool,
    wait: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    from clickline.pipeline.up_folder import UpFolder

    folder = UpFolder(config)
    folder.refuse_if_taken()
    folder.logs.mkdir(parents=True, exist_ok=True)
    with folder.detached_log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", "from clickline.cli.main import main; main()", *again],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # the end of this terminal is not its end
        )
    seen = _until_it_runs(process, folder)
    if wait:
        seen = _until_it_answers(config, process, folder, serve=serve, quiet=quiet or as_json)
    endpoint = seen.document.get("stages", {}).get("serve", {}).get("facts", {})
    here = "" if config_file == Path("clickline.yaml") else f" -c {config_file}"
    page = (seen.document.get("studio") or {}).get("url")
    if as_json:
        told = {"pid": process.pid, "state": seen.state, "logs": str(folder.logs), "studio": page}
        emit({**told, "endpoint": endpoint or None})
        return
    named: dict[str, object] = {"pid": process.pid, "logs": folder.logs}
    if "curl" in endpoint:
        named |= {"gRPC": endpoint["grpc"], "HTTP": endpoint["http"], "metrics": endpoint["metrics"]}
    if page is not None:
        named["studio"] = page
    named |= {
        "how far": f"clickline status{here}",
        "what it says": f"clickline logs -f{here}",
        "end it": f"clickline down{here}",
    }
    facts(named)
    if "curl" in endpoint:
        typer.echo(f"\ntry it:\n  {endpoint['curl']}")


def _until_it_runs(process: subprocess.Popen[bytes], folder: UpFolder) -> Seen:
    """Wait until it has taken the lock."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        ended = process.poll() is not None
        seen = folder.look()
        if seen.document.get("pid") == process.pid:
            return seen
        if ended:
            said = folder.detached_log.read_text(errors="replace").strip()
            raise ClicklineError(said or f"it ended at once, with exit code {process.returncode}.")
        if time.monotonic() > deadline:
            process.kill()
            raise ClicklineError(
                f"it did not begin within {_START_SECONDS:.0f} s. See {folder.detached_log}."
            )
        time.sleep(_POLL_SECONDS)


def _until_it_answers(
    config: Config, process: subprocess.Popen[bytes], folder: UpFolder, *, serve: bool, quiet: bool
) -> Seen:
    """Wait until the endpoint answers; without one until all is published, or hours are waited for. What the stages
    come to is told meanwhile."""
    from clickline.pipeline.endpoint import readiness
    from clickline.pipeline.ipc import error_of

    told: dict[str, str] = {}
    while True:
        ended = process.poll() is not None
        seen = folder.look()
        stages = seen.document.get("stages", {})
        for name, state, words, seconds in stage_rows(seen.document):
            if not quiet and state not in ("waiting", told.get(name)):
                told[name] = state
                if state == "running":
                    note(f"{name}: begun")
                else:
                    note(f"{name}: {', '.join(part for part in (state, words, seconds) if part)}")
        if ended:
            if seen.document.get("error"):
                raise error_of(seen.document["error"])
            if seen.state == "done":
                return seen
            raise ClicklineError(f"the run ended before it was up ({seen.state}). See `clickline status`.")
        if serve:
            if "grpc" in stages.get("serve", {}).get("facts", {}) and readiness(config) == "ready":
                return seen
        elif stages.get("follow", {}).get("state") == "running":
            return seen
        time.sleep(_POLL_SECONDS)
