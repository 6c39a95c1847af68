"""Clickline: click logs in, a click-through-rate service out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clickline.client import Client
    from clickline.config import Config, load_config
    from clickline.data.prepare.run import prepare
    from clickline.errors import ClicklineError
    from clickline.evaluation.run import evaluate
    from clickline.pipeline.flow import train
    from clickline.pipeline.planning.run import plan
    from clickline.pipeline.up import RunHandle, up
    from clickline.publishing.run import publish

__all__ = [
    "ClicklineError",
    "Client",
    "Config",
    "RunHandle",
    "__version__",
    "evaluate",
    "load_config",
    "plan",
    "prepare",
    "publish",
    "train",
    "up",
]
__version__ = "0.1.0"

# Where each name lives. They are fetched on first use, so that importing the package costs nothing. What a stage
# returns is typed where the stage is: clickline.pipeline.flow.TrainResult.
_HOMES = {
    "ClicklineError": "clickline.errors",
    "Client": "clickline.client",
    "Config": "clickline.config",
    "RunHandle": "clickline.pipeline.up",
    "evaluate": "clickline.evaluation.run",
    "load_config": "clickline.config",
    "plan": "clickline.pipeline.planning.run",
    "prepare": "clickline.data.prepare.run",
    "publish": "clickline.publishing.run",
    "train": "clickline.pipeline.flow",
    "up": "clickline.pipeline.up",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'clickline' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
