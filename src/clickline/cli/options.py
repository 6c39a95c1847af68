"""Options that several commands share.

A command takes a group of them as its first parameter, and `CommandGroup` makes the group's fields options of the
command.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from clickline.cli.console import show_progress
from clickline.progress import Progress

if TYPE_CHECKING:
    from clickline.config import Config

DEFAULT_CONFIG = Path("clickline.yaml")
_BY_NAME = inspect.Parameter.KEYWORD_ONLY
_Command = TypeVar("_Command", bound=Callable[..., None])

ConfigFile = Annotated[Path, typer.Option("-c", "--config", metavar="FILE", help="The config to use.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Change a key of the config for this run; may be repeated.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on stdout.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Show no progress.")]


@dataclass(frozen=True)
class ConfigOptions:
    """The config."""

    config_file: ConfigFile = DEFAULT_CONFIG
    overrides: Overrides = None

    def changes(self) -> list[str]:
        """The keys of the config that the command line changes."""
        return list(self.overrides or ())

    def config(self) -> Config:
        from clickline.config import load_config

        return load_config(self.config_file, self.changes())


@dataclass(frozen=True)
class JsonOptions(ConfigOptions):
    """The config, and how the result is printed."""

    as_json: Json = False


@dataclass(frozen=True)
class ProgressOptions(JsonOptions):
    """The config, and how progress and the result are printed."""

    quiet: Quiet = False

    def progress(self, stages: Sequence[str] = ()) -> AbstractContextManager[Progress]:
        return show_progress(as_json=self.as_json, quiet=self.quiet, stages=stages)


class CommandGroup(typer.Typer):
    """Commands whose first parameter may be one of these groups: its fields become options after the command's own."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[_Command], _Command]:
        register = super().command(name, **settings)

        def decorate(command: _Command) -> _Command:
            register(_with_fields(command))
            return command

        return decorate


def _with_fields(command: Callable[..., None]) -> Callable[..., None]:
    first, *own = inspect.signature(command, eval_str=True).parameters.values()
    group = first.annotation
    if not (isinstance(group, type) and issubclass(group, ConfigOptions)):
        return command
    types = get_type_hints(group, include_extras=True)
    shared = [
        inspect.Parameter(one.name, _BY_NAME, default=one.default, annotation=types[one.name])
        for one in fields(group)
    ]

    @wraps(command)
    def run(**arguments: Any) -> None:
        command(group(**{one.name: arguments.pop(one.name) for one in shared}), **arguments)

    parameters = [*(one.replace(kind=_BY_NAME) for one in own), *shared]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run
