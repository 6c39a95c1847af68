"""The command tree of `clickline`."""

from __future__ import annotations

from typing import Annotated

import typer

import clickline
from clickline.cli.cache import cache
from clickline.cli.check import check
from clickline.cli.deploy import deploy
from clickline.cli.import_ import import_
from clickline.cli.init import init
from clickline.cli.lookup import lookup
from clickline.cli.options import CommandGroup
from clickline.cli.plan import plan
from clickline.cli.predict import predict
from clickline.cli.report import report
from clickline.cli.run_control import down, logs, scale
from clickline.cli.sample import sample
from clickline.cli.serve import serve
from clickline.cli.stages import evaluate, prepare, publish, train
from clickline.cli.status import status
from clickline.cli.studio import studio
from clickline.cli.up import up
from clickline.cli.versions import versions

app = CommandGroup(
    name="clickline",
    help="Click logs in, a click-through-rate service out.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"clickline {clickline.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def clickline_command(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Click logs in, a click-through-rate service out."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


app.command()(init)
app.command()(check)
app.command()(sample)
app.command()(up)
app.command()(status)
app.command()(logs)
app.command()(down)
app.command()(studio)
app.command()(plan)
app.command()(prepare)
app.command()(train)
app.command()(scale)
app.command()(evaluate)
app.command()(report)
app.command()(publish)
app.command()(serve)
app.command()(lookup)
app.command()(predict)
for name, group in {"versions": versions, "cache": cache, "deploy": deploy, "import": import_}.items():
    app.add_typer(group, name=name)
