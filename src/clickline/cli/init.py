"""clickline init: writes a commented config to start from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import typer

from clickline.errors import ConfigError, Mistake


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder to write clickline.yaml into.")
    ] = Path(),
    preset: Annotated[
        Literal["criteo", "slots", "csv"], typer.Option(help="The log format to start from.")
    ] = "criteo",
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing clickline.yaml.")] = False,
) -> None:
    """Write a commented clickline.yaml."""
    target = folder / "clickline.yaml"
    text = (files("clickline.config") / "presets" / f"{preset}.yaml").read_text(encoding="utf-8")
    write_config(target, text, force, "Name another folder, or overwrite it with --force.")
    typer.echo(f"wrote {target} (preset {preset})")
    inside = "" if folder == Path() else f"cd {folder} && "
    typer.echo(f"next: {inside}clickline sample --format {preset} --out data && clickline up")


def write_config(target: Path, text: str, force: bool, remedy: str) -> None:
    """Write a config and the folders above it; an existing file is overwritten only with `force`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with target.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError([Mistake(str(target), 0, "", "already exists.", remedy)]) from None
