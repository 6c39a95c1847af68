"""`clickline.up`: from logs to a running endpoint; with `follow` it keeps training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from clickline.config import Config
from clickline.errors import ClicklineError
from clickline.pipeline.endpoint import Endpoint
from clickline.pipeline.runner import Runner
from clickline.progress import Progress, default_progress


@dataclass(frozen=True)
class RunHandle:
    """The results of `up` and a handle to the processes it keeps running. With `follow`, results that do not exist yet
    are None.

    `with clickline.up(config) as run:` stops the run at the end of the block."""

    name: str
    dataset: str | None
    checkpoint: str | None
    metrics: Mapping[str, float | None]  # auc, logloss, calibration; empty if nothing was evaluated
    gate: Mapping[str, Any]  # passed, warnings
    version: int | None  # the version published by this run, else the one that the endpoint serves
    skipped: tuple[str, ...]  # stages whose config and input have not changed
    endpoint: Endpoint | None  # None without serving
    studio: str | None  # its address; None if it is disabled
    logs: Path
    _runner: Runner = field(repr=False, compare=False)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the run to end, at most `seconds`; returns whether it ended. Raises the error of a failed run."""
        return self._runner.wait(seconds=seconds)

    def stop(self) -> None:
        """Drain running requests, then stop all processes."""
        self._runner.stop()

    def status(self) -> dict[str, Any]:
        """Current state of the stages and of the work in progress."""
        return self._runner.status()

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
) -> RunHandle:
    """Prepare, train, evaluate, check the gate, publish and serve; stages whose input has not changed are skipped.

    Returns when the endpoint answers, or without `serve` when the version is published. `follow` keeps training on
    hours as they arrive, after those of `backfill`, a text FROM..TO. Raises GateRefused if the model does not pass the
    gate.
    """
    return start(
        config,
        follow=follow,
        backfill=backfill,
        serve=serve,
        studio=config.studio.enabled,
        progress=progress or default_progress(),
        program=True,
    )


def start(config: Config, **options: Any) -> RunHandle:
    """Start a run with the options of `Runner`; returns when it is up. Raises its error if it fails before."""
    runner = Runner(config, **options)
    runner.start()
    try:
        runner.wait(until_up=True)
    except BaseException:
        runner.stop()
        raise
    if runner.ended and runner.was_stopped:
        raise ClicklineError("`clickline down` stopped the run before it was up. Run it again to resume.")
    return _handle(runner)


def _handle(runner: Runner) -> RunHandle:
    stages = runner.status()["stages"]
    facts: dict[str, Mapping[str, Any]] = {name: one["facts"] for name, one in stages.items()}
    serving = facts.get("serve", {})
    evaluation = facts.get("evaluate", {})
    return RunHandle(
        name=runner.name,
        dataset=facts.get("prepare", {}).get("dataset"),
        checkpoint=facts.get("train", {}).get("checkpoint"),
        metrics={name: value for name, value in evaluation.items() if name != "report"},
        gate=facts.get("gate", {}),
        version=facts.get("publish", {}).get("version", serving.get("version")),
        skipped=tuple(name for name, one in stages.items() if one["state"] == "skipped"),
        endpoint=Endpoint(**{key: serving[key] for key in ("grpc", "http", "metrics", "curl")})
        if "grpc" in serving
        else None,
        studio=runner.studio,
        logs=runner.folder.logs,
        _runner=runner,
    )
