"""Clickline: click logs in, a click-through-rate service out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clickline.client import Client
    from clickline.config import Config, load_config
    from clickline.errors import ClicklineError
    from clickline.stages.evaluate.run import EvaluateResult, evaluate
    from clickline.stages.prepare.run import PrepareResult, prepare
    from clickline.stages.publish.run import PublishResult, publish
    from clickline.stages.train.run import TrainResult, train

__all__ = [
    "ClicklineError",
    "Client",
    "Config",
    "EvaluateResult",
    "PrepareResult",
    "PublishResult",
    "TrainResult",
    "__version__",
    "evaluate",
    "load_config",
    "prepare",
    "publish",
    "train",
]
__version__ = "0.1.0"

# Where each name lives. They are fetched on first use, so that importing the package costs nothing.
_HOMES = {
    "ClicklineError": "clickline.errors",
    "Client": "clickline.client",
    "Config": "clickline.config",
    "EvaluateResult": "clickline.stages.evaluate.run",
    "PrepareResult": "clickline.stages.prepare.run",
    "PublishResult": "clickline.stages.publish.run",
    "TrainResult": "clickline.stages.train.run",
    "evaluate": "clickline.stages.evaluate.run",
    "load_config": "clickline.config",
    "prepare": "clickline.stages.prepare.run",
    "publish": "clickline.stages.publish.run",
    "train": "clickline.stages.train.run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'clickline' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
