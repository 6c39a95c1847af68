"""clickline import: the config of another system becomes a clickline.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clickline.cli.console import note
from clickline.errors import ConfigError, Mistake

if TYPE_CHECKING:
    from clickline.importers.config_draft import Draft

import_ = typer.Typer(help="Write a clickline.yaml from the config of another system.", no_args_is_help=False)

Output = Annotated[
    Path, typer.Option("-o", "--output", metavar="FILE", help="The file to write; - prints it instead.")
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")]

_DEFAULT = Path("clickline.yaml")


@import_.command()
def elasticrec(
    data_config: Annotated[
        Path, typer.Argument(metavar="DATA_CONFIG", help="Its exports: where the data are, and which hours.")
    ],
    slot_conf: Annotated[Path, typer.Argument(metavar="SLOT_CONF", help="The slots to use, one a line.")],
    output: Output = _DEFAULT,
    force: Force = False,
) -> None:
    """From ElasticCTR 2.0 (ElasticREC)."""
    from clickline.importers.elasticrec import elasticrec

    _write(elasticrec(data_config, slot_conf, output.parent), output, force)


@import_.command()
def paddlerec(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The config.yaml of a model.")],
    output: Output = _DEFAULT,
    force: Force = False,
) -> None:
    """From PaddleRec, as PaddleFlow's pipeline runs it too."""
    from clickline.importers.paddlerec import paddlerec

    _write(paddlerec(config, output.parent), output, force)


@import_.command()
def elasticdl(
    command: Annotated[
        str, typer.Argument(metavar="COMMAND", help='What followed `elasticdl`, in quotes: "train --…".')
    ],
    output: Output = _DEFAULT,
    force: Force = False,
) -> None:
    """From the flags of `elasticdl train`."""
    from clickline.importers.elasticdl import elasticdl

    _write(elasticdl(command), output, force)


@import_.command()
def tfserving_intel(
    params: Annotated[
        Path, typer.Argument(metavar="PARAMS", help="What its kustomize packages are set by, one a line.")
    ],
    output: Output = _DEFAULT,
    force: Force = False,
) -> None:
    """From Intel's Wide & Deep on Kubernetes with TensorFlow Serving."""
    from clickline.importers.tfserving_intel import tfserving_intel

    _write(tfserving_intel(params), output, force)


def _write(draft: Draft, output: Path, force: bool) -> None:
    from clickline.importers.run import checked

    text = checked(draft, output.parent)
    if str(output) == "-":
        typer.echo(text, nl=False)
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with output.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        remedy = "Name another file with -o, or overwrite it with --force."
        raise ConfigError([Mistake(str(output), 0, "", "exists already.", remedy)]) from None
    typer.echo(
        f"wrote {output}: {_times(len(draft.entries), 'key')}, {len(draft.left)} without a counterpart"
    )
    note("read its comments, then: clickline check")


def _times(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
