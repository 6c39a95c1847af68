"""clickline import: converts the config of another system to a clickline.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clickline.cli.console import note
from clickline.cli.init import write_config
from clickline.progress import pluralize

if TYPE_CHECKING:
    from clickline.importers.config_draft import ConfigDraft

import_ = typer.Typer(help="Convert the config of another system to a clickline.yaml.", no_args_is_help=False)

Output = Annotated[
    Path, typer.Option("-o", "--output", metavar="FILE", help="The file to write; - prints it instead.")
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")]

_DEFAULT = Path("clickline.yaml")


@import_.command()
def elasticrec(
    data_config: Annotated[
        Path,
        typer.Argument(metavar="DATA_CONFIG", help="Its data.config: where the data is, and which hours."),
    ],
    slot_conf: Annotated[
        Path, typer.Argument(metavar="SLOT_CONF", help="Its slot.conf: the slots to use, one per line.")
    ],
    cpu: Annotated[int | None, typer.Option("-u", "--cpu", min=1, help="Its -u: cores of a trainer.")] = None,
    mem: Annotated[int | None, typer.Option("-m", "--mem", min=1, help="Its -m: GB of a trainer.")] = None,
    trainer: Annotated[
        int | None, typer.Option("-t", "--trainer", min=1, help="Its -t: number of trainers.")
    ] = None,
    pserver: Annotated[
        int | None, typer.Option("-p", "--pserver", min=1, help="Its -p: number of parameter servers.")
    ] = None,
    cube: Annotated[int | None, typer.Option("-b", "--cube", min=1, help="Its -b: shards of cube.")] = None,
    output: Output = _DEFAULT,
    force: Force = False,
) -> None:
    """Import from ElasticCTR 2.0 (ElasticREC), with the options of elastic-control.sh."""
    from clickline.importers.elasticrec import ControlOptions, elasticrec

    options = ControlOptions(cpu, mem, trainer, pserver, cube)
    _write(elasticrec(data_config, slot_conf, output.parent, options), output, force)


@import_.command()
def paddlerec(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The config.yaml of a model.")],
    output: Output = _DEFAULT,
    force: Force = False,
) -> None:
    """Import from PaddleRec, also as run by a PaddleFlow pipeline."""
    from clickline.importers.paddlerec import paddlerec

    _write(paddlerec(config, output.parent), output, force)


@import_.command()
def elasticdl(
    command: Annotated[
        str, typer.Argument(metavar="COMMAND", help='The arguments of `elasticdl`, in quotes: "train --…".')
    ],
    output: Output = _DEFAULT,
    force: Force = False,
) -> None:
    """Import from the flags of `elasticdl train`."""
    from clickline.importers.elasticdl import elasticdl

    _write(elasticdl(command), output, force)


@import_.command()
def tfserving_intel(
    params: Annotated[
        Path,
        typer.Argument(
            metavar="PARAMS", help="The params.env of its kustomize packages, one setting per line."
        ),
    ],
    parameters: Annotated[
        list[str] | None,
        typer.Option(
            "-p",
            "--parameter",
            metavar="NAME=VALUE",
            help="A setting, as for `argo submit`; overrides PARAMS.",
        ),
    ] = None,
    output: Output = _DEFAULT,
    force: Force = False,
) -> None:
    """Import from Intel's Wide & Deep on Kubernetes with TensorFlow Serving."""
    from clickline.importers.tfserving_intel import tfserving_intel

    _write(tfserving_intel(params, parameters or ()), output, force)


def _write(draft: ConfigDraft, output: Path, force: bool) -> None:
    from clickline.importers.run import valid_yaml

    text = valid_yaml(draft, output.parent)
    if str(output) == "-":
        typer.echo(text, nl=False)
        return
    write_config(output, text, force, "Name another file with -o, or overwrite it with --force.")
    keys = pluralize(len(draft.entries), "key")
    typer.echo(f"wrote {output}: {keys}, {len(draft.skipped)} without a counterpart")
    note("next: read its comments, then run clickline check")
