"""`clickline.up`: logs in, a running endpoint out; with follow it keeps learning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from clickline.config import Config
from clickline.errors import ClicklineError, ConfigError, Mistake
from clickline.pipeline.endpoint import Endpoint
from clickline.pipeline.runner import Runner
from clickline.progress import Progress, usual


@dataclass(frozen=True)
class Running:
    """What `up` has built and keeps running in processes of its own. With follow, what is not learned yet is None.

    `with clickline.up(config) as running:` ends it with the block."""

    name: str
    dataset: str | None
    checkpoint: str | None
    metrics: Mapping[str, float | None]  # auc, logloss, calibration; empty when nothing was measured
    gate: Mapping[str, Any]  # passed, warnings
    version: int | None  # that was published; of an endpoint that only follows, the one it found
    skipped: tuple[str, ...]  # stages that had nothing to do: same config, same input
    endpoint: Endpoint | None  # None without serving
    studio: str | None  # the address of the page; None without one
    logs: Path
    _runner: Runner = field(repr=False, compare=False)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end, at most so long; True when it is over. Raises what it failed with."""
        return self._runner.wait(seconds=seconds)

    def stop(self) -> None:
        """Let running requests end, then everything. Nothing is left behind."""
        self._runner.stop()

    def status(self) -> dict[str, Any]:
        """Stages and work as they are now."""
        return self._runner.facts()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def up(
    config: Config,
    *,
    follow: bool = False,
    backfill: str | None = None,
    serve: bool = True,
    progress: Progress | None = None,
) -> Running:
    """Prepare, train, evaluate, judge, publish, serve; what has not changed is skipped.

    Returns when the endpoint answers, or without `serve` when the version is published. `follow` keeps learning hours
    as they arrive, after those of `backfill`, a text FROM..TO. Raises GateRefused if the model is not good enough.
    """
    return run_up(
        config,
        follow=follow,
        backfill=backfill,
        serve=serve,
        studio=config.studio.enabled,
        progress=progress,
        program=True,
    )


def run_up(
    config: Config,
    *,
    follow: bool,
    backfill: str | None,
    serve: bool,
    studio: bool,
    progress: Progress | None,
    program: bool,
) -> Running:
    """As `up`. Not a `program`: a process of its own, which a signal may end."""
    if backfill is not None:
        _check_backfill(backfill, follow)
    runner = Runner(
        config,
        follow=follow,
        backfill=backfill,
        serve=serve,
        studio=studio,
        progress=progress or usual(),
        program=program,
    )
    runner.start()
    try:
        runner.wait(until_up=True)
    except BaseException:
        runner.stop()
        raise
    if runner.ended and runner.was_stopped:
        raise ClicklineError("`clickline down` ended the run before it was up. Run it again to go on.")
    return _running(config, runner)


def _check_backfill(backfill: str, follow: bool) -> None:
    from clickline.pipeline.backfill import hours_between

    hours_between(backfill)
    if not follow:
        raise ConfigError(
            [Mistake("", 0, "--backfill", f"is {backfill!r}, without --follow.", "Give --follow as well.")]
        )


def _running(config: Config, runner: Runner) -> Running:
    stages = runner.facts()["stages"]
    facts: dict[str, Mapping[str, Any]] = {name: one["facts"] for name, one in stages.items()}
    served = facts.get("serve", {})
    measured = facts.get("evaluate", {})
    return Running(
        name=config.name,
        dataset=facts.get("prepare", {}).get("dataset"),
        checkpoint=facts.get("train", {}).get("checkpoint"),
        metrics={name: value for name, value in measured.items() if name != "report"},
        gate=facts.get("gate", {}),
        version=facts.get("publish", {}).get("version", served.get("version")),
        skipped=tuple(name for name, one in stages.items() if one["state"] == "skipped"),
        endpoint=Endpoint(**{key: served[key] for key in ("grpc", "http", "metrics", "curl")})
        if "grpc" in served
        else None,
        studio=runner.studio,
        logs=runner.folder.logs,
        _runner=runner,
    )
