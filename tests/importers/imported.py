"""What an import makes: its text, and the config that the text loads to."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import yaml

from clickline.config import Config, load_config
from clickline.importers.config_draft import Draft
from clickline.importers.run import checked


class Imported(NamedTuple):
    text: str
    config: Config
    said: str
    """All comments as one line."""


def flowing(text: str) -> str:
    """The comments of a file as one line, as they were before they were wrapped."""
    comments = [line.partition("# ")[2] for line in text.splitlines() if "#" in line]
    return " ".join(" ".join(comments).split())


def imported(draft: Draft, folder: Path) -> Imported:
    """Loads the draft from `folder`, and holds it to what every import promises."""
    text = checked(draft, folder)
    file = folder / "clickline.yaml"
    file.write_text(text)
    config = load_config(file)
    said = flowing(text)
    for key, entry in draft.entries.items():
        value = yaml.safe_load(text)
        for step in key.split("."):
            value = value[step]
        assert entry.comment in said, f"{key} does not say where it comes from"
    for origin, why in draft.left:
        assert not origin.key.isprintable() or f"{origin}: {why}" in said
    return Imported(text, config, said)
