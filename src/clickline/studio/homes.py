"""Which homes are shown: those of configs, and folders without one, which tell by themselves how they were made."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from clickline.config import Config, load_config
from clickline.errors import ClicklineError, ConfigError, Mistake
from clickline.serving.auth import read_token
from clickline.storage.redaction import Redactor, secrets_in
from clickline.storage.storage import Storage


@dataclass(frozen=True)
class Home:
    """One home and the config that is told of it."""

    id: str  # in addresses; one of a kind
    name: str
    config: Config
    file: str | None  # the config's, where there is one to name
    kept: bool = False  # the config is what the home itself kept of its last run

    @property
    def folder(self) -> Path:
        return Path(self.config.home)

    @property
    def guarded(self) -> bool:
        """Whether its owner has set a token, for the studio or for the server whose scores and figures it shows. What a
        home keeps of its config may be older than the token, so there it counts as set."""
        set_ = self.config.studio.token_file is not None or self.config.serve.token_file is not None
        return set_ or self.kept

    def redactor(self, *secrets: str) -> Redactor:
        """Strikes out `secrets`, and those of the config's stores and server."""
        found = list(secrets)
        with suppress(ClicklineError):
            token = read_token(self.config.serve.token_file)
            found += [] if token is None else [token]
        if self.config.storage.credentials_file is not None:
            with suppress(OSError, ValueError, yaml.YAMLError):
                found += secrets_in(yaml.safe_load(Path(self.config.storage.credentials_file).read_text()))
        return Redactor(found)


def open_homes(files: Sequence[Path], folders: Sequence[Path], overrides: Sequence[str] = ()) -> list[Home]:
    """The homes of configs, then the folders. Raises ConfigError for a config with mistakes."""
    taken: set[str] = set()
    found = []
    for file in files:
        found.append(home_of(load_config(file, overrides), str(file), taken))
    for folder in folders:
        found.append(home_of(_kept_config(folder), None, taken, kept=True))
    return found


def home_of(config: Config, file: str | None, taken: set[str], *, kept: bool = False) -> Home:
    """`taken`: ids that others have; this one's is added."""
    slug = re.sub(r"[^a-z0-9]+", "-", config.name.lower()).strip("-") or "home"
    number, chosen = 1, slug
    while chosen in taken:
        number += 1
        chosen = f"{slug}-{number}"
    taken.add(chosen)
    return Home(chosen, config.name, config, file, kept)


def _kept_config(folder: Path) -> Config:
    """The config that something in a home was made with last; for an empty one, what is sure."""
    folder = folder.absolute()
    if folder.exists() and not folder.is_dir():
        raise ConfigError([Mistake("", 0, "--home", f"is {folder}, a file.", "Name a home's folder.")])
    kept = [*folder.glob("runs/*/resolved.yaml"), *folder.glob("datasets/*/resolved.yaml")]
    for file in sorted(kept, key=lambda path: path.stat().st_mtime, reverse=True):
        with suppress(ConfigError):
            return load_config(file, [f"home={folder}"], folder=folder)
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", folder.parent.name if folder.name[:1] == "." else folder.name)
    document = {"data": {"train": Storage.join(str(folder), "no-config")}, "home": str(folder)}
    try:
        return Config.model_validate({**document, "name": name})
    except ValueError:  # no name to be had from the folder's
        return Config.model_validate(document)
