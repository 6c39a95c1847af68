"""From a draft to a text that `load_config` takes; where it does not, the mistake is the source's and told as such."""

from __future__ import annotations

import tempfile
from pathlib import Path

from clickline.config import load_config
from clickline.errors import ConfigError, Mistake
from clickline.importers.config_draft import Draft, Entry


def checked(draft: Draft, folder: Path) -> str:
    """The text of a draft that will lie in `folder`, proven to load."""
    text = draft.text()
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "clickline.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            load_config(file, folder=folder.absolute())
        except ConfigError as error:
            raise ConfigError([_in_the_source(draft, one) for one in error.mistakes]) from None
    return text


def _in_the_source(draft: Draft, mistake: Mistake) -> Mistake:
    entry = _entry(draft, mistake.key)
    problem = f"would become {mistake.key}, which {mistake.problem}"
    if entry is None:  # a default that no longer fits
        entry = _neighbour(draft, mistake.key)
        problem = f"does not fit: {mistake.key} {mistake.problem}"
    if entry is None or not entry.origins:
        return Mistake(draft.system, 0, mistake.key, mistake.problem, mistake.remedy)
    origin = entry.origins[0]
    return Mistake(origin.file, origin.line, origin.key, problem, "Correct it there, or take it out.")


def _entry(draft: Draft, key: str) -> Entry | None:
    """The entry that a mistake is about: the key itself, one below it, or the one that it is in."""
    for name, entry in draft.entries.items():
        same, above, below = name == key, name.startswith(f"{key}."), key.startswith((f"{name}.", f"{name}["))
        if key and (same or above or below):
            return entry
    return None


def _neighbour(draft: Draft, key: str) -> Entry | None:
    """The first entry from the source in the same group of keys."""
    group = key.rpartition(".")[0]
    near = [one for name, one in draft.entries.items() if name.rpartition(".")[0] == group and one.origins]
    return near[0] if near else None
