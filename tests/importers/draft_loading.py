"""Loads the draft of an importer: its YAML text, and the config that it loads to."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import yaml

from clickline.config import Config, load_config
from clickline.importers.config_draft import ConfigDraft
from clickline.importers.run import valid_yaml


class LoadedDraft(NamedTuple):
    text: str
    config: Config
    comments: str
    """All comments as one line."""


def comments_of(text: str) -> str:
    """The comments of a file as one line, before they were wrapped."""
    lines = [line.partition("# ")[2] for line in text.splitlines() if "#" in line]
    return " ".join(" ".join(lines).split())


def load_draft(draft: ConfigDraft, folder: Path) -> LoadedDraft:
    """Load the draft from `folder`, and check what every importer promises."""
    text = valid_yaml(draft, folder)
    file = folder / "clickline.yaml"
    file.write_text(text)
    config = load_config(file)
    comments = comments_of(text)
    for key, entry in draft.entries.items():
        value = yaml.safe_load(text)
        for step in key.split("."):
            value = value[step]
        assert entry.comment in comments, f"{key} does not say where it comes from"
    for origin, why in draft.skipped:
        assert not origin.key.isprintable() or f"{origin}: {why}" in comments
    return LoadedDraft(text, config, comments)
