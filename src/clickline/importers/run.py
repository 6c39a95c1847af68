"""Turns a draft into YAML that `load_config` accepts; a mistake is reported at its place in the source."""

from __future__ import annotations

import tempfile
from pathlib import Path

from clickline.config import load_config
from clickline.errors import ConfigError, Mistake
from clickline.importers.config_draft import ConfigDraft, Entry


def valid_yaml(draft: ConfigDraft, folder: Path) -> str:
    """The text of a draft to be saved in `folder`, after checking that it loads."""
    text = draft.text()
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "clickline.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            load_config(file, folder=folder.absolute())
        except ConfigError as error:
            raise ConfigError([_in_source(draft, one) for one in error.mistakes]) from None
    return text


def _in_source(draft: ConfigDraft, mistake: Mistake) -> Mistake:
    entry = _entry(draft, mistake.key)
    problem = f"would become {mistake.key}, which {mistake.problem}"
    if entry is None:  # a default that conflicts with an imported key
        entry = _sibling(draft, mistake.key)
        problem = f"conflicts with a default: {mistake.key} {mistake.problem}"
    if entry is None or not entry.origins:
        return Mistake(draft.system, 0, mistake.key, mistake.problem, mistake.remedy)
    origin = entry.origins[0]
    return Mistake(origin.file, origin.line, origin.key, problem, "Correct or remove it there.")


def _entry(draft: ConfigDraft, key: str) -> Entry | None:
    """The entry that a mistake is about: the key itself, a key below it, or its parent."""
    for name, entry in draft.entries.items():
        same, above, below = name == key, name.startswith(f"{key}."), key.startswith((f"{name}.", f"{name}["))
        if key and (same or above or below):
            return entry
    return None


def _sibling(draft: ConfigDraft, key: str) -> Entry | None:
    """The first entry from the source in the same section."""
    group = key.rpartition(".")[0]
    near = [one for name, one in draft.entries.items() if name.rpartition(".")[0] == group and one.origins]
    return near[0] if near else None
